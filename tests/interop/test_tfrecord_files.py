"""TFRecord files of ours in TensorFlow and in the ``tfrecord`` package.

Each of the two lives in a child process of its own: they cannot be imported into one process.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from cachetool.block import Block
from cachetool.formats import get_format
from cachetool.formats.tfrecord import shape_name
from cachetool.schema import Field, Schema
from tests.formats.samples import EVERY_KIND, block, write

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


@pytest.fixture(scope="module")
def tensorflow_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What TensorFlow read, in one run."""
    folder = tmp_path_factory.mktemp("tensorflow")
    (folder / "schema.json").write_text(json.dumps(EVERY_KIND.to_json()))
    write(KIND, folder / "ours.tfrecord", block(EVERY_KIND, 25))
    write(KIND, folder / "ours.gz.tfrecord", block(EVERY_KIND, 25), compression="gzip")
    run("tensorflow_records.py", folder)
    return folder


@pytest.mark.parametrize("name", ["ours", "ours.gz"])
def test_tensorflow_reads_every_kind_of_field(tensorflow_folder: Path, name: str) -> None:
    """``TFRecordDataset`` and ``parse_single_example`` give the bits that were written, plain and gzip."""
    content = block(EVERY_KIND, 25)
    found = json.loads((tensorflow_folder / f"{name}.json").read_text())
    assert len(found) == 25
    for index, raw in enumerate(found):
        one = content.sample(index)
        for field in EVERY_KIND:
            value = one[field.name]
            expected = value if field.kind == "bytes" else value.encode() if field.kind == "str" else value.tobytes()
            assert bytes.fromhex(raw[field.name]) == expected, field.name
            if field.kind == "ragged":
                assert bytes.fromhex(raw[shape_name(field)]) == np.array(value.shape, dtype="<i8").tobytes()


def test_the_tfrecord_package_reads_ours(tmp_path: Path) -> None:
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
