"""What feeders are told: how to read, for as long as they live, and what, epoch by epoch. Values, sent as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Self, TypeAlias

import numpy as np

from cachetool.core import ranges
from cachetool.core.ranges import Ranges
from cachetool.core.schema import Schema
from cachetool.loaders.order import EpochOrder, Int64s, Shuffle, Steps
from cachetool.loaders.ranks import require_node
from cachetool.loaders.view import ShardFile, View

__all__ = ["SHARE", "Begun", "EpochPlan", "Settings", "Value", "Where", "rows", "where_dict"]

SHARE = 0.05
"""Of the samples for validation, where nothing else is said."""
Value: TypeAlias = int | float | str
Where: TypeAlias = tuple[tuple[str, tuple[Value, ...]], ...]
"""Fields, and the values of each that samples are selected by; both in ascending order."""


@dataclass(frozen=True, slots=True)
class Settings:
    """What a loader was made with and its feeders need to know."""

    root: str
    """Folder of the cache, or the first of the paths."""
    paths: tuple[str, ...] = ()
    """Where shards outside any cache are."""
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
    """Rank and world size among the processes of this node; None: not known."""
    split: str | None = None
    validation: float = SHARE
    where: Where | None = None
    min_samples: int = 1
    min_each: bool = False
    """Whether ``min_samples`` is for each rank."""
    wait: float = 600.0
    hold: float = 60.0
    epochs: int | None = None
    missing: str = "error"
    verify: bool = False
    prefetch: int | None = None
    transform_each: str = "sample"
    """What ``transform`` is called with: a sample or a batch."""

    def place(self, view: View | None) -> tuple[int, int]:
        """Rank and world size that divide the samples of ``view``. Other nodes have what a cache that draws parts of
        its source has not, so only the ranks of its own node divide it. Raises :class:`UsageError` if nobody knows
        those."""
        return (self.rank, self.world_size) if view is None or not view.in_parts else require_node(self.node)

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Self:
        """What :meth:`to_json` gave."""
        fields, where, node = value["fields"], value["where"], value["node"]
        tuples = {
            "fields": None if fields is None else tuple(fields),
            "paths": tuple(value["paths"]),
            "node": None if node is None else tuple(node),
            "where": None if where is None else tuple((name, tuple(values)) for name, values in where),
        }
        return cls(**{**value, **tuples})


@dataclass(frozen=True, slots=True)
class EpochPlan:
    """What one epoch reads. Batches carry the number of their plan's ``generation``."""

    generation: int
    epoch: int
    view: View | None
    """None: nothing to read; let go of all files."""
    samples: int = 0
    """How many of the view's samples are read, after the split."""
    position: int = 0
    """Where in the order of the epoch to begin."""
    lost: Ranges = ()
    """Of an epoch taken up again: ranges of its indices whose shards were evicted, ascending. The plan then reads what
    is left of it, and ``samples`` counts that."""
    of: tuple[int, int] = (0, 0)
    """How many samples that epoch had, and where in its order to begin."""
    follows: bool = False
    """Whether it waits for the plan before it to be made; else it comes in its place."""

    def steps(self, settings: Settings) -> Steps:
        """How it is cut into batches."""
        return Steps(
            self.samples,
            settings.batch_size,
            *settings.place(self.view),
            settings.drop_last,
            self.position,
        )

    def order(self, settings: Settings) -> EpochOrder:
        """The order of its samples."""
        nbytes = 0 if self.view is None else self.view.schema.fixed_nbytes
        return EpochOrder(
            self.samples, shuffle=settings.shuffle, seed=settings.seed, epoch=self.epoch, nbytes=nbytes
        )  # fmt: skip

    def left(self, settings: Settings) -> tuple[Int64s, Int64s]:
        """With something lost: the positions that are left of the order of the whole epoch, and the indices in the view
        of the samples there."""
        samples, position = self.of
        positions = np.arange(position, samples, dtype=np.int64)
        indices = replace(self, samples=samples).order(settings)[positions]
        kept = ranges.positions(ranges.difference([(0, samples)], self.lost))
        here = np.isin(indices, kept)
        return positions[here], np.searchsorted(kept, indices[here])

    def to_json(self, sent: View | None = None) -> dict[str, Any]:
        """Plain values; a part is a row of seven. Of the view that was ``sent`` before only its version."""
        view = self.view
        value = {name: getattr(self, name) for name in self.__dataclass_fields__}
        if view is not None:
            value["view"] = {"version": view.version}
            if view is not sent:
                value["view"] |= {"dataset": view.dataset, "schema": view.schema.to_json(), "parts": rows(view.parts)}
                value["view"]["in_parts"] = view.in_parts
        return value

    @classmethod
    def from_json(cls, value: dict[str, Any], sent: View | None = None) -> Self:
        """What :meth:`to_json` gave."""
        described = value.pop("view")
        value = {**value, "lost": ranges.pairs(value["lost"]), "of": tuple(value["of"])}
        if described is None or "parts" not in described:
            return cls(**value, view=None if described is None else sent)
        schema, parts = Schema.from_json(described["schema"]), tuple(ShardFile(*row) for row in described["parts"])
        view = View(described["version"], described["dataset"], schema, parts, described["in_parts"])
        return cls(**value, view=view)


@dataclass(frozen=True, slots=True)
class Begun:
    """What the training process knows of the plan of an epoch."""

    generation: int
    epoch: int
    version: int
    """Of the snapshot."""
    steps: Steps
    """How it is cut into batches."""

    @classmethod
    def of(cls, plan: EpochPlan, settings: Settings) -> Self:
        """That of this plan."""
        version = 0 if plan.view is None else plan.view.version
        return cls(plan.generation, plan.epoch, version, plan.steps(settings))

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Self:
        """What :meth:`to_json` gave."""
        return cls(**{**value, "steps": Steps(**value["steps"])})


def rows(parts: Sequence[ShardFile]) -> list[list[Any]]:
    """Parts as plain values."""
    return [list(part) for part in parts]


def where_dict(where: Where) -> dict[str, list[Value]]:
    """The selection as a user could give it, for states and messages."""
    return {name: list(values) for name, values in where}
