"""The common part of all peers' scripts: create the samples, and write them to each folder on request. Needs only
NumPy.

The benchmark starts the script once per case with the Python of the peer's environment and exchanges lines with it:
``{"folder": ...}`` in, ``{"seconds": ...}`` or ``{"error": ...}`` out. The seconds include writing and an fsync of
each file, but not the imports and the creation of the samples.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import numpy as np


def samples(count: int, nbytes: int, seed: int = 0) -> np.ndarray:
    """Return incompressible float32 arrays of ``nbytes`` each, (count, nbytes // 4), the same in each process."""
    raw = np.random.default_rng(seed).integers(0, 2**63, size=count * nbytes // 8, dtype=np.int64)
    return raw.view("<f4").reshape(count, nbytes // 4)


def sync(folder: Path) -> None:
    """Call fsync on every file below ``folder`` and on the folders."""
    for path in [folder, *folder.rglob("*")]:
        fd = os.open(path, os.O_RDONLY)
        os.fsync(fd)
        os.close(fd)


def serve(write: Callable[[Path, np.ndarray], None]) -> None:
    """Write the samples into each folder that a line of standard input names. The folder does not exist yet."""
    x = samples(int(sys.argv[1]), int(sys.argv[2]))
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # the library's output must not mix with the answers
    answers.write(json.dumps({"ready": True}) + "\n")
    for line in sys.stdin:
        folder = Path(json.loads(line)["folder"])
        try:
            begin = time.perf_counter()
            write(folder, x)
            written = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
            if written < x.nbytes:
                raise RuntimeError(f"{written} bytes were written of samples of {x.nbytes}")
            sync(folder)
            answer = {"seconds": time.perf_counter() - begin}
        except Exception:  # noqa: BLE001 - any failure of a peer is its result
            answer = {"error": traceback.format_exc().strip().splitlines()[-1]}
        answers.write(json.dumps(answer) + "\n")
