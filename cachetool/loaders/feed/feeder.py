"""The main function of a feeder process, and of the keeper process from which all feeders are forked.

::

    stdin    {"settings": ..., "rings": [5, 6], ...}, then the functions' bytes               from the training process
             {"id": 1, "do": "begin", "epoch": 0} ...        to the leader from here on
             {"id": 0, "do": "stop"}, or its end
    answers  {"id": 0, "feeders": [813, 812]}                                               from the leader
             {"id": 1, "steps": 16, ...} or {"id": 1, "error": ...}
    rings    batches, of each feeder in its own
    stdout   {"died": [812, -9]}                                                            from the keeper, at its end

The process that the training process starts becomes the keeper. It imports what feeders need, forks them, and waits for
them. The main thread of each feeder makes batches, and a second thread listens. The second thread of feeder 0, the
leader, runs the transactions of the catalog and tells the other feeders what each epoch reads. Nothing here imports a
framework or the user's program.

::

    training process --- starts ---> keeper --- forks ---> other feeders, and last the leader
                     <-- who died, and how --'  '-- life: a pipe that ends when the feeders are to end

Importing NumPy and our modules takes longer than everything else at a start, and processes that import side by side
slow each other down. So the keeper imports once and forks.

The keeper has one thread, and never runs the user's program or a framework. A transform in a feeder may keep the GIL,
fork, or wait for all its children; the keeper notices the end of a feeder all the same.
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
from cachetool.loaders.feed.transform import loads
from cachetool.loaders.read.mapped import MappedParts
from cachetool.loaders.read.unmapped import raise_limit
from cachetool.loaders.ring.batch_times import BatchTimes
from cachetool.loaders.ring.ring import RingWriter
from cachetool.loaders.ring.slot import SlotWriter
from cachetool.loaders.settings import EpochPlan, Settings
from cachetool.loaders.view import View
from cachetool.proc.child import end_with
from cachetool.proc.lines import Lines, own_streams, ready, write_line

__all__ = ["Place", "fork", "main"]


# With 0.7 s the end of the feeders was late in one of six runs.
_GRACE = 0.4
"""Seconds that the leader has to give its leases back once all feeders are to end."""
_LOOK = 0.5
"""Seconds between two looks at the parent process, on kernels before 5.3, which have no pidfd."""


class Place(NamedTuple):
    """The place of a feeder among the others."""

    number: int
    life: int
    """A descriptor that becomes readable when this feeder is to end."""
    plans: list[int]
    """The writing ends of the pipes to the other feeders in the leader (number 0); the reading end of its own in
    another feeder."""
    pids: list[int]
    """The pids of the feeders. Only the leader, which is forked last, has all of the others."""


def fork(feeders: int, *, trainer: int, report: int, others: Sequence[int]) -> Place:
    """Become the keeper of so many feeders, and return in each of these feeders. In the keeper this does not return.

    ``trainer`` is the pid of the training process; all processes end with it. ``report`` is a pipe to it for errors, as
    JSON. ``others`` are descriptors that the keeper does not need.
    """
    plans = [os.pipe() for _ in range(feeders - 1)]
    ends, life = os.pipe()
    inherited = {report, life, *(fd for pair in plans for fd in pair)}
    keeper, pids = os.getpid(), list[int]()
    failed: dict[str, Any] = {}
    # The leader is forked last, so that it has the pids of all others and can tell them to the
    # training process.
    for number in [*range(1, feeders), 0]:
        try:
            pid = os.fork()
        except OSError as error:
            failed = {"error": f"cannot start a feeder: {error.strerror}"}
            break
        if pid == 0:
            # The kernel ends this feeder with the keeper, whatever a transform does here.
            end_with(keeper, gives_back=False)
            # Linux shares processors out by sessions. In one session all feeders together would get
            # what one thread gets: 4.2 to 5.0 GB/s instead of 4.4 to 5.6.
            # A sandbox may forbid the call.
            with contextlib.suppress(PermissionError):
                os.setsid()
            own = [plans[number - 1][0]] if number else [write for _, write in plans]
            # A feeder that held a writing end of another pipe would keep that pipe from ending.
            for fd in inherited.difference(own):
                os.close(fd)
            if (random := sys.modules.get("numpy.random")) is not None:
                # Otherwise all feeders would draw the same random numbers. Python's own random
                # module is seeded anew by a fork, NumPy's is not.
                random.seed()
            return Place(number, ends, own, pids)
        pids.append(pid)
    # The keeper closes what only feeders use. An end of a pipe that stayed open here would keep
    # that pipe from ending with its feeder.
    for fd in inherited.difference([report, life]).union(others, [ends]):
        os.close(fd)
    failed = _Keeper(pids, life).keep(trainer, failed=failed)
    # Writing fails when the training process has ended, and then nobody needs the report.
    with contextlib.suppress(BrokenPipeError):
        write_line(report, failed)
    os._exit(0)


class _Keeper:
    def __init__(self, pids: Sequence[int], life: int) -> None:
        self._left, self._leader, self._life = set(pids), pids[-1] if pids else 0, life
        self._woken, wake = os.pipe()
        os.set_blocking(wake, False)
        # The handlers do nothing. They exist so that Python writes the signal's number into this
        # pipe, which the keeper waits on: a signal between a check and the wait cannot be missed.
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
        for what in (signal.SIGCHLD, signal.SIGTERM):
            signal.signal(what, lambda *_: None)

    def keep(self, trainer: int, *, failed: dict[str, Any]) -> dict[str, Any]:
        """Wait until a feeder or the training process ends, or until SIGTERM comes; then end the feeders that are left.

        Return the error: ``failed``, or the feeder that ended by itself. The leader ends by itself when it is
        told to stop.
        """
        terminated, gone = False, _end_of(trainer)
        while not failed and not terminated and os.getppid() == trainer:
            if (died := self._died()) is not None:
                failed = {"died": died}
                break
            # The parent is asked for regularly only where there is no pidfd.
            terminated = signal.SIGTERM in self._signals(None if gone else _LOOK, *gone)
        self._end(0.0 if terminated else _GRACE)
        return failed

    def _signals(self, seconds: float | None, *others: int) -> bytes:
        """Wait for signals and return their numbers; return none when something else happens or the time is over."""
        return os.read(self._woken, 4096) if self._woken in ready(seconds, self._woken, *others) else b""

    def _died(self) -> tuple[int, int] | None:
        """Return pid and exit code (below zero: a signal) of a feeder that ended, or None."""
        pid, status = os.waitpid(-1, os.WNOHANG) if self._left else (0, 0)
        if not pid:
            return None
        self._left.discard(pid)
        return pid, os.waitstatus_to_exitcode(status)

    def _end(self, grace: float) -> None:
        # The leader waits for this pipe: its end tells it to give the leases back.
        os.close(self._life)
        # Only the leader has something to give back.
        self._kill(self._left - {self._leader})
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
            # The pid cannot belong to another process yet, because the keeper has not waited for
            # it.
            os.kill(pid, signal.SIGKILL)


def _end_of(pid: int) -> list[int]:
    """Return a descriptor that becomes readable when a process ends; none on kernels before 5.3."""
    # A pidfd rather than the end of a pipe, because a process that the training process forked has
    # all of its pipes, and would keep them open.
    try:
        return [os.pidfd_open(pid)]
    except (OSError, AttributeError):
        return []


# The listener needs the GIL after each statement of a transaction, and the thread that makes
# batches never releases it by itself: with Python's default of 5 ms a transaction would take too
# long.
_SWITCH_INTERVAL = 0.0005
"""Seconds for which a thread of a feeder has the GIL at a time."""
# As long as the transactions of a snapshot take on busy processors. Asked for later, short epochs
# had pauses of 8 of 27 ms.
_SOON = 0.03
"""Seconds of work that are left of a plan when the next plan is asked for."""


class _Listener(Protocol):
    """The work of a feeder's second thread."""

    def run(self, life: int) -> None:
        """Listen until the descriptor ``life`` becomes readable."""
        ...

    def made(self, generation: int) -> None:
        """Note that all batches of a plan, or nearly all, are made here. The main thread calls this."""
        ...

    @property
    def ahead(self) -> float:
        """Seconds that the next plan will take, by the last one."""
        ...


