"""What a pull is asked for: one frozen value that checks itself before anything is touched."""

from __future__ import annotations

import math
import os
import re
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Self

from cachetool.core.errors import UsageError
from cachetool.core.options import (
    Address,
    MinEpochs,
    On,
    OnError,
    Option,
    Options,
    Policy,
    RoomWait,
    Workers,
    choice,
)  # fmt: skip
from cachetool.core.progress import Report, silent
from cachetool.core.text import shown
from cachetool.core.units import (
    parse_duration,
    parse_fraction,
    parse_rate,
    parse_size,
    parse_text,
    parse_whole,
)
from cachetool.sources.options import SourceOptions

if TYPE_CHECKING:
    from cachetool.cache import Room

__all__ = ["MOST_PARTS", "DrawOptions", "PullCall", "PullOptions", "ShardSize"]

_PART = re.compile(r"(\d{1,9}(?:,\d{1,9})*)/(\d{1,9})", flags=re.ASCII)
_MOST_CUT = 10**6
MOST_PARTS = 128
"""Parts of a source in one cache, at most: every shard's record lists them."""
_LAUNCHERS = ("SLURM_NODEID", "SLURM_NNODES"), ("GROUP_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
"""The variables by which Slurm, and torchrun, say which node of how many this is: the index follows the disk, not the
rank."""


def _shard_size(value: Any, *, what: str) -> int:
    nbytes = parse_size(value, what=what)
    if nbytes == 0:
        raise UsageError("--shard-size must be at least 1 byte")
    return nbytes


def _dataset(value: object, *, what: str) -> str:
    name = parse_text(value, what=what)
    if not name or len(name) > 100 or not name.isprintable():
        raise UsageError(f"dataset name {shown(name)} cannot be used: up to 100 printable characters")
    return name


def _first_shard_after(value: Any, *, what: str) -> float:
    """Seconds; 0 for ``none``."""
    if value is None or (isinstance(value, str) and value.strip().lower() == "none"):
        return 0.0
    return parse_duration(value, what=what)


def _part(value: Any, *, what: str) -> str:
    """``I[,J...]/N``, for ``auto`` as well."""
    text = parse_text(value, what=what)
    if text == "auto":
        return _part_of_node()
    if _PART.fullmatch(text) is None:
        raise UsageError(f"--part {shown(text)} is not I/N; write it like --part 0/8, or --part 0,1/8")
    return text


def _part_of_node() -> str:
    for names in _LAUNCHERS:
        if not set(names) <= os.environ.keys():
            continue
        try:
            index, count, *on_node = (int(os.environ[name]) for name in names)
            nodes, more = divmod(count, on_node[0] if on_node else 1)
            if more or not 0 <= index < nodes:
                raise ValueError(names)
            return f"{index}/{nodes}"
        except (ValueError, ZeroDivisionError):
            values = ", ".join(f"{name}={os.environ[name]!r}" for name in names)
            raise UsageError(f"--part auto cannot be found of {values}; give --part I/N") from None
    missing = (" and ".join(name for name in names if name not in os.environ) for names in _LAUNCHERS)
    raise UsageError(f"--part auto finds no number of this node: {', or '.join(missing)} not set; give --part I/N")


def _listing(value: Any, *, what: str) -> str:
    from cachetool.proc.disk import parse_location
    from cachetool.stores.redact import redact

    text = parse_location(value, what=what)
    if "://" in text:
        raise UsageError(f"--listing {shown(redact(text))} is a URL; name a folder that all nodes see")
    return os.path.abspath(text)


ShardSize = Annotated[
    int | str | None,
    Option(
        "Most bytes of values in one shard. Default: 64MB, or a sixteenth of the cap where that is smaller.", "SIZE",
        _shard_size,
    ),
]  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class DrawOptions(SourceOptions):
    """How samples are drawn, as far as a pull without an end has it."""

    to: Annotated[
        str | None,
        Option("Format of the shards: lmdb (default for a new dataset), hdf5, zarr or tfrecord.", "FORMAT", parse_text),
    ] = None
    policy: Policy = "oldest"
    dataset: Annotated[str, Option("Put them into this dataset.", "NAME", _dataset)] = "default"
    seed: Annotated[
        int | None,
        Option(
            "Decides the order of the draw. Default: what this source is drawn with already, or 0.", "N", parse_whole
        ),
    ] = None
    order: Annotated[
        str | None,
        Option(
            "Draw at random, or in order of names. Default: as this source is drawn already, or random.",
            "random|sequential", choice("random", "sequential"),
        ),
    ] = None  # fmt: skip
    refresh: Annotated[bool, Option("List SOURCE again: what is new is drawn too, what is gone is named.")] = False
    start_early: Annotated[bool, Option("Draw while a long listing goes on, 2^20 names at a time (s3, gs, az).")] = (
        False
    )
    workers: Workers = 2
    max_rate: Annotated[
        int | str | None, Option("Most bytes a second of all workers together, as 200MB/s.", "RATE", parse_rate)
    ] = None
    shard_size: ShardSize = None
    first_shard_after: Annotated[
        float | str | None,
        Option(
            "Close the first shard of a new dataset after TIME with what it has, so that training can begin; none: when"
            " it is full. Replicas, which must be alike, close it when it is full.",
            "TIME", _first_shard_after,
        ),
    ] = "10s"  # fmt: skip
    min_epochs: MinEpochs = 0
    on_error: OnError = "error"
    renew: Annotated[
        float | str, Option("Share of a full cache that each epoch gives up for new samples.", "SHARE", parse_fraction)
    ] = "10%"

    part: Annotated[
        str | None,
        Option(
            "Draw the share of node I, from 0, of N nodes with a cache each; auto: as Slurm or torchrun number this"
            " node. --samples then counts for all nodes together, from the beginning.",
            "I[,J...]/N|auto", _part,
        ),
    ] = None  # fmt: skip
    parts: Annotated[
        int | None,
        Option("With --part: cut the source into P parts, so that N may change. Default: N.", "P", parse_whole),
    ] = None
    listing: Annotated[
        str | os.PathLike[str] | None,
        Option(
            "A folder that all nodes see: who lists SOURCE first leaves the listing there for the others.",
            "DIR", _listing,
        ),
    ] = None  # fmt: skip
    repart: Annotated[bool, Option("With --part: let samples go that are in the share of another node now.")] = False

    elsewhere: ClassVar = {
        **SourceOptions.elsewhere,
        **dict.fromkeys(("samples", "all", "follow", "wait", "progress"), "use cache.pull for a pull with an end"),
    }

    def _check(self) -> None:
        super()._check()
        from cachetool.cache.policies import check_policy
        from cachetool.formats import get_format

        if self.to is not None:
            get_format(self.to)
        check_policy(self.policy)
        if self.read_as is not None:
            from cachetool.sources.kinds import check_read_as

            check_read_as(self.read_as)
        if self.part is None and self.parts is not None:
            raise UsageError("--parts goes with --part; add that, or leave it out")
        _ = self.share
        if self.start_early and self.label_from_folder == "int":
            raise UsageError(
                "--label-from-folder int numbers all folders, which --start-early does not know yet; leave one of the"
                " two out"
            )

    def at(self, url: str) -> tuple[str, Self]:
        """The place that ``url`` names, and the options for it: a glob in its name is one of ``include``. Raises
        :class:`UsageError`."""
        from cachetool.sources.globs import with_glob

        url, source = with_glob(url, self.source)
        return url, self.with_source(source)

    @property
    def source(self) -> SourceOptions:
        """The options of the source alone."""
        return self.only(SourceOptions)

    def with_source(self, source: SourceOptions) -> Self:
        """The same options for another source."""
        return replace(self, **{one.name: getattr(source, one.name) for one in fields(SourceOptions)})

    @property
    def share(self) -> tuple[int, tuple[int, ...]] | None:
        """Into how many parts the source is cut, and which of them this node draws; None where nothing is said."""
        if self.part is None:
            return None
        match = _PART.fullmatch(self.part)
        assert match is not None
        numbers, nodes = {int(number) for number in match[1].split(",")}, int(match[2])
        if not max(numbers) < nodes:
            raise UsageError(f"--part {self.part} names node {max(numbers)} of {nodes}; they are numbered from 0")
        cut = nodes if self.parts is None else self.parts
        if nodes > _MOST_CUT:
            raise UsageError(f"--part {self.part} has {nodes} nodes; there may be {_MOST_CUT}")
        if not nodes <= cut <= _MOST_CUT:
            raise UsageError(f"--parts {cut} cannot be used for {nodes} nodes: {nodes} to {_MOST_CUT}")
        parts = sorted(part for number in numbers for part in range(number, cut, nodes))
        if len(parts) > MOST_PARTS:
            raise UsageError(
                f"--part {self.part} gives one cache {len(parts)} parts of {cut}, over {MOST_PARTS}; lower --parts"
            )
        return cut, tuple(parts)

    @property
    def first_shard_seconds(self) -> float | None:
        """:attr:`first_shard_after` as a number; None: when the shard is full."""
        return parse_duration(self.first_shard_after or 0) or None


@dataclass(frozen=True, kw_only=True)
class PullOptions(DrawOptions):
    """How to pull, and until when."""

    samples: Annotated[
        int | None,
        Option(
            "Draw N samples that were not drawn before; with --part, N from the beginning for all nodes.",
            "N",
            parse_whole,
        ),
    ] = None
    all: Annotated[bool, Option("Draw all that is left of the source, older shards evicted for it.")] = False
    follow: Annotated[bool, Option("Keep drawing until stopped; once the cache is full old shards go.")] = False
    wait: RoomWait = "60s"
    reopened: bool = False
    """Only the reopened draws, which any pull draws first."""
    trainer: str | None = None
    """See :class:`~cachetool.cache.policies.Room`."""

    def _check(self) -> None:
        super()._check()
        if self.samples is not None and self.samples < 1:
            raise UsageError(f"--samples must be at least 1, got {self.samples}")
        if (self.samples is not None) + self.all + self.follow > 1:
            raise UsageError("only one of --samples, --all and --follow can be given")

    @property
    def evicts(self) -> bool:
        """Whether older shards make room: not when a pull only fills what is free."""
        return self.samples is not None or self.all or self.follow

    @property
    def room(self) -> Room:
        """How room is made: a pull that follows waits as long as it takes, one that only fills does not wait."""
        from cachetool.cache import Room

        wait = parse_duration(self.wait) if self.evicts else 0.0
        return Room(
            evict=self.evicts,
            policy=self.policy,
            min_epochs=self.min_epochs,
            keep_own=not self.follow,
            wait=math.inf if self.follow else wait,
            renew=parse_fraction(self.renew),
            trainer=self.trainer,
        )


@dataclass(frozen=True, kw_only=True)
class _Place(Options):
    """The machines that a pull runs on, and the function that hears of progress."""

    on: On = "local"
    address: Address = None
    placement: Annotated[
        str | None,
        Option(
            "With --on ray: each sample on one node (default), or the same samples on every node.",
            "split|replicate",
            choice("split", "replicate"),
        ),
    ] = None
    progress: Annotated[Report, Option("A function that is told how far the pull is.", command_line=False)] = silent


@dataclass(frozen=True, kw_only=True)
class PullCall(PullOptions, _Place):
    """The keywords of :meth:`cachetool.Cache.pull`."""
