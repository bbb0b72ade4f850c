"""The iterator of a loader: one epoch over a snapshot. It takes batches from the feed a few at once, and yields them
singly.

::

    feed -- a few at once --> ready -- one by one --> the training loop

Between two batches the training loop evicts this code from the processor's caches, and the code that then runs holds
the GIL. So ``__next__`` is one line in the usual case, and the number of delivered batches follows from the number that
is left.
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

# A GPU that has one step in its queue waits longer for 32 small batches than for one: with 4 at once 0.05 % of 13,600
# steps waited, with 32 at once 2.31 %.
_AT_ONCE, _PREFETCHED = 32, 4
"""Most batches taken from the feed at once, and the same if a prefetcher copies them to a device."""


def check_batches(given: object) -> None:
    """Raise :class:`UsageError` if ``given`` yields no batches: text, such as the name of a cache, or an object that is
    not iterable."""
    iterable = hasattr(given, "__iter__") or hasattr(given, "__getitem__")
    if not iterable or isinstance(given, str | bytes | os.PathLike):
        raise UsageError(f"{given!r} is not an iterable of batches; use a Loader or another iterable of batches")


class Progress:
    """The progress of one epoch. The loader keeps this object, so it knows the progress when the iterator is gone."""

    __slots__ = ("before", "begun", "counted", "failed", "feed", "fetched", "half", "kept", "ready", "steps", "touched")

    def __init__(self, feed: Feed, begun: Begun, steps: int, before: int, *, kept: bool = False) -> None:
        self.feed, self.begun = feed, begun
        # Ranks that agree on an epoch by a collective must either all take this epoch again or all begin another one.
        # Each rank would decide by its own clock when hold= is over, so one could begin a new epoch while another
        # waits.
        self.kept = kept
        """True if the snapshot stays leased until a batch is asked for, although the iterator is gone."""
        self.steps, self.before = steps, before
        """Number of batches of this iterator, and number of batches of the epoch that were delivered before it was
        resumed."""
        self.half = -(-steps // 2)
        """Number of delivered batches after which the next epoch's snapshot may be taken."""
        self.fetched = 0
        """Number of batches that came from the feed, without a last one that is kept back."""
        self.ready: deque[Any] = deque()
        """Fetched batches that were not yielded yet."""
        self.counted: int | None = None
        """Number of batches delivered, if a prefetcher counts them; otherwise None."""
        self.failed = False
        """True if an error ended the epoch."""
        self.touched = False
        """True once a batch was asked for."""

    @property
    def step(self) -> int:
        """Number of batches delivered."""
        return self.fetched - len(self.ready) if self.counted is None else self.counted

    def drop(self) -> None:
        """Discard the batches that are ready, as if they had not been fetched."""
        self.fetched -= len(self.ready)
        self.ready.clear()

    @property
    def ended(self) -> bool:
        """True if the last batch was delivered."""
        return self.step >= self.steps

    @property
    def left(self) -> bool:
        """True if the training loop was left in the middle of this epoch."""
        return 0 < self.step < self.steps and not self.failed

    def forgotten(self) -> None:
        """Discard the batches that are ready, because the iterator is gone, and tell the feed."""
        self.drop()
        if self.touched or not self.kept:
            self.feed.left(self.begun.generation)

    def resume(self, step: int | None = None) -> dict[str, Any]:
        """Return the state from which the epoch can continue: at the present step, or at an earlier ``step``.

        Raises :class:`UsageError` if the feeders have ended, or belong to another process.
        """
        if self.feed.pid != os.getpid():
            raise UsageError(f"this epoch runs in process {self.feed.pid}; call state_dict() in that process")
        if self.feed.closed:
            raise UsageError(
                f"the loader was closed, or its feeders ended, after {self.step} of {self.steps} batches of epoch"
                f" {self.begun.epoch}; call state_dict() before that"
            )
        return self.feed.state(self.begun.generation, self.begun.steps.reached(self.step if step is None else step))


