"""Following a dataset while it grows: one leased snapshot at a time, and a new one on request.

A subscription belongs to the process that uses it. It may be forked or pickled: the copy holds no lease, reads the
catalog through its own connection, and takes its own lease if it is asked for the newest snapshot.
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

__all__ = ["CacheSubscription", "Leases", "Subscription", "launched_run", "subscribe"]


class Leases(Protocol):
    """The leased views of what a loader reads: one dataset, or those of a mixture."""

    def newest(
        self, *, epoch: int | None = None, peek: bool = False, sparing: bool = False, anew: bool = False,
        reads: Sequence[float] = (),
    ) -> View:  # fmt: skip
        """Lease the newest view and return it, and end the lease of the view before.

        Args:
            epoch: Number of the epoch that will read the view. Processes of one run that ask for the same epoch get the
                same view as long as any of them holds it.
            peek: True if no epoch will be read from the view yet.
            sparing: True if the newest shards may be left for the next epoch, which would otherwise have nothing new.
            anew: True if the view before was not read. Its lease then ends in the same transaction, so that it does
                not count as a view that a process holds.
            reads: Fraction of each dataset of a mixture that an epoch reads. Default: all of it.
        """
        ...

    @property
    def spared(self) -> bool:
        """Return True if the leased view leaves shards for the next one."""
        ...

    def moved(self, view: View) -> bool:
        """Return True if there may be a newer view than this one. Takes no lease."""
        ...

    def share(self, other: Leases) -> None:
        """Take over the view of another subscription of this dataset, so that its shards are not read again."""
        ...

    def served(self, delivered: Delivered | None = None, *, last: bool = False) -> None:
        """Count one epoch for the shards of the leased view, and note its times if they are known.

        ``last`` is true if :meth:`release` is called next.
        """
        ...

    def under_way(self, delivered: Delivered, *, epoch: int) -> None:
        """Note the times so far of an epoch that has not ended."""
        ...

    def release(self, *, unread: bool = False) -> None:
        """Give the lease back; another can be taken. ``unread`` is true if no epoch was read from it after all."""
        ...

    def close(self) -> None:
        """Give the lease back. May be called twice."""
        ...


class Subscription(Leases, Protocol):
    """The views of one dataset, also without a lease, for samplers."""

    def now(self) -> View:
        """Return the current view. Takes no lease."""
        ...

    def at(self, version: int) -> View:
        """Return what is left of the view of an earlier version. Takes no lease."""
        ...


class CacheSubscription:
    """The snapshots of one dataset of a cache.

    While a background pull fills an empty dataset, making a subscription waits for the first samples. A lease also ends
    when this object is deleted, and with the process, however that ends.

    Args:
        cache: An open cache, or its folder.
        dataset: Name of the dataset; None for the only one.
        run: Name of a training run of several processes. Those that ask for the newest view of the same ``epoch`` get
            the same view.

    Raises:
        UsageError: The cache or the dataset does not exist.
        SourceError: The background pull failed.
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
        """Return this process's own handle of the cache."""
        # A handle of its own, because closing the user's must not end this lease. A forked one
        # belongs to the parent: SQLite's connections must not be used after a fork.
        if self._cache is None or self._pid != os.getpid():
            self._forget()
            self._cache, self._pid = CacheDir(self.root), os.getpid()
        return self._cache

    def newest(
        self, *, epoch: int | None = None, peek: bool = False, sparing: bool = False, anew: bool = False,
        reads: Sequence[float] = (),
    ) -> View:  # fmt: skip
        """Lease the current version, or the one that another process of the run leases for ``epoch``."""
        after = self._open().snapshot(
            dataset=self.dataset, run=None if epoch is None else self.run, epoch=epoch, peek=peek,
            sparing=sparing, reads=reads[0] if reads else 1.0, instead=self._snapshot if anew else None,
            known=self._newest_seen,
        )  # fmt: skip
        self._have(after)
        # The same view for the same shards: listing 780 shards takes longer than the rest of a
        # snapshot.
        if self._view is None or not after.is_unchanged:
            self._view, self._newest_seen = View.of_snapshot(after, self._view), (after.version, after.stamp)
        return self._view

    def share(self, other: Leases) -> None:
        """Take over the view of another subscription of this dataset, so that its shards are not read again."""
        if other is not self and isinstance(other, CacheSubscription) and other._view is not None:
            self._open()
            self._view, self._newest_seen = other._view, other._newest_seen

    def _have(self, after: Snapshot) -> None:
        """Hold a new lease in place of the present one."""
        before, cache = self._snapshot, self._open()
        if self._finalizer is not None:
            # The finalizer of the lease before must not run any more: release() below gives that
            # one back.
            self._finalizer.detach()
        self._snapshot = after
        self._finalizer = weakref.finalize(self, _give_back, os.getpid(), after, cache)
        # Not at the end of the process: the lease ends with it anyway, and no thread can be started
        # then.
        self._finalizer.atexit = False
        # The new lease is there before the old one ends, so no shard of both is evicted in between.
        if before is not None:
            before.release()

    def now(self) -> View:
        """Return the shards of the current version."""
        return self.at(self._open().version)

    def at(self, version: int) -> View:
        """Return the shards of ``version`` that still exist."""
        cache = self._open()
        schema = cache.schema(self.dataset)
        return View.of_shards(version, self.dataset, schema, cache.shards(self.dataset, version=version))

    def served(self, delivered: Delivered | None = None, *, last: bool = False) -> None:
        """Count one epoch for every shard of the leased snapshot."""
        if self._snapshot is not None and self._pid == os.getpid():
            self._snapshot.served(delivered, last=last)

    def under_way(self, delivered: Delivered, *, epoch: int) -> None:
        """Note the times so far of an epoch that has not ended."""
        if self._snapshot is not None and self._pid == os.getpid():
            self._snapshot.under_way(delivered, epoch=epoch)

    @property
    def spared(self) -> bool:
        """Return True if the newest shards were left out of the leased snapshot."""
        return self._snapshot is not None and self._snapshot.version < self._snapshot.newest

    def moved(self, view: View) -> bool:
        """Return True if a shard was committed or evicted since."""
        own = self._snapshot
        # A snapshot that spares the newest shards has an older version than the catalog had when it
        # was taken, so it is compared with that one.
        return self._open().version != (own.newest if own and own.version == view.version else view.version)

    def release(self, *, unread: bool = False) -> None:
        """Give the lease back and keep the catalog open. A forked copy does nothing."""
        if self._pid != os.getpid():
            return
        if self._finalizer is not None:
            self._finalizer.detach()
        snapshot, self._snapshot, self._finalizer = self._snapshot, None, None
        if snapshot is not None:
            snapshot.release(unread=unread)

    def close(self) -> None:
        """Give the lease back. May be called twice. In a forked copy the original keeps its lease."""
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
        # A database connection that came through a fork must be neither used nor closed, so it is
        # kept for ever.
        _inherited.append(cache)
        return

    def release() -> None:
        snapshot.release()
        cache.close()

    beside(release)


