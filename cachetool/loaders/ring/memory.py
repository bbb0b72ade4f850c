"""The memory of a ring: its layout, and its map in the feeder process and in the training process.

::

    memfd    | semaphores | state of each slot | queue of filled slots | where each slot lies |  slot  |  slot  | ...
               filled, free   1 byte each          4 x int32 each          2 x int64 each        grown by the feeder

An entry of the queue has four numbers: slot, form of the batch (1, 2, ...), generation of the plan, and step. The
training process can therefore decide about a batch without reading its slot, whose bytes are in no processor's cache.
Beside it stand the time at which the slot was filled, and what the feeder has spent its time on so far.

The memory is a memfd, which has no name in the file system. So nothing is left behind, however the processes end.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import struct
import sys
import time
from typing import Any

import numpy as np

from cachetool.core.errors import UsageError
from cachetool.formats.runs import Bytes
from cachetool.loaders.read.arena import HUGE, map_at, reserve
from cachetool.loaders.ring.batch_times import STEPS

__all__ = ["HEAD", "IDLE", "IN_USE", "MOST", "MOST_KEPT", "Head", "Owner", "library", "supported", "wait"]

MOST = 16384
"""Maximum number of slots of a ring."""
MOST_KEPT = MOST // 2
"""Maximum number of batches of a ring that a consumer may keep. As many again may be ready at the same time."""

_ENTRY = struct.Struct("4i")
# A sem_t takes 32 bytes on 64-bit Linux. 64 bytes apart, each has a cache line of its own.
_FILLED, _FREE = 0, 64
_COUNT = 128
"""Position of two int64: the slots that the feeder has allowed itself, and how often the consumer has waited for a
batch."""
_SPENT = 192
"""Position of the nanoseconds that the feeder has spent on each step, int64."""
_SUMS = struct.Struct(f"{len(STEPS)}q")
# The head is written densely in its first page only. The states, the queue and the table are sized
# for MOST slots, but an untouched page of a memfd takes no memory.
_STATES = 4096
_QUEUE = _STATES + MOST
_TABLE = _QUEUE + 16 * MOST
_READY = _TABLE + 16 * MOST
"""Position of the times at which the slots in the queue were filled, int64 nanoseconds of the monotonic clock."""
HEAD = _READY + 8 * MOST
"""Size in bytes of everything before the first slot. Most of these bytes are never touched."""

IN_USE, IDLE = 0, 1
"""States of a slot: filled or being filled, and free to be filled again."""
# 1 TiB of addresses, without memory behind them. Under a limit on addresses (ulimit -v) half of
# that is tried, and so on; with less than 4 GiB a ring would have no use.
_RESERVED, _LEAST_RESERVED = 2**40, 2**32
_MONOTONIC = time.CLOCK_MONOTONIC


def supported() -> bool:
    """Return True if this platform can have a ring: Linux with 64-bit addresses."""
    return sys.platform == "linux" and sys.maxsize > 2**32


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


@functools.cache
def library(*, keeps_gil: bool) -> Any:
    """Return the C library: called with the GIL held, or without the GIL for calls that may block."""
    # PyDLL keeps the GIL during a call. In the training process that is wanted for sem_trywait and
    # sem_post: they take 0.14 us, but a thread that let the GIL go may wait milliseconds to get it
    # back.
    libc = ctypes.PyDLL(None, use_errno=True) if keeps_gil else ctypes.CDLL(None, use_errno=True)
    for name in ("sem_post", "sem_trywait"):
        getattr(libc, name).argtypes = [ctypes.c_void_p]
    libc.sem_init.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_uint]
    libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
    return libc


def wait(semaphore: ctypes.c_void_p, seconds: float) -> bool:
    """Wait for a semaphore without the GIL, for at most ``seconds``. Return False after that time or after a signal."""
    # sem_clockwait with the monotonic clock, because sem_timedwait uses the wall clock: a wait
    # would end early, or last for hours, when somebody sets the clock.
    clockwait = library(keeps_gil=False).sem_clockwait
    until = time.clock_gettime_ns(_MONOTONIC) + int(seconds * 1e9)
    limit = _Timespec(*divmod(until, 10**9))
    return bool(clockwait(semaphore, _MONOTONIC, ctypes.byref(limit)) == 0)


def _reserved() -> Bytes:
    nbytes = _RESERVED
    while True:
        try:
            return reserve(nbytes)
        except OSError:
            nbytes //= 2
            if nbytes < _LEAST_RESERVED:
                raise


class Owner:
    """The base object of an array made from an address. It refers to the object that keeps the memory alive."""

    __slots__ = ("__array_interface__", "_keeper")

    def __init__(self, interface: dict[str, Any], keeper: object) -> None:
        self.__array_interface__ = interface
        self._keeper = keeper


class Head:
    """The head of a ring, mapped, and the addresses of its slots.

    Byte n of the memfd is at address ``base + n``, in the feeder and in the training process. One reserved range holds
    all slots.
    """

    def __init__(self, fd: int) -> None:
        self.fd = fd
        # Slots are mapped by the C library into this range. A map made by Python's mmap module
        # keeps a descriptor open each: two feeders with 64 slots each would take 128 descriptors.
        reserved = _reserved()
        start = int(reserved.ctypes.data)
        # Aligned to 2 MiB, because the kernel makes huge pages only where file offset and address
        # agree.
        self._base = -(-start // HUGE) * HUGE
        shape = (len(reserved) - (self._base - start),)
        interface = {"data": (self._base, False), "shape": shape, "typestr": "|u1", "version": 3}
        # The array is made from an interface, because Python's own map of the reserved range is
        # read-only. The Owner keeps that map alive, so the addresses stay reserved as long as an
        # array points into them.
        self._range: Bytes = np.asarray(Owner(interface, reserved))
        self._map(0, HEAD)
        head = self._range[:HEAD].data
        self.count = head[_COUNT : _COUNT + 16].cast("q")
        self.states = head[_STATES : _STATES + MOST]
        self.queue, self.entry = head[_QUEUE : _QUEUE + 16 * MOST], _ENTRY
        self.table = head[_TABLE : _TABLE + 16 * MOST].cast("q")
        self.sums, self.spent = _SUMS, head[_SPENT : _SPENT + _SUMS.size]
        self.ready = head[_READY : _READY + 8 * MOST].cast("q")
        self.filled = ctypes.c_void_p(self._base + _FILLED)
        self.free = ctypes.c_void_p(self._base + _FREE)

    def _map(self, start: int, size: int) -> None:
        both = mmap.PROT_READ | mmap.PROT_WRITE
        # The training process maps a slot when it takes the first batch in it. The call takes 10 us, and a busy thread
        # that gets the GIL meanwhile keeps it for 5 ms and more: 150 such calls took 70 to 180 ms instead of 2 to 60.
        if not map_at(self._base + start, size, both, mmap.MAP_SHARED, self.fd, start, keeps_gil=True):
            raise OSError(ctypes.get_errno(), "mapping a slot failed")

    def region(self, slot: int) -> tuple[int, Bytes]:
        """Map a slot where it lies now. Return its position in the memfd, and its memory.

        Raises :class:`UsageError` when the reserved addresses do not reach that far.
        """
        start, size = self.table[2 * slot], self.table[2 * slot + 1]
        # MAP_FIXED replaces whatever is mapped at an address. Behind the end of the reserved range
        # that would be memory of another part of the program.
        if start + size > len(self._range):
            raise UsageError(
                f"the batches of a loader need more than the {len(self._range) // 2**20} MiB of address space that this"
                " process has for them; keep fewer batches, keep copies instead, or raise the limit (ulimit -v)"
            )
        self._map(start, size)
        return start, self._range[start : start + size]
