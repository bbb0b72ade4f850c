"""``fields`` with a minus before each name: all fields except these, for every kind of source."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import lmdb
import numpy as np
import pytest
import zarr

import cachetool
from cachetool.core.errors import UsageError
from cachetool.sources.options import SourceOptions
from tests.sources.files import open_files, samples
from tests.sources.test_files_tfrecord import example
from tests.sources.test_files_tfrecord import write as write_records
from tests.sources.test_remote_mixed import pulled

A, B, C = np.arange(4), np.arange(4) + 0.5, np.arange(8, dtype="u1").reshape(4, 2)


def write_hdf5(path: Path) -> None:
    with h5py.File(path, "w") as file:
        file["a"], file["b"], file["c"] = A, B, C


def write_zarr(path: Path) -> None:
    group = zarr.open_group(path, mode="w")
    for name, array in (("a", A), ("b", B), ("c", C)):
        group.create_array(name, data=array)


def write_parquet(path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    pytest.importorskip("pyarrow.parquet").write_table(pyarrow.table({"a": A, "b": B, "c": C.tolist()}), path)


def members() -> list[tuple[str, bytes]]:
    """Create objects of four samples; ``c`` is in a JSON beside other keys."""
    out = []
    for at in range(4):
        for name, array in (("a", A), ("b", B)):
            body = io.BytesIO()
            np.save(body, array[at])
            out.append((f"{at}.{name}.npy", body.getvalue()))
        out.append((f"{at}.json", b'{"c": %d}' % at))
    return out


def write_objects(path: Path) -> None:
    path.mkdir()
    for name, body in members():
        (path / name).write_bytes(body)


def write_tar(path: Path) -> None:
    with tarfile.open(path, "w") as tar:
        for name, body in members():
            info = tarfile.TarInfo(name)
            info.size = len(body)
            tar.addfile(info, io.BytesIO(body))


def write_tfrecord(path: Path) -> None:
    write_records(path, *[example(**{name: b"\x1a\x03\x0a\x01" + bytes([at]) for name in "abc"}) for at in range(4)])


WRITERS: dict[str, Callable[[Path], Any]] = {
    "x.h5": write_hdf5,
    "x.zarr": write_zarr,
    "x.npz": lambda path: np.savez(path, a=A, b=B, c=C),
    "x.parquet": write_parquet,
    "x.tar": write_tar,
    "x.tfrecord": write_tfrecord,
    "objects": write_objects,
}


@pytest.fixture(params=WRITERS)
def path(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Create a source of the fields a, b and c."""
    WRITERS[request.param](tmp_path / request.param)
    return tmp_path / str(request.param)


def test_a_minus_leaves_out_a_field_and_keeps_the_others(path: Path, tmp_path: Path) -> None:
    assert {*samples(path, fields=("-b",))[0]} - {"__key__"} == {"a", "c"}
    assert {*samples(path, fields=("-a", "-c"))[0]} - {"__key__"} == {"b"}
    found = pulled(path, tmp_path / "cache", fields=["-b"])
    assert len(found) == 4
    assert all({*sample} == {"a", "c", "__key__"} for sample in found.values())


def test_a_minus_refers_to_the_name_after_renaming(path: Path) -> None:
    assert {*samples(path, rename={"b": "x"}, fields=("-x",))[0]} - {"__key__"} == {"a", "c"}


def test_leaving_out_a_missing_field_is_refused_with_the_existing_ones(path: Path, tmp_path: Path) -> None:
    """Fields of TFRecord files, whose records need not have all features, only after all records were read."""
    with pytest.raises(
        UsageError, match=r"unknown field 'typo'.*a, b, c|unknown field 'typo'.*a, c, b|unknown field 'typo'.*c, "
    ):
        samples(path, fields=("-typo",))
    if path.suffix != ".tfrecord":
        with pytest.raises(UsageError, match="unknown field 'typo'"):
            pulled(path, tmp_path / "cache", fields=["-typo"])


def test_fields_left_out_on_request_are_not_reported(path: Path, tmp_path: Path) -> None:
    with cachetool.open_cache(tmp_path / "cache", max_size="20MB") as cache:
        assert cache.pull(path, all=True, fields=["-b"]).left_out == ()


def test_convert_and_a_second_pull_leave_the_same_fields_out(path: Path, tmp_path: Path) -> None:
    cachetool.convert(path, to="hdf5", out=tmp_path / "out", fields=["-c"])
    with h5py.File(tmp_path / "out" / "part-00000.h5") as file:
        assert {"a", "b"} == {*file} - {"__key__", "__key__.offsets"}
    with cachetool.open_cache(tmp_path / "cache", max_size="20MB") as cache:
        cache.pull(path, samples=1, fields=["-c"], workers=1)
        cache.pull(path, all=True, workers=1)
        assert {*cache.schema("default").names} == {"a", "b", "__key__"}


def test_a_file_of_a_set_may_lack_the_field_that_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "set").mkdir()
    with h5py.File(tmp_path / "set" / "0.h5", "w") as file:
        file["a"], file["b"] = A, B
    with h5py.File(tmp_path / "set" / "1.h5", "w") as file:
        file["a"] = A
    assert len(samples(tmp_path / "set", fields=("-b",))) == 8


def test_an_unsupported_field_can_be_left_out_too(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file["a"], file["größe"], file["single"] = A, B, 3
    with open_files(tmp_path / "x.h5", SourceOptions(fields=("-größe", "-single"))) as source:
        assert source.schema.names == ("a",)


def test_the_only_values_of_a_database_cannot_be_left_out(tmp_path: Path) -> None:
    with lmdb.open(str(tmp_path / "x.lmdb"), subdir=False, lib_version=0) as env, env.begin(write=True) as txn:
        txn.put(b"a", b"value")
    with pytest.raises(UsageError, match="'value'"):
        samples(tmp_path / "x.lmdb", fields=("-value",))


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        (("a", "-b"), "but not both: 'a', '-b'"),
        (("-b", "a", "c"), "but not both: 'a', '-b'"),
        (("-",), "a minus without a name"),
        (("-__key__",), "--no-key"),
        (("-b", "-__key__"), "--no-key"),
    ],
)
def test_an_invalid_choice_of_fields_is_refused(fields: tuple[str, ...], reason: str) -> None:
    with pytest.raises(UsageError, match=reason):
        SourceOptions(fields=fields)


def test_options_with_a_minus_go_through_json_unchanged() -> None:
    options = SourceOptions(fields=("-b", "-c"))
    assert SourceOptions.from_json(options.to_json()) == options
    assert (options.chosen, options.dropped) == (None, {"b", "c"})
