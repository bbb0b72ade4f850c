"""``.npy`` and ``.npz`` files whose rows are samples. Neither is ever unpickled.

``x.npy`` is one field, named ``x``. The arrays of an ``.npz`` are fields under their own names. They are inflated row
by row while they are read, so neither a large array nor a hostile file fills the memory.
"""

from __future__ import annotations

import math
import zipfile
from collections.abc import Callable
from dataclasses import replace
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from cachetool.core.errors import BadObject
from cachetool.sources.blocks import Repeated, blocks_of
from cachetool.sources.byte_source import SourceFile
from cachetool.sources.decode import MAX_HEADER, npy_layout
from cachetool.sources.flat import unflattened, wants_arrays
from cachetool.sources.groups import by_groups
from cachetool.sources.limits import check_allocation, quoted
from cachetool.sources.npz import directory_of, stream_of
from cachetool.sources.options import SourceOptions
from cachetool.sources.readers import NOT_ASKED, reading
from cachetool.sources.rows import Boxes, ColumnFile, StoredColumn, unpadded

__all__ = ["open_npy", "open_npz"]

Array = npt.NDArray[Any]


def open_npy(file: SourceFile, options: SourceOptions) -> ColumnFile:
    """Return the rows of one ``.npy`` file. Raises :class:`BadObject` naming the file."""
    head = memoryview(file.ranges.part(file.number, 0, _HEADER))
    # Bytes 8 and 9 hold the length of the header. Few headers are longer than 4 KiB, so only those cost a second
    # request.
    if len(head) >= 12 and 12 + int.from_bytes(head[8:10], "little") > len(head):
        head = memoryview(file.ranges.part(file.number, 0, MAX_HEADER + 12))
    try:
        dtype, fortran, shape, start = npy_layout(head, text=True)
    except BadObject as error:
        raise BadObject(f"{file}: {error}") from error
    if not shape:
        raise BadObject(f"{file} holds a single number, but it must hold rows: each row is a sample")
    text, row = dtype.kind in "SU", math.prod(shape[1:]) * dtype.itemsize
    if text and len(shape) > 1:
        raise BadObject(f"{file} holds texts in {len(shape)} dimensions, but a sample can hold only one text")
    # A file that was cut, or has bytes behind the array, is refused now and not in the middle of a pull.
    if start + shape[0] * row != file.size:
        raise BadObject(f"{file}: its {file.size} bytes do not fit its header, a {dtype} array of shape {shape}")
    by_columns = fortran and len(shape) > 1
    # The bytes of a row are spread over the whole file, so the whole array is read into memory.
    if by_columns:
        check_allocation(f"{file}, which is stored column by column,", shape[0] * row, stored=file.size)
    whole: list[Array] = []

    def read(start_row: int, stop_row: int) -> Array:
        if not by_columns:
            body = file.ranges.part(file.number, start + start_row * row, (stop_row - start_row) * row)
            rows: Array = np.frombuffer(body, dtype=dtype).reshape(stop_row - start_row, *shape[1:])
        else:
            if not whole:
                body = file.ranges.part(file.number, start, shape[0] * row)
                whole.append(np.frombuffer(body, dtype=dtype).reshape(shape[::-1]).T)
            rows = whole[0][start_row:stop_row]
        # Little-endian and contiguous, as a block needs it. A view is returned where the array is both already.
        return np.ascontiguousarray(rows, dtype=dtype.newbyteorder("<"))

    name = file.name.stem if file.alone else "npy"
    if text:
        kind = "str" if dtype.kind == "U" else "bytes"
        column = StoredColumn(name, kind, shape, shape[0] * row, lambda a, b: unpadded(read(a, b)))
    else:
        little, at = dtype.newbyteorder("<").str, -1 if by_columns else start
        column = StoredColumn(name, little, shape, shape[0] * row, read, offset=at, stored=dtype.str)
        if options.block:
            boxes = Boxes(lambda bounds: _box(read, shape, bounds), (1,) * len(shape), lambda _: (), lambda: 0)
            skipped: list[tuple[str, str]] = []
            columns, grid = blocks_of(
                file, [replace(column, boxes=boxes)], options, skipped, stored=file.size, repeated=Repeated()
            )
            return ColumnFile(file, columns, options, skipped=skipped, stored=file.size, close=whole.clear, grid=grid)
    return ColumnFile(file, [column], options, stored=file.size, close=whole.clear)