def main() -> None:
    """Serve the training process that holds the other end of stdin, until that process ends."""
    # Ctrl-C reaches all processes of a terminal. The training process decides about it, and ends
    # stdin.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # The training process may ignore or block these signals, and children inherit that. The keeper
    # needs them to wait for its feeders.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGCHLD, signal.SIGTERM])
    _yield_to_training()
    lines, report = own_streams()
    hello = lines.wait()
    if hello is None or hello.get("do") == "stop":
        # The training process was interrupted before it sent the settings.
        return
    settings, rings, answers = Settings.from_json(hello["settings"]), hello["rings"], hello["answers"]
    functions = bytearray(hello["functions"])
    try:
        lines.fill(memoryview(functions))
    except EOFError:
        return
    others = [*rings, answers, lines.fd]
    number, life, plans, pids = fork(len(rings), trainer=hello["trainer"], report=report, others=others)
    # Each feeder closes the rings of the others, whose memory it would keep otherwise.
    for fd in set(others).difference([rings[number]] if number else [rings[0], answers, lines.fd]):
        os.close(fd)
    raise_limit()
    if any(decoder == "jpeg" for _, decoder, _ in settings.decode):
        # OpenCV would start a thread for each processor in each feeder. Read when OpenCV is imported.
        os.environ.setdefault("OPENCV_FOR_THREADS_NUM", "1")
    places = MappedParts(alone=True)
    mailbox = Mailbox(places.prepare)
    times = BatchTimes()
    listener: _Listener
    if number == 0:
        # Only the leader uses the catalog, whose modules take 60 ms to import.
        from cachetool.loaders.feed.leader import Leader

        listener = Leader(settings, mailbox, lines, answers, plans, [os.getpid(), *pids])
    else:
        listener = _Follower(mailbox, Lines(*plans))
    threading.Thread(target=_listen, args=(listener, life), daemon=True).start()
    work(
        settings,
        mailbox,
        SlotWriter(RingWriter(rings[number]), ready=settings.prefetch, feeders=len(rings), times=times),
        places,
        times,
        functions=loads(functions),
        number=number,
        feeders=len(rings),
        made=listener.made,
        soon=lambda: max(_SOON, listener.ahead),
    )


