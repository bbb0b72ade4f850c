"""kill -9 at random moments of two pullers and an evictor on one cache, with an oracle outside of it (fault 2).

Also a shard of LMDB in the middle of its writes. Zero failures in n kills bound the rate at about
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
"""Seconds between the start and a kill, at most: the fault itself, not a way to wait for anything."""
WRITING = 0.03
"""Seconds that the writing of a large shard takes at most, at first; from kill to kill it is learnt how long here."""


@pytest.mark.parametrize("rounds", [pytest.param(8, id="short"), pytest.param(500, id="all", marks=pytest.mark.soak)])
@pytest.mark.timeout(7200)
def test_random_kills_lose_nothing_and_commit_nothing_twice(
    tmp_path: Path, children: Children, figures: Figures, rounds: int
) -> None:
    """After every round the whole post-check: nothing acknowledged lost, nothing twice or half, nothing left over,
    charged bytes those on disk, and a repair finds nothing to do."""
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
def test_a_large_shard_is_whole_or_nothing_whenever_its_writer_is_killed(
    tmp_path: Path, children: Children, figures: Figures, kills: int
) -> None:
    """Shards of 1,500 samples in LMDB, killed within a moment of the making of one's file."""
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
