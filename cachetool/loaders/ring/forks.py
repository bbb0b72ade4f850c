"""Batches that a forked child inherited: their slots are not filled again before the child ends.

A fork shares the memory of a ring with the child, in which a batch that is still referred to can be read at any time.
The parent cannot see when the child drops it. So it notes, at each fork, which slots were looked at, and holds the
reading end of a pipe whose other end lives in the child, its own children, and nowhere else: closed means all of them
ended, or became other programs. No pipe is made while no batch is held. What an iterator has
at hand and has not handed out is let go of in the child.
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
    """The slots of one ring that forked children may look at."""

    def __init__(self, slots_seen: Callable[[], Collection[int]]) -> None:
        self._slots_seen = slots_seen
        self.children: list[tuple[int, frozenset[int]]] = []
        """Those that may live: a pipe that ends with each, and its slots."""
        self._kept: set[int] = set()
        _all.add(self)

    def slots_in_use(self) -> frozenset[int]:
        """The slots that this process looks at now, or keeps for a child."""
        return frozenset(self._slots_seen()) | self._kept

    def note(self, pipe: int, slots: frozenset[int]) -> None:
        """A child with the other end of ``pipe`` inherited these slots."""
        self.children.append((pipe, slots))

    def keep(self, slot: int) -> bool:
        """Whether a slot that is not looked at here any more must be kept for a child."""
        if not any(slot in slots for _, slots in self.children):
            return False
        self._kept.add(slot)
        return True

    def ended(self) -> list[int]:
        """The kept slots that no child looks at any more."""
        over = ready(0, *(pipe for pipe, _ in self.children))
        for child in [child for child in self.children if child[0] in over]:
            with contextlib.suppress(ValueError):  # close(), in a signal's handler, was first
                self.children.remove(child)  # in place: another thread may fork and add one
                os.close(child[0])
        free = [slot for slot in self._kept if not any(slot in slots for _, slots in self.children)]
        self._kept.difference_update(free)
        return free

    def __len__(self) -> int:
        return len(self._kept)

    def close(self) -> None:
        """Let go of the pipes: no slot will be filled again."""
        while self.children:
            os.close(self.children.pop()[0])


_all: weakref.WeakSet[Inherited] = weakref.WeakSet()
_forking: dict[int, tuple[int, int, list[tuple[Inherited, frozenset[int]]]]] = {}
"""By the thread that forks, since two may at the same time: its pipe, and what its child will inherit."""


def _before() -> None:
    inherited = [(ring, slots) for ring in members(_all) if (slots := ring.slots_in_use())]
    if inherited:
        _forking[threading.get_ident()] = (*os.pipe(), inherited)


def _in_parent() -> None:
    fork = _forking.pop(threading.get_ident(), None)
    if fork:
        reading, writing, inherited = fork
        os.close(writing)
        for ring, slots in inherited:
            ring.note(os.dup(reading), slots)
        os.close(reading)


class _HasBatches(Protocol):
    def drop(self) -> None: ...


_dropped: weakref.WeakSet[_HasBatches] = weakref.WeakSet()


def drop_in_child(iterator: _HasBatches) -> None:
    """In a forked child this lets go of what it has at hand, which is the parent's to deliver."""
    watch()
    _dropped.add(iterator)


def _in_child() -> None:
    for iterator in members(_dropped):
        iterator.drop()
    _dropped.clear()
    for thread, (reading, writing, _) in _forking.items():
        os.close(reading)
        if thread != threading.get_ident():
            os.close(writing)  # is for another child; its own stays open for as long as this process is what it is
    _forking.clear()
    for ring in members(_all):
        ring.close()
    _all.clear()


def watch() -> None:
    """See to it that forks of this process are noted; once is enough, and more do no harm."""
    if not _watching:
        _watching.append(True)
        os.register_at_fork(before=_before, after_in_parent=_in_parent, after_in_child=_in_child)


_watching: list[bool] = []
