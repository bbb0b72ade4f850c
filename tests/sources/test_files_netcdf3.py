"""Classic NetCDF files (CDF-1, CDF-2, CDF-5): rows of variables and records, local and remote, sound and hostile."""

from __future__ import annotations

import io
import tracemalloc
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.io import netcdf_file

import cachetool
from cachetool.core.errors import BadObject, NotFound, UsageError
from cachetool.loaders.numpy import Loader
from cachetool.sources.byte_source import MemoryRanges, SourceFile
from cachetool.sources.kinds import kind_of_head
from cachetool.sources.netcdf3 import open_netcdf3
from cachetool.sources.opening import facts_of_rows
from cachetool.sources.options import SourceOptions
from cachetool.sources.rows import ColumnFile
from tests.servers import Http, folder_server
from tests.sources.classic import TYPES, Variable, classic
from tests.sources.files import damaged, open_files, outcome, same, samples
from tests.sources.test_remote_mixed import pulled

VERSIONS = (1, 2, 5)
RNG = np.random.default_rng(7)
TEXTS = np.array([b"%d rain" % (7 * at) for at in range(12)])


def text(values: Any) -> Any:
    """Return texts as the characters that a file stores."""
    array = np.asarray(values)
    return array.view("S1").reshape(*array.shape, array.dtype.itemsize)


def numbers(dtype: str, *shape: int) -> Any:
    return RNG.integers(0, 100, shape).astype(dtype)


def opened(path: Path, **options: Any) -> ColumnFile:
    """Open a file by the reader of its kind, in this process."""
    body = path.read_bytes()
    return open_netcdf3(SourceFile(path, len(body), MemoryRanges(body)), SourceOptions(key=False, **options))


def rows_of(path: Path, name: str) -> list[Any]:
    """Return the rows of one variable."""
    file = opened(path, fields=(name,), read_as="rows")
    block = file.read(0, file.samples)
    return [block.sample(number)[name] for number in range(file.samples)]


def agrees(path: Path, variables: Mapping[str, Variable]) -> None:
    """Compare every variable that has rows with its values."""
    for name, (_, values, _) in variables.items():
        array = np.asarray(values)
        if not array.shape:
            continue
        if array.dtype.kind == "S":
            array = array.view(f"S{array.shape[-1]}").reshape(-1) if array.ndim == 2 else array
            assert rows_of(path, name) == [bytes(row) for row in array]
        else:
            found = rows_of(path, name)
            assert len(found) == len(array)
            assert all(same(row, wanted) for row, wanted in zip(found, array, strict=True)), name


def of_every_type(version: int) -> dict[str, Variable]:
    """Return variables of every type that the version has, with records and without, of rank 0 to 5."""
    types = [name for name, number in TYPES.items() if number <= 6 or version == 5]
    out: dict[str, Variable] = {}
    for dtype in types:
        out[f"one_{dtype}"] = ((), numbers(dtype), {})
        for rank in range(1, 3 if dtype == "S1" else 6):
            inner = ("a", "b", "c", "d")[: rank - 1]
            sizes = (3, 2, 1, 5)[: rank - 1]
            values = numbers(dtype, 12, *sizes) if dtype != "S1" else text(numbers("S3", 12))[:, :3]
            if dtype == "S1" and rank == 1:
                values = np.ascontiguousarray(values[:, 0])
            out[f"fixed_{dtype}_{rank}"] = (("x", *inner), values, {})
            out[f"record_{dtype}_{rank}"] = (("time", *inner), values[:7], {})
    return out


DIMS = {"time": None, "x": 12, "a": 3, "b": 2, "c": 1, "d": 5}


@pytest.mark.parametrize("version", VERSIONS)
def test_values_of_every_type_and_rank_are_the_written_ones(version: int, tmp_path: Path) -> None:
    variables = of_every_type(version)
    (tmp_path / "x.nc").write_bytes(classic(variables, DIMS, version=version))

    agrees(tmp_path / "x.nc", variables)


