"""Following a dataset while it grows: one leased snapshot at a time, taken again when asked.

A subscription belongs to the process that uses it. It may be forked or pickled: the copy holds no lease, reads the
catalog through a connection of its own, and takes its own lease if it is asked for the newest snapshot.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

from cachetool.cache import CacheDir, Snapshot, open_cache
from cachetool.cache.history import Delivered
from cachetool.core.units import parse_text
from cachetool.loaders.snapshots.plain_files import located, shards_at
from cachetool.loaders.snapshots.waiting import wait_for_samples
from cachetool.loaders.view import View

__all__ = ["CacheSubscription", "Subscription", "launched_run", "subscribe"]


class Subscription(Protocol):
    """Where a loader gets its views from."""

    def newest(
        self, *, epoch: int | None = None, peek: bool = False, sparing: bool = False, anew: bool = False
    ) -> View:
        """The newest view, leased; the one before it is given back. Those of one run that ask for the same
        ``epoch`` get the same one while any of them has it. ``peek``: no epoch is to be read from it yet. ``sparing``:
        the newest shards may be left for the next epoch, where that would have nothing new. ``anew``: the one before
        went unread, and does not count as one that somebody has."""
        ...

    def now(self) -> View:
        """What there is now. Takes no lease."""
        ...

    def at(self, version: int) -> View:
        """What is left of the view of an earlier version. Takes no lease."""
        ...

    @property
    def spared(self) -> bool:
        """Whether the leased view leaves something for the next one."""
        ...

    def moved(self, view: View) -> bool:
        """Whether there may be a newer view than this one. Takes no lease."""
        ...

    def served(self, delivered: Delivered | None = None, *, last: bool = False) -> None:
        """Count one epoch for the parts of the leased view, and how it went where that is known. ``last``: what is
        called next is :meth:`release`."""
        ...

    def release(self, *, unread: bool = False) -> None:
        """Give the lease back; another can be taken. ``unread``: no epoch was read from it after all."""
        ...

    def close(self) -> None:
        """Give the lease back. May be called twice."""
        ...


class CacheSubscription:
    """Snapshots of one dataset of a cache.

    ``cache`` is an open cache or its folder. ``run`` names a training run of several processes: those that ask for the
    newest view of the same ``epoch`` get the same one. While a background pull fills an empty dataset, this waits for
    its first samples. The lease also ends when this object is collected, and with the process however that ends. Raises
    :class:`UsageError` for a cache or a dataset that is not there, :class:`SourceError` when that pull fails.
    """

    def __init__(self, cache: CacheDir | str | Path, *, dataset: str | None = None, run: str | None = None) -> None:
        if isinstance(cache, CacheDir):
            self._name(cache, dataset)
        else:
            with open_cache(cache, create=False) as opened:
                self._name(opened, dataset)
        self.run = run
        self._forget()

    def _name(self, cache: CacheDir, dataset: str | None) -> None:
        dataset = None if dataset is None else parse_text(dataset, what="dataset=")
        if cache.exists:
            wait_for_samples(cache, dataset)
        self.root = cache.root
        self.dataset = cache.dataset(dataset)

    def _forget(self) -> None:
        self._pid = 0
        self._cache: CacheDir | None = None
        self._snapshot: Snapshot | None = None
        self._view: View | None = None
        self._newest_seen: tuple[int, int | None] | None = None
        self._finalizer: weakref.finalize[Any, Any] | None = None

    def _open(self) -> CacheDir:
        """This process's own handle: closing the user's must not end our lease, and a forked one is not ours."""
        if self._cache is None or self._pid != os.getpid():
            self._forget()
            self._cache, self._pid = CacheDir(self.root), os.getpid()
        return self._cache

    def newest(
        self, *, epoch: int | None = None, peek: bool = False, sparing: bool = False, anew: bool = False
    ) -> View:
        """Lease the present version, or the one that another process of the run leases for ``epoch``."""
        after = self._open().snapshot(
            dataset=self.dataset, run=None if epoch is None else self.run, epoch=epoch, peek=peek,
            sparing=sparing, instead=self._snapshot if anew else None, known=self._newest_seen,
        )  # fmt: skip
        self._have(after)
        if self._view is None or not after.is_unchanged:
            self._view, self._newest_seen = View.of_snapshot(after), (after.version, after.stamp)
        return self._view

    def _have(self, after: Snapshot) -> None:
        """A lease, in place of the one that this has."""
        before, cache = self._snapshot, self._open()
        if self._finalizer is not None:
            self._finalizer.detach()
        self._snapshot = after
        self._finalizer = weakref.finalize(self, _give_back, os.getpid(), after, cache)
        # The process's end frees the lease by itself, and no thread can be started there.
        self._finalizer.atexit = False
        if before is not None:
            before.release()

    def now(self) -> View:
        """The shards of the present version."""
        return self.at(self._open().version)

    def at(self, version: int) -> View:
        """The shards of ``version`` that are still there."""
        cache = self._open()
        schema = cache.schema(self.dataset)
        return View.of_shards(version, self.dataset, schema, cache.shards(self.dataset, version=version))

    def served(self, delivered: Delivered | None = None, *, last: bool = False) -> None:
        """Count one epoch for every shard of the leased snapshot."""
        if self._snapshot is not None and self._pid == os.getpid():
            self._snapshot.served(delivered, last=last)

    @property
    def spared(self) -> bool:
        """Whether the newest shards were left out of the leased snapshot."""
        return self._snapshot is not None and self._snapshot.version < self._snapshot.newest

    def moved(self, view: View) -> bool:
        """Whether anything was committed or evicted since."""
        own = self._snapshot
        return self._open().version != (own.newest if own and own.version == view.version else view.version)

    def release(self, *, unread: bool = False) -> None:
        """Give the lease back, keeping the catalog open; in a forked copy it does nothing to the original."""
        if self._pid != os.getpid():
            return
        if self._finalizer is not None:
            self._finalizer.detach()
        snapshot, self._snapshot, self._finalizer = self._snapshot, None, None
        if snapshot is not None:
            snapshot.release(unread=unread)

    def close(self) -> None:
        """Give the lease back. May be called twice; in a forked copy it does nothing to the original."""
        self.release()
        cache, pid = self._cache, self._pid
        self._forget()
        if cache is not None and pid == os.getpid():
            cache.close()

    def __reduce__(self) -> tuple[Any, ...]:
        return _copy, (self.root, self.dataset, self.run)


def _copy(root: Path, dataset: str, run: str | None) -> CacheSubscription:
    subscription = CacheSubscription.__new__(CacheSubscription)
    subscription.root, subscription.dataset, subscription.run = root, dataset, run
    subscription._forget()
    return subscription


_inherited: list[CacheDir] = []


def _give_back(pid: int, snapshot: Snapshot, cache: CacheDir) -> None:
    if os.getpid() != pid:
        _inherited.append(cache)  # a database connection that came through a fork is neither used nor closed: kept
        return

    def release() -> None:
        snapshot.release()
        cache.close()

    beside(release)


def beside(release: Callable[[], None]) -> None:
    """Call it in a thread, which is done when this returns unless the garbage collector runs in the middle of a
    transaction of this very thread: that must end first."""
    thread = threading.Thread(target=release, name="cachetool-release", daemon=True)
    thread.start()
    thread.join(1.0)


def subscribe(
    cache_or_paths: CacheDir | str | Path | Sequence[str | Path], *, dataset: str | None, run: str | None
) -> Subscription:
    """Follow a dataset of a cache; or read shards outside any, such as ``cachetool convert --out`` writes."""
    root, paths = located(cache_or_paths, dataset)
    if not paths:
        return CacheSubscription(
            cache_or_paths if isinstance(cache_or_paths, CacheDir) else root, dataset=dataset, run=run
        )
    return shards_at(paths)


def launched_run() -> str | None:
    """What tells this run of a launcher's job from any other, the same on all its processes; None without a launcher.

    From the environment of torchrun (id of the rendezvous, address, restarts) or of Slurm (id of job and step).
    """
    env = os.environ
    names: tuple[str, ...]
    if "TORCHELASTIC_RUN_ID" in env:
        names = ("TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT")
    elif "SLURM_JOB_ID" in env:
        names = ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT")
    else:
        return None
    return ":".join(env.get(name, "") for name in names)
