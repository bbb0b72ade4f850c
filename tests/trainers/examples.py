"""Runs an example as its docstring says: as one process, or as two ranks of torchrun."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from tests.trainers.conftest import REPOSITORY, completed


def run_example(name: str, folder: Path, *, ranks: int = 1) -> str:
    """Return the output of ``examples/NAME``, which must succeed without a warning of cachetool."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    said, warned = completed(
        [sys.executable, *(launcher if ranks > 1 else []), str(REPOSITORY / "examples" / name), str(folder / "work")],
        environment={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"},
        folder=folder,
        seconds=200,
    )
    assert "cachetool: " not in warned
    return said
