"""The advice of messages about fields, names, disks and limits."""

from __future__ import annotations

import errno
import os
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from cachetool.core.schema import Field, Schema
from cachetool.formats.files import capacity_errors
from cachetool.proc.disk import disk_error
from tests.advice.conftest import World, follows
from tests.advice.rows import Row, follow
from tests.faults.test_disk import small_disk


def classes(folder: Path) -> None:
    """Write samples into folders with long names."""
    for number in range(300):
        place = folder / "d" / f"{'x' * 200}{number}"
        place.mkdir(parents=True)
        (place / "a.bin").write_bytes(b"x")


ROWS = [
    Row(
        "core/units.py", "--workers must be at least",
        "pull src --workers 9999 --cache new", "pull src --workers 1 --cache new",
    ),
    Row(
        "core/schema.py", "field {} is also the folder",
        "convert a.h5 --rename x=n/x --to lmdb --out new", "convert a.h5 --rename x=m/x --to lmdb --out new",
    ),
    Row(
        "proc/disk.py", "{}: {}: another program changes",
        ("$ rm -r c/listings; touch c/listings", "pull src --all --cache c"), ("$ rm c/listings", "!"),
    ),
    Row(
        "core/schema.py", "field {}: the names of {} classes",
        (classes, "pull d --all --cache x --label-from-folder int"), "pull d --all --cache x --label-from-folder",
    ),
]  # fmt: skip


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_the_advice_of_a_message_works(world: World, row: Row) -> None:
    follow(world, row)


@follows("core/schema.py", "field name {} cannot be used")
@follows("core/schema.py", "field name {} is reserved")
def test_a_field_is_renamed_to_a_valid_name(world: World) -> None:
    for number, name in enumerate(("a:b", "a/shape")):
        np.savez(world.folder / f"{number}.npz", **{name: np.zeros((3, 2))})
        world.fails(f"convert {number}.npz --to lmdb --out new{number}")
        world.works(f"convert {number}.npz --to lmdb --out new{number} --rename {name}=NEW")


@follows("core/schema.py", "{} fields in one sample")
def test_some_of_too_many_fields_are_selected(world: World) -> None:
    world.raises(lambda: Schema(tuple(Field(f"x{number}", "<f4") for number in range(5000))))
    world.works("convert a.h5 --to lmdb --out new --fields x")


@follows("core/schema.py", "field {} appears twice")
def test_one_of_two_fields_with_the_same_name_is_renamed(world: World) -> None:
    world.raises(lambda: Schema((Field("x", "<f4"), Field("x", "<i8"))))
    world.works("convert a.h5 --to lmdb --out new --rename x=y")


@follows("formats/files.py", "free some disk space, or lower --max-size or --shard-size")
@follows("proc/disk.py", ", or lower --max-size")
def test_the_cap_can_be_lowered_on_a_full_disk(world: World) -> None:
    data = world.folder / "c/shards/data.lmdb"
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(data))

    def write() -> None:
        with capacity_errors(data, 10**9):
            raise full

    world.raises(write)
    world.note(disk_error(full))
    world.works("pull src --all --cache c --max-size 40MB --shard-size 1MB")


def test_files_are_written_after_space_was_freed_on_a_full_disk(world: World) -> None:
    large(world)
    with small_disk(world.folder / "disk", "size=8m"):
        (world.folder / "disk/other").write_bytes(bytes(6 * 10**6))
        said = world.fails("convert many --to lmdb --out disk/new")
        assert "--max-size" not in said
        (world.folder / "disk/other").unlink()
        world.works("convert many --to lmdb --out disk/new")


@follows("proc/disk.py", "the file would be larger")
@follows("formats/files.py", "raise the limit (ulimit -f)")
def test_smaller_shards_fit_under_a_limit_on_file_sizes(world: World) -> None:
    large(world)
    world.note(disk_error(OSError(errno.EFBIG, os.strerror(errno.EFBIG))))
    command = [sys.executable, "-m", "cachetool", "convert", "many", "--to", "hdf5", "--out", "new"]
    for options in ([], ["--shard-size", "600kB"]):
        line = f"ulimit -f 2000; exec {shlex.join([*command, *options])}"
        done = subprocess.run(["bash", "-c", line], cwd=world.folder, capture_output=True, text=True)
        world.note(done.stderr)
        assert bool(done.returncode) == (not options), done.stderr
    world.worked += 1


def large(world: World) -> None:
    """Write ``many``: eight samples of half a megabyte."""
    (world.folder / "many").mkdir()
    for number in range(8):
        np.save(world.folder / f"many/{number}.npy", np.zeros(2**19, "u1"))
