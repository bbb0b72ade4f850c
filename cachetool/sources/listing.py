"""The listing of a store on disk: its objects, in the order that numbers the units.

A listing is one folder of arrays, memory-mapped and shared by processes. With ImageNet's names it takes 8 bytes an
object besides the ETag::

    objects.npy    keys and ETags, sorted by (sample, key), packed (:mod:`cachetool.sources.key_blocks`)
    blocks.npy     where each block of them begins
    sizes.npy      int32 or int64 (objects,)     -1 where the store tells no size
    units.npy      int32 or int64 (units + 1,)   the first object of each unit; absent where all have as many objects
    listing.json   counts, rule of grouping, digest, names that are in no sample; written last

Keys may arrive in any order and any number. Runs of :data:`RUN` keys are sorted in memory, written to files and merged,
so a hundred million keys take no more memory than one run.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import heapq
import itertools
import json
import operator
import os
import struct
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt
from numpy.lib.format import write_array_header_1_0

from cachetool.core.errors import BadObject, CorruptError
from cachetool.proc.arrays import load_array
from cachetool.proc.folders import make_missing, new_file, remove_path, replacing
from cachetool.sources.grouping import Grouping, Kept, Record
from cachetool.sources.key_blocks import BLOCK, KeyBlocks, packed
from cachetool.sources.keys import Stem
from cachetool.sources.names import NamedPage
from cachetool.stores import Object
from cachetool.stores.base import KEY_BYTES, LARGEST, Batch, LeftOut, check_listed

__all__ = ["LISTING_FILE", "TABLE_FILE", "Listing", "Record", "opened", "write_listing", "write_sorted"]

LISTING_FILE = "listing.json"
TABLE_FILE = "table.json"
"""The file beside the listing of files of many samples."""
RUN = 2**18
"""Number of keys that are sorted in memory at a time."""
_VERSION = 2
_HEAD = struct.Struct("<IIIq")
_COUNT = struct.Struct("<I")
HIDDEN = "hidden"
"""The reason for hidden names, which are counted but not listed by name."""
CHUNK = 2**14
"""Number of objects that are written, or read in order, at a time: a multiple of a block."""
_NO_STARTS = np.zeros(0, dtype=np.int32)


def write_listing(
    folder: Path,
    pages: Iterable[Batch],
    *,
    stem: Stem,
    url: str,
    left_out: Callable[[], Mapping[str, int]] = dict,
    progress: Callable[[int], None] | None = None,
    inside: Callable[[], str] = str,
    grouping: Grouping | None = None,
) -> Listing:
    """Write the objects in ``pages`` as a listing into ``folder``, which is created. It is complete once
    ``listing.json`` exists.

    ``left_out`` is called after the last page and returns what the store left out; ``inside`` returns a note on what
    the objects are. ``progress`` is called with the number of keys seen. ``grouping`` decides which names make samples,
    and may choose another rule than ``stem``. Raises :class:`BadObject` for a key that is listed twice, and the errors
    of ``grouping``.
    """
    make_missing(folder)
    passed_over = LeftOut()
    arrived = _Arrived(folder, stem, grouping)
    seen = 0
    try:
        for page in pages:
            for key, why in arrived.add_page(NamedPage.of(page), url):
                if grouping is None or why == HIDDEN:
                    passed_over[why] += 1
                else:
                    passed_over.add(key, why, why)
            seen += len(page)
            if progress is not None:
                progress(seen)
        sifted: Iterator[Record] | None = None
        if grouping is not None:
            # Only all names together show whether the first or the last dot is meant, so names are cut once more at the
            # end.
            if grouping.restem(url):
                stem = grouping.stem
                arrived.regroup(stem)
            sifted = grouping.sifted(arrived.records, url)
        return _written(
            folder, arrived.columns() if sifted is None else _in_columns(sifted), stem=stem, url=url,
            left_out=lambda: passed_over.joined(left_out()), inside=inside, grouping=grouping,
        )  # fmt: skip
    finally:
        arrived.close()


@dataclass(frozen=True, slots=True)
class _Columns:
    """Some records as columns."""

    samples: list[bytes]
    keys: list[bytes]
    sizes: list[int]
    etags: list[bytes]

    @classmethod
    def of(cls, records: Iterable[Record]) -> _Columns:
        """Return at least one record as columns."""
        samples, keys, sizes, etags = zip(*records, strict=True)
        return cls([*samples], [*keys], [*sizes], [*etags])

    def __len__(self) -> int:
        return len(self.keys)

    def records(self) -> Iterator[Record]:
        """Return the records one by one."""
        return zip(self.samples, self.keys, self.sizes, self.etags, strict=True)

    def record(self, at: int) -> Record:
        """Return one record."""
        return self.samples[at], self.keys[at], self.sizes[at], self.etags[at]

    def part(self, start: int, stop: int) -> _Columns:
        """Return some of the records."""
        return _Columns(self.samples[start:stop], self.keys[start:stop], self.sizes[start:stop], self.etags[start:stop])

    def extend(self, more: _Columns) -> None:
        """Add records at the end."""
        self.samples.extend(more.samples)
        self.keys.extend(more.keys)
        self.sizes.extend(more.sizes)
        self.etags.extend(more.etags)


class _Arrived:
    """The records of a listing in progress, in sorted runs on disk and one run in memory."""

    def __init__(self, folder: Path, stem: Stem, grouping: Grouping | None) -> None:
        self._folder, self._stem, self._grouping = folder, stem, grouping
        self._runs: list[tuple[Record, Record, Path]] = []
        """First record, last record and file of each run."""
        self._pending = _Columns([], [], [], [])
        self._number = itertools.count()

    def add_page(self, page: NamedPage, url: str) -> Iterator[tuple[str, str]]:
        """Add objects. Yield each key that belongs to no sample, with the reason."""
        # A page may be the whole list of a store, and no more than a run of it should be in memory twice.
        step = min(RUN, CHUNK)
        for start in range(0, len(page), step):
            part = page if len(page) <= step else NamedPage.of(page[start : start + step])
            for at in self._add_plain(part):
                if (why := self.add(item := part[at], url)) is not None:
                    yield item.key, why
            if len(self._pending) >= RUN:
                self._put_aside()

    def _add_plain(self, page: NamedPage) -> Iterable[int]:
        """Add the objects whose names are only cut at a dot. Return the positions of the other ones."""
        suffixes = self._stem.suffixes(page)
        keys, etags = _all_encoded(page.keys, page.text), _all_encoded(page.etags)
        if suffixes is None or keys is None or etags is None or not _are_usable(keys, page.sizes, etags):
            return range(len(page))
        others = {*page.hidden, *(() if self._grouping is None else self._grouping.one_by_one(page))}
        counts = Counter(suffixes)
        if "" in counts:
            others.update(at for at, suffix in enumerate(suffixes) if not suffix)
        names, sizes = page.names, page.sizes
        if others:
            plain = [at for at in range(len(page)) if at not in others]
            names, suffixes = [names[at] for at in plain], [suffixes[at] for at in plain]
            keys, sizes, etags = [keys[at] for at in plain], [sizes[at] for at in plain], [etags[at] for at in plain]
            counts = Counter(suffixes)
        # The dot is cut off, too.
        lengths = {suffix: len(_encode(suffix)) + 1 for suffix in counts}
        if len(lengths) == 1:
            (length,) = lengths.values()
            samples = [key[:-length] for key in keys]
        else:
            samples = [key[: -lengths[suffix]] for key, suffix in zip(keys, suffixes, strict=True)]
        if self._grouping is not None:
            parts: Counter[tuple[str, str]] = Counter()
            for suffix, number in counts.items():
                parts[self._stem.part(suffix)] += number
            self._grouping.count_all(names, parts)
        self._pending.extend(_Columns(samples, keys, sizes, etags))
        return sorted(others)

    def add(self, item: Object, url: str) -> str | None:
        """Add one object; return the reason why it belongs to no sample, or None."""
        part = self._stem.split(item.key)
        if isinstance(part, str):
            return part
        check_listed(item, url)
        if self._grouping is not None:
            self._grouping.count(item.key, part)
        record = _Columns([_encode(part.sample)], [_encode(item.key)], [item.size], [_encode(item.etag or "")])
        self._pending.extend(record)
        return None

    def _put_aside(self) -> None:
        pending = _in_order(self._pending)
        path = self._folder / f"run-{next(self._number):04d}.tmp"
        with new_file(path, 2**20) as file:
            for start in range(0, len(pending), CHUNK):
                _put(file, pending.part(start, start + CHUNK))
        self._runs.append((pending.record(0), pending.record(-1), path))
        self._pending = _Columns([], [], [], [])

    def columns(self) -> Iterator[_Columns]:
        """Return all records in sorted order, :data:`CHUNK` at a time."""
        pending = self._pending = _in_order(self._pending)
        runs = [(first, last, _take_back(path)) for first, last, path in self._runs]
        if len(pending):
            runs.append((pending.record(0), pending.record(-1), iter([pending])))
        runs.sort(key=lambda run: run[0])
        streams = [columns for *_, columns in runs]
        # Most stores list in the order of keys, so the runs follow each other and need no merge.
        if all(one[1] <= two[0] for one, two in pairwise(runs)):
            return _in_chunks(itertools.chain(*streams))
        return _in_columns(heapq.merge(*map(_in_records, streams)))

    def records(self) -> Iterator[Record]:
        """Return all records in sorted order."""
        return _in_records(self.columns())

    def regroup(self, stem: Stem) -> None:
        """Cut all names again by another rule."""
        # columns() holds on to the old runs and the old lists, so new ones can be collected while the old files are
        # read.
        chunks, runs = self.columns(), self._runs
        self._stem, self._runs, self._pending = stem, [], _Columns([], [], [], [])
        try:
            for chunk in chunks:
                page = NamedPage([*map(_decode, chunk.keys)], chunk.sizes, [*map(_decode, chunk.etags)])
                for _ in self.add_page(page, ""):
                    pass
        finally:
            for *_, path in runs:
                remove_path(path)

    def close(self) -> None:
        """Delete the files of runs."""
        for *_, path in self._runs:
            remove_path(path)


def _in_order(columns: _Columns) -> _Columns:
    """Return the records sorted."""
    samples = columns.samples
    # Most stores list in the order of keys, which is nearly always that of samples, too.
    if all(map(operator.lt, samples, itertools.islice(samples, 1, None))):
        return columns
    return _Columns.of(sorted(columns.records()))


def _in_records(chunks: Iterable[_Columns]) -> Iterator[Record]:
    return itertools.chain.from_iterable(chunk.records() for chunk in chunks)


def _in_columns(records: Iterator[Record]) -> Iterator[_Columns]:
    """Yield records as columns, :data:`CHUNK` at a time."""
    while some := list(itertools.islice(records, CHUNK)):
        yield _Columns.of(some)


def _in_chunks(columns: Iterable[_Columns]) -> Iterator[_Columns]:
    """Yield the records of columns of any length, :data:`CHUNK` at a time."""
    rest = _Columns([], [], [], [])
    for some in columns:
        rest.extend(some)
        whole = len(rest) - len(rest) % CHUNK
        for start in range(0, whole, CHUNK):
            yield rest.part(start, start + CHUNK)
        rest = rest.part(whole, len(rest))
    if len(rest):
        yield rest


def _all_encoded(texts: list[str], joined: str | None = None) -> list[bytes] | None:
    """Return each text as :func:`_encode` does; None if they cannot all be encoded at once."""
    try:
        raw = _encode("\0".join(texts) if joined is None else joined).split(b"\0")
    # Half of a surrogate pair: the error is raised for the one key that has it.
    except UnicodeEncodeError:
        return None
    return raw if len(raw) == len(texts) else None


def _are_usable(keys: list[bytes], sizes: list[int], etags: list[bytes]) -> bool:
    """Return True if :func:`check_listed` would accept all of these objects."""
    longest = max(max(map(len, keys)), max(map(len, etags)))
    return longest <= KEY_BYTES and min(sizes) >= -1 and max(sizes) < LARGEST


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
    """Write a listing as :func:`write_listing` does, from records that are sorted already."""
    return _written(
        folder, _in_columns(records), stem=stem, url=url, left_out=left_out, inside=inside, grouping=grouping
    )


def _written(
    folder: Path,
    chunks: Iterator[_Columns],
    *,
    stem: Stem,
    url: str,
    left_out: Callable[[], Mapping[str, int]],
    inside: Callable[[], str],
    grouping: Grouping | None,
) -> Listing:
    make_missing(folder)
    facts = _Writer(folder, url).write(chunks)
    passed_over = LeftOut().joined(left_out())
    facts |= {"version": _VERSION, "url": url, "stem": stem.rule}
    notes = [inside()]
    if grouping is not None:
        passed_over.joined(grouping.left_out)
        facts["kept"] = grouping.kept
        notes.append(grouping.note)
    facts |= {"left_out": passed_over, "named": passed_over.named, "more": passed_over.more}
    facts["notes"] = [note for note in notes if note]
    # Written last, by one rename: a folder without listing.json is one whose process was killed, and is listed again.
    with replacing(folder / LISTING_FILE) as file:
        file.write(json.dumps(facts, indent=1).encode())
    return Listing.open(folder)


def _encode(text: str) -> bytes:
    """Return the UTF-8 bytes of a key; bytes that are no UTF-8 come back unchanged by :func:`_decode`."""
    return text.encode("utf-8", "surrogateescape")


def _put(file: BinaryIO, columns: _Columns) -> None:
    """Write records to a file: their count, the lengths of their texts, their sizes, and the texts."""
    texts = columns.samples, columns.keys, columns.etags
    lengths = array("I")
    for column in texts:
        lengths.extend(map(len, column))
    file.write(_COUNT.pack(len(columns)) + lengths.tobytes() + array("q", columns.sizes).tobytes())
    for column in texts:
        file.write(b"".join(column))


def _take_back(path: Path) -> Iterator[_Columns]:
    """Yield the records of a file that :func:`_put` wrote, as many at a time as were written."""
    with open(path, "rb") as file:
        while head := file.read(_COUNT.size):
            (count,) = _COUNT.unpack(head)
            lengths, sizes = array("I"), array("q")
            lengths.fromfile(file, 3 * count)
            sizes.fromfile(file, count)
            samples = _cut(file, lengths[:count])
            keys = _cut(file, lengths[count : 2 * count])
            yield _Columns(samples, keys, sizes.tolist(), _cut(file, lengths[2 * count :]))


def _cut(file: BinaryIO, lengths: array[int]) -> list[bytes]:
    text = file.read(sum(lengths))
    return [text[start:stop] for start, stop in pairwise(itertools.accumulate(lengths, initial=0))]


class _Writer:
    """The writer of the arrays of a listing; records must come sorted."""

    def __init__(self, folder: Path, url: str) -> None:
        self._folder, self._url = folder, url

    def write(self, chunks: Iterator[_Columns]) -> dict[str, Any]:
        digest = hashlib.sha256()
        objects = units = nbytes = largest = open_bytes = begun = 0
        last_sample: bytes | None = None
        last_key: bytes | None = None
        counts: set[int] = set()
        blocks = array("q", [0])
        with (
            _BytesFile(self._folder / "objects.npy") as data,
            _Numbers(self._folder / "sizes.npy") as sizes,
            _Numbers(self._folder / "units.npy") as starts,
        ):
            for some in chunks:
                samples, keys, etags = some.samples, some.keys, some.etags
                # Records are sorted by sample, then key, so a key that is listed twice stands next to itself, also
                # across two chunks.
                if last_key == keys[0] or any(map(operator.eq, keys, itertools.islice(keys, 1, None))):
                    twice = next(one for one, two in pairwise((last_key, *keys)) if one == two)
                    raise BadObject(f"{self._url}: the key {_decode(twice or b'')!r} is listed twice")
                records = some.records()
                digest.update(b"".join([_HEAD.pack(len(a), len(b), len(d), c) + b + d for a, b, c, d in records]))
                for at in range(0, len(keys), BLOCK):
                    data.write(packed(keys[at : at + BLOCK], etags[at : at + BLOCK]))
                    blocks.append(data.count)
                known = np.array(some.sizes, dtype=np.int64)
                sizes.write(known)
                np.maximum(known, 0, out=known)
                nbytes += int(known.sum())
                # The listing may claim any sizes. Sums of sizes are int64, which must not overflow.
                if nbytes >= 2**62:
                    raise BadObject(
                        f"{self._url}: the listing claims {nbytes:.1e} bytes for {objects + len(keys)} objects"
                    )
                begins = [at for at, (one, two) in enumerate(pairwise((last_sample, *samples))) if one != two]
                # The first sum of a chunk belongs to the unit that the previous chunk left open, unless a unit begins
                # exactly here.
                sums = np.add.reduceat(known, [0, *(at for at in begins if at)])
                sums[0] += open_bytes if begins[:1] != [0] else 0
                largest, open_bytes = max(largest, int(sums.max())), int(sums[-1])
                if begins:
                    first = np.array(begins, dtype=np.int64) + objects
                    # For the first chunk the first difference is 0 and no size of a unit. np.unique sorts, so the slice
                    # drops it.
                    counts.update(np.unique(np.diff(first, prepend=begun))[units == 0 :].tolist())
                    starts.write(first)
                    units, begun = units + len(begins), int(first[-1])
                last_sample, last_key, objects = samples[-1], keys[-1], objects + len(keys)
            counts.add(objects - begun)
            starts.write(np.array([objects], dtype=np.int64))
            sizes.finish()
            # If all units have as many objects, one number in listing.json replaces units.npy, and the temporary file
            # is dropped.
            if (each := counts.pop() if len(counts) == 1 else 0) == 0:
                starts.finish()
        # Every array is synced before listing.json, which says that they are complete, also after a power cut.
        with new_file(self._folder / "blocks.npy") as file:
            np.save(file, np.frombuffer(blocks, dtype=np.int64), allow_pickle=False)
            file.flush()
            os.fsync(file.fileno())
        return {
            "objects": objects,
            "units": units,
            "each": each,
            "bytes": nbytes,
            "largest": largest,
            "digest": digest.hexdigest(),
        }


class _Numbers:
    """A ``.npy`` file of whole numbers that arrive a few at a time. It gets 4 bytes a number, or 8 if one number needs
    them."""

    def __init__(self, path: Path) -> None:
        self._path, self._most = path, 0

    def __enter__(self) -> _Numbers:
        aside = self._path.with_suffix(".tmp")
        # __exit__ closes the file. Its name is removed at once, so a killed process leaves no temporary file.
        self._file = new_file(aside, 2**20)
        remove_path(aside)
        return self

    def write(self, numbers: npt.NDArray[np.int64]) -> None:
        self._file.write(numbers.tobytes())
        self._most = max(self._most, int(numbers.max()))

    def finish(self) -> None:
        """Write the file."""
        count = self._file.tell() // 8
        dtype = np.dtype(np.int32 if self._most < 2**31 else np.int64)
        self._file.seek(0)
        with new_file(self._path, 2**20) as file:
            write_array_header_1_0(file, {"descr": dtype.str, "fortran_order": False, "shape": (count,)})
            while piece := self._file.read(2**20):
                file.write(np.frombuffer(piece, dtype=np.int64).astype(dtype).tobytes())
            file.flush()
            os.fsync(file.fileno())

    def __exit__(self, *_: object) -> None:
        self._file.close()


class _BytesFile:
    """A ``.npy`` file of bytes whose length is known only at the end. Its header has a fixed size and is written
    last."""

    _HEADER = 128
    """Bytes of the header: a multiple of 64, as NumPy aligns the data, with space for any count."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.count = 0
        self._file: BinaryIO

    def __enter__(self) -> _BytesFile:
        # __exit__ closes the file, after it has written the header into the 128 bytes that are left free here.
        self._file = new_file(self._path, 2**20)
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
        os.fsync(self._file.fileno())
        self._file.close()


