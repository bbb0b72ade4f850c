"""Leftovers of loaders, growth while they run, and the time until a killed process is noticed."""

from __future__ import annotations

import os
import signal
import statistics
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cachetool.cache import CacheDir, open_cache
from cachetool.core.errors import CacheToolError
from cachetool.loaders.numpy import Loader
from tests.loaders.conftest import run_script
from tests.loaders.numbered import leases, put
from tests.loaders.processes import alive, children, until

FORMATS = ("lmdb", "hdf5", "zarr", "tfrecord")
ENDS = ["exhausted", "abandoned", "broken_off", "failed", "failed_and_forgotten"]


@pytest.mark.parametrize(("whose", "workers"), [("numpy", 0), ("numpy", 2), ("torch", 2)])
def test_iterating_leaves_no_resources_however_it_ended(whose: str, workers: int, cache: CacheDir) -> None:
    """No process, thread, descriptor, map, segment of shared memory or lease remains: after the last batch, after an
    iterator was dropped or left, after an exception in ``transform``, after a feeder was killed.
    """
    found = run_script("feed_left.py", cache.root, workers, whose)

    running = found.pop("while it runs")
    assert running["leases"] in (1, 2)  # the lease of the prepared next epoch counts too
    assert [running["processes"], running["threads"]] == [workers + 1 if workers else 0, 0]
    assert (running["segments"] > 0) == (workers > 0)
    assert list(found) == [*ENDS, *(["killed_leader", "killed_follower"] if workers else [])]
    for end, left in found.items():
        assert left == dict.fromkeys(running, 0), end


def filled(root: Path, shards: int) -> Path:
    """Create a cache of ``shards`` shards of two samples, in all formats in turn, as dataset ``mixed``."""
    with open_cache(root, max_size="200MB") as cache:
        for at in range(shards):
            put(cache, range(2 * at, 2 * at + 2), format=FORMATS[at % 4], dataset="mixed")
    return root


@pytest.fixture(
    scope="module",
    params=[(40, 32), pytest.param((780, 256), marks=pytest.mark.soak)],
    ids=["40 shards", "780 shards"],
)
def many(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int, int]:
    """Return a cache of many shards, their number, and a smaller limit of descriptors."""
    shards, descriptors = request.param
    return filled(tmp_path_factory.mktemp("many") / "cache", shards), shards, descriptors


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.timeout(1200)
def test_nothing_grows_over_fifty_epochs_of_more_files_than_descriptors(
    workers: int, many: tuple[Path, int, int], record_property: Callable[[str, object], None]
) -> None:
    """Some epochs are left early, some batches are kept. Memory is the anonymous and shared memory of trainer and
    feeders.
    """
    root, shards, descriptors = many

    found = run_script("feed_steady.py", root, workers, descriptors, seconds=1100)

    grown = found["grown"]
    for name, value in grown.items():
        record_property(f"{name} grown" + (", KiB" if name == "memory" else ""), value)
    assert found["read"] == 2 * shards
    assert grown["memory"] < 4096  # KiB
    assert abs(grown["maps"]) < 40
    assert grown["descriptors"] <= 8  # those of a transaction or a part that is open at this moment
    assert grown["threads"] <= 0


@pytest.mark.soak
@pytest.mark.timeout(1200)
def test_datasets_for_pytorch_read_780_shards_with_256_descriptors(tmp_path: Path) -> None:
    """Both in this process and in two workers. py-lmdb keeps one environment per file, and 300 of the files are
    LMDB.
    """
    root = filled(tmp_path / "cache", 780)
    with open_cache(root) as cache:
        for at in range(300):
            put(cache, range(2 * at, 2 * at + 2), dataset="lmdb")

    found = run_script("torch_many.py", root, 256, seconds=1000)

    assert len(found) == 4
    for name, epochs in found.items():
        assert epochs == [list(range(600 if name.startswith("LMDB") else 1560))] * 2, name


ROUNDS = 15


def told(record_property: Callable[[str, object], None], seconds: list[float]) -> float:
    """Record the median beside the longest time, and return it."""
    record_property("times", len(seconds))
    record_property("median ms", round(1e3 * statistics.median(seconds), 1))
    record_property("longest ms", round(1e3 * max(seconds), 1))
    return statistics.median(seconds)


@pytest.mark.soak
@pytest.mark.parametrize("victim", [0, 1], ids=["leader", "follower"])
@pytest.mark.parametrize("state", ["batches come", "a batch is waited for"])
def test_a_killed_feeder_is_an_error_within_a_second(
    state: str, victim: int, cache: CacheDir, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    """Measured from the kill to the exception in the loop. The other feeder has ended by then."""
    notes = tmp_path / "notes"

    def stands_still(sample: dict[str, Any]) -> dict[str, Any]:
        with open(notes, "a") as file:
            file.write(f"{os.getpid()}\n")
        while True:
            signal.pause()

    def kill(pids: list[int]) -> None:
        until(lambda: notes.exists() and len(set(notes.read_text().split())) == 2)
        killed.append(time.monotonic())
        os.kill(pids[victim], signal.SIGKILL)

    seconds = []
    for _ in range(ROUNDS):
        killed: list[float] = []
        notes.unlink(missing_ok=True)
        waits = state == "a batch is waited for"
        with Loader(cache, batch_size=2, workers=2, prefetch=1, transform=stands_still if waits else None) as loader:
            batches = iter(loader)
            assert loader._feed is not None
            pids = loader._feed.pids  # type: ignore[attr-defined]
            if waits:
                killer = threading.Thread(target=kill, args=(pids,))
                killer.start()
            else:
                next(batches)
                killed.append(time.monotonic())
                os.kill(pids[victim], signal.SIGKILL)
            with pytest.raises(CacheToolError, match=rf"a feeder \(pid {pids[victim]}\) was killed by signal 9"):
                list(batches)
            seconds.append(time.monotonic() - killed[0])
            if waits:
                killer.join()
            assert children() == []
    assert told(record_property, seconds) < 1.0
    assert leases(cache) == []


TRAINS = """
    import os, sys, time
    from cachetool.loaders.numpy import Loader

    root, *notes = sys.argv[1:]

    def stands_still(sample):
        open(f"{notes[0]}/{os.getpid()}", "w").close()
        time.sleep(1000)

    loader = Loader(root, batch_size=2, workers=2, transform=stands_still if notes else None)
    batches = iter(loader)
    print(*loader._feed.pids, flush=True)
    while True:
        for batch in batches:
            pass
        batches = iter(loader)
"""


@pytest.mark.soak
@pytest.mark.parametrize("state", ["batches come", "a function stands still"])
def test_feeders_end_within_a_second_after_their_trainer(
    state: str, script: Any, cache: CacheDir, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    seconds = []
    for number in range(ROUNDS):
        notes = tmp_path / str(number)
        notes.mkdir()
        stands = state == "a function stands still"
        process = script(TRAINS, cache.root, *([notes] if stands else []))
        feeders = [int(pid) for pid in process.stdout.readline().split()]
        assert len(feeders) == 2
        until(lambda notes=notes, stands=stands: len(os.listdir(notes)) == 2 or not stands)
        killed = time.monotonic()
        process.send_signal(signal.SIGKILL)
        while any(map(alive, feeders)):
            assert time.monotonic() < killed + 20
            time.sleep(0.001)
        seconds.append(time.monotonic() - killed)
        process.communicate()
        assert leases(cache) == []
    assert told(record_property, seconds) < 1.0
