"""Files of one folder with slightly different contents: a pull reads the values of each file, or raises an error that
names it.
"""

from __future__ import annotations

import gzip
import io
import tarfile
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import zarr

import cachetool
from cachetool.core.block import Block
from cachetool.core.errors import BadObject, UsageError
from cachetool.core.schema import Field, Schema
from cachetool.formats import get_format
from cachetool.formats.shard import open_shard
from cachetool.sources.shapes import fitted
from tests.sources.files import open_files
from tests.sources.test_files_tfrecord import example
from tests.sources.test_files_tfrecord import write as write_records

ROWS = 40


def numbered(*arrays: tuple[str, Any, tuple[int, ...]]) -> dict[str, np.ndarray[Any, Any]]:
    """Return named arrays with these dtypes and row shapes, whose values are all different."""
    return {
        name: (np.arange(ROWS * int(np.prod(row)), dtype="<i8").reshape(ROWS, *row) * 2 + at).astype(dtype)
        for at, (name, dtype, row) in enumerate(sorted(arrays))
    }


def write_hdf5(path: Path, arrays: dict[str, np.ndarray[Any, Any]], *order: str) -> None:
    with h5py.File(path, "w", track_order=True) as file:
        for name in order:
            file[name] = arrays[name]


def pulled(url: Path, cache: Path, **options: Any) -> dict[str, dict[str, Any]]:
    """Return all samples by key, as they are in the shards."""
    found: dict[str, dict[str, Any]] = {}
    with cachetool.open_cache(cache, max_size="200MB") as opened:
        opened.pull(str(url), all=True, workers=1, **options)
        for shard in opened.shards("default"):
            with open_shard(shard.path, get_format("lmdb"), shard.schema) as reader:
                block = reader.read(0, reader.samples)
            found.update((sample["__key__"], sample) for sample in map(block.sample, range(len(block))))
    return found


@pytest.mark.parametrize(
    "arrays",
    [
        pytest.param(numbered(("x", "<f4", (3,)), ("y", "<f4", (3,))), id="of one dtype"),
        pytest.param(numbered(("x", "<f4", ()), ("y", "<i8", ())), id="of other dtypes"),
        pytest.param(numbered(("x", ">i4", (2000,)), ("y", "<i2", (5,))), id="large and small"),
    ],
)
def test_fields_in_a_different_order_in_each_file_keep_their_values(
    arrays: dict[str, np.ndarray[Any, Any]], tmp_path: Path
) -> None:
    (tmp_path / "files").mkdir()
    write_hdf5(tmp_path / "files" / "f0.h5", arrays, "x", "y")
    write_hdf5(tmp_path / "files" / "f1.h5", arrays, "y", "x")
    found = pulled(tmp_path / "files", tmp_path / "cache")

    assert sorted(found) == sorted(f"f{file}.h5#{row}" for file in range(2) for row in range(ROWS))
    for key, sample in found.items():
        for name, array in arrays.items():
            assert sample[name].dtype == array.dtype.newbyteorder("<")
            np.testing.assert_array_equal(sample[name], array[int(key.rpartition("#")[2])])


def test_a_file_with_another_dtype_of_a_field_is_named(tmp_path: Path) -> None:
    (tmp_path / "files").mkdir()
    write_hdf5(tmp_path / "files" / "f0.h5", numbered(("x", "<f4", ()), ("y", "<i4", ())), "x", "y")
    write_hdf5(tmp_path / "files" / "f1.h5", numbered(("x", "<i4", ()), ("y", "<i4", ())), "y", "x")
    with pytest.raises(BadObject, match=r"'x' is .*f0\.h5 but .*f1\.h5"):
        pulled(tmp_path / "files", tmp_path / "cache")


def write_keys(path: Path, keys: np.ndarray[Any, Any]) -> None:
    numbers = np.arange(len(keys), dtype="<i8")
    if path.suffix == ".parquet":
        parquet = pytest.importorskip("pyarrow.parquet")
        parquet.write_table(pytest.importorskip("pyarrow").table({"__key__": keys, "number": numbers}), path)
    elif path.suffix == ".zarr":
        group = zarr.open_group(path, mode="w")
        group.create_array("__key__", data=keys)
        group.create_array("number", data=numbers)
    else:
        with h5py.File(path, "w") as file:
            file["__key__"], file["number"] = keys, numbers


