"""Views by index: which list of samples an index refers to, in the process that made the dataset and in its workers.

The process that made the dataset holds the lease and writes the number of each snapshot on the board. A worker process
has a copy of the dataset, made by fork or pickle when the worker started. It reads the board and looks up the list of
shards in the catalog. It uses a list only if the fingerprint on the board matches, so an index never means another
sample.

The board is a few numbers: the last snapshots, and which of them is the newest. A worker that outlives an epoch keeps
the list of shards it started with, and the board tells it that there is a newer one. The board is in shared memory
without a name, which ends with its last process and reaches children by fork, spawn and forkserver alike. Pickled to
anywhere else (a file, another machine) it becomes a board of its own.

One process writes the board. A row is invalid while it is written, and readers check a row before and after reading it.
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
        """Return the version of the newest snapshot; 0 before the first."""
        return int(self._cells[_CURRENT])

    def publish(self, version: int, fingerprint: int) -> None:
        """Make a snapshot known as the newest. ``fingerprint`` is any number that identifies its list of shards."""
        cells = self._cells
        if self.fingerprint(version) != fingerprint:
            at = _FIRST + 2 * (cells[_COUNT] % _ROWS)
            # Version 0 while the fingerprint is written. A worker that reads the row at this moment
            # sees that it is invalid, rather than another snapshot's fingerprint.
            cells[at] = 0
            cells[at + 1] = fingerprint
            cells[at] = version
            cells[_COUNT] += 1
        cells[_CURRENT] = version

    def fingerprint(self, version: int) -> int | None:
        """Return the fingerprint of a snapshot; None if it is unknown or among the older ones."""
        cells = self._cells
        for at in range(_FIRST, _FIRST + 2 * _ROWS, 2):
            if cells[at] == version:
                fingerprint = int(cells[at + 1])
                # Read again: the owner may have rewritten the row while its fingerprint was read.
                return fingerprint if cells[at] == version else None
        return None

    def __reduce__(self) -> tuple[Callable[..., Board], tuple[Any]]:
        # Shared memory can be handed only to a child that is being started right now.
        if get_spawning_popen() is None:
            return Board, (list(self._cells),)
        return _attached, (self._cells,)


def _attached(cells: Any) -> Board:
    board = Board.__new__(Board)
    board._cells = cells
    return board


# A plain function, because it is pickled by its name.
Check = Callable[[View], None]
"""A check that raises :class:`UsageError` for a view that a loader cannot read."""


def usable(view: View) -> None:
    """Accept every view: the check of a loader that reads every format."""


class Views:
    """The views of one dataset, each of which passed ``check``. ``changed`` is called with every new one."""

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
        """Return the version of the snapshot that this process took last."""
        return self._view.version

    def refresh(self, *, epoch: int | None = None, sparing: bool = False) -> View:
        """Take the newest snapshot and give the one before back. ``sparing`` may leave its newest shards for the next
        epoch."""
        # A copy follows the dataset by itself from here on, and must not write on the owner's
        # board.
        if self._owner != os.getpid():
            self._board, self._owner = Board(), os.getpid()
        self._view = self._take(self._subscription.newest(epoch=epoch, sparing=sparing))
        return self._view

    def plain(self) -> View:
        """Return the view that an index without a version means, also in a worker that started before a refresh.

        Nobody can tell from which snapshot such an index was drawn. This does not matter while the older list is the
        beginning of the newer one. After an eviction the index is refused, because it might mean another sample.
        """
        version = self._board.current
        if version != self._view.version:
            view = self._load(version)
            if not view.extends(self._view):
                raise UsageError(
                    f"shards were evicted between snapshots {self._view.version} and {version}, so a plain index may"
                    " mean another sample now; use sampler=EpochSampler(dataset), or persistent_workers=False"
                )
            self._view = view
            self._changed(view)
        return self._view

    def at(self, version: int) -> View:
        """Return the view of an index that carries its version. Raises :class:`UsageError` when that snapshot has
        ended."""
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
                f"these indices belong to snapshot {version}, which has ended, so its shards may be evicted;"
                " iterate over the sampler again to get new indices"
            )
        self._check(view)
        return view

    def served(self) -> None:
        """Count one epoch for the shards of the current snapshot."""
        self._subscription.served()

    def close(self) -> None:
        """Give the lease back. In a copy the owner's lease stays."""
        self._subscription.close()

    def __getstate__(self) -> dict[str, Any]:
        # Owner 0 is no process, so a pickled copy never counts as the owner, whatever process it is
        # in.
        return {**self.__dict__, "_owner": 0}
