"""``.npy`` and ``.npz`` files whose rows are samples. Neither is ever unpickled.

``x.npy`` is one field, named ``x``, read through a memory map. The arrays of an ``.npz`` are fields by their names;
they are inflated as they are read, row by row, so that neither a large array nor what a bomb claims takes memory.
"""

from __future__ import annotations

import math
import mmap
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from cachetool.core.errors import BadObject
from cachetool.sources.decode import MAX_HEADER, npy_layout, parse_npy
from cachetool.sources.limits import check_allocation, quoted
from cachetool.sources.npz import directory_of, stream_of
from cachetool.sources.readers import NOT_ASKED, FileOptions, reading
from cachetool.sources.rows import ColumnFile, StoredColumn, unpadded

__all__ = ["open_npy", "open_npz"]

Array = npt.NDArray[Any]


def open_npy(path: Path, options: FileOptions) -> ColumnFile:
    """The rows of one ``.npy`` file. Raises :class:`BadObject` naming it."""
    with reading(f"{path} is not a whole .npy file"), path.open("rb") as file:
        size = path.stat().st_size
        view = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)) if size else memoryview(b"")
        try:
            array = parse_npy(view, text=True)
        except BadObject as error:
            raise BadObject(f"{path}: {error}") from error
    if array.ndim == 0:
        raise BadObject(f"{path} holds a single number; its rows should be samples")
    little = array.dtype.newbyteorder("<")

    def read(start: int, stop: int) -> Array:
        return np.ascontiguousarray(array[start:stop], dtype=little)

    column = StoredColumn(path.stem, little.str, array.shape, array.nbytes, read)
    if array.dtype.kind in "SU":
        if array.ndim > 1:
            raise BadObject(f"{path} holds texts in {array.ndim} dimensions; its rows should be samples of one text")
        kind = "str" if array.dtype.kind == "U" else "bytes"
        column = replace(column, dtype=kind, read=lambda start, stop: unpadded(read(start, stop)))
    return ColumnFile(path, [column], options, stored=size)


def open_npz(path: Path, options: FileOptions) -> ColumnFile:
    """The arrays of one ``.npz`` file. Raises :class:`BadObject` naming it."""
    with reading(f"{path} is not a whole .npz file"):
        stored = path.stat().st_size
        archive = _Archive(path)
        infos = archive.zip.infolist()
        if len({info.filename for info in infos}) != len(infos):
            raise BadObject(f"{path} holds two arrays of one name")
    columns: list[StoredColumn] = []
    skipped: list[tuple[str, str]] = []
    try:
        for info in infos:
            name = info.filename.removesuffix(".npy")
            if reason := _not_an_array(info) or (None if options.wants(name) else NOT_ASKED):
                skipped.append((name, reason))
                continue
            with reading(f"{path}: {quoted(name)}"):
                member = _Member.open(archive, info)
            if isinstance(member, str):
                skipped.append((name, member))
                continue
            columns.append(member.column(name, stored=stored))
        return ColumnFile(path, columns, options, skipped=skipped, stored=stored, close=archive.close)
    finally:
        archive.close()


def _not_an_array(info: zipfile.ZipInfo) -> str | None:
    if not info.filename.endswith(".npy"):
        return "not an array"
    if info.flag_bits & 1:
        return "encrypted"
    if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        return "compressed in a way that NumPy never writes"
    return None


class _Archive:
    """The zip file under an ``.npz``; opened when it is needed, also after it was closed."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._zip: zipfile.ZipFile | None = None
        self._open: list[IO[bytes]] = []

    @property
    def zip(self) -> zipfile.ZipFile:
        if self._zip is None:
            self._open.append(file := self.path.open("rb"))
            self._zip = directory_of(file)
        return self._zip

    def stream(self, info: zipfile.ZipInfo) -> IO[bytes]:
        """The bytes of a member, until :meth:`close`."""
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
    """One array of an ``.npz``, inflated row by row; going back begins anew."""

    def __init__(self, archive: _Archive, info: zipfile.ZipInfo, head: memoryview) -> None:
        """``head`` is its beginning. Raises :class:`BadObject` with the reason alone."""
        self._archive, self._info = archive, info
        self.dtype, self.fortran, self.shape, self._start = npy_layout(head, text=True)
        self._row = math.prod(self.shape[1:]) * self.dtype.itemsize
        self._stream: IO[bytes] | None = None
        self._at = 0

    @classmethod
    def open(cls, archive: _Archive, info: zipfile.ZipInfo) -> _Member | str:
        """The array in a member, or why it is none. Raises what zipfile does for a damaged one."""
        with stream_of(archive.zip, info) as stream:
            try:
                member = cls(archive, info, memoryview(stream.read(MAX_HEADER + 12)))
            except BadObject as error:
                while stream.read(2**20):  # if it is damaged, its CRC says so at the end
                    pass
                return str(error)
        if not member.shape:
            return "a single number, without rows"
        if member.dtype.kind in "SU" and len(member.shape) > 1:
            return f"texts in {len(member.shape)} dimensions"
        size = member._start + member._row * member.shape[0]
        if size != info.file_size:
            raise ValueError(f"{info.file_size} bytes are not a {member.dtype} array {member.shape}")
        return member

    def column(self, name: str, *, stored: int) -> StoredColumn:
        """This array as a candidate for a field; ``stored`` is the size of the archive."""
        nbytes, read = self._row * self.shape[0], self._rows
        if self.dtype.kind in "SU":
            kind = "str" if self.dtype.kind == "U" else "bytes"
            return StoredColumn(name, kind, self.shape, nbytes, lambda start, stop: unpadded(self._rows(start, stop)))
        if self.fortran and len(self.shape) > 1:
            what = f"{self._archive.path}: {quoted(name)}, which is stored column by column,"
            check_allocation(what, nbytes, stored=stored)
            read = self._rows_of_columns
        return StoredColumn(name, self.dtype.newbyteorder("<").str, self.shape, nbytes, read)

    def _rows(self, start: int, stop: int) -> Array:
        if self._stream is None or self._stream.closed or start < self._at:
            self._stream, self._at = self._archive.stream(self._info), 0
            self._stream.read(self._start)
        while self._at < start:
            self._take(min(start - self._at, max(1, 2**20 // max(1, self._row))))
        flat = np.frombuffer(self._take(stop - start), dtype=self.dtype)
        return flat.reshape(stop - start, *self.shape[1:]).astype(self.dtype.newbyteorder("<"), copy=False)

    def _take(self, rows: int) -> bytes:
        """The next rows; at the end of the member zipfile checks its CRC."""
        assert self._stream is not None
        raw = self._stream.read(rows * self._row)
        if len(raw) != rows * self._row:
            raise ValueError("fewer bytes than its header says")
        self._at += rows
        if self._at == self.shape[0] and self._stream.read(1):
            raise ValueError("more bytes than its directory says")
        return raw

    def _rows_of_columns(self, start: int, stop: int) -> Array:
        """Out of an array in Fortran's order, the bytes of whose rows lie all over it: read whole, once."""
        if self._stream is None or self._stream.closed:
            self._array = self._rows(0, self.shape[0]).reshape(self.shape[::-1]).T
        return np.ascontiguousarray(self._array[start:stop])
