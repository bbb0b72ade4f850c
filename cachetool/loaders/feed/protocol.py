"""The interface of a maker of batches.

Batches are made by child processes (:mod:`~cachetool.loaders.feed.processes`) or by the training process itself
(:mod:`~cachetool.loaders.feed.in_process`).
"""

from __future__ import annotations

from typing import Any, Protocol, TypeAlias

from cachetool.loaders.mixture import Shares
from cachetool.loaders.ring.ring import Lock
from cachetool.loaders.ring.slot import Batch
from cachetool.loaders.settings import Begun
from cachetool.loaders.waits import EpochTimes

__all__ = ["Feed", "Ratios"]

Ratios: TypeAlias = tuple[Shares, Shares]
"""The shares of the datasets of a mixture in an epoch and in the next one; empty without a mixture."""


class Feed(Protocol):
    """A maker of the batches of one epoch after another. One thread at a time uses it."""

    pid: int
    """The pid of the process that the feed belongs to."""
    closed: bool
    """True if the feed was closed, by its owner or by itself after a feeder died."""
    times: EpochTimes
    """The waits of the present epoch."""
    unsure: bool
    """True if :meth:`take` was interrupted; the caller of :meth:`take` sets it.

    Batches may have been taken that were not counted, so no other epoch may begin.
    """

    def begin(self, epoch: int, resume: dict[str, Any] | None = None, ratios: Ratios = ((), ())) -> Begun:
        """Start an epoch on the snapshot that was taken for it, otherwise on the newest, or resume one.

        Wait until there are enough samples.
        """
        ...

    def prepare(self, epoch: int, resume: dict[str, Any] | None = None, ratios: Ratios = ((), ())) -> Begun:
        """Take the snapshot of an epoch now, and return the epoch that :meth:`begin` will start.

        Return the current epoch if it has this number and nothing is resumed.
        """
        ...

    def take(self, generation: int, step: int, most: int) -> list[Batch]:
        """Wait for the batch of ``step``. Return it with the batches behind it that are ready, at most ``most`` in all.

        Steps are taken in order. Raises the error that happened while the batch of ``step`` was made.
        """
        ...

    def refresh(self) -> None:
        """Discard the snapshot that was taken for the next epoch."""
        ...

    def half_delivered(self, generation: int) -> None:
        """Note that half of the batches of the epoch were delivered."""
        ...

    def delivered(self, generation: int, batches: int) -> None:
        """Note that the last of ``batches`` batches of the epoch was delivered."""
        ...

    def ready(self, generation: int, step: int) -> bool:
        """Return True if :meth:`take` would not wait for this step."""
        ...

    def lock_pages(self, lock: Lock | None) -> None:
        """Put the batches of the current epoch into memory that ``lock`` locks, if that memory is shared with feeders.

        The caller makes sure that no device reads a batch to which nothing refers any more.
        """
        ...

    def left(self, generation: int) -> None:
        """Give the snapshot of an epoch up in ``hold`` seconds, because its iterator was deleted before the last batch.

        May be called in the middle of any other call.
        """
        ...

    def regain(self, generation: int) -> bool:
        """Keep the snapshot of an epoch that was :meth:`left`. Return False if it was given up before."""
        ...

    def state(self, generation: int, reached: int) -> dict[str, Any]:
        """Return what :meth:`begin` needs to resume the current epoch after ``reached`` samples of all ranks.

        Raises :class:`UsageError` when another epoch is the current one.
        """
        ...

    def close(self) -> None:
        """Stop. May be called twice; batches that were taken stay valid."""
        ...
