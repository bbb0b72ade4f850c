"""The order in which a source is drawn: its units in a seeded order, then the samples inside each unit in an order of
their own.

::

Several caches share a source without communication, by parts of its order::

    home numbers      unit 1: 0   unit 2: 1   unit 0: 2      places in the order of pass 0, segment after segment
    part 0 of 2       unit 1, unit 0                         home numbers that are 0 modulo 2, in every pass
    part 1 of 2       unit 2

If every unit is one sample, the order is computed and never stored. Otherwise it takes 16 bytes for each unit of the
part.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from cachetool.core.permutation import Permutation, SegmentedOrder, part_size

__all__ = ["DrawOrder", "PartOrder"]

_Numbers = npt.NDArray[np.int64]


class DrawOrder(Protocol):
    """The draws of a pass over a source, by position."""

    def __getitem__(self, positions: Any) -> Any:
        """Return the draws at ``positions``, an int64 array."""
        ...

    def unit_end(self, start: int, stop: int) -> int:
        """Return where to end a run of positions that begins at ``start`` and should end near ``stop``, without
        splitting a unit."""
        ...


class PartOrder:
    """One part of a pass over a source; see :class:`DrawOrder`.

    ``sizes`` are the numbers of samples of the units, or the number of units of one sample each. ``segments`` are the
    bounds between the segments of this pass, ``home`` the bounds between all segments of the source. Both count
    samples, and ``segments`` is a subset of ``home``. Each segment is drawn after all earlier ones, so a new segment
    moves no draw.

    A source is cut into ``cut`` parts. ``part`` has the units whose home number is ``part`` modulo ``cut``. In pass 0
    they come by home number, later in a seeded order of each segment. The order inside a unit does not depend on the
    cut; with ``in_rows`` it is that of the file. A source in one part is drawn in each pass in an order of all its
    units.
    """

    def __init__(
        self,
        sizes: _Numbers | int,
        *,
        seed: int = 0,
        pass_number: int = 0,
        segments: Sequence[int] = (),
        home: Sequence[int] = (),
        part: int = 0,
        cut: int = 1,
        sequential: bool = False,
        in_rows: bool = False,
    ) -> None:
        # Units of one sample each need no stored order: positions are units.
        if not isinstance(sizes, int) and (sizes == 1).all():
            sizes = len(sizes)
        self._part, self._cut, self._seed = part, cut, seed
        self._sizes = None if isinstance(sizes, int) else sizes
        self._units = sizes if isinstance(sizes, int) else len(sizes)
        segments, home = self._in_units(segments), self._in_units(home)
        # The number seeds the orders inside units. It uses the first segment's length only, so these orders do not
        # change when the source grows by a segment.
        self._inside = None if sequential or in_rows else pass_number * (segments[0] if segments else self._units)
        self._home: SegmentedOrder | None = None
        label = ""
        if cut > 1:
            label = f"{part}/{cut}"
            self._home = SegmentedOrder(self._units, seed=seed, segments=home, sequential=sequential)
            # In pass 0 the home order is already the seeded order, so the part is walked by home number.
            sequential = sequential or pass_number == 0
            segments = [part_size(place, part, cut) for place in segments]
        count = part_size(self._units, part, cut)
        # A segment that is shorter than the cut has no unit in some parts, so two bounds may fall together.
        places = sorted({place for place in segments if 0 < place < count})
        self._order = SegmentedOrder(
            count, seed=seed, pass_number=pass_number, segments=places, part=label, sequential=sequential
        )
        self._drawn: _Numbers | None = None
        if self._sizes is not None:
            self._drawn = self._unit_at(np.arange(count, dtype=np.int64))
            self._first = np.cumsum(self._sizes) - self._sizes
            self._ends = np.cumsum(self._sizes[self._drawn])

    def _in_units(self, places: Sequence[int]) -> list[int]:
        """Return bounds between samples as bounds between units."""
        if self._sizes is None:
            return list(places)
        ends: list[int] = (np.searchsorted(np.cumsum(self._sizes), np.array(places, dtype=np.int64)) + 1).tolist()
        return ends

    def _unit_at(self, places: _Numbers) -> _Numbers:
        """Return the units at these places of the part."""
        units = self._order[places]
        return units if self._home is None else self._home[self._part + self._cut * units]

    def __len__(self) -> int:
        if self._drawn is None:
            return len(self._order)
        return int(self._ends[-1]) if len(self._ends) else 0

    def __getitem__(self, positions: Any) -> _Numbers:
        at = np.asarray(positions, dtype=np.int64)
        if self._drawn is None or self._sizes is None:
            return self._unit_at(at)
        if at.size and (int(at.min()) < 0 or int(at.max()) >= len(self)):
            raise IndexError(f"position outside 0 .. {len(self) - 1}")
        places = np.searchsorted(self._ends, at, side="right")
        out = np.empty_like(at)
        # Positions are grouped by unit, so that each unit's permutation is computed once for all of its positions.
        by_unit = np.argsort(places, axis=None, kind="stable")
        cuts = np.flatnonzero(np.diff(places.flat[by_unit])) + 1
        for group in np.split(by_unit, cuts) if at.size else ():
            place = int(places.flat[group[0]])
            unit = int(self._drawn[place])
            size = int(self._sizes[unit])
            inside = at.flat[group] - (int(self._ends[place]) - size)
            if size > 1 and self._inside is not None:
                # Each unit gets its own order. Otherwise all chunks of one size would be drawn in the same inner order.
                inside = Permutation(size, seed=self._seed, pass_number=self._inside + unit)[inside]
            out.flat[group] = self._first[unit] + inside
        return out

    def unit_end(self, start: int, stop: int) -> int:
        """Return the last end of a unit up to ``stop``, or the first one after ``start``."""
        if self._drawn is None:
            return stop
        last = int(np.searchsorted(self._ends, stop, side="right")) - 1
        if last >= 0 and self._ends[last] > start:
            return int(self._ends[last])
        return int(self._ends[np.searchsorted(self._ends, start, side="right")])

    def limit(self, upto: int) -> int:
        """Return how many of the first ``upto`` draws of pass 0 over the whole source are in this part."""
        if self._home is None:
            return min(upto, len(self))
        if self._sizes is None:
            return part_size(min(upto, self._units), self._part, self._cut)
        sizes = self._sizes[self._home[np.arange(self._units, dtype=np.int64)]]
        # For each unit in the order of pass 0 the number of its samples among the first `upto`: all, some of the last
        # unit, none.
        taken = np.clip(upto - (np.cumsum(sizes) - sizes), 0, sizes)
        return int(taken[self._part :: self._cut].sum())
