"""One reserved range of addresses, into which many files are mapped side by side.

::

    | file | file | file | free ...                                        |    16 TiB of addresses, no memory
    0      at     at                                                  len(bytes)

So the bytes of all files of a snapshot are one array: a batch out of 500 shards is one copy with one vector of
positions, as out of one. Grouped by shard it is 250 small copies.

Reserving costs nothing: no page of the range exists until a file is mapped there. Python's ``mmap`` cannot place a map,
so files are mapped by the C library's, over the range that a Python map owns; that one unmaps all of it together when
the last array that points into it is gone.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from cachetool.formats.files import map_file, open_plain
from cachetool.formats.runs import Bytes, Int64s

__all__ = ["HUGE", "Arena", "huge_pages", "map_alone", "map_at", "open_arena", "reserve"]

_RESERVED = 2**44
_LEAST = 2**36  # under a limit on addresses (ulimit -v) less is reserved; less than this is of no use
_MOST = 24_000  # files: Linux gives a process 65,530 maps (vm.max_map_count), gaps between files count too
HUGE = 2**21  # bytes of a huge page; where the page cache has some, only a map so aligned is made of them
_COLLAPSE = 25  # MADV_COLLAPSE of Linux 6.1
_FIXED = 0x10  # MAP_FIXED of Linux on every processor
_FAILED = ctypes.c_void_p(-1).value
_ANYWHERE = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS


@functools.cache
def _libc(name: str) -> Callable[[int, int, Any], int]:
    """``madvise`` or ``mincore``."""
    function = getattr(ctypes.CDLL(None, use_errno=True), name)
    function.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int if name == "madvise" else ctypes.c_char_p]
    return function  # type: ignore[no-any-return]


@functools.cache
def _libc_mmap() -> Callable[[int, int, int, int, int, int], int]:
    function = ctypes.CDLL(None, use_errno=True).mmap
    function.restype = ctypes.c_void_p
    function.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_int64]
    return function


def map_at(address: int, length: int, protection: int, flags: int, fd: int, offset: int = 0) -> bool:
    """Map a file over part of a range that :func:`reserve` gave; False when the kernel refuses."""
    return _libc_mmap()(address, length, protection, flags | _FIXED, fd, offset) != _FAILED


def huge_pages(address: int, nbytes: int) -> None:
    """Make huge pages of new shared memory, as far as it fills any: each of 512 pages costs whoever touches it first a
    fault, and whoever looks at one byte of it a walk through the tables. A kernel that does not is none the worse."""
    _libc("madvise")(address, nbytes & -HUGE, _COLLAPSE)


def reserve(nbytes: int) -> Bytes:
    """So many addresses without memory, all of them unmapped when the array is gone. Raises OSError."""
    return np.frombuffer(mmap.mmap(-1, nbytes, flags=_ANYWHERE, prot=0), dtype=np.uint8)


def map_alone(path: Path) -> Bytes:
    """The bytes of a file, mapped as by :func:`~cachetool.formats.files.map_file`, but without a descriptor, of which
    Python's ``mmap`` keeps one for each map."""
    if sys.platform != "linux":
        return map_file(path)
    fd, size = open_plain(path)
    try:
        found = reserve(size) if size else np.empty(0, dtype=np.uint8)
        if size and not map_at(int(found.ctypes.data), size, mmap.PROT_READ, mmap.MAP_SHARED, fd):
            return map_file(path)
        found.flags.writeable = False
        return found
    finally:
        os.close(fd)


def open_arena() -> Arena | None:
    """A new range; None where there is none to be had: not Linux, not 64 bits, or too tight a limit on addresses."""
    if sys.platform != "linux" or sys.maxsize < 2**32:
        return None
    nbytes = _RESERVED
    while nbytes >= _LEAST:
        try:
            return Arena(nbytes)
        except OSError:
            nbytes //= 2
    return None


class Arena:
    """The range. Reading outside the files kills the process, so whoever takes positions from a file checks them."""

    def __init__(self, nbytes: int) -> None:
        self.bytes: Bytes = reserve(nbytes)
        """The whole range, read-only."""
        self._base = int(self.bytes.ctypes.data)
        self._next = -self._base % HUGE
        self._lengths: dict[int, int] = {}

    @property
    def spent(self) -> bool:
        """Whether most of the range lies behind: then a new one serves better."""
        return 2 * (self._next - sum(self._lengths.values())) > len(self.bytes)

    @property
    def files(self) -> int:
        """Number of files mapped."""
        return len(self._lengths)

    def map(self, path: Path) -> tuple[int, int] | None:
        """Map a file read-only; gives its position and size. Raises OSError when it cannot be opened.

        None when the range is used up (what was unmapped is not used again) or there are too many maps.
        """
        fd, size = open_plain(path)
        try:
            at, length = self._next, max(1, -(-size // HUGE)) * HUGE
            if at + length > len(self.bytes) or len(self._lengths) >= _MOST:
                return None
            if size and not map_at(self._base + at, size, mmap.PROT_READ, mmap.MAP_SHARED, fd):
                return None
        finally:
            os.close(fd)
        self._next += length
        self._lengths[at] = length
        return at, size

    def unmap(self, at: int) -> None:
        """Let go of the file mapped at ``at``: nothing may read there any more."""
        length = self._lengths.pop(at)
        if not map_at(self._base + at, length, 0, _ANYWHERE, -1):
            raise OSError(ctypes.get_errno(), "unmapping failed")

    def resident(self, positions: Int64s) -> bool:
        """Whether the pages of these positions are in memory. True where the kernel does not say, as of files of
        another user."""
        return not any(self._asleep(positions))

    def asleep(self, positions: Int64s) -> npt.NDArray[np.bool_]:
        """Which of these positions have pages that are not in memory, as far as the kernel says: bool, one each."""
        return np.fromiter(self._asleep(positions), np.bool_, len(positions))

    def _asleep(self, positions: Int64s) -> Iterator[bool]:
        mincore, page = _libc("mincore"), ctypes.create_string_buffer(1)
        for at in positions.tolist():
            yield mincore(self._base + (at & -mmap.PAGESIZE), 1, page) == 0 and not page.raw[0] & 1

    def will_need(self, starts: Int64s, sizes: Int64s, *, near: int) -> None:
        """Have the kernel read these runs, without waiting for it; what lies between them too where it is at most
        ``near`` bytes."""
        chosen = np.flatnonzero(sizes > 0)
        order = chosen[np.argsort(starts[chosen])]
        first = starts[order] & -mmap.PAGESIZE
        last = np.maximum.accumulate(starts[order] + sizes[order])
        apart = first[1:] > last[:-1] + near
        begins = first[np.concatenate([[True], apart])] if len(first) else first
        ends = last[np.concatenate([apart, [True]])] if len(last) else last
        madvise = _libc("madvise")
        for begin, end in zip(begins.tolist(), ends.tolist(), strict=True):
            madvise(self._base + begin, end - begin, mmap.MADV_WILLNEED)

    def position(self, array: np.ndarray[tuple[int, ...], np.dtype[np.generic]]) -> int:
        """Where in :attr:`bytes` an array that is a view of it begins."""
        return int(array.ctypes.data) - self._base
