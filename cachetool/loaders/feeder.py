"""The main function of a feeder process.

::

    stdin    {"settings": ..., "number": 0, "feeders": 2, ...}, then the transform's bytes     from the training process
             {"id": 1, "do": "begin", "epoch": 0} ...        to the leader only
             {"id": 0, "do": "stop"}, or its end
    plans    a plan a line                                                                      from the leader
    answers  {"id": 1, "steps": 16, ...} or {"id": 1, "error": ...}                             from the leader
    ring     batches

The main thread makes batches. A second one listens; that of the first feeder, the leader, runs the transactions of the
catalog and tells the other feeders what each epoch reads. Nothing here imports a framework or the user's program.
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

    def run(self, parent: int) -> None:
        """Listen until the training process, whose pid is given, ends."""
        ...

    def exhausted(self, generation: int) -> None:
        """All batches of a plan are made here, or nearly; called by the main thread."""
        ...


def main() -> None:
    """Serve the training process that holds the other end of stdin, until that ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the training process decides; it ends our stdin
    _yield_to_training()
    keep_standard_streams()
    os.dup2(2, 1)  # what a transform prints is no answer
    lines = Lines(0)
    hello = json.loads(lines.whole())
    settings = Settings.from_json(hello["settings"])
    function = lines.exactly(hello["transform"])
    if function and hello["main"]:
        end_with(hello["parent"])
    mailbox = Mailbox()
    listener: Listener
    if hello["number"] == 0:
        from cachetool.loaders.leader import Leader  # the catalog, which the others do not need: 60 ms to import

        listener = Leader(settings, mailbox, lines, hello["answers"], hello["followers"])
    else:
        listener = _Follower(settings, mailbox, lines, hello["plans"])
    threading.Thread(target=_listen, args=(listener, hello["parent"]), daemon=True).start()
    transform = Transform(loads(function), each=settings.each, seed=settings.seed) if function else None
    work(
        settings,
        mailbox,
        SlotWriter(RingWriter(hello["ring"]), ready=settings.prefetch, feeders=hello["feeders"]),
        MappedParts(),
        transform=transform,
        number=hello["number"],
        feeders=hello["feeders"],
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


def _listen(listener: Listener, parent: int) -> None:
    _as_usual()
    try:
        listener.run(parent)
    except BaseException:  # noqa: BLE001 - without its listener a feeder would never end
        traceback.print_exc()
        os._exit(1)


class _Follower:
    """Listens for plans."""

    def __init__(self, settings: Settings, mailbox: Mailbox, lines: Lines, plans: int) -> None:
        self._settings, self._mailbox = settings, mailbox
        self._control, self._plans = lines, Lines(plans)
        self._told: View | None = None

    def run(self, parent: int) -> None:
        """Until the training process or the leader ends."""
        poll = select.poll()
        for fd in (self._control.fd, self._plans.fd, *parent_fd(parent)):
            poll.register(fd, select.POLLIN)
        while True:
            # Whatever comes after the greeting means: stop.
            if self._control.next() is not None or any(fd != self._plans.fd for fd, _ in poll.poll()):
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
