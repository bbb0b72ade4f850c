"""Malicious files: they try to run a program, read other files, fill the memory, or kill the reader (61, 62, 67, 77 to
82).
"""

from __future__ import annotations

import gzip
import io
import json
import os
import pickle
import random
import shutil
import struct
import subprocess
import sys
import tarfile
import tracemalloc
import zipfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import crc32c
import h5py
import lmdb
import numcodecs
import numpy as np
import pytest
import zarr

import cachetool
from cachetool.core.errors import BadObject, CorruptError
from cachetool.core.schema import Field, Schema
from cachetool.core.tf_example import parse_example
from cachetool.formats import get_format
from cachetool.formats.exported import DATASET_FILE
from cachetool.formats.shard import CHECKSUMS_FILE, side_folder, stored_checksums
from tests.commands import run_command
from tests.faults.world import SCHEMA, block
from tests.sources.classic import classic
from tests.sources.files import open_files
from tests.sources.test_images import png_bomb

MIB = 2**20


@dataclass(frozen=True, slots=True)
class Ran:
    """The result of a command."""

    code: int
    said: str
    mib: int
    """Peak memory in MiB of the command's largest process."""


def run(*words: object, **env: str) -> Ran:
    """Run a command of cachetool in a separate process."""
    command = [sys.executable, "-m", "cachetool", *map(str, words)]
    program = "import os, sys; pid = os.posix_spawn(sys.argv[1], sys.argv[1:], os.environ); _, status, used ="
    program += " os.wait4(pid, 0); print(); print(os.waitstatus_to_exitcode(status), used.ru_maxrss)"
    done = subprocess.run(
        [sys.executable, "-c", program, *command], capture_output=True, text=True, check=True, env={**os.environ, **env}
    )
    code, most = done.stdout.splitlines()[-1].split()
    return Ran(int(code), done.stdout + done.stderr, int(most) >> 10)


# -- bombs -------------------------------------------------------------------------------------------------------------


def tar_gz(path: Path, name: str, size: int, **others: bytes) -> None:
    """Write zeros, and other members after them."""
    with gzip.open(path, "wb", compresslevel=1) as file, tarfile.open(fileobj=file, mode="w") as archive:
        info = tarfile.TarInfo(name)
        info.size = size
        file.write(info.tobuf())
        for _ in range(size // MIB):
            file.write(bytes(MIB))
        for other, data in others.items():
            info = tarfile.TarInfo(other.replace("_", "."))
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))


def tar_of(path: Path, **members: bytes) -> None:
    with tarfile.open(path, "w") as archive:
        for name, data in members.items():
            info = tarfile.TarInfo(name.replace("_", "."))
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))


def zip_of_zips(path: Path) -> None:
    """Write zips in zips, six levels deep, and an array that declares 4 GB."""
    data = bytes(MIB)
    for depth in range(6):
        out = io.BytesIO()
        with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
            for number in range(4):
                archive.writestr(f"{depth}-{number}.zip", data)
        data = out.getvalue()
    head = io.BytesIO()
    np.lib.format.write_array_header_1_0(head, {"descr": "<f4", "fortran_order": False, "shape": (10, 10**8)})
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("deep.zip", data)
        with archive.open("x.npy", "w", force_zip64=True) as file:
            file.write(head.getvalue())
            for _ in range(20):
                file.write(bytes(MIB))


def gzip_chain(path: Path) -> None:
    """Write gzip in gzip in gzip, of 30 MB of zeros."""
    data = gzip.compress(bytes(30 * MIB), 1)
    for _ in range(3):
        data = gzip.compress(data, 1)
    path.write_bytes(data)


def zarr_of(path: Path, chunk: bytes, compressor: Any) -> None:
    array = zarr.create_array(path, shape=(8,), chunks=(8,), dtype="f8", compressors=compressor)
    array[:] = np.arange(8)
    next((path / "c").iterdir()).write_bytes(chunk)


def zarr_zstd(path: Path) -> None:
    zarr_of(path, numcodecs.Zstd(level=1).encode(np.zeros(400 * MIB, dtype=np.uint8)), zarr.codecs.ZstdCodec())


