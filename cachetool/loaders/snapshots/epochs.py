"""Which snapshot each epoch trains on: the catalog's side of a loader, run by one of its feeders.

::

    begin(e) ----- batches of e are made ----- exhausted(e) ----------- delivered(e) ----- begin(e + 1)
       leased                                  the next one is leased                      leased anew, if that is late
                                               and made, provisionally                     and shards came since
                                                                                           e counts, its lease ends

An epoch that begins at once is of the provisional snapshot without another look, unless the training process used the
catalog meanwhile: else it would wait for a pull that commits just then, for the disk, and for batches made anew. The
snapshot is given up after ``hold`` seconds, so that a long validation or an idle notebook keeps nothing on the disk.

When a loader looks for its next snapshot: early enough that training never waits for it, late enough to be new.

::

    begun(e) ------------- batches made ------------- look ahead ------------ delivered(e) -- begun(e + 1)
             rings hold what is left of the epoch     |--- at least a second ---|  |- at once -|
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from cachetool.cache import open_cache
from cachetool.cache.history import Delivered
from cachetool.core.errors import CacheToolError, CapacityError, UsageError
from cachetool.loaders.settings import EpochPlan, Settings, rows
from cachetool.loaders.snapshots.follow import Subscription, subscribe
from cachetool.loaders.snapshots.resume import Resume, resumed
from cachetool.loaders.snapshots.waiting import NotYet, failed_pull, no_samples, require, say
from cachetool.loaders.split import Split
from cachetool.loaders.view import View

__all__ = ["EpochSnapshots", "Timing"]


_ONWARD, _LONGEST = 0.5, 3.0
"""Seconds after the last batch was handed out in which the next epoch begins at once, no command having run in between:
half as long again as a step of training, but so many at least and at most."""
_FRESH = 10.0
"""Seconds after which a provisional snapshot is looked at again when the last batch is delivered."""
_LEAD = 1.0
"""Seconds before the end of an epoch in which the next one's snapshot is taken: a disk may pause for so long."""


@dataclass(frozen=True, slots=True)
class _EpochSnapshot:
    plan: EpochPlan
    lease: Subscription
    parts: Sequence[Sequence[Any]]
    """All parts of the epoch, those it lost too, as rows."""


