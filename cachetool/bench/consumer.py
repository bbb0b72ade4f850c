"""The consumer by which every loader is measured, ours and others: it touches each page of each batch. Uses NumPy
alone."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

__all__ = ["PACE", "STRIDE", "Spinner", "epoch", "rate", "touched"]

PACE = 600e6
"""Bytes a second that a consumer with a fixed pace takes."""

# At least one byte in each page, wherever the first page begins, and each in another cache line
# than the byte before. With 4,096 all bytes would fall into one set of the processor's first cache.
# Its few ways would then be measured, which no program that reads its samples meets.
STRIDE = 4096 - 64
"""Bytes from one touched byte to the next."""


def touched(batches: Iterable[dict[str, Any]], pace: float | None = None, seconds: float | None = None) -> int:
    """Touch every page of every batch without releasing the GIL. Return the bytes of all batches.

    ``pace`` is the maximum of bytes a second. ``seconds`` stops the epoch after that time.
    """
    total, begin = 0, time.perf_counter()
    for batch in batches:
        for column in batch.values():
            # Texts were copied already when the list was made, so their length is enough.
            if isinstance(column, list):
                total += sum(map(len, column))
                continue
            view = memoryview(getattr(column, "values", column)).cast("B")
            # A slice of a memoryview is copied by C code that keeps the GIL, as a training step in
            # Python does.
            bytes(view[::STRIDE])
            total += len(view)
        passed = time.perf_counter() - begin
        if seconds is not None and passed > seconds:
            break
        if pace is not None and (ahead := total / pace - passed) > 0:
            time.sleep(ahead)
    return total


class Spinner:
    """A thread that counts, and the part of its time for which the GIL kept it from counting."""

    def __init__(self) -> None:
        self.blocked = 0.0
        self._stop = False
        self._thread = threading.Thread(target=self._spin)

    def _spin(self) -> None:
        def times() -> tuple[float, float]:
            # The kernel's own times of this thread. Time in which it could run but had no processor
            # counts as running: other programs on the machine are not the loader's fault.
            running, waiting, _ = Path("/proc/thread-self/schedstat").read_text().split()
            return time.perf_counter(), (int(running) + int(waiting)) / 1e9

        wall, cpu = times()
        count = 0
        while not self._stop:
            count += 1
        wall_end, cpu_end = times()
        self.blocked = max(0.0, 1 - (cpu_end - cpu) / (wall_end - wall))

    def __enter__(self) -> Spinner:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop = True
        self._thread.join()


def rate(read: Callable[[], int]) -> float:
    """Return the MB/s of a function that returns the bytes it read."""
    begin = time.perf_counter()
    return read() / (time.perf_counter() - begin) / 1e6


def epoch(
    start: Callable[[], Iterable[dict[str, Any]]],
    *,
    busy: bool = False,
    pace: float | None = None,
    seconds: float | None = None,
) -> dict[str, float]:
    """Measure one epoch: its MB/s, and with ``busy`` the part of a counting thread's time that was blocked."""
    batches = iter(start())
    # From the second batch on: how long an epoch takes to begin is not compared here.
    touched([next(batches)])
    if not busy:
        return {"MB/s": rate(lambda: touched(batches, pace, seconds))}
    with Spinner() as spinner:
        speed = rate(lambda: touched(batches, pace, seconds))
    return {"MB/s": speed, "blocked": spinner.blocked}
