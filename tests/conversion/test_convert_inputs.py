"""Converting files: any kind to any format; an interrupted conversion continues; the same files pulled."""

from __future__ import annotations

import io
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
from cachetool.core.errors import BadObject, UsageError
from cachetool.formats import get_format
from cachetool.formats.digest import checksums
from cachetool.formats.shard import open_shard, stored_checksums
from cachetool.loaders.snapshots.plain_files import shards_at
from tests.formats.samples import EVERY_KIND, block
from tests.interop.folders import make, whole

KILLED = Path(__file__).parent / "scripts" / "killed_convert.py"


@pytest.fixture
def foreign(tmp_path: Path) -> Path:
    """Create twenty samples as five kinds of file."""
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


@pytest.mark.parametrize(
    ("name", "workers"),
    [
        *[("x.npy", 1), ("both.npz", 2), ("a.h5", 1), ("a.tar", 2), ("objects", 1), ("x.npy", 2)],
        *[pytest.param(*each, marks=pytest.mark.soak) for each in (("both.npz", 1), ("a.h5", 2), ("a.tar", 1))],
        pytest.param("objects", 2, marks=pytest.mark.soak),
    ],
)
def test_a_foreign_input_is_converted_to_files_and_pulled_into_a_cache(
    foreign: Path, tmp_path: Path, name: str, workers: int
) -> None:
    arguments: dict[str, Any] = {"to": "hdf5", "shard_size": 120, "workers": workers}
    plain = cachetool.convert(foreign / name, out=tmp_path / "out", **arguments)
    assert plain.samples == 20
    assert plain.shards > 1
    x = np.asarray(whole(tmp_path / "out").columns["x"])
    assert (x.dtype, x.tolist()) == (np.dtype("<f4"), np.arange(120.0).reshape(20, 2, 3).tolist())
    with open_cache(tmp_path / "cache", max_size="20MB") as cache:
        assert cache.pull(foreign / name, all=True, **arguments).samples == 20
        rows = []
        for shard in cache.shards():
            with open_shard(shard.path, get_format("hdf5"), shard.schema) as reader:
                rows += np.asarray(reader.read(0, reader.samples).columns["x"]).tolist()
        assert sorted(rows) == x.tolist()
        assert cache.pull(foreign / name, all=True, **arguments).samples == 0, "the same input adds nothing"


def test_an_input_without_out_is_refused_with_the_pull_command(foreign: Path) -> None:
    with pytest.raises(UsageError, match=rf"--out DIR;\n.*cachetool pull {foreign}/x.npy --all$"):
        cachetool.convert(foreign / "x.npy", to="hdf5")


@pytest.mark.parametrize(
    ("name", "way", "to"),
    [
        *[("odd.npy", way, to) for way in ("out", "pull") for to in ("lmdb", "hdf5", "zarr", "tfrecord")],
        *[("a.tar", "out", "tfrecord"), ("objects", "out", "tfrecord"), ("objects", "pull", "tfrecord")],
        *[("ragged", "out", "hdf5"), ("ragged", "pull", "zarr")],
    ],
)
def test_a_bool_stored_as_any_nonzero_byte_is_true_and_not_damage(tmp_path: Path, name: str, way: str, to: str) -> None:
    """NumPy treats every nonzero byte as true. Formats that store a number or a bit return 1 for it."""
    odd = np.array([0, 1, 2, 255], "u1").view(bool)
    np.save(tmp_path / "odd.npy", odd)
    for folder in ("objects", "ragged"):
        (tmp_path / folder).mkdir()
        for at in range(4):
            np.save(tmp_path / folder / f"{at}.npy", odd[at : at + 1] if folder == "objects" else odd[:at])
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        tar.add(tmp_path / "objects", "a")
    if way == "out":
        cachetool.convert(tmp_path / name, out=tmp_path / "out", to=to, verify=True)
        found = whole(tmp_path / "out")
    else:
        with open_cache(tmp_path / "cache", max_size="20MB") as cache:
            cache.pull(tmp_path / name, all=True, order="sequential", workers=1, to=to)
            (shard,) = cache.shards()
            with open_shard(shard.path, get_format(to), shard.schema, library=True) as reader:
                found = reader.read(0, reader.samples)
            assert np.array_equal(checksums(found), stored_checksums(shard.path, shard.schema))

    column = found.columns[found.schema.names[0]]
    values = column if isinstance(column, np.ndarray) else column.compact().values
    assert sorted(values.view("u1").flat) == ([0, 0, 0, 1, 1, 1] if name == "ragged" else [0, 1, 1, 1])


