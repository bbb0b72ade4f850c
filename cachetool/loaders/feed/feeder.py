"""The main function of a feeder process.

::

    stdin    {"settings": ..., "rings": [5, 6], ...}, then the transform's bytes               from the training process
             {"id": 1, "do": "begin", "epoch": 0} ...        to the leader from here on
             {"id": 0, "do": "stop"}, or its end
    answers  {"id": 0, "feeders": [813, 812]}                                               from the leader
             {"id": 1, "steps": 16, ...} or {"id": 1, "error": ...}
    rings    batches, of each feeder in its own
    stdout   {"died": [812, -9]}                                                            from the keeper, at its end

What the training process starts becomes the keeper, from which all feeders are forked. The main thread of each makes
batches. A second one listens; that of number 0, the leader, runs the transactions of the catalog and tells the other
feeders what each epoch reads. Nothing here imports a framework or the user's program.

The parent of a loader's feeders: they are forked from it once all that they need is imported, and it waits for them.

::

    training process --- starts ---> keeper --- forks ---> other feeders, and last the leader
                     <-- who died, and how --'  '-- life: a pipe that ends when the feeders are to end

Importing NumPy and ours takes longer than everything else at a start, and processes that do so side by side slow each
other down. When the keeper forks it has one thread, and nothing of the user's program or of a framework in it; nor has
it later. So whatever a transform does in a feeder (keep the GIL, fork, wait for all its children), here it is noticed.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from cachetool.loaders.feed.batches import Mailbox, work
from cachetool.loaders.feed.transform import Transform, loads
from cachetool.loaders.read.mapped import MappedParts
from cachetool.loaders.read.unmapped import raise_limit
from cachetool.loaders.ring.ring import RingWriter
from cachetool.loaders.ring.slot import SlotWriter
from cachetool.loaders.settings import EpochPlan, Settings
from cachetool.loaders.view import View
from cachetool.proc.child import end_with
from cachetool.proc.lines import Lines, own_streams, ready, write_line

__all__ = ["Place", "fork", "main"]


_GRACE = 0.4
"""Seconds that the leader has to give its leases back once all are to end."""
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
            end_with(keeper, gives_back=False)  # whatever a transform does here
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
        write_line(report, failed)
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
        terminated, gone = False, _end_of(trainer)
        while not failed and not terminated and os.getppid() == trainer:
            if (died := self._died()) is not None:
                failed = {"died": died}
                break
            terminated = signal.SIGTERM in self._signals(None if gone else _LOOK, *gone)
        self._end(0.0 if terminated else _GRACE)
        return failed

    def _signals(self, seconds: float | None, *others: int) -> bytes:
        """Those that came, waited for; less when something else happens or the time is over."""
        return os.read(self._woken, 4096) if self._woken in ready(seconds, self._woken, *others) else b""

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


def _end_of(pid: int) -> list[int]:
    """A descriptor that becomes readable when a process ends, though what it forked may have all its pipes; none on
    kernels before 5.3."""
    try:
        return [os.pidfd_open(pid)]
    except (OSError, AttributeError):
        return []


_SWITCH_INTERVAL = 0.0005
"""Seconds for which a thread of a feeder has the GIL at a time: the listener needs it after each statement of a
transaction, and the thread that makes batches never lets go of it by itself."""
_SOON = 0.03
"""Seconds of work that are left when the next plan is asked for: what its transactions take on busy processors."""


class _Listener(Protocol):
    """What a feeder's second thread does."""

    def run(self, life: int) -> None:
        """Listen until this descriptor becomes readable."""
        ...

    def made(self, generation: int) -> None:
        """All batches of a plan are made here, or nearly; called by the main thread."""
        ...


def main() -> None:
    """Serve the training process that holds the other end of stdin, until that ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the training process decides; it ends our stdin
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # the keeper waits for these two, whatever the training process does
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGCHLD, signal.SIGTERM])
    _yield_to_training()
    lines, report = own_streams()
    hello = lines.wait()
    if hello is None or hello.get("do") == "stop":
        return  # the training process was interrupted before it said hello
    settings, rings, answers = Settings.from_json(hello["settings"]), hello["rings"], hello["answers"]
    function = bytearray(hello["transform"])
    try:
        lines.fill(memoryview(function))
    except EOFError:
        return
    others = [*rings, answers, lines.fd]
    number, life, plans, pids = fork(len(rings), trainer=hello["trainer"], report=report, others=others)
    for fd in set(others).difference([rings[number]] if number else [rings[0], answers, lines.fd]):
        os.close(fd)
    raise_limit()
    mailbox = Mailbox()
    listener: _Listener
    if number == 0:
        from cachetool.loaders.feed.leader import Leader  # the catalog, which the others do not need: 60 ms to import

        listener = Leader(settings, mailbox, lines, answers, plans, [os.getpid(), *pids])
    else:
        listener = _Follower(mailbox, Lines(*plans))
    threading.Thread(target=_listen, args=(listener, life), daemon=True).start()
    transform = (
        Transform(loads(function), transform_each=settings.transform_each, seed=settings.seed) if function else None
    )
    work(
        settings,
        mailbox,
        SlotWriter(RingWriter(rings[number]), ready=settings.prefetch, feeders=len(rings)),
        MappedParts(alone=True),
        transform=transform,
        number=number,
        feeders=len(rings),
        made=listener.made,
        soon=_SOON,
    )


def _yield_to_training() -> None:
    """Never take the processor from a thread that runs: the training thread wakes a feeder by giving a slot back, and
    would else have to wait for it with the GIL in its hands."""
    _schedule("SCHED_BATCH")


def _as_usual() -> None:
    """Let the calling thread be as quick as any, in getting a processor and this process's GIL: the training process
    waits for its answers."""
    sys.setswitchinterval(_SWITCH_INTERVAL)
    _schedule("SCHED_OTHER")


def _schedule(policy: str) -> None:
    """Of the calling thread."""
    if hasattr(os, policy):
        with contextlib.suppress(OSError):  # where a sandbox forbids it
            os.sched_setscheduler(0, getattr(os, policy), os.sched_param(0))


def _listen(listener: _Listener, life: int) -> None:
    _as_usual()
    try:
        listener.run(life)
    except BaseException:  # noqa: BLE001 - without its listener a feeder would never end
        traceback.print_exc()
        os._exit(1)


class _Follower:
    """Listens for plans."""

    def __init__(self, mailbox: Mailbox, plans: Lines) -> None:
        self._mailbox, self._plans = mailbox, plans
        self._received: View | None = None

    def run(self, life: int) -> None:
        """Until all are to end."""
        pipes = [self._plans.fd, life]
        while life not in ready(None, *pipes):
            self._plans.receive()
            if self._plans.ended:
                pipes = [life]  # the leader has ended, after which we are told to
            for value in self._plans:
                plan = EpochPlan.from_json(value, self._received)
                self._received = plan.view or self._received
                self._mailbox.put(plan)
        os._exit(0)

    def made(self, generation: int) -> None:
        """Only the leader needs to know."""
