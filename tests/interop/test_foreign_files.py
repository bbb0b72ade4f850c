"""Foreign files converted to each of the four formats: the values that were read are those that arrive.

``tests/sources`` compares the values that are read with those that were written, for each kind of file;
``test_other_versions.py`` does so for other versions of the libraries.
"""

from __future__ import annotations

import io
import subprocess
import sys
import tarfile
import warnings
from pathlib import Path
from typing import Any

import h5py
import lmdb
import numpy as np
import pytest
import zarr

import cachetool
from tests.interop.folders import FORMATS, whole
from tests.sources.files import same, samples

N = 30
X = np.arange(N * 6, dtype=">f4").reshape(N, 2, 3)
Y = np.arange(N).astype("<M8[s]")
TEXTS = [f"tëxt {n}" * (n % 3) for n in range(N)]
SCRIPT = Path(__file__).parents[1] / "sources" / "scripts" / "write_tfrecord_package.py"


def packed(array: np.ndarray[Any, Any]) -> bytes:
    out = io.BytesIO()
    np.save(out, array)
    return out.getvalue()


def add(tar: tarfile.TarFile, name: str, content: bytes) -> None:
    info = tarfile.TarInfo(name)
    info.size = len(content)
    tar.addfile(info, io.BytesIO(content))


@pytest.fixture(scope="module")
def foreign(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("foreign")
    np.save(root / "x.npy", X)
    np.savez(root / "arrays.npz", x=X, y=Y)
    np.savez_compressed(root / "packed.npz", x=X, y=Y)
    with h5py.File(root / "file.h5", "w") as file:
        file["plain"] = X
        file.create_dataset("group/chunked", data=X, chunks=(7, 1, 3))
        file.create_dataset("group/gzip", data=X, compression="gzip", shuffle=True)
        file.create_dataset("text", data=TEXTS, dtype=h5py.string_dtype())
    for version in (2, 3):
        group = zarr.open_group(root / f"v{version}.zarr", mode="w", zarr_format=version)  # type: ignore[arg-type]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Zarr 3 has no specification of times
            for name, array in (("x", X), ("inner/y", Y)):
                chunks = (7, *array.shape[1:])
                group.create_array(name, shape=array.shape, dtype=array.dtype, chunks=chunks)[:] = array
    for engine in (0, 1):
        env = lmdb.open(str(root / f"engine{engine}.lmdb"), subdir=False, lib_version=engine, map_size=2**22)
        with env, env.begin(write=True) as txn:
            for n in range(N):
                txn.put(b"%04d" % n, packed(X[n]))
    with tarfile.open(root / "web.tar", "w") as tar:
        for n in range(N):
            add(tar, f"train/{n:03d}.x.npy", packed(X[n]))
            add(tar, f"train/{n:03d}.txt", TEXTS[n].encode())
    subprocess.run([sys.executable, str(SCRIPT), str(root)], check=True, capture_output=True)
    (root / "package.npz").unlink()
    return root


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("to", FORMATS)
def test_foreign_files_are_converted_to_every_format(foreign: Path, tmp_path: Path, to: str) -> None:
    """NumPy, h5py, zarr 2 and 3, both engines of LMDB, the ``tfrecord`` package and tar; verified, in several parts."""
    kinds = sorted(path for path in foreign.iterdir() if "-lock" not in path.name)
    assert len(kinds) == 10
    for path in kinds:
        options = {"value_format": "npy"} if path.suffix == ".lmdb" else {}
        result = cachetool.convert(path, to=to, out=tmp_path / path.name, shard_size=400, verify=True, **options)
        wanted, found = samples(path, **options), whole(tmp_path / path.name)
        assert result.shards > 1
        assert len(wanted) == len(found) == result.samples == N
        for n, sample in enumerate(wanted):
            one = found.sample(n)
            assert sample.keys() == one.keys()
            assert all(same(one[name], value) for name, value in sample.items()), path.name
