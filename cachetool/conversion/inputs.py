"""What ``convert`` reads: a cache's dataset, or any source that ``pull`` reads, in order.

Whatever it is, it has a schema, a number of samples and blocks from one sample to another. An input describes itself in
plain values, so that each worker process opens it again for itself. Its listing lies in a hidden folder beside the
output, which goes with the end of the conversion. A source elsewhere is listed by a child process, since its store may
be used in these alone::

    .OUT.input-3f2a/  listing/            locked while it is in use: what a killed process left is swept by the next one

The identity of an input is its place, sizes and ETags: an interrupted conversion goes on, and a changed object begins
anew.
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

PROBED = 4096
"""A folder of objects of this machine gets its schema from the first of so many..."""
PROBED_ELSEWHERE = 64
"""...and a remote one from so many, spread over all."""
_REPORT_SECONDS = 0.2


class Input(Protocol):
    """Samples in order. Used by one thread of one process."""

    schema: Schema
    samples: int

    def blocks(self, start: int, stop: int) -> Iterator[Block]:
        """Samples ``start`` to ``stop`` in blocks of about 8 MB."""
        ...

    def check(self, start: int, checksums: npt.NDArray[np.uint64]) -> None:
        """Compare the ``checksums``, (fields, samples), of the samples that came from ``start`` on with those that the
        input keeps, if it does. Raises :class:`CorruptError` naming file, sample and field."""
        ...

    def left_out(self) -> list[tuple[str, str]]:
        """Samples of the blocks since the last call that could not be used: key and reason."""
        ...

    def close(self) -> None:
        """Let go of files. May be called twice."""
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
    """How :func:`open_input` opens a source in another process; good inside of the ``with`` block.

    ``beside`` is the output; None where there is none: then the listing lies where temporary files go. ``skip_bad``:
    samples that cannot be used are left out. Raises :class:`UsageError` for a cache, and the errors of
    :func:`cachetool.sources.list_source`.
    """
    url, options = with_glob(parse_location(source, what="INPUT"), options)
    check_place(url)
    local = split_url(url)[0] in ("", "file")
    if local:
        path = local_path(url).absolute()
        try:
            there = path.exists()
        except PermissionError as error:
            raise AccessDenied(f"{printable(str(source))!r}: permission denied") from error
        if not there and braces_of(url) is None:
            raise UsageError(f"there is no {source}; name a file or a folder")
        if Layout(path).is_cache:
            raise UsageError(f"{path} is a cache; give it by --cache, without INPUT")
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
            yield {**look(_Reporting(report), **arguments), "path": seen}
            return
        task = Task("cachetool.conversion.inputs:look", arguments)
        yield LocalEngine().run([task], lambda _, message: report(Progress(**message)))[0]


@contextlib.contextmanager
def _folder(beside: Path | None) -> Iterator[Path]:
    """A new folder beside ``beside``, or where temporary files go when nothing can be made there."""
    with contextlib.ExitStack() as stack:
        try:
            if beside is None:
                raise PermissionError
            parent = beside.absolute().parent
            make_missing(parent)
            folder = stack.enter_context(scratch(parent, f".{shortened(beside.name)}.input-"))
        except (PermissionError, NotADirectoryError, FileExistsError):  # --out says why, where it is made
            folder = stack.enter_context(scratch(Path(tempfile.gettempdir()), "cachetool-input-"))
        yield folder


def look(channel: Channel, *, url: str, listing: str, options: Message, skip_bad: bool) -> Message:
    """The task: list what is at ``url``, look at all that its schema needs, and give the description."""
    parsed, folder, reporter = SourceOptions.from_json(options), Path(listing), _Reporter(channel)
    progress = reporter.listed
    list_source(url, folder, parsed, progress=progress, survey="all", skip_bad=skip_bad)
    parsed = numbered(parsed, [folder])
    options = parsed.to_json()
    with contextlib.closing(open_source(url, folder, parsed, number=False)) as source:
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
    text = json.dumps([canonical(url), options, content], sort_keys=True)
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()[:32]


class _Reporting:
    """The channel of a task that runs in this process."""

    def __init__(self, report: Report) -> None:
        self._report = report

    def send(self, message: Message) -> None:
        self._report(Progress(**message))


class _Reporter:
    """Progress to the starter, a few times a second."""

    def __init__(self, channel: Channel) -> None:
        self._channel, self._next = channel, 0.0

    def listed(self, count: int) -> None:
        """So many objects were seen."""
        if time.monotonic() >= self._next:
            self._next = time.monotonic() + _REPORT_SECONDS
            self._channel.send({"phase": "list", "done": count, "total": None})


def open_input(description: Message) -> Input:
    """The input that :func:`look`, or the cache, described; a source in a child process only."""
    return _Stored.of_cache(description) if description["kind"] == "cache" else _Sourced(description)


@dataclass(frozen=True, slots=True)
class Survey:
    """What is known of an input before its samples are read."""

    schema: Schema
    samples: int
    random: bool
    """Whether any run of samples can be read without those before it; else one worker reads all in order."""
    skipped: tuple[tuple[str, str], ...]
    """What is there but not taken: name and reason."""
    left_out_counts: Mapping[str, int]
    """How many objects are not taken, by reason."""
    runs: list[tuple[int, int]]
    """Runs of samples of about as many bytes as were asked for; where samples differ in size, by those in front."""


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
    return str(description["shown"])


def _survey(description: Message, part_bytes: int) -> Survey:
    if description["kind"] != "cache":  # its store may only be used in a child process, where it was looked at
        schema, samples = Schema.from_json(description["schema"]), int(description["samples"])
        size = schema.fixed_nbytes if schema.is_fixed else int(description["mean"])
        skipped = tuple((str(name), str(why)) for name, why in description["skipped"])
        counts, runs = description["left_out_counts"], _runs(samples, size, part_bytes)
        return Survey(schema, samples, not description["in_order"], skipped, counts, runs)
    source = open_input(description)
    try:
        size = source.schema.fixed_nbytes
        if not source.schema.is_fixed and source.samples:
            first = next(source.blocks(0, min(source.samples, 256)))
            size = -(-first.nbytes // len(first))
        cuts = _runs(source.samples, size, part_bytes)
        return Survey(source.schema, source.samples, True, (), {}, cuts)
    finally:
        source.close()


def _runs(samples: int, size: int, part_bytes: int) -> list[tuple[int, int]]:
    step = max(1, part_bytes // max(1, size))
    return [(at, min(at + step, samples)) for at in range(0, samples, step)]


def identity(description: Message) -> str:
    """Changes when the input does: its place, size and time of change, and how it is read."""
    if "identity" in description:
        return str(description["identity"])
    facts = {key: value for key, value in description.items() if key != "version"}
    return hashlib.sha256(json.dumps([facts], sort_keys=True).encode()).hexdigest()[:32]


@dataclass(frozen=True, slots=True)
class _Part:
    """One shard."""

    samples: int
    name: str
    """Of its data file, for messages."""
    open: Callable[[], Reader]
    checksums: Callable[[], npt.NDArray[np.uint64]]
    """What its samples must hash to."""


class _Stored:
    """Shards of a cache: one reader after another."""

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


class _Sourced:
    """A source: rows of files, or a folder of objects, one sample a key, in the order of their keys."""

    def __init__(self, description: Message) -> None:
        """As :func:`look` described it."""
        options = SourceOptions.from_json(description["options"])
        self.schema, self.samples = Schema.from_json(description["schema"]), int(description["samples"])
        self._source: Source = open_source(description["url"], Path(description["listing"]), options, number=False)
        self._skip_bad, self._left_out = bool(description["skip_bad"]), list[tuple[str, str]]()

    def blocks(self, start: int, stop: int) -> Iterator[Block]:
        reading = self._source.read(np.arange(start, stop), schema=self.schema, skip_bad=self._skip_bad)
        with contextlib.closing(reading) as pieces, naming_skip(skip_bad=self._skip_bad, has_refresh=False):
            for piece in pieces:
                self._left_out += [(skipped.key, skipped.reason) for skipped in piece.skipped]
                if len(piece.block):
                    yield piece.block.with_plain_bools()

    def left_out(self) -> list[tuple[str, str]]:
        left_out, self._left_out = self._left_out, []
        return left_out

    def check(self, start: int, checksums: npt.NDArray[np.uint64]) -> None:
        if (check := getattr(self._source, "check", None)) is not None:
            check(start, checksums)

    def close(self) -> None:
        self._source.close()
