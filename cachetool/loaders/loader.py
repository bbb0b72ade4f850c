"""What the loaders of all frameworks are: an epoch at each ``iter()``, state, and the feed behind them.

The lengths that ``len()`` of a loader returned, and the one line about a trainer that kept an old one.

A trainer that asks for the length once, and then takes so many batches of every epoch, trains a growing cache only in
part, without an error anywhere. The loader sees this: an epoch is left exactly where another epoch would have ended.

The arguments of a loader, checked once and kept as :class:`~cachetool.loaders.settings.Settings`.
"""

from __future__ import annotations

import os
import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Generic, NoReturn, TypeAlias, TypeVar

from cachetool.cache import CacheDir
from cachetool.cache.forking import members
from cachetool.core.closing import Closing
from cachetool.core.errors import CacheToolError, UsageError
from cachetool.core.schema import names_of
from cachetool.core.text import shown
from cachetool.core.units import is_one_of, parse_duration, parse_flag, parse_text, parse_whole
from cachetool.loaders.epoch import Epoch, Progress
from cachetool.loaders.feed.processes import Processes
from cachetool.loaders.feed.protocol import Feed
from cachetool.loaders.feed.transform import Function, dumps
from cachetool.loaders.fixed_epochs import FixedEpochs
from cachetool.loaders.order import SHUFFLES, Steps, parse_epoch
from cachetool.loaders.other_names import OF_LOADERS, answering
from cachetool.loaders.ranks import given, launched, on_node
from cachetool.loaders.ring.memory import MOST_KEPT
from cachetool.loaders.ring.slot import Batch
from cachetool.loaders.selection import WhereOption, parse_where
from cachetool.loaders.settings import Settings, where_dict
from cachetool.loaders.snapshots.follow import launched_run, subscribe
from cachetool.loaders.snapshots.plain_files import located
from cachetool.loaders.snapshots.resume import SAVED, STATE, require_same, require_state
from cachetool.loaders.snapshots.waiting import say
from cachetool.loaders.split import parse_split

__all__ = ["BaseLoader", "CacheOrPaths", "Lengths", "parse_arguments"]

_LEAST = {"batch_size": 1, "seed": None, "workers": 0}


def parse_arguments(cache_or_paths: Any, options: Mapping[str, Any]) -> tuple[Settings, int | None, int]:
    """Return the settings of a loader, its ``steps=`` and its ``workers=``.

    ``options`` has the keyword arguments of :class:`cachetool.loaders.numpy.Loader`. The settings are those of the only
    process of a run; :meth:`BaseLoader._placed` adds rank, world size and run. Raises :class:`UsageError` naming the
    argument and its value.
    """
    values = dict(options)
    for name, least in _LEAST.items():
        values[name] = parse_whole(values[name], what=f"{name}=", least=least)
    for name in ("prefetch", "steps", "epochs", "min_samples"):
        if values[name] is not None:
            values[name] = parse_whole(values[name], what=f"{name}=", least=None if name == "prefetch" else 1)
    for name in ("drop_last", "verify", "concurrent"):
        values[name] = parse_flag(values[name], what=f"{name}=")
    for name in ("wait", "hold"):
        values[name] = parse_duration(values[name], what=f"{name}=")
    values["validation"] = parse_split(values["split"], values["validation"])
    values["where"] = parse_where(values["where"])
    _check(values)
    if isinstance(cache_or_paths, CacheDir):
        cache_or_paths.settle_cap()  # the feeders must find it on disk, as it is to be
    root, paths = located(cache_or_paths, values["dataset"])
    values["min_each"] = values["min_samples"] is None
    if values["min_each"]:
        may_be_few = values["split"] == "validation" or values["where"] is not None
        values["min_samples"] = 1 if may_be_few else values["batch_size"]
    values |= {
        "root": str(root),
        "paths": tuple(map(str, paths)),
        "fields": None if values["fields"] is None else names_of(values["fields"]),
        "shuffle": SHUFFLES[values["shuffle"]],
        "rank": 0,
        "world_size": 1,
        "node": (0, 1),
    }
    settings = Settings(**{name: values[name] for name in Settings.__dataclass_fields__})
    return settings, values["steps"], values["workers"]


