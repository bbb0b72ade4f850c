"""Parquet files: each row is a sample, read by row groups. Needs the extra ``parquet``.

==============================  =======================================================
column                          field
==============================  =======================================================
bool, int, float                fixed
date, timestamp                 ``datetime64`` in the unit of the file; with a time zone: the values are UTC
time of day, duration           ``timedelta64``, since midnight
decimal                         ``float64`` up to 15 digits, which it tells apart; of more left out
string, binary                  ``str``, ``bytes``
dictionary                      as the values that it stands for
list of numbers                 ragged; of fixed length: fixed; lists of fixed lists: ragged of a rank more
struct of ``bytes``, ``path``   an image or audio of the Hugging Face hub: ``bytes``; and ``NAME.path``, if asked for
other structs                   each of their parts, as ``NAME.PART``
anything else                   left out, with the reason
==============================  =======================================================

A row with a null in a field is no sample (:class:`~cachetool.sources.readers.MisfitRows`), because no field can hold a
null. A column of nulls alone is left out.
"""

from __future__ import annotations

import functools
import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from cachetool.core.block import Column, Ragged
from cachetool.core.errors import BadObject, MissingExtra
from cachetool.core.schema import storage_dtype
from cachetool.sources.byte_source import SourceFile
from cachetool.sources.limits import check_allocation, quoted
from cachetool.sources.options import SourceOptions
from cachetool.sources.readers import NOT_ASKED, reading
from cachetool.sources.rows import ColumnFile, Incomplete, Part, StoredColumn

__all__ = ["open_parquet"]


def open_parquet(path: SourceFile, options: SourceOptions) -> ColumnFile:
    """Return the columns of one Parquet file. Raises :class:`BadObject` naming file and column."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise MissingExtra("reading Parquet files", "parquet") from None

    with reading(f"{path} is not a whole Parquet file"):
        # pre_buffer=False: each read asks for its bytes when needed. The worker has fetched a row group's parts before,
        # and pyarrow would read ahead in larger pieces of its own.
        opened = pyarrow.PythonFile(path.open(), mode="r")
        file = pyarrow.parquet.ParquetFile(opened, memory_map=False, pre_buffer=False)
        about = file.metadata
        groups = [about.row_group(number) for number in range(about.num_row_groups)]
        counts = [group.num_rows for group in groups]
        # The metadata of a damaged file may state anything. Units and reads rely on these counts.
        if any(count < 0 for count in counts) or sum(counts) != about.num_rows:
            raise BadObject(f"{path}: its row groups together do not have as many rows as the file")
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
    leaves = [leaf for field in schema for leaf in _leaves(field.name, (field.name,), field.type)]
    places = [about.schema.column(at).path for at in range(about.num_columns)]
    # The parts of a column are those whose place begins with the column's name and a dot.
    inside: dict[str, list[int]] = defaultdict(list)
    for at, place in enumerate(places):
        for end in (*(end for end, letter in enumerate(place) if letter == "."), len(place)):
            inside[place[:end]].append(at)
    names, tops = Counter(leaf.name for leaf in leaves), Counter(schema.names)
    for leaf in leaves:
        if reason := _not_taken(leaf, options):
            skipped.append((leaf.name, reason))
            continue
        is_column = len(leaf.steps) == 1 and tops[leaf.name] == 1
        # Two columns of one name: one would be read with the type of the other.
        if names[leaf.name] > 1 and not is_column:
            skipped.append((leaf.name, "another column has the same name"))
            continue
        values = _values_of(leaf.kind, leaf.shape)
        chunks = inside[leaf.place]
        if isinstance(values, str):
            skipped.append((leaf.name, values))
        elif _only_nulls(about, [at for at in chunks if places[at] == leaf.place]):
            skipped.append((leaf.name, _ONLY_PATHS if leaf.is_file else "all of its values are null"))
        else:
            columns.append(replace(values.column(table, leaf, piece), parts=functools.partial(_parts, about, chunks)))
            if zone := getattr(leaf.kind, "tz", None):
                skipped.append((f"time zone of {leaf.name}", f"{zone[:60]}; the values are UTC"))
    cuts = np.unique(ends[ends > 0]).tolist()
    return ColumnFile(path, columns, options, skipped=skipped, stored=path.size, cuts=cuts)


@dataclass(frozen=True, slots=True)
class _Leaf:
    """A column, or one part of a column that is a struct."""

    name: str
    steps: tuple[str, ...]
    """The column's name, and the names that lead from the column to the part."""
    kind: Any
    """The Arrow type of the values themselves, without a dictionary or extension around them."""
    is_file: bool = False
    """True for the bytes of an image or audio that lie in a struct beside their path."""
    is_path: bool = False
    shape: tuple[int, ...] = ()
    """The shape of each value if the column holds tensors of a fixed shape."""

    @property
    def place(self) -> str:
        """The name in the metadata of a row group."""
        return ".".join(self.steps)


