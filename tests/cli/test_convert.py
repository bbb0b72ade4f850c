"""``cachetool convert`` as typed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import h5py
import numpy as np
import pytest

from tests.cli.folders import labels, tree

if TYPE_CHECKING:
    from tests.cli.conftest import Run

FORMATS = ("lmdb", "hdf5", "zarr", "tfrecord")


def test_a_cache_goes_through_every_format_and_keeps_its_samples_and_digest(run: Run, filled: Path) -> None:
    before = sorted(labels(filled))
    digests = set()
    for name in ("hdf5", "zarr", "tfrecord", "lmdb"):
        ran = run("convert", "--to", name, "--verify", "--json")
        assert ran.code == 0, ran.stderr
        assert (ran.document["to"], ran.document["samples"], ran.document["verified"]) == (name, 30, True)
        assert {shard["format"] for shard in run("ls", "--json").document["shards"]} == {name}
        digests.add(ran.document["digest"])

    assert len(digests) == 1
    assert sorted(labels(filled)) == before


@pytest.mark.parametrize("name", FORMATS)
def test_out_writes_plain_files_and_leaves_the_cache_alone(run: Run, filled: Path, tmp_path: Path, name: str) -> None:
    before = {shard["id"] for shard in run("ls", "--json").document["shards"]}
    ran = run("convert", "--to", name, "--out", tmp_path / "plain")

    assert ran.code == 0, ran.stderr
    assert "converted 30 samples" in ran.stdout
    assert json.loads((tmp_path / "plain" / "dataset.json").read_text())["samples"] == 30
    assert list((tmp_path / "plain").glob("part-00000.*"))
    assert {shard["id"] for shard in run("ls", "--json").document["shards"]} == before


def test_plain_hdf5_opens_without_cachetool(run: Run, filled: Path, tmp_path: Path) -> None:
    assert run("convert", "--to", "hdf5", "--out", tmp_path / "plain", "--quiet").code == 0
    with h5py.File(tmp_path / "plain" / "part-00000.h5") as file:
        volumes, numbers = file["volume"][:], file["label"][:]

    assert volumes.shape == (30, 4, 8, 8)
    assert np.array_equal(volumes[:, 0, 0, 0], numbers)
    assert sorted(numbers) == sorted(labels(filled))


@pytest.mark.parametrize(
    ("line", "code", "says"),
    [
        ("convert --to parquet", 2, "'parquet'"),
        ("convert --to hdf5 --dataset nothing", 2, "'nothing'"),
        ("convert --to lmdb --compression gzip", 2, "gzip"),
        ("convert --to hdf5 --compression brotli", 2, "brotli"),
        ("convert --to hdf5 --out cache", 2, "cache"),
    ],
)
def test_what_cannot_be_converted_leaves_the_cache_as_it_was(
    here: Run, filled: Path, line: str, code: int, says: str
) -> None:
    before = tree(filled)
    ran = here(*line.split())

    assert ran.code == code, ran.stderr
    assert says in ran.error
    assert tree(filled) == before


def test_without_a_cache_nothing_is_made(here: Run, tmp_path: Path) -> None:
    ran = here("convert", "--to", "hdf5")

    assert ran.code == 2
    assert "no cache" in ran.error
    assert not (tmp_path / "cache").exists()
