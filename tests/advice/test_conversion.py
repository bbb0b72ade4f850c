"""The advice of messages of conversions."""

from __future__ import annotations

import errno
from typing import Any

import h5py
import numpy as np
import pytest

import cachetool
import cachetool.conversion.to_files as to_files
from cachetool import open_cache
from cachetool.conversion.options import ConvertOptions
from cachetool.conversion.run import convert
from cachetool.conversion.to_files import WorkFolder
from tests.advice.conftest import World, follows
from tests.advice.rows import Row, follow, group

LONG = "x" * 300

pytestmark = pytest.mark.soak  # 250 commands; test_complete.py says by default which message has no test

ROWS = [
    Row(
        "formats/compression.py", "--compression auto is for {}", "convert a.h5 --to lmdb --compression auto --out new",
        "convert a.h5 --to zarr --compression auto --out new",
    ),
    Row(
        "conversion/inputs.py", "{} is a cache; name it with",
        "convert c --to hdf5 --out new", "convert --to hdf5 --out new --cache c",
    ),
    Row(
        "conversion/run.py", "convert INPUT writes plain files",
        "convert a.h5 --to lmdb --cache x", ("!", "convert a.h5 --to lmdb --out new"),
    ),
    Row(
        "conversion/options.py", "the name of the folder to write",
        "convert a.h5 --to lmdb --out ''", "convert a.h5 --to lmdb --out new",
    ),
    Row(
        "conversion/run.py", "--dataset is only for samples of a cache",
        "convert a.h5 --to lmdb --out new --dataset default", "convert a.h5 --to lmdb --out new",
    ),
    Row(
        "pull/options.py", "--shard-size must be at least",
        "convert a.h5 --to lmdb --out new --shard-size 0", "convert a.h5 --to lmdb --out new --shard-size 1",
    ),
    Row(
        "conversion/to_files.py", "cannot write into {}",
        "convert a.h5 --to lmdb --out a.tar/new", "convert a.h5 --to lmdb --out new",
    ),
    Row(
        "conversion/to_files.py", "--out {} ends in '..'",
        "convert a.h5 --to lmdb --out new/..", "convert a.h5 --to lmdb --out new",
    ),
    Row(
        "conversion/to_files.py", "--out {} is too long",
        f"convert a.h5 --to lmdb --out {LONG}", "convert a.h5 --to lmdb --out new",
    ),
    Row(
        "conversion/to_files.py", "{} exists already",
        "convert a.h5 --to lmdb --out out", "convert a.h5 --to lmdb --out new",
    ),
    Row(
        "cli/convert.py", "--max-size cannot be used with --out",
        "convert --to hdf5 --out new --cache c --max-size 60MB", "convert --to hdf5 --out new --cache c",
    ),
    Row(
        "cli/convert.py", "{} is for a cache, but INPUT",
        "convert a.h5 --to hdf5 --out new --cache c",
        ("convert a.h5 --to hdf5 --out new", "convert --to hdf5 --out newer --cache c"),
    ),
    Row("api.py", "cache {} is one folder for each node", "stats --cache c/{node}", "stats --cache c"),
    Row("api.py", "cache {} has {} with an id", "show --cache c zz:0", "!"),
    Row("api.py", "--{} needs --on ray", "pull src --all --cache c --placement split", "pull src --all --cache c"),
    Row(
        "conversion/options.py", "{}: only for INPUT with --out",
        "convert --to hdf5 --cache c --on-error skip", "convert a.h5 --to hdf5 --out new --on-error skip",
    ),
    Row(
        "cli/convert.py", "--dry-run needs an INPUT",
        "convert --to hdf5 --cache c --dry-run", "convert a.h5 --to hdf5 --dry-run",
    ),
]  # fmt: skip


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_the_advice_of_a_message_works(world: World, row: Row) -> None:
    follow(world, row)


@follows("conversion/run.py", "name a cache, or both")
def test_a_conversion_without_samples_says_what_to_name(world: World) -> None:
    world.raises(lambda: convert(ConvertOptions(to="hdf5")))
    with open_cache(world.folder / "c") as cache:
        assert convert(ConvertOptions(to="hdf5"), cache=cache).samples == 12
    assert convert(ConvertOptions(to="hdf5"), source=world.folder / "a.h5", out=world.folder / "new").samples == 12
    world.worked += 1


