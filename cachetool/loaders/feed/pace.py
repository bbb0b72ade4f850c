"""How an epoch goes for the process that trains: counted where it waits, and told when the epoch ends.

Nothing is counted for a batch that is ready when it is asked for: that way stays as short as it is.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from cachetool.cache.history import Delivered

__all__ = ["Pace"]


class Pace:
    """The waits of one epoch, from the moment in which it is asked for."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._waits = 0
        self._waited = 0.0

    def begun(self) -> None:
        """The epoch can begin: what passed until now was waited for."""
        self._waited = time.monotonic() - self._began

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """While a batch is waited for."""
        began = time.monotonic()
        try:
            yield
        finally:
            self._waits += 1
            self._waited += time.monotonic() - began

    def delivered(self, batches: int) -> Delivered:
        """How it went, now that the last batch is out."""
        return Delivered(time.monotonic() - self._began, batches, self._waits, self._waited)
