"""Draws under kill -9: pulls of a real source whose whole process trees or single workers are killed at any moment.

After every kill the coverage in ``stats`` equals the committed samples exactly. After the pass every sample is in the
cache exactly once. The random moment of a kill is the fault itself, not a way to wait for something.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

import cachetool
from cachetool.cache import CacheDir
from cachetool.check.own_files import contradiction
from cachetool.formats import get_format
from cachetool.formats.shard import open_shard

REPOSITORY = Path(__file__).parents[2]


def keys(cache: CacheDir) -> list[str]:
    """Return the key of every sample in the cache."""
    found: list[str] = []
    for shard in cache.shards():
        with open_shard(shard.path, get_format(shard.format), shard.schema) as reader:
            block = reader.take(np.arange(shard.samples))
            found += [block.sample(at)["__key__"] for at in range(len(block))]
    return found


def children(pid: int) -> list[int]:
    with contextlib.suppress(OSError):
        return [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return []


def start(source: Path, root: Path, workers: int, *more: str) -> subprocess.Popen[bytes]:
    """Start a pull that is slow enough for a kill before the end of the pass."""
    command = [sys.executable, "-m", "cachetool", "pull", str(source), "--cache", str(root), "--workers", str(workers)]
    options = ["--shard-size", "15kB", "--all", "--seed", "4", "--max-size", "40MB", "--max-rate", "300kB", "--quiet"]
    return subprocess.Popen(
        [*command, *options, *more],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


def kill_some(process: subprocess.Popen[bytes], rng: random.Random) -> None:
    """Kill the command, one of its workers, or all of them."""
    victims = [process.pid, *children(process.pid)]
    chosen = rng.choice([victims, [process.pid], [rng.choice(victims)]])
    for pid in chosen:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.wait()
    for (
        pid
    ) in victims:  # the others end by themselves: two trees of a round must not overlap, so that the counts are exact
        while Path(f"/proc/{pid}").exists():
            time.sleep(0.01)


def committed(root: Path) -> int:
    with contextlib.suppress(cachetool.CacheToolError), cachetool.open_cache(root, create=False) as cache:
        return sum(shard.samples for shard in cache.shards())
    return 0


@pytest.mark.parametrize("workers", [1, 2, 3, 4])
@pytest.mark.parametrize("grows", [False, True], ids=["fixed", "refreshed"])
@pytest.mark.parametrize("rounds", [pytest.param(n, id=str(n), marks=pytest.mark.soak) for n in (1, 10)])
@pytest.mark.timeout(3000)
def test_a_pass_draws_every_sample_exactly_once_despite_any_kill(
    digits: Path, tmp_path: Path, rounds: int, workers: int, grows: bool
) -> None:
    for number in range(rounds):
        rng = random.Random(100 * number + workers)
        root, source = tmp_path / f"cache{number}", tmp_path / f"source{number}"
        source.mkdir()
        names = sorted({path.name.partition(".")[0] for path in digits.iterdir()})[:600]
        for name in names[: 500 if grows else 600]:
            for end in ("npy", "json"):
                os.link(digits / f"{name}.{end}", source / f"{name}.{end}")
        kills, most, process = 0, 4 if rounds > 1 else 2, start(source, root, workers)
        before = 0
        while kills < most:
            # Each round must commit some samples before its kill; otherwise only starts would be killed.
            while process.poll() is None and committed(root) <= before:
                time.sleep(0.01)
            time.sleep(rng.random() * 0.3)
            if process.poll() is not None:
                break
            kill_some(process, rng)
            kills += 1
            with cachetool.open_cache(root) as cache:
                found = keys(cache)
                told = cache.stats().sources[0]
                assert len(found) == len(set(found)) == told["drawn"], "coverage is what was committed"
                assert contradiction(cache.catalog, cache.layout) is None
            before = len(found)
            more = []
            if grows and kills == most // 2:
                for name in names[500:]:
                    for end in ("npy", "json"):
                        os.link(digits / f"{name}.{end}", source / f"{name}.{end}")
            if grows and kills >= most // 2:
                more = ["--refresh"]
            process = start(source, root, workers, *more)
        assert process.wait() == 0
        with cachetool.open_cache(root) as cache:
            if grows:
                cache.pull(str(source), all=True, refresh=True)
            assert sorted(keys(cache)) == names
            told = cache.stats().sources[0]
            assert (told["drawn"], told["skipped"], told["coverage"]) == (600, 0, 1.0)
        assert kills, "nothing was killed"


def test_the_same_seed_draws_the_same_samples_with_any_number_of_workers(digits: Path, tmp_path: Path) -> None:
    drawn = []
    for workers in (1, 2, 4):
        with cachetool.open_cache(tmp_path / str(workers), max_size="40MB") as cache:
            cache.pull(str(digits), samples=333, seed=9, workers=workers, shard_size=15_000 // workers)
            drawn.append(sorted(keys(cache)))
    assert drawn[0] == drawn[1] == drawn[2]
    assert len(set(drawn[0])) == 333