def zarr_window(path: Path) -> None:
    """Write a frame without a size that requests a window of terabytes."""
    zarr_of(path, b"\x28\xb5\x2f\xfd\x00\xf8" + b"\x02\x00\x01\x00" * 50, zarr.codecs.ZstdCodec())


def zarr_blosc(path: Path) -> None:
    """Write a chunk whose header declares 2 GB."""
    chunk = bytearray(numcodecs.Blosc().encode(np.zeros(MIB, dtype=np.uint8)))
    chunk[4:8] = (2**31 - 1).to_bytes(4, "little")
    zarr_of(path, bytes(chunk), zarr.codecs.BloscCodec())


def hdf5_chunk(path: Path) -> None:
    """Write a chunk of 60 MB of zeros in a few kilobytes: the largest chunk that is read at all."""
    with h5py.File(path, "w") as file:
        file.create_dataset("x", (8, 1_900_000), "f4", chunks=(8, 1_900_000), compression="gzip")[:] = 0


def hdf5_shape(path: Path) -> None:
    with h5py.File(path, "w") as file:
        file.create_dataset("x", (10**12, 1000), "f8", chunks=(1, 1000))


def netcdf3_shape(path: Path) -> None:
    """Write a header that claims an array of 2^62 rows of 2^62 numbers."""
    values = np.zeros((2, 3))
    body = classic({"x": (("n", "m"), values, {})}, {"n": 2, "m": 3}, version=5)
    for length in (2, 3):
        body = body.replace(length.to_bytes(8, "big"), (2**62).to_bytes(8, "big"), 1)
    path.write_bytes(body)


def masked(data: bytes) -> bytes:
    crc = crc32c.crc32c(data)
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)


def tfrecord_length(path: Path) -> None:
    length = struct.pack("<Q", 2**63)
    path.write_bytes(length + masked(length) + b"abc")


def tfrecord_gzip(path: Path) -> None:
    length = struct.pack("<Q", 120 * MIB)
    with gzip.open(path, "wb", compresslevel=1) as file:
        file.write(length + masked(length))
        for _ in range(120):
            file.write(bytes(MIB))


def jpeg_bomb() -> bytes:
    from PIL import Image

    out = io.BytesIO()
    Image.new("RGB", (8, 8)).save(out, "JPEG")
    body = bytearray(out.getvalue())
    at = bytes(body).index(b"\xff\xc0") + 5
    body[at : at + 4] = struct.pack(">HH", 60_000, 60_000)
    return bytes(body)


def npz_row(path: Path) -> None:
    np.savez_compressed(path, x=np.zeros((1, 100_000_000), dtype=np.uint8))


BOMBS: dict[str, tuple[Callable[[Path], None], int, tuple[str, ...]]] = {
    # file: the function that creates it, the exit code, options
    "member.tar.gz": (lambda path: tar_gz(path, "a.bin", 120 * MIB), 3, ()),
    "left-out.tar.gz": (lambda path: tar_gz(path, "README", 120 * MIB, a_txt=b"fine"), 0, ()),
    "chain.tar.gz": (gzip_chain, 3, ()),
    "row.npz": (npz_row, 3, ()),
    "zips.npz": (zip_of_zips, 3, ()),
    "zstd.zarr": (zarr_zstd, 3, ()),
    "window.zarr": (zarr_window, 3, ()),
    "blosc.zarr": (zarr_blosc, 3, ()),
    "chunk.h5": (hdf5_chunk, 0, ()),
    "shape.h5": (hdf5_shape, 3, ()),
    "shape.nc3": (netcdf3_shape, 3, ()),
    "length.tfrecord": (tfrecord_length, 3, ()),
    "zeros.tfrecord.gz": (tfrecord_gzip, 3, ()),
    "png.tar": (lambda path: tar_of(path, a_png=png_bomb(60_000, 60_000)), 3, ("--decode", "image")),
    "jpeg.tar": (lambda path: tar_of(path, a_jpg=jpeg_bomb()), 3, ("--decode", "image")),
}


