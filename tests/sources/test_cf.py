"""CF attributes of HDF5, netCDF and Zarr: reported if they are ignored, applied file by file with ``--decode cf``."""

from __future__ import annotations

import base64
import json
import re
import struct
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import zarr

import cachetool
from cachetool.core.cf import decoder, packing_of
from cachetool.core.errors import BadObject, UsageError
from cachetool.sources.options import SourceOptions
from tests.servers import folder_server
from tests.sources.files import open_files, same, samples
from tests.sources.test_remote_mixed import pulled

COUNTS = np.arange(24, dtype="i2").reshape(12, 2)
SCALED = {"scale_factor": 0.01, "add_offset": 273.15, "_FillValue": np.int16(-9999)}


def write(path: Path, arrays: dict[str, tuple[Any, dict[str, Any]]], **options: Any) -> Path:
    """Write an HDF5 file, or the folder of a Zarr, with arrays and their attributes."""
    if path.suffix == ".zarr":
        group = zarr.open_group(path, mode="w", **options)
        for name, (values, attributes) in arrays.items():
            array = group.create_array(name, data=np.asarray(values))
            array.attrs.update(
                {key: value.item() if isinstance(value, np.generic) else value for key, value in attributes.items()}
            )
        return path
    with h5py.File(path, "w") as file:
        for name, (values, attributes) in arrays.items():
            file.create_dataset(name, data=values, **options).attrs.update(attributes)
    return path


def decoded(values: Any, attributes: dict[str, Any]) -> Any:
    """Return the decoded values, or the message of the error."""
    stored = np.asarray(values)
    decoding = decoder(stored.dtype, packing_of(attributes, stored.dtype))
    return decoding if isinstance(decoding, str) else decoding[1](stored)


@pytest.mark.parametrize("beside", ["groups", "offsets"])
def test_each_group_and_each_flat_array_uses_its_own_attributes(beside: str, tmp_path: Path) -> None:
    """Values are decoded before arrays are joined to samples. Without the option a note names the attributes."""
    path = tmp_path / "x.h5"
    with h5py.File(path, "w") as file:
        if beside == "groups":
            for number in range(3):
                packed = file.create_dataset(f"demo_{number}/t", data=np.arange(4 + number, dtype="i2"))
                packed.attrs.update(scale_factor=0.5 * (number + 1), _FillValue=np.int16(3))
        else:
            packed = file.create_dataset("t", data=np.concatenate([np.arange(4 + n, dtype="i2") for n in range(3)]))
            packed.attrs.update(scale_factor=0.5, _FillValue=np.int16(3))
            file["offsets"] = np.array([0, 4, 9, 15])
    with open_files(path) as source:
        assert any("--decode cf" in why for name, why in source.skipped if not name)
    with open_files(path, SourceOptions(decode="cf")) as source:
        read = [source.read(number, number + 1).sample(0) for number in range(3)]
    for number, sample in enumerate(read):
        values = np.arange(4 + number) * (0.5 * (number + 1) if beside == "groups" else 0.5)
        values[3] = np.nan
        np.testing.assert_array_equal(sample["t"], values.astype("f4"))


@pytest.mark.parametrize("name", ["x.h5", "x.nc.h5", "x.zarr"])
def test_ignored_attributes_are_named_with_the_option_that_applies_them(tmp_path: Path, name: str) -> None:
    """The bits stay. Fields without such attributes, and a fill value that is not a number, are not reported."""
    nothing = {"units": "K", "long_name": "plain", "_FillValue": np.float32("nan"), "valid_min": np.int16(3)}
    path = write(tmp_path / name, {"t2m": (COUNTS, SCALED), "plain": (np.arange(12, dtype="f4"), nothing)})

    assert same(samples(path)[3]["t2m"], COUNTS[3])
    with open_files(path) as source:
        (entry,) = source.skipped
    assert re.search(r"^CF attributes of t2m \(_FillValue, scale_factor, add_offset\): .*--decode cf", entry[1])
    with cachetool.open_cache(tmp_path / "cache", max_size="20MB") as cache:
        assert cache.pull(path, all=True).notes == (entry[1],)
        assert cache.pull(path, all=True, dataset="decoded", decode="cf").left_out == ()


