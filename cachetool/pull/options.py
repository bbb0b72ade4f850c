"""What a pull is asked for: one frozen value that checks itself before anything is touched."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, Self

from cachetool.cache import Room
from cachetool.cache.policies import check_policy
from cachetool.core.errors import UsageError
from cachetool.core.schema import names_of
from cachetool.core.text import shown
from cachetool.core.units import (
    parse_choice,
    parse_duration,
    parse_flag,
    parse_fraction,
    parse_rate,
    parse_size,
    parse_text,
    parse_whole,
    parse_workers,
)
from cachetool.formats import get_format
from cachetool.sources.globs import with_glob
from cachetool.sources.options import SourceOptions

__all__ = ["PullOptions"]


@dataclass(frozen=True, slots=True)
class PullOptions:
    """How to pull; checked when made. Raises :class:`UsageError`."""

    to: str | None = None
    """Format of the shards; None for that of the dataset's newest shard, or lmdb."""
    samples: int | None = None
    """How many to commit; None for as many as there are, or as fit."""
    everything: bool = False
    """All that is left of the pass, older shards evicted for it."""
    follow: bool = False
    """Keep drawing and evicting, pass after pass, until stopped."""
    dataset: str = "default"
    seed: int | None = None
    """None: what this source is drawn with already, or 0."""
    order: str | None = None
    """``random`` or ``sequential``; None: as this source is drawn already, or random."""
    refresh: bool = False
    """List the source again, for what is new in it and what is gone."""
    start_early: bool = False
    """Draw from the first part of a listing while the rest comes."""
    workers: int = 2
    max_rate: int | str | None = None
    """Bytes a second that all workers together fetch at most; ``"200MB/s"``."""
    shard_size: int | str | None = None
    """Bytes of values in a shard."""
    first_shard_after: float | str | None = 10.0
    """Seconds from the beginning after which each worker closes the first shard of a new dataset with what it has, so
    that training begins; None or 0: when the shard is full."""
    policy: str = "oldest"
    min_epochs: int = 0
    on_error: str = "error"
    wait: float | str = 60.0
    """Seconds to wait for room that readers hold."""
    renew: float | str = 0.1
    """Share of the cap that each epoch's snapshot frees for this pull once the cache is full."""
    reopened: bool = False
    """Only the reopened draws, which any pull draws first."""
    source: SourceOptions = field(default_factory=SourceOptions)
    """How samples are made of objects."""

    @classmethod
    def of(cls, **given: Any) -> Self:
        """Options as :meth:`cachetool.Cache.pull` takes them: those of the source beside the others.

        Raises :class:`UsageError` also for a name that is none.
        """
        source = {option.name: given.pop(option.name) for option in fields(SourceOptions) if option.name in given}
        names = [option.name for option in fields(cls) if option.name not in ("source", "reopened")]
        if unknown := set(given) - set(names):
            names += [option.name for option in fields(SourceOptions)]
            raise UsageError(f"unknown option {min(unknown)!r}; there are {', '.join(names)}")
        if source.get("fields") is not None:
            source["fields"] = names_of(source["fields"])
        source["rename"] = {} if source.get("rename") is None else source["rename"]
        return cls(**given, source=SourceOptions(**source))

    def at(self, url: str) -> tuple[str, Self]:
        """The place that ``url`` names, and the options for it: a glob in its name is one of ``include``. Raises
        :class:`UsageError`."""
        url, source = with_glob(url, self.source)
        return url, replace(self, source=source)

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {**asdict(self), "source": self.source.to_json()}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Self:
        """The options that :meth:`to_json` described."""
        return cls(**{**value, "source": SourceOptions.from_json(value["source"])})

    def __post_init__(self) -> None:
        for name in ("samples", "seed", "min_epochs"):
            if (value := getattr(self, name)) is not None or name == "min_epochs":
                object.__setattr__(self, name, parse_whole(value, what=f"--{name.replace('_', '-')}"))
        for name in ("everything", "follow", "refresh", "start_early"):
            what = "--all" if name == "everything" else f"--{name.replace('_', '-')}"
            object.__setattr__(self, name, parse_flag(getattr(self, name), what=what))
        object.__setattr__(self, "workers", parse_workers(self.workers))
        if self.to is not None:
            get_format(parse_text(self.to, what="--to"))
        if self.samples is not None and self.samples < 1:
            raise UsageError(f"--samples must be at least 1, got {self.samples}")
        if (self.samples is not None) + self.everything + self.follow > 1:
            raise UsageError("only one of --samples, --all and --follow can be given")
        if self.order is not None:
            parse_choice(self.order, ("random", "sequential"), what="--order")
        if self.max_rate is not None:
            object.__setattr__(self, "max_rate", parse_rate(self.max_rate, what="--max-rate"))
        if self.start_early and self.source.label_from_folder == "int":
            raise UsageError(
                "--label-from-folder int numbers all folders, which --start-early does not know yet; leave one of the"
                " two out"
            )
        check_policy(self.policy)
        if self.source.read_as is not None:
            from cachetool.sources.kinds import check_read_as

            check_read_as(self.source.read_as)
        parse_choice(self.on_error, ("error", "skip"), what="--on-error")
        parse_text(self.dataset, what="--dataset")
        if not self.dataset or len(self.dataset) > 100 or not self.dataset.isprintable():
            raise UsageError(f"dataset name {shown(self.dataset)} cannot be used: up to 100 printable characters")
        if self.shard_size is not None:
            object.__setattr__(self, "shard_size", parse_size(self.shard_size, what="--shard-size"))
            if self.shard_size == 0:
                raise UsageError("--shard-size must be at least 1 byte")
        if self.min_epochs < 0:
            raise UsageError(f"--min-epochs must be at least 0, got {self.min_epochs}")
        object.__setattr__(self, "first_shard_after", self.first_shard_seconds or "none")
        object.__setattr__(self, "wait", parse_duration(self.wait, what="--wait"))
        object.__setattr__(self, "renew", parse_fraction(self.renew, what="--renew"))

    @property
    def first_shard_seconds(self) -> float | None:
        """:attr:`first_shard_after` as a number; None: when the shard is full."""
        value = self.first_shard_after
        if value is None or (isinstance(value, str) and value.strip().lower() == "none"):
            return None
        return parse_duration(value, what="--first-shard-after") or None

    @property
    def evicts(self) -> bool:
        """Whether older shards make room: not when a pull only fills what is free."""
        return self.samples is not None or self.everything or self.follow

    @property
    def room(self) -> Room:
        """How room is made: a pull that follows waits as long as it takes, one that only fills does not wait."""
        wait = parse_duration(self.wait) if self.evicts else 0.0
        return Room(
            evict=self.evicts,
            policy=self.policy,
            min_epochs=self.min_epochs,
            keep_own=not self.follow,
            wait=math.inf if self.follow else wait,
            renew=parse_fraction(self.renew),
        )
