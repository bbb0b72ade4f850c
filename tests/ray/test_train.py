"""Training over nodes: each rank reads the cache of its node, with as many steps as all ranks can take."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from cachetool.cache import open_cache
from tests.loaders.numbered import KEYED, put
from tests.servers import free_port

pytestmark = pytest.mark.soak  # one test of a pull and one of a loader run on a real cluster by default

EXAMPLE = Path(__file__).parents[2] / "examples" / "ray_train_two_nodes.py"
EPOCHS = 5
FIRST = {"a": range(100), "b": range(1000, 1030)}
"""The samples in the cache of each node when training begins."""
MORE = {"a": 7, "b": 25}
"""The samples that are added in each epoch."""


@ray.remote(num_cpus=0)
class Rank:
    """One rank of a job, on a node."""

    def __init__(self, rank: int, port: int, root: str) -> None:
        import torch

        os.environ["OMP_NUM_THREADS"] = "1"
        torch.distributed.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
        self.root = root

    def train(self, node: str, whole: bool) -> list[list[list[int]]]:
        """Return the numbers of each batch of each epoch. Commit a shard in the middle of each epoch."""
        from torch import distributed

        from cachetool.loaders.ray import cache_here
        from cachetool.loaders.torch import Loader

        place, epochs = cache_here(self.root), []
        assert place.endswith(node)
        own = {"rank": 0, "world_size": 1, "agree": True} if whole else {}
        coming = max(FIRST[node]) + 1
        with open_cache(place) as cache, Loader(place, batch_size=4, fields=["number"], workers=1, **own) as loader:
            for _ in range(EPOCHS):
                epoch = []
                for step, batch in enumerate(loader):
                    epoch.append(batch["number"].tolist())
                    distributed.barrier()  # as the gradients of a training step do
                    if step == 1:
                        put(cache, range(coming, coming + MORE[node]), schema=KEYED)
                        coming += MORE[node]
                epochs.append(epoch)
        return epochs


@pytest.mark.parametrize("whole", [True, False], ids=["each its cache", "a share of it"])
def test_ranks_on_two_nodes_take_the_same_steps_while_unequal_caches_grow(
    joined: str, tmp_path: Path, whole: bool
) -> None:
    ids = {row["NodeName"]: row["NodeID"] for row in ray.nodes() if row["Alive"]}
    for node, numbers in FIRST.items():
        with open_cache(tmp_path / node, max_size="8MB") as cache:
            put(cache, numbers, schema=KEYED)
    port = free_port()
    ranks = [
        Rank.options(scheduling_strategy=NodeAffinitySchedulingStrategy(ids[node], soft=False)).remote(
            rank, port, f"{tmp_path}/{{node}}"
        )
        for rank, node in enumerate(FIRST)
    ]

    work = [rank.train.remote(node, whole) for rank, node in zip(ranks, FIRST, strict=True)]
    found: list[list[list[list[int]]]] = ray.get(work, timeout=200)
    for rank in ranks:
        ray.kill(rank)

    steps = [[len(epoch) for epoch in epochs] for epochs in found]
    assert steps[0] == steps[1], "no rank waits for another for ever"
    share = 1 if whole else 2
    have = [30 + 25 * epoch for epoch in range(EPOCHS)]  # of node b, which has fewer samples until it overtakes node a
    other = [100 + 7 * epoch for epoch in range(EPOCHS)]
    assert steps[0] == [-(-min(each) // (4 * share)) for each in zip(have, other, strict=True)]
    assert steps[0] == sorted(steps[0])
    assert steps[0][0] < steps[0][-1], "later epochs have more"
    for epoch in range(EPOCHS):
        numbers = [number for epochs in found for batch in epochs[epoch] for number in batch]
        assert len(set(numbers)) == len(numbers), "no sample twice"
    assert max(number for batch in found[1][-1] for number in batch) >= 1030, "what came meanwhile is trained on"


@pytest.mark.soak
def test_the_example_trains_on_two_nodes_whose_caches_grow(tmp_path: Path) -> None:
    pytest.importorskip("pandas", reason="Ray Train needs it")
    done = subprocess.run(
        [sys.executable, EXAMPLE, tmp_path / "work"],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1", "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    lines: list[Any] = [line for line in done.stdout.splitlines() if line.startswith("epoch ")]
    assert len(lines) == EPOCHS
    for line in lines:
        left, _, right = line.split(": ")[1].split(" steps")[0].partition(" and ")
        assert left == right
    samples = [int(line.split("steps, ")[1].split()[0]) for line in lines]
    accuracy = [float(line.rsplit(" ", 1)[1]) for line in lines]
    assert samples[0] < samples[-1]
    assert accuracy[0] < accuracy[-1]