@pytest.mark.parametrize("name", ["{}.h5", "{}.zarr"])
def test_each_file_of_a_series_is_unpacked_by_its_own_attributes(tmp_path: Path, name: str) -> None:
    """Two packings of the same temperatures, with times counted from other days: local and from a server, by ``pull``
    and ``convert``. Without the option a note reports the difference.
    """
    truth = np.round(np.random.default_rng(2).normal(280, 10, (40, 3)), 2)
    packings = ((0.01, 273.15, -32768, "hours since 1900-01-01"), (0.005, 250.0, -1, "days since 2000-01-01 12:00"))
    times = np.datetime64("2010-05-01T12:00") + np.arange(40).astype("m8[D]")
    (tmp_path / "place").mkdir()
    for file, (scale, offset, fill, units) in enumerate(packings):
        rows = slice(20 * file, 20 * file + 20)
        counts = np.rint((truth[rows] - offset) / scale).astype("i2")
        counts[3, 1] = fill
        origin = np.datetime64("1900-01-01") if file == 0 else np.datetime64("2000-01-01T12:00")
        count = (times[rows] - origin.astype("M8[m]")) // np.timedelta64(60 if file == 0 else 1440, "m")
        attributes = {"scale_factor": scale, "add_offset": offset, "_FillValue": np.int16(fill)}
        write(
            tmp_path / "place" / name.format(file),
            {"t2m": (counts, attributes), "time": (count.astype("i4"), {"units": units})},
        )

    with open_files(tmp_path / "place") as source:
        ((_, why),) = source.skipped
    assert why.startswith("CF attributes of t2m, time ")
    assert "differ from file to file" in why
    with folder_server(tmp_path / "place", index="json") as server:
        for url, cache in ((str(tmp_path / "place"), "here"), (server.url, "there")):
            found = pulled(url, tmp_path / cache, decode="cf")  # type: ignore[arg-type]
            assert len(found) == 40
            for key, sample in found.items():
                file, row = int(key[0]), int(key.rpartition("#")[2])
                wanted = truth[20 * file + row].copy()
                wanted[1] = np.nan if row == 3 else wanted[1]
                assert sample["t2m"].dtype == np.float32
                np.testing.assert_allclose(sample["t2m"], wanted, atol=packings[file][0])
                assert sample["time"] == times[20 * file + row]
                assert sample["time"].dtype == "<M8[ns]"
    cachetool.convert(tmp_path / "place", to="hdf5", out=tmp_path / "out", decode="cf", verify=True)
    with h5py.File(tmp_path / "out" / "part-00000.h5") as file:
        np.testing.assert_allclose(file["t2m"][:][:, 0], truth[:, 0], atol=0.01)
        assert np.isnan(file["t2m"][:][:, 1]).sum() == 2