def test_a_single_exported_file_is_recognised_and_a_damaged_one_is_an_error(tmp_path: Path) -> None:
    content = block(EVERY_KIND, 60)
    for name, suffix in (("lmdb", ".lmdb"), ("hdf5", ".h5"), ("zarr", ".zarr")):
        made = make(tmp_path / f"made-{name}", name, content)
        cachetool.convert(made / f"part-00000{suffix}", to="tfrecord", out=tmp_path / name)
        np.testing.assert_array_equal(checksums(whole(tmp_path / name)), checksums(content))
    broken = tmp_path / "broken.h5"
    broken.write_bytes((tmp_path / "made-hdf5" / "part-00000.h5").read_bytes()[:-2000])
    with pytest.raises(BadObject, match=r"broken\.h5"):
        cachetool.convert(broken, to="lmdb", out=tmp_path / "x")
    assert not (tmp_path / "x").exists()


def test_a_killed_conversion_continues_with_its_complete_parts(foreign: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    killed = subprocess.run([sys.executable, KILLED, foreign / "x.npy", out, "120"], check=False)
    assert killed.returncode == -signal.SIGKILL
    assert not out.exists()
    (aside,) = tmp_path.glob(".out.partial-*")
    stamps = {path.name: path.stat().st_mtime_ns for path in (aside / "made").glob("part-*.h5")}
    assert sorted(stamps)[:2] == ["part-00000.h5", "part-00001.h5"]

    cachetool.convert(foreign / "x.npy", to="hdf5", out=out, shard_size=120)
    assert not aside.exists()
    assert sorted(os.listdir(out)) == [".extents", "dataset.json", *(f"part-{n:05d}.h5" for n in range(4))]
    for name in ("part-00000.h5", "part-00001.h5"):
        assert (out / name).stat().st_mtime_ns == stamps[name], "a whole part is not made again"
    assert np.asarray(whole(out).columns["x"]).tolist() == np.arange(120.0).reshape(20, 2, 3).tolist()


def test_the_next_conversion_removes_the_listing_of_a_killed_one(
    tmp_path: Path,
) -> None:
    objects, place = tmp_path / "objects", tmp_path / "place"
    objects.mkdir()
    place.mkdir()
    for number in range(20):
        np.save(objects / f"{number:02d}.npy", np.arange(6.0) + number)
    subprocess.run(
        [sys.executable, KILLED, objects, tmp_path / "out", "200"],
        env={**os.environ, "TMPDIR": str(place)},
        check=False,
    )
    assert len(list(tmp_path.glob(".out.input-*/listing"))) == 1

    assert cachetool.convert(objects, to="hdf5", out=tmp_path / "out", shard_size=200).samples == 20
    assert sorted(path.name for path in tmp_path.iterdir()) == ["objects", "out", "place"]
    assert list(place.glob("*")) == []


def test_a_killed_conversion_starts_again_with_other_options(foreign: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    subprocess.run([sys.executable, KILLED, foreign / "x.npy", out, "120"], check=False)
    result = cachetool.convert(foreign / "x.npy", to="zarr", out=out, shard_size=120)

    assert result.samples == 20
    assert not any(path.suffix == ".h5" for path in out.rglob("*"))


def test_the_error_says_if_only_the_order_of_the_fields_differs(tmp_path: Path) -> None:
    """The message has the option that accepts them."""
    x, y = np.arange(4), np.ones((4, 2))
    np.savez(tmp_path / "a.npz", x=x, y=y)
    np.savez(tmp_path / "b.npz", y=y, x=x)
    for name, order in (("a", "xy"), ("b", "yx")):
        (tmp_path / name).mkdir()
        for at in range(4):
            (tmp_path / name / f"{at}.json").write_text(json.dumps(dict.fromkeys(order, at)))
    says = "has the fields of this source in another order; add --fields x,y"
    with open_cache(tmp_path / "cache", max_size="20MB") as cache:
        cache.pull(tmp_path / "a.npz", all=True)
        with pytest.raises(UsageError, match=f"dataset 'default' {says}"):
            cache.pull(tmp_path / "b.npz", all=True)
        assert cache.pull(tmp_path / "b.npz", all=True, fields=["x", "y"]).samples == 4
        cache.pull(tmp_path / "a", all=True, dataset="two")
        with pytest.raises(UsageError, match=f"dataset 'two' {says}"):
            cache.pull(tmp_path / "b", all=True, dataset="two")
        assert cache.pull(tmp_path / "b", all=True, dataset="two", fields=["x", "y"]).samples == 4
    for name in "ab":
        cachetool.convert(tmp_path / f"{name}.npz", to="lmdb", out=tmp_path / f"out-{name}")
    with pytest.raises(UsageError, match="hold the same fields in different orders: y, x and x, y"):
        shards_at([tmp_path / "out-a", tmp_path / "out-b"])


def test_an_input_of_another_schema_is_refused(foreign: Path, tmp_path: Path) -> None:
    with open_cache(tmp_path / "cache", max_size="20MB") as cache:
        cache.pull(foreign / "x.npy", all=True)
        with pytest.raises(UsageError, match="another --dataset"):
            cache.pull(foreign / "both.npz", all=True)
        assert cache.pull(foreign / "both.npz", all=True, dataset="two").samples == 20
