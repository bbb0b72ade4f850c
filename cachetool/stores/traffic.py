"""Counters of this process's use of stores, for progress reports: requests in flight, bytes received, repeated
requests.

Requests are counted where they are made, at the cost of two operations on a set. obstore repeats requests by itself and
reports none of these repeats, so the retries of object stores are missing here.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["arrived", "arrivals", "flying", "in_flight", "paused", "retried", "retries", "throttled"]

# A set without a lock: add() and discard() are atomic in CPython, and every request of every thread makes both calls.
_threads: set[int] = set()
"""Identifiers of the threads that are at a request now."""
_retries = 0
_arrived = 0
_throttled = 0.0
# `+=` on the counters is a read and a write, between which another thread may run; so both counters need the lock.
_lock = threading.Lock()


@contextmanager
def flying() -> Iterator[None]:
    """Count this thread as busy for one request, or for several that it makes one after another."""
    me = threading.get_ident()
    _threads.add(me)
    try:
        yield
    finally:
        _threads.discard(me)


def in_flight() -> int:
    """Return the number of threads that are at a request."""
    return len(_threads)


def arrived(nbytes: int) -> None:
    """Count an answer of about ``nbytes`` bytes."""
    global _arrived
    with _lock:
        _arrived += nbytes


def arrivals() -> int:
    """Return about how many bytes arrived since this process began."""
    return _arrived


def retried() -> None:
    """Count a request that is sent again."""
    global _retries
    with _lock:
        _retries += 1


def retries() -> int:
    """Return how many requests were sent again since this process began."""
    return _retries


def paused(seconds: float) -> None:
    """Count a pause that a store asked for because it is too busy."""
    global _throttled
    with _lock:
        _throttled += seconds


def throttled() -> float:
    """Return the seconds of such pauses since this process began, of all threads together."""
    return _throttled