def beside(release: Callable[[], None]) -> None:
    """Call ``release`` in a thread, and wait for the thread.

    A garbage collection may call this in the middle of a transaction of this thread, which must end before ``release``
    can begin. So the wait is limited to a second.
    """
    thread = threading.Thread(target=release, name="cachetool-release", daemon=True)
    thread.start()
    thread.join(1.0)


def subscribe(
    cache_or_paths: CacheDir | str | Path | Sequence[str | Path], *, dataset: str | None, run: str | None
) -> Subscription:
    """Follow a dataset of a cache, or read shards outside any cache, such as ``cachetool convert --out`` writes."""
    root, paths = located(cache_or_paths, dataset)
    if not paths:
        return CacheSubscription(
            cache_or_paths if isinstance(cache_or_paths, CacheDir) else root, dataset=dataset, run=run
        )
    return shards_at(paths)


def launched_run() -> str | None:
    """Return a name of this run of a launcher's job, the same on all its processes; None without a launcher.

    The name is made of the environment of torchrun (id of the rendezvous, address, restarts) or of Slurm (id of job and
    step, restarts).
    """
    env = os.environ
    names: tuple[str, ...]
    if "TORCHELASTIC_RUN_ID" in env:
        # With the number of restarts: a restarted job must not share the snapshot that the failed
        # one began.
        names = ("TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT")
    elif "SLURM_JOB_ID" in env:
        names = ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT")
    else:
        return None
    return ":".join(env.get(name, "") for name in names)