class EpochSnapshots:
    """Takes and returns the snapshots of a loader's epochs; ``publish`` tells all feeders of each new plan. Methods may
    be called by one thread at a time."""

    def __init__(self, settings: Settings, publish: Callable[[EpochPlan], None]) -> None:
        self._settings, self._publish = settings, publish
        self._split = None if settings.split is None else Split(settings.split, settings.validation)
        self._free: list[Subscription] = []
        self._view: View | None = None
        self._rows: Sequence[Sequence[Any]] = ()  # its parts
        self._short: tuple[View, NotYet] | None = None
        self._generation = 0
        self._current: _EpochSnapshot | None = None
        self._over: list[tuple[_EpochSnapshot, Delivered | None]] = []
        """Epochs that ended, and how they went; None if they do not count: broken off, or another rank's to count."""
        self._ahead: _EpochSnapshot | None = None
        self._promised: tuple[int, Resume | None] | None = None
        """Whose length was told of that, which then holds."""
        self._timing = Timing()
        self._until = 0.0
        self._due: float | None = None
        """When the look ahead is due that can wait."""
        self._left = False
        self._gone: _EpochSnapshot | None = None
        """An epoch that was left and given up; its lease is over."""

    def begin(self, epoch: int, resume: Resume | None = None, *, surely: bool = True) -> EpochPlan:
        """Start an epoch on the newest snapshot, or on what is left of an earlier one.

        ``surely``: whoever asks may know of a newer one than was found a moment ago. Raises :class:`NotYet`, and
        :class:`UsageError` when samples of an epoch that is resumed are gone.
        """
        if self._fits(epoch, resume):
            if self._current is not None:  # which was broken off
                self._cut()
            self._freshen(resume, surely)
            ahead = self._ahead
            assert ahead is not None
        else:
            if resume is None:  # else what is to be read may go in between
                self._drop_ahead()
            lease, self._ahead = None if self._ahead is None else self._ahead.lease, None
            # Given back before it is taken again: a run's processes share a snapshot for as long as any has it.
            self._drop_current()
            self.finish_epochs()
            ahead = self._take(epoch, resume, lease)
            self._publish(ahead.plan)
        self._drop_current()
        self._current, self._ahead, self._promised = ahead, None, None
        self._gone, self._left, self._due = None, False, None
        self._timing.begun()
        return ahead.plan

    def prepare(self, epoch: int, resume: Resume | None = None, *, surely: bool = True) -> EpochPlan:
        """The plan that :meth:`begin` then starts, unless it knows surely of a newer one; the present one if that is of
        this epoch and nothing is resumed. Raises what :meth:`begin` does."""
        if self._current is not None and self._current.plan.epoch == epoch and resume is None:
            return self._current.plan
        if self._fits(epoch, resume):
            self._freshen(resume, surely)
        else:
            self._drop_ahead()
            self._look_ahead(epoch, resume)
        self._promised = epoch, resume
        assert self._ahead is not None
        return self._ahead.plan

    def exhausted(self, generation: int) -> None:
        """All batches of a plan are made, or nearly: go on with the next epoch, provisionally; with :meth:`tick`, if
        those that are there will last for long."""
        current = self._current
        if current is None or current.plan.generation != generation:
            return
        if (spare := self._timing.spare(current.plan.steps(self._settings).count)) > 0:
            self._due = time.monotonic() + spare
        else:
            self._follow(current, follows=True)

    def delivered(self, generation: int, pace: Delivered) -> None:
        """The last batch of a plan was delivered: the epoch counts and its lease ends with :meth:`finish_epochs`."""
        current = self._current
        if current is not None and current.plan.generation == generation:
            self._follow(current, follows=False)  # batches beyond an agreed number of steps are not made any more
        if self._timing.old and self._promised is None:
            with contextlib.suppress(Exception):  # whoever begins that epoch will hear of it
                self._renew()
        self._timing.delivered(pace)
        self._until = time.monotonic() + self._settings.hold
        if current is not None and current.plan.generation == generation:
            if pace.batches < current.plan.steps(self._settings).count:
                self._cut()
            self._current, self._gone = None, current  # an interrupt may take the last batch back
            self._over.append((current, pace if self._settings.rank == 0 else None))
        if self._ahead is None:
            self._publish(EpochPlan(self._next(), 0, None))

    @property
    def has_unfinished(self) -> bool:
        """Whether :meth:`finish_epochs` has something to do. Of several ranks, one that begins an epoch late must find
        the lease of those that are through with it: theirs end when they begin the next."""
        return bool(self._over) and self._settings.world_size == 1

    def finish_epochs(self) -> None:
        """Count epochs that are over and give their leases back: transactions that nobody needs to wait for."""
        while self._over:
            snapshot, pace = self._over.pop(0)
            self._done_with(snapshot.lease, pace)

    def state(self, generation: int, reached: int) -> Resume:
        """Where to take the present epoch up again when ``reached`` samples of its plan were read by all ranks. Raises
        :class:`UsageError` when another one was begun meanwhile."""
        snapshot = self._current or self._gone
        if snapshot is None or snapshot.plan.generation != generation:
            raise UsageError("the epoch whose state is asked for is over: another one was begun")
        plan, parts = snapshot.plan, snapshot.parts
        if not plan.lost:
            return Resume(reached, plan.samples, parts)
        positions, _ = plan.left(self._settings)
        return Resume(int(positions[reached]), plan.of[0], parts)

    def left(self, generation: int) -> None:
        """Nobody has the iterator of this epoch any more: if it is the present one, its time is over soon."""
        if self._current is not None and self._current.plan.generation == generation:
            self._until, self._left = time.monotonic() + self._settings.hold, True

    def regain(self, generation: int) -> bool:
        """Keep the snapshot of an epoch that was :meth:`left`; return False if it was given up before."""
        if self._current is None or self._current.plan.generation != generation:
            return False
        self._left = False
        return True

    def tick(self) -> float | None:
        """Take the next snapshot when that is due; give it up, and that of an epoch that was left, when their time is
        over. Gives how many seconds are left until then, None: no matter."""
        current = self._current
        if self._due is not None and current is not None and not self._left:
            if (left := self._due - time.monotonic()) > 0:
                return left
            self._follow(current, follows=True)
        idle = current is None and self._ahead is None and (self.has_unfinished or not self._over)
        if idle or (current is not None and not self._left):
            return None
        if (left := self._until - time.monotonic()) > 0:
            return min(left, 3600.0)  # hold= may be infinite
        if current is not None:
            self._gone = current
            self._drop_current()
        self._drop_ahead()
        self.finish_epochs()
        self._publish(EpochPlan(self._next(), 0, None))
        return None

    def close(self) -> None:
        """Give everything back."""
        self._drop_current()
        try:
            self.finish_epochs()  # first: there may be little time
        finally:
            self._drop_ahead()
        while self._free:
            self._free.pop().close()

    # -- one snapshot --------------------------------------------------------------------------------------------------

    def _follow(self, current: _EpochSnapshot, *, follows: bool) -> None:
        self._due = None
        following = current.plan.epoch + 1
        if self._ahead is None and (self._settings.epochs is None or following < self._settings.epochs):
            with contextlib.suppress(Exception):  # whoever begins that epoch will hear of it
                self._look_ahead(following, follows=follows)

    def _fits(self, epoch: int, resume: Resume | None) -> bool:
        """Whether the provisional snapshot is of this epoch."""
        if self._ahead is None or self._ahead.plan.epoch != epoch:
            return False
        return self._promised == (epoch, resume) if self._promised is not None else resume is None

    def _freshen(self, resume: Resume | None, surely: bool) -> None:
        if resume is None and (surely or (self._promised is None and not self._timing.at_once)):
            self._renew()

    def _look_ahead(
        self, epoch: int, resume: Resume | None = None, *, follows: bool = False, instead: _EpochSnapshot | None = None
    ) -> None:
        self._timing.looked()
        snapshot = self._take(epoch, resume, None if instead is None else instead.lease)
        if instead is not None and snapshot.plan.view is instead.plan.view:  # another process of the run has it still
            self._ahead = instead
            return
        # Other feeders may still be making the present epoch.
        self._ahead = replace(snapshot, plan=replace(snapshot.plan, follows=follows))
        self._until = time.monotonic() + self._settings.hold
        self._publish(self._ahead.plan)

    def _renew(self) -> None:
        """Take the provisional snapshot again if it is not the newest any more. Raises :class:`NotYet`."""
        ahead = self._ahead
        if ahead is not None and (ahead.plan.view is None or ahead.lease.moved(ahead.plan.view)):
            self._ahead = None
            self._look_ahead(ahead.plan.epoch, instead=ahead)

    def _cut(self) -> None:
        """What is left of the present epoch is not made any more."""
        if self._ahead is not None and self._ahead.plan.follows:
            self._ahead = replace(self._ahead, plan=replace(self._ahead.plan, follows=False))
            self._publish(self._ahead.plan)

    def _next(self) -> int:
        self._generation += 1
        return self._generation

    def _take(self, epoch: int, resume: Resume | None, lease: Subscription | None = None) -> _EpochSnapshot:
        """``lease``: of a snapshot that is given back unread for it."""
        lease = lease or (self._free.pop() if self._free else self._open())
        try:
            if resume is not None:
                # No room is made by it: what would go may be what it is to read.
                view = self._same(lease.newest(epoch=epoch, peek=True, anew=True))
                plan = resumed(self._next(), epoch, view, resume, settings=self._settings, count=self._count)
                return _EpochSnapshot(plan, lease, resume.parts)
            if self._short is not None and not lease.moved(self._short[0]):
                raise self._short[1]
            view, samples = self._enough(lease, epoch)
            self._short = None
            return _EpochSnapshot(EpochPlan(self._next(), epoch, view, samples), lease, self._rows)
        except BaseException:
            self._done_with(lease, unread=True)
            raise

    def _enough(self, lease: Subscription, epoch: int) -> tuple[View, int]:
        """The newest view and its samples; one that leaves some for the next epoch only if it is enough."""
        view = self._same(lease.newest(epoch=epoch, sparing=True, anew=True))
        if lease.spared:
            with contextlib.suppress(NotYet):
                self._require(view, samples := self._count(view))
                return view, samples
            view = self._same(lease.newest(epoch=epoch, anew=True))
        self._require(view, samples := self._count(view))
        return view, samples

    def _same(self, view: View) -> View:
        """One object for as long as nothing changes: feeders then have its parts open already."""
        if self._view is not None and view == self._view:
            return self._view
        self._view, self._rows = view, rows(view.parts)
        return view

    def _count(self, view: View) -> int:
        return view.samples if self._split is None else len(self._split.chosen(view))

    def _require(self, view: View, samples: int) -> None:
        try:
            require(self._settings, samples, grows=bool(view.dataset))
        except NotYet as short:
            self._short = view, short
            raise

    def _open(self) -> Subscription:
        root, dataset, paths = self._settings.root, self._settings.dataset, self._settings.paths
        if not paths:
            with open_cache(root, create=False) as cache:
                names = cache.datasets()
                exists = bool(names) and dataset in (None, *names)
                if not exists or not any(shard.samples for shard in cache.shards(dataset)):
                    if (error := failed_pull(cache, dataset)) is not None:
                        raise error
                    raise no_samples(root, dataset, [] if exists else names)
        return subscribe(paths or root, dataset=dataset, run=self._settings.run)

    def _drop_current(self) -> None:
        snapshot, self._current = self._current, None
        if snapshot is not None:
            self._over.append((snapshot, None))

    def _drop_ahead(self) -> None:
        snapshot, self._ahead, self._promised = self._ahead, None, None
        if snapshot is not None:
            self._done_with(snapshot.lease, unread=True)

    def _done_with(self, lease: Subscription, pace: Delivered | None = None, *, unread: bool = False) -> None:
        """Count an epoch, if it does, and give its lease back. Nobody waits for this, so what fails is told; a catalog
        that is lost raises when an epoch that begins needs it."""
        reported = False
        try:
            if pace is not None:
                lease.served(pace, last=True)
        except CapacityError:
            pass  # on a full disk: it was delivered all the same
        except (CacheToolError, OSError) as error:
            say(f"an epoch was not counted: {error}")
            reported = True
        finally:
            self._free.append(lease)
            try:
                lease.release(unread=unread)
            except (CacheToolError, OSError) as error:
                if not reported:
                    say(f"a snapshot is kept until this process ends: {error}")


