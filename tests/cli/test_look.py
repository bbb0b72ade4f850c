"""``cachetool ls``, ``show`` and ``stats`` on the command line: they report the contents and change nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

from tests.cli.folders import tree

if TYPE_CHECKING:
    from tests.cli.conftest import Run


def test_ls_show_and_stats_change_nothing(here: Run, filled: Path) -> None:
    before, shards = tree(filled), tree(filled / "shards")
    shard = here("ls", "--json").document["shards"][0]["id"]
    for line in (["ls"], ["stats"], ["show", shard], ["ls", "--dataset", "default"]):
        assert here(*line).code == 0
    assert tree(filled) == before

    assert here("show", f"{shard}:3").code == 0  # leases a snapshot while it reads
    assert tree(filled / "shards") == shards


def test_ls_lists_each_shard_on_a_line_of_its_own(here: Run, filled: Path) -> None:
    shards = here("ls", "--json").document["shards"]
    lines = here("ls").stdout.splitlines()

    assert [shard["samples"] for shard in shards] == [10, 10, 10]
    for shard in shards:
        assert sum(shard["id"] in line and "lmdb" in line for line in lines) == 1
        assert Path(shard["path"]).is_dir()


def test_show_finds_a_shard_by_a_prefix_of_its_id_and_prints_its_fields(here: Run, filled: Path) -> None:
    shard = here("ls", "--json").document["shards"][0]["id"]
    ran = here("show", shard[:6])

    assert ran.code == 0, ran.stderr
    assert "float32 (4, 8, 8)" in ran.stdout
    assert "10 samples as lmdb" in ran.stdout
    assert [field["name"] for field in here("show", shard, "--json").document["schema"]] == [
        "label",
        "volume",
        "__key__",
    ]


def test_show_prints_the_values_of_a_sample(here: Run, filled: Path) -> None:
    shard = here("ls", "--json").document["shards"][0]["id"]
    document = here("show", f"{shard}:4", "--json").document
    number = document["fields"]["label"]

    assert document["index"] == 4
    assert document["fields"]["__key__"] == f"scan{number:03d}"
    assert np.array_equal(np.full((4, 8, 8), number), document["fields"]["volume"])
    text = here("show", f"{shard}:4").stdout
    assert f"scan{number:03d}" in text
    assert max(map(len, text.splitlines())) < 200


def test_show_writes_valid_json_for_all_numbers(here: Run, tmp_path: Path) -> None:
    """Numbers that are not finite are written as text, because JSON cannot represent them."""
    np.savez(
        tmp_path / "x.npz",
        f=np.array([[1.5, np.nan, np.inf, -np.inf]], "f4"),
        s=np.array([np.nan]),
        c=np.array([complex(np.inf, 2)]),
        i=np.array([7]),
    )
    assert here("pull", tmp_path / "x.npz", "--all", "--no-key", "--max-size", "20MB").code == 0
    shard = here("ls", "--json").document["shards"][0]["id"]

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is no JSON")

    document = json.loads(here("show", f"{shard}:0", "--json").stdout, parse_constant=refuse)

    assert document["fields"] == {
        "f": [1.5, "NaN", "Infinity", "-Infinity"],
        "s": "NaN",
        "c": {"real": "Infinity", "imag": 2.0},
        "i": 7,
    }


@pytest.mark.parametrize(
    ("shard", "says"),
    [("zzz", "'zzz'"), ("", "3 shards"), ("{}:10", "0 to 9"), ("{}:-1", "'-1'"), ("{}:x", "'x'"), ("{}:", "''")],
)
def test_show_of_a_missing_shard_or_sample_lists_existing_ones(here: Run, filled: Path, shard: str, says: str) -> None:
    first = here("ls", "--json").document["shards"][0]["id"]
    ran = here("show", shard.format(first))

    assert ran.code == 2
    assert says in ran.error


def test_stats_equal_a_recount_from_the_disk(here: Run, remote: Path, tmp_path: Path) -> None:
    ran = here("pull", remote, "--samples", "30", "--shard-size", "10400", "--max-size", "8MB")
    assert ran.code == 0, ran.stderr
    filled = tmp_path / "cache"
    document = here("stats", "--json").document
    folders = [path for path in (filled / "shards").iterdir() if path.is_dir()]
    files = [path.lstat() for folder in folders for path in (folder, *folder.rglob("*"))]

    assert document["samples"] == 30
    assert document["shards"] == len(folders) == 3
    assert document["shard_bytes"] == sum(max(stat.st_blocks * 512, stat.st_size) for stat in files)
    assert document["shard_bytes"] < document["used"] <= document["max_size"] == 8_000_000
    (source,) = document["sources"]
    assert (source["units"], source["drawn"], source["coverage"], source["seed"]) == (60, 30, 0.5, 0)


def test_stats_prints_the_cap_the_datasets_and_the_coverage(here: Run, filled: Path) -> None:
    ran = here("stats")

    assert ran.code == 0
    assert "of 8.0 MB used" in ran.stdout
    rows = [line.split() for line in ran.stdout.splitlines()]
    assert ["dataset", "format", "shards", "samples", "bytes", "retiring", "epochs"] in rows
    assert any(row[:4] == ["default", "lmdb", "3", "30"] for row in rows)
    assert "50.0 %" in ran.stdout


def test_stats_names_the_readers(here: Run, filled: Path) -> None:
    import os

    import cachetool

    with cachetool.open_cache(filled, create=False) as cache, cache.snapshot():
        assert f"pid {os.getpid()}" in here("stats").stdout
    assert f"pid {os.getpid()}" not in here("stats").stdout


@pytest.mark.parametrize("command", ["ls", "stats", "show x"])
def test_without_a_cache_the_pull_command_is_advised(here: Run, tmp_path: Path, command: str) -> None:
    ran = here(*command.split())

    assert ran.code == 2
    assert "cachetool pull SOURCE" in ran.error
    assert not (tmp_path / "cache").exists()
