"""Parquet files, a row a sample, read by row groups; needs the extra ``parquet``.

==============================  =======================================================
column                          field
==============================  =======================================================
bool, int, float, date, time    fixed; dates and times as whole numbers
string, binary                  ``str``, ``bytes``
list of numbers                 ragged, rank 1; of fixed length: fixed
anything else                   left out, with the reason
==============================  =======================================================

A value that is null is refused: no field can hold it.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from cachetool.core.block import Column, Ragged
from cachetool.core.errors import BadObject, MissingExtra, UsageError
from cachetool.core.schema import storage_dtype
from cachetool.sources.byte_source import SourceFile
from cachetool.sources.limits import check_allocation, quoted
from cachetool.sources.options import SourceOptions
from cachetool.sources.readers import NOT_ASKED, reading
from cachetool.sources.rows import ColumnFile, Part, StoredColumn, of_sizes

__all__ = ["open_parquet"]


def open_parquet(path: SourceFile, options: SourceOptions) -> ColumnFile:
    """The columns of one Parquet file. Raises :class:`BadObject` naming file and column."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise MissingExtra("reading Parquet files", "parquet") from None

    with reading(f"{path} is not a whole Parquet file"):
        opened = pyarrow.PythonFile(path.open(), mode="r")
        file = pyarrow.parquet.ParquetFile(opened, memory_map=False, pre_buffer=False)
        about = file.metadata
        groups = [about.row_group(number) for number in range(about.num_row_groups)]
        counts = [group.num_rows for group in groups]
        if any(count < 0 for count in counts) or sum(counts) != about.num_rows:
            raise BadObject(f"{path}: its row groups do not add up to its rows")
        piece = max(
            (sum(group.column(at).total_uncompressed_size for at in range(group.num_columns)) for group in groups),
            default=0,
        )
        check_allocation(f"{path}: a row group", piece, stored=path.size)
        schema = file.schema_arrow
    ends = np.cumsum(counts).astype(np.int64)
    table = _Table(path, file, ends)
    skipped: list[tuple[str, str]] = []
    columns: list[StoredColumn] = []
    names = Counter(schema.names)
    for field in schema:
        if not options.wants(field.name):
            skipped.append((field.name, NOT_ASKED))
            continue
        if names[field.name] > 1:  # one of them would be read under the type of the other
            skipped.append((field.name, "another column has this name too"))
            continue
        column = _column(table, field, about.num_rows, piece)
        if isinstance(column, str):
            skipped.append((field.name, column))
        else:
            columns.append(replace(column, parts=functools.partial(_parts, about, field.name)))
    cuts = np.unique(ends[ends > 0]).tolist()
    return ColumnFile(path, columns, options, skipped=skipped, stored=path.size, cuts=cuts)


def _parts(about: Any, name: str) -> Iterator[Part]:
    """Where a column lies in each row group."""
    row = 0
    for number in range(about.num_row_groups):
        group = about.row_group(number)
        for at in range(group.num_columns):
            column = group.column(at)
            if f"{column.path_in_schema}.".startswith(f"{name}."):
                start = column.dictionary_page_offset or column.data_page_offset
                yield row, min(start, column.data_page_offset), column.total_compressed_size, ""
        row += group.num_rows


