"""The second thread of the leader: runs the catalog's transactions and tells the other feeders what to read."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Sequence
from typing import Any

from cachetool.cache.history import Delivered
from cachetool.loaders.feed.batches import Mailbox
from cachetool.loaders.settings import Begun, EpochPlan, Settings
from cachetool.loaders.snapshots.epochs import EpochSnapshots
from cachetool.loaders.snapshots.waiting import NotYet, Talk, given_up
from cachetool.loaders.view import View
from cachetool.proc.lines import Lines, described, ready, write_line

__all__ = ["Leader"]

"""Seconds between two looks for samples while there are too few."""
_POLL = 0.2
# Counting an epoch and ending its lease take 10 to 60 ms on a busy disk. They run after the next
# epoch began, or when none begins within this time.
_SOON = 0.6
"""Seconds after the end of an epoch in which the next epoch may begin without waiting for the end of this one."""
_GRACE = 0.5
"""Seconds that the clean-up may take once the training process has ended."""


class Leader:
    """The listener of feeder 0: answers the training process, and runs the transactions that are due."""

    def __init__(
        self,
        settings: Settings,
        mailbox: Mailbox,
        lines: Lines,
        answers: int,
        followers: Sequence[int],
        pids: Sequence[int],
    ) -> None:
        self._settings, self._mailbox, self._lines = settings, mailbox, lines
        self._answers, self._followers, self._pids = answers, followers, pids
        self._snapshots = EpochSnapshots(settings, self._publish)
        # A pipe, because the listener waits for descriptors: the main thread wakes it by a byte.
        self._woken, self._wake = os.pipe()
        self._made_generation = 0
        self._sent: View | None = None
        self._pending: tuple[dict[str, Any], Talk, float] | None = None
        """The question that waits for samples, what is told meanwhile, and since when it waits."""

    @property
    def ahead(self) -> float:
        """Seconds that the next plan will take, by the last one."""
        # At most a second: later samples are fresher, and a busy disk must not take the snapshot much earlier.
        return min(1.0, self._snapshots.seconds)

    def made(self, generation: int) -> None:
        """Note that all batches of a plan, or nearly all, are made. The main thread calls this."""
        self._made_generation = generation
        os.write(self._wake, b"\0")

    def _publish(self, plan: EpochPlan) -> None:
        self._mailbox.put(plan)
        if self._followers:
            value = plan.to_json(self._sent)
            self._sent = plan.view or self._sent
            for fd in self._followers:
                # A feeder died. The keeper notices that and ends all of them.
                with contextlib.suppress(BrokenPipeError):
                    write_line(fd, value)

    def run(self, life: int) -> None:
        """Answer requests of the training process until it ends, or until all feeders must end."""
        self._say({"id": 0, "feeders": self._pids})
        while True:
            for asked in self._lines:
                # These come at any time, also while another question waits for samples, which must
                # continue waiting.
                if asked["do"] in ("left", "half_delivered"):
                    getattr(self._snapshots, asked["do"])(asked["generation"])
                    continue
                if asked["do"] == "stop":
                    self._leave()
                # The training process asks something else, so it has given up waiting for the
                # earlier answer.
                self._pending = None
                self._answer(asked)
            if self._pending is not None:
                self._answer(self._pending[0])
            wait = _POLL if self._pending else self._snapshots.tick()
            # If no next epoch is asked for, the finished one is counted after this time.
            if self._snapshots.has_unfinished:
                wait = min(wait or _SOON, _SOON)
            pipes = ready(wait, self._lines.fd, self._woken, life)
            if not pipes and self._snapshots.has_unfinished:
                self._snapshots.finish_epochs()
            if self._woken in pipes:
                os.read(self._woken, 4096)
                self._snapshots.made(self._made_generation)
            if self._lines.fd in pipes:
                self._lines.receive()
            if self._lines.ended or life in pipes:
                self._leave()

    def _answer(self, asked: dict[str, Any]) -> None:
        try:
            result = self._do(asked)
        except NotYet as short:
            self._later(asked, short)
            return
        # Any error: the training process waits for an answer and must get the error.
        except Exception as error:  # noqa: BLE001
            result = {"error": described(error)}
        self._pending = None
        if result is not None:
            self._say({"id": asked["id"], **result})
        if asked["do"] == "begin":
            # After the answer: training waits for that, but for none of these transactions.
            self._snapshots.finish_epochs()
            # The batches of this epoch may have been made while training still took those of the
            # epoch before.
            self._snapshots.made(self._made_generation)

    def _say(self, value: dict[str, Any]) -> None:
        # The training process has ended. The keeper and the pipe on stdin tell that too.
        with contextlib.suppress(BrokenPipeError):
            write_line(self._answers, value)

    def _later(self, asked: dict[str, Any], short: NotYet) -> None:
        settings = self._settings
        _, talk, since = self._pending or (
            asked, Talk(settings.root, settings.wait, dataset=settings.dataset), time.monotonic(),
        )  # fmt: skip
        if talk.over:
            self._pending = None
            self._say({"id": asked["id"], "error": described(given_up(settings, short))})
            return
        talk.tell(short)
        self._pending = asked, talk, since

    def _do(self, asked: dict[str, Any]) -> dict[str, Any] | None:
        match asked["do"]:
            case "begin":
                plan = self._snapshots.begin(asked["epoch"], asked["resume"], asked["ratios"])
            case "prepare":
                plan = self._snapshots.prepare(asked["epoch"], asked["resume"], asked["ratios"])
            case "delivered":
                generation = asked["generation"]
                self._snapshots.half_delivered(generation)
                # With an agreed number of steps some batches are never made. So the plan counts as
                # made.
                self._snapshots.made(generation)
                self._snapshots.delivered(generation, Delivered(*asked["pace"]))
                return None
            case "under_way":
                self._snapshots.under_way(asked["generation"], Delivered(*asked["pace"]))
                return None
            case "refresh":
                self._snapshots.refresh()
                return {}
            case "regain":
                return {"regained": self._snapshots.regain(asked["generation"])}
            case "state":
                return {"state": self._snapshots.state(asked["generation"], asked["reached"])}
            case unknown:
                raise AssertionError(unknown)
        lacked = 0.0 if self._pending is None else time.monotonic() - self._pending[2]
        return Begun.of(plan, self._settings, lacked=lacked).to_json()

    def _leave(self) -> None:
        """Give the leases back if that is quick. They end with this process in any case."""
        # A timer, because a transaction may wait for a busy disk, and the keeper kills this process
        # soon.
        threading.Timer(_GRACE, os._exit, (0,)).start()
        with contextlib.suppress(Exception):
            self._snapshots.close()
        os._exit(0)
