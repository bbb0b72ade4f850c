"""Selections: the samples of a snapshot that an epoch reads, by a side of a split, by given values of fields, or both.

A selection depends on the samples alone. So it is computed once for each shard, and an epoch counts, shuffles and
divides the selected samples only. A field of numbers is compared in the column that the extents have; text is gathered.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from cachetool.core.block import Column, Ragged
from cachetool.core.errors import UsageError
from cachetool.core.schema import KEY, Field, Schema
from cachetool.core.text import shown
from cachetool.loaders.order import Int64s
from cachetool.loaders.read.gather import gather
from cachetool.loaders.read.mapped import MappedParts
from cachetool.loaders.settings import Value, Where
from cachetool.loaders.split import Split
from cachetool.loaders.view import ShardFile, View

__all__ = ["ByPart", "Selection", "WhereOption", "parse_where"]

WhereOption: TypeAlias = Mapping[str, Any]
"""Type of ``where=``: values by field; one number or text, or a set, list, tuple, range or array of them."""


def parse_where(where: object) -> Where | None:
    """Return the argument ``where`` of a loader as pairs of a field and its values, in a fixed order.

    Raises :class:`UsageError` if it names no field or no value, and for values that are neither numbers nor text.
    """
    if where is None:
        return None
    if not isinstance(where, Mapping) or not where or not all(isinstance(name, str) for name in where):
        raise UsageError(
            f"where={shown(where)} cannot be used; use a dict of fields and their values, such as {{'label': {{0, 1}}}}"
        )
    # Sorted, because states and messages compare selections by their text; the order in which a user writes them must
    # not matter.
    return tuple(sorted((name, _values(name, values)) for name, values in where.items()))


def _values(name: str, given: Any) -> tuple[Value, ...]:
    listed = [given]
    if isinstance(given, set | frozenset | list | tuple | range) or (isinstance(given, np.ndarray) and given.ndim == 1):
        listed = list(given)
    values = {_value(name, value) for value in listed}
    if not values:
        raise UsageError(f"where= has no value for field {shown(name)}, so it selects no sample; give at least one")
    if len({isinstance(value, str) for value in values}) > 1:
        raise UsageError(f"where= has both numbers and text for field {shown(name)}; a field holds one of them")
    return tuple(sorted(values))


def _value(name: str, value: Any) -> Value:
    """Return the value as a Python value. Whole numbers, 1.0 and True included, become int."""
    value = value.item() if isinstance(value, np.generic) else value
    if isinstance(value, str):
        return value
    if not isinstance(value, bool | int | float) or math.isnan(value):
        raise UsageError(
            f"where= cannot select {shown(value)} of field {shown(name)}; use numbers or text, or a set of them"
        )
    return int(value) if math.isfinite(value) and value == int(value) else value


class ByPart:
    """Arrays of numbers about the samples of shard files, computed once for each file.

    One object may serve several threads.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[str, int], Int64s] = {}

    def of(self, view: View, compute: Callable[[View, Int64s, MappedParts], Int64s]) -> list[Int64s]:
        """Return the array of each shard file of ``view``, in order.

        ``compute(view, indices, places)`` returns the array of one file, whose samples are ``indices`` of that view.
        """
        known = self._known
        fresh = {_identity(part): at for at, part in enumerate(view.parts) if _identity(part) not in known}
        computed = dict[tuple[str, int], Int64s]()
        if fresh:
            places = MappedParts()
            try:
                parts = view.only(sorted(fresh.values()))
                names = map(_identity, parts.parts)
                for name, start, stop in zip(names, parts.starts[:-1].tolist(), parts.starts[1:].tolist(), strict=True):
                    computed[name] = compute(parts, np.arange(start, stop, dtype=np.int64), places)
            finally:
                places.close()
        both = known | computed
        # A new dict that has only the shards of this view, so that evicted shards are forgotten. It replaces the old
        # dict in one step, because another thread may ask for another view meanwhile.
        self._known = {_identity(part): both[_identity(part)] for part in view.parts}
        return list(map(both.__getitem__, map(_identity, view.parts)))


