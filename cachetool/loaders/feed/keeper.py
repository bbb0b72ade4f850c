"""The parent of a loader's feeders: they are forked from it once all that they need is imported, and it waits for them.

::

    training process --- starts ---> keeper --- forks ---> other feeders, and last the leader
                     <-- who died, and how --'  '-- life: a pipe that ends when the feeders are to end

Importing NumPy and ours takes longer than everything else at a start, and processes that do so side by side slow each
other down. When the keeper forks it has one thread, and nothing of the user's program or of a framework in it; nor has
it later. So whatever a transform does in a feeder (keep the GIL, fork, wait for all its children), here it is noticed.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import signal
import sys
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

__all__ = ["Place", "fork"]

_GRACE = 0.4
"""Seconds that the leader has to give its leases back once all are to end."""
_PDEATHSIG = 1  # linux/prctl.h
_LOOK = 0.5
"""Seconds between two looks at who the parent is, on kernels before 5.3."""


class Place(NamedTuple):
    """What a feeder is among the others."""

    number: int
    life: int
    """A descriptor that becomes readable when it is to end."""
    plans: list[int]
    """Of the leader, number 0: where each other feeder is told what to read; of another where that comes from."""
    pids: list[int]
    """Of the other feeders; only the leader has them all."""


def fork(feeders: int, *, trainer: int, report: int, others: Sequence[int]) -> Place:
    """Become the keeper of so many feeders, which ends in here, and these feeders, in which this returns.

    ``trainer``: the pid of the training process, with which all of them end. ``report``: a pipe to it, for what went
    wrong, as JSON. ``others``: descriptors that the keeper does not need.
    """
    plans = [os.pipe() for _ in range(feeders - 1)]
    ends, life = os.pipe()
    inherited = {report, life, *(fd for pair in plans for fd in pair)}
    keeper, pids = os.getpid(), list[int]()
    failed: dict[str, Any] = {}
    for number in [*range(1, feeders), 0]:
        try:
            pid = os.fork()
        except OSError as error:
            failed = {"error": f"cannot start a feeder: {error.strerror}"}
            break
        if pid == 0:
            _end_with(keeper)
            # Linux shares processors out by sessions: as one, all feeders would get what one thread gets.
            with contextlib.suppress(PermissionError):  # where a sandbox forbids it
                os.setsid()
            own = [plans[number - 1][0]] if number else [write for _, write in plans]
            for fd in inherited.difference(own):
                os.close(fd)
            if (random := sys.modules.get("numpy.random")) is not None:
                random.seed()  # else all would draw the same numbers; Python's own is seeded anew by forking
            return Place(number, ends, own, pids)
        pids.append(pid)
    for fd in inherited.difference([report, life]).union(others, [ends]):
        os.close(fd)
    failed = _Keeper(pids, life).keep(trainer, failed=failed)
    with contextlib.suppress(BrokenPipeError):
        os.write(report, json.dumps(failed).encode())
    os._exit(0)


class _Keeper:
    def __init__(self, pids: Sequence[int], life: int) -> None:
        self._left, self._leader, self._life = set(pids), pids[-1] if pids else 0, life
        self._woken, wake = os.pipe()
        os.set_blocking(wake, False)
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
        for what in (signal.SIGCHLD, signal.SIGTERM):
            signal.signal(what, lambda *_: None)

    def keep(self, trainer: int, *, failed: dict[str, Any]) -> dict[str, Any]:
        """Until a feeder or the training process ends, or that says so by SIGTERM; then end all that are left.

        Gives what went wrong: ``failed``, or which feeder ended by itself, as the leader does when it is told to.
        """
        told, gone = False, _end_of(trainer)
        while not failed and not told and os.getppid() == trainer:
            if (died := self._died()) is not None:
                failed = {"died": died}
                break
            told = signal.SIGTERM in self._signals(None if gone else _LOOK, *gone)
        self._end(0.0 if told else _GRACE)
        return failed

    def _signals(self, seconds: float | None, *others: int) -> bytes:
        """Those that came, waited for; less when something else happens or the time is over."""
        poll = select.poll()
        for fd in (self._woken, *others):
            poll.register(fd, select.POLLIN)
        ready = {fd for fd, _ in poll.poll(None if seconds is None else 1000 * seconds)}
        return os.read(self._woken, 4096) if self._woken in ready else b""

    def _died(self) -> tuple[int, int] | None:
        """Pid and exit code of a feeder, less than zero for a signal."""
        pid, status = os.waitpid(-1, os.WNOHANG) if self._left else (0, 0)
        if not pid:
            return None
        self._left.discard(pid)
        return pid, os.waitstatus_to_exitcode(status)

    def _end(self, grace: float) -> None:
        os.close(self._life)
        self._kill(self._left - {self._leader})  # they have nothing to give back
        deadline = time.monotonic() + grace
        while self._left:
            if self._died() is None:
                left = deadline - time.monotonic()
                if left > 0:
                    self._signals(left)
                else:
                    self._kill(self._left)
                    self._signals(_LOOK)

    def _kill(self, pids: set[int]) -> None:
        for pid in pids:
            os.kill(pid, signal.SIGKILL)  # nobody else can have its pid before we have waited for it


def _end_with(keeper: int) -> None:
    """Let the kernel kill this process when the one that forked it ends, whatever a transform does here."""
    ctypes.CDLL(None).prctl(_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != keeper:
        os._exit(0)


def _end_of(pid: int) -> list[int]:
    """A descriptor that becomes readable when a process ends, though what it forked may have all its pipes; none on
    kernels before 5.3."""
    try:
        return [os.pidfd_open(pid)]
    except (OSError, AttributeError):
        return []
