"""One reserved range of addresses, into which many files are mapped side by side.

::

    | file | file | file | free ...                                        |    16 TiB of addresses, no memory
    0      at     at                                                  len(bytes)

So the bytes of all files of a snapshot are one array. A batch out of 500 shards is one copy with one array of
positions, as if it came out of one shard. Copied shard by shard it would be 250 small copies.

Reserving costs nothing, because no page of the range exists until a file is mapped there. Python's ``mmap`` cannot
choose the address of a map, so the C library maps the files over a range that one Python map owns. That Python map
unmaps all of them together when the last array that points into the range is deleted.

A process may have only a limited number of maps. So the range can also hold copies: the contents of a small file are
copied into it and need no map of their own.
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

# 16 TiB of addresses: they are not used again after a file is unmapped, so a long training run
# needs many more than the cache has bytes.
_RESERVED = 2**44
# Under a limit on addresses (ulimit -v) half is tried, and so on. Less than 64 GiB would be used up
# too soon to be of use.
_LEAST = 2**36
_MAX_MAPS = "/proc/sys/vm/max_map_count"
_USUAL_MAPS = 65_530
"""The default of Linux, where the limit cannot be read."""
# Maps. When fewer than these are left, counting them again for each file would cost more than it
# gains: the remaining shards are read without a map.
_FEW = 32
# Bytes that are got at once for copies. A map for each small copy would use up the limit of maps.
_BLOCK = 2**22
_SMALLEST = mmap.PAGESIZE
"""The smallest number of addresses of a map."""
_ALIGN = 64
"""Alignment of a copied array: a cache line."""
# Bytes of a huge page. A map shows huge pages of the page cache only if its address is aligned so.
HUGE = 2**21
# MADV_COLLAPSE of Linux 6.1, which Python's mmap module does not name. Older kernels refuse it.
_COLLAPSE = 25
# MAP_FIXED, which Python's mmap module does not name. It has this value on every processor.
_FIXED = 0x10
_FAILED = ctypes.c_void_p(-1).value
_ANYWHERE = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS


@functools.cache
def _libc(name: str) -> Callable[[int, int, Any], int]:
    """Return ``madvise`` or ``mincore`` of the C library."""
    function = getattr(ctypes.CDLL(None, use_errno=True), name)
    function.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int if name == "madvise" else ctypes.c_char_p]
    return function  # type: ignore[no-any-return]


@functools.cache
def _libc_mmap(*, keeps_gil: bool) -> Callable[[int, int, int, int, int, int], int]:
    function = (ctypes.PyDLL if keeps_gil else ctypes.CDLL)(None, use_errno=True).mmap
    # Without a result type ctypes would cut the address down to 32 bits.
    function.restype = ctypes.c_void_p
    function.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_int64]
    return function


def map_at(
    address: int, length: int, protection: int, flags: int, fd: int, offset: int = 0, *, keeps_gil: bool = False
) -> bool:
    """Map a file over part of a range that :func:`reserve` returned. Return False when the kernel refuses."""
    return _libc_mmap(keeps_gil=keeps_gil)(address, length, protection, flags | _FIXED, fd, offset) != _FAILED


def huge_pages(address: int, nbytes: int) -> None:
    """Turn new shared memory into huge pages, as far as it fills whole ones. Kernels that cannot do it change
    nothing."""
    # Each of 512 small pages costs a page fault at the first write, and a walk through the page
    # tables in the training process, which reads one byte of each.
    _libc("madvise")(address, nbytes & -HUGE, _COLLAPSE)


def reserve(nbytes: int) -> Bytes:
    """Reserve ``nbytes`` addresses without memory, until the array is deleted. Raises OSError."""
    return np.frombuffer(mmap.mmap(-1, nbytes, flags=_ANYWHERE, prot=0), dtype=np.uint8)


def open_arena(*, share: float = 0.75) -> Arena | Memory:
    """Return a new range, or plain memory if there can be none: not Linux, not 64 bits, or too tight a limit on
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
    """Return how many maps a process may have."""
    try:
        return int(Path(_MAX_MAPS).read_text())
    except (OSError, ValueError):
        return _USUAL_MAPS


def maps_now() -> int:
    """Return how many maps this process has; the maximum if the system does not say."""
    try:
        with open("/proc/self/maps", "rb") as listing:
            # Counted in pieces of 64 KiB: the listing of 50,000 maps is some megabytes of text.
            return sum(piece.count(b"\n") for piece in iter(lambda: listing.read(2**16), b""))
    except OSError:
        # The cautious answer: no file is mapped then, and all of them are read.
        return most_maps()


