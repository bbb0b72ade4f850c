"""``pull --runs``: neighbouring rows of a file are drawn together and in their order."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import zarr
from hypothesis import given
from hypothesis import strategies as st

import cachetool
from cachetool.core.errors import UsageError
from cachetool.loaders.numpy import Loader
from cachetool.sources.options import SourceOptions
from cachetool.sources.order import PartOrder
from cachetool.sources.registry import list_source, open_source

ROWS = 600


def write(path: Path, *, width: int = 1024, chunk: int = 1) -> Path:
    """Write rows of ``width`` numbers, the first of which is the number of the row."""
    data = np.zeros((ROWS, width), dtype="<f4")
    data[:, 0] = np.arange(ROWS)
    if path.suffix == ".zarr":
        array = zarr.open_group(path, mode="w").create_array("x", shape=data.shape, dtype="<f4", chunks=(chunk, width))
        array[:] = data
    elif path.suffix == ".h5":
        with h5py.File(path, "w") as file:
            file.create_dataset("x", data=data, chunks=(chunk, width))
    else:
        np.save(path, data)
    return path


def order_of(tmp_path: Path, source: Path, runs: int | None, **how: Any) -> list[int]:
    options = SourceOptions(runs=runs)
    folder = tmp_path / f"listing-{runs}-{len(list(tmp_path.iterdir()))}"
    list_source(str(source), folder, options)
    opened = open_source(str(source), folder, options)
    try:
        order = opened.order(**{"seed": 3, "pass_number": 0, **how})
        draws: list[int] = order[np.arange(len(order))].tolist()
        return draws
    finally:
        opened.close()


def lone(rows: Any) -> float:
    """Return the share of rows whose neighbour before is not among them; the first row of the file counts."""
    there = set(map(int, rows))
    return sum(row - 1 not in there for row in there) / len(there)


@given(
    sizes=st.lists(st.integers(1, 40), min_size=1, max_size=12),
    seed=st.integers(0, 99),
    pass_number=st.integers(0, 3),
    cut=st.integers(1, 4),
)
def test_the_rows_of_a_unit_ascend_and_parts_are_disjoint_and_complete(
    sizes: list[int], seed: int, pass_number: int, cut: int
) -> None:
    bounds = np.concatenate([[0], np.cumsum(sizes)])
    drawn: list[int] = []
    for part in range(cut):
        order = PartOrder(np.array(sizes), seed=seed, pass_number=pass_number, part=part, cut=cut, in_rows=True)
        draws = order[np.arange(len(order))]
        units = np.searchsorted(bounds, draws, side="right")
        # Within a unit each row follows the one before it.
        assert (np.diff(draws)[np.diff(units) == 0] == 1).all()
        drawn += draws.tolist()
    assert sorted(drawn) == list(range(sum(sizes)))


@pytest.mark.parametrize("name", ["x.zarr", "x.h5", "x.npy"])
def test_runs_are_neighbouring_rows_in_their_order(tmp_path: Path, name: str) -> None:
    draws = np.array(order_of(tmp_path, write(tmp_path / name), 32))

    assert sorted(draws.tolist()) == list(range(ROWS))
    breaks = np.flatnonzero(np.diff(draws) != 1) + 1
    runs = np.split(draws, breaks)
    # 600 rows are 18 runs of 32 and one of 24; two runs may meet by chance.
    assert len(runs) >= 15
    assert all(run[0] % 32 == 0 for run in runs)
    assert draws.tolist() != list(range(ROWS))


def test_runs_are_rounded_up_to_what_is_stored_together(tmp_path: Path) -> None:
    source = write(tmp_path / "x.zarr", chunk=48)

    draws = np.array(order_of(tmp_path, source, 50))

    starts = draws[np.flatnonzero(np.diff(draws, prepend=-2) != 1)]
    assert set(starts.tolist()) <= set(range(0, ROWS, 96))


def test_a_later_pass_draws_other_runs_first(tmp_path: Path) -> None:
    source = write(tmp_path / "x.npy")

    first, second = (order_of(tmp_path, source, 32, pass_number=number) for number in (0, 1))

    assert sorted(first) == sorted(second)
    assert first != second


@pytest.mark.parametrize("name", ["x.zarr", "x.h5"])
def test_a_full_cache_has_the_neighbours_of_most_samples(tmp_path: Path, name: str) -> None:
    # Rows of 32 KiB, because smaller ones are drawn with their neighbours anyway.
    source = write(tmp_path / name, width=2**13)
    shares = {}
    for runs in (None, 32):
        with cachetool.open_cache(tmp_path / f"cache{runs}", max_size="15MB") as cache:
            options: dict[str, Any] = {} if runs is None else {"runs": runs}
            # The second pull evicts shards of the first.
            for _ in range(2):
                cache.pull(str(source), to="hdf5", workers=2, shard_size="2MB", samples=250, **options)
            with Loader(cache, batch_size=16, workers=0, fields=["x"]) as loader:
                shares[runs] = lone(np.concatenate([batch["x"][:, 0] for batch in loader]))

    assert shares[32] < 1.5 / 32 + 0.02
    assert shares[None] > 2.5 * shares[32]


def test_another_length_of_runs_is_another_order_and_refused(tmp_path: Path) -> None:
    source = write(tmp_path / "x.npy")
    with cachetool.open_cache(tmp_path / "cache", max_size="20MB") as cache:
        cache.pull(str(source), to="hdf5", samples=64, runs=16)

        with pytest.raises(UsageError, match="runs"):
            cache.pull(str(source), to="hdf5", samples=64, runs=32)


def test_sources_without_rows_and_conversions_refuse_runs(tmp_path: Path) -> None:
    (tmp_path / "objects").mkdir()
    for number in range(5):
        np.save(tmp_path / "objects" / f"{number}.npy", np.zeros((3, 4)))
        (tmp_path / "objects" / f"{number}.txt").write_text("a")
    with cachetool.open_cache(tmp_path / "cache", max_size="20MB") as cache:
        with pytest.raises(UsageError, match="--runs"):
            cache.pull(str(tmp_path / "objects"), to="hdf5", samples=4, runs=2, read_as="objects")
        source = write(tmp_path / "x.npy")
        with pytest.raises(UsageError, match="runs="):
            cache.convert(str(source), to="hdf5", out=tmp_path / "out", runs=4)
        with pytest.raises(UsageError, match="--block"):
            cache.pull(str(source), to="hdf5", samples=4, runs=2, block={"0": 4})
