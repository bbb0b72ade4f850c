"""The advice of messages about a cache and its cap."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

from cachetool import open_cache
from cachetool.bench.samples import fill
from cachetool.core.block import Block
from cachetool.core.errors import UsageError
from cachetool.core.schema import Field, Schema
from tests.advice.conftest import World, follows
from tests.advice.rows import VALUES, Row, follow, group

pytestmark = pytest.mark.soak  # 250 commands; test_complete.py says by default which message has no test

ROWS = [
    Row("cache/layout.py", "the name of the cache folder is empty", "stats --cache ''", "stats --cache c"),
    Row("cache/layout.py", "a cache is a local folder", "pull src --all --cache s3://b/c", "!"),
    Row("cache/layout.py", "the cache folder {} has control", "stats --cache 'a\tb'", "stats --cache c"),
    Row(
        "cache/layout.py", "the path of cache {} has",
        f"pull src --all --cache {'/'.join(['y' * 200] * 3)}", "pull src --all --cache x",
    ),
    Row(
        "cache/layout.py", "the path of cache {} is too long",
        f"pull src --all --cache {'x' * 300}", "pull src --all --cache x",
    ),
    Row("cache/marker.py", "folder {} is not a cache", "pull src --all --cache src", "pull src --all --cache x"),
    Row("cache/marker.py", "{} {}; run: cachetool verify", ("$ echo x > c/cachetool.json", "stats --cache c"), "!"),
    Row(
        "cache/marker.py", "cachetool verify --repair",
        ("$ rm c/cachetool.json; mkdir c/cachetool.json", "stats --cache c"), ("$ rmdir c/cachetool.json", "!"),
    ),
    Row("cache/marker.py", "cache {} {}; name a folder", "stats --cache a.h5", "stats --cache c"),
    Row(
        "cache/marker.py", "cache {} is a link to {}",
        ("$ ln -s gone link", "stats --cache link"), ("$ mkdir gone", "pull src --all --cache link"),
    ),
    Row(
        "cache/opening.py", "half of the free disk",
        "pull src --all --cache x", "pull src --all --cache y --max-size 1GB",
    ),
    Row("cache/opening.py", "there is no cache at {}", "stats --cache x", ("!", "stats --cache x")),
    Row("check/verify.py", "there is no cache at {}", "verify --cache x", ("!", "verify --cache x")),
    Row(
        "check/verify.py", "--max-size is only for --repair",
        "verify --cache c --max-size 60MB", "verify --cache c --repair --max-size 60MB",
    ),
    Row(
        "check/own_files.py", "--max-size was ignored",
        "verify --cache c --repair --max-size 60MB", "verify --cache c --repair",
    ),
    Row(
        "cache/rebuild.py", "the cap of {} was lost",
        ("$ rm c/cachetool.json c/catalog.sqlite3", "verify --repair --cache c"), ("!", "stats --cache c"),
    ),
    Row(
        "check/own_files.py", "--max-size is {}, but {} takes",
        ("$ rm c/cachetool.json c/catalog.sqlite3", "verify --repair --max-size 1kB --cache c"),
        "verify --repair --max-size 60MB --cache c",
    ),
    Row(
        "cache/removal.py", "{} was deleted, with",
        ("$ rm -r c/shards", "pull src --all --cache c"), "!",
    ),
    Row(
        "cache/catalog.py", "run: cachetool verify --repair",
        ("$ printf '%4096s' x | dd of=c/catalog.sqlite3 conv=notrunc status=none", "stats --cache c"), "!",
    ),
    Row(
        "cache/catalog.py", "catalog {} is shared with a copy",
        ("$ cp -al c d", "stats --cache c"), ("$!", "stats --cache c", "stats --cache d"),
    ),
    Row(
        "core/names.py", "{} is no name of {}",
        ("$ sqlite c/catalog.sqlite3 \"UPDATE shards SET id = '../x'\"", "ls --cache c"), "!",
    ),
    Row(
        "cache/eviction.py", "cannot shrink the cache to {}",
        "evict --max-size 1kB --cache c", (r"evict --max-size {minimum is --max-size (\d+)} --cache c",),
    ),
    Row(
        "cache/root.py", "; choose one with --dataset",
        ("pull src --all --cache x --dataset a", "pull src --all --cache x --dataset b", "convert --to hdf5 --cache x"),
        "convert --to hdf5 --cache x --dataset b",
    ),
    Row(
        "cache/root.py", "dataset {} holds {}, but this source",
        "pull out --fields x --all --cache c", "pull out --fields x --all --cache c --dataset b",
    ),
    Row(
        "cache/root.py", "dataset {} has the fields of this source in another order",
        "pull src --all --fields n,x --cache c", (r"pull src --all --fields {add --fields (\S+)} --cache c",),
    ),
    Row(
        "cache/draws.py", "{} is drawn with --seed",
        ("pull src --samples 3 --cache c", "pull src --all --seed 7 --cache c"), "pull src --all --cache c",
    ),
    Row(
        "cache/policies.py", "used by fewer than {} epochs",
        "evict --max-size 1.22MB --min-epochs 1 --cache c", "evict --max-size 1.22MB --min-epochs 0 --cache c",
    ),
    Row(
        "cache/capping.py", "the cap of {} cannot become {} because",
        "pull src --all --cache c --max-size 1.22MB", ("!", "pull src --samples 1 --cache c"),
    ),
]  # fmt: skip


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_the_advice_of_a_message_works(world: World, row: Row) -> None:
    follow(world, row)


@follows("cache/root.py", "it is empty; fill it with")
def test_an_empty_cache_is_filled(world: World) -> None:
    with open_cache(world.folder / "e", max_size="50MB") as cache, pytest.raises(UsageError) as error:
        cache.dataset("x")
    world.note(error.value)
    world.advised(**VALUES)


@follows("cache/capping.py", "the cap of {} cannot become {}: the cache needs")
def test_the_least_possible_cap_is_named_if_no_eviction_frees_enough(world: World) -> None:
    least = int(group(r"minimum is --max-size (\d+)", world.fails("evict --max-size 1kB --cache c")))
    said = world.fails(f"pull src --all --cache c --max-size {least - 1}")
    world.fails(f"pull src --all --cache c --max-size {group(r'minimum is --max-size ([0-9]+)', said)}")
    world.advised()  # space is freed first


def samples(count: int) -> Block:
    """Return ``count`` megabytes of samples."""
    return Block(Schema((Field("x", "|u1", (10**6,)),)), {"x": np.zeros((count, 10**6), "u1")})


@follows("cache/admission.py", "raise --max-size or lower --shard-size")
def test_a_cap_too_small_for_one_shard_is_refused_with_a_sufficient_cap(world: World) -> None:
    with open_cache(world.folder / "f", max_size="4MB") as cache:
        said = world.raises(lambda: fill(cache, "lmdb", samples(8), 1))
        fill(cache, "lmdb", samples(2), 2)  # smaller shards
    with open_cache(world.folder / "f", max_size=int(group(r"minimum is ([0-9]+)", said)) * 2) as cache:
        fill(cache, "lmdb", samples(8), 1)
    world.worked += 1


@follows("cache/admission.py", ";\nraise --max-size")
@follows("cache/admission.py", ", or free space with: cachetool evict")
@pytest.mark.parametrize("way", ["raise", "evict"])
def test_either_advice_for_a_full_cache_lets_the_pull_continue(world: World, way: str) -> None:
    with open_cache(world.folder / "f", max_size="8MB") as cache:
        fill(cache, "lmdb", samples(6), 6)
        world.raises(lambda: fill(cache, "lmdb", samples(1), 1))
    if way == "evict":
        world.advised()
    with open_cache(world.folder / "f", max_size="10MB" if way == "raise" else None) as cache:
        fill(cache, "lmdb", samples(1), 1)
    world.worked += 1


@follows("cache/capping.py", "the cap of {} is {} and cannot become")
def test_the_cap_is_not_changed_while_other_processes_use_the_cache(world: World) -> None:
    code = "import sys, cachetool; c = cachetool.open_cache('c'); c.snapshot(); print(flush=True); sys.stdin.read()"
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, cwd=world.folder, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        other.stdout.readline()
        world.fails("pull src --all --cache c --max-size 60MB")
        world.works("pull src --all --cache c")


@follows("pull/run.py", ", or use --follow")
@follows("pull/prepare.py", "a cap of {} cannot hold one")
def test_a_cap_that_is_too_small_for_a_pull_is_refused_with_a_sufficient_cap(world: World) -> None:
    folder = world.folder / "many"
    folder.mkdir()
    for number in range(40):
        np.save(folder / f"{number}.npy", np.zeros(2**18, "u1"))
    said = world.fails("pull many --all --cache t --max-size 1.4MB")
    said = world.fails(f"pull many --all --cache t --max-size {group(r'minimum is ([0-9]+)', said)}")
    world.works(f"pull many --all --cache t --max-size {group(r'to about (.*) for all', said)}")
