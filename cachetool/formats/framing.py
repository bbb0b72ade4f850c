"""The records of a TFRecord file: lengths and checksums around bytes.

::

    length u64 | masked crc32c of the length u32 | data | masked crc32c of the data u32        little-endian

(tensorflow/core/lib/io/record_writer.h.) Both checksums are written and checked: the one of a length before anything
is allocated for it, the one of the data before anything is made of it.

Random access into a gzip file, for TFRecords that were compressed whole.

While the file is read through once, the state of the decompressor is kept every few MiB; a read begins at the nearest
one before it. Memory stays at those states (about 40 kB each) and one piece of output.
"""

from __future__ import annotations

import os
import struct
import zlib
from pathlib import Path
from typing import Any

import crc32c
import numpy as np
import numpy.typing as npt

from cachetool.core.errors import CorruptError
from cachetool.formats.runs import Bytes, Int64s, as_bytes, windows

__all__ = [
    "AFTER",
    "BEFORE",
    "GZIP_MAGIC",
    "GZIP_WBITS",
    "GzipFile",
    "check_records",
    "frame_records",
    "frame_size",
    "mask",
    "scan_records",
]


BEFORE, AFTER = 12, 4
"""Bytes around the data of a record."""


def mask(crcs: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint32]:
    """What is stored for these crc32c values: rotated by 15 bits, plus a constant."""
    return (crcs >> np.uint32(15) | crcs << np.uint32(17)) + np.uint32(0xA282EAD8)


def _crcs(buffer: Bytes, starts: Int64s, sizes: Int64s) -> npt.NDArray[np.uint32]:
    """Masked crc32c of many runs of ``buffer``."""
    view, crc = buffer.data, crc32c.crc32c
    checksums = [crc(view[at : at + size]) for at, size in zip(starts.tolist(), sizes.tolist(), strict=True)]
    return mask(np.array(checksums, dtype=np.uint32))


def frame_records(buffer: Bytes, starts: Int64s, sizes: Int64s) -> None:
    """Write lengths and checksums around the records at ``starts``, which have room for them on both sides."""
    if not len(starts):
        return
    lengths = as_bytes(sizes.astype("<u8"))
    if (sizes == sizes[0]).all():
        length_crcs = np.full(len(sizes), mask(np.array([crc32c.crc32c(lengths[:8].data)], dtype=np.uint32))[0])
    else:
        length_crcs = _crcs(lengths, np.arange(len(sizes)) * 8, np.full(len(sizes), 8))
    windows(buffer, 8)[starts - BEFORE] = lengths.reshape(-1, 8)
    windows(buffer, 4)[starts - 4] = as_bytes(length_crcs.astype("<u4")).reshape(-1, 4)
    data_crcs = _crcs(buffer, starts, sizes)
    windows(buffer, 4)[starts + sizes] = as_bytes(data_crcs.astype("<u4")).reshape(-1, 4)


def check_records(buffer: Bytes, starts: Int64s, sizes: Int64s, *, name: str, numbers: Int64s) -> None:
    """Raise :class:`CorruptError`, naming ``name`` and the number of the record, where data does not match its crc."""
    if not len(starts):
        return
    stored = np.ascontiguousarray(windows(buffer, 4)[starts + sizes]).view("<u4")[:, 0]
    wrong = _crcs(buffer, starts, sizes) != stored
    if wrong.any():
        raise CorruptError(f"{name}: sample {int(numbers[int(np.argmax(wrong))])} does not match its crc32c")


def frame_size(head: bytes) -> int | None:
    """The data size that the first 12 bytes of a record announce; None when their checksum is wrong."""
    if len(head) != BEFORE:
        return None
    size, stored = struct.unpack("<QI", head)
    crc = int(mask(np.array([crc32c.crc32c(head[:8])], dtype=np.uint32))[0])
    return int(size) if crc == stored else None


def scan_records(buffer: Bytes, *, name: str) -> tuple[Int64s, Int64s]:
    """Where the data of each record of a whole file lies: starts and sizes.

    Raises :class:`CorruptError`, naming ``name`` and the record, for a wrong length checksum or a record cut short.
    """
    total = len(buffer)
    first = frame_size(buffer[:BEFORE].tobytes())
    step = BEFORE + (first or 0) + AFTER
    if first is not None and total % step == 0:
        # All records of one size, told by heads that are all alike: then every one of them is what a scan would find.
        heads = windows(buffer, BEFORE)[::step]
        if (heads == heads[0]).all():
            return np.arange(BEFORE, total, step, dtype=np.int64), np.full(total // step, first, dtype=np.int64)
    starts: list[int] = []
    sizes: list[int] = []
    at = 0
    while at < total:
        size = frame_size(buffer[at : at + BEFORE].tobytes())
        if size is None:
            what = "is cut short" if total - at < BEFORE else "has a damaged length"
            raise CorruptError(f"{name}: sample {len(starts)}, at byte {at}, {what}")
        if size > total - at - BEFORE - AFTER:
            raise CorruptError(f"{name} is cut short: sample {len(starts)} needs {size} bytes at byte {at}")
        starts.append(at + BEFORE)
        sizes.append(size)
        at += BEFORE + size + AFTER
    return np.array(starts, dtype=np.int64), np.array(sizes, dtype=np.int64)


GZIP_MAGIC = b"\x1f\x8b"
GZIP_WBITS = 31
_PIECE = 2**18
_EVERY = 4 * 2**20


class GzipFile:
    """The uncompressed bytes of a gzip file by position. Raises :class:`CorruptError` naming the file and no other."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        # (position in the output, position in the file, decompressor whose next input is at that position)
        self._states: list[tuple[int, int, Any]] = [(0, 0, zlib.decompressobj(GZIP_WBITS))]
        self._rewind(0)

    def _rewind(self, position: int) -> None:
        at, file_at, state = next(s for s in reversed(self._states) if s[0] <= position)
        self._begin, self._piece = at, b""
        self._file_at, self._inflate = file_at, state.copy()

    def _next(self) -> bool:
        """Move to the next piece of output; False at the end of the file."""
        while True:
            end = self._begin + len(self._piece)
            if end - self._states[-1][0] >= _EVERY and not self._inflate.eof:
                self._states.append((end, self._file_at, self._inflate.copy()))
            given = self._inflate.unconsumed_tail or self._inflate.unused_data
            if not given:
                given = os.pread(self._fd, _PIECE, self._file_at)
                self._file_at += len(given)
            if self._inflate.eof:
                if not given:
                    return False
                self._inflate = zlib.decompressobj(GZIP_WBITS)  # another member behind the first
            elif not given:
                raise CorruptError(f"{self.path} is cut short: its gzip stream does not end")
            try:
                piece = self._inflate.decompress(given, _PIECE)
            except zlib.error as error:
                raise CorruptError(f"{self.path} is damaged: {error}") from error
            if piece:
                self._begin, self._piece = end, piece
                return True

    def read(self, position: int, size: int) -> bytes:
        """``size`` bytes from ``position``, fewer at the end of the file."""
        if position < self._begin:
            self._rewind(position)
        parts: list[bytes] = []
        while size > 0:
            begin = position - self._begin
            part = self._piece[begin : begin + size] if begin >= 0 else b""
            parts.append(part)
            position, size = position + len(part), size - len(part)
            if size > 0 and not self._next():
                break
        return b"".join(parts)

    def close(self) -> None:
        """Let go of the file. May be called twice."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
