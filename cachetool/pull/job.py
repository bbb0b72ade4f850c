"""A pull as it is once all is settled, and what it came to: the same wherever its shards go."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from cachetool.cache import CacheDir, SourceRow
from cachetool.core.progress import Report
from cachetool.core.schema import Schema
from cachetool.formats.base import Format
from cachetool.proc.task import Message, Task
from cachetool.pull.options import PullOptions

__all__ = ["AT_ITS_END", "Elsewhere", "PullResult", "PullJob", "too_many", "why_ended"]

TOLERATED = 0.01
"""Share of draws that ``--on-error skip`` may leave out, once it is more than :data:`TOLERATED_FEW`."""
TOLERATED_FEW = 10
AT_ITS_END = "source at its end"


@dataclass(frozen=True, slots=True)
class PullJob:
    """What is settled before the first sample is drawn."""

    url: str
    options: PullOptions
    id: str
    """Of the source."""
    schema: Schema
    kind: Format
    shard_bytes: int
    per_shard: int
    """Draws that make a shard."""
    per_unit: int
    """Samples that one draw brings."""
    found: Message
    """What the listing and the first samples told."""
    pace: Message | None
    began: float
    looked: str | None
    """Where that what was looked at beforehand lies on this machine."""
    is_new: bool
    """Whether the dataset has no shard yet."""

    @property
    def wanted(self) -> int | None:
        """Draws that were asked for."""
        if self.options.again:
            return sum(each.draws for each in self.options.again)
        return None if self.options.samples is None else -(-self.options.samples // self.per_unit)

    def task(self, root: str, job: str, **more: Any) -> Task:
        """A sampler for a job of the cache in the folder ``root``."""
        options = self.options
        after = options.first_shard_seconds if self.is_new and not options.again else None
        return Task(
            "cachetool.pull.worker:draw",
            {
                "root": root,
                "url": self.url,
                "options": options.source.to_json(),
                "job": job,
                "source": self.id,
                "dataset": options.dataset,
                "format": self.kind.name,
                "schema": self.schema.to_json(),
                "shard_bytes": self.shard_bytes,
                "units_per_shard": self.per_shard,
                "per_unit": self.per_unit,
                "room": asdict(replace(options.room, job=job)),
                "follow": options.follow,
                "lost": options.lost,
                "pace": self.pace,
                "looked": self.looked,
                "skip_bad": options.on_error == "skip",
                "first_shard_in": None if after is None else max(0.0, after - (time.monotonic() - self.began)),
                "again": [(each.ranges, each.content) for each in options.again],
                **more,
            },
        )


class Elsewhere(Protocol):
    """Caches on other nodes, which the shards go to; ``cache`` has the catalog of the whole then."""

    cap: int
    """The least of theirs."""
    format: str | None
    """Of their newest shard."""

    def known(self) -> SourceRow | None:
        """The source as they know it, where they do."""
        ...

    def refuse(self, cache: CacheDir, id: str, url: str) -> None:
        """Raise :class:`UsageError` when nothing may be drawn now; before anything of the source is changed."""
        ...

    def restore(self, cache: CacheDir, id: str, scratch: Path) -> None:
        """Give the source to a catalog that lost it, where listing it again would not make it what it is there."""
        ...

    def draw(self, cache: CacheDir, settled: PullJob, report: Report) -> PullResult:
        """As a pull into ``cache`` itself does."""
        ...


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
    """What of the source's files is in no sample although nobody said so: name of an array or value, and why."""
    added: int = 0
    """Units that a refresh found beside those known."""
    vanished: int = 0
    """Units that a refresh did not find any more, or with another content."""
    vanished_examples: tuple[str, ...] = ()
    """Keys of the first 20 samples that vanished."""
    nodes: tuple[dict[str, Any], ...] = ()
    """Of a pull over several nodes, a row for each: node, cache, samples, shards, bytes, fetched, evicted_shards, state
    (empty, ``full`` or ``lost``)."""

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return asdict(self)


def too_many(unused: int, drawn: int) -> bool:
    """Whether so many of the draws are more than may be left out."""
    return unused > max(TOLERATED_FEW, TOLERATED * drawn)


def why_ended(samples: int, wanted: int | None, *, complete: bool, full: bool) -> str:
    """:attr:`PullResult.reason`."""
    if wanted is not None and samples >= wanted:
        return "done"
    if complete:
        return AT_ITS_END
    return "cache full" if full else "done"