def _box(read: Callable[[int, int], Array], shape: tuple[int, ...], bounds: tuple[slice, ...]) -> Array:
    """Return a box of an array whose rows ``read`` returns."""
    first, *others = bounds
    if all(bound == slice(0, size) for bound, size in zip(others, shape[1:], strict=True)):
        return read(first.start, first.stop)
    # Row by row, because complete rows of a volume may take many times the memory of the box.
    return np.stack([read(row, row + 1)[0][tuple(others)] for row in range(first.start, first.stop)])


_HEADER = 4096
"""Bytes that are read first: nearly every header of a ``.npy`` file is shorter."""
_UNITS = 16
"""Number of units that an ``.npz`` file is divided into, unless they would be smaller than :data:`_UNIT_BYTES`."""
_UNIT_BYTES = 8 * 2**20


def open_npz(file: SourceFile, options: SourceOptions) -> ColumnFile:
    """Return the arrays of one ``.npz`` file. Raises :class:`BadObject` naming the file."""
    with reading(f"{file} is not a whole .npz file"):
        archive = _Archive(file)
        infos = archive.zip.infolist()
        if len({info.filename for info in infos}) != len(infos):
            raise BadObject(f"{file} has two arrays of the same name")
    columns: list[StoredColumn] = []
    skipped: list[tuple[str, str]] = []
    wants = wants_arrays(options)
    try:
        for info in infos:
            name = info.filename.removesuffix(".npy")
            if reason := _not_an_array(info) or (None if wants(name) else NOT_ASKED):
                skipped.append((name, reason))
                continue
            with reading(f"{file}: {quoted(name)}"):
                member = _Member.open(archive, info)
                # The checksum stands at the end of a member. Rows that are read here and there never reach it, so it is
                # compared now.
                if not isinstance(member, str) and not file.in_order:
                    member.check()
            if isinstance(member, str):
                skipped.append((name, member))
                continue
            columns.append(member.column(name, stored=file.size))
        columns, keys = by_groups(file, columns, options, skipped, stored=file.size)
        rows = columns[0].shape[0] if columns else 0
        # Each run of rows is inflated from the beginning of its member. A unit of a sixteenth of the file, or of 8 MiB,
        # bounds how often that happens.
        unit = max(1, -(-rows // _UNITS), _UNIT_BYTES * rows // max(1, sum(column.nbytes for column in columns)))
        columns = [replace(column, chunk=unit, piece=0) for column in columns]
        if keys is None:
            columns = unflattened(file, columns, skipped, options)
        return ColumnFile(file, columns, options, skipped=skipped, stored=file.size, close=archive.close, keys=keys)
    finally:
        archive.close()


def _not_an_array(info: zipfile.ZipInfo) -> str | None:
    if not info.filename.endswith(".npy"):
        return "not an array"
    if info.flag_bits & 1:
        return "encrypted"
    # Other methods (bzip2, LZMA) inflate without the bounds that deflate is read with here.
    if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        return "compressed in a way that NumPy never writes"
    return None


class _Archive:
    """The zip file under an ``.npz``. It is opened when needed, also again after :meth:`close`."""

    def __init__(self, path: SourceFile) -> None:
        self.path = path
        self._zip: zipfile.ZipFile | None = None
        self._open: list[IO[bytes]] = []

    @property
    def zip(self) -> zipfile.ZipFile:
        if self._zip is None:
            self._open.append(file := self.path.stream())
            self._zip = directory_of(file)
        return self._zip

    def stream(self, info: zipfile.ZipInfo) -> IO[bytes]:
        """Return the bytes of a member as a stream that :meth:`close` closes."""
        stream = stream_of(self.zip, info)
        self._open.append(stream)
        return stream

    def close(self) -> None:
        if self._zip is not None:
            self._zip.close()
            self._zip = None
        while self._open:
            self._open.pop().close()


class _Member:
    """One array of an ``.npz``, inflated row by row. Reading earlier rows starts again at the beginning."""

    def __init__(self, archive: _Archive, info: zipfile.ZipInfo, head: memoryview) -> None:
        """``head`` is the beginning of the member. Raises :class:`BadObject` with the reason alone."""
        self._archive, self._info = archive, info
        self.dtype, self.fortran, self.shape, self._start = npy_layout(head, text=True)
        self._row, self._count = math.prod(self.shape[1:]) * self.dtype.itemsize, self.shape[0] if self.shape else 1
        self._stream: IO[bytes] | None = None
        self._at = 0

    @classmethod
    def open(cls, archive: _Archive, info: zipfile.ZipInfo) -> _Member | str:
        """Return the array in a member, or the reason why it is none. Raises the errors of zipfile for a damaged
        member."""
        with stream_of(archive.zip, info) as stream:
            try:
                member = cls(archive, info, memoryview(stream.read(MAX_HEADER + 12)))
            except BadObject as error:
                # Read to the end, where zipfile compares the CRC: a damaged member is an error, another content is only
                # left out.
                while stream.read(2**20):
                    pass
                return str(error)
        if member.dtype.kind in "SU" and len(member.shape) > 1:
            return f"texts in {len(member.shape)} dimensions"
        size = member._start + member._row * member._count
        if size != info.file_size:
            raise ValueError(
                f"its {info.file_size} bytes do not fit its header, a {member.dtype} array of shape {member.shape}"
            )
        return member

    def check(self) -> None:
        """Read the member to its end, where its checksum is. Raises the errors of zipfile for a damaged member."""
        with stream_of(self._archive.zip, self._info) as stream:
            count = 0
            while data := stream.read(2**20):
                count += len(data)
        if count != self._info.file_size:
            raise ValueError(f"{'more' if count > self._info.file_size else 'fewer'} bytes than its directory says")

    def column(self, name: str, *, stored: int) -> StoredColumn:
        """Return this array as a candidate for a field; ``stored`` is the size of the archive in bytes."""
        nbytes, read = self._row * self._count, self._rows
        if self.dtype.kind in "SU":
            kind = "str" if self.dtype.kind == "U" else "bytes"
            return StoredColumn(
                name, kind, self.shape, nbytes, lambda start, stop: unpadded(self._rows(start, stop)),
                once=lambda start, stop: unpadded(self._once(start, stop)),
            )  # fmt: skip
        if self.fortran and len(self.shape) > 1:
            what = f"{self._archive.path}: {quoted(name)}, which is stored column by column,"
            check_allocation(what, nbytes, stored=stored)
            read = self._rows_of_columns
        return StoredColumn(name, self.dtype.newbyteorder("<").str, self.shape, nbytes, read, once=self._once)

    def _rows(self, start: int, stop: int) -> Array:
        if self._stream is None or self._stream.closed or start < self._at:
            self._stream, self._at = self._archive.stream(self._info), 0
            self._stream.read(self._start)
        # The rows in between must be inflated too. At most 1 MiB at a time, so skipping takes no memory.
        while self._at < start:
            self._take(min(start - self._at, max(1, 2**20 // max(1, self._row))))
        flat = np.frombuffer(self._take(stop - start), dtype=self.dtype)
        return flat.reshape(stop - start, *self.shape[1:]).astype(self.dtype.newbyteorder("<"), copy=False)

    def _once(self, start: int, stop: int) -> Array:
        """Return rows of an array from which no more rows are read soon, and keep nothing open."""
        by_columns = self.fortran and len(self.shape) > 1
        rows = self._rows(0, self._count) if by_columns else self._rows(start, stop)
        if by_columns:
            rows = rows.reshape(self.shape[::-1]).T[start:stop]
        if self._stream is not None:
            self._stream.close()
        return np.ascontiguousarray(rows)

    def _take(self, rows: int) -> bytes:
        """Return the bytes of the next rows. At the end of the member zipfile compares its CRC."""
        assert self._stream is not None
        raw = self._stream.read(rows * self._row)
        if len(raw) != rows * self._row:
            raise ValueError("fewer bytes than its header says")
        self._at += rows
        # Reading one more byte makes zipfile compare the CRC, and finds bytes that the directory does not state.
        if self._at == self._count and self._stream.read(1):
            raise ValueError("more bytes than its directory says")
        return raw

    def _rows_of_columns(self, start: int, stop: int) -> Array:
        """Return rows of an array in Fortran order."""
        # The bytes of a row are spread over the whole array, so it is read once and kept until the archive is closed.
        if self._stream is None or self._stream.closed:
            self._array = self._rows(0, self._count).reshape(self.shape[::-1]).T
        return np.ascontiguousarray(self._array[start:stop])
