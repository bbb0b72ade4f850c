"""Converting files: any kind in, any format out, plain or into a cache; what stops half-way goes on."""

from __future__ import annotations

import io
import itertools
import json
import os
import signal
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

import cachetool
from cachetool.api import open_cache
from cachetool.block import Block
from cachetool.errors import CapacityError, CorruptError, UsageError
from cachetool.formats import get_format
from cachetool.formats.shard import PlainFile, open_shard, side_folder
from cachetool.schema import Field, Schema

FORMATS = ("lmdb", "hdf5", "zarr", "tfrecord")
EVERYTHING = Schema(
    (
        *(
            Field(f"s{code[1:]}", code)
            for code in ("|b1", "|i1", "|u1", "<i2", "<u4", "<i8", "<u8", "<f2", "<f4", "<f8", "<c8", "<c16")
        ),
        Field("when", "<M8[ns]"),
        Field("half", "<f2", (3,)),
        Field("deep", "<i4", (2, 1, 3, 1, 2)),
        Field("none", "<f4", (0, 4)),
        Field("ragged", "<c8", (None, None)),
        Field("group/raw", "bytes"),
        Field("__key__", "str"),
    )
)


def everything(count: int) -> Block:
    """Samples of every type, with the values that are easily lost: NaN payloads, extremes, empty, not UTF-8."""
    rng = np.random.default_rng(0)
    columns: list[dict[str, Any]] = []
    for number in range(count):
        sample: dict[str, Any] = {}
        for field in EVERYTHING:
            if field.kind == "fixed":
                raw = rng.integers(0, 256, field.nbytes, dtype=np.uint8)
                if field.numpy.kind == "b":
                    raw &= 1
                sample[field.name] = raw.view(field.numpy).reshape(field.sizes)
        sample["ragged"] = (rng.random((number % 3, number % 4)) + 1j).astype(np.complex64)
        sample["group/raw"] = bytes(range(number % 7))
        sample["__key__"] = ["", "ü/\n", "\udcff", "a" * 300][number % 4] + str(number)
        columns.append(sample)
    return Block.from_samples(EVERYTHING, columns)


def same(left: Block, right: Block) -> None:
    assert left.schema == right.schema
    for i in range(len(left)):
        for (name, a), b in zip(left.sample(i).items(), right.sample(i).values(), strict=True):
            if isinstance(a, str | bytes):
                assert a == b, name
            else:
                assert (a.dtype, a.shape, a.tobytes()) == (b.dtype, b.shape, b.tobytes()), name


def whole(folder: Path) -> Block:
    """All samples of a folder of plain files, through the format's own library."""
    about = json.loads((folder / "dataset.json").read_text())
    kind, schema = get_format(about["format"]), Schema.from_json(about["schema"])
    blocks = []
    for part in about["parts"]:
        with kind.open(folder / part["file"], schema=schema) as reader:
            blocks.append(reader.read(0, reader.samples))
    return Block.concat(blocks)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every type of field in every format, as plain files."""
    root = tmp_path_factory.mktemp("made")
    block = everything(60)
    for name in FORMATS:
        (root / name / ".extents").mkdir(parents=True)
        kind = get_format(name)
        path = root / name / f"part-00000{kind.suffix}"
        file = PlainFile(path, kind, EVERYTHING, samples=60, nbytes=block.nbytes)
        file.write(block)
        written = file.finish()
        part = {"file": path.name, "samples": 60, "payload": written.payload}
        about = {"format": name, "schema": EVERYTHING.to_json(), "samples": 60, "parts": [part]}
        (root / name / "dataset.json").write_text(json.dumps(about))
    return root


@pytest.mark.parametrize(("a", "b"), list(itertools.product(FORMATS, FORMATS)))
def test_every_pair_keeps_every_type_bit_for_bit(made: Path, tmp_path: Path, a: str, b: str) -> None:
    result = cachetool.convert(made / a, to=b, out=tmp_path / "out", shard_size="3kB", verify=True, workers=1)

    assert result.samples == 60
    assert result.shards > 1
    same(whole(tmp_path / "out"), everything(60))


def test_a_chain_with_other_cuts_on_the_way_keeps_the_digest(made: Path, tmp_path: Path) -> None:
    digests, source = set(), made / "lmdb"
    for number, (to, size) in enumerate([("hdf5", "3kB"), ("zarr", "1MB"), ("tfrecord", "9kB"), ("lmdb", "5kB")]):
        out = tmp_path / f"{number}"
        digests.add(cachetool.convert(source, to=to, out=out, shard_size=size).digest)
        source = out
    assert len(digests) == 1
    same(whole(source), everything(60))


@pytest.fixture
def foreign(tmp_path: Path) -> Path:
    """Twenty samples, as five kinds of file."""
    root = tmp_path / "foreign"
    (root / "objects").mkdir(parents=True)
    x = np.arange(20 * 6, dtype=">f4").reshape(20, 2, 3)
    np.save(root / "x.npy", x)
    np.savez(root / "both.npz", x=x, y=np.arange(20))
    with h5py.File(root / "a.h5", "w") as file:
        file["x"] = x
        file["other"] = np.zeros(3)
    with tarfile.open(root / "a.tar", "w") as tar:
        for number in range(20):
            out = io.BytesIO()
            np.save(out, x[number])
            info = tarfile.TarInfo(f"{number:03d}.x.npy")
            info.size = len(out.getvalue())
            tar.addfile(info, io.BytesIO(out.getvalue()))
            (root / "objects" / f"{number:03d}.x.npy").write_bytes(out.getvalue())
    return root


@pytest.mark.parametrize("name", ["x.npy", "both.npz", "a.h5", "a.tar", "objects"])
@pytest.mark.parametrize("workers", [1, 2])
def test_a_foreign_input_goes_into_files_and_into_a_cache(
    foreign: Path, tmp_path: Path, name: str, workers: int
) -> None:
    arguments: dict[str, Any] = {"to": "hdf5", "shard_size": 120, "workers": workers}
    plain = cachetool.convert(foreign / name, out=tmp_path / "out", **arguments)
    stored = cachetool.convert(foreign / name, cache=tmp_path / "cache", max_size="20MB", **arguments)
    assert plain.samples == stored.samples == 20
    assert plain.shards > 1
    x = np.asarray(whole(tmp_path / "out").columns["x"])
    assert (x.dtype, x.tolist()) == (np.dtype("<f4"), np.arange(120.0).reshape(20, 2, 3).tolist())
    with open_cache(tmp_path / "cache") as cache:
        rows = []
        for shard in cache.shards():
            with open_shard(shard.path, get_format("hdf5"), shard.schema) as reader:
                rows += np.asarray(reader.read(0, reader.samples).columns["x"]).tolist()
        assert sorted(rows) == x.tolist()
        again = cache.convert(foreign / name, **arguments)
        assert again.samples == 0, "the same input adds nothing"
        assert sum(shard.samples for shard in cache.shards()) == 20
        with pytest.raises(CapacityError, match="nothing more may be evicted"):
            cache.evict(cache.usage().total - 1)
        assert sum(shard.samples for shard in cache.shards()) == 20, "it exists nowhere else as far as we know"


def test_a_single_file_of_ours_is_known_and_a_damaged_one_is_an_error(made: Path, tmp_path: Path) -> None:
    for name, suffix in (("lmdb", ".lmdb"), ("hdf5", ".h5"), ("zarr", ".zarr")):
        part = made / name / f"part-00000{suffix}"
        cachetool.convert(part, to="tfrecord", out=tmp_path / name)
        same(whole(tmp_path / name), everything(60))
    broken = tmp_path / "broken.h5"
    broken.write_bytes((made / "hdf5" / "part-00000.h5").read_bytes()[:-2000])
    with pytest.raises(CorruptError, match=r"broken\.h5"):
        cachetool.convert(broken, to="lmdb", out=tmp_path / "x")
    assert not (tmp_path / "x").exists()


KILLED = """
import os, signal, sys
import cachetool.export as export
import cachetool.formats.shard as shard
left = [int(sys.argv[3])]
real = shard.PlainFile.finish
def finish(self):
    if left[0] == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    left[0] -= 1
    return real(self)
