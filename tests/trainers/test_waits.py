"""Trainers log how long each epoch waited for data."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from cachetool.cache import open_cache
from cachetool.core.schema import Field, Schema
from tests.loaders.numbered import put_samples

ROOT = Path(__file__).parents[2]


@pytest.mark.timeout(600)
def test_three_trainers_log_the_waits_of_each_epoch(tmp_path: Path) -> None:
    schema = Schema((Field("x", "<f4", (4,)), Field("label", "<f4")))
    with open_cache(tmp_path / "cache", max_size="20MB") as cache:
        put_samples(cache, [{"x": np.ones(4, np.float32), "label": 1.0} for _ in range(24)], schema=schema)
    done = subprocess.run(
        [sys.executable, "-m", "tests.trainers.scripts.waits", tmp_path / "cache"],
        cwd=ROOT, capture_output=True, text=True, timeout=500, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    logged = json.loads(done.stdout.splitlines()[-1])
    assert logged == {key: ["data_wait_seconds", "data_wait_share"] for key in ("lightning", "huggingface", "keras")}
