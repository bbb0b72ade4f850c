"""Waits for batches have causes: each test makes one thing slow and looks at the cause that is named."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cachetool.bench.samples import fill
from cachetool.cache import CacheDir, open_cache
from cachetool.cache.history import history_of
from cachetool.core.block import Block
from cachetool.core.causes import CAUSES, main_cause, sentence
from cachetool.core.errors import UsageError
from cachetool.core.schema import Field, Schema
from cachetool.loaders.feed import processes
from cachetool.loaders.numpy import Loader
from cachetool.loaders.ring.batch_times import STEPS, divided
from cachetool.loaders.waits import EpochTimes

COUNT, SIZE = 64, 2**18
BLKIO = Path("/sys/fs/cgroup/blkio")


@pytest.fixture
def cache(tmp_path: Path) -> Iterator[CacheDir]:
    values = np.random.default_rng(0).integers(0, 255, (COUNT, SIZE), dtype=np.uint8)
    with open_cache(tmp_path / "cache", max_size="100MB") as opened:
        fill(opened, "hdf5", Block(Schema((Field("x", "|u1", (SIZE,)),)), {"x": values}), 2)
        yield opened


def slow(sample: dict[str, Any]) -> dict[str, Any]:
    time.sleep(0.005)
    return sample


@given(st.lists(st.integers(0, 10**9), min_size=len(STEPS), max_size=len(STEPS)), st.floats(0, 2))
def test_a_wait_is_divided_in_the_ratio_of_the_steps_and_never_exceeded(spent: list[int], seconds: float) -> None:
    before = [7] * len(STEPS)
    parts = divided(before, [a + b for a, b in zip(before, spent, strict=True)], seconds)
    assert sum(parts.values()) <= seconds + 1e-9
    assert sum(parts.values()) == pytest.approx(min(seconds, sum(spent) / 1e9))
    assert all(parts[STEPS[at]] >= parts.get(STEPS[0], 0) for at in range(len(STEPS)) if spent[at] > max(spent[0], 0))


def test_feeders_that_copy_are_the_cause_only_if_processors_are_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    for processors, cause in ((4, "feeders"), (2, "memory")):
        monkeypatch.setattr(os, "sched_getaffinity", lambda _, count=processors: set(range(count)))
        times = EpochTimes(2)
        times.add(1.0, {"copy": 0.7, "find": 0.1, "disk": 0.1}, rest="slots")
        assert times.causes() == pytest.approx({cause: 0.8, "disk": 0.1, "slots": 0.1})


def test_every_cause_has_a_sentence() -> None:
    for cause, about in CAUSES.items():
        assert about.helps in sentence({cause: 1.0}, 2.0)
    assert main_cause({"disk": 0.01}, 1.0) is None
    assert sentence({}, 0.0).startswith("nothing was late")


@pytest.mark.parametrize("workers", [0, 2])
def test_a_slow_transform_is_named(cache: CacheDir, workers: int) -> None:
    with Loader(cache, batch_size=8, workers=workers, transform=slow) as loader:
        for _ in range(2):
            for _ in loader:
                pass
        report = loader.report()
    assert report.cause == "transform"
    assert report.causes["transform"] > 0.5 * report.waited
    assert report.batches == COUNT // 8
    assert str(report).count("\n") == 2
    row = history_of(cache.layout).epochs[-1]
    assert max(row["causes"], key=row["causes"].get) == "transform"
    assert len(row["longest"]) == 3


def test_nothing_is_late_if_training_is_slower_than_the_data(cache: CacheDir) -> None:
    with Loader(cache, batch_size=8) as loader:
        for _ in range(3):
            for _ in loader:
                time.sleep(0.05)
        # On a busy machine the epoch itself may begin late.
        assert loader.report().cause in (None, "start")


def test_a_thread_that_keeps_the_gil_is_named(cache: CacheDir) -> None:
    stop = threading.Event()

    def busy() -> None:
        while not stop.is_set():
            sum(range(1000))

    thread = threading.Thread(target=busy, daemon=True)
    thread.start()
    try:
        with Loader(cache, batch_size=2) as loader:
            for _ in range(12):
                for _ in loader:
                    pass
    finally:
        stop.set()
        thread.join()
    sums: Counter[str] = Counter()
    for row in history_of(cache.layout).epochs:
        sums.update(row["causes"])
    assert sums["gil"] > 0


def test_a_batch_that_is_taken_late_waited_for_the_gil() -> None:
    class Filled:
        """A ring whose batch was ready 1 ms after the wait began, which ends now, 30 ms later."""

        ready = 1

        def filled(self) -> int:
            return began + 10**6

        def spent(self) -> tuple[int, ...]:
            return tuple(10**6 * (name == "copy") for name in STEPS)

    began = time.monotonic_ns() - 31 * 10**6
    feed = processes.Processes.__new__(processes.Processes)
    feed.times, feed.pid = EpochTimes(2), -1
    feed._count(Filled(), began, (0,) * len(STEPS), first=False)  # type: ignore[arg-type]
    causes = feed.times.causes()
    assert next(iter(causes)) == "gil"
    assert causes["gil"] >= 0.03
    assert sum(causes.values()) == pytest.approx(feed.times.delivered(1).waited)


def test_samples_that_come_late_are_named(tmp_path: Path) -> None:
    with open_cache(tmp_path / "cache", max_size="100MB") as cache:
        (tmp_path / "source").mkdir()

        def come() -> None:
            time.sleep(1.0)
            for number in range(16):
                np.save(tmp_path / f"source/s{number}.x.npy", np.zeros(100, np.float32))
            cachetool_pull(tmp_path / "source", cache.root)

        thread = threading.Thread(target=come)
        thread.start()
        with Loader(cache, batch_size=4) as loader:
            for _ in loader:
                pass
            report = loader.report()
        thread.join()
    assert report.cause == "samples"


def cachetool_pull(source: Path, root: Path) -> None:
    command = [sys.executable, "-m", "cachetool", "pull", str(source), "--all", "--cache", str(root), "--quiet"]
    subprocess.run(command, check=True, capture_output=True)


def forget_pages(root: Path) -> None:
    """Let the kernel drop the files of a cache from memory."""
    for file in root.rglob("*"):
        if file.is_file():
            fd = os.open(file, os.O_RDONLY)
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)


def test_samples_that_are_not_in_memory_are_named(cache: CacheDir) -> None:
    with Loader(cache, batch_size=8, workers=0) as loader:
        forget_pages(cache.root)
        for _ in loader:
            pass
        cold = loader.report()
        for _ in loader:
            pass
        warm = loader.report()
    if cold.waited < 2 * warm.waited:
        pytest.skip("this file system keeps its files in memory")
    for_batches = cold.waited - cold.causes["start"]
    assert cold.causes.get("page_cache", 0.0) + cold.causes.get("disk", 0.0) > 0.3 * for_batches
    assert "page_cache" not in warm.causes


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one processor has no room for another feeder")
def test_one_feeder_too_few_is_named(cache: CacheDir) -> None:
    with Loader(cache, batch_size=8, workers=1) as loader:
        for _ in range(6):
            for _ in loader:
                pass
    sums: Counter[str] = Counter()
    for row in history_of(cache.layout).epochs[1:]:
        sums.update(row["causes"])
    # On a busy machine the training process itself may be late, too.
    assert sums["feeders"] > 0
    assert "memory" not in sums


def test_a_slow_disk_is_named(cache: CacheDir) -> None:
    """The kernel limits reads of a process group to 20 MB/s."""
    number = os.stat(cache.root).st_dev
    disk = Path(f"/sys/dev/block/{os.major(number)}:{os.minor(number)}")
    limit = BLKIO / "blkio.throttle.read_bps_device"
    if not limit.exists() or not os.access(BLKIO, os.W_OK) or not disk.exists():
        pytest.skip("needs root, cgroups of version 1 and a disk")
    if (disk / "partition").exists():
        disk = disk.resolve().parent
    group = BLKIO / f"cachetool-{os.getpid()}"
    group.mkdir()
    try:
        (group / limit.name).write_text(f"{(disk / 'dev').read_text().strip()} 20000000")
        program = (
            "import os, sys; open(sys.argv[2], 'w').write(str(os.getpid()))\n"
            "from cachetool.loaders.numpy import Loader\n"
            "with Loader(sys.argv[1], batch_size=8) as loader:\n"
            "    for batch in loader: pass\n"
            "    report = loader.report()\n"
            "print(report.cause, round(report.waited, 2), dict(report.causes))"
        )
        forget_pages(cache.root)
        done = subprocess.run(
            [sys.executable, "-c", program, cache.root, group / "cgroup.procs"],
            capture_output=True, text=True, timeout=100, check=True,
        )  # fmt: skip
    finally:
        group.rmdir()
    assert done.stdout.split()[0] == "disk", done.stdout


def test_a_running_epoch_is_shown_before_it_ends(cache: CacheDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "_TOLD", 0.0)
    with Loader(cache, batch_size=4, transform=slow) as loader:
        batches = iter(loader)
        for _ in range(6):
            next(batches)
        # The leader writes it a moment later.
        deadline = time.monotonic() + 20
        while not (rows := cache.stats().trainers) or not rows[0]["running"]:
            assert time.monotonic() < deadline
            next(batches, None)
        assert rows[0]["causes"]["transform"] > 0
        for _ in batches:
            pass
        for _ in loader:
            break
        rows = cache.stats().trainers
        assert len(rows) == 1


def test_there_is_nothing_to_report_before_the_first_batch(cache: CacheDir) -> None:
    with Loader(cache, batch_size=8) as loader, pytest.raises(UsageError, match="nothing to report before the first"):
        loader.report()
