"""Values that the feeders receive as JSON: how to read, for their whole life, and what to read, epoch by epoch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Self, TypeAlias

import numpy as np

from cachetool.core import ranges
from cachetool.core.ranges import Ranges
from cachetool.core.schema import Schema
from cachetool.loaders.crop import Crops, Offsets
from cachetool.loaders.decode import Decode
from cachetool.loaders.mixture import DATASET, Group, MixedOrder, Mixture, Shares
from cachetool.loaders.order import EpochOrder, Int64s, Shuffle, Steps
from cachetool.loaders.padding import Pad, Pads
from cachetool.loaders.ranks import require_node
from cachetool.loaders.sample_weights import WEIGHT, Floats, WeightedOrder
from cachetool.loaders.view import ShardFile, View

__all__ = ["SHARE", "Begun", "EpochPlan", "Settings", "Value", "Where", "rows", "where_dict"]

SHARE = 0.05
"""Fraction of the samples for validation if ``validation=`` is not given."""
Value: TypeAlias = int | float | str
Where: TypeAlias = tuple[tuple[str, tuple[Value, ...]], ...]
"""Fields and the values of each by which samples are selected; both in ascending order."""


@dataclass(frozen=True, slots=True)
class Settings:
    """The arguments of a loader that its feeders need."""

    root: str
    """Folder of the cache, or the first of the paths."""
    paths: tuple[str, ...] = ()
    """Paths of shards outside of any cache."""
    dataset: str | None = None
    run: str | None = None
    fields: tuple[str, ...] | None = None
    batch_size: int = 1
    shuffle: Shuffle = "full"
    seed: int = 0
    drop_last: bool = False
    rank: int = 0
    world_size: int = 1
    node: tuple[int, int] | None = (0, 1)
    """Rank and world size among the processes of this node; None if unknown."""
    split: str | None = None
    validation: float = SHARE
    where: Where | None = None
    min_samples: int = 1
    min_each: bool = False
    """True if ``min_samples`` counts for each rank."""
    wait: float = 600.0
    hold: float = 60.0
    epochs: int | None = None
    missing: str = "error"
    verify: bool = False
    prefetch: int | None = None
    transform_each: str = "sample"
    """Unit with which ``transform`` is called: ``sample`` or ``batch``."""
    decode: Decode = ()
    """Fields that are decoded, each with its decoder and the decoder's options."""
    pad: Pads = ()
    varlen: tuple[str, ...] = ()
    crop: Crops | None = None
    """Boxes that are cut out of the samples."""
    offsets: Offsets = ()
    """Fields of which an item has the values of several rows, each with the rows."""
    mixture: Mixture | None = None
    """The groups that an epoch draws from in a ratio."""

    @property
    def laid_out(self) -> frozenset[str]:
        """Names of the fields that are padded, or given as values and offsets."""
        return frozenset((*(name for name, _ in self.pad), *self.varlen))

    @property
    def stored_fields(self) -> tuple[str, ...] | None:
        """The fields asked for that datasets have; None for all."""
        if self.fields is None or self.mixture is None:
            return self.fields
        extra = (DATASET,) if self.mixture.members else (WEIGHT,) if self.mixture.sample_weights else ()
        return tuple(name for name in self.fields if name not in extra)

    @property
    def has_dataset_field(self) -> bool:
        """True if a batch tells the dataset of each sample."""
        mixed = self.mixture is not None and bool(self.mixture.members)
        return mixed and self.fields is not None and DATASET in self.fields

    @property
    def multiple(self) -> int:
        """A number by which the samples of a mixture's epoch can be divided: the size of complete batches, or 1."""
        return self.batch_size if self.drop_last else self.whole_batches

    @property
    def whole_batches(self) -> int:
        """Number of samples that are drawn together from one dataset of a mixture: a batch, or 1."""
        return self.batch_size if self.mixture is not None and self.mixture.mix == "batch" else 1

    def place(self, view: View | None) -> tuple[int, int]:
        """Return rank and world size by which the samples of ``view`` are divided.

        A cache that draws only parts of its source is divided by the ranks of its own node. Raises :class:`UsageError`
        if their number is unknown.
        """
        return (self.rank, self.world_size) if view is None or not view.in_parts else require_node(self.node)

    def to_json(self) -> dict[str, Any]:
        """Return plain values."""
        return asdict(self)

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Self:
        """Rebuild the settings that :meth:`to_json` described."""
        fields, where, node = value["fields"], value["where"], value["node"]
        tuples = {
            "fields": None if fields is None else tuple(fields),
            "paths": tuple(value["paths"]),
            "node": None if node is None else tuple(node),
            "decode": tuple((name, decoder, options) for name, decoder, options in value["decode"]),
            "pad": tuple((name, Pad(**pad)) for name, pad in value["pad"]),
            "varlen": tuple(value["varlen"]),
            "crop": Crops.from_json(value["crop"]),
            "offsets": tuple((name, tuple(offsets)) for name, offsets in value["offsets"]),
            "mixture": Mixture.from_json(value["mixture"]),
            "where": None if where is None else tuple((name, tuple(values)) for name, values in where),
        }
        return cls(**{**value, **tuples})


