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
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import sys
import threading
import traceback
from typing import Protocol

from cachetool.loaders.feed.batches import Mailbox, work
from cachetool.loaders.feed.keeper import fork
from cachetool.loaders.feed.transform import Transform, loads
from cachetool.loaders.read.mapped import MappedParts
from cachetool.loaders.read.unmapped import raise_limit
from cachetool.loaders.ring.ring import RingWriter
from cachetool.loaders.ring.slot import SlotWriter
from cachetool.loaders.settings import Plan, Settings
from cachetool.loaders.view import View
from cachetool.proc.lines import Lines
from cachetool.proc.streams import keep_standard_streams

__all__ = ["main"]


_TURN = 0.0005
"""Seconds for which a thread of a feeder has the GIL at a time: the listener needs it after each statement of a
transaction, and the thread that makes batches never lets go of it by itself."""
_SOON = 0.03
"""Seconds of work that are left when the next plan is asked for: what its transactions take on busy processors."""


class Listener(Protocol):
    """What a feeder's second thread does."""

    def run(self, life: int) -> None:
        """Listen until this descriptor becomes readable."""
        ...

    def exhausted(self, generation: int) -> None:
        """All batches of a plan are made here, or nearly; called by the main thread."""
        ...


def main() -> None:
    """Serve the training process that holds the other end of stdin, until that ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the training process decides; it ends our stdin
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # the keeper waits for these two, whatever the training process does
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGCHLD, signal.SIGTERM])
    _yield_to_training()
    keep_standard_streams()
    lines, report = Lines(os.dup(0)), os.dup(1)
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)  # a transform, or a program that it runs, finds nothing to read
    os.dup2(2, 1)
    hello = json.loads(lines.whole())
    if hello.get("do") == "stop":
        return  # the training process was interrupted before it said hello
    settings, rings, answers = Settings.from_json(hello["settings"]), hello["rings"], hello["answers"]
    function = lines.exactly(hello["transform"])
    others = [*rings, answers, lines.fd]
    number, life, plans, pids = fork(len(rings), trainer=hello["trainer"], report=report, others=others)
    for fd in set(others).difference([rings[number]] if number else [rings[0], answers, lines.fd]):
        os.close(fd)
    raise_limit()
    mailbox = Mailbox()
    listener: Listener
    if number == 0:
        from cachetool.loaders.feed.leader import Leader  # the catalog, which the others do not need: 60 ms to import

        listener = Leader(settings, mailbox, lines, answers, plans, [os.getpid(), *pids])
    else:
        listener = _Follower(mailbox, Lines(*plans))
    threading.Thread(target=_listen, args=(listener, life), daemon=True).start()
    transform = Transform(loads(function), each=settings.each, seed=settings.seed) if function else None
    work(
        settings,
        mailbox,
        SlotWriter(RingWriter(rings[number]), ready=settings.prefetch, feeders=len(rings)),
        MappedParts(alone=True),
        transform=transform,
        number=number,
        feeders=len(rings),
        exhausted=listener.exhausted,
        soon=_SOON,
    )


def _yield_to_training() -> None:
    """Never take the processor from a thread that runs: the training thread wakes a feeder by giving a slot back, and
    would else have to wait for it with the GIL in its hands."""
    _schedule("SCHED_BATCH")


def _as_usual() -> None:
    """Let the calling thread be as quick as any, in getting a processor and this process's GIL: the training process
    waits for its answers."""
    sys.setswitchinterval(_TURN)
    _schedule("SCHED_OTHER")


def _schedule(policy: str) -> None:
    """Of the calling thread."""
    if hasattr(os, policy):
        with contextlib.suppress(OSError):  # where a sandbox forbids it
            os.sched_setscheduler(0, getattr(os, policy), os.sched_param(0))


def _listen(listener: Listener, life: int) -> None:
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
        self._told: View | None = None

    def run(self, life: int) -> None:
        """Until all are to end."""
        poll = select.poll()
        for fd in (self._plans.fd, life):
            poll.register(fd, select.POLLIN)
        while not any(fd == life for fd, _ in poll.poll()):
            self._plans.receive()
            if self._plans.ended:
                poll.unregister(self._plans.fd)  # the leader has ended, after which we are told to
            while (line := self._plans.next()) is not None:
                plan = Plan.from_json(json.loads(line), self._told)
                self._told = plan.view or self._told
                self._mailbox.put(plan)
        os._exit(0)

    def exhausted(self, generation: int) -> None:
        """Only the leader needs to know."""
