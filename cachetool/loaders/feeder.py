"""The main function of a feeder process.

::

    stdin    {"settings": ..., "number": 0, "feeders": 2, ...}, then the transform's bytes     from the training process
             {"id": 1, "do": "begin", "epoch": 0} ...        its end means: stop               (to the leader only)
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
import time
import traceback
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from cachetool.loaders.failure import described
from cachetool.loaders.mapped import MappedParts
from cachetool.loaders.plan import Begun, Plan, Settings
from cachetool.loaders.produce import Mailbox, work
from cachetool.loaders.ring import RingWriter
from cachetool.loaders.slot import SlotWriter
from cachetool.loaders.transform import Transform, loads
from cachetool.loaders.turns import NotYet, Resume, Turns

__all__ = ["main"]

_POLL = 0.2
_SOON = 0.05
"""Seconds after the end of an epoch in which the next one is probably begun, which then has not to wait."""
_TALK = 10.0
"""Seconds between two lines that say what is waited for."""
_GRACE = 0.5
"""Seconds that the clean-up may take once the training process is gone."""


def main() -> None:
    """Serve the training process that holds the other end of stdin, until that ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the training process decides; it ends our stdin
    os.dup2(2, 1)  # what a transform prints is no answer
    lines = _Lines(0)
    hello = json.loads(lines.whole())
    settings = Settings.from_json(hello["settings"])
    function = lines.exactly(hello["transform"])
    mailbox = Mailbox()
    listener: _Leader | _Follower
    if hello["number"] == 0:
        listener = _Leader(settings, mailbox, lines, hello["answers"], hello["followers"])
    else:
        listener = _Follower(settings, mailbox, lines, hello["plans"])
    threading.Thread(target=_listen, args=(listener, hello["parent"]), daemon=True).start()
    transform = Transform(loads(function), each=settings.each, seed=settings.seed) if function else None
    work(
        settings,
        mailbox,
        SlotWriter(RingWriter(hello["ring"]), ready=settings.prefetch),
        MappedParts(),
        transform=transform,
        number=hello["number"],
        feeders=hello["feeders"],
        exhausted=listener.exhausted,
    )


def _listen(listener: _Leader | _Follower, parent: int) -> None:
    try:
        listener.run(parent)
    except BaseException:  # noqa: BLE001 - without its listener a feeder would never end
        traceback.print_exc()
        os._exit(1)


