"""Which epoch the workers of one iteration read, agreed among them: the first begins it, the others join.

::

    worker 0    takes the newest snapshot -> writes epoch, version, fingerprint, then who began it
    worker k    waits for that -> takes the same snapshot -> writes that it is there
    worker 0    at its own end: waits until all are there, since only its lease keeps what they are about to read

The workers of a DataLoader are all started before one of them can end, and none knows of an epoch but by being asked
for its iterator. The cells lie in shared memory that reaches them through fork, spawn and forkserver
(:mod:`cachetool.loaders.snapshots.indexed` has the same). What an earlier iteration with the same key left in them is
told by who wrote it, which has ended, or by who joined it, which was a worker of the same number. Of several iterations
at the same time each is begun when all workers of the one before have joined that.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import time
from collections.abc import Callable, Iterator
from multiprocessing.context import get_spawning_popen
from multiprocessing.sharedctypes import RawArray
from typing import Any, NamedTuple

from cachetool.core.errors import CacheToolError, UsageError
from cachetool.loaders.ring.memory import library, supported, wait

__all__ = ["Call", "RollCall"]

_KEY, _PID, _EPOCH, _VERSION, _FINGERPRINT, _NEXT, _DONE, _WORKERS, _TURN, _FIRST = *range(9), 16
_MOST = 1024  # workers
_POLL = 0.002
_PATIENCE = 120.0


class Call(NamedTuple):
    """What is read."""

    epoch: int
    version: int
    fingerprint: int


class RollCall:
    """Shared by a dataset and its copies in worker processes."""

    __slots__ = ("_cells",)

    def __init__(self, cells: list[int] | None = None) -> None:
        self._cells: Any = RawArray(ctypes.c_int64, _FIRST + _MOST)
        if cells is not None:
            self._cells[:] = cells
        else:
            self._cells[_DONE] = -1
        if supported():
            library(keeps_gil=True).sem_init(self._turn, 1, 1)

    @property
    def _turn(self) -> ctypes.c_void_p:
        """A semaphore that whoever begins an iteration takes down; it fills four cells."""
        return ctypes.c_void_p(ctypes.addressof(self._cells) + 8 * _TURN)

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """While no other process begins an iteration; but nobody waits for ever for one that was killed."""
        if not supported():
            yield
            return
        end = time.monotonic() + _PATIENCE
        while not wait(self._turn, 1.0) and time.monotonic() < end:
            pass
        try:
            yield
        finally:
            library(keeps_gil=True).sem_post(self._turn)

    @property
    def next_epoch(self) -> int:
        """Number of the epoch that begins next."""
        return int(self._cells[_NEXT])

    @next_epoch.setter
    def next_epoch(self, epoch: int) -> None:
        self._cells[_NEXT] = epoch

    @property
    def done(self) -> int:
        """The last epoch that worker 0 read to its end; -1 before any."""
        return int(self._cells[_DONE])

    @done.setter
    def done(self, epoch: int) -> None:
        self._cells[_DONE] = epoch

    @contextlib.contextmanager
    def beginning(self, key: int, workers: int) -> Iterator[Callable[[Call], None]]:
        """To begin the iteration ``key`` of so many workers: gives what is to be told what it reads."""
        with self._alone():
            _until(self._whole, "another worker did not begin")
            yield functools.partial(self.begin, key, workers=workers)

    def begin(self, key: int, call: Call, *, workers: int = 1) -> None:
        """Say what the iteration ``key`` reads."""
        cells = self._cells
        cells[_KEY] = 0
        cells[_FIRST:] = [0] * _MOST
        cells[_PID], cells[_WORKERS] = os.getpid(), workers
        cells[_EPOCH], cells[_VERSION], cells[_FINGERPRINT] = call
        cells[_NEXT] = call.epoch + 1
        cells[_KEY] = key

    def _whole(self) -> bool:
        """Whether nobody is still to join the present iteration."""
        key, workers, cells = self._cells[_KEY], self._cells[_WORKERS], self._cells
        return not key or not _alive(cells[_PID]) or all(each == key for each in cells[_FIRST + 1 : _FIRST + workers])

    @property
    def current(self) -> Call:
        """What was begun last."""
        return Call(*(int(each) for each in self._cells[_EPOCH : _FINGERPRINT + 1]))

    def join(self, key: int, worker: int) -> Call:
        """What the iteration ``key`` reads, waited for."""
        if worker >= _MOST:
            raise UsageError(f"{worker + 1} workers are too many: at most {_MOST}")
        cells, own = self._cells, _FIRST + worker

        def begun() -> bool:
            # With the same seed for two epochs the key may be that of an earlier one, in which such a worker was.
            return bool(cells[_KEY] == key and cells[own] != key and _alive(cells[_PID]))

        _until(begun, "worker 0 has not begun the epoch")
        return self.current

    def arrived(self, key: int, worker: int) -> None:
        """Say that this worker holds what it is going to read."""
        self._cells[_FIRST + worker] = key

    def wait_for_all(self, key: int, workers: int) -> None:
        """Come back when all workers have arrived, as they have when another iteration was begun since."""
        others, cells = slice(_FIRST + 1, _FIRST + workers), self._cells
        _until(
            lambda: cells[_PID] != os.getpid() or all(each == key for each in cells[others]),
            "another worker did not begin",
        )

    def __reduce__(self) -> tuple[Callable[..., RollCall], tuple[Any]]:
        # Shared memory can only be handed to a child that is being started right now.
        if get_spawning_popen() is None:
            return RollCall, (list(self._cells),)
        return _attached, (self._cells,)


def _attached(cells: Any) -> RollCall:
    call = RollCall.__new__(RollCall)
    call._cells = cells
    return call


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def _until(condition: Callable[[], bool], complaint: str) -> None:
    parent, end = os.getppid(), time.monotonic() + _PATIENCE
    while not condition():
        if os.getppid() != parent or time.monotonic() > end:
            raise CacheToolError(f"{complaint}; was it killed?")
        time.sleep(_POLL)