@pytest.mark.parametrize(
    ("stored", "attributes", "wanted"),
    [
        pytest.param(np.array([1, 2], "i1"), {"scale_factor": 0.5}, np.array([0.5, 1], "f4"), id="8 bits"),
        pytest.param(np.array([1, 2], "u2"), {"add_offset": 10}, np.array([11, 12], "f4"), id="16 bits without a sign"),
        pytest.param(np.array([1, 2], "i4"), {"scale_factor": 0.5}, np.array([0.5, 1], "f8"), id="32 bits"),
        pytest.param(np.array([1, 2], "f4"), {"scale_factor": 2.0}, np.array([2, 4], "f4"), id="float32"),
        pytest.param(np.array([1, 2], "f8"), {"scale_factor": 2.0}, np.array([2, 4], "f8"), id="float64"),
        pytest.param(
            np.array([1, -9, 2], "i2"),
            {"_FillValue": np.int16(-9)},
            np.array([1, np.nan, 2], "f4"),
            id="fill value alone",
        ),
        pytest.param(
            np.array([1, 5, 7], "i2"),
            {"_FillValue": np.int16(5), "missing_value": np.array([7, 8], "i2"), "scale_factor": np.array([2.0])},
            np.array([2, np.nan, np.nan], "f4"),
            id="several missing values",
        ),
        pytest.param(
            np.array([1e20, 1], "f4"), {"missing_value": 1e20}, np.array([np.nan, 1], "f4"), id="a wider fill value"
        ),
        pytest.param(
            np.array([-1, 1, -2], "i1"),
            {"_Unsigned": "true", "_FillValue": np.int8(-1), "scale_factor": 2.0},
            np.array([np.nan, 2, 508], "f4"),
            id="unsigned, the fill value signed",
        ),
        pytest.param(np.array([-1, 1], "i1"), {"_Unsigned": b"true"}, np.array([255, 1], "u1"), id="unsigned alone"),
        pytest.param(np.array([255, 1], "u1"), {"_Unsigned": "false"}, np.array([-1, 1], "i1"), id="signed"),
        pytest.param(np.array([3, 4], "i2"), {"scale_factor": "0.5"}, np.array([1.5, 2], "f4"), id="a scale as text"),
        pytest.param(
            np.array([7, 1], "f8"),
            {"_FillValue": base64.b64encode(struct.pack("<d", 7.0)).decode()},
            np.array([np.nan, 1], "f8"),
            id="as xarray writes it into Zarr v3",
        ),
        pytest.param(
            np.array([3, 4], "i2"), {"scale_factor": 1.0, "add_offset": 0.0}, np.array([3, 4], "i2"), id="nothing"
        ),
        pytest.param(np.array([3, 4], "i2"), {"scale_factor": [1.0, 2.0]}, np.array([3, 4], "i2"), id="two scales"),
        pytest.param(
            np.array([3, 4], "i2"), {"valid_range": np.array([0, 3], "i2")}, np.array([3, 4], "i2"), id="valid range"
        ),
    ],
)
def test_packed_numbers_are_decoded_by_their_attributes(stored: Any, attributes: dict[str, Any], wanted: Any) -> None:
    """The dtype too: float32 if it represents every possible stored number."""
    found = decoded(stored, attributes)
    assert found.dtype == wanted.dtype
    np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize(
    ("units", "calendar", "count", "wanted"),
    [
        ("hours since 1900-01-01", None, 6, "1900-01-01T06"),
        ("days since 2000-1-1 6:30", "gregorian", 1, "2000-01-02T06:30"),
        ("seconds since 1970-01-01T00:00:00Z", "standard", -1, "1969-12-31T23:59:59"),
        ("minutes since 2000-01-01 00:00:00 -2:30", None, 0, "2000-01-01T02:30"),
        ("milliseconds since 2000-01-01 00:00:00.5 UTC", "proleptic_gregorian", 250, "2000-01-01T00:00:00.75"),
        ("days since 0001-01-01", "proleptic_gregorian", 730119, "2000-01-01"),
        ("days since 0001-01-01 00:00:0.0", None, 730121, "2000-01-01"),
        ("hours since 1-1-1", "standard", 17522904, "2000-01-01"),
        ("microseconds since 2020-02-29", None, 1, "2020-02-29T00:00:00.000001"),
        ("seconds since 2000-01-01 00:00:00.00000000000", None, 1, "2000-01-01T00:00:01"),
    ],
)
@pytest.mark.parametrize("dtype", ["i8", "f8"])
def test_times_are_counted_from_the_date_in_their_units(
    units: str, calendar: str | None, count: int, wanted: str, dtype: str
) -> None:
    """Before 1582 the standard calendar is the Julian calendar, two days behind in the year 1."""
    attributes = {"units": units} | ({} if calendar is None else {"calendar": calendar})
    found = decoded(np.array([count], dtype), attributes)
    assert found.dtype == "<M8[ns]"
    assert found[0] == np.datetime64(wanted)


