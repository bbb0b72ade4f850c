"""The parameters of one pull, fixed before its workers start, and its result: the same wherever its shards go."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Self

from cachetool.cache import SourceRow
from cachetool.core.permutation import part_size
from cachetool.core.schema import Schema
from cachetool.formats.base import Format
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
"""Share of draws that ``--on-error skip`` may leave out, once it is more than :data:`TOLERATED_FEW`."""
TOLERATED_FEW = 10
AT_ITS_END = "source at its end"


@dataclass(frozen=True, slots=True)
class ListingChange:
    """The difference between a refreshed listing and the one before it."""

    added: int
    """Units that are new, or have another content."""
    vanished: int
    """Units that are gone, or have another content."""
    names: tuple[str, ...]
    """Keys of the first samples that vanished."""
    segments: tuple[tuple[str, int, str], ...]
    """Name of each new segment, and the units and the digest of the listing with it; empty where nothing changed."""

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Self:
        """The change that ``asdict`` described."""
        return cls(**{**value, "names": tuple(value["names"]), "segments": tuple(map(tuple, value["segments"]))})


@dataclass(frozen=True, slots=True)
class Prepared:
    """The facts about a source that the listing and the first samples gave."""

    url: str
    """Redacted."""
    identity: str
    units: int
    samples: int
    schema: Schema
    mean_bytes: int
    """Mean bytes of values of a sample."""
    per_unit: int
    """Samples of a unit."""
    left_out: tuple[tuple[str, str], ...]
    """Keys that belong to no sample, with the reason."""
    left_out_counts: Mapping[str, int]
    """How many keys belong to no sample, by reason."""
    complete: bool
    """True when the listing is complete, so that no more segments follow."""
    change: ListingChange | None
    """The result of ``--refresh``; None without it."""
    segments: tuple[int, ...]
    """Numbers of units at which the listing has grown."""
    parts: tuple[tuple[int, int, int], ...]
    """The parts that the cache is to draw: number, draws in a pass, and how many of these are asked for."""

    def to_json(self) -> Message:
        """Plain values."""
        change = None if self.change is None else asdict(self.change)
        plain = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return {**plain, "schema": self.schema.to_json(), "change": change}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Self:
        """The value that :meth:`to_json` described."""
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
    """The folder of the listing, which is written unless it exists."""
    options: Message
    """The source options: how samples are made of objects."""
    order: Message
    """Arguments of :meth:`Source.order`."""
    units: int | None
    """Units that the cache knows of."""
    skip_bad: bool
    skip_keys: bool
    """Keys that no request can name are left out by name."""
    refresh: str | None
    """The folder for a new listing and its differences."""
    early: int | None
    """Objects of the first segment, where that is enough."""
    pace: Message | None
    """Arguments of :class:`RateLimit`."""
    looked: str | None
    """The folder that keeps the bytes of the samples read for the schema."""
    cut: int
    parts: tuple[int, ...]
    """The parts of the cut that the cache is to draw."""
    samples: int | None
    """So many first samples of the source, of which the parts have some; None for all."""
    shared: str | None
    """The folder of the listing that all nodes use."""


@dataclass(frozen=True, slots=True)
class WorkerArguments:
    """JSON values for :func:`cachetool.pull.worker.draw`."""

    root: str
    """The folder of the cache."""
    url: str
    options: Message
    """How samples are made of objects."""
    job: str
    source: str
    dataset: str
    format: str
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
    """In how many seconds the first shard is closed with what it has by then."""
    looked: str | None = None
    """Where that what was fetched before lies."""


@dataclass(frozen=True, slots=True)
class PullJob:
    """What is settled before the first sample is drawn."""

    url: str
    options: PullOptions
    id: str
    """Of the source."""
    kind: Format
    shard_bytes: int
    per_shard: int
    """Draws that make a shard."""
    per_unit: int
    """Samples that one draw brings."""
    prepared: Prepared
    """What the listing and the first samples told."""
    pace: Message | None
    began: float
    looked: str | None
    """Where that what was looked at beforehand lies on this machine."""
    is_new: bool
    """Whether the dataset has no shard yet."""
    cut: int
    """Into how many parts the source is cut."""

    @property
    def schema(self) -> Schema:
        """Of the samples."""
        return self.prepared.schema

    @property
    def wanted(self) -> int | None:
        """Draws that were asked for beside those that are there; None for all, and for those of :attr:`upto`."""
        return None if self.upto is not None else self._asked

    @property
    def upto(self) -> int | None:
        """The first draws of the source that were asked for, of which the parts here have some; None for all, or for a
        number beside those that are there."""
        return self._asked if self.cut > 1 or self.options.part is not None else None

    @property
    def _asked(self) -> int | None:
        return None if self.options.samples is None else -(-self.options.samples // self.per_unit)

    def limits(self, source: SourceRow) -> dict[int, int]:
        """How many draws of each part are asked for, once the source is as ``source`` says."""
        if self.upto is not None and source.units != self.prepared.units:  # it grew, and a unit is one draw then
            return {
                part.number: part_size(min(self.upto, source.units), part.number, self.cut) for part in source.parts
            }
        return {part: limit for part, _, limit in self.prepared.parts}

    def task(self, root: str, job: str, **changes: Any) -> Task:
        """A sampler for a job of the cache in the folder ``root``; ``changes`` are fields of
        :class:`WorkerArguments`."""
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
            schema=self.schema.to_json(),
            shard_bytes=self.shard_bytes,
            units_per_shard=self.per_shard,
            per_unit=self.per_unit,
            room=asdict(replace(options.room, job=job)),
            follow=options.follow,
            reopened=options.reopened,
            skip_bad=options.on_error == "skip",
            pace=self.pace,
            first_shard_in=None if after is None else max(0.0, after - (time.monotonic() - self.began)),
            looked=self.looked,
        )
        return Task("cachetool.pull.worker:draw", asdict(replace(arguments, **changes)))


@dataclass(frozen=True, slots=True)
class PullResult:
    """What a pull came to."""

    source: str
    """URL without user info and query."""
    dataset: str
    format: str
    seed: int
    samples: int
    """Committed by this pull."""
    skipped: int
    """Draws that could not be used."""
    skipped_examples: tuple[dict[str, str], ...]
    """The first 20: key and reason."""
    bytes: int
    """Of values committed."""
    fetched: int
    """Over the wire."""
    shards: int
    evicted_shards: int
    """Shards that went to make room for this pull, not for others beside it."""
    seconds: float
    pass_complete: bool
    """Whether every sample of the source was drawn in this pass."""
    reason: str
    """Why it stopped: ``done``, ``source at its end``, ``cache full``."""
    warning: str = ""
    """That more draws of the pass could not be used than may be left out, where an earlier pull met some of them."""
    left_out: tuple[tuple[str, str], ...] = ()
    """What of the source is in no sample although nobody said so: name of an object, array or value, and why; the first
    100."""
    left_out_counts: Mapping[str, int] = field(default_factory=dict)
    """How many objects of the source are in no sample, by reason: all of them, hidden ones and those that ``--include``
    and ``--exclude`` do not choose too."""
    notes: tuple[str, ...] = ()
    """Decisions about how the source is read, each with the option that decides otherwise."""
    of_objects: bool = True
    """Whether the source is a folder of objects, which ``refresh`` lists again; False for files of many samples."""
    added: int = 0
    """Units that a refresh found beside those known."""
    vanished: int = 0
    """Units that a refresh did not find any more, or with another content."""
    vanished_examples: tuple[str, ...] = ()
    """Keys of the first 20 samples that vanished."""
    listing: str = ""
    """Digest of the listing: the same on all nodes that share the source."""
    cut: int = 1
    """Into how many parts the source is cut."""
    parts: tuple[int, ...] = ()
    """The parts of the source that this cache draws."""
    released: int = 0
    """Samples of other parts that went by ``--repart``."""
    nodes: tuple[dict[str, Any], ...] = ()
    """Of a pull over several nodes, a row for each: node, cache, samples, shards, bytes, fetched, evicted_shards, state
    (empty, ``full`` or ``lost``)."""

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return asdict(self)


def too_many(unused: int, draw_count: int) -> bool:
    """Whether so many of the draws are more than may be left out."""
    return unused > max(TOLERATED_FEW, TOLERATED * draw_count)


def why_ended(samples: int, wanted: int | None, *, complete: bool, full: bool) -> str:
    """:attr:`PullResult.reason`."""
    if wanted is not None and samples >= wanted:
        return "done"
    if complete:
        return AT_ITS_END
    return "cache full" if full else "done"