def _check(values: Mapping[str, Any]) -> None:
    _require(is_one_of(values["shuffle"], SHUFFLES), "shuffle", values["shuffle"], "'full', 'window' or False")
    prefetch = values["prefetch"]
    _require(prefetch is None or 1 <= prefetch <= MOST_KEPT, "prefetch", prefetch, f"1 to {MOST_KEPT} batches")
    transform_each, transform = values["transform_each"], values["transform"]
    _require(is_one_of(transform_each, ("sample", "batch")), "transform_each", transform_each, "'sample' or 'batch'")
    _require(transform is None or callable(transform), "transform", transform, "a function")
    dataset, run = values["dataset"], values["run"]
    _require(dataset is None or (isinstance(dataset, str) and dataset != ""), "dataset", dataset, "a name")
    _require(run is None or isinstance(run, str), "run", run, "a name")
    for name in ("dataset", "run"):
        if values[name] is not None:
            parse_text(values[name], what=f"{name}=")
    missing = values["missing"]
    _require(is_one_of(missing, ("error", "skip")), "missing", missing, "'error' or 'skip'")


def _require(good: bool, name: str, value: object, wanted: str) -> None:
    if not good:
        raise UsageError(f"{name}={shown(value)} cannot be used: {wanted}")


_KEPT = 64
"""Epochs whose lengths are remembered."""


class Lengths:
    """The lengths told by one loader, and whether its present epoch is left at one of another epoch."""

    def __init__(self) -> None:
        self._by_epoch: dict[int, int] = {}
        self._warned = False
        self.progress: Progress | None = None
        """Progress of the epoch that was begun last. The loader has it too; but this object is checked when the loader
        is collected, so it must not refer to the loader."""

    def tell(self, epoch: int, length: int) -> int:
        """Note that ``len()`` returned ``length`` for this epoch, and return it."""
        self._by_epoch.pop(epoch, None)  # so that the epochs asked for last stay
        self._by_epoch[epoch] = length
        if len(self._by_epoch) > _KEPT:
            del self._by_epoch[next(iter(self._by_epoch))]
        return length

    def forget(self) -> None:
        """Forget all lengths. An integration that asks for the length of each epoch calls this before, because an epoch
        that is left at an older length is then left on purpose: by early stopping, or at a number of steps."""
        self._by_epoch.clear()

    def check(self) -> None:
        """Say once on stderr, on rank 0, that the epoch begun last was left at the length of another epoch.

        Called when the next epoch begins, when the loader is closed, and at the latest when it is collected or the
        process ends.
        """
        progress, self.progress = self.progress, None
        if progress is None or self._warned or not progress.left or progress.feed.pid != os.getpid():
            return
        if progress.begun.steps.rank:
            return  # rank 0 says it for all
        epoch, reached = progress.begun.epoch, progress.before + progress.step
        others = [number for number, length in self._by_epoch.items() if length == reached and number != epoch]
        if not others or self._by_epoch.get(epoch) == reached:
            return
        self._warned = True
        say(
            f"epoch {epoch} was left after {reached} of {progress.before + progress.steps} batches, the length of epoch"
            f" {others[-1]}: the trainer kept that length, so what came to the cache since is not trained; use"
            " loader.epochs_of(steps=N), or the integration for this trainer in docs/trainers.md"
        )


T = TypeVar("T")
CacheOrPaths: TypeAlias = CacheDir | str | Path | Sequence[str | Path]
"""An open cache, its folder, or one or several shards outside any cache."""


