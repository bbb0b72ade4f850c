"""``convert --on ray``: the nodes together write the same files as one machine, and each node converts its own
cache.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cachetool
from cachetool.cache import open_cache
from cachetool.cluster.engine import RayEngine
from cachetool.cluster.spread import Spread
from cachetool.conversion.options import ConvertOptions
from cachetool.conversion.run import content_digest, convert
from cachetool.core.errors import UsageError
from cachetool.proc.parent import LocalEngine
from cachetool.proc.scratch import WorkFolder
from cachetool.proc.task import Task
from tests.cli.conftest import Ran
from tests.loaders.numbered import put
from tests.ray.nodes import Nodes

pytestmark = pytest.mark.soak  # one test of a pull and one of a loader run on a real cluster by default

Command = Callable[..., Ran]


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a file of 600 rows of 1,200 bytes."""
    path = tmp_path_factory.mktemp("input") / "rows.npy"
    np.save(path, np.arange(600 * 300, dtype=np.float32).reshape(600, 300))
    return path


def test_all_nodes_together_write_the_same_files_as_one_machine(command: Command, rows: Path, tmp_path: Path) -> None:
    local = cachetool.convert(rows, to="zarr", out=tmp_path / "local", shard_size="100KB")

    ran = command(
        "convert",
        rows,
        "--to",
        "zarr",
        "--out",
        tmp_path / "out",
        "--shard-size",
        "100KB",
        "--workers",
        "1",
        "--verify",
        "--json",
    )

    assert ran.code == 0, ran.stderr
    assert ran.document["digest"] == local.digest
    assert (ran.document["samples"], ran.document["shards"]) == (600, 8)
    assert sorted(os.listdir(tmp_path / "out")) == sorted(os.listdir(tmp_path / "local"))
    about = [json.loads((tmp_path / name / "dataset.json").read_text()) for name in ("local", "out")]
    assert about[0] == about[1]


def test_each_node_converts_its_own_cache(command: Command, tmp_path: Path) -> None:
    place, before = f"{tmp_path}/{{node}}", {}
    for first, node in enumerate("abc"):
        with open_cache(tmp_path / node, max_size="8MB") as cache:
            put(cache, range(100 * first, 100 * first + 10 * (first + 1)))
            before[node] = content_digest(cache.shards())

    there = command("convert", "--to", "tfrecord", "--cache", place, "--json")
    files = command("convert", "--to", "hdf5", "--cache", place, "--out", f"{tmp_path}/files/{{node}}")

    assert (there.code, files.code) == (0, 0), there.stderr + files.stderr
    assert {node: each["digest"] for node, each in there.document["nodes"].items()} == before
    assert there.document["sum"] == {"nodes": 3, "shards": 3, "samples": 60} | {
        "bytes": sum(each["bytes"] for each in there.document["nodes"].values())
    }
    for node in "abc":
        with open_cache(tmp_path / node) as cache:
            assert {shard.format for shard in cache.shards()} == {"tfrecord"}
        assert json.loads((tmp_path / "files" / node / "dataset.json").read_text())["content"] == before[node]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (["rows.npy"], "name a folder that all nodes see with --out"),
        (["--out", "one"], "name one for each node: --out one/{node}"),
        (["none.npy", "--out", "out"], "none.npy does not exist"),
    ],
)
def test_options_that_do_not_work_on_nodes_are_refused(
    command: Command, rows: Path, line: list[str], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(rows.parent)

    refused = command("convert", *line, "--to", "zarr")

    assert refused.code == 2
    assert said in refused.error


def test_a_node_without_access_to_the_folder_is_named(tmp_path: Path, rows: Path) -> None:
    work = WorkFolder.make(tmp_path, ".out.partial-", "out")
    arguments = {"folder": str(work.path), "to": "zarr", "compression": None, "verify": False}
    described = {"description": {"kind": "files", "path": str(rows), "options": {}}, "todo": []}

    with pytest.raises(UsageError, match=r"does not see .*; choose an --out"):
        LocalEngine().run(
            [Task("cachetool.conversion.to_files:write_parts", {**arguments, "token": "0" * 32, **described})]
        )
    described["description"]["path"] = str(tmp_path / "none.npy")
    with pytest.raises(UsageError, match=r"has no .*none\.npy; choose an INPUT that every node can read"):
        LocalEngine().run(
            [Task("cachetool.conversion.to_files:write_parts", {**arguments, "token": work.token, **described})]
        )


def test_parts_of_a_lost_node_are_written_by_others(
    engine: RayEngine, cluster: Nodes, rows: Path, tmp_path: Path
) -> None:
    """The node is lost while parts are written. The files are the same, and no part is written twice or partially."""
    local = cachetool.convert(rows, to="hdf5", out=tmp_path / "local", shard_size="20KB")
    at: list[int] = []

    class Losing(Spread):
        def run(self, tasks: Any, on_message: Any = None) -> Any:
            def heard(number: int, message: Any) -> None:
                on_message(number, message)
                if not at:
                    at.append(number)
                    cluster.kill("c")

            return super().run(tasks, heard)

    try:
        nodes = [node for node in engine.nodes() if node.name in "bc"]
        assert len(nodes) == 2
        ran = convert(
            ConvertOptions(to="hdf5", shard_size="20KB"), source=rows, out=tmp_path / "out",
            engine=Losing(engine, nodes, per_node=1),
        )  # fmt: skip
    finally:
        cluster.revive()

    assert at
    assert ran.digest == local.digest
    assert sorted(os.listdir(tmp_path / "out")) == sorted(os.listdir(tmp_path / "local"))
