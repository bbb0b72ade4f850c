"""Slots whose batches a forked child inherited: they are not filled again before the child ends.

A fork shares the memory of a ring with the child. The child can read a batch that it still refers to at any time, and
the parent cannot see when the child drops that batch.

So at each fork the parent notes which slots hold batches in use, and makes a pipe. The parent keeps the reading end.
The writing end exists only in the child and in the child's own children. When the reading end reports end of file, all
of these processes have ended or have replaced themselves by ``exec``. No pipe is made while no batch is in use.

An iterator may also have batches that it took from the ring and has not handed out yet. The child drops these, because
the parent delivers them.
"""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from collections.abc import Callable, Collection
from typing import Protocol

from cachetool.cache.forking import members
from cachetool.proc.lines import ready

__all__ = ["Inherited", "drop_in_child", "watch"]


class Inherited:
    """The slots of one ring that forked children may read."""

    def __init__(self, slots_seen: Callable[[], Collection[int]]) -> None:
        self._slots_seen = slots_seen
        self.children: list[tuple[int, frozenset[int]]] = []
        """The children that may still live: the reading end of the child's pipe, and the slots it inherited."""
        # Slots that the parent is finished with. The parent gives such a slot back to the feeder
        # only after the last child that inherited it has ended.
        self._kept: set[int] = set()
        _all.add(self)

    def slots_in_use(self) -> frozenset[int]:
        """Return the numbers of the slots that this process reads now or keeps for a child."""
        return frozenset(self._slots_seen()) | self._kept

    def note(self, pipe: int, slots: frozenset[int]) -> None:
        """Note that the child with the other end of ``pipe`` inherited these slots."""
        self.children.append((pipe, slots))

    def keep(self, slot: int) -> bool:
        """Return True if a slot that this process has finished with must be kept for a child."""
        if not any(slot in slots for _, slots in self.children):
            return False
        self._kept.add(slot)
        return True

    def ended(self) -> list[int]:
        """Return the kept slots that no living child reads any more, and forget their children."""
        # A timeout of 0: the training loop calls this while it takes a batch, and must not wait for
        # a child.
        over = ready(0, *(pipe for pipe, _ in self.children))
        for child in [child for child in self.children if child[0] in over]:
            # A signal handler may call close() between the two lines, and then the child is no
            # longer in the list. That call has closed the pipe as well, so it is not closed a
            # second time here.
            with contextlib.suppress(ValueError):
                # The list is changed in place, because another thread may fork at this moment and
                # append a child to it. A new list in its place would lose that child, and the
                # feeder would overwrite batches that the child still reads.
                self.children.remove(child)
                os.close(child[0])
        free = [slot for slot in self._kept if not any(slot in slots for _, slots in self.children)]
        self._kept.difference_update(free)
        return free

    def __len__(self) -> int:
        return len(self._kept)

    def close(self) -> None:
        """Close the pipes of all children, because no slot of this ring will be filled again."""
        while self.children:
            os.close(self.children.pop()[0])


_all: weakref.WeakSet[Inherited] = weakref.WeakSet()
# By thread, because two threads of the training process can fork at the same time.
_forking: dict[int, tuple[int, int, list[tuple[Inherited, frozenset[int]]]]] = {}
"""The forks in progress, by thread id: both ends of the pipe, and the slots that the child inherits."""


def _before() -> None:
    # The pipe is made before the fork, so that the child inherits its writing end. The slots are
    # noted before the fork as well: a batch that is dropped during it may still be seen in the
    # child.
    inherited = [(ring, slots) for ring in members(_all) if (slots := ring.slots_in_use())]
    if inherited:
        _forking[threading.get_ident()] = (*os.pipe(), inherited)


def _in_parent() -> None:
    fork = _forking.pop(threading.get_ident(), None)
    if fork:
        reading, writing, inherited = fork
        # Without this close the parent itself would hold a writing end, and the pipe would never
        # end.
        os.close(writing)
        for ring, slots in inherited:
            # One descriptor for each ring, because each ring closes its own when it sees the end of
            # the child.
            ring.note(os.dup(reading), slots)
        os.close(reading)


class _HasBatches(Protocol):
    def drop(self) -> None: ...


_dropped: weakref.WeakSet[_HasBatches] = weakref.WeakSet()


def drop_in_child(iterator: _HasBatches) -> None:
    """Make a forked child drop the batches that ``iterator`` took from the ring and has not handed out yet."""
    watch()
    _dropped.add(iterator)


def _in_child() -> None:
    # First, because drop() changes only what the iterator holds. Without it the child would hand
    # out batches that the parent hands out as well.
    for iterator in members(_dropped):
        iterator.drop()
    _dropped.clear()
    for thread, (reading, writing, _) in _forking.items():
        # The reading ends belong to the parent, which alone looks at them.
        os.close(reading)
        if thread != threading.get_ident():
            # A fork of another thread was in progress: this end belongs to that thread's child, and
            # a copy here would keep the pipe open after that child has ended. The writing end of
            # this child's own pipe stays open on purpose: the kernel closes it when this process
            # ends or calls exec, and that is what the parent waits for. A child of this child
            # inherits it too, and is waited for as well.
            os.close(writing)
    _forking.clear()
    # The pipes that these rings hold tell the end of other children, which only the parent waits
    # for.
    for ring in members(_all):
        ring.close()
    _all.clear()


def watch() -> None:
    """Register the handlers that note every fork of this process. A second call does nothing."""
    if not _watching:
        _watching.append(True)
        # Once a process: handlers of os.register_at_fork cannot be removed, so each further
        # registration would make one more pipe at each fork.
        os.register_at_fork(before=_before, after_in_parent=_in_parent, after_in_child=_in_child)


_watching: list[bool] = []
