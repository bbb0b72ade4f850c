"""How one sample is packed into one LMDB value. Pure: bytes and arrays, no LMDB.

::

    fixed fields, in schema order, each at the next multiple of its alignment (item size, at most 8)
    padding to 8, then the table: for each other field, in schema order, int64 numbers:
                                    bytes and str: 1, the number of bytes; ragged: rank, the shape
    for each other field, in schema order: padding to 8, its bytes

All numbers little-endian; padding is zero. A schema of fixed fields alone has no table, and its value ends with the
last field. Scalars are fixed fields of shape ``()``.
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
    """What an error says about the values being unpacked."""

    where: str
    numbers: Int64s


def _align(at: Any, to: int) -> Any:
    return -(-at // to) * to


class ValueLayout:
    """Where the fields of ``schema`` lie in a value; packs and unpacks samples and whole blocks."""

    def __init__(self, schema: Schema) -> None:
        self.schema = schema
        self.fixed: dict[str, int] = {}
        """Offset of each fixed field."""
        self.variable = tuple(f for f in schema if f.kind != "fixed")
        """The other fields, in the order of their tables and bytes."""
        self._gaps: list[tuple[int, int]] = []  # padding between fixed fields, and before the table
        at = 0
        for field in schema:
            if field.kind == "fixed":
                self.fixed[field.name] = to = _align(at, min(field.numpy.itemsize, 8))
                self._gaps += [(at, to - at)] * (to > at)
                at = to + field.nbytes
        self.table = _align(at, 8) if self.variable else at
        """Offset of the table."""
        self._gaps += [(at, self.table - at)] * (self.table > at)
        self._columns: dict[str, slice] = {}
        column = 0
        for field in self.variable:
            width = field.rank if field.kind == "ragged" else 1
            self._columns[field.name] = slice(column, column + width)
            column += width
        self.head = self.table + 8 * column
        """Bytes before those of the first variable field: all of the value when there is none."""

    @property
    def overhead(self) -> int:
        """Most bytes that a value has beyond those of its fields."""
        return self.head - self.schema.fixed_nbytes + 8 * len(self.variable)

    def positions(self, sizes: Int64s) -> tuple[Int64s, Int64s]:
        """Where the bytes of the variable fields begin inside each value, and the size of each value.

        ``sizes`` is (samples, variable fields) in bytes; the results are of that shape, and (samples,).
        """
        starts = np.empty_like(sizes)
        at = np.full(len(sizes), self.head, dtype=np.int64)
        for column in range(sizes.shape[1]):
            starts[:, column] = _align(at, 8)
            at = starts[:, column] + sizes[:, column]
        return starts, at

    def variable_sizes(self, block: Block) -> Int64s:
        """Bytes of the variable fields of each sample, (samples, variable fields)."""
        out = np.empty((block.samples, len(self.variable)), dtype=np.int64)
        for column, field in enumerate(self.variable):
            ragged = _ragged(block.columns[field.name])
            out[:, column] = ragged.sizes * ragged.values.itemsize
        return out

    def totals(self, block: Block) -> Int64s:
        """Bytes of the value of each sample, (samples,)."""
        return self.positions(self.variable_sizes(block))[1]

    def place(self, block: Block, out: Bytes, starts: Int64s) -> Placed:
        """Pack the samples of a canonical block into ``out``, each from ``starts[i]``, padding included; but for the
        bytes of large fields: these are given back with their places in ``out``."""
        count = block.samples
        large: Placed = []
        sizes = self.variable_sizes(block)
        within, _totals = self.positions(sizes)
        for at, nbytes in self._gaps:
            put_rows(out, starts + at, np.zeros((count, nbytes), dtype=np.uint8))
        for column_index in range(len(self.variable)):
            # Padding is what these eight bytes keep once the rest of the value is written.
            put_rows(out, starts + within[:, column_index] - 8, np.zeros((count, 8), dtype=np.uint8))
        for name, offset in self.fixed.items():
            column, nbytes = block.columns[name], self.schema[name].nbytes
            if isinstance(column, np.ndarray) and nbytes:
                row = np.arange(count, dtype=np.int64) * nbytes
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
        """One sample out of its value: field name to array, NumPy scalar, bytes or str; everything copied.

        ``names`` chooses fields (default: all). Raises :class:`CorruptError` when the value does not fit the schema.
        """
        flat = np.frombuffer(value, dtype=np.uint8)
        chosen = self.schema.names if names is None else tuple(names)
        if not self.variable:
            if len(flat) != self.head:
                raise CorruptError(f"a value of {len(flat)} bytes where the schema says {self.head}")
            out: dict[str, Any] = {}
            for name in chosen:
                field = self.schema[name]
                raw = flat[self.fixed[name] : self.fixed[name] + field.nbytes]
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
        """The samples whose values lie at ``starts`` in ``buffer``, copied.

        Raises :class:`CorruptError` for a value that does not fit the schema, naming ``where`` it comes from and its
        number out of ``numbers`` (default: its position in ``starts``).
        """
        name = _Name(where, np.arange(len(starts)) if numbers is None else numbers)
        schema = self.schema if names is None else self.schema.select(names)
        self._check(sizes >= self.head if self.variable else sizes == self.head, name)
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
        self._check((table >= 0).all(axis=1), name)
        for column, field in enumerate(self.variable):
            shapes = table[:, self._columns[field.name]]
            # In floating point first: a damaged shape may have a product that wraps around.
            total = shapes.astype(np.float64).prod(axis=1) * field.numpy.itemsize
            self._check(total <= sizes, name)
            nbytes[:, column] = shapes.prod(axis=1) * field.numpy.itemsize
        within, totals = self.positions(nbytes)
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
        if not good.all():
            number = int(name.numbers[int(np.argmin(good))])
            raise CorruptError(f"{name.where}: the value of sample {number} does not fit the schema")


def _ragged(column: Column) -> Ragged:
    if not isinstance(column, Ragged):
        raise TypeError("a column of a variable field is ragged")
    return column


def _typed(raw: Bytes, field: Field, count: int) -> npt.NDArray[Any]:
    if not field.nbytes:
        return np.empty((count, *field.sizes), dtype=field.numpy)
    return np.ascontiguousarray(raw).reshape(-1).view(field.numpy).reshape(count, *field.sizes)
