"""A Python file object for HDF5's ``fileobj`` driver that cannot fail, over memory or over a preallocated file.

HDF5 cannot close a file whose driver raised, and the interpreter then crashes at its end. So :class:`Recorder` keeps
the first error for :meth:`Recorder.check` and goes on as if nothing happened: the file is thrown away then.
"""

from __future__ import annotations

import io
import os
from collections.abc import Callable
from typing import Any

__all__ = ["Recorder", "SparseImage"]


class SparseImage:
    """The bytes that were written of a file, and where; the rest reads as zeros."""

    def __init__(self) -> None:
        self.writes: list[tuple[int, bytes]] = []
        """Positions and bytes in the order in which they were written; later ones may cover earlier ones."""

    def write(self, at: int, data: memoryview) -> None:
        """Keep a copy of ``data``."""
        self.writes.append((at, bytes(data)))

    def read(self, at: int, count: int) -> bytes:
        """``count`` bytes from ``at``."""
        out = bytearray(count)
        for start, data in self.writes:
            low, high = max(at, start), min(at + count, start + len(data))
            if low < high:
                out[low - at : high - at] = data[low - start : high - start]
        return bytes(out)


class Recorder(io.RawIOBase):
    """Hands writes on with their position, and knows the size of the file."""

    def __init__(self, write: Callable[[int, memoryview], object], read: Callable[[int, int], bytes]) -> None:
        self.size = 0
        """Of the file, as HDF5 has it."""
        self._write, self._read = write, read
        self._at = 0
        self._error: Exception | None = None

    def check(self) -> None:
        """Raise the first error that was met."""
        if self._error is not None:
            raise self._error

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Move to a position."""
        self._at = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self.size}[whence]
        return self._at

    def tell(self) -> int:
        """The position."""
        return self._at

    def readinto(self, buffer: Any) -> int:
        """Fill ``buffer``, with zeros where the file has nothing."""
        view = memoryview(buffer).cast("B")
        try:
            data = self._read(self._at, len(view))
        except Exception as error:  # noqa: BLE001 - see the module
            data, self._error = b"", self._error or error
        view[: len(data)] = data
        view[len(data) :] = bytes(len(view) - len(data))
        self._at += len(view)
        return len(view)

    def write(self, data: Any) -> int:
        """Hand ``data`` on."""
        view = memoryview(data).cast("B")
        try:
            self._write(self._at, view)
        except Exception as error:  # noqa: BLE001 - see the module
            self._error = self._error or error
        self._at += len(view)
        self.size = max(self.size, self._at)
        return len(view)

    def truncate(self, size: int | None = None) -> int:
        """Set the size; nothing is handed on."""
        self.size = self._at if size is None else size
        return self.size

    def flush(self) -> None:
        """Nothing is held back."""
