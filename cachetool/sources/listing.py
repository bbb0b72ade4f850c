"""What a store held when it was listed, on disk: the objects in the order that numbers the units.

One folder of plain arrays, made to be memory-mapped and shared; about 40 bytes an object beside its key and ETag::

    keys.npy          uint8    the keys, one after another, sorted by (sample, key)
    key_offsets.npy   int64    (objects + 1,)   where each begins
    etags.npy         uint8    the ETags, one after another; empty where the store has none
    etag_offsets.npy  int64    (objects + 1,)
    sizes.npy         int64    (objects,)       -1 where the listing does not say
    units.npy         int64    (units + 1,)     the first object of each unit
    listing.json               counts, rule of grouping, digest, names that are in no sample; written last

Keys arrive in any order and any number: runs of :data:`RUN` keys are sorted in memory, put aside in the folder and
merged, so that a hundred million keys take no more memory than a quarter of one.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import hashlib
import heapq
import itertools
import json
import os
import struct
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from cachetool.core.errors import BadObject, CorruptError
from cachetool.proc.arrays import load_array
from cachetool.proc.folders import make_missing, new_file, remove_path, replacing
from cachetool.sources.grouping import Grouping, Kept, Record
from cachetool.sources.keys import Stem
from cachetool.stores import Object
from cachetool.stores.base import LeftOut, check_listed

__all__ = ["LISTING_FILE", "TABLE_FILE", "Listing", "Record", "opened", "write_listing", "write_sorted"]

LISTING_FILE = "listing.json"
TABLE_FILE = "table.json"
"""Beside the listing of files of many samples."""
RUN = 2**18
"""Keys that are sorted in memory at a time."""
_VERSION = 1
_HEAD = struct.Struct("<IIIq")
HIDDEN = "hidden"
"""The reason of names that are counted, and not named."""
CHUNK = 2**16
"""Objects that :meth:`Listing.records` takes out of the maps at a time."""


def write_listing(
    folder: Path,
    pages: Iterable[list[Object]],
    *,
    stem: Stem,
    url: str,
    left_out: Callable[[], Mapping[str, int]] = dict,
    progress: Callable[[int], None] | None = None,
    inside: Callable[[], str] = str,
    grouping: Grouping | None = None,
) -> Listing:
    """Write what ``pages`` name into ``folder``, which is made; the folder is whole once ``listing.json`` is there.

    ``left_out`` is asked afterwards what the store passed over, ``inside`` for a note on what the objects are;
    ``progress`` is told how many keys have come. ``grouping`` decides which names make samples, and may decide on
    another stem than ``stem``, its own. Raises :class:`BadObject` for a key that is named twice, and the errors of
    ``grouping``.
    """
    make_missing(folder)
    passed_over = LeftOut()
    arrived = _Arrived(folder, stem, grouping)
    seen = 0
    try:
        for page in pages:
            for item in page:
                if (why := arrived.add(item, url)) is not None:
                    if grouping is None or why == HIDDEN:
                        passed_over[why] += 1
                    else:
                        passed_over.add(item.key, why, why)
            seen += len(page)
            if progress is not None:
                progress(seen)
        records = arrived.records
        if grouping is not None:
            if grouping.restem(url):
                stem = grouping.stem
                arrived.regroup(stem)
            records = functools.partial(grouping.sifted, arrived.records, url)
        return write_sorted(
            folder, records(), stem=stem, url=url, left_out=lambda: passed_over.joined(left_out()),
            inside=inside, grouping=grouping,
        )  # fmt: skip
    finally:
        arrived.close()


class _Arrived:
    """The records of what was listed, in runs that are sorted in memory and put aside."""

    def __init__(self, folder: Path, stem: Stem, grouping: Grouping | None) -> None:
        self._folder, self._stem, self._grouping = folder, stem, grouping
        self._runs: list[Path] = []
        self._pending: list[Record] = []
        self._number = itertools.count()

    def add(self, item: Object, url: str) -> str | None:
        """Take one object in; gives why it is none of a sample, or None."""
        part = self._stem.split(item.key)
        if isinstance(part, str):
            return part
        check_listed(item, url)
        if self._grouping is not None:
            self._grouping.count(item.key, part)
        self._append((_encode(part.sample), _encode(item.key), item.size, _encode(item.etag or "")))
        return None

    def _append(self, record: Record) -> None:
        self._pending.append(record)
        if len(self._pending) >= RUN:
            self._runs.append(_put_aside(self._folder / f"run-{next(self._number):04d}.tmp", self._pending))
            self._pending = []

    def records(self) -> Iterator[Record]:
        """All of them, sorted."""
        self._pending.sort()
        if not self._runs:
            return iter(self._pending)
        return heapq.merge(*(_take_back(run) for run in self._runs), self._pending)

    def regroup(self, stem: Stem) -> None:
        """Cut the names of all of them in another way."""
        records, runs = self.records(), self._runs
        self._stem, self._runs, self._pending = stem, [], []
        try:
            for _, key, size, etag in records:
                self.add(Object(_decode(key), size, _decode(etag) or None), "")
        finally:
            for run in runs:
                remove_path(run)

    def close(self) -> None:
        """Remove what was put aside."""
        for run in self._runs:
            remove_path(run)


def write_sorted(
    folder: Path,
    records: Iterator[Record],
    *,
    stem: Stem,
    url: str,
    left_out: Callable[[], Mapping[str, int]] = dict,
    inside: Callable[[], str] = str,
    grouping: Grouping | None = None,
) -> Listing:
    """:func:`write_listing` for records that are sorted already."""
    make_missing(folder)
    facts = _Writer(folder, url).write(records)
    passed_over = LeftOut().joined(left_out())
    facts |= {"version": _VERSION, "url": url, "stem": stem.rule}
    notes = [inside()]
    if grouping is not None:
        passed_over.joined(grouping.left_out)
        facts["kept"] = grouping.kept
        notes.append(grouping.note)
    facts |= {"left_out": passed_over, "named": passed_over.named, "more": passed_over.more}
    facts["notes"] = [note for note in notes if note]
    with replacing(folder / LISTING_FILE) as file:
        file.write(json.dumps(facts, indent=1).encode())
    return Listing.open(folder)


def _encode(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")


def _sync(fd: int) -> None:
    os.fsync(fd)


def _put_aside(path: Path, records: list[Record]) -> Path:
    records.sort()
    with new_file(path) as file:
        for sample, key, size, etag in records:
            file.write(_HEAD.pack(len(sample), len(key), len(etag), size) + sample + key + etag)
    return path


def _take_back(path: Path) -> Iterator[Record]:
    with open(path, "rb") as file:
        while head := file.read(_HEAD.size):
            sample, key, etag, size = _HEAD.unpack(head)
            body = file.read(sample + key + etag)
            yield body[:sample], body[sample : sample + key], size, body[sample + key :]


class _Writer:
    """Streams sorted records into the arrays."""

    def __init__(self, folder: Path, url: str) -> None:
        self._folder, self._url = folder, url

    def write(self, records: Iterator[Record]) -> dict[str, Any]:
        key_offsets, etag_offsets, sizes, units = array("q", [0]), array("q", [0]), array("q"), array("q")
        digest = hashlib.sha256()
        last_sample, last_key = None, None
        with _BytesFile(self._folder / "keys.npy") as keys, _BytesFile(self._folder / "etags.npy") as etags:
            for sample, key, size, etag in records:
                if key == last_key:
                    raise BadObject(f"{self._url}: the key {_decode(key)!r} is listed twice")
                if sample != last_sample:
                    units.append(len(sizes))
                    last_sample = sample
                last_key = key
                sizes.append(size)
                keys.write(key)
                etags.write(etag)
                key_offsets.append(keys.count)
                etag_offsets.append(etags.count)
                digest.update(_HEAD.pack(len(sample), len(key), len(etag), size) + key + etag)
        units.append(len(sizes))
        columns = {"key_offsets": key_offsets, "etag_offsets": etag_offsets, "sizes": sizes, "units": units}
        for name, column in columns.items():
            with new_file(self._folder / f"{name}.npy") as file:
                np.save(file, np.frombuffer(column, dtype=np.int64), allow_pickle=False)
                file.flush()
                _sync(file.fileno())
        object_sizes = np.frombuffer(sizes, dtype=np.int64)
        if object_sizes.sum(dtype=np.float64) >= 2.0**62:
            raise BadObject(
                f"{self._url}: {len(object_sizes)} objects are said to have"
                f" {object_sizes.sum(dtype=np.float64):.1e} bytes"
            )
        starts = np.frombuffer(units, dtype=np.int64)[:-1]
        per_unit = (
            np.add.reduceat(np.maximum(object_sizes, 0), starts) if len(object_sizes) else np.zeros(1, dtype=np.int64)
        )
        return {
            "objects": len(sizes),
            "units": len(units) - 1,
            "bytes": int(np.maximum(object_sizes, 0).sum()),
            "largest": int(per_unit.max()),
            "digest": digest.hexdigest(),
        }


class _BytesFile:
    """A ``.npy`` file of bytes whose length is known at the end: its header has a fixed size and is written last."""

    _HEADER = 128

    def __init__(self, path: Path) -> None:
        self._path = path
        self.count = 0
        self._file: BinaryIO

    def __enter__(self) -> _BytesFile:
        self._file = new_file(self._path, 2**20)  # closed in __exit__
        self._file.write(bytes(self._HEADER))
        return self

    def write(self, data: bytes) -> None:
        self._file.write(data)
        self.count += len(data)

    def __exit__(self, *_: object) -> None:
        text = f"{{'descr': '|u1', 'fortran_order': False, 'shape': ({self.count},), }}"
        header = b"\x93NUMPY\x01\x00" + struct.pack("<H", self._HEADER - 10)
        header += text.ljust(self._HEADER - len(header) - 1).encode("ascii") + b"\n"
        self._file.seek(0)
        self._file.write(header)
        self._file.flush()
        _sync(self._file.fileno())
        self._file.close()


@contextlib.contextmanager
def opened(
    what: str, about: Path, names: Iterable[str], *, version: int
) -> Iterator[tuple[dict[str, Any], dict[str, npt.NDArray[Any]]]]:
    """The JSON in the file ``about``, and the arrays that lie beside it under ``names``, memory-mapped.

    Raises :class:`CorruptError`, naming ``what`` they are, also for what is missing in them inside of the block.
    """
    folder = about.parent
    try:
        facts = json.loads(about.read_text(encoding="utf-8"))
        if facts["version"] != version:
            raise CorruptError(f"{what} {str(folder)!r} has version {facts['version']}, known is {version}")
        arrays = {name: load_array(folder / f"{name}.npy", mapped=True) for name in names}
        yield facts, arrays
    except (OSError, ValueError, KeyError, TypeError) as error:
        if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM):  # it is well
            raise
        why = error if isinstance(error, OSError) else "it is damaged"  # NumPy would advise to allow pickles
        raise CorruptError(f"{what} {str(folder)!r} cannot be read ({why}); remove it to list again") from error


def _decode(raw: bytes) -> str:
    return raw.decode("utf-8", "surrogateescape")


@dataclass(frozen=True)
class Listing:
    """A listing on disk, memory-mapped."""

    folder: Path
    url: str
    stem: str
    """The rule that grouped the objects."""
    objects: int
    units: int
    bytes: int
    """Bytes of all objects whose size is known."""
    largest: int
    """Bytes of the largest unit."""
    digest: str
    """SHA-256 over keys, sizes and ETags in order."""
    left_out: LeftOut
    """What is no part of a sample, ``{"reason": count}``, and the names that a user may miss."""
    notes: tuple[str, ...]
    """What was decided about the names, or what the objects are beside bytes, and which option decides otherwise."""
    kept: Kept | None
    """The fields by which a folder of objects was sifted; None where that was not done."""
    sizes: npt.NDArray[np.int64]
    """Bytes of each object, -1 where not known."""
    unit_starts: npt.NDArray[np.int64]
    """The first object of each unit, and the number of objects."""
    _keys: npt.NDArray[np.uint8]
    _key_offsets: npt.NDArray[np.int64]
    _etags: npt.NDArray[np.uint8]
    _etag_offsets: npt.NDArray[np.int64]

    @classmethod
    def open(cls, folder: Path) -> Listing:
        """Map the listing in ``folder``. Raises :class:`CorruptError` when it is not one, or not whole."""
        names = ("keys", "key_offsets", "etags", "etag_offsets", "sizes", "units")
        with opened("listing", folder / LISTING_FILE, names, version=_VERSION) as (facts, arrays):
            listing = cls(
                folder=folder,
                url=facts["url"],
                stem=facts["stem"],
                objects=facts["objects"],
                units=facts["units"],
                bytes=facts["bytes"],
                largest=facts["largest"],
                digest=facts["digest"],
                left_out=LeftOut(facts["left_out"], facts.get("named", ()), facts.get("more", 0)),
                notes=tuple(map(str, facts.get("notes", ()))),
                kept=None if facts.get("kept") is None else tuple((str(a), str(b)) for a, b in facts["kept"]),
                sizes=arrays["sizes"],
                unit_starts=arrays["units"],
                _keys=arrays["keys"],
                _key_offsets=arrays["key_offsets"],
                _etags=arrays["etags"],
                _etag_offsets=arrays["etag_offsets"],
            )
        lengths = (len(listing.sizes), len(listing._key_offsets) - 1, len(listing._etag_offsets) - 1)
        consistent = lengths == (listing.objects,) * 3 and len(listing.unit_starts) == listing.units + 1
        if not (
            consistent
            and listing._key_offsets[-1] == len(listing._keys)
            and listing._etag_offsets[-1] == len(listing._etags)
        ):
            raise CorruptError(f"listing {str(folder)!r} is not whole; remove it to list again")
        return listing

    @property
    def identity(self) -> str:
        """Digest of what a unit number means: the objects in order and how they were grouped."""
        return hashlib.sha256(json.dumps([self.digest, self.stem]).encode()).hexdigest()

    def unit_bytes(self, units: npt.NDArray[np.int64], *, unknown: int = 0) -> npt.NDArray[np.int64]:
        """Bytes of each of these units, (len(units),); an object of unknown size counts as ``unknown``."""
        starts = self.unit_starts[units]
        counts = self.unit_starts[units + 1] - starts
        ends = np.cumsum(counts)
        at = np.arange(ends[-1] if len(ends) else 0) + np.repeat(starts - (ends - counts), counts)
        sizes = self.sizes[at]
        return np.add.reduceat(np.where(sizes < 0, unknown, sizes), ends - counts) if len(ends) else ends

    def object(self, index: int) -> Object:
        """The object at a position."""
        key = self._keys[self._key_offsets[index] : self._key_offsets[index + 1]]
        etag = self._etags[self._etag_offsets[index] : self._etag_offsets[index + 1]]
        return Object(_decode(key.tobytes()), int(self.sizes[index]), _decode(etag.tobytes()) or None)

    def unit(self, number: int) -> list[Object]:
        """The objects of one unit, in order of their keys. Raises :class:`IndexError` for a number out of range."""
        if not 0 <= number < self.units:
            raise IndexError(f"unit {number} of {self.units}")
        return [self.object(index) for index in range(self.unit_starts[number], self.unit_starts[number + 1])]

    def records(self, stem: Stem) -> Iterator[tuple[int, Record]]:
        """Every object with the number of its unit, in their order; ``stem`` is the rule that grouped them."""
        unit, ends = -1, iter(self.unit_starts.tolist())
        begin = next(ends)
        for start in range(0, self.objects, CHUNK):
            stop = min(start + CHUNK, self.objects)
            keys, etags = (
                _cut(data, offsets[start : stop + 1])
                for data, offsets in ((self._keys, self._key_offsets), (self._etags, self._etag_offsets))
            )
            for at, (key, size, etag) in enumerate(zip(keys, self.sizes[start:stop].tolist(), etags, strict=True)):
                if start + at == begin:
                    unit, begin = unit + 1, next(ends)
                part = stem.split(_decode(key))
                assert not isinstance(part, str), f"{key!r} was listed as part of a sample"
                yield unit, (_encode(part.sample), key, size, etag)


def _cut(data: npt.NDArray[np.uint8], offsets: npt.NDArray[np.int64]) -> list[bytes]:
    """The byte strings that lie one after another."""
    at = (offsets - offsets[0]).tolist()
    blob = data[offsets[0] : offsets[-1]].tobytes()
    return [blob[a:b] for a, b in pairwise(at)]
