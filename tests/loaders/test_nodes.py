"""Two nodes of two ranks: each cache holds a part of the source, and only the ranks of its node divide it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cachetool
from cachetool.core.errors import UsageError
from cachetool.loaders.ranks import on_node, require_node
from tests.loaders.conftest import REPOSITORY
from tests.servers import free_port

SAMPLES = 60


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Return the keys that four processes read: two on a cache with 30 samples, two on one with 20 and soon 30
    samples.
    """
    folder = tmp_path_factory.mktemp("nodes")
    (folder / "source").mkdir()
    for number in range(SAMPLES):
        np.save(folder / "source" / f"{number:03d}.npy", np.full(30, number, "f4"))
    for node, samples in enumerate((60, 40)):  # of all nodes together
        with cachetool.open_cache(folder / f"cache{node}", max_size="20MB") as cache:
            cache.pull(folder / "source", samples=samples, part=f"{node}/2", shard_size=2000)
    script = Path(__file__).parent / "scripts" / "torch_nodes.py"
    job = {
        "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()),
        "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    processes = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", script, folder / f"cache{rank // 2}", folder / "source", str(SAMPLES)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **job, "RANK": str(rank), "LOCAL_RANK": str(rank % 2)},
        )
        for rank in range(4)
    ]
    outputs = [process.communicate(timeout=200) for process in processes]
    for process, (_, err) in zip(processes, outputs, strict=True):
        assert process.returncode == 0, err
    return [json.loads(out.splitlines()[-1]) for out, _ in outputs]


def read(*ranks: list[list[str]]) -> list[str]:
    """Return all keys that these ranks read in an epoch."""
    return [key for batches in ranks for batch in batches for key in batch]


def test_no_sample_is_read_twice_and_all_ranks_take_the_steps_of_the_smallest_cache(
    ranks: list[dict[str, Any]],
) -> None:
    epochs = list(zip(*(rank["epochs"] for rank in ranks), strict=True))
    assert [[len(batches) for batches in epoch] for epoch in epochs] == [[3] * 4, [3] * 4, [4] * 4, [4] * 4]
    for epoch in epochs:
        keys = read(*epoch)
        assert len(set(keys)) == len(keys)
    for epoch in epochs[:2]:
        assert len(read(*epoch[2:])) == 20, "the smaller cache is read whole"
        assert len(read(*epoch[:2])) >= 22, "the larger one as far as the steps reach"
    assert set(read(*epochs[0][:2])) != set(read(*epochs[1][:2]))


def test_an_epoch_after_growth_and_a_resumed_epoch_have_all_samples(ranks: list[dict[str, Any]]) -> None:
    for number in (2, 3):
        epoch = [rank["epochs"][number] for rank in ranks]
        assert sorted(read(*epoch)) == sorted(f"{number:03d}" for number in range(SAMPLES))


def test_the_sampler_of_a_dataset_divides_samples_and_agrees_on_steps_too(ranks: list[dict[str, Any]]) -> None:
    epoch = [rank["sampler"] for rank in ranks]
    assert [len(read(batches)) for batches in epoch] == [10] * 4
    assert len(set(read(*epoch))) == 40


def test_given_ranks_are_used_and_unknown_ranks_are_refused(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert len(rank["refused"]) == 2
        assert all("set their rank= and world_size=" in line for line in rank["refused"])
    assert len(set(read(*(rank["told"] for rank in ranks)))) == SAMPLES


@pytest.mark.parametrize(
    ("environment", "node"),
    [
        ({"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "WORLD_SIZE": "4"}, (1, 2)),
        ({"SLURM_LOCALID": "3", "SLURM_NTASKS_PER_NODE": "4", "SLURM_NTASKS": "4"}, (3, 4)),
        ({"LOCAL_RANK": "1", "WORLD_SIZE": "4"}, None),
        ({"LOCAL_RANK": "2", "LOCAL_WORLD_SIZE": "2", "WORLD_SIZE": "4"}, None),
        # Each Slurm task has started two processes itself.
        ({"SLURM_LOCALID": "0", "SLURM_NTASKS_PER_NODE": "1", "SLURM_NTASKS": "2"}, None),
        ({}, None),
    ],
)
def test_the_launchers_environment_tells_the_ranks_of_this_node(
    environment: dict[str, str], node: tuple[int, int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in (
        "LOCAL_RANK",
        "LOCAL_WORLD_SIZE",
        "WORLD_SIZE",
        "SLURM_LOCALID",
        "SLURM_NTASKS_PER_NODE",
        "SLURM_NTASKS",
    ):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert on_node(4) == node
    assert on_node(1) == (0, 1)
    if node is None:
        with pytest.raises(UsageError, match=r"LOCAL_RANK.*SLURM_LOCALID"):
            require_node(node)