def _leaves(name: str, steps: tuple[str, ...], kind: Any) -> Iterator[_Leaf]:
    """Yield the candidates for fields in a column: the column itself, or the parts of a struct."""
    from pyarrow import types

    # Values of a permuted tensor lie in another order than its shape says, so its shape is used only for the identity.
    permuted = getattr(kind, "permutation", None)
    shape = tuple(getattr(kind, "shape", ())) if permuted in (None, sorted(permuted or ())) else ()
    kind = _plain(kind)
    if not types.is_struct(kind):
        yield _Leaf(name, steps, kind, shape=shape)
        return
    parts = {part.name: _plain(part.type) for part in kind}
    # The Hugging Face hub stores images and audio as this struct. The field gets the column's own name.
    if parts.keys() == {"bytes", "path"} and _is_binary(parts["bytes"]):
        yield _Leaf(name, (*steps, "bytes"), parts["bytes"], is_file=True)
        yield _Leaf(f"{name}.path", (*steps, "path"), parts["path"], is_path=True)
        return
    for part in kind:
        yield from _leaves(f"{name}.{part.name}", (*steps, part.name), part.type)


def _not_taken(leaf: _Leaf, options: SourceOptions) -> str:
    """Return the reason to leave a column out before it is read; empty if there is none."""
    name = options.rename.get(leaf.name, leaf.name)
    # `--fields -a` leaves out every part of the struct `a`, such as `a.b`.
    around = (".".join(leaf.steps[:count]) for count in range(1, len(leaf.steps)))
    if not options.wants(leaf.name) or any(place in options.dropped for place in around):
        return NOT_ASKED
    if leaf.is_path and name not in (options.chosen or ()):
        return f"the path beside the bytes of {leaf.name.removesuffix('.path')}; to read it, name it in --fields"
    return ""


_NO_BYTES = "has no bytes (at most a path to a file outside of the table)"
_ONLY_PATHS = "it has paths to files but no bytes; pull the folder of these files, or write the table with their bytes"


def _only_nulls(about: Any, chunks: Sequence[int]) -> bool:
    """Return True if the metadata show that a column has no value in any row. ``chunks``: the column's number."""
    for number in range(about.num_row_groups) if len(chunks) == 1 else ():
        group = about.row_group(number)
        statistics = group.column(chunks[0]).statistics
        if statistics is None or not statistics.has_null_count or statistics.null_count != group.num_rows:
            return False
    return bool(about.num_rows and len(chunks) == 1)


def _parts(about: Any, chunks: Sequence[int]) -> Iterator[Part]:
    """Yield the places in each row group of the columns with the numbers ``chunks``."""
    row = 0
    for number in range(about.num_row_groups):
        group = about.row_group(number)
        for at in chunks:
            column = group.column(at)
            # A dictionary page lies before the data pages, and the size of the column counts both.
            start = column.dictionary_page_offset or column.data_page_offset
            yield row, min(start, column.data_page_offset), column.total_compressed_size, ""
        row += group.num_rows


