"""The common part of all peers' loader scripts: write the samples in the peer's form, then run epochs on request.

Arguments: samples, bytes per sample, samples per batch, workers, a folder of its own. Lines in: ``{"epochs": ...,
"seconds": ..., "busy": ..., "pace": ...}``. Lines out: the result of ``epoch`` in :mod:`cachetool.bench.consumer`
for these epochs one after another, or an error.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from common import samples

sys.path.append(str(Path(__file__).parents[2]))  # the peer's environment has NumPy, but not cachetool
from cachetool.bench.consumer import epoch

Batches = Iterable[dict[str, Any]]


@dataclass(frozen=True)
class Job:
    """The samples and settings of a job. ``x`` has the shape (samples, values); ``y`` counts the samples."""

    folder: Path
    x: np.ndarray
    y: np.ndarray
    batch: int
    workers: int


class Rows:
    """The samples one by one, as datasets need them."""

    def __init__(self, job: Job) -> None:
        self.x, self.y = job.x, job.y

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[np.ndarray, int]:
        return self.x[index], int(self.y[index])


def arrays(batches: Iterable[Any]) -> Iterator[dict[str, Any]]:
    """Convert batches of (x, y) pairs or dicts of tensors to dicts of arrays."""
    for batch in batches:
        x, y = (batch["x"], batch["y"]) if isinstance(batch, dict) else batch
        yield {"x": x.numpy() if hasattr(x, "numpy") else x, "y": y.numpy() if hasattr(y, "numpy") else y}


def several(start: Callable[[], Batches], epochs: int, seconds: float) -> Iterator[dict[str, Any]]:
    """Yield the batches of several epochs. No epoch starts after half of the time, so few epochs are stopped in the
    middle.
    """
    half = time.perf_counter() + seconds / 2
    for _ in range(epochs):
        yield from start()
        if time.perf_counter() > half:
            return


def serve(prepare: Callable[[Job], Callable[[], Batches]]) -> None:
    """Prepare once, then measure once per line of standard input."""
    count, nbytes, batch, workers = map(int, sys.argv[1:5])
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # the library's output must not mix with the answers

    def answer(work: Callable[[], dict[str, Any]]) -> None:
        try:
            found = work()
        except Exception:  # noqa: BLE001 - any failure of a peer is its result
            found = {"error": traceback.format_exc().strip().splitlines()[-1]}
        answers.write(json.dumps(found) + "\n")

    job = Job(Path(sys.argv[5]), samples(count, nbytes), np.arange(count), batch, workers)
    start: list[Callable[[], Batches]] = []

    def begin() -> dict[str, Any]:
        start.append(prepare(job))
        return {"ready": True}

    def measure(epochs: int, seconds: float, **options: Any) -> dict[str, Any]:
        return dict(epoch(lambda: several(start[0], epochs, seconds), seconds=seconds, **options))

    answer(begin)
    for line in sys.stdin:
        answer(lambda line=line: measure(**json.loads(line)))
