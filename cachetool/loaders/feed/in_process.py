"""A feed inside the training process, for notebooks and small jobs: each batch is made when it is asked for.

::

    begin: a snapshot is leased -- take: one batch is made -- ... -- delivered: the epoch counts, its lease ends

No thread makes batches. So ``begin`` takes the snapshot, and no snapshot is taken ahead. A timer gives up the lease
when no more batches are asked for. Data is read rather than mapped, and files are closed while no epoch is under way,
because this process may live for days beside a cache whose shards change.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy.typing as npt

from cachetool.core.block import Column
from cachetool.core.errors import CacheToolError
from cachetool.core.schema import Field, Schema
from cachetool.loaders.feed.batches import Maker
from cachetool.loaders.feed.protocol import Ratios
from cachetool.loaders.feed.transform import Functions
from cachetool.loaders.read.gather import new_array
from cachetool.loaders.read.mapped import MappedParts
from cachetool.loaders.ring.batch_times import BatchTimes, divided
from cachetool.loaders.ring.ring import Lock
from cachetool.loaders.ring.slot import Batch
from cachetool.loaders.settings import Begun, EpochPlan, Settings
from cachetool.loaders.snapshots.epochs import EpochSnapshots
from cachetool.loaders.snapshots.follow import beside
from cachetool.loaders.snapshots.waiting import NotYet, Talk, given_up
from cachetool.loaders.waits import EpochTimes
from cachetool.proc.lines import closed, rebuilt, shared

__all__ = ["InProcess"]

"""Seconds between two looks for samples while there are too few."""
_POLL = 0.2


class InProcess:
    """A :class:`~cachetool.loaders.feed.protocol.Feed` without a process or thread of its own."""

    def __init__(self, settings: Settings, *, functions: Functions) -> None:
        self.pid, self.closed, self.unsure = os.getpid(), False, False
        self._settings, self.times = settings, EpochTimes()
        self._spent = BatchTimes()
        # The owner is noted beside the lock, because a signal handler runs in the thread that it
        # interrupts. It would wait for ever for a lock that its own thread holds.
        self._lock, self._owner = threading.Lock(), 0
        """The lock on the catalog, and the thread that holds it. The timer uses the catalog too."""
        self._timer: threading.Timer | None = None
        self._snapshots = EpochSnapshots(settings, self._published)
        self._sink, self._places = _Sink(), MappedParts(maps=False)
        self._maker = Maker(settings, self._sink, self._places, functions, self._spent)
        self._lacked = 0.0
        self._batches: Iterator[object] = iter(())
        self._making = False

    def begin(self, epoch: int, resume: dict[str, Any] | None = None, ratios: Ratios = ((), ())) -> Begun:
        """See :class:`~cachetool.loaders.feed.protocol.Feed`."""
        self.times, self._lacked = EpochTimes(), 0.0
        plan = self._waited(lambda: self._snapshots.begin(epoch, resume, ratios))
        assert plan.view is not None
        self._places.keep(plan.view)
        self._batches = self._maker.make(plan, plan.view, over=lambda: False)
        # After the snapshot was taken: training waits for that one, but not for these transactions.
        with self._using():
            self._snapshots.finish_epochs()
        self.times.begun(self._lacked)
        return Begun.of(plan, self._settings)

    def prepare(self, epoch: int, resume: dict[str, Any] | None = None, ratios: Ratios = ((), ())) -> Begun:
        """See :class:`~cachetool.loaders.feed.protocol.Feed`."""
        plan = self._waited(lambda: self._snapshots.prepare(epoch, resume, ratios))
        return Begun.of(plan, self._settings)

    def refresh(self) -> None:
        """See :class:`~cachetool.loaders.feed.protocol.Feed`."""
        with self._using():
            self._snapshots.refresh()

    def take(self, generation: int, step: int, most: int) -> list[Batch]:
        """See :class:`~cachetool.loaders.feed.protocol.Feed`."""
        # A second thread, or a handler in the middle of a batch, would mix up the batches of two
        # loops.
        if self._making:
            raise shared()
        self._making = True
        try:
            began, before = time.monotonic(), tuple(self._spent.spent)
            self._spent.resumed()
            next(self._batches, None)
            waited = time.monotonic() - began
            self.times.add(waited, divided(before, self._spent.spent, waited), rest="start")
        finally:
            self._making = False
            # A handler closed the feed while the batch was made, and left the lease to this call.
            if self.closed:
                self._end()
        if self.closed:
            raise closed()
        batch = self._sink.batch
        self._sink.batch = None
        # Another loop over the same loader took the batch, or began another epoch.
        if batch is None or batch[0] != generation:
            raise shared()
        if not isinstance(batch, Batch):
            raise rebuilt(batch[1])
        if batch.step != step:
            raise shared()
        return [batch]

    def half_delivered(self, generation: int) -> None:
        """Do nothing: no snapshot is taken ahead. See :class:`~cachetool.loaders.feed.protocol.Feed`."""

    def delivered(self, generation: int, batches: int) -> None:
        """See :class:`~cachetool.loaders.feed.protocol.Feed`."""
        with self._using():
            self._snapshots.delivered(generation, self.times.delivered(batches))
            if self._snapshots.has_unfinished:
                self._snapshots.finish_epochs()

    def ready(self, generation: int, step: int) -> bool:
        """Return False: no batch is made before it is asked for. See :class:`~cachetool.loaders.feed.protocol.Feed`."""
        return False

    def lock_pages(self, lock: Lock | None) -> None:
        """Do nothing. See :class:`~cachetool.loaders.feed.protocol.Feed`.

        The memory of a batch is new here each time, and locking it costs more than copying it.
        """

    def left(self, generation: int) -> None:
        """See :class:`~cachetool.loaders.feed.protocol.Feed`."""
        # In a forked child the snapshot belongs to the parent.
        if self.pid == os.getpid() and not self.closed:
            self._snapshots.left(generation)
            self._watch(self._settings.hold)

    def regain(self, generation: int) -> bool:
        """See :class:`~cachetool.loaders.feed.protocol.Feed`."""
        with self._using():
            return self._snapshots.regain(generation)

    def state(self, generation: int, reached: int) -> dict[str, Any]:
        """See :class:`~cachetool.loaders.feed.protocol.Feed`."""
        return self._snapshots.state(generation, reached)

    def close(self) -> None:
        """See :class:`~cachetool.loaders.feed.protocol.Feed`. Called by a signal handler in the middle of another call,
        this leaves the lease to that call, which gives it back when it ends."""
        if self.pid != os.getpid():
            return
        self.closed = True
        if not self._making and self._owner != threading.get_ident():
            self._end()

    # -- the catalog ---------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _using(self) -> Iterator[None]:
        """Hold the catalog; afterwards set the timer for what is leased."""
        # A signal handler runs in the middle of a transaction of this same thread.
        if self._owner == threading.get_ident():
            raise closed() if self.closed else shared()
        try:
            with self._lock:
                self._owner = threading.get_ident()
                try:
                    if self.closed:
                        raise closed()
                    yield
                    seconds = self._snapshots.tick()
                    # The timer is set anew after each use, because each use may change when the
                    # lease ends.
                    self._unwatch()
                    if seconds is not None:
                        self._watch(seconds)
                finally:
                    self._owner = 0
        finally:
            # A call that was interrupted by close() gives the lease back here, after the lock is
            # free.
            if self.closed:
                self._end()

    def _waited(self, attempt: Callable[[], EpochPlan]) -> EpochPlan:
        settings = self._settings
        talk = Talk(settings.root, settings.wait, dataset=settings.dataset)
        while True:
            try:
                with self._using():
                    return attempt()
            except NotYet as short:
                if talk.over:
                    raise given_up(settings, short) from None
                talk.tell(short)
            # Outside the lock, so that another thread can close the loader while this one waits.
            time.sleep(_POLL)
            self._lacked += _POLL

    def _published(self, plan: EpochPlan) -> None:
        if plan.view is None:
            # The loader is idle: open files would keep deleted shards on the disk.
            self._batches = iter(())
            self._places.close()

    def _watch(self, seconds: float) -> None:
        """Look after ``seconds`` seconds whether the lease is to be given up."""
        if self._timer is None:
            # An hour at most, because hold= may be infinite, which no timer takes. The timer looks
            # again.
            self._timer = threading.Timer(min(seconds, 3600.0), _look, (weakref.ref(self),))
            self._timer.daemon = True
            self._timer.start()

    def _unwatch(self) -> None:
        timer, self._timer = self._timer, None
        if timer is not None:
            timer.cancel()

    def _end(self) -> None:
        try:
            # In a thread of its own, because the garbage collector may end a loader in the middle
            # of a transaction of this thread.
            beside(self._give_back)
        # The interpreter ends and starts no thread any more.
        except RuntimeError:
            self._give_back()

    def _give_back(self) -> None:
        with self._lock:
            self._unwatch()
            self._batches = iter(())
            self._places.close()
            self._snapshots.close()


def _look(feed: weakref.ref[InProcess]) -> None:
    """Look whether the lease of a loader is to be given up; the function of the timer."""
    # The timer holds a weak reference, so that it keeps no loader alive.
    here = feed()
    if here is not None and not here.closed:
        # The feed may be closed meanwhile.
        with contextlib.suppress(CacheToolError), here._using():
            pass


class _Sink:
    """The batch that was made last, in plain memory; a :class:`~cachetool.loaders.feed.batches.Sink`."""

    def __init__(self) -> None:
        self.batch: Batch | tuple[int, Mapping[str, Any]] | None = None
        self._schema: Schema | None = None

    def open(self, over: Callable[[], bool]) -> bool:
        return True

    def begin(self, schema: Schema) -> None:
        self._schema = schema

    def values(self, field: Field, shape: tuple[int, ...]) -> npt.NDArray[Any]:
        return new_array(field, shape)

    def commit(self, generation: int, step: int, columns: Mapping[str, Column]) -> None:
        assert self._schema is not None
        self.batch = Batch(generation, step, self._schema, columns)

    def fail(self, generation: int, step: int, error: Mapping[str, Any]) -> None:
        self.batch = generation, error