class _Table:
    """The columns of the row group that was read last."""

    def __init__(self, path: SourceFile, file: Any, ends: np.ndarray[Any, np.dtype[np.int64]]) -> None:
        self._path, self._file, self._ends = path, file, ends
        self._number = -1
        self._columns: dict[str, Any] = {}

    def read(self, leaf: _Leaf, start: int, stop: int) -> Any:
        """Return the rows from ``start`` to ``stop`` of a column; they may lie in several row groups."""
        import pyarrow

        parts = []
        while start < stop:
            number = int(np.searchsorted(self._ends, start, side="right"))
            if number != self._number:
                # Only one row group is kept: its columns are unpacked as a whole, and the process's memory is limited.
                self._number, self._columns = number, {}
            if leaf.place not in self._columns:
                self._columns[leaf.place] = self._of_group(leaf, number)
            first = int(self._ends[number - 1]) if number else 0
            end = min(stop, int(self._ends[number]))
            parts.append(self._columns[leaf.place].slice(start - first, end - start))
            start = end
        return parts[0] if len(parts) == 1 else pyarrow.concat_arrays(parts)

    def _of_group(self, leaf: _Leaf, number: int) -> Any:
        """Return a column of one row group in one piece."""
        import pyarrow

        # pyarrow also returns columns whose names begin with this one, because a dot may be part of a name.
        column = self._file.read_row_group(number, columns=[leaf.place]).column(leaf.steps[0])
        chunks = [_inside(chunk, leaf.steps[1:]) for chunk in column.chunks]
        if not chunks:
            return pyarrow.array([], leaf.kind)
        array = chunks[0] if len(chunks) == 1 else pyarrow.concat_arrays(chunks)
        self._check(leaf.name, number, len(array))
        return array

    def _check(self, name: str, number: int, came: int) -> None:
        """Raise :class:`BadObject` if pyarrow returned another number of rows than the file has."""
        # pyarrow 26 returns fewer rows for some lists in small data pages of version 2.0. Without this check samples
        # would be joined from values of different rows.
        rows = int(self._ends[number] - (self._ends[number - 1] if number else 0))
        if came != rows:
            raise BadObject(
                f"{self._path}: {quoted(name)} has {rows} rows in row group {number}, but pyarrow reads {came};\n"
                f"write the file again with data_page_version='1.0', or leave the column out with --fields -{name}"
            )


def _inside(array: Any, steps: tuple[str, ...] = ()) -> Any:
    """Return the part of a struct that ``steps`` lead to, without a dictionary or extension around its values."""
    while True:
        if hasattr(array, "storage"):
            array = array.storage
        elif hasattr(array, "dictionary"):
            array = array.dictionary_decode()
        elif steps:
            # flatten(), unlike field(), makes the part null where the struct is null.
            array, steps = array.flatten()[array.type.get_field_index(steps[0])], steps[1:]
        else:
            return array


def _plain(kind: Any) -> Any:
    """Return the type of the values inside an extension or a dictionary."""
    from pyarrow import types

    while True:
        if hasattr(kind, "storage_type"):
            kind = kind.storage_type
        elif types.is_dictionary(kind):
            kind = kind.value_type
        else:
            return kind


