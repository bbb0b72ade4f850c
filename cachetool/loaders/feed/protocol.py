"""What makes the batches of a loader: child processes (:mod:`~cachetool.loaders.feed.processes`), or this process by
itself (:mod:`~cachetool.loaders.feed.in_process`).

How an epoch goes for the process that trains: counted where it waits, and told when the epoch ends.

Nothing is counted for a batch that is ready when it is asked for: that way stays as short as it is.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from cachetool.cache.history import Delivered
from cachetool.loaders.ring.ring import Lock
from cachetool.loaders.ring.slot import Batch
from cachetool.loaders.settings import Begun

__all__ = ["Feed", "EpochTimes"]


class Feed(Protocol):
    """Makes the batches of one epoch after another. Belongs to one thread at a time."""

    pid: int
    """Of the process that it belongs to."""
    closed: bool
    """Whether it was closed, by itself too when a feeder died."""
    unsure: bool
    """Whether :meth:`take` was interrupted, as whoever calls it notes: batches may have been taken out that were not
    counted, so no other epoch may begin."""

    def begin(self, epoch: int, resume: dict[str, Any] | None = None) -> Begun:
        """Start an epoch on the snapshot taken for it, else on the newest, or take one up again; waits until there is
        enough to train on."""
        ...

    def prepare(self, epoch: int, resume: dict[str, Any] | None = None) -> Begun:
        """What :meth:`begin` then starts; the present epoch if it is this one and nothing is resumed."""
        ...

    def take(self, generation: int, step: int, most: int) -> list[Batch]:
        """The batches of this step, which is waited for, and of those behind it that are there, ``most`` at most.

        Steps are taken in order. Raises what happened while the batch of ``step`` was made.
        """
        ...

    def refresh(self) -> None:
        """Discard the snapshot that was taken for the next epoch."""
        ...

    def half_delivered(self, generation: int) -> None:
        """Half of the batches of the epoch were delivered."""
        ...

    def delivered(self, generation: int, batches: int) -> None:
        """The last of so many batches of the epoch was delivered."""
        ...

    def ready(self, generation: int, step: int) -> bool:
        """Whether :meth:`take` would not wait for this step."""
        ...

    def lock_pages(self, lock: Lock | None) -> None:
        """Let batches of the present epoch lie in memory that is locked so, if it is shared with feeders. They are for
        whoever sees to it that no device reads a batch that nothing sees any more."""
        ...

    def left(self, generation: int) -> None:
        """Nobody has the iterator of this epoch any more, which was not delivered whole: its snapshot is given up
        ``hold`` seconds from now. May be called in the middle of any other call."""
        ...

    def regain(self, generation: int) -> bool:
        """Keep the snapshot of an epoch that was :meth:`left`; return False if it was given up before."""
        ...

    def state(self, generation: int, reached: int) -> dict[str, Any]:
        """What :meth:`begin` needs to take the present epoch up after ``reached`` samples of all ranks. Raises
        :class:`UsageError` when another one is the present one."""
        ...

    def close(self) -> None:
        """Stop. May be called twice; batches already taken stay as they are."""
        ...


class EpochTimes:
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
