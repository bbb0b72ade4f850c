"""The main function of a feeder process.

::

    stdin    {"settings": ..., "rings": [5, 6], ...}, then the transform's bytes               from the training process
             {"id": 1, "do": "begin", "epoch": 0} ...
             {"id": 0, "do": "stop"}, or its end
    answers  {"id": 0, "feeders": [812, 813]}, then, when one died, {"id": 0, "died": [813, -9]}
             {"id": 1, "steps": 16, ...} or {"id": 1, "error": ...}
    rings    batches, of each feeder in its own

What the training process starts is the first feeder, the leader, from which the others are forked: to them it tells
what each epoch reads. The main thread of each makes batches. A second one listens; that of the leader runs the
transactions of the catalog. Nothing here imports a framework or the user's program.
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

from cachetool.loaders.followers import fork
from cachetool.loaders.mapped import MappedParts
from cachetool.loaders.pipes import Lines, end_with, parent_fd
from cachetool.loaders.plan import Plan, Settings
from cachetool.loaders.produce import Mailbox, work
from cachetool.loaders.ring import RingWriter
from cachetool.loaders.slot import SlotWriter
from cachetool.loaders.transform import Transform, loads
from cachetool.loaders.view import View
from cachetool.streams import keep_standard_streams

__all__ = ["main"]


_TURN = 0.0005
"""Seconds for which a thread of a feeder has the GIL at a time: the listener needs it after each statement of a
transaction, and the thread that makes batches never lets go of it by itself."""
_SOON = 0.03
"""Seconds of work that are left when the next plan is asked for: what its transactions take on busy processors."""


class Listener(Protocol):
    """What a feeder's second thread does."""

    def run(self, gone: list[int]) -> None:
        """Listen until the training process ends: a descriptor that is given, if any, becomes readable then."""
        ...

    def exhausted(self, generation: int) -> None:
        """All batches of a plan are made here, or nearly; called by the main thread."""
        ...


def main() -> None:
    """Serve the training process that holds the other end of stdin, until that ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the training process decides; it ends our stdin
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # who ignores it cannot wait for other feeders, and that is inherited
    _yield_to_training()
    keep_standard_streams()
    os.dup2(2, 1)  # what a transform prints is no answer
    lines = Lines(_standard_input_apart())
    hello = json.loads(lines.whole())
    settings, rings, answers = Settings.from_json(hello["settings"]), hello["rings"], hello["answers"]
    function = lines.exactly(hello["transform"])
    if function and hello["main"]:
        end_with(hello["parent"])
    gone = parent_fd(hello["parent"])
    number, plans, followers = fork(len(rings))
    for fd in [*rings[:number], *rings[number + 1 :], *([answers, lines.fd] if number else [])]:
        os.close(fd)
    mailbox = Mailbox()
    listener: Listener
    if number == 0:
        from cachetool.loaders.leader import Leader  # the catalog, which the others do not need: 60 ms to import

        listener = Leader(settings, mailbox, lines, answers, followers)
    else:
        listener = _Follower(mailbox, Lines(plans))
    threading.Thread(target=_listen, args=(listener, gone), daemon=True).start()
    transform = Transform(loads(function), each=settings.each, seed=settings.seed) if function else None
    work(
        settings,
        mailbox,
        SlotWriter(RingWriter(rings[number]), ready=settings.prefetch, feeders=len(rings)),
        MappedParts(),
        transform=transform,
        number=number,
        feeders=len(rings),
        exhausted=listener.exhausted,
        soon=_SOON,
    )


def _standard_input_apart() -> int:
    """A descriptor of what the training process says; a transform, or a program it runs, finds nothing to read."""
    said = os.dup(0)
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    return said


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


def _listen(listener: Listener, gone: list[int]) -> None:
    _as_usual()
    try:
        listener.run(gone)
    except BaseException:  # noqa: BLE001 - without its listener a feeder would never end
        traceback.print_exc()
        os._exit(1)


class _Follower:
    """Listens for plans."""

    def __init__(self, mailbox: Mailbox, plans: Lines) -> None:
        self._mailbox, self._plans = mailbox, plans
        self._told: View | None = None

    def run(self, gone: list[int]) -> None:
        """Until the training process or the leader ends."""
        poll = select.poll()
        for fd in (self._plans.fd, *gone):
            poll.register(fd, select.POLLIN)
        while True:
            if any(fd != self._plans.fd for fd, _ in poll.poll()):
                os._exit(0)
            self._plans.receive()
            if self._plans.ended:
                os._exit(0)
            while (line := self._plans.next()) is not None:
                plan = Plan.from_json(json.loads(line), self._told)
                self._told = plan.view or self._told
                self._mailbox.put(plan)

    def exhausted(self, generation: int) -> None:
        """Only the leader needs to know."""
