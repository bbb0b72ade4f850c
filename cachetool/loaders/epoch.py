"""One pass of a loader over a snapshot: batches taken out of the feed a few at once and handed out one by one."""

from __future__ import annotations

import contextlib
import os
import weakref
from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from cachetool.errors import CacheToolError, UsageError
from cachetool.loaders.feed import Feed
from cachetool.loaders.plan import Begun
from cachetool.loaders.slot import Batch

if TYPE_CHECKING:
    from cachetool.loaders.base import BaseLoader

__all__ = ["Epoch", "Progress"]

T = TypeVar("T")


class Progress:
    """How far an epoch is; the loader knows it when the iterator is gone."""

    __slots__ = ("before", "begun", "failed", "feed", "step", "steps")

    def __init__(self, feed: Feed, begun: Begun, steps: int, before: int) -> None:
        self.feed, self.begun = feed, begun
        self.steps, self.before = steps, before
        """Batches in all, and those of it that were delivered before it was resumed."""
        self.step = 0
        """Batches delivered."""
        self.failed = False
        """Whether an error ended it."""

    @property
    def ended(self) -> bool:
        """Whether the last batch was delivered."""
        return self.step >= self.steps

    @property
    def left(self) -> bool:
        """Whether the loop was left in the middle of it."""
        return 0 < self.step < self.steps and not self.failed

    def resume(self) -> dict[str, Any]:
        """What it takes to go on from here. Raises :class:`UsageError` when the feeders ended."""
        if self.feed.closed or self.feed.pid != os.getpid():
            raise UsageError(
                f"the loader was closed, or its feeders ended, after {self.step} of {self.steps} batches of epoch"
                f" {self.begun.epoch}; call state_dict() before that, in the process that iterates"
            )
        return self.feed.state(self.begun.generation, self.begun.steps.reached(self.step))


class Epoch(Iterator[T]):
    """One epoch of a loader."""

    def __init__(self, loader: BaseLoader[T], progress: Progress) -> None:
        self._loader, self.progress = loader, progress
        self._feed, self._steps = progress.feed, progress.steps
        self._generation = progress.begun.generation
        self._left = weakref.finalize(self, progress.feed.left, self._generation)
        self._left.atexit = False
        self._finalizer: weakref.finalize[Any, Any] | None = None
        self._ready: deque[T] = deque()
        self._fetched = 0
        self.replaced = False
        self.over = False
        """Whether it was asked for more than it had."""

    @property
    def all_fetched(self) -> bool:
        """Whether nothing is left to fetch."""
        return self._fetched >= self._steps

    def __next__(self) -> T:
        batch = self.fetch()
        self.count()
        return batch

    def fetch(self) -> T:
        """The next batch, for whoever calls :meth:`count` once it is delivered. Raises ``StopIteration`` at the end."""
        if not self._ready or self._feed.pid != os.getpid():  # what is ready after a fork is the parent's to deliver
            self._refill()
        self._fetched += 1
        return self._ready.popleft()

    def _refill(self) -> None:
        """Get what is there, all at once.

        Between two batches the training loop drives this code out of the processor's caches.
        """
        if self.all_fetched:
            self.over = True
            raise StopIteration
        if self._feed.pid != os.getpid():
            raise UsageError(f"this iterator belongs to process {self._feed.pid}; iterate the loader again in this one")
        if self.replaced:
            raise UsageError(
                "this iterator ended when its loader was iterated again, closed or interrupted; with concurrent=True"
                " one goes on when another begins"
            )
        try:
            batches = self._taken()
            self._ready.extend(map(self._loader._finish, batches[: self._steps - self._fetched]))
        except BaseException as error:
            self.progress.failed = isinstance(error, Exception)
            self.replace()  # an epoch with a hole in it is not gone on with
            raise

    def _taken(self) -> list[Batch]:
        self._feed.unsure = True
        try:
            batches = self._feed.take(self._generation, self._fetched)
        except CacheToolError:
            self._feed.unsure = False
            raise
        self._feed.unsure = False
        return batches

    def replace(self) -> None:
        """Nothing is fetched from now on: the feeders work for somebody else."""
        self.replaced = True
        self._ready.clear()

    def uncounted(self) -> Iterator[T]:
        """What is left to fetch, for whoever calls :meth:`count` once a batch is delivered."""
        while not self.all_fetched:
            yield self.fetch()

    def count(self) -> None:
        """A batch was delivered; the last one ends the epoch."""
        self.progress.step += 1
        if self.progress.step == self._steps and not self.replaced and self._feed.pid == os.getpid():
            self.deliver()

    def deliver(self) -> None:
        """All batches were delivered."""
        self._left.detach()
        self._loader._delivered(self.progress)
        with contextlib.suppress(CacheToolError):  # whoever begins the next one will hear of it
            self._feed.delivered(self._generation, self.progress.step)
        self.end()

    def own_feed(self) -> None:
        """The feeders are this epoch's alone: they end with it, or when nobody has it any more."""
        self._finalizer = weakref.finalize(self, self._feed.close)

    def end(self) -> None:
        """Stop feeders that are this epoch's alone."""
        if self._finalizer is not None and self._feed.pid == os.getpid():
            self._finalizer()

    def __reduce__(self) -> NoReturn:
        self._loader.__reduce__()

    def __len__(self) -> int:
        return self._steps - self.progress.step