@pytest.mark.parametrize("version", [1, 2])
def test_files_of_scipy_have_the_values_that_scipy_reads(version: Any, tmp_path: Path) -> None:
    variables = of_every_type(version)
    with netcdf_file(tmp_path / "x.nc", "w", version=version) as file:
        for name, length in DIMS.items():
            file.createDimension(name, length)
        for name, (along, values, _) in variables.items():
            if along:
                # scipy writes scalars as the first of its variables with their own, wrong, length.
                made = file.createVariable(name, np.asarray(values).dtype.newbyteorder(">"), along)
                made[: len(values)] = values
    agrees(tmp_path / "x.nc", {name: one for name, one in variables.items() if one[0]})


@pytest.mark.parametrize(
    ("form", "version"), [("NETCDF3_CLASSIC", 1), ("NETCDF3_64BIT_OFFSET", 2), ("NETCDF3_64BIT_DATA", 5)]
)
def test_files_of_the_netcdf_library_have_the_values_that_it_reads(form: Any, version: int, tmp_path: Path) -> None:
    """The library also reads the files of the writer of these tests."""
    netcdf4 = pytest.importorskip("netCDF4")
    variables = of_every_type(version)
    with netcdf4.Dataset(tmp_path / "x.nc", "w", format=form) as file:
        for name, length in DIMS.items():
            file.createDimension(name, length)
        for name, (along, values, _) in variables.items():
            file.createVariable(name, np.asarray(values).dtype, along)[:] = values
    assert (tmp_path / "x.nc").read_bytes()[3] == version
    agrees(tmp_path / "x.nc", variables)

    (tmp_path / "ours.nc").write_bytes(classic(variables, DIMS, version=version))
    with netcdf4.Dataset(tmp_path / "ours.nc") as file:
        file.set_auto_mask(False)
        file.set_auto_chartostring(False)
        for name, (_, values, _) in variables.items():
            np.testing.assert_array_equal(file[name][...], values)


CDF5 = bytes.fromhex(
    "4344460500000000000000020000000a0000000000000002000000000000000474696d650000000000000000000000000000"
    "00017800000000000000000000030000000000000000000000000000000b0000000000000003000000000000000178000000"
    "000000000000000100000000000000010000000000000000000000000000000b0000000000000018000000000000013c0000"
    "000000000001740000000000000000000002000000000000000000000000000000010000000c000000000000000100000000"
    "0000000c7363616c655f666163746f720000000600000000000000013fe00000000000000000000300000000000000080000"
    "00000000015400000000000000016e0000000000000000000001000000000000000000000000000000000000000000000008"
    "0000000000000004000000000000015c00000000000000018000000000000000ffffffffffffffff0002fffc000600080007"
    "ffff0008000afff40000ffffffff"
)
"""Written by netCDF4 1.7.5 with the library 4.10.1 as NETCDF3_64BIT_DATA."""


def test_a_cdf5_file_of_the_netcdf_library_has_the_values_that_were_written(tmp_path: Path) -> None:
    (tmp_path / "x.nc").write_bytes(CDF5)
    assert rows_of(tmp_path / "x.nc", "x") == [1, 2**63, 2**64 - 1]
    assert samples(tmp_path / "x.nc", rows=2, decode="cf")[1]["t"].tolist() == [4, 5, -6]
    assert [(sample["t"].tolist(), sample["n"]) for sample in samples(tmp_path / "x.nc", rows=2)] == [
        ([2, -4, 6], 7), ([8, 10, -12], 65535),
    ]  # fmt: skip


