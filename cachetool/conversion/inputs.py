"""The input of ``convert``: a cache's dataset, or any source that ``pull`` reads, in order.

An input has a schema, a number of samples, and blocks between two samples. It describes itself in plain values, so that
each worker process can open it again. Its listing lies in a hidden folder beside the output, which is deleted at the
end of the conversion. A child process lists a remote source, because only child processes may use a store::

    .OUT.input-3f2a/  listing/            locked while it is in use; the next run deletes the folder of a killed process

The identity of an input is its place, sizes and ETags. So an interrupted conversion continues, and a changed object
starts a new one.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from cachetool.cache import CacheDir, Shard
from cachetool.cache.layout import Layout
from cachetool.core.block import Block
from cachetool.core.errors import AccessDenied, NotFound, UsageError
from cachetool.core.progress import Progress, Report, silent
from cachetool.core.schema import Schema
from cachetool.formats import get_format
from cachetool.formats.base import Reader
from cachetool.formats.shard import check_content, check_samples, open_shard
from cachetool.proc.disk import parse_location
from cachetool.proc.folders import make_missing, shortened
from cachetool.proc.parent import LocalEngine
from cachetool.proc.scratch import scratch
from cachetool.proc.task import Channel, Message, Task
from cachetool.sources.base import Source
from cachetool.sources.blame import naming_skip
from cachetool.sources.braces import braces_of
from cachetool.sources.classes import numbered
from cachetool.sources.file_opening import run_of_blocks
from cachetool.sources.globs import with_glob
from cachetool.sources.options import SourceOptions
from cachetool.sources.registry import check_place, list_source, open_source
from cachetool.stores import canonical, local_path, split_url
from cachetool.stores.redact import printable

__all__ = ["Input", "Survey", "described", "identity", "look", "open_input", "survey"]

# Reading an object of a disk is cheap, so many are read. A request to a store takes milliseconds, so few are, but from
# all over the folder: its first objects are often alike.
PROBED = 4096
"""Number of objects, the first ones, that decide the schema of a folder on this machine."""
PROBED_ELSEWHERE = 64
"""Number of objects, spread over all, that decide the schema of a remote folder."""
_REPORT_SECONDS = 0.2
"""Seconds between two messages to the process that prints the progress."""


class Input(Protocol):
    """Samples in order. One thread of one process uses the object."""

    schema: Schema
    samples: int

    def blocks(self, start: int, stop: int) -> Iterator[Block]:
        """Yield samples ``start`` to ``stop - 1`` in blocks of about 8 MB."""
        ...

    def check(self, start: int, checksums: npt.NDArray[np.uint64]) -> None:
        """Compare ``checksums``, (fields, samples), of the samples from ``start`` on with those that the input stores,
        if any.
        Raises :class:`CorruptError` naming file, sample and field.
        """
        ...

    def left_out(self) -> list[tuple[str, str]]:
        """Return key and reason of the unusable samples in the blocks since the last call."""
        ...

    def close(self) -> None:
        """Close files. May be called twice."""
        ...


@contextlib.contextmanager
def described(
    source: str | Path,
    options: SourceOptions,
    *,
    beside: Path | None = None,
    report: Report = silent,
    skip_bad: bool = False,
) -> Iterator[Message]:
    """Yield a description with which :func:`open_input` opens a source in any process, inside of the ``with`` block.

    ``beside`` is the output. None: the listing goes into the folder for temporary files. ``skip_bad``: leave out
    unusable samples. Raises :class:`UsageError` for a cache, and the errors of :func:`cachetool.sources.list_source`.
    """
    url, options = with_glob(parse_location(source, what="INPUT"), options)
    check_place(url)
    local = split_url(url)[0] in ("", "file")
    if local:
        # Absolute, because worker processes and other machines may have another working directory.
        path = local_path(url).absolute()
        try:
            there = path.exists()
        except PermissionError as error:
            raise AccessDenied(f"{printable(str(source))!r}: permission denied") from error
        # A path with braces names several places and does not exist by itself.
        if not there and braces_of(url) is None:
            raise UsageError(f"{source} does not exist; name a file or a folder")
        if Layout(path).is_cache:
            raise UsageError(f"{path} is a cache; name it with --cache, not as INPUT")
        url = str(path)
    with _folder(beside) as folder:
        arguments: dict[str, Any] = {
            "url": url,
            "listing": str(folder / "listing"),
            "options": options.to_json(),
            "skip_bad": skip_bad,
        }
        if local:
            braces = braces_of(url)
            seen = url if braces is None else str(local_path(braces.place))
            # A local source needs no store, so the list is made in this process and no child has to start.
            yield {**look(_Reporting(report), **arguments), "path": seen}
            return
        task = Task("cachetool.conversion.inputs:look", arguments)
        yield LocalEngine().run([task], lambda _, message: report(Progress(**message)))[0]


@contextlib.contextmanager
def _folder(beside: Path | None) -> Iterator[Path]:
    """Yield a new folder beside ``beside``, or in the folder for temporary files if none can be made there."""
    with contextlib.ExitStack() as stack:
        try:
            if beside is None:
                raise PermissionError
            parent = beside.absolute().parent
            make_missing(parent)
            folder = stack.enter_context(scratch(parent, f".{shortened(beside.name)}.input-"))
        # The folder of the output cannot be used. The code that makes --out reports this with the right words.
        except (PermissionError, NotADirectoryError, FileExistsError):
            folder = stack.enter_context(scratch(Path(tempfile.gettempdir()), "cachetool-input-"))
        yield folder


def look(channel: Channel, *, url: str, listing: str, options: Message, skip_bad: bool) -> Message:
    """List the objects at ``url``, read as many as the schema needs, and return the description. This is a task."""
    parsed, folder, reporter = SourceOptions.from_json(options), Path(listing), _Reporter(channel)
    progress = reporter.listed
    list_source(url, folder, parsed, progress=progress, survey="all", skip_bad=skip_bad)
    parsed = numbered(parsed, [folder])
    options = parsed.to_json()
    with contextlib.closing(open_source(url, folder, parsed, number=False)) as source:
        # Only sources of files compare checksums, so the method tells them from folders of objects.
        objects = not hasattr(source, "check")
        units = np.arange(min(source.units, PROBED if objects else 1), dtype=np.int64)
        if objects and split_url(url)[0] not in ("", "file"):
            units = np.unique(np.linspace(0, source.units - 1, PROBED_ELSEWHERE).astype(np.int64))
        with naming_skip(skip_bad=skip_bad, has_refresh=False):
            probe = source.probe(units, skip_bad=skip_bad)
        return {
            "kind": "objects" if objects else "files",
            "url": url,
            "shown": source.url,
            "listing": listing,
            "options": options,
            "samples": source.samples,
            "schema": probe.schema.to_json(),
            "mean": probe.mean_bytes,
            "in_order": getattr(source, "in_order", False),
            "skipped": getattr(source, "skipped", ()),
            "left_out_counts": getattr(source, "left_out_counts", {}),
            "skip_bad": skip_bad,
            "identity": _identity(url, options, source.identity),
        }


def _identity(url: str, options: Message, content: object) -> str:
    """Return a digest that changes when the source or the way of reading it changes."""
    # surrogateescape: a file name may have bytes that are not UTF-8.
    text = json.dumps([canonical(url), options, content], sort_keys=True)
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()[:32]


class _Reporting:
    """The channel of a task that runs in this process."""

    def __init__(self, report: Report) -> None:
        self._report = report

    def send(self, message: Message) -> None:
        self._report(Progress(**message))


class _Reporter:
    """A sender of progress to the starting process, a few times a second."""

    def __init__(self, channel: Channel) -> None:
        self._channel, self._next = channel, 0.0

    def listed(self, count: int) -> None:
        """Report that ``count`` objects were listed."""
        if time.monotonic() >= self._next:
            self._next = time.monotonic() + _REPORT_SECONDS
            self._channel.send({"phase": "list", "done": count, "total": None})


def open_input(description: Message) -> Input:
    """Open the input that :func:`look`, or the cache, described. A source is opened in child processes only."""
    return _Stored.of_cache(description) if description["kind"] == "cache" else _Sourced(description)


@dataclass(frozen=True, slots=True)
class Survey:
    """The facts about an input before its samples are read."""

    schema: Schema
    samples: int
    random: bool
    """True if any run of samples can be read without those before it. Otherwise one worker reads all in order."""
    skipped: tuple[tuple[str, str], ...]
    """Objects that are not read: name and reason."""
    left_out_counts: Mapping[str, int]
    """Number of objects that are not read, by reason."""
    runs: list[tuple[int, int]]
    """Runs of samples, each of about the requested bytes. If samples differ in size, the first ones decide."""


def survey(description: Message, part_bytes: int) -> Survey:
    """Return the facts about the input that ``description`` opens.

    Raises the errors of :func:`open_input`, and :class:`NotFound` when the input has no samples.
    """
    contents = _survey(description, part_bytes)
    if not contents.samples:
        raise NotFound(f"{_place(description)} has no samples")
    return contents


def _place(description: Message) -> str:
    """Return the name of an input for messages."""
    if description["kind"] == "cache":
        return f"dataset {description['dataset']!r} of cache {description['root']}"
    return str(description["shown"])


def _survey(description: Message, part_bytes: int) -> Survey:
    # The source was looked at when it was described. Its store may be used in a child process only, so it is not opened
    # again here.
    if description["kind"] != "cache":
        schema, samples = Schema.from_json(description["schema"]), int(description["samples"])
        size = schema.fixed_nbytes if schema.is_fixed else int(description["mean"])
        skipped = tuple((str(name), str(why)) for name, why in description["skipped"])
        counts, runs = description["left_out_counts"], _runs(samples, size, part_bytes)
        return Survey(schema, samples, not description["in_order"], skipped, counts, runs)
    source = open_input(description)
    try:
        size = source.schema.fixed_nbytes
        if not source.schema.is_fixed and source.samples:
            # The mean of the first 256 samples decides the length of a file. Equal counts make parallel workers and
            # resuming simple (docs/explanation/decisions.md).
            first = next(source.blocks(0, min(source.samples, 256)))
            size = -(-first.nbytes // len(first))
        cuts = _runs(source.samples, size, part_bytes)
        return Survey(source.schema, source.samples, True, (), {}, cuts)
    finally:
        source.close()


def _runs(samples: int, size: int, part_bytes: int) -> list[tuple[int, int]]:
    """Return runs of samples of about ``part_bytes`` bytes each, given the bytes of one sample."""
    step = max(1, part_bytes // max(1, size))
    return [(at, min(at + step, samples)) for at in range(0, samples, step)]


def identity(description: Message) -> str:
    """Return a digest of the input's place, sizes, time of change and options. It changes when the input does."""
    if "identity" in description:
        return str(description["identity"])
    # The version of the catalog grows with every commit, also of other datasets. The samples are named by their content
    # digest.
    facts = {key: value for key, value in description.items() if key != "version"}
    return hashlib.sha256(json.dumps([facts], sort_keys=True).encode()).hexdigest()[:32]


