"""Files that cachetool wrote, outside of any cache: a folder of ``convert --out``, or one such file from anywhere.

:class:`OurFile` is read by its format's library, in the guarded process like all that others made. Nobody vouches for
them: whoever made a file could have made a digest that fits. So no library opens one in this process. A part is read by
its extents, every number of which is checked; one without extents, and a file alone, by its format's library in a
process of its own (:mod:`cachetool.sources.guard`). Against accidents the checksums beside each part must be those that
``dataset.json`` says, and the samples must have these checksums.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

from cachetool.core.block import BLOCK_BYTES, Block
from cachetool.core.errors import BadObject, CorruptError, UsageError
from cachetool.core.extents import EXTENTS_FILE
from cachetool.core.names import Name
from cachetool.core.schema import KEY, Schema
from cachetool.formats import format_for, get_format
from cachetool.formats.base import Format, Reader
from cachetool.formats.files import map_file
from cachetool.formats.lmdb import is_ours as is_our_lmdb
from cachetool.formats.shard import check_content, open_plain, side_folder, stored_checksums
from cachetool.proc.folders import read_json
from cachetool.sources.guard import GuardedFile
from cachetool.sources.limits import check_allocation, disk_bytes
from cachetool.sources.readers import ClosingFile, FileOptions, bounded, field_names, make_schema, reading

__all__ = [
    "DATASET_FILE",
    "LAYOUT",
    "OurFile",
    "PartFile",
    "is_ours",
    "open_alone",
    "open_here",
    "our_lmdb",
    "our_records",
    "read_parts",
    "run_of_blocks",
    "schema_of",
]


def our_lmdb(path: Path, options: FileOptions) -> OurFile | None:
    """The samples of an LMDB file of ours; None for all others. Raises :class:`BadObject` for a damaged one."""
    with _bad(path):
        if options.value_format is not None or not path.is_file() or not is_our_lmdb(map_file(path)):
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


DATASET_FILE = "dataset.json"
LAYOUT = 1
"""Of :data:`DATASET_FILE` and the folder around it."""
_HEAD = 2**18
_MOST_METADATA = 16 * 2**20


@dataclass(frozen=True, slots=True)
class PartFile:
    """One file of a folder that ``convert --out`` wrote."""

    path: Path
    kind: Format
    schema: Schema
    samples: int
    content: str | None
    """Content digest; None in a folder that was made without."""

    def open(self) -> Reader | GuardedFile:
        """Read it. Raises :class:`CorruptError` naming the file when it is not what the folder says."""
        if (side_folder(self.path) / EXTENTS_FILE).exists():
            reader: Reader | GuardedFile = open_plain(self.path, self.kind, self.schema)
        else:
            reader = open_alone(self.path)
        if reader.samples != self.samples or reader.schema != self.schema:
            reader.close()
            raise CorruptError(f"{self.path} does not hold the {self.samples} samples that {DATASET_FILE} says")
        return reader

    def checksums(self) -> npt.NDArray[np.uint64]:
        """What its samples must hash to, (fields, samples). Raises :class:`CorruptError` naming the file."""
        side = side_folder(self.path)
        if self.content is None:
            return stored_checksums(side, self.schema, links=True)
        return check_content(side, self.schema, self.content, links=True)


def read_parts(folder: Path) -> tuple[Schema, list[PartFile]]:
    """The schema and the parts of a folder. Raises :class:`CorruptError` when its list of parts cannot be read."""
    about = folder / DATASET_FILE
    try:
        value = json.loads(read_json(about, links=True))
        layout = int(value.get("layout", LAYOUT))
        if layout > LAYOUT:
            raise CorruptError(f"{about} has layout {layout}, this cachetool reads layout {LAYOUT}; update cachetool")
        schema, kind = Schema.from_json(value["schema"]), get_format(value["format"])
        parts = []
        for part in value["parts"]:
            file, samples, content = str(part["file"]), int(part["samples"]), part.get("content")
            plain = Name.fits(file) and not file.startswith(".") and file.endswith(kind.suffix)
            if not plain or samples < 0 or not isinstance(content, str | None):
                raise ValueError(f"a part called {file!r} of {samples} samples")
            parts.append(PartFile(folder / file, kind, schema, samples, content))
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise CorruptError(f"{about} is not what cachetool convert writes: {error}") from error
    return schema, parts


def is_ours(path: Path) -> bool:
    """Whether a file carries the mark of our layout: then it is read as that, and a damaged one is an error."""
    if path.suffix in (".h5", ".hdf5") and path.is_file():
        with path.open("rb") as file:
            return b"cachetool" in file.read(_HEAD)
    if path.suffix == ".zarr" and (path / "zarr.json").is_file():
        with (path / "zarr.json").open("rb") as file:
            return b'"cachetool"' in file.read(_MOST_METADATA)
    return path.suffix == ".lmdb" and path.is_file() and is_our_lmdb(map_file(path))


def open_alone(path: Path) -> GuardedFile:
    """Read one file of ours through its format's library, in a process of its own.

    Raises :class:`CorruptError` or :class:`BadObject` naming it when it is damaged, whatever that does to the process.
    """
    return GuardedFile(path, FileOptions(), opener=f"{__name__}:{open_here.__name__}")


def open_here(path: Path, options: FileOptions, *, notice: Callable[[Path], None]) -> OurFile:
    """In that process: open the file. Its schema comes from the folder around it, or, without one, from itself."""
    notice(path)
    about = path.parent / DATASET_FILE
    schema = None
    if about.is_file():
        folder_schema, parts = read_parts(path.parent)
        schema = folder_schema if path.name in [part.path.name for part in parts] else None
    return OurFile(path, format_for(path), options, schema=schema)
