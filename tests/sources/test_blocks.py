"""Blocks of arrays as samples (``--block``), compared with slices of the arrays: every kind of file, place and edge."""

from __future__ import annotations

import math
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import h5py
import netCDF4
import numpy as np
import pytest
import zarr
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import cachetool
from cachetool.core.errors import BadObject, UsageError
from cachetool.sources.options import SourceOptions
from cachetool.sources.registry import list_source, open_source
from tests.servers import folder_server
from tests.sources.classic import classic

KINDS = ("zarr2", "zarr3", "sharded", "hdf5", "contiguous", "netcdf", "netcdf3", "npy")
DTYPES = ("<f4", ">i2", "|u1", "<f8", "<u4", "|b1", "<c8")
DIMS = ("a", "b", "c", "d", "e")


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


class Blocks:
    """All blocks of a source, by their keys."""

    def __init__(self, url: str | Path, listing: Path, *, skip_bad: bool = False, **options: Any) -> None:
        chosen = SourceOptions(**options)
        list_source(str(url), listing, chosen)
        source: Any = open_source(str(url), listing, chosen)
        try:
            units = np.arange(source.units)
            probe = source.probe(units[:8])
            self.schema, self.notes = probe.schema, [f"{name}: {why}" for name, why in source.skipped]
            self.samples: dict[str, dict[str, Any]] = {}
            self.skipped: dict[str, str] = {}
            for piece in source.read(units, schema=probe.schema, skip_bad=skip_bad):
                self.skipped |= {one.key: one.reason for one in piece.skipped}
                columns = dict(piece.block.columns)
                keys = columns.pop("__key__")
                for at, key in enumerate(bytes(keys[row]).decode() for row in range(len(keys))):
                    assert key not in self.samples
                    self.samples[key] = {name: column[at] for name, column in columns.items()}
        finally:
            source.close()


def corners(key: str) -> dict[str, int]:
    """Return the first indices that a key tells."""
    pairs = (pair.split("=") for pair in key.partition("#")[2].split(","))
    return {name: int(first) for name, first in pairs}


def write(kind: str, folder: Path, array: Any, chunks: tuple[int, ...]) -> Path:
    """Write ``array`` as one file or folder of ``kind``, in chunks where the kind has them."""
    dims = list(DIMS[: array.ndim])
    if kind in ("zarr2", "zarr3", "sharded"):
        path = folder / "x.zarr"
        how: dict[str, Any] = {"chunks": chunks}
        if kind == "sharded":
            how["shards"] = tuple(2 * chunk for chunk in chunks)
        group = zarr.open_group(path, mode="w", zarr_format=2 if kind == "zarr2" else 3)
        if kind != "zarr2":
            how["dimension_names"] = dims
        made = group.create_array("v", shape=array.shape, dtype=array.dtype, **how)
        if kind == "zarr2":
            made.attrs["_ARRAY_DIMENSIONS"] = dims
        made[...] = array
        return path
    if kind == "npy":
        np.save(folder / "v.npy", array)
        return folder / "v.npy"
    if kind == "netcdf3":
        # With a second variable of records, so that the rows of the first one lie apart.
        beside = np.arange(len(array), dtype=">i2")
        variables = {"v": (dims, array, {}), "w": (dims[:1], beside, {})}
        sizes = {name: size if axis else None for axis, (name, size) in enumerate(zip(dims, array.shape, strict=True))}
        (folder / "x.nc").write_bytes(classic(variables, sizes, version=5))
        return folder / "x.nc"
    if kind == "netcdf":
        path = folder / "x.nc"
        with h5py.File(path, "w") as file:
            made = file.create_dataset("v", data=array, chunks=chunks, compression="gzip")
            # As netCDF4 writes dimensions without values.
            for axis, size in enumerate(array.shape):
                scale = file.create_dataset(dims[axis], shape=(size,), dtype=">f4")
                scale.make_scale(f"This is a netCDF dimension but not a netCDF variable. {size:9}")
                made.dims[axis].attach_scale(scale)
        return path
    path = folder / "x.h5"
    with h5py.File(path, "w") as file:
        made = file.create_dataset("v", data=array, chunks=chunks if kind == "hdf5" else None)
        for dim, name in zip(made.dims, dims, strict=True):
            dim.label = name
    return path


