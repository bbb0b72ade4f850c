"""Shared memory between one feeder, which fills slots with batches, and the training process, which looks at them.

A slot comes back, by one byte and one semaphore, when nobody can see it any more (:class:`Slot`). A consumer that keeps
batches is granted as many slots more. Tokens of ``free`` are permissions to fill a slot: one that is free, or else a
new one. In the training process nothing here lets go of the GIL but waiting for a batch that is not there.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref
from collections import deque
from collections.abc import Callable
from sys import getrefcount
from typing import Any, TypeAlias

import numpy as np

from cachetool.core.errors import UsageError
from cachetool.formats.runs import Bytes
from cachetool.loaders.read.arena import HUGE, huge_pages
from cachetool.loaders.ring.forks import Inherited, watch
from cachetool.loaders.ring.memory import HEAD, IDLE, IN_USE, MOST, MOST_KEPT, Head, Owner, library, wait

__all__ = ["Lock", "Ring", "RingWriter", "Slot"]

_PUNCH = 3  # FALLOC_FL_KEEP_SIZE | FALLOC_FL_PUNCH_HOLE
_LOOK = 0.5  # seconds
_MANY = 8  # slots
_LOOKS = 16  # slots in use that are looked at when a batch is taken: thousands may be kept

Lock: TypeAlias = Callable[[memoryview], object]
"""Locks memory where it is, for a device that reads it by itself; what this gives keeps the memory and the lock."""


class Slot:
    """One slot as the training process sees it: where its memory lies now, and the arrays of the batch in it.

    The arrays stay here from one batch to the next like it. Whoever is handed a batch gets views of them, each of which
    refers to the array, whatever else is made of it: other views, tensors, exchanged or mapped copies. So the slot is
    seen for as long as one of the arrays is referred to by something else, and that is looked up, not signalled.
    """

    __slots__ = ("_base", "_keeper", "_start", "arrays", "columns", "form", "lock", "memory", "number", "numbers")

    def __init__(self, number: int) -> None:
        self.number = number
        self.arrays: list[np.ndarray[Any, Any]] = []
        """To be handed out as views only."""
        self.form = 0
        """Which of the feeder's forms the arrays have."""
        self.columns: Any = None
        """What the reader knows of them."""
        self.lock: Lock | None = None
        """How its memory is locked."""
        self._start = -1

    def look(self, head: Head, lock: Lock | None = None) -> None:
        """See where the slot lies now, which a feeder changes that makes it larger; let go of its arrays.

        Nothing may see them any more: so this is when its memory may be locked, or not be any more.
        """
        self.form = 0
        self.arrays.clear()
        moved = head.table[2 * self.number] != self._start
        if moved:
            self._start, region = head.region(self.number)
            self._base = int(region.ctypes.data)
            self.memory = region.data
            """The bytes of the slot; none of them may be looked at once it is given back."""
            self.numbers = self.memory[: len(region) // 8 * 8].cast("q")
            """The same as int64."""
        if moved or lock is not self.lock:
            self.lock, self._keeper = lock, None  # a lock there was ends before there is another
            self._keeper = self.memory if lock is None else lock(self.memory)

    def array(self, offset: int, shape: tuple[int, ...], dtype: str) -> None:
        """Another array in the slot, which keeps the memory and is counted from now on."""
        interface = {"data": (self._base + offset, False), "shape": shape, "typestr": dtype, "version": 3}
        self.arrays.append(np.asarray(Owner(interface, self._keeper)))

    @property
    def seen(self) -> bool:
        """Whether anything sees a batch in this slot."""
        for array in self.arrays:  # noqa: SIM110 - a generator would count for itself
            if getrefcount(array) > _ALONE:
                return True
        return False


def _alone() -> int:
    """What ``getrefcount`` says in such a loop of an array that only the list refers to."""
    for array in [np.empty(0)]:
        return getrefcount(array)
    raise AssertionError


_ALONE = _alone()


def _close_here(fd: int, pid: int) -> None:
    """In a forked child the number may be another file's by now."""
    if os.getpid() == pid:
        os.close(fd)


class Ring:
    """The training process's end: makes the memory, takes batches out, gives slots back.

    It belongs to one thread at a time. Batches may be dropped in any: their slots are found and given back later.
    """

    def __init__(self) -> None:
        self.fd = os.memfd_create("cachetool-ring", os.MFD_CLOEXEC)
        """To be handed to the feeder."""
        self._close = weakref.finalize(self, _close_here, self.fd, os.getpid())  # of one that came to nothing too
        self._close.atexit = False  # somebody's handler may still take batches
        os.ftruncate(self.fd, HEAD)
        self._head = Head(self.fd)
        self._library = library(keeps_gil=True)
        for semaphore in (self._head.filled, self._head.free):
            if self._library.sem_init(semaphore, 1, 0):
                raise OSError(ctypes.get_errno(), "sem_init failed")
        self._post, self._trywait = self._library.sem_post, self._library.sem_trywait
        self.ready = 0
        """Batches that can be taken without another look."""
        self.lock: Lock | None = None
        """How slots are locked from the next batch on."""
        self._taken = 0
        self._granted = 0
        self._slots: dict[int, Slot] = {}
        self._live: deque[Slot] = deque()
        watch()
        self._inherited = Inherited(lambda live=self._live: [slot.number for slot in list(live) if slot.seen])  # type: ignore[misc]

    @property
    def batches_in_use(self) -> int:
        """Number of batches that somebody can still see."""
        self._give_back(len(self._live))
        return len(self._live) + len(self._inherited)

    @property
    def many(self) -> bool:
        """Whether it has so many slots that batches may gather in it."""
        return self._head.count[0] >= _MANY

    @property
    def most(self) -> int:
        """How many batches are taken at once, with as many of the other rings: less than half of the slots, so that the
        feeder has some to fill while one batch is seen and the others wait for their turn. Of two slots none are."""
        return min(_LOOKS, (self._head.count[0] - 1) // 2)

    def poll(self) -> bool:
        """Take note of batches that are there, which :attr:`ready` counts; keeps the GIL.

        A few are taken note of at once and as many slots given back: a call of the C library whose code left the cache
        meanwhile takes 20 microseconds.
        """
        live, most = self._live, max(1, self.most)
        if live:
            self._give_back(min(len(live), _LOOKS + 2 * most))
        if (kept := len(live) + len(self._inherited)) != self._granted:
            self._grant(kept)
        while self.ready < most and self._trywait(self._head.filled) == 0:
            self.ready += 1
        return self.ready > 0

    def late(self) -> None:
        """Tell the feeder that the consumer waits for a batch of an epoch that is under way."""
        self._head.count[1] += 1

    def wait(self, seconds: float) -> bool:
        """As :meth:`poll`, waiting without the GIL. May come back early, after a signal."""
        if self.batches_in_use >= self._head.count[0] + self._granted:
            self._grant(self._granted + 1)  # the feeder has no slot left: all of them are looked at here
        if wait(self._head.filled, seconds):
            self.ready += 1
        return self.ready > 0

    def next(self) -> tuple[Slot, int, int, int]:
        """The slot of the next batch, one of those that are ready, with its form, generation and step; the same until
        :meth:`take`."""
        head = self._head
        number, form, generation, step = head.entry.unpack_from(head.queue, 16 * (self._taken % MOST))
        slot = self._slots.get(number)
        if slot is None:
            slot = self._slots[number] = Slot(number)
        return slot, form, generation, step

    def look(self, slot: Slot) -> None:
        """See where the slot lies now; its arrays, which nothing may see any more, are gone."""
        slot.look(self._head, self.lock)

    def take(self, slot: Slot) -> None:
        """The next slot's batch is out: the slot comes back once nobody sees it."""
        self.ready -= 1
        self._taken += 1
        self._live.append(slot)

    def _give_back(self, looks: int) -> None:
        """Find slots that nobody sees any more among so many of those in use, the longest used first."""
        live, inherited = self._live, self._inherited
        for _ in range(looks):
            slot = live[0]
            for array in slot.arrays:  # as Slot.seen
                if getrefcount(array) > _ALONE:
                    live.rotate(-1)
                    break
            else:
                live.popleft()
                if not (inherited.children and inherited.keep(slot.number)):  # another thread may fork at any time
                    self._free(slot.number)
        if inherited.children:
            for number in inherited.ended():  # kept for children that have ended
                self._free(number)

    def _free(self, number: int) -> None:
        self._head.states[number] = IDLE  # before the token, which says that there is one
        self._post(self._head.free)

    def _grant(self, kept: int) -> None:
        """Let the feeder fill as many slots more as are in use here. Raises :class:`UsageError` for thousands."""
        if kept > MOST_KEPT:
            raise UsageError(f"{kept} batches of a loader are kept at once; copy what is to be kept")
        while self._granted < kept:
            self._post(self._head.free)
            self._granted += 1
        while self._granted > kept and self._trywait(self._head.free) == 0:
            self._granted -= 1

    def close(self) -> None:
        """Let go of the descriptor; the memory stays for as long as batches of it are seen."""
        self._inherited.close()
        self.fd = self._head.fd = -1  # its number may be another file's soon
        self._close()


class RingWriter:
    """The feeder's end: one thread of it gets slots, fills them and commits them."""

    def __init__(self, fd: int) -> None:
        self._head = Head(fd)
        self._library = library(keeps_gil=False)
        self._end = -(-HEAD // mmap.PAGESIZE) * mmap.PAGESIZE
        self._slots = 0
        self._committed = 0
        self._regions: dict[int, tuple[int, Bytes]] = {}
        self._huge: dict[int, int] = {}
        """How many bytes of each slot are in huge pages."""
        self._stalled = -1  # how often the consumer had waited when no slot was free, -1 while one always was
        self._starved = -4 * MOST  # batches there were when it last waited after that

    def permit(self, slots: int) -> None:
        """Allow so many slots more."""
        self._head.count[0] += slots
        for _ in range(slots):
            self._library.sem_post(self._head.free)

    def acquire(self, over: Callable[[], bool] = lambda: False) -> int | None:
        """Wait for a slot that nobody sees; None when it is ``over``, which is looked at now and then."""
        while self._library.sem_trywait(self._head.free):
            if self._stalled < 0:
                self._stalled = self._head.count[1]
            if wait(self._head.free, _LOOK):
                break
            if over():
                return None
        if over():
            self._library.sem_post(self._head.free)
            return None
        slot = self._head.states[: self._slots].tobytes().find(IDLE)
        if slot < 0:
            slot = self._slots
            self._slots += 1
            if slot >= MOST:
                raise UsageError("a loader has no slots left: too many of its batches are kept at once")
            self._regions[slot] = 0, np.empty(0, dtype=np.uint8)
        self._head.states[slot] = IN_USE
        return slot

    def starved(self) -> bool:
        """Whether the consumer waited for a batch after no slot was free, for the second time while the slots were
        filled twice: with more slots it would have had one. A wait now and then has other reasons."""
        if not 0 <= self._stalled < self._head.count[1]:
            return False
        since, self._starved = self._committed - self._starved, self._committed
        self._stalled = -1
        return since <= 2 * self._head.count[0]

    def memory(self, slot: int, nbytes: int = 0, *, keep: int = 0) -> Bytes:
        """The slot's memory, made larger to ``nbytes`` when it has less: its first ``keep`` bytes are then copied."""
        start, memory = self._regions[slot]
        if nbytes <= len(memory):
            return memory
        size = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        at = -(-self._end // HUGE) * HUGE if size >= HUGE else self._end
        self._end = at + size
        os.ftruncate(self._head.fd, self._end)
        self._head.table[2 * slot], self._head.table[2 * slot + 1] = at, size
        new = self._head.region(slot)
        self._huge[slot] = 0
        new[1][:keep] = memory[:keep]
        if start:  # nobody looks there any more: the memory goes back
            self._library.fallocate(self._head.fd, _PUNCH, start, len(memory))
        self._regions[slot] = new
        return new[1]

    def fill(self, slot: int, stop: int) -> None:
        """The slot is about to be filled up to ``stop``: as far as it was not before, in huge pages."""
        start, end = self._huge[slot], stop & -HUGE
        if start < end:
            memory = self._regions[slot][1][start:end]
            memory[::HUGE] |= 0  # written as it is: where nothing is, Linux makes none
            huge_pages(memory.ctypes.data, end - start)
            self._huge[slot] = end

    def commit(self, slot: int, form: int = 1, generation: int = 1, step: int = 0) -> None:
        """Hand the slot over. With the ``form`` (1, 2, ...) that it was handed over with before, it has the same arrays
        at the same places, and lies where it lay."""
        self._head.entry.pack_into(self._head.queue, 16 * (self._committed % MOST), slot, form, generation, step)
        self._committed += 1
        self._library.sem_post(self._head.filled)
