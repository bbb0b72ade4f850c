"""Recovery after a process died: its lock is free, and everything that it held is returned."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from cachetool.cache import CacheDir, SourceRow, draws, holders, open_cache
from cachetool.cache.draws import reopen, reopened
from cachetool.core.errors import CatalogError, UsageError
from cachetool.core.names import Id

from .conftest import SCHEMA, put_shard

SOURCE = Id("5" * 16)

HELD = """
import os, sys, time
from cachetool.cache import CacheDir, Room, draws
from cachetool.core.schema import Field, Schema
cache = CacheDir(__import__("pathlib").Path(sys.argv[1]))
schema = Schema((Field("x", "<f4", (4,)),))
snapshot = cache.snapshot()
staging = cache.stage(dataset="default", schema=schema, format="lmdb", bound=500_000)
(staging.path / "data.lmdb").write_bytes(bytes(1000))
with cache.catalog.write() as connection:
    job, _ = draws.open_job(connection, "5" * 16, holder=cache.holder.id, wanted=None, seed=None)
    draws.claim(connection, job, holder=cache.holder.id, most=7)
if "fork" in sys.argv and os.fork() == 0:
    os.dup2(os.open(os.devnull, os.O_RDWR), 1)
    time.sleep(600)
print("ready", flush=True)
time.sleep(600)
"""

READ = """
import sys, time
from cachetool.cache import open_cache
cache = open_cache(sys.argv[1])
snapshot = cache.snapshot()
print("ready", flush=True)
time.sleep(600)
"""


def source(units: int = 100) -> SourceRow:
    return SourceRow(SOURCE, "file:///data", {}, "identity", "default", units, units, 0, 0, 0)


@pytest.fixture
def listing(tmp_path: Path) -> Path:
    folder = tmp_path / "listing"
    folder.mkdir()
    (folder / "listing.json").write_text("{}")
    return folder


@pytest.mark.parametrize("fork", [False, True], ids=["alone", "with a forked child alive"])
def test_the_next_open_recovers_everything_that_a_killed_process_held(
    cache: CacheDir, listing: Path, fork: bool
) -> None:
    put_shard(cache)
    cache.add_source(source(), listing)
    cache.close()
    child = subprocess.Popen(
        [sys.executable, "-c", HELD, str(cache.root), *(["fork"] if fork else [])],
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    assert child.stdout is not None
    assert child.stdout.readline() == b"ready\n"
    with open_cache(cache.root) as other:
        stats = other.stats()
        assert len(stats.leases) == 1
        assert stats.reserved > 500_000
        assert [row["holder"] for row in other.catalog.rows("SELECT holder FROM claims")] != [None]

    os.kill(child.pid, signal.SIGKILL)
    child.wait()
    try:
        with open_cache(cache.root) as other:
            stats = other.stats()
            assert stats.leases == []
            assert stats.holders == [] or stats.holders[0]["pid"] == os.getpid()
            assert stats.reserved == 0
            assert [row["holder"] for row in other.catalog.rows("SELECT holder FROM claims")] == [None]
            assert os.listdir(cache.root / "shards") == [shard.id for shard in other.shards()]
            assert other.recover() == 0
        assert os.listdir(cache.root / "holders") == []
    finally:
        if fork:
            os.killpg(child.pid, signal.SIGKILL)


def test_closing_leaves_no_holder_lease_or_lock_behind(cache: CacheDir) -> None:
    put_shard(cache)
    cache.snapshot()
    cache.close()
    cache.close()

    assert os.listdir(cache.root / "holders") == []
    with open_cache(cache.root) as again:
        assert again.catalog.rows("SELECT * FROM leases") == []
        assert again.catalog.rows("SELECT * FROM holders") == []


def test_a_snapshot_released_after_its_cache_was_closed_changes_nothing(cache: CacheDir) -> None:
    put_shard(cache)
    snapshot = cache.snapshot()
    cache.close()
    snapshot.release()

    with open_cache(cache.root) as again:
        assert again.catalog.rows("SELECT * FROM holders") == []


def test_using_a_closed_cache_raises_that_it_is_closed(cache: CacheDir) -> None:
    put_shard(cache)
    cache.close()
    for use in (cache.snapshot, cache.stats, cache.shards, lambda: cache.declare("other", SCHEMA)):
        with pytest.raises(UsageError, match=r"is closed; open it again with cachetool\.open_cache"):
            use()

    assert os.listdir(cache.root / "holders") == []


def test_a_program_whose_cache_was_deleted_exits_silently(cache: CacheDir) -> None:
    put_shard(cache)
    cache.close()
    code = """
