"""What every loader is measured by, ours and the peers': the consumer that touches each page. NumPy alone."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

__all__ = ["PACE", "STRIDE", "Spinner", "epoch", "rate", "touched"]

PACE = 600e6
"""Bytes a second that a paced consumer takes."""

STRIDE = 4096 - 64
"""Bytes from one that is touched to the next: one in each page at least, wherever the first page begins, and each in
another line than the one before. At a stride of 4,096 all of them fall into one set of the processor's first cache, and
its few ways are what is measured; nobody who reads his samples meets that."""


def touched(batches: Iterable[dict[str, Any]], pace: float | None = None, seconds: float | None = None) -> int:
    """Touch every page of every batch, without letting go of the GIL; gives the bytes of all.

    ``pace``: bytes a second at most. ``seconds``: stop after so many, in the middle of an epoch.
    """
    total, begin = 0, time.perf_counter()
    for batch in batches:
        for column in batch.values():
            if isinstance(column, list):  # texts, which were copied when the list was made
                total += sum(map(len, column))
                continue
            view = memoryview(getattr(column, "values", column)).cast("B")
            bytes(view[::STRIDE])
            total += len(view)
        passed = time.perf_counter() - begin
        if seconds is not None and passed > seconds:
            break
        if pace is not None and (ahead := total / pace - passed) > 0:
            time.sleep(ahead)
    return total


class Spinner:
    """A thread that counts, and how much of its time it was kept from it by the GIL."""

    def __init__(self) -> None:
        self.blocked = 0.0
        self._stop = False
        self._thread = threading.Thread(target=self._spin)

    def _spin(self) -> None:
        def times() -> tuple[float, float]:
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
    """MB/s of what ``read`` gives the bytes of."""
    begin = time.perf_counter()
    return read() / (time.perf_counter() - begin) / 1e6


def epoch(
    start: Callable[[], Iterable[dict[str, Any]]],
    *,
    busy: bool = False,
    pace: float | None = None,
    seconds: float | None = None,
) -> dict[str, float]:
    """One epoch: its MB/s, and beside a counting thread (``busy``) how much of its time that was blocked.

    Both from the second batch on: how long an epoch takes to begin is not what is compared here.
    """
    batches = iter(start())
    touched([next(batches)])
    if not busy:
        return {"MB/s": rate(lambda: touched(batches, pace, seconds))}
    with Spinner() as spinner:
        speed = rate(lambda: touched(batches, pace, seconds))
    return {"MB/s": speed, "blocked": spinner.blocked}
