"""Classic netCDF files (netCDF-3), whose variables hold one sample a row: CDF-1, CDF-2 (64-bit offset) and CDF-5.

The header says where each variable lies. All numbers are big-endian, so no library is needed::

    CDF\\x01 \\x02 \\x05    number of records, dimensions, attributes, variables with their attributes and first byte
    fixed variables     one after another
    record variables    record 0 of each, record 1 of each, ...: the rows along the unlimited dimension

https://docs.unidata.ucar.edu/netcdf-c/current/file_format_specifications.html

Variables of numbers are fields. The characters of a variable ``(n, length)`` are texts: ``bytes``, or ``str`` if the
attribute ``_Encoding`` is ``utf-8``. CF attributes say what numbers stand for: :mod:`cachetool.core.cf`.

A file may state any counts and places. They are compared with the size of the file before anything is read or
allocated.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from cachetool.core.block import Column
from cachetool.core.cf import ATTRIBUTES, packing_of
from cachetool.core.errors import BadObject
from cachetool.core.schema import storage_dtype
from cachetool.sources.blocks import Repeated, blocks_of
from cachetool.sources.byte_source import SourceFile
from cachetool.sources.flat import unflattened, wants_arrays
from cachetool.sources.groups import by_groups
from cachetool.sources.limits import quoted
from cachetool.sources.options import SourceOptions
from cachetool.sources.readers import NOT_ASKED
from cachetool.sources.rows import (
    UNIT_BYTES,
    Boxes,
    ColumnFile,
    Part,
    Place,
    StoredColumn,
    decoded,
    named_dims,
    unpadded,
)

__all__ = ["open_netcdf3"]

MAX_ENTRIES = 2**17
"""Most entries of the header of one file. Each takes a few microseconds whenever the file is opened."""
MAX_VARIABLES = 8192
"""Most variables of one file, as many as the netCDF library allows (NC_MAX_VARS)."""
_MAX_RANK = 1024
_MAX_NAME = 4096
_MAX_TEXT = 1024
"""Bytes of the text of an attribute that are read."""
_MAX_NUMBERS = 64
"""Numbers of an attribute that are read."""
_STEP = 16 * 2**10
"""Bytes of the header that are read at a time."""
_DIMENSION, _VARIABLE, _ATTRIBUTE = 10, 11, 12
"""Tags before the lists of the header."""
_CHAR = 2
_TYPES = {1: "i1", _CHAR: "S1", 3: ">i2", 4: ">i4", 5: ">f4", 6: ">f8"}
_TYPES_OF_5 = _TYPES | {7: "u1", 8: ">u2", 9: ">u4", 10: ">i8", 11: ">u8"}
_ENCODING = "_Encoding"
_FILLS: dict[str, float | int] = {
    "i1": -127, "i2": -32767, "i4": -(2**31) + 1, "i8": -(2**63) + 2, "u1": 255, "u2": 2**16 - 1, "u4": 2**32 - 1,
    "u8": 2**64 - 2, "f4": 2.0**123 * 0.9375, "f8": 2.0**123 * 0.9375,
}  # fmt: skip
"""Values of elements never written, of variables without ``_FillValue``: the NC_FILL constants of netcdf.h."""

Array = npt.NDArray[Any]


def open_netcdf3(file: SourceFile, options: SourceOptions) -> ColumnFile:
    """Return the variables of one classic netCDF file.

    Raises :class:`BadObject` that names the file, and the variable, if the file is damaged or truncated.
    """
    header = _Header(file)
    variables = header.variables()
    records = header.records([variable for variable in variables if variable.stride])
    if len({variable.name for variable in variables}) != len(variables):
        raise BadObject(f"{file} has two variables of the same name")
    skipped: list[tuple[str, str]] = []
    wants = options.wants if options.block else wants_arrays(options)
    rows: list[_Rows] = []
    for variable in variables:
        if not wants(variable.name):
            skipped.append((variable.name, NOT_ASKED))
        elif variable.is_text and len(variable.shape) > 2:
            skipped.append((variable.name, f"texts in {len(variable.shape) - 1} dimensions"))
        else:
            rows.append(_Rows.of(file, variable, records))
    # A file without a record yet would otherwise have the values of a coordinate, such as its latitudes, as samples.
    if records == 0 and options.rows is None and options.chosen is None and any(one.variable.stride for one in rows):
        skipped += [(one.variable.name, "the file has no records yet") for one in rows if not one.variable.stride]
        rows = [one for one in rows if one.variable.stride]
    columns = decoded(_columns(rows, options), options, skipped)
    if options.block:
        repeated = Repeated()
        columns, grid = blocks_of(file, columns, options, skipped, stored=file.size, repeated=repeated)
        return ColumnFile(file, columns, options, skipped=skipped, stored=file.size, close=repeated.drop, grid=grid)
    columns, keys = by_groups(file, columns, options, skipped, stored=file.size)
    if keys is None:
        columns = unflattened(file, columns, skipped, options)
    return ColumnFile(file, columns, options, skipped=skipped, stored=file.size, keys=keys)


@dataclass(frozen=True, slots=True)
class _Variable:
    """A variable as the header describes it."""

    name: str
    type: int
    dims: tuple[str, ...]
    shape: tuple[int, ...]
    """The lengths of the dimensions; 0 for the record dimension, which can only be the first."""
    begin: int
    stride: int
    """Bytes from one record to the next; 0 for a fixed variable."""
    dtype: np.dtype[Any]
    attributes: dict[str, Any]

    @property
    def is_text(self) -> bool:
        return self.type == _CHAR


class _Header:
    """The header of a file, read from its beginning to its end."""

    def __init__(self, file: SourceFile) -> None:
        self._file, self._at, self._first, self._entries = file, 0, 0, 0
        self._body: memoryview | bytes = b""
        magic = bytes(self._take(4)) if file.size >= 4 else b""
        if magic[:3] != b"CDF" or magic[3] not in (1, 2, 5):
            raise BadObject(f"{file} is no classic netCDF file")
        # Counts have 4 bytes, in CDF-5 8; places have 4 bytes only in CDF-1.
        self._count_size, self._place_size = 8 if magic[3] == 5 else 4, 4 if magic[3] == 1 else 8
        self._types = _TYPES_OF_5 if magic[3] == 5 else _TYPES
        self._records = self._count()

    def variables(self) -> list[_Variable]:
        """Return the variables, in the order of the file."""
        dims = [(self._name(), self._count()) for _ in range(self._list(_DIMENSION, "dimensions"))]
        self._attributes()
        variables = [self._variable(dims) for _ in range(self._list(_VARIABLE, "variables"))]
        records = [variable for variable in variables if variable.stride]
        # A record is padded to 4 bytes for each variable, unless only one variable has records.
        stride = records[0].stride if len(records) == 1 else sum(-(-one.stride // 4) * 4 for one in records)
        return [replace(variable, stride=stride) if variable.stride else variable for variable in variables]

    def records(self, variables: Sequence[_Variable]) -> int:
        """Return the number of records of the record variables."""
        if self._records != 2 ** (8 * self._count_size) - 1 or not variables:
            return self._records
        # The program that wrote the file as a stream did not go back to write the number, so the size of the file
        # tells it.
        ends = [(self._file.size - one.begin - _row_bytes(one)) // one.stride + 1 for one in variables]
        return max(0, min(ends))

    def _variable(self, dims: list[tuple[str, int]]) -> _Variable:
        name, rank = self._name(), self._count()
        if rank > _MAX_RANK:
            raise self._damaged(f"{quoted(name)} has {rank} dimensions")
        self._allow(rank)
        numbers = [self._count() for _ in range(rank)]
        if any(number >= len(dims) for number in numbers):
            raise self._damaged(f"{quoted(name)} has a dimension that does not exist")
        attributes, type_ = self._attributes(), self._type()
        # The size that the file states is ignored: it is redundant, and too small for variables above 4 GiB.
        self._count()
        begin = self._number(self._place_size)
        shape = tuple(dims[number][1] for number in numbers)
        if 0 in shape[1:]:
            raise self._damaged(f"the record dimension of {quoted(name)} is not its first")
        dtype = np.dtype(self._types[type_])
        stride = math.prod(shape[1:]) * dtype.itemsize if shape[:1] == (0,) else 0
        names = tuple(dims[number][0] for number in numbers)
        return _Variable(name, type_, names, shape, begin, stride, dtype, attributes)

    def _attributes(self) -> dict[str, Any]:
        """Return those attributes that say what numbers and texts stand for."""
        attributes: dict[str, Any] = {}
        for _ in range(self._list(_ATTRIBUTE, "attributes")):
            name, type_, count = self._name(), self._type(), self._count()
            dtype = np.dtype(self._types[type_])
            nbytes = count * dtype.itemsize
            start = self._at
            self._skip(nbytes + -nbytes % 4)
            if name in ATTRIBUTES or name == _ENCODING:
                stop, self._at = self._at, start
                body = bytes(self._take(min(count, _MAX_TEXT if type_ == _CHAR else _MAX_NUMBERS) * dtype.itemsize))
                self._at = stop
                attributes[name] = body.rstrip(b"\0") if type_ == _CHAR else np.frombuffer(body, dtype)
        return attributes

    def _list(self, tag: int, what: str) -> int:
        """Return the number of entries of the list that begins here."""
        stated, count = self._number(4), self._count()
        if stated != tag and (stated or count):
            raise self._damaged(f"its list of {what} begins with {stated}, not with {tag}")
        if tag == _VARIABLE and count > MAX_VARIABLES:
            raise self._damaged(f"its header claims {count} variables; a file has at most {MAX_VARIABLES}")
        self._allow(count)
        return count

    def _allow(self, entries: int) -> None:
        self._entries += entries
        if self._entries > MAX_ENTRIES:
            raise self._damaged(f"its header claims {self._entries} entries; at most {MAX_ENTRIES} are read")

    def _name(self) -> str:
        length = self._count()
        if length > _MAX_NAME:
            raise self._damaged(f"a name has {length} bytes")
        raw = bytes(self._take(length))
        self._skip(-length % 4)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            raise self._damaged(f"the name {quoted(raw.decode(errors='backslashreplace'))} is not UTF-8") from None

    def _type(self) -> int:
        type_ = self._number(4)
        if type_ not in self._types:
            raise self._damaged(f"a variable or an attribute has the unknown type {type_}")
        return type_

    def _count(self) -> int:
        return self._number(self._count_size)

    def _number(self, size: int) -> int:
        return int.from_bytes(self._take(size), "big")

    def _take(self, length: int) -> memoryview | bytes:
        start = self._at
        self._skip(length)
        if start < self._first or self._at > self._first + len(self._body):
            self._first = start
            self._body = self._file.ranges.part(self._file.number, start, max(length, _STEP))
            if len(self._body) < length:
                raise self._truncated()
        return self._body[start - self._first : self._at - self._first]

    def _skip(self, length: int) -> None:
        if length > self._file.size - self._at:
            raise self._truncated()
        self._at += length

    def _truncated(self) -> BadObject:
        return BadObject(f"{self._file}: the file is truncated: it has {self._file.size} bytes and its header more")

    def _damaged(self, what: str) -> BadObject:
        return BadObject(f"{self._file} is damaged: {what}")


def _row_bytes(variable: _Variable) -> int:
    return math.prod(variable.shape[1:]) * variable.dtype.itemsize


@dataclass(frozen=True, slots=True)
class _Span:
    """Bytes that are read together: a part of each row of one variable or of several."""

    begin: int
    nbytes: int
    stride: int
    """Bytes from one row to the next."""
    rows: int
    chunk: int
    """Number of rows that are read together."""

    def parts(self) -> Iterator[Part]:
        """Yield the place of each chunk."""
        for row in range(0, self.rows, self.chunk):
            yield row, *self.place(row), ""

    def place(self, row: int) -> tuple[int, int]:
        """Return first byte and number of bytes of the chunk that begins with ``row``."""
        last = min(row + self.chunk, self.rows) - 1
        return self.begin + row * self.stride, (last - row) * self.stride + self.nbytes


@dataclass(frozen=True, slots=True)
class _Rows:
    """The rows of one variable of a file."""

    file: SourceFile
    variable: _Variable
    rows: int
    nbytes: int
    """Bytes of a row."""
    stride: int
    """Bytes from one row to the next."""

    @classmethod
    def of(cls, file: SourceFile, variable: _Variable, records: int) -> _Rows:
        """Return the rows of a variable. Raises :class:`BadObject` if the file is too short for them."""
        nbytes, shape = _row_bytes(variable), variable.shape
        rows = records if variable.stride else shape[0] if shape else 1
        stride = variable.stride or nbytes
        end = variable.begin + (rows - 1) * stride + nbytes
        if rows and end > file.size:
            raise BadObject(
                f"{file}: the file is truncated: {quoted(variable.name)} ends at byte {end}, and the file has"
                f" {file.size} bytes"
            )
        return cls(file, variable, rows, nbytes, stride)

    @property
    def is_plain(self) -> bool:
        """True if the rows are numbers that lie one after another."""
        return self.stride == self.nbytes and not self.variable.is_text

    @property
    def values(self) -> tuple[np.dtype[Any], tuple[int, ...]]:
        """The dtype of the values in the file, and the shape of a row."""
        variable = self.variable
        # The last dimension of characters is the length of a text; a variable of one dimension has one character a row.
        # Without rows nothing limits the length that a file claims, and NumPy has none above 2**31.
        length = min(self.nbytes, 2**30)
        return (np.dtype(f"S{length}"), ()) if variable.is_text else (variable.dtype, variable.shape[1:])

    def column(self, span: _Span | None) -> StoredColumn:
        """Return the rows as a candidate for a field. With ``span`` its chunks are read, otherwise the rows asked
        for."""
        dtype, inner = self.values
        variable = self.variable
        shape = (self.rows, *inner) if variable.shape else ()
        chunk, parts = (1, None) if span is None else (span.chunk, span.parts)
        read = self._exactly if span is None else self._by_chunks(span)
        if variable.is_text:
            encoding = variable.attributes.get(_ENCODING)
            is_utf8 = isinstance(encoding, bytes) and encoding.lower() in (b"utf-8", b"utf8")

            def texts(start: int, stop: int) -> Column:
                return unpadded(read(start, stop))

            return StoredColumn(
                variable.name, "str" if is_utf8 else "bytes", shape, self.rows * self.nbytes, texts, chunk=chunk,
                parts=parts, dims=named_dims(variable.dims[: len(shape)], len(shape)),
            )  # fmt: skip
        little = storage_dtype(dtype)
        return StoredColumn(
            variable.name, little.str, shape, self.rows * self.nbytes, read, chunk=chunk, parts=parts,
            offset=variable.begin if span is None else -1, stored=dtype.str if span is None else "",
            packing=packing_of(variable.attributes, little), dims=named_dims(variable.dims, len(shape)),
            boxes=Boxes(self._box, (1,) * len(shape), self._places, self._fill),
        )  # fmt: skip

    def _near(self, row: tuple[int, ...]) -> int:
        """Return the number of rows that are read together, if ``row`` is the shape of the part wanted of each."""
        if self.stride == self.nbytes and row == self.variable.shape[1:]:
            return max(1, self.rows)
        # A request costs as much as the transfer of 64 KiB.
        return max(1, UNIT_BYTES // self.stride)

    def _groups(self, start: int, stop: int, near: int) -> Iterator[tuple[int, int]]:
        for first in range(start, stop, near):
            yield first, min(first + near, stop)

    def _places(self, shape: tuple[int, ...]) -> Iterator[Place]:
        """Yield the places of the rows of all blocks of this shape, if blocks are made of complete rows."""
        if not shape or shape[1:] != self.variable.shape[1:] or not self.nbytes:
            return
        zeros = (0,) * (len(shape) - 1)
        for block in range(0, self.rows, max(1, shape[0])):
            for first, last in self._groups(block, min(block + shape[0], self.rows), self._near(shape[1:])):
                nbytes = (last - 1 - first) * self.stride + self.nbytes
                yield (first, *zeros), self.variable.begin + first * self.stride, nbytes, ""

    def _box(self, bounds: tuple[slice, ...]) -> Array:
        """Return a box of the variable. Only the bytes from its first to its last element of each row are read."""
        dtype, inner = self.values
        rows, *others = bounds or (slice(0, 1),)
        row = tuple(one.stop - one.start for one in others)
        box = np.empty((rows.stop - rows.start, *row), dtype.newbyteorder("<"))
        if box.size:
            steps = tuple(math.prod(inner[axis + 1 :]) * dtype.itemsize for axis in range(len(inner)))
            low = sum(one.start * step for one, step in zip(others, steps, strict=True))
            high = sum((one.stop - 1) * step for one, step in zip(others, steps, strict=True)) + dtype.itemsize
            for first, last in self._groups(rows.start, rows.stop, self._near(row)):
                body = self._part(
                    self.variable.begin + first * self.stride + low, (last - 1 - first) * self.stride + high - low
                )
                near: Array = np.ndarray((last - first, *row), dtype, body, 0, (self.stride, *steps))
                box[first - rows.start : last - rows.start] = near
        return box if bounds else box[0]

    def _fill(self) -> Any:
        little = storage_dtype(self.variable.dtype)
        fill = packing_of(self.variable.attributes, little).get("_FillValue") or [_FILLS[little.str[1:]]]
        return np.asarray(fill[0]).astype(little)[()]

    def _exactly(self, start: int, stop: int) -> Array:
        body = self._part(self.variable.begin + start * self.nbytes, (stop - start) * self.nbytes)
        dtype, inner = self.values
        return np.frombuffer(body, dtype).reshape(stop - start, *inner).astype(dtype.newbyteorder("<"))

    def _by_chunks(self, span: _Span) -> Callable[[int, int], Array]:
        dtype, inner = self.values
        steps = tuple(math.prod(inner[axis + 1 :]) * dtype.itemsize for axis in range(len(inner)))

        def read(start: int, stop: int) -> Array:
            rows = np.empty((stop - start, *inner), dtype=dtype.newbyteorder("<"))
            # Whole chunks, because their bytes were fetched in advance, and the other variables of a record find them
            # in the cache.
            for first in range(start // span.chunk * span.chunk, stop, span.chunk):
                count = min(span.chunk, span.rows - first)
                body = self._part(*span.place(first))
                chunk: Array = np.ndarray(
                    (count, *inner), dtype, body, self.variable.begin - span.begin, (self.stride, *steps)
                )
                a, b = max(first, start), min(first + count, stop)
                rows[a - start : b - start] = chunk[a - first : b - first]
            return rows

        return read

    def _part(self, start: int, length: int) -> memoryview | bytes:
        body = self.file.ranges.part(self.file.number, start, length)
        if len(body) != length:
            raise ValueError("the file is truncated")
        return body


def _columns(rows: Sequence[_Rows], options: SourceOptions) -> list[StoredColumn]:
    """Return a column for each variable, in their order."""
    by_length: dict[int | None, list[_Rows]] = {}
    for one in rows:
        by_length.setdefault(one.rows if one.variable.shape else None, []).append(one)
    columns = {}
    for together in by_length.values():
        spans = _spans(together, options)
        columns.update({one.variable.name: one.column(spans.get(one.variable.name)) for one in together})
    return [columns[one.variable.name] for one in rows]


def _spans(together: Sequence[_Rows], options: SourceOptions) -> dict[str, _Span]:
    """Return the bytes to read for each of the variables of one length.

    Empty if the rows of all of them can be taken from the file by their offsets.
    """
    packed = options.decode == "cf" and any(packing_of(one.variable.attributes, one.variable.dtype) for one in together)
    if not packed and all(one.is_plain for one in together):
        return {}
    fixed = [one for one in together if not one.variable.stride]
    records = sorted((one for one in together if one.variable.stride), key=lambda one: one.variable.begin)
    # About 64 KiB of rows of all variables, because a request costs as much as the transfer of so many bytes.
    row = sum(one.nbytes for one in fixed) + (records[0].stride if records else 0)
    chunk = max(1, UNIT_BYTES // row)
    spans = {one.variable.name: _Span(one.variable.begin, one.nbytes, one.nbytes, one.rows, chunk) for one in fixed}
    # Neighbours in a record are read together for the same reason.
    groups: list[list[_Rows]] = []
    for one in records:
        if groups and one.variable.begin + one.nbytes - groups[-1][0].variable.begin <= UNIT_BYTES:
            groups[-1].append(one)
        else:
            groups.append([one])
    for group in groups:
        begin = group[0].variable.begin
        end = max(one.variable.begin + one.nbytes for one in group)
        span = _Span(begin, end - begin, group[0].stride, group[0].rows, chunk)
        spans.update({one.variable.name: span for one in group})
    return spans
