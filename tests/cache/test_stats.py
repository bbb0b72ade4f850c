"""Figures of ``stats`` beside shards: evictions by reason, bytes fetched and served, errors."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from cachetool.cache import CacheDir, Room, SourceRow, draws, open_cache
from cachetool.core.errors import CapBlocked
from cachetool.core.names import Id
from tests.cache.conftest import SCHEMA

SOURCE = Id("5" * 16)

Put = Callable[..., str]


def test_evictions_are_counted_by_reason_and_policy_for_ever(cache: CacheDir, put: Put) -> None:
    for _ in range(20):
        put(200_000, room=Room(evict=True, policy="lru", wait=0))
    cache.evict("1.5MB", policy="most-used")

    found = {(row["reason"], row["policy"]): row for row in cache.stats().evictions}
    assert set(found) == {("room", "lru"), ("evict", "most-used")}
    gone = 20 - len(cache.shards())
    assert sum(row["shards"] for row in found.values()) == cache.stats().evicted == gone
    assert sum(row["samples"] for row in found.values()) == 10 * gone
    assert all(row["bytes"] > 200_000 * row["shards"] for row in found.values())
    with cache.catalog.write() as connection:
        connection.execute("DELETE FROM events")
    assert cache.stats().evicted == gone, "the log is bounded, the counters are not"


def test_reuse_is_bytes_served_over_bytes_fetched(cache: CacheDir, put: Put, tmp_path: Path) -> None:
    (tmp_path / "listing").mkdir()
    cache.add_source(SourceRow(SOURCE, "file:///data", {}, "i", "default", 9, 9, 0, 0, 0), tmp_path / "listing")
    assert cache.stats().reuse is None
    with cache.catalog.write() as connection:
        job, _ = draws.open_job(connection, SOURCE, holder=cache.holder.id, wanted=None, seed=None)
        held = draws.claim(connection, job, holder=cache.holder.id, most=2)
        assert held is not None
        draws.finish(connection, job, held, held.stop, samples=2, skipped=0, fetched=50_000)
    put(100_000)
    for _ in range(3):
        with cache.snapshot() as snapshot:
            snapshot.served()

    stats = cache.stats()
    assert (stats.fetched, stats.served, stats.reuse) == (50_000, 300_000, 6.0)
    assert stats.sources[0]["fetched"] == 50_000
    cache.close()
    with open_cache(cache.root) as again:
        assert again.stats().reuse == 6.0


def test_the_newest_errors_come_first(cache: CacheDir) -> None:
    for number in range(7):
        cache.catalog.note_error("s3://bucket/", f"Unreachable: try {number}", dataset="default")

    assert [row["text"][-1] for row in cache.stats().errors] == ["6", "5", "4", "3", "2"]


def test_stats_of_one_dataset_exclude_other_datasets(cache: CacheDir, put: Put, tmp_path: Path) -> None:
    """Evictions, errors, events, readers, bytes fetched and served, although both datasets were drawn from one URL."""
    cache.declare("other", SCHEMA)
    (tmp_path / "listing").mkdir()
    for number, name in enumerate(("default", "other")):
        row = SourceRow(Id(str(number) * 16), "s3://bucket/", {}, "i", name, 9, 9, 0, 0, 0)
        cache.add_source(row, tmp_path / "listing")
        with cache.catalog.write() as connection:
            job, _ = draws.open_job(connection, row.id, holder=cache.holder.id, wanted=None, seed=None)
            held = draws.claim(connection, job, holder=cache.holder.id, most=2)
            assert held is not None
            draws.finish(connection, job, held, held.stop, samples=2, skipped=0, fetched=1000 + number)
        cache.catalog.note_error("s3://bucket/", f"Unreachable: {name}", dataset=name)
        put(100_000 * (number + 1), dataset=name)
        put(100_000 * (number + 1), dataset=name)
        with cache.snapshot(dataset=name) as snapshot:
            snapshot.served()
        cache.evict(cache.usage().total - 1, dataset=name)
    with cache.snapshot(dataset="other"):
        default, other, both = cache.stats("default"), cache.stats("other"), cache.stats()

    for stats, name, fetched, served in ((default, "default", 1000, 200_000), (other, "other", 1001, 400_000)):
        assert [(row["dataset"], row["shards"]) for row in stats.evictions] == [(name, 1)]
        assert stats.evicted == 1
        assert [row["text"] for row in stats.errors] == [f"Unreachable: {name}"]
        assert {row["kind"] for row in stats.events} == {"evict", "error"}
        assert len(stats.events) == 2
        assert (stats.fetched, stats.served) == (fetched, served)
    assert [row["dataset"] for row in other.leases] == ["other"]
    assert default.leases == []
    assert (both.evicted, len(both.errors), both.fetched, both.served) == (2, 2, 2001, 600_000)
    assert both.evictions == default.evictions + other.evictions


def test_retired_shards_are_counted_once_although_they_are_deleted_later(cache: CacheDir, put: Put) -> None:
    for _ in range(4):
        put()
    with cache.snapshot():
        with pytest.raises(CapBlocked):
            cache.evict("1.4MB")
        retired = cache.stats().evicted
        assert retired == 4 - len(cache.shards()) > 0
    assert cache.stats().evicted == retired


def test_shards_whose_folder_was_deleted_by_hand_are_counted_as_missing(cache: CacheDir, put: Put) -> None:
    cache.declare("other", SCHEMA)
    ids = [put() for _ in range(3)] + [put(dataset="other")]
    assert cache.stats().gone == 0
    shutil.rmtree(cache.layout.shards / ids[1])
    with cache.snapshot(dataset="default") as held:
        with pytest.raises(CapBlocked):
            cache.evict(cache.usage().total - 1)
        assert held.shards[0].path.exists(), "what is retiring is no more gone than what is ready"
        assert cache.stats().gone == cache.stats("default").gone == 1
        assert cache.stats("other").gone == 0


def test_stats_itemise_the_bytes_charged_to_the_cap(cache: CacheDir, put: Put) -> None:
    put()
    staging = cache.stage(dataset="default", schema=cache.schema("default"), format="lmdb", bound=50_000)
    with staging, cache.snapshot():
        going = put()
        with cache.catalog.write() as connection:
            connection.execute("UPDATE shards SET state = 'retiring', until = 99 WHERE id = ?", (going,))
        stats = cache.stats()
        rows = {row["id"]: row["bytes"] for row in cache.catalog.rows("SELECT id, bytes FROM shards")}
    charged = stats.charged
    assert sum(charged.values()) == stats.used
    assert charged["retiring"] == rows[going]
    assert charged["reserved"] == rows[staging.id] == stats.reserved
    assert charged["ready"] == sum(rows.values()) - rows[going] - rows[staging.id]
    assert stats.overhead == stats.used - sum(rows.values()) - charged["listings"]