@dataclass(frozen=True, slots=True)
class _Values:
    """The conversion of a column's values to those of a field."""

    dtype: str
    """The dtype as in :class:`~cachetool.core.schema.Field`."""
    row: tuple[int, ...] = ()
    """Sizes of a row, or of each entry of a list."""
    depth: int = 0
    """Number of nested lists of fixed length in a value, or in each entry of a list."""
    is_list: bool = False

    def column(self, table: _Table, leaf: _Leaf, piece: int) -> StoredColumn:
        """Return the column as a candidate for a field."""
        rows = int(table._ends[-1]) if len(table._ends) else 0
        flat = self.dtype in ("bytes", "str") or self.is_list
        # 0 for values of different sizes: the metadata do not tell their bytes, so nothing is claimed that must be
        # checked.
        nbytes = 0 if flat else rows * math.prod(self.row) * np.dtype(self.dtype).itemsize
        return StoredColumn(
            leaf.name, self.dtype, (rows,) if flat else (rows, *self.row), nbytes,
            functools.partial(self._read, table, leaf), ragged=1 + len(self.row) if self.is_list else 0,
            piece=piece if flat or self.row else 0,
        )  # fmt: skip

    def _read(self, table: _Table, leaf: _Leaf, start: int, stop: int) -> Column | Incomplete:
        array = table.read(leaf, start, stop)
        column = self._taken(array)
        missing = _missing(array)
        if missing is None:
            return column
        return Incomplete(column, missing, _NO_BYTES if leaf.is_file else "is null")

    def _taken(self, array: Any) -> Column:
        if self.dtype in ("bytes", "str"):
            return _bytes(array)
        if not self.is_list:
            return _numbers(_flat(array, self.depth), self.dtype).reshape(len(array), *self.row)
        offsets = _offsets(array)
        sizes = np.diff(offsets)
        values = _numbers(_flat(_entries(array), self.depth), self.dtype)
        shapes = np.empty((len(array), 1 + len(self.row)), dtype=np.int64)
        shapes[:, 0], shapes[:, 1:] = sizes, self.row
        return Ragged(values, (offsets - offsets[0]) * math.prod(self.row), shapes)


def _values_of(kind: Any, shape: tuple[int, ...]) -> _Values | str:
    """Return the conversion of values of an Arrow type, or the reason why there is none; ``shape`` as in
    :class:`_Leaf`."""
    from pyarrow import types

    if types.is_null(kind):
        return "all of its values are null"
    if _is_text(kind) or _is_binary(kind):
        return _Values("str" if _is_text(kind) else "bytes")
    is_list = _is_list(kind)
    inner, row = _plain(kind.value_type) if is_list else kind, []
    while types.is_fixed_size_list(inner):
        row.append(inner.list_size)
        inner = _plain(inner.value_type)
    if dtype := _dtype(inner):
        return _Values(dtype, shape or tuple(row), len(row), is_list)
    shown = str(kind)[:60]
    if types.is_decimal(kind):
        return (
            f"of the type {shown}, with more digits than float64 can hold; cast it in the file to 'float64', or to"
            " 'string' to keep all digits"
        )
    if is_list and _is_text(inner):
        return f"of the type {shown}, but a field holds one text per sample; join each list into one text in the file"
    return f"of the type {shown}, which no field can hold; write each value as one text (JSON) in the file"


def _is_text(kind: Any) -> bool:
    from pyarrow import types

    return bool(types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind))


def _is_binary(kind: Any) -> bool:
    from pyarrow import types

    fixed = types.is_fixed_size_binary(kind) and not types.is_decimal(kind)
    return bool(types.is_binary(kind) or types.is_large_binary(kind) or types.is_binary_view(kind) or fixed)


def _is_list(kind: Any) -> bool:
    from pyarrow import types

    return bool(types.is_list(kind) or types.is_large_list(kind))


_EXACT_DIGITS = 15
"""Number of decimal digits up to which float64 tells all numbers apart."""


def _dtype(kind: Any) -> str:
    """Return the dtype of a field for an Arrow type; empty for a type that is no number."""
    from pyarrow import types

    if types.is_date(kind):
        return "<M8[D]" if types.is_date32(kind) else "<M8[ms]"
    if types.is_timestamp(kind):
        return f"<M8[{kind.unit}]"
    if types.is_time(kind) or types.is_duration(kind):
        return f"<m8[{kind.unit}]"
    if types.is_decimal(kind):
        return "<f8" if kind.precision <= _EXACT_DIGITS else ""
    if types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind):
        return storage_dtype(kind.to_pandas_dtype()).str
    return ""


