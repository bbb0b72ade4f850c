"""``convert --shard-size`` of a cache in place: shards are split and merged, and nothing else changes."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cachetool.api import Cache, open_cache
from cachetool.cache import CacheDir, Origin
from cachetool.cache.removal import retire
from cachetool.check.verify import verify
from cachetool.conversion import in_place as replacement
from cachetool.conversion.groups import Piece, cuts, groups, is_exact, origin_of
from cachetool.conversion.in_place import replace_groups
from cachetool.conversion.run import content_digest
from cachetool.core.errors import CapacityError, CapTooSmall
from cachetool.formats import get_format
from cachetool.formats.shard import open_shard, shard_bound
from tests.conversion import test_convert
from tests.faults import world
from tests.faults.world import Oracle, Quiet

# --- the plan -------------------------------------------------------------------------------------------------------

ORIGINS = [("a", 0, False), ("a", 1, False), ("b", 0, True)]


def pieces(draw: Sequence[tuple[int, int, bool, bool]], size: int) -> list[Piece]:
    return [Piece(str(i), n, n * size, ORIGINS[o], exact, done) for i, (n, o, exact, done) in enumerate(draw)]


shards = st.lists(st.tuples(st.integers(1, 40), st.integers(0, 2), st.booleans(), st.booleans()), max_size=30)


@given(shards, st.integers(1, 9), st.integers(1, 400))
def test_groups_are_adjacent_shards_of_one_source_within_the_size(
    found: list[tuple[int, int, bool, bool]], size: int, most: int
) -> None:
    given = pieces(found, size)
    by_id = {piece.id: piece for piece in given}
    planned = groups(given, most)

    ids = [id for group in planned for id in group]
    assert ids == sorted(set(ids), key=int)
    for group in planned:
        assert [int(id) for id in group] == list(range(int(group[0]), int(group[0]) + len(group)))
        assert len({by_id[id].origin for id in group}) == 1
        if len(group) > 1:
            assert sum(by_id[id].payload for id in group) <= most
    kept = [piece for piece in given if piece.id not in ids]
    assert all(piece.done for piece in kept), "another format is always written anew"
    assert all(piece.payload <= most or piece.samples == 1 or not piece.exact for piece in kept)


@given(shards, st.integers(1, 9), st.integers(1, 400))
def test_a_second_plan_after_a_conversion_is_empty(
    found: list[tuple[int, int, bool, bool]], size: int, most: int
) -> None:
    most = max(1, most // size) * size
    given = pieces(found, size)
    by_id = {piece.id: piece for piece in given}
    planned = {group[0]: group for group in groups(given, most)}
    inside = {id for group in planned.values() for id in group[1:]}
    after: list[Piece] = []
    for piece in given:
        group = planned.get(piece.id, [piece.id])
        samples = sum(by_id[id].samples for id in group)
        at = [0, samples]
        if samples * size > most and piece.exact and samples > 1:
            at = cuts(np.arange(samples + 1) * size, most)
        if piece.id not in inside:
            after += [
                Piece(f"{len(after)}.{k}", b - a, (b - a) * size, piece.origin, piece.exact, True)
                for k, (a, b) in enumerate(pairwise(at))
            ]

    assert sum(piece.samples for piece in after) == sum(piece.samples for piece in given)
    assert groups(after, most) == []


@given(st.lists(st.integers(0, 50), min_size=1, max_size=60), st.integers(1, 120))
def test_new_shards_are_as_large_as_allowed(sizes: list[int], most: int) -> None:
    upto = np.concatenate([[0], np.cumsum(sizes)])
    if upto[-1] == 0:
        return
    at = cuts(upto, most)

    assert (at[0], at[-1]) == (0, len(sizes))
    assert at == sorted(set(at))
    for start, stop in pairwise(at):
        assert upto[stop] - upto[start] <= most or stop - start == 1


def test_draws_follow_their_samples() -> None:
    """The rule also holds for draws that are not in order, as after commits of two workers."""
    origins = {
        "a": Origin("s", "u", 2, ((10, 14),)),
        "b": Origin("s", "u", 2, ((14, 16), (0, 3))),
    }
    assert origin_of(origins, ["a", "b"], 0, 9, 9) == Origin("s", "u", 2, ((10, 16), (0, 3)))
    assert origin_of(origins, ["b"], 1, 4, 5) == Origin("s", "u", 2, ((15, 16), (0, 2)))
    assert is_exact(origins["b"], 5)
    assert not is_exact(origins["b"], 4), "one draw was skipped, nobody knows which"


# --- a cache --------------------------------------------------------------------------------------------------------


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Create a cache of six shards of twelve samples, drawn from one source."""
    world.make(tmp_path / "cache", cap="40MB")
    world.pull(str(tmp_path / "cache"), shards=6, format="lmdb", ledger=str(tmp_path / "ledger"))
    return tmp_path / "cache"


def replace(root: Path, planned: list[list[str]], *, to: str = "lmdb", most: int | None = None) -> None:
    replace_groups(
        Quiet(),
        root=str(root),
        dataset="default",
        groups=planned,
        to=to,
        most=most,
        compression=None,
        verify=False,
        wait=0.0,
    )


