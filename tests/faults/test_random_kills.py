"""kill -9 at random moments of two pulls and an evictor on one cache, checked by an oracle outside the cache (fault 2).

A shard of LMDB is also killed in the middle of its writes. Zero failures in n kills bound the failure rate at about
3/n: the soak makes 500 rounds of three kills, and 200 kills of LMDB writers alone.
"""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path

import pytest

from cachetool.cache import open_cache
from tests.faults.conftest import Figures
from tests.faults.tracing import Children
from tests.faults.world import Oracle, make

LONGEST = 0.4
"""Longest time in seconds between the start and a kill. The random moment is the fault itself, not a way to wait."""
WRITING = 0.03
"""First estimate of the longest time in seconds to write a large shard. Each kill refines it for this machine."""


@pytest.mark.parametrize("rounds", [pytest.param(8, id="short"), pytest.param(500, id="all", marks=pytest.mark.soak)])
@pytest.mark.timeout(7200)
def test_random_kills_lose_nothing_and_commit_nothing_twice(
    tmp_path: Path, children: Children, figures: Figures, rounds: int
) -> None:
    """After every round: nothing acknowledged is lost, no sample is doubled or partial, no file is left over, the
    charged bytes are those on the disk, and a repair has nothing to do.
    """
    root, ledger = tmp_path / "cache", tmp_path / "ledger"
    make(root)
    oracle = Oracle(root, ledger)
    rng = random.Random(2)
    visible, kills = [], 0
    for number in range(rounds):
        arguments = {"root": root, "ledger": ledger, "format": "all", "shards": 0, "evict": True}
        running = [children.start("pull", **arguments) for _ in range(2)]
        running.append(children.start("evict_for_ever", root=root, seed=number))
        rng.shuffle(running)
        while running:
            time.sleep(rng.random() * LONGEST)
            for _ in range(rng.randint(1, len(running))):
                kill(children, running.pop())
                kills += 1
        try:
            visible.append(oracle.check())
        except AssertionError as error:
            raise AssertionError(f"round {number}: {error}") from error

    acknowledged = sum(len(line["numbers"]) for line in oracle.lines())
    with open_cache(root) as cache:
        evicted = cache.stats().evicted
    figures(rounds=rounds, kills=kills, samples_acknowledged=acknowledged, lost=0, twice=0, shards_evicted=evicted)
    assert acknowledged > 12 * rounds
    assert max(visible) < acknowledged, "shards were evicted on the way"


@pytest.mark.parametrize("kills", [pytest.param(12, id="short"), pytest.param(200, id="all", marks=pytest.mark.soak)])
@pytest.mark.timeout(3000)
def test_a_large_shard_is_complete_or_absent_whenever_its_writer_is_killed(
    tmp_path: Path, children: Children, figures: Figures, kills: int
) -> None:
    """Shards of 1,500 samples in LMDB; the kill comes shortly after the shard's file was created."""
    root, ledger = tmp_path / "cache", tmp_path / "ledger"
    make(root, cap="12MB")
    oracle = Oracle(root, ledger)
    rng = random.Random(65)
    halves, most = 0, WRITING
    for number in range(kills):
        pid = children.start("pull", root=root, ledger=ledger, format="lmdb", shards=0, most=1500, evict=True)
        while not half_written(root):
            pass
        time.sleep(rng.random() * most)
        kill(children, pid)
        in_time = half_written(root)
        halves += in_time
        most *= 1.25 if in_time else 0.5
        try:
            oracle.check(library=number % 2 == 1)
        except AssertionError as error:
            raise AssertionError(f"kill {number}: {error}") from error
    figures(kills=kills, with_a_half_written_file=halves, shards_acknowledged=len(oracle.lines()), lost=0)
    assert halves > kills // 4


def half_written(root: Path) -> bool:
    return any(not (path.parent / "shard.json").exists() for path in root.glob("shards/*/data.lmdb"))


def kill(children: Children, pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
    outcome = children.wait(pid)
    assert outcome.status == -signal.SIGKILL, outcome