@dataclass(frozen=True, slots=True)
class EpochPlan:
    """The samples that one epoch reads. Batches carry the ``generation`` of their plan."""

    generation: int
    epoch: int
    view: View | None
    """Samples of the snapshot; None: there is nothing to read, so feeders close all files."""
    samples: int = 0
    """Number of samples of the view that are read, after a split and a selection; with crops the number of crops."""
    position: int = 0
    """Position in the order of the epoch at which to begin."""
    lost: Ranges = ()
    """Ranges of the numbers of samples, or of crops, whose shards were evicted, ascending, if the epoch is resumed. The
    plan then reads those that are left, and ``samples`` counts these."""
    of: tuple[int, int] = (0, 0)
    """Number of samples of the epoch that is resumed with losses, and the position in its order at which to begin."""
    ratio: Shares = ()
    """The shares of the groups of a mixture."""
    follows: bool = False
    """True if the plan before is finished first; False if this plan replaces it."""

    def steps(self, settings: Settings) -> Steps:
        """Return the division of the samples into batches."""
        return Steps(
            self.samples,
            settings.batch_size,
            *settings.place(self.view),
            settings.drop_last or settings.whole_batches > 1,
            self.position,
        )

    def order(
        self, settings: Settings, groups: Sequence[Group] = (), ends: Floats | None = None
    ) -> EpochOrder | MixedOrder | WeightedOrder:
        """Return the order of the samples, or of the draws from the groups of a mixture, or by weights with these
        ``ends``."""
        if ends is not None:
            return WeightedOrder(
                ends, self.samples, shuffle=settings.shuffle != "no", seed=settings.seed, epoch=self.epoch
            )
        nbytes, together = 0, 1
        if self.view is not None:
            nbytes = self.view.schema.fixed_nbytes
            together = 1 if settings.crop is None else settings.crop.each(self.view.schema) or 1
        if self.ratio:
            assert settings.mixture is not None
            batch, items = settings.whole_batches, [*map(len, groups)]
            return MixedOrder(
                groups, self.ratio, self.samples, shuffle=settings.shuffle, seed=settings.seed, epoch=self.epoch,
                first=settings.mixture.first(self.ratio, items, self.samples, epoch=self.epoch, batch=batch,
                    whole=settings.multiple,
                ),
                batch=batch, nbytes=nbytes,
            )  # fmt: skip
        return EpochOrder(
            self.samples, shuffle=settings.shuffle, seed=settings.seed, epoch=self.epoch, nbytes=nbytes,
            together=together,
        )  # fmt: skip

    def left(self, settings: Settings) -> tuple[Int64s, Int64s]:
        """Return, for a plan with losses, the positions that are left of the order of the whole epoch, and the indices
        in the view of the samples at these positions; both int64, (k,)."""
        samples, position = self.of
        positions = np.arange(position, samples, dtype=np.int64)
        indices = replace(self, samples=samples).order(settings)[positions]
        kept = ranges.positions(ranges.difference([(0, samples)], self.lost))
        here = np.isin(indices, kept)
        return positions[here], np.searchsorted(kept, indices[here])

    def to_json(self, sent: View | None = None) -> dict[str, Any]:
        """Return plain values, in which a shard file is a row of seven.

        If the view is the one that was ``sent`` before, only its version is included. Shard files that the view before
        had are given as a range of their numbers there, a pair.
        """
        view = self.view
        value = {name: getattr(self, name) for name in self.__dataclass_fields__}
        if view is not None:
            value["view"] = {"version": view.version}
            # A view may have thousands of rows, and the leader sends each plan to each feeder. The same object means
            # that the feeder has it: the next epoch then begins after 6.5 instead of 40 ms.
            if view is not sent:
                value["view"] |= {"dataset": view.dataset, "schema": view.schema.to_json()}
                value["view"]["parts"] = _changes(view.parts, () if sent is None else sent.parts)
                value["view"]["in_parts"] = view.in_parts
                value["view"]["members"] = view.members
                value["view"]["schemas"] = [schema.to_json() for schema in view.schemas]
        return value

    @classmethod
    def from_json(cls, value: dict[str, Any], sent: View | None = None) -> Self:
        """Rebuild the plan that :meth:`to_json` described; ``sent`` is the view that was received before."""
        described = value.pop("view")
        value = {**value, "lost": ranges.pairs(value["lost"]), "of": tuple(value["of"]), "ratio": tuple(value["ratio"])}
        if described is None or "parts" not in described:
            return cls(**value, view=None if described is None else sent)
        schema, parts = Schema.from_json(described["schema"]), list[ShardFile]()
        for row in described["parts"]:
            if len(row) == _PAIR:
                assert sent is not None
                parts += sent.parts[row[0] : row[1]]
            else:
                parts.append(ShardFile(*row))
        view = View(
            described["version"], described["dataset"], schema, tuple(parts), described["in_parts"],
            tuple(described["members"]), tuple(map(Schema.from_json, described["schemas"])),
        )  # fmt: skip
        return cls(**value, view=view)


