"""Renewal of a full cache: one pull with ``--follow``, one trainer, one validation reader, epoch after epoch."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from cachetool.api import open_cache
from cachetool.cache import CacheDir, Snapshot
from cachetool.cache.usage import measure
from tests.faults.conftest import Figures

CAP = 12_000_000
VALIDATION = """
import sys, cachetool
with cachetool.open_cache(sys.argv[1]) as cache:
    held = None
    for line in sys.stdin:  # one snapshot, held until the next is asked for
        held, before = cache.snapshot(), held
        nbytes = sum(len(shard.data.read_bytes()) for shard in held.shards)
        if before is not None:
            before.release()
        if line == "and let go\\n":
            held.release()
            held = None
        print(nbytes, flush=True)
"""


@pytest.fixture(scope="module")
def objects(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("objects")
    for number in range(3000):
        np.save(folder / f"{number:04d}.npy", np.random.default_rng(number).random(1000))
    return folder


class Puller:
    """A process that runs ``cachetool pull --follow``."""

    def __init__(self, objects: Path, root: Path, *options: str) -> None:
        words = ("pull", objects, "--cache", root, "--max-size", str(CAP), "--follow", "--workers", "1", *options)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "cachetool", *map(str, words)],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )

    def wait_until_full(self, root: Path) -> None:
        """Wait until the pull needs space that it cannot get."""
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline:
            assert self.process.poll() is None, self.process.communicate()
            if (root / "cachetool.json").exists():
                with open_cache(root, create=False) as cache, cache.catalog.read() as connection:
                    states = {row[0] for row in connection.execute("SELECT state FROM shards")}
                    wanted = connection.execute("SELECT coalesce(max(bytes_wanted), 0) FROM jobs").fetchone()[0]
                    if (
                        states <= {"ready", "retiring"}
                        and wanted > cache.max_size - measure(connection, cache.layout).total
                    ):
                        return
            time.sleep(0.05)
        raise AssertionError("the cache did not fill")

    def stop(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        self.process.communicate(timeout=60)


@contextlib.contextmanager
def validation(root: Path) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-c", VALIDATION, str(root)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        yield process
    finally:
        process.communicate()


def ask(process: subprocess.Popen[str], what: str = "and let go") -> None:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(f"{what}\n")
    process.stdin.flush()
    assert int(process.stdout.readline()) > 0


def train(cache: CacheDir, snapshot: Snapshot) -> None:
    assert sum(len(shard.data.read_bytes()) for shard in snapshot.shards) > 0
    snapshot.served()


def soak(*values: object) -> object:
    return pytest.param(*values, marks=pytest.mark.soak)


@pytest.mark.parametrize(
    ("options", "held", "epochs"),
    [
        ((), "and let go", 4),
        soak((), "and let go", 20),
        soak((), "and hold", 20),
        soak(("--shard-size", "200kB"), "and let go", 20),
        soak(("--shard-size", "200kB"), "and hold", 20),
        soak(("--renew", "30%"), "and let go", 20),
        soak(("--renew", "30%"), "and hold", 20),
        soak(("--min-epochs", "2"), "and hold", 20),
    ],
    ids=str,
)
@pytest.mark.timeout(1200)
def test_each_epoch_replaces_at_least_four_fifths_of_renew(
    tmp_path: Path, objects: Path, figures: Figures, options: tuple[str, ...], held: str, epochs: int
) -> None:
    """The validation reader releases its snapshot at once, or holds it until it takes the next one."""
    root = tmp_path / "cache"
    renew = 0.3 if "--renew" in options else 0.1
    puller = Puller(objects, root, "--to", "hdf5", *options)
    try:
        puller.wait_until_full(root)
        with open_cache(root) as cache, validation(root) as second:
            snapshot = cache.snapshot()
            shares = []
            for _ in range(epochs + 2):
                train(cache, snapshot)
                ask(second, held)
                after = cache.snapshot()
                snapshot.release()
                known = {shard.id for shard in snapshot.shards}
                shares.append(sum(shard.bytes for shard in after.shards if shard.id not in known) / CAP)
                snapshot = after
                puller.wait_until_full(root)
            snapshot.release()
    finally:
        puller.stop()
    # The first snapshot of a full cache frees the first space. Samples that used it are in the second snapshot.
    figures(epochs=epochs, least_replaced=f"{min(shares[2:]):.3f} of the cap", renew=renew)
    assert min(shares[2:]) >= 0.8 * renew, shares
    assert os.listdir(root / "holders") == []


def test_nothing_is_retired_while_no_pull_waits_for_space(tmp_path: Path, objects: Path) -> None:
    root = tmp_path / "cache"
    puller = Puller(objects, root, "--to", "hdf5")
    try:
        puller.wait_until_full(root)
        puller.process.send_signal(signal.SIGKILL)
        puller.process.wait()
        with open_cache(root) as cache:
            while cache.recover() or cache.catalog.rows("SELECT 1 FROM jobs"):
                pass  # the pull's worker ends a moment later
            full = cache.shards()
            for epoch in range(5):
                with cache.snapshot() as snapshot:
                    assert list(snapshot.shards) == [replace(shard, epochs=epoch) for shard in full]
                    train(cache, snapshot)
            assert cache.stats().evicted == 0
    finally:
        puller.process.kill()


def test_a_pull_with_min_epochs_evicts_only_samples_trained_that_often(
    tmp_path: Path, objects: Path, figures: Figures
) -> None:
    root = tmp_path / "cache"
    puller = Puller(objects, root, "--to", "hdf5", "--min-epochs", "2")
    try:
        puller.wait_until_full(root)
        epochs: dict[str, int] = {}
        with open_cache(root) as cache:
            for _ in range(6):
                with cache.snapshot() as snapshot:
                    train(cache, snapshot)
                    for shard in snapshot.shards:
                        epochs[shard.id] = epochs.get(shard.id, 0) + 1
                puller.wait_until_full(root)
            evicted = cache.stats().evicted  # read first, because the pull continues
            gone = [id for id in epochs if id not in {shard.id for shard in cache.shards()}]
            assert len(gone) > 4
            assert min(epochs[id] for id in gone) >= 2
            assert evicted <= len(gone), "a shard went that was in no epoch"
    finally:
        puller.stop()
    figures(shards_evicted=len(gone), least_epochs_of_one=min(epochs[id] for id in gone))