@st.composite
def contents(draw: st.DrawFn) -> tuple[dict[str, Variable], dict[str, int | None], int]:
    """Return variables, dimensions and version of a file."""
    version = draw(st.sampled_from(VERSIONS))
    sizes: dict[str, int | None] = {f"d{at}": draw(st.integers(1, 5)) for at in range(3)}
    records = draw(st.integers(0, 6))
    names = st.sampled_from([name for name, number in TYPES.items() if number <= 6 or version == 5])
    variables: dict[str, Variable] = {}
    for at in range(draw(st.integers(1, 5))):
        dtype = draw(names)
        along = draw(st.lists(st.sampled_from(list(sizes)), min_size=0, max_size=1 if dtype == "S1" else 3))
        is_record = draw(st.booleans())
        shape = [*([records] if is_record else []), *(sizes[dim] or 0 for dim in along)]
        seed = draw(st.integers(0, 2**32 - 1))
        raw = np.random.default_rng(seed).integers(1, 120, int(np.prod(shape)) * np.dtype(dtype).itemsize, dtype="u1")
        values = raw.view(dtype).reshape(shape)
        variables[f"v{at}"] = ((*(["time"] if is_record else []), *along), values, {})
    return variables, {"time": None, **sizes}, version


@settings(max_examples=60, deadline=None)
@given(contents())
def test_any_file_is_read_as_it_was_written(content: tuple[dict[str, Variable], dict[str, int | None], int]) -> None:
    import tempfile

    variables, dims, version = content
    body = classic(variables, dims, version=version)
    assert kind_of_head(body).name == "netcdf3"  # type: ignore[union-attr]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "x.nc")
        path.write_bytes(body)
        agrees(path, {name: one for name, one in variables.items() if len(np.atleast_1d(one[1]))})
        if version != 5:
            with netcdf_file(io.BytesIO(body), mmap=False) as file:
                for name, (_, values, _) in variables.items():
                    np.testing.assert_array_equal(file.variables[name].data, values)


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("names", [("t",), ("t", "u", "v")])
def test_a_file_written_as_a_stream_has_the_records_that_fit_its_size(
    names: tuple[str, ...], version: int, tmp_path: Path
) -> None:
    """One variable of three bytes has records without padding, several have them padded to four bytes."""
    variables: dict[str, Variable] = {name: (("time", "a"), numbers("i1", 9, 3), {}) for name in names}
    unknown = 2 ** (64 if version == 5 else 32) - 1
    body = classic(variables, {"time": None, "a": 3}, version=version, stated=unknown)
    (tmp_path / "x.nc").write_bytes(body)
    agrees(tmp_path / "x.nc", variables)

    # The writer stopped in the middle of the last record.
    (tmp_path / "x.nc").write_bytes(body[:-2])
    assert len(rows_of(tmp_path / "x.nc", "t")) == 8


def test_a_file_without_records_has_no_samples_and_counts_for_nothing_among_others(tmp_path: Path) -> None:
    """Its coordinates are not the samples. Its fields are those of the other files."""
    dims: dict[str, int | None] = {"time": None, "lat": 5}
    for name, count in (("a.nc", 4), ("b.nc", 0)):
        variables: dict[str, Variable] = {
            "lat": (("lat",), numbers("f4", 5), {}), "t": (("time", "lat"), numbers("i2", count, 5), {}),
            "time": (("time",), numbers("i4", count), {}),
        }  # fmt: skip
        (tmp_path / name).write_bytes(classic(variables, dims))
    with pytest.raises(NotFound, match=r"b\.nc.*has no rows"):
        open_files(tmp_path / "b.nc")
    assert len(samples(tmp_path)) == 4
    assert len(rows_of(tmp_path / "b.nc", "lat")) == 5


def fetched(server: Http) -> int:
    """Return the bytes of all files that were sent.

    The request for an index page of a file, which only this server answers with the file, does not count.
    """
    asked = [headers.get("Range", "bytes=0-1000000000") for path, headers in server.requests if path[-1] != "/"]
    ranges = [one.partition("=")[2].split("-") for one in asked]
    return sum(int(last) + 1 - int(first) for first, last in ranges)


