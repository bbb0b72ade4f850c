"""The figures of a report as numbers: the present state, its history, and shards and times in bins.

Twenty thousand shards become a few dozen bars here, so a page stays small whatever the cache holds.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from cachetool.cache import CacheDir
from cachetool.cache.history import History, history_of, present

__all__ = ["Bins", "Figures", "figures", "waiting"]

_BINS = 48
_BINS_OF_SHARDS = 20
_BEGIN = 60.0
"""Maximum of seconds from the making of the cache to the first point, for it to be drawn as empty at first."""

_AT_ONCE = ("evict", "moved", "corrupt")
"""Reasons of evictions that happen at one moment, without a pull."""

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Bins:
    """Values in neighbouring ranges."""

    edges: Floats
    """The edges of the bins: one more than there are bins."""
    series: Mapping[str, Floats]
    """A value for each bin, by name."""

    @property
    def most(self) -> float:
        """Return the largest sum of a bin."""
        return float(sum(self.series.values(), start=np.zeros(len(self.edges) - 1)).max(initial=0.0))


@dataclass(frozen=True, slots=True)
class Figures:
    """The figures that a page shows."""

    stats: Mapping[str, Any]
    """The fields of :class:`cachetool.cache.Stats`."""
    dataset: str | None
    """The only dataset of which shards, sources and epochs are shown; None for all."""
    taken_at: float
    """The time at which the figures were taken, in seconds since 1970."""
    history: History
    """The history of the cache, with one more point for the present state."""
    age: Bins | None
    """Bytes of shards by their age in seconds: read, unread, retiring. None without shards."""
    size: Bins | None
    """Number of shards by the logarithm (base 10) of their bytes."""

    @property
    def drawable(self) -> bool:
        """Return True if there is a history: at least two points, at different times."""
        points = self.history.points
        return len(points) > 1 and points[-1]["at"] > points[0]["at"]

    def rates(self) -> Bins:
        """Return the bytes fetched a second, over time."""
        edges = self._edges()
        return Bins(edges, {"fetched": self._grown("fetched", edges) / np.diff(edges)})

    def evictions(self) -> Bins:
        """Return the bytes evicted over time, by reason."""
        edges = self._edges()
        reasons = sorted({reason for point in self.history.points for reason in point["evicted"]})
        return Bins(edges, {reason: self._grown("evicted", edges, reason) for reason in reasons})

    def _edges(self) -> Floats:
        points = self.history.points
        return np.linspace(points[0]["at"], points[-1]["at"], _BINS + 1)

    def _grown(self, name: str, edges: Floats, reason: str | None = None) -> Floats:
        """Return how much a total that only grows gained in each bin."""
        points = self.history.points
        totals = [point[name] if reason is None else point[name].get(reason, 0) for point in points]
        # A total seems to shrink when a catalog was rebuilt or a clock was set back; it gained
        # nothing then.
        gained = np.maximum(0.0, np.diff(np.array(totals, dtype=np.float64)))
        times = np.array([point["at"] for point in points])
        ends = times[1:]
        # A gain is spread evenly from point to point, because a pull makes a point at both of its
        # ends. An eviction that happens at one moment counts at the later point only.
        begins = ends if reason in _AT_ONCE else times[:-1]
        shares = np.clip((edges[:, None] - ends) / np.maximum(ends - begins, 1e-9) + 1.0, 0.0, 1.0)
        gain_per_bin: Floats = np.diff(shares @ gained)
        return gain_per_bin


def figures(cache: CacheDir, dataset: str | None = None) -> Figures:
    """Return the figures of a cache, or of one dataset of it. Raises :class:`UsageError` for an unknown dataset."""
    stats = cache.stats(dataset).as_dict()
    history = history_of(cache.layout, dataset=dataset)
    shards = cache.shards(dataset, retiring=True)
    now = time.time()
    created = np.array([shard.created for shard in shards], dtype=np.float64)
    sizes = np.array([shard.bytes for shard in shards], dtype=np.float64)
    state = np.array([2 if shard.state == "retiring" else 0 if shard.epochs else 1 for shard in shards], dtype=np.int64)
    points = _points(cache, stats, history, now)
    return Figures(
        stats,
        dataset,
        now,
        History(points, history.epochs),
        _ages(np.maximum(0.0, now - created), sizes, state) if len(shards) else None,
        _sizes(sizes) if len(shards) else None,
    )


def waiting(epochs: Sequence[Mapping[str, Any]]) -> float | None:
    """Return the part of their time that epochs waited; None if no loader told it."""
    timed = [row for row in epochs if row["waited"] is not None and row["seconds"]]
    seconds = sum(row["seconds"] for row in timed)
    return min(1.0, sum(row["waited"] for row in timed) / seconds) if seconds else None


def _points(cache: CacheDir, stats: Mapping[str, Any], history: History, now: float) -> list[dict[str, Any]]:
    """Return the history with a point for the present state, and a point for the empty cache if it was just made
    then."""
    with cache.catalog.read() as connection:
        newest = present(connection, cache.layout)
        times = connection.execute(
            "SELECT (SELECT min(created) FROM datasets) AS began, (SELECT max(created) FROM shards) AS committed,"
            " (SELECT max(at) FROM events) AS told"
        ).fetchone()
    points, began = list(history.points), times["began"]
    # While nobody uses the cache, its present state is as old as the last change. A point of now
    # would draw a flat line over days.
    if not (stats["leases"] or stats["reserved"] or stats["pulls"]):
        moments = [point["at"] for point in points[-1:]] + [row["ended"] for row in history.epochs[-1:]]
        moments += [at for at in times if at is not None]
        newest["at"] = min(now, max(moments, default=now))
    if points and began is not None and 0 < points[0]["at"] - began < _BEGIN:
        empty = {"shards": 0, "samples": 0, "fetched": 0, "served": 0, "evicted": {}}
        least = stats["overhead"] + stats["listings"]
        points.insert(0, {**points[0], "at": began, "used": min(least, points[0]["used"]), **empty})
    if points and newest["at"] <= points[-1]["at"]:
        # The point is of the same moment, or the clock was set back.
        newest["at"] = points.pop()["at"]
    return [*points, newest]


def _ages(ages: Floats, sizes: Floats, state: npt.NDArray[np.int64]) -> Bins:
    edges = np.linspace(0.0, max(float(ages.max()), 1.0), _BINS_OF_SHARDS + 1)
    names = ("read by an epoch", "not read yet", "retiring")
    return Bins(
        edges,
        {
            name: np.histogram(ages[state == number], edges, weights=sizes[state == number])[0]
            for number, name in enumerate(names)
        },
    )


def _sizes(sizes: Floats) -> Bins:
    logs = np.log10(np.maximum(sizes, 1.0))
    # The range is at least from half to twice the mean size, because mostly all shards are of one
    # size.
    low, high = min(float(logs.min()), float(logs.mean()) - math.log10(2)), float(logs.max())
    edges = np.linspace(low, max(high, float(logs.mean()) + math.log10(2)), _BINS_OF_SHARDS + 1)
    return Bins(edges, {"shards": np.histogram(logs, edges)[0].astype(np.float64)})
