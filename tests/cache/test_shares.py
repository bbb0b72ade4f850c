"""Shares of the cap: a dataset never takes more than its own, and nobody else evicts it."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

import cachetool
from cachetool.cache import CacheDir, open_cache
from cachetool.core.errors import CapacityError, UsageError
from cachetool.loaders.numpy import Loader
from tests.commands import run_command
from tests.loaders.processes import until

CAP = 8_000_000
SIZE = 8192
"""Values of a sample, 32 KiB."""


def source(folder: Path, first: int, count: int) -> Path:
    folder.mkdir()
    for number in range(first, first + count):
        np.save(folder / f"{number:05d}.x.npy", np.full(SIZE, number, dtype=np.float32))
    return folder


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two sources of 13 MB each."""
    place = tmp_path_factory.mktemp("sources")
    return source(place / "sim", 0, 400), source(place / "obs", 1000, 400)


def bytes_of(cache: CacheDir, dataset: str) -> int:
    """Return the bytes that a dataset takes, with those being written or deleted."""
    rows = cache.catalog.rows("SELECT coalesce(sum(bytes), 0) FROM shards WHERE dataset = ?", (dataset,))
    return int(rows[0][0])


def test_a_dataset_fills_its_share_and_not_more(sources: tuple[Path, Path], tmp_path: Path) -> None:
    with cachetool.open_cache(tmp_path / "cache", max_size=CAP) as cache:
        cache.pull(sources[0], dataset="sim", share="40%")
        cache.pull(sources[1], dataset="obs")
        sim, obs = bytes_of(cache, "sim"), bytes_of(cache, "obs")
        assert 0.3 * CAP < sim <= 0.4 * CAP
        assert obs > 0.3 * CAP
        shares = {row["name"]: row["share"] for row in cache.stats().datasets}
        assert shares == {"sim": 0.4, "obs": None}


def test_only_its_own_writers_evict_a_dataset_with_a_share(sources: tuple[Path, Path], tmp_path: Path) -> None:
    with cachetool.open_cache(tmp_path / "cache", max_size=CAP) as cache:
        cache.pull(sources[0], dataset="sim", share="40%")
        before = {shard.id for shard in cache.shards("sim")}
        # A pull with an end keeps its own samples, and may not evict those of the share.
        with pytest.raises(CapacityError, match="cache is full"):
            cache.pull(sources[1], dataset="obs", all=True)
        assert {shard.id for shard in cache.shards("sim")} == before
        obs = {shard.id for shard in cache.shards("obs")}
        cache.pull(sources[0], dataset="sim", samples=40)
        assert {shard.id for shard in cache.shards("sim")} != before
        assert {shard.id for shard in cache.shards("obs")} == obs
        assert bytes_of(cache, "sim") <= 0.4 * CAP


def test_a_share_is_kept_free_for_its_dataset(sources: tuple[Path, Path], tmp_path: Path) -> None:
    with cachetool.open_cache(tmp_path / "cache", max_size=CAP) as cache:
        cache.pull(sources[0], dataset="sim", share="50%", samples=10)
        cache.pull(sources[1], dataset="obs")
        assert bytes_of(cache, "obs") <= 0.5 * CAP
        cache.pull(sources[0], dataset="sim")
        assert bytes_of(cache, "sim") > 0.4 * CAP


def test_a_dataset_that_filled_the_cache_before_leaves_the_share(sources: tuple[Path, Path], tmp_path: Path) -> None:
    with cachetool.open_cache(tmp_path / "cache", max_size=CAP) as cache:
        cache.pull(sources[1], dataset="obs")
        full = bytes_of(cache, "obs")
        cache.pull(sources[0], dataset="sim", share="50%", samples=80)
        assert bytes_of(cache, "sim") > 80 * 4 * SIZE
        assert bytes_of(cache, "obs") < full
        cache.pull(sources[0], dataset="sim", share="98%", samples=1)
        with pytest.raises(CapacityError, match="the shares of other datasets leave"):
            cache.pull(sources[1], dataset="obs", samples=1, shard_size="1MB")


