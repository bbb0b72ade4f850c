"""Blocks: the columns of many samples, as sources yield them and writers take them.

::

    Block(schema, columns)            k samples
      "image"  fixed   ndarray (k, *shape)
      "audio"  ragged  Ragged: values (sum of sizes,), offsets (k + 1,), shapes (k, rank)
      "name"   str     Ragged: values uint8 UTF-8 bytes, offsets (k + 1,), shapes None

Columns may be views of memory that other objects use too (a memory map, or the block that this block was cut from), so
treat columns as read-only.
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
"""Target size of a block: about this many bytes of samples (8 MiB)."""


class Ragged:
    """The values of k samples of different sizes, one after another in one array; ``ragged[i]`` is one sample's array.

    Args:
        values: All values, flat, an array of shape (total,); ``uint8`` for bytes and str.
        offsets: Index in ``values`` of each sample's first value, int64, shape (k + 1,); the first
            need not be 0.
        shapes: Shape of each sample's array, int64, shape (k, rank). None for bytes and str. Default: None.

    Example:
        >>> import numpy as np
        >>> from cachetool.core.block import Ragged
        >>> ragged = Ragged(np.arange(6), np.array([0, 2, 6]), np.array([[2], [4]]))
        >>> len(ragged), ragged[1]
        (2, array([2, 3, 4, 5]))
    """

    # Not a dataclass and not a Sequence: code of trainers that moves or converts batches takes both apart, and would
    # rebuild a Ragged wrongly. Such code passes an object of an unknown class on unchanged.
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
        """Index in ``values`` of the first value of each sample, shape (k + 1,); the first may be above 0."""
        self.shapes = shapes
        """Shape of the array of each sample, (k, rank); None for bytes and str."""

    def __repr__(self) -> str:
        return f"Ragged({len(self)} arrays of {self.values.dtype})"

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def sizes(self) -> npt.NDArray[np.int64]:
        """Number of values of each sample, int64, (k,)."""
        return np.diff(self.offsets)

    @property
    def nbytes(self) -> int:
        """Number of bytes of the values of these samples; offsets and shapes do not count."""
        return int(self.offsets[-1] - self.offsets[0]) * self.values.itemsize

    @overload
    def __getitem__(self, index: int) -> npt.NDArray[Any]: ...
    @overload
    def __getitem__(self, index: builtins.slice) -> list[npt.NDArray[Any]]: ...
    def __getitem__(self, index: int | builtins.slice) -> npt.NDArray[Any] | list[npt.NDArray[Any]]:
        """Return the values of one sample in its shape, or a list of them for a slice; views."""
        if isinstance(index, builtins.slice):
            return [self[at] for at in range(*index.indices(len(self)))]
        at = range(len(self))[index]
        flat = self.values[self.offsets[at] : self.offsets[at + 1]]
        return flat if self.shapes is None else flat.reshape(self.shapes[at])

    def slice(self, start: int, stop: int) -> Ragged:
        """Return samples ``start`` to ``stop`` (not included), as views.

        Args:
            start: Index of the first sample.
            stop: Index behind the last sample.

        Returns:
            A :class:`Ragged`.
        """
        shapes = None if self.shapes is None else self.shapes[start:stop]
        return Ragged(self.values, self.offsets[start : stop + 1], shapes)

    def compact(self) -> Ragged:
        """Return the same samples with offsets from 0 and no value before or after them; views where possible."""
        first, last = int(self.offsets[0]), int(self.offsets[-1])
        if first == 0 and last == len(self.values):
            return self
        return Ragged(self.values[first:last], self.offsets - first, self.shapes)

    def take(self, indices: npt.NDArray[np.int64]) -> Ragged:
        """Return a copy of the samples at ``indices``, in that order.

        Args:
            indices: Indices of samples, int64, shape (n,).

        Returns:
            A :class:`Ragged` of n samples.
        """
        sizes = self.sizes[indices]
        offsets = np.zeros(len(indices) + 1, dtype=np.int64)
        np.cumsum(sizes, out=offsets[1:])
        # One NumPy gather copies all samples, because a loop over samples costs microseconds for each. A value's index
        # in the source is its index in the output plus the distance between the two places of its sample.
        shift = np.repeat(self.offsets[:-1][indices] - offsets[:-1], sizes)
        values = self.values[np.arange(int(offsets[-1]), dtype=np.int64) + shift]
        return Ragged(values, offsets, None if self.shapes is None else self.shapes[indices])


Column = npt.NDArray[Any] | Ragged
"""The values of one field: an array of shape (k, *shape) for a fixed field, otherwise a :class:`Ragged`."""


@dataclass(frozen=True, slots=True)
class Block:
    """The columns of some samples of one schema.

    Args:
        schema: The fields of the samples.
        columns: A column for each field of ``schema``, by name; all columns have the same number of samples.

    Raises:
        UsageError: If the columns differ in length.

    Example:
        >>> from cachetool.core.schema import Field, Schema
        >>> schema = Schema((Field("x", "<i4"), Field("name", "str")))
        >>> block = Block.from_samples(schema, [{"x": 1, "name": "a"}, {"x": 2, "name": "bc"}])
        >>> len(block), block.sample(1)["name"]
        (2, 'bc')
    """

    schema: Schema
    columns: Mapping[str, Column]
    """A column for each field of the schema, by the name of the field."""

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
        """Number of bytes of the values of all fields: the least that a format must store."""
        return sum(self.columns[name].nbytes for name in self.schema.names)

    @property
    def sample_nbytes(self) -> npt.NDArray[np.int64]:
        """Number of bytes of each sample, int64, (samples,)."""
        total = np.full(self.samples, self.schema.fixed_nbytes, dtype=np.int64)
        for name in self.schema.names:
            column = self.columns[name]
            if isinstance(column, Ragged):
                total += column.sizes * column.values.itemsize
        return total

    def slice(self, start: int, stop: int) -> Block:
        """Return the samples from ``start`` to before ``stop``, as views.

        Args:
            start: Number of the first sample.
            stop: Number of the sample after the last.

        Returns:
            A block of the same schema.
        """
        return Block(
            self.schema,
            {
                name: column.slice(start, stop) if isinstance(column, Ragged) else column[start:stop]
                for name, column in self.columns.items()
            },
        )

    def take(self, indices: Sequence[int] | npt.NDArray[np.int64]) -> Block:
        """Return copies of the samples at ``indices``, in that order.

        Args:
            indices: Numbers of samples, (m,).

        Returns:
            A block of m samples.
        """
        at = np.asarray(indices, dtype=np.int64)
        return Block(
            self.schema,
            {
                name: column.take(at) if isinstance(column, Ragged) else column[at]
                for name, column in self.columns.items()
            },
        )

    def select(self, names: Iterable[str]) -> Block:
        """Return the same samples with only some fields.

        Args:
            names: Names of the fields to keep, in the wanted order.

        Returns:
            A block that shares the columns of this block.

        Raises:
            UsageError: If a name is unknown or comes twice, or if there is no name.
        """
        schema = self.schema.select(names)
        return Block(schema, {name: self.columns[name] for name in schema.names})

    def with_plain_bools(self) -> Block:
        """Return the same samples with every true value stored as the byte 1.

        Returns:
            The block itself if all bool fields are stored so already, otherwise a block with new bool columns.
        """
        converted: dict[str, Column] = {}
        for field in self.schema:
            column = self.columns[field.name]
            values = column.values if isinstance(column, Ragged) else column
            # Other programs may store any byte other than 0 for true. A format that keeps a number or a bit for each
            # bool would not return such a byte, so the checksums of the sample would differ after a conversion.
            if field.numpy.kind == "b" and values.view(np.uint8).max(initial=0) > 1:
                plain = values.view(np.uint8) != 0
                converted[field.name] = (
                    Ragged(plain, column.offsets, column.shapes) if isinstance(column, Ragged) else plain
                )
        return Block(self.schema, {**self.columns, **converted}) if converted else self

    def sample(self, index: int) -> dict[str, Any]:
        """Return one sample as a dict.

        Args:
            index: Number of the sample.

        Returns:
            Field name to array, NumPy scalar, bytes or str; arrays are views.
        """
        out: dict[str, Any] = {}
        for field in self.schema:
            value = self.columns[field.name][index]
            if field.kind == "bytes":
                value = value.tobytes()
            elif field.kind == "str":
                # File names and keys may hold bytes that are not UTF-8. surrogateescape keeps such bytes, so encoding
                # the text again with surrogateescape restores the bytes that are stored.
                value = value.tobytes().decode("utf-8", "surrogateescape")
            out[field.name] = value
        return out

    @classmethod
    def concat(cls, blocks: Sequence[Block]) -> Block:
        """Join blocks of one schema.

        Args:
            blocks: At least one block.

        Returns:
            A block of all samples in order; the block itself, not a copy, if there is only one.
        """
        if len(blocks) == 1:
            return blocks[0]
        schema = blocks[0].schema
        return cls(schema, {f.name: _concat(f, [b.columns[f.name] for b in blocks]) for f in schema})

    @classmethod
    def from_samples(cls, schema: Schema, samples: Sequence[Mapping[str, Any]], *, exact: bool = False) -> Block:
        """Build the columns from single samples, with values cast to the stored byte order.

        Args:
            schema: The fields of the samples.
            samples: A mapping from field name to value for each sample; other names are ignored.
            exact: If True, refuse a Python float that the dtype of its field cannot hold exactly. Default: False, round
                it.

        Returns:
            A block of ``len(samples)`` samples.

        Raises:
            UsageError: If a value is missing or does not fit its field: another shape, dtype or kind, masked values, or
                a Python number that the dtype cannot hold. The message names the field.
        """
        columns = {f.name: _column(f, [_value(s, f.name) for s in samples], exact=exact) for f in schema}
        return cls(schema, columns)


def _value(sample: Mapping[str, Any], name: str) -> Any:
    """Return one value of a sample. Raise :class:`UsageError` with the names there are if it is missing."""
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
        # A block of one sample holds a large array, often of many MiB, so it is returned as a view instead of a copy.
        if len(arrays) == 1:
            return np.asarray(arrays[0], order="C")[None]
        out = np.empty((len(arrays), *field.sizes), dtype=field.numpy)
        np.stack(arrays, out=out)
        return out
    # The reshape also serves zero samples and rank 0, for which np.array() alone would return an array without the
    # second dimension.
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
                raise UsageError(
                    f"field {field.name!r} holds str, got text with half a surrogate pair, which UTF-8 cannot store"
                ) from None
    elif isinstance(value, bytes | bytearray | memoryview):
        return bytes(value)
    raise UsageError(f"field {field.name!r} holds {field.kind}, got {type(value).__name__}")


def masked(value: Any) -> bool:
    """Return True if ``value`` is a NumPy masked array that hides at least one value."""
    # The attribute is looked up first because NumPy imports np.ma at its first use, and most processes never meet a
    # masked array.
    return hasattr(value, "mask") and isinstance(value, np.ma.MaskedArray) and bool(np.ma.is_masked(value))


def _array(field: Field, value: Any, *, exact: bool) -> npt.NDArray[Any]:
    if isinstance(value, str | bytes | bytearray | memoryview):
        raise UsageError(f"field {field.name!r} holds {field.describe()}, got {type(value).__name__}")
    # np.asarray() drops the mask, so hidden values, often fill values such as -9999, would be stored and trained on.
    if masked(value):
        raise UsageError(f"field {field.name!r}: masked values cannot be stored; fill them: .filled(VALUE)")
    array = np.asarray(value)
    want = field.numpy
    same = array.dtype.newbyteorder("<") == want
    # A Python number has no dtype of its own. An int fits a field if its value is kept, which is checked below. A float
    # fits a field if it is at most rounded. A bool does not count as a number: in a field of numbers True could not be
    # told from 1.
    integers = array.dtype.kind in "iu" and want.kind in "iu"
    number = isinstance(value, int | float) and not isinstance(value, bool)
    plain = number and (integers or np.can_cast(array.dtype, want, "same_kind"))
    if not same and not plain:
        raise UsageError(f"field {field.name!r} holds {field.describe()}, got {array.dtype} {array.shape}")
    fits = array.ndim == field.rank if field.kind == "ragged" else array.shape == field.shape
    if not fits:
        raise UsageError(f"field {field.name!r} holds {field.describe()}, got {array.dtype} {array.shape}")
    if same or not number:
        return array.astype(want, copy=False)
    # A number that is too large becomes an infinity here, without a NumPy warning, because it is refused below.
    with np.errstate(over="ignore"):
        out = array.astype(want)
    kept = out.item() == value if exact or isinstance(value, int) else np.isfinite(out)
    if want.kind in "iufc" and not kept and np.isfinite(value):
        raise UsageError(f"field {field.name!r} holds {field.describe()}, which cannot hold {value}")
    return out
