"""Files made of arrays whose rows are samples: the choice of arrays that become fields, and reading them together.

:class:`Slab` reads rows of one stored array. It reads a chunk of many rows once, whichever rows are asked for.
"""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from cachetool.core.block import Block, Column, Ragged
from cachetool.core.cf import DIFFER, Packing, decoder
from cachetool.core.closing import Closing
from cachetool.core.errors import BadObject, CorruptError, UsageError
from cachetool.core.schema import KEY, MAX_RANK, Field, Schema, is_dim
from cachetool.formats.columnar import parse_header
from cachetool.sources.limits import check_claims, quoted
from cachetool.sources.options import SourceOptions
from cachetool.sources.readers import (
    MisfitRows,
    because,
    bounded,
    checked_key,
    field_names,
    make_schema,
    reading,
)

__all__ = [
    "Boxes",
    "ColumnFile",
    "Grid",
    "Incomplete",
    "Part",
    "Place",
    "Slab",
    "StoredColumn",
    "decoded",
    "joined",
    "named_dims",
    "of_sizes",
    "schema_of_ours",
    "unpadded",
    "wants_of_ours",
]


UNIT_BYTES = 64 * 2**10
"""Rows smaller than this are fetched and drawn together with their neighbours, because a request costs as much as the
transfer of so many bytes."""
SLABS_BYTES = 256 * 2**20
"""Most bytes that all arrays of a file keep at a time, unless one row is larger. Larger chunks are read several
times."""

_NAMED = 8
"""Most fields in the option that a hint advises."""

Array = npt.NDArray[Any]


