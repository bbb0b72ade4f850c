"""What the loaders of all frameworks are: an epoch at each ``iter()``, state, and the feed behind them."""

from __future__ import annotations

import os
import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Generic, NoReturn, Self, TypeAlias, TypeVar

from cachetool.cache import CacheDir
from cachetool.cache.forking import members
from cachetool.errors import CacheToolError, UsageError
from cachetool.loaders.epoch import Epoch, Progress
from cachetool.loaders.feed import Feed
from cachetool.loaders.files import located
from cachetool.loaders.order import SHUFFLES, Steps, parse_epoch
from cachetool.loaders.plan import Settings
from cachetool.loaders.processes import Processes
from cachetool.loaders.ranks import given, launched
from cachetool.loaders.resume import SAVED, require_order, require_state
from cachetool.loaders.ring_memory import MOST_KEPT
from cachetool.loaders.slot import Batch
from cachetool.loaders.split import parse_split
from cachetool.loaders.subscription import launched_run
from cachetool.loaders.transform import Function, dumps
from cachetool.schema import names_of
from cachetool.units import parse_duration, parse_whole

__all__ = ["BaseLoader", "CacheOrPaths"]

T = TypeVar("T")
CacheOrPaths: TypeAlias = CacheDir | str | Path | Sequence[str | Path]
"""An open cache, its folder, or one or several shards outside any cache."""

_STATE = 1


