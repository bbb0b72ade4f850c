"""Samples that are concatenated in one long array are read as samples, not as a million single numbers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import zarr
from hypothesis import given, settings
from hypothesis import strategies as st

import cachetool
from cachetool.core.block import Ragged
from cachetool.core.errors import BadObject, UsageError
from cachetool.loaders.numpy import Loader
from cachetool.sources.options import SourceOptions
from tests.sources.classic import classic
from tests.sources.files import open_files

Arrays = dict[str, Any]
LENGTHS = np.array([3, 0, 5, 1, 120, 2, 0, 7])
OFFSETS = np.concatenate([[0], np.cumsum(LENGTHS)])
TOTAL = int(OFFSETS[-1])
VALUES = np.arange(TOTAL, dtype="<f4")


def hdf5(path: Path, arrays: Arrays, **more: Any) -> Path:
    with h5py.File(path.with_suffix(".h5"), "w") as file:
        for name, values in arrays.items():
            file.create_dataset(name, data=values, **more)
    return path.with_suffix(".h5")


def chunked(path: Path, arrays: Arrays) -> Path:
    return hdf5(path, arrays, chunks=True, compression="gzip")


def npz(path: Path, arrays: Arrays) -> Path:
    np.savez(path.with_suffix(".npz"), **arrays)
    return path.with_suffix(".npz")


def zarray(path: Path, arrays: Arrays) -> Path:
    group = zarr.open_group(path.with_suffix(".zarr"), mode="w")
    for name, values in arrays.items():
        group.create_array(name, data=np.asarray(values))
    return path.with_suffix(".zarr")


def netcdf3(path: Path, arrays: Arrays) -> Path:
    """Write CDF-5, whose names have no slash."""
    variables, dims = {}, {}
    for number, (name, values) in enumerate(arrays.items()):
        along = tuple(f"d{number}_{axis}" for axis in range(np.asarray(values).ndim))
        dims.update(zip(along, np.shape(values), strict=True))
        variables[name] = (along, values, {})
    path.with_suffix(".nc").write_bytes(classic(variables, dims, version=5))
    return path.with_suffix(".nc")


WRITERS = [hdf5, chunked, npz, zarray, netcdf3]
Write = Callable[[Path, Arrays], Path]


def read(path: Path, **options: Any) -> tuple[dict[str, list[Any]], dict[str, str]]:
    """Return the values of each field, sample by sample, and the left-out arrays."""
    with open_files(path, SourceOptions(**options)) as files:
        block = files.read(0, files.samples)
        samples = [block.sample(number) for number in range(len(block))]
        return {name: [sample[name] for sample in samples] for name in block.schema.names}, dict(files.skipped)


def same(seen: list[Any], values: np.ndarray[Any, Any], starts: np.ndarray[Any, Any] = OFFSETS) -> None:
    assert len(seen) == len(starts) - 1
    for number, value in enumerate(seen):
        np.testing.assert_array_equal(value, values[starts[number] : starts[number + 1]])


@pytest.mark.parametrize("write", WRITERS)
@pytest.mark.parametrize(
    ("name", "marks"),
    [
        ("offsets", OFFSETS),
        ("indptr", OFFSETS.astype("<i4")),
        ("values_offsets", OFFSETS.astype("<u8")),
        ("row_splits", OFFSETS),
        ("cu_seqlens", OFFSETS.astype("<i4")),
        ("lengths", LENGTHS),
        ("counts", LENGTHS.astype("<u2")),
    ],
)
def test_values_with_offsets_are_samples_of_different_size(name: str, marks: Any, write: Write, tmp_path: Path) -> None:
    labels = np.arange(len(LENGTHS))
    path = write(tmp_path / "flat", {"values": VALUES, name: marks, "label": labels})
    seen, skipped = read(path)
    same(seen["values"], VALUES)
    assert [int(label) for label in seen["label"]] == labels.tolist()
    assert skipped[name].startswith("it says where each sample of 'values' begins")


@pytest.mark.parametrize("write", WRITERS)
def test_points_and_sparse_rows_with_offsets_are_samples(write: Write, tmp_path: Path) -> None:
    points = np.arange(3 * TOTAL, dtype="<f8").reshape(TOTAL, 3)
    seen, _ = read(write(tmp_path / "points", {"xyz": points, "feature": VALUES, "ptr": OFFSETS}))
    same(seen["xyz"], points)
    same(seen["feature"], VALUES)
    if write is not npz:
        sparse = {"X/data": VALUES, "X/indices": np.arange(TOTAL), "X/indptr": OFFSETS, "y": np.arange(len(LENGTHS))}
        seen, skipped = read(write(tmp_path / "sparse", sparse))
        same(seen["X/data"], VALUES)
        same(seen["X/indices"], np.arange(TOTAL))
        assert "X/indptr" in skipped


@pytest.mark.parametrize("write", WRITERS)
def test_a_single_requested_field_still_uses_its_offsets(write: Write, tmp_path: Path) -> None:
    path = write(tmp_path / "flat", {"values": VALUES, "offsets": OFFSETS, "label": np.arange(len(LENGTHS))})
    seen, _ = read(path, fields=("values",))
    same(seen["values"], VALUES)
    seen, _ = read(path, fields=("signal",), rename={"values": "signal"})
    same(seen["signal"], VALUES)
    seen, _ = read(path, fields=("offsets",))
    assert [int(value) for value in seen["offsets"]] == OFFSETS.tolist()
    with pytest.raises(UsageError, match="unknown field 'nothing'"):
        read(path, fields=("nothing",))


@pytest.mark.parametrize("write", WRITERS)
@pytest.mark.parametrize("offsets", [OFFSETS[:-1], OFFSETS + 1, np.append(OFFSETS, TOTAL + 5)])
def test_invalid_offsets_are_refused_and_the_advice_works(offsets: Any, write: Write, tmp_path: Path) -> None:
    path = write(tmp_path / "flat", {"values": VALUES, "offsets": offsets})
    with pytest.raises(BadObject, match=r"'offsets' looks like offsets of samples in 'values'.*\n.*--fields values"):
        read(path)
    seen, _ = read(path, fields=("values",))
    assert len(seen["values"]) == TOTAL


@pytest.mark.parametrize("write", WRITERS)
def test_decreasing_offsets_are_refused(write: Write, tmp_path: Path) -> None:
    offsets = OFFSETS.copy()
    offsets[3], offsets[4] = offsets[4], offsets[3]
    with pytest.raises(BadObject, match="'offsets' has offsets that decrease or point outside"):
        read(write(tmp_path / "flat", {"values": VALUES, "offsets": offsets}))


@pytest.mark.parametrize("write", WRITERS)
def test_row_fields_named_like_offsets_stay_fields(write: Write, tmp_path: Path) -> None:
    rows = {"x": np.ones((9, 4)), "offset": np.arange(9), "counts": np.arange(9) * 2, "length": np.arange(9.0)}
    seen, skipped = read(write(tmp_path / "rows", rows))
    assert {name: len(values) for name, values in seen.items()} == dict.fromkeys(rows, 9)
    assert not skipped


@pytest.mark.parametrize("write", WRITERS)
def test_a_pull_of_flat_values_names_the_offsets_and_delivers_ragged_batches(write: Write, tmp_path: Path) -> None:
    path = write(tmp_path / "flat", {"values": VALUES, "offsets": OFFSETS})
    with cachetool.open_cache(tmp_path / "cache", max_size="50MB") as cache:
        result = cache.pull(str(path), all=True)
    assert result.samples == len(LENGTHS)
    assert dict(result.left_out)["offsets"].startswith("it says where each sample of 'values' begins")
    with Loader(tmp_path / "cache", batch_size=4, workers=0) as loader:
        columns = [batch["values"] for batch in loader]
    assert all(isinstance(column, Ragged) for column in columns)
    assert sorted(len(column[at]) for column in columns for at in range(len(column))) == sorted(LENGTHS.tolist())


@settings(max_examples=40, deadline=None)
@given(lengths=st.lists(st.integers(0, 9), min_size=1, max_size=30), by=st.sampled_from(["offsets", "lengths"]))
def test_values_of_any_lengths_are_read_back(
    lengths: list[int], by: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    starts = np.concatenate([[0], np.cumsum(lengths)])
    values = np.arange(int(starts[-1]), dtype="<i8")
    if len(values) == len(lengths) or not len(values):
        return  # rows and values cannot be distinguished, or there are none
    marks = starts if by == "offsets" else np.array(lengths)
    path = hdf5(tmp_path_factory.mktemp("any") / "flat", {"values": values, by: marks})
    seen, _ = read(path)
    same(seen["values"], values, starts)