@pytest.fixture(scope="module")
def usual(tmp_path_factory: pytest.TempPathFactory) -> int:
    """Return the MiB that a command takes for a harmless file."""
    folder = tmp_path_factory.mktemp("usual")
    np.save(folder / "x.npy", np.arange(10))
    ran = run("convert", folder / "x.npy", "--to", "lmdb", "--out", folder / "out")
    assert ran.code == 0, ran
    return ran.mib


FEW = (
    "left-out.tar.gz",
    "row.npz",
    "zstd.zarr",
    "chunk.h5",
    "shape.nc3",
    "length.tfrecord",
    "zeros.tfrecord.gz",
    "jpeg.tar",
)
"""One or two files of each kind for the default run; the long runs have all."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in FEW else [pytest.mark.soak]) for name in BOMBS]
)
def test_no_bomb_takes_more_than_256_mib(tmp_path: Path, usual: int, name: str) -> None:
    """Fault 80: bombs are refused with the file's name, or read in pieces. No process grows by more than 256 MiB."""
    make, code, options = BOMBS[name]
    make(tmp_path / name)
    ran = run("convert", tmp_path / name, "--to", "tfrecord", "--out", tmp_path / "out", *options)

    assert ran.code == code, ran
    assert ran.mib - usual <= 256, ran
    assert "Traceback" not in ran.said
    assert code == 0 or name in ran.said
    assert (tmp_path / "out").exists() == (code == 0)


# -- pickles -----------------------------------------------------------------------------------------------------------


class Canary:
    """An object that creates a folder when it is unpickled."""

    def __init__(self, place: Path) -> None:
        self.place = place

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.place),)


def with_pickles(folder: Path, place: Path) -> dict[str, tuple[str, ...]]:
    """Write files that hold a canary in every possible way, each with the options that try hardest to read it."""
    folder.mkdir()
    canary, song = Canary(place), pickle.dumps(Canary(place))
    np.save(folder / "object.npy", np.array([canary], dtype=object), allow_pickle=True)
    np.savez(folder / "object.npz", x=np.array([canary], dtype=object), y=np.arange(1))
    about = {"zarr_format": 2, "shape": [1], "chunks": [1], "dtype": "|O", "fill_value": None, "order": "C"}
    for name, compressor in (("plain", None), ("behind", {"id": "zlib", "level": 1})):
        (folder / f"{name}.zarr").mkdir()
        chunk = pickle.dumps([np.array([canary], dtype=object)])
        (folder / f"{name}.zarr" / "0").write_bytes(chunk if compressor is None else zlib.compress(chunk))
        more = {"compressor": compressor, "filters": [{"id": "pickle", "protocol": 5}]}
        (folder / f"{name}.zarr" / ".zarray").write_text(json.dumps({**about, **more}))
    env = lmdb.open(str(folder / "values.lmdb"), subdir=False)
    with env.begin(write=True) as txn:
        txn.put(b"0", song)
    env.close()
    tar_of(folder / "members.tar", a_pyd=song, a_pkl=song, a_pth=song, a_txt=b"x")
    objects = folder / "objects"
    objects.mkdir()
    for name in ("a.pt", "a.pth", "a.pkl", "a.pyd", "a.pickle"):
        (objects / name).write_bytes(song)
    (objects / "a.txt").write_text("x")
    return {
        "object.npy": (),
        "object.npz": (),
        "plain.zarr": (),
        "behind.zarr": (),
        "values.lmdb": ("--value-format", "bytes"),
        "members.tar": (),
        "objects": (),
    }


