"""Columns of many samples moving through a pipe: the unit that sources yield and writers take.

::

    Block(schema, columns)            k samples
      "image"  fixed   ndarray (k, *shape)
      "audio"  ragged  Ragged: values (sum of sizes,), offsets (k + 1,), shapes (k, rank)
      "name"   str     Ragged: values uint8 UTF-8 bytes, offsets (k + 1,), shapes None

Columns may be views of somebody's buffer (a memory map, a block this one was cut from): treat them as read-only.
"""

from __future__ import annotations

import builtins
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, overload

import numpy as np
import numpy.typing as npt

from cachetool.core.errors import UsageError
from cachetool.core.schema import Field, Schema

__all__ = ["BLOCK_BYTES", "Block", "Column", "Ragged"]

BLOCK_BYTES = 8 * 2**20
"""About how many bytes of samples one block carries."""


class Ragged:
    """Values of k samples of different sizes, one after another.

    Neither a dataclass nor a Sequence: what moves or converts the batches of a trainer takes both apart, and would
    rebuild this one wrongly. So it is handed on whole.
    """

    __slots__ = ("offsets", "shapes", "values")

    def __init__(
        self,
        values: npt.NDArray[Any],
        offsets: npt.NDArray[np.int64],
        shapes: npt.NDArray[np.int64] | None = None,
    ) -> None:
        self.values = values
        """All values, flat, shape (total,); ``uint8`` for bytes and str."""
        self.offsets = offsets
        """Index in ``values`` of each sample's first value, shape (k + 1,); the first need not be 0."""
        self.shapes = shapes
        """Shape of each sample's array, (k, rank); None for bytes and str."""

    def __repr__(self) -> str:
        return f"Ragged({len(self)} arrays of {self.values.dtype})"

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def sizes(self) -> npt.NDArray[np.int64]:
        """Number of values of each sample, (k,)."""
        return np.diff(self.offsets)

    @property
    def nbytes(self) -> int:
        """Bytes of the values of these samples."""
        return int(self.offsets[-1] - self.offsets[0]) * self.values.itemsize

    @overload
    def __getitem__(self, index: int) -> npt.NDArray[Any]: ...
    @overload
    def __getitem__(self, index: builtins.slice) -> list[npt.NDArray[Any]]: ...
    def __getitem__(self, index: int | builtins.slice) -> npt.NDArray[Any] | list[npt.NDArray[Any]]:
        """The values of one sample, in its shape, or of each in a slice; views. Raises IndexError outside of them."""
        if isinstance(index, builtins.slice):
            return [self[at] for at in range(*index.indices(len(self)))]
        at = range(len(self))[index]
        flat = self.values[self.offsets[at] : self.offsets[at + 1]]
        return flat if self.shapes is None else flat.reshape(self.shapes[at])

    def slice(self, start: int, stop: int) -> Ragged:
        """Samples ``start`` to ``stop``, as views."""
        shapes = None if self.shapes is None else self.shapes[start:stop]
        return Ragged(self.values, self.offsets[start : stop + 1], shapes)

    def compact(self) -> Ragged:
        """The same samples with offsets from 0 and no value before or after them; views where possible."""
        first, last = int(self.offsets[0]), int(self.offsets[-1])
        if first == 0 and last == len(self.values):
            return self
        return Ragged(self.values[first:last], self.offsets - first, self.shapes)

    def take(self, indices: npt.NDArray[np.int64]) -> Ragged:
        """The samples at ``indices``, copied, in that order."""
        sizes = self.sizes[indices]
        offsets = np.zeros(len(indices) + 1, dtype=np.int64)
        np.cumsum(sizes, out=offsets[1:])
        # One gather for all samples: position within the output plus the distance to where its sample lies.
        shift = np.repeat(self.offsets[:-1][indices] - offsets[:-1], sizes)
        values = self.values[np.arange(int(offsets[-1]), dtype=np.int64) + shift]
        return Ragged(values, offsets, None if self.shapes is None else self.shapes[indices])


Column = npt.NDArray[Any] | Ragged
"""The values of one field: an array of shape (k, *shape), or a ragged one; bytes and str are ragged too."""


