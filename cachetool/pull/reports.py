"""Reports of a pull's workers: what each of them sends, and what they add up to.

The process that watches adds up what the workers have committed, and looks how full that made the cache. Beside that a
worker says how busy its stores keep it, and for whom it waits.
"""

from __future__ import annotations

import contextlib
import threading
import time
from dataclasses import dataclass, field

from cachetool.cache import CacheDir
from cachetool.cache.draws import job_row
from cachetool.cache.usage import measure
from cachetool.proc.task import Channel, Message
from cachetool.stores.traffic import arrivals, in_flight, retries

__all__ = ["CacheFill", "Heartbeat", "WorkerReports", "WaitingFor"]


_LOOK = 2.0
"""Seconds between two looks at how full the cache is."""


@dataclass(slots=True)
class WorkerReports:
    """What the workers have reported."""

    samples: int = 0
    payload: int = 0
    arrived: int = 0
    fetched: int = 0
    shards: int = 0
    skipped: int = 0
    examples: list[dict[str, str]] = field(default_factory=list)
    busy: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Of each worker: requests in flight, and retries."""
    came: dict[int, int] = field(default_factory=dict)
    """Of each worker: bytes that came, those included of which no samples were made yet."""
    waiting: dict[int, str] = field(default_factory=dict)
    """For whom a worker waits that waits for room."""

    def add(self, worker: int, message: Message) -> None:
        """Take in what worker number ``worker`` said."""
        if "flying" in message:
            self.busy[worker] = message["flying"], message["retries"]
            self.came[worker] = message["arrived"]
            return
        self.waiting.pop(worker, None)
        if "waiting" in message:
            self.waiting[worker] = message["waiting"]
        self.samples += message.get("committed", 0)
        self.payload += message.get("payload", 0)
        self.arrived += message.get("samples", 0)
        self.fetched += message.get("fetched", 0)
        self.shards += "shard" in message
        for example in message.get("skipped", ()):
            self.skipped += 1
            if len(self.examples) < 20:
                self.examples.append(example)

    @property
    def moved(self) -> int:
        """Bytes that came so far, for whoever watches."""
        return max(self.fetched, sum(self.came.values()))


class CacheFill:
    """How full the cache is and what was evicted for a pull, looked at now and then: counting takes its time."""

    def __init__(self, cache: CacheDir, job: str) -> None:
        self._cache, self._job, self._next = cache, job, 0.0
        self.used = self.evicted = 0
        self.cap = cache.max_size

    def look(self) -> None:
        """Every other second, and for at most a hundredth of the time."""
        if (began := time.monotonic()) < self._next:
            return
        with self._cache.catalog.read() as connection:
            self.used = measure(connection, self._cache.layout).total
            self.evicted = job_row(connection, self._job).evicted
        now = time.monotonic()
        self._next = now + max(_LOOK, 100 * (now - began))


_PULSE = 1.0


class Heartbeat:
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


class WaitingFor:
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
