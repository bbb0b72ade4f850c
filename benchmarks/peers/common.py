"""What every peer's script does: make the samples, and write them whenever it is told a folder. NumPy alone.

The benchmark starts the script once a case with the Python of the peer's own environment and talks to it by lines:
``{"folder": ...}`` in, ``{"seconds": ...}`` or ``{"error": ...}`` out. Writing and an fsync of every file count;
importing and making the samples do not.
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
    """Incompressible float32 arrays of ``nbytes`` each, (count, nbytes // 4); the same for everybody."""
    raw = np.random.default_rng(seed).integers(0, 2**63, size=count * nbytes // 8, dtype=np.int64)
    return raw.view("<f4").reshape(count, nbytes // 4)


def sync(folder: Path) -> None:
    """fsync every file below ``folder`` and the folders themselves."""
    for path in [folder, *folder.rglob("*")]:
        fd = os.open(path, os.O_RDONLY)
        os.fsync(fd)
        os.close(fd)


def serve(write: Callable[[Path, np.ndarray], None]) -> None:
    """Write the samples into each folder that a line of standard input names, which does not exist yet."""
    x = samples(int(sys.argv[1]), int(sys.argv[2]))
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what the library prints must not mix with the answers
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
        except Exception:  # noqa: BLE001 - whatever a peer fails of is its result
            answer = {"error": traceback.format_exc().strip().splitlines()[-1]}
        answers.write(json.dumps(answer) + "\n")
