"""``doctor --live``, ``stats`` and metrics name what slows a pull or a training down."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cachetool
from cachetool.loaders.numpy import Loader
from cachetool.report.metrics import metrics

PROGRAM = [sys.executable, "-m", "cachetool"]
TRAINING = """
import sys, time
from cachetool.loaders.numpy import Loader

def slow(sample):
    time.sleep(0.02)
    return sample

with Loader(sys.argv[1], batch_size=4, transform=slow if sys.argv[2] == "transform" else None) as loader:
    while True:
        for batch in loader:
            time.sleep(0.1 if sys.argv[2] == "trainer" else 0.0)
"""


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "source"
    folder.mkdir()
    for number in range(300):
        np.save(folder / f"s{number:03d}.x.npy", np.zeros(2500, np.float32))
    return folder


@contextmanager
def running(*command: object) -> Iterator[subprocess.Popen[bytes]]:
    """Run a program beside the ``with`` block."""
    with subprocess.Popen(list(map(str, command)), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            yield process
        finally:
            process.send_signal(signal.SIGINT)
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()


def live(root: Path, seconds: float = 12) -> str:
    command = [*PROGRAM, "doctor", "--live", "--seconds", str(seconds), "--json", "--cache", str(root)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    sentence: str = json.loads(done.stdout)["sentence"]
    return sentence


def awaited(root: Path, what: Any) -> dict[str, Any]:
    """Return the figures of ``stats`` once ``what`` of them is true."""
    deadline = time.monotonic() + 90
    with cachetool.open_cache(root) as cache:
        while True:
            figures = cache.stats().as_dict()
            if what(figures):
                return figures
            assert time.monotonic() < deadline, figures["pulling"] or figures["trainers"]
            time.sleep(0.2)


def pull(source: Path, root: Path, *options: object) -> None:
    subprocess.run(
        [*PROGRAM, "pull", str(source), "--cache", str(root), *map(str, options)], check=True, capture_output=True
    )


@pytest.mark.parametrize(("what", "expected"), [("transform", "for the transform"), ("trainer", "nothing is late")])
def test_the_sentence_names_what_a_training_waits_for(source: Path, tmp_path: Path, what: str, expected: str) -> None:
    root = tmp_path / "cache"
    pull(source, root, "--samples", 100, "--max-size", "20MB")
    with running(sys.executable, "-c", TRAINING, root, what):
        awaited(root, lambda figures: figures["trainers"])
        assert expected in live(root)
        figures = awaited(root, lambda figures: figures["trainers"])
    assert (figures["trainers"][0]["cause"] == what) == (what == "transform")
    values = {metric.name: metric.values for metric in metrics(figures)}["cachetool_epoch_wait_seconds"]
    largest = max(values, key=lambda pair: pair[1])[0]["cause"]
    assert (largest == what) == (what == "transform")


def test_a_cap_that_is_too_small_is_named(source: Path, tmp_path: Path) -> None:
    """A pull that replaces samples waits, because no epoch has read the ones that are there."""
    root = tmp_path / "cache"
    with running(*PROGRAM, "pull", source, "--follow", "--cache", root, "--max-size", "3MB"):
        awaited(root, lambda figures: _main(figures["pulling"]) == "room")
        assert "room under the cap; raise --max-size" in live(root, 6)


def test_an_eviction_that_waits_for_a_reader_is_named(source: Path, tmp_path: Path) -> None:
    root = tmp_path / "cache"
    pull(source, root, "--samples", 40, "--max-size", "3MB")
    with Loader(root, batch_size=4, workers=0) as loader, Loader(root, batch_size=4, workers=0) as other:
        for _ in loader:
            pass
        with running(*PROGRAM, "pull", source, "--follow", "--renew", "90%", "--cache", root):
            reading = iter(loader)
            next(reading)
            awaited(root, lambda figures: _main(figures["pulling"]) == "room")
            # The next snapshot lets shards go, which the first loader still reads.
            next(iter(other))
            awaited(root, lambda figures: _main(figures["pulling"]) == "readers")
            assert "readers to end, which still use the shards that go" in live(root, 0)


def test_nothing_runs(source: Path, tmp_path: Path) -> None:
    root = tmp_path / "cache"
    pull(source, root, "--samples", 10, "--max-size", "3MB")
    assert "no training and no pull" in live(root, 0)


def _main(pulling: list[dict[str, Any]]) -> str | None:
    causes = pulling[0]["causes"] if pulling else {}
    return max(causes, key=lambda step: causes[step]) if causes else None
