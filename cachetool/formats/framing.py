"""The framing of TFRecord files: lengths and checksums around the data of each record.

::

    length u64 | masked crc32c of the length u32 | data | masked crc32c of the data u32        little-endian

(tensorflow/core/lib/io/record_writer.h.) The writer computes both checksums, and the reader compares both: the checksum
of a length before it allocates memory for the data, the checksum of the data before anything parses the data.

:class:`GzipFile` gives random access to a TFRecord file that was compressed as one gzip stream. While it reads the file
once from start to end, it keeps the state of the decompressor every 4 MiB of output. A later read starts at the nearest
state before its position. The memory used is these states (about 40 kB each) and one piece of output.
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
"""Bytes before and behind the data of a record."""


def mask(crcs: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint32]:
    """Return the values that the file stores for these crc32c values: rotated right by 15 bits, plus a constant."""
    # TensorFlow stores masked checksums because a crc over data that contains crcs is problematic. The constant is
    # kMaskDelta of tensorflow/core/lib/hash/crc32c.h.
    return (crcs >> np.uint32(15) | crcs << np.uint32(17)) + np.uint32(0xA282EAD8)


def _crcs(buffer: Bytes, starts: Int64s, sizes: Int64s) -> npt.NDArray[np.uint32]:
    """Return the masked crc32c of many runs of ``buffer``, uint32 of shape (runs,)."""
    # A memoryview's slice costs no copy, and crc32c accepts it (google_crc32c takes only bytes). Local names save two
    # look-ups a record.
    view, crc = buffer.data, crc32c.crc32c
    checksums = [crc(view[at : at + size]) for at, size in zip(starts.tolist(), sizes.tolist(), strict=True)]
    return mask(np.array(checksums, dtype=np.uint32))


def frame_records(buffer: Bytes, starts: Int64s, sizes: Int64s) -> None:
    """Write lengths and checksums around the records at ``starts``. The buffer has space for them on both sides."""
    if not len(starts):
        return
    lengths = as_bytes(sizes.astype("<u8"))
    # Samples of a fixed schema all have one length, so one checksum serves all of them.
    if (sizes == sizes[0]).all():
        length_crcs = np.full(len(sizes), mask(np.array([crc32c.crc32c(lengths[:8].data)], dtype=np.uint32))[0])
    else:
        length_crcs = _crcs(lengths, np.arange(len(sizes)) * 8, np.full(len(sizes), 8))
    # One scatter for each column of the frame instead of one call for each record: Python takes microseconds a record.
    windows(buffer, 8)[starts - BEFORE] = lengths.reshape(-1, 8)
    windows(buffer, 4)[starts - 4] = as_bytes(length_crcs.astype("<u4")).reshape(-1, 4)
    data_crcs = _crcs(buffer, starts, sizes)
    windows(buffer, 4)[starts + sizes] = as_bytes(data_crcs.astype("<u4")).reshape(-1, 4)


def check_records(buffer: Bytes, starts: Int64s, sizes: Int64s, *, name: str, numbers: Int64s) -> None:
    """Raise :class:`CorruptError` if the data of a record does not match its crc32c.

    The message has ``name`` and the record's number out of ``numbers``.
    """
    if not len(starts):
        return
    stored = np.ascontiguousarray(windows(buffer, 4)[starts + sizes]).view("<u4")[:, 0]
    wrong = _crcs(buffer, starts, sizes) != stored
    if wrong.any():
        raise CorruptError(f"{name}: sample {int(numbers[int(np.argmax(wrong))])} does not match its crc32c")


def frame_size(head: bytes) -> int | None:
    """Return the data size that the first 12 bytes of a record announce, or None if their checksum is wrong."""
    if len(head) != BEFORE:
        return None
    # The length is compared with its checksum before anybody uses it: a damaged length may say 2^63 bytes.
    size, stored = struct.unpack("<QI", head)
    crc = int(mask(np.array([crc32c.crc32c(head[:8])], dtype=np.uint32))[0])
    return int(size) if crc == stored else None


def scan_records(buffer: Bytes, *, name: str) -> tuple[Int64s, Int64s]:
    """Return the starts and sizes, in bytes, of the data of all records of a file.

    Raises :class:`CorruptError`, naming ``name`` and the record, for a wrong length checksum or a record that is cut
    short.
    """
    total = len(buffer)
    first = frame_size(buffer[:BEFORE].tobytes())
    step = BEFORE + (first or 0) + AFTER
    if first is not None and total % step == 0:
        # The file is the sum of equal records if all heads are alike at equal distances. A scan record by record would
        # find the same positions, but it takes 8 us for each one.
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
        # The size is compared with the file before an int64 array gets it: a hostile file can announce 2^64 - 1 bytes
        # with a correct checksum.
        if size > total - at - BEFORE - AFTER:
            raise CorruptError(f"{name} is cut short: sample {len(starts)} needs {size} bytes at byte {at}")
        starts.append(at + BEFORE)
        sizes.append(size)
        at += BEFORE + size + AFTER
    return np.array(starts, dtype=np.int64), np.array(sizes, dtype=np.int64)


GZIP_MAGIC = b"\x1f\x8b"
GZIP_WBITS = 31
# 31 tells zlib to expect gzip's header and trailer and the largest window (16 + 15).
_PIECE = 2**18
_EVERY = 4 * 2**20


class GzipFile:
    """A gzip file that is read by positions in its uncompressed bytes.

    Raises :class:`CorruptError`, naming the file, for damaged or cut bytes, and no other error for them.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        # Each state is a copy of zlib's decompressor, with its window of 32 KiB.
        # (position in the output, position in the file, decompressor whose next input is at that position)
        self._states: list[tuple[int, int, Any]] = [(0, 0, zlib.decompressobj(GZIP_WBITS))]
        self._rewind(0)

    def _rewind(self, position: int) -> None:
        at, file_at, state = next(s for s in reversed(self._states) if s[0] <= position)
        self._begin, self._piece = at, b""
        # A copy, because decompressing changes the state, and a later read starts at the kept state again.
        self._file_at, self._inflate = file_at, state.copy()

    def _next(self) -> bool:
        """Move to the next piece of output. Return False at the end of the file."""
        while True:
            end = self._begin + len(self._piece)
            if end - self._states[-1][0] >= _EVERY and not self._inflate.eof:
                self._states.append((end, self._file_at, self._inflate.copy()))
            # Input that the last call did not use comes first: ``unconsumed_tail`` because the output was limited to
            # one piece, ``unused_data`` because a member ended inside of the input.
            given = self._inflate.unconsumed_tail or self._inflate.unused_data
            if not given:
                given = os.pread(self._fd, _PIECE, self._file_at)
                self._file_at += len(given)
            if self._inflate.eof:
                if not given:
                    return False
                # A gzip file may have several members one after another, for example the output of `cat a.gz b.gz`.
                # Each needs a new decompressor.
                self._inflate = zlib.decompressobj(GZIP_WBITS)
            elif not given:
                raise CorruptError(f"{self.path} is cut short: its gzip stream does not end")
            try:
                # The limit bounds the memory: 256 KiB of a hostile file could unpack to 256 MiB.
                piece = self._inflate.decompress(given, _PIECE)
            except zlib.error as error:
                raise CorruptError(f"{self.path} is damaged: {error}") from error
            if piece:
                self._begin, self._piece = end, piece
                return True

    def read(self, position: int, size: int) -> bytes:
        """Return ``size`` bytes from ``position``, fewer at the end of the file."""
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
