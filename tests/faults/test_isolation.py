"""Readers, pulls and evictions at the same time: a reader sees only the samples that it leased (13, 14, 15, 25)."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from pathlib import Path

import pytest

from cachetool.cache import CacheDir, Room, Snapshot, draws, open_cache
from cachetool.cache.removal import delete_trash, retire, sweep
from cachetool.core.errors import CapBlocked
from tests.cache.conftest import put_shard
from tests.faults.conftest import Figures
from tests.faults.tracing import Children
from tests.faults.world import LARGE, LARGE_BYTES, OWN, SCHEMA, SOURCE, Oracle, commit_one, make


def fill(root: Path, children: Children, shards: int) -> None:
    make(root)
    assert children.run("pull", root=root, format="all", shards=shards).status == 0


@pytest.mark.parametrize(
    "samples", [pytest.param(3000, id="short"), pytest.param(125_000, id="all", marks=pytest.mark.soak)]
)
@pytest.mark.timeout(3000)
def test_readers_are_never_disturbed_by_pulls_and_evictions(
    tmp_path: Path, children: Children, figures: Figures, samples: int
) -> None:
    """Eight readers, half of them through the formats' own libraries, two pulls, two evictors, a cap of three
    shards.
    """
    root, ledger = tmp_path / "cache", tmp_path / "ledger"
    cap = OWN + 3 * LARGE_BYTES
    make(root, cap=cap)
    assert children.run("pull", root=root, format="all", shards=4, most=LARGE, evict=True).status == 0
    others = [
        children.start("pull", root=root, format="all", shards=0, most=LARGE, evict=True, ledger=ledger, wait=600)
        for _ in range(2)
    ] + [children.start("evict_for_ever", root=root, seed=seed, most=cap) for seed in range(2)]
    readers = [
        children.start("read", root=root, samples=samples, each=500, seed=seed, library=seed % 2 == 1)
        for seed in range(8)
    ]
    oracle = Oracle(root, ledger)
    while any(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z" for pid in readers):
        oracle.follow()
        time.sleep(1)
    for pid in readers:
        outcome = children.wait(pid)
        assert outcome.status == 0, outcome
    for pid in others:
        os.kill(pid, signal.SIGKILL)
        outcome = children.wait(pid)
        assert outcome.status == -signal.SIGKILL, outcome
    oracle.check()
    with open_cache(root) as cache:
        stats = cache.stats()
        figures(samples_read=8 * samples, exceptions=0, wrong=0, shards_committed=len(oracle.lines()))
        figures(shards_evicted=stats.evicted, bytes_served_to_epochs=stats.served)
        assert stats.evicted > 4
        assert stats.served > 0
        assert stats.leases == []


@pytest.mark.parametrize(
    "rounds", [pytest.param(40, id="short"), pytest.param(10_000, id="all", marks=pytest.mark.soak)]
)
@pytest.mark.timeout(3000)
def test_a_lease_keeps_its_shards_or_excludes_evicted_ones_in_every_interleaving(
    tmp_path: Path, figures: Figures, rounds: int
) -> None:
    """Two readers and an evictor, one step at a time in every order (1,680 orders)."""
    rng = random.Random(14)
    seen: set[tuple[str, ...]] = set()
    with open_cache(tmp_path / "cache", max_size="4MB") as cache:
        cache.declare("default", SCHEMA)
        for number in range(rounds):
            for _ in range(2 - len(cache.shards())):
                put_shard(cache, 5000)
            steps = [name for name in ("one", "two", "evictor") for _ in range(3)]
            rng.shuffle(steps)
            seen.add(tuple(steps))
            interleave(cache, steps)
            assert cache.stats().leases == [], (number, steps)
            assert sorted(os.listdir(cache.layout.shards)) == sorted(shard.id for shard in cache.shards())
    figures(interleavings=rounds, different=len(seen))


def interleave(cache: CacheDir, steps: list[str]) -> None:
    victim = cache.shards()[0].id
    held: dict[str, Snapshot] = {}
    trash: list[str] = []
    at = dict.fromkeys(steps, 0)
    retired = False
    for name in steps:
        at[name] += 1
        if name == "evictor":
            if at[name] == 3:
                delete_trash(cache.catalog, cache.layout, trash)
                continue
            with cache.catalog.write() as connection:
                if at[name] == 1:
                    retire(connection, [victim], reason="evict", policy="oldest")
                    retired = True
                else:
                    trash = sweep(connection, cache.holder)
        elif at[name] == 1:
            held[name] = cache.snapshot()
            assert (victim in {shard.id for shard in held[name].shards}) != retired, (
                "in every snapshot until it retires"
            )
        elif at[name] == 2:
            for shard in held[name].shards:
                assert len((shard.path / "data.lmdb").read_bytes()) == 5000
                assert (shard.path / "shard.json").exists()
        else:
            held[name].release()
    cache.recover()


@pytest.mark.parametrize(
    "evictors", [2, pytest.param(3, marks=pytest.mark.soak), pytest.param(5, marks=pytest.mark.soak), 8]
)
@pytest.mark.parametrize("rounds", [pytest.param(1, id="short"), pytest.param(20, id="all", marks=pytest.mark.soak)])
def test_evictors_with_the_same_victims_delete_each_once(
    tmp_path: Path, children: Children, figures: Figures, evictors: int, rounds: int
) -> None:
    for number in range(rounds):
        folder = tmp_path / str(number)
        folder.mkdir()
        stampede(folder, children, evictors)
    figures(evictors=evictors, rounds=rounds, shards_deleted=8 * rounds, deleted_twice=0)


def stampede(tmp_path: Path, children: Children, evictors: int) -> None:
    root, told = tmp_path / "cache", tmp_path / "told"
    fill(root, children, 12)
    with open_cache(root) as cache:
        before = cache.shards()
        # Each process adds a few bytes to the cache's own folders, fewer than a shard.
        target = cache.usage().total - sum(shard.bytes for shard in before[:8]) + 4096
    pids = [children.start("evict", root=root, size=target, told=told) for _ in range(evictors)]
    for pid in pids:
        outcome = children.wait(pid)
        assert outcome.status == 0, outcome

    done = [json.loads(line) for line in told.read_text().splitlines()]
    with open_cache(root) as cache:
        after = cache.shards()
        gone = [shard for shard in before if shard not in after]
        assert len(gone) == sum(each["removed_shards"] for each in done) == cache.stats().evicted == 8
        assert sum(shard.bytes for shard in gone) == sum(each["freed"] for each in done)
    Oracle(root, tmp_path / "none").check()


def test_a_sleeping_reader_is_named_and_its_death_frees_the_space(tmp_path: Path, children: Children) -> None:
    root, told = tmp_path / "cache", tmp_path / "told"
    make(root)
    with open_cache(root) as cache:
        room = Room(evict=True, wait=0.3)
        with cache.catalog.write() as connection:
            job, _ = draws.open_job(connection, SOURCE.id, holder=cache.holder.id, wanted=None, seed=None)
        while cache.stats().evicted == 0:
            commit_one(cache, job, format="lmdb", ledger=None, room=room)
        reader = children.start("hold", root=root, told=told)
        while not told.exists():
            time.sleep(0.01)

        def commit_five() -> None:
            for _ in range(5):
                commit_one(cache, job, format="lmdb", ledger=None, room=room)

        who = rf"cache is full.*waited 0.3 s.*: pid {reader} on \S+ \(.*\) reads default"
        with pytest.raises(CapBlocked, match=who):
            commit_five()
        os.kill(reader, signal.SIGKILL)
        children.wait(reader)
        commit_one(cache, job, format="lmdb", ledger=None, room=room)


def test_the_folder_of_a_slow_writer_is_not_removed(tmp_path: Path, children: Children) -> None:
    root = tmp_path / "cache"
    make(root)
    with (
        open_cache(root) as cache,
        cache.stage(dataset="default", schema=SCHEMA, format="lmdb", bound=10_000) as staging,
    ):
        (staging.path / "data.lmdb").write_bytes(b"half")
        for action in ("recover", "repair", "evict") * 3:
            arguments = {"size": 2_000_000} if action == "evict" else {}
            assert children.run(action, root=root, **arguments).status == 0
            assert (staging.path / "data.lmdb").read_bytes() == b"half"


def test_a_deleted_lock_file_of_a_living_holder_frees_no_lease_and_is_created_again(
    tmp_path: Path, children: Children
) -> None:
    root = tmp_path / "cache"
    fill(root, children, 2)
    with open_cache(root) as cache, cache.snapshot() as snapshot:
        cache.holder.path.unlink()
        assert children.run("recover", root=root).status == 0
        outcome = children.run("evict", root=root, size=cache.usage().total - 1000)
        assert outcome.kinds[0] == "CapBlocked", outcome
        assert all(shard.path.exists() for shard in snapshot.shards)
        cache.snapshot().release()
        assert cache.holder.path.exists()
        assert children.run("recover", root=root).status == 0
        assert len(cache.stats().leases) == 1
    assert os.listdir(root / "holders") == []


@pytest.mark.parametrize("count", [pytest.param(10, id="short"), pytest.param(500, id="all", marks=pytest.mark.soak)])
def test_forked_children_use_the_cache_without_harm_to_their_parent(
    tmp_path: Path, children: Children, figures: Figures, count: int
) -> None:
    root = tmp_path / "cache"
    fill(root, children, 2)
    figures(forks=count)
    outcome = children.run("fork_many", root=root, count=count)
    assert outcome.status == 0, outcome
    Oracle(root, tmp_path / "none").check()


def test_sixteen_writers_and_four_readers_all_get_the_lock(tmp_path: Path, children: Children) -> None:
    root, ledger = tmp_path / "cache", tmp_path / "ledger"
    make(root, cap="20MB")
    assert children.run("pull", root=root, ledger=ledger).status == 0
    pids = [children.start("pull", root=root, format="all", shards=2, ledger=ledger) for _ in range(16)]
    pids += [children.start("read", root=root, samples=500, seed=seed) for seed in range(4)]
    for pid in pids:
        outcome = children.wait(pid)
        assert outcome.status == 0, outcome
    assert Oracle(root, ledger).check() == 33 * 12
