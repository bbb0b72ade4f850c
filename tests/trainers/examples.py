"""Runs an example as its first lines say: as one process, or as two ranks of torchrun."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.trainers.conftest import REPOSITORY


def run_example(name: str, folder: Path, *, ranks: int = 1) -> str:
    """Return what ``examples/NAME`` prints; it must succeed, and print no warning of cachetool."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    done = subprocess.run(
        [sys.executable, *(launcher if ranks > 1 else []), str(REPOSITORY / "examples" / name), str(folder / "work")],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "cachetool: " not in done.stderr
    return done.stdout
