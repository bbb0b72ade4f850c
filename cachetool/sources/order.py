"""The order in which a source is drawn: its units in a seeded order, then the samples inside each in one of their own.

::

    units (sizes)     0: 4    1: 4    2: 3          what is fetched together
    drawn             1 1 1 1   2 2 2   0 0 0 0     is drawn together
    positions         0 . . .   4 . .   7 . . 10    claims that end where a unit does fetch nothing twice

Where every unit is one sample this is :class:`cachetool.core.permutation.Permutation` itself, computed and never
stored; otherwise 8 bytes a unit are.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from cachetool.core.permutation import Permutation

__all__ = ["DrawOrder", "SequentialOrder", "SingleOrder", "UnitOrder", "order_of"]

_Numbers = npt.NDArray[np.int64]


class DrawOrder(Protocol):
    """Positions of a pass over a source, as draws."""

    def __getitem__(self, positions: Any) -> Any:
        """The draws at ``positions``, an int64 array."""
        ...

    def unit_end(self, start: int, stop: int) -> int:
        """Where to end a run of positions from ``start`` that should end near ``stop`` so that it splits no unit."""
        ...


class SingleOrder(Permutation):
    """Units of one sample each."""

    __slots__ = ()

    def unit_end(self, start: int, stop: int) -> int:
        """Nothing can be split."""
        return stop


class UnitOrder:
    """Units of ``sizes`` samples, numbered one after another; see :class:`DrawOrder`."""

    def __init__(self, sizes: _Numbers, *, seed: int = 0, pass_number: int = 0) -> None:
        self._seed, self._turn = seed, pass_number
        self._units: _Numbers = Permutation(len(sizes), seed=seed, pass_number=pass_number)[
            np.arange(len(sizes), dtype=np.int64)
        ]
        self._first = np.cumsum(sizes) - sizes
        self._ends = np.cumsum(sizes[self._units])

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def __getitem__(self, positions: Any) -> _Numbers:
        at = np.asarray(positions, dtype=np.int64)
        if at.size and (int(at.min()) < 0 or int(at.max()) >= len(self)):
            raise IndexError(f"position outside 0 .. {len(self) - 1}")
        found = np.searchsorted(self._ends, at, side="right")
        out = np.empty_like(at)
        by_unit = np.argsort(found, axis=None, kind="stable")
        cuts = np.flatnonzero(np.diff(found.flat[by_unit])) + 1
        for mine in np.split(by_unit, cuts) if at.size else ():
            place = int(found.flat[mine[0]])
            start = int(self._ends[place - 1]) if place else 0
            unit, size = int(self._units[place]), int(self._ends[place]) - start
            inside = at.flat[mine] - start
            if size > 1:
                # Another order in each unit: else all chunks of one size would be gone through alike.
                inside = Permutation(size, seed=self._seed, pass_number=self._turn * len(self._units) + unit)[inside]
            out.flat[mine] = self._first[unit] + inside
        return out

    def unit_end(self, start: int, stop: int) -> int:
        """The last end of a unit up to ``stop``, or the first one behind ``start``."""
        return _whole(self._ends, start, stop)


class SequentialOrder:
    """Everything in its place, unit after unit."""

    def __init__(self, sizes: _Numbers | int) -> None:
        self._ends = None if isinstance(sizes, int) else np.cumsum(sizes)
        self._count = sizes if isinstance(sizes, int) else int(np.sum(sizes))

    def __getitem__(self, positions: Any) -> _Numbers:
        at = np.array(positions, dtype=np.int64)
        if at.size and (int(at.min()) < 0 or int(at.max()) >= self._count):
            raise IndexError(f"position outside 0 .. {self._count - 1}")
        return at

    def unit_end(self, start: int, stop: int) -> int:
        """As :meth:`UnitOrder.unit_end`."""
        return stop if self._ends is None else _whole(self._ends, start, stop)


def _whole(ends: _Numbers, start: int, stop: int) -> int:
    last = int(np.searchsorted(ends, stop, side="right")) - 1
    if last >= 0 and ends[last] > start:
        return int(ends[last])
    return int(ends[np.searchsorted(ends, start, side="right")])


def order_of(sizes: _Numbers | int, *, seed: int, pass_number: int, sequential: bool = False) -> DrawOrder:
    """The order of units of ``sizes`` samples, or of so many units of one sample each."""
    if sequential:
        return SequentialOrder(sizes)
    if isinstance(sizes, int):
        return SingleOrder(sizes, seed=seed, pass_number=pass_number)
    if (sizes == 1).all():
        return SingleOrder(len(sizes), seed=seed, pass_number=pass_number)
    return UnitOrder(sizes, seed=seed, pass_number=pass_number)
