"""Random access into a gzip file, for TFRecords that were compressed whole.

While the file is read through once, the state of the decompressor is kept every few MiB; a read begins at the nearest
one before it. Memory stays at those states (about 40 kB each) and one piece of output.
"""

from __future__ import annotations

import os
import zlib
from pathlib import Path
from typing import Any

from cachetool.core.errors import CorruptError

__all__ = ["GZIP_MAGIC", "GZIP_WBITS", "GzipFile"]

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
