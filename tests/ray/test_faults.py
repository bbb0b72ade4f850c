"""A pull over three nodes while nodes and the command die at any moment and return.

The short forms are in ``test_pull.py``; here all of it happens to one pass, round after round.
"""

from __future__ import annotations

import random
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

import cachetool
from cachetool.check.own_files import contradiction
from tests.ray.nodes import NAMES, Nodes, command, committed, keys_at, until, write_numbers

COUNT = 2000


def all_committed(folder: Path) -> int:
    return sum(committed(folder / name) for name in NAMES)


@pytest.mark.soak
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("rounds", [3])
def test_every_sample_is_on_exactly_one_living_node_after_any_deaths(
    rounds: int, tmp_path: Path, cluster: Nodes, record_property: Callable[[str, object], None]
) -> None:
    source = write_numbers(tmp_path / "source", COUNT)
    kills = {"nodes": 0, "drivers": 0}
    for number in range(rounds):
        rng = random.Random(number)
        folder = tmp_path / f"round{number}"
        cluster.revive()
        words = command(
            source, folder / "{node}", cluster.address,
            "--all", "--shard-size", "4kB", "--max-rate", "30kB", "--workers", "1", "--max-size", "20MB",
        )  # fmt: skip

        def start(words: list[str] = words) -> subprocess.Popen[str]:
            return subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

        process = start()
        plan = ["b", "driver", "c", "driver"]
        rng.shuffle(plan)
        for victim in plan:
            before = all_committed(folder)
            more = rng.randrange(20, 200)
            until(
                lambda folder=folder, before=before, more=more, running=process: (
                    all_committed(folder) > before + more or running.poll() is not None
                )
            )
            if process.poll() is not None:
                break
            if victim == "driver":
                process.kill()
                process.communicate()
                kills["drivers"] += 1
                process = start()
            else:
                cluster.kill(victim)
                kills["nodes"] += 1
                if rng.random() < 0.7:
                    cluster.start(victim)
        _, error = process.communicate()
        assert process.returncode == 0, error
        away = [name for name in NAMES if name not in cluster.living]
        if not away:  # a node that returned after everything was drawn reports its samples now
            again = start()
            _, error = again.communicate()
            assert again.returncode == 0, error
        living = [name for name in NAMES if name not in away]
        found = sorted(key for name in living for key in keys_at(folder / name))
        assert found == [f"{n:05d}" for n in range(COUNT)], f"round {number}, plan {plan}, away {away}"
        drawn = 0
        for name in living:
            with cachetool.open_cache(folder / name, create=False) as cache:
                assert contradiction(cache.catalog, cache.layout) is None
                (told,) = cache.stats().sources
                assert (told["skipped"], told["coverage"]) == (0, 1.0)
                drawn += told["drawn"]
        assert drawn == COUNT
    for what, count in kills.items():
        record_property(f"{what} killed", count)
    assert kills["nodes"] >= 2
    assert kills["drivers"]