class Timing:
    """What is known of how fast the training goes. Times are those of ``time.monotonic``."""

    def __init__(self) -> None:
        self._began = self._looked = self._onward = self._step = 0.0

    def begun(self) -> None:
        """An epoch begins."""
        self._began = time.monotonic()

    def delivered(self, pace: Delivered) -> None:
        """Its last batch was delivered."""
        self._step = max(0.0, pace.seconds - pace.waited) / max(1, pace.batches)
        self._onward = time.monotonic() + max(_ONWARD, min(1.5 * self._step, _LONGEST))

    def looked(self) -> None:
        """What the catalog has is known."""
        self._looked = time.monotonic()

    @property
    def at_once(self) -> bool:
        """Whether an epoch that begins now follows the one before without a pause."""
        return time.monotonic() <= self._onward

    @property
    def old(self) -> bool:
        """Whether it is long ago that somebody looked."""
        return time.monotonic() > self._looked + _FRESH

    def spare(self, steps: int) -> float:
        """Seconds for which the look ahead can wait, all batches of an epoch of so many steps being made.

        Half of the time that the batches will last if this epoch goes as the one before, since as many are to be made
        for the next one meanwhile.
        """
        left = steps * self._step - (time.monotonic() - self._began)
        return max(0.0, min(left / 2, left - _LEAD))
