"""Files made of arrays whose rows are samples: which arrays become fields, and reading them together.

:class:`Slab` reads rows of one stored array: chunks of many rows once, however rows are asked for.
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
from cachetool.core.closing import Closing
from cachetool.core.errors import BadObject, CorruptError, UsageError
from cachetool.core.schema import KEY, Field, Schema
from cachetool.formats.columnar import parse_header
from cachetool.sources.cf import Packing, decoder
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
    "ColumnFile",
    "Incomplete",
    "Part",
    "Slab",
    "StoredColumn",
    "decoded",
    "joined",
    "of_sizes",
    "schema_of_ours",
    "unpadded",
    "wants_of_ours",
]


UNIT_BYTES = 64 * 2**10
"""Rows smaller than this are fetched, and so drawn, with their neighbours: a request costs as much as so many bytes."""
SLABS_BYTES = 256 * 2**20
"""Most bytes kept at a time by all arrays of a file, unless a row is larger; chunks that reach further are read several
times."""

_NAMED = 8
"""Fields in the option that a hint advises."""

Array = npt.NDArray[Any]


class Slab:
    """The last run of rows read, aligned to chunks; rows are handed out as views of it."""

    def __init__(self, fetch: Callable[[int, int], Array], *, rows: int, row_nbytes: int, chunk: int) -> None:
        """``fetch(start, stop)`` gives fresh rows; ``chunk`` rows are stored together, of ``rows`` in all."""
        self._fetch, self._rows, self._row_nbytes, self._chunk = fetch, rows, max(1, row_nbytes), chunk
        self.share(1)
        self._start = self._stop = 0
        self._kept: Array | None = None

    def read(self, start: int, stop: int) -> Array:
        """Rows ``start`` to ``stop``; ``start < stop``."""
        parts = []
        while start < stop:
            if self._kept is None or not self._start <= start < self._stop:
                self._start = start // self._step * self._step
                asked = -(-(stop - self._start) // self._step) * self._step
                self._stop = min(self._start + min(asked, self._most), self._rows)
                self._kept = None  # let go of it before the next one is made
                self._kept = self._fetch(self._start, self._stop)
            end = min(stop, self._stop)
            parts.append(self._kept[start - self._start : end - self._start])
            start = end
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def share(self, slabs: int) -> None:
        """Keep no more than this one's part, of so many."""
        fit = max(1, SLABS_BYTES // slabs // self._row_nbytes)
        self._step = min(self._chunk, fit)
        self._most = fit // self._step * self._step

    def drop(self) -> None:
        """Let go of the rows kept; views that were handed out stay valid."""
        self._kept = None


def of_sizes(values: Array, sizes: npt.NDArray[np.int64], *, shapes: bool = False) -> Ragged:
    """Samples of ``sizes`` values each, one after another in ``values``; with ``shapes`` arrays of rank 1."""
    offsets = np.zeros(len(sizes) + 1, dtype=np.int64)
    np.cumsum(sizes, out=offsets[1:])
    return Ragged(values, offsets, sizes[:, None] if shapes else None)


def joined(values: Sequence[bytes | memoryview]) -> Ragged:
    """A column of byte strings."""
    sizes = np.fromiter((len(value) for value in values), dtype=np.int64, count=len(values))
    return of_sizes(np.frombuffer(b"".join(values), dtype=np.uint8), sizes)


def unpadded(rows: Array) -> Ragged:
    """A column out of strings of one width, dtype ``S`` or ``U``, (k,), NULs at their ends left out; text as UTF-8."""
    if rows.dtype.kind == "U":
        rows = np.char.encode(rows, "utf-8")
    flat = np.ascontiguousarray(rows).view(np.uint8).reshape(len(rows), -1)
    sizes = np.char.str_len(rows).astype(np.int64)
    return of_sizes(flat[np.arange(flat.shape[1]) < sizes[:, None]], sizes)


@dataclass(frozen=True, slots=True)
class Incomplete:
    """Rows of a column some of which hold no value."""

    column: Column
    missing: npt.NDArray[np.bool_]
    """For each row whether its value is missing; what stands in its place in the column means nothing."""
    reason: str
    """Behind the column's name."""


Part = tuple[int, int, int, str]
"""The first row of a part, where it lies in the file and how many bytes it has; for Zarr its key instead, 0 and 0."""


@dataclass(frozen=True, slots=True)
class StoredColumn:
    """One array of a file, as a candidate for a field."""

    name: str
    """As the file has it."""
    dtype: str
    """As in :class:`Field`: a NumPy dtype, ``bytes`` or ``str``."""
    shape: tuple[int, ...]
    """Of the whole array; its first size counts samples. Empty for a single value, which is read as row 0."""
    nbytes: int
    """Bytes of all values, the least that they can have where they differ in size."""
    read: Callable[[int, int], Column | Incomplete]
    """Rows ``start`` to ``stop``, little-endian; ``start < stop``."""
    ragged: int = 0
    """The rank of the rows, where every one is an array of its own size."""
    piece: int = 0
    """Bytes of the largest part that is in memory at once, if that is not a row."""
    offset: int = -1
    """Where in the file row 0 lies when the rows lie one after another as :attr:`stored`; else -1."""
    stored: str = ""
    """The dtype of the rows in the file, its byte order included."""
    chunk: int = 1
    """Rows that are stored, and so fetched, together."""
    parts: Callable[[], Iterable[Part]] | None = None
    """Where those lie, if that can be told beforehand."""
    once: Callable[[int, int], Column] | None = None
    """The same as :attr:`read`, where that keeps rows for the next call."""
    packing: Packing = dataclasses.field(default_factory=dict)
    """The CF attributes by which its numbers stand for others."""

    def field(self, name: str) -> Field:
        """The field that this array becomes. Raises :class:`UsageError` for a name that cannot be one."""
        if self.dtype in ("bytes", "str"):
            return Field(name, self.dtype)
        return Field(name, self.dtype, (None,) * self.ragged if self.ragged else self.shape[1:])


def _decoded(column: StoredColumn) -> StoredColumn | str:
    """The array of what its numbers stand for by their CF attributes, or why there is none."""
    if not column.packing or column.ragged or column.dtype in ("bytes", "str"):
        return column
    decoding = decoder(stored := np.dtype(column.dtype), column.packing)
    if isinstance(decoding, str):
        return decoding
    dtype, decode = decoding
    chunk, parts = column.chunk, column.parts
    if column.offset >= 0:  # rows that lie one after another are fetched as they would be without a library
        rows, row = column.shape[0], column.nbytes // max(1, column.shape[0])
        chunk = max(1, UNIT_BYTES // max(1, row))

        def parts() -> Iterator[Part]:
            for at in range(0, rows, chunk):
                yield at, column.offset + at * row, min(chunk, rows - at) * row, ""

    return replace(
        column, dtype=dtype.str, nbytes=column.nbytes // stored.itemsize * dtype.itemsize,
        read=lambda start, stop: decode(np.asarray(column.read(start, stop))), once=None, offset=-1, stored="",
        piece=column.piece // stored.itemsize * 8, chunk=chunk, parts=parts,
    )  # fmt: skip


def decoded(columns: list[StoredColumn], options: SourceOptions, skipped: list[tuple[str, str]]) -> list[StoredColumn]:
    """With ``--decode cf`` the arrays of what their numbers stand for; those that stand for nothing known are added to
    ``skipped``. Done before arrays are joined to samples: each has attributes of its own."""
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
    ) -> None:
        """Choose fields among ``arrays``; ``stored`` is how many bytes the input has on disk, ``close`` lets
        go of what reading them opened; ``cuts``: where the parts end that are stored together, if they differ in size;
        ``ours``: what the file says that it holds, if it carries the mark of those that cachetool writes; ``keys``: the
        samples' keys, if the file has them.

        Raises :class:`UsageError` when none is left or a field that was asked for is missing, :class:`BadObject` when
        there were none, or larger ones than their file can hold.
        """
        self.path = path
        self._close, self.cuts = close, cuts
        out = list(skipped)
        if ours is not None:
            arrays = _columns_of_ours(path, ours, arrays, out)
        by_name = {column.name: column for column in arrays}
        names = field_names(path, [name for name in by_name if ours is None or name != KEY], out, options)
        if ours is not None and KEY in by_name and options.key:
            names[KEY] = KEY
            if options.fields is None:  # in the order of its checksums, whichever place the key has
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
                # Only our own mark on a file says what its numbers stand for.
                named = ours is not None and name in ours and column.dtype == ours[name].dtype
                fields.append(replace(one, classes=ours[name].classes) if ours is not None and named else one)
            except UsageError as error:
                out.append((name, str(error)))
                continue
            self._columns[new] = column
        if keys is not None and options.key:
            self._columns[KEY] = keys
            fields.append(keys.field(KEY))
        self.schema = make_schema(path, fields, out)
        self.skipped = bounded(out)
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
        """Samples ``start`` to ``stop``. Raises :class:`MisfitRows` where some rows lack a value."""
        if not 0 <= start <= stop <= self.samples:
            raise UsageError(f"{self.path}: samples {start} to {stop} of {self.samples}")
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
                misfits |= dict.fromkeys((np.flatnonzero(values.missing) + start).tolist(), why) | misfits
                values = values.column
            columns[name] = values
        block = Block(self.schema, columns)
        if misfits:
            raise MisfitRows(self.path, block, misfits)
        return block

    def close(self) -> None:
        """Let go of files."""
        self._close()


def schema_of_ours(path: object, header: Any) -> Schema:
    """What the mark of a file says that cachetool wrote. Raises :class:`BadObject`."""
    try:
        return parse_header(header, path=Path(str(path)), schema=None)[0]
    except CorruptError as error:
        raise BadObject(str(error)) from error


def wants_of_ours(options: SourceOptions) -> Callable[[str], bool]:
    """Whether an array of a file that cachetool wrote is asked for, by the name of its field."""

    def wants(name: str) -> bool:
        name = name.removesuffix(".offsets").removesuffix(".shapes")
        return options.key if name == KEY else options.wants(name)

    return wants


def _columns_of_ours(
    path: object, schema: Schema, arrays: Sequence[StoredColumn], skipped: list[tuple[str, str]]
) -> list[StoredColumn]:
    """A column for each field of a file that cachetool wrote (:mod:`cachetool.formats.columnar`). Of a field that
    differs in length the values of all samples lie in one array, and two others say where."""
    by_name = {column.name: column for column in arrays}
    left_out = dict(skipped)
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
    """The array with the dtype of its field: neither HDF5 nor Zarr has all of them, times for example."""
    if values.dtype == field.numpy.str:
        return values
    if values.dtype in ("bytes", "str") or values.ragged or np.dtype(values.dtype).itemsize != field.numpy.itemsize:
        raise BadObject(f"{path}: field {quoted(field.name)} is not what cachetool writes")

    def read(start: int, stop: int) -> Column:
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
        raise BadObject(f"{path}: field {quoted(field.name)} is not what cachetool writes")

    def read(start: int, stop: int) -> Column:
        at = np.asarray(offsets.read(start, stop + 1))
        first, last = int(at[0]), int(at[-1])
        if first < 0 or last > count or (np.diff(at) < 0).any():
            raise BadObject(f"{path}: field {quoted(field.name)} has offsets that lead out of it")
        flat = np.asarray(values.read(first, last)) if last > first else np.empty(0, dtype=field.numpy)
        return Ragged(flat, at - first, None if shapes is None else np.asarray(shapes.read(start, stop)).copy())

    return StoredColumn(
        field.name, field.dtype, (max(0, rows),), values.nbytes, read, ragged=field.rank if shapes is not None else 0,
        piece=max(values.piece, offsets.piece),
    )  # fmt: skip


def _common_length(
    path: object, columns: Sequence[StoredColumn], wanted: int | None, skipped: Sequence[tuple[str, str]]
) -> int:
    """The first dimension of the arrays that hold most bytes; of equal ones the one that most arrays have."""
    if not columns and not skipped:
        raise BadObject(f"{path}: no samples in it")
    if not columns:
        raise BadObject(f"{path}: nothing in it can be taken as samples{because(skipped)}")
    lengths = _by_length(columns)
    if wanted is None:
        return max(lengths, key=lambda length: (sum(c.nbytes for c in lengths[length]), len(lengths[length]), length))
    if wanted not in lengths:
        have = ", ".join(map(str, sorted(lengths)))
        raise UsageError(f"{path}: no array has {wanted} rows; there are {have}")
    return wanted


def _by_length(columns: Iterable[StoredColumn]) -> dict[int, list[StoredColumn]]:
    """The arrays of each first dimension."""
    lengths: dict[int, list[StoredColumn]] = {}
    for column in columns:
        lengths.setdefault(column.shape[0], []).append(column)
    return lengths


def _hints(columns: Sequence[StoredColumn], names: Mapping[str, str], samples: int) -> dict[str, str]:
    """For the first array of each other length that as many arrays have: why it lost, and the option that takes it."""
    lengths = _by_length(columns)
    hints = {}
    for length, others in lengths.items():
        if length != samples and len(others) >= len(lengths[samples]):
            fields = shlex.quote(",".join(names[column.name] for column in others[:_NAMED]))
            hints[others[0].name] = f", which most bytes have; to take the {length} instead: --fields {fields}"
    return hints
