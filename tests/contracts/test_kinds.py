"""The contract of every kind of file: each test runs for all installed kinds, including those of other packages.

A package that adds a kind can provide a test file: a function ``write(path, rows)`` beside its ``KIND`` writes one.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import h5py
import lmdb
import numpy as np
import pytest
import zarr

import cachetool
from cachetool.core.errors import BadObject, CacheToolError
from cachetool.sources.kinds import Kind, kind_of, kind_of_head, kinds, locate
from cachetool.sources.options import SourceOptions
from cachetool.sources.registry import list_source, open_source
from tests.servers import Http, folder_server
from tests.sources.classic import classic
from tests.sources.files import open_files
from tests.sources.test_files_tfrecord import example
from tests.sources.test_files_tfrecord import write as write_records

X = np.arange(50 * 6, dtype="<f4").reshape(50, 6)


def write_hdf5(path: Path) -> None:
    with h5py.File(path, "w") as file:
        file.create_dataset("x", data=X, chunks=(8, 6))


def write_parquet(path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    rows = pyarrow.FixedSizeListArray.from_arrays(pyarrow.array(X.reshape(-1)), 6)
    pytest.importorskip("pyarrow.parquet").write_table(pyarrow.table({"x": rows}), path, row_group_size=9)


def write_tar(path: Path) -> None:
    with tarfile.open(path, "w") as archive:
        for number, row in enumerate(X):
            out = io.BytesIO()
            np.save(out, row)
            info = tarfile.TarInfo(f"{number:03d}.x.npy")
            info.size = len(out.getvalue())
            archive.addfile(info, io.BytesIO(out.getvalue()))


def write_lmdb(path: Path) -> None:
    env = lmdb.open(str(path), subdir=False, lib_version=0, lock=False)
    with env.begin(write=True) as txn:
        for number, row in enumerate(X):
            txn.put(b"%03d" % number, row.tobytes())
    env.close()


def write_netcdf3(path: Path) -> None:
    """Write records of two variables, so that the rows of one do not lie one after another."""
    along = ("time", "six")
    variables = {"x": (along, X, {}), "y": (("time",), np.arange(50, dtype="i2"), {})}
    path.write_bytes(classic(variables, {"time": None, "six": 6}, version=2))


WRITERS: dict[str, Callable[[Path], Any]] = {
    "npy": lambda path: np.save(path, X),
    "npz": lambda path: np.savez(path, x=X),
    "hdf5": write_hdf5,
    "netcdf3": write_netcdf3,
    "zarr": lambda path: zarr.open_group(path, mode="w").create_array("x", data=X, chunks=(8, 6)),
    "parquet": write_parquet,
    "tar": write_tar,
    "tfrecord": lambda path: write_records(path, *[example(x=b"\x12\x1a\x0a\x18" + row.tobytes()) for row in X]),
    "lmdb": write_lmdb,
}


@pytest.fixture(params=kinds())
def kind(request: pytest.FixtureRequest) -> Kind:
    return kinds()[request.param]


@pytest.fixture
def options(kind: Kind) -> dict[str, Any]:
    """Return options with which the samples are the rows of ``X``, named ``x``."""
    return {"value_format": "raw:float32,6", "rename": {"value": "x"}} if kind.name == "lmdb" else {}


@pytest.fixture
def path(kind: Kind, tmp_path: Path) -> Path:
    """Write a file of this kind, alone in its folder."""
    place = tmp_path / "place" / f"x{kind.suffixes[0]}"
    place.parent.mkdir()
    if kind.name in WRITERS:
        WRITERS[kind.name](place)
    else:
        importlib.import_module(kind.opener.partition(":")[0]).write(str(place), X)
    return place


@pytest.fixture
def server(path: Path) -> Iterator[Http]:
    with folder_server(path.parent, index="json") as found:
        yield found


def test_a_file_is_recognised_by_its_name_and_by_its_first_bytes(kind: Kind, path: Path, tmp_path: Path) -> None:
    assert all(kind_of(f"a{suffix}") is kind and kind_of(f"A{suffix}".upper()) is kind for suffix in kind.suffixes)
    if path.is_file():
        assert locate(str(path)) == (str(path.parent), path.name, kind)
        head = path.read_bytes()[:512]
        if kind_of_head(head) is not None:
            assert kind_of_head(head) is kind
            assert locate(str(path.rename(tmp_path / "data"))) == (str(tmp_path), "data", kind)


def test_all_samples_are_read_in_order_from_a_disk_and_from_a_server(
    path: Path, server: Http, options: dict[str, Any]
) -> None:
    for place in (path, f"{server.url}/{path.name}"):
        with open_files(place, SourceOptions(**options)) as source:
            assert source.samples == len(X)
            assert source.schema["x"].describe() == "float32 (6,)"
            np.testing.assert_array_equal(
                np.concatenate([np.asarray(block.columns["x"]) for block in source.blocks()]), X
            )


def test_any_range_of_samples_can_be_read_repeatedly(path: Path, options: dict[str, Any]) -> None:
    with open_files(path, SourceOptions(**options)) as source:
        for start, stop in [(20, 50), (0, 3), (3, 21), (7, 7), (0, 50)]:
            np.testing.assert_array_equal(source.read(start, stop).columns["x"], X[start:stop])
        source.close()
        np.testing.assert_array_equal(source.read(49, 50).columns["x"], X[49:])


def test_samples_are_drawn_in_random_order_and_each_once(
    path: Path, server: Http, options: dict[str, Any], tmp_path: Path
) -> None:
    given = SourceOptions(**options)
    url = f"{server.url}/{path.name}"
    list_source(url, tmp_path / "listing", given)
    with contextlib.closing(open_source(url, tmp_path / "listing", given)) as source:
        draws = source.order(seed=3, pass_number=0)[np.arange(source.units)]
        schema = source.probe(draws[:4]).schema
        blocks = [piece.block for piece in source.read(draws, schema=schema)]
    rows = np.concatenate([np.asarray(block.columns["x"]) for block in blocks])
    np.testing.assert_array_equal(rows[np.argsort(rows[:, 0])], X)
    keys = [str(block.sample(at)["__key__"]) for block in blocks for at in range(len(block))]
    assert len(set(keys)) == len(X)


def test_pull_and_convert_bring_the_same_samples(path: Path, options: dict[str, Any], tmp_path: Path) -> None:
    made = cachetool.convert(path, to="lmdb", out=tmp_path / "out", key=False, workers=1, **options)
    with cachetool.open_cache(tmp_path / "cache", max_size="20MB") as cache:
        cache.pull(path, all=True, order="sequential", key=False, workers=1, **options)
        found = cache.convert(to="hdf5", out=tmp_path / "pulled", workers=1)
    assert (made.samples, made.digest) == (found.samples, found.digest)


def test_fields_are_chosen_and_renamed(kind: Kind, path: Path) -> None:
    old = "value" if kind.name == "lmdb" else "x"
    how = SourceOptions(fields=("image",), rename={old: "image"}, key=False)
    with open_files(path, how) as source:
        assert source.schema.names == ("image",)
    with pytest.raises(CacheToolError, match="nothing"):
        open_files(path, SourceOptions(fields=("nothing",)))


def test_a_truncated_file_is_an_error_that_names_it(kind: Kind, path: Path, options: dict[str, Any]) -> None:
    if path.is_dir():
        pytest.skip("a folder is not cut")
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2 + 3])
    with pytest.raises(BadObject, match=path.name), open_files(path, SourceOptions(**options)) as source:
        list(source.blocks())


def test_a_file_that_changes_after_it_was_listed_is_never_read(
    path: Path, server: Http, options: dict[str, Any]
) -> None:
    import os

    for place in (path, f"{server.url}/{path.name}"):
        source = open_files(place, SourceOptions(**options))
        for file in [path, *path.rglob("*")]:
            if file.is_file():
                os.utime(file, (1, 1 if place is path else 2))
        with source, pytest.raises(BadObject, match="changed since it was listed"):
            list(source.blocks())
