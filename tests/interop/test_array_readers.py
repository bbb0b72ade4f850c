"""Blocks, crops and windows against other readers of the same file: xarray, zarr, tensorstore, h5py and netCDF4."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import h5py
import netCDF4
import numpy as np
import pytest
import zarr

import cachetool
from cachetool.loaders.numpy import Loader

DIMS = ("time", "level", "z", "y", "x")
READERS = {
    "zarr2": ("zarr", "xarray", "tensorstore"),
    "zarr3": ("zarr", "xarray", "tensorstore"),
    "hdf5": ("h5py", "netCDF4"),
    "netcdf4": ("netCDF4", "xarray", "h5py"),
    "netcdf3": ("netCDF4", "xarray"),
}
"""Kinds of files, and who else reads them."""
FORMATS = ("lmdb", "hdf5", "zarr", "tfrecord")
DTYPES = ("<f4", "<i2", "<f8", "|u1", "<i4")
Read = Callable[[tuple[slice, ...]], np.ndarray]

FEW, ALL = 60, 2_000
"""Blocks, crops and windows of each rank; all ranks of a kind of file have 10,000 of each."""
RANKS = range(1, 6)
CASES = [
    *(pytest.param(kind, rank, FEW, id=f"{kind}, rank {rank}") for rank, kind in enumerate(READERS, 1)),
    *(
        pytest.param(kind, rank, ALL, id=f"{kind}, rank {rank}, all", marks=pytest.mark.soak)
        for kind in READERS
        for rank in RANKS
    ),
]


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    # zarr warns of consolidated metadata of version 3, netCDF4 of the size of NumPy's objects.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def write(kind: str, folder: Path, array: np.ndarray, chunks: tuple[int, ...]) -> Path:
    """Write ``array`` as the variable ``v``, by the library that made the kind of file. Return the file."""
    dims = DIMS[-array.ndim :]
    if kind.startswith("zarr"):
        path = folder / "x.zarr"
        group = zarr.open_group(path, mode="w", zarr_format=int(kind[-1]))  # type: ignore[arg-type]
        how: dict[str, Any] = {"dimension_names": dims} if kind == "zarr3" else {}
        made = group.create_array("v", shape=array.shape, chunks=chunks, dtype=array.dtype, **how)
        if kind == "zarr2":
            made.attrs["_ARRAY_DIMENSIONS"] = list(dims)
        made[...] = array
    elif kind == "hdf5":
        path = folder / "x.h5"
        with h5py.File(path, "w") as file:
            made = file.create_dataset("v", data=array, chunks=chunks, compression="gzip", shuffle=True)
            for dim, name in zip(made.dims, dims, strict=True):
                dim.label = name
    else:
        path = folder / "x.nc"
        with netCDF4.Dataset(path, "w", format="NETCDF4" if kind == "netcdf4" else "NETCDF3_64BIT_DATA") as file:
            for number, (name, size) in enumerate(zip(dims, array.shape, strict=True)):
                file.createDimension(name, size if number or kind == "netcdf4" else None)
            how = {"chunksizes": chunks, "zlib": True} if kind == "netcdf4" else {}
            file.createVariable("v", array.dtype, dims, **how)[...] = array
    return path


def reader(name: str, kind: str, path: Path) -> Read:
    """Return how this library reads a box of ``v``."""
    if name == "zarr":
        opened: Any = zarr.open_group(path, mode="r")["v"]
        return lambda box: np.asarray(opened[box])
    if name == "tensorstore":
        import tensorstore

        driver = "zarr3" if kind == "zarr3" else "zarr"
        spec = {"driver": driver, "kvstore": {"driver": "file", "path": f"{path}/v"}}
        store = tensorstore.open(spec, open=True, read=True).result()
        return lambda box: np.asarray(store[box].read().result())
    if name == "h5py":
        dataset: Any = h5py.File(path)["v"]
        return lambda box: np.asarray(dataset[box])
    if name == "netCDF4":
        variable = netCDF4.Dataset(path)["v"]
        variable.set_auto_maskandscale(False)
        return lambda box: np.asarray(variable[box])
    import xarray

    engine = "zarr" if kind.startswith("zarr") else "netcdf4"
    how = {"consolidated": False} if engine == "zarr" else {}
    data = xarray.open_dataset(path, engine=engine, cache=False, chunks=None, mask_and_scale=False, **how)["v"]
    return lambda box: data.isel(dict(zip(data.dims, box, strict=True))).to_numpy()


class Data:
    """A random array in a file, and who reads it. Its blocks lie side by side ``counts`` times."""

    def __init__(self, kind: str, rank: int, count: int, folder: Path, *, rows: bool = False) -> None:
        self.rng = np.random.default_rng([rank, count, list(READERS).index(kind)])
        block = self.rng.integers(2, (40, 9, 5, 4, 3)[rank - 1] + 1, rank)
        if rows:
            # Rows and not blocks are the samples: one axis has all of them.
            block[0], counts = 1, np.array([count + 50, *self.rng.integers(1, 3, rank - 1)])
        else:
            counts = np.ones(rank, np.int64)
            while math.prod(counts.tolist()) < count:
                counts[np.argmin(counts)] += 1
        self.block, self.counts = tuple(block.tolist()), tuple(counts.tolist())
        self.shape = tuple((block * counts).tolist())
        dtype = DTYPES[(rank + list(READERS).index(kind)) % len(DTYPES)]
        self.array = self.rng.integers(0, 200, self.shape).astype(dtype)
        # A block is one chunk, or two along its first axis.
        chunks = (max(self.block[0] // 2, 1) if self.block[0] % 2 == 0 else self.block[0], *self.block[1:])
        self.path = write(kind, folder, self.array, chunks)
        self.readers = {name: reader(name, kind, self.path) for name in READERS[kind]}
        self.cache = folder / "cache"
        self.to = FORMATS[rank % len(FORMATS)]

    def check(self, first: tuple[int, ...], values: np.ndarray) -> None:
        """Compare values with the box of their shape at ``first``, as each reader gives it."""
        box = tuple(slice(int(at), int(at) + size) for at, size in zip(first, values.shape, strict=True))
        for name, read in self.readers.items():
            expected = read(box)
            assert expected.dtype.newbyteorder("=") == values.dtype.newbyteorder("=")
            assert np.array_equal(expected, values), (name, box)

    def pull_blocks(self) -> None:
        names = DIMS[-len(self.shape) :]
        with cachetool.open_cache(self.cache, max_size="2GB") as cache:
            cache.pull(str(self.path), block=dict(zip(names, self.block, strict=True)), to=self.to)


def first_of(key: str) -> tuple[int, ...]:
    """Return the first indices of the block with this key."""
    return tuple(int(one.partition("=")[2]) for one in key.rpartition("#")[2].split(","))


@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("kind", "rank", "count"), CASES)
def test_blocks_and_crops_of_them_are_what_other_readers_give(kind: str, rank: int, count: int, tmp_path: Path) -> None:
    data = Data(kind, rank, count, tmp_path)
    data.pull_blocks()
    keys = set()
    with Loader(data.cache, batch_size=32, min_samples=1) as loader:
        for batch in loader:
            for key, values in zip(batch["__key__"], batch["v"], strict=True):
                data.check(first_of(key), values)
                keys.add(key)
    assert len(keys) == math.prod(data.counts) >= count

    box = tuple(int(data.rng.integers(1, size + 1)) for size in data.block)
    with Loader(data.cache, batch_size=32, min_samples=1, crop={"v": box}) as loader:
        cropped = 0
        for batch in loader:
            for key, corner, values in zip(batch["__key__"], batch["v_corner"], batch["v"], strict=True):
                assert values.shape == box
                data.check(tuple(np.add(first_of(key), corner).tolist()), values)
                cropped += 1
    assert cropped == len(keys)


@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("kind", "rank", "count"), CASES)
def test_windows_of_rows_are_what_other_readers_give(kind: str, rank: int, count: int, tmp_path: Path) -> None:
    """Also where the cache holds only some runs of the rows, in several shards."""
    data = Data(kind, rank, count, tmp_path, rows=True)
    reach = (-2, -1, 0, 1)
    with cachetool.open_cache(data.cache, max_size="2GB") as cache:
        cache.pull(str(data.path), runs=16, samples=count // 2, to=data.to)
        cache.pull(str(data.path), runs=16, samples=count // 2, to=data.to)
    seen = set()
    with Loader(data.cache, batch_size=32, min_samples=1, offsets={"v": reach}) as loader:
        for batch in loader:
            for key, values in zip(batch["__key__"], batch["v"], strict=True):
                row = int(key.rpartition("#")[2])
                assert values.shape == (len(reach), *data.shape[1:])
                data.check((row + reach[0], *[0] * (rank - 1)), values)
                seen.add(row)
    # Each run of 16 loses three anchors at its ends.
    assert len(seen) >= 0.7 * count
