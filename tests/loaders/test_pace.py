"""What a loader tells of each epoch: its batches, and how often and how long training waited."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest

from cachetool.bench.samples import fill
from cachetool.cache import CacheDir, open_cache
from cachetool.cache.history import history_of
from cachetool.core.block import Block
from cachetool.core.schema import Field, Schema
from cachetool.loaders.numpy import Loader


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Twenty samples."""
    with open_cache(tmp_path / "cache", max_size="8MB") as cache:
        fill(cache, "lmdb", Block(Schema((Field("y", "<i8"),)), {"y": np.arange(20)}), 2)
    return tmp_path / "cache"


def epochs(cache: CacheDir, count: int) -> list[dict]:
    """The epochs that are written down, once there are so many: that is done a moment after each ended."""
    deadline = time.monotonic() + 60
    while len(found := history_of(cache.layout).epochs) < count and time.monotonic() < deadline:
        time.sleep(0.01)
    return found


def slow(sample: dict) -> dict:
    time.sleep(0.05)
    return sample


@pytest.mark.parametrize("workers", [0, 2])
def test_epochs_are_told_with_their_batches_and_waits(root: Path, workers: int) -> None:
    """Batches that take 0.2 s to make are waited for; there is no time limit in this, only an order of sizes."""
    with (
        open_cache(root) as cache,
        Loader(cache, batch_size=4, workers=workers, transform=slow, run="job") as loader,
    ):
        for _ in range(2):
            assert sum(len(batch["y"]) for batch in loader) == 20
        found = epochs(cache, 2)

    assert [(row["run"], row["epoch"], row["batches"], row["samples"]) for row in found] == [
        ("job", 0, 5, 20),
        ("job", 1, 5, 20),
    ]
    for row in found:
        assert 1 <= row["waits"] <= 5
        assert 0 < row["waited"] <= row["seconds"]
        assert row["dataset"] == "default"


def test_an_epoch_that_is_broken_off_is_not_told(root: Path) -> None:
    with open_cache(root) as cache, Loader(cache, batch_size=4, workers=0) as loader:
        next(iter(loader))
        for _ in loader:
            pass
        assert [row["epoch"] for row in epochs(cache, 1)] == [1]
    with open_cache(root) as cache:
        assert len(history_of(cache.layout).epochs) == 1
