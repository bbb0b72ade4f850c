"""The batch that every producer of ``producer.py`` creates, and the training that waits for it. Needs only NumPy."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

SHAPE = (4, 1_000_000, 3)
IO, STEP = 0.05, 0.1
WARM = 5  # steps whose waits do not count, because buffers fill


def produced(seed: int) -> np.ndarray:
    """Return one batch after 0.05 s of sleep, as for a disk or network, and some computing."""
    time.sleep(IO)
    return np.random.default_rng(seed).random(SHAPE, dtype=np.float32)


def trained(start: Callable[[], Iterator[np.ndarray]], steps: int) -> dict[str, Any]:
    """Take ``steps`` batches and train 0.1 s after each. Touch every page of a batch. Return the waited seconds."""
    waits = []
    begin = time.perf_counter()
    batches = start()
    for _ in range(steps):
        batch = next(batches)
        waits.append(time.perf_counter() - begin)
        if batch.shape != SHAPE or batch.dtype != np.float32:
            raise AssertionError(f"{batch.shape} {batch.dtype}")
        batch.reshape(-1)[::1024].sum()
        del batch
        time.sleep(STEP)
        begin = time.perf_counter()
    return {"first": waits[0], "mean": statistics.mean(waits[WARM:]), "most": max(waits[WARM:])}
