"""Files that cachetool wrote, read by their format's library, in the guarded process like all that others made."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from cachetool.core.block import BLOCK_BYTES, Block
from cachetool.core.errors import BadObject, CorruptError, UsageError
from cachetool.core.schema import KEY, Schema
from cachetool.formats import get_format
from cachetool.formats.base import Format, Reader
from cachetool.formats.files import map_file
from cachetool.formats.lmdb_file import is_ours
from cachetool.sources.limits import check_allocation, disk_bytes
from cachetool.sources.readers import ClosingFile, FileOptions, bounded, field_names, make_schema, reading

__all__ = ["OurFile", "our_lmdb", "our_records", "run_of_blocks", "schema_of"]


def our_lmdb(path: Path, options: FileOptions) -> OurFile | None:
    """The samples of an LMDB file of ours; None for all others. Raises :class:`BadObject` for a damaged one."""
    with _bad(path):
        if options.value_format is not None or not path.is_file() or not is_ours(map_file(path)):
            return None
        return OurFile(path, get_format("lmdb"), options)


def our_records(path: Path, options: FileOptions, schema: Schema) -> OurFile:
    """The samples of a TFRecord file of ours, which does not say its ``schema``. Raises :class:`BadObject`."""
    with _bad(path):
        return OurFile(path, get_format("tfrecord"), options, schema=schema)


def schema_of(about: bytes | memoryview, kind: str, names: Iterable[str]) -> Schema | None:
    """The schema of files with these names, by the ``dataset.json`` beside them; None where it says nothing of them."""
    with contextlib.suppress(ValueError, KeyError, TypeError, AttributeError, RecursionError, UsageError):
        value = json.loads(bytes(about))
        if value["format"] == kind and {str(part["file"]) for part in value["parts"]}.issuperset(names):
            return Schema.from_json(value["schema"])
    return None


@contextlib.contextmanager
def _bad(path: Path) -> Iterator[None]:
    """Nobody vouches for the file: what is wrong with it is an object that cannot be used, not damage of a cache."""
    try:
        with reading(str(path)):
            yield
    except CorruptError as error:
        raise BadObject(str(error)) from error


class OurFile(ClosingFile):
    """One file; see :class:`cachetool.sources.readers.RandomAccess`. ``schema`` is what it must have, where known."""

    def __init__(self, path: Path, kind: Format, options: FileOptions, *, schema: Schema | None = None) -> None:
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
        size = disk_bytes(path)
        check_allocation(f"{path}: a sample", reader.schema.fixed_nbytes, stored=size)
        self.piece = reader.schema.fixed_nbytes if reader.schema.is_fixed else size

    def read(self, start: int, stop: int) -> Block:
        """Samples ``start`` to ``stop``."""
        if not 0 <= start <= stop <= self.samples:
            raise UsageError(f"{self.path}: samples {start} to {stop} of {self.samples}")
        with _bad(self.path):
            block = self._open().read(start, stop)
        return Block(self.schema, {new: block.columns[name] for name, new in self._names.items()})

    def blocks(self, *, block_bytes: int = BLOCK_BYTES) -> Iterator[Block]:
        """All samples in order."""
        return run_of_blocks(self, 0, self.samples, block_bytes=block_bytes)

    def close(self) -> None:
        """Let go of the file."""
        reader, self._reader = self._reader, None
        if reader is not None:
            reader.close()

    def _open(self) -> Reader:
        if self._reader is None:
            self._reader = self._kind.open(self.path, schema=self._stored)
        return self._reader


class Readable(Protocol):
    """What reads any run of samples."""

    schema: Schema

    def read(self, start: int, stop: int) -> Block:
        """Samples ``start`` to ``stop``."""
        ...


def run_of_blocks(reader: Readable, start: int, stop: int, *, block_bytes: int = BLOCK_BYTES) -> Iterator[Block]:
    """Samples ``start`` to ``stop`` of a reader, in blocks of about 8 MB, judged by the one before."""
    step = 1 if not reader.schema.is_fixed else block_bytes // max(1, reader.schema.fixed_nbytes)
    at = start
    while at < stop:
        block = reader.read(at, min(at + max(1, step), stop))
        yield block
        at += len(block)
        step = min(8 * max(1, step), max(1, len(block) * block_bytes // max(1, block.nbytes)))
