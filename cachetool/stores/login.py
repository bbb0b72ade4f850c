"""Credentials of a store, read again when the store refuses them or when they are about to expire.

::

    refused          read again:  other credentials             -> repeat the request with them
                                  the same credentials          -> the refusal is final
                                  a half-written or empty file  -> read again for a few seconds
    about to expire  (if the end is known) read again before the next request, at most every ten seconds
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from cachetool.core.errors import CacheToolError

__all__ = ["Credentials", "Login"]

# A program (`credential_process`) may print new keys at each call, and the store may refuse all of them. Without a
# limit the request would be repeated for ever.
RENEWALS = 6
"""Most repeats of one request with other credentials."""
NEAR = 120.0
"""Seconds before their end at which credentials are read again."""
EVERY = 10.0
"""Seconds between two readings of credentials that are about to expire."""
# The process that renews the credentials may be writing the file at this moment, so an empty or cut file is no final
# answer.
HALF_WRITTEN = 5.0
"""Seconds that are granted to a credentials file which cannot be used."""
_LOOK = 0.2

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Credentials(Generic[T]):
    """Credentials as they were read at one moment."""

    # Left out of repr(): a traceback or log line that shows the object must not show a secret.
    value: T = field(repr=False)
    """The value that requests need: a client, or a header."""
    identity: object = field(repr=False)
    """A value that is equal for equal credentials; None if there are no credentials."""
    expires: float | None = None
    """The time at which they expire, in seconds of :func:`time.time`; None if unknown."""


class Login(Generic[T]):
    """The present credentials of one store. Used by many threads.

    ``read`` reads them from the environment, from files, and from the programs that these name. The constructor calls
    it and raises its errors. Later the same errors count as a half-written file.
    """

    def __init__(self, read: Callable[[], Credentials[T]]) -> None:
        self._read, self._lock = read, threading.Lock()
        self._credentials = read()
        # Keys whose stated end is long past (a wrong clock) may still be valid. Without this pause the file or program
        # would be read again at each request.
        self._next = time.monotonic() + EVERY

    def now(self) -> Credentials[T]:
        """Return the credentials for the next request; read them again first if they are about to expire."""
        near = self._credentials.expires is not None and self._credentials.expires - time.time() < NEAR
        # Not blocking: one thread reads the credentials again, while the other threads continue with the old ones and
        # do not wait.
        if near and time.monotonic() >= self._next and self._lock.acquire(blocking=False):
            try:
                self._next = time.monotonic() + EVERY
                if (credentials := self._usable()) is not None:
                    self._credentials = credentials
            finally:
                self._lock.release()
        return self._credentials

    def renewed(self, refused: Credentials[T], times: int) -> bool:
        """Return True if other credentials than the ``refused`` ones are present now, so that the request may be
        repeated.

        ``times`` is how often this request was refused so far.
        """
        if times > RENEWALS:
            return False
        # The second refusal in a row: the file may have been read half-written, or the store may not know the new keys
        # yet. So the pauses grow, up to 2 s.
        if times > 1:
            time.sleep(min(2.0, 0.1 * 2**times))
        with self._lock:
            # Another thread has read new credentials since this request was sent. Reading once more would run the
            # credential program once for each thread.
            if self._credentials is not refused:
                return True
            until = time.monotonic() + HALF_WRITTEN
            while (credentials := self._usable()) is None:
                if time.monotonic() > until:
                    return False
                time.sleep(_LOOK)
            # The same keys again: the refusal is the store's last word, and repeating the request would only hide it.
            if credentials.identity == refused.identity:
                return False
            self._credentials = credentials
            return True

    def _usable(self) -> Credentials[T] | None:
        """Return the credentials present now; None if they cannot be used, or if all credentials have disappeared."""
        try:
            credentials = self._read()
        except CacheToolError:
            return None
        # A file that had credentials and has none now is probably being rewritten. Taken at its word, the next request
        # would go out unsigned.
        return None if credentials.identity is None and self._credentials.identity is not None else credentials
