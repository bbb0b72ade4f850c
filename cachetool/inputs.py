"""What ``convert`` reads: a cache's dataset, plain files of ours, files that others made, a folder of objects.

Whatever it is, it has a schema, a number of samples and blocks from one sample to another. An input describes itself in
plain values, so that each worker process opens it again for itself.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from cachetool.block import BLOCK_BYTES, Block
from cachetool.cache import CacheDir, Shard
from cachetool.engines.task import Message
from cachetool.errors import CorruptError, UsageError
from cachetool.formats import format_for, get_format
from cachetool.formats.base import Reader
from cachetool.formats.shard import open_plain, open_shard
from cachetool.schema import Schema
from cachetool.sources import SourceOptions, list_source, open_source
from cachetool.sources.files import FileOptions, FileSource, is_file_input, open_files

__all__ = ["Input", "describe", "identity", "open_input", "run_of_blocks"]

DATASET_FILE = "dataset.json"


class Input(Protocol):
    """Samples in order. Used by one thread of one process."""

    schema: Schema
    samples: int
    random: bool
    """Whether any run of samples can be read without those before it; else one worker reads all in order."""
    skipped: tuple[tuple[str, str], ...]
    """What is there but not taken: name and reason."""

    def blocks(self, start: int, stop: int) -> Iterator[Block]:
        """Samples ``start`` to ``stop`` in blocks of about 8 MB."""
        ...

    def close(self) -> None:
        """Let go of files. May be called twice."""
        ...


def describe(path: Path, options: FileOptions) -> Message:
    """How :func:`open_input` opens ``path`` in another process; raises :class:`UsageError` when it is not there."""
    if not path.exists():
        raise UsageError(f"there is no {path}; name a file or a folder to convert")
    value: Message = {"path": str(path.resolve()), "options": options.to_json()}
    if (path / DATASET_FILE).is_file():
        return {"kind": "parts", **value}
    if _is_ours(path):
        return {"kind": "own", **value}
    return {"kind": "files" if is_file_input(path) else "objects", **value}


def open_input(description: Message) -> Input:
    """The input that :func:`describe`, or the cache, described."""
    if description["kind"] == "cache":
        return _Stored.of_cache(description)
    path = Path(description["path"])
    if description["kind"] == "parts":
        return _Stored.of_folder(path)
    if description["kind"] == "own":
        return _Stored.of_file(path)
    options = FileOptions.from_json(description["options"])
    if description["kind"] == "objects":
        return _Objects(path, options)
    return _Files(open_files(path, options))


def identity(description: Message) -> str:
    """Changes when the input does: its place, size and time of change, and how it is read."""
    facts: list[Any] = [{key: value for key, value in description.items() if key != "version"}]
    path = Path(str(description.get("path") or description["root"]))
    names = [path] if path.is_file() else sorted(p for p in path.rglob("*") if p.is_file())
    if description["kind"] != "cache":
        facts += [(str(p), p.stat().st_size, p.stat().st_mtime_ns) for p in names]
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:32]


def _is_ours(path: Path) -> bool:
    """Whether a file carries the mark of our layout: then a damaged one is an error, not somebody else's file."""
    if path.suffix in (".h5", ".hdf5") and path.is_file():
        with path.open("rb") as file:
            return b"cachetool" in file.read(2**18)
    if path.suffix == ".zarr" and (path / "zarr.json").is_file():
        return '"cachetool"' in (path / "zarr.json").read_text("utf-8", "replace")
    if path.suffix == ".lmdb" and path.is_file() and path.stat().st_size:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as view:
            return view.rfind(b"__schema__") >= 0 and view.rfind(b"__len__") >= 0
    return False


