"""Parquet files, a row a sample, read by row groups; needs the extra ``parquet``.

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

A row with a null in a field is no sample (:class:`~cachetool.sources.readers.MisfitRows`): no field can hold it. A
column of nulls alone is left out.
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
    leaves = [leaf for field in schema for leaf in _leaves(field.name, (field.name,), field.type)]
    places = [about.schema.column(at).path for at in range(about.num_columns)]
    inside: dict[str, list[int]] = defaultdict(list)  # the parts of a column, which begin with its name and a dot
    for at, place in enumerate(places):
        for end in (*(end for end, letter in enumerate(place) if letter == "."), len(place)):
            inside[place[:end]].append(at)
    names, tops = Counter(leaf.name for leaf in leaves), Counter(schema.names)
    for leaf in leaves:
        if reason := _not_taken(leaf, options):
            skipped.append((leaf.name, reason))
            continue
        is_column = len(leaf.steps) == 1 and tops[leaf.name] == 1
        if names[leaf.name] > 1 and not is_column:  # one of them would be read under the type of the other
            skipped.append((leaf.name, "another column has this name too"))
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
    """A column, or a part of one that is a struct."""

    name: str
    steps: tuple[str, ...]
    """The column, and the names that lead from it to the part."""
    kind: Any
    """Type in Arrow, without what is around its values: dictionary, extension."""
    is_file: bool = False
    """True for the bytes of an image or audio, in a struct beside their path."""
    is_path: bool = False
    shape: tuple[int, ...] = ()
    """The shape of each value, where the column holds tensors of a fixed shape."""

    @property
    def place(self) -> str:
        """The name in the metadata of a row group."""
        return ".".join(self.steps)


def _leaves(name: str, steps: tuple[str, ...], kind: Any) -> Iterator[_Leaf]:
    """The candidates for fields in a column: the column itself, or the parts of a struct."""
    from pyarrow import types

    permuted = getattr(kind, "permutation", None)
    shape = tuple(getattr(kind, "shape", ())) if permuted in (None, sorted(permuted or ())) else ()
    kind = _plain(kind)
    if not types.is_struct(kind):
        yield _Leaf(name, steps, kind, shape=shape)
        return
    parts = {part.name: _plain(part.type) for part in kind}
    if parts.keys() == {"bytes", "path"} and _is_binary(parts["bytes"]):
        yield _Leaf(name, (*steps, "bytes"), parts["bytes"], is_file=True)
        yield _Leaf(f"{name}.path", (*steps, "path"), parts["path"], is_path=True)
        return
    for part in kind:
        yield from _leaves(f"{name}.{part.name}", (*steps, part.name), part.type)


def _not_taken(leaf: _Leaf, options: SourceOptions) -> str:
    """The reason to leave a column out before it is looked at; empty when there is none."""
    name = options.rename.get(leaf.name, leaf.name)
    around = (".".join(leaf.steps[:count]) for count in range(1, len(leaf.steps)))  # ``-a`` leaves out all of ``a.b``
    if not options.wants(leaf.name) or any(place in options.dropped for place in around):
        return NOT_ASKED
    if leaf.is_path and name not in (options.chosen or ()):
        return f"the path beside the bytes of {leaf.name.removesuffix('.path')}; --fields takes it where it names it"
    return ""


_NO_BYTES = "has no bytes, at most a path to a file that is not in the table"
_ONLY_PATHS = "it has paths to files and no bytes; pull the folder of these files, or write the table with their bytes"


def _only_nulls(about: Any, chunks: Sequence[int]) -> bool:
    """True when the metadata say that a column, given by its number, has no value in any row."""
    for number in range(about.num_row_groups) if len(chunks) == 1 else ():
        group = about.row_group(number)
        statistics = group.column(chunks[0]).statistics
        if statistics is None or not statistics.has_null_count or statistics.null_count != group.num_rows:
            return False
    return bool(about.num_rows and len(chunks) == 1)


def _parts(about: Any, chunks: Sequence[int]) -> Iterator[Part]:
    """The places of a column, given by the numbers of its parts, in each row group."""
    row = 0
    for number in range(about.num_row_groups):
        group = about.row_group(number)
        for at in chunks:
            column = group.column(at)
            start = column.dictionary_page_offset or column.data_page_offset
            yield row, min(start, column.data_page_offset), column.total_compressed_size, ""
        row += group.num_rows


class _Table:
    """Columns of the row group that was read last."""

    def __init__(self, path: SourceFile, file: Any, ends: np.ndarray[Any, np.dtype[np.int64]]) -> None:
        self._path, self._file, self._ends = path, file, ends
        self._number = -1
        self._columns: dict[str, Any] = {}

    def read(self, leaf: _Leaf, start: int, stop: int) -> Any:
        """Rows ``start`` to ``stop`` of a column, which are of one row group or of several."""
        import pyarrow

        parts = []
        while start < stop:
            number = int(np.searchsorted(self._ends, start, side="right"))
            if number != self._number:
                self._number, self._columns = number, {}
            if leaf.place not in self._columns:
                self._columns[leaf.place] = self._of_group(leaf, number)
            first = int(self._ends[number - 1]) if number else 0
            end = min(stop, int(self._ends[number]))
            parts.append(self._columns[leaf.place].slice(start - first, end - start))
            start = end
        return parts[0] if len(parts) == 1 else pyarrow.concat_arrays(parts)

    def _of_group(self, leaf: _Leaf, number: int) -> Any:
        """A column of one row group, in one piece."""
        import pyarrow

        # Others come with it whose names begin as this one does: a dot may be part of a name.
        column = self._file.read_row_group(number, columns=[leaf.place]).column(leaf.steps[0])
        chunks = [_inside(chunk, leaf.steps[1:]) for chunk in column.chunks]
        if not chunks:
            return pyarrow.array([], leaf.kind)
        array = chunks[0] if len(chunks) == 1 else pyarrow.concat_arrays(chunks)
        self._check(leaf.name, number, len(array))
        return array

    def _check(self, name: str, number: int, came: int) -> None:
        """Refuse what pyarrow 26 makes of some lists in small pages of version 2.0: fewer rows than there are."""
        rows = int(self._ends[number] - (self._ends[number - 1] if number else 0))
        if came != rows:
            raise BadObject(
                f"{self._path}: {quoted(name)} has {rows} rows in row group {number}, of which pyarrow reads {came};\n"
                f"write the file again with data_page_version='1.0', or leave it out with --fields -{name}"
            )


def _inside(array: Any, steps: tuple[str, ...] = ()) -> Any:
    """The part of a struct that ``steps`` lead to, without what is around its values: dictionary, extension. A null of
    the struct is one of the part."""
    while True:
        if hasattr(array, "storage"):
            array = array.storage
        elif hasattr(array, "dictionary"):
            array = array.dictionary_decode()
        elif steps:
            array, steps = array.flatten()[array.type.get_field_index(steps[0])], steps[1:]
        else:
            return array


def _plain(kind: Any) -> Any:
    """The type of the values that an extension or a dictionary stands for."""
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
    """How the values of a column become those of a field."""

    dtype: str
    """As in :class:`~cachetool.core.schema.Field`."""
    row: tuple[int, ...] = ()
    """Sizes of a row, or of each entry of a list."""
    depth: int = 0
    """How many lists of fixed length lie in each other there."""
    is_list: bool = False

    def column(self, table: _Table, leaf: _Leaf, piece: int) -> StoredColumn:
        """The candidate for a field."""
        rows = int(table._ends[-1]) if len(table._ends) else 0
        flat = self.dtype in ("bytes", "str") or self.is_list
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
    """How values of an Arrow type are taken, or why they are not; ``shape`` as in :class:`_Leaf`."""
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
            f"of the type {shown}, with more digits than float64 can hold; cast it in the file, to 'float64', or to"
            " 'string' for all digits"
        )
    if is_list and _is_text(inner):
        return f"of the type {shown}, and a field holds one text a sample; join each list into one text in the file"
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
"""Decimals of so many digits are all told apart by float64."""


def _dtype(kind: Any) -> str:
    """The dtype that values of an Arrow type become; empty when they are no numbers."""
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
    """Mark the rows that hold a null, themselves or in their lists; None when there is no null."""
    from pyarrow import types

    nulls: Any = array.is_null().to_numpy(zero_copy_only=False) if array.null_count else None
    inner: Any = None
    if types.is_fixed_size_list(array.type):
        if (entries := _missing(_flat(array, 1))) is not None:
            inner = entries.reshape(len(array), array.type.list_size).any(axis=1)
    elif _is_list(array.type) and (entries := _missing(_entries(array))) is not None:
        offsets = _offsets(array)
        inner = np.zeros(len(array), dtype=np.bool_)
        inner[np.searchsorted(offsets - offsets[0], np.flatnonzero(entries), side="right") - 1] = True
    if nulls is None or inner is None:
        return inner if nulls is None else nulls  # type: ignore[no-any-return]
    return np.asarray(nulls | inner)


def _offsets(lists: Any) -> np.ndarray[Any, np.dtype[np.int64]]:
    return np.asarray(lists.offsets).astype(np.int64)


def _entries(lists: Any) -> Any:
    """The entries of all lists, one after another."""
    offsets = _offsets(lists)
    return _inside(lists.values.slice(offsets[0], offsets[-1] - offsets[0]))


def _flat(array: Any, depth: int) -> Any:
    """The entries of lists of fixed length, those of a list that is null included."""
    for _ in range(depth):
        size = array.type.list_size
        array = _inside(array.values.slice(array.offset * size, len(array) * size))
    return array


def _numbers(array: Any, dtype: str) -> np.ndarray[Any, np.dtype[Any]]:
    """The values; any number in place of a null."""
    from pyarrow import types

    wanted = np.dtype(dtype)
    if types.is_boolean(array.type):
        return np.asarray(array.fill_null(False).to_numpy(zero_copy_only=False), dtype=wanted)
    if types.is_decimal(array.type):
        return _decimals(array)
    data = array.buffers()[1]
    if data is None or not len(array):
        return np.zeros(len(array), dtype=wanted)
    size = array.type.bit_width // 8
    stored = np.dtype(f"<i{size}") if wanted.kind in "mM" else wanted
    values = np.frombuffer(data, dtype=stored, count=len(array), offset=array.offset * size)
    return values.astype("<i8", copy=False).view(wanted) if wanted.kind in "mM" else values


def _decimals(array: Any) -> np.ndarray[Any, np.dtype[np.float64]]:
    """The float64 next to each decimal: whole numbers below 2^53 divided by a power of ten, which is exact too."""
    import pyarrow

    scale = array.type.scale
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

    wide = array.cast(pyarrow.large_string() if _is_text(array.type) else pyarrow.large_binary())
    _, offsets, values = wide.buffers()
    at = np.frombuffer(offsets, dtype=np.int64)[wide.offset : wide.offset + len(wide) + 1]
    flat = np.frombuffer(values, dtype=np.uint8) if values is not None else np.zeros(0, np.uint8)
    return Ragged(flat, at).compact()
