"""Half-open ranges ``(start, stop)`` of whole numbers: draws of a pass, samples of an epoch.

Functions that treat ranges as a set of numbers accept them in any order, overlapping, and as lists from JSON. The sets
that they return are sorted, disjoint and without empty ranges. The functions :func:`positions`, :func:`joined` and
:func:`between` treat ranges as a sequence and keep their order, because the draws of a shard are in the order of its
samples.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from operator import itemgetter

import numpy as np
import numpy.typing as npt

__all__ = [
    "Range",
    "Ranges",
    "between",
    "difference",
    "joined",
    "overlaps",
    "pairs",
    "positions",
    "runs",
    "total",
    "union",
]

Range = tuple[int, int]
Ranges = tuple[Range, ...]


def pairs(ranges: Iterable[Iterable[int]]) -> Ranges:
    """Convert ranges that may be lists from JSON to tuples; their order and content stay."""
    return tuple((start, stop) for start, stop in ranges)


def runs(start: int, flags: npt.NDArray[np.bool_]) -> Ranges:
    """Return the ranges of the numbers whose flag is set; ``flags[0]`` belongs to the number ``start``."""
    edges = np.flatnonzero(np.diff(flags, prepend=False, append=False)) + start
    return pairs(edges.reshape(-1, 2).tolist())


def positions(ranges: Iterable[Sequence[int]]) -> npt.NDArray[np.int64]:
    """Return all numbers in these ranges in their order, int64, (:func:`total`,)."""
    # The empty array gives a result for no ranges, for which np.concatenate() alone raises an error, and fixes the
    # dtype.
    return np.concatenate([np.zeros(0, dtype=np.int64), *(np.arange(start, stop) for start, stop in ranges)])


def total(ranges: Iterable[Sequence[int]]) -> int:
    """Return the sum of the lengths of these ranges, which must be disjoint."""
    return sum(stop - start for start, stop in ranges)


def joined(ranges: Iterable[Sequence[int]]) -> Ranges:
    """Join each range with the one before it where the two touch or overlap."""
    out: list[Range] = []
    for start, stop in ranges:
        if out and out[-1][0] <= start <= out[-1][1]:
            out[-1] = out[-1][0], max(out[-1][1], stop)
        elif start < stop:
            out.append((start, stop))
    return tuple(out)


def between(ranges: Iterable[Sequence[int]], first: int, last: int) -> Ranges:
    """Return the numbers of a sequence of ranges whose index is from ``first`` to below ``last``."""
    out, at = [], 0
    for start, stop in ranges:
        low, high = max(first - at, 0), min(last - at, stop - start)
        if low < high:
            out.append((start + low, start + high))
        at += stop - start
    return tuple(out)


def union(ranges: Iterable[Sequence[int]]) -> Ranges:
    """Return the numbers that are in at least one of ``ranges``."""
    return joined(sorted(pairs(ranges)))


def difference(ranges: Iterable[Sequence[int]], others: Iterable[Sequence[int]]) -> Ranges:
    """Return the numbers that are in ``ranges`` and not in ``others``."""
    left: list[Range] = []
    holes = union(others)
    for start, stop in union(ranges):
        # Bisection finds the holes that overlap this range. A scan of all holes for each range would take quadratic
        # time, and a source may have many claims.
        for low, high in holes[bisect_right(holes, start, key=itemgetter(1)) : bisect_left(holes, (stop,))]:
            left.append((start, low))
            start = high
        left.append((start, stop))
    return joined(left)


def overlaps(ranges: Sequence[Range], start: int, stop: int) -> bool:
    """Return True if a range contains a number from ``start`` to below ``stop``; ``ranges`` is sorted and disjoint."""
    after = bisect_left(ranges, (stop,))
    return after > 0 and ranges[after - 1][1] > start