@dataclass(frozen=True, slots=True)
class Begun:
    """The part of an epoch's plan that the training process needs."""

    generation: int
    epoch: int
    version: int
    """Version of the snapshot."""
    steps: Steps
    """Division of the samples into batches."""
    lacked: float = 0.0
    """Seconds in which there were too few samples to begin."""

    @classmethod
    def of(cls, plan: EpochPlan, settings: Settings, *, lacked: float = 0.0) -> Self:
        """Return this part of a plan."""
        version = 0 if plan.view is None else plan.view.version
        return cls(plan.generation, plan.epoch, version, plan.steps(settings), lacked)

    def to_json(self) -> dict[str, Any]:
        """Return plain values."""
        return asdict(self)

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Self:
        """Rebuild the value that :meth:`to_json` described."""
        return cls(**{**value, "steps": Steps(**value["steps"])})


_PAIR = 2


def _changes(parts: Sequence[ShardFile], before: Sequence[ShardFile]) -> list[list[Any]]:
    """Return shard files as rows of plain values; those of ``before`` as pairs, the ranges of their numbers there."""
    # The files of a new view are the objects of the view before, as far as it had them.
    numbers = {id(part): number for number, part in enumerate(before)}
    out: list[list[Any]] = []
    start = stop = 0
    for part in parts:
        number = numbers.get(id(part), -1)
        if number == stop and start < stop:
            stop += 1
            continue
        if start < stop:
            out.append([start, stop])
        start, stop = (number, number + 1) if number >= 0 else (0, 0)
        if number < 0:
            out.append(list(part))
    return [*out, [start, stop]] if start < stop else out


def rows(parts: Sequence[ShardFile]) -> list[list[Any]]:
    """Return shard files as rows of plain values."""
    return [list(part) for part in parts]


def where_dict(where: Where) -> dict[str, list[Value]]:
    """Return the selection in the form in which a user writes it, for states and messages."""
    return {name: list(values) for name, values in where}
