"""The examples run as they are, and the cache they train on grows."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.parametrize("name", ["torch_growing_cache.py", "tensorflow_growing_cache.py"])
def test_every_epoch_of_an_example_trains_on_more_samples(name: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / name), str(tmp_path / "work")],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )

    assert done.returncode == 0, done.stderr
    epochs = re.findall(r"epoch (\d): (\d+) samples, accuracy (\d\.\d\d)", done.stdout)
    assert [(int(epoch), int(samples)) for epoch, samples, _ in epochs] == [(1, 300), (2, 600), (3, 900), (4, 1200)]
    assert float(epochs[0][2]) < float(epochs[-1][2])
    assert float(epochs[-1][2]) > 0.9