class Epoch(Iterator[T]):
    """An iterator over the batches of one epoch of a loader."""

    def __init__(self, loader: BaseLoader[T], progress: Progress) -> None:
        self._loader, self.progress = loader, progress
        self._ready: deque[T] = progress.ready
        self._last: list[T] = []
        self._counts = True
        """True if a yielded batch counts as delivered; False if a prefetcher counts."""
        self._left = weakref.finalize(self, progress.forgotten)
        # When the process ends the feeders end anyway, so no message to them is needed; by default weakref.finalize
        # would send one at exit.
        self._left.atexit = False
        self._finalizer: weakref.finalize[Any, Any] | None = None
        self.replaced = False
        self._asked = False
        # A prefetcher of an older iterator, from which this iterator takes the epoch over, may have set it.
        progress.counted = None
        drop_in_child(self)

    @property
    def over(self) -> bool:
        """True if a batch was asked for after the last one, and all batches were delivered."""
        return self._asked and self.progress.ended

    def __next__(self) -> T:
        while True:
            try:
                return self._ready.popleft()
            except IndexError:
                pass
            self._fill()

    def _fill(self) -> None:
        """Fetch the batches that are ready in the feed; the last batch of the epoch alone, because it ends the
        epoch."""
        progress = self.progress
        if progress.fetched >= progress.steps:
            self._asked = True
            raise StopIteration
        pid = progress.feed.pid
        if pid != os.getpid():
            raise UsageError(f"this iterator belongs to process {pid}; iterate the loader again in this process")
        if self.replaced:
            raise UsageError(
                "this iterator ended because its loader was iterated again, closed or interrupted; with concurrent=True"
                " an iterator continues when another begins"
            )
        if progress.feed.closed:
            raise CacheToolError("the feeders of this iterator ended; iterate the loader again to start new ones")
        try:
            if self._last:
                self._release()
            else:
                # _taken() stops at the half, so no batch of the first half is ready any more: all were delivered.
                if self._counts and progress.fetched == progress.half:
                    progress.feed.half_delivered(progress.begun.generation)
                self._fetch()
        except BaseException as error:
            progress.failed = isinstance(error, Exception)
            # Batches may have been taken out of the feed and lost, so this epoch must not continue with a gap.
            self.replace()
            raise

    def _fetch(self) -> None:
        progress = self.progress
        batches = [self._loader._finish(batch) for batch in self._taken()]
        # steps= may end the epoch before the feeders do; they know nothing of it.
        del batches[progress.steps - progress.fetched :]
        last = batches[progress.steps - progress.fetched - 1 :]
        if last:
            # The last batch is kept back: the epoch ends, in the catalog too, when this batch is asked for, and not
            # when the batch before it is.
            batches.pop()
        # The count is made before the two lines below. Between these lines Python runs no handler of a signal, so a
        # handler that asks for the state never finds a fetched batch that is in neither queue.
        count = len(batches)
        progress.fetched += count
        self._ready.extend(batches)
        self._last.extend(last)

    def _release(self) -> None:
        try:
            last = self._last.pop()
        # The handler of a signal has closed the loader, which dropped the batch. __next__ then raises the error.
        except IndexError:
            return
        # Python runs no handler of a signal between these two lines, so the count and the queue always agree.
        self.progress.fetched += 1
        self._ready.append(last)
        # The catalog is told before the batch is yielded. If Ctrl-C interrupts this call, the batch was not delivered,
        # and the epoch can be resumed before it. The other order lost the end of an epoch.
        if self._counts:
            self.deliver()

    def _taken(self) -> list[Batch]:
        feed = self.progress.feed
        self.progress.touched = True
        most = _PREFETCHED
        if self._counts:
            # Fetching stops at the half of the epoch, because the next snapshot may be taken only when that half was
            # delivered, not when it was fetched.
            half = self.progress.half - self.progress.fetched
            most = min(_AT_ONCE, half) if half > 0 else _AT_ONCE
        # An interrupt in take() may lose batches that were taken out and not counted. The mark stays set then, and the
        # loader starts new feeders instead of beginning an epoch with these.
        feed.unsure = True
        try:
            batches = feed.take(self.progress.begun.generation, self.progress.fetched, most)
        except CacheToolError:
            feed.unsure = False
            raise
        except Exception:
            # The handler of a signal may close the feed anywhere in take(), which then fails with any error.
            if feed.closed:
                raise closed() from None
            raise
        feed.unsure = False
        return batches

    def replace(self) -> None:
        """Let this iterator yield no further batch, because the feeders now work for another one."""
        self.replaced = True
        self.drop()

    def hand_over(self) -> None:
        """Give this epoch, of which no batch was taken, to another iterator."""
        self.replaced = True
        # A new queue: the other iterator shares the old one with the progress.
        self._ready = deque()
        self._left.detach()

    def drop(self) -> None:
        """Discard the batches that are ready."""
        self.progress.drop()
        self._last.clear()

    @property
    def ready(self) -> bool:
        """True if ``next()`` would not wait: the next batch is ready, the epoch has ended, or an error would be
        raised."""
        progress, feed = self.progress, self.progress.feed
        if self._ready or self._last or progress.fetched >= progress.steps:
            return True
        # next() would raise an error here, which takes no waiting either.
        if self.replaced or feed.closed or feed.pid != os.getpid():
            return True
        # Looking into the rings is bracketed as taking is, so that an interrupt cannot leave a prefetcher half changed.
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
        """Return this iterator for a prefetcher, which calls :meth:`count` when it has delivered a batch."""
        self._counts = False
        self.progress.counted = self.progress.step
        return self

    def count(self) -> None:
        """Count one delivered batch of :meth:`uncounted`; the last one ends the epoch."""
        progress = self.progress
        counted = progress.step + 1
        if counted in (progress.half, progress.steps) and not self.replaced and progress.feed.pid == os.getpid():
            if counted == progress.half:
                progress.feed.half_delivered(progress.begun.generation)
            # Before the count: if Ctrl-C interrupts this call, the batch was not delivered and the epoch has not ended.
            if counted == progress.steps:
                self.deliver()
        # The last line of the function, so that no handler of a signal runs between the count and the yield of the
        # batch.
        progress.counted = counted

    def deliver(self) -> None:
        """End the epoch, because all batches were delivered."""
        # If the feeders have ended, the next epoch raises the error. This batch is complete and must still be
        # delivered.
        with contextlib.suppress(CacheToolError):
            self.progress.feed.delivered(self.progress.begun.generation, self.progress.steps)
        self._left.detach()
        self._loader._delivered(self.progress)
        self.end()

    def own_feed(self) -> None:
        """Let the feeders, which work for this epoch alone, end with it, or when the iterator is collected."""
        self._finalizer = weakref.finalize(self, self.progress.feed.close)

    def end(self) -> None:
        """Stop the feeders if they work for this epoch alone."""
        if self._finalizer is not None and self.progress.feed.pid == os.getpid():
            self._finalizer()

    def __reduce__(self) -> NoReturn:
        self._loader.__reduce__()

    def __len__(self) -> int:
        return self.progress.steps - self.progress.step
