"""Forks of a process with threads: none happens in the middle of another thread's transaction.

SQLite keeps a table of the locks that a process has on a file. A child inherits it with a lock that it does not have
and never gives back, so each of its own transactions waits for that in vain, and lets nobody else in meanwhile. So
whoever forks waits for the other threads first. Our own locks are left to the child as free ones by the modules that
have them.
"""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from typing import Protocol, TypeVar

__all__ = ["forks_wait_for", "members"]

T = TypeVar("T")

_PATIENCE = 10.0
"""Seconds: a transaction takes milliseconds, and now and then as long as the disk needs. A thread that waits for what
only the forking one can give must not stop it for ever."""


class _TakesTurns(Protocol):
    def lock(self) -> threading.RLock: ...


_all: weakref.WeakSet[_TakesTurns] = weakref.WeakSet()
_taken: dict[int, list[threading.RLock]] = {}
"""By the thread that forks, since two may at the same time."""


def members(of: weakref.WeakSet[T]) -> list[T]:
    """Those that are there now, also when another thread adds one just then."""
    while True:
        with contextlib.suppress(RuntimeError):  # it changed its size
            return list(of)


def forks_wait_for(catalog: _TakesTurns) -> None:
    """From now on a fork waits until no other thread has this catalog's turn."""
    _all.add(catalog)


def _before() -> None:
    locks = _taken[threading.get_ident()] = []
    for catalog in members(_all):
        lock = catalog.lock()
        if lock.acquire(timeout=_PATIENCE):
            locks.append(lock)


def _in_parent() -> None:
    for lock in _taken.pop(threading.get_ident(), ()):
        lock.release()


def _in_child() -> None:
    _in_parent()
    _taken.clear()


os.register_at_fork(before=_before, after_in_parent=_in_parent, after_in_child=_in_child)
