"""Which list of samples an index means: in the process that follows the dataset, and in every copy of it elsewhere.

The process that made the dataset holds the lease and writes the number of each snapshot on the board. A worker process
has a copy, made by fork or pickle when it was started; it reads the board and looks the list of shards up in the
catalog. It uses a list only if its fingerprint is that on the board: an index never means another sample.

A few numbers that one process writes and its workers read: which snapshots there were lately, and which is the last.

A worker process that outlives an epoch keeps the list of shards it was born with; this board tells it that there is a
newer one. It lies in shared memory that has no name and goes with its last process, and it reaches children through
fork, spawn and forkserver alike. Pickled anywhere else (a file, another machine) it becomes a board of its own.

Written by one process. A row is invalid while it is rewritten, and rows are checked before and after they are read.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from multiprocessing.context import get_spawning_popen
from multiprocessing.sharedctypes import RawArray
from typing import Any

from cachetool.core.errors import UsageError
from cachetool.loaders.snapshots.follow import Subscription
from cachetool.loaders.view import View

__all__ = ["Board", "Check", "Views", "usable"]


_ROWS = 16
_CURRENT, _COUNT, _FIRST = 0, 1, 2


class Board:
    """The last 16 snapshots as (version, fingerprint), and the version of the newest."""

    __slots__ = ("_cells",)

    def __init__(self, cells: list[int] | None = None) -> None:
        self._cells: Any = RawArray(ctypes.c_int64, _FIRST + 2 * _ROWS)
        if cells is not None:
            self._cells[:] = cells

    @property
    def current(self) -> int:
        """Version of the newest snapshot; 0 before the first."""
        return int(self._cells[_CURRENT])

    def publish(self, version: int, fingerprint: int) -> None:
        """Make a snapshot known and the newest. ``fingerprint`` is any number that tells its list of shards."""
        cells = self._cells
        if self.fingerprint(version) != fingerprint:
            at = _FIRST + 2 * (cells[_COUNT] % _ROWS)
            cells[at] = 0
            cells[at + 1] = fingerprint
            cells[at] = version
            cells[_COUNT] += 1
        cells[_CURRENT] = version

    def fingerprint(self, version: int) -> int | None:
        """The fingerprint of a snapshot; None when it is unknown or long gone."""
        cells = self._cells
        for at in range(_FIRST, _FIRST + 2 * _ROWS, 2):
            if cells[at] == version:
                fingerprint = int(cells[at + 1])
                return fingerprint if cells[at] == version else None
        return None

    def __reduce__(self) -> tuple[Callable[..., Board], tuple[Any]]:
        # Shared memory can only be handed to a child that is being started right now.
        if get_spawning_popen() is None:
            return Board, (list(self._cells),)
        return _attached, (self._cells,)


def _attached(cells: Any) -> Board:
    board = Board.__new__(Board)
    board._cells = cells
    return board


Check = Callable[[View], None]
"""Raises :class:`UsageError` for a view that a loader cannot read. A plain function: it is pickled by name."""


def usable(view: View) -> None:
    """The check of a loader that reads every format."""


class Views:
    """The views of one dataset, each of which passed ``check``; ``changed`` is told of every new one."""

    def __init__(self, subscription: Subscription, *, check: Check, changed: Callable[[View], None]) -> None:
        self._subscription = subscription
        self._check, self._changed = check, changed
        self._board = Board()
        self._owner = os.getpid()
        self._view = self._other = self._take(subscription.newest(peek=True))

    def _take(self, view: View) -> View:
        self._check(view)
        self._board.publish(view.version, view.fingerprint)
        self._changed(view)
        return view

    @property
    def version(self) -> int:
        """Version of the snapshot that this process took last."""
        return self._view.version

    def refresh(self, *, epoch: int | None = None, sparing: bool = False) -> View:
        """Take the newest snapshot; give the one before it back. ``sparing`` may leave some for the next epoch."""
        if self._owner != os.getpid():  # a copy goes its own way from here: it must not write the owner's board
            self._board, self._owner = Board(), os.getpid()
        self._view = self._take(self._subscription.newest(epoch=epoch, sparing=sparing))
        return self._view

    def plain(self) -> View:
        """The view that an index without a version means, also in a worker that was started before a refresh.

        Which snapshot such an index was drawn from cannot be told. It does not matter while the older list is the
        beginning of the newer one; after an eviction the index is refused, as it might mean another sample.
        """
        version = self._board.current
        if version != self._view.version:
            view = self._load(version)
            if not view.extends(self._view):
                raise UsageError(
                    f"shards were evicted between snapshots {self._view.version} and {version}: a plain index no longer"
                    " says which sample it means; use sampler=EpochSampler(dataset), or persistent_workers=False"
                )
            self._view = view
            self._changed(view)
        return self._view

    def at(self, version: int) -> View:
        """The view of an index that carries its version. Raises :class:`UsageError` when that snapshot is over."""
        if version == self._view.version:
            return self._view
        if version != self._other.version:
            self._other = self._load(version)
            self._changed(self._other)
        return self._other

    def _load(self, version: int) -> View:
        expected = self._board.fingerprint(version)
        view = self._subscription.at(version)
        if view.fingerprint != expected:
            raise UsageError(
                f"snapshot {version} of these indices is over and its shards may be evicted; draw indices of the"
                " present one: iterate over the sampler again"
            )
        self._check(view)
        return view

    def served(self) -> None:
        """Count one epoch for the shards of the present snapshot."""
        self._subscription.served()

    def close(self) -> None:
        """Give the lease back; in a copy nothing happens to the owner's."""
        self._subscription.close()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_owner": 0}
