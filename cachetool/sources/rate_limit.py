"""A limit on bytes per second for all processes of a pull together: two numbers in a file that they share.

::

    due = the time when all bytes granted so far will have passed at the rate
    nbytes more may begin at max(due, now), which moves due on by nbytes / rate

A pause causes no burst afterwards, a slow process blocks no share of the rate, and errors do not add up. The bytes
granted up to any moment are at most rate times time, plus one object. The clock is the system's monotonic clock, which
all processes of a machine share.

The second number is the share of the rate that these processes may use; without it they use all of it. In a pull over
several nodes the process that knows the number of nodes writes it (:func:`shared`).
"""

from __future__ import annotations

import fcntl
import os
import struct
import threading
import time
from collections.abc import Callable
from pathlib import Path

from cachetool.proc.folders import shared_file
from cachetool.stores import Object, Store
from cachetool.stores.base import StoreAround

__all__ = ["RateLimit", "grant", "paced", "shared"]

_DUE = struct.Struct("<d")
_SHARE = struct.Struct("<d")


def grant(due: float, now: float, nbytes: int, rate: float) -> tuple[float, float]:
    """Return when ``nbytes`` may begin, and the new ``due``. Times are in seconds, ``rate`` is in bytes per second."""
    begin = max(due, now)
    return begin, begin + nbytes / rate


def shared(share: float) -> tuple[int, bytes]:
    """Return the position in the file, and the bytes to write there, for a share of the rate (above 0, at most 1)."""
    return _DUE.size, _SHARE.pack(share)


class RateLimit:
    """A limit shared through the file ``path``, which is created if missing. Any thread may call it with the bytes to
    come.

    ``clock`` and ``sleep`` default to those of :mod:`time`.
    """

    def __init__(
        self,
        path: Path,
        rate: float,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._rate, self._clock, self._sleep = rate, clock, sleep
        # No close(): threads that nobody waits for may still use the file when a source is closed. It is closed with
        # the last reference to this object.
        self._file = shared_file(path)
        self._lock = threading.Lock()

    def __call__(self, nbytes: int) -> None:
        """Wait until ``nbytes`` may begin."""
        # lockf locks between processes only, so threads of this process need a lock of their own.
        with self._lock:
            fd = self._file.fileno()
            fcntl.lockf(fd, fcntl.LOCK_EX)
            try:
                now = self._clock()
                raw = os.pread(fd, _DUE.size + _SHARE.size, 0)
                # The first process finds an empty file.
                due = _DUE.unpack_from(raw)[0] if raw else now
                share = _SHARE.unpack_from(raw, _DUE.size)[0] if len(raw) > _DUE.size else 1.0
                begin, due = grant(due, now, nbytes, self._rate * share)
                os.pwrite(fd, _DUE.pack(due), 0)
            finally:
                fcntl.lockf(fd, fcntl.LOCK_UN)
        if begin > now:
            # Outside of both locks: others reserve their own times meanwhile.
            self._sleep(begin - now)


def paced(store: Store, pace: RateLimit | None) -> Store:
    """Return ``store`` with every request for data limited by ``pace``."""
    return store if pace is None else _PacedStore(store, pace)


class _PacedStore(StoreAround):
    """A store behind a limit. Listing is not limited."""

    def __init__(self, store: Store, pace: RateLimit) -> None:
        super().__init__(store)
        self._pace = pace

    def get(self, item: Object) -> memoryview:
        if item.size > 0:
            self._pace(item.size)
        body = self._store.get(item)
        # The listing told no size, so the bytes are counted after they arrived; the next request waits for them.
        if item.size < 0:
            self._pace(len(body))
        return body

    def get_range(self, item: Object, start: int, length: int) -> memoryview:
        self._pace(length)
        return self._store.get_range(item, start, length)
