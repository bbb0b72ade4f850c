"""Forks of a process with threads: a fork waits until no other thread is inside a transaction.

SQLite keeps a table of the locks that a process has on a file. A forked child inherits this table with a lock that the
child does not have and never gives back. Each transaction of the child then waits in vain for that lock, and keeps
other processes out meanwhile. So the forking thread waits for the other threads first. The modules that own our own
locks reset them in the child.
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
"""Seconds that a fork waits at most. A transaction takes milliseconds, and sometimes as long as the disk needs. The
bound exists because the other thread may itself wait for something that only the forking thread can do."""


class _TakesTurns(Protocol):
    def lock(self) -> threading.RLock: ...


_all: weakref.WeakSet[_TakesTurns] = weakref.WeakSet()
_taken: dict[int, list[threading.RLock]] = {}
"""The locks taken before a fork, by the id of the thread that forks: two threads may fork at the same time."""


def members(of: weakref.WeakSet[T]) -> list[T]:
    """Return the present members of a weak set."""
    while True:
        # Another thread may add a member during the copy ("set changed size during iteration");
        # then copy again.
        with contextlib.suppress(RuntimeError):
            return list(of)


def forks_wait_for(catalog: _TakesTurns) -> None:
    """Let every fork wait until no other thread is inside a transaction of this catalog."""
    _all.add(catalog)


def _before() -> None:
    locks = _taken[threading.get_ident()] = []
    for catalog in members(_all):
        lock = catalog.lock()
        # After the timeout the fork continues without the lock: a fork that never returns is worse
        # than a child that may not reach the cache.
        if lock.acquire(timeout=_PATIENCE):
            locks.append(lock)


def _in_parent() -> None:
    for lock in _taken.pop(threading.get_ident(), ()):
        lock.release()


def _in_child() -> None:
    # The lock is an RLock, and the child's only thread has the id of the thread that took it, so
    # the child can release it.
    _in_parent()
    # Locks that other threads took for their own forks belong to threads that do not exist in the
    # child.
    _taken.clear()


# Also covers forks by `multiprocessing` and by a DataLoader's workers, but not forks of C code.
os.register_at_fork(before=_before, after_in_parent=_in_parent, after_in_child=_in_child)