class Slab:
    """The rows that were read last from one array, aligned to chunks. Rows are handed out as views."""

    def __init__(self, fetch: Callable[[int, int], Array], *, rows: int, row_nbytes: int, chunk: int) -> None:
        """``fetch(start, stop)`` returns new rows. ``chunk`` of the ``rows`` rows are stored together."""
        self._fetch, self._rows, self._row_nbytes, self._chunk = fetch, rows, max(1, row_nbytes), chunk
        self.share(1)
        self._start = self._stop = 0
        self._kept: Array | None = None

    def read(self, start: int, stop: int) -> Array:
        """Return the rows from ``start`` to ``stop``; ``start < stop``."""
        parts = []
        while start < stop:
            if self._kept is None or not self._start <= start < self._stop:
                self._start = start // self._step * self._step
                asked = -(-(stop - self._start) // self._step) * self._step
                self._stop = min(self._start + min(asked, self._most), self._rows)
                # The old rows are freed before new ones are made. Otherwise both would count against the process's
                # memory limit.
                self._kept = None
                self._kept = self._fetch(self._start, self._stop)
            end = min(stop, self._stop)
            parts.append(self._kept[start - self._start : end - self._start])
            start = end
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def share(self, slabs: int) -> None:
        """Keep at most the share of one of ``slabs`` slabs."""
        fit = max(1, SLABS_BYTES // slabs // self._row_nbytes)
        # Whole chunks if they fit, because reading a part of a compressed chunk unpacks all of it.
        self._step = min(self._chunk, fit)
        self._most = fit // self._step * self._step

    def drop(self) -> None:
        """Free the rows that are kept; views that were handed out stay valid."""
        self._kept = None


def of_sizes(values: Array, sizes: npt.NDArray[np.int64], *, shapes: bool = False) -> Ragged:
    """Return samples of ``sizes`` values each, one after another in ``values``; with ``shapes`` they are arrays of rank
    1."""
    offsets = np.zeros(len(sizes) + 1, dtype=np.int64)
    np.cumsum(sizes, out=offsets[1:])
    return Ragged(values, offsets, sizes[:, None] if shapes else None)


def joined(values: Sequence[bytes | memoryview]) -> Ragged:
    """Return a column of byte strings."""
    sizes = np.fromiter((len(value) for value in values), dtype=np.int64, count=len(values))
    return of_sizes(np.frombuffer(b"".join(values), dtype=np.uint8), sizes)


def named_dims(names: Any, rank: int) -> tuple[str, ...]:
    """Return the names of ``rank`` dimensions from the metadata of a file; empty if one has no usable name."""
    if not isinstance(names, list | tuple) or len(names) != rank or not 0 < rank <= MAX_RANK:
        return ()
    return tuple(names) if all(map(is_dim, names)) else ()


def unpadded(rows: Array) -> Ragged:
    """Return a column from strings of one width, dtype ``S`` or ``U``, (k,), without the NULs at their ends; text as
    UTF-8."""
    if rows.dtype.kind == "U":
        rows = np.char.encode(rows, "utf-8")
    flat = np.ascontiguousarray(rows).view(np.uint8).reshape(len(rows), -1)
    sizes = np.char.str_len(rows).astype(np.int64)
    # One mask over all rows keeps the bytes before each end, without a loop over rows.
    return of_sizes(flat[np.arange(flat.shape[1]) < sizes[:, None]], sizes)


@dataclass(frozen=True, slots=True)
class Incomplete:
    """Rows of a column, some of which have no value."""

    column: Column
    missing: npt.NDArray[np.bool_]
    """True for each row without a value; the value in its place in the column has no meaning."""
    reason: str
    """The reason, which a message puts after the column's name."""


@dataclass(frozen=True, slots=True)
class Boxes:
    """The reading of any box of an array, instead of rows."""

    read: Callable[[tuple[slice, ...]], Array]
    """Return the box with these bounds, one slice for each dimension, little-endian."""
    chunks: tuple[int, ...]
    """The shape of a chunk, the part that is stored together. Sizes of 1 if the values are not in chunks."""
    places: Callable[[tuple[int, ...]], Iterable[Place]]
    """Return the places of the chunks, if they are known without reading. The argument is the shape of a block."""
    fill: Callable[[], Any]
    """Return the value of elements that were never written, a scalar of the array's dtype."""


Grid = Sequence[tuple[str, int, int]]
"""The blocks of an array, in C order: name, size of a block and number of blocks, for each dimension that is cut."""

Place = tuple[tuple[int, ...], int, int, str]
"""First index of a chunk in each dimension; then as in :data:`Part`: its first byte in the object, its number of bytes
(0: the whole object), and the object's key."""

Part = tuple[int, int, int, str]
"""First row of a part, its first byte in the file, and its number of bytes. For Zarr: first row, 0, 0 and the chunk's
key."""


@dataclass(frozen=True, slots=True)
class StoredColumn:
    """One array of a file, as a candidate for a field."""

    name: str
    """The name in the file."""
    dtype: str
    """The dtype as in :class:`Field`: a NumPy dtype, ``bytes`` or ``str``."""
    shape: tuple[int, ...]
    """The shape of the whole array; its first size counts samples. Empty for a single value, which is read as row 0."""
    nbytes: int
    """Bytes of all values, or the fewest they can have if values differ in size."""
    read: Callable[[int, int], Column | Incomplete]
    """Return the rows from ``start`` to ``stop``, little-endian; ``start < stop``."""
    ragged: int = 0
    """The rank of the rows if every row is an array of its own size, otherwise 0."""
    piece: int = 0
    """Bytes of the largest part that is in memory at once, if that is not a row."""
    offset: int = -1
    """First byte of row 0 in the file if the rows lie one after another as :attr:`stored`, otherwise -1."""
    stored: str = ""
    """The dtype of the rows in the file, including its byte order."""
    chunk: int = 1
    """Number of rows that are stored, and so fetched, together."""
    parts: Callable[[], Iterable[Part]] | None = None
    """A function that returns the places of the chunks, if they are known without reading."""
    once: Callable[[int, int], Column] | None = None
    """:attr:`read` without keeping rows for the next call."""
    packing: Packing = dataclasses.field(default_factory=dict)
    """The CF attributes by which its numbers stand for other values."""
    alike: bool = True
    """False if :attr:`packing` does not hold for all rows."""
    dims: tuple[str, ...] = ()
    """A name for each dimension of the whole array, the first one (rows) included. Empty if unknown."""
    boxes: Boxes | None = None
    """The way to read any box of the array; None for texts and values that differ in size."""

    def field(self, name: str) -> Field:
        """Return the field that this array becomes. Raises :class:`UsageError` for a name that no field can have."""
        if self.dtype in ("bytes", "str"):
            return Field(name, self.dtype)
        shape = (None,) * self.ragged if self.ragged else self.shape[1:]
        # Rows of lists have dimensions that the array does not have. Field drops names that do not fit its shape.
        return Field(name, self.dtype, shape, (), self.dims[1:], self.packing if self.alike else DIFFER)


def _decoded(column: StoredColumn) -> StoredColumn | str:
    """Return the array of the values that the numbers stand for by their CF attributes, or the reason why there is
    none."""
    if not column.packing or column.ragged or column.dtype in ("bytes", "str"):
        return column
    decoding = decoder(stored := np.dtype(column.dtype), column.packing)
    if isinstance(decoding, str):
        return decoding
    dtype, decode = decoding
    chunk, parts = column.chunk, column.parts
    # Decoded rows cannot be taken from the file by their offset, so units are made as if no library were needed: about
    # 64 KiB of rows.
    if column.offset >= 0:
        rows, row = column.shape[0], column.nbytes // max(1, column.shape[0])
        chunk = max(1, UNIT_BYTES // max(1, row))

        def parts() -> Iterator[Part]:
            for at in range(0, rows, chunk):
                yield at, column.offset + at * row, min(chunk, rows - at) * row, ""

    return replace(
        column, dtype=dtype.str, nbytes=column.nbytes // stored.itemsize * dtype.itemsize,
        read=lambda start, stop: decode(np.asarray(column.read(start, stop))), once=None, offset=-1, stored="",
        # Decoded values (float64, datetime64) have at most 8 bytes each.
        piece=column.piece // stored.itemsize * 8, chunk=chunk, parts=parts, boxes=_decoded_boxes(column.boxes, decode),
    )  # fmt: skip


def _decoded_boxes(boxes: Boxes | None, decode: Callable[[Array], Array]) -> Boxes | None:
    if boxes is None:
        return None

    def fill() -> Any:
        stored = np.asarray(boxes.fill())[None]
        try:
            return decode(stored)[0]
        # The fill value of a library is no time that datetime64 has.
        except ValueError:
            return np.datetime64("NaT", "ns")

    return replace(boxes, read=lambda bounds: decode(boxes.read(bounds)), fill=fill)


def decoded(columns: list[StoredColumn], options: SourceOptions, skipped: list[tuple[str, str]]) -> list[StoredColumn]:
    """Return ``columns`` with the values that their numbers stand for, for ``--decode cf``.

    Columns whose attributes are unknown are added to ``skipped``. Must run before arrays are joined to samples, because
    each array has attributes of its own.
    """
    if options.decode != "cf":
        return columns
    values = {column.name: _decoded(column) for column in columns}
    skipped += [(name, why) for name, why in values.items() if isinstance(why, str)]
    return [column for column in values.values() if not isinstance(column, str)]


class ColumnFile(Closing):
    """A file made of arrays; see :class:`RandomAccess`."""

    def __init__(
        self,
        path: object,
        arrays: Sequence[StoredColumn],
        options: SourceOptions,
        *,
        skipped: Sequence[tuple[str, str]] = (),
        stored: int,
        close: Callable[[], None] = lambda: None,
        cuts: list[int] | None = None,
        ours: Schema | None = None,
        keys: StoredColumn | None = None,
        grid: Grid = (),
    ) -> None:
        """Choose fields among ``arrays``.

        ``stored``: bytes of the input on disk. ``close`` closes what reading the arrays opened. ``cuts``: the rows at
        which the parts that are stored together end, if they differ in size. ``ours``: the schema in the file's mark,
        if cachetool wrote the file. ``keys``: the samples' keys, if the file has them. ``grid``: the blocks that are
        the samples, if rows are not.

        Raises :class:`UsageError` if no array is left or a field asked for is missing, :class:`BadObject` if the file
        has no arrays, or larger ones than it can hold.
        """
        self.path = path
        self._close, self.cuts, self.grid = close, cuts, grid
        out = list(skipped)
        if ours is not None:
            arrays = _columns_of_ours(path, ours, arrays, out)
        by_name = {column.name: column for column in arrays}
        names = field_names(path, [name for name in by_name if ours is None or name != KEY], out, options)
        if ours is not None and KEY in by_name and options.key:
            names[KEY] = KEY
            # The order of the written schema is also the order of the file's checksums, wherever the key stands in it.
            if options.fields is None:
                names = {name: names[name] for name in by_name if name in names}
        candidates = [by_name[name] for name in names]
        self.samples = _common_length(path, candidates, options.rows, out)
        hints = {}
        if options.rows is None and options.fields is None:
            hints = _hints(candidates, names, self.samples)
        self._columns: dict[str, StoredColumn] = {}
        fields: list[Field] = []
        for name, new in names.items():
            column = by_name[name]
            if column.shape[0] != self.samples:
                out.append((name, f"its first dimension is {column.shape[0]}, not {self.samples}{hints.get(name, '')}"))
                continue
            try:
                one = checked_key(column.field(new))
                # Class names of a label come only from the mark that cachetool writes: no other file says what its
                # numbers stand for.
                named = ours is not None and name in ours and column.dtype == ours[name].dtype
                if ours is not None and named:
                    one = replace(one, classes=ours[name].classes, dims=ours[name].dims, packing=ours[name].packing)
                # Decoded numbers stand for themselves. The column keeps its packing, which tells that it was decoded.
                fields.append(replace(one, packing={}) if options.decode == "cf" and column.packing else one)
            except UsageError as error:
                out.append((name, str(error)))
                continue
            self._columns[new] = column
        if keys is not None and options.key:
            self._columns[KEY] = keys
            fields.append(keys.field(KEY))
        self.schema = make_schema(path, fields, out)
        self.skipped = bounded(out)
        # The guarded process computes its memory limit from this number.
        self.piece = max(max(c.piece, c.nbytes // max(1, self.samples)) for c in self._columns.values())
        check_claims(
            str(path),
            {name: (column.nbytes, self.samples) for name, column in self._columns.items()},
            stored=stored,
        )

    @property
    def columns(self) -> Mapping[str, StoredColumn]:
        """The arrays taken, by the names of their fields."""
        return self._columns

    def read(self, start: int, stop: int) -> Block:
        """Return the samples from ``start`` to ``stop``. Raises :class:`MisfitRows` if some rows lack a value."""
        if not 0 <= start <= stop <= self.samples:
            raise UsageError(f"{self.path}: samples {start} to {stop} do not exist; the file has {self.samples}")
        columns: dict[str, Column] = {}
        misfits: dict[int, str] = {}
        for name, column in self._columns.items():
            if start == stop:
                columns[name] = Block.from_samples(self.schema.select([name]), []).columns[name]
                continue
            with reading(f"{self.path}: {quoted(column.name)}, rows {start} to {stop}"):
                values = column.read(start, stop)
            if isinstance(values, Incomplete):
                why = f"{quoted(column.name)} {values.reason}; leave the column out with --fields -{name}"
                # The right operand wins, so a row keeps the reason of the first column in which it lacks a value.
                misfits |= dict.fromkeys((np.flatnonzero(values.missing) + start).tolist(), why) | misfits
                values = values.column
            columns[name] = values
        block = Block(self.schema, columns)
        if misfits:
            raise MisfitRows(self.path, block, misfits)
        return block

    def close(self) -> None:
        """Close files."""
        self._close()


def schema_of_ours(path: object, header: Any) -> Schema:
    """Return the schema in the mark of a file that cachetool wrote. Raises :class:`BadObject`."""
    try:
        return parse_header(header, path=Path(str(path)), schema=None)[0]
    except CorruptError as error:
        raise BadObject(str(error)) from error


def wants_of_ours(options: SourceOptions) -> Callable[[str], bool]:
    """Return a function that tells, by the name of its field, whether an array of a file of ours is asked for."""

    def wants(name: str) -> bool:
        name = name.removesuffix(".offsets").removesuffix(".shapes")
        return options.key if name == KEY else options.wants(name)

    return wants


def _columns_of_ours(
    path: object, schema: Schema, arrays: Sequence[StoredColumn], skipped: list[tuple[str, str]]
) -> list[StoredColumn]:
    """Return a column for each field of a file that cachetool wrote (:mod:`cachetool.formats.columnar`).

    If samples of a field differ in length, one array holds the values of all samples and two others say where each
    lies.
    """
    by_name = {column.name: column for column in arrays}
    left_out = dict(skipped)
    # The arrays of offsets and shapes are no fields that a user knows, so messages do not name them.
    skipped[:] = [entry for entry in skipped if entry[0] in schema or not entry[0].endswith((".offsets", ".shapes"))]
    columns = []
    for field in schema:
        values, offsets = by_name.get(field.name), by_name.get(f"{field.name}.offsets")
        shapes = by_name.get(f"{field.name}.shapes")
        if values is None and field.name in left_out:
            continue
        if values is None or (field.kind != "fixed" and offsets is None) or (field.kind == "ragged" and shapes is None):
            raise BadObject(f"{path}: field {quoted(field.name)} lacks one of its arrays")
        values = _typed(path, field, values)
        if field.kind == "fixed":
            columns.append(values)
        else:
            assert offsets is not None
            columns.append(_column_of_ours(path, field, values, offsets, shapes))
    return columns


def _typed(path: object, field: Field, values: StoredColumn) -> StoredColumn:
    """Return the array with the dtype of its field."""
    if values.dtype == field.numpy.str:
        return values
    if values.dtype in ("bytes", "str") or values.ragged or np.dtype(values.dtype).itemsize != field.numpy.itemsize:
        raise BadObject(f"{path}: field {quoted(field.name)} is not stored as cachetool writes it")

    def read(start: int, stop: int) -> Column:
        # HDF5 and Zarr lack some of NumPy's dtypes, such as times. Their bytes are stored as integers of the same size.
        return np.ascontiguousarray(values.read(start, stop)).view(field.numpy)

    return replace(values, dtype=field.numpy.str, read=read, stored=field.numpy.str)


def _column_of_ours(
    path: object, field: Field, values: StoredColumn, offsets: StoredColumn, shapes: StoredColumn | None
) -> StoredColumn:
    rows, count = offsets.shape[0] - 1, values.shape[0]
    plain = offsets.dtype == "<i8" and len(offsets.shape) == len(values.shape) == 1 and values.dtype == field.numpy.str
    if shapes is not None:
        plain = plain and shapes.dtype == "<i8" and shapes.shape == (rows, field.rank)
    if not plain:
        raise BadObject(f"{path}: field {quoted(field.name)} is not stored as cachetool writes it")

    def read(start: int, stop: int) -> Column:
        at = np.asarray(offsets.read(start, stop + 1))
        first, last = int(at[0]), int(at[-1])
        # Offsets of a damaged or hostile file may point anywhere, also outside of the values.
        if first < 0 or last > count or (np.diff(at) < 0).any():
            raise BadObject(f"{path}: field {quoted(field.name)} has offsets outside of its values")
        flat = np.asarray(values.read(first, last)) if last > first else np.empty(0, dtype=field.numpy)
        return Ragged(flat, at - first, None if shapes is None else np.asarray(shapes.read(start, stop)).copy())

    return StoredColumn(
        field.name, field.dtype, (max(0, rows),), values.nbytes, read, ragged=field.rank if shapes is not None else 0,
        piece=max(values.piece, offsets.piece),
    )  # fmt: skip


def _common_length(
    path: object, columns: Sequence[StoredColumn], wanted: int | None, skipped: Sequence[tuple[str, str]]
) -> int:
    """Return the number of samples: the first dimension of the arrays that hold most bytes.

    On equal bytes the dimension that most arrays have wins.
    """
    if not columns and not skipped:
        raise BadObject(f"{path}: no samples in it")
    if not columns:
        raise BadObject(f"{path}: nothing in it can be read as samples{because(skipped)}")
    lengths = _by_length(columns)
    if wanted is None:
        # Bytes decide, because the mean and standard deviation of a dataset once outvoted its images.
        return max(lengths, key=lambda length: (sum(c.nbytes for c in lengths[length]), len(lengths[length]), length))
    if wanted not in lengths:
        have = ", ".join(map(str, sorted(lengths)))
        raise UsageError(f"{path}: no array has {wanted} rows; the arrays have {have}")
    return wanted


def _by_length(columns: Iterable[StoredColumn]) -> dict[int, list[StoredColumn]]:
    """Return the arrays by their first dimension."""
    lengths: dict[int, list[StoredColumn]] = {}
    for column in columns:
        lengths.setdefault(column.shape[0], []).append(column)
    return lengths


def _hints(columns: Sequence[StoredColumn], names: Mapping[str, str], samples: int) -> dict[str, str]:
    """Return, for the first array of each other length that as many arrays have, why it lost and the option that takes
    it."""
    lengths = _by_length(columns)
    hints = {}
    for length, others in lengths.items():
        if length != samples and len(others) >= len(lengths[samples]):
            fields = shlex.quote(",".join(names[column.name] for column in others[:_NAMED]))
            hints[others[0].name] = (
                f", the length with the most bytes; to use the length {length} instead: --fields {fields}"
            )
    return hints
