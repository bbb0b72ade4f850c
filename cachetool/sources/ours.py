"""Files that cachetool wrote, outside of any cache: a folder of ``convert --out``, or one such file from anywhere.

HDF5 and Zarr files are read like foreign ones (:mod:`cachetool.sources.rows`). :class:`OurFile` reads LMDB and TFRecord
with the format's own reader. These files are not trusted, because the author of a file could also make a matching
digest. Against accidental damage two things are compared: the checksums beside each file with ``dataset.json``, and the
samples with these checksums (:meth:`Exported.check`).
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
    """Return the samples of an LMDB file that cachetool wrote; None for all others. Raises :class:`BadObject` for a
    damaged one."""
    # Imported here, so that TFRecord files are read without the package lmdb.
    from cachetool.formats.lmdb import is_ours

    with _bad(path):
        if options.value_format is not None or not is_ours(map_file(path)):
            return None
        return OurFile(path, get_format("lmdb"), options)


def our_records(path: Path, options: SourceOptions, schema: Schema) -> OurFile:
    """Return the samples of a TFRecord file that cachetool wrote; the file does not contain its ``schema``.

    Raises :class:`BadObject`.
    """
    with _bad(path):
        return OurFile(path, get_format("tfrecord"), options, schema=schema)


@dataclass(frozen=True, slots=True)
class Exported:
    """The statements of ``dataset.json`` about the files beside it."""

    schema: Schema
    contents: Mapping[str, str]
    """The content digest of each file, by its name; empty if the folder was written without digests."""

    def check(self, store: Store, name: str, start: int, checksums: npt.NDArray[np.uint64]) -> None:
        """Compare the checksums of some samples of a file with those that were written.

        ``checksums`` has the shape (fields, samples), for the samples from ``start`` on. Raises :class:`CorruptError`
        naming the file, sample and field.
        """
        expected = self._checksums(store, name)
        # The checksums lie in a file of their own, which may be damaged too. dataset.json has the digest of all of
        # them.
        if self.contents[name] and digest_of(self.schema, [expected]) != self.contents[name]:
            raise CorruptError(f"{name}: the checksums beside it are not those of the samples that were written")
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
        """Return the value as plain JSON values."""
        return {"schema": self.schema.to_json(), "contents": dict(self.contents)}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Exported:
        """Return the value that :meth:`to_json` described."""
        return cls(Schema.from_json(value["schema"]), value["contents"])


def exported(about: bytes | memoryview, kind: str, names: Iterable[str], *, alone: bool = False) -> Exported | None:
    """Return the statements of a ``dataset.json`` about the files ``names``; None if it is not of ``convert``.

    ``alone``: ``names`` is one of several files. Raises :class:`CorruptError` for a file that looks like ours and does
    not fit, or is of a later version.
    """
    raw, names = bytes(about), list(names)
    with contextlib.suppress(ValueError):
        dataset = parse_dataset(raw)
        contents = {file.name: file.content for file in dataset.files}
        if alone and not contents.keys() >= set(names):
            return None
        if dataset.format == kind and (alone or contents.keys() == set(names)):
            return Exported(dataset.schema, {name: contents[name] for name in names})
    # A damaged dataset.json no longer parses. If most of its keys are still there, the folder was exported, and reading
    # it as a foreign one would skip all checks. A single file may lie beside the dataset.json of another program.
    if sum(word in raw for word in _WORDS) >= len(_WORDS) // 2 + 1 and not alone:
        raise CorruptError(NOT_OURS)
    return None


@contextlib.contextmanager
def _bad(path: Path) -> Iterator[None]:
    """Turn damage of a file into :class:`BadObject`."""
    try:
        with reading(str(path)):
            yield
    except CorruptError as error:
        # CorruptError means damage of a cache, for which `verify --repair` is advised. Here it is one unusable object
        # of a source.
        raise BadObject(str(error)) from error


class OurFile(Closing):
    """One file; see :class:`cachetool.sources.readers.RandomAccess`. ``schema``: the expected schema, if it is
    known."""

    def __init__(self, path: Path, kind: Format, options: SourceOptions, *, schema: Schema | None = None) -> None:
        self.path, self._kind, self._stored = path, kind, schema
        self._reader: Reader | None = None
        reader = self._open()
        self._stored, self.samples = reader.schema, reader.samples
        skipped: list[tuple[str, str]] = []
        self._names = field_names(path, [name for name in reader.schema.names if name != KEY], skipped, options)
        if KEY in reader.schema and options.key:
            self._names[KEY] = KEY
        # The order of the written schema is also the order of the file's checksums, with which samples are compared.
        if options.fields is None:
            self._names = {name: self._names[name] for name in reader.schema.names if name in self._names}
        fields = [replace(reader.schema[name], name=new) for name, new in self._names.items()]
        self.schema = make_schema(path, fields, skipped)
        self.skipped = bounded(skipped)
        size = path.stat().st_size
        check_allocation(f"{path}: a sample", reader.schema.fixed_nbytes, stored=size)
        self.piece = reader.schema.fixed_nbytes if reader.schema.is_fixed else size

    def read(self, start: int, stop: int) -> Block:
        """Return the samples from ``start`` to ``stop``."""
        if not 0 <= start <= stop <= self.samples:
            raise UsageError(f"{self.path}: samples {start} to {stop} do not exist; the file has {self.samples}")
        with _bad(self.path):
            block = self._open().read(start, stop)
        return Block(self.schema, {new: block.columns[name] for name, new in self._names.items()})

    def close(self) -> None:
        """Close the file."""
        reader, self._reader = self._reader, None
        if reader is not None:
            reader.close()

    def _open(self) -> Reader:
        if self._reader is None:
            self._reader = self._kind.open(self.path, schema=self._stored)
        return self._reader


NOT_OURS = f"{DATASET_FILE} does not fit the files that cachetool convert wrote: one of them is missing or damaged"
"""The error for a folder that ``convert --out`` wrote and that is damaged."""
_WORDS = (b'"layout"', b'"format"', b'"schema"', b'"content"', b'"parts"')
"""Keys of ``dataset.json``, most of which remain in a damaged one."""