@pytest.mark.parametrize("dtype", ["i8", "u8"])
def test_whole_counts_are_never_rounded(dtype: str) -> None:
    """float64 would round today's nanoseconds by a hundred."""
    counts = np.array([1_600_000_000_000_000_001, 1_600_000_000_123_456_789], dtype)
    assert decoded(counts, {"units": "nanoseconds since 1970-01-01"}).astype("i8").tolist() == counts.tolist()


def test_a_missing_time_is_nat() -> None:
    since = {"units": "hours since 2000-01-01"}
    assert np.isnat(decoded(np.array([1, -99]), {**since, "_FillValue": -99})).tolist() == [False, True]
    assert np.isnat(decoded(np.array([1, np.nan, 9e36]), {**since, "missing_value": 9e36})).tolist() == [
        False,
        True,
        True,
    ]


@pytest.mark.parametrize(
    ("units", "calendar", "reason"),
    [
        ("days since 2000-01-01", "360_day", "calendar '360_day'"),
        ("days since 2000-01-01", "noleap", "calendar 'noleap'"),
        ("months since 2000-01-01", "standard", "'months since 2000-01-01'"),
        ("days since 2000-13-01", "standard", "no valid date"),
        ("days since launch", "standard", "'days since launch'"),
    ],
)
def test_times_that_datetime64_cannot_represent_are_left_out_and_named(
    tmp_path: Path, units: str, calendar: str, reason: str
) -> None:
    times = (np.arange(12), {"units": units, "calendar": calendar})
    path = write(tmp_path / "x.h5", {"t2m": (COUNTS, SCALED), "time": times})
    with open_files(path, SourceOptions(decode="cf")) as source:
        assert source.schema.names == ("t2m",)
        ((name, why),) = source.skipped
    assert name == "time"
    assert reason in why
    with pytest.raises(UsageError, match=r"'time' cannot be read: .*leave out --decode cf"):
        samples(path, decode="cf", fields=("time",))
    assert samples(path, fields=("time",))[2]["time"] == 2


def test_times_outside_the_range_of_datetime64_are_named_with_their_file(tmp_path: Path) -> None:
    times = (np.array([0, 10**6]), {"units": "days since 2000-01-01"})
    path = write(tmp_path / "x.h5", {"time": times})
    with pytest.raises(BadObject, match=r"x\.h5: 'time', rows .*: times outside of the years 1678 to 2262"):
        samples(path, decode="cf")
    assert samples(path)[1]["time"] == 10**6


def test_the_fill_value_of_zarr_version_2_is_masked_only_if_xarray_wrote_it(tmp_path: Path) -> None:
    """xarray names dimensions and sets no fill value of its own. Other writers set one for missing chunks."""
    for name, more in (("xarray.zarr", {"_ARRAY_DIMENSIONS": ["time"]}), ("plain.zarr", {})):
        path = tmp_path / name
        group = zarr.open_group(path, mode="w", zarr_format=2)
        array = group.create_array("t", shape=(4,), dtype="i2", fill_value=0)
        array[:] = [0, 1, 2, 3]
        array.attrs.update({**more, "scale_factor": 0.5})
    assert np.isnan([s["t"] for s in samples(tmp_path / "xarray.zarr", decode="cf")]).tolist() == [
        True,
        False,
        False,
        False,
    ]
    assert [s["t"] for s in samples(tmp_path / "plain.zarr", decode="cf")] == [0, 0.5, 1, 1.5]


