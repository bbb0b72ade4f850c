"""Renewal: while a pull waits for space, each epoch's snapshot retires a share of the cache. Otherwise nothing is
retired.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest

import cachetool
from cachetool.cache import CacheDir, Room, SourceRow, Staging, draws, snapshots
from cachetool.cache.removal import candidates, retire
from cachetool.core.names import Id
from tests.cache.conftest import SCHEMA

SOURCE = Id("5" * 16)

Put = Callable[..., str]


@pytest.fixture
def job(cache: CacheDir, tmp_path: Path) -> str:
    (tmp_path / "listing").mkdir()
    row = SourceRow(SOURCE, "file:///data", {}, "identity", "default", 1000, 1000, 0, 0, 0)
    cache.add_source(row, tmp_path / "listing")
    with cache.catalog.write() as connection:
        room = Room(evict=True, renew=0.25)
        return draws.open_job(connection, SOURCE, holder=cache.holder.id, wanted=None, seed=None, room=room)[0]


def fill(cache: CacheDir, put: Put) -> None:
    while cache.max_size - cache.usage().total > 150_000:
        put(100_000)


def room(cache: CacheDir) -> int:
    """Return the bytes that are free for shards."""
    return cache.max_size - cache.usage().overhead - cache.usage().listings


def hungry(cache: CacheDir, job: str) -> None:
    """Start a pull that waits for space in a cache whose shards were all in a snapshot."""
    with cache.snapshot():
        pass
    with cache.catalog.write() as connection:
        connection.execute("UPDATE jobs SET bytes_wanted = 1 WHERE id = ?", (job,))


def test_nothing_retires_while_no_pull_waits_for_space(cache: CacheDir, put: Put, job: str) -> None:
    fill(cache, put)
    before = cache.shards()
    with cache.snapshot() as one, cache.snapshot() as two:
        assert one.shards == two.shards == tuple(before)
    assert cache.shards() == before


def test_a_snapshot_retires_up_to_the_share_and_the_next_one_adds_nothing(cache: CacheDir, put: Put, job: str) -> None:
    fill(cache, put)
    full = cache.shards()
    hungry(cache, job)
    first = cache.snapshot()
    with cache.snapshot() as second:
        assert first.shards == second.shards

    gone = len(full) - len(first.shards)
    free = cache.max_size - cache.usage().total
    assert list(first.shards) == full[gone:]
    assert free >= 0.25 * room(cache) > free - full[0].bytes
    first.release()


def test_shards_that_no_snapshot_contained_do_not_retire(cache: CacheDir, put: Put, job: str) -> None:
    while sum(shard.bytes for shard in cache.shards()) < 0.25 * room(cache):
        put(100_000)
    first = {shard.id for shard in cache.shards()}
    hungry(cache, job)
    fill(cache, put)
    full = {shard.id for shard in cache.shards()}
    with cache.snapshot() as one:
        assert full - first <= {shard.id for shard in one.shards} < full


@pytest.mark.parametrize("shown", [0, 3])
def test_if_few_shards_were_in_a_snapshot_the_newest_are_kept_for_the_next_one(
    cache: CacheDir, put: Put, job: str, shown: int
) -> None:
    """Otherwise the second epoch of a cache that was full before the first epoch would see no new sample."""
    for _ in range(shown):
        put(100_000)
    hungry(cache, job)
    fill(cache, put)
    full = cache.shards()
    with cache.snapshot(sparing=True) as one:
        assert cache.shards() == full, "nothing was given up that no snapshot contained"
        later = full[len(one.shards) :]
        share = sum(shard.bytes for shard in later)
        assert list(one.shards) == full[: len(one.shards)]
        assert share >= 0.25 * room(cache) - (cache.max_size - cache.usage().total) > share - full[0].bytes
        with cache.snapshot(sparing=True) as two:
            assert two.shards[-len(later) :] == tuple(later)
            assert len(two.shards) < len(full), "now some of the others may go"
        assert all(shard.path.exists() for shard in one.shards)


@pytest.mark.parametrize("renew", [0.1, 0.25, 0.6, 0.9])
def test_every_epoch_of_a_full_cache_has_new_samples_until_the_source_ends(
    cache: CacheDir, put: Put, job: str, renew: float
) -> None:
    """The rule holds for every share, while a waiting writer takes the freed space."""
    hungry(cache, job)
    with cache.catalog.write() as connection:
        connection.execute("UPDATE jobs SET renew = ?", (renew,))
    fill(cache, put)
    before: set[str] = set()
    for _ in range(6):
        with cache.snapshot(sparing=True) as snapshot:
            shown = {shard.id for shard in snapshot.shards}
            assert shown - before
            before = shown
        fill(cache, put)


def test_a_small_dataset_in_a_full_cache_is_complete_within_two_snapshots(cache: CacheDir, put: Put, job: str) -> None:
    cache.declare("other", SCHEMA)
    hungry(cache, job)
    few = {put(100_000, dataset="other") for _ in range(8)}
    fill(cache, put)
    seen: set[str] = set()
    for least in (6, 8):
        with cache.snapshot(dataset="other", sparing=True) as snapshot:
            seen |= {shard.id for shard in snapshot.shards}
            assert len(seen) >= least
    assert seen == few


def test_a_snapshot_that_must_be_complete_contains_all_shards(cache: CacheDir, put: Put, job: str) -> None:
    """A loader asks for all shards to resume, or to read as many samples as exist."""
    hungry(cache, job)
    fill(cache, put)
    with cache.snapshot() as whole:
        assert list(whole.shards) == cache.shards()


def test_shards_of_an_unread_snapshot_are_kept_once_for_the_next(cache: CacheDir, put: Put, job: str) -> None:
    """A loader prepares its next epoch, and prepares it again if the cache changes before the epoch begins."""
    hungry(cache, job)
    fill(cache, put)
    full = cache.shards()
    first = cache.snapshot(sparing=True)
    first.release(unread=True)
    with cache.snapshot(sparing=True) as second:
        assert second.shards == first.shards
        assert cache.shards() == full
        other = cache.snapshot(sparing=True)
    provisional = cache.snapshot(sparing=True)
    provisional.release(unread=True)
    assert cache.catalog.number("seen") >= other.version, "others had it"
    other.release()


def test_exchanging_an_unread_snapshot_keeps_its_shards_for_the_new_one(cache: CacheDir, put: Put, job: str) -> None:
    hungry(cache, job)
    fill(cache, put)
    first = cache.snapshot(sparing=True)
    with cache.snapshot(sparing=True, instead=first) as second:
        assert second.shards == first.shards
        assert len(cache.catalog.rows("SELECT * FROM leases")) == 1
    seen = cache.catalog.number("seen")
    with cache.snapshot(peek=True, instead=second):
        assert cache.catalog.number("seen") == seen, "it was read, then released"


def test_exchanging_a_snapshot_deletes_shards_that_only_the_old_one_kept(cache: CacheDir, put: Put) -> None:
    put()
    first = cache.snapshot()
    with pytest.raises(cachetool.CapBlocked):
        cache.evict(max_size=cache.stats().used - 1)
    with cache.snapshot(instead=first) as second:
        assert second.shards == ()
        assert not first.shards[0].path.exists()
        assert cache.catalog.rows("SELECT * FROM shards") == []


def test_an_interrupted_exchange_leaves_no_lease(cache: CacheDir, put: Put, monkeypatch: pytest.MonkeyPatch) -> None:
    def cut_off(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    put()
    first = cache.snapshot()
    monkeypatch.setattr(snapshots, "delete_trash", cut_off)
    with pytest.raises(KeyboardInterrupt):
        cache.snapshot(instead=first)
    first.release()
    assert cache.catalog.rows("SELECT * FROM leases") == []


def test_a_corrupt_shard_that_is_retiring_is_in_no_snapshot(cache: CacheDir, put: Put, job: str) -> None:
    hungry(cache, job)
    fill(cache, put)
    bad = cache.shards()[0]
    with cache.snapshot(peek=True), cache.catalog.write() as connection:
        retire(connection, [bad.id], reason="corrupt", policy="verify")
    with cache.snapshot(sparing=True) as snapshot:
        assert bad not in snapshot.shards


def test_an_older_snapshot_keeps_shards_that_retire_meanwhile(cache: CacheDir, put: Put, job: str) -> None:
    fill(cache, put)
    old = cache.snapshot()
    hungry(cache, job)
    with cache.snapshot() as new:
        assert len(new.shards) < len(old.shards)
        assert all(shard.path.exists() for shard in old.shards)
        with cache.snapshot() as newer:
            assert newer.shards == new.shards, "what is leaving counts"
    old.release()
    assert [shard.path.exists() for shard in old.shards[: len(old.shards) - len(new.shards)]].count(True) == 0


def test_the_last_ready_shard_stays(cache: CacheDir, put: Put, job: str) -> None:
    put(cache.max_size - cache.usage().total - 70_000)
    hungry(cache, job)
    with cache.snapshot() as snapshot:
        assert len(snapshot.shards) == 1


def test_a_writer_at_the_cap_records_that_its_pull_waits_for_space(cache: CacheDir, put: Put, job: str) -> None:
    fill(cache, put)
    assert cache.catalog.rows("SELECT bytes_wanted FROM jobs")[0]["bytes_wanted"] == 0
    put(100_000, room=Room(evict=True, wait=0, job=job), job=job)

    assert cache.catalog.rows("SELECT bytes_wanted FROM jobs")[0]["bytes_wanted"] > 108_192, (
        "as many bytes as it found no room for"
    )


def test_free_space_too_small_for_the_waiting_shard_does_not_count(cache: CacheDir, put: Put, job: str) -> None:
    fill(cache, put)
    full = cache.shards()
    free = cache.max_size - cache.usage().total
    hungry(cache, job)
    with cache.catalog.write() as connection:
        connection.execute("UPDATE jobs SET bytes_wanted = ? WHERE id = ?", (free + 1, job))
    with cache.snapshot() as first, cache.snapshot() as second:
        gone = sum(shard.bytes for shard in full if shard not in first.shards)
        assert first.shards == second.shards
    assert gone >= 0.25 * room(cache) > gone - full[0].bytes


def test_a_pull_with_follow_evicts_only_shards_that_were_in_a_snapshot(cache: CacheDir, put: Put) -> None:
    first = put()
    with cache.snapshot():
        pass
    second = put()
    with cache.catalog.read() as connection:
        assert [row.id for row in candidates(connection, seen=True)] == [first]
        assert sorted(row.id for row in candidates(connection)) == sorted([first, second])


def test_a_pull_with_follow_retires_nothing_itself_while_a_reader_is_active(
    cache: CacheDir, put: Put, job: str
) -> None:
    """Otherwise each of its workers would retire one shard more than the requested share."""

    class Waits(Exception):
        pass

    def waiting(_: str) -> None:
        raise Waits

    def stage() -> Staging:
        room = Room(evict=True, wait=math.inf, job=job)
        return cache.stage(
            dataset="default", schema=SCHEMA, format="lmdb", bound=900_000, job=job, room=room, waiting=waiting
        )

    fill(cache, put)
    hungry(cache, job)
    with cache.snapshot():
        before = cache.shards()
        with pytest.raises(Waits):
            stage()
        assert cache.shards() == before
    with stage():
        assert len(cache.shards()) < len(before)
