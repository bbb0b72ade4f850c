"""``stats``, ``evict`` and ``verify`` of the caches of three nodes: one row per node, and their sum."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import cachetool
from cachetool.cache import open_cache
from cachetool.cluster.engine import RayEngine
from tests.cli.conftest import Ran
from tests.loaders.numbered import put

pytestmark = pytest.mark.soak  # one test of a pull and one of a loader run on a real cluster by default

Command = Callable[..., Ran]

SHARDS = {"a": 3, "b": 2, "c": 1}
"""Shards of each node, with ten samples each. No sample is on two nodes."""


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Create a cache for each node. Tests must not change them."""
    folder, number = tmp_path_factory.mktemp("filled"), 0
    for node, shards in SHARDS.items():
        with open_cache(folder / node, max_size="8MB") as cache:
            for _ in range(shards):
                put(cache, range(number, number + 10))
                number += 10
    return folder


@pytest.fixture
def caches(filled: Path, tmp_path: Path) -> Iterator[Path]:
    """Copy the caches. Their path is ``caches/{node}``."""
    shutil.copytree(filled, tmp_path / "caches")
    return tmp_path / "caches"


def place(caches: Path) -> str:
    return f"{caches}/{{node}}"


def test_stats_have_a_row_for_each_node_and_their_sum(command: Command, filled: Path) -> None:
    found = command("stats", "--cache", place(filled), "--json").document
    text = command("stats", "--cache", place(filled))

    assert {node: each["samples"] for node, each in found["nodes"].items()} == {"a": 30, "b": 20, "c": 10}
    for node, each in found["nodes"].items():
        with open_cache(filled / node) as cache:
            alone = cache.stats().as_dict()
        assert each | {"free_disk": 0} == alone | {"free_disk": 0}
    total = found["sum"]
    assert (total["nodes"], total["samples"], total["shards"]) == (3, 60, 6)
    assert total["used"] == sum(each["used"] for each in found["nodes"].values())
    assert total["max_size"] == 24_000_000
    rows = [line.split() for line in text.stdout.splitlines() if line]
    assert [row[:3] for row in rows if row[0] in SHARDS] == [["a", "3", "30"], ["b", "2", "20"], ["c", "1", "10"]]
    assert rows[-1][:4] == ["3", "nodes", "6", "60"]
    assert (text.code, text.stderr) == (0, "")


def test_a_node_without_a_cache_has_no_row(command: Command, caches: Path) -> None:
    shutil.rmtree(caches / "b")

    found = command("stats", "--cache", place(caches), "--json")

    assert found.code == 0
    assert sorted(found.document["nodes"]) == ["a", "c"]
    assert found.document["sum"]["samples"] == 40
    none = command("stats", "--cache", f"{caches}/none/{{node}}")
    assert none.code == 2
    assert (
        f"no node has a cache at {caches}/none/{{node}} (nodes: a, b, c); fill their caches with: cachetool pull"
        in none.error
    )


def test_a_folder_that_two_nodes_share_is_refused(command: Command, filled: Path) -> None:
    refused = command("stats", "--cache", filled / "a")

    assert refused.code == 2
    assert (
        f"nodes a and b share the folder {filled}/a; if each node has its own, put {{node}} into --cache"
        in refused.error
    )


def test_the_error_of_a_node_is_its_row_and_ends_the_command(command: Command, caches: Path) -> None:
    (caches / "b" / "catalog.sqlite3").write_bytes(b"no catalog" * 1000)

    found = command("stats", "--cache", place(caches), "--json")
    text = command("stats", "--cache", place(caches))

    assert (found.code, text.code) == (6, 6)
    assert found.document["nodes"]["b"]["error"] == "CatalogError"
    assert found.document["nodes"]["b"]["exit_code"] == 6
    assert found.document["nodes"]["c"]["samples"] == 10
    assert text.error.startswith("node b: ")
    assert "2 nodes" in text.stdout


def test_evict_shrinks_the_cache_of_each_node_to_the_requested_size(command: Command, caches: Path) -> None:
    used = {node: _used(caches / node) for node in SHARDS}
    target = (used["b"] + used["c"]) // 2

    planned = command("evict", "--max-size", target, "--cache", place(caches), "--dry-run")
    assert {node: _used(caches / node) for node in SHARDS} == used
    done = command("evict", "--max-size", target, "--cache", place(caches), "--json")

    assert (planned.code, done.code) == (0, 0)
    removed = {node: each["removed_shards"] for node, each in done.document["nodes"].items()}
    assert removed == {"a": 2, "b": 1, "c": 0}
    assert all(_used(caches / node) <= target for node in SHARDS)
    assert done.document["sum"]["removed_shards"] == 3
    assert planned.stdout.splitlines()[-1].split()[:4] == ["3", "nodes", "3", "30"]


def test_evict_names_the_node_and_the_reader_that_it_waits_for(command: Command, caches: Path) -> None:
    target = _used(caches / "c")
    with open_cache(caches / "b") as cache, cache.snapshot():
        blocked = command("evict", "--max-size", target, "--cache", place(caches))

        assert blocked.code == 4
        assert blocked.error.startswith("node b: ")
        assert "readers end: pid" in blocked.error
        assert _used(caches / "a") <= target, "the other nodes are done"


def test_verify_finds_and_repairs_damage_on_a_node(command: Command, caches: Path) -> None:
    (data,) = list((caches / "c" / "shards").glob("*/data.lmdb"))
    with data.open("r+b") as file:
        file.seek(-100, 2)
        byte = file.read(1)
        file.seek(-1, 1)
        file.write(bytes([byte[0] ^ 1]))

    found = command("verify", "--cache", place(caches), "--json")
    text = command("verify", "--cache", place(caches))

    assert (found.code, text.code) == (5, 5)
    assert {node: each["sound"] for node, each in found.document["nodes"].items()} == {"a": True, "b": True, "c": False}
    assert (found.document["sum"]["sound"], found.document["sum"]["problems"]) == (False, 1)
    assert "cachetool verify --repair --on ray" in text.stderr
    assert command("verify", "--repair", "--cache", place(caches)).code == 0


@pytest.mark.parametrize("option", [["--watch"], ["--html", "page.html"]])
def test_stats_of_nodes_refuse_options_for_a_single_cache(command: Command, filled: Path, option: list[str]) -> None:
    refused = command("stats", *option, "--cache", place(filled))

    assert refused.code == 2
    assert f"{option[0]} looks at one cache; run it on the node, without --on ray" in refused.error


def _used(root: Path) -> int:
    with cachetool.open_cache(root) as cache:
        return cache.stats().used


def test_the_nodes_keep_no_file_of_a_driver_that_has_ended(joined: str, tmp_path: Path) -> None:
    (tmp_path / "listing").write_bytes(bytes(1000))
    engine = RayEngine()
    try:
        nodes = engine.nodes()
        places = [Path(place) for place in engine.send(nodes, tmp_path).values()]
        places += [Path(engine.write(node, "pace", 0, b"1")) for node in nodes]
        assert [place.stat().st_size for place in places if place.is_file()] == [1, 1, 1]
        assert all((place / "listing").read_bytes() == bytes(1000) for place in places[:3])
    finally:
        engine.close()
    assert [place for place in places if place.exists() or place.parent.exists()] == []
