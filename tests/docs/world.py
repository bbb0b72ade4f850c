"""The data that the pages of the documentation use: a bucket, and folders as other tools leave them."""

from __future__ import annotations

import io
import json
import pickle
import shutil
import tarfile
from pathlib import Path

import numpy as np

__all__ = ["fill_bucket", "page_folder"]

VOLUMES = 240


def fill_bucket(bucket: Path) -> Path:
    """``volumes/`` (16 KiB and a label each), ``photos/CLASS/``, ``tars/``, ``run7.h5``, and two
    of Zarr."""
    _volumes(bucket / "volumes")
    _photos(bucket / "photos")
    _tars(bucket / "tars")
    _hdf5(bucket / "run7.h5")
    _zarr(bucket / "ocean.zarr")
    _volume(bucket / "volume.zarr")
    return bucket


def page_folder(folder: Path, bucket: Path) -> Path:
    """A folder to run a page in: ``volumes/`` and ``photos/`` as in the bucket, and data as other tools leave it:
    ``train.lmdb``, ``mds/`` and ``clips.h5``."""
    folder.mkdir()
    for name in ("volumes", "photos"):
        shutil.copytree(bucket / name, folder / name)
    shutil.copytree(bucket / "volumes", folder / "data" / "volumes")
    _pickles(folder / "train.lmdb")
    _mds(folder / "mds")
    _clips(folder / "clips.h5")
    return folder


def _label(number: int) -> int:
    return number % 4


def _volumes(folder: Path) -> None:
    """The mean brightness of a volume is its label."""
    folder.mkdir(parents=True)
    rng = np.random.default_rng(0)
    for number in range(VOLUMES):
        volume = rng.normal(_label(number), size=(16, 16, 16)).astype(np.float32)
        np.save(folder / f"scan{number:04d}.volume.npy", volume)
        (folder / f"scan{number:04d}.json").write_text(json.dumps({"label": _label(number)}))


def _jpeg(number: int) -> bytes:
    from PIL import Image

    file = io.BytesIO()
    Image.fromarray(np.full((40 + number, 60, 3), 10 * number, dtype=np.uint8)).save(file, "JPEG")
    return file.getvalue()


def _photos(folder: Path) -> None:
    for number in range(12):
        path = folder / ("cat", "dog")[number % 2] / f"{number}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(_jpeg(number))


def _tars(folder: Path) -> None:
    folder.mkdir()
    for shard in range(2):
        with tarfile.open(folder / f"train-{shard:04d}.tar", "w") as tar:
            for number in range(6 * shard, 6 * shard + 6):
                for suffix, body in (("jpg", _jpeg(number)), ("cls", str(number % 2).encode())):
                    member = tarfile.TarInfo(f"{number:05d}.{suffix}")
                    member.size = len(body)
                    tar.addfile(member, io.BytesIO(body))


def _hdf5(path: Path) -> None:
    import h5py

    with h5py.File(path, "w") as file:
        file["field"] = np.random.default_rng(1).normal(size=(120, 4, 32, 32)).astype(np.float32)
        file["time"] = np.arange(120, dtype=np.float64)


def _clips(path: Path) -> None:
    """A group for each clip."""
    import h5py

    with h5py.File(path, "w") as file:
        for number in range(12):
            file[f"clip{number:03d}/feat"] = np.full((16 + number, 4), number, dtype=np.float32)
            file[f"clip{number:03d}/label"] = number


def _volume(path: Path) -> None:
    import zarr

    array = zarr.create_array(
        path, shape=(128, 192, 64), chunks=(32, 48, 64), dtype="i2", dimension_names=["z", "y", "x"]
    )
    array[:] = np.arange(128 * 192 * 64).reshape(128, 192, 64).astype("i2")


def _zarr(path: Path) -> None:
    import zarr

    group = zarr.open_group(path, mode="w")
    array = group.create_array("sst", shape=(120, 32, 32), chunks=(10, 32, 32), dtype="float32")
    array[:] = np.random.default_rng(2).normal(size=(120, 32, 32)).astype(np.float32)
    group.create_array("day", shape=(120,), chunks=(120,), dtype="int32")[:] = np.arange(120)


def _pickles(path: Path) -> None:
    """An LMDB as people make it: the number as text, and the pickle of an image and its label."""
    import lmdb

    with lmdb.open(str(path), map_size=2**24) as env, env.begin(write=True) as txn:
        for number in range(24):
            image = np.full((8, 8), number, dtype=np.uint8)
            txn.put(f"{number:08d}".encode(), pickle.dumps((image, number % 4)))


def _mds(folder: Path) -> None:
    """Two shards of MosaicML Streaming: columns ``image`` and ``text``, whose values differ in size, and ``label``."""
    folder.mkdir()
    shards = []
    names, encodings, sizes = ["image", "label", "text"], ["jpeg", "int", "str"], [None, 8, None]
    for shard in range(2):
        samples = []
        for number in range(6 * shard, 6 * shard + 6):
            image, text = _jpeg(number), f"number {number}".encode()
            head = np.array([len(image), len(text)], dtype="<u4").tobytes()
            samples.append(head + image + np.int64(number % 2).tobytes() + text)
        config = json.dumps({"column_names": names}).encode()
        first = 4 + 4 * (len(samples) + 1) + len(config)
        ends = first + np.cumsum([0, *map(len, samples)])
        body = np.uint32(len(samples)).tobytes() + ends.astype("<u4").tobytes() + config + b"".join(samples)
        name = f"shard.{shard:05d}.mds"
        (folder / name).write_bytes(body)
        shards.append(
            {
                "column_encodings": encodings,
                "column_names": names,
                "column_sizes": sizes,
                "compression": None,
                "format": "mds",
                "hashes": [],
                "raw_data": {"basename": name, "bytes": len(body), "hashes": {}},
                "samples": len(samples),
                "size_limit": 2**26,
                "version": 2,
                "zip_data": None,
            }
        )
    (folder / "index.json").write_text(json.dumps({"shards": shards, "version": 2}))
