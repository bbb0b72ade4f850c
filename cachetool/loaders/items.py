"""Items: the samples of a view that an epoch reads, or the crops of these samples, as the numbers that it counts,
shuffles and divides.

::

    number 0, 1, 2, ...  -- of a selection -->  sample, crop  -->  code = sample * crops + crop

A code says which sample of the view is read, and which crop of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from cachetool.core.block import Ragged
from cachetool.core.errors import UsageError
from cachetool.core.schema import KEY, Schema
from cachetool.core.text import shown
from cachetool.formats.runs import Int64s, ends
from cachetool.loaders.crop import Crops
from cachetool.loaders.mixture import Group, Shares, shares
from cachetool.loaders.read.gather import gather
from cachetool.loaders.read.mapped import MappedParts
from cachetool.loaders.sample_weights import Floats, SampleWeights
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
    groups: tuple[Group, ...] = ()
    """The items of each group of a mixture, whose items are drawn in a ratio; empty without a mixture."""
    ratio: Shares = ()
    """The shares of the groups, if the samples decide them."""
    weights: Floats | None = None
    """The weight of each sample of the view, if items are drawn by weights, (samples,)."""
    ends: Floats | None = None
    """The sum of the weights up to and with each item."""

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

    def before(self, sample: int) -> int:
        """Return the number of items of the samples before this one."""
        at = sample if self.chosen is None else int(np.searchsorted(self.chosen, sample))
        return at * self.crops if self.starts is None else int(self.starts[at])


class Items:
    """A finder of the items of views."""

    def __init__(self, settings: Settings, weights: SampleWeights | None = None) -> None:
        self._settings, self._weights = settings, weights
        # Neighbours lie on both sides of a split by single keys, so windows are divided in longer runs below.
        split = None if settings.offsets else settings.split
        chooses = split is not None or settings.where is not None
        self._selection = Selection(split, settings.validation, settings.where) if chooses else None
        self._series = Series()
        self._grids, self._labels = ByPart(), ByPart()
        self._values: dict[bytes, int] = {}
        """A number for each text of the field ``balance``, in the order in which this process met them."""
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
            self._of = view, self._grouped(view, self._numbers(view))
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

    def _grouped(self, view: View, numbers: Numbers) -> Numbers:
        """Return the items with the groups of a mixture."""
        mixture = self._settings.mixture
        if mixture is None:
            return numbers
        if mixture.sample_weights:
            return numbers if self._weights is None else self._weighted(view, numbers, self._weights)
        if mixture.balance is None:
            firsts = [numbers.before(int(view.starts[part])) for part in np.cumsum([0, *view.members]).tolist()]
            return numbers._replace(groups=tuple(map(range, firsts, firsts[1:])))
        values = self._labels_of(view, mixture.balance)
        values = values[numbers.samples(numbers.codes(np.arange(numbers.total, dtype=np.int64)))]
        order = np.argsort(values, kind="stable")
        groups = np.split(order, np.flatnonzero(np.diff(values[order])) + 1) if len(order) else []
        texts = {number: text.decode(errors="backslashreplace") for text, number in self._values.items()}
        field = view.schema[mixture.balance]
        for value, _ in mixture.weights_by:
            if isinstance(value, str) != (field.kind in ("str", "bytes")):
                raise UsageError(
                    f"weights_by= names {shown(value)}, but {shown(field.name)} holds {field.describe()}; use its"
                    " values"
                )
        # In the order of the values, which is the same in all processes.
        unsigned = field.kind == "fixed" and field.numpy.kind == "u"
        firsts = [values[group[:1]].view(np.uint64 if unsigned else np.int64).tolist()[0] for group in groups]
        named = sorted(
            ((texts.get(first, first), group) for first, group in zip(firsts, groups, strict=True)),
            key=lambda one: one[0],
        )
        weights = [mixture.weight_of(value) for value, _ in named]
        there = [group for (_, group), weight in zip(named, weights, strict=True) if weight]
        if groups and not there:
            raise UsageError(f"weights_by= has the weight 0 for all values of {shown(field.name)}; give one a weight")
        ratio = shares([weight for weight in weights if weight]) if there else ()
        return numbers._replace(groups=tuple(there), ratio=ratio)

    def _weighted(self, view: View, numbers: Numbers, weights: SampleWeights) -> Numbers:
        """Return the items with their weights. Raises :class:`UsageError` if there are no keys, or no weights."""
        if KEY not in view.schema or view.schema[KEY].kind not in ("str", "bytes"):
            raise UsageError(f"sample_weights= needs the field {KEY} of text; this dataset was pulled without it")
        schema = view.schema.select([KEY])

        def bits(parts: View, indices: Int64s, places: MappedParts) -> Int64s:
            return weights.of(gather(parts, indices, places, schema)[KEY]).view(np.int64)

        of_samples = np.concatenate([*self._labels.of(view, bits), np.empty(0, dtype=np.int64)]).view(np.float64)
        of_items = of_samples[numbers.samples(numbers.codes(np.arange(numbers.total, dtype=np.int64)))]
        if numbers.total and not of_items.any():
            raise UsageError(f"all {numbers.total} samples have the weight 0 in sample_weights=; give some a weight")
        return numbers._replace(weights=of_samples, ends=np.cumsum(of_items))

    def _labels_of(self, view: View, name: str) -> Int64s:
        """Return the value of a field for each sample, or the number of its text, (samples,).

        Raises :class:`UsageError` if the field is neither text nor a whole number.
        """
        if name not in view.schema:
            raise UsageError(f"balance= needs field {shown(name)}; this dataset has {', '.join(view.schema.names)}")
        field = view.schema[name]
        if field.kind not in ("str", "bytes") and not (field.is_scalar and field.numpy.kind in "biu"):
            raise UsageError(
                f"balance= cannot use field {shown(name)} ({field.describe()}); choose one of whole numbers or text"
            )
        schema = view.schema.select([name])

        def values(parts: View, indices: Int64s, places: MappedParts) -> Int64s:
            column = gather(parts, indices, places, schema)[name]
            if not isinstance(column, Ragged):
                return column.astype(np.int64)
            texts = (bytes(column[at]) for at in range(len(column)))
            return np.fromiter((self._values.setdefault(text, len(self._values)) for text in texts), np.int64)

        return np.concatenate([*self._labels.of(view, values), np.empty(0, dtype=np.int64)])

    def _complete(self, view: View, numbers: Numbers) -> Numbers:
        """Return the items of which all neighbours are in the view, on the same side of a split."""
        settings = self._settings
        codes = self._series.codes(view)
        reach = sorted({offset for _, offsets in settings.offsets for offset in offsets})
        edges = view.starts[np.cumsum([0, *(view.members or [len(view.parts)])])].tolist()
        # Datasets of a mixture may have the same keys, so each is looked at by itself.
        of_each = [neighbours(codes[first:stop], reach) for first, stop in pairwise(edges)]
        found = {
            offset: np.concatenate(
                [np.where(one[offset] < 0, -1, one[offset] + first) for one, first in zip(of_each, edges, strict=False)]
            )
            for offset in reach
        }
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
