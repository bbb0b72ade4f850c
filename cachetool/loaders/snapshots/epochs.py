"""The choice of the snapshot for each epoch: the catalog's side of a loader, run by one of its feeders.

One rule decides. The snapshot of epoch e + 1 is taken once, when all batches of e are made and half of them were
delivered. It fixes the samples of that epoch, and so its length. :meth:`EpochSnapshots.refresh` discards it, and the
next epoch then reads the newest snapshot. It is given up ``hold`` seconds after e ended or was left, so that a long
validation or an idle notebook keeps nothing on the disk. The first snapshot is taken by the first ``begin``, or by
``prepare``, which needs the length.

The states are named by what is leased: ``reading`` is the snapshot of the current epoch, ``ahead`` that of the next::

    leased           made, and        delivered   refresh   prepare          begin     held too long
                     half delivered
    nothing          -                -           -         ahead            reading   -
    ahead            -                -           nothing   -                reading   nothing
    reading          reading, ahead   nothing     -         reading, ahead   reading   nothing
    reading, ahead   -                ahead       reading   -                reading   nothing

``begin`` uses the snapshot ahead if it was taken for this epoch, otherwise the newest.

With ``split="validation"`` no snapshot is taken ahead. The loader is idle until the next validation, which shall see
the samples that arrive meanwhile; batches made ahead would be stale or given up.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from cachetool.cache import open_cache
from cachetool.cache.history import Delivered
from cachetool.core.errors import CacheToolError, CapacityError, UsageError
from cachetool.core.text import shown
from cachetool.loaders.items import Items
from cachetool.loaders.mixture import Shares, drawn
from cachetool.loaders.settings import EpochPlan, Settings, rows, where_dict
from cachetool.loaders.snapshots.follow import Leases, Subscription, subscribe
from cachetool.loaders.snapshots.mixed import MixedSubscription
from cachetool.loaders.snapshots.resume import Resume, resumed
from cachetool.loaders.snapshots.waiting import NotYet, failed_pull, is_pulled, no_dataset, no_samples, require, say
from cachetool.loaders.view import View

__all__ = ["EpochSnapshots"]


@dataclass(frozen=True, slots=True)
class _EpochSnapshot:
    plan: EpochPlan
    lease: Leases
    parts: Sequence[Sequence[Any]]
    """All parts of the epoch as rows, those that it lost too."""
    resume: Resume | None
    ratio: Shares = ()
    """The shares of the datasets of a mixture that were asked for."""


class EpochSnapshots:
    """The snapshots of a loader's epochs: takes them and gives them back. ``publish`` tells all feeders of each new
    plan.

    One thread at a time may call its methods.
    """

    def __init__(self, settings: Settings, publish: Callable[[EpochPlan], None]) -> None:
        self._settings, self._publish = settings, publish
        self._items = Items(settings)
        self._told = False
        self._free: list[Leases] = []
        self._newest: Leases | None = None
        """The subscription that was asked for a view last."""
        self._view: View | None = None
        # The rows of the view's parts, kept because resuming needs them after the lease has ended.
        self._rows: Sequence[Sequence[Any]] = ()
        self._short: tuple[View, NotYet] | None = None
        self._generation = 0
        self.seconds: float = 0.0
        """Time that the last snapshot ahead took."""
        self._reading: _EpochSnapshot | None = None
        self._ahead: _EpochSnapshot | None = None
        self._awaited: set[str] = set()
        """Events of the epoch being read that must come before the next snapshot is taken; empty if none is taken
        ahead."""
        self._until: float | None = None
        """The time at which what is leased is given up; None while an epoch is read."""
        self._begun: _EpochSnapshot | None = None
        """The epoch begun last. Its lease may have ended."""
        self._reads: Sequence[float] = ()
        """Fraction of each dataset of a mixture that the last epoch read; of its samples as many are renewed."""
        self._following: Shares = ()
        """The shares of a mixture for the epoch after the one begun last."""
        self._over: list[tuple[_EpochSnapshot, Delivered | None]] = []
        """Epochs that ended, and their times; None for an epoch that does not count here: broken off, or counted by
        another rank."""

    def begin(
        self, epoch: int, left_over: Mapping[str, Any] | None = None, ratios: Sequence[Sequence[int]] = ((), ())
    ) -> EpochPlan:
        """Start an epoch on the snapshot taken for it, otherwise on the newest, or on what is left of an earlier one.

        ``ratios``: the shares of the datasets of a mixture in this epoch and in the next one.

        Raises :class:`NotYet`, and :class:`UsageError` when samples of an epoch that is resumed are gone.
        """
        resume = Resume.of(left_over)
        ratio, self._following = map(tuple, ratios)
        if self._fits(epoch, resume, ratio):
            # The epoch before was broken off: its other batches need not be made.
            if self._reading is not None:
                self._cut()
            ahead = self._ahead
            assert ahead is not None
        else:
            # A snapshot to resume must not be given back before it is taken again: its shards could
            # be evicted in between.
            if resume is None:
                self._drop_ahead()
            lease, self._ahead = None if self._ahead is None else self._ahead.lease, None
            # Given back before the next one is taken: the processes of a run share a snapshot as
            # long as any of them has it, and would get the old one again.
            self._drop_reading()
            self.finish_epochs()
            ahead = self._take(epoch, resume, lease, ratio=ratio)
            self._publish(ahead.plan)
        self._drop_reading()
        self._reading = self._begun = ahead
        self._ahead, self._until = None, None
        # Half delivered, because a short epoch fits into the ring as a whole. Without it the next
        # epoch would be as old as the beginning of this one.
        self._awaited = set() if self._settings.split == "validation" else {"made", "half"}
        return ahead.plan

    def prepare(
        self, epoch: int, left_over: Mapping[str, Any] | None = None, ratios: Sequence[Sequence[int]] = ((), ())
    ) -> EpochPlan:
        """Return the plan that :meth:`begin` will start, or the current plan if it is of this epoch and nothing is
        resumed.

        Raises the errors of :meth:`begin`.
        """
        resume = Resume.of(left_over)
        if self._reading is not None and self._reading.plan.epoch == epoch and resume is None:
            return self._reading.plan
        ratio = tuple(ratios[0])
        if not self._fits(epoch, resume, ratio):
            self._drop_ahead()
            self._take_ahead(epoch, resume, ratio=ratio, follows=False)
            self._until = time.monotonic() + self._settings.hold
        assert self._ahead is not None
        return self._ahead.plan

    def refresh(self) -> None:
        """Discard the snapshot ahead, so that the next epoch reads the newest."""
        if self._ahead is None:
            return
        self._drop_ahead()
        if self._reading is None:
            # A plan without a view: feeders stop making batches of the discarded snapshot and close
            # its files.
            self._publish(EpochPlan(self._next(), 0, None))

    def made(self, generation: int) -> None:
        """Note that all batches of a plan, or nearly all, are made."""
        self._happened("made", generation)

    def half_delivered(self, generation: int) -> None:
        """Note that half of the batches of a plan were delivered."""
        self._happened("half", generation)

    def under_way(self, generation: int, pace: Delivered) -> None:
        """Note the times so far of the epoch that is read."""
        reading = self._reading
        if reading is not None and reading.plan.generation == generation:
            reading.lease.under_way(pace, epoch=reading.plan.epoch)

    def delivered(self, generation: int, pace: Delivered) -> None:
        """Note that the last batch of a plan was delivered. :meth:`finish_epochs` counts the epoch and ends its
        lease."""
        reading = self._reading
        if reading is None or reading.plan.generation != generation:
            return
        # With split= or where= an epoch reads fewer samples than its snapshot has.
        if self._items.chooses or self._settings.crop is not None or self._settings.mixture is not None:
            pace = pace._replace(samples=reading.plan.samples)
        # Ranks agreed on fewer steps, so the batches that are left would only fill slots.
        if pace.batches < reading.plan.steps(self._settings).count:
            self._cut()
        self._reading, self._until = None, time.monotonic() + self._settings.hold
        # Only rank 0 counts the epoch: all ranks read the same snapshot, which shall count once.
        self._over.append((reading, pace if reading.plan.steps(self._settings).rank == 0 else None))
        if self._ahead is None:
            self._publish(EpochPlan(self._next(), 0, None))

    @property
    def has_unfinished(self) -> bool:
        """Return True if :meth:`finish_epochs` has something to do that may be done now."""
        # A rank that begins an epoch late must find the lease of the ranks that have finished it.
        # So with several ranks a lease ends only when its rank begins the next epoch.
        return bool(self._over) and self._over[0][0].plan.steps(self._settings).world_size == 1

    def finish_epochs(self) -> None:
        """Count the epochs that ended and give their leases back. No caller needs to wait for these transactions."""
        while self._over:
            snapshot, pace = self._over.pop(0)
            self._done_with(snapshot.lease, pace)

    def state(self, generation: int, reached: int) -> dict[str, Any]:
        """Return where to resume the current epoch after all ranks have read ``reached`` samples of its plan.

        Raises :class:`UsageError` when another epoch was begun meanwhile.
        """
        snapshot = self._begun
        if snapshot is None or snapshot.plan.generation != generation:
            raise UsageError("this epoch has no state any more, because another epoch began")
        plan, parts = snapshot.plan, snapshot.parts
        if not plan.lost:
            members = [] if plan.view is None else list(plan.view.members)
            return Resume(reached, plan.samples, parts, members, list(plan.ratio))._asdict()
        # Positions are those of the first plan: an epoch may be resumed several times, and lose
        # shards each time.
        positions, _ = plan.left(self._settings)
        return Resume(int(positions[reached]), plan.of[0], parts)._asdict()

    def left(self, generation: int) -> None:
        """Let the lease of an epoch end soon, because its iterator was deleted."""
        if self._reading is not None and self._reading.plan.generation == generation:
            self._until = time.monotonic() + self._settings.hold

    def regain(self, generation: int) -> bool:
        """Keep the snapshot of an epoch that was :meth:`left`. Return False if it was given up before."""
        if self._reading is None or self._reading.plan.generation != generation:
            return False
        self._until = None
        return True

    def tick(self) -> float | None:
        """Give up what is leased when its time is over. Return the seconds until then; None if no time is set."""
        if self._until is None or not (self._reading or self._ahead or self._over):
            return None
        if (left := self._until - time.monotonic()) > 0:
            # At most an hour, because hold= may be infinite.
            return min(left, 3600.0)
        self._until = None
        self._drop_reading()
        self._drop_ahead()
        self.finish_epochs()
        self._publish(EpochPlan(self._next(), 0, None))
        return None

    def close(self) -> None:
        """Give all leases back."""
        self._drop_reading()
        try:
            # First, because there may be little time: an epoch that is not counted here is never
            # counted.
            self.finish_epochs()
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
        mixture = self._settings.mixture
        # The weights of the next epoch are not known before it begins.
        if mixture is not None and mixture.members and not self._following:
            return
        # The error comes again when that epoch begins, where somebody hears of it.
        with contextlib.suppress(Exception):
            self._take_ahead(following, ratio=self._following, follows=True)

    def _fits(self, epoch: int, resume: Resume | None, ratio: Shares) -> bool:
        """Return True if the snapshot ahead was taken for this epoch."""
        ahead = self._ahead
        if ahead is None or ahead.plan.epoch != epoch or ahead.resume != resume:
            return False
        # A resumed epoch has the shares that it began with.
        return resume is not None or ahead.ratio == ratio

    def _take_ahead(self, epoch: int, resume: Resume | None = None, *, ratio: Shares, follows: bool) -> None:
        """Take the snapshot ahead. ``follows`` is true while feeders may still be making the current epoch."""
        began = time.monotonic()
        snapshot = self._take(epoch, resume, ratio=ratio)
        self._ahead = replace(snapshot, plan=replace(snapshot.plan, follows=follows))
        self._publish(self._ahead.plan)
        self.seconds = time.monotonic() - began

    def _cut(self) -> None:
        """Tell the feeders that the batches left of the current epoch need not be made."""
        if self._ahead is not None and self._ahead.plan.follows:
            self._ahead = replace(self._ahead, plan=replace(self._ahead.plan, follows=False))
            self._publish(self._ahead.plan)

    def _next(self) -> int:
        self._generation += 1
        return self._generation

    def _take(self, epoch: int, resume: Resume | None, lease: Leases | None = None, *, ratio: Shares) -> _EpochSnapshot:
        """Take a snapshot for an epoch. ``lease`` is one of a snapshot that is given back unread for it."""
        lease = lease or (self._free.pop() if self._free else self._open())
        try:
            if self._newest is not None:
                lease.share(self._newest)
            self._newest = lease
            if resume is not None:
                # A snapshot for resuming evicts nothing for a pull: the shards that would be evicted
                # may be those that it is to read.
                view = self._same(lease.newest(epoch=epoch, peek=True, anew=True))
                plan = resumed(
                    self._next(), epoch, view, resume, settings=self._settings,
                    count=lambda view: self._count(view, tuple(resume.ratio), epoch),
                )  # fmt: skip
                return _EpochSnapshot(plan, lease, resume.parts, resume)
            # Nothing changed since there were too few samples, so looking again would give the
            # same.
            if self._short is not None and not lease.moved(self._short[0]):
                raise self._short[1]
            view, samples = self._enough(lease, epoch, ratio)
            self._short = None
            plan = EpochPlan(self._next(), epoch, view, samples, ratio=ratio or self._items.of(view).ratio)
            return _EpochSnapshot(plan, lease, self._rows, None, ratio)
        except BaseException:
            self._done_with(lease, unread=True)
            raise

    def _enough(self, lease: Leases, epoch: int, ratio: Shares) -> tuple[View, int]:
        """Return the newest view and its number of samples.

        A view that leaves the newest shards for the next epoch is used only if it has enough samples.
        """
        view = self._same(lease.newest(epoch=epoch, sparing=True, anew=True, reads=self._reads))
        if lease.spared:
            with contextlib.suppress(NotYet):
                return view, self._required(view, ratio, epoch)
            view = self._same(lease.newest(epoch=epoch, anew=True, reads=self._reads))
        return view, self._required(view, ratio, epoch)

    def _same(self, view: View) -> View:
        """Return the same object as long as the view does not change, because feeders then have its shards open
        already."""
        if self._view is not None and view == self._view:
            return self._view
        self._view, self._rows = view, rows(view.parts)
        return view

    def _count(self, view: View, ratio: Shares, epoch: int) -> int:
        """Return the number of samples that an epoch reads."""
        numbers = self._items.of(view)
        if numbers.alone and not self._told and self._settings.rank == 0:
            self._told = True
            kept = 0 if numbers.chosen is None else len(numbers.chosen)
            say(
                f"offsets= leaves out {numbers.alone} of {numbers.alone + kept} samples, because the cache lacks a"
                " neighbour of each; pull with --runs to draw neighbours together"
            )
        mixture = self._settings.mixture
        if mixture is None:
            return numbers.total
        if mixture.sample_weights:
            return mixture.epoch_samples or numbers.total
        ratio = ratio or numbers.ratio
        items = list(map(len, numbers.groups))
        if len(ratio) != len(items):
            raise UsageError(f"the state of this epoch has {len(ratio)} datasets, but the mixture {len(items)}")
        for number, (share, count) in enumerate(zip(ratio, items, strict=True)):
            if share and not count:
                member = mixture.members[number]
                chooses = " that where=, split= or offsets= selects" if self._items.chooses else ""
                short = NotYet(f"no samples of dataset {shown(member.name)}{chooses} in {member.root}")
                self._short = view, short
                raise short
        settings = self._settings
        batch, whole = settings.whole_batches, settings.multiple
        draws = mixture.length(ratio, items, epoch=epoch, batch=batch, whole=whole) if ratio else 0
        if mixture.members and ratio:
            self._reads = tuple((drawn(ratio, draws) / np.maximum(items, 1)).tolist())
        return draws

    def _required(self, view: View, ratio: Shares, epoch: int) -> int:
        """Return the number of samples that an epoch reads. Raises :class:`NotYet` if the cache has too few."""
        samples = self._count(view, ratio, epoch)
        # The samples of a mixture may be drawn again and again, so those that are there are counted.
        self._require(view, samples if self._settings.mixture is None else self._items.of(view).total)
        settings = self._settings
        if settings.mixture is not None:
            whole = settings.drop_last or settings.whole_batches > 1
            need = settings.place(view)[1] * (settings.batch_size if whole else 1)
            if samples < need:
                batches = f" in complete batches of {settings.batch_size}" if whole else ""
                raise UsageError(
                    f"an epoch of {samples} samples is too short for world_size={settings.place(view)[1]}{batches}; use"
                    " a larger epoch_samples="
                )
        return samples

    def _require(self, view: View, samples: int) -> None:
        try:
            world_size = self._settings.place(view)[1]
            require(self._settings, samples, world_size=world_size, grows=bool(view.dataset))
        except NotYet as short:
            if short.less in ("where=", "offsets="):
                self._refuse_values(view, short.less)
            self._short = view, short
            raise

    def _refuse_values(self, view: View, option: str) -> None:
        """Raise :class:`UsageError` for values that no sample has, or neighbours, while no pull runs."""
        with open_cache(self._settings.root, create=False) as cache:
            # While a pull runs, such samples may still come.
            if is_pulled(cache):
                return
            if option == "offsets=":
                raise UsageError(
                    f"none of the {view.samples} samples in {self._settings.root} has all neighbours of offsets=, and"
                    " no pull is running; use other numbers of rows"
                )
            raise UsageError(
                f"where={shown(where_dict(self._settings.where or ()))} selects none of the {view.samples} samples"
                f" in {self._settings.root}, and no pull is running; use other values"
            )

    def _open(self) -> Leases:
        settings = self._settings
        if settings.mixture is None or not settings.mixture.members:
            # Files have one view for ever and no lease, so all epochs share a subscription.
            if settings.paths and self._newest is not None:
                return self._newest
            return self._opened(settings.root, settings.dataset, settings.paths)
        members: list[Subscription] = []
        try:
            for one in settings.mixture.members:
                members.append(self._opened(one.root, one.dataset, one.paths))
        except BaseException:
            for member in members:
                member.close()
            raise
        fields = settings.stored_fields
        asked = None if fields is None else [*fields, *(name for name, _ in settings.where or ())]
        return MixedSubscription(members, settings.mixture, asked)

    def _opened(self, root: str, dataset: str | None, paths: Sequence[str]) -> Subscription:
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

    def _done_with(self, lease: Leases, pace: Delivered | None = None, *, unread: bool = False) -> None:
        """Count an epoch if it counts, and give its lease back.

        Failures are printed, because no caller waits for this. If the catalog is lost, the next epoch that begins
        raises.
        """
        reported = False
        try:
            if pace is not None:
                lease.served(pace, last=True)
        except CapacityError:
            # The disk is full, so the epoch cannot be counted; it was delivered all the same.
            pass
        except (CacheToolError, OSError) as error:
            say(f"a finished epoch could not be counted in the cache: {error}")
            reported = True
        finally:
            self._free.append(lease)
            try:
                lease.release(unread=unread)
            except (CacheToolError, OSError) as error:
                if not reported:
                    say(f"a snapshot could not be released and stays leased until this process ends: {error}")
