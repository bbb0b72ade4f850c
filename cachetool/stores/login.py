"""Credentials of a store, read again when the store refuses them or their end is near.

::

    refused  -> read again: others than those -> the request is made once more with them
                            the same          -> the refusal is final
                            a file half written, or empty -> read once more, for a few seconds
    near its end (where that is told) -> read again before the next request, at most every ten seconds
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from cachetool.core.errors import CacheToolError

__all__ = ["Credentials", "Login"]

RENEWALS = 6
"""Times that one request is made again with other credentials: a program may give new ones each time."""
NEAR = 120.0
"""Seconds before their end from which on credentials are read again."""
EVERY = 10.0
"""Seconds between two readings because the end is near."""
HALF_WRITTEN = 5.0
"""Seconds that a file which cannot be used is given: whoever renews it may be writing it."""
_LOOK = 0.2

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Credentials(Generic[T]):
    """Credentials as they were read at one moment."""

    value: T = field(repr=False)
    """What requests are made with: a client, or a header."""
    identity: object = field(repr=False)
    """Equal for those that are the same; None where there are none."""
    expires: float | None = None
    """When they end, in seconds of :func:`time.time`, where that is known."""


class Login(Generic[T]):
    """The present credentials of one store. Used by many threads."""

    def __init__(self, read: Callable[[], Credentials[T]]) -> None:
        """``read`` reads them from the environment, the files and the programs that it names; its errors are raised
        now, and later count as a file half written."""
        self._read, self._lock = read, threading.Lock()
        self._credentials = read()
        self._next = time.monotonic() + EVERY

    def now(self) -> Credentials[T]:
        """What to make the next request with."""
        near = self._credentials.expires is not None and self._credentials.expires - time.time() < NEAR
        if near and time.monotonic() >= self._next and self._lock.acquire(blocking=False):
            try:
                self._next = time.monotonic() + EVERY
                if (credentials := self._usable()) is not None:
                    self._credentials = credentials
            finally:
                self._lock.release()
        return self._credentials

    def renewed(self, refused: Credentials[T], times: int) -> bool:
        """Whether there are others by now than those that were refused, for a request that was refused ``times``
        times."""
        if times > RENEWALS:
            return False
        if times > 1:  # what was read may not have been whole; or the store does not know it yet
            time.sleep(min(2.0, 0.1 * 2**times))
        with self._lock:
            if self._credentials is not refused:
                return True
            until = time.monotonic() + HALF_WRITTEN
            while (credentials := self._usable()) is None:
                if time.monotonic() > until:
                    return False
                time.sleep(_LOOK)
            if credentials.identity == refused.identity:
                return False
            self._credentials = credentials
            return True

    def _usable(self) -> Credentials[T] | None:
        """What is there now; None for what cannot be used, or where all that there was has gone."""
        try:
            credentials = self._read()
        except CacheToolError:
            return None
        return None if credentials.identity is None and self._credentials.identity is not None else credentials