def era(path: Path, rows: int = 60, *, records: bool = True, version: int = 2) -> dict[str, Any]:
    """Write a file like those of ERA5: packed fields on a grid of 64 KB, times. Return the values."""
    grid = RNG.integers(-3000, 3000, (2, rows, 160, 200)).astype("i2")
    grid[:, ::7, 0, 0] = -32767
    values = {"t2m": grid[0], "u10": grid[1], "time": np.arange(rows, dtype="i4") + 900_000}
    packing = {"scale_factor": 0.01, "add_offset": 273.15, "_FillValue": np.int16(-32767), "units": "K"}
    along = ("time", "lat", "lon")
    variables: dict[str, Variable] = {
        "lon": (("lon",), np.arange(200, dtype="f4"), {}), "lat": (("lat",), np.arange(160, dtype="f4"), {}),
        "time": (("time",), values["time"], {"units": "hours since 1900-01-01 00:00:00.0", "calendar": "gregorian"}),
        "t2m": (along, values["t2m"], packing), "u10": (along, values["u10"], {"scale_factor": 0.5}),
    }  # fmt: skip
    dims = {"lon": 200, "lat": 160, "time": None if records else rows}
    path.write_bytes(classic(variables, dims, version=version))
    return values


@pytest.mark.parametrize("records", [True, False])
@pytest.mark.parametrize("decode", [None, "cf"])
def test_a_pull_fetches_hardly_more_than_the_bytes_of_the_rows_that_it_draws(
    decode: str | None, records: bool, tmp_path: Path
) -> None:
    (tmp_path / "place").mkdir()
    values = era(tmp_path / "place" / "era.nc", 100, records=records)
    with folder_server(tmp_path / "place", index="json") as server:
        with cachetool.open_cache(tmp_path / "cache", max_size="60MB") as cache:
            assert cache.pull(f"{server.url}/era.nc", samples=10, workers=1, decode=decode).samples == 10
        needed = 10 * (2 * values["t2m"][0].nbytes + 4)
        # The header is fetched by the command and by its worker, 64 KiB each, and 16 KiB tell the kind of the file.
        assert needed <= fetched(server) <= 1.02 * needed + 4 * 2**16
    with Loader(tmp_path / "cache", batch_size=10) as loader:
        (batch,) = loader
    rows = [int(key.partition("#")[2]) for key in batch["__key__"]]
    if decode is None:
        for name, array in values.items():
            np.testing.assert_array_equal(batch[name], array[rows])
    else:
        wanted = values["t2m"][rows] * 0.01 + 273.15
        wanted[values["t2m"][rows] == -32767] = np.nan
        np.testing.assert_array_equal(batch["t2m"], wanted.astype("f4"))
        hours = values["time"][rows].astype("m8[h]")
        np.testing.assert_array_equal(batch["time"], np.datetime64("1900-01-01") + hours)


@pytest.mark.parametrize(("version", "fields"), [(1, None), (2, ("u",)), (5, ("time", "name"))])
def test_small_records_are_fetched_once_however_many_variables_they_have(
    version: int, fields: tuple[str, ...] | None, tmp_path: Path
) -> None:
    """5000 records of 54 bytes: about 64 KiB of them share a request. ``convert`` fetches no byte twice, either."""
    (tmp_path / "place").mkdir()
    count = 5000
    names = np.array([b"s%d" % at for at in range(count)])
    values = {"time": np.arange(count), "u": numbers("i2", count, 5), "v": numbers("f4", count, 7), "name": text(names)}
    variables: dict[str, Variable] = {
        "time": (("time",), values["time"].astype("i4"), {}), "u": (("time", "a"), values["u"], {}),
        "v": (("time", "b"), values["v"], {}), "name": (("time", "length"), values["name"], {}),
        "fixed": (("x", "b"), numbers("i4", 30, 7), {}),
    }  # fmt: skip
    body = classic(variables, {"time": None, "a": 5, "b": 7, "x": 30, "length": 5}, version=version)
    (tmp_path / "place" / "x.nc").write_bytes(body)
    with folder_server(tmp_path / "place", index="json") as server:
        found = pulled(f"{server.url}/x.nc", tmp_path / "cache", fields=fields)  # type: ignore[arg-type]
        assert fetched(server) <= len(body) + 4 * 2**16
        server.requests.clear()
        cachetool.convert(f"{server.url}/x.nc", to="lmdb", out=tmp_path / "out", workers=1, fields=fields)
        # The header is read three times, and the first record once more for the size of the texts.
        assert fetched(server) <= len(body) + 5 * 2**16
    # Few parts, and the same ones for all variables.
    file = opened(tmp_path / "place" / "x.nc", fields=fields)
    assert 3 <= len(facts_of_rows(file, len(body)).parts) <= 6
    assert len(found) == count
    for key, sample in found.items():
        row = int(key.partition("#")[2])
        assert set(sample) - {"__key__"} == set(fields or values)
        assert sample.get("name", names[row]) == names[row]
        assert all(same(sample[name], variables[name][1][row]) for name in ("time", "u", "v") if name in sample)