class Selection:
    """The samples that ``split``, ``validation`` and ``where`` of a loader select."""

    def __init__(self, split: str | None, validation: float, where: Where | None) -> None:
        self._split = None if split is None else Split(split, validation)
        self._where = dict(where or ())
        self._by_part = ByPart()

    def chosen(self, view: View) -> Int64s:
        """Return the indices in ``view`` of the selected samples, ascending, int64.

        Raises :class:`UsageError` for a field that ``view`` lacks, and for one that cannot hold such values.
        """
        schema = self._schema(view.schema)
        wanted = {name: _stored(view.schema[name], values) for name, values in self._where.items()}
        by_part = self._by_part.of(
            view, lambda parts, indices, places: self._of_part(parts, indices, places, schema, wanted)
        )
        shifted = [indices + start for indices, start in zip(by_part, view.starts.tolist(), strict=False)]
        return np.concatenate(shifted) if shifted else np.empty(0, dtype=np.int64)

    def _schema(self, schema: Schema) -> Schema:
        """Return the schema of the fields that the selection reads."""
        names = list(self._where)
        for name in names:
            if name not in schema:
                raise UsageError(f"where= needs field {shown(name)}; this dataset has {', '.join(schema.names)}")
        if self._split is not None:
            Split.require(schema)
            names += [KEY] * (KEY not in names)
        return schema.select(names)

    def _of_part(
        self, view: View, indices: Int64s, places: MappedParts, schema: Schema, wanted: Mapping[str, Any]
    ) -> Int64s:
        columns = gather(view, indices, places, schema)
        mask = np.ones(len(indices), dtype=np.bool_)
        for name, values in wanted.items():
            mask &= _matches(columns[name], values)
        if self._split is not None:
            mask &= self._split.mask(columns[KEY])
        return np.flatnonzero(mask).astype(np.int64)


def _stored(field: Field, values: Sequence[Value]) -> Any:
    """Return the values as the field stores them: an array of its dtype, or a list of bytes for text."""
    texts = isinstance(values[0], str)
    if field.kind in ("str", "bytes"):
        if not texts:
            raise UsageError(
                f"where= gives {shown(values[0])} for field {shown(field.name)}, which holds {field.describe()};"
                " give text"
            )
        return [str(value).encode() for value in values]
    if not field.is_scalar or field.numpy.kind not in "biuf":
        raise UsageError(
            f"where= cannot select by field {shown(field.name)} ({field.describe()});"
            " choose a field that holds one number or text"
        )
    bad = [value for value in values if not _holds(field, value)]
    if bad:
        raise UsageError(
            f"where= gives {shown(bad[0])} for field {shown(field.name)}, but {field.describe()} cannot hold that"
            f" value; give {'a number' if texts else 'numbers of this type'}"
        )
    return np.array(values).astype(field.numpy)


def _holds(field: Field, value: Value) -> bool:
    if isinstance(value, str):
        return False
    if field.numpy.kind == "f":
        return True
    if field.numpy.kind == "b":
        return value in (0, 1)
    limits = np.iinfo(field.numpy)
    return isinstance(value, int) and limits.min <= value <= limits.max


def _matches(column: Column, wanted: Any) -> npt.NDArray[np.bool_]:
    """Return a mask of the samples whose value in the column is wanted."""
    if not isinstance(column, Ragged):
        return np.isin(column, wanted)
    mask = np.zeros(len(column.offsets) - 1, dtype=np.bool_)
    sizes = np.diff(column.offsets)
    # Texts of one length are compared together as fixed-width byte strings, which NumPy does for all samples at once. A
    # Python loop would take microseconds for each sample.
    for size in {len(text) for text in wanted}:
        rows = np.flatnonzero(sizes == size)
        # NumPy has no byte strings of width 0.
        if size == 0:
            mask[rows] = True
        elif len(rows):
            at = column.offsets[:-1][rows, None] + np.arange(size)
            texts = np.ascontiguousarray(column.values[at]).view(f"S{size}")[:, 0]
            mask[rows] = np.isin(texts, np.array([text for text in wanted if len(text) == size], dtype=f"S{size}"))
    return mask


def _identity(part: ShardFile) -> tuple[str, int]:
    # By content, so that a shard that was converted to another format keeps its selection. A file outside of a cache
    # may have no content digest.
    return part.content or part.id, part.samples