class BaseLoader(Closing, ABC, Generic[T]):
    """Batches of a cache, epoch by epoch. See :class:`cachetool.loaders.numpy.Loader` for the arguments."""

    @answering(OF_LOADERS)
    def __init__(
        self,
        cache_or_paths: CacheOrPaths,
        *,
        batch_size: int,
        fields: str | Sequence[str] | None = None,
        shuffle: str | bool = "full",
        seed: int = 0,
        drop_last: bool = False,
        rank: int | None = None,
        world_size: int | None = None,
        steps: int | None = None,
        workers: int = 2,
        prefetch: int | None = None,
        transform: Function | None = None,
        transform_each: str = "sample",
        dataset: str | None = None,
        run: str | None = None,
        split: str | None = None,
        validation: float | str | None = None,
        where: WhereOption | None = None,
        min_samples: int | None = None,
        wait: float | str = 600.0,
        hold: float | str = 60.0,
        epochs: int | None = None,
        missing: str = "error",
        verify: bool = False,
        concurrent: bool = False,
    ) -> None:
        self._settings, self._limit, self._workers = parse_arguments(cache_or_paths, locals())
        self._given = given(rank, world_size)
        self._here: tuple[int, Settings] | None = None  # a pid, and the settings with the place of that process
        self._fed_with: Settings | None = None
        self._transform = transform
        self._concurrent, self._claim = concurrent, threading.Lock()
        self._home: threading.Thread | None = None
        self._function = b"" if transform is None or self._workers == 0 else dumps(transform)
        self._epoch, self._chosen = 0, False
        self._feed: Feed | None = None
        self._finalizer: weakref.finalize[Any, Any] | None = None
        self._latest: weakref.ref[Epoch[T]] | None = None  # iterator of the epoch that was begun last
        self._progress: Progress | None = None  # of that epoch
        self._resume: dict[str, Any] | None = None
        self._taken = self._resumed = 0  # batches of the epoch to resume that were delivered before, and its number
        self._loaded = False  # whether a state was loaded, and no epoch begun since
        self._last = self._others = -1  # number of the epoch that was begun last, and of the last one beside another
        self._beside: weakref.WeakSet[Epoch[T]] = weakref.WeakSet()
        self._lengths = Lengths()
        weakref.finalize(self, self._lengths.check)

    # -- what a framework adds -----------------------------------------------------------------------------------------

    def _world(self) -> tuple[int, int]:
        """Rank and world size of this process, looked up anew."""
        return self._given or launched()

    def _shared_run(self) -> str | None:
        """A name of this run that all its processes have, when the launcher gave none."""
        return None

    @property
    def _collective(self) -> bool:
        """True if all ranks agree on the steps of an epoch, and so must begin the same epochs."""
        return False

    def _agreed(self, steps: int) -> int:
        """How many steps all ranks take, when this one could take ``steps``."""
        return steps

    @abstractmethod
    def _finish(self, batch: Batch) -> T:
        """The batch as the framework has it."""

    # -- what trainers read --------------------------------------------------------------------------------------------

    @property
    def batch_size(self) -> int:
        """Samples of a batch of one rank, at most."""
        return self._settings.batch_size

    @property
    def drop_last(self) -> bool:
        """True if every batch has ``batch_size`` samples."""
        return self._settings.drop_last

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of the numbers of the field ``label``, as ``pull --label-from-folder int`` numbered them; empty where
        no field has such names."""
        place = [Path(path) for path in self._settings.paths] or self._settings.root
        subscription = subscribe(place, dataset=self._settings.dataset, run=None)
        try:
            return subscription.now().schema.classes
        finally:
            subscription.close()

    @property
    def epoch(self) -> int:
        """Number of the epoch: how many were delivered before, or left with ``break``. The next ``iter()`` begins this
        one, or the next one if it was left; after it was set, this one in any case."""
        return self._epoch

    @epoch.setter
    def epoch(self, number: int) -> None:
        self._epoch, self._chosen = parse_epoch(number), True

    def set_epoch(self, epoch: int) -> None:
        """Let the next ``iter()`` begin epoch number ``epoch``; trainers call this before each epoch.

        A state that was loaded decides itself where its epoch goes on: then the number is ignored.
        """
        epoch = parse_epoch(epoch)
        if not self._loaded and epoch != self._next():
            self.epoch = epoch

    def epochs_of(self, *, steps: int) -> FixedEpochs[T]:
        """Return a view of this loader whose every epoch has ``steps`` batches, pass after pass of the cache.

        A trainer that keeps the first length, and a learning-rate schedule that counts steps, are right with it while
        the cache grows. Raises :class:`UsageError` for ``steps`` below 1.
        """
        return FixedEpochs(self, steps=steps)

    # -- epochs --------------------------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[T]:
        """Begin an epoch, or the same one again if no batch of it was taken. Older iterators end with an error, or with
        ``concurrent`` go on.

        Its snapshot is the one taken once all batches of the epoch before were made and half of them delivered; the
        newest after :meth:`refresh`, ``hold`` seconds after that epoch, for the first one, with ``workers=0``, and with
        ``split="validation"``.
        """
        return self.begin()

    def begin(self) -> Epoch[T]:
        """The same, with batches in host memory whatever ``device=`` says."""
        before = None if self._latest is None else self._latest()
        going_on = before is not None and not before.progress.ended and not before.replaced
        alone = not self._concurrent or (not going_on and self._home in (None, threading.current_thread()))
        # Before the lock is taken: this may ask the feeders, and a signal's handler may begin an epoch meanwhile.
        untouched = self._untouched(before) if alone else None
        with self._claim:  # threads that begin at the same moment begin different epochs
            beside = self._concurrent and (going_on or not self._at_home())
            if untouched is not None and (beside or untouched is not self._progress or untouched.touched):
                untouched = None
            if not beside and untouched is None:
                self._epoch = self._next()
            self._last = number = max(self.epoch, self._last + 1) if beside else self.epoch
            self._others = number if beside else self._others
        if beside:
            epoch = self._started(self._new_feed(), number, None, own=True)
            epoch.own_feed()
            self._beside.add(epoch)
            return epoch
        if untouched is not None:
            untouched.feed.lock_pages(None)  # as after a begin: a prefetcher of the older iterator asked for it
            epoch = Epoch(self, untouched)
            if before is not None:
                before.hand_over()
            self._latest = weakref.ref(epoch)
            return epoch
        if before is not None:
            before.replace()
        self._lengths.check()
        epoch = self._started(self._fed(), number, self._left_over(number))
        self._chosen = self._loaded = False  # not where that failed: who tries again is to get the same epoch
        self._latest, self._progress = weakref.ref(epoch), epoch.progress
        self._lengths.progress = epoch.progress
        if epoch.progress.ended:  # nothing was left of the epoch that was resumed
            epoch.deliver()
        return epoch

    def refresh(self) -> None:
        """Let the next ``iter()`` read the newest snapshot, after a pull between two epochs: discard the one that was
        taken for it. With several ranks, call it on all of them before one begins that epoch."""
        feed = self._feed
        if feed is None or feed.closed or feed.unsure or feed.pid != os.getpid():
            return
        begun = None if self._latest is None else self._latest()
        if begun is None and self._progress is not None and not self._progress.touched:
            self._progress = None  # begun, and nobody has it: not to be begun again
        feed.refresh()

    def _untouched(self, iterator: Epoch[T] | None) -> Progress | None:
        """The epoch that was begun last, if no batch of it was asked for and its snapshot is still leased.

        Trainers call ``iter()`` two or three times before they take a batch, and the length that they kept meanwhile
        must be that of the epoch that they then read.
        """
        progress = self._progress
        if progress is None or progress.touched or progress.ended or self._chosen:
            return None
        feed = progress.feed
        if feed is not self._feed or feed.closed or feed.unsure or feed.pid != os.getpid():
            return None
        if self._fed_with is not self._placed():
            return None
        if iterator is not None:
            return None if iterator.replaced else progress
        if progress.kept:
            return progress
        # Nobody has its iterator, so its snapshot is given up after hold= seconds: the feeders know.
        return progress if feed.regain(progress.begun.generation) else None

    def _next(self) -> int:
        """Number of the epoch that comes next: after one that was left another one, else a loop with a ``break`` in it
        would see the same samples for ever."""
        at = self._progress
        left = at is not None and at.left and at.begun.epoch == self.epoch
        number = self._last + 1 if left and not self._chosen else self.epoch
        return number if self._chosen or self._left_over(number) else max(number, self._others + 1)

    def _at_home(self) -> bool:
        """Whether this thread is the one that shares the loader's own feeders with nobody: the first that iterates, and
        once that has ended another."""
        if self._home is None or not self._home.is_alive():
            self._home = threading.current_thread()
        return self._home is threading.current_thread()

    def _started(self, feed: Feed, number: int, resume: dict[str, Any] | None, *, own: bool = False) -> Epoch[T]:
        begun, taken = None, 0 if resume is None else self._taken
        try:
            begun = feed.begin(number, resume)
            steps = self._agreed(self._limited(begun.steps, taken))
        except BaseException as error:
            # Interrupted, or with ranks that do not agree, it would wait for samples, or keep some, for nobody.
            if own or begun is not None or not isinstance(error, CacheToolError):
                feed.close()
            raise
        return Epoch(self, Progress(feed, begun, steps, taken, kept=self._collective))

    def _limited(self, steps: Steps, taken: int) -> int:
        return steps.count if self._limit is None else max(0, min(steps.count, self._limit - taken))

    def _left_over(self, epoch: int) -> dict[str, Any] | None:
        """What is left of this epoch, if it is the one to resume."""
        return self._resume if epoch == self._resumed else None

    def __len__(self) -> int:
        """Number of batches of the whole epoch: of the one that ``iter()`` began, with those that were delivered before
        it was resumed; else of the next one. Later epochs may have more.

        Waits as ``iter()`` does, which then begins the snapshot that was counted, within ``hold`` seconds.
        """
        epoch = None if self._latest is None else self._latest()
        progress = None if epoch is None or epoch.over or epoch.replaced else epoch.progress
        if progress is not None and progress.feed.pid != os.getpid():  # a fork may be another rank
            steps = progress.begun.steps
            here = self._placed()
            progress = progress if (steps.rank, steps.world_size) in ((here.rank, here.world_size), here.node) else None
        if progress is None and (progress := self._untouched(None)) is not None and not progress.kept:
            progress.feed.left(progress.begun.generation)  # still nobody has its iterator
        if progress is not None:
            return self._lengths.tell(progress.begun.epoch, progress.before + progress.steps)
        number = self._next()
        left_over = self._left_over(number)
        taken = 0 if left_over is None else self._taken
        count = self._limited(self._fed().prepare(number, left_over).steps, taken)
        return self._lengths.tell(number, taken + count)

    def _placed(self) -> Settings:
        """The settings with rank, world size and run, looked up when an epoch begins or is counted.

        In the constructor it would be too early: trainers start their ranks, or fork them, once they have the loader.
        """
        rank, world_size = self._world()
        if self._here is not None and self._here[0] == os.getpid():
            settings = self._here[1]
            if (settings.rank, settings.world_size) == (rank, world_size):
                return settings
        run = self._settings.run or launched_run() or self._shared_run()
        if world_size > 1 and run is None:
            raise UsageError("several processes need run=NAME on their loaders, the same on each, to share snapshots")
        node = self._given or on_node(world_size)
        settings = replace(self._settings, rank=rank, world_size=world_size, node=node, run=run)
        self._here = os.getpid(), settings
        return settings

    def _fed(self) -> Feed:
        settings = self._placed()
        feed = self._feed  # a handler may close the loader anywhere in here: no feed is noted that none would end
        if feed is not None and (feed.unsure or self._fed_with is not settings):
            feed.close()
        if feed is None or feed.closed or feed.pid != os.getpid():  # a fork has feeders of its own
            feed = self._new_feed()
            self._finalizer = weakref.finalize(self, feed.close)
            self._feed, self._fed_with = feed, settings
        return feed

    def _new_feed(self) -> Feed:
        settings = self._placed()
        if self._workers:
            return Processes(settings, feeders=self._workers, transform=self._function)
        from cachetool.loaders.feed.in_process import InProcess

        return InProcess(settings, transform=self._transform)

    # -- state ---------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Where training stands, as plain values: epoch, batches delivered, and the samples the epoch consists of.

        Raises :class:`UsageError` in the middle of an epoch, also of one left with ``break``, once the feeders ended.
        """
        at = self._progress
        if at is None or at.step == 0 or at.ended or self._chosen or at.begun.epoch != self.epoch:
            return self._state(self.epoch, self._left_over(self.epoch), self._taken)
        return self._state(self.epoch, at.resume(), at.before + at.step)

    def state_behind(self, batches: int) -> dict[str, Any]:
        """Return ``state_dict()`` as it was so many batches ago, in the same epoch: for trainers that read ahead.

        The last batch of an epoch ends it, but its state can be asked for until the next one begins. Raises
        :class:`UsageError` for more batches than this epoch has delivered, and what :meth:`state_dict` does.
        """
        at, batches = self._progress, parse_whole(batches, what="batches=")
        if batches == 0:
            return self.state_dict()
        if at is None or not 0 < batches <= at.step:
            raise UsageError(f"the present epoch has not delivered {batches} batches, so it was never at that place")
        taken = at.step - batches
        return self._state(at.begun.epoch, at.resume(taken), at.before + taken)

    def _state(self, epoch: int, resume: dict[str, Any] | None, taken: int) -> dict[str, Any]:
        seed, order = self._settings.seed, self._order()
        return {"state": STATE, "epoch": epoch, "seed": seed, "order": order, "resume": resume, "taken": taken}

    def _order(self) -> dict[str, Any]:
        """What the samples of an epoch and their order depend on, beside the seed."""
        values: dict[str, Any] = {"shuffle": self._settings.shuffle, "split": self._settings.split}
        if self._settings.where is not None:
            values["where"] = str(where_dict(self._settings.where))
        return values if values["split"] is None else {**values, "validation": self._settings.validation}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Let the next ``iter()`` go on where ``state_dict`` was called, with any number of ranks.

        Raises :class:`UsageError` for what is no state of a loader or that of one with another seed, and in the middle
        of an epoch for that of one with another ``shuffle``, ``split``, ``validation`` or ``where``. The loader is then
        as before.
        """
        require_state(state, SAVED, of="loaders")
        # Earlier versions saved less, and a state has no selection where there was none.
        saved = {"where": None, **(state.get("order") or {})} if state.get("resume") else {}
        here = {"seed": self._settings.seed, "where": None, **self._order()}
        require_same({"seed": state.get("seed"), **saved}, here, of="loader")
        self._epoch = self._resumed = int(state["epoch"])
        self._others = -1
        self._resume, self._taken = state.get("resume"), int(state.get("taken") or 0)
        self._loaded, self._chosen = True, False
        if self._latest is not None and (before := self._latest()) is not None:
            before.replace()
        self._latest = self._progress = self._lengths.progress = None

    def _delivered(self, progress: Progress) -> None:
        """The last batch of an epoch was delivered. One that ran beside another is no part of the state."""
        if progress is not self._progress:
            return
        if not self._chosen:
            self._epoch = self._last + 1
        self._resume, self._taken = None, 0

    def __reduce__(self) -> NoReturn:
        raise UsageError(
            "a loader has feeders of its own and can be neither pickled nor copied; make another where it is iterated,"
            " which load_state_dict() lets go on where this one is"
        )

    # -- the end -------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Stop the feeders and give the lease back; iterating again starts anew. Batches stay as they are."""
        for beside in members(self._beside):
            beside.replace()
            beside.end()
        if self._latest is not None and (before := self._latest()) is not None:
            before.replace()
        if self._finalizer is not None and self._feed is not None and self._feed.pid == os.getpid():
            self._finalizer()
        self._feed = None
        self._lengths.check()  # last: stderr may be blocked


# As Python says it of a keyword that there is not.
BaseLoader.__init__.__wrapped__.__qualname__ = "Loader.__init__"  # type: ignore[attr-defined]