@pytest.mark.parametrize("where", ["here", "elsewhere"])
def test_convert_writes_the_same_samples_as_pull(where: str, tmp_path: Path) -> None:
    (tmp_path / "place").mkdir()
    era(tmp_path / "place" / "a.nc", 20)
    era(tmp_path / "place" / "b.nc", 15, version=5)
    with folder_server(tmp_path / "place", index="json") as server:
        url = str(tmp_path / "place") if where == "here" else f"{server.url}/"
        made = cachetool.convert(url, to="hdf5", out=tmp_path / "out", key=False, workers=1, decode="cf")
        with cachetool.open_cache(tmp_path / "cache", max_size="60MB") as cache:
            cache.pull(url, all=True, order="sequential", key=False, workers=1, decode="cf")
            again = cache.convert(to="lmdb", out=tmp_path / "again", workers=1)
    assert (made.samples, made.digest) == (again.samples, again.digest)
    assert made.samples == 35


def test_texts_are_str_if_the_file_says_utf8(tmp_path: Path) -> None:
    variables = {
        "plain": (("x", "length"), text(TEXTS), {}), "said": (("x", "length"), text(TEXTS), {"_Encoding": "utf-8"}),
        "deep": (("x", "y", "length"), text(np.array([TEXTS, TEXTS]).T.copy()), {}),
        "flag": (("x",), numbers("S1", 12), {}), "title": (("length",), text(TEXTS)[0], {}),
    }  # fmt: skip
    (tmp_path / "x.nc").write_bytes(classic(variables, {"x": 12, "y": 2, "length": TEXTS.dtype.itemsize}))
    with open_files(tmp_path / "x.nc", SourceOptions(rows=12)) as source:
        found = source.read(0, 12)
        assert ("deep", "texts in 2 dimensions") in source.skipped
        assert [source.schema[name].dtype for name in ("plain", "said", "flag")] == ["bytes", "str", "bytes"]
        assert [found.sample(at)["said"].encode() for at in range(12)] == TEXTS.tolist()


@pytest.mark.parametrize("names", ["abc", "bca", "acb"])
@pytest.mark.parametrize("where", ["here", "elsewhere"])
def test_one_series_may_have_classic_files_and_hdf5(where: str, names: str, tmp_path: Path) -> None:
    """Old files of a series are classic and new ones HDF5, or the other way round. Only if neither the first nor the
    last file is HDF5, the one in the middle is an error.
    """
    place = tmp_path / "place"
    place.mkdir()
    values = [era(place / f"{names[number]}.nc", 3, records=number == 0)["t2m"] for number in range(2)]
    values.append(values[0][::-1])
    with h5py.File(place / f"{names[2]}.nc", "w") as file:
        file["t2m"] = values[2]
    wanted = {f"{name}.nc#{row}": rows[row] for name, rows in zip(names, values, strict=True) for row in range(3)}
    with folder_server(place, index="json") as server:
        url: Any = place if where == "here" else f"{server.url}/"
        if names == "acb":
            with pytest.raises(BadObject, match=r"b\.nc is no netcdf3 file: it is of the kind hdf5; rename it"):
                pulled(url, tmp_path / "cache", fields=("t2m",))
            return
        found = pulled(url, tmp_path / "cache", fields=("t2m",))
    assert set(found) == set(wanted)
    assert all(same(found[key]["t2m"], row) for key, row in wanted.items())


