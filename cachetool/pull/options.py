"""Options of a pull: one frozen value that checks itself before the cache or the source is touched."""

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

__all__ = ["MOST_PARTS", "Compression", "DrawOptions", "PullCall", "PullOptions", "ShardSize"]

# At most nine digits a number, and ASCII: int() would take digits of any script, and numbers of any length.
_PART = re.compile(r"(\d{1,9}(?:,\d{1,9})*)/(\d{1,9})", flags=re.ASCII)
_MOST_CUT = 10**6
# The record of every shard lists all parts of its cache.
MOST_PARTS = 128
"""Most parts of a source in one cache."""
# Variables of the node and not of the rank: all ranks of a node share one disk, and so one cache and one share.
_LAUNCHERS = ("SLURM_NODEID", "SLURM_NNODES"), ("GROUP_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
"""Variables with which Slurm and torchrun say which node of how many this is."""


def _shard_size(value: Any, *, what: str) -> int:
    nbytes = parse_size(value, what=what)
    if nbytes == 0:
        raise UsageError("--shard-size must be at least 1 byte")
    return nbytes


def _dataset(value: object, *, what: str) -> str:
    name = parse_text(value, what=what)
    if not name or len(name) > 100 or not name.isprintable():
        raise UsageError(f"dataset name {shown(name)} cannot be used; choose 1 to 100 printable characters")
    return name


def _first_shard_after(value: Any, *, what: str) -> float:
    """Return the seconds; 0 for ``none``."""
    if value is None or (isinstance(value, str) and value.strip().lower() == "none"):
        return 0.0
    return parse_duration(value, what=what)


def _share(value: Any, *, what: str) -> str | float:
    """Return the fraction; ``none`` for no share."""
    if isinstance(value, str) and value.strip().lower() == "none":
        return "none"
    if not (fraction := parse_fraction(value, what=what)):
        raise UsageError(f"{what} {shown(value)} leaves no space for the dataset; use more than 0")
    return fraction


def _part(value: Any, *, what: str) -> str:
    """Return ``I[,J...]/N``, also for ``auto``."""
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
            # torchrun counts processes in WORLD_SIZE, and nodes only indirectly. With a rest, nodes have different
            # numbers of processes and the count of nodes is unknown.
            nodes, more = divmod(count, on_node[0] if on_node else 1)
            if more or not 0 <= index < nodes:
                raise ValueError(names)
            return f"{index}/{nodes}"
        except (ValueError, ZeroDivisionError):
            values = ", ".join(f"{name}={os.environ[name]!r}" for name in names)
            raise UsageError(f"--part auto cannot be computed from {values}; give --part I/N") from None
    missing = (" and ".join(name for name in names if name not in os.environ) for names in _LAUNCHERS)
    raise UsageError(f"--part auto needs the number of this node: set {', or '.join(missing)}, or give --part I/N")


def _listing(value: Any, *, what: str) -> str:
    # Imported here: options are loaded for every command's help, which must start fast.
    from cachetool.proc.disk import parse_location
    from cachetool.stores.redact import redact

    text = parse_location(value, what=what)
    if "://" in text:
        raise UsageError(f"--listing {shown(redact(text))} is a URL; name a folder that all nodes see")
    return os.path.abspath(text)


def _compression(value: object, *, what: str) -> str:
    """Return the name of a compression, which is checked later: its format may be known only then."""
    if not isinstance(value, str):
        raise UsageError(f"{what} {shown(value)} cannot be used; it must be the name of a compression")
    return value


Compression = Annotated[
    str | None,
    Option(
        "Compression of the new shards: none (default), gzip (hdf5, tfrecord), blosc or zstd (zarr), or auto (zarr),"
        " which is blosc if that makes the first samples 1.3 times smaller.", "NAME", _compression,
    ),
]  # fmt: skip

ShardSize = Annotated[
    int | str | None,
    Option(
        "Largest size of the values in one shard. Default: 64MB, or a sixteenth of the cap if that is smaller.", "SIZE",
        _shard_size,
    ),
]  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class DrawOptions(SourceOptions):
    """The options of drawing samples, as far as a pull without an end has them."""

    to: Annotated[
        str | None,
        Option("Format of the shards: lmdb (default for a new dataset), hdf5, zarr or tfrecord.", "FORMAT", parse_text),
    ] = None
    compression: Compression = None
    policy: Policy = "oldest"
    dataset: Annotated[str, Option("Dataset to add the samples to.", "NAME", _dataset)] = "default"
    seed: Annotated[
        int | None,
        Option("Seed of the random order. Default: the seed of earlier pulls of this source, or 0.", "N", parse_whole),
    ] = None
    order: Annotated[
        str | None,
        Option(
            "Draw at random, or in the order of names. Default: as in earlier pulls of this source, or random.",
            "random|sequential", choice("random", "sequential"),
        ),
    ] = None  # fmt: skip
    refresh: Annotated[bool, Option("List SOURCE again, draw new samples too, and name deleted samples.")] = False
    start_early: Annotated[
        bool,
        Option(
            "Begin to draw before a long listing is complete, after 2^20 names of a bucket (s3, gs, az), or 2^14 of a"
            " folder of this machine or a manifest."
        ),
    ] = False
    workers: Workers = 2
    max_rate: Annotated[
        int | str | None, Option("Highest rate of all workers together, such as 200MB/s.", "RATE", parse_rate)
    ] = None
    shard_size: ShardSize = None
    first_shard_after: Annotated[
        float | str | None,
        Option(
            "Finish the first shard of a new dataset after TIME even if it is not full, so that training can begin."
            " With none, only when it is full. Not used with --placement replicate.",
            "TIME", _first_shard_after,
        ),
    ] = "10s"  # fmt: skip
    min_epochs: MinEpochs = 0
    on_error: OnError = "error"
    renew: Annotated[
        float | str,
        Option("Fraction of a full cache that new samples replace at each epoch.", "FRACTION", parse_fraction),
    ] = "10%"
    share: Annotated[
        float | str | None,
        Option(
            "Most of the cap that the dataset takes, for several datasets in one cache; kept for later pulls. none: it"
            " has no share. Default: as in earlier pulls.",
            "FRACTION", _share,
        ),
    ] = None  # fmt: skip

    part: Annotated[
        str | None,
        Option(
            "Draw the part of node I of N nodes, numbered from 0, each with its own cache; auto: I and N of Slurm or"
            " torchrun. --samples then counts for all nodes and all earlier pulls together.",
            "I[,J...]/N|auto", _part,
        ),
    ] = None  # fmt: skip
    parts: Annotated[
        int | None,
        Option("With --part: cut the source into P parts, so that N can change later. Default: N.", "P", parse_whole),
    ] = None
    listing: Annotated[
        str | os.PathLike[str] | None,
        Option(
            "Folder that all nodes see. The first node stores its listing of SOURCE there, and the others use it.",
            "DIR", _listing,
        ),
    ] = None  # fmt: skip
    repart: Annotated[bool, Option("With --part: remove samples that are now in the part of another node.")] = False

    elsewhere: ClassVar = {
        **SourceOptions.elsewhere,
        **dict.fromkeys(("samples", "all", "follow", "wait", "progress"), "use cache.pull for a pull with an end"),
    }

    def _check(self) -> None:
        super()._check()
        # Imported here, so that the help of a command does not load the cache and the formats.
        from cachetool.cache.policies import check_policy
        from cachetool.formats import get_format

        if self.to is not None:
            get_format(self.to)
        check_policy(self.policy)
        if self.read_as is not None:
            from cachetool.sources.kinds import check_read_as

            check_read_as(self.read_as)
        if self.part is None and self.parts is not None:
            raise UsageError("--parts needs --part; add --part, or leave --parts out")
        # Asked for its errors: a wrong --part must be refused before anything is started.
        _ = self.node_parts
        if self.start_early and self.label_from_folder == "int":
            raise UsageError(
                "--label-from-folder int needs the names of all folders, which --start-early does not have yet; leave"
                " one of the two options out"
            )

    def at(self, url: str) -> tuple[str, Self]:
        """Return the place that ``url`` names, and the options for it. A glob in the URL becomes one of ``include``.

        Raises:
            UsageError: If the glob cannot be used.
        """
        from cachetool.sources.globs import with_glob

        url, source = with_glob(url, self.source)
        return url, self.with_source(source)

    @property
    def source(self) -> SourceOptions:
        """The options of the source alone."""
        return self.only(SourceOptions)

    def with_source(self, source: SourceOptions) -> Self:
        """Return the same options with the source options of ``source``."""
        return replace(self, **{one.name: getattr(source, one.name) for one in fields(SourceOptions)})

    @property
    def node_parts(self) -> tuple[int, tuple[int, ...]] | None:
        """The number of parts of the source, and the parts that this node draws; None without ``part``."""
        if self.part is None:
            return None
        match = _PART.fullmatch(self.part)
        assert match is not None
        numbers, nodes = {int(number) for number in match[1].split(",")}, int(match[2])
        if not max(numbers) < nodes:
            raise UsageError(f"--part {self.part} names node {max(numbers)} of {nodes}; nodes are numbered from 0")
        cut = nodes if self.parts is None else self.parts
        if nodes > _MOST_CUT:
            raise UsageError(f"--part {self.part} has {nodes} nodes; the maximum is {_MOST_CUT}")
        if not nodes <= cut <= _MOST_CUT:
            raise UsageError(f"--parts {cut} cannot be used for {nodes} nodes; choose {nodes} to {_MOST_CUT}")
        # Part k belongs to node k mod N. All nodes compute the same, and ask nobody.
        parts = sorted(part for number in numbers for part in range(number, cut, nodes))
        if len(parts) > MOST_PARTS:
            raise UsageError(
                f"--part {self.part} gives one cache {len(parts)} parts of {cut}, but the maximum is {MOST_PARTS};"
                " lower --parts"
            )
        return cut, tuple(parts)

    @property
    def first_shard_seconds(self) -> float | None:
        """:attr:`first_shard_after` in seconds; None: close the first shard when it is full."""
        return parse_duration(self.first_shard_after or 0) or None


@dataclass(frozen=True, kw_only=True)
class PullOptions(DrawOptions):
    """The options of a pull: those of drawing, and when it ends."""

    samples: Annotated[
        int | None,
        Option(
            "Draw N samples that were not drawn before. With --part, N counts for all nodes and all earlier pulls.",
            "N",
            parse_whole,
        ),
    ] = None
    all: Annotated[bool, Option("Draw all remaining samples of the source, and evict older shards for them.")] = False
    follow: Annotated[bool, Option("Draw until stopped; when the cache is full, evict old shards.")] = False
    wait: RoomWait = "60s"
    reopened: bool = False
    """True to draw only the reopened draws. Any other pull draws these first."""
    trainer: str | None = None
    """The holder of the trainer that a background pull belongs to. See :class:`~cachetool.cache.policies.Room`."""

    def _check(self) -> None:
        super()._check()
        if self.samples is not None and self.samples < 1:
            raise UsageError(f"--samples must be at least 1, got {self.samples}")
        if (self.samples is not None) + self.all + self.follow > 1:
            raise UsageError("only one of --samples, --all and --follow can be given")

    @property
    def evicts(self) -> bool:
        """True if older shards are evicted for this pull; False for a pull that only fills free space."""
        return self.samples is not None or self.all or self.follow

    @property
    def room(self) -> Room:
        """The way in which room is made for this pull."""
        from cachetool.cache import Room

        wait = parse_duration(self.wait) if self.evicts else 0.0
        return Room(
            evict=self.evicts,
            policy=self.policy,
            min_epochs=self.min_epochs,
            # A pull with an end must not evict its own samples, or it would never reach its goal. A pull with
            # `--follow` never ends, and may.
            keep_own=not self.follow,
            # A following pull waits as long as training needs. A pull that only fills free space waits for nobody.
            wait=math.inf if self.follow else wait,
            renew=parse_fraction(self.renew),
            trainer=self.trainer,
        )


@dataclass(frozen=True, kw_only=True)
class _Place(Options):
    """The machines that a pull runs on, and the function that receives its progress."""

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
    progress: Annotated[
        Report, Option("Function that is called with the progress of the pull.", command_line=False)
    ] = silent


@dataclass(frozen=True, kw_only=True)
class PullCall(PullOptions, _Place):
    """The keywords of :meth:`cachetool.Cache.pull`."""
