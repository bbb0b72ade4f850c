"""What a sampler says of itself beside what it commits: how busy its stores keep it, and for whom it waits."""

from __future__ import annotations

import contextlib
import threading
import time

from cachetool.proc.task import Channel
from cachetool.stores.traffic import arrivals, in_flight, retries

__all__ = ["Pulse", "Waiting"]

_PULSE = 1.0


class Pulse:
    """Says once a second how busy the stores keep this process, when that has changed: also while nothing comes."""

    def __init__(self, channel: Channel) -> None:
        self._channel, self._stopped = channel, threading.Event()
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        before, said = arrivals(), (0, retries(), 0)  # what it looked at is not part of what it draws
        while not self._stopped.wait(_PULSE):
            now = in_flight(), retries(), arrivals() - before
            if now != said:
                said = now
                with contextlib.suppress(OSError):  # the starter is gone, which the main thread finds out as well
                    self._channel.send({"flying": now[0], "retries": now[1], "arrived": now[2]})

    def stop(self) -> None:
        """Say no more."""
        self._stopped.set()


class Waiting:
    """Says for what and for whom a worker waits: at once, and then ever more rarely; training may take hours."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._pause, self._next = 2.0, 0.0

    def tell(self, why: str) -> None:
        """The worker waits now."""
        if (now := time.monotonic()) >= self._next:
            self._pause = min(2 * self._pause, 600.0)
            self._next = now + self._pause
            self._channel.send({"waiting": why})