@pytest.mark.parametrize("name", ["rows.h5", "rows.zarr", "rows.parquet"])
def test_a_column_named_like_the_key_does_not_replace_the_keys(name: str, tmp_path: Path) -> None:
    write_keys(tmp_path / name, np.arange(ROWS, dtype="|u1"))
    found = pulled(tmp_path / name, tmp_path / "cache")

    assert {key: int(sample["number"]) for key, sample in found.items()} == {f"{name}#{at}": at for at in range(ROWS)}


def test_a_column_named_like_the_key_is_reported_with_the_reason(tmp_path: Path) -> None:
    np.savez(tmp_path / "rows.npz", __key__=np.arange(ROWS, dtype="|u1"), number=np.arange(ROWS))
    with open_files(tmp_path / "rows.npz") as source:
        assert source.schema.names == ("number",)
        assert source.skipped == (
            ("__key__", "the name is reserved for keys of samples, which are text, but the values are uint8"),
        )


def test_rows_with_text_keys_keep_them(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "rows.h5", "w") as file:
        file["__key__"], file["number"] = [f"mine {number}" for number in range(ROWS)], np.arange(ROWS)
    assert sorted(pulled(tmp_path / "rows.h5", tmp_path / "cache")) == sorted(f"mine {at}" for at in range(ROWS))


def test_zarr_arrays_whose_rows_and_chunks_are_empty_are_samples(tmp_path: Path) -> None:
    zarr.create_array(tmp_path / "none.zarr", shape=(4, 0), chunks=(4, 0), dtype="f4", zarr_format=3)
    found = pulled(tmp_path / "none.zarr", tmp_path / "cache")

    assert sorted(found) == [f"none.zarr#{row}" for row in range(4)]
    assert {(sample["none"].dtype.str, sample["none"].shape) for sample in found.values()} == {("<f4", (0,))}


def test_parquet_columns_are_read_by_their_own_names(tmp_path: Path) -> None:
    """The rule also holds if another name, or two joined names, would be a path into a list or a struct."""
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    arrays = {
        "s": pyarrow.array([{"x": -1}] * ROWS),
        "s.x": np.arange(ROWS, dtype="<i4"),
        "l.list.element": np.arange(ROWS) / 2,
        "l": pyarrow.array([[at] * (at % 3) for at in range(ROWS)]),
        "twice": np.arange(ROWS),
        "again": np.arange(ROWS) / 4,
    }
    names = ["twice" if name == "again" else name for name in arrays]
    table = pyarrow.Table.from_arrays([pyarrow.array(array) for array in arrays.values()], names=names)
    parquet.write_table(table, tmp_path / "rows.parquet", row_group_size=7)
    found = pulled(tmp_path / "rows.parquet", tmp_path / "cache")

    assert len(found) == ROWS
    for key, sample in found.items():
        at = int(key.rpartition("#")[2])
        assert sorted(sample) == ["__key__", "l", "l.list.element", "s.x"]
        assert (sample["s.x"], sample["l.list.element"], sample["l"].tolist()) == (at, at / 2, [at] * (at % 3))
    with pytest.raises(UsageError, match="'twice' cannot be read: another column has the same name"):
        pulled(tmp_path / "rows.parquet", tmp_path / "other", fields=["twice"])


def test_npy_files_of_different_dtypes_are_named(tmp_path: Path) -> None:
    (tmp_path / "files").mkdir()
    for name, dtype in (("a", "<f4"), ("b", "<f4"), ("c", "<i4")):
        np.save(tmp_path / "files" / f"{name}.npy", np.arange(ROWS, dtype=dtype))
    with pytest.raises(BadObject, match=r"'npy' is float32 in a\.npy but int32 in c\.npy"):
        pulled(tmp_path / "files", tmp_path / "cache", read_as="files")