class Memory:
    """Plain memory in place of an :class:`Arena`, where there can be none. It maps no files, and holds copies all the
    same."""

    def __init__(self) -> None:
        self.bytes: Bytes = np.empty(_BLOCK, dtype=np.uint8)
        self._next = self._let_go = 0

    @property
    def spent(self) -> bool:
        """See :attr:`Arena.spent`."""
        return _spent(self._let_go, self._next)

    def look(self) -> None:
        """Do nothing: there are no maps to count."""

    def map(self, path: Path | str, *, links: bool = True) -> tuple[int, int] | None:
        """Return None: no file can be mapped."""
        return None

    def unmap(self, at: int) -> None:
        """Do nothing: nothing was mapped."""

    def hold(self, array: npt.NDArray[Any]) -> int:
        """Copy an array into the memory. Afterwards :attr:`bytes` may be another array, unlike that of an arena."""
        at = self._next
        self._next += -(-array.nbytes // _ALIGN) * _ALIGN
        if self._next > len(self.bytes):
            larger = np.empty(2 * self._next, dtype=np.uint8)
            larger[:at] = self.bytes[:at]
            self.bytes = larger
        self.bytes[at : at + array.nbytes] = as_bytes(array)
        return at

    def let_go(self, nbytes: int) -> None:
        """See :meth:`Arena.let_go`."""
        self._let_go += nbytes

    def asleep(self, positions: Int64s) -> npt.NDArray[np.bool_]:
        """Return False for each position: all of it is in memory."""
        return np.zeros(len(positions), dtype=np.bool_)

    def will_need(self, starts: Int64s, sizes: Int64s, *, near: int) -> None:
        """Do nothing: all of it is in memory."""


def _spent(let_go: int, held_bytes: int) -> bool:
    return let_go > _BLOCK and 2 * let_go > held_bytes


class Arena:
    """A reserved range of addresses with the files mapped in it.

    Reading an address of the range where no file is mapped kills the process. So code that takes positions from a file
    checks them.

    The maps of a process are limited (``vm.max_map_count`` of Linux). After a file was mapped, at most the part
    ``share`` of them is in use, the process that made them. The others are left for the rest of the program.
    """

    def __init__(self, nbytes: int, *, share: float = 0.75) -> None:
        self._share = share
        self.bytes: Bytes = reserve(nbytes)
        """The whole range as bytes, read-only."""
        self._base = int(self.bytes.ctypes.data)
        self._next = -self._base % HUGE
        self._lengths: dict[int, int] = {}
        self._mapped = 0
        self._room = 0
        """Maps that may be made before they are counted again. Below 0: none may be made."""
        self._held_bytes = self._let_go = 0
        self._block: Bytes = np.empty(0, dtype=np.uint8)
        """The part of the range that can be written."""
        self._hold_at = self._hold_end = 0

    @property
    def spent(self) -> bool:
        """Return True if a new range would serve better: most of this one, or of the copies in it, is no longer
        used."""
        return 2 * (self._next - self._mapped) > len(self.bytes) or _spent(self._let_go, self._held_bytes)

    @property
    def files(self) -> int:
        """Number of files mapped."""
        return len(self._lengths)

    def look(self) -> None:
        """Make the next :meth:`map` count the maps of the process again."""
        self._room = 0

    def map(self, path: Path | str, *, links: bool = True) -> tuple[int, int] | None:
        """Map a file read-only. Return its position in the range and its size in bytes.

        Return None when the range is used up (addresses are not used twice) or when there are too many maps. Raises
        OSError when the file cannot be opened, and :class:`CorruptError` for a link when ``links`` are not followed.
        """
        if not self._has_room():
            return None
        fd, size = open_plain(path, links=links)
        try:
            # Files below 2 MiB get no huge page, so they lie side by side. A gap between two of
            # them would count as a map of its own.
            unit = HUGE if size >= HUGE else _SMALLEST
            at, length = self._place(size, unit)
            if at + length > len(self.bytes):
                return None
            if size and not map_at(self._base + at, size, mmap.PROT_READ, mmap.MAP_SHARED, fd):
                return None
        finally:
            # The map keeps the file open by itself. Closed here, 10,000 shards need no descriptor.
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
        """Return True if one more map may be made."""
        if self._room == 0:
            # Counting reads a file of one line a map, so it is not done for each file. A map makes
            # two entries at most, itself and the gap behind it, so half of what is left can be made
            # without counting.
            self._room = max(0, (int(self._share * most_maps()) - maps_now()) // 2)
            if self._room < _FEW:
                self._room = -1
        return self._room > 0

    def unmap(self, at: int) -> None:
        """Unmap the file at ``at``. Nothing may read there any more."""
        length = self._lengths.pop(at)
        self._mapped -= length
        # The addresses are not given back but mapped without memory: otherwise the kernel could
        # place a map of another library there, and the Python map would unmap that one at the end.
        if not map_at(self._base + at, length, 0, _ANYWHERE, -1):
            raise OSError(ctypes.get_errno(), "unmapping failed")

    def hold(self, array: npt.NDArray[Any]) -> int:
        """Copy an array into the range, where it stays as long as the range. Return its position. Raises
        MemoryError."""
        nbytes = -(-array.nbytes // _ALIGN) * _ALIGN
        if self._hold_at + nbytes > self._hold_end:
            at, length = self._place(max(nbytes, _BLOCK), HUGE)
            both = mmap.PROT_READ | mmap.PROT_WRITE
            if at + length > len(self.bytes) or not map_at(self._base + at, length, both, _ANYWHERE, -1):
                raise MemoryError("no address space or memory maps are left to read samples")
            # A ctypes array gives writable memory at an address, as the read-only Python map
            # cannot.
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
        """Note that ``nbytes`` of the held copies are no longer needed."""
        self._let_go += nbytes

    def asleep(self, positions: Int64s) -> npt.NDArray[np.bool_]:
        """Return for each position whether its page is not in memory, according to the kernel: bool, one each."""
        return np.fromiter(self._asleep(positions), np.bool_, len(positions))

    def _asleep(self, positions: Int64s) -> Iterator[bool]:
        mincore, page = _libc("mincore"), ctypes.create_string_buffer(1)
        for at in positions.tolist():
            # If mincore fails, the page counts as being in memory: then nothing is read ahead, and
            # the copy waits for the disk, which is slower but right.
            yield mincore(self._base + (at & -mmap.PAGESIZE), 1, page) == 0 and not page.raw[0] & 1

    def will_need(self, starts: Int64s, sizes: Int64s, *, near: int) -> None:
        """Ask the kernel to read these runs, without waiting. Gaps between them of at most ``near`` bytes are read as
        well."""
        # Sorted and joined, because one request for a long run is served much faster than many
        # short ones, and each madvise call costs a system call.
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
        """Return the position in :attr:`bytes` at which ``array``, a view of these bytes, begins."""
        return int(array.ctypes.data) - self._base
