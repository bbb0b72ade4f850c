"""One reserved range of addresses, into which many files are mapped side by side.

::

    | file | file | file | free ...                                        |    16 TiB of addresses, no memory
    0      at     at                                                  len(bytes)

So the bytes of all files of a snapshot are one array: a batch out of 500 shards is one copy with one vector of
positions, as out of one. Grouped by shard it is 250 small copies.

Reserving costs nothing: no page of the range exists until a file is mapped there. Python's ``mmap`` cannot place a map,
so files are mapped by the C library's, over the range that a Python map owns; that one unmaps all of it together when
the last array that points into it is gone.

A process may have so many maps only. What belongs to a small file can be held in the range as a copy, without one.
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

from cachetool.formats.files import open_plain
from cachetool.formats.runs import Bytes, Int64s, as_bytes

__all__ = ["HUGE", "Arena", "Memory", "huge_pages", "map_at", "open_arena", "reserve"]

_RESERVED = 2**44
_LEAST = 2**36  # under a limit on addresses (ulimit -v) less is reserved; less than this is of no use
_MAX_MAPS = "/proc/sys/vm/max_map_count"
_USUAL_MAPS = 65_530  # where that cannot be read
_FEW = 32  # maps: of fewer it is not worth while to look again
_BLOCK = 2**22  # bytes held: so many are got at once
_SMALLEST = mmap.PAGESIZE  # addresses of a map
_ALIGN = 64  # of an array that is held
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


def open_arena(*, share: float = 0.75) -> Arena | Memory:
    """A new range; plain memory where there is none to be had: not Linux, not 64 bits, or too tight a limit on
    addresses."""
    if sys.platform != "linux" or sys.maxsize < 2**32:
        return Memory()
    nbytes = _RESERVED
    while nbytes >= _LEAST:
        try:
            return Arena(nbytes, share=share)
        except OSError:
            nbytes //= 2
    return Memory()


@functools.cache
def most_maps() -> int:
    """How many maps a process may have."""
    try:
        return int(Path(_MAX_MAPS).read_text())
    except (OSError, ValueError):
        return _USUAL_MAPS


def maps_now() -> int:
    """How many maps this process has; where nobody says, as many as there may be."""
    try:
        with open("/proc/self/maps", "rb") as listing:
            return sum(piece.count(b"\n") for piece in iter(lambda: listing.read(2**16), b""))
    except OSError:
        return most_maps()


class Memory:
    """What stands for an :class:`Arena` where there is none to be had: it maps nothing, and holds columns all the
    same."""

    def __init__(self) -> None:
        self.bytes: Bytes = np.empty(_BLOCK, dtype=np.uint8)
        self._next = self._let_go = 0

    @property
    def spent(self) -> bool:
        """As of an arena."""
        return _spent(self._let_go, self._next)

    def look(self) -> None:
        """As of an arena."""

    def map(self, path: Path | str, *, links: bool = True) -> tuple[int, int] | None:
        """None."""
        return None

    def unmap(self, at: int) -> None:
        """Nothing was mapped."""

    def hold(self, array: npt.NDArray[Any]) -> int:
        """As of an arena, but :attr:`bytes` may be another array afterwards."""
        at = self._next
        self._next += -(-array.nbytes // _ALIGN) * _ALIGN
        if self._next > len(self.bytes):
            larger = np.empty(2 * self._next, dtype=np.uint8)
            larger[:at] = self.bytes[:at]
            self.bytes = larger
        self.bytes[at : at + array.nbytes] = as_bytes(array)
        return at

    def let_go(self, nbytes: int) -> None:
        """As of an arena."""
        self._let_go += nbytes

    def asleep(self, positions: Int64s) -> npt.NDArray[np.bool_]:
        """None of it."""
        return np.zeros(len(positions), dtype=np.bool_)

    def will_need(self, starts: Int64s, sizes: Int64s, *, near: int) -> None:
        """It is there."""


def _spent(let_go: int, held_bytes: int) -> bool:
    return let_go > _BLOCK and 2 * let_go > held_bytes


class Arena:
    """The range. Reading outside the files kills the process, so whoever takes positions from a file checks them.

    Of the maps that a process may have (``vm.max_map_count`` of Linux) at most ``share`` are in use after a file was
    mapped, whoever made them: the rest is for what the program does besides.
    """

    def __init__(self, nbytes: int, *, share: float = 0.75) -> None:
        self._share = share
        self.bytes: Bytes = reserve(nbytes)
        """The whole range, read-only."""
        self._base = int(self.bytes.ctypes.data)
        self._next = -self._base % HUGE
        self._lengths: dict[int, int] = {}
        self._mapped = 0
        self._room = 0  # maps that may be made before it is looked again; below 0: none
        self._held_bytes = self._let_go = 0
        self._block: Bytes = np.empty(0, dtype=np.uint8)  # a part of the range that can be written
        self._hold_at = self._hold_end = 0

    @property
    def spent(self) -> bool:
        """Whether most of the range lies behind, or of what was held: then a new one serves better."""
        return 2 * (self._next - self._mapped) > len(self.bytes) or _spent(self._let_go, self._held_bytes)

    @property
    def files(self) -> int:
        """Number of files mapped."""
        return len(self._lengths)

    def look(self) -> None:
        """Look up anew how many maps there may be."""
        self._room = 0

    def map(self, path: Path | str, *, links: bool = True) -> tuple[int, int] | None:
        """Map a file read-only; gives its position and size. Raises OSError when it cannot be opened, and
        :class:`CorruptError` for a link where ``links`` are not followed.

        None when the range is used up (what was unmapped is not used again) or there are too many maps.
        """
        if not self._has_room():
            return None
        fd, size = open_plain(path, links=links)
        try:
            # Smaller ones side by side, without a gap, which would count as a map: they get no huge page anyway.
            unit = HUGE if size >= HUGE else _SMALLEST
            at, length = self._place(size, unit)
            if at + length > len(self.bytes):
                return None
            if size and not map_at(self._base + at, size, mmap.PROT_READ, mmap.MAP_SHARED, fd):
                return None
        finally:
            os.close(fd)
        self._enter(at, length)
        return at, size

    def _place(self, size: int, unit: int) -> tuple[int, int]:
        at = self._next + -(self._base + self._next) % unit
        return at, max(1, -(-size // unit)) * unit

    def _enter(self, at: int, length: int) -> None:
        self._next = at + length
        self._lengths[at] = length
        self._mapped += length
        self._room -= 1

    def _has_room(self) -> bool:
        """Whether one more map may be made. Each makes two at most, with the gap behind it: after half of those that
        are left it is looked how many there are."""
        if self._room == 0:
            self._room = max(0, (int(self._share * most_maps()) - maps_now()) // 2)
            if self._room < _FEW:
                self._room = -1
        return self._room > 0

    def unmap(self, at: int) -> None:
        """Let go of the file mapped at ``at``: nothing may read there any more."""
        length = self._lengths.pop(at)
        self._mapped -= length
        if not map_at(self._base + at, length, 0, _ANYWHERE, -1):
            raise OSError(ctypes.get_errno(), "unmapping failed")

    def hold(self, array: npt.NDArray[Any]) -> int:
        """Copy an array into the range, for as long as that is there; gives its position. Raises MemoryError."""
        nbytes = -(-array.nbytes // _ALIGN) * _ALIGN
        if self._hold_at + nbytes > self._hold_end:
            at, length = self._place(max(nbytes, _BLOCK), HUGE)
            both = mmap.PROT_READ | mmap.PROT_WRITE
            if at + length > len(self.bytes) or not map_at(self._base + at, length, both, _ANYWHERE, -1):
                raise MemoryError("no addresses or maps are left for the places of samples")
            block = (ctypes.c_char * length).from_address(self._base + at)
            self._block = np.frombuffer(memoryview(block), dtype=np.uint8)
            self._hold_at, self._hold_end, self._next = at, at + length, at + length
            self._mapped += length
        at = self._hold_at
        self._hold_at += nbytes
        self._held_bytes += nbytes
        start = at - self._hold_end + len(self._block)
        self._block[start : start + array.nbytes] = as_bytes(array)
        return at

    def let_go(self, nbytes: int) -> None:
        """So many of the bytes that are held are of no use any more."""
        self._let_go += nbytes

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
