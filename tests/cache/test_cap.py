"""The cap: charged bytes are those on the disk, and nothing is written without a reservation."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from cachetool.cache import CacheDir, Room, SourceRow, draws, open_cache
from cachetool.cache.draws import close_job
from cachetool.core.errors import CapacityError, CapBlocked, CapTooSmall, UsageError
from cachetool.core.names import Id
from cachetool.core.units import format_size
from cachetool.proc.folders import tree_bytes

from .conftest import SCHEMA, put_shard

Put = Callable[..., str]


def du(root: Path) -> int:
    """Return the bytes that a folder takes, apparent or allocated, whichever is larger."""
    allocated = int(subprocess.run(["du", "-sB1", root], capture_output=True, text=True, check=True).stdout.split()[0])
    apparent = int(subprocess.run(["du", "-sb", root], capture_output=True, text=True, check=True).stdout.split()[0])
    return max(allocated, apparent)


def test_charged_bytes_of_a_shard_are_those_on_disk(cache: CacheDir, put: Put) -> None:
    put(100_000)
    put(3)

    for shard in cache.shards():
        assert shard.bytes == tree_bytes(shard.path)


def test_used_bytes_are_never_less_than_those_on_disk(cache: CacheDir, put: Put) -> None:
    for size in (1, 4096, 100_000, 250_001):
        put(size)

        assert du(cache.root) <= cache.usage().total <= cache.max_size


def test_a_reservation_is_charged_in_full_and_shrinks_at_commit(cache: CacheDir) -> None:
    before = cache.usage().total
    with cache.stage(dataset="default", schema=SCHEMA, format="lmdb", bound=1_000_000) as staging:
        reserved = cache.usage()
        assert reserved.reserved == staging.bound >= 1_000_000
        assert reserved.total == before + staging.bound

    assert cache.usage().total == before
    assert os.listdir(cache.root / "shards") == []


def test_a_pull_at_the_cap_evicts_the_oldest_and_stays_under_it(cache: CacheDir, put: Put) -> None:
    ids = [put(200_000, room=Room(evict=True, wait=0)) for _ in range(30)]

    left = [shard.id for shard in cache.shards()]
    assert left == ids[-len(left) :]
    assert 5 < len(left) < 30
    assert du(cache.root) <= cache.max_size
    assert sorted(os.listdir(cache.root / "shards")) == sorted(left)


def test_a_writer_that_may_not_evict_fails_at_once_in_a_full_cache(cache: CacheDir, put: Put) -> None:
    fits = (cache.max_size - cache.usage().total) // 250_000
    for _ in range(fits):
        put(200_000)
    put(cache.max_size - cache.usage().total - 70_000)
    with pytest.raises(
        CapBlocked,
        match=r"cache is full: [\d.]+ MB of 4.0 MB are used, up to [\d.]+ kB more are needed: ",
    ):
        put(200_000)


def test_the_error_of_a_full_cache_has_consistent_numbers_and_a_command_that_works(cache: CacheDir, put: Put) -> None:
    """Bytes taken, bytes needed and the size to evict to add up. After the advised command the shard fits, to the
    byte.
    """
    while cache.max_size - cache.usage().total > 250_000:
        put(200_000)
    put(cache.max_size - cache.usage().total - 70_000)
    with pytest.raises(CapBlocked) as caught:
        put(200_000)
    told = re.fullmatch(
        r"cache is full: (.+) of 4.0 MB are used, up to (.+) more are needed: .*;\n"
        r"raise --max-size, or .*: cachetool evict --max-size (\d+) --cache (\S+)",
        str(caught.value),
    )
    assert told is not None, str(caught.value)
    target = int(told.group(3))
    assert told.group(1) == format_size(cache.usage().total)
    assert told.group(2) == format_size(4_000_000 - target)
    assert told.group(4) == str(cache.root)

    cache.evict(target)
    put(200_000)


def test_the_minimum_cap_includes_the_growth_of_the_catalog(cache: CacheDir, root: Path) -> None:
    with cache.catalog.write() as connection:
        for number in range(700):
            connection.execute("INSERT INTO evictions VALUES (?, '', '', 0, 0, 0)", (f"{number:0180d}",))
    with pytest.raises(CapTooSmall, match=r"the minimum is (\d+) bytes") as caught:
        put_shard(cache, 5_000_000)
    least = int(str(caught.value).split("minimum is ")[1].split()[0])
    cache.close()

    with open_cache(root, max_size=least) as larger:
        put_shard(larger, 5_000_000)


def test_each_pull_counts_the_shards_evicted_for_it(cache: CacheDir, put: Put, tmp_path: Path) -> None:
    """Two pulls run at the same time, beside an eviction by a user."""
    (tmp_path / "listing").mkdir()
    jobs = []
    for name in (Id("a" * 16), Id("b" * 16)):
        cache.add_source(SourceRow(name, name, {}, "i", "default", 9, 9, 0, 0, 0), tmp_path / "listing")
        with cache.catalog.write() as connection:
            jobs.append(draws.open_job(connection, name, holder=cache.holder.id, wanted=None, seed=None)[0])
    for _ in range(10):
        put(200_000)
    before = len(cache.shards())
    cache.evict(cache.usage().total - 1)
    for job, count in zip(jobs, (7, 11), strict=True):
        for _ in range(count):
            put(400_000, job=job, room=Room(evict=True, job=job, wait=0))

    with cache.catalog.write() as connection:
        evicted = [close_job(connection, job).evicted for job in jobs]
    assert min(evicted) > 0
    assert sum(evicted) + 1 == before + 18 - len(cache.shards()) == cache.stats().evicted


def test_a_pull_never_evicts_its_own_shards(cache: CacheDir, put: Put) -> None:
    older = [put(200_000) for _ in range(3)]
    mine = []
    room = Room(evict=True, job="me", keep_own=True, wait=0)
    while cache.max_size - cache.usage().total > 300_000 or set(older) & {shard.id for shard in cache.shards()}:
        mine.append(put(200_000, job="me", room=room))
    put(cache.max_size - cache.usage().total - 70_000, job="me")
    mine = [shard.id for shard in cache.shards()]
    with pytest.raises(CapBlocked):
        put(200_000, job="me", room=room)

    assert [shard.id for shard in cache.shards()] == mine
    assert not set(older) & set(mine)


def test_a_shard_that_can_never_fit_is_refused_with_the_minimum(cache: CacheDir, root: Path) -> None:
    with pytest.raises(CapTooSmall, match=r"the minimum is (\d+) bytes") as caught:
        put_shard(cache, 5_000_000)
    least = int(str(caught.value).split("minimum is ")[1].split()[0])
    cache.close()

    with open_cache(root, max_size=least) as larger:
        put_shard(larger, 5_000_000)
        assert du(root) <= least


@pytest.mark.parametrize("size", [0, 1, 1_000_000])
def test_a_cap_below_the_caches_own_files_is_refused_before_a_file_is_created(root: Path, size: int) -> None:
    with pytest.raises(CapTooSmall, match="own files"):
        open_cache(root, max_size=size)

    assert not root.exists()


def test_a_free_disk_floor_is_kept(root: Path) -> None:
    with open_cache(root, max_size="4MB", min_free="4000PB") as cache:
        cache.declare("default", SCHEMA)
        with pytest.raises(CapacityError, match="--min-free"):
            put_shard(cache, 1000)


@pytest.mark.parametrize("reached", [False, True])
def test_nothing_is_evicted_for_a_floor_that_evictions_cannot_reach(
    root: Path, monkeypatch: pytest.MonkeyPatch, reached: bool
) -> None:
    with open_cache(root, max_size="8MB") as cache:
        cache.declare("default", SCHEMA)
        for _ in range(3):
            put_shard(cache, 100_000)
    disk = 10_000_000 + tree_bytes(root / "shards")
    with open_cache(root, min_free=10_000_000 + (50_000 if reached else 500_000)) as cache:
        monkeypatch.setattr(cache.layout, "free_disk", lambda: disk - tree_bytes(root / "shards"))
        with contextlib.nullcontext() if reached else pytest.raises(CapacityError, match="--min-free"):
            put_shard(cache, 1000, room=Room(evict=True, wait=0))

        assert [shard.samples for shard in cache.shards()] == [10, 10, 10]
        assert sum(row["shards"] for row in cache.catalog.rows("SELECT shards FROM evictions")) == int(reached)


def test_the_cap_is_stored_and_a_new_cap_takes_effect_at_the_next_write(root: Path) -> None:
    with open_cache(root, max_size="4MB") as cache:
        cache.declare("default", SCHEMA)
    with open_cache(root) as cache:
        assert cache.max_size == 4_000_000
    with open_cache(root, max_size="6MB") as cache:
        put_shard(cache, 1000)
    with open_cache(root) as cache:
        assert cache.max_size == 6_000_000


def test_a_new_cap_is_refused_while_another_process_uses_the_cache(cache: CacheDir) -> None:
    cache.recover()
    _ = cache.holder
    with cache.snapshot():
        code = (
            "import sys, cachetool.cache\n"
            "try: cachetool.cache.open_cache(sys.argv[1], max_size='9MB')\n"
            "except Exception as error: print(type(error).__name__, error)"
        )
        out = subprocess.run(["python", "-c", code, cache.root], capture_output=True, text=True, check=True).stdout

    assert UsageError.__name__ in out
    assert f"pid {os.getpid()}" in out


def test_the_catalogs_page_limit_grows_before_it_is_reached(root: Path) -> None:
    with open_cache(root, max_size="40MB") as cache:
        cache.declare("default", SCHEMA)
        first = cache.catalog.number("pages")
        with cache.catalog.write() as connection:
            connection.executemany(
                "INSERT INTO shards (id, dataset, format, state, bytes, seq) VALUES (?, '', 'lmdb', 'staging', 0, 1)",
                [(f"{n:0200d}",) for n in range(300)],
            )
        before = cache.usage().overhead
        put_shard(cache, 1000)

        assert cache.catalog.number("pages") == 2 * first
        assert cache.usage().overhead > before


def test_open_connections_use_a_page_limit_that_another_process_raised(root: Path) -> None:
    """SQLite's page limit belongs to a connection. A reader must not fail because a pull raised the limit."""
    with open_cache(root, max_size="40MB") as cache, CacheDir(root) as other:
        cache.declare("default", SCHEMA)
        pages = other.catalog.number("pages")
        with cache.catalog.write() as connection:
            connection.execute("UPDATE cache SET pages = ?", (4 * pages,))
        with cache.catalog.write() as connection:
            connection.executemany(
                "INSERT INTO shards (id, dataset, format, state, bytes, seq) VALUES (?, '', 'lmdb', 'staging', 0, 1)",
                [(f"{n:0200d}",) for n in range(2 * pages * 4096 // 600)],
            )
        with other.catalog.write() as connection:
            connection.executemany(
                "INSERT INTO events (at, kind, dataset, subject, text) VALUES (0, '', '', '', ?)", [("x" * 3000,)] * 50
            )
        assert len(other.catalog.rows("SELECT id FROM events")) == 50


def test_a_cap_below_the_used_bytes_is_refused_with_the_evict_command(root: Path) -> None:
    with open_cache(root, max_size="9MB") as cache:
        put_shard(cache, 3_000_000)
        put_shard(cache, 3_000_000)
        used = cache.usage().total
    with pytest.raises(CapTooSmall, match=rf"{format_size(used)} are used; .* cachetool evict --max-size 5000000"):
        open_cache(root, max_size=5_000_000)
    with open_cache(root) as cache:
        assert cache.max_size == 9_000_000
        cache.evict(5_000_000)
    with open_cache(root, max_size=5_000_000) as cache:
        _ = cache.holder
        assert cache.max_size == 5_000_000


def test_a_new_cap_is_refused_at_the_first_write_if_another_process_opened_the_cache_meanwhile(root: Path) -> None:
    with open_cache(root, max_size="9MB") as cache:
        cache.declare("default", SCHEMA)
        put_shard(cache, 1000)
    with open_cache(root, max_size="20MB") as late:
        code = (
            "import sys, cachetool.cache\n"
            "cache = cachetool.cache.open_cache(sys.argv[1])\n"
            "with cache.snapshot():\n"
            "    print('here', flush=True)\n"
            "    sys.stdin.read()\n"
        )
        reader = subprocess.Popen(
            [sys.executable, "-c", code, root], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert reader.stdout is not None
        assert reader.stdout.readline() == "here\n"
        with pytest.raises(UsageError, match=f"while pid {reader.pid}"):
            late.snapshot()
        assert late.catalog.number("max_size") == 9_000_000
        reader.communicate()
        with late.snapshot():
            assert late.max_size == 20_000_000