@dataclass(frozen=True, slots=True)
class _Part:
    """One shard of an input."""

    samples: int
    name: str
    """Path of the data file, for messages."""
    open: Callable[[], Reader]
    checksums: Callable[[], npt.NDArray[np.uint64]]
    """Function that returns the stored checksums of the samples."""


class _Stored:
    """The shards of a cache, opened one after another."""

    def __init__(self, schema: Schema, parts: list[_Part]) -> None:
        self.schema = schema
        self._parts = parts
        self._starts = np.cumsum([0, *(part.samples for part in parts)])
        self.samples = int(self._starts[-1])

    @classmethod
    def of_cache(cls, description: Message) -> _Stored:
        """Return the shards of a dataset at a version that the caller has leased."""
        with CacheDir(Path(description["root"])) as cache:
            shards = cache.shards(description["dataset"], version=description["version"])
            schema = cache.schema(description["dataset"])
        return cls(schema, [_shard(shard) for shard in shards])

    def blocks(self, start: int, stop: int) -> Iterator[Block]:
        for part, low, high in self._inside(start, stop):
            with part.open() as reader:
                yield from run_of_blocks(reader, low, high)

    def check(self, start: int, checksums: npt.NDArray[np.uint64]) -> None:
        done = 0
        for part, low, high in self._inside(start, start + checksums.shape[1]):
            computed, done = checksums[:, done : done + high - low], done + high - low
            check_samples(computed, part.checksums()[:, low:high], self.schema, name=part.name, first=low)

    def left_out(self) -> list[tuple[str, str]]:
        return []

    def _inside(self, start: int, stop: int) -> Iterator[tuple[_Part, int, int]]:
        """Yield the parts with samples ``start`` to ``stop - 1``, and the first and last sample inside of each."""
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