def test_no_command_runs_a_pickle(tmp_path: Path) -> None:
    """Fault 77: dry run, convert, pull, verify, show and load never unpickle anything."""
    place = tmp_path / "unpickled"
    for name, options in with_pickles(tmp_path / "in", place).items():
        path, cache = tmp_path / "in" / name, tmp_path / f"cache-{name}"
        commands: list[tuple[object, ...]] = [
            ("convert", path, "--to", "lmdb", "--dry-run"),
            ("convert", path, "--to", "hdf5", "--out", tmp_path / f"out-{name}", *options),
            ("pull", path, "--to", "hdf5", "--all", "--cache", cache, "--max-size", "20MB", *options),
        ]
        for words in commands:
            ran = run_command(*words, folder=tmp_path)
            assert ran.returncode in (0, 2, 3), ran
            assert "Traceback" not in ran.stdout + ran.stderr
        if cache.exists() and cachetool.open_cache(cache).shards():
            (shard,) = cachetool.open_cache(cache).shards()
            assert run_command("verify", "--cache", cache, folder=tmp_path).returncode == 0
            assert run_command("show", f"{shard.id}:0", "--cache", cache, folder=tmp_path).returncode == 0
            from cachetool.loaders.torch import CacheDataset

            assert len(CacheDataset(cache)[0]) >= 1
    assert not place.exists()
    pickle.loads(pickle.dumps(Canary(place)))
    assert place.exists(), "the canary does sing"


def test_checksums_beside_a_file_are_no_pickle_and_take_no_memory(tmp_path: Path) -> None:
    place = tmp_path / "unpickled"
    np.save(tmp_path / CHECKSUMS_FILE, np.array([Canary(place)], dtype=object), allow_pickle=True)
    with pytest.raises(CorruptError, match=r"checksums\.npy"):
        stored_checksums(tmp_path, SCHEMA)
    assert not place.exists()

    np.save(tmp_path / CHECKSUMS_FILE, np.zeros((len(SCHEMA), 1), dtype=np.uint64))
    raw = (tmp_path / CHECKSUMS_FILE).read_bytes()
    (tmp_path / CHECKSUMS_FILE).write_bytes(raw.replace(b"(4, 1), }            ", b"(4, 1000000000000), }"))
    tracemalloc.start()
    with pytest.raises(CorruptError, match=r"checksums\.npy cannot be read"):
        stored_checksums(tmp_path, SCHEMA)
    assert tracemalloc.get_traced_memory()[1] < MIB
    tracemalloc.stop()


# -- files that claim to be ours ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Create folders by ``convert --out``, by format and compression."""
    root, content = tmp_path_factory.mktemp("plain"), block(list(range(40)))
    np.save(root / "x.npy", np.asarray(content.columns["x"]))
    for to, compression in (
        ("lmdb", None), ("hdf5", None), ("zarr", None), ("tfrecord", None),
        ("hdf5", "gzip"), ("zarr", "zstd"), ("tfrecord", "gzip"),
    ):  # fmt: skip
        out = root / f"{to}-{compression}"
        cachetool.convert(root / "x.npy", to=to, out=out, compression=compression, shard_size="10kB")
    return root


LOOK = """
import sys
from pathlib import Path
import h5py, lmdb, zarr
lmdb.open = h5py.File = zarr.open = zarr.open_group = zarr.open_array = None
from tests.sources.files import open_files
for path in sys.argv[1:]:
    with open_files(path) as source:
        assert sum(len(block) for block in source.blocks()) == source.samples > 0, path
"""


