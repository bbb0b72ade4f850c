"""What the first feeder does beside its batches: the catalog's transactions, and telling the others what to read."""

from __future__ import annotations

import contextlib
import os
import threading
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

_POLL = 0.2
_SOON = 0.6
"""Seconds after the end of an epoch in which the next one may begin at once, which then has not to wait."""
_GRACE = 0.5
"""Seconds that the clean-up may take once the training process is gone."""


class Leader:
    """Does what the training process asks for, and what is due by itself."""

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
        self._woken, self._wake = os.pipe()
        self._made_generation = 0
        self._sent: View | None = None
        self._pending: tuple[dict[str, Any], Talk] | None = None

    def made(self, generation: int) -> None:
        """Called by the main thread."""
        self._made_generation = generation
        os.write(self._wake, b"\0")

    def _publish(self, plan: EpochPlan) -> None:
        self._mailbox.put(plan)
        if self._followers:
            value = plan.to_json(self._sent)
            self._sent = plan.view or self._sent
            for fd in self._followers:
                with contextlib.suppress(BrokenPipeError):  # it died, after which all of us end
                    write_line(fd, value)

    def run(self, life: int) -> None:
        """Until the training process ends, or all are to end."""
        self._say({"id": 0, "feeders": self._pids})
        while True:
            for asked in self._lines:
                if asked["do"] in ("left", "half_delivered"):  # said at any time, also while an answer is waited for
                    getattr(self._snapshots, asked["do"])(asked["generation"])
                    continue
                if asked["do"] == "stop":
                    self._leave()
                self._pending = None  # whoever waited for it gave up
                self._answer(asked)
            if self._pending is not None:
                self._answer(self._pending[0])
            wait = _POLL if self._pending else self._snapshots.tick()
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
        except Exception as error:  # noqa: BLE001 - whatever it is, it must reach whoever asked
            result = {"error": described(error)}
        self._pending = None
        if result is not None:
            self._say({"id": asked["id"], **result})
        if asked["do"] == "begin":
            self._snapshots.finish_epochs()
            # An epoch that was made, or nearly, while the one before was delivered.
            self._snapshots.made(self._made_generation)

    def _say(self, value: dict[str, Any]) -> None:
        with contextlib.suppress(BrokenPipeError):  # the training process is gone, which is noticed by other means
            write_line(self._answers, value)

    def _later(self, asked: dict[str, Any], short: NotYet) -> None:
        settings = self._settings
        _, talk = self._pending or (asked, Talk(settings.root, settings.wait, dataset=settings.dataset))
        if talk.over:
            self._pending = None
            self._say({"id": asked["id"], "error": described(given_up(settings, short))})
            return
        talk.tell(short)
        self._pending = asked, talk

    def _do(self, asked: dict[str, Any]) -> dict[str, Any] | None:
        match asked["do"]:
            case "begin":
                plan = self._snapshots.begin(asked["epoch"], asked["resume"])
            case "prepare":
                plan = self._snapshots.prepare(asked["epoch"], asked["resume"])
            case "delivered":
                generation = asked["generation"]
                self._snapshots.half_delivered(generation)
                self._snapshots.made(generation)  # batches beyond an agreed number of steps are not made any more
                self._snapshots.delivered(generation, Delivered(*asked["pace"]))
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
        return Begun.of(plan, self._settings).to_json()

    def _leave(self) -> None:
        """Give the leases back, if that is quick: they end with this process in any case."""
        threading.Timer(_GRACE, os._exit, (0,)).start()
        with contextlib.suppress(Exception):
            self._snapshots.close()
        os._exit(0)
