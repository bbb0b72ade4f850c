"""Items: the samples of a view that an epoch reads, or the crops of these samples, as the numbers that it counts,
shuffles and divides.

::

    number 0, 1, 2, ...  -- of a selection -->  sample, crop  -->  code = sample * crops + crop

A code says which sample of the view is read, and which crop of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from cachetool.core.schema import Schema
from cachetool.formats.runs import Int64s, ends
from cachetool.loaders.crop import Crops
from cachetool.loaders.read.mapped import MappedParts
from cachetool.loaders.selection import ByPart, Selection
from cachetool.loaders.series import Series, neighbours
from cachetool.loaders.settings import Settings
from cachetool.loaders.view import View

__all__ = ["Items", "Numbers"]


class Numbers(NamedTuple):
    """The items of one view."""

    total: int
    chosen: Int64s | None = None
    """Samples of the view that take part, ascending, (n,); None: all."""
    crops: int = 1
    """Most crops of a sample."""
    starts: Int64s | None = None
    """Number of the first crop of each sample that takes part, and the number of all crops, (n + 1,); None if each
    sample has as many."""
    neighbours: Mapping[int, Int64s] = {}
    """For each number of rows the index of the sample that lies so far behind each sample of the view, (samples,)."""
    alone: int = 0
    """Samples that are left out because the cache lacks a neighbour of them."""

    def codes(self, numbers: Int64s) -> Int64s:
        """Return the codes of items, (k,)."""
        if self.crops == 1 and self.starts is None:
            return numbers if self.chosen is None else self.chosen[numbers]
        if self.starts is None:
            samples, crops = np.divmod(numbers, self.crops)
        else:
            samples = np.searchsorted(self.starts, numbers, side="right") - 1
            crops = numbers - self.starts[samples]
        if self.chosen is not None:
            samples = self.chosen[samples]
        codes: Int64s = samples * self.crops + crops
        return codes

    def samples(self, codes: Int64s) -> Int64s:
        """Return the samples of these codes, (k,)."""
        return codes if self.crops == 1 else codes // self.crops


class Items:
    """A finder of the items of views."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        # Neighbours lie on both sides of a split by single keys, so windows are divided in longer runs below.
        split = None if settings.offsets else settings.split
        chooses = split is not None or settings.where is not None
        self._selection = Selection(split, settings.validation, settings.where) if chooses else None
        self._series = Series()
        self._grids = ByPart()
        self._of: tuple[View, Numbers] | None = None

    @property
    def chooses(self) -> bool:
        """True if not all samples of a view take part."""
        return self._selection is not None or bool(self._settings.offsets)

    def of(self, view: View) -> Numbers:
        """Return the items of a view.

        Raises :class:`UsageError` for fields that ``view`` lacks, or that have no such crops or windows.
        """
        # Of the same object, because an epoch asks again and again.
        if self._of is None or self._of[0] is not view:
            self._of = view, self._numbers(view)
        return self._of[1]

    def _numbers(self, view: View) -> Numbers:
        chosen = None if self._selection is None else self._selection.chosen(view)
        numbers = Numbers(view.samples if chosen is None else len(chosen), chosen)
        if self._settings.offsets:
            numbers = self._complete(view, numbers)
        crops = self._settings.crop
        if crops is None:
            return numbers
        if (each := crops.each(view.schema)) is not None:
            return numbers._replace(total=numbers.total * each, crops=each)
        counts = self._counts(view, crops)
        most = int(counts.max(initial=1))
        starts = ends(counts if numbers.chosen is None else counts[numbers.chosen])
        return numbers._replace(total=int(starts[-1]), crops=most, starts=starts)

    def _complete(self, view: View, numbers: Numbers) -> Numbers:
        """Return the items of which all neighbours are in the view, on the same side of a split."""
        settings = self._settings
        codes = self._series.codes(view)
        found = neighbours(codes, sorted({offset for _, offsets in settings.offsets for offset in offsets}))
        there, side = np.ones(view.samples, dtype=np.bool_), None
        if settings.split is not None:
            side = self._series.held_out(codes, settings.validation) == (settings.split == "validation")
            there &= side
        if numbers.chosen is not None:
            where = np.zeros(view.samples, dtype=np.bool_)
            where[numbers.chosen] = True
            there &= where
        asked = int(there.sum())
        for indices in found.values():
            there &= indices >= 0
            if side is not None:
                there &= side[indices]
        chosen = np.flatnonzero(there)
        return Numbers(len(chosen), chosen, neighbours=found, alone=asked - len(chosen))

    def _counts(self, view: View, crops: Crops) -> Int64s:
        """Return the number of boxes of a grid over each sample, (samples,).

        Raises :class:`UsageError` for a sample with different numbers of boxes in its fields.
        """
        schema = view.schema.select([name for name, _ in crops.boxes])
        by_part = self._grids.of(view, lambda parts, indices, places: _boxes(parts, indices, places, schema, crops))
        return np.concatenate([*by_part, np.empty(0, dtype=np.int64)])


def _boxes(view: View, indices: Int64s, places: MappedParts, schema: Schema, crops: Crops) -> Int64s:
    """Return the number of boxes of a grid over each of these samples, (k,), the same for all fields of ``schema``."""
    counts = {}
    located = places.locate(view, indices, schema)
    for field in schema:
        shapes = np.zeros((len(indices), field.rank), dtype=np.int64)
        for to, runs in located:
            there = runs[field.name].shapes
            shapes[slice(None) if to is None else to] = field.sizes if there is None else there
        counts[field.name] = crops.grid(shapes, crops.box(field)).prod(axis=1)
    first: Int64s = next(iter(counts.values()))
    for of_field in counts.values():
        if len(different := np.flatnonzero(of_field != first)):
            raise crops.unequal({name: int(numbers[different[0]]) for name, numbers in counts.items()})
    return first