@pytest.mark.parametrize("options", [{}, {"chunks": (5, 2)}, {"chunks": (5, 2), "compression": "gzip"}])
def test_values_are_right_for_every_layout_of_the_file(tmp_path: Path, options: dict[str, Any]) -> None:
    """Including large contiguous rows, each of which is fetched from a server at most once."""
    counts = np.random.default_rng(0).integers(0, 9999, (64, 40_000)).astype("i2")
    (tmp_path / "place").mkdir()
    chunks = {**options, "chunks": (5, 40_000)} if options else options
    path = write(tmp_path / "place" / "x.h5", {"t2m": (counts, {"scale_factor": 0.25})}, **chunks)
    with folder_server(path.parent, index="json") as server:
        found = pulled(f"{server.url}/x.h5", tmp_path / "cache", decode="cf", rename={"t2m": "t"})  # type: ignore[arg-type]
        sent, requests = server.sent, len(server.requests)
    assert len(found) == 64
    for key, sample in found.items():
        assert same(sample["t"], (counts[int(key.rpartition("#")[2])] * 0.25).astype("f4"))
    assert sent <= 1.3 * path.stat().st_size
    print("REQUESTS", requests, sent / path.stat().st_size)


def test_a_field_packed_in_only_some_files_is_one_field_after_decoding(tmp_path: Path) -> None:
    (tmp_path / "place").mkdir()
    write(tmp_path / "place" / "a.h5", {"t": (np.array([1, 2], "i2"), {"scale_factor": 0.5})})
    write(tmp_path / "place" / "b.h5", {"t": (np.array([7, 8], "f4"), {})})
    with pytest.raises(BadObject, match=r"field 't' is int16 in a\.h5 but float32 in b\.h5"):
        samples(tmp_path / "place")
    assert [sample["t"] for sample in samples(tmp_path / "place", decode="cf")] == [0.5, 1, 7, 8]


def test_the_packing_of_each_file_is_kept_with_the_listing(tmp_path: Path) -> None:
    (tmp_path / "place").mkdir()
    for name, scale in (("a.h5", 0.5), ("b.h5", 0.25)):
        write(tmp_path / "place" / name, {"t": (np.array([1, 2], "i2"), {"scale_factor": scale})})
    with cachetool.open_cache(tmp_path / "cache", max_size="20MB") as cache:
        cache.pull(tmp_path / "place", all=True)
    (table,) = (tmp_path / "cache").rglob("table.json")
    scales = [layout["packing"]["t"]["scale_factor"] for layout in json.loads(table.read_text())["layouts"]]
    assert scales == [0.5, 0.25]


def test_decode_cf_without_encoded_values_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "objects").mkdir()
    np.save(tmp_path / "objects" / "0.a.npy", COUNTS)
    np.save(tmp_path / "x.npy", COUNTS)
    write(tmp_path / "x.h5", {"t": (COUNTS, {"units": "K"})})
    for name in ("x.npy", "x.h5"):
        with pytest.raises(UsageError, match=r"--decode cf finds nothing to decode in .*\n.*leave --decode out"):
            samples(tmp_path / name, decode="cf")
    with pytest.raises(UsageError, match="--decode cf is for HDF5, netCDF and Zarr"):
        samples(tmp_path / "objects", decode="cf")


def test_a_source_drawn_undecoded_is_not_drawn_decoded_into_the_same_dataset(tmp_path: Path) -> None:
    path = write(tmp_path / "x.h5", {"t2m": (COUNTS, SCALED)})
    with cachetool.open_cache(tmp_path / "cache", max_size="20MB") as cache:
        cache.pull(path, samples=3)
        with pytest.raises(UsageError, match="listed with other --fields, --rename, --decode, --value-format"):
            cache.pull(path, samples=3, decode="cf")
        cache.pull(path, samples=3, decode="cf", dataset="decoded")


@pytest.mark.parametrize(
    "value", [np.void(b"abc"), h5py.Empty("f4"), np.array(["a", "b"], "S1"), np.arange(5000.0), True]
)
def test_invalid_attributes_are_ignored(tmp_path: Path, value: Any) -> None:
    names = ("scale_factor", "add_offset", "units", "calendar", "_Unsigned")
    path = write(tmp_path / "x.h5", {"t": (COUNTS, dict.fromkeys(names, value))})
    assert same(samples(path)[2]["t"], COUNTS[2])
