"""The examples run unchanged and print what they promise."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.servers import free_port

EXAMPLES = Path(__file__).parents[2] / "examples"


def run(folder: Path, *line: str | Path, **env: str) -> str:
    """Return the output of a command, which must succeed within four minutes on any machine."""
    done = subprocess.run(
        [sys.executable, *map(str, line)],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1", **env},
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_every_example_is_run_by_some_test() -> None:
    elsewhere = {
        "custom_format.py": "tests/formats/test_custom_format.py",
        "custom_kind.py": "tests/sources/test_custom_kind.py",
        "ray_train_two_nodes.py": "tests/ray/test_train.py",
        "huggingface_growing_cache.py": "tests/trainers/test_huggingface.py",
        "accelerate_growing_cache.py": "tests/trainers/test_accelerate.py",
        "lightning_growing_cache.py": "tests/trainers/test_lightning.py",
        "keras_growing_cache.py": "tests/trainers/test_keras.py",
    }
    here = Path(__file__).read_text()

    for path in EXAMPLES.glob("*.py"):
        if (test := elsewhere.get(path.name)) is not None:
            here += (EXAMPLES.parent / test).read_text()
        assert f'"{path.name}"' in here


@pytest.mark.parametrize("name", ["torch_growing_cache.py", "tensorflow_growing_cache.py"])
def test_every_epoch_of_an_example_trains_on_more_samples(name: str, tmp_path: Path) -> None:
    told = run(tmp_path, EXAMPLES / name, tmp_path / "work")

    epochs = re.findall(r"epoch (\d): (\d+) samples, accuracy (\d\.\d\d)", told)
    assert [(int(epoch), int(samples)) for epoch, samples, _ in epochs] == [(1, 300), (2, 600), (3, 900), (4, 1200)]
    assert float(epochs[0][2]) < float(epochs[-1][2])
    assert float(epochs[-1][2]) > 0.9


@pytest.mark.soak  # tests/trainers/test_torchrun.py tests a launcher by default
def test_two_ranks_train_on_one_cache_that_grows(tmp_path: Path) -> None:
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    told = run(tmp_path, *launcher, EXAMPLES / "torch_ddp.py", tmp_path / "work")

    epochs = [
        (int(samples), float(share)) for samples, share in re.findall(r"(\d+) samples on 2 ranks, accuracy (.+)", told)
    ]
    assert len(epochs) == 4
    assert 300 <= epochs[0][0] <= epochs[-1][0]
    assert epochs[0][1] < epochs[-1][1]


@pytest.mark.soak  # tests/trainers/test_torchrun.py tests a launcher by default
def test_two_nodes_started_by_torchrun_train_on_one_part_each(tmp_path: Path) -> None:
    told = run(tmp_path, EXAMPLES / "torchrun_two_nodes.py", tmp_path / "work")

    epochs = re.findall(r"epoch \d: (\d+) and (\d+) steps, (\d+) samples, accuracy (.+)", told)
    assert len(epochs) == 4
    assert all(first == second for first, second, _, _ in epochs)
    assert 600 <= int(epochs[0][2]) <= int(epochs[-1][2]) <= 1797
    assert float(epochs[0][3]) < float(epochs[-1][3])
    assert {path.name for path in (tmp_path / "work").iterdir()} == {"bucket", "cache0", "cache1"}


def test_the_jobs_for_slurm_and_kubernetes_can_be_parsed() -> None:
    slurm, kubernetes = EXAMPLES / "slurm_pull_and_train.sbatch", EXAMPLES / "kubernetes_pull.yaml"
    subprocess.run(["bash", "-n", slurm], check=True)
    *_, job = pytest.importorskip("yaml").safe_load_all(kubernetes.read_text())
    (container,) = job["spec"]["template"]["spec"]["containers"]
    shell = container["command"][2]
    subprocess.run(["sh", "-n", "-c", shell], check=True)
    assert f"$JOB_COMPLETION_INDEX/{job['spec']['completions']}" in shell
    options = (EXAMPLES.parent / "docs" / "reference" / "commands.md").read_text()
    for text in (slurm.read_text(), shell):
        pull = re.search(r"cachetool (pull (?:.*\\\n)*.*) &\n", text)
        assert pull is not None
        assert all(
            f"`{option}" in options for option in set(re.findall(r"--[a-z-]+", pull[1])) - {"--cache", "--max-size"}
        )


NODES = """
import json, os, sys
from pathlib import Path
import cachetool
from cachetool.loaders.torch import Loader
from torch import distributed