def ids(cache: CacheDir) -> list[str]:
    return [shard.id for shard in cache.shards()]


def numbers(cache: CacheDir, shards: Any = None) -> list[int]:
    found: list[int] = []
    for shard in cache.shards() if shards is None else shards:
        with open_shard(shard.path, get_format(shard.format), shard.schema) as reader:
            found += np.asarray(reader.read(0, reader.samples).columns["number"]).tolist()
    return found


def facts(cache: CacheDir) -> tuple[Any, ...]:
    """Return the facts about a cache that must never change."""
    source = cache.stats().sources[0]
    return numbers(cache), content_digest(cache.shards()), source["drawn"], source["coverage"], source["skipped"]


def average(cache: CacheDir) -> int:
    return sum(shard.payload for shard in cache.shards()) // 6


def test_merging_and_splitting_keep_samples_order_digest_and_draws(root: Path, tmp_path: Path) -> None:
    """The post-check of the fault tests compares every sample with the draw in its shard's record."""
    with open_cache(root) as cache:
        before, size = facts(cache), average(cache)
        counts = []
        for most, to in ((7 * size, "lmdb"), (size // 2, "hdf5"), (3 * size, "zarr"), (size, "tfrecord")):
            result = cache.convert(to=to, shard_size=most, workers=2, verify=True)
            counts.append(len(cache.shards()))
            assert facts(cache) == before
            assert {shard.format for shard in cache.shards()} == {to}
            assert all(shard.payload <= most for shard in cache.shards())
            assert (result.samples, result.digest) == (72, before[1])
            assert cache.convert(to=to, shard_size=most).shards == 0, "a second run does nothing"
    assert Oracle(root, tmp_path / "ledger").check(library=True) == 72
    assert counts[0] == 1
    assert counts[1] >= 12
    assert counts[2] < counts[1]


def test_the_order_of_commits_survives_repeated_splits(root: Path) -> None:
    with open_cache(root) as cache:
        before = facts(cache)
        for _ in range(3):
            for shard in cache.shards():
                if shard.samples > 1:
                    replace(root, [[shard.id]], most=shard.payload // 2 + 200)
        assert len(cache.shards()) > 24
        assert facts(cache) == before
        victims = cache.evict(cache.usage().total - 1, dry_run=True).plan
        assert victims[0].id == ids(cache)[0]
        world.pull(str(root), shards=1, format="hdf5", ledger=None)
        assert numbers(cache)[:72] == before[0], "what is drawn later comes last"
        assert len(set(numbers(cache))) == 84


def test_the_new_shard_has_the_fewest_epochs_and_the_latest_use_of_the_old_ones(root: Path) -> None:
    with open_cache(root) as cache:
        for count, id in enumerate(ids(cache)):
            with cache.catalog.write() as connection:
                connection.execute("UPDATE shards SET epochs = ?, used = ? WHERE id = ?", (count + 1, 100 + count, id))
        replace(root, [ids(cache)[1:4]])
        rows = cache.catalog.rows("SELECT epochs, used, samples FROM shards ORDER BY seq")
    assert [tuple(row) for row in rows] == [(1, 100, 12), (2, 103, 36), (5, 104, 12), (6, 105, 12)]


@pytest.mark.parametrize("merging", [True, False])
def test_every_snapshot_during_the_conversion_has_every_sample_once(root: Path, merging: bool) -> None:
    with open_cache(root) as cache:
        before = numbers(cache)
        with cache.snapshot() as old:
            chosen = [ids(cache)] if merging else [[id] for id in ids(cache)]
            replace(root, chosen, to="hdf5", most=None if merging else average(cache) // 3)
            with cache.snapshot() as new:
                assert {shard.id for shard in old.shards}.isdisjoint(shard.id for shard in new.shards)
                assert numbers(cache, old.shards) == numbers(cache, new.shards) == before
                assert sum(1 for _ in (root / "shards").iterdir()) == len(old.shards) + len(new.shards)
        assert {path.name for path in (root / "shards").iterdir()} == set(ids(cache))


def test_a_group_that_does_not_fit_under_the_cap_is_refused_without_changes(tmp_path: Path) -> None:
    root = tmp_path / "cache"
    world.make(root, cap=1_405_000)
    world.pull(str(root), shards=3, format="lmdb", ledger=None)
    with open_cache(root) as cache:
        before = ids(cache)
        most = sum(shard.payload for shard in cache.shards())
        assert cache.max_size - cache.usage().total < shard_bound(get_format("lmdb"), world.SCHEMA, 36, most)
        with pytest.raises(CapacityError):
            replace(root, [before])
        assert ids(cache) == before
        assert cache.usage().reserved == 0
    with open_cache(root) as cache, pytest.raises((CapTooSmall, CapacityError)):
        cache.convert(to="zarr", shard_size="1GB", wait=0)


def test_a_group_with_an_evicted_shard_is_not_converted(root: Path) -> None:
    with open_cache(root) as cache:
        before = ids(cache)
        cache.evict(cache.usage().total - 1)
        assert ids(cache) == before[1:]
        replace(root, [before[:3], before[3:]])
        assert [shard.samples for shard in cache.shards()] == [12, 12, 36]


# --- a lost catalog -------------------------------------------------------------------------------------------------


def lost(root: Path, copy: Path, *, without: Sequence[str] = ()) -> Cache:
    """Copy the cache, remove its catalog and some shards, and repair it."""
    shutil.copytree(root, copy, ignore=shutil.ignore_patterns("*.sqlite3*", "*.lock", *without))
    verify(copy, repair=True)
    return open_cache(copy)


@pytest.mark.parametrize("merging", [True, False])
@pytest.mark.parametrize("again", [False, True])
def test_a_rebuild_beside_old_shards_still_in_use_counts_no_sample_twice(
    root: Path, tmp_path: Path, merging: bool, again: bool
) -> None:
    """The records of new shards name the replaced shards, also after they were replaced themselves, so nothing is drawn
    again.
    """
    with open_cache(root) as cache:
        before = facts(cache)
        with cache.snapshot():
            replace(root, [ids(cache)] if merging else [[id] for id in ids(cache)], most=None if merging else 3_000)
            if again:
                replace(root, [[id] for id in ids(cache)], to="hdf5", most=5_000 if merging else None)
            new = ids(cache)
            assert sum(1 for _ in (root / "shards").iterdir()) > len(new)
            with lost(root, tmp_path / "copy") as rebuilt:
                assert facts(rebuilt) == before
                assert ids(rebuilt) == new
    world.pull(str(tmp_path / "copy"), shards=1, format="lmdb", ledger=None)
    with open_cache(tmp_path / "copy") as rebuilt:
        assert len(set(numbers(rebuilt))) == 84


@pytest.mark.parametrize("merging", [True, False])
def test_a_rebuild_counts_no_sample_without_a_source_twice(tmp_path: Path, merging: bool) -> None:
    """No draws show that an old shard and the new shards hold the same samples. The lineage in the new records does."""
    with open_cache(tmp_path / "cache", max_size="20MB") as cache:
        cache.declare("default", test_convert.SCHEMA)
        old = [test_convert.add(cache, test_convert.block(40, first), "lmdb") for first in (0, 40)]
        before = test_convert.samples(cache)
        with cache.snapshot():
            replace(cache.root, [old] if merging else [[id] for id in old], most=None if merging else 5_000)
            replace(cache.root, [[id] for id in ids(cache)], to="hdf5")
            with lost(cache.root, tmp_path / "copy") as rebuilt:
                assert ids(rebuilt) == ids(cache)
                assert test_convert.samples(rebuilt) == before


def test_a_rebuild_drops_uncommitted_new_shards_and_keeps_the_shard_they_were_split_from(
    root: Path, tmp_path: Path
) -> None:
    """The conversion was killed between the first ``shard.json`` and the commit, and then the catalog was lost."""
    with open_cache(root) as cache:
        before, old = facts(cache), ids(cache)
        with cache.snapshot():
            replace(root, [[old[2]]], most=3_000)
            parts = [id for id in ids(cache) if id not in old]
            assert len(parts) > 2
            with lost(root, tmp_path / "copy", without=parts[1:]) as rebuilt:
                assert facts(rebuilt) == before
                assert ids(rebuilt) == old
        with lost(root, tmp_path / "later", without=parts[1:2]) as rebuilt:
            assert parts[0] in ids(rebuilt), "one part was lost, and there is nothing to go back to"


def test_the_record_forgets_replaced_shards_after_their_files_are_deleted(root: Path) -> None:
    with open_cache(root) as cache:
        for most in (10**6, 3_000, 10**6, 3_000):
            cache.convert(to="lmdb", shard_size=most, workers=1)
        for shard in cache.shards():
            named = json.loads((shard.path / "shard.json").read_bytes())["ancestors"]
            assert len(named) == 1


@pytest.mark.parametrize("moment", ["_sizes", "commit_together"])
def test_a_group_whose_shard_is_evicted_meanwhile_is_skipped_and_the_next_is_converted(
    root: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    with open_cache(root) as cache:
        first, second, *others = before = ids(cache)
        wanted = numbers(cache, cache.shards()[1:])
        owner: Any = replacement._Swap if moment == "_sizes" else replacement
        goes_on = getattr(owner, moment)

        def evicting(*args: Any, **more: Any) -> Any:
            if first in ids(cache):
                with cache.catalog.write() as connection:
                    retire(connection, [first], reason="evict", policy="oldest")
                if moment == "_sizes":  # no process leases it yet
                    shutil.rmtree(cache.layout.shards / first)
            return goes_on(*args, **more)

        monkeypatch.setattr(owner, moment, evicting)
        replace(root, [[first], [second]], to="hdf5", most=100)

        left = ids(cache)
        assert not {first, second} & set(left)
        assert left[-len(others) :] == others
        assert {shard.format for shard in cache.shards() if shard.id not in before} == {"hdf5"}
        assert numbers(cache) == wanted
        assert cache.stats().reserved == 0
