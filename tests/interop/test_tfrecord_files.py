"""TFRecord files of ours in the ``tfrecord`` package, which runs in a separate process.

The package cannot be imported beside TensorFlow; ``test_formats_doc.py`` uses TensorFlow's reader.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from cachetool.core.block import Block
from cachetool.core.schema import Field, Schema
from cachetool.formats import get_format
from tests.formats.samples import write

KIND = get_format("tfrecord")
ROOT = Path(__file__).parents[2]


def run(script: str, folder: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(Path(__file__).parent / "scripts" / script), str(folder)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]


def test_the_tfrecord_package_reads_our_files(tmp_path: Path) -> None:
    """Numbers, bytes and shapes through ``tfrecord_loader``."""
    schema = Schema(
        (
            Field("n", "<i8"),
            Field("f", "<f4"),
            Field("x", "<f8", (2,)),
            Field("r", "<i2", (None, None)),
            Field("t", "str"),
        )
    )
    samples = [
        {
            "n": -n,
            "f": np.float32(n / 3),
            "x": np.array([n, n + 0.5]),
            "r": np.ones((n % 3 + 1, 2), "<i2"),
            "t": f"text {n}",
        }
        for n in range(10)
    ]
    write(KIND, tmp_path / "ours.tfrecord", Block.from_samples(schema, samples))
    run("tfrecord_package.py", tmp_path)
    found = json.loads((tmp_path / "ours.json").read_text())
    assert len(found) == 10
    for one, expected in zip(found, samples, strict=True):
        assert one["n"] == [expected["n"]]
        assert one["f"] == [pytest.approx(float(expected["f"]), abs=0)]
        assert bytes.fromhex(one["x"]) == expected["x"].tobytes()
        assert bytes.fromhex(one["r"]) == expected["r"].tobytes()
        assert one["r/shape"] == list(expected["r"].shape)
        assert bytes.fromhex(one["t"]) == expected["t"].encode()