def _missing(array: Any) -> np.ndarray[Any, np.dtype[np.bool_]] | None:
    """Mark the rows that contain a null, directly or in their lists; return None if there is no null."""
    from pyarrow import types

    nulls: Any = array.is_null().to_numpy(zero_copy_only=False) if array.null_count else None
    inner: Any = None
    if types.is_fixed_size_list(array.type):
        if (entries := _missing(_flat(array, 1))) is not None:
            inner = entries.reshape(len(array), array.type.list_size).any(axis=1)
    elif _is_list(array.type) and (entries := _missing(_entries(array))) is not None:
        offsets = _offsets(array)
        inner = np.zeros(len(array), dtype=np.bool_)
        # The offsets of a slice do not begin at 0. searchsorted finds the row of each null entry without a loop.
        inner[np.searchsorted(offsets - offsets[0], np.flatnonzero(entries), side="right") - 1] = True
    if nulls is None or inner is None:
        return inner if nulls is None else nulls  # type: ignore[no-any-return]
    return np.asarray(nulls | inner)


def _offsets(lists: Any) -> np.ndarray[Any, np.dtype[np.int64]]:
    return np.asarray(lists.offsets).astype(np.int64)


def _entries(lists: Any) -> Any:
    """Return the entries of all lists, one after another."""
    offsets = _offsets(lists)
    # An array may be a slice: `values` still holds the entries of all rows of the row group.
    return _inside(lists.values.slice(offsets[0], offsets[-1] - offsets[0]))


def _flat(array: Any, depth: int) -> Any:
    """Return the entries of lists of fixed length, including those of lists that are null."""
    for _ in range(depth):
        size = array.type.list_size
        # `flatten()` would skip the entries of null lists, and later rows would move to wrong places.
        array = _inside(array.values.slice(array.offset * size, len(array) * size))
    return array


def _numbers(array: Any, dtype: str) -> np.ndarray[Any, np.dtype[Any]]:
    """Return the values as NumPy numbers, with any number in place of a null."""
    from pyarrow import types

    wanted = np.dtype(dtype)
    if types.is_boolean(array.type):
        return np.asarray(array.fill_null(False).to_numpy(zero_copy_only=False), dtype=wanted)
    if types.is_decimal(array.type):
        return _decimals(array)
    # Read out of the buffer, because to_numpy() turns integers with nulls into floats.
    data = array.buffers()[1]
    if data is None or not len(array):
        return np.zeros(len(array), dtype=wanted)
    size = array.type.bit_width // 8
    # Dates and times lie as integers of 4 or 8 bytes; NumPy's types have 8.
    stored = np.dtype(f"<i{size}") if wanted.kind in "mM" else wanted
    values = np.frombuffer(data, dtype=stored, count=len(array), offset=array.offset * size)
    return values.astype("<i8", copy=False).view(wanted) if wanted.kind in "mM" else values


def _decimals(array: Any) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Return the float64 nearest to each decimal."""
    import pyarrow

    scale = array.type.scale
    # A decimal128 is a whole number of 16 bytes times a power of ten. Up to 15 digits fit its lower 8 bytes and are
    # below 2**53, so the division below rounds once and gives the nearest float64.
    wide = array.cast(pyarrow.decimal128(38, scale))
    data = wide.buffers()[1]
    if data is None or not len(wide):
        return np.zeros(len(wide))
    low = np.frombuffer(data, dtype="<i8", count=2 * len(wide), offset=16 * wide.offset)[::2]
    integers = np.where(wide.is_valid().to_numpy(zero_copy_only=False), low, 0).astype(np.float64)
    power = np.float64(10) ** abs(scale)
    return np.asarray(integers / power if scale >= 0 else integers * power)


def _bytes(array: Any) -> Ragged:
    import pyarrow

    # Offsets of 8 bytes, as a Ragged column has them, for every kind of text and bytes.
    wide = array.cast(pyarrow.large_string() if _is_text(array.type) else pyarrow.large_binary())
    _, offsets, values = wide.buffers()
    at = np.frombuffer(offsets, dtype=np.int64)[wide.offset : wide.offset + len(wide) + 1]
    flat = np.frombuffer(values, dtype=np.uint8) if values is not None else np.zeros(0, np.uint8)
    # The slice refers to the buffer of the whole row group; compact() copies only its own bytes.
    return Ragged(flat, at).compact()
