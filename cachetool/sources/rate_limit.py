"""A limit on bytes a second, one for all processes of a pull: two numbers in a file that they share.

::

    due = when all that was granted so far will have passed at the rate
    nbytes more may begin at max(due, now), which moves due on by nbytes / rate

So there is no burst after a pause, no share that lies idle with a slow process, and no drift: what was granted up to
any moment is the rate times the time, and at most one object more. The clock is the system's monotonic one, which is
the same in all processes of a machine. The other number is their part of the rate, all of it when the file has none: of
a pull over several nodes whoever knows how many there are writes it (:func:`shared`).
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
    """When ``nbytes`` may begin, and the new ``due``; times in seconds, ``rate`` in bytes a second."""
    begin = max(due, now)
    return begin, begin + nbytes / rate


def shared(share: float) -> tuple[int, bytes]:
    """Where in the file, and as which bytes, it says that a part of the rate, above 0 and up to 1, is theirs."""
    return _DUE.size, _SHARE.pack(share)


class RateLimit:
    """Takes turns on the file ``path``, which is made when it is not there. For any thread; call it with bytes to come.

    ``clock`` and ``sleep`` are those of :mod:`time`.
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
        # Closed with the last reference to this: threads that nobody waits for may be at it when a source is closed.
        self._file = shared_file(path)
        self._lock = threading.Lock()

    def __call__(self, nbytes: int) -> None:
        """Come back when ``nbytes`` may begin."""
        with self._lock:  # the file's lock is between processes alone
            fd = self._file.fileno()
            fcntl.lockf(fd, fcntl.LOCK_EX)
            try:
                now = self._clock()
                raw = os.pread(fd, _DUE.size + _SHARE.size, 0)
                due = _DUE.unpack_from(raw)[0] if raw else now
                share = _SHARE.unpack_from(raw, _DUE.size)[0] if len(raw) > _DUE.size else 1.0
                begin, due = grant(due, now, nbytes, self._rate * share)
                os.pwrite(fd, _DUE.pack(due), 0)
            finally:
                fcntl.lockf(fd, fcntl.LOCK_UN)
        if begin > now:
            self._sleep(begin - now)


def paced(store: Store, pace: RateLimit | None) -> Store:
    """``store``, every request for data of which waits for its turn."""
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
        if item.size < 0:  # known only now
            self._pace(len(body))
        return body

    def get_range(self, item: Object, start: int, length: int) -> memoryview:
        self._pace(length)
        return self._store.get_range(item, start, length)