def fill(world: World) -> None:
    """Create a cache ``f`` without space for one more shard."""
    (world.folder / "many").mkdir()
    for number in range(8):
        np.save(world.folder / f"many/{number}.npy", np.zeros(2**18, "u1"))
    world.run("pull many --all --cache f --max-size 20MB --shard-size 300kB --workers 1")
    with open_cache(world.folder / "f") as cache:
        cap = cache.usage().total + 20_000
        with cache.catalog.write() as connection:
            connection.execute("UPDATE cache SET max_size = ?", (cap,))


@follows("conversion/groups.py", "raise the cap with --max-size")
@follows("conversion/groups.py", "free space with: cachetool evict")
@pytest.mark.parametrize("way", ["raise", "evict"])
def test_a_full_cache_is_converted_after_either_advice(world: World, way: str) -> None:
    fill(world)
    said = world.fails("convert --to hdf5 --cache f")
    if way == "evict":
        world.advised()
        world.works("convert --to hdf5 --cache f")
    else:
        world.works(f"convert --to hdf5 --cache f --max-size {group(r'with --max-size ([0-9]+)', said)}")


@follows("conversion/groups.py", "wait longer for the readers with --wait")
def test_a_full_cache_is_converted_after_its_readers_end(world: World) -> None:
    fill(world)
    with open_cache(world.folder / "f") as cache, cache.snapshot():
        world.fails(f"evict --max-size {cache.usage().total - 600_000} --cache f")
        world.fails("convert --to hdf5 --cache f --wait 0s")
    world.works("convert --to hdf5 --cache f --wait 60s")


@follows("conversion/in_place.py", "cachetool verify --repair")
def test_a_damaged_shard_is_repaired(world: World) -> None:
    data = next((world.folder / "c/shards").glob("*/data.lmdb"))
    raw = bytearray(data.read_bytes())
    at = max(raw.rfind(np.full(4, number, "f4").tobytes()) for number in range(1, 12))
    raw[at] ^= 1
    data.write_bytes(raw)
    world.fails("convert --to hdf5 --cache c")
    world.advised()
    world.works("convert --to hdf5 --cache c")


@follows("conversion/to_files.py", "another process is writing")
def test_a_conversion_works_after_another_process_finished_the_output(world: World) -> None:
    work = WorkFolder.make(world.folder, ".new.partial-", "new")
    world.fails("convert a.h5 --to lmdb --out new")
    world.works("convert a.h5 --to lmdb --out newer")
    work.close()
    world.works("convert a.h5 --to lmdb --out new")


@follows("conversion/to_files.py", "{} was created by another program")
def test_an_output_that_appeared_meanwhile_is_moved_away(world: World) -> None:
    out = world.folder / "new"

    def plant(progress: Any) -> None:
        if progress.phase == "convert":
            out.write_text("planted")

    world.raises(lambda: cachetool.convert(world.folder / "a.h5", to="lmdb", out=out, workers=1, progress=plant))
    out.rename(world.folder / "moved")
    world.works("convert a.h5 --to lmdb --out new")


@follows("conversion/to_files.py", "{} cannot be created")
def test_an_output_that_cannot_be_created_is_written_to_another_folder(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(errno.EACCES, "no")

    monkeypatch.setattr(to_files, "put_in_place", refuse)
    world.raises(lambda: cachetool.convert(world.folder / "a.h5", to="lmdb", out=world.folder / "new", workers=1))
    world.works("convert a.h5 --to lmdb --out elsewhere/new")


@follows("cli/convert.py", "--dry-run lists them")
def test_skipped_samples_are_listed(world: World) -> None:
    with h5py.File(world.folder / "more.h5", "w") as file:
        file["x"] = np.zeros((20, 3))
        for number in range(12):
            file[f"about{number:02d}"] = np.zeros((3 + number, 2))
    world.works("convert more.h5 --to lmdb --out new")
    assert "about11" in world.works("convert more.h5 --to lmdb --dry-run")
