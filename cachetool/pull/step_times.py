"""How a pull worker spends its time: waiting for the store, decoding, writing, committing, waiting for room.

The main thread of a worker does one step after another. While it waits for the next samples, the processor time of the
whole process is decoding, the pauses that a busy store asked for are throttling, and the rest is the store.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

from cachetool.core.causes import PULL_CAUSES
from cachetool.stores.traffic import throttled

__all__ = ["StepTimes"]

T = TypeVar("T")


class StepTimes:
    """Seconds of a worker by step, with the names of :data:`cachetool.core.causes.PULL_CAUSES`."""

    def __init__(self) -> None:
        self._spent = dict.fromkeys(PULL_CAUSES, 0.0)
        self._now: tuple[str, float] | None = None
        """The present step, and when it began."""

    @contextmanager
    def at(self, step: str) -> Iterator[None]:
        """Count the time of a ``with`` block as one step."""
        began = time.monotonic()
        self._now = step, began
        try:
            yield
        finally:
            self._now = None
            self._spent[step] += time.monotonic() - began

    def fetched(self, pieces: Iterator[T]) -> T | None:
        """Return the next of ``pieces``, or None at their end."""
        began, used, paused = time.monotonic(), time.process_time(), throttled()
        self._now = "store", began
        try:
            return next(pieces, None)
        finally:
            self._now = None
            seconds = time.monotonic() - began
            decoding = min(seconds, time.process_time() - used)
            # Threads pause side by side.
            pausing = min(seconds - decoding, throttled() - paused)
            self._spent["decode"] += decoding
            self._spent["throttling"] += pausing
            self._spent["store"] += seconds - decoding - pausing

    def sums(self) -> dict[str, float]:
        """Return the seconds so far, those of the present step too. Other threads may call this."""
        spent = dict(self._spent)
        if (now := self._now) is not None:
            spent[now[0]] += time.monotonic() - now[1]
        return spent