class _Stored:
    """Shards of a cache, or the parts of a folder of ours: one reader after another."""

    random = True
    skipped: tuple[tuple[str, str], ...] = ()

    def __init__(self, schema: Schema, parts: list[tuple[int, Callable[[], Reader]]]) -> None:
        self.schema = schema
        self._parts = parts
        self._starts = np.cumsum([0, *(samples for samples, _ in parts)])
        self.samples = int(self._starts[-1])

    @classmethod
    def of_cache(cls, description: Message) -> _Stored:
        """The shards of a dataset at a version that the caller leases."""
        with CacheDir(Path(description["root"])) as cache:
            shards = cache.shards(description["dataset"], version=description["version"])
            schema = cache.schema(description["dataset"])
        return cls(schema, [(shard.samples, _shard_opener(shard)) for shard in shards])

    @classmethod
    def of_folder(cls, folder: Path) -> _Stored:
        """What ``convert --out`` wrote. Raises :class:`CorruptError` when its list of parts cannot be read."""
        try:
            about = json.loads((folder / DATASET_FILE).read_bytes())
            schema = Schema.from_json(about["schema"])
            parts = [
                (int(part["samples"]), _part_opener(folder, str(part["file"]), about, schema))
                for part in about["parts"]
            ]
        except (ValueError, KeyError, TypeError) as error:
            raise CorruptError(f"{folder / DATASET_FILE} is not what cachetool convert writes: {error}") from error
        return cls(schema, parts)

    @classmethod
    def of_file(cls, path: Path) -> _Stored:
        """One file of ours, wherever it came from."""
        kind = format_for(path)
        with kind.open(path) as reader:
            return cls(reader.schema, [(reader.samples, lambda: kind.open(path))])

    def blocks(self, start: int, stop: int) -> Iterator[Block]:
        first = int(np.searchsorted(self._starts, start, side="right")) - 1
        for number in range(max(0, first), len(self._parts)):
            low, high = int(self._starts[number]), int(self._starts[number + 1])
            if low >= stop:
                return
            with self._parts[number][1]() as reader:
                yield from run_of_blocks(reader, max(start, low) - low, min(stop, high) - low)

    def close(self) -> None:
        pass


def _shard_opener(shard: Shard) -> Callable[[], Reader]:
    return lambda: open_shard(shard.path, get_format(shard.format), shard.schema)


def _part_opener(folder: Path, file: str, about: Message, schema: Schema) -> Callable[[], Reader]:
    if os.sep in file or file.startswith("."):
        raise ValueError(f"a part called {file!r}")
    return lambda: open_plain(folder / file, get_format(about["format"]), schema)


def run_of_blocks(reader: Reader, start: int, stop: int) -> Iterator[Block]:
    """Samples ``start`` to ``stop`` of a reader, in blocks of about 8 MB, judged by the one before."""
    step = 1 if not reader.schema.is_fixed else BLOCK_BYTES // max(1, reader.schema.fixed_nbytes)
    at = start
    while at < stop:
        block = reader.read(at, min(at + max(1, step), stop))
        yield block
        at += len(block)
        step = min(8 * max(1, step), max(1, len(block) * BLOCK_BYTES // max(1, block.nbytes)))


class _Files:
    """Files that others made."""

    def __init__(self, source: FileSource) -> None:
        self._source = source
        self.schema, self.samples, self.skipped = source.schema, source.samples, source.skipped
        self._read = getattr(source, "read", None)
        self.random = self._read is not None
        self._running: Iterator[Block] | None = None
        self._at = 0
        self._rest: Block | None = None

    def blocks(self, start: int, stop: int) -> Iterator[Block]:
        if self._read is not None:
            yield from run_of_blocks(self._source, start, stop)  # type: ignore[arg-type]  # it has all that is used
            return
        if self._running is None or start < self._at:
            self._running, self._at, self._rest = self._source.blocks(), 0, None
        while self._at < stop:
            block = self._rest if self._rest is not None else next(self._running, None)
            if block is None:
                raise CorruptError(f"{self._source.path} has {self._at} samples, {self.samples} were counted")
            low, high = max(start - self._at, 0), min(stop - self._at, len(block))
            self._rest = block.slice(high, len(block)) if high < len(block) else None
            self._at += high
            if low < high:
                yield block.slice(low, high)

    def close(self) -> None:
        self._source.close()


class _Objects:
    """A local folder of objects, one sample a key, in the order of their keys."""

    random = True
    skipped: tuple[tuple[str, str], ...] = ()

    def __init__(self, folder: Path, options: SourceOptions) -> None:
        self._listing = tempfile.TemporaryDirectory(prefix="cachetool-")
        where = Path(self._listing.name) / "listing"
        list_source(str(folder), where, options)
        self._source = open_source(str(folder), where, options)
        self.samples = self._source.units
        self.schema = self._source.probe(np.arange(min(self.samples, 4096))).schema

    def blocks(self, start: int, stop: int) -> Iterator[Block]:
        for piece in self._source.read(np.arange(start, stop), schema=self.schema):
            if len(piece.block):
                yield piece.block

    def close(self) -> None:
        self._source.close()
        self._listing.cleanup()
