"""The rate of a loader beside a thread that spins in Python, as a share of its idle rate, in twenty new processes.

    python benchmarks/other_cases/busy.py FOLDER [PROCESSES]

Another process of the same program gets other processors for its feeders, and finds other work on the machine. So one
process says little, and the least of twenty counts. The loop is the plainest one: ``for batch in loader``, over 50,000
samples of 3 KiB in batches of 256, with two feeders. It keeps the GIL, because an operation that lets the GIL go gives
it to the busy thread for 5 ms, whatever loads the batches. In each process idle and busy epochs alternate, and the
share is that of the medians.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np

from cachetool.bench.samples import fill
from cachetool.cache import open_cache
from cachetool.core.block import Block
from cachetool.core.schema import Field, Schema
from cachetool.loaders.numpy import Loader

SAMPLES, NBYTES, SHARDS, BATCH = 50_000, 3 * 2**10, 3, 256
PROCESSES, PAIRS, SECONDS = 20, 4, 0.4
LEAST = 0.4


def measure(folder: Path, rounds: int) -> list[dict[str, str | float]]:
    """Return the least and the median share of ``PROCESSES`` processes, or of as many as ``rounds`` if that is more."""
    schema = Schema((Field("x", "<f4", (NBYTES // 4,)), Field("y", "<i8")))
    raw = np.random.default_rng(0).integers(0, 2**63, size=SAMPLES * NBYTES // 8, dtype=np.int64)
    block = Block(schema, {"x": raw.view("<f4").reshape(SAMPLES, -1), "y": np.arange(SAMPLES)})
    with tempfile.TemporaryDirectory(dir=folder) as own:
        with open_cache(Path(own) / "cache", max_size="1GB") as cache:
            fill(cache, "lmdb", block, SHARDS)
        command = [sys.executable, __file__, "--one", str(Path(own) / "cache")]
        ran = [subprocess.run(command, check=True, capture_output=True) for _ in range(max(PROCESSES, rounds))]
    found = [json.loads(process.stdout) for process in ran]
    shares = [one["busy"] / one["idle"] for one in found]
    idle = statistics.median(one["idle"] for one in found)
    return [
        {
            "case": f"beside a busy thread, 3 KiB: {what}",
            "ours": round(share * idle),
            "peer": "the same loop, idle",
            "ratio": round(share, 2),
            "target": LEAST,
            "unit": f"batches a second; busy / idle of {len(found)} processes",
        }
        for what, share in (("the least", min(shares)), ("the median", statistics.median(shares)))
    ]


def _spin(stop: list[Any]) -> None:
    count = 0
    while not stop:
        count += 1


def _rate(loader: Loader) -> float:
    batches, begin = 0, time.perf_counter()
    while True:
        for batch in loader:
            batches += len(batch) > 0
        if (passed := time.perf_counter() - begin) > SECONDS:
            return batches / passed


def _one(cache: str) -> dict[str, float]:
    """Return the idle and the busy rate of this process."""
    idle, busy = [], []
    with Loader(cache, batch_size=BATCH, workers=2, seed=0) as loader:
        _rate(loader)  # fills the page tables
        for _ in range(PAIRS):
            idle.append(_rate(loader))
            stop: list[Any] = []
            thread = threading.Thread(target=_spin, args=(stop,))
            thread.start()
            try:
                busy.append(_rate(loader))
            finally:
                stop.append(None)
                thread.join()
    return {"idle": statistics.median(idle), "busy": statistics.median(busy)}


if __name__ == "__main__":
    if sys.argv[1] == "--one":
        print(json.dumps(_one(sys.argv[2])))
    else:
        for row in measure(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0):
            print(row)