def test_no_library_opens_a_file_outside_a_cache_in_this_process(plain: Path) -> None:
    """An attacker can make a file look like ours, with valid digests. That is no reason to trust it."""
    inputs = [folder for folder in plain.iterdir() if folder.is_dir()]
    inputs += [path for folder in inputs for path in folder.glob("part-00000.*") if path.suffix != ".tfrecord"]
    assert len(inputs) == 7 + 5
    ran = subprocess.run([sys.executable, "-c", LOOK, *inputs], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr


def test_a_part_outside_the_folder_is_not_read(plain: Path, tmp_path: Path) -> None:
    """Fault 78: neither the list of parts nor their extents lead outside the folder."""
    secret = tmp_path / "secret"
    secret.write_bytes(b"host bytes " * 10_000)
    shutil.copytree(plain / "lmdb-None", tmp_path / "in")
    extents = side_folder(tmp_path / "in" / "part-00000.lmdb") / "extents.bin"
    raw, about = extents.read_bytes(), json.loads((tmp_path / "in" / DATASET_FILE).read_text())
    extents.write_bytes(raw.replace(b'"part-00000.lmdb"', b'"../secret"      '))
    with pytest.raises(CorruptError, match=r"extents\.bin .*'\.\./secret' is not a name inside of the folder"):
        cachetool.convert(tmp_path / "in", to="hdf5", out=tmp_path / "out")
    extents.write_bytes(raw)
    for name in ("../secret.lmdb", "/etc/passwd", ".hidden.lmdb", "part-00000.h5"):
        about["parts"][0]["file"] = name
        (tmp_path / "in" / DATASET_FILE).write_text(json.dumps(about))
        with pytest.raises(CorruptError, match=r"dataset\.json does not fit the files"):
            open_files(tmp_path / "in")


def test_parts_that_were_swapped_are_found(plain: Path, tmp_path: Path) -> None:
    """Fault 59: parts swapped with all their side files, and alone."""
    for way in ("lmdb-None", "zarr-zstd"):
        for together in (True, False):
            folder = tmp_path / f"{way}-{together}"
            shutil.copytree(plain / way, folder)
            one, two = sorted(folder.glob("part-*"))[:2]
            for a, b in [(one, two), (side_folder(one), side_folder(two))][: 1 + together]:
                a.rename(folder / "aside")
                b.rename(a)
                (folder / "aside").rename(b)
            with pytest.raises(CorruptError, match=r"part-0000[01]"):
                cachetool.convert(folder, to="tfrecord", out=tmp_path / "out")
            assert not (tmp_path / "out").exists()


def test_a_newer_layout_is_refused_with_both_versions(plain: Path, tmp_path: Path) -> None:
    """Fault 67: also a newer layout of extents."""
    shutil.copytree(plain / "hdf5-None", tmp_path / "in")
    about = tmp_path / "in" / DATASET_FILE
    value = json.loads(about.read_text())
    about.write_text(json.dumps({**value, "layout": 2}))
    with pytest.raises(CorruptError, match=r"dataset\.json has layout 2, this cachetool reads layout 1"):
        cachetool.convert(tmp_path / "in", to="lmdb", out=tmp_path / "out")
    about.write_text(json.dumps(value))
    extents = side_folder(tmp_path / "in" / "part-00000.h5") / "extents.bin"
    extents.write_bytes(extents.read_bytes().replace(b"CTEXT002", b"CTEXT007"))
    with pytest.raises(CorruptError, match=r"extents\.bin .*version 7, this cachetool reads version 2"):
        cachetool.convert(tmp_path / "in", to="lmdb", out=tmp_path / "out")


# -- files that were left open, and links -----------------------------------------------------------------------------


def test_a_file_that_its_writer_left_open_is_not_changed(tmp_path: Path) -> None:
    """Fault 62: the file is read, or refused with its name. Nobody clears its mark."""
    program = (
        "import h5py, os, sys\n"
        "file = h5py.File(sys.argv[1], 'w', libver='latest')\n"
        "data = file.create_dataset('x', (10, 3), 'f4', maxshape=(None, 3), chunks=(5, 3))\n"
        "if sys.argv[2] == 'swmr': file.swmr_mode = True\n"
        "data[:] = 1; file.flush(); os._exit(0)\n"
    )
    for how in ("swmr", "plain"):
        path = tmp_path / f"{how}.h5"
        subprocess.run([sys.executable, "-c", program, path, how], check=True)
        before = path.read_bytes()
        with pytest.raises(BadObject, match=rf"{how}\.h5 is not a whole HDF5 file"):
            open_files(path)
        with cachetool.open_cache(tmp_path / "c", max_size="8MB") as cache:
            with pytest.raises(BadObject, match=rf"{how}\.h5 is not a whole HDF5 file: a program is writing it"):
                cache.pull(path, all=True)
            assert not cache.shards()
        assert path.read_bytes() == before


def test_chunks_that_are_links_are_refused(tmp_path: Path) -> None:
    """Fault 78 in Zarr: a link in place of a chunk would read any file of this machine as values."""
    (tmp_path / "secret").write_bytes(b"host" * 100)
    for version in (2, 3):
        path = tmp_path / f"{version}.zarr"
        array = zarr.create_array(path, shape=(100,), chunks=(50,), dtype="i4", compressors=None, zarr_format=version)
        array[:] = np.arange(100)
        chunk = path / ("1" if version == 2 else "c/1")
        chunk.unlink()
        chunk.symlink_to(tmp_path / "secret")
        with pytest.raises(BadObject, match=rf"{version}\.zarr: .*links that lead out of the folder"):
            open_files(path)


def test_a_blosc_chunk_that_was_cut_is_an_error(tmp_path: Path) -> None:
    """Fault 64: Blosc reads beyond the end of a chunk."""
    for version in (2, 3):
        path = tmp_path / f"{version}.zarr"
        how: Any = numcodecs.Blosc() if version == 2 else zarr.codecs.BloscCodec()
        data = np.random.default_rng(0).standard_normal(1000)
        zarr.create_array(path, shape=(1000,), chunks=(1000,), dtype="f8", compressors=how, zarr_format=version)[:] = (
            data
        )
        chunk = path / ("0" if version == 2 else "c/0")
        raw = chunk.read_bytes()
        for size in (len(raw) - 1, len(raw) // 2, 16, 3):
            chunk.write_bytes(raw[:size])
            with open_files(path) as source, pytest.raises(BadObject, match="Blosc chunk that is cut short"):
                list(source.blocks())


# -- records -----------------------------------------------------------------------------------------------------------


def examples() -> list[bytes]:
    """Return serialised examples with every kind of feature, and without features."""
    from cachetool.formats.example import ExampleLayout

    schema = Schema((*SCHEMA.fields, Field("raw", "bytes"), Field("w", "<f4"), Field("n", "<i8")))
    layout, rng = ExampleLayout(schema), random.Random(81)
    content = block([1, 2, 3])
    samples = [{**content.sample(i), "raw": rng.randbytes(i), "w": np.float32(i), "n": i} for i in range(3)]
    from cachetool.core.block import Block

    buffer, starts, sizes = layout.encode(Block.from_samples(schema, samples), before=12, after=4)
    out = [buffer[at : at + size].tobytes() for at, size in zip(starts.tolist(), sizes.tolist(), strict=True)]
    nested = b""
    for _ in range(60):
        nested = b"\x0a" + bytes([len(nested) & 0x7F]) + nested
    return [*out, nested, b"\x0a\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01", b""]


@pytest.mark.parametrize(
    "runs", [pytest.param(5000, id="short"), pytest.param(1_000_000, id="all", marks=pytest.mark.soak)]
)
@pytest.mark.timeout(7200)
def test_damaged_examples_are_parsed_or_refused_and_take_no_memory(runs: int) -> None:
    """Fault 81: bytes changed, cut, repeated and joined cause at most a ValueError."""
    rng, seeds, parsed = random.Random(1), examples(), 0
    tracemalloc.start()
    for _ in range(runs):
        record = bytearray(rng.choice(seeds))
        for _ in range(rng.randrange(1, 6)):
            at = rng.randrange(len(record) + 1)
            how = rng.randrange(4)
            if how == 0 and record:
                record[at % len(record)] ^= 1 << rng.randrange(8)
            elif how == 1:
                record[at:at] = rng.choice((b"\xff" * 9, b"\x0a\x7f", b"\x12", rng.randbytes(3)))
            elif how == 2:
                del record[at : at + rng.randrange(20)]
            else:
                record[at:at] = rng.choice(seeds)[: rng.randrange(50)]
        try:
            parse_example(memoryview(bytes(record)))
            parsed += 1
        except ValueError:
            pass
    assert tracemalloc.get_traced_memory()[1] < MIB
    tracemalloc.stop()
    assert 0 < parsed < runs


def test_a_tfrecord_shard_with_a_huge_record_length_takes_no_memory(tmp_path: Path) -> None:
    """Fault 61, read with a schema: the length has a valid checksum and is compared with the file's size."""
    tfrecord_length(tmp_path / "x.tfrecord")
    tracemalloc.start()
    with pytest.raises(CorruptError, match=r"x\.tfrecord is cut short"):
        get_format("tfrecord").open(tmp_path / "x.tfrecord", schema=SCHEMA)
    assert tracemalloc.get_traced_memory()[1] < MIB
    tracemalloc.stop()