import shutil, sys, cachetool
cache = cachetool.open_cache(sys.argv[1])
snapshot = cache.snapshot()
shutil.rmtree(sys.argv[1])
"""
    done = subprocess.run([sys.executable, "-c", code, cache.root], capture_output=True, text=True, check=True)

    assert done.stderr == ""


@pytest.mark.parametrize("folder", ["holders", "listings"])
def test_a_missing_folder_for_temporary_files_is_created_again(cache: CacheDir, folder: str) -> None:
    put_shard(cache)
    cache.close()
    shutil.rmtree(cache.root / folder)
    with open_cache(cache.root) as again, again.snapshot() as snapshot:
        assert snapshot.samples == 10
        shutil.rmtree(cache.root / folder)
        with again.snapshot() as other:
            assert other.samples == 10

    assert (cache.root / folder).is_dir()


def test_a_missing_shards_folder_is_created_again_only_if_the_catalog_has_no_shards(cache: CacheDir) -> None:
    (cache.root / "shards").rmdir()
    shard = put_shard(cache)
    shutil.rmtree(cache.root / "shards")
    for use in (cache.snapshot, lambda: put_shard(cache), lambda: open_cache(cache.root)):
        with pytest.raises(CatalogError, match="1 shards of 10 samples; run: cachetool verify --repair --cache"):
            use()

    assert not (cache.root / "shards").exists()
    assert [each.id for each in cache.shards()] == [shard]


def test_stats_list_only_other_living_processes_as_holders(cache: CacheDir) -> None:
    put_shard(cache)
    snapshot = cache.snapshot()
    assert cache.stats().holders == []
    child = subprocess.Popen([sys.executable, "-c", READ, cache.root], stdout=subprocess.PIPE)
    assert child.stdout is not None
    assert child.stdout.readline() == b"ready\n"
    assert [row["pid"] for row in cache.stats().holders] == [child.pid]
    assert {row["pid"] for row in cache.stats().leases} == {child.pid, os.getpid()}

    child.kill()
    child.wait()
    assert cache.catalog.rows("SELECT * FROM holders WHERE pid = ?", (child.pid,)), "nobody has looked since"
    assert cache.stats().holders == []
    assert {row["pid"] for row in cache.stats().leases} == {os.getpid()}
    snapshot.release()


def test_two_open_caches_of_one_process_share_one_holder(cache: CacheDir) -> None:
    put_shard(cache)
    with open_cache(cache.root) as other:
        snapshot = other.snapshot()
        assert other.holder is cache.holder
    assert len(cache.stats().leases) == 1, "the first is still open"
    snapshot.release()
    assert cache.stats().leases == []


def test_opening_writes_nothing_if_no_process_died(cache: CacheDir) -> None:
    put_shard(cache)
    cache.close()
    before = {path: path.read_bytes() for path in cache.root.rglob("*") if path.is_file()}
    with open_cache(cache.root, create=False) as again:
        again.stats()
        again.shards()

    assert {path: path.read_bytes() for path in cache.root.rglob("*") if path.is_file()} == before


def test_draws_are_claimed_once_and_open_draws_are_claimed_first(cache: CacheDir, listing: Path) -> None:
    cache.add_source(source(units=20), listing)
    me = cache.holder.id
    with cache.catalog.write() as connection:
        job, _ = draws.open_job(connection, SOURCE, holder=me, wanted=None, seed=None)
        first = draws.claim(connection, job, holder=me, most=8)
        second = draws.claim(connection, job, holder=me, most=8)
        assert first is not None
        assert second is not None
        assert [(first.start, first.stop), (second.start, second.stop)] == [(0, 8), (8, 16)]
        draws.finish(connection, job, first, 5, samples=5, skipped=0)
        draws.finish(connection, job, second, 16, samples=7, skipped=1)
        draws.give_back(connection, me, job)
        row = draws.source_row(connection, SOURCE)
        assert row is not None
        assert draws.positions_done(connection, row) == 13
        assert row.skipped == 1
        got = []
        while (held := draws.claim(connection, job, holder=me, most=2)) is not None:
            got.append((held.start, held.stop))
            draws.finish(connection, job, held, held.stop, samples=2, skipped=0)
        assert got == [(5, 7), (7, 8), (16, 18), (18, 20)]
        assert draws.begin_next_pass(connection, SOURCE)
        again = draws.claim(connection, job, holder=me, most=30)
        assert again is not None
        assert (again.pass_number, again.start, again.stop) == (1, 0, 20)


def test_open_draws_are_claimed_first_and_counted_until_they_are_drawn(cache: CacheDir, listing: Path) -> None:
    cache.add_source(source(units=40), listing)
    me = cache.holder.id
    with cache.catalog.write() as connection:
        job, row = draws.open_job(connection, SOURCE, holder=me, wanted=None, seed=None)
        first = draws.claim(connection, job, holder=me, most=30)
        assert first is not None
        draws.finish(connection, job, first, 30, samples=30, skipped=0)
        open_one = draws.claim(connection, job, holder=me, most=4)
        assert open_one is not None
        draws.give_back(connection, me, job)  # an open draw like any other
        assert reopened(connection) == []
        assert reopen(connection, row, 0, 0, [(5, 9), (20, 26)]) == 10
        assert [(row.draws, row.tried) for row in reopened(connection)] == [(10, 0)]
        got = []
        for left in (7, 6, 3, 0):
            held = draws.claim(connection, job, holder=me, most=3)
            assert held is not None
            got.append((held.start, held.stop))
            draws.finish(connection, job, held, held.stop, samples=3, skipped=0)
            assert sum(row.draws for row in reopened(connection)) == left
        assert got == [(5, 8), (8, 9), (20, 23), (23, 26)]
        assert reopened(connection) == []
        held = draws.claim(connection, job, holder=me, most=30)
        assert held is not None
        assert (held.start, held.stop) == (30, 34)


def test_a_job_never_claims_more_samples_than_requested(cache: CacheDir, listing: Path) -> None:
    cache.add_source(source(units=100), listing)
    me = cache.holder.id
    with cache.catalog.write() as connection:
        job, _ = draws.open_job(connection, SOURCE, holder=me, wanted=10, seed=None)
        first = draws.claim(connection, job, holder=me, most=8)
        second = draws.claim(connection, job, holder=me, most=8)
        assert first is not None
        assert second is not None
        assert (second.start, second.stop) == (8, 10)
        assert draws.claim(connection, job, holder=me, most=8) is None
        draws.finish(connection, job, first, first.stop, samples=6, skipped=2)
        third = draws.claim(connection, job, holder=me, most=8)
        assert third is not None
        assert (third.start, third.stop) == (10, 12), "skipped draws are made up for"


def test_a_forked_child_has_its_own_connection_and_holder(cache: CacheDir) -> None:
    put_shard(cache)
    snapshot = cache.snapshot()
    mine = cache.holder.id
    reader, writer = os.pipe()
    if (pid := os.fork()) == 0:
        try:
            snapshot.release()
            theirs = cache.holder.id
            os.write(writer, f"{theirs != mine} {len(cache.shards())} {len(cache.stats().leases)}".encode())
        finally:
            os._exit(0)
    os.waitpid(pid, 0)

    assert os.read(reader, 100) == b"True 1 1"
    assert len(cache.stats().leases) == 1


def test_a_new_schema_for_a_dataset_is_refused(cache: CacheDir) -> None:
    from cachetool.core.schema import Field, Schema

    cache.declare("default", SCHEMA)
    with pytest.raises(UsageError, match="another --dataset"):
        cache.declare("default", Schema((Field("y", "<f4"),)))


def test_a_child_forked_while_another_thread_is_in_a_transaction_does_not_hang(cache: CacheDir) -> None:
    put_shard(cache)
    inside, leave = threading.Event(), threading.Event()

    def hold() -> None:
        with cache.catalog.read():
            inside.set()
            leave.wait(60)

    thread = threading.Thread(target=hold)
    thread.start()
    inside.wait(60)
    reader, writer = os.pipe()
    if (pid := os.fork()) == 0:
        signal.alarm(30)
        try:
            os.write(writer, str(len(cache.shards())).encode())
        finally:
            os._exit(0)
    os.close(writer)
    os.waitpid(pid, 0)
    leave.set()
    thread.join()

    assert os.read(reader, 10) == b"1"


def test_a_program_that_ends_without_closing_leaves_no_lease_or_lock(cache: CacheDir) -> None:
    put_shard(cache)
    cache.close()
    code = "import sys, cachetool\nc = cachetool.open_cache(sys.argv[1])\ns = c.snapshot()\nprint(s.samples)"
    done = subprocess.run([sys.executable, "-c", code, cache.root], capture_output=True, text=True, check=True)

    assert done.stdout == "10\n"
    assert os.listdir(cache.root / "holders") == []
    with open_cache(cache.root) as again:
        assert again.catalog.rows("SELECT * FROM leases") == []


def test_the_dataset_name_defaults_to_default(cache: CacheDir) -> None:
    cache.declare("other", SCHEMA)
    assert cache.dataset() == "default"
    assert cache.dataset("other") == "other"


def test_a_new_cap_takes_effect_while_a_dead_process_is_recovered(cache: CacheDir) -> None:
    """The new cap and the recovery both need the catalog's lock as soon as the cache is opened."""
    code = "import sys, os, cachetool; s = cachetool.open_cache(sys.argv[1]).snapshot(dataset='default'); os._exit(9)"
    put_shard(cache)
    cache.close()
    for size in (5_000_000, 6_000_000):
        subprocess.run([sys.executable, "-c", code, cache.root], check=False)
        with open_cache(cache.root, max_size=size) as again:
            assert again.stats().leases == []
            assert again.holder.path.exists()
            assert again.catalog.number("max_size") == size


def test_a_recovery_that_deletes_a_lock_file_during_its_check_breaks_no_lock(
    cache: CacheDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask = holders._other_gets
    asked: list[Path] = []

    def recovering(path: Path) -> bool:
        asked.append(path)
        if len(asked) == 1:  # deleted by hand while it was held: proves nothing
            path.unlink()
        elif len(asked) == 3:  # free, which a recovery sees
            with open_cache(cache.root, create=False):
                pass
        return ask(path)

    monkeypatch.setattr(holders, "_other_gets", recovering)

    assert holders.locks_work(cache.layout.holders)
    assert len(set(asked)) == 2
    assert len(asked) == 3
    assert [path for path in asked if path.exists()] == []


@pytest.mark.parametrize("gets", [True, False], ids=["keep nobody out", "let nobody in"])
def test_a_file_system_without_working_locks_is_reported(
    cache: CacheDir, monkeypatch: pytest.MonkeyPatch, gets: bool
) -> None:
    monkeypatch.setattr(holders, "_other_gets", lambda path: gets)

    assert not holders.locks_work(cache.layout.holders)
    assert [path for path in cache.layout.holders.iterdir() if path != cache.holder.path] == []