class _Table:
    """Columns of the row group that was read last."""

    def __init__(self, path: SourceFile, file: Any, ends: np.ndarray[Any, np.dtype[np.int64]]) -> None:
        self._path, self._file, self._ends = path, file, ends
        self._number = -1
        self._columns: dict[str, Any] = {}

    def read(self, name: str, start: int, stop: int) -> Any:
        """Rows ``start`` to ``stop`` of a column, which are of one row group or of several."""
        import pyarrow

        parts = []
        while start < stop:
            number = int(np.searchsorted(self._ends, start, side="right"))
            if number != self._number:
                self._number, self._columns = number, {}
            if name not in self._columns:
                # Others come with it whose names begin as this one does: a dot may be part of a name.
                column = self._file.read_row_group(number, columns=[name]).column(name).combine_chunks()
                self._check(name, number, len(column))
                self._columns[name] = column
            first = int(self._ends[number - 1]) if number else 0
            end = min(stop, int(self._ends[number]))
            parts.append(self._columns[name].slice(start - first, end - start))
            start = end
        chunks = [chunk for part in parts for chunk in (part.chunks if hasattr(part, "chunks") else [part])]
        out = chunks[0] if len(chunks) == 1 else pyarrow.concat_arrays(chunks)
        if out.null_count:
            raise BadObject(f"{self._path}: {quoted(name)} has values that are null; choose other fields with --fields")
        return out

    def _check(self, name: str, number: int, came: int) -> None:
        """Refuse what pyarrow 26 makes of some lists in small pages of version 2.0: fewer rows than there are."""
        rows = int(self._ends[number] - (self._ends[number - 1] if number else 0))
        if came != rows:
            raise BadObject(
                f"{self._path}: {quoted(name)} has {rows} rows in row group {number}, of which pyarrow reads {came};\n"
                "write the file again with data_page_version='1.0', or choose other fields with --fields"
            )


def _column(table: _Table, field: Any, rows: int, piece: int) -> StoredColumn | str:
    """The column as a candidate for a field, or why it cannot be one."""
    from pyarrow import types

    name, kind = field.name, field.type
    if types.is_string(kind) or types.is_large_string(kind) or types.is_binary(kind) or types.is_large_binary(kind):
        text = "str" if types.is_string(kind) or types.is_large_string(kind) else "bytes"
        return StoredColumn(name, text, (rows,), 0, lambda a, b: _bytes(table.read(name, a, b)), piece=piece)
    if types.is_fixed_size_list(kind) and (number := _number(kind.value_type)):
        shape = (rows, kind.list_size)
        nbytes = rows * kind.list_size * np.dtype(number).itemsize

        def fixed(start: int, stop: int) -> Column:
            values = _values(table.read(name, start, stop).flatten(), number)
            return values.reshape(stop - start, kind.list_size)

        return StoredColumn(name, number, shape, nbytes, fixed, piece=piece)
    if (types.is_list(kind) or types.is_large_list(kind)) and (number := _number(kind.value_type)):

        def ragged(start: int, stop: int) -> Column:
            lists = table.read(name, start, stop)
            sizes = np.diff(np.asarray(lists.offsets)).astype(np.int64)
            return of_sizes(_values(lists.flatten(), number), sizes, shapes=True)

        return StoredColumn(name, number, (rows,), 0, ragged, ragged=1, piece=piece)
    if number := _number(kind):
        nbytes = rows * np.dtype(number).itemsize
        return StoredColumn(name, number, (rows,), nbytes, lambda a, b: _values(table.read(name, a, b), number))
    return f"of the type {str(kind)[:60]}"


def _number(kind: Any) -> str:
    """The dtype that values of an Arrow type become; empty when they are no numbers."""
    from pyarrow import types

    if types.is_date32(kind) or types.is_time32(kind):
        return "<i4"
    if types.is_date64(kind) or types.is_time64(kind) or types.is_timestamp(kind) or types.is_duration(kind):
        return "<i8"
    if not (types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind)):
        return ""
    try:
        return storage_dtype(kind.to_pandas_dtype()).str
    except UsageError:
        return ""


def _values(array: Any, dtype: str) -> np.ndarray[Any, np.dtype[Any]]:
    if array.null_count:
        raise BadObject("it has values that are null; choose other fields with --fields")
    if str(array.type).startswith("time"):  # of day: these come as objects of Python
        array = array.cast(f"int{array.type.bit_width}")
    values = array.to_numpy(zero_copy_only=False)
    return np.ascontiguousarray(values.view("<i8") if values.dtype.kind in "mM" else values, dtype=dtype)


def _bytes(array: Any) -> Ragged:
    import pyarrow

    wide = array.cast(pyarrow.large_binary())
    _, offsets, values = wide.buffers()
    at = np.frombuffer(offsets, dtype=np.int64)[wide.offset : wide.offset + len(wide) + 1]
    flat = np.frombuffer(values, dtype=np.uint8) if values is not None else np.zeros(0, np.uint8)
    return Ragged(flat, at).compact()
