"""Shared memory between one feeder, which fills slots with batches, and the training process, which looks at them.

::

    memfd    | semaphores | state of each slot | queue of filled slots | where each slot lies |  slot  |  slot  | ...
               filled, free   1 byte each          int32 each              2 x int64 each        grown by the feeder

A slot comes back when nobody can see it any more: whatever looks into it holds its :class:`Lease`, whose end writes one
byte and posts one semaphore. A consumer that keeps batches is granted as many slots more. Tokens of ``free`` are
permissions to fill a slot: one that is free, or else a new one.

The memory has no name, so nothing is left behind however the processes end. In the training process nothing here lets
go of the GIL but waiting for a batch that is not there.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import os
import sys
import time
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np

from cachetool.errors import UsageError
from cachetool.formats.runs import Bytes
from cachetool.loaders.arena import map_at, reserve
from cachetool.loaders.forks import Inherited, watch

__all__ = ["HEAD", "Lease", "Ring", "RingWriter", "supported"]

MOST = 16384
"""Slots a ring can have at most."""

_FILLED, _FREE = 0, 64  # sem_t takes 32 bytes on 64-bit Linux
_COUNT = 128  # of slots that the feeder allowed itself
_STATES = 4096
_QUEUE = _STATES + MOST
_TABLE = _QUEUE + 4 * MOST
HEAD = _TABLE + 16 * MOST
"""Bytes before the first slot; most of them are never touched."""

_IN_USE, _IDLE = b"\0", b"\1"
_HUGE = 2**21
_RESERVED, _LEAST_RESERVED = 2**40, 2**32  # less under a limit on addresses (ulimit -v)
_PUNCH = 3  # FALLOC_FL_KEEP_SIZE | FALLOC_FL_PUNCH_HOLE
_MONOTONIC = time.CLOCK_MONOTONIC


def supported() -> bool:
    """Whether this platform has what a ring is made of: Linux with 64-bit addresses."""
    return sys.platform == "linux" and sys.maxsize > 2**32


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


@functools.cache
def _library(*, keeps_gil: bool) -> Any:
    """The C library, called with the GIL held, or without it for calls that may block."""
    library = ctypes.PyDLL(None, use_errno=True) if keeps_gil else ctypes.CDLL(None, use_errno=True)
    for name in ("sem_post", "sem_wait", "sem_trywait"):
        getattr(library, name).argtypes = [ctypes.c_void_p]
    library.sem_init.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_uint]
    library.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
    return library


def _wait(semaphore: ctypes.c_void_p, seconds: float) -> bool:
    """Wait at most so long, without the GIL; False when the time is over or a signal came."""
    library = _library(keeps_gil=False)
    until = time.clock_gettime_ns(_MONOTONIC) + int(seconds * 1e9)
    limit = _Timespec(*divmod(until, 10**9))
    return bool(library.sem_clockwait(semaphore, _MONOTONIC, ctypes.byref(limit)) == 0)


def _reserved() -> Bytes:
    nbytes = _RESERVED
    while True:
        try:
            return reserve(nbytes)
        except OSError:
            nbytes //= 2
            if nbytes < _LEAST_RESERVED:
                raise


class _Owner:
    """What an array has as its base: it keeps what keeps the memory."""

    __slots__ = ("__array_interface__", "_keeper")

    def __init__(self, interface: dict[str, Any], keeper: object) -> None:
        self.__array_interface__ = interface
        self._keeper = keeper


class _Head:
    """The head of a ring, mapped, and addresses for its slots: each byte of the file at its place behind the head.

    One range and no map of Python's own, which would keep a descriptor a slot.
    """

    def __init__(self, fd: int) -> None:
        self.fd = fd
        reserved = _reserved()
        self._base = int(reserved.ctypes.data)
        interface = {"data": (self._base, False), "shape": reserved.shape, "typestr": "|u1", "version": 3}
        self._whole: Bytes = np.asarray(_Owner(interface, reserved))  # writable, which Python's map is not
        self._map(0, HEAD)
        whole = self._whole[:HEAD].data
        self.count = whole[_COUNT : _COUNT + 8].cast("q")
        self.states = whole[_STATES : _STATES + MOST]
        self.queue = whole[_QUEUE : _QUEUE + 4 * MOST].cast("i")
        self.table = whole[_TABLE : _TABLE + 16 * MOST].cast("q")
        self.filled = ctypes.c_void_p(self._base + _FILLED)
        self.free = ctypes.c_void_p(self._base + _FREE)

    def _map(self, start: int, size: int) -> None:
        both = mmap.PROT_READ | mmap.PROT_WRITE
        if not map_at(self._base + start, size, both, mmap.MAP_SHARED, self.fd, start):
            raise OSError(ctypes.get_errno(), "mapping a slot failed")

    def region(self, slot: int) -> tuple[int, Bytes]:
        """Where the slot lies in the file now, and its memory."""
        start, size = self.table[2 * slot], self.table[2 * slot + 1]
        self._map(start, size)
        return start, self._whole[start : start + size]


class Lease:
    """One batch in its slot. The slot comes back when this object and all arrays of :meth:`array` are gone."""

    __slots__ = ("__weakref__", "_base", "memory")

    def __init__(self, memory: Bytes, base: int) -> None:
        self.memory = memory
        """The slot: as long as it is looked at directly, this object must be kept."""
        self._base = base

    def array(self, offset: int, shape: tuple[int, ...], dtype: str) -> np.ndarray[Any, Any]:
        """An array in the slot, a storage of its own: as long as anything sees it, through whatever views, copies of
        views or tensors, the slot is not filled again."""
        interface = {"data": (self._base + offset, False), "shape": shape, "typestr": dtype, "version": 3}
        return np.asarray(_Owner(interface, self))


class _Watch(weakref.ref[Lease]):
    __slots__ = ("slot",)

    slot: int


class Ring:
    """The training process's end: makes the memory, takes batches out, gives slots back.

    ``poll``, ``wait`` and ``take`` belong to one thread at a time; leases may end in any.
    """

    def __init__(self) -> None:
        self.fd = os.memfd_create("cachetool-ring", os.MFD_CLOEXEC)
        """To be handed to the feeder."""
        os.ftruncate(self.fd, HEAD)
        self._head = _Head(self.fd)
        self._library = _library(keeps_gil=True)
        for semaphore in (self._head.filled, self._head.free):
            if self._library.sem_init(semaphore, 1, 0):
                raise OSError(ctypes.get_errno(), "sem_init failed")
        self._taken = 0
        self._granted = 0
        self._regions: dict[int, tuple[int, Bytes, int]] = {}
        self._live: dict[int, _Watch] = {}
        watch()
        self._inherited = Inherited(lambda live=self._live: list(live))  # type: ignore[misc]
        self._back = _returner(self._head, self._live, self._inherited)

    @property
    def held(self) -> int:
        """Number of batches that somebody can still see."""
        return len(self._live) + len(self._inherited)

    def poll(self) -> bool:
        """Whether a batch is there, which :meth:`take` must then be called for; keeps the GIL."""
        return bool(self._library.sem_trywait(self._head.filled) == 0)

    def wait(self, seconds: float) -> bool:
        """As :meth:`poll`, waiting without the GIL. May come back early, after a signal."""
        self._look_for_ended()
        if self.held >= self._head.count[0] + self._granted:
            self._grant(self._granted + 1)  # the feeder has no slot left: all of them are looked at here
        return _wait(self._head.filled, seconds)

    def take(self) -> Lease:
        """The next batch. Raises :class:`UsageError` when thousands of batches are kept."""
        head = self._head
        slot = head.queue[self._taken % MOST]
        self._taken += 1
        self._look_for_ended()
        self._grant(max(0, self.held - 1))
        start, memory, base = self._regions.get(slot, (-1, None, 0))
        if memory is None or start != head.table[2 * slot] or len(memory) != head.table[2 * slot + 1]:
            start, memory = head.region(slot)
            base = int(memory.ctypes.data)
            self._regions[slot] = start, memory, base
        lease = Lease(memory, base)
        watch = _Watch(lease, self._back)
        watch.slot = slot
        self._live[slot] = watch
        return lease

    def _grant(self, kept: int) -> None:
        """Let the feeder fill as many slots more as batches are kept beside the last one taken."""
        if kept > MOST // 2:
            raise UsageError(f"{kept} batches of a loader are kept at once; copy what is to be kept")
        while self._granted < kept:
            self._library.sem_post(self._head.free)
            self._granted += 1
        while self._granted > kept and self._library.sem_trywait(self._head.free) == 0:
            self._granted -= 1

    def _look_for_ended(self) -> None:
        """Give back what was kept for children that have ended."""
        if self._inherited:
            for slot in self._inherited.ended():
                _give_back(self._head, slot)

    def close(self) -> None:
        """Let go of the descriptor; the memory stays for as long as batches of it are seen."""
        self._inherited.close()
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)


def _give_back(head: _Head, slot: int) -> None:
    head.states[slot : slot + 1] = _IDLE  # before the token, which says that there is one
    _library(keeps_gil=True).sem_post(head.free)


def _returner(head: _Head, live: dict[int, _Watch], inherited: Inherited) -> Callable[[_Watch], None]:
    """What is called at the end of a lease, in whatever thread. It keeps the head alive, not the ring."""
    pid = os.getpid()

    def back(watch: _Watch, getpid: Callable[[], int] = os.getpid) -> None:
        if getpid() != pid:
            return  # a forked child lost sight of its copy; the parent may still look at the batch
        slot = watch.slot
        live.pop(slot, None)
        if not (inherited and inherited.keep(slot)):
            _give_back(head, slot)

    return back


class RingWriter:
    """The feeder's end: one thread of it gets slots, fills them and commits them."""

    def __init__(self, fd: int) -> None:
        self._head = _Head(fd)
        self._library = _library(keeps_gil=False)
        self._end = -(-HEAD // _HUGE) * _HUGE
        self._slots = 0
        self._committed = 0
        self._regions: dict[int, tuple[int, Bytes]] = {}

    def permit(self, slots: int) -> None:
        """Allow so many slots more."""
        self._head.count[0] += slots
        for _ in range(slots):
            self._library.sem_post(self._head.free)

    def acquire(self) -> int:
        """Wait for a slot that nobody sees."""
        while self._library.sem_wait(self._head.free):
            pass  # interrupted by a signal
        slot = self._head.states[: self._slots].tobytes().find(_IDLE)
        if slot < 0:
            slot = self._slots
            self._slots += 1
            if slot >= MOST:
                raise UsageError("a loader has no slots left: too many of its batches are kept at once")
            self._regions[slot] = 0, np.empty(0, dtype=np.uint8)
        self._head.states[slot : slot + 1] = _IN_USE
        return slot

    def put_back(self, slot: int) -> None:
        """Give a slot back that was not filled."""
        self._head.states[slot : slot + 1] = _IDLE
        self._library.sem_post(self._head.free)

    def memory(self, slot: int, nbytes: int = 0, *, keep: int = 0) -> Bytes:
        """The slot's memory, made larger to ``nbytes`` when it has less: its first ``keep`` bytes are then copied."""
        start, memory = self._regions[slot]
        if nbytes <= len(memory):
            return memory
        size = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        at = self._end
        self._end += -(-size // _HUGE) * _HUGE if size >= _HUGE else size
        os.ftruncate(self._head.fd, self._end)
        self._head.table[2 * slot], self._head.table[2 * slot + 1] = at, size
        new = self._head.region(slot)
        new[1][:keep] = memory[:keep]
        if start:  # nobody looks there any more: the memory goes back
            self._library.fallocate(self._head.fd, _PUNCH, start, len(memory))
        self._regions[slot] = new
        return new[1]

    def commit(self, slot: int) -> None:
        """Hand the slot over."""
        self._head.queue[self._committed % MOST] = slot
        self._committed += 1
        self._library.sem_post(self._head.filled)
