"""What the workers of a pull have reported, and how full that made the cache."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from cachetool.cache import CacheDir
from cachetool.cache.jobs import job_row
from cachetool.cache.usage import measure
from cachetool.proc.task import Message

__all__ = ["Fill", "Tally"]

_LOOK = 2.0
"""Seconds between two looks at how full the cache is."""


@dataclass(slots=True)
class Tally:
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
        for each in message.get("skipped", ()):
            self.skipped += 1
            if len(self.examples) < 20:
                self.examples.append(each)

    @property
    def moved(self) -> int:
        """Bytes that came so far, for whoever watches."""
        return max(self.fetched, sum(self.came.values()))


class Fill:
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
