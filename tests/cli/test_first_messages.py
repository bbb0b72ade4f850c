"""Messages for a first user: a lowered cap, a dataset of another format or name, an epoch of a part of the samples."""

from __future__ import annotations

import re
import shlex
import time
from pathlib import Path

import numpy as np
import pytest

from cachetool.core.errors import UsageError
from cachetool.loaders.numpy import Loader
from tests.cli.conftest import Run
from tests.loaders.conftest import run_script


@pytest.fixture
def objects(tmp_path: Path) -> Path:
    (tmp_path / "objects").mkdir()
    for number in range(40):
        np.save(tmp_path / "objects" / f"{number}.x.npy", np.full(100, number))
    return tmp_path / "objects"


def test_a_pull_with_a_smaller_cap_says_that_it_lowers_the_cap(run: Run, objects: Path) -> None:
    assert "lowered" not in run("pull", objects, "--samples", "3", "--max-size", "60MB").stderr
    assert "lowered" not in run("pull", objects, "--samples", "3", "--max-size", "60MB").stderr
    assert "lowered" not in run("pull", objects, "--samples", "3", "--max-size", "70MB").stderr
    ran = run("pull", objects, "--samples", "3", "--max-size", "50MB")
    assert ran.code == 0
    assert "is lowered from 70.0 MB to 50.0 MB" in ran.stderr
    assert run("stats", "--json").document["max_size"] == 50_000_000


def test_the_least_cap_that_a_message_names_works(run: Run, objects: Path) -> None:
    ran = run("pull", objects, "--samples", "3", "--max-size", "1500kB", "--shard-size", "4MB")
    assert ran.code == 4
    (least,) = re.findall(r"the minimum is (\d+) bytes", ran.error)
    assert run("pull", objects, "--samples", "3", "--max-size", str(int(least) - 1000), "--shard-size", "4MB").code == 4
    ran = run("pull", objects, "--samples", "3", "--max-size", least, "--shard-size", "4MB")
    assert ran.code == 0, ran.stderr


def test_a_pull_reports_existing_shards_of_another_format_and_the_advice_works(run: Run, objects: Path) -> None:
    assert "beside these" not in run("pull", objects, "--samples", "10", "--max-size", "50MB").stderr
    assert "beside these" not in run("pull", objects, "--samples", "5").stderr
    ran = run("pull", objects, "--samples", "10", "--to", "hdf5")
    assert ran.code == 0
    assert "dataset 'default' has lmdb shards beside the new hdf5 shards" in ran.stderr
    (advice,) = re.findall(r"cachetool (convert .*)", ran.stderr)
    assert run(*shlex.split(advice)).code == 0
    formats = run("stats", "--json").document["datasets"][0]["formats"]
    assert list(formats) == ["hdf5"]
    assert "beside these" not in run("pull", objects, "--samples", "5", "--to", "hdf5").stderr


@pytest.mark.parametrize("workers", [0, 1])
def test_a_missing_dataset_is_refused_at_once(workers: int, run: Run, objects: Path, tmp_path: Path) -> None:
    assert run("pull", objects, "--samples", "10", "--dataset", "train", "--max-size", "50MB").code == 0
    began = time.monotonic()
    says = r"unknown dataset 'trian' in .*; choose one of train with dataset=, .*--dataset trian"
    with (
        Loader(tmp_path / "cache", batch_size=4, dataset="trian", workers=workers) as loader,
        pytest.raises(UsageError, match=says) as refused,
    ):
        iter(loader)
    assert time.monotonic() - began < 60  # not the 600 s of wait=
    (advice,) = re.findall(r"cachetool (pull .*)", str(refused.value))
    assert run(*shlex.split(advice.replace("SOURCE", str(objects))), "--samples", "4").code == 0
    with Loader(tmp_path / "cache", batch_size=4, dataset="trian", workers=workers) as loader:
        assert sum(len(batch["x"]) for batch in loader) == 4


@pytest.mark.parametrize("workers", [0, 1])
def test_an_epoch_of_a_split_counts_only_the_samples_that_it_read(
    workers: int, run: Run, objects: Path, tmp_path: Path
) -> None:
    assert run("pull", objects, "--all", "--max-size", "50MB").code == 0
    counts = []
    for options in ({"split": "train", "validation": 0.3}, {"split": "validation", "validation": 0.3}, {}):
        with Loader(tmp_path / "cache", batch_size=4, workers=workers, **options) as loader:  # type: ignore[arg-type]
            counts.append(sum(len(batch["x"]) for batch in loader))
    assert counts[0] + counts[1] == counts[2] == 40
    document = run("stats", "--json").document
    source = document["sources"][0]
    assert source["served"] == pytest.approx(2 * 40 * (800 + 2), rel=0.2)
    from cachetool.cache import open_cache
    from cachetool.cache.history import history_of

    with open_cache(tmp_path / "cache") as cache:
        rows = history_of(cache.layout, dataset="default").epochs
    assert [row["samples"] for row in rows] == counts
    assert rows[0]["bytes"] + rows[1]["bytes"] == pytest.approx(rows[2]["bytes"], abs=2)


def test_tensorflow_epochs_are_recorded_with_batches_and_time(run: Run, objects: Path, tmp_path: Path) -> None:
    assert run("pull", objects, "--all", "--to", "tfrecord", "--max-size", "50MB").code == 0
    run_script("tensorflow_epochs.py", tmp_path / "cache")
    from cachetool.cache import open_cache
    from cachetool.cache.history import history_of

    with open_cache(tmp_path / "cache") as cache:
        rows = history_of(cache.layout, dataset="default").epochs
    assert [row["batches"] for row in rows] == [5, -(-rows[1]["samples"] // 6)]
    assert rows[0]["samples"] == 40
    assert rows[1]["samples"] < 40
    assert all(row["seconds"] > 0 and row["waited"] is None for row in rows)
    assert run("stats", "--html", tmp_path / "page.html").code == 0


def test_the_report_shows_what_was_new_in_each_epoch(run: Run, objects: Path, tmp_path: Path) -> None:
    for count in (10, 30):
        assert run("pull", objects, "--samples", str(count), "--max-size", "50MB").code == 0
        with Loader(tmp_path / "cache", batch_size=4, workers=0) as loader:
            assert sum(len(batch["x"]) for _ in range(2) for batch in loader)
    from cachetool.cache import open_cache
    from cachetool.cache.history import history_of

    with open_cache(tmp_path / "cache") as cache:
        rows = history_of(cache.layout).epochs
    assert [(row["samples"], row["new"]) for row in rows] == [(10, 10), (10, 0), (40, 30), (40, 0)]
    assert run("stats", "--html", tmp_path / "page.html").code == 0
    page = (tmp_path / "page.html").read_text()
    assert "Samples of each epoch" in page
    assert "40 samples, 30 new" in page
    assert re.search(r"<th[^>]*>dataset</th><th[^>]*>epoch</th><th[^>]*>ended</th>", page)
