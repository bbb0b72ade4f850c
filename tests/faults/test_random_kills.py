"""kill -9 at random moments of two pullers and an evictor on one cache, with an oracle outside of it (fault 2).

Also what system calls do not show, such as LMDB's writes through a memory map. Zero failures in n rounds bounds the
rate at about 3/n: the soak makes 250 rounds of three kills.
"""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path

import pytest

from tests.faults.tracing import Children
from tests.faults.world import Oracle, make

LONGEST = 0.4
"""Seconds between the start and a kill, at most: the fault itself, not a way to wait for anything."""


@pytest.mark.parametrize("rounds", [pytest.param(8, id="short"), pytest.param(250, id="all", marks=pytest.mark.soak)])
@pytest.mark.timeout(3000)
def test_random_kills_lose_nothing_and_commit_nothing_twice(tmp_path: Path, children: Children, rounds: int) -> None:
    root, ledger = tmp_path / "cache", tmp_path / "ledger"
    make(root)
    oracle = Oracle(root, ledger)
    rng = random.Random(2)
    visible = []
    for number in range(rounds):
        arguments = {"root": root, "ledger": ledger, "format": "all", "shards": 0, "evict": True}
        running = [children.start("pull", **arguments) for _ in range(2)]
        running.append(children.start("evict_for_ever", root=root, seed=number))
        rng.shuffle(running)
        while running:
            time.sleep(rng.random() * LONGEST)
            for _ in range(rng.randint(1, len(running))):
                pid = running.pop()
                os.kill(pid, signal.SIGKILL)
                outcome = children.wait(pid)
                assert outcome.status == -signal.SIGKILL, outcome
        try:
            visible.append(oracle.check())
        except AssertionError as error:
            raise AssertionError(f"round {number}: {error}") from error

    acknowledged = sum(len(line["numbers"]) for line in oracle.lines())
    assert acknowledged > 12 * rounds
    assert max(visible) < acknowledged, "shards were evicted on the way"
