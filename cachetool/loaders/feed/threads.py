"""A feed without child processes: the same engine in one thread of this process, for notebooks and small jobs.

It shares the GIL with whatever else runs here. Data is read, not mapped, and files are closed when no epoch is under
way: this process may stay for days beside a cache whose shards come and go.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from queue import Empty, SimpleQueue
from typing import Any

import numpy.typing as npt

from cachetool.cache.catalog import statements
from cachetool.core.block import Column
from cachetool.core.schema import Field, Schema
from cachetool.loaders.feed.batches import Mailbox, work
from cachetool.loaders.feed.protocol import EpochTimes
from cachetool.loaders.feed.transform import Function, Transform
from cachetool.loaders.read.gather import new_array
from cachetool.loaders.read.mapped import MappedParts
from cachetool.loaders.ring.ring import Lock
from cachetool.loaders.ring.slot import Batch
from cachetool.loaders.settings import Begun, Settings
from cachetool.loaders.snapshots.epochs import EpochSnapshots
from cachetool.loaders.snapshots.resume import asked_for
from cachetool.loaders.snapshots.waiting import NotYet, Talk, given_up
from cachetool.proc.lines import closed, described, rebuilt, shared

__all__ = ["Thread"]

_READY = 2
_POLL = 0.2
_LOOK = 0.5
_GRACE = 2.0
"""Seconds that the thread has to end when it is stopped. It may be in the middle of a transform; and where a signal's
handler stops it, the thread that was interrupted may have the lock that this one waits for."""


class Thread:
    """A :class:`~cachetool.loaders.feed.protocol.Feed` in this process."""

    def __init__(self, settings: Settings, *, transform: Function | None) -> None:
        self.pid, self.closed, self.unsure = os.getpid(), False, False
        self._settings = settings
        self._statements = self._generation = 0
        self._mailbox = Mailbox()
        self._snapshots = EpochSnapshots(settings, self._mailbox.put)
        self._lock, self._pace = threading.Lock(), EpochTimes()
        self._duties = _Duties(self._snapshots, self._lock)
        self._queue = _Queue(settings.prefetch or _READY, self._duties.due)
        self._thread = threading.Thread(
            target=_run,
            args=(settings, self._mailbox, self._queue, self._duties, transform),
            name="cachetool-feeder",
            daemon=True,
        )
        self._thread.start()

    def begin(self, epoch: int, resume: dict[str, Any] | None = None) -> Begun:
        """See :class:`~cachetool.loaders.feed.protocol.Feed`."""
        self._pace = EpochTimes()
        surely = statements() != self._statements
        begun = self._waited(lambda: self._snapshots.begin(epoch, asked_for(resume), surely=surely))
        with self._lock:
            self._snapshots.finish_epochs()
        self._pace.begun()
        self._statements, self._generation = 0, begun.generation
        return begun

    def prepare(self, epoch: int, resume: dict[str, Any] | None = None) -> Begun:
        """See :class:`~cachetool.loaders.feed.protocol.Feed`."""
        surely = statements() != self._statements
        begun = self._waited(lambda: self._snapshots.prepare(epoch, asked_for(resume), surely=surely))
        if begun.generation != self._generation:
            self._statements = statements()
        return begun

    def _waited(self, attempt: Any) -> Begun:
        settings = self._settings
        until, talk = time.monotonic() + settings.wait, Talk(settings.root, settings.wait, dataset=settings.dataset)
        while True:
            try:
                with self._lock:
                    if self.closed:
                        raise closed()
                    if not self._duties.over:
                        return Begun.of(attempt(), settings)
                raise self._failed()
            except NotYet as short:
                if time.monotonic() >= until:
                    raise given_up(settings, short) from None
                talk.tell(short)
            time.sleep(_POLL)

    def take(self, generation: int, step: int, most: int) -> list[Batch]:
        """See :class:`~cachetool.loaders.feed.protocol.Feed`."""
        while True:
            item = self._queue.get(self._pace)
            if item is None:
                raise closed() if self.closed else self._failed()
            if isinstance(item, Batch):
                if item.generation == generation:
                    if item.step != step:
                        raise shared()
                    return [item]
            elif item[0] == generation:
                raise rebuilt(item[1])

    def _failed(self) -> Exception:
        """Why the thread ended by itself."""
        self.close()
        return rebuilt(self._queue.failure)

    def delivered(self, generation: int, batches: int) -> None:
        """See :class:`~cachetool.loaders.feed.protocol.Feed`."""
        with self._lock:
            self._snapshots.delivered(generation, self._pace.delivered(batches))
            if self._snapshots.has_unfinished:
                self._snapshots.finish_epochs()

    def ready(self, generation: int, step: int) -> bool:
        """See :class:`~cachetool.loaders.feed.protocol.Feed`."""
        return self._queue.ready

    def lock_pages(self, lock: Lock | None) -> None:
        """See :class:`~cachetool.loaders.feed.protocol.Feed`: what is new with each batch costs more to lock than to
        copy."""

    def left(self, generation: int) -> None:
        """See :class:`~cachetool.loaders.feed.protocol.Feed`."""
        self._duties.left = generation

    def regain(self, generation: int) -> bool:
        """See :class:`~cachetool.loaders.feed.protocol.Feed`."""
        with self._lock:
            self._duties.left = 0
            return self._snapshots.regain(generation)

    def state(self, generation: int, reached: int) -> dict[str, Any]:
        """See :class:`~cachetool.loaders.feed.protocol.Feed`."""
        with self._lock:
            return asdict(self._snapshots.state(generation, reached))

    def close(self) -> None:
        """See :class:`~cachetool.loaders.feed.protocol.Feed`."""
        if self.pid != os.getpid():
            return
        self.closed = True
        self._mailbox.close()
        self._queue.close()
        if self._thread is not threading.current_thread():  # which may collect the loader in the middle of its duties
            self._thread.join(_GRACE)


class _Duties:
    """What the thread does beside its batches."""

    def __init__(self, snapshots: EpochSnapshots, lock: threading.Lock) -> None:
        self._snapshots, self._lock = snapshots, lock
        self.left = 0
        """Generation of an epoch that was left."""
        self.over = False
        """Whether everything was given back."""

    def exhausted(self, generation: int) -> None:
        """All batches of a plan are made."""
        with self._lock:
            self._snapshots.exhausted(generation)

    def end(self) -> None:
        """The thread ends, and gives everything back."""
        with self._lock:
            self.over = True
            self._snapshots.close()

    def due(self) -> None:
        """Called now and then while there is nothing else to do."""
        with self._lock:
            left, self.left = self.left, 0
            self._snapshots.left(left)
            self._snapshots.tick()
            if self._snapshots.has_unfinished:
                self._snapshots.finish_epochs()


def _run(settings: Settings, mailbox: Mailbox, queue: _Queue, duties: _Duties, function: Function | None) -> None:
    """The thread; it knows nothing of the loader, which can be collected while this runs."""
    try:
        transform = (
            None
            if function is None
            else Transform(function, transform_each=settings.transform_each, seed=settings.seed)
        )
        work(
            settings,
            mailbox,
            queue,
            MappedParts(maps=False),
            transform=transform,
            number=0,
            feeders=1,
            exhausted=duties.exhausted,
            due=duties.due,
        )
    except BaseException as error:  # noqa: BLE001 - without this thread the training thread would wait for ever
        queue.failure = described(error)
    duties.end()
    queue.end()


class _Queue:
    """Batches in plain memory; a :class:`~cachetool.loaders.feed.batches.Sink`.

    A signal's handler may end it in the middle of any call of the training thread: hence queues whose ``put`` allows
    that.
    """

    def __init__(self, ready: int, due: Callable[[], None]) -> None:
        self._due = due
        self._items: SimpleQueue[Batch | tuple[int, Mapping[str, Any]] | None] = SimpleQueue()
        self._room: SimpleQueue[None] = SimpleQueue()
        for _ in range(ready):
            self._room.put(None)
        self._schema: Schema | None = None
        self.failure: Mapping[str, Any] = {}
        """Why the thread ended."""

    @property
    def ready(self) -> bool:
        """Whether there is a batch or an error, or will be none."""
        return not self._items.empty()

    def get(self, pace: EpochTimes) -> Batch | tuple[int, Mapping[str, Any]] | None:
        """The next batch or error, waited for; None when the thread ended."""
        if self._items.empty():  # nobody else takes anything out
            with pace.waiting():
                item = self._items.get()
        else:
            item = self._items.get()
        if item is not None:
            self._room.put(None)
        return item

    def open(self, over: Callable[[], bool]) -> bool:
        while not self._roomy():
            self._due()
            if over():
                return False
        if over():
            self._room.put(None)
            return False
        return True

    def _roomy(self) -> bool:
        try:
            self._room.get(timeout=_LOOK)
        except Empty:
            return False
        return True

    def begin(self, schema: Schema) -> None:
        self._schema = schema

    def values(self, field: Field, shape: tuple[int, ...]) -> npt.NDArray[Any]:
        return new_array(field, shape)

    def commit(self, generation: int, step: int, columns: Mapping[str, Column]) -> None:
        assert self._schema is not None
        self._items.put(Batch(generation, step, self._schema, columns))

    def fail(self, generation: int, step: int, error: Mapping[str, Any]) -> None:
        self._items.put((generation, error))

    def end(self) -> None:
        """There will be no more."""
        self._items.put(None)

    def close(self) -> None:
        """Let a thread that waits for room go on: what it makes is thrown away. And one that waits for a batch."""
        self._room.put(None)
        self.end()
