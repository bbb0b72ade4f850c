"""The waits of one epoch in the training process: how many, how long, and their causes.

Only batches that were not ready are counted, so taking a ready batch costs nothing more.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from cachetool.cache.history import Delivered
from cachetool.core.causes import main_cause, sentence
from cachetool.core.text import count
from cachetool.core.units import format_duration

__all__ = ["EpochTimes", "Report"]


_MILLISECONDS = 1.0
"""Seconds below which durations are milliseconds."""


@dataclass(frozen=True, slots=True)
class Report:
    """The waits of an epoch, as ``loader.report()`` returns them; ``str()`` gives three lines."""

    epoch: int
    """Number of the epoch."""
    seconds: float
    """Seconds since the epoch was asked for, up to its last batch."""
    batches: int
    """Batches delivered."""
    waits: int
    """Batches that were not ready when the program asked for them."""
    waited: float
    """Seconds of these waits and of the wait for the epoch to begin."""
    longest: tuple[float, float, float]
    """Seconds of a wait that 50, 95 and 99 % of the waits do not exceed."""
    causes: Mapping[str, float] = field(default_factory=dict)
    """Seconds of waits by cause, largest first. The names are those of ``docs/explanation/waits.md``."""

    @property
    def share(self) -> float:
        """Part of the time that was waited: 0 to 1."""
        return min(1.0, self.waited / self.seconds) if self.seconds else 0.0

    @property
    def cause(self) -> str | None:
        """Name of the main cause; None if nothing was late."""
        return main_cause(self.causes, self.seconds)

    @property
    def metrics(self) -> dict[str, float]:
        """The figures for a logger: ``data_wait_seconds``, ``data_wait_share`` (0 to 1), and the seconds of each cause
        that there was, such as ``data_wait_disk``."""
        causes = {f"data_wait_{name}": seconds for name, seconds in self.causes.items()}
        return {"data_wait_seconds": self.waited, "data_wait_share": self.share, **causes}

    def __str__(self) -> str:
        half, most, nearly_all = map(_short, self.longest)
        causes = ", ".join(f"{name} {_short(each)}" for name, each in self.causes.items())
        return (
            f"epoch {self.epoch}: {self.batches} batches in {_short(self.seconds)},"
            f" {count(self.waits, 'wait')} of {_short(self.waited)} together ({100 * self.share:.1f} %)\n"
            f"waits up to {half} (50 %), {most} (95 %), {nearly_all} (99 %); by cause: {causes or 'none'}\n"
            f"{sentence(self.causes, self.seconds)}"
        )


def _short(seconds: float) -> str:
    """Return a duration; of a wait milliseconds tell."""
    return f"{1000 * seconds:.1f} ms" if seconds < _MILLISECONDS else format_duration(seconds)


class EpochTimes:
    """The waits of one epoch, counted from the moment in which the epoch is asked for.

    ``feeders`` is the number of feeders.
    """

    def __init__(self, feeders: int = 0) -> None:
        self._began = time.monotonic()
        self._feeders = feeders
        self._waited = 0.0
        self._waits: list[float] = []
        self._causes: dict[str, float] = {}

    def begun(self, lacked: float = 0.0) -> None:
        """Count the time until now as waiting, because the epoch can begin only now; ``lacked`` seconds of it because
        there were too few samples."""
        self._waited = time.monotonic() - self._began
        lacked = min(lacked, self._waited)
        self._causes = {"samples": lacked, "start": self._waited - lacked}

    def add(self, seconds: float, causes: Mapping[str, float], *, rest: str) -> None:
        """Count a wait for a batch, with the seconds of it by step of the feeder. ``rest`` is the cause of what is
        left."""
        self._waits.append(seconds)
        self._waited += seconds
        known = 0.0
        for name, part in causes.items():
            known += part
            self._causes[name] = self._causes.get(name, 0.0) + part
        if seconds > known:
            self._causes[rest] = self._causes.get(rest, 0.0) + seconds - known

    def causes(self) -> dict[str, float]:
        """Return the seconds of all waits by cause, largest first."""
        found = dict(self._causes)
        # Finding and copying samples is the work of feeders alone. More of them help if there are processors for them.
        busy = found.pop("find", 0.0) + found.pop("copy", 0.0)
        name = "feeders" if self._feeders < _processors() else "memory"
        found[name] = found.get(name, 0.0) + busy
        return {name: each for name, each in sorted(found.items(), key=lambda one: -one[1]) if each > 0}

    def longest(self) -> tuple[float, float, float]:
        """Return the seconds that 50, 95 and 99 % of the waits do not exceed."""
        half, most, nearly_all = np.quantile(self._waits or [0.0], (0.5, 0.95, 0.99)).tolist()
        return half, most, nearly_all

    def delivered(self, batches: int) -> Delivered:
        """Return the times and waits of the epoch after its last batch."""
        seconds = time.monotonic() - self._began
        return Delivered(seconds, batches, len(self._waits), self._waited, None, self.causes(), self.longest())

    def report(self, epoch: int, batches: int) -> Report:
        """Return what is known so far."""
        seconds = time.monotonic() - self._began
        return Report(epoch, seconds, batches, len(self._waits), self._waited, self.longest(), self.causes())


def _processors() -> int:
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # not on macOS
        return os.cpu_count() or 1
