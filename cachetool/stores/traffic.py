"""How busy this process is with stores, for whoever shows progress: requests in flight, bytes that came, and requests
that were sent again.

Counted where a request is made, at the cost of two operations on a set. obstore sends requests again by itself and
tells nobody: of object stores there are no retries here.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["arrived", "arrivals", "flying", "in_flight", "retried", "retries"]

_threads: set[int] = set()
"""Those that are at a request now; adding and discarding are atomic."""
_retries = 0
_arrived = 0
_lock = threading.Lock()


@contextmanager
def flying() -> Iterator[None]:
    """Around one request, or several that one thread makes one after another."""
    me = threading.get_ident()
    _threads.add(me)
    try:
        yield
    finally:
        _threads.discard(me)


def in_flight() -> int:
    """How many threads are at a request."""
    return len(_threads)


def arrived(nbytes: int) -> None:
    """A request was answered, with about so many bytes."""
    global _arrived
    with _lock:
        _arrived += nbytes


def arrivals() -> int:
    """About how many bytes came since this process began."""
    return _arrived


def retried() -> None:
    """A request is sent again."""
    global _retries
    with _lock:
        _retries += 1


def retries() -> int:
    """How many requests were sent again since this process began."""
    return _retries
