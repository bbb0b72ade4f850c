"""Ragged fields as the arrays that models take: padded to one shape, or as values and offsets.

::

    pad={"tokens": 0}       [1 2 3] [4]   ->   tokens [[1 2 3] [4 0 0]]   tokens_length [3 1]
    varlen={"tokens"}                     ->   tokens [1 2 3 4]   tokens_offsets [0 3 4]   tokens_longest 3

Feeders lay a batch out: each value is copied once, from the shard's file to its place in the batch. With a transform,
the results of the transform are laid out.

On its way to the training process such an array is a ragged column with a single value, because its shape differs from
batch to batch.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import KW_ONLY, dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from cachetool.core.block import Block, Column, Ragged
from cachetool.core.errors import UsageError
from cachetool.core.schema import Field, Schema, names_of
from cachetool.core.text import shown
from cachetool.core.units import parse_flag, parse_text, parse_whole
from cachetool.formats.runs import Int64s, as_bytes, copy_runs, ends

__all__ = ["Layout", "Pad", "PadOption", "Pads", "VarlenOption", "fill_value", "opened", "parse_pad"]


@dataclass(frozen=True, slots=True)
class Pad:
    """The way in which ``pad=`` of a loader pads one ragged field.

    Without ``length`` each batch is padded to its longest sample. Arrays of a higher rank are padded along all axes.

    Args:
        value: The number that fills the padding, of the field's type. Default: 0.
        length: Size of the first axis in every batch. Default: that of the longest sample of the batch.
        multiple: The size of the first axis is rounded up to a multiple of this number, such as 8 for tensor cores.
            Default: 1.
        truncate: True: samples longer than ``length`` lose their end. False: they raise an error. Default: False.
        mask: Name of a field for a mask of bool, shape (k, longest), which is True for values and False for padding.
            The batch then has the mask in place of the field of lengths. Default: no mask.

    Raises:
        UsageError: An argument cannot be used, or ``length`` and ``multiple`` are both given.

    Example:
        >>> from cachetool.loaders.numpy import Pad
        >>> Pad(0, length=2048, truncate=True)
        Pad(value=0, length=2048, multiple=None, truncate=True, mask=None)
    """

    value: float = 0
    """The number that fills the padding."""
    _: KW_ONLY
    length: int | None = None
    """Size of the first axis in every batch; None: that of the longest sample."""
    multiple: int | None = None
    """The size of the first axis is a multiple of this number."""
    truncate: bool = False
    """True if samples longer than ``length`` lose their end."""
    mask: str | None = None
    """Name of the field for the mask."""

    def __post_init__(self) -> None:
        value = self.value.item() if isinstance(self.value, np.generic) else self.value
        if not isinstance(value, bool | int | float):
            raise UsageError(f"value={shown(value)} cannot be used; padding is filled with a number")
        # The dataclass is frozen; its checks may still bring a value into its one form.
        object.__setattr__(self, "value", value)
        for name in ("length", "multiple"):
            if (number := getattr(self, name)) is not None:
                object.__setattr__(self, name, parse_whole(number, what=f"{name}=", least=1))
        object.__setattr__(self, "truncate", parse_flag(self.truncate, what="truncate="))
        if self.mask is not None:
            object.__setattr__(self, "mask", parse_text(self.mask, what="mask="))
        if self.length is not None and self.multiple is not None:
            raise UsageError(f"length={self.length} and multiple={self.multiple} exclude each other; give one of them")
        if self.truncate and self.length is None:
            raise UsageError("truncate=True needs length=, the length at which samples are cut")


PadOption: TypeAlias = Mapping[str, float | Pad]
"""Type of ``pad=``: the number that fills the padding, or a :class:`Pad`, by field."""
VarlenOption: TypeAlias = str | Iterable[str]
"""Type of ``varlen=``: the name of a field, or several names."""
Pads: TypeAlias = tuple[tuple[str, Pad], ...]
"""The checked argument ``pad=``."""


def parse_pad(pad: object, varlen: Any) -> tuple[Pads, tuple[str, ...]]:
    """Return the arguments ``pad`` and ``varlen`` of a loader in their one form. Raises :class:`UsageError`."""
    pads: list[tuple[str, Pad]] = []
    if pad is not None:
        if not isinstance(pad, Mapping) or not pad or not all(isinstance(name, str) for name in pad):
            raise UsageError(
                f"pad={shown(pad)} cannot be used; use a dict of ragged fields and the numbers that fill them up, such"
                " as {'tokens': 0}"
            )
        for name, value in pad.items():
            try:
                pads.append((name, value if isinstance(value, Pad) else Pad(value)))
            except UsageError as error:
                raise UsageError(f"pad= of field {shown(name)}: {error}") from None
    listed: tuple[str, ...] = ()
    if varlen is not None:
        # Sorted, because a set has another order in each process.
        listed = names_of(sorted(varlen) if isinstance(varlen, set | frozenset) else varlen)
    if both := [name for name, _ in pads if name in listed]:
        raise UsageError(f"field {shown(both[0])} is in pad= and in varlen=; name it in one of them")
    return tuple(pads), listed


def _length(name: str) -> str:
    return f"{name}_length"


def _offsets(name: str) -> str:
    return f"{name}_offsets"


def _longest(name: str) -> str:
    return f"{name}_longest"


def opened(columns: Mapping[str, Column], pads: Pads, varlen: tuple[str, ...]) -> Mapping[str, Any]:
    """Return the columns of a batch that a feeder laid out, with arrays of their own shape and whole numbers."""
    if not pads and not varlen:
        return columns
    out: dict[str, Any] = dict(columns)
    for name in (*(name for name, _ in pads), *(pad.mask for _, pad in pads if pad.mask is not None), *varlen):
        out[name] = out[name][0]
    for name in varlen:
        out[_longest(name)] = int(out[_longest(name)][0])
    return out


_Empty = Callable[[Field, tuple[int, ...]], npt.NDArray[Any]]


class Layout:
    """A maker of batches in which some fields are padded, or are values and offsets.

    It is the ``empty`` of :func:`~cachetool.loaders.read.gather.gather`. :meth:`begin` begins a batch, and
    :meth:`complete` adds the fields that belong to those laid out. ``empty`` makes the memory of the batch.
    """

    def __init__(self, pads: Pads, varlen: tuple[str, ...], empty: _Empty) -> None:
        self._pads, self._varlen, self._empty = dict(pads), varlen, empty
        self.fields = frozenset((*self._pads, *varlen))
        """Names of the fields that are laid out."""
        self._given: Schema | None = None
        self._schema: Schema
        self._fills: dict[str, Any] = {}
        self._samples: Int64s
        self._placed: dict[str, _Placed] = {}

    def begin(self, schema: Schema, samples: Int64s) -> Schema:
        """Return the fields of the next batch, of samples with the fields ``schema`` and these numbers.

        Raises :class:`UsageError` for a field that cannot be laid out.
        """
        if schema is not self._given:
            self._schema, self._given = Schema(tuple(self._laid_out(schema))), schema
        self._samples = samples
        self._placed.clear()
        return self._schema

    def _laid_out(self, schema: Schema) -> Iterator[Field]:
        added: dict[str, list[Field]] = {}
        for name in (*self._pads, *self._varlen):
            field, what = schema[name], "pad=" if name in self._pads else "varlen="
            if not field.shape:
                raise UsageError(
                    f"{what} cannot be used for field {name!r}, which holds {field.describe()}; it is for arrays of"
                    " numbers"
                )
            if (pad := self._pads.get(name)) is None:
                added[name] = [
                    Field(name, field.dtype, (None,) * field.rank),
                    Field(_offsets(name), "<i4"),
                    Field(_longest(name), "<i8"),
                ]
                continue
            self._fills[name] = fill_value(field, pad.value, what="pad=")
            added[name] = [Field(name, field.dtype, (None,) * (field.rank + 1))]
            if pad.mask is None:
                added[name].append(Field(_length(name), "<i8", () if field.rank == 1 else (field.rank,)))
            else:
                added[name].append(Field(pad.mask, "|b1", (None, None)))
        names = [*schema.names, *(field.name for fields in added.values() for field in fields[1:])]
        if twice := [name for name in names if names.count(name) > 1]:
            raise UsageError(
                f"pad= and varlen= would add a field {twice[0]!r}, but the batch has one of this name; leave that out"
                " with fields=, or give the mask another name"
            )
        for field in schema:
            yield from added.get(field.name, (field,))

    def __call__(self, field: Field, shape: tuple[int, ...]) -> npt.NDArray[Any]:
        """Return memory for the values of a field; for a field that is laid out afterwards, plain memory."""
        return np.empty(shape, dtype=field.numpy) if field.name in self.fields else self._empty(field, shape)

    def place(self, field: Field, shapes: Int64s) -> tuple[npt.NDArray[Any], Int64s, Int64s] | None:
        """Return memory for the values of samples of these ``shapes``, and the first byte and the number of bytes of
        each sample in this memory.

        None if the field is not laid out, or if its samples are not one run each.
        """
        if field.name not in self.fields:
            return None
        plan = self._plan(field, shapes)
        if plan.first_axis:
            return None
        placed = self._placed[field.name] = self._made(field, plan)
        return placed.values, placed.plan.starts(0), placed.plan.sizes(0)

    def complete(self, columns: Mapping[str, Column]) -> Mapping[str, Column]:
        """Return the columns of the batch, after every column that was not placed yet is laid out."""
        out: dict[str, Column] = {}
        for name, column in columns.items():
            if name not in self.fields:
                out[name] = column
                continue
            placed = self._placed.get(name)
            if placed is None:
                placed = self._copied(self._given_field(name), column)
            out[name] = _whole(placed.values, placed.plan.shape)
            self._add(name, placed.plan, out)
        return out

    def _given_field(self, name: str) -> Field:
        assert self._given is not None
        return self._given[name]

    def _copied(self, field: Field, column: Column) -> _Placed:
        if not isinstance(column, Ragged):
            shapes = np.tile(np.array(column.shape[1:], dtype=np.int64), (len(column), 1))
            column = Ragged(column.reshape(-1), ends(shapes.prod(axis=1)), shapes)
        assert column.shapes is not None
        plan = self._plan(field, column.shapes)
        placed = self._made(field, plan)
        axis = plan.first_axis
        source = plan.source(axis, column.offsets[:-1] * field.numpy.itemsize)
        copy_runs(as_bytes(placed.values), plan.starts(axis), as_bytes(column.values), source, plan.sizes(axis))
        return placed

    def _plan(self, field: Field, shapes: Int64s) -> _Plan:
        """Return where samples of these shapes go. Raises :class:`UsageError` for one that does not fit."""
        longest = shapes.max(axis=0, initial=0)
        pad = self._pads.get(field.name)
        if pad is None:
            if len(different := np.flatnonzero((shapes[:, 1:] != longest[1:]).any(axis=1))):
                at = int(different[0])
                raise UsageError(
                    f"varlen= joins samples along the first axis, so their other axes must be equal, but field"
                    f" {field.name!r} has the shape {tuple(shapes[at].tolist())} in {self._name(at, len(shapes))} and"
                    f" up to {tuple(longest[1:].tolist())} in others; use pad="
                )
            return _Plan(shapes, shapes, longest, field.numpy.itemsize, joined=True)
        cut = shapes
        if pad.length is not None:
            if longest[0] > pad.length:
                if not pad.truncate:
                    at = int(shapes[:, 0].argmax())
                    raise UsageError(
                        f"field {field.name!r} of {self._name(at, len(shapes))} has the length {longest[0]}, but pad="
                        f" has length={pad.length}; give a greater length, or truncate=True to cut its end off"
                    )
                cut = shapes.copy()
                np.minimum(shapes[:, 0], pad.length, out=cut[:, 0])
            longest[0] = pad.length
        elif pad.multiple is not None:
            longest[0] = -(-longest[0] // pad.multiple) * pad.multiple
        return _Plan(shapes, cut, longest, field.numpy.itemsize)

    def _name(self, at: int, count: int) -> str:
        # A transform of whole batches may leave samples out, and then the numbers are unknown.
        if count == len(self._samples):
            return f"sample {self._samples[at]}"
        return f"a sample of the batch that begins with sample {self._samples[0]}"

    def _made(self, field: Field, plan: _Plan) -> _Placed:
        values = self._empty(self._schema[field.name], (math.prod(plan.shape),))
        if not plan.joined:
            # All of it and not the gaps alone, because one call fills memory faster than Python finds the gaps.
            values.fill(self._fills[field.name])
        return _Placed(values, plan)

    def _add(self, name: str, plan: _Plan, out: dict[str, Column]) -> None:
        """Add the fields that belong to a field that was laid out."""
        lengths = plan.cut[:, 0]
        pad = self._pads.get(name)
        if pad is None:
            offsets = ends(lengths)
            if offsets[-1] > np.iinfo(np.int32).max:
                raise UsageError(
                    f"varlen= cannot join field {name!r}: one batch has {offsets[-1]} rows, more than int32 can count;"
                    " use smaller batches"
                )
            self._put(_offsets(name), offsets, out)
            self._put(_longest(name), plan.longest[:1], out)
        elif pad.mask is None:
            self._put(_length(name), lengths if plan.cut.shape[1] == 1 else plan.cut, out)
        else:
            shape = plan.shape[:2]
            mask = self._empty(self._schema[pad.mask], (math.prod(shape),))
            np.less(np.arange(shape[1]), lengths[:, None], out=mask.reshape(shape))
            out[pad.mask] = _whole(mask, shape)

    def _put(self, name: str, values: Int64s, out: dict[str, Column]) -> None:
        column = self._empty(self._schema[name], values.shape)
        column[...] = values
        out[name] = column


@dataclass(frozen=True, slots=True)
class _Placed:
    """A field in its place in the batch."""

    values: npt.NDArray[Any]
    plan: _Plan


@dataclass(frozen=True)
class _Plan:
    """The places of k samples of one field.

    A sample is copied in runs. Each run has all axes from one axis on, which is the first one behind which all samples
    have the same sizes as the array of the batch.
    """

    shapes: Int64s
    """Shapes of the samples, (k, rank)."""
    cut: Int64s
    """The same, of the parts that are copied."""
    longest: Int64s
    """Shape of one sample in the batch, (rank,)."""
    itemsize: int
    joined: bool = False
    """True if samples follow one another without padding."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the array of the batch."""
        if self.joined:
            return int(self.shapes[:, 0].sum()), *self.longest[1:].tolist()
        return len(self.shapes), *self.longest.tolist()

    @functools.cached_property
    def first_axis(self) -> int:
        """The axis at which the runs begin; 0 if each sample is one run."""
        axis = int(self.shapes.shape[1]) - 1
        while axis and bool((self.cut[:, axis] == self.longest[axis]).all()):
            axis -= 1
        return axis

    def _inner(self, axis: int) -> int:
        inner: int = math.prod(self.longest[axis + 1 :].tolist())
        return inner * self.itemsize

    def _counts(self, axis: int) -> Int64s:
        counts: Int64s = self.cut[:, :axis].prod(axis=1)
        return counts

    def sizes(self, axis: int) -> Int64s:
        """Return the bytes of each run."""
        sizes = self.cut[:, axis] * self._inner(axis)
        return sizes if not axis else np.repeat(sizes, self._counts(axis))

    def source(self, axis: int, starts: Int64s) -> Int64s:
        """Return where each run begins, if the samples begin at ``starts``."""
        if not axis:
            return starts
        counts = self._counts(axis)
        return np.repeat(starts, counts) + _within(counts) * np.repeat(self.shapes[:, axis] * self._inner(axis), counts)

    def starts(self, axis: int) -> Int64s:
        """Return where each run begins in the array of the batch."""
        if self.joined:
            return ends(self.sizes(axis))[:-1]
        row = self._inner(axis) * int(self.longest[axis])
        at = np.arange(len(self.shapes), dtype=np.int64)
        if axis:
            counts = self._counts(axis)
            number, at = _within(counts), np.repeat(at, counts)
            for outer in range(axis):
                behind = np.repeat(self.cut[:, outer + 1 : axis].prod(axis=1), counts)
                at = at * self.longest[outer] + number // behind
                number = number % behind
        return at * row


def _within(counts: Int64s) -> Int64s:
    """Return the numbers from 0 of so many runs of each sample."""
    within: Int64s = np.arange(int(counts.sum()), dtype=np.int64) - np.repeat(ends(counts)[:-1], counts)
    return within


def _whole(values: npt.NDArray[Any], shape: tuple[int, ...]) -> Ragged:
    """Return one array as a ragged column with a single value."""
    return Ragged(values, np.array([0, len(values)], dtype=np.int64), np.array([shape], dtype=np.int64))


def fill_value(field: Field, value: float, *, what: str) -> Any:
    """Return the number in the type of the field. Raises :class:`UsageError`, which begins with ``what``, if the type
    cannot hold it."""
    kind = field.numpy.kind
    if kind == "b" and value in (0, 1):
        return np.bool_(value)
    # A date is filled with the whole number that it is stored as.
    stored = Field(field.name, "<i8") if kind in "mM" else dataclasses.replace(field, shape=(), classes=())
    try:
        column = Block.from_samples(Schema((stored,)), [{field.name: value}]).columns[field.name]
    except UsageError as error:
        raise UsageError(f"{what} has the value {value}: {error}") from None
    assert not isinstance(column, Ragged)
    return column.view(field.numpy)[0]
