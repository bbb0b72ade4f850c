"""Parameters and result of one pull. The parameters are fixed before the workers start."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Self

from cachetool.cache import SourceRow
from cachetool.core.permutation import part_size
from cachetool.core.schema import Schema
from cachetool.formats.base import Format
from cachetool.formats.compression import compression_of
from cachetool.proc.task import Message, Task
from cachetool.pull.options import PullOptions

__all__ = [
    "AT_ITS_END",
    "ListingChange",
    "PrepareArguments",
    "Prepared",
    "PullJob",
    "PullResult",
    "WorkerArguments",
    "too_many",
    "why_ended",
]

TOLERATED = 0.01
"""Share of draws that ``--on-error skip`` may leave out, if that is more than :data:`TOLERATED_FEW` draws."""
# With 1 % alone, one bad object in fifty would stop a pull that was told to skip bad objects.
TOLERATED_FEW = 10
"""Draws that ``--on-error skip`` may always leave out."""
AT_ITS_END = "source at its end"
"""The reason of a pull that drew the whole source."""


@dataclass(frozen=True, slots=True)
class ListingChange:
    """The difference between a refreshed listing and the one before it."""

    added: int
    """Units that are new, or have other content."""
    vanished: int
    """Units that are gone, or have other content."""
    names: tuple[str, ...]
    """Keys of the first samples that vanished."""
    segments: tuple[tuple[str, int, str], ...]
    """Name of each new segment, with the units and the digest of the listing that includes it; empty if nothing
    changed."""

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Self:
        """Return the change that ``asdict`` described."""
        return cls(**{**value, "names": tuple(value["names"]), "segments": tuple(map(tuple, value["segments"]))})


@dataclass(frozen=True, slots=True)
class Prepared:
    """The facts about a source that the listing and the first samples gave."""

    url: str
    """The URL without user info and query."""
    identity: str
    units: int
    samples: int
    schema: Schema
    mean_bytes: int
    """Mean bytes of the values of a sample."""
    per_unit: int
    """Samples in a unit."""
    left_out: tuple[tuple[str, str], ...]
    """Keys that belong to no sample, with the reason."""
    left_out_counts: Mapping[str, int]
    """Number of keys that belong to no sample, by reason."""
    complete: bool
    """True when the listing is complete, so that no more segments follow."""
    change: ListingChange | None
    """The result of ``--refresh``; None without it."""
    segments: tuple[int, ...]
    """Numbers of units at which the listing has grown."""
    parts: tuple[tuple[int, int, int], ...]
    """The parts that the cache is to draw: number, draws in a pass, and the draws that are asked for."""
    compression: str | None
    """The compression that the first samples are worth, if they were asked for it; otherwise None."""

    def to_json(self) -> Message:
        """Return plain values for JSON."""
        change = None if self.change is None else asdict(self.change)
        plain = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return {**plain, "schema": self.schema.to_json(), "change": change}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Self:
        """Return the value that :meth:`to_json` described."""
        change = value["change"]
        return cls(
            **{
                **value,
                "schema": Schema.from_json(value["schema"]),
                "left_out": tuple((name, why) for name, why in value["left_out"]),
                "change": None if change is None else ListingChange.from_json(change),
                "segments": tuple(value["segments"]),
                "parts": tuple((part, size, limit) for part, size, limit in value["parts"]),
            }
        )


@dataclass(frozen=True, slots=True)
class PrepareArguments:
    """JSON values for :func:`cachetool.pull.listing.prepare`."""

    url: str
    listing: str
    """The folder of the listing. The listing is written unless it exists."""
    options: Message
    """The source options, which say how samples are made of objects."""
    order: Message
    """Arguments of :meth:`Source.order`."""
    units: int | None
    """Number of units that the cache knows; None for a new source."""
    skip_bad: bool
    skip_keys: bool
    """True to leave out, by name, keys that no request can name."""
    refresh: str | None
    """The folder for a new listing and its differences; None without ``--refresh``."""
    early: int | None
    """Objects in the first segment with ``--start-early``; None to list all objects."""
    pace: Message | None
    """Arguments of :class:`RateLimit`."""
    looked: str | None
    """The folder that keeps the bytes of the samples that are read for the schema."""
    cut: int
    """Number of parts that the source is cut into."""
    parts: tuple[int, ...]
    """The parts that the cache is to draw."""
    samples: int | None
    """Number of first samples of the source that are asked for, over all parts; None for all."""
    shared: str | None
    """The folder of the listing that all nodes use; None without one."""
    probed: str | None
    """The format whose compression is tried on the first samples; None without ``--compression auto``."""


@dataclass(frozen=True, slots=True)
class WorkerArguments:
    """JSON values for :func:`cachetool.pull.worker.draw`."""

    root: str
    """The folder of the cache."""
    url: str
    options: Message
    """The source options, which say how samples are made of objects."""
    job: str
    source: str
    dataset: str
    format: str
    compression: str | None
    schema: list[Message]
    shard_bytes: int
    units_per_shard: int
    per_unit: int
    room: Message
    """Arguments of :class:`~cachetool.cache.Room`."""
    follow: bool
    reopened: bool
    skip_bad: bool
    pace: Message | None
    """Arguments of :class:`RateLimit`."""
    first_shard_in: float | None = None
    """Seconds until the first shard is closed with the samples that it has; None: when it is full."""
    looked: str | None = None
    """The folder with the bytes of the samples that were read for the schema; None if there is none."""


@dataclass(frozen=True, slots=True)
class PullJob:
    """The parameters of one pull."""

    url: str
    options: PullOptions
    id: str
    """The id of the source."""
    kind: Format
    shard_bytes: int
    per_shard: int
    """Draws in a shard."""
    per_unit: int
    """Samples in a draw."""
    prepared: Prepared
    """The facts from the listing and the first samples."""
    pace: Message | None
    began: float
    looked: str | None
    """The folder with the bytes of the samples that were read for the schema; None if there is none."""
    is_new: bool
    """True if the dataset has no shard yet."""
    cut: int
    """Number of parts that the source is cut into."""

    @property
    def schema(self) -> Schema:
        """The schema of the samples."""
        return self.prepared.schema

    @property
    def wanted(self) -> int | None:
        """New draws that are asked for; None for all, and if :attr:`upto` counts."""
        return None if self.upto is not None else self._asked

    @property
    def upto(self) -> int | None:
        """First draws of the source that are asked for, of which the parts in this cache have some; None if
        :attr:`wanted` counts."""
        # With parts, N counts from the beginning of the source for all nodes together. Each node then knows its share
        # without asking the others.
        return self._asked if self.cut > 1 or self.options.part is not None else None

    @property
    def _asked(self) -> int | None:
        # Rounded up: a draw is the smallest amount that can be fetched, and no fewer samples than asked for may come.
        return None if self.options.samples is None else -(-self.options.samples // self.per_unit)

    def limits(self, source: SourceRow) -> dict[int, int]:
        """Return the number of draws that are asked for of each part of ``source``."""
        # The source grew since the listing process looked. A source that grows has objects, and there a unit is one
        # draw.
        if self.upto is not None and source.units != self.prepared.units:
            return {
                part.number: part_size(min(self.upto, source.units), part.number, self.cut) for part in source.parts
            }
        return {part: limit for part, _, limit in self.prepared.parts}

    def task(self, root: str, job: str, **changes: Any) -> Task:
        """Return the task of a worker, for a job of the cache in the folder ``root``.

        ``changes`` are fields of :class:`WorkerArguments`.
        """
        options = self.options
        after = options.first_shard_seconds if self.is_new else None
        arguments = WorkerArguments(
            root=root,
            url=self.url,
            options=options.source.to_json(),
            job=job,
            source=self.id,
            dataset=options.dataset,
            format=self.kind.name,
            compression=compression_of(self.kind),
            schema=self.schema.to_json(),
            shard_bytes=self.shard_bytes,
            units_per_shard=self.per_shard,
            per_unit=self.per_unit,
            room=asdict(replace(options.room, job=job)),
            follow=options.follow,
            reopened=options.reopened,
            skip_bad=options.on_error == "skip",
            pace=self.pace,
            # The seconds since the pull began are subtracted: the user waits for the first samples from the start of
            # the command.
            first_shard_in=None if after is None else max(0.0, after - (time.monotonic() - self.began)),
            looked=self.looked,
        )
        return Task("cachetool.pull.worker:draw", asdict(replace(arguments, **changes)))


@dataclass(frozen=True, slots=True)
class PullResult:
    """The result of a pull."""

    source: str
    """The source, without user info and query."""
    dataset: str
    """Name of the dataset."""
    format: str
    """Format of the shards."""
    seed: int
    """The seed that decided the order of the draw."""
    samples: int
    """Number of samples that this pull committed."""
    skipped: int
    """Number of draws that could not be used."""
    skipped_examples: tuple[dict[str, str], ...]
    """The first 20 of them: key and reason."""
    bytes: int
    """Bytes of the values of the committed samples."""
    fetched: int
    """Bytes that came over the network."""
    shards: int
    """Number of shards that this pull committed."""
    evicted_shards: int
    """Number of shards that were evicted for this pull; evictions for other pulls do not count."""
    seconds: float
    """Duration of the pull in seconds."""
    pass_complete: bool
    """True if every sample of the source was drawn in this pass."""
    reason: str
    """Why the pull stopped: ``done``, ``source at its end`` or ``cache full``."""
    warning: str = ""
    """A warning that more draws of the pass could not be used than may be skipped, where an earlier pull met some of
    them; otherwise empty."""
    left_out: tuple[tuple[str, str], ...] = ()
    """Objects, arrays and values of the source that are in no sample although no option left them out: name and reason;
    the first 100."""
    left_out_counts: Mapping[str, int] = field(default_factory=dict)
    """Number of objects of the source that are in no sample, by reason; objects that ``--include`` and ``--exclude``
    leave out, and hidden ones, count too."""
    notes: tuple[str, ...] = ()
    """Decisions about how the source is read, each with the option that changes the decision."""
    of_objects: bool = True
    """True if the source is a folder of objects, which ``refresh`` lists again; False for files of many samples."""
    added: int = 0
    """Number of units that a refresh added."""
    vanished: int = 0
    """Number of units that a refresh did not find any more, or with another content."""
    vanished_examples: tuple[str, ...] = ()
    """Keys of the first 20 samples that vanished."""
    listing: str = ""
    """Digest of the listing, the same on all nodes that share the source."""
    cut: int = 1
    """Number of parts that the source is cut into."""
    parts: tuple[int, ...] = ()
    """The parts of the source that this cache draws."""
    released: int = 0
    """Number of samples of other parts that ``--repart`` removed."""
    nodes: tuple[dict[str, Any], ...] = ()
    """Rows of a pull over several nodes, one for each node: node, cache, samples, shards, bytes, fetched,
    evicted_shards, state (empty, ``full`` or ``lost``)."""

    def as_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return asdict(self)


def too_many(unused: int, draw_count: int) -> bool:
    """Return True if ``unused`` of ``draw_count`` draws are more than may be left out."""
    return unused > max(TOLERATED_FEW, TOLERATED * draw_count)


def why_ended(samples: int, wanted: int | None, *, complete: bool, full: bool) -> str:
    """Return the value of :attr:`PullResult.reason`."""
    if wanted is not None and samples >= wanted:
        return "done"
    if complete:
        return AT_ITS_END
    return "cache full" if full else "done"
