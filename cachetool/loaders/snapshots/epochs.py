"""Which snapshot each epoch reads: the catalog's side of a loader, run by one of its feeders.

One rule. The snapshot of epoch e + 1 is taken once, when all batches of e are made and half of them were delivered. It
is that epoch, and its length. :meth:`EpochSnapshots.refresh` discards it; the next epoch then reads the newest. It is
given up ``hold`` seconds after e ended or was left, so that a long validation or an idle notebook keeps nothing on the
disk. The first one is taken by the first ``begin``, or by ``prepare`` for its length.

The states, by what is leased: the snapshot of the epoch being read, and the one ahead, of the next epoch::

    leased           made, and        delivered   refresh   prepare          begin     held too long
                     half delivered
    nothing          -                -           -         ahead            reading   -
    ahead            -                -           nothing   -                reading   nothing
    reading          reading, ahead   nothing     -         reading, ahead   reading   nothing
    reading, ahead   -                ahead       reading   -                reading   nothing

Half delivered: else a short epoch, which the memory of the feeders holds whole, would be followed by one as old as its
own beginning. ``begin`` takes the snapshot ahead if that is of the epoch it begins, else the newest.

With ``split="validation"`` none is taken ahead: the loader is idle until the next validation, which is to see what
arrives meanwhile, and batches made ahead for it would be stale or given up.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from cachetool.cache import open_cache
from cachetool.cache.history import Delivered
from cachetool.core.errors import CacheToolError, CapacityError, UsageError
from cachetool.core.text import shown
from cachetool.loaders.selection import selection
from cachetool.loaders.settings import EpochPlan, Settings, rows, where_dict
from cachetool.loaders.snapshots.follow import Subscription, subscribe
from cachetool.loaders.snapshots.resume import Resume, resumed
from cachetool.loaders.snapshots.waiting import NotYet, failed_pull, is_pulled, no_dataset, no_samples, require, say
from cachetool.loaders.view import View

__all__ = ["EpochSnapshots"]


@dataclass(frozen=True, slots=True)
class _EpochSnapshot:
    plan: EpochPlan
    lease: Subscription
    parts: Sequence[Sequence[Any]]
    """All parts of the epoch, those it lost too, as rows."""
    resume: Resume | None


class EpochSnapshots:
    """Takes and returns the snapshots of a loader's epochs; ``publish`` tells all feeders of each new plan. Methods may
    be called by one thread at a time."""

    def __init__(self, settings: Settings, publish: Callable[[EpochPlan], None]) -> None:
        self._settings, self._publish = settings, publish
        self._selection = selection(settings)
        self._free: list[Subscription] = []
        self._view: View | None = None
        self._rows: Sequence[Sequence[Any]] = ()  # its parts
        self._short: tuple[View, NotYet] | None = None
        self._generation = 0
        self._reading: _EpochSnapshot | None = None
        self._ahead: _EpochSnapshot | None = None
        self._awaited: set[str] = set()
        """Events of the epoch being read that come before the next snapshot is taken; none if it is not taken ahead."""
        self._until: float | None = None
        """When what is leased is given up; None while an epoch is read."""
        self._begun: _EpochSnapshot | None = None
        """The epoch begun last; its lease may be over."""
        self._over: list[tuple[_EpochSnapshot, Delivered | None]] = []
        """Epochs that ended, and how they went; None if they do not count: broken off, or another rank's to count."""

    def begin(self, epoch: int, left_over: Mapping[str, Any] | None = None) -> EpochPlan:
        """Start an epoch on the snapshot taken for it, else on the newest, or on what is left of an earlier one.

        Raises :class:`NotYet`, and :class:`UsageError` when samples of an epoch that is resumed are gone.
        """
        resume = Resume.of(left_over)
        if self._fits(epoch, resume):
            if self._reading is not None:  # which was broken off
                self._cut()
            ahead = self._ahead
            assert ahead is not None
        else:
            if resume is None:  # else what is to be read may go in between
                self._drop_ahead()
            lease, self._ahead = None if self._ahead is None else self._ahead.lease, None
            # Given back before it is taken again: a run's processes share a snapshot for as long as any has it.
            self._drop_reading()
            self.finish_epochs()
            ahead = self._take(epoch, resume, lease)
            self._publish(ahead.plan)
        self._drop_reading()
        self._reading = self._begun = ahead
        self._ahead, self._until = None, None
        self._awaited = set() if self._settings.split == "validation" else {"made", "half"}
        return ahead.plan

    def prepare(self, epoch: int, left_over: Mapping[str, Any] | None = None) -> EpochPlan:
        """The plan that :meth:`begin` then starts; the present one if that is of this epoch and nothing is resumed.
        Raises what :meth:`begin` does."""
        resume = Resume.of(left_over)
        if self._reading is not None and self._reading.plan.epoch == epoch and resume is None:
            return self._reading.plan
        if not self._fits(epoch, resume):
            self._drop_ahead()
            self._take_ahead(epoch, resume, follows=False)
            self._until = time.monotonic() + self._settings.hold
        assert self._ahead is not None
        return self._ahead.plan

    def refresh(self) -> None:
        """Discard the snapshot ahead: the next epoch reads the newest."""
        if self._ahead is None:
            return
        self._drop_ahead()
        if self._reading is None:
            self._publish(EpochPlan(self._next(), 0, None))

    def made(self, generation: int) -> None:
        """All batches of a plan are made, or nearly."""
        self._happened("made", generation)

    def half_delivered(self, generation: int) -> None:
        """Half of the batches of a plan were delivered."""
        self._happened("half", generation)

    def delivered(self, generation: int, pace: Delivered) -> None:
        """The last batch of a plan was delivered: the epoch counts and its lease ends with :meth:`finish_epochs`."""
        reading = self._reading
        if reading is None or reading.plan.generation != generation:
            return
        if self._selection is not None:
            pace = pace._replace(samples=reading.plan.samples)
        if pace.batches < reading.plan.steps(self._settings).count:
            self._cut()
        self._reading, self._until = None, time.monotonic() + self._settings.hold
        self._over.append((reading, pace if reading.plan.steps(self._settings).rank == 0 else None))
        if self._ahead is None:
            self._publish(EpochPlan(self._next(), 0, None))

    @property
    def has_unfinished(self) -> bool:
        """Whether :meth:`finish_epochs` has something to do. Of several ranks, one that begins an epoch late must find
        the lease of those that are through with it: theirs end when they begin the next."""
        return bool(self._over) and self._over[0][0].plan.steps(self._settings).world_size == 1

    def finish_epochs(self) -> None:
        """Count epochs that are over and give their leases back: transactions that nobody needs to wait for."""
        while self._over:
            snapshot, pace = self._over.pop(0)
            self._done_with(snapshot.lease, pace)

    def state(self, generation: int, reached: int) -> dict[str, Any]:
        """Where to take the present epoch up again when ``reached`` samples of its plan were read by all ranks. Raises
        :class:`UsageError` when another one was begun meanwhile."""
        snapshot = self._begun
        if snapshot is None or snapshot.plan.generation != generation:
            raise UsageError("the epoch whose state is asked for is over: another one was begun")
        plan, parts = snapshot.plan, snapshot.parts
        if not plan.lost:
            return Resume(reached, plan.samples, parts)._asdict()
        positions, _ = plan.left(self._settings)
        return Resume(int(positions[reached]), plan.of[0], parts)._asdict()

    def left(self, generation: int) -> None:
        """Nobody has the iterator of this epoch any more: if it is the present one, its time is over soon."""
        if self._reading is not None and self._reading.plan.generation == generation:
            self._until = time.monotonic() + self._settings.hold

    def regain(self, generation: int) -> bool:
        """Keep the snapshot of an epoch that was :meth:`left`; return False if it was given up before."""
        if self._reading is None or self._reading.plan.generation != generation:
            return False
        self._until = None
        return True

    def tick(self) -> float | None:
        """Give up what is leased when its time is over. Return the seconds until then; None if it is not limited."""
        if self._until is None or not (self._reading or self._ahead or self._over):
            return None
        if (left := self._until - time.monotonic()) > 0:
            return min(left, 3600.0)  # hold= may be infinite
        self._until = None
        self._drop_reading()
        self._drop_ahead()
        self.finish_epochs()
        self._publish(EpochPlan(self._next(), 0, None))
        return None

    def close(self) -> None:
        """Give everything back."""
        self._drop_reading()
        try:
            self.finish_epochs()  # first: there may be little time
        finally:
            self._drop_ahead()
        while self._free:
            self._free.pop().close()

    # -- one snapshot --------------------------------------------------------------------------------------------------

    def _happened(self, event: str, generation: int) -> None:
        reading = self._reading
        if reading is None or reading.plan.generation != generation or event not in self._awaited:
            return
        self._awaited.remove(event)
        following = reading.plan.epoch + 1
        if self._awaited or self._ahead is not None or following == self._settings.epochs:
            return
        with contextlib.suppress(Exception):  # whoever begins that epoch will hear of it
            self._take_ahead(following, follows=True)

    def _fits(self, epoch: int, resume: Resume | None) -> bool:
        """Whether the snapshot ahead is of this epoch."""
        return self._ahead is not None and self._ahead.plan.epoch == epoch and self._ahead.resume == resume

    def _take_ahead(self, epoch: int, resume: Resume | None = None, *, follows: bool) -> None:
        """``follows``: other feeders may still be making the present epoch."""
        snapshot = self._take(epoch, resume)
        self._ahead = replace(snapshot, plan=replace(snapshot.plan, follows=follows))
        self._publish(self._ahead.plan)

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
                return _EpochSnapshot(plan, lease, resume.parts, resume)
            if self._short is not None and not lease.moved(self._short[0]):
                raise self._short[1]
            view, samples = self._enough(lease, epoch)
            self._short = None
            return _EpochSnapshot(EpochPlan(self._next(), epoch, view, samples), lease, self._rows, None)
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
        return view.samples if self._selection is None else len(self._selection.chosen(view))

    def _require(self, view: View, samples: int) -> None:
        try:
            world_size = self._settings.place(view)[1]
            require(self._settings, samples, world_size=world_size, grows=bool(view.dataset))
        except NotYet as short:
            if short.less == "where=":
                self._refuse_values(view)
            self._short = view, short
            raise

    def _refuse_values(self, view: View) -> None:
        """Raise :class:`UsageError` for values that no sample has, while nobody pulls more."""
        with open_cache(self._settings.root, create=False) as cache:
            if not is_pulled(cache):
                raise UsageError(
                    f"none of the {view.samples} samples in {self._settings.root} is selected by"
                    f" where={shown(where_dict(self._settings.where or ()))}, and no pull draws more; give other values"
                )

    def _open(self) -> Subscription:
        root, dataset, paths = self._settings.root, self._settings.dataset, self._settings.paths
        if not paths:
            with open_cache(root, create=False) as cache:
                names = cache.datasets()
                exists = bool(names) and dataset in (None, *names)
                if names and not exists and not is_pulled(cache):
                    raise no_dataset(root, str(dataset), names)
                if not exists or not any(shard.samples for shard in cache.shards(dataset)):
                    if (error := failed_pull(cache, dataset)) is not None:
                        raise error
                    raise no_samples(root, dataset, [] if exists else names)
        return subscribe(paths or root, dataset=dataset, run=self._settings.run)

    def _drop_reading(self) -> None:
        snapshot, self._reading = self._reading, None
        if snapshot is not None:
            self._over.append((snapshot, None))

    def _drop_ahead(self) -> None:
        snapshot, self._ahead = self._ahead, None
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
