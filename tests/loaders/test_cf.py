"""``decode="cf"`` of a loader: the values that stored numbers stand for, in every format, and the facts beside the
schema that it needs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import zarr
from hypothesis import given
from hypothesis import strategies as st

from cachetool.cache import CacheDir, open_cache
from cachetool.core import cf
from cachetool.core.errors import CacheToolError, UsageError
from cachetool.core.schema import Field, Schema, agreed
from cachetool.loaders.feed.cf import CFDecoder
from cachetool.loaders.numpy import Loader
from tests.commands import run_command

FORMATS = ("lmdb", "hdf5", "zarr", "tfrecord")
ROWS = 24
SCALED: dict[str, Any] = {"scale_factor": 0.01, "add_offset": 273.15, "_FillValue": np.int16(-9999)}
HOURS: dict[str, Any] = {"units": "hours since 2001-02-03", "calendar": "proleptic_gregorian"}


def arrays() -> dict[str, tuple[Any, dict[str, Any], tuple[str, ...]]]:
    """Return packed arrays with their attributes and the names of their dimensions."""
    packed = np.random.default_rng(0).integers(-3000, 3000, (ROWS, 3, 4)).astype("i2")
    packed[5, 1] = -9999
    floats = np.arange(ROWS * 3, dtype="f4").reshape(ROWS, 3)
    floats[7] = -1
    wide = np.arange(ROWS, dtype="i4") * 10**6
    return {
        "t2m": (packed, SCALED, ("time", "lat", "lon")),
        "f": (floats, {"_FillValue": np.float32(-1)}, ("time", "lat")),
        "u": (np.arange(ROWS, dtype="u1"), {"scale_factor": 0.5, "_FillValue": np.uint8(3)}, ("time",)),
        "w": (wide, {"scale_factor": 0.5}, ("time",)),
        "time": (np.arange(ROWS, dtype="i8"), HOURS, ("time",)),
        "plain": (np.arange(ROWS), {}, ("time",)),
    }


def write(path: Path, **changed: Any) -> Path:
    """Write the arrays as netCDF4 or xarray would; ``changed`` are attributes of ``t2m``."""
    if path.suffix == ".zarr":
        group = zarr.open_group(path, mode="w", zarr_format=3)
        for name, (values, attributes, dims) in arrays().items():
            array = group.create_array(name, data=values, dimension_names=dims)
            array.attrs.update({key: getattr(value, "item", lambda v=value: v)() for key, value in attributes.items()})
        return path
    with h5py.File(path, "w") as file:
        for name, size in (("time", ROWS), ("lat", 3), ("lon", 4)):
            file[name] = arrays()[name][0] if name in arrays() else np.arange(size)
            file[name].make_scale(name)
        for name, (values, attributes, dims) in arrays().items():
            data = file[name] if name in file else file.create_dataset(name, data=values)
            data.attrs.update(attributes | (changed if name == "t2m" else {}))
            if name != "time":
                for axis, dim in enumerate(dims):
                    data.dims[axis].attach_scale(file[dim])
    return path


def pull(path: Path, cache: Path, *options: object, dataset: str = "data") -> None:
    words = ("pull", path, "--all", "--dataset", dataset, "--cache", cache, "--max-size", "50MB", *options)
    run(*words, folder=path.parent)


def run(*words: object, folder: Path) -> None:
    done = run_command(*words, folder=folder)
    assert done.returncode == 0, done.stderr


def read(cache: Path | str | CacheDir, **options: Any) -> dict[str, Any]:
    """Return the columns of one epoch, sorted by ``plain``."""
    with Loader(cache, batch_size=7, epochs=1, drop_last=False, **options) as loader:
        batches = [{name: np.array(batch[name]) for name in batch} for batch in loader]
    columns = {name: np.concatenate([batch[name] for batch in batches]) for name in batches[0]}
    order = np.argsort(columns["plain"])
    return {name: column[order] for name, column in columns.items() if name != "__key__"}


def same(got: dict[str, Any], wanted: dict[str, Any]) -> None:
    assert got.keys() == wanted.keys()
    for name, column in wanted.items():
        assert got[name].dtype == column.dtype, name
        np.testing.assert_array_equal(got[name], column, err_msg=name)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("end", ["nc.h5", "zarr"])
def test_the_values_are_those_of_decode_cf_of_a_pull(tmp_path: Path, end: str, format: str) -> None:
    path = write(tmp_path / f"x.{end}")
    pull(path, tmp_path / "c", "--to", format)
    pull(path, tmp_path / "c", "--decode", "cf", dataset="decoded")
    wanted = read(tmp_path / "c", dataset="decoded")
    assert wanted["t2m"].dtype == np.float32
    assert np.isnan(wanted["t2m"][5, 1]).all()
    assert wanted["time"][2] == np.datetime64("2001-02-03T02")
    same(read(tmp_path / "c", dataset="data", decode="cf"), wanted)
    same(read(tmp_path / "c", dataset="data", decode="cf", workers=0, verify=True), wanted)
    some = read(tmp_path / "c", dataset="data", decode={"t2m": "cf"})
    assert some["f"][7, 0] == -1
    np.testing.assert_array_equal(some["t2m"], wanted["t2m"])


@pytest.mark.parametrize("end", ["nc.h5", "zarr"])
def test_dimensions_and_packing_stand_beside_the_schema(tmp_path: Path, end: str) -> None:
    pull(write(tmp_path / f"x.{end}"), tmp_path / "c", "--rename", "t2m=warm")
    pull(tmp_path / f"x.{end}", tmp_path / "c", "--decode", "cf", "--fields", "t2m,plain", dataset="decoded")
    with open_cache(tmp_path / "c") as cache:
        field, decoded = cache.schema("data")["warm"], cache.schema("decoded")["t2m"]
    assert field.dims == decoded.dims == ("lat", "lon")
    assert field.packing == {"scale_factor": 0.01, "add_offset": 273.15, "_FillValue": [-9999]}
    assert decoded.packing == {}


def test_both_facts_survive_conversions_and_exported_folders(tmp_path: Path) -> None:
    pull(write(tmp_path / "x.nc.h5"), tmp_path / "c")
    wanted = read(tmp_path / "c", decode="cf")
    with open_cache(tmp_path / "c") as cache:
        facts = [(field.dims, field.packing) for field in cache.schema("data")]
    run("convert", "--to", "hdf5", "--cache", tmp_path / "c", folder=tmp_path)
    same(read(tmp_path / "c", decode="cf"), wanted)
    for format in FORMATS:
        run("convert", "--cache", tmp_path / "c", "--to", format, "--out", tmp_path / format, folder=tmp_path)
        pull(tmp_path / format, tmp_path / f"c-{format}")
        same(read(tmp_path / f"c-{format}", decode="cf"), wanted)
        with open_cache(tmp_path / f"c-{format}") as cache:
            assert [(field.dims, field.packing) for field in cache.schema("data")] == facts


def test_files_that_differ_are_refused_with_the_way_out(tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    write(tmp_path / "d" / "0.h5")
    write(tmp_path / "d" / "1.h5", scale_factor=0.5)
    pull(tmp_path / "d", tmp_path / "c")
    for decode in ({"t2m": "cf"}, "cf"):
        with pytest.raises(UsageError, match=r"'t2m': its samples do not share .* --decode cf"):
            read(tmp_path / "c", decode=decode)
    with pytest.raises(UsageError, match="'plain': it has no CF attributes"):
        read(tmp_path / "c", decode={"plain": "cf"})
    assert read(tmp_path / "c", decode={"f": "cf"})["f"].shape == (2 * ROWS, 3)


def test_a_dataset_that_grows_by_other_attributes_is_not_decoded_by_the_first_ones(tmp_path: Path) -> None:
    pull(write(tmp_path / "a.h5"), tmp_path / "c")
    read(tmp_path / "c", decode={"t2m": "cf"})
    pull(write(tmp_path / "b.h5", add_offset=0.5), tmp_path / "c")
    with pytest.raises(UsageError, match="its samples do not share"):
        read(tmp_path / "c", decode={"t2m": "cf"})


def test_a_rebuilt_catalog_has_the_facts_that_hold_for_all_shards(tmp_path: Path) -> None:
    pull(write(tmp_path / "a.h5"), tmp_path / "c")
    pull(write(tmp_path / "b.h5", add_offset=0.5), tmp_path / "c")
    with open_cache(tmp_path / "c") as cache:
        before = cache.schema("data")
        catalog = cache.layout.catalog
    catalog.write_bytes(b"garbled")
    run("verify", "--repair", "--cache", tmp_path / "c", folder=tmp_path)
    with open_cache(tmp_path / "c") as cache:
        after = cache.schema("data")
        assert sum(shard.samples for shard in cache.shards()) == 2 * ROWS
    assert [(f.dims, f.packing) for f in after] == [(f.dims, f.packing) for f in before]
    assert after["t2m"].packing == cf.DIFFER
    assert after["u"].packing


def test_equal_schemas_may_have_other_facts_and_keep_their_fingerprint() -> None:
    bare = Schema((Field("x", "<i2", (3,)),))
    noted = Schema((Field("x", "<i2", (3,), (), ("a",), {"scale_factor": 2.0}),))
    assert bare == noted
    assert bare.fingerprint == noted.fingerprint
    assert Schema.from_json(json.loads(json.dumps(noted.to_json())))["x"].packing == {"scale_factor": 2.0}
    assert agreed(noted, bare)["x"].packing == cf.DIFFER
    assert agreed(noted, noted)["x"].dims == ("a",)


@pytest.mark.parametrize(
    "note",
    [
        {"dims": 3}, {"dims": ["a", "b"]}, {"dims": [7]}, {"dims": ["a" * 101]}, {"dims": ["a\n"]}, {"dims": None},
        {"packing": 3}, {"packing": {"other": 1}}, {"packing": {"scale_factor": "2"}}, {"packing": {"units": 3}},
        {"packing": {"_FillValue": [1] * 17}}, {"packing": {"_FillValue": [10**400]}}, {"packing": {"_Unsigned": []}},
        {"packing": {"add_offset": float("nan")}}, {"packing": {"units": "d" * 101}}, {"packing": None},
    ],
)  # fmt: skip
def test_damaged_facts_are_dropped(note: dict[str, Any]) -> None:
    field = Schema.from_json([{"name": "x", "dtype": "<i2", "shape": [3]} | note])["x"]
    assert (field.dims, field.packing) == ((), {})


NUMBERS = st.integers(-300, 300) | st.floats(-1e6, 1e6)


@given(
    dtype=st.sampled_from(["<i1", "<u1", "<i2", "<u2", "<i4", "<u8", "<f2", "<f4", "<f8"]),
    packing=st.fixed_dictionaries(
        {},
        optional={
            "scale_factor": NUMBERS.map(float), "add_offset": NUMBERS.map(float),
            "_FillValue": st.lists(NUMBERS, max_size=3),
            "missing_value": st.lists(NUMBERS, max_size=2), "_Unsigned": st.just("true"),
        },
    ),
    bits=st.binary(min_size=16, max_size=512),
)  # fmt: skip
def test_each_number_becomes_the_value_that_a_pull_computes(dtype: str, packing: dict[str, Any], bits: bytes) -> None:
    if np.dtype(dtype).kind == "f":
        packing = {name: value for name, value in packing.items() if name != "_Unsigned"}
    stored = np.frombuffer(bits[: len(bits) // 16 * 16], dtype=dtype).reshape(2, -1)
    field = Field("x", dtype, stored.shape[1:], (), (), packing)
    if not field.packing:
        return
    wanted_dtype, compute = cf.decoder(field.numpy, packing)  # type: ignore[misc]
    decoder = CFDecoder()
    assert decoder.field(field, lambda: (stored, str)).numpy == wanted_dtype
    out = np.empty(stored.shape, wanted_dtype)
    decoder.decode(stored, out, epoch=0, indices=np.arange(2), named=str)
    with np.errstate(all="ignore"):
        np.testing.assert_array_equal(out, compute(stored))


def test_times_outside_of_datetime64_are_named_with_their_sample(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file["t"] = np.array([1, 10**9, 2] * 7)
        file["t"].attrs["units"] = "days since 2000-01-01"
        file["plain"] = np.arange(21)
    pull(tmp_path / "x.h5", tmp_path / "c")
    with pytest.raises(CacheToolError, match=r"sample \d+ .*outside of the years 1678 to 2262"):
        read(tmp_path / "c", decode="cf")