@dataclass(frozen=True, slots=True)
class Block:
    """The columns of ``samples`` samples of one schema."""

    schema: Schema
    columns: Mapping[str, Column]
    """A column for every field of the schema."""

    def __post_init__(self) -> None:
        counts = {name: len(self.columns[name]) for name in self.schema.names}
        if len(set(counts.values())) != 1:
            raise UsageError(f"columns of one block differ in length: {counts}")

    @property
    def samples(self) -> int:
        """Number of samples."""
        return len(self.columns[self.schema.names[0]])

    def __len__(self) -> int:
        return self.samples

    @property
    def nbytes(self) -> int:
        """Bytes of the values of all fields: what a format must store at least."""
        return sum(self.columns[name].nbytes for name in self.schema.names)

    @property
    def sample_nbytes(self) -> npt.NDArray[np.int64]:
        """Bytes of each sample, (samples,)."""
        total = np.full(self.samples, self.schema.fixed_nbytes, dtype=np.int64)
        for name in self.schema.names:
            column = self.columns[name]
            if isinstance(column, Ragged):
                total += column.sizes * column.values.itemsize
        return total

    def slice(self, start: int, stop: int) -> Block:
        """Samples ``start`` to ``stop``, as views."""
        return Block(
            self.schema,
            {
                name: column.slice(start, stop) if isinstance(column, Ragged) else column[start:stop]
                for name, column in self.columns.items()
            },
        )

    def take(self, indices: Sequence[int] | npt.NDArray[np.int64]) -> Block:
        """The samples at ``indices``, copied, in that order."""
        at = np.asarray(indices, dtype=np.int64)
        return Block(
            self.schema,
            {
                name: column.take(at) if isinstance(column, Ragged) else column[at]
                for name, column in self.columns.items()
            },
        )

    def select(self, names: Iterable[str]) -> Block:
        """Only these fields, in the order given."""
        schema = self.schema.select(names)
        return Block(schema, {name: self.columns[name] for name in schema.names})

    def with_plain_bools(self) -> Block:
        """The same samples with every true as the byte 1: others leave whatever is not 0, which formats that keep a
        number or a bit would not give back. The block itself where nothing is to be done."""
        converted: dict[str, Column] = {}
        for field in self.schema:
            column = self.columns[field.name]
            values = column.values if isinstance(column, Ragged) else column
            if field.numpy.kind == "b" and values.view(np.uint8).max(initial=0) > 1:
                plain = values.view(np.uint8) != 0
                converted[field.name] = (
                    Ragged(plain, column.offsets, column.shapes) if isinstance(column, Ragged) else plain
                )
        return Block(self.schema, {**self.columns, **converted}) if converted else self

    def sample(self, index: int) -> dict[str, Any]:
        """One sample: field name to array, NumPy scalar, bytes or str."""
        out: dict[str, Any] = {}
        for field in self.schema:
            value = self.columns[field.name][index]
            if field.kind == "bytes":
                value = value.tobytes()
            elif field.kind == "str":
                value = value.tobytes().decode("utf-8", "surrogateescape")
            out[field.name] = value
        return out

    @classmethod
    def concat(cls, blocks: Sequence[Block]) -> Block:
        """One block of all samples in order; the block itself when there is only one."""
        if len(blocks) == 1:
            return blocks[0]
        schema = blocks[0].schema
        return cls(schema, {f.name: _concat(f, [b.columns[f.name] for b in blocks]) for f in schema})

    @classmethod
    def from_samples(cls, schema: Schema, samples: Sequence[Mapping[str, Any]], *, exact: bool = False) -> Block:
        """Columns out of single samples, values cast to the stored byte order.

        Raises :class:`UsageError` naming the field when a value is missing or does not fit the schema: another shape,
        another dtype, another kind, a Python number that the dtype cannot hold. A float is rounded to a dtype that is
        narrower, unless ``exact``.
        """
        columns = {f.name: _column(f, [_value(s, f.name) for s in samples], exact=exact) for f in schema}
        return cls(schema, columns)


def _value(sample: Mapping[str, Any], name: str) -> Any:
    try:
        return sample[name]
    except KeyError:
        raise UsageError(f"a sample has no field {name!r}; it has {', '.join(sample)}") from None


