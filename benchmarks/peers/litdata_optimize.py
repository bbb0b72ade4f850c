"""LitData's optimize: one worker, 64 MB per file. The worker process inherits the samples by fork."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from common import serve
from litdata import optimize

rows = np.empty((0, 0), dtype=np.float32)


def sample(number: int) -> dict[str, object]:
    return {"x": rows[number], "y": number}


def write(folder: Path, x: np.ndarray) -> None:
    global rows
    rows = x
    optimize(
        fn=sample,
        inputs=list(range(len(x))),
        output_dir=str(folder),
        chunk_bytes="64MB",
        num_workers=1,
        start_method="fork",
        verbose=False,
    )


if __name__ == "__main__":
    serve(write)
