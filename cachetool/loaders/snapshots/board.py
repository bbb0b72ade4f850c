"""A few numbers that one process writes and its workers read: which snapshots there were lately, and which is the last.

A worker process that outlives an epoch keeps the list of shards it was born with; this board tells it that there is a
newer one. It lies in shared memory that has no name and goes with its last process, and it reaches children through
fork, spawn and forkserver alike. Pickled anywhere else (a file, another machine) it becomes a board of its own.

Written by one process. A row is invalid while it is rewritten, and rows are checked before and after they are read.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from multiprocessing.context import get_spawning_popen
from multiprocessing.sharedctypes import RawArray
from typing import Any

__all__ = ["Board"]

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
                found = int(cells[at + 1])
                return found if cells[at] == version else None
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