def _concat(field: Field, columns: Sequence[Column]) -> Column:
    if field.kind == "fixed":
        return np.concatenate([c for c in columns if isinstance(c, np.ndarray)])
    parts = [c.compact() for c in columns if isinstance(c, Ragged)]
    shapes = [p.shapes for p in parts if p.shapes is not None]
    return Ragged(
        np.concatenate([p.values for p in parts]),
        _offsets(np.concatenate([p.sizes for p in parts])),
        np.concatenate(shapes) if shapes else None,
    )


def _offsets(sizes: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    offsets = np.zeros(len(sizes) + 1, dtype=np.int64)
    np.cumsum(sizes, out=offsets[1:])
    return offsets


def _column(field: Field, values: Sequence[Any], *, exact: bool) -> Column:
    if field.kind in ("bytes", "str"):
        raw = [_raw(field, value) for value in values]
        sizes = np.fromiter((len(r) for r in raw), dtype=np.int64, count=len(raw))
        return Ragged(np.frombuffer(b"".join(raw), dtype=np.uint8), _offsets(sizes))
    arrays = [_array(field, value, exact=exact) for value in values]
    if field.kind == "fixed":
        if not arrays:
            return np.empty((0, *field.sizes), dtype=field.numpy)
        if len(arrays) == 1:  # large ones come one by one: no copy
            return np.asarray(arrays[0], order="C")[None]
        out = np.empty((len(arrays), *field.sizes), dtype=field.numpy)
        np.stack(arrays, out=out)
        return out
    shapes = np.array([a.shape for a in arrays], dtype=np.int64).reshape(len(arrays), field.rank)
    sizes = np.fromiter((a.size for a in arrays), dtype=np.int64, count=len(arrays))
    flat = np.concatenate([a.reshape(-1) for a in arrays]) if arrays else np.empty(0, dtype=field.numpy)
    return Ragged(flat, _offsets(sizes), shapes)


def _raw(field: Field, value: Any) -> bytes:
    if field.kind == "str":
        if isinstance(value, str):
            try:
                return value.encode("utf-8", "surrogateescape")
            except UnicodeEncodeError:
                raise UsageError(f"field {field.name!r} holds str, got text with half a surrogate pair") from None
    elif isinstance(value, bytes | bytearray | memoryview):
        return bytes(value)
    raise UsageError(f"field {field.name!r} holds {field.kind}, got {type(value).__name__}")


def masked(value: Any) -> bool:
    """Whether it is an array of NumPy's that hides values, which are lost where it becomes a plain one."""
    # np.ma is loaded when it is first named.
    return hasattr(value, "mask") and isinstance(value, np.ma.MaskedArray) and bool(np.ma.is_masked(value))


def _array(field: Field, value: Any, *, exact: bool) -> npt.NDArray[Any]:
    if isinstance(value, str | bytes | bytearray | memoryview):
        raise UsageError(f"field {field.name!r} holds {field.describe()}, got {type(value).__name__}")
    if masked(value):
        raise UsageError(f"field {field.name!r}: values that are masked cannot be kept; fill them: .filled(VALUE)")
    array = np.asarray(value)
    want = field.numpy
    same = array.dtype.newbyteorder("<") == want
    # A Python number has no dtype of its own: an int fits where the number is kept, a float where it is no more than
    # rounded. A bool is no number: in a field of numbers nothing would tell it from 0 and 1.
    integers = array.dtype.kind in "iu" and want.kind in "iu"  # the value itself is checked below
    number = isinstance(value, int | float) and not isinstance(value, bool)
    plain = number and (integers or np.can_cast(array.dtype, want, "same_kind"))
    if not same and not plain:
        raise UsageError(f"field {field.name!r} holds {field.describe()}, got {array.dtype} {array.shape}")
    fits = array.ndim == field.rank if field.kind == "ragged" else array.shape == field.shape
    if not fits:
        raise UsageError(f"field {field.name!r} holds {field.describe()}, got {array.dtype} {array.shape}")
    if same or not number:
        return array.astype(want, copy=False)
    with np.errstate(over="ignore"):  # to an infinity, which is refused below
        out = array.astype(want)
    kept = out.item() == value if exact or isinstance(value, int) else np.isfinite(out)
    if want.kind in "iufc" and not kept and np.isfinite(value):
        raise UsageError(f"field {field.name!r} holds {field.describe()}, which cannot hold {value}")
    return out
