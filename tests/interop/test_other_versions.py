"""Other versions of the libraries: they open our files, and cachetool reads theirs.

Two versions cannot exist in one environment, so pip installs each into its own folder, which is first on the path of a
child process. That takes a minute in all, so these tests belong to the long runs. The other tests of this folder use
the versions installed beside cachetool.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.formats.samples import EVERY_FIELD, big_endian, block
from tests.interop.documented import arguments, expected, read
from tests.interop.folders import make
from tests.sources.files import same, samples

pytestmark = pytest.mark.soak

ROOT = Path(__file__).parents[2]
CONTENT = block(EVERY_FIELD, 6, seed=4)
Library = Callable[..., Path]


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Library:
    """Install requirements into a folder, once per session; skip if pip reaches no index."""
    folders: dict[tuple[str, ...], Path] = {}

    def install(*requirements: str) -> Path:
        if requirements not in folders:
            folder = tmp_path_factory.mktemp(requirements[0].replace("==", "-"))
            command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(folder)]
            done = subprocess.run([*command, *requirements], capture_output=True, text=True, check=False)
            if done.returncode:
                pytest.skip(f"pip cannot install {' '.join(requirements)}: {done.stderr.strip().splitlines()[-1]}")
            folders[requirements] = folder
        return folders[requirements]

    return install


def child(program: str, folder: Path, *args: object) -> str:
    """Return the output of a program that imports the libraries in ``folder`` before all others."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program, *map(str, args)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join((str(folder), str(ROOT)))},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.strip()


OURS = """
import sys
from pathlib import Path
import h5py
from cachetool.formats import get_format
from tests.formats.samples import write
from tests.interop.test_other_versions import CONTENT
for compression in (None, "gzip"):
    write(get_format("hdf5"), Path(sys.argv[1]) / f"{compression}.h5", CONTENT, compression=compression)
print(h5py.__version__, h5py.version.hdf5_version)
"""
H5PY = {"3.14.0": "1.14", "3.16.0": "2.0"}


@pytest.mark.parametrize("writer", H5PY)
def test_hdf5_files_of_ours_open_in_hdf5_1_14_and_2_0(library: Library, tmp_path: Path, writer: str) -> None:
    """Written by either version and read by either: uncompressed and compressed, every type of field."""
    said = child(OURS, library(f"h5py=={writer}"), tmp_path).split()
    assert said[0] == writer
    assert said[1].startswith(H5PY[writer])
    jobs = [(6, arguments("hdf5", tmp_path / f"{name}.h5", EVERY_FIELD)) for name in ("None", "gzip")]
    for reader in H5PY:
        where = library(f"h5py=={reader}")
        assert child("import h5py; print(h5py.__version__)", where) == reader
        assert read("hdf5", jobs, library=where) == [expected(CONTENT)] * 2


@pytest.mark.parametrize("version", ["1.6.2", "2.3.0", "3.0.0"])
def test_lmdb_files_of_ours_open_in_other_versions(library: Library, tmp_path: Path, version: str) -> None:
    where = library(f"lmdb=={version}")
    assert child("import lmdb; print(lmdb.__version__)", where) == version
    path = make(tmp_path / "ours", "lmdb", big_endian(CONTENT)) / "part-00000.lmdb"

    assert read("lmdb", [(6, arguments("lmdb", path, EVERY_FIELD))], library=where) == [expected(CONTENT)]


LMDB = """
import sys
import lmdb
how = {"lib_version": int(sys.argv[2])} if sys.argv[2] else {}
env = lmdb.open(sys.argv[1], subdir=False, map_size=2**24, **how)
for first in (0, 300):
    with env.begin(write=True) as txn:
        for n in range(first, first + 300):
            txn.put(b"key %d" % n, bytes([n % 256]) * (n * 37 % 9000))
with env.begin(write=True) as txn:
    for n in range(0, 600, 7):
        txn.delete(b"key %d" % n)
env.close()
print(lmdb.__version__)
"""


@pytest.mark.parametrize(("version", "engine"), [("1.6.2", ""), ("2.3.0", ""), ("3.0.0", "0"), ("3.0.0", "1")])
def test_lmdb_files_of_every_version_and_engine_are_read(
    library: Library, tmp_path: Path, version: str, engine: str
) -> None:
    assert child(LMDB, library(f"lmdb=={version}"), tmp_path / "x.lmdb", engine) == version

    found = {sample["__key__"]: sample["value"] for sample in samples(tmp_path / "x.lmdb")}
    assert found == {f"key {n}": bytes([n % 256]) * (n * 37 % 9000) for n in range(600) if n % 7}


N = 50
ARRAYS: dict[str, Any] = {
    "scalar": np.arange(N, dtype=np.int32),
    "image": np.arange(N * 60, dtype=np.uint8).reshape(N, 4, 5, 3),
    "big": np.arange(N * 2, dtype=">i8").reshape(N, 2),
    "half": np.arange(N * 3, dtype=np.float16).reshape(N, 3),
    "flag": np.arange(N) % 2 == 0,
    "complex": (np.arange(N) * 1j).astype(np.complex64),
}
HDF5_FILE = """
import sys
import h5py
from tests.interop.test_other_versions import ARRAYS, N
with h5py.File(sys.argv[1], "w") as file:
    for layout, how in {"contiguous": {}, "chunked": {"chunks": True}, "gzip": {"compression": "gzip"}}.items():
        for name, array in ARRAYS.items():
            file.create_dataset(f"{layout}/{name}", data=array, **how)
    file.create_dataset("text", data=[f"text {n}" for n in range(N)], dtype=h5py.string_dtype())
print(h5py.__version__)
"""


@pytest.mark.parametrize("version", H5PY)
def test_hdf5_files_of_every_version_are_read(library: Library, tmp_path: Path, version: str) -> None:
    """Contiguous, chunked, gzip, groups, big-endian, text of variable length."""
    assert child(HDF5_FILE, library(f"h5py=={version}"), tmp_path / "x.h5") == version

    found = samples(tmp_path / "x.h5")
    assert len(found) == N
    for n, sample in enumerate(found):
        assert sample.pop("text") == f"text {n}"
        assert len(sample) == 3 * len(ARRAYS)
        assert all(same(value, ARRAYS[name.split("/")[1]][n]) for name, value in sample.items())


ZARR_2 = """
import sys
import numcodecs
import zarr
from tests.interop.test_other_versions import ARRAYS
group = zarr.open_group(sys.argv[1], mode="w")
for number, (name, array) in enumerate(ARRAYS.items()):
    packed = (None, numcodecs.Blosc(), numcodecs.GZip(), numcodecs.Zstd())[number % 4]
    group.array(f"group/{name}", array, chunks=(7, *array.shape[1:]), compressor=packed)
print(zarr.__version__)
"""


def test_zarr_folders_of_zarr_python_2_are_read(library: Library, tmp_path: Path) -> None:
    where = library("zarr==2.18.7", "numcodecs==0.13.1", "fasteners==0.20", "asciitree==0.3.3")
    assert child(ZARR_2, where, tmp_path / "x.zarr") == "2.18.7"
    assert (tmp_path / "x.zarr" / "group" / "image" / ".zarray").exists()

    found = samples(tmp_path / "x.zarr")
    assert len(found) == N
    for n, sample in enumerate(found):
        assert sorted(sample) == sorted(f"group/{name}" for name in ARRAYS)
        assert all(same(sample[f"group/{name}"], array[n]) for name, array in ARRAYS.items())
