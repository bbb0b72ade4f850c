"""Further passes over a source: no sample is in the cache twice, no cached sample is fetched, and none is lost."""

from __future__ import annotations

import contextlib
import random
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import cachetool
from cachetool.cache.draws import Copies, copies, source_row
from cachetool.check.own_files import contradiction
from cachetool.check.verify import verify
from cachetool.core.errors import CapBlocked
from cachetool.core.permutation import SegmentedOrder
from cachetool.core.ranges import runs
from cachetool.pull import claims
from cachetool.pull.claims import Cached
from cachetool.sources.registry import open_source
from tests.pull.test_background import until
from tests.pull.test_growing import drawn, write


def keys(cache: cachetool.Cache) -> Counter[str]:
    return Counter(key for key, _ in drawn(cache))


@given(count=st.integers(1, 300), seed=st.integers(0, 9), wanted=st.integers(1, 40), data=st.data())
def test_a_claim_has_the_requested_draws_within_the_limit_of_ranges(
    count: int, seed: int, wanted: int, data: st.DataObject
) -> None:
    order = SegmentedOrder(count, seed=seed)
    held = data.draw(st.sets(st.integers(0, count - 1)))
    start = data.draw(st.integers(0, count - 1))
    most = data.draw(st.integers(1, 20))
    cached = Cached()
    cached._draws = np.array(sorted(held), dtype=np.int64)
    before, claims.MOST_RUNS = claims.MOST_RUNS, most
    try:
        stop = cached.reach(order, start, min(start + wanted, count), end=count)
    finally:
        claims.MOST_RUNS = before
    assert start < stop <= count
    flags = np.array([int(unit) not in held for unit in order[np.arange(start, stop)]])
    assert flags.sum() <= wanted
    assert len(runs(start, flags)) <= most
    if held and len(runs(start, flags)) < most:
        assert flags.sum() == min(wanted, count - start) or stop == count


def test_a_claim_of_a_pass_reads_no_shard_of_that_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cost of a claim therefore does not depend on the number of shards."""
    remote = tmp_path / "remote"
    write(remote, range(40))
    with cachetool.open_cache(tmp_path / "cache", max_size="20MB") as cache:
        cache.pull(str(remote), samples=30, shard_size=160)
        (source,) = cache.catalog.rows("SELECT id FROM sources")
        row = cache.source(source["id"])
        assert row is not None
        opened = open_source(str(remote), cache.listing(row.id), units=row.units)
        with contextlib.closing(opened), cache.catalog.read() as connection:
            assert len(copies(connection, row.id)) > 1
            monkeypatch.setattr(Copies, "ranges", property(lambda copy: pytest.fail("looked into")))
            Cached().look(connection, opened, row)


@pytest.mark.parametrize("workers", [1, 3])
def test_passes_into_a_small_cache_draw_every_sample_and_none_twice(workers: int, tmp_path: Path) -> None:
    """Pulls of a few samples alternate with evictions of any shards, over many passes."""
    remote = tmp_path / "remote"
    write(remote, range(40))
    rng = random.Random(workers)
    came: Counter[str] = Counter()
    with cachetool.open_cache(tmp_path / "cache", max_size="20MB") as cache:
        while cache.stats().sources[:1] == [] or cache.stats().sources[0]["pass"] < 3:
            before = keys(cache)
            result = cache.pull(str(remote), samples=rng.randint(5, 25), workers=workers, shard_size=160, seed=3)
            now = keys(cache)
            assert max(now.values()) == 1, "a sample twice in one snapshot"
            assert result.samples == (now - before).total()
            assert not before - now
            came += now - before
            source = cache.catalog.one("SELECT id FROM sources")
            assert source is not None
            with cache.catalog.read() as connection:
                held, row = copies(connection, source["id"]), source_row(connection, source["id"])
            assert row is not None
            assert sum(b - a for copy in held for a, b in copy.ranges(row)) == now.total(), "each draw is in its shard"
            assert contradiction(cache.catalog, cache.layout) is None
            if rng.random() < 0.7:
                cache.evict(cache.usage().total - rng.randint(1, cache.stats().shard_bytes), policy="random")
        assert len(came) == 40
        root = cache.root
        rows = [dict(row) for row in cache.catalog.rows("SELECT * FROM sources")]
        left = keys(cache)
    (root / "catalog.sqlite3").unlink()
    assert verify(root, repair=True).sound
    with cachetool.open_cache(root) as cache:
        again = [dict(row) for row in cache.catalog.rows("SELECT * FROM sources")]
        counted = {"fetched": 0, "served": 0, "began_at_moves": None}
        assert [{**row, **counted} for row in again] == [{**row, **counted} for row in rows]
        cache.pull(str(remote), all=True)
        cache.pull(str(remote), samples=40)
        assert keys(cache) == Counter(f"{n:04d}" for n in range(40))
        assert left.keys() <= keys(cache).keys()


def test_a_background_pull_rests_with_a_complete_cache_and_fetches_evicted_samples(tmp_path: Path) -> None:
    remote = tmp_path / "remote"
    write(remote, range(30))
    with (
        cachetool.open_cache(tmp_path / "cache", max_size="20MB") as cache,
        cachetool.BackgroundPull(cache, str(remote), shard_size=100) as background,
    ):
        until(lambda: background.progress().phase == "all is in the cache")
        assert keys(cache) == Counter(f"{n:04d}" for n in range(30))
        assert background.progress().samples == 30
        with contextlib.suppress(CapBlocked):  # evicted samples may be fetched again before all are counted
            cache.evict(cache.usage().total - 1)
        until(lambda: cache.stats().samples == 30)
        assert keys(cache) == Counter(f"{n:04d}" for n in range(30))
        assert 30 < background.progress().samples < 60
