"""Reports of the pull workers, and their sums.

The process that started the workers adds up what they have committed, and looks how full the cache is. A worker also
reports how many requests it has in flight, and for whom it waits.
"""

from __future__ import annotations

import contextlib
import threading
import time
from dataclasses import dataclass, field

from cachetool.cache import CacheDir
from cachetool.cache.draws import job_row
from cachetool.cache.history import write_pull
from cachetool.cache.usage import measure
from cachetool.proc.task import Channel, Message
from cachetool.pull.step_times import StepTimes
from cachetool.stores.redact import redact
from cachetool.stores.traffic import arrivals, in_flight, retries

__all__ = ["CacheFill", "Heartbeat", "PullNews", "WorkerReports", "WaitingFor"]


_LOOK = 2.0
"""Seconds between two looks at how full the cache is."""


@dataclass(slots=True)
class WorkerReports:
    """The sums of all that the workers have reported."""

    samples: int = 0
    payload: int = 0
    arrived: int = 0
    fetched: int = 0
    shards: int = 0
    skipped: int = 0
    examples: list[dict[str, str]] = field(default_factory=list)
    busy: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Requests in flight and retries, by worker."""
    came: dict[int, int] = field(default_factory=dict)
    """Bytes received so far, by worker, including bytes that are not yet in a sample."""
    times: dict[int, dict[str, float]] = field(default_factory=dict)
    """Seconds by step, by worker."""
    waiting: dict[int, str] = field(default_factory=dict)
    """The reason why a worker waits for room, by worker."""

    def add(self, worker: int, message: Message) -> None:
        """Add a message of worker number ``worker``."""
        if "flying" in message:
            self.busy[worker] = message["flying"], message["retries"]
            self.came[worker] = message["arrived"]
            self.times[worker] = message["times"]
            return
        if "times" in message:
            self.times[worker] = message["times"]
            return
        # Any other message shows that the worker continues, so its old reason must not stay on the screen.
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
            # Each example is text from the source. A million of them would fill the memory of the process that only
            # watches.
            if len(self.examples) < 20:
                self.examples.append(example)

    @property
    def causes(self) -> dict[str, float]:
        """Seconds by step of all workers together."""
        causes: dict[str, float] = {}
        for times in self.times.values():
            for step, seconds in times.items():
                causes[step] = causes.get(step, 0.0) + seconds
        return causes

    @property
    def moved(self) -> int:
        """Bytes received so far, for the progress report."""
        # `came` includes the bytes of incomplete blocks (on a slow line a block takes a minute), but arrives only once
        # a second. `fetched` arrives with each piece.
        return max(self.fetched, sum(self.came.values()))


class CacheFill:
    """The used bytes of the cache and the shards evicted for one job, looked up now and then."""

    def __init__(self, cache: CacheDir, job: str) -> None:
        self._cache, self._job, self._next = cache, job, 0.0
        self.used = self.evicted = 0
        self.cap = cache.max_size

    def look(self) -> None:
        """Read the used bytes and the evictions from the catalog again, unless the last read was a moment ago."""
        if (began := time.monotonic()) < self._next:
            return
        with self._cache.catalog.read() as connection:
            self.used = measure(connection, self._cache.layout).total
            self.evicted = job_row(connection, self._job).evicted
        now = time.monotonic()
        # Counting takes longer in a large cache. It may take at most a hundredth of the time.
        self._next = now + max(_LOOK, 100 * (now - began))


class PullNews:
    """Notes of a pull that runs in the history, for ``stats`` and other reports."""

    def __init__(self, cache: CacheDir, *, url: str, dataset: str) -> None:
        self._cache, self._about = cache, {"url": redact(url), "dataset": dataset, "pid": cache.holder.pid}
        self._began = self._next = time.monotonic()

    def tell(self, reports: WorkerReports, *, last: bool = False) -> None:
        """Write down how far the pull is and what it waits for, unless that was done a moment ago and more is to
        come."""
        if (now := time.monotonic()) < self._next and not last:
            return
        self._next = now + _NEWS
        causes = reports.causes
        # Space that becomes free when readers end has another remedy than a small cap.
        if causes.get("room") and self._cache.catalog.one("SELECT 1 FROM shards WHERE state = 'retiring'"):
            causes["readers"] += causes.pop("room")
        write_pull(
            self._cache.layout, samples=reports.samples, bytes=reports.moved, seconds=now - self._began,
            retries=sum(retries for _, retries in reports.busy.values()), causes=causes, **self._about,
        )  # fmt: skip


_NEWS = 5.0
"""Seconds between two notes of a pull."""
_SILENT = 5
"""Looks of the heartbeat without a change after which the times are told."""
_PULSE = 1.0
"""Seconds between two looks of the heartbeat."""


class Heartbeat:
    """A thread that reports once a second how busy this process is with stores, if that has changed."""

    def __init__(self, channel: Channel, times: StepTimes) -> None:
        self._channel, self._times, self._stopped = channel, times, threading.Event()
        # The listing process also draws, and has looked at samples before. Those bytes are no part of the draw.
        self._before = arrivals()
        # A thread, because the main thread reports nothing while it waits for the network or for room. A daemon, so
        # that it never keeps the worker alive.
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        said, silent = (0, retries(), 0), 0
        while not self._stopped.wait(_PULSE):
            now = in_flight(), retries(), arrivals() - self._before
            # A pull that waits for hours for room must not write a line a second, so without a change only the times
            # are told, and those seldom.
            if now != said:
                said, silent = now, 0
                self._send()
            elif (silent := silent + 1) % _SILENT == 0:
                with contextlib.suppress(OSError):
                    self._channel.send({"times": self._times.sums()})

    def _send(self) -> None:
        told = {"flying": in_flight(), "retries": retries(), "arrived": arrivals() - self._before}
        # Safe to suppress: the process that started this worker is gone, and the main thread finds out as well.
        with contextlib.suppress(OSError):
            self._channel.send({**told, "times": self._times.sums()})

    def stop(self) -> None:
        """Stop reporting, after a last report."""
        self._stopped.set()
        self._send()


class WaitingFor:
    """Reports of the reason why a worker waits for room."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._pause, self._next = 2.0, 0.0

    def tell(self, why: str) -> None:
        """Report ``why`` the worker waits now, unless that was reported a short time ago."""
        if (now := time.monotonic()) >= self._next:
            # The pauses grow up to ten minutes, because training may hold its shards for hours.
            self._pause = min(2 * self._pause, 600.0)
            self._next = now + self._pause
            self._channel.send({"waiting": why})