@contextlib.contextmanager
def opened(
    what: str, about: Path, names: Iterable[str], *, version: int
) -> Iterator[tuple[dict[str, Any], dict[str, npt.NDArray[Any]]]]:
    """Yield the JSON in the file ``about``, and the arrays beside it under ``names``, memory-mapped.

    Raises :class:`CorruptError` naming ``what`` they are. KeyError and similar errors inside the block become the same
    error, because they mean that something is missing in the JSON.
    """
    folder = about.parent
    try:
        facts = json.loads(about.read_text(encoding="utf-8"))
        if facts["version"] != version:
            raise CorruptError(
                f"{what} {str(folder)!r} has version {facts['version']}, but version {version} is needed;"
                " remove it to list again"
            )
        arrays = {name: load_array(folder / f"{name}.npy", mapped=True) for name in names}
        yield facts, arrays
    except (OSError, ValueError, KeyError, TypeError) as error:
        # The machine lacks descriptors or memory. The listing is sound, and must not be reported as damaged.
        if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM):
            raise
        # Not NumPy's own text, which would advise the user to allow pickles.
        why = error if isinstance(error, OSError) else "it is damaged"
        raise CorruptError(f"{what} {str(folder)!r} cannot be read ({why}); remove it to list again") from error


def _decode(raw: bytes) -> str:
    return raw.decode("utf-8", "surrogateescape")


