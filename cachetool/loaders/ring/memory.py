"""The memory of a ring: where what lies in it, mapped at the same places in a feeder and in the training process.

::

    memfd    | semaphores | state of each slot | queue of filled slots | where each slot lies |  slot  |  slot  | ...
               filled, free   1 byte each          4 x int32 each          2 x int64 each        grown by the feeder

Of a filled slot the queue has all that its batch is known by, so that the slot itself, which is in nobody's cache, is
not looked at before it is used: its number, which form it has (1, 2, ...), generation and step.

It has no name, so nothing is left behind however the processes end.
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

__all__ = ["HEAD", "IDLE", "IN_USE", "MOST", "MOST_KEPT", "Head", "Owner", "library", "supported", "wait"]

MOST = 16384
"""Slots a ring can have at most."""
MOST_KEPT = MOST // 2
"""Batches of a ring that may be kept at once, and as many that may be ready beside them."""

_ENTRY = struct.Struct("4i")
_FILLED, _FREE = 0, 64  # sem_t takes 32 bytes on 64-bit Linux
_COUNT = 128  # of slots that the feeder allowed itself, and of batches that the consumer waited for
_STATES = 4096
_QUEUE = _STATES + MOST
_TABLE = _QUEUE + 16 * MOST
HEAD = _TABLE + 16 * MOST
"""Bytes before the first slot; most of them are never touched."""

IN_USE, IDLE = 0, 1
"""States of a slot."""
_RESERVED, _LEAST_RESERVED = 2**40, 2**32  # less under a limit on addresses (ulimit -v)
_MONOTONIC = time.CLOCK_MONOTONIC


def supported() -> bool:
    """Whether this platform has what a ring is made of: Linux with 64-bit addresses."""
    return sys.platform == "linux" and sys.maxsize > 2**32


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


@functools.cache
def library(*, keeps_gil: bool) -> Any:
    """The C library, called with the GIL held, or without it for calls that may block."""
    libc = ctypes.PyDLL(None, use_errno=True) if keeps_gil else ctypes.CDLL(None, use_errno=True)
    for name in ("sem_post", "sem_wait", "sem_trywait"):
        getattr(libc, name).argtypes = [ctypes.c_void_p]
    libc.sem_init.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_uint]
    libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
    return libc


def wait(semaphore: ctypes.c_void_p, seconds: float) -> bool:
    """Wait at most so long, without the GIL; False when the time is over or a signal came."""
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
    """What an array has as its base: it keeps what keeps the memory."""

    __slots__ = ("__array_interface__", "_keeper")

    def __init__(self, interface: dict[str, Any], keeper: object) -> None:
        self.__array_interface__ = interface
        self._keeper = keeper


class Head:
    """The head of a ring, mapped, and addresses for its slots: each byte of the file at its place behind the head.

    One range and no map of Python's own, which would keep a descriptor a slot.
    """

    def __init__(self, fd: int) -> None:
        self.fd = fd
        reserved = _reserved()
        start = int(reserved.ctypes.data)
        self._base = -(-start // HUGE) * HUGE
        shape = (len(reserved) - (self._base - start),)
        interface = {"data": (self._base, False), "shape": shape, "typestr": "|u1", "version": 3}
        self._range: Bytes = np.asarray(Owner(interface, reserved))  # writable, which Python's map is not
        self._map(0, HEAD)
        head = self._range[:HEAD].data
        self.count = head[_COUNT : _COUNT + 16].cast("q")
        self.states = head[_STATES : _STATES + MOST]
        self.queue, self.entry = head[_QUEUE : _QUEUE + 16 * MOST], _ENTRY
        self.table = head[_TABLE : _TABLE + 16 * MOST].cast("q")
        self.filled = ctypes.c_void_p(self._base + _FILLED)
        self.free = ctypes.c_void_p(self._base + _FREE)

    def _map(self, start: int, size: int) -> None:
        both = mmap.PROT_READ | mmap.PROT_WRITE
        if not map_at(self._base + start, size, both, mmap.MAP_SHARED, self.fd, start):
            raise OSError(ctypes.get_errno(), "mapping a slot failed")

    def region(self, slot: int) -> tuple[int, Bytes]:
        """Where the slot lies in the file now, and its memory. Raises :class:`UsageError` beyond the addresses."""
        start, size = self.table[2 * slot], self.table[2 * slot + 1]
        if start + size > len(self._range):  # mapped there it would replace what is not ours
            raise UsageError(
                f"batches of a loader take more than the {len(self._range) // 2**20} MiB of addresses that this process"
                " has for them; keep fewer batches, or copies of them, or raise the limit (ulimit -v)"
            )
        self._map(start, size)
        return start, self._range[start : start + size]