class _Sourced:
    """A source in the order of its keys: rows of files, or a folder of objects with one sample a key."""

    def __init__(self, description: Message) -> None:
        """Open the source that :func:`look` described."""
        options = SourceOptions.from_json(description["options"])
        self.schema, self.samples = Schema.from_json(description["schema"]), int(description["samples"])
        self._source: Source = open_source(description["url"], Path(description["listing"]), options, number=False)
        self._skip_bad, self._left_out = bool(description["skip_bad"]), list[tuple[str, str]]()

    def blocks(self, start: int, stop: int) -> Iterator[Block]:
        reading = self._source.read(np.arange(start, stop), schema=self.schema, skip_bad=self._skip_bad)
        with contextlib.closing(reading) as pieces, naming_skip(skip_bad=self._skip_bad, has_refresh=False):
            for piece in pieces:
                self._left_out += [(skipped.key, skipped.reason) for skipped in piece.skipped]
                # A reading whose samples were all left out has an empty block, which a writer does not need.
                if len(piece.block):
                    yield piece.block.with_plain_bools()

    def left_out(self) -> list[tuple[str, str]]:
        left_out, self._left_out = self._left_out, []
        return left_out

    def check(self, start: int, checksums: npt.NDArray[np.uint64]) -> None:
        # Folders of objects store no checksums, so their sources have no such method.
        if (check := getattr(self._source, "check", None)) is not None:
            check(start, checksums)

    def close(self) -> None:
        self._source.close()