@st.composite
def cases(draw: Any) -> Any:
    rank = draw(st.integers(1, 5))
    most = (40, 16, 9, 6, 5)[rank - 1]
    shape = tuple(draw(st.integers(1, most)) for _ in range(rank))
    chunks = tuple(draw(st.integers(1, size)) for size in shape)
    axes = draw(st.lists(st.integers(0, rank - 1), min_size=1, unique=True))
    block = {axis: draw(st.integers(1, shape[axis] + 2)) for axis in axes}
    kind, dtype = draw(st.sampled_from(KINDS)), draw(st.sampled_from(DTYPES))
    named = kind != "npy" and draw(st.booleans())
    return shape, chunks, block, kind, dtype, named, draw(st.sampled_from(("keep", "drop", "pad")))


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(case=cases(), remote=st.booleans())
def test_blocks_equal_slices_and_hold_every_element_once(
    case: Any, remote: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """With ``keep`` each element is in exactly one block. With ``drop`` and ``pad`` blocks have one shape."""
    shape, chunks, block, kind, dtype, named, edges = case
    if kind == "netcdf3" and dtype in ("|b1", "<c8"):
        dtype = ">i8"
    folder = tmp_path_factory.mktemp("blocks")
    array = np.random.default_rng(0).integers(1, 100, shape).astype(dtype)
    path = write(kind, folder, array, chunks)
    names = {axis: DIMS[axis] if kind != "npy" else str(axis) for axis in block}
    asked = {names[axis] if named else str(axis): size for axis, size in block.items()}
    stored = (1,) * len(shape) if kind in ("contiguous", "netcdf3", "npy") else chunks
    steps = {axis: min(-(-size // stored[axis]) * stored[axis], shape[axis]) for axis, size in block.items()}
    listing = folder / "listing"
    try:
        if remote:
            with folder_server(folder) as server:
                blocks = Blocks(f"{server.url}/{path.name}", listing, block=asked, edges=edges)
        else:
            blocks = Blocks(path, listing, block=asked, edges=edges)
    except UsageError as error:
        # A block that is larger than the array, of which nothing would be left.
        if edges == "drop" and "drop leaves no block" in str(error):
            return
        raise

    counts = {a: shape[a] // step if edges == "drop" else -(-shape[a] // step) for a, step in steps.items()}
    assert len(blocks.samples) == math.prod(counts.values())
    seen = np.zeros(shape, dtype=np.int64)
    for key, sample in blocks.samples.items():
        first = {axis: corners(key)[names[axis]] for axis in block}
        bounds = tuple(slice(first.get(a, 0), first.get(a, 0) + steps.get(a, shape[a])) for a in range(len(shape)))
        values, expected = sample["v"], array[bounds]
        if edges == "pad":
            assert values.shape == tuple(steps.get(a, shape[a]) for a in range(len(shape)))
            inside = tuple(map(slice, expected.shape))
            outside = np.ones(values.shape, dtype=bool)
            outside[inside] = False
            fill = netCDF4.default_fillvals[np.dtype(dtype).str[1:]] if kind == "netcdf3" else 0
            assert (values[outside] == np.asarray(fill).astype(dtype)).all()
            values = values[inside]
        assert values.shape == expected.shape
        assert np.array_equal(values, expected)
        seen[bounds] += 1
    assert seen.max() == 1 if edges == "drop" else (seen == 1).all()


def write_weather(path: Path, version: int = 3) -> dict[str, Any]:
    """Write two variables over time, a mask without time, coordinates, and arrays that do not belong."""
    random = np.random.default_rng(1)
    arrays = {
        "t2m": (random.random((20, 6, 8)).astype("f4"), (4, 3, 8), ["time", "lat", "lon"]),
        "u10": (random.random((20, 6, 8)), (2, 6, 4), ["time", "lat", "lon"]),
        "lsm": (random.integers(0, 2, (6, 8), dtype="u1"), (5, 5), ["lat", "lon"]),
        "time": (np.arange(20, dtype="i8") * 6, (7,), ["time"]),
        "lat": (np.linspace(-1, 1, 6), (6,), ["lat"]),
        "level": (np.arange(3), (3,), ["level"]),
        "daily": (random.random((5, 6, 8)), (5, 6, 8), ["time", "lat", "lon"]),
        "crs": (np.zeros((), "i4"), (), []),
    }
    if path.suffix == ".nc":
        with h5py.File(path, "w") as file:
            for name, (array, chunks, _) in arrays.items():
                file.create_dataset(name, data=array, chunks=chunks or None)
            for name, (_, _, dims) in arrays.items():
                if dims == [name]:
                    file[name].make_scale(name)
            file.create_dataset("lon", shape=(8,), dtype=">f4").make_scale(
                "This is a netCDF dimension but not a netCDF variable.         8"
            )
            for name, (array, _, dims) in arrays.items():
                if dims != [name] and name != "daily":
                    for axis in range(array.ndim):
                        file[name].dims[axis].attach_scale(file[dims[axis]])
            for axis, label in enumerate(("time", "lat", "lon")):
                file["daily"].dims[axis].label = label
    else:
        group = zarr.open_group(path, mode="w", zarr_format=version)  # type: ignore[arg-type]
        for name, (array, chunks, dims) in arrays.items():
            how: dict[str, Any] = {} if version == 2 else {"dimension_names": dims}
            made = group.create_array(name, shape=array.shape, dtype=array.dtype, chunks=chunks, **how)
            if version == 2:
                made.attrs["_ARRAY_DIMENSIONS"] = dims
            made[...] = array
    return {name: array for name, (array, _, _) in arrays.items()}


@pytest.mark.parametrize(("name", "version"), [("w.zarr", 2), ("w.zarr", 3), ("w.nc", 0)])
def test_variables_share_blocks_and_those_without_a_dimension_are_repeated(
    tmp_path: Path, name: str, version: int
) -> None:
    arrays = write_weather(tmp_path / name, version)

    found = Blocks(tmp_path / name, tmp_path / "l", block={"time": 5, "lat": 4})

    # Chunks of 4 and 2 times, and of 3 and 6 latitudes, fit together in blocks of 8 and 6.
    assert list(found.samples) == [f"{name}#time={time},lat=0" for time in (0, 8, 16)]
    for key, sample in found.samples.items():
        time = slice(corners(key)["time"], corners(key)["time"] + 8)
        assert sample.keys() == {"t2m", "u10", "lsm", "time", "lat"}
        for field in ("t2m", "u10", "time"):
            assert np.array_equal(sample[field], arrays[field][time]), field
        assert np.array_equal(sample["lsm"], arrays["lsm"])
        assert np.array_equal(sample["lat"], arrays["lat"])
    notes = "\n".join(found.notes)
    assert "blocks have time=8, not 5" in notes
    assert "blocks have lat=6, not 4" in notes
    assert "daily: its dimension 'time' is 5, not 20" in notes
    assert "level: it has none of the dimensions time, lat" in notes


def test_named_fields_alone_are_taken_also_without_a_dimension(tmp_path: Path) -> None:
    arrays = write_weather(tmp_path / "w.zarr")

    found = Blocks(tmp_path / "w.zarr", tmp_path / "l", block={"time": 4}, fields=["t2m", "level"], edges="drop")

    assert found.schema.names == ("t2m", "level", "__key__")
    assert found.schema["t2m"].shape == (4, 6, 8)
    assert len(found.samples) == 5
    assert all(np.array_equal(sample["level"], arrays["level"]) for sample in found.samples.values())


def test_a_number_names_a_dimension_of_the_largest_array(tmp_path: Path) -> None:
    """``0`` is the time for all arrays, because the largest array has the time there; the mask has latitudes there."""
    write_weather(tmp_path / "w.zarr")

    numbered = Blocks(tmp_path / "w.zarr", tmp_path / "a", block={"0": 4})
    named = Blocks(tmp_path / "w.zarr", tmp_path / "b", block={"time": 4})

    assert numbered.schema == named.schema
    assert list(numbered.samples) == list(named.samples)


@pytest.mark.parametrize("kind", ["zarr2", "zarr3", "sharded", "hdf5", "contiguous"])
@pytest.mark.parametrize("block", [{"0": 30, "1": 64, "2": 80}, {"0": 60}, {"0": 60, "1": 64}])
def test_each_chunk_is_fetched_once(tmp_path: Path, kind: str, block: dict[str, int]) -> None:
    array = np.random.default_rng(0).integers(0, 256, (120, 128, 160 * 4), dtype="u1").view("f4")
    path = write(kind, tmp_path, array, (30, 32, 40))
    stored = sum(file.stat().st_size for file in tmp_path.rglob("*") if file.is_file())

    with folder_server(tmp_path) as server:
        Blocks(f"{server.url}/{path.name}", tmp_path / "l", block=block)

    # The metadata of HDF5 are read in pieces of 64 KiB, when the file is listed and when it is read.
    again = [asked for asked, count in Counter(path for path, _ in server.requests).items() if count > 1]
    assert server.sent <= 1.02 * stored + (2**18 if path.suffix == ".h5" else 0), again


@pytest.mark.parametrize("version", [2, 3])
def test_chunks_that_were_never_written_are_the_fill_value(tmp_path: Path, version: int) -> None:
    array = zarr.create_array(
        tmp_path / "x.zarr", shape=(10, 6), chunks=(4, 3), dtype="f4", fill_value=7, zarr_format=version
    )
    array[:4] = 1

    found = Blocks(tmp_path / "x.zarr", tmp_path / "l", block={"0": 4}, edges="pad")

    assert [float(sample["x"].min()) for sample in found.samples.values()] == [1, 7, 7]
    assert found.schema["x"].shape == (4, 6)


@pytest.mark.parametrize("kind", ["zarr3", "sharded"])
def test_a_damaged_chunk_skips_its_block_alone(tmp_path: Path, kind: str) -> None:
    array = np.arange(16 * 6, dtype="f4").reshape(16, 6)
    write(kind, tmp_path, array, (4, 3) if kind == "zarr3" else (2, 3))
    chunks = sorted((tmp_path / "x.zarr/v/c").rglob("*"))
    chunk = next(path for path in chunks if path.is_file() and path.parent.name == "1")
    chunk.write_bytes(chunk.read_bytes()[:-5])

    found = Blocks(tmp_path / "x.zarr", tmp_path / "l", block={"a": 4}, skip_bad=True)

    assert list(found.skipped) == ["x.zarr#a=4"]
    assert "x.zarr" in found.skipped["x.zarr#a=4"]
    assert list(found.samples) == ["x.zarr#a=0", "x.zarr#a=8", "x.zarr#a=12"]


def test_a_block_larger_than_its_file_can_mean_is_refused(tmp_path: Path) -> None:
    zarr.create_array(tmp_path / "x.zarr", shape=(2**20, 2**10, 2**10), chunks=(1, 64, 64), dtype="f4")

    with pytest.raises(BadObject, match=r"a block of x claims 4.3 GB in one piece"):
        Blocks(tmp_path / "x.zarr", tmp_path / "l", block={"0": 2**10})
    with pytest.raises(BadObject, match=r"x.zarr claims 4.4 TB of samples"):
        Blocks(tmp_path / "x.zarr", tmp_path / "m", block={"0": 1, "1": 64, "2": 64})


def test_packed_numbers_are_decoded_and_padded_as_missing(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "x.nc", "w") as file:
        made = file.create_dataset("t", data=np.arange(10, dtype="i2").reshape(5, 2), chunks=(2, 2))
        made.attrs.update(scale_factor=0.5, add_offset=100.0, _FillValue=np.int16(3))

    found = Blocks(tmp_path / "x.nc", tmp_path / "l", block={"0": 2}, edges="pad", decode="cf")

    last = found.samples["x.nc#0=4"]["t"]
    assert last.dtype == np.float32
    assert last[0].tolist() == [104.0, 104.5]
    assert np.isnan(last[1]).all()
    assert np.isnan(found.samples["x.nc#0=0"]["t"][1, 1])


def test_several_files_of_other_sizes_are_one_source(tmp_path: Path) -> None:
    for name, size in (("a", 6), ("b", 8)):
        with h5py.File(tmp_path / f"{name}.h5", "w") as file:
            file.create_dataset("v", data=np.full((size, 3), size), chunks=(2, 3))

    found = Blocks(tmp_path, tmp_path.parent / f"{tmp_path.name}-l", block={"0": 4})

    assert {key: sample["v"].shape for key, sample in found.samples.items()} == {
        "a.h5#0=0": (4, 3), "a.h5#0=4": (2, 3), "b.h5#0=0": (4, 3), "b.h5#0=4": (4, 3)
    }  # fmt: skip


def test_what_has_no_blocks_is_refused(tmp_path: Path) -> None:
    (tmp_path / "images").mkdir()
    (tmp_path / "images/a.jpg").write_bytes(b"x")
    write_weather(tmp_path / "w.zarr")

    with pytest.raises(UsageError, match=r"each object of .* is a sample"):
        Blocks(tmp_path / "images", tmp_path / "a", block={"0": 4})
    with pytest.raises(UsageError, match=r"no array has the dimensions time, z of --block; .*'t2m' .time, lat, lon."):
        Blocks(tmp_path / "w.zarr", tmp_path / "b", block={"time": 4, "z": 4})
    with pytest.raises(UsageError, match="twice"):
        Blocks(tmp_path / "w.zarr", tmp_path / "c", block={"time": 4, "0": 4})


@pytest.mark.parametrize(
    "options",
    [
        {"edges": "drop"}, {"edges": "x", "block": {"0": 1}}, {"block": {"0": 0}}, {"block": {"0": 1}, "rows": 2},
        {"block": {"0": 1}, "read_as": "groups"}, {"block": 3}, {"block": {"1000": 1}},
    ],
)  # fmt: skip
def test_options_that_contradict_each_other_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        SourceOptions(**options)


@pytest.mark.parametrize("format", ["hdf5", "zarr"])
def test_a_file_that_cachetool_wrote_has_samples_already(tmp_path: Path, format: str) -> None:
    write_weather(tmp_path / "w.zarr")
    cachetool.convert(tmp_path / "w.zarr", to=format, out=tmp_path / "o", block={"time": 4})

    with pytest.raises(UsageError, match="was written by cachetool"):
        Blocks(next((tmp_path / "o").glob("part*")), tmp_path / "l", block={"0": 4})


def write_image(folder: Path, version: int, number: int = 0, *, labels: bool = False, label_levels: int = 2) -> Any:
    """Write an image of OME-Zarr with two levels, and labels if asked for. Return the values of the first level."""
    image = np.random.default_rng(number).integers(0, 2**16, (2, 12, 16), dtype="u2")
    groups = {folder: (image, ["c", "y", "x"])}
    if labels:
        groups[folder / "labels/cells"] = (image[0] % 5, ["y", "x"])
    for path, (array, axes) in groups.items():
        group = zarr.open_group(path, mode="w", zarr_format=version)  # type: ignore[arg-type]
        levels = label_levels if path != folder else 2
        for level in range(levels):
            step = 2**level
            values = array[..., ::step, ::step]
            group.create_array(str(level), shape=values.shape, dtype="u2", chunks=(1, 4, 8)[-array.ndim :])[...] = (
                values
            )
        datasets = [{"path": str(level)} for level in range(levels)]
        scales = [{"axes": [{"name": name, "type": "space"} for name in axes], "datasets": datasets}]
        group.attrs.update({"ome": {"multiscales": scales}} if version == 3 else {"multiscales": scales})
    if labels:
        zarr.open_group(folder / "labels", mode="a", zarr_format=version)  # type: ignore[arg-type]
    return image


@pytest.mark.parametrize("version", [2, 3])
def test_one_level_of_an_image_and_of_its_labels_is_read(tmp_path: Path, version: int) -> None:
    image = write_image(tmp_path / "i.zarr", version, labels=True)

    full = Blocks(tmp_path / "i.zarr", tmp_path / "a", block={"y": 4, "x": 8})
    half = Blocks(tmp_path / "i.zarr", tmp_path / "b", block={"y": 4}, level=1, fields=["image"])

    assert full.schema.names == ("image", "labels/cells", "__key__")
    assert np.array_equal(full.samples["i.zarr#y=4,x=8"]["image"], image[:, 4:8, 8:])
    assert np.array_equal(full.samples["i.zarr#y=4,x=8"]["labels/cells"], image[0, 4:8, 8:] % 5)
    assert np.array_equal(half.samples["i.zarr#y=4"]["image"], image[:, 8::2, ::2])
    with pytest.raises(UsageError, match="has the levels 0 to 1"):
        Blocks(tmp_path / "i.zarr", tmp_path / "c", block={"y": 4}, level=2)


@pytest.mark.parametrize("version", [2, 3])
def test_labels_without_the_level_are_left_out(tmp_path: Path, version: int) -> None:
    image = write_image(tmp_path / "i.zarr", version, labels=True, label_levels=1)
    half = Blocks(tmp_path / "i.zarr", tmp_path / "l", block={"y": 4}, level=1)
    assert half.schema.names == ("image", "__key__")
    assert np.array_equal(half.samples["i.zarr#y=4"]["image"], image[:, 8::2, ::2])
    assert "labels/cells: it has no level 1, only 0 to 0" in half.notes


@pytest.mark.parametrize("version", [2, 3])
@pytest.mark.parametrize("kind", ["plate", "series"])
def test_each_image_of_a_plate_or_series_is_a_file_of_the_source(tmp_path: Path, version: int, kind: str) -> None:
    paths = ("A/1/0", "A/1/1", "B/2/0") if kind == "plate" else ("0", "1")
    about: dict[str, Any] = {"bioformats2raw.layout": 3}
    if kind == "plate":
        about = {"plate": {"wells": [{"path": "A/1"}, {"path": "B/2"}]}}
    root = zarr.open_group(tmp_path / "p.zarr", mode="w", zarr_format=version)  # type: ignore[arg-type]
    root.attrs.update({"ome": about} if version == 3 else about)
    for path in paths[:-1] if kind == "plate" else ():
        for parent in Path(path).parents[:-1]:
            zarr.open_group(tmp_path / "p.zarr" / parent, mode="a", zarr_format=version)  # type: ignore[arg-type]
    images = {path: write_image(tmp_path / "p.zarr" / path, version, at) for at, path in enumerate(paths)}

    found = Blocks(tmp_path / "p.zarr", tmp_path / "l", block={"y": 4})

    assert list(found.samples) == [f"{path}#y={y}" for path in paths for y in (0, 4, 8)]
    for key, sample in found.samples.items():
        first = corners(key)["y"]
        assert np.array_equal(sample["image"], images[key.partition("#")[0]][:, first : first + 4])
    assert not [note for note in found.notes if "level 1" not in note]