# -- damaged and hostile files -----------------------------------------------------------------------------------------


def test_a_truncated_file_names_the_first_variable_that_it_lacks(tmp_path: Path) -> None:
    """A variable that is whole can still be read by its name."""
    path = tmp_path / "x.nc"
    variables: dict[str, Variable] = {
        "a": (("x",), np.arange(50, dtype="i4"), {}),
        "b": (("x",), np.arange(50, dtype="i4"), {}),
    }
    body = classic(variables, {"x": 50})
    path.write_bytes(body[:-1])
    with pytest.raises(BadObject, match=r"x\.nc: the file is truncated: 'b' ends at byte \d+, and the file has \d+"):
        open_files(path)
    assert rows_of(path, "a") == list(range(50))
    path.write_bytes(body[:100])
    with pytest.raises(BadObject, match=r"x\.nc: the file is truncated: it has 100 bytes and its header more"):
        open_files(path)


@pytest.mark.parametrize("version", VERSIONS)
def test_a_damaged_file_is_read_or_refused_with_its_name(version: int, tmp_path: Path) -> None:
    variables = of_every_type(version)
    few = {name: variables[name] for name in ("one_i4", "fixed_i2_2", "record_f8_1", "record_i1_2", "record_S1_2")}
    (tmp_path / "x.nc").write_bytes(classic(few, DIMS, version=version))
    for what, path in damaged(tmp_path / "x.nc", cuts=100, flips=1000, seed=version):
        message = ""
        try:
            file = opened(path)
            assert len(file.read(0, file.samples)) == file.samples, what
        except (BadObject, UsageError) as error:
            message = str(error)
        assert not message or "damaged.nc" in message, what


def u4(*values: int) -> bytes:
    return b"".join(value.to_bytes(4, "big") for value in values)


def u8(*values: int) -> bytes:
    return b"".join(value.to_bytes(8, "big") for value in values)


X = u4(1) + b"x\0\0\0"
ONE_DIM = u4(10, 1) + X + u4(8) + u4(0, 0)
"""The dimension x of length 8, and no attributes."""


def one_variable(
    *, rank: int = 1, dims: bytes = u4(0), attributes: bytes = u4(0, 0), kind: int = 4, at: int = 100
) -> bytes:
    return u4(11, 1) + X + u4(rank) + dims + attributes + u4(kind, 32, at) + bytes(64)