distributed.init_process_group("gloo")
rank = distributed.get_rank()
root = Path(sys.argv[1], f"node{rank}")  # each rank is a node of its own, with a cache of its own
with cachetool.open_cache(root, max_size="20MB") as cache:
    cache.pull(sys.argv[2], samples=(30, 50)[rank], seed=rank)
with Loader(root, batch_size=5, fields=["__key__"]) as loader:
    epochs = [[list(batch["__key__"]) for batch in loader] for _ in range(2)]
Path(sys.argv[1], f"{rank}.json").write_text(json.dumps(epochs))
distributed.destroy_process_group()
"""


@pytest.mark.soak  # test_torch_feed.py tests two ranks on unequal caches by default
def test_ranks_with_a_cache_each_take_the_same_number_of_steps(tmp_path: Path) -> None:
    """All ranks use the least number that any rank can take, as docs/how-to/train-on-several-machines.md says."""
    (tmp_path / "data").mkdir()
    for number in range(100):
        (tmp_path / "data" / f"{number:03d}.json").write_text(json.dumps({"n": number}))
    (tmp_path / "nodes.py").write_text(NODES)
    job = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    with ThreadPoolExecutor(2) as pool:  # as a launcher starts them
        for _ in pool.map(lambda rank: run(tmp_path, "nodes.py", tmp_path, tmp_path / "data", RANK=rank, **job), "01"):
            pass

    ranks = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    assert [[len(epoch) for epoch in epochs] for epochs in ranks] == [[3, 3], [3, 3]]
    for epochs in ranks:
        keys = [[key for batch in epoch for key in batch] for epoch in epochs]
        assert all(len(set(each)) == len(each) for each in keys)
        assert set(keys[0]) != set(keys[1])


def test_a_transform_runs_in_workers_and_is_the_same_in_every_run(tmp_path: Path) -> None:
    told = run(tmp_path, EXAMPLES / "transform_in_workers.py", tmp_path / "work")

    assert [int(n) for n in re.findall(r"epoch \d: 500 samples, made by (\d)", told)] == [1, 1, 3, 3]
    assert "the same in both runs: True" in told
    assert "the same in both epochs: False" in told


@pytest.mark.soak  # test_resume.py and the trainers' tests resume killed jobs by default
def test_a_killed_job_continues_its_epoch_with_the_same_samples(tmp_path: Path) -> None:
    told = run(tmp_path, EXAMPLES / "resume_after_kill.py", tmp_path / "work")

    assert told.splitlines() == [
        "epoch 0: 300 samples, 300 different ones",
        "the job ended with -9; 200 more samples are pulled before it is started again",
        "going on in epoch 1 behind 125 samples",
        "epoch 1: 300 samples, 300 different ones",
        "epoch 2: 500 samples, 500 different ones",
    ]


def test_the_command_line_pulls_from_a_custom_source(tmp_path: Path) -> None:
    """The source is installed as its docstring says: a module on the path, and its entry point."""
    text = (EXAMPLES / "custom_source.py").read_text()
    lines = re.search(r'\[project\.entry-points\."(fsspec\.specs)"\]\n +(\w+) = "([\w:]+)"', text)
    assert lines is not None
    info = tmp_path / "site" / "cachetool_digits-1.0.dist-info"
    info.mkdir(parents=True)
    (tmp_path / "site" / "custom_source.py").write_text(text)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: cachetool-digits\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[{lines[1]}]\n{lines[2]} = {lines[3]}\n")
    env = {
        "PYTHONPATH": f"{EXAMPLES.parent}{os.pathsep}{tmp_path / 'site'}",
        "CACHETOOL_CACHE": str(tmp_path / "cache"),
    }

    run(tmp_path, "-m", "cachetool", "pull", "digits://test/", "--all", "--max-size", "8MB", **env)
    found = run(tmp_path, "-m", "cachetool", "stats", "--json", **env)

    assert '"samples": 297' in found
    assert '"url": "digits://test' in found