shard.PlainFile.finish = finish
class Local:
    def run(self, tasks, on_message=None):
        class Channel:
            def send(self, message): pass
        return [export.write_parts(Channel(), **dict(task.arguments)) for task in tasks]
export.LocalEngine = Local
import cachetool
cachetool.convert(sys.argv[1], to="hdf5", out=sys.argv[2], shard_size=120, workers=1)
"""


def test_a_killed_conversion_goes_on_with_the_parts_that_are_whole(foreign: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    killed = subprocess.run([sys.executable, "-c", KILLED, foreign / "x.npy", out, "2"], check=False)
    assert killed.returncode == -signal.SIGKILL
    assert not out.exists()
    aside = tmp_path / ".out.partial"
    stamps = {path.name: path.stat().st_mtime_ns for path in aside.glob("part-*.h5")}
    assert sorted(stamps)[:2] == ["part-00000.h5", "part-00001.h5"]

    cachetool.convert(foreign / "x.npy", to="hdf5", out=out, shard_size=120)
    assert not aside.exists()
    assert sorted(os.listdir(out)) == [".extents", "dataset.json", *(f"part-{n:05d}.h5" for n in range(4))]
    for name in ("part-00000.h5", "part-00001.h5"):
        assert (out / name).stat().st_mtime_ns == stamps[name], "a whole part is not made again"
    assert np.asarray(whole(out).columns["x"]).tolist() == np.arange(120.0).reshape(20, 2, 3).tolist()


def test_other_options_begin_anew(foreign: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    subprocess.run([sys.executable, "-c", KILLED, foreign / "x.npy", out, "2"], check=False)
    result = cachetool.convert(foreign / "x.npy", to="zarr", out=out, shard_size=120)

    assert result.samples == 20
    assert not any(path.suffix == ".h5" for path in out.rglob("*"))


def test_a_compressed_file_keeps_its_checksums_beside_it(foreign: Path, tmp_path: Path) -> None:
    cachetool.convert(foreign / "x.npy", to="hdf5", out=tmp_path / "out", compression="gzip", verify=True)

    side = side_folder(tmp_path / "out" / "part-00000.h5")
    assert os.listdir(side) == ["checksums.npy"]
    assert np.load(side / "checksums.npy").shape == (1, 20)


def test_an_input_of_another_schema_is_refused(foreign: Path, tmp_path: Path) -> None:
    cachetool.convert(foreign / "x.npy", to="lmdb", cache=tmp_path / "cache", max_size="20MB")
    with pytest.raises(UsageError, match="name another --dataset"):
        cachetool.convert(foreign / "both.npz", to="lmdb", cache=tmp_path / "cache")
    assert cachetool.convert(foreign / "both.npz", to="lmdb", cache=tmp_path / "cache", dataset="two").samples == 20
