"""Several programs on one cache, and the death of one of several processes (9, 16, 20, 22, 23, 24)."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from cachetool.api import open_cache
from tests.faults.conftest import Figures
from tests.faults.tracing import Children
from tests.faults.world import OWN, Oracle, make

REPOSITORY = Path(__file__).parents[2]
LAST_PID = Path("/proc/sys/kernel/ns_last_pid")


@pytest.fixture(scope="module")
def objects(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("objects")
    for number in range(120):
        np.save(folder / f"{number:03d}.npy", np.random.default_rng(number).random(500))
    return folder


def start(*words: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, *map(str, words)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=REPOSITORY,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"},
    )


@pytest.mark.parametrize("epochs", [pytest.param(3, id="short"), pytest.param(60, id="all", marks=pytest.mark.soak)])
@pytest.mark.timeout(3000)
def test_a_forking_and_a_spawning_job_share_a_cache_with_pulls_and_evictions(
    tmp_path: Path, children: Children, figures: Figures, epochs: int
) -> None:
    root, ledger = tmp_path / "cache", tmp_path / "ledger"
    cap = OWN + 2_000_000
    make(root, cap=cap)
    assert children.run("pull", root=root, format="all", shards=12, ledger=ledger).status == 0
    others = [children.start("pull", root=root, format="all", shards=0, evict=True, ledger=ledger) for _ in range(2)]
    others.append(children.start("evict_for_ever", root=root, seed=9, least=OWN + 1_000_000, most=cap))
    script = Path(__file__).parent / "scripts" / "training_job.py"
    jobs = {method: start("-W", "ignore", script, method, root, epochs) for method in ("fork", "spawn")}
    oracle = Oracle(root, ledger)
    try:
        while any(job.poll() is None for job in jobs.values()):
            oracle.follow()
            time.sleep(0.2)
    finally:
        for pid in others:
            os.kill(pid, signal.SIGKILL)
            assert children.wait(pid).status == -signal.SIGKILL
    for method, job in jobs.items():
        out, err = job.communicate()
        assert job.returncode == 0, (method, err)
        assert err == "", method
        found = json.loads(out)
        assert found["samples"] >= found["different"] > 100
        figures(**{f"samples_by_{method}": found["samples"], f"different_by_{method}": found["different"]})
    with open_cache(root) as cache:
        assert cache.stats().leases == []
        figures(epochs=epochs, evicted=cache.stats().evicted, errors=0)
    oracle.check()
    assert os.listdir(root / "holders") == []


def test_simultaneous_pulls_of_one_source_fetch_each_object_once(tmp_path: Path, objects: Path) -> None:
    root = tmp_path / "cache"
    with open_cache(root, max_size="20MB") as cache:
        cache.pull(str(objects), samples=10, workers=1, shard_size=20_000)
    words = ("-m", "cachetool", "pull", objects, "--all", "--cache", root, "--shard-size", "20kB", "--json")
    pulls = [start(*words) for _ in range(4)]
    counts = []
    for each in pulls:
        out, err = each.communicate()
        assert each.returncode == 0, err
        counts.append(json.loads(out)["samples"])
    assert sum(counts) == 110
    with open_cache(root) as cache:
        stats = cache.stats()
    assert stats.samples == stats.sources[0]["drawn"] == 120
    assert stats.fetched == sum(path.stat().st_size for path in objects.iterdir())
    assert os.listdir(root / "holders") == []


@pytest.mark.parametrize("who", ["the command", "one worker"])
def test_a_pull_with_a_killed_process_ends_and_returns_everything(tmp_path: Path, objects: Path, who: str) -> None:
    root = tmp_path / "cache"
    pull = start("-m", "cachetool", "pull", objects, "--follow", "--cache", root, "--max-size", "2MB", "--workers", 2)
    workers: list[int] = []
    try:
        while len(workers) < 2:  # both workers and their parent are in the catalog
            assert pull.poll() is None, pull.communicate()
            if (root / "cachetool.json").exists():
                with open_cache(root, create=False) as cache:
                    rows = cache.catalog.rows("SELECT pid FROM holders")
                    workers = [row["pid"] for row in rows if row["pid"] not in (pull.pid, os.getpid())]
        os.kill(pull.pid if who == "the command" else workers[0], signal.SIGKILL)
        _, err = pull.communicate(timeout=60)
        if who == "one worker":
            assert pull.returncode == 1
            assert f"a worker (pid {workers[0]}) was killed by signal 9" in err
        while any(runs(pid) for pid in workers):
            time.sleep(0.05)
    finally:
        pull.kill()
    with open_cache(root) as cache:
        # A child that is just starting may register once more before it notices that its parent has died. It then
        # returns its claims within three seconds.
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            others = cache.catalog.rows("SELECT 1 FROM holders WHERE pid != ?", (os.getpid(),))
            if not (cache.recover() + cache.usage().reserved + len(others)):
                break
            time.sleep(0.05)
        assert cache.catalog.rows("SELECT * FROM jobs") == []
        assert [row["holder"] for row in cache.catalog.rows("SELECT holder FROM claims WHERE holder IS NOT NULL")] == []
        assert cache.usage().reserved == 0
    assert os.listdir(root / "holders") == []


def runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.skipif(not os.access(LAST_PID, os.W_OK), reason="the next pid cannot be chosen here")
def test_a_process_with_the_pid_of_a_dead_holder_is_not_mistaken_for_it(tmp_path: Path, children: Children) -> None:
    root, told = tmp_path / "cache", tmp_path / "told"
    make(root)
    assert children.run("pull", root=root).status == 0
    holder = children.start("hold", root=root, told=told)
    while not told.exists():
        time.sleep(0.01)
    os.kill(holder, signal.SIGKILL)
    children.wait(holder)
    for _ in range(200):  # another process of the machine may take the pid first
        LAST_PID.write_text(str(holder - 1))
        other = subprocess.Popen(["sleep", "60"])
        if other.pid == holder:
            break
        other.kill()
        other.wait()
    else:
        pytest.skip("the pid could not be had again")
    try:
        with open_cache(root) as cache:
            assert cache.stats().leases == []
            assert cache.stats().holders == [] or cache.stats().holders[0]["pid"] == os.getpid()
    finally:
        other.kill()
        other.wait()