def test_a_list_missing_in_some_record_files_is_empty_there(tmp_path: Path) -> None:
    (tmp_path / "files").mkdir()
    numbers = np.arange(ROWS)
    for name, arrays in {"a": {"list": numbers, "number": numbers}, "b": {"number": numbers}}.items():
        np.savez(tmp_path / f"{name}.npz", **arrays)
        cachetool.convert(tmp_path / f"{name}.npz", to="tfrecord", out=tmp_path / name)
        (tmp_path / name / "part-00000.tfrecord").rename(tmp_path / "files" / f"{name}.tfrecord")
    found = pulled(tmp_path / "files", tmp_path / "cache")

    assert len(found) == 2 * ROWS
    for key, sample in found.items():
        number = int(key.rpartition("#")[2])
        assert int(sample["number"]) == number
        assert sample["list"].tolist() == ([number] if key.startswith("a") else [])


def write_tar(path: Path, samples: dict[str, dict[str, Any]]) -> None:
    with tarfile.open(path, "w") as archive:
        for key, fields in samples.items():
            for name, value in fields.items():
                file = io.BytesIO()
                np.save(file, value)
                info = tarfile.TarInfo(f"{key}.{name}.npy")
                info.size = file.tell()
                archive.addfile(info, io.BytesIO(file.getvalue()))


def test_archives_with_different_fields_are_named(tmp_path: Path) -> None:
    (tmp_path / "files").mkdir()
    write_tar(tmp_path / "files" / "a.tar", {f"a{n}": {"x": np.int64(n), "wave": np.arange(n)} for n in range(3)})
    write_tar(tmp_path / "files" / "b.tar", {f"b{n}": {"x": np.int64(n)} for n in range(3)})
    with pytest.raises(BadObject, match=r"[ab]\.tar and [ab]\.tar differ in their fields: wave"):
        pulled(tmp_path / "files", tmp_path / "cache")


def test_an_array_missing_in_an_archive_is_an_error() -> None:
    """The rule also holds if that archive is not among those that decided the fields."""
    schema = Schema((Field("x", "<i8"), Field("wave", "<i8", (None,))))
    block = Block.from_samples(schema.select(["x"]), [{"x": 1}])
    with pytest.raises(BadObject, match=r"'b\.tar' has the fields x, but the dataset has x, wave"):
        fitted(block, schema, "b.tar")


@pytest.mark.parametrize("kind", ["tar", "tfrecord", "tfrecord.gz"])
def test_an_empty_archive_among_others_has_no_samples(kind: str, tmp_path: Path) -> None:
    """Both pull and convert behave so, as with HDF5 and Parquet files. Without another file it is an error."""
    files = tmp_path / "files"
    files.mkdir()
    for name, count in (("a", 2), ("b", 0), ("c", 3)):
        path = files / f"{name}.{kind}"
        if kind == "tar":
            write_tar(path, {f"{name}{n}": {"x": np.int64(n)} for n in range(count)})
        else:
            write_records(path, *[example(x=b"\x1a\x03\x0a\x01" + bytes([n])) for n in range(count)])
            if kind.endswith("gz"):
                path.write_bytes(gzip.compress(path.read_bytes()))

    result = cachetool.convert(files, to="hdf5", out=tmp_path / "out", workers=1)
    assert result.samples == 5
    assert result.skipped == ((f"b.{kind}", "no samples in it"),)
    assert len(pulled(files, tmp_path / "cache")) == 5
    for name in ("a", "c"):
        (files / f"{name}.{kind}").unlink()
    with pytest.raises(BadObject, match=rf"b\.{kind}: no (samples|records) in it"):
        pulled(files / f"b.{kind}", tmp_path / "cache", dataset="empty")


def test_files_of_samples_among_other_objects_are_named_with_the_option_that_reads_them(tmp_path: Path) -> None:
    files = tmp_path / "files"
    files.mkdir()
    write_hdf5(files / "a.h5", numbered(("x", "<f4", ())), "x")
    (files / "plot.pdf").write_bytes(bytes(100_000))
    for verb in (
        lambda **how: cachetool.convert(files, to="hdf5", out=tmp_path / "out", **how).samples,
        lambda **how: len(pulled(files, tmp_path / "cache", **how)),
    ):
        with pytest.raises(BadObject, match="samples in the h5 files with --read-as files"):
            verb()
        assert verb(read_as="files") == ROWS
    write_tar(files / "b.tar", {str(number): {"x": np.int64(number)} for number in range(100)})
    assert len(pulled(files, tmp_path / "more", read_as="files")) == 100, "the files with the most bytes"
