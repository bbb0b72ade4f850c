"""The order in which a source is drawn: its units in a seeded order, then the samples inside each in one of their own.

::

    units (sizes)     0: 4    1: 4    2: 3          what is fetched together
    drawn             1 1 1 1   2 2 2   0 0 0 0     is drawn together
    positions         0 . . .   4 . .   7 . . 10    claims that end where a unit does fetch nothing twice

Several caches share a source without a word between them, by parts of its order::

    home numbers      unit 1: 0   unit 2: 1   unit 0: 2      places in the order of pass 0, segment after segment
    part 0 of 2       unit 1, unit 0                         home numbers that are 0 modulo 2, in every pass
    part 1 of 2       unit 2

Where every unit is one sample the order is computed and never stored; otherwise 16 bytes a unit of the part are.
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
    """Positions of a pass over a source, as draws."""

    def __getitem__(self, positions: Any) -> Any:
        """The draws at ``positions``, an int64 array."""
        ...

    def unit_end(self, start: int, stop: int) -> int:
        """Where to end a run of positions from ``start`` that should end near ``stop`` so that it splits no unit."""
        ...


class PartOrder:
    """One part of a pass over a source; see :class:`DrawOrder`.

    ``sizes`` are the samples of each unit, or the number of units of one sample each. ``segments`` are the places
    between the segments of this pass, ``home`` those between all segments of the source, both counted in samples;
    ``segments`` is made of some of ``home``. Each segment is drawn after all before it, so that one more moves nothing.

    A source cut into ``cut`` parts has in ``part`` the units whose home number is ``part`` modulo ``cut``: in pass 0 by
    that number, later in a seeded order of each segment. The order inside a unit depends on no cut. A source in one
    part is drawn in each pass in an order of all its units.
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
    ) -> None:
        if not isinstance(sizes, int) and (sizes == 1).all():
            sizes = len(sizes)
        self._part, self._cut, self._seed = part, cut, seed
        self._sizes = None if isinstance(sizes, int) else sizes
        self._units = sizes if isinstance(sizes, int) else len(sizes)
        segments, home = self._in_units(segments), self._in_units(home)
        # Counted up to the first segment, so that the orders inside units stay as they are when the source grows.
        self._inside = None if sequential else pass_number * (segments[0] if segments else self._units)
        self._home: SegmentedOrder | None = None
        label = ""
        if cut > 1:
            label = f"{part}/{cut}"
            self._home = SegmentedOrder(self._units, seed=seed, segments=home, sequential=sequential)
            sequential = sequential or pass_number == 0
            segments = [part_size(place, part, cut) for place in segments]
        count = part_size(self._units, part, cut)
        # A part has no unit of a segment that is shorter than the cut.
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
        """Places between samples as places between units."""
        if self._sizes is None:
            return list(places)
        ends: list[int] = (np.searchsorted(np.cumsum(self._sizes), np.array(places, dtype=np.int64)) + 1).tolist()
        return ends

    def _unit_at(self, places: _Numbers) -> _Numbers:
        """The units at these places of the part."""
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
        by_unit = np.argsort(places, axis=None, kind="stable")
        cuts = np.flatnonzero(np.diff(places.flat[by_unit])) + 1
        for group in np.split(by_unit, cuts) if at.size else ():
            place = int(places.flat[group[0]])
            unit = int(self._drawn[place])
            size = int(self._sizes[unit])
            inside = at.flat[group] - (int(self._ends[place]) - size)
            if size > 1 and self._inside is not None:
                # Another order in each unit: else all chunks of one size would be gone through alike.
                inside = Permutation(size, seed=self._seed, pass_number=self._inside + unit)[inside]
            out.flat[group] = self._first[unit] + inside
        return out

    def unit_end(self, start: int, stop: int) -> int:
        """The last end of a unit up to ``stop``, or the first one behind ``start``."""
        if self._drawn is None:
            return stop
        last = int(np.searchsorted(self._ends, stop, side="right")) - 1
        if last >= 0 and self._ends[last] > start:
            return int(self._ends[last])
        return int(self._ends[np.searchsorted(self._ends, start, side="right")])

    def limit(self, upto: int) -> int:
        """How many of the first ``upto`` draws of pass 0 over the whole source are in this part."""
        if self._home is None:
            return min(upto, len(self))
        if self._sizes is None:
            return part_size(min(upto, self._units), self._part, self._cut)
        sizes = self._sizes[self._home[np.arange(self._units, dtype=np.int64)]]
        # Of each unit in the order of pass 0 so many samples: all, those that are left of `upto`, none.
        taken = np.clip(upto - (np.cumsum(sizes) - sizes), 0, sizes)
        return int(taken[self._part :: self._cut].sum())
