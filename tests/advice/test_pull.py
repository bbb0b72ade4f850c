"""The advice of messages of pulls."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import h5py
import numpy as np
import pytest

from cachetool import open_cache
from cachetool.pull.options import PullOptions
from tests.advice.conftest import World, follows
from tests.advice.rows import Row, follow, group


def days(folder: Path) -> None:
    """Write samples whose names have several dots."""
    (folder / "d").mkdir()
    for day in range(10, 31):
        (folder / f"d/2024.01.{day}.bin").write_bytes(b"x")


pytestmark = pytest.mark.soak  # 250 commands; test_complete.py says by default which message has no test

ROWS = [
    Row("pull/options.py", "only one of --samples", "pull src --all --follow --cache c", "pull src --all --cache c"),
    Row(
        "pull/options.py", "--shard-size must be at least",
        "pull src --shard-size 0 --cache c", "pull src --shard-size 1 --cache c",
    ),
    Row(
        "pull/listing.py", "--refresh works only for folders",
        ("pull a.h5 --all --cache c --dataset h", "pull a.h5 --refresh --cache c --dataset h"),
        "pull a.h5 --all --cache c --dataset again",
    ),
    Row(
        "pull/options.py", "--parts needs --part",
        "pull src --parts 4 --cache x", ("pull src --part 0/2 --parts 4 --cache x", "pull src --cache y"),
    ),
    Row(
        "pull/prepare.py", "--repart needs --part",
        "pull src --repart --cache x", ("pull src --part 0/2 --repart --cache x", "pull src --cache y"),
    ),
    Row(
        "pull/options.py", "--part {} is not I/N",
        "pull src --part 3 --cache x", ("pull src --part 0/8 --cache x", "pull src --part 0,1/8 --cache y"),
    ),
    Row(
        "pull/options.py", "--part auto needs the number",
        "pull src --part auto --cache x", "pull src --part 0/2 --cache x",
    ),
    Row(
        "pull/options.py", "--part {} has {} nodes",
        "pull src --part 0/2000000 --cache x", "pull src --part 0/2 --cache x",
    ),
    Row("pull/options.py", "--part {} names node", "pull src --part 2/2 --cache x", "pull src --part 0/2 --cache x"),
    Row(
        "pull/options.py", "--parts {} cannot be used",
        "pull src --part 0/2 --parts 1 --cache x", "pull src --part 0/2 --parts {choose (\\d+) to} --cache x",
    ),
    Row(
        "pull/options.py", "--part {} gives one cache",
        "pull src --part 0/1 --parts 300 --cache x", "pull src --part 0/1 --parts {maximum is (\\d+)} --cache x",
    ),
    Row(
        "cache/own_parts.py", "cache {} draws {} of {}",
        ("pull src --part 0/2 --cache x", "pull src --part 1/2 --cache x"),
        ("pull src --cache x", "pull src --part 1/2 --repart --cache x"),
    ),
    Row(
        "pull/prepare.py", "--start-early cannot be used with --listing",
        "pull src --part 0/2 --start-early --cache x", "pull src --part 0/2 --cache x",
    ),
    Row(
        "pull/prepare.py", "--refresh of a source in parts",
        ("pull src --part 0/2 --cache x", "pull src --refresh --cache x"),
        ("$ mkdir shared", "pull src --refresh --listing shared --cache x"),
    ),
    Row(
        "pull/options.py", "--listing {} is a URL",
        "pull src --listing s3://bucket/listings --cache x", ("$ mkdir shared", "pull src --listing shared --cache x"),
    ),
    Row(
        "pull/prepare.py", "--listing {} is not a folder",
        "pull src --listing shared --cache x", ("$ mkdir shared", "pull src --listing shared --cache x"),
    ),
    Row(
        "pull/shared_listing.py", "the listing in {} is not that",
        (
            "$ mkdir shared other", "pull src --listing shared --cache x", "$ mv src/s03.npz src/t03.npz",
            "pull src --cache y", "pull src --listing shared --cache y",
        ),
        ("pull src --listing other --cache y", "pull src --listing shared --dataset again --cache y"),
    ),
    Row(
        "pull/shared_listing.py", "the listing in {} is damaged",
        (
            "$ mkdir shared", "pull src --part 0/2 --listing shared --cache x",
            "$ truncate -s 10 shared/*/listing.json",
            "pull src --part 1/2 --listing shared --cache y",
        ),
        ("$ rm -r shared/*", "pull src --part 1/2 --listing shared --cache y"),
    ),
    Row(
        "api.py", "--part and --listing are for nodes",
        "pull src --part 0/2 --on ray --cache x", "pull src --part 0/2 --cache x",
    ),
    Row("pull/prepare.py", "cachetool convert --to lmdb", "pull c --all --cache x", ("!", "pull new --all --cache x")),
    Row("pull/prepare.py", "{} is a cache; give it with --cache", "pull c --all --cache x", "pull src --all --cache c"),
    Row(
        "pull/prepare.py", "the listing of {} was lost",
        ("pull src --all --cache c", "$ rm -r c/listings; mv src/s03.npz src/t03.npz", "pull src --all --cache c"),
        "pull src --all --cache c --dataset again",
    ),
    Row(
        "cli/pull.py", "--refresh looks for new samples",
        ("pull src --all --cache c", "pull src --all --cache c"), "pull src --all --refresh --cache c",
    ),
    Row(
        "pull/options.py", "--label-from-folder int needs",
        ("$ mkdir d; cp -r src d/one", "pull d --label-from-folder int --start-early --cache x"),
        "pull d --all --label-from-folder int --cache x",
    ),
    Row(
        "pull/prepare.py", "{} {};\nchoose the same names",
        ("pull src --samples 1 --cache x --include s0*", "pull src --all --cache x"),
        ("pull src --all --cache x --include s0*", "pull src --all --cache x --dataset other"),
    ),
    Row(
        "pull/prepare.py", "{} {};\nread it in the same way",
        ("pull src --samples 1 --cache x", "pull src --all --cache x --read-as npz"),
        ("pull src --all --cache x", "pull src --all --cache x --read-as npz --dataset other"),
    ),
    Row(
        "pull/prepare.py", "{} --stem {}, chosen",
        (days, "pull d --samples 1 --cache x", "pull d --all --cache x --stem last"), "pull d --all --cache x",
    ),
    Row("pull/run.py", "dataset {} has {} shards beside", "pull src --all --to hdf5 --cache c --dataset default", "!"),
]  # fmt: skip


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_the_advice_of_a_message_works(world: World, row: Row) -> None:
    follow(world, row)


@follows("pull/options.py", "--part auto cannot be computed from")
def test_a_batch_job_without_part_numbers_is_told_to_pass_them(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_NODEID", "x")
    monkeypatch.setenv("SLURM_NNODES", "2")
    world.raises(lambda: PullOptions(part="auto"))
    assert PullOptions(part="0/2").node_parts == (2, (0,))
    world.worked += 1


@follows("pull/options.py", "--samples must be at least 1")
def test_the_least_values_in_a_message_are_accepted(world: World) -> None:
    world.raises(lambda: PullOptions(samples=0))
    world.raises(lambda: PullOptions(min_epochs=-1))
    world.works("pull src --samples 1 --min-epochs 0 --cache new")


def numbered(folder: Path, count: int, bad: int = 0) -> None:
    """Write objects, the last ``bad`` of which are not arrays."""
    folder.mkdir()
    for number in range(count):
        path = folder / f"{number:03d}.npy"
        np.save(path, np.full(4, number))
        if number >= count - bad:
            path.write_bytes(b"no array")


@follows("sources/blame.py", "{};\n{}skip such")
def test_a_bad_object_is_skipped(world: World) -> None:
    numbered(world.folder / "many", 200, bad=1)
    world.fails("pull many --all --order sequential --cache x")
    world.works("pull many --all --order sequential --cache x --on-error skip")


@follows("sources/blame.py", "{};\nother objects can be read")
def test_an_object_without_read_permission_is_skipped(world: World) -> None:
    numbered(world.folder / "many", 200)
    (world.folder / "many/150.npy").chmod(0)
    world.fails("pull many --all --cache x", powerless=True)
    world.works("pull many --all --cache x --on-error skip", powerless=True)


@follows("sources/blame.py", "list the source again with --refresh, or ")
@pytest.mark.parametrize("option", ["--refresh", "--on-error skip"])
def test_a_deleted_object_is_skipped_or_no_longer_listed(world: World, option: str) -> None:
    numbered(world.folder / "many", 200)
    world.works("pull many --samples 1 --order sequential --cache x")
    (world.folder / "many/150.npy").unlink()
    world.fails("pull many --all --cache x")
    world.works(f"pull many --all --cache x {option}")


@follows("pull/prepare.py", "repair or remove these objects")
@pytest.mark.parametrize("way", ["mended", "taken away"])
def test_more_bad_objects_than_may_be_skipped_are_listed_again(world: World, way: str) -> None:
    numbered(world.folder / "many", 200, bad=12)
    world.fails("pull many --all --cache x --on-error skip")
    world.fails("pull many --all --cache x --on-error skip")
    for path in (world.folder / "many").glob("1[89]?.npy"):
        path.unlink()
        if way == "mended":
            np.save(path, np.zeros(4, "i8"))
    world.works("pull many --all --refresh --cache x")


@follows("pull/prepare.py", "repair the files")
def test_more_bad_rows_than_may_be_skipped_are_drawn_again(world: World) -> None:
    def write(large: int) -> None:
        with h5py.File(world.folder / "many.h5", "w") as file:
            rows = file.create_dataset("x", 200, h5py.vlen_dtype("u1"))
            for number in range(200):
                rows[number] = np.zeros(3 * 10**6 if number < large else 10, "u1")

    write(12)
    world.fails("pull many.h5 --all --cache x --on-error skip --max-size 4MB")
    world.fails("pull many.h5 --all --cache x --on-error skip")
    write(0)
    world.works("pull many.h5 --all --cache x --on-error skip --dataset again")


@follows("pull/shards.py", "leave the sample out with --on-error skip")
def test_a_sample_larger_than_a_shard_is_skipped(world: World) -> None:
    (world.folder / "many").mkdir()
    for number in range(200):
        (world.folder / f"many/{number:03d}.bin").write_bytes(bytes(10**7 if number == 150 else 10))
    world.fails("pull many --all --order sequential --cache x --max-size 5MB")
    world.works("pull many --all --order sequential --cache x --on-error skip")


@follows("cli/pull.py", "--json lists them")
def test_skipped_objects_are_listed(world: World) -> None:
    with h5py.File(world.folder / "more.h5", "w") as file:
        file["x"] = np.zeros((20, 3))
        for number in range(12):
            file[f"about{number:02d}"] = np.zeros((3 + number, 2))
    world.works("pull more.h5 --all --cache x")
    assert "about11" in world.works("pull more.h5 --all --cache y --json")


@follows("cli/pull.py", "stopped: {}, all samples were drawn")
def test_a_pull_with_follow_draws_evicted_samples_again(world: World) -> None:
    world.works("pull a.h5 --all --cache x")
    least = group(r"minimum is --max-size (\d+)", world.fails("evict --max-size 1kB --cache x"))
    world.works(f"evict --max-size {least} --cache x")
    assert "--refresh" not in world.works("pull a.h5 --all --cache x")
    with following(world, "a.h5", "x") as wait_until:
        wait_until("SELECT count(*) FROM shards WHERE state = 'ready'")


@follows("pull/run.py", ", or use --follow")
def test_a_pull_with_follow_renews_a_full_cache(world: World) -> None:
    numbered(world.folder / "many", 10)
    for path in (world.folder / "many").iterdir():
        np.save(path, np.zeros(10**5))
    world.fails("pull many --all --cache x --max-size 3MB --wait 0s")
    with following(world, "many", "x") as wait_until:
        wait_until("SELECT max(bytes_wanted) > 0 FROM jobs")


@contextmanager
def following(world: World, source: str, cache: str) -> Iterator[Callable[[str], None]]:
    """Run ``pull --follow`` inside the block and stop it by a signal. Yield a function that waits until a catalog query
    is true.
    """
    words = ["pull", source, "--follow", "--cache", cache]
    with subprocess.Popen(
        [sys.executable, "-m", "cachetool", *words], cwd=world.folder, stderr=subprocess.PIPE, text=True
    ) as follower:

        def wait_for(query: str) -> None:
            with open_cache(world.folder / cache) as opened:
                while not opened.catalog.rows(query)[0][0]:
                    assert follower.poll() is None, follower.communicate()
                    os.sched_yield()
            world.worked += 1

        try:
            yield wait_for
        finally:
            follower.send_signal(signal.SIGINT)
            assert follower.wait() == 130
