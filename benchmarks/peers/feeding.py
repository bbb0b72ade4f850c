"""What every peer's loader script does: write the samples in its own form, then run epochs whenever it is told to.

Arguments: samples, bytes of each, samples a batch, workers, a folder of its own. Lines in: ``{"epochs": ...,
"seconds": ..., "busy": ..., "pace": ...}``. Lines out: what ``epoch`` of :mod:`cachetool.bench.consumer` gives of these
epochs one after another, or an error.
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

sys.path.append(str(Path(__file__).parents[2]))  # its environment has NumPy, not cachetool
from cachetool.bench.consumer import epoch

Batches = Iterable[dict[str, Any]]


@dataclass(frozen=True)
class Job:
    """What is to be loaded: ``x`` is (samples, values), ``y`` counts."""

    folder: Path
    x: np.ndarray
    y: np.ndarray
    batch: int
    workers: int


class Rows:
    """The samples one by one, as datasets want them."""

    def __init__(self, job: Job) -> None:
        self.x, self.y = job.x, job.y

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[np.ndarray, int]:
        return self.x[index], int(self.y[index])


def arrays(batches: Iterable[Any]) -> Iterator[dict[str, Any]]:
    """Batches of (x, y) pairs or dicts of tensors as dicts of arrays."""
    for batch in batches:
        x, y = (batch["x"], batch["y"]) if isinstance(batch, dict) else batch
        yield {"x": x.numpy() if hasattr(x, "numpy") else x, "y": y.numpy() if hasattr(y, "numpy") else y}


def several(start: Callable[[], Batches], epochs: int, seconds: float) -> Iterator[dict[str, Any]]:
    """The batches of epochs one after another; no other one begins when half of the time is over, so that as few as
    possible are left in the middle."""
    half = time.perf_counter() + seconds / 2
    for _ in range(epochs):
        yield from start()
        if time.perf_counter() > half:
            return


def serve(prepare: Callable[[Job], Callable[[], Batches]]) -> None:
    """Prepare once, then measure once a line."""
    count, nbytes, batch, workers = map(int, sys.argv[1:5])
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what the library prints must not mix with the answers

    def answer(work: Callable[[], dict[str, Any]]) -> None:
        try:
            found = work()
        except Exception:  # noqa: BLE001 - whatever a peer fails of is its result
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
