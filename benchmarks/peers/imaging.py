"""The common part of the peers' scripts that decode images: read the JPEG files, then run epochs on request.

Arguments: a folder of JPEG files, the case (``whole``, ``center`` or ``random``), images per batch, workers, a folder
of its own. A line in begins an epoch; the line out has its images and seconds, or an error.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SIDE = 224


@dataclass(frozen=True)
class Job:
    """The images and settings of a job."""

    images: list[bytes]
    case: str
    batch: int
    workers: int
    folder: Path


def epoch(batches: Iterable[Any]) -> dict[str, float]:
    """Return the images of an epoch and its seconds. One byte of each batch is read."""
    begin, images = time.perf_counter(), 0
    for batch in batches:
        images += len(batch)
        _ = batch[0, 0, 0, 0]
    return {"images": images, "seconds": time.perf_counter() - begin}


def serve(prepare: Callable[[Job], Callable[[], Iterable[Any]]]) -> None:
    """Prepare once, then run an epoch for each line of standard input."""
    source, case, batch, workers, folder = sys.argv[1:6]
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # the library's output must not mix with the answers
    images = [path.read_bytes() for path in sorted(Path(source).glob("*.jpg"))]
    try:
        start = prepare(Job(images, case, int(batch), int(workers), Path(folder)))
        answer: dict[str, Any] = {"ready": True}
    except Exception:  # noqa: BLE001 - any failure of a peer is its result
        answer = {"error": traceback.format_exc().strip().splitlines()[-1]}
    answers.write(json.dumps(answer) + "\n")
    for _ in sys.stdin:
        try:
            answer = epoch(start())
        except Exception:  # noqa: BLE001
            answer = {"error": traceback.format_exc().strip().splitlines()[-1]}
        answers.write(json.dumps(answer) + "\n")