HOSTILE: dict[str, bytes] = {
    "name of 2 GiB": b"CDF\x01" + u4(0, 10, 1, 2**31),
    "name of 16 EiB": b"CDF\x05" + u8(0) + u4(10) + u8(1, 2**64 - 1),
    "2^30 dimensions": b"CDF\x01" + u4(0, 10, 2**30),
    "2^63 dimensions": b"CDF\x05" + u8(0) + u4(10) + u8(2**63),
    "2^32 attributes": b"CDF\x01" + u4(0, 0, 0, 12, 2**32 - 1),
    "2^31 variables": b"CDF\x01" + u4(0, 0, 0, 0, 0, 11, 2**31) + bytes(99),
    "2^30 dimensions of a variable": b"CDF\x01" + u4(0) + ONE_DIM + one_variable(rank=2**30),
    "a dimension that is missing": b"CDF\x01" + u4(0) + ONE_DIM + one_variable(dims=u4(1)),
    "a negative beginning": b"CDF\x01" + u4(0) + ONE_DIM + one_variable(at=2**32 - 100),
    "a beginning behind the end": b"CDF\x01" + u4(0) + ONE_DIM + one_variable(at=1000),
    "an unknown type": b"CDF\x01" + u4(0) + ONE_DIM + one_variable(kind=7),
    "an attribute of 2^32 numbers": b"CDF\x01" + u4(0) + ONE_DIM + one_variable(
        attributes=u4(12, 1, 5) + b"units\0\0\0" + u4(6, 2**32 - 1)
    ),
    "an array of 2^124 values": b"CDF\x05" + u8(0) + u4(10) + u8(2) + 2 * (u8(1) + b"x\0\0\0" + u8(2**62)) + u4(0)
    + u8(0) + u4(11) + u8(1, 1) + b"x\0\0\0" + u8(2, 0, 1) + u4(0) + u8(0) + u4(6) + u8(0, 0),
    "2^31 records": b"CDF\x01" + u4(2**31, 10, 1) + X + u4(0, 0, 0) + one_variable(),
    "the record dimension behind": b"CDF\x01" + u4(1, 10, 2) + X + u4(0) + X + u4(8, 0, 0) + one_variable(
        rank=2, dims=u4(1, 0)
    ),
    "two variables of one name": b"CDF\x01" + u4(0) + ONE_DIM + u4(11, 2) + 2 * (X + u4(1, 0, 0, 0, 4, 32, 0)),
    "a wrong tag": b"CDF\x01" + u4(0, 11, 1) + bytes(99),
    "a name that is no text": b"CDF\x01" + u4(0, 10, 1, 2) + b"\xff\xfe\0\0" + u4(8) + bytes(99),
    "the signature alone": b"CDF\x02",
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_header_is_refused_before_anything_is_allocated(name: str, tmp_path: Path) -> None:
    (tmp_path / "x.nc3").write_bytes(HOSTILE[name])
    assert isinstance(outcome(tmp_path / "x.nc3"), str)
    tracemalloc.start()
    with pytest.raises(BadObject, match=r"x\.nc3"):
        opened(tmp_path / "x.nc3")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2**20


def many_dims(count: int) -> bytes:
    return b"CDF\x01" + u4(0, 10, count) + count * (u4(1) + b"x\0\0\0" + u4(1))


def many_variables(count: int) -> bytes:
    return b"CDF\x01" + u4(0) + ONE_DIM + u4(11, count) + count * (X + u4(1, 0, 0, 0, 4, 32, 0))


def many_ranks(count: int) -> bytes:
    """Return variables that name a dimension a thousand times each."""
    one = X + u4(1000) + bytes(4000) + u4(0, 0, 4, 32, 0)
    return b"CDF\x01" + u4(0) + ONE_DIM + u4(11, count) + count * one


@pytest.mark.parametrize(
    "body", [many_dims(2**18), many_variables(10**5), many_ranks(4000)], ids=["dims", "vars", "ranks"]
)
def test_a_header_of_too_many_entries_is_refused(body: bytes, tmp_path: Path) -> None:
    (tmp_path / "x.nc").write_bytes(body)
    with pytest.raises(BadObject, match=r"x\.nc is damaged: its header claims \d+"):
        open_files(tmp_path / "x.nc")


def test_a_long_header_is_read_in_parts(tmp_path: Path) -> None:
    """History attributes of megabytes are passed over, not fetched."""
    attributes = {"history": "abc " * 300_000, "units": "K"}
    variables: dict[str, Variable] = {f"v{at}": (("x",), numbers("f4", 6), attributes) for at in range(4)}
    (tmp_path / "place").mkdir()
    (tmp_path / "place" / "x.nc").write_bytes(classic(variables, {"x": 6}))
    agrees(tmp_path / "place" / "x.nc", variables)
    with folder_server(tmp_path / "place") as server, open_files(f"{server.url}/x.nc") as source:
        assert source.samples == 6
        assert fetched(server) < 8 * 2**16