class BaseLoader(ABC, Generic[T]):
    """Batches of a cache, epoch by epoch. See :class:`cachetool.loaders.numpy.Loader` for the arguments."""

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
        min_samples: int | None = None,
        wait: float | str = 600.0,
        hold: float | str = 60.0,
        epochs: int | None = None,
        missing: str = "error",
        verify: bool = False,
        concurrent: bool = False,
    ) -> None:
        rank, world_size = self._world(rank, world_size)
        rank, world_size = parse_whole(rank, what="rank="), parse_whole(world_size, what="world_size=")
        batch_size, seed = parse_whole(batch_size, what="batch_size="), parse_whole(seed, what="seed=")
        workers = parse_whole(workers, what="workers=")
        steps, prefetch, epochs, min_samples = (
            None if value is None else parse_whole(value, what=f"{name}=")
            for name, value in (
                ("steps", steps), ("prefetch", prefetch), ("epochs", epochs), ("min_samples", min_samples)
            )
        )  # fmt: skip
        wait, hold = parse_duration(wait, what="wait="), parse_duration(hold, what="hold=")
        share = parse_split(split, validation)
        _check(
            {
                "batch_size": (batch_size >= 1, batch_size, "at least 1"),
                "shuffle": (shuffle in SHUFFLES, shuffle, "'full', 'window' or False"),
                "world_size": (world_size >= 1, world_size, "at least 1"),
                "rank": (0 <= rank < world_size, rank, f"0 to {world_size - 1}, below world_size"),
                "workers": (workers >= 0, workers, "0 (a thread) or more feeder processes"),
                "prefetch": (prefetch is None or 1 <= prefetch <= MOST_KEPT, prefetch, f"1 to {MOST_KEPT} batches"),
                "steps": (steps is None or steps >= 1, steps, "at least 1"),
                "transform_each": (transform_each in ("sample", "batch"), transform_each, "'sample' or 'batch'"),
                "epochs": (epochs is None or epochs >= 1, epochs, "at least 1"),
                "min_samples": (min_samples is None or min_samples >= 1, min_samples, "at least 1"),
                "dataset": (dataset is None or (isinstance(dataset, str) and dataset != ""), dataset, "a name"),
                "run": (run is None or isinstance(run, str), run, "a name"),
                "verify": (verify in (True, False), verify, "True or False"),
                "transform": (transform is None or callable(transform), transform, "a function"),
                "drop_last": (drop_last in (True, False), drop_last, "True or False"),
                "missing": (missing in ("error", "skip", "refetch"), missing, "'error', 'skip' or 'refetch'"),
            }
        )
        if isinstance(cache_or_paths, CacheDir):
            cache_or_paths.settle_cap()  # the feeders must find it on disk, as it is to be
        root, paths = located(cache_or_paths)
        if paths and dataset is not None:
            raise UsageError(f"{root} is a folder of plain files, which hold one dataset; leave out dataset=")
        run = run or launched_run() or self._shared_run(world_size)
        if world_size > 1 and run is None:
            raise UsageError("several processes need run=NAME on their loaders, the same on each, to share snapshots")
        least = world_size * (1 if split == "validation" else batch_size)
        self._settings = Settings(
            root=str(root),
            paths=tuple(map(str, paths)),
            dataset=dataset,
            run=run,
            fields=None if fields is None else names_of(fields),
            batch_size=batch_size,
            shuffle=SHUFFLES[shuffle],
            seed=seed,
            drop_last=bool(drop_last),
            rank=rank,
            world_size=world_size,
            split=split,
            validation=share,
            min_samples=least if min_samples is None else min_samples,
            wait=wait,
            hold=hold,
            epochs=epochs,
            missing=missing,
            verify=bool(verify),
            prefetch=prefetch,
            each=transform_each,
        )
        self._limit, self._workers, self._transform = steps, workers, transform
        self._concurrent, self._claim = concurrent, threading.Lock()
        self._home: threading.Thread | None = None
        self._function = b"" if transform is None or workers == 0 else dumps(transform)
        self._epoch, self._chosen = 0, False
        self._feed: Feed | None = None
        self._finalizer: weakref.finalize[Any, Any] | None = None
        self._iterator: weakref.ref[Epoch[T]] | None = None
        self._progress: Progress | None = None
        self._resume: dict[str, Any] | None = None
        self._taken = self._resumed = 0  # batches of the epoch to resume that were delivered before, and its number
        self._last = self._others = -1  # number of the epoch that was begun last, and of the last one beside another
        self._beside: weakref.WeakSet[Epoch[T]] = weakref.WeakSet()

    # -- what a framework adds -----------------------------------------------------------------------------------------

    def _world(self, rank: int | None, world_size: int | None) -> tuple[int, int]:
        return given(rank, world_size) or launched()

    def _shared_run(self, world_size: int) -> str | None:
        """A name of this run that all its processes have, when the launcher gave none."""
        return None

    def _agreed(self, steps: int) -> int:
        """How many steps all ranks take, when this one could take ``steps``."""
        return steps

    @abstractmethod
    def _finish(self, batch: Batch) -> T:
        """The batch as the framework has it."""

    @property
    def epoch(self) -> int:
        """Number of the epoch: how many were delivered before, or left with ``break``. The next ``iter()`` begins this
        one, or the next one if it was left; after it was set, this one in any case."""
        return self._epoch

    @epoch.setter
    def epoch(self, number: int) -> None:
        self._epoch, self._chosen = parse_epoch(number), True

    # -- epochs --------------------------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[T]:
        """Begin an epoch on the newest snapshot. Older iterators end with an error, or go on with ``concurrent``."""
        return self.begin()

    def begin(self) -> Epoch[T]:
        """The same, with batches in host memory whatever ``device=`` says."""
        before = None if self._iterator is None else self._iterator()
        going_on = before is not None and not before.progress.ended and not before.replaced
        with self._claim:  # threads that begin at the same moment begin different epochs
            beside = self._concurrent and (going_on or not self._at_home())
            if not beside:
                self._epoch = self._next()
            self._last = number = max(self.epoch, self._last + 1) if beside else self.epoch
            self._others = number if beside else self._others
        if beside:
            epoch = self._started(self._new_feed(), number, None, own=True)
            epoch.own_feed()
            self._beside.add(epoch)
            return epoch
        if before is not None:
            before.replace()
        self._chosen = False
        epoch = self._started(self._fed(), number, self._left_over(number))
        self._iterator, self._progress = weakref.ref(epoch), epoch.progress
        if epoch.progress.ended:  # nothing was left of the epoch that was resumed
            epoch.deliver()
        return epoch

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
        return Epoch(self, Progress(feed, begun, steps, taken))

    def _limited(self, steps: Steps, taken: int) -> int:
        return steps.count if self._limit is None else max(0, min(steps.count, self._limit - taken))

    def _left_over(self, epoch: int) -> dict[str, Any] | None:
        """What is left of this epoch, if it is the one to resume."""
        return self._resume if epoch == self._resumed else None

    def __len__(self) -> int:
        """Number of batches of the epoch under way, else of the next one; later ones may have more. Waits as ``iter()``
        does, which then begins the snapshot that was counted: within ``hold`` seconds, unless this process used the
        cache meanwhile."""
        epoch = None if self._iterator is None else self._iterator()
        if epoch is not None and not (epoch.over or epoch.replaced):
            return epoch.progress.steps
        number = self._next()
        rest = self._left_over(number)
        return self._limited(self._fed().prepare(number, rest).steps, 0 if rest is None else self._taken)

    def _fed(self) -> Feed:
        feed = self._feed  # a handler may close the loader anywhere in here: no feed is noted that none would end
        if feed is not None and feed.unsure:
            feed.close()
        if feed is None or feed.closed or feed.pid != os.getpid():  # a fork has feeders of its own
            feed = self._new_feed()
            self._finalizer = weakref.finalize(self, feed.close)
            self._feed = feed
        return feed

    def _new_feed(self) -> Feed:
        if self._workers:
            return Processes(self._settings, feeders=self._workers, transform=self._function)
        from cachetool.loaders.threads import Thread

        return Thread(self._settings, transform=self._transform)

    # -- state ---------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Where training stands, as plain values: epoch, batches delivered, and the samples the epoch consists of.

        Raises :class:`UsageError` in the middle of an epoch, also of one left with ``break``, once the feeders ended.
        """
        at = self._progress
        state = {"state": _STATE, "epoch": self.epoch, "seed": self._settings.seed, "order": self._order()}
        if at is None or at.step == 0 or at.ended or self._chosen or at.begun.epoch != self.epoch:
            return {**state, "resume": self._left_over(self.epoch), "taken": self._taken}
        return {**state, "resume": at.resume(), "taken": at.before + at.step}

    def _order(self) -> dict[str, Any]:
        """What the samples of an epoch and their order depend on, beside the seed."""
        found: dict[str, Any] = {"shuffle": self._settings.shuffle, "split": self._settings.split}
        return found if found["split"] is None else {**found, "validation": self._settings.validation}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Let the next ``iter()`` go on where ``state_dict`` was called, with any number of ranks.

        Raises :class:`UsageError` for what is no state of a loader or that of one with another seed, and in the middle
        of an epoch for that of one with another ``shuffle``, ``split`` or ``validation``. The loader is then as before.
        """
        require_state(state, _STATE, SAVED, of="loaders")
        if state.get("seed") != self._settings.seed:
            raise UsageError(f"the state was made with seed={state.get('seed')}, this loader has {self._settings.seed}")
        if state.get("resume"):
            require_order(state.get("order"), self._order(), of="loader")
        self._epoch = self._resumed = int(state["epoch"])
        self._others = -1
        self._resume, self._taken = state.get("resume"), int(state.get("taken") or 0)
        if self._iterator is not None and (before := self._iterator()) is not None:
            before.replace()
        self._iterator = self._progress = None

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
        if self._iterator is not None and (before := self._iterator()) is not None:
            before.replace()
        if self._finalizer is not None and self._feed is not None and self._feed.pid == os.getpid():
            self._finalizer()
        self._feed = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _check(values: dict[str, tuple[bool, Any, str]]) -> None:
    for name, (good, value, wanted) in values.items():
        if not good:
            raise UsageError(f"{name}={value!r} cannot be used: {wanted}")


BaseLoader.__init__.__qualname__ = "Loader.__init__"  # as Python says it of a keyword that there is not
