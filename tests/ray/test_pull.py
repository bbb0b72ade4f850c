"""``pull --on ray``: three nodes on one machine, each with its own cache, draw the same samples as one machine."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import cachetool
from cachetool.check.own_files import contradiction
from cachetool.loaders.numpy import Loader
from tests.ray.nodes import NAMES, Nodes, command, committed, keys, keys_at, until, write_numbers

COUNT = 5200
SIZE = {"max_size": "20MB"}
MORE = ["--max-size", "20MB", "--workers", "1"]


@pytest.fixture(scope="module")
def numbers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_numbers(tmp_path_factory.mktemp("source") / "numbers", COUNT)


@pytest.fixture(autouse=True)
def all_there(cluster: Nodes) -> None:
    cluster.revive()


def each(folder: Path) -> dict[str, list[str]]:
    """Return the keys of the samples of every node."""
    return {name: keys_at(folder / name) for name in NAMES}


def slow(numbers: Path, cache: Path, cluster: Nodes) -> list[str]:
    """Start a pull of 400 samples in shards of 57 that takes about four seconds: long enough to kill a process."""
    return command(
        numbers, cache / "{node}", cluster.address,
        "--all", "--shard-size", "4kB", "--max-rate", "20kB", "--workers", "1", "--max-size", "20MB", "--json",
    )  # fmt: skip


@pytest.fixture(scope="module")
def few(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_numbers(tmp_path_factory.mktemp("few") / "few", 400)


def run(words: list[str]) -> subprocess.Popen[str]:
    return subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def once(folder: Path, wanted: int) -> None:
    """Assert that every sample is on exactly one node, that the catalogs agree, and that the driver left no files."""
    found = sorted(key for keys in each(folder).values() for key in keys)
    assert found == [f"{number:05d}" for number in range(wanted)]
    assert {path.name for path in folder.iterdir()} == set(NAMES), "no folder of a driver"
    drawn = 0
    for name in NAMES:
        with cachetool.open_cache(folder / name, create=False) as cache:
            assert contradiction(cache.catalog, cache.layout) is None
            assert cache.catalog.rows("SELECT 1 FROM shards WHERE state <> 'ready'") == []
            assert cache.catalog.rows("SELECT 1 FROM jobs") == []
            (told,) = cache.stats().sources
            assert (told["skipped"], told["coverage"]) == (0, 1.0)
            drawn += told["drawn"]
    assert drawn == wanted


@pytest.mark.soak
def test_folders_have_the_same_numbers_on_all_nodes(cluster: Nodes, tmp_path: Path) -> None:
    for name in ("dog", "cat", "owl"):
        (tmp_path / "photos" / name).mkdir(parents=True)
        for number in range(10):
            np.save(tmp_path / "photos" / name / f"{number}.x.npy", np.array([["cat", "dog", "owl"].index(name)]))
    words = [tmp_path / "photos", tmp_path / "{node}", cluster.address, "--all", "--shard-size", "64", *MORE]
    done = subprocess.run(command(*words, "--label-from-folder", "int"), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    seen = 0
    for name in NAMES:
        with Loader(tmp_path / name, batch_size=4, workers=0) as loader:
            assert loader.classes == ("cat", "dog", "owl")
            for batch in loader:
                assert batch["x"][:, 0].tolist() == batch["label"].tolist()
                seen += len(batch["label"])
    assert seen == 30


def test_the_nodes_draw_the_same_samples_as_one_machine_and_each_is_on_one_node(
    numbers: Path, tmp_path: Path, cluster: Nodes
) -> None:
    with cachetool.open_cache(tmp_path / "local", **SIZE) as cache:
        cache.pull(str(numbers), samples=5000, seed=3)
        local = keys(cache)
    with cachetool.open_cache(tmp_path / "{node}", **SIZE) as cache:
        told = cache.pull(str(numbers), samples=5000, seed=3, on="ray", address=cluster.address)
    found = each(tmp_path)

    assert sorted(key for keys in found.values() for key in keys) == sorted(local)
    assert told.samples == 5000
    assert {row["node"]: row["samples"] for row in told.nodes} == {name: len(keys) for name, keys in found.items()}


@pytest.mark.soak
def test_replicas_have_the_same_samples_and_digests_on_every_node(
    numbers: Path, tmp_path: Path, cluster: Nodes
) -> None:
    with cachetool.open_cache(tmp_path / "{node}", **SIZE) as cache:
        for samples in (200, 100):  # the second pull continues after the first
            told = cache.pull(
                str(numbers),
                samples=samples,
                seed=3,
                shard_size="4kB",
                on="ray",
                address=cluster.address,
                placement="replicate",
            )
            assert told.samples == samples
    digests = []
    for name in NAMES:
        with cachetool.open_cache(tmp_path / name, create=False) as cache:
            digests.append(sorted(shard.content for shard in cache.shards()))
            assert contradiction(cache.catalog, cache.layout) is None
    with cachetool.open_cache(tmp_path / "local", **SIZE) as cache:
        cache.pull(str(numbers), samples=300, seed=3)
        local = keys(cache)

    assert digests[0] == digests[1] == digests[2]
    assert {name: sorted(found) for name, found in each(tmp_path).items()} == dict.fromkeys(NAMES, sorted(local))


@pytest.mark.soak
def test_the_samples_of_a_lost_node_are_drawn_by_the_others_and_a_returning_node_takes_part_again(
    few: Path, tmp_path: Path, cluster: Nodes
) -> None:
    process = run(slow(few, tmp_path, cluster))
    until(lambda: committed(tmp_path / "b") > 0 or process.poll() is not None)
    cluster.kill("b")
    until(lambda: committed(tmp_path / "c") > 60 or process.poll() is not None)
    cluster.start("b")
    out, error = process.communicate()

    assert process.returncode == 0, error
    assert "lost" in [row["state"] for row in json.loads(out)["nodes"]]
    assert "node b was lost" in error
    with cachetool.open_cache(tmp_path / "{node}") as cache:
        cache.pull(str(few), all=True, on="ray", address=cluster.address)  # the node may have returned too late
    once(tmp_path, 400)


@pytest.mark.soak
def test_a_pull_can_be_repeated_after_its_driver_died(few: Path, tmp_path: Path, cluster: Nodes) -> None:
    process = run(slow(few, tmp_path, cluster))
    until(lambda: committed(tmp_path / "c") > 0 or process.poll() is not None)
    assert process.poll() is None, process.communicate()
    process.kill()
    process.communicate()
    again = run(slow(few, tmp_path, cluster))
    _, error = again.communicate()

    assert again.returncode == 0, error
    once(tmp_path, 400)


@pytest.mark.soak
def test_ctrl_c_leaves_no_partial_work(few: Path, tmp_path: Path, cluster: Nodes) -> None:
    process = run(slow(few, tmp_path, cluster))
    until(lambda: min(committed(tmp_path / name) for name in NAMES) > 0 or process.poll() is not None)
    process.send_signal(signal.SIGINT)
    _, error = process.communicate()

    assert process.returncode == 130
    assert error.splitlines()[-1].startswith("error: interrupted")
    for name in NAMES:
        with cachetool.open_cache(tmp_path / name, create=False) as cache:
            for table in ("jobs", "claims WHERE holder IS NOT NULL", "shards WHERE state <> 'ready'"):
                assert cache.catalog.rows(f"SELECT 1 FROM {table}") == [], (name, table)
    with cachetool.open_cache(tmp_path / "{node}") as cache:
        cache.pull(str(few), all=True, on="ray", address=cluster.address)
    once(tmp_path, 400)


@pytest.mark.soak  # tests/cluster/test_pull.py tests this without nodes
def test_a_further_pass_skips_the_samples_of_all_nodes(few: Path, tmp_path: Path, cluster: Nodes) -> None:
    place = {"on": "ray", "address": cluster.address}
    with cachetool.open_cache(tmp_path / "{node}", **SIZE) as cache:
        cache.pull(str(few), all=True, shard_size="4kB", **place)
        with cachetool.open_cache(tmp_path / "b", create=False) as evicted:
            evicted.evict(evicted.usage().total - 20_000)
        lacking = 400 - sum(len(keys) for keys in each(tmp_path).values())
        assert 0 < lacking < 400
        told = cache.pull(str(few), samples=350, shard_size="4kB", **place)

    assert told.samples == lacking
    once(tmp_path, 400)


@pytest.mark.soak
def test_follow_renews_the_caches_of_all_nodes_until_it_is_stopped(
    numbers: Path, tmp_path: Path, cluster: Nodes
) -> None:
    words = ["--follow", "--renew", "0.5", "--shard-size", "4kB", "--workers", "1", "--max-size", "1900kB"]
    process = run(command(numbers, tmp_path / "{node}", cluster.address, *words))

    def evicted(name: str) -> int:
        """Return the evictions of a node that trains an epoch when its cache is full."""
        if keys_at(tmp_path / name):
            with Loader(tmp_path / name, batch_size=64, workers=0, rank=0, world_size=1) as loader:
                assert sum(len(batch["x"]) for batch in loader) > 0
        with cachetool.open_cache(tmp_path / name) as cache:
            return cache.stats().evicted

    until(lambda: min(map(evicted, NAMES)) > 3 or process.poll() is not None)
    process.send_signal(signal.SIGINT)
    _, error = process.communicate()

    assert process.returncode == 130, error
    found = [key for keys in each(tmp_path).values() for key in keys]
    assert len(found) == len(set(found))
    for name in NAMES:
        with cachetool.open_cache(tmp_path / name, create=False) as cache:
            assert cache.usage().total <= 1_900_000
            assert contradiction(cache.catalog, cache.layout) is None


def test_nodes_that_share_a_folder_are_refused_in_one_line(few: Path, tmp_path: Path, cluster: Nodes) -> None:
    with (
        cachetool.open_cache(tmp_path / "one", **SIZE) as cache,
        pytest.raises(cachetool.UsageError, match=r"^nodes \w and \w share one cache folder.*\{node\}") as refused,
    ):
        cache.pull(str(few), samples=10, on="ray", address=cluster.address)
    assert len(str(refused.value).splitlines()) == 1


def test_a_wrong_address_is_one_line_and_exit_code_3(few: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        command(few, tmp_path / "{node}", "127.0.0.1:9", "--samples", "10", "--quiet"),
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == 3
    assert done.stderr.count("\n") == 1
    assert done.stderr.startswith("error: no Ray cluster answers at 127.0.0.1:9: ")


def test_without_ray_the_extra_is_named_in_one_line(few: Path, tmp_path: Path) -> None:
    words = command(few, tmp_path / "{node}", "auto", "--samples", "10")[3:]
    code = "import sys; sys.modules['ray'] = None; from cachetool.cli.app import run; sys.exit(run(sys.argv[1:]))"
    done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, check=False)

    assert done.returncode == 2
    assert done.stderr == (
        "error: work on several nodes (--on ray) needs the extra 'ray': pip install 'cachetool[ray]'\n"
    )


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--on", "dask"], "--on must be local or ray, got 'dask'"),
        (["--placement", "split"], "--placement needs --on ray"),
        (["--address", "auto"], "--address needs --on ray"),
        (["--on", "ray", "--placement", "both"], "--placement must be split or replicate, got 'both'"),
        (["--on", "ray", "--cache", "/data/{nod}"], "cache /data/{nod} has braces other than {node}"),
        (["--on", "ray", "--start-early"], "--start-early cannot be used with --on ray"),
        (["--on", "ray", "--address", "ray://head:10001"], "--address ray://head:10001 is an address of Ray Client"),
        (["--on", "ray", "--address", "head"], "--address must be HOST:PORT, auto or local, got 'head'"),
    ],
)
def test_options_that_make_no_sense_are_refused(words: list[str], said: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "cachetool", "pull", str(tmp_path), "--cache", str(tmp_path / "cache"), *words],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ},
    )

    assert done.returncode == 2
    assert done.stderr.startswith(f"error: {said}")
