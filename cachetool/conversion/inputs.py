"""What ``convert`` reads: a cache's dataset, plain files of ours, files that others made, a folder of objects.

Whatever it is, it has a schema, a number of samples and blocks from one sample to another. An input describes itself in
plain values, so that each worker process opens it again for itself.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from cachetool.cache import CacheDir, Shard
from cachetool.cache.layout import Layout
from cachetool.core.block import Block
from cachetool.core.errors import CorruptError, NotFound, UsageError
from cachetool.core.schema import Schema
from cachetool.formats import get_format
from cachetool.formats.base import Reader
from cachetool.formats.shard import check_content, check_samples, open_shard, side_folder, stored_checksums
from cachetool.proc.scratch import listing_scratch
from cachetool.proc.task import Message
from cachetool.sources import Source, SourceOptions, list_source, open_source
from cachetool.sources.doors import FileOptions, FileSource, is_file_input, open_files
from cachetool.sources.guard import GuardedFile
from cachetool.sources.ours import DATASET_FILE, is_ours, open_alone, read_parts, run_of_blocks
from cachetool.sources.readers import reading

__all__ = ["Input", "Survey", "describe", "identity", "open_input", "run_of_blocks", "survey"]


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

    def check(self, start: int, checksums: npt.NDArray[np.uint64]) -> None:
        """Compare the ``checksums``, (fields, samples), of the samples that came from ``start`` on with those that the
        input keeps, if it does. Raises :class:`CorruptError` naming file, sample and field."""
        ...

    def close(self) -> None:
        """Let go of files. May be called twice."""
        ...


def describe(path: Path, options: FileOptions) -> Message:
    """How :func:`open_input` opens ``path`` in another process; raises :class:`UsageError` when it is not there,
    :class:`AccessDenied` when this user may not look at it."""
    with reading(str(path)):
        return _describe(path, options)


def _describe(path: Path, options: FileOptions) -> Message:
    if not path.exists():
        raise UsageError(f"there is no {path}; name a file or a folder")
    if Layout(path).is_cache:
        raise UsageError(f"{path} is a cache; give it by --cache, without INPUT")
    value: Message = {"path": str(path.resolve()), "options": options.to_json()}
    if (path / DATASET_FILE).is_file():
        return {"kind": "parts", **value}
    if is_ours(path):
        return {"kind": "own", **value}
    return {"kind": "files" if is_file_input(path) else "objects", **value}


def open_input(description: Message) -> Input:
    """The input that :func:`describe`, or the cache, described."""
    if description["kind"] == "cache":
        return _Stored.of_cache(description)
    if description["kind"] == "remote":
        return _Objects.of_listing(description)
    path = Path(description["path"])
    if description["kind"] == "parts":
        return _Stored.of_folder(path)
    if description["kind"] == "own":
        return _Stored.of_file(path)
    options = FileOptions.from_json(description["options"])
    if description["kind"] == "objects":
        return _Objects.of_folder(path, options)
    return _Files(open_files(path, options))


@dataclass(frozen=True, slots=True)
class Survey:
    """What is known of an input before its samples are read."""

    schema: Schema
    samples: int
    random: bool
    skipped: tuple[tuple[str, str], ...]
    runs: list[tuple[int, int]]
    """Runs of samples of about as many bytes as were asked for; where samples differ in size, by those in front."""
    size: int
    """Bytes of one sample, by which they are cut."""

    def step(self, part_bytes: int) -> int:
        """Samples of a run of about ``part_bytes``."""
        return min(self.samples, max(1, part_bytes // max(1, self.size)))


def survey(description: Message, part_bytes: int) -> Survey:
    """Look at the input that ``description`` opens. Errors are those of :func:`open_input`, and :class:`NotFound` when
    it holds no samples at all."""
    contents = _survey(description, part_bytes)
    if not contents.samples:
        raise NotFound(f"{_place(description)}: no samples in it")
    return contents


def _place(description: Message) -> str:
    """What an input is called in messages."""
    if description["kind"] == "cache":
        return f"dataset {description['dataset']!r} of cache {description['root']}"
    return str(description.get("shown") or description["path"])


def _survey(description: Message, part_bytes: int) -> Survey:
    if description["kind"] == "remote":  # its store may only be used in a child process, where it was looked at
        schema, samples = Schema.from_json(description["schema"]), int(description["samples"])
        size = schema.fixed_nbytes if schema.is_fixed else int(description["mean"])
        return Survey(schema, samples, True, (), _runs(samples, size, part_bytes), size)
    source = open_input(description)
    try:
        size = source.schema.fixed_nbytes
        if not source.schema.is_fixed and source.samples:
            first = next(source.blocks(0, min(source.samples, 256)))
            size = -(-first.nbytes // len(first))
        cuts = _runs(source.samples, size, part_bytes)
        return Survey(source.schema, source.samples, source.random, source.skipped, cuts, size)
    finally:
        source.close()


def _runs(samples: int, size: int, part_bytes: int) -> list[tuple[int, int]]:
    step = max(1, part_bytes // max(1, size))
    return [(at, min(at + step, samples)) for at in range(0, samples, step)]


def identity(description: Message) -> str:
    """Changes when the input does: its place, size and time of change, and how it is read."""
    if "identity" in description:
        return str(description["identity"])
    facts: list[Any] = [{key: value for key, value in description.items() if key != "version"}]
    path = Path(str(description.get("path") or description["root"]))
    with reading(str(path)):
        names = [path] if path.is_file() else sorted(p for p in path.rglob("*") if p.is_file())
        if description["kind"] != "cache":
            facts += [(str(p), p.stat().st_size, p.stat().st_mtime_ns) for p in names]
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:32]


@dataclass(frozen=True, slots=True)
class _Part:
    """One shard, or one file of ours."""

    samples: int
    name: str
    """Of its data file, for messages."""
    open: Callable[[], Reader | GuardedFile]
    checksums: Callable[[], npt.NDArray[np.uint64]] | None
    """What its samples must hash to; None where nothing says it."""


class _Stored:
    """Shards of a cache, or files of ours outside of any: one reader after another."""

    random = True
    skipped: tuple[tuple[str, str], ...] = ()

    def __init__(self, schema: Schema, parts: list[_Part]) -> None:
        self.schema = schema
        self._parts = parts
        self._starts = np.cumsum([0, *(part.samples for part in parts)])
        self.samples = int(self._starts[-1])

    @classmethod
    def of_cache(cls, description: Message) -> _Stored:
        """The shards of a dataset at a version that the caller leases."""
        with CacheDir(Path(description["root"])) as cache:
            shards = cache.shards(description["dataset"], version=description["version"])
            schema = cache.schema(description["dataset"])
        return cls(schema, [_shard(shard) for shard in shards])

    @classmethod
    def of_folder(cls, folder: Path) -> _Stored:
        """What ``convert --out`` wrote. Raises :class:`CorruptError` when its list of parts cannot be read."""
        schema, parts = read_parts(folder)
        return cls(schema, [_Part(part.samples, str(part.path), part.open, part.checksums) for part in parts])

    @classmethod
    def of_file(cls, path: Path) -> _Stored:
        """One file of ours, wherever it came from."""
        with open_alone(path) as reader:
            schema, samples = reader.schema, reader.samples
        has_checksums = side_folder(path).is_dir()  # it still lies where it was written
        checksums = (lambda: stored_checksums(side_folder(path), schema, links=True)) if has_checksums else None
        return cls(schema, [_Part(samples, str(path), lambda: open_alone(path), checksums)])

    def blocks(self, start: int, stop: int) -> Iterator[Block]:
        for part, low, high in self._inside(start, stop):
            with part.open() as reader:
                yield from run_of_blocks(reader, low, high)

    def check(self, start: int, checksums: npt.NDArray[np.uint64]) -> None:
        done = 0
        for part, low, high in self._inside(start, start + checksums.shape[1]):
            computed, done = checksums[:, done : done + high - low], done + high - low
            if part.checksums is not None:
                expected = part.checksums()[:, low:high]
                check_samples(computed, expected, self.schema, name=part.name, first=low)

    def _inside(self, start: int, stop: int) -> Iterator[tuple[_Part, int, int]]:
        """The parts that hold samples ``start`` to ``stop``, and which of each part these are."""
        first = int(np.searchsorted(self._starts, start, side="right")) - 1
        for number in range(max(0, first), len(self._parts)):
            low, high = int(self._starts[number]), int(self._starts[number + 1])
            if low >= stop:
                return
            yield self._parts[number], max(start, low) - low, min(stop, high) - low

    def close(self) -> None:
        pass


def _shard(shard: Shard) -> _Part:
    kind = get_format(shard.format)
    return _Part(
        shard.samples,
        str(shard.path / f"data{kind.suffix}"),
        lambda: open_shard(shard.path, kind, shard.schema, digest=shard.digest),
        lambda: check_content(shard.path, shard.schema, shard.content),
    )


class _Files:
    """Files that others made."""

    def __init__(self, source: FileSource) -> None:
        self._source = source
        self.schema, self.samples, self.skipped = source.schema, source.samples, source.skipped
        self._read = getattr(source, "read", None)
        self.random = self._read is not None
        self._running: Iterator[Block] | None = None
        self._at = 0
        self._remaining: Block | None = None

    def blocks(self, start: int, stop: int) -> Iterator[Block]:
        if self._read is not None:
            for block in run_of_blocks(self._source, start, stop):  # type: ignore[arg-type]  # it has all that is used
                yield block.with_plain_bools()
            return
        if self._running is None or start < self._at:
            self._running, self._at, self._remaining = self._source.blocks(), 0, None
        while self._at < stop:
            current = self._remaining if self._remaining is not None else next(self._running, None)
            if current is None:
                raise CorruptError(f"{self._source.path} has {self._at} samples, {self.samples} were counted")
            low, high = max(start - self._at, 0), min(stop - self._at, len(current))
            self._remaining = current.slice(high, len(current)) if high < len(current) else None
            self._at += high
            if low < high:
                yield current.slice(low, high).with_plain_bools()

    def check(self, start: int, checksums: npt.NDArray[np.uint64]) -> None:
        pass

    def close(self) -> None:
        self._source.close()


class _Objects:
    """A folder of objects, one sample a key, in the order of their keys."""

    random = True
    skipped: tuple[tuple[str, str], ...] = ()

    def __init__(self, source: Source, schema: Schema) -> None:
        self._source, self.schema, self.samples = source, schema, source.units
        self._kept = ExitStack()

    @classmethod
    def of_folder(cls, folder: Path, options: SourceOptions) -> _Objects:
        """A local one, listed now."""
        with ExitStack() as stack:
            where = stack.enter_context(listing_scratch()) / "listing"
            list_source(str(folder), where, replace(options, read_as="objects"))
            source = open_source(str(folder), where, options)
            opened = cls(source, source.probe(np.arange(min(source.units, 4096))).schema)
            opened._kept = stack.pop_all()
        return opened

    @classmethod
    def of_listing(cls, description: Message) -> _Objects:
        """A remote one, as :mod:`cachetool.conversion.remote` listed it; in a child process."""
        options = FileOptions.from_json(description["options"])
        source = open_source(description["url"], Path(description["listing"]), options)
        return cls(source, Schema.from_json(description["schema"]))

    def blocks(self, start: int, stop: int) -> Iterator[Block]:
        for piece in self._source.read(np.arange(start, stop), schema=self.schema):
            if len(piece.block):
                yield piece.block.with_plain_bools()

    def check(self, start: int, checksums: npt.NDArray[np.uint64]) -> None:
        pass

    def close(self) -> None:
        self._source.close()
        self._kept.close()