@dataclass(frozen=True)
class Listing:
    """A memory-mapped listing on disk."""

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
    """Objects that belong to no sample, ``{"reason": count}``, and the names that a user may miss."""
    notes: tuple[str, ...]
    """Decisions about the names, or notes on what the objects are, each with the option that decides otherwise."""
    kept: Kept | None
    """The fields that were kept of a folder of objects; None if no field was sorted out."""
    _each: int
    """Number of objects of every unit; 0 if units differ."""
    _sizes: npt.NDArray[Any]
    """Bytes of each object, -1 if unknown."""
    _starts: npt.NDArray[Any]
    """The first object of each unit, and the number of objects; empty if all units have as many objects."""
    _blocks: KeyBlocks

    @classmethod
    def open(cls, folder: Path) -> Listing:
        """Map the listing in ``folder``. Raises :class:`CorruptError` when it is no listing, or not complete."""
        with opened("listing", folder / LISTING_FILE, ("objects", "blocks", "sizes"), version=_VERSION) as (
            facts,
            arrays,
        ):
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
                _each=facts["each"],
                _sizes=arrays["sizes"],
                _starts=_NO_STARTS if facts["each"] else load_array(folder / "units.npy", mapped=True),
                _blocks=KeyBlocks(folder, arrays["objects"], arrays["blocks"], facts["objects"]),
            )
            if not listing._is_whole:
                raise CorruptError(f"listing {str(folder)!r} is incomplete; remove it to list again")
        return listing

    @property
    def _is_whole(self) -> bool:
        """True when the arrays have the shapes and bounds that all other methods rely on."""
        sizes, starts = self._sizes, self._starts
        if not all(type(count) is int and count >= 0 for count in (self.objects, self.units, self._each)):
            return False
        if sizes.shape != (self.objects,) or sizes.dtype.kind != "i":
            return False
        if self._each:
            return self._each * self.units == self.objects
        is_column = starts.shape == (self.units + 1,) and starts.dtype.kind == "i"
        bounds_fit = is_column and starts[0] == 0 and starts[-1] == self.objects
        return bool(bounds_fit and (starts[1:] > starts[:-1]).all())

    @property
    def identity(self) -> str:
        """Digest of what a unit number means: the objects in order and their grouping."""
        return hashlib.sha256(json.dumps([self.digest, self.stem]).encode()).hexdigest()

    def unit_bytes(self, units: npt.NDArray[np.int64], *, unknown: int = 0) -> npt.NDArray[np.int64]:
        """Return the bytes of each of these units, (len(units),); an object of unknown size counts as ``unknown``."""
        starts, stops = self._bounds(units)
        counts = stops - starts
        ends = np.cumsum(counts)
        # Positions of all objects of all units in one array, so that there is no loop over units in Python.
        at = np.arange(ends[-1] if len(ends) else 0) + np.repeat(starts - (ends - counts), counts)
        sizes = self._sizes[at].astype(np.int64)
        # reduceat returns wrong sums for empty units. There are none: _is_whole refuses a listing with one.
        return np.add.reduceat(np.where(sizes < 0, unknown, sizes), ends - counts) if len(ends) else ends

    def _bounds(self, units: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Return the first object of each unit, and the position after its last object."""
        if self._each:
            return units * self._each, (units + 1) * self._each
        return self._starts[units].astype(np.int64), self._starts[units + 1].astype(np.int64)

    def object(self, index: int) -> Object:
        """Return the object at a position. Raises :class:`CorruptError` if the listing is damaged."""
        key, etag = self._blocks[index]
        return Object(_decode(key), int(self._sizes[index]), _decode(etag) or None)

    def unit(self, number: int) -> list[Object]:
        """Return the objects of one unit in order of their keys. Raises :class:`IndexError` for a number out of
        range."""
        if not 0 <= number < self.units:
            raise IndexError(f"unit {number} of {self.units}")
        if self._each:
            start, stop = number * self._each, (number + 1) * self._each
        else:
            start, stop = self._starts[number : number + 2].tolist()
        return [self.object(index) for index in range(start, stop)]

    def records(self, stem: Stem) -> Iterator[tuple[int, Record]]:
        """Yield every object with the number of its unit, in order; ``stem`` is the rule that grouped them."""
        pairs, unit, stop = iter(self._blocks), -1, 0
        for start in range(0, self.objects, CHUNK):
            for at, size in enumerate(self._sizes[start : start + CHUNK].tolist(), start):
                if at == stop:
                    unit += 1
                    stop = stop + self._each if self._each else int(self._starts[unit + 1])
                key, etag = next(pairs)
                part = stem.split(_decode(key))
                assert not isinstance(part, str), f"{key!r} was listed as part of a sample"
                yield unit, (_encode(part.sample), key, size, etag)
