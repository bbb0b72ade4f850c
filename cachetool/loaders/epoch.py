"""One pass of a loader over a snapshot: batches taken out of the feed a few at once and handed out one by one.

::

    feed -- a few at once --> ready -- one by one --> the training loop

Between two batches the training loop drives our code out of the processor's caches, and what then runs to hand one out
holds the GIL: so handing out is one line, and what was delivered is known by what is left.
"""

from __future__ import annotations

import contextlib
import os
import weakref
from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from cachetool.core.errors import CacheToolError, UsageError
from cachetool.loaders.feed.protocol import Feed
from cachetool.loaders.ring.forks import drop_in_child
from cachetool.loaders.ring.slot import Batch
from cachetool.loaders.settings import Begun
from cachetool.proc.lines import closed

if TYPE_CHECKING:
    from cachetool.loaders.loader import BaseLoader

__all__ = ["Epoch", "Progress", "check_batches"]

T = TypeVar("T")

_AT_ONCE, _PREFETCHED = 32, 4
"""Batches taken out of the feed at once, and where a prefetcher hands them on: a GPU that has one step in its queue
waits longer for a few dozen small batches than for one."""


def check_batches(given: object) -> None:
    """Raise :class:`UsageError` for what gives no batches: text, as the name of a cache, or what is not iterable."""
    iterable = hasattr(given, "__iter__") or hasattr(given, "__getitem__")
    if not iterable or isinstance(given, str | bytes | os.PathLike):
        raise UsageError(f"{given!r} gives no batches; give a Loader, or another iterable of batches")


