"""The packing of one sample into one LMDB value. It works on bytes and arrays and needs no LMDB.

::

    fixed fields, in schema order, each at the next multiple of its alignment (item size, at most 8)
    padding to 8, then the table: for each other field, in schema order, int64 numbers:
                                    bytes and str: 1, the number of bytes; ragged: rank, the shape
    for each other field, in schema order: padding to 8, its bytes

All numbers are little-endian, and padding is zero. A schema with only fixed fields has no table, and its value ends
with the last field. Scalars are fixed fields of shape ``()``.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from cachetool.core.block import Block, Column, Ragged
from cachetool.core.errors import CorruptError
from cachetool.core.schema import Field, Schema
from cachetool.formats.runs import Bytes, Int64s, Placed, as_bytes, copy_runs, ends, place_runs, put_rows, windows

__all__ = ["ValueLayout"]


class _Name(NamedTuple):
    """The file and the numbers of samples that an error message names."""

    where: str
    numbers: Int64s


def _align(at: Any, to: int) -> Any:
    """Return ``at`` rounded up to a multiple of ``to``. ``at`` is a number or an array."""
    return -(-at // to) * to


class ValueLayout:
    """The positions of the fields of ``schema`` in a value. Packs and unpacks samples and whole blocks."""

    def __init__(self, schema: Schema) -> None:
        self.schema = schema
        self.fixed: dict[str, int] = {}
        """Offset in bytes of each fixed field."""
        self.variable = tuple(f for f in schema if f.kind != "fixed")
        """The other fields, in the order of their tables and bytes."""
        # Offset and bytes of the padding between fixed fields and before the table. :meth:`place` writes zeros there,
        # because equal samples must make equal files.
        self._gaps: list[tuple[int, int]] = []
        at = 0
        for field in schema:
            if field.kind == "fixed":
                self.fixed[field.name] = to = _align(at, min(field.numpy.itemsize, 8))
                self._gaps += [(at, to - at)] * (to > at)
                at = to + field.nbytes
        # A multiple of 8 like the alignment of a field, because the table holds int64 numbers.
        self.table = _align(at, 8) if self.variable else at
        """Offset of the table in bytes."""
        self._gaps += [(at, self.table - at)] * (self.table > at)
        self._columns: dict[str, slice] = {}
        column = 0
        for field in self.variable:
            width = field.rank if field.kind == "ragged" else 1
            self._columns[field.name] = slice(column, column + width)
            column += width
        self.head = self.table + 8 * column
        """Bytes before those of the first variable field, or all bytes of the value if the schema has none."""

    @property
    def overhead(self) -> int:
        """Return the most bytes that a value has beyond the bytes of its fields."""
        # Each variable field may be preceded by up to 7 bytes of padding.
        return self.head - self.schema.fixed_nbytes + 8 * len(self.variable)

    def positions(self, sizes: Int64s) -> tuple[Int64s, Int64s]:
        """Return where the bytes of the variable fields begin inside each value, and the size of each value.

        ``sizes`` is (samples, variable fields) in bytes. The results have that shape and (samples,).
        """
        starts = np.empty_like(sizes)
        at = np.full(len(sizes), self.head, dtype=np.int64)
        for column in range(sizes.shape[1]):
            starts[:, column] = _align(at, 8)
            at = starts[:, column] + sizes[:, column]
        return starts, at

    def variable_sizes(self, block: Block) -> Int64s:
        """Return the bytes of the variable fields of each sample, (samples, variable fields)."""
        out = np.empty((block.samples, len(self.variable)), dtype=np.int64)
        for column, field in enumerate(self.variable):
            ragged = _ragged(block.columns[field.name])
            out[:, column] = ragged.sizes * ragged.values.itemsize
        return out

    def totals(self, block: Block) -> Int64s:
        """Return the bytes of the value of each sample, (samples,)."""
        return self.positions(self.variable_sizes(block))[1]

    def place(self, block: Block, out: Bytes, starts: Int64s) -> Placed:
        """Pack the samples of a canonical block into ``out``, sample i from ``starts[i]`` on, with zeros as padding.

        The bytes of large fields are not copied. They are returned with their positions in ``out``.
        """
        count = block.samples
        large: Placed = []
        sizes = self.variable_sizes(block)
        within, _totals = self.positions(sizes)
        for at, nbytes in self._gaps:
            put_rows(out, starts + at, np.zeros((count, nbytes), dtype=np.uint8))
        for column_index in range(len(self.variable)):
            # Zero the eight bytes before each variable field. The bytes that nothing overwrites later are its
            # padding, and equal samples must make equal files.
            put_rows(out, starts + within[:, column_index] - 8, np.zeros((count, 8), dtype=np.uint8))
        for name, offset in self.fixed.items():
            column, nbytes = block.columns[name], self.schema[name].nbytes
            if isinstance(column, np.ndarray) and nbytes:
                row = np.arange(count, dtype=np.int64) * nbytes
                # Rows of a canonical column lie end to end, so one call copies the field of all samples of the block.
                large += place_runs(out, starts + offset, as_bytes(column), row, np.full(count, nbytes))
        if not self.variable:
            return large
        put_rows(out, starts + self.table, as_bytes(self._tables(block)).reshape(count, self.head - self.table))
        for column_index, field in enumerate(self.variable):
            ragged = _ragged(block.columns[field.name])
            source = ragged.offsets[:-1] * ragged.values.itemsize
            to, values = starts + within[:, column_index], as_bytes(ragged.values)
            large += place_runs(out, to, values, source, sizes[:, column_index])
        return large

    def _tables(self, block: Block) -> npt.NDArray[np.int64]:
        parts = []
        for field in self.variable:
            ragged = _ragged(block.columns[field.name])
            parts.append(ragged.sizes[:, None] if ragged.shapes is None else ragged.shapes)
        return np.concatenate(parts, axis=1).astype("<i8")

    def decode(self, value: bytes | memoryview, names: Iterable[str] | None = None) -> dict[str, Any]:
        """Return one sample out of its value: field name to array, NumPy scalar, bytes or str, all copied.

        ``names`` chooses fields (default: all). Raises :class:`CorruptError` when the value does not fit the schema.
        """
        flat = np.frombuffer(value, dtype=np.uint8)
        chosen = self.schema.names if names is None else tuple(names)
        if not self.variable:
            if len(flat) != self.head:
                raise CorruptError(f"a value has {len(flat)} bytes, but its schema needs {self.head}")
            out: dict[str, Any] = {}
            for name in chosen:
                field = self.schema[name]
                raw = flat[self.fixed[name] : self.fixed[name] + field.nbytes]
                # A copy: the value may be LMDB's own memory, which is invalid after the transaction. The copy is also
                # aligned.
                array = raw.copy().view(field.numpy).reshape(field.sizes)
                out[name] = array if field.shape else array[()]
            return out
        one = np.array([0], dtype=np.int64)
        block = self.decode_block(flat, one, np.array([len(flat)], dtype=np.int64), names=chosen)
        return block.sample(0)

    def decode_block(
        self,
        buffer: Bytes,
        starts: Int64s,
        sizes: Int64s,
        *,
        names: Iterable[str] | None = None,
        where: str = "value",
        numbers: Int64s | None = None,
    ) -> Block:
        """Return the samples whose values lie at ``starts`` in ``buffer``, copied.

        Raises :class:`CorruptError` for a value that does not fit the schema. The message names the file (``where``)
        and the sample's number out of ``numbers`` (default: its position in ``starts``).
        """
        name = _Name(where, np.arange(len(starts)) if numbers is None else numbers)
        schema = self.schema if names is None else self.schema.select(names)
        # Sizes come from the file. They are compared with the layout before any position is computed from them.
        self._check(sizes >= self.head if self.variable else sizes == self.head, name)
        # ``windows`` does not refuse negative positions, and a value may not end behind the buffer.
        if len(starts) and (int(starts.min()) < 0 or int((starts + sizes).max()) > len(buffer)):
            raise CorruptError(f"{where}: a value that reaches past its buffer")
        columns: dict[str, Column] = {}
        for field in schema:
            if field.kind == "fixed":
                raw = windows(buffer, field.nbytes)[starts + self.fixed[field.name]] if len(starts) else buffer[:0]
                columns[field.name] = _typed(raw, field, len(starts))
        if self.variable:
            columns.update(self._decode_variable(schema, buffer, starts, sizes, name))
        return Block(schema, columns)

    def _decode_variable(
        self, schema: Schema, buffer: Bytes, starts: Int64s, sizes: Int64s, name: _Name
    ) -> dict[str, Column]:
        count = len(starts)
        width = self.head - self.table
        raw = windows(buffer, width)[starts + self.table] if count else np.empty((0, width), dtype=np.uint8)
        table = np.ascontiguousarray(raw).view("<i8").reshape(count, width // 8).astype(np.int64)
        nbytes = np.empty((count, len(self.variable)), dtype=np.int64)
        # A damaged table may hold negative numbers, which would turn positions around.
        self._check((table >= 0).all(axis=1), name)
        for column, field in enumerate(self.variable):
            shapes = table[:, self._columns[field.name]]
            # The product is computed in floating point first: a damaged shape may have a product that wraps around
            # int64 and looks small.
            total = shapes.astype(np.float64).prod(axis=1) * field.numpy.itemsize
            self._check(total <= sizes, name)
            nbytes[:, column] = shapes.prod(axis=1) * field.numpy.itemsize
        within, totals = self.positions(nbytes)
        # The sizes of all fields must add up to the value's size exactly. So no field can reach into the next value.
        self._check(totals == sizes, name)
        out: dict[str, Column] = {}
        for column, field in enumerate(self.variable):
            if field.name not in schema:
                continue
            size = nbytes[:, column]
            to = ends(size)
            values = np.empty(int(to[-1]), dtype=np.uint8)
            copy_runs(values, to[:-1], buffer, starts + within[:, column], size)
            shapes = np.ascontiguousarray(table[:, self._columns[field.name]])
            out[field.name] = Ragged(
                values.view(field.numpy), to // field.numpy.itemsize, shapes if field.kind == "ragged" else None
            )
        return out

    @staticmethod
    def _check(good: npt.NDArray[np.bool_] | np.bool_, name: _Name) -> None:
        """Raise :class:`CorruptError`, naming the first sample for which ``good`` is False."""
        if not good.all():
            number = int(name.numbers[int(np.argmin(good))])
            raise CorruptError(f"{name.where}: the value of sample {number} does not fit the schema")


def _ragged(column: Column) -> Ragged:
    if not isinstance(column, Ragged):
        raise TypeError("a column of a variable field must be ragged")
    return column


def _typed(raw: Bytes, field: Field, count: int) -> npt.NDArray[Any]:
    """Return rows of bytes as an array of the field's dtype and shape."""
    if not field.nbytes:
        return np.empty((count, *field.sizes), dtype=field.numpy)
    return np.ascontiguousarray(raw).reshape(-1).view(field.numpy).reshape(count, *field.sizes)
