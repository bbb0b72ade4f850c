"""Eviction: the order of the policies, protection, and leases that no eviction disturbs."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cachetool.cache import CacheDir, eviction
from cachetool.cache.policies import POLICIES, Candidate, choose
from cachetool.core.errors import CapBlocked, CapTooSmall, UsageError

Put = Callable[..., str]

rows = st.lists(
    st.builds(
        Candidate,
        id=st.uuids().map(str),
        dataset=st.sampled_from(["a", "b"]),
        samples=st.integers(1, 100),
        bytes=st.integers(1, 10**6),
        seq=st.integers(1, 10**6),
        epochs=st.integers(0, 5),
        used=st.floats(0, 2e9),
        job=st.sampled_from([None, "me", "other"]),
    ),
    unique_by=(lambda row: row.id, lambda row: row.seq),
)


@pytest.mark.parametrize("policy", POLICIES)
@given(rows=rows, excess=st.integers(-10, 3 * 10**6), epochs=st.integers(0, 3), dataset=st.sampled_from([None, "a"]))
def test_a_policy_chooses_just_enough_shards_and_never_protected_ones(
    policy: str, rows: list[Candidate], excess: int, epochs: int, dataset: str | None
) -> None:
    victims = choose(rows, excess=excess, policy=policy, min_epochs=epochs, dataset=dataset, keep_job="me")

    by_id = {row.id: row for row in rows}
    chosen = [by_id[victim.id] for victim in victims]
    free = [r for r in rows if r.epochs >= epochs and r.dataset in (dataset or "ab") and r.job != "me"]
    assert len(set(by_id)) == len(rows)
    assert all(row in free for row in chosen)
    assert sum(row.bytes for row in chosen) >= min(excess, sum(row.bytes for row in free))
    assert sum(row.bytes for row in chosen[:-1]) < max(excess, 1)
    key = POLICIES[policy]
    assert [key(row) for row in chosen] == sorted(map(key, free))[: len(chosen)]
    assert victims == choose(
        list(reversed(rows)), excess=excess, policy=policy, min_epochs=epochs, dataset=dataset, keep_job="me"
    )


def test_an_unknown_policy_is_refused_with_the_list_of_policies() -> None:
    with pytest.raises(UsageError, match="oldest, most-used, lru, random"):
        choose([], excess=1, policy="newest")


def test_evict_reaches_its_target_and_keeps_the_cap(cache: CacheDir, put: Put) -> None:
    ids = [put() for _ in range(10)]
    result = cache.evict("1.6MB")

    left = [shard.id for shard in cache.shards()]
    assert left == ids[-len(left) :]
    assert result.used == cache.usage().total <= 1_600_000
    assert result.removed_shards == 10 - len(left) == len(result.plan)
    assert result.removed_samples == 10 * result.removed_shards
    assert cache.max_size == 4_000_000


def test_a_dry_run_deletes_nothing_and_shows_the_plan_of_the_eviction(cache: CacheDir, put: Put) -> None:
    for _ in range(10):
        put()
    plan = cache.evict("1.6MB", dry_run=True).plan

    assert len(cache.shards()) == 10
    assert cache.evict("1.6MB").plan == plan


def test_a_leased_shard_is_retired_and_deleted_when_the_lease_ends(cache: CacheDir, put: Put) -> None:
    for _ in range(5):
        put()
    snapshot = cache.snapshot()
    with pytest.raises(CapBlocked, match=f"pid {os.getpid()} on .* reads default at version {snapshot.version}"):
        cache.evict("1.4MB")

    assert len(cache.shards()) < 5
    assert [s.id for s in cache.shards(version=snapshot.version)] == [s.id for s in snapshot.shards]
    assert all(shard.data.exists() for shard in snapshot.shards)
    with cache.snapshot() as later:
        assert len(later.shards) == len(cache.shards()) < 5
    assert all(shard.data.exists() for shard in snapshot.shards)

    snapshot.release()
    snapshot.release()
    assert sorted(os.listdir(cache.root / "shards")) == sorted(shard.id for shard in cache.shards())
    assert cache.usage().total <= 1_400_000


def empty_size(cache: CacheDir) -> int:
    """Return the bytes that are charged for a cache without shards."""
    usage = cache.usage()
    return usage.overhead + usage.listings


def test_a_target_below_an_empty_cache_is_refused_before_anything_is_evicted(cache: CacheDir, put: Put) -> None:
    shard = put()
    least = empty_size(cache)
    with pytest.raises(CapTooSmall, match=rf" MB .*--max-size {least}$"):
        cache.evict(least - 1)
    assert [each.id for each in cache.shards()] == [shard]

    cache.evict(least)
    assert cache.shards() == []


def test_served_epochs_are_counted_and_min_epochs_protects_shards(cache: CacheDir, put: Put) -> None:
    old = put()
    with cache.snapshot() as snapshot:
        snapshot.served()
    new = put()
    assert [(s.id, s.epochs) for s in cache.shards()] == [(old, 1), (new, 0)]
    with pytest.raises(CapTooSmall):
        cache.evict(empty_size(cache), min_epochs=1)

    assert [shard.id for shard in cache.shards()] == [new]


def test_a_replacement_appears_in_one_version_and_keeps_the_age_of_the_old_shard(cache: CacheDir, put: Put) -> None:
    old, other = put(), put()
    with cache.snapshot() as before:
        version = before.version
        new = put(replaces=old)

        assert [shard.id for shard in cache.shards()] == [new, other]
        assert [shard.id for shard in cache.shards(version=version)] == [old, other]
        assert cache.version == version + 1
    assert sorted(os.listdir(cache.root / "shards")) == sorted([new, other])


def test_the_event_log_is_bounded(cache: CacheDir) -> None:
    from cachetool.cache.catalog import MAX_EVENTS, event

    with cache.catalog.write() as connection:
        for number in range(MAX_EVENTS + 50):
            event(connection, 0.0, "evict", str(number), "")

    rows = cache.catalog.rows("SELECT subject FROM events ORDER BY id")
    assert len(rows) == MAX_EVENTS
    assert rows[0]["subject"] == "50"


def test_a_shard_that_cannot_be_deleted_is_reported_and_blocks_no_other(root: Path, put: Put, cache: CacheDir) -> None:
    ids = [put() for _ in range(4)]
    stuck = root / "shards" / ids[1] / "data.lmdb"
    if shutil.which("chattr") is None or subprocess.run(["chattr", "+i", stuck], capture_output=True).returncode:
        pytest.skip("no right, or no file system, to make a file immutable")
    try:
        with pytest.raises(PermissionError):
            cache.evict(empty_size(cache))
        assert [each for each in ids if (root / "shards" / each).exists()] == [ids[1]]
        with pytest.raises(PermissionError):
            cache.evict(empty_size(cache))
    finally:
        subprocess.run(["chattr", "-i", stuck], check=True)
    assert cache.evict(empty_size(cache)).used <= empty_size(cache)
    assert os.listdir(root / "shards") == []


def test_a_shard_that_another_process_cannot_delete_is_reported(
    cache: CacheDir, put: Put, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(eviction, "_DELETING", 0.0)
    shard = put()
    with cache.catalog.write() as connection:
        connection.execute(
            "INSERT INTO holders (id, pid, host, started, what) VALUES ('0123456789abcdef', ?, ?, ?, 'evict')",
            (os.getpid(), socket.gethostname(), time.time()),
        )
        connection.execute("UPDATE shards SET state = 'trash', holder = '0123456789abcdef' WHERE id = ?", (shard,))

    with pytest.raises(CapBlocked, match=r"remain:\n1 shard \(.* kB\) already evicted"):
        cache.evict(empty_size(cache))


def test_lru_reports_the_time_of_last_use_in_the_plan_and_the_event(cache: CacheDir, put: Put) -> None:
    old, new = put(), put()
    with cache.catalog.write() as connection:
        connection.execute("UPDATE shards SET used = 1e9 WHERE id = ?", (new,))
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(1e9))

    (victim,) = cache.evict(cache.usage().total - 1, policy="lru").plan
    assert (victim.id, victim.reason) == (new, f"lru: last used {when}")
    (event,) = [event for event in cache.stats().events if event["kind"] == "evict"]
    assert (event["subject"], event["text"]) == (new, f"evict, lru: last used {when}")
    assert [shard.id for shard in cache.shards()] == [old]