def _yield_to_training() -> None:
    """Make this process one that never takes the processor from a running thread."""
    # The training thread wakes a feeder when it gives a slot back. A feeder that ran at once on the
    # same processor would stop that thread while it holds the GIL. At 1 MiB the training process is
    # blocked 0.9 instead of 1.3 % of its time.
    _schedule("SCHED_BATCH")


def _as_usual() -> None:
    """Let the calling thread get a processor and the GIL of this process as quickly as any."""
    # This thread answers the training process, which waits for the answer.
    sys.setswitchinterval(_SWITCH_INTERVAL)
    _schedule("SCHED_OTHER")


def _schedule(policy: str) -> None:
    """Set the scheduling policy of the calling thread."""
    if hasattr(os, policy):
        # A sandbox may forbid the call.
        with contextlib.suppress(OSError):
            os.sched_setscheduler(0, getattr(os, policy), os.sched_param(0))


def _listen(listener: _Listener, life: int) -> None:
    _as_usual()
    try:
        listener.run(life)
    # Any error: without its listener a feeder would never hear that it is to end.
    except BaseException:  # noqa: BLE001
        traceback.print_exc()
        os._exit(1)


class _Follower:
    """The listener of every feeder but the leader: receives plans."""

    def __init__(self, mailbox: Mailbox, plans: Lines) -> None:
        self._mailbox, self._plans = mailbox, plans
        self._received: View | None = None

    def run(self, life: int) -> None:
        """Receive plans until all feeders are to end."""
        pipes = [self._plans.fd, life]
        while life not in ready(None, *pipes):
            self._plans.receive()
            if self._plans.ended:
                # The leader has ended. The keeper notices that and ends this feeder as well.
                pipes = [life]
            for value in self._plans:
                # A view that did not change is not sent again: the plan refers to the one before.
                plan = EpochPlan.from_json(value, self._received)
                self._received = plan.view or self._received
                self._mailbox.put(plan)
        os._exit(0)

    ahead = 0.0

    def made(self, generation: int) -> None:
        """Do nothing: only the leader needs to know."""
