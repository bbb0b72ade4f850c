"""Shared memory between one feeder process, which fills slots with batches, and the training process, which reads them.

A slot returns to the feeder by one byte (its state) and one semaphore (``free``), when no array of its batch is in use
any more (:class:`Slot`). When the consumer keeps batches, the feeder may use as many slots more. A token of ``free`` is
the permission to fill one slot: a free slot if one exists, otherwise a new one.

In the training process this module releases the GIL only while it waits for a batch that is not ready.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from sys import getrefcount
from typing import Any, TypeAlias

import numpy as np

from cachetool.core.errors import UsageError
from cachetool.formats.runs import Bytes
from cachetool.loaders.read.arena import HUGE, huge_pages
from cachetool.loaders.ring.forks import Inherited, watch
from cachetool.loaders.ring.memory import HEAD, IDLE, IN_USE, MOST, MOST_KEPT, Head, Owner, library, wait

__all__ = ["Lock", "Ring", "RingWriter", "Slot"]

# FALLOC_FL_KEEP_SIZE | FALLOC_FL_PUNCH_HOLE of linux/falloc.h, which Python has no names for.
_PUNCH = 3
# Seconds between two looks of a feeder that waits for a slot: an epoch may have ended meanwhile,
# and the shards that it maps would still fill the disk.
_LOOK = 0.5
# Slots. A ring with fewer holds large batches, for which the training process waits no time to
# collect several.
_MANY = 8
# Slots in use that are looked at when a batch is taken. Not all of them: a consumer may keep
# thousands of batches, and looking at each would make taking a batch slower and slower.
_LOOKS = 16

Lock: TypeAlias = Callable[[memoryview], object]
"""A function that locks memory in place, for a device that reads it directly. Its result keeps memory and lock
alive."""


class Slot:
    """One slot in the training process: where its memory lies, and the arrays of the batch in it.

    The arrays are made once and serve all following batches of the same form. A consumer gets views of them. Everything
    that a consumer makes of a view (another view, a tensor, an exchanged or mapped copy) refers to the array. So a slot
    is in use as long as anything but the slot itself refers to one of its arrays. The reference count tells this; no
    callback does.
    """

    __slots__ = ("_base", "_keeper", "_start", "arrays", "columns", "form", "lock", "memory", "number", "numbers")

    def __init__(self, number: int) -> None:
        self.number = number
        # A consumer that had the array itself would be counted as a reference, but the slot's list
        # and the consumer could then not be told apart: only views make the count exact.
        self.arrays: list[np.ndarray[Any, Any]] = []
        """The arrays of the batch. Hand out views of them only."""
        self.form = 0
        """The number of the form that the arrays have, given by the feeder; 0 if there are no arrays."""
        self.columns: Any = None
        """The description of the arrays that the reader made of the head of the slot."""
        self.lock: Lock | None = None
        """The function that locked the memory of this slot, or None."""
        self._start = -1

    def look(self, head: Head, lock: Lock | None = None) -> None:
        """Drop the slot's arrays, and map the slot again if the feeder has moved it to make it larger.

        The caller makes sure that nothing refers to the arrays. So this is also the moment to lock or to unlock the
        memory.
        """
        self.form = 0
        self.arrays.clear()
        # A feeder never changes a slot in place: a larger slot lies at a new position of the memfd.
        moved = head.table[2 * self.number] != self._start
        if moved:
            self._start, region = head.region(self.number)
            self._base = int(region.ctypes.data)
            self.memory = region.data
            """The bytes of the slot. Do not read them after the slot was given back."""
            self.numbers = self.memory[: len(region) // 8 * 8].cast("q")
            """The same bytes as int64."""
        if moved or lock is not self.lock:
            # The old lock is dropped before the new one is made, because a range of memory that is
            # locked twice is an error of the device's driver.
            self.lock, self._keeper = lock, None
            self._keeper = self.memory if lock is None else lock(self.memory)

    def array(self, offset: int, shape: tuple[int, ...], dtype: str) -> None:
        """Add an array in the slot. The array keeps the memory mapped, and its references count from now on."""
        interface = {"data": (self._base + offset, False), "shape": shape, "typestr": dtype, "version": 3}
        self.arrays.append(np.asarray(Owner(interface, self._keeper)))

    @property
    def seen(self) -> bool:
        """Return True if anything refers to an array of this slot."""
        # A plain loop: a generator expression would hold one more reference while the count is
        # read.
        for array in self.arrays:  # noqa: SIM110
            if getrefcount(array) > _ALONE:
                return True
        return False


def _alone() -> int:
    """Return what ``getrefcount`` says, in a loop like that of ``Slot.seen``, of an array that only a list refers
    to."""
    # Measured here, because the number of references that a loop and a call add depends on the
    # version of Python.
    for array in [np.empty(0)]:
        return getrefcount(array)
    raise AssertionError


_ALONE = _alone()


def _close_here(fd: int, pid: int) -> None:
    """Close a descriptor, unless this is a forked child of the process ``pid``."""
    # In a forked child the finalizer runs too. There the number may belong to another file by now,
    # which would be closed in its place.
    if os.getpid() == pid:
        os.close(fd)


class Ring:
    """The end of a ring in the training process: makes the memory, takes batches, gives slots back.

    A ring is used by one thread at a time. Batches may be dropped in any thread: their slots are found later, when this
    thread looks at them.
    """

    def __init__(self) -> None:
        self.fd = os.memfd_create("cachetool-ring", os.MFD_CLOEXEC)
        """The descriptor of the memfd, which the feeder inherits."""
        # Before anything that can fail, so that the descriptor is closed even if the ring is not
        # completed.
        self._close = weakref.finalize(self, _close_here, self.fd, os.getpid())
        # Not at the end of the interpreter: an exit handler of the user's program may still take
        # batches.
        self._close.atexit = False
        os.ftruncate(self.fd, HEAD)
        self._head = Head(self.fd)
        self._library = library(keeps_gil=True)
        for semaphore in (self._head.filled, self._head.free):
            # The second argument makes the semaphore work between processes, not only between
            # threads.
            if self._library.sem_init(semaphore, 1, 0):
                raise OSError(ctypes.get_errno(), "sem_init failed")
        self._post, self._trywait = self._library.sem_post, self._library.sem_trywait
        self.ready = 0
        """The number of batches that can be taken without looking at the semaphore again."""
        self.lock: Lock | None = None
        """The function that locks slots from the next batch on, or None."""
        self._taken = 0
        self._granted = 0
        self._slots: dict[int, Slot] = {}
        self._live: deque[Slot] = deque()
        watch()
        # The list is copied first, because a fork in another thread calls this while batches are
        # taken.
        self._inherited = Inherited(lambda live=self._live: [slot.number for slot in list(live) if slot.seen])  # type: ignore[misc]

    @property
    def batches_in_use(self) -> int:
        """Number of batches that something still refers to, in this process or in a forked child."""
        self._give_back(len(self._live))
        return len(self._live) + len(self._inherited)

    @property
    def many(self) -> bool:
        """Return True if the ring has so many slots that the consumer may let batches collect in it."""
        return self._head.count[0] >= _MANY

    @property
    def most(self) -> int:
        """Maximum number of batches that are taken at once.

        Less than half of the slots, so that the feeder has slots to fill while one batch is in use and the others wait
        to be handed out. With two slots the result is 0.
        """
        return min(_LOOKS, (self._head.count[0] - 1) // 2)

    def poll(self) -> bool:
        """Count the batches that are ready in :attr:`ready`, without waiting and without releasing the GIL. Return True
        if any is."""
        # Several batches are counted, and several slots given back, in one call: a call into the C
        # library takes 20 us when its code has left the processor's caches since the last one.
        live, most = self._live, max(1, self.most)
        if live:
            self._give_back(min(len(live), _LOOKS + 2 * most))
        # A kept batch occupies a slot for as long as the consumer likes. Without another slot in
        # its place the feeder would run out of them, and training would wait for ever.
        if (kept := len(live) + len(self._inherited)) != self._granted:
            self._grant(kept)
        while self.ready < most and self._trywait(self._head.filled) == 0:
            self.ready += 1
        return self.ready > 0

    def spent(self) -> tuple[int, ...]:
        """Return what the feeder had spent on each step when it filled its last slot, in nanoseconds."""
        sums: tuple[int, ...] = self._head.sums.unpack_from(self._head.spent)
        return sums

    def filled(self) -> int:
        """Return the time at which the next ready slot was filled, in nanoseconds of the monotonic clock."""
        return self._head.ready[self._taken % MOST]

    def late(self) -> None:
        """Tell the feeder that the consumer waits for a batch in the middle of an epoch."""
        self._head.count[1] += 1

    def wait(self, seconds: float) -> bool:
        """Do the same as :meth:`poll`, but wait up to ``seconds`` without the GIL. A signal may end the wait early."""
        if self.batches_in_use >= self._head.count[0] + self._granted:
            # All slots of the feeder hold batches that are in use here. It cannot make the batch
            # that this process is about to wait for, unless it gets one more slot.
            self._grant(self._granted + 1)
        if wait(self._head.filled, seconds):
            self.ready += 1
        return self.ready > 0

    def next(self) -> tuple[Slot, int, int, int]:
        """Return the slot of the next ready batch, with its form, generation and step. :meth:`take` moves on to the
        next one."""
        head = self._head
        number, form, generation, step = head.entry.unpack_from(head.queue, 16 * (self._taken % MOST))
        slot = self._slots.get(number)
        if slot is None:
            slot = self._slots[number] = Slot(number)
        return slot, form, generation, step

    def look(self, slot: Slot) -> None:
        """Map the slot where it lies now, and drop its arrays, which nothing may refer to any more."""
        slot.look(self._head, self.lock)

    def take(self, slot: Slot) -> None:
        """Remove the next batch from the queue. Its slot is given back when nothing refers to the batch any more."""
        self.ready -= 1
        self._taken += 1
        self._live.append(slot)

    def _give_back(self, looks: int) -> None:
        """Look at ``looks`` of the slots in use, the oldest first, and give back those that nothing refers to."""
        live, inherited = self._live, self._inherited
        for _ in range(looks):
            slot = live[0]
            # The loop of Slot.seen, written out: this runs with each batch that training takes,
            # from cold processor caches, where every call counts.
            for array in slot.arrays:
                if getrefcount(array) > _ALONE:
                    # To the end of the line: the batch is still in use, and the next look shall
                    # begin with another slot.
                    live.rotate(-1)
                    break
            else:
                live.popleft()
                # The children are asked for each slot anew, because another thread may fork at any
                # time. A slot that was given back in spite of a new child would be overwritten
                # while that child reads it.
                if not (inherited.children and inherited.keep(slot.number)):
                    self._free(slot.number)
        if inherited.children:
            # These slots were kept for children that have ended since, so the feeder may fill them
            # now.
            for number in inherited.ended():
                self._free(number)

    def _free(self, number: int) -> None:
        # The state before the token: the feeder looks for an idle slot as soon as it has the token,
        # and would make a new slot if it found none.
        self._head.states[number] = IDLE
        self._post(self._head.free)

    def _grant(self, kept: int) -> None:
        """Let the feeder use one more slot for each batch that is kept here. Raises :class:`UsageError` for thousands
        of batches."""
        if kept > MOST_KEPT:
            raise UsageError(f"{kept} batches of a loader are kept at the same time; keep copies instead")
        while self._granted < kept:
            self._post(self._head.free)
            self._granted += 1
        # Tokens are taken back only if the feeder has not used them yet: a slot that exists stays.
        while self._granted > kept and self._trywait(self._head.free) == 0:
            self._granted -= 1

    def close(self) -> None:
        """Close the descriptor. The memory stays mapped as long as something refers to a batch."""
        self._inherited.close()
        # The number may belong to another file soon. A later call on the old number would change
        # that file.
        self.fd = self._head.fd = -1
        self._close()


class RingWriter:
    """The end of a ring in a feeder: one thread gets slots, fills them and commits them."""

    def __init__(self, fd: int) -> None:
        self._head = Head(fd)
        self._library = library(keeps_gil=False)
        self._end = -(-HEAD // mmap.PAGESIZE) * mmap.PAGESIZE
        self._slots = 0
        self._committed = 0
        self._regions: dict[int, tuple[int, Bytes]] = {}
        self._huge: dict[int, int] = {}
        """The number of bytes at the beginning of each slot that are in huge pages."""
        self._stalled = -1
        """The consumer's count of waits at the moment when no slot was free; -1 while one was always free."""
        # The number of committed batches when the consumer last waited after such a moment. Far
        # below zero at first, so that the first wait never counts as the second one.
        self._starved = -4 * MOST

    def permit(self, slots: int) -> None:
        """Allow this feeder ``slots`` slots more."""
        self._head.count[0] += slots
        for _ in range(slots):
            self._library.sem_post(self._head.free)

    def acquire(self, over: Callable[[], bool] = lambda: False) -> int | None:
        """Wait for a slot that is free. Return its number, or None when ``over()`` is true, which is called twice a
        second."""
        # Without waiting first: the call that may wait costs several times as much.
        while self._library.sem_trywait(self._head.free):
            if self._stalled < 0:
                self._stalled = self._head.count[1]
            if wait(self._head.free, _LOOK):
                break
            if over():
                return None
        # The token goes back, because the caller takes no slot. The next plan would miss it for
        # ever.
        if over():
            self._library.sem_post(self._head.free)
            return None
        slot = self._head.states[: self._slots].tobytes().find(IDLE)
        if slot < 0:
            slot = self._slots
            self._slots += 1
            if slot >= MOST:
                raise UsageError("too many batches of a loader are kept at the same time; keep copies instead")
            self._regions[slot] = 0, np.empty(0, dtype=np.uint8)
        self._head.states[slot] = IN_USE
        return slot

    def starved(self) -> bool:
        """Return True if more slots would have spared the consumer a wait.

        The consumer must have waited for a batch after all slots were filled, for the second time within two rounds of
        slots.
        """
        # A single wait has other reasons, such as a consumer that takes its batches in bursts. If
        # the first wait counted, a steady consumer would end with 384 MiB of slots, four times what
        # it needs.
        if not 0 <= self._stalled < self._head.count[1]:
            return False
        since, self._starved = self._committed - self._starved, self._committed
        self._stalled = -1
        return since <= 2 * self._head.count[0]

    def memory(self, slot: int, nbytes: int = 0, *, keep: int = 0) -> Bytes:
        """Return the memory of a slot, after making it at least ``nbytes`` large and copying its first ``keep`` bytes
        if it grew."""
        start, memory = self._regions[slot]
        if nbytes <= len(memory):
            return memory
        size = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        # At a multiple of 2 MiB if the slot can have a huge page at all; smaller slots follow each
        # other.
        at = -(-self._end // HUGE) * HUGE if size >= HUGE else self._end
        self._end = at + size
        os.ftruncate(self._head.fd, self._end)
        # The place is in the table before the batch is in the queue, so the training process, which
        # reads the table when it finds a new form, maps the new place.
        self._head.table[2 * slot], self._head.table[2 * slot + 1] = at, size
        new = self._head.region(slot)
        self._huge[slot] = 0
        new[1][:keep] = memory[:keep]
        # The training process gave this slot back, so nothing maps the old place for reading.
        # Without the hole the memfd would keep the old and the new memory of every slot that grew.
        if start:
            self._library.fallocate(self._head.fd, _PUNCH, start, len(memory))
        self._regions[slot] = new
        return new[1]

    def fill(self, slot: int, stop: int) -> None:
        """Prepare the slot for being filled up to byte ``stop``: put what is new of that range into huge pages."""
        start, end = self._huge[slot], stop & -HUGE
        # A look at one byte of each page of 8 MiB takes 52 us with huge pages, and 110 us without.
        if start < end:
            memory = self._regions[slot][1][start:end]
            # MADV_COLLAPSE needs at least one page that exists in each 2 MiB. The bytes are written
            # with their own value, because the slot may hold the beginning of a batch already.
            memory[::HUGE] |= 0
            huge_pages(memory.ctypes.data, end - start)
            self._huge[slot] = end

    def commit(
        self, slot: int, form: int = 1, generation: int = 1, step: int = 0, *, spent: Sequence[int] = ()
    ) -> None:
        """Hand the slot over to the training process. ``spent`` are the sums of :class:`BatchTimes`.

        ``form`` is a number from 1 on. A slot that is handed over twice with the same form has the same arrays at the
        same places, and was not moved in between.
        """
        # The entry before the token of the semaphore, which says that the entry is complete.
        number, head = self._committed % MOST, self._head
        head.entry.pack_into(head.queue, 16 * number, slot, form, generation, step)
        if spent:
            head.sums.pack_into(head.spent, 0, *spent)
        head.ready[number] = time.monotonic_ns()
        self._committed += 1
        self._library.sem_post(self._head.filled)
