"""The cap holds at every instant, in every format (35, 37)."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from cachetool.api import open_cache
from cachetool.cache.catalog import FIRST_PAGES, allowance
from cachetool.cache.layout import HISTORY_LIMIT
from cachetool.core.errors import CapBlocked, CapTooSmall
from tests.faults.conftest import Figures
from tests.faults.replay import CALLS, Replay
from tests.faults.tracing import Children, needs_strace
from tests.faults.world import FORMATS, LARGE, LARGE_BYTES, OWN, Oracle, make

FIVE = (OWN + 5 * LARGE_BYTES) // 4096 * 4096
"""A cap of five large shards."""
CAP = 2_000_000 // 4096 * 4096
CATALOG = 400 * 1024
"""More bytes than the catalog and its journal take in these tests."""


@pytest.fixture(scope="module")
def objects(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("objects")
    for number in range(40):
        np.save(folder / f"{number:03d}.npy", np.random.default_rng(number).random(500))
    return folder


def du(root: Path) -> int:
    """Return the bytes that a folder takes, apparent or allocated, whichever is larger."""
    words = (["du", "-sB1", root], ["du", "-sb", root])
    return max(int(subprocess.run(w, capture_output=True, text=True, check=True).stdout.split()[0]) for w in words)


@pytest.mark.parametrize("format", FORMATS)
def test_a_cap_of_one_shard_works_and_one_byte_less_is_refused_before_the_first_shard(
    tmp_path: Path, objects: Path, format: str
) -> None:
    root = tmp_path / "cache"

    def pull(cap: int) -> None:
        with open_cache(root, max_size=cap) as cache:
            cache.pull(str(objects), to=format, shard_size=41_000, workers=1, samples=25)

    for cap in (0, 1, 1_160_000):
        with pytest.raises(CapTooSmall) as refused:
            pull(cap)
        assert not root.exists()
    least = int(str(refused.value).split("the minimum is ")[1].split()[0])
    with pytest.raises(CapTooSmall, match=f"the minimum is {least} bytes"):
        pull(least - 1)
    assert not root.exists()
    for cap in (least, least + 1):
        # One shard fits. A pull never evicts its own shards, so it reports that it stopped at the cap.
        with pytest.raises(CapBlocked) as stopped:
            pull(cap)
        with open_cache(root) as cache:
            samples = sum(shard.samples for shard in cache.shards())
            assert f"stopped at the cap with {samples} of 25 samples" in str(stopped.value)
            assert samples in (10, 20), "on tmpfs, where folders take nothing, there is room for one more"
            assert du(root) <= cache.usage().total <= cap
        shutil.rmtree(root)


@needs_strace
@pytest.mark.parametrize("format", FORMATS)
def test_the_folder_never_exceeds_the_cap_after_any_system_call(
    tmp_path: Path, children: Children, figures: Figures, format: str
) -> None:
    """The test replays the calls of a pull that must evict before each of its shards."""
    root = tmp_path / "cache"
    make(root, cap=CAP)
    fill = {"root": root, "format": "all", "shards": 0, "evict": False, "wait": 0.0}
    assert children.run("pull", **fill).kinds[0] == "CapBlocked"
    with open_cache(root) as cache:
        before = cache.usage().total
        assert cache.stats().evicted == 0
        charged = allowance(FIRST_PAGES) + cache.layout.history_bytes
        room = cache.max_size - allowance(FIRST_PAGES)
    replay = Replay(root)
    assert replay.rest + replay.catalog == pytest.approx(du(root), abs=8192)
    children.log("pull", tmp_path / "log", calls=CALLS, root=root, format=format, shards=5, evict=True)
    replay.follow(tmp_path / "log")

    figures(system_calls=replay.calls, most_bytes=replay.peak, of=room)
    assert replay.calls > 500
    assert before - charged - 100_000 < replay.peak <= room
    assert replay.catalog_peak <= allowance(FIRST_PAGES)
    assert replay.rest + replay.catalog == pytest.approx(du(root), abs=8192), "the replay followed"
    with open_cache(root) as cache:
        assert cache.stats().evicted > 0


@contextlib.contextmanager
def disk_of(folder: Path, kind: str, size: int) -> Iterator[Path]:
    """Mount a file system with exactly ``size`` free bytes, so that running out of space means that the cap was
    exceeded.
    """
    folder.mkdir()
    image = folder.with_suffix(".image")
    if kind == "tmpfs":
        mount = ["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", folder]
    else:
        with open(image, "wb") as file:
            file.truncate(32 * 2**20)
        subprocess.run(["mkfs.ext4", "-q", "-m", "0", "-b", "4096", image], check=False, capture_output=True)
        mount = ["mount", "-o", "loop", image, folder]
    if subprocess.run(mount, check=False, capture_output=True).returncode:
        pytest.skip(f"{kind} cannot be mounted here")
    try:
        with open(folder / "ballast", "wb") as file:
            os.posix_fallocate(file.fileno(), 0, free(folder) - size)
        while free(folder) < size:  # ext4 keeps a block for the list of blocks
            os.truncate(folder / "ballast", (folder / "ballast").stat().st_size - 4096)
        yield folder
    finally:
        subprocess.run(["umount", folder], check=True)


def catalog_bytes(root: Path) -> int:
    """Return the bytes of the catalog, its journal and the history on the disk."""
    total = 0
    for name in ("catalog.sqlite3", "catalog.sqlite3-journal", "history.jsonl", "history.jsonl.new"):
        with contextlib.suppress(FileNotFoundError):
            total += (root / name).stat().st_blocks * 512
    return total


def free(folder: Path) -> int:
    found = os.statvfs(folder)
    return found.f_bavail * found.f_frsize


def stand_still(pids: list[int]) -> None:
    """Stop these processes, and wait until they have stopped."""
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    for pid in pids:
        while Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "T":
            pass


@pytest.mark.parametrize("seconds", [pytest.param(2, id="short"), pytest.param(600, id="all", marks=pytest.mark.soak)])
@pytest.mark.parametrize("kind", ["tmpfs", "ext4"])
@pytest.mark.timeout(3000)
def test_a_disk_as_large_as_the_cap_never_runs_out_of_space(
    tmp_path: Path, children: Children, figures: Figures, kind: str, seconds: int
) -> None:
    """Run two pulls with unequal shards in all formats, an evictor and a reader at a cap of five large shards. Check
    ``statvfs`` every 5 ms, and ``du`` repeatedly while all of them are stopped.

    The catalog and the history are charged with their possible growth. To hide nothing, the disk is smaller by that
    amount, except ``CATALOG``, and their bytes are subtracted from the measurement.
    """
    room = FIVE - allowance(FIRST_PAGES) - 2 * HISTORY_LIMIT
    with disk_of(tmp_path / "disk", kind, room + CATALOG) as disk:
        root, ledger, told = disk / "cache", tmp_path / "ledger", tmp_path / "told"
        empty = free(disk)
        make(root, cap=FIVE)
        with open_cache(root) as cache:
            assert cache.usage().total <= OWN
        at_rest = empty - free(disk) - catalog_bytes(root)
        watcher = children.start("watch_disk", root=root, told=told)
        assert children.run("pull", root=root, format="all", shards=0, most=LARGE, wait=0.0).kinds[0] == "CapBlocked"
        with open_cache(root) as cache:
            assert 2 <= len(cache.shards()) <= 6
            assert max(shard.bytes for shard in cache.shards()) <= LARGE_BYTES
        pids = [
            children.start("pull", root=root, format="all", shards=0, most=most, evict=True, ledger=ledger)
            for most in (60, LARGE)
        ]
        pids.append(children.start("evict_for_ever", root=root, seed=35, most=FIVE))
        pids.append(children.start("read", root=root, samples=10**9, seed=35))
        oracle = Oracle(root, ledger)
        pauses, largest, deadline = 0, 0, time.monotonic() + seconds
        try:
            while time.monotonic() < deadline or len(oracle.lines()) < 10:
                time.sleep(0.05)
                stand_still(pids)
                largest = max(largest, du(root) - catalog_bytes(root))
                assert largest <= room
                pauses += 1
                for pid in pids:
                    os.kill(pid, signal.SIGCONT)
                if pauses % 50 == 0:
                    oracle.follow()
        finally:
            for pid in pids:
                os.kill(pid, signal.SIGKILL)
            outcomes = [children.wait(pid) for pid in pids]
            os.kill(watcher, signal.SIGTERM)
            watched = children.wait(watcher)
        assert watched.status == 0, watched
        seen = json.loads(told.read_text())
        most = at_rest + seen["most"]
        shards, samples = len(oracle.lines()), sum(len(line["numbers"]) for line in oracle.lines())
        with open_cache(root) as cache:
            evicted = cache.stats().evicted
        figures(seconds=seconds, statvfs=seen["polls"], longest_gap=f"{1000 * seen['longest']:.0f} ms")
        figures(du_standing_still=pauses, shards_committed=shards, evicted=evicted, samples_acknowledged=samples)
        figures(most_bytes_by_statvfs=most, by_du=largest, of=room)
        assert [outcome.status for outcome in outcomes] == [-signal.SIGKILL] * 4, outcomes
        assert 0.7 * room < most <= room, seen
        assert catalog_bytes(root) < CATALOG
        assert seen["polls"] > pauses > min(seconds, 500)
        oracle.check()