class _Lines:
    """Lines out of a pipe, however they are cut on their way."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._rest = b""
        self.ended = False

    def receive(self) -> None:
        """Read what is there, waiting for at least something."""
        data = os.read(self.fd, 1 << 20)
        self.ended = not data
        self._rest += data

    def next(self) -> bytes | None:
        """A line that has come whole; None when there is none."""
        line, found, rest = self._rest.partition(b"\n")
        if not found:
            return None
        self._rest = rest
        return line

    def whole(self) -> bytes:
        """The next line, waited for."""
        while (line := self.next()) is None:
            self._more()
        return line

    def exactly(self, count: int) -> bytes:
        """So many bytes, waited for."""
        while len(self._rest) < count:
            self._more()
        data, self._rest = self._rest[:count], self._rest[count:]
        return data

    def _more(self) -> None:
        self.receive()
        if self.ended:
            os._exit(0)


def _write(fd: int, value: Any) -> None:
    data = memoryview(json.dumps(value).encode() + b"\n")
    while data:
        data = data[os.write(fd, data) :]


def _parent_fd(pid: int) -> list[int]:
    """A descriptor that becomes readable when the training process ends, though forked children of it still hold
    their copies of our pipe; none on kernels before 5.3."""
    try:
        fd = os.pidfd_open(pid)
    except (OSError, AttributeError):
        return []
    if os.getppid() != pid:
        os._exit(0)
    return [fd]


class _Follower:
    """Listens for plans."""

    def __init__(self, settings: Settings, mailbox: Mailbox, lines: _Lines, plans: int) -> None:
        self._settings, self._mailbox = settings, mailbox
        self._control, self._plans = lines, _Lines(plans)

    def run(self, parent: int) -> None:
        """Until the training process or the leader ends."""
        poll = select.poll()
        for fd in (self._control.fd, self._plans.fd, *_parent_fd(parent)):
            poll.register(fd, select.POLLIN)
        while True:
            if any(fd != self._plans.fd for fd, _ in poll.poll()):
                os._exit(0)
            self._plans.receive()
            if self._plans.ended:
                os._exit(0)
            while (line := self._plans.next()) is not None:
                self._mailbox.put(Plan.from_json(json.loads(line)))

    def exhausted(self, generation: int) -> None:
        """Only the leader needs to know."""


class _Leader:
    """Does what the training process asks for, and what is due by itself."""

    def __init__(
        self, settings: Settings, mailbox: Mailbox, lines: _Lines, answers: int, followers: Sequence[int]
    ) -> None:
        self._settings, self._mailbox, self._lines = settings, mailbox, lines
        self._answers, self._followers = answers, followers
        self._turns = Turns(settings, self._publish)
        self._woken, self._wake = os.pipe()
        self._made = 0
        self._pending: tuple[dict[str, Any], float, float] | None = None

    def exhausted(self, generation: int) -> None:
        """Called by the main thread."""
        self._made = generation
        os.write(self._wake, b"\0")

    def _publish(self, plan: Plan) -> None:
        self._mailbox.put(plan)
        if self._followers:
            value = plan.to_json()
            for fd in self._followers:
                with contextlib.suppress(BrokenPipeError):  # a dead follower is noticed by whoever waits for its batch
                    _write(fd, value)

    def run(self, parent: int) -> None:
        """Until the training process ends."""
        poll = select.poll()
        gone = _parent_fd(parent)
        for fd in (self._lines.fd, self._woken, *gone):
            poll.register(fd, select.POLLIN)
        while True:
            while (line := self._lines.next()) is not None:
                self._pending = None  # whoever waited for it gave up
                self._answer(json.loads(line))
            if self._pending is not None:
                self._answer(self._pending[0])
            wait = _POLL if self._pending else self._turns.tick()
            if self._turns.unsettled:
                wait = min(wait or _SOON, _SOON)
            ready = {fd for fd, _ in poll.poll(None if wait is None else wait * 1000)}
            if not ready:
                self._turns.settle()
            if self._woken in ready:
                os.read(self._woken, 4096)
                self._turns.exhausted(self._made)
            if self._lines.fd in ready:
                self._lines.receive()
            if self._lines.ended or not ready.isdisjoint(gone):
                self._leave()

    def _answer(self, asked: dict[str, Any]) -> None:
        try:
            result = self._do(asked)
        except NotYet as short:
            self._later(asked, short)
            return
        except Exception as error:  # noqa: BLE001 - whatever it is, it must reach whoever asked
            result = {"error": described(error)}
        self._pending = None
        if result is not None:
            with contextlib.suppress(BrokenPipeError):
                _write(self._answers, {"id": asked["id"], **result})
        if asked["do"] == "begin":
            self._turns.settle()
            self._turns.exhausted(self._made)  # an epoch that was made whole while the one before was delivered

    def _later(self, asked: dict[str, Any], short: NotYet) -> None:
        now = time.monotonic()
        _, until, talked = self._pending or (asked, now + self._settings.wait, 0.0)
        if now >= until:
            self._pending = None
            _write(self._answers, {"id": asked["id"], "error": described(self._turns.given_up(short))})
            return
        if now - talked >= _TALK:
            print(f"cachetool: waiting for samples: {short}", file=sys.stderr, flush=True)  # noqa: T201 - talk
            talked = now
        self._pending = asked, until, talked

    def _do(self, asked: dict[str, Any]) -> dict[str, Any] | None:
        match asked["do"]:
            case "begin":
                resume = asked.get("resume")
                plan = self._turns.begin(asked["epoch"], Resume(**resume) if resume else None)
            case "prepare":
                plan = self._turns.prepare(asked["epoch"])
            case "delivered":
                self._turns.delivered(asked["generation"])
                return None
            case "state":
                return {"state": asdict(self._turns.state(asked["reached"]))}
            case unknown:
                raise AssertionError(unknown)
        return Begun.of(plan, self._settings).to_json()

    def _leave(self) -> None:
        """Give the leases back, if that is quick: they end with this process in any case."""
        threading.Timer(_GRACE, os._exit, (0,)).start()
        with contextlib.suppress(Exception):
            self._turns.close()
        os._exit(0)