def test_a_full_share_is_named_with_the_option(sources: tuple[Path, Path], tmp_path: Path) -> None:
    with cachetool.open_cache(tmp_path / "cache", max_size=CAP) as cache:
        with pytest.raises(CapacityError, match=r"has taken its share(.|\n)*raise --share or --max-size"):
            cache.pull(sources[0], dataset="sim", share="40%", all=True)
        with pytest.raises(CapacityError, match=r"has taken its share(.|\n)*raise --share or --max-size"):
            cache.convert(to="hdf5", dataset="sim")


def test_shares_of_more_than_the_cap_are_refused(sources: tuple[Path, Path], tmp_path: Path) -> None:
    with cachetool.open_cache(tmp_path / "cache", max_size=CAP) as cache:
        cache.pull(sources[0], dataset="sim", share=0.7, samples=10)
        with pytest.raises(UsageError, match=r"--share 40% of dataset 'obs' is too much beside the shares of sim 70%"):
            cache.pull(sources[1], dataset="obs", share=0.4, samples=10)
        cache.pull(sources[0], dataset="sim", share="none", samples=10)
        cache.pull(sources[1], dataset="obs", share="100%", samples=10)
        with pytest.raises(UsageError, match="leaves no space for the dataset"):
            cache.pull(sources[0], dataset="sim", share=0, samples=10)


def test_a_share_that_is_too_small_for_a_shard_says_so(sources: tuple[Path, Path], tmp_path: Path) -> None:
    with (
        cachetool.open_cache(tmp_path / "cache", max_size=CAP) as cache,
        pytest.raises(CapacityError, match=r"the share of dataset 'sim', .* of the cap, is too small"),
    ):
        cache.pull(sources[0], dataset="sim", share="0.1%", samples=10)


def test_the_command_takes_a_share_and_stats_shows_it(sources: tuple[Path, Path], tmp_path: Path) -> None:
    environment = {**os.environ, "CACHETOOL_CACHE": str(tmp_path / "cache"), "COLUMNS": "100"}
    pull = ("pull", str(sources[0]), "--max-size", str(CAP), "--dataset", "sim", "--share", "30%", "--samples", "20")
    assert run_command(*pull, folder=tmp_path, environment=environment).returncode == 0
    assert "30 %" in run_command("stats", folder=tmp_path, environment=environment).stdout


@pytest.mark.parametrize("epochs", [5, pytest.param(10, marks=pytest.mark.soak)])
@pytest.mark.timeout(300)
def test_two_growing_datasets_keep_their_shares_and_are_both_renewed(
    sources: tuple[Path, Path], tmp_path: Path, epochs: int
) -> None:
    """Beside a mixture that trains on both."""
    shares = {"sim": 0.5, "obs": 0.25}
    with (
        open_cache(tmp_path / "cache", max_size=CAP) as cache,
        cachetool.BackgroundPull(cache, sources[0], dataset="sim", share=shares["sim"], renew=0.3),
        cachetool.BackgroundPull(cache, sources[1], dataset="obs", share=shares["obs"], renew=0.3),
        Loader(
            {"sim": 2, "obs": 1}, cache=cache, batch_size=8, workers=1, epoch_of="obs", fields=["x"], min_samples=40
        ) as loader,
    ):
        seen: dict[str, list[set[int]]] = {"sim": [], "obs": []}

        def full() -> bool:
            within = all(bytes_of(cache, name) <= share * CAP for name, share in shares.items())
            assert within, "a share was exceeded"
            return all(bytes_of(cache, name) > 0.7 * share * CAP for name, share in shares.items())

        until(full)
        for _ in range(epochs):
            numbers = [int(row[0]) for batch in loader for row in batch["x"]]
            for name, mine in {
                "sim": [n for n in numbers if n < 1000],
                "obs": [n for n in numbers if n >= 1000],
            }.items():
                seen[name].append(set(mine))
                assert bytes_of(cache, name) <= shares[name] * CAP
            until(full)
    for name, of_epochs in seen.items():
        assert set().union(*of_epochs) > of_epochs[0], f"{name} was not renewed"