class Progress:
    """How far an epoch is; the loader knows it when the iterator is gone."""

    __slots__ = ("before", "begun", "counted", "failed", "feed", "fetched", "half", "kept", "ready", "steps", "touched")

    def __init__(self, feed: Feed, begun: Begun, steps: int, before: int, *, kept: bool = False) -> None:
        self.feed, self.begun = feed, begun
        self.kept = kept
        """True if its snapshot stays leased until a batch was asked for, although nobody has its iterator.

        Ranks that agree on an epoch by a collective must all hand it over again, or all begin another one. A clock that
        each of them reads for itself cannot decide that."""
        self.steps, self.before = steps, before
        """Batches in all, and those of it that were delivered before it was resumed."""
        self.half = -(-steps // 2)
        """Batches after whose delivery the next epoch's snapshot is taken."""
        self.fetched = 0
        """Batches that came out of the feed, without a last one that is kept back."""
        self.ready: deque[Any] = deque()
        """Those of them that were not handed out."""
        self.counted: int | None = None
        """Batches delivered, where a prefetcher counts them."""
        self.failed = False
        """Whether an error ended it."""
        self.touched = False
        """True once a batch was asked for."""

    @property
    def step(self) -> int:
        """Batches delivered."""
        return self.fetched - len(self.ready) if self.counted is None else self.counted

    def drop(self) -> None:
        """Throw away what is ready, as if it had not come."""
        self.fetched -= len(self.ready)
        self.ready.clear()

    @property
    def ended(self) -> bool:
        """Whether the last batch was delivered."""
        return self.step >= self.steps

    @property
    def left(self) -> bool:
        """Whether the loop was left in the middle of it."""
        return 0 < self.step < self.steps and not self.failed

    def forgotten(self) -> None:
        """The iterator is gone, and with it what it had at hand."""
        self.drop()
        if self.touched or not self.kept:
            self.feed.left(self.begun.generation)

    def resume(self, step: int | None = None) -> dict[str, Any]:
        """Return the state to go on from here, or from an earlier ``step``. Raises :class:`UsageError` when the feeders
        ended."""
        if self.feed.pid != os.getpid():
            raise UsageError(f"this epoch is under way in process {self.feed.pid}; call state_dict() there")
        if self.feed.closed:
            raise UsageError(
                f"the loader was closed, or its feeders ended, after {self.step} of {self.steps} batches of epoch"
                f" {self.begun.epoch}; call state_dict() before that"
            )
        return self.feed.state(self.begun.generation, self.begun.steps.reached(self.step if step is None else step))


class Epoch(Iterator[T]):
    """One epoch of a loader."""

    def __init__(self, loader: BaseLoader[T], progress: Progress) -> None:
        self._loader, self.progress = loader, progress
        self._ready: deque[T] = progress.ready
        self._last: list[T] = []
        self._counts = True  # whether a batch that is handed out is delivered
        self._left = weakref.finalize(self, progress.forgotten)
        self._left.atexit = False
        self._finalizer: weakref.finalize[Any, Any] | None = None
        self.replaced = False
        self._asked = False
        progress.counted = None  # by a prefetcher of an iterator that handed this epoch over
        drop_in_child(self)

    @property
    def over(self) -> bool:
        """Whether it was asked for more than it had, and all that it had was delivered."""
        return self._asked and self.progress.ended

    def __next__(self) -> T:
        while True:
            try:
                return self._ready.popleft()
            except IndexError:
                pass
            self._fill()

    def _fill(self) -> None:
        """Get what is there, all at once; the last batch by itself, since it ends the epoch."""
        progress = self.progress
        if progress.fetched >= progress.steps:
            self._asked = True
            raise StopIteration
        pid = progress.feed.pid
        if pid != os.getpid():
            raise UsageError(f"this iterator belongs to process {pid}; iterate the loader again in this one")
        if self.replaced:
            raise UsageError(
                "this iterator ended when its loader was iterated again, closed or interrupted; with concurrent=True"
                " one goes on when another begins"
            )
        if progress.feed.closed:
            raise CacheToolError("the feeders of this iterator ended; iterate the loader again to start new ones")
        try:
            if self._last:
                self._release()
            else:
                if self._counts and progress.fetched == progress.half:  # none of them is ready any more
                    progress.feed.half_delivered(progress.begun.generation)
                self._fetch()
        except BaseException as error:
            progress.failed = isinstance(error, Exception)
            self.replace()  # an epoch with a hole in it is not gone on with
            raise

    def _fetch(self) -> None:
        progress = self.progress
        batches = [self._loader._finish(batch) for batch in self._taken()]
        del batches[progress.steps - progress.fetched :]
        last = batches[progress.steps - progress.fetched - 1 :]
        if last:
            batches.pop()
        count = len(batches)
        progress.fetched += count  # no signal's handler runs between this and the next line
        self._ready.extend(batches)
        self._last.extend(last)

    def _release(self) -> None:
        try:
            last = self._last.pop()
        except IndexError:
            return  # a signal's handler closed the loader
        self.progress.fetched += 1  # no signal's handler runs between this and the next line
        self._ready.append(last)
        if self._counts:
            self.deliver()  # interrupted in it, the batch has not come

    def _taken(self) -> list[Batch]:
        feed = self.progress.feed
        self.progress.touched = True
        most = _PREFETCHED
        if self._counts:
            half = self.progress.half - self.progress.fetched
            most = min(_AT_ONCE, half) if half > 0 else _AT_ONCE
        feed.unsure = True
        try:
            batches = feed.take(self.progress.begun.generation, self.progress.fetched, most)
        except CacheToolError:
            feed.unsure = False
            raise
        except Exception:
            if feed.closed:  # by a signal's handler, wherever that found it
                raise closed() from None
            raise
        feed.unsure = False
        return batches

    def replace(self) -> None:
        """Nothing is handed out from now on: the feeders work for somebody else."""
        self.replaced = True
        self.drop()

    def hand_over(self) -> None:
        """Another iterator has this epoch from now on, of which nothing was taken."""
        self.replaced = True
        self._ready = deque()
        self._left.detach()

    def drop(self) -> None:
        """Throw away what is at hand."""
        self.progress.drop()
        self._last.clear()

    @property
    def ready(self) -> bool:
        """Whether the next batch is there, or there will be none."""
        progress, feed = self.progress, self.progress.feed
        if self._ready or self._last or progress.fetched >= progress.steps:
            return True
        # What raises does not wait either.
        if self.replaced or feed.closed or feed.pid != os.getpid():
            return True
        feed.unsure = True
        try:
            there = feed.ready(progress.begun.generation, progress.fetched)
        except BaseException as error:
            if isinstance(error, Exception) and (isinstance(error, CacheToolError) or feed.closed):
                there = True
            else:
                progress.failed = isinstance(error, Exception)
                self.replace()
                raise
        feed.unsure = False
        return there

    def uncounted(self) -> Iterator[T]:
        """What is left, for whoever calls :meth:`count` once a batch is delivered."""
        self._counts = False
        self.progress.counted = self.progress.step
        return self

    def count(self) -> None:
        """A batch of :meth:`uncounted` was delivered; the last one ends the epoch."""
        progress = self.progress
        counted = progress.step + 1
        if counted in (progress.half, progress.steps) and not self.replaced and progress.feed.pid == os.getpid():
            if counted == progress.half:
                progress.feed.half_delivered(progress.begun.generation)
            if counted == progress.steps:
                self.deliver()  # interrupted in it, the batch has not come
        progress.counted = counted  # no signal's handler runs between this and what hands the batch out

    def deliver(self) -> None:
        """All batches were delivered."""
        with contextlib.suppress(CacheToolError):  # whoever begins the next one will hear of it
            self.progress.feed.delivered(self.progress.begun.generation, self.progress.steps)
        self._left.detach()
        self._loader._delivered(self.progress)
        self.end()

    def own_feed(self) -> None:
        """The feeders are this epoch's alone: they end with it, or when nobody has it any more."""
        self._finalizer = weakref.finalize(self, self.progress.feed.close)

    def end(self) -> None:
        """Stop feeders that are this epoch's alone."""
        if self._finalizer is not None and self.progress.feed.pid == os.getpid():
            self._finalizer()

    def __reduce__(self) -> NoReturn:
        self._loader.__reduce__()

    def __len__(self) -> int:
        return self.progress.steps - self.progress.step
