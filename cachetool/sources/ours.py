"""Files that cachetool wrote, outside of any cache: a folder of ``convert --out``, or one such file from anywhere.

Arrays (HDF5, Zarr) are read as those of others are (:mod:`cachetool.sources.rows`). :class:`OurFile` reads LMDB and
TFRecord by their format's library. Nobody vouches for them: whoever made a file could have made a digest that fits.
Against accidents the checksums beside each file must be those that ``dataset.json`` says, and the samples must have
these checksums (:meth:`Exported.check`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from cachetool.core.block import Block
from cachetool.core.closing import Closing
from cachetool.core.errors import BadObject, CorruptError, NotFound, UsageError
from cachetool.core.extents import EXTENTS_FILE, Extents
from cachetool.core.schema import KEY, Schema
from cachetool.formats import get_format
from cachetool.formats.base import Format, Reader
from cachetool.formats.digest import digest_of
from cachetool.formats.exported import DATASET_FILE, SIDE_FOLDER, parse_dataset
from cachetool.formats.files import map_file
from cachetool.formats.shard import CHECKSUMS_FILE, check_samples
from cachetool.sources.decode import parse_npy
from cachetool.sources.limits import check_allocation
from cachetool.sources.options import SourceOptions
from cachetool.sources.readers import bounded, field_names, make_schema, reading
from cachetool.stores import Store

__all__ = ["NOT_OURS", "Exported", "OurFile", "exported", "our_lmdb", "our_records"]


def our_lmdb(path: Path, options: SourceOptions) -> OurFile | None:
    """The samples of an LMDB file of ours; None for all others. Raises :class:`BadObject` for a damaged one."""
    from cachetool.formats.lmdb import is_ours

    with _bad(path):
        if options.value_format is not None or not is_ours(map_file(path)):
            return None
        return OurFile(path, get_format("lmdb"), options)


def our_records(path: Path, options: SourceOptions, schema: Schema) -> OurFile:
    """The samples of a TFRecord file of ours, which does not say its ``schema``. Raises :class:`BadObject`."""
    with _bad(path):
        return OurFile(path, get_format("tfrecord"), options, schema=schema)


@dataclass(frozen=True, slots=True)
class Exported:
    """What ``dataset.json`` says of the files beside it."""

    schema: Schema
    contents: Mapping[str, str]
    """By name the content digest of each file; empty in a folder that was made without."""

    def check(self, store: Store, name: str, start: int, checksums: npt.NDArray[np.uint64]) -> None:
        """Compare the ``checksums``, (fields, samples), of the samples of a file from ``start`` on with those that were
        written. Raises :class:`CorruptError` naming the file, sample and field."""
        expected = self._checksums(store, name)
        if self.contents[name] and digest_of(self.schema, [expected]) != self.contents[name]:
            raise CorruptError(f"{name}: beside it are not the checksums of the samples that were written")
        stop = start + checksums.shape[1]
        check_samples(checksums, expected[:, start:stop], self.schema, name=name, first=start)

    def _checksums(self, store: Store, name: str) -> npt.NDArray[np.uint64]:
        side = f"{SIDE_FOLDER}/{name}"
        with contextlib.suppress(NotFound):
            body = store.get(store.find(f"{side}/{EXTENTS_FILE}"))
            return Extents.from_buffer(body, schema=self.schema, name=f"{side}/{EXTENTS_FILE}").checksums
        try:
            array = parse_npy(store.get(store.find(f"{side}/{CHECKSUMS_FILE}")))
        except (NotFound, BadObject) as error:
            raise CorruptError(f"{side}/{CHECKSUMS_FILE} cannot be read: {error}") from error
        if array.dtype != np.uint64 or array.ndim != 2 or len(array) != len(self.schema):
            raise CorruptError(f"{side}/{CHECKSUMS_FILE} does not hold the checksums of {len(self.schema)} fields")
        return array

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {"schema": self.schema.to_json(), "contents": dict(self.contents)}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Exported:
        """What :meth:`to_json` gave."""
        return cls(Schema.from_json(value["schema"]), value["contents"])


def exported(about: bytes | memoryview, kind: str, names: Iterable[str], *, alone: bool = False) -> Exported | None:
    """What a ``dataset.json`` says of the files with these names, or of one of several; None where it is not ours.

    Raises :class:`CorruptError` for one that looks like ours and does not fit, or is of a later version.
    """
    raw, names = bytes(about), list(names)
    with contextlib.suppress(ValueError):
        dataset = parse_dataset(raw)
        contents = {file.name: file.content for file in dataset.files}
        if alone and not contents.keys() >= set(names):
            return None
        if dataset.format == kind and (alone or contents.keys() == set(names)):
            return Exported(dataset.schema, {name: contents[name] for name in names})
    if sum(word in raw for word in _WORDS) >= len(_WORDS) // 2 + 1 and not alone:
        raise CorruptError(NOT_OURS)
    return None


@contextlib.contextmanager
def _bad(path: Path) -> Iterator[None]:
    """Nobody vouches for the file: what is wrong with it is an object that cannot be used, not damage of a cache."""
    try:
        with reading(str(path)):
            yield
    except CorruptError as error:
        raise BadObject(str(error)) from error


class OurFile(Closing):
    """One file; see :class:`cachetool.sources.readers.RandomAccess`. ``schema`` is what it must have, where known."""

    def __init__(self, path: Path, kind: Format, options: SourceOptions, *, schema: Schema | None = None) -> None:
        self.path, self._kind, self._stored = path, kind, schema
        self._reader: Reader | None = None
        reader = self._open()
        self._stored, self.samples = reader.schema, reader.samples
        skipped: list[tuple[str, str]] = []
        self._names = field_names(path, [name for name in reader.schema.names if name != KEY], skipped, options)
        if KEY in reader.schema and options.key:
            self._names[KEY] = KEY
        if options.fields is None:
            self._names = {name: self._names[name] for name in reader.schema.names if name in self._names}
        fields = [replace(reader.schema[name], name=new) for name, new in self._names.items()]
        self.schema = make_schema(path, fields, skipped)
        self.skipped = bounded(skipped)
        size = path.stat().st_size
        check_allocation(f"{path}: a sample", reader.schema.fixed_nbytes, stored=size)
        self.piece = reader.schema.fixed_nbytes if reader.schema.is_fixed else size

    def read(self, start: int, stop: int) -> Block:
        """Samples ``start`` to ``stop``."""
        if not 0 <= start <= stop <= self.samples:
            raise UsageError(f"{self.path}: samples {start} to {stop} of {self.samples}")
        with _bad(self.path):
            block = self._open().read(start, stop)
        return Block(self.schema, {new: block.columns[name] for name, new in self._names.items()})

    def close(self) -> None:
        """Let go of the file."""
        reader, self._reader = self._reader, None
        if reader is not None:
            reader.close()

    def _open(self) -> Reader:
        if self._reader is None:
            self._reader = self._kind.open(self.path, schema=self._stored)
        return self._reader


NOT_OURS = f"{DATASET_FILE} is not what cachetool convert writes of these files: one of them is missing or damaged"
"""Said of a folder that ``convert --out`` wrote."""
_WORDS = (b'"layout"', b'"format"', b'"schema"', b'"content"', b'"parts"')
"""A damaged one still has most of these."""
