"""``cachetool bench``: it measures the user's own samples, leaves no files, and its advice follows from the figures."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from cachetool.bench.rates import Measurements, advice
from cachetool.formats import format_names
from tests.cli.conftest import Run

FOUND = Measurements(
    total_bytes=10**9,
    available=10**10,
    mean=100_000,
    batch=80,
    memory=10_000,
    in_order=1500,
    at_random=1200,
    own="lmdb",
    warm={"lmdb": 5000, "hdf5": 5500, "zarr": 5100, "tfrecord": 5200},
    busy={"lmdb": 4000, "hdf5": 4000, "zarr": 4000, "tfrecord": 4000},
    cold={"lmdb": 1000, "hdf5": 1010, "zarr": 990, "tfrecord": 1000},
    window=None,
    by_workers={1: 3000, 2: 5000},
    workers=2,
    conversion="cachetool convert --to {}",
)
BIG = replace(FOUND, total_bytes=10**11)


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (FOUND, ["fit into memory", "5,000 MB/s", "1.6 ms or more for 80 samples", "nothing needs to change"]),
        (replace(FOUND, warm={**FOUND.warm, "hdf5": 7000}), ["format limits the rate", "cachetool convert --to hdf5"]),
        (replace(FOUND, by_workers={1: 3000, 2: 5000, 8: 9000}), ["feeders limit the rate", "workers=8 gives 9,000"]),
        (BIG, ["do not fit", "disk is the limit", "--max-size"]),
        (replace(BIG, window=5000), ["one by one is slow", 'shuffle="window" gives 5,000 MB/s']),
        (replace(BIG, cold={**BIG.cold, "tfrecord": 1400}), ["tfrecord gives 1,400", "convert --to tfrecord"]),
        (replace(BIG, at_random=3000), ["of 3,000 MB/s that the disk can give", "workers=4"]),
    ],
)
def test_the_advice_names_the_bottleneck_and_the_option_to_change(found: Measurements, words: list[str]) -> None:
    said = advice(found)

    assert all(word in said for word in words), said
    assert said.count(".") - said.count("0.") <= 3
    assert said.endswith(".")


@pytest.mark.soak  # half a minute, most of it imports of PyTorch and TensorFlow
@pytest.mark.timeout(300)
def test_files_are_measured_in_every_format_and_no_file_is_left(tmp_path: Path, run: Run) -> None:
    x = np.random.default_rng(0).random((3000, 16, 16), dtype="<f4")
    np.save(tmp_path / "x.npy", x)
    work = tmp_path / "work"
    work.mkdir()

    done = run("bench", tmp_path / "x.npy", "--dir", work, "--seconds", "0.01", "--json")

    assert done.code == 0, done.stderr
    found = done.document
    rows = {(row["what"], row["how"]): row["number"] for row in found["rows"]}
    assert all(number > 0 for number in rows.values()), rows
    for name in format_names():
        for how in ("Loader, from memory", "Loader, beside a busy Python thread", "Loader, from the disk"):
            assert (name, how) in rows
    assert {("tfrecord", "torch Loader"), ("tfrecord", "TensorFlow make_dataset")} <= set(rows)
    assert 0 < next(number for (_, how), number in rows.items() if how.startswith("GIL")) <= 100
    assert "3000 samples of 1.0 kB" in found["samples"]
    assert found["advice"].startswith("All 3.1 MB fit into memory")
    assert list(work.iterdir()) == []
    assert sorted(path.name for path in tmp_path.iterdir()) == ["work", "x.npy"]


@pytest.mark.timeout(300)
def test_a_cache_is_measured_in_its_own_format_first_and_is_not_changed(tmp_path: Path, run: Run) -> None:
    """The samples include texts and arrays of many sizes; PyTorch and TensorFlow are left out for these."""
    folder = tmp_path / "objects"
    folder.mkdir()
    rng = np.random.default_rng(0)
    for number in range(300):
        np.save(folder / f"{number}.npy", rng.random(int(rng.integers(100, 5000)), dtype="<f4"))
    assert run("pull", folder, "--all", "--to", "zarr", "--max-size", "20MB").code == 0
    before = run("stats", "--json").document

    done = run("bench", "--seconds", "0.01")

    assert done.code == 0, done.stderr
    assert "of the cache" in done.stdout
    assert done.stdout.index("zarr ") < done.stdout.index("lmdb ")
    assert "torch" not in done.stdout
    after = run("stats", "--json").document
    assert after["shards"] == before["shards"]
    assert after["leases"] == []
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cache", "objects"]


def test_data_that_cannot_be_measured_is_refused_in_one_line(tmp_path: Path, run: Run) -> None:
    (tmp_path / "x.txt").write_text("not data")
    np.save(tmp_path / "one.npy", np.zeros((1, 4)))

    for data, code, words in (
        ("nothing.npy", 2, "nothing.npy does not exist"),
        ("one.npy", 2, "one sample is too few to measure"),
    ):
        done = run("bench", data, "--dir", tmp_path)
        assert done.code == code, done.stderr
        assert words in done.error
    absent = run("bench", "--cache", "nope", "--dir", tmp_path)
    assert absent.code == 2, absent.stderr
    assert "there is no cache at nope" in absent.error
