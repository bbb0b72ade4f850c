"""The record of each epoch: its batches, and the number and time of the training's waits."""

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
    """Create a cache of twenty samples."""
    with open_cache(tmp_path / "cache", max_size="8MB") as cache:
        fill(cache, "lmdb", Block(Schema((Field("y", "<i8"),)), {"y": np.arange(20)}), 2)
    return tmp_path / "cache"


def epochs(cache: CacheDir, count: int) -> list[dict]:
    """Return the recorded epochs when there are ``count`` of them: each is written a moment after its end."""
    deadline = time.monotonic() + 60
    while len(found := history_of(cache.layout).epochs) < count and time.monotonic() < deadline:
        time.sleep(0.01)
    return found


def slow(sample: dict) -> dict:
    time.sleep(0.05)
    return sample


@pytest.mark.parametrize("workers", [0, 2])
def test_epochs_are_recorded_with_their_batches_and_waits(root: Path, workers: int) -> None:
    """Batches that take 0.2 s to build cause waits. The test compares orders of magnitude, not times."""
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


def test_an_interrupted_epoch_is_not_recorded(root: Path) -> None:
    with open_cache(root) as cache, Loader(cache, batch_size=4, workers=0) as loader:
        next(iter(loader))
        for _ in loader:
            pass
        assert [row["epoch"] for row in epochs(cache, 1)] == [1]
    with open_cache(root) as cache:
        assert len(history_of(cache.layout).epochs) == 1
