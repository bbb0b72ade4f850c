"""Parts of a source: several caches divide its order by arithmetic, without asking each other."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import cachetool
from cachetool.cache import CacheDir, Origin, Room, SourceRow, draws
from cachetool.cache.draws import ClaimGone, Part, source_row
from cachetool.cache.layout import Layout
from cachetool.cache.own_parts import assign, is_same_share
from cachetool.cache.rebuild import rebuild
from cachetool.cache.stats import take_over
from cachetool.check.own_files import contradiction
from cachetool.core.errors import UsageError
from cachetool.core.names import Id
from cachetool.core.permutation import Permutation, SegmentedOrder, part_size
from cachetool.formats import get_format
from cachetool.pull.claims import Claims
from cachetool.pull.options import PullOptions
from cachetool.pull.prepare import source_id
from cachetool.pull.shards import Drawing, FirstShard, WorkerJob
from cachetool.pull.step_times import StepTimes
from cachetool.sources.order import PartOrder
from cachetool.sources.registry import open_source
from tests.cache.conftest import SCHEMA, put_shard
from tests.commands import run_command
from tests.faults.test_pull_kills import keys
from tests.faults.world import Quiet
from tests.pull.test_background import until

REPOSITORY = Path(__file__).parents[1]


@dataclass(frozen=True)
class Grown:
    """A source that has grown: the sizes of its units, and the number of units before each growth."""

    sizes: tuple[int, ...]
    ends: tuple[int, ...]

    def order(self, *, grown: int | None = None, **arguments: Any) -> PartOrder:
        """Return the order after ``grown`` growths; ``segments`` are numbers of growths."""
        ends = self.ends[:grown]
        units = len(self.sizes) if grown is None or grown >= len(self.ends) else self.ends[grown]
        sizes = np.array(self.sizes[:units], dtype=np.int64)
        places = [int(sizes[:end].sum()) for end in ends]
        segments = [places[number] for number in arguments.pop("segments", ()) if number < len(places)]
        if arguments.get("pass_number", 0) == 0:
            segments = places
        return PartOrder(sizes, segments=segments, home=places, **arguments)


@st.composite
def sources(draw: st.DrawFn) -> Grown:
    alone = draw(st.booleans())
    sizes = draw(st.lists(st.just(1) if alone else st.integers(1, 7), min_size=1, max_size=60))
    ends = draw(st.sets(st.integers(1, max(1, len(sizes) - 1)), max_size=3))
    return Grown(tuple(sizes), tuple(sorted(end for end in ends if end < len(sizes))))


def every(order: PartOrder) -> list[int]:
    """Return all draws in order."""
    draws: list[int] = order[np.arange(len(order))].tolist()
    return draws


ARGUMENTS = {"source": sources(), "seed": st.integers(0, 2**40), "cut": st.integers(1, 20)}


@given(**ARGUMENTS, pass_number=st.integers(0, 3), sequential=st.booleans())
def test_parts_are_disjoint_and_together_make_up_the_source_in_every_pass(
    source: Grown, seed: int, cut: int, pass_number: int, sequential: bool
) -> None:
    count = len(source.ends)
    of_part = [
        every(source.order(seed=seed, cut=cut, part=part, pass_number=pass_number, sequential=sequential))
        for part in range(cut)
    ]
    assert sorted(draw for draws in of_part for draw in draws) == list(range(sum(source.sizes)))
    for grown in range(count + 1):
        lengths = [len(source.order(seed=seed, cut=cut, part=part, grown=grown)) for part in range(cut)]
        assert sum(lengths) == len(source.order(seed=seed, grown=grown))


@given(**ARGUMENTS, upto=st.integers(0, 500), sequential=st.booleans())
def test_the_first_draws_of_all_parts_are_the_first_draws_of_one_machine(
    source: Grown, seed: int, cut: int, upto: int, sequential: bool
) -> None:
    one = every(source.order(seed=seed, sequential=sequential))
    first: list[int] = []
    for part in range(cut):
        order = source.order(seed=seed, cut=cut, part=part, sequential=sequential)
        first += every(order)[: order.limit(upto)]
    assert sorted(first) == sorted(one[:upto])


@given(**ARGUMENTS)
def test_pass_0_of_a_part_has_its_units_in_the_order_of_one_machine(source: Grown, seed: int, cut: int) -> None:
    place = {draw: at for at, draw in enumerate(every(source.order(seed=seed)))}
    for part in range(cut):
        places = [place[draw] for draw in every(source.order(seed=seed, cut=cut, part=part))]
        assert places == sorted(places)


@given(**ARGUMENTS, pass_number=st.integers(0, 3))
def test_a_unit_always_stays_in_its_part(source: Grown, seed: int, cut: int, pass_number: int) -> None:
    for part in range(cut):
        first = every(source.order(seed=seed, cut=cut, part=part))
        later = every(source.order(seed=seed, cut=cut, part=part, pass_number=pass_number))
        assert sorted(first) == sorted(later)


@given(**ARGUMENTS, pass_number=st.integers(0, 3), began=st.integers(0, 3))
def test_growth_of_a_source_moves_no_position(source: Grown, seed: int, cut: int, pass_number: int, began: int) -> None:
    """The positions of a part in a pass that began after so many growths."""
    began = min(began, len(source.ends))
    during = range(began, len(source.ends))
    for part in range(cut):
        before: list[int] = []
        for grown in range(began, len(source.ends) + 1):
            now = every(
                source.order(
                    grown=grown, seed=seed, cut=cut, part=part, pass_number=pass_number, segments=during
                )
            )  # fmt: skip
            assert now[: len(before)] == before
            before = now


@given(**ARGUMENTS, pass_number=st.integers(0, 3), data=st.data())
def test_positions_can_be_requested_in_any_way_and_runs_end_with_their_units(
    source: Grown, seed: int, cut: int, pass_number: int, data: st.DataObject
) -> None:
    unit_of = np.repeat(np.arange(len(source.sizes)), source.sizes)
    order = source.order(seed=seed, cut=cut, part=cut - 1, pass_number=pass_number)
    draws = np.array(every(order), dtype=np.int64)
    if not len(draws):
        return
    at = np.array(data.draw(st.lists(st.integers(0, len(draws) - 1))), dtype=np.int64)
    assert np.array_equal(order[at], draws[at])
    with pytest.raises(IndexError):
        order[np.array([len(draws)])]
    start = data.draw(st.integers(0, len(draws) - 1))
    stop = data.draw(st.integers(start + 1, len(draws)))
    end = order.unit_end(start, stop)
    assert start < end <= len(draws)
    if end < len(draws):
        assert unit_of[draws[end - 1]] != unit_of[draws[end]]


@given(units=st.integers(0, 300), seed=st.integers(0, 2**40), pass_number=st.integers(0, 3))
def test_a_source_in_one_part_is_drawn_in_the_order_of_earlier_releases(
    units: int, seed: int, pass_number: int
) -> None:
    at = np.arange(units)
    order = PartOrder(units, seed=seed, pass_number=pass_number, home=[units // 2] if units > 1 else [])
    assert np.array_equal(order[at], Permutation(units, seed=seed, pass_number=pass_number)[at])
    if units > 1:
        grown = SegmentedOrder(units, seed=seed, pass_number=pass_number, segments=[units // 2])
        order = PartOrder(units, seed=seed, pass_number=pass_number, segments=[units // 2])
        assert np.array_equal(order[at], grown[at])


def test_the_order_of_a_part_is_the_same_in_every_release() -> None:
    """A cache records draws as positions. Another order would repeat and lose samples."""
    sizes = np.array([4, 4, 3, 1, 5])
    assert every(PartOrder(sizes, seed=7)) == ONE
    assert every(PartOrder(sizes, seed=7, pass_number=2)) == ONE_LATER
    assert every(PartOrder(sizes, seed=7, pass_number=2, part=1, cut=2)) == PART_LATER
    assert every(PartOrder(40, seed=7, part=3, cut=4)) == PART
    assert every(PartOrder(40, seed=7, pass_number=1, part=3, cut=4)) == PART_SECOND


ONE = [6, 5, 7, 4, 0, 1, 3, 2, 11, 9, 8, 10, 15, 16, 13, 14, 12]
ONE_LATER = [11, 3, 0, 1, 2, 10, 8, 9, 13, 12, 14, 15, 16, 7, 6, 4, 5]
PART_LATER = [3, 0, 1, 2, 10, 8, 9]
PART = [37, 12, 20, 17, 24, 21, 6, 10, 18, 35]
PART_SECOND = [21, 20, 37, 24, 35, 10, 12, 17, 6, 18]


@given(count=st.integers(0, 300), cut=st.integers(1, 40))
def test_the_size_of_a_part_is_that_of_its_numbers(count: int, cut: int) -> None:
    for part in range(cut):
        assert part_size(count, part, cut) == len(range(part, count, cut))


# -- in the catalog ----------------------------------------------------------------------------------------------------

SOURCE = Id("77" * 8)
UNITS = 60


def new_source(cache: CacheDir, folder: Path, cut: int, parts: Iterable[int]) -> None:
    """Create a source whose units are one sample each. The cache draws these parts of it."""
    cache.declare("default", SCHEMA)
    folder.mkdir()
    (folder / "listing.json").write_text("{}")
    own = tuple(Part(part, 0, part_size(UNITS, part, cut)) for part in parts)
    row = SourceRow(SOURCE, "/nowhere", {}, "i", "default", UNITS, UNITS, 0, 0, 0, cut=cut, parts=own)
    cache.add_source(row, folder, new=True)


def redeal(cache: CacheDir, parts: Iterable[int], cut: int = 4) -> None:
    """Make the cache draw only these parts from now on."""
    assign(cache, SOURCE, cut, {part: part_size(UNITS, part, cut) for part in parts}, (), repart=True, beside=True)


def begin(cache: CacheDir, **more: Any) -> str:
    """Begin a new job."""
    with cache.catalog.write() as connection:
        cache.holder.register(connection)
        return draws.open_job(connection, SOURCE, holder=cache.holder.id, wanted=None, seed=None, **more)[0]


def claimed(cache: CacheDir, job: str, most: int = 4) -> draws.Claim | None:
    """Take a new claim."""
    with cache.catalog.write() as connection:
        return draws.claim(
            connection, job, holder=cache.holder.id, most=most, limit=lambda part, upto: part_size(upto, part, 4)
        )  # fmt: skip


def commit(cache: CacheDir, job: str, claim: draws.Claim) -> str:
    """Commit a shard of a claim."""
    origin = Origin(SOURCE, "/nowhere", claim.pass_number, ((claim.start, claim.stop),), claim.part)
    size = claim.stop - claim.start
    return put_shard(
        cache, 1000, samples=size, job=job, origin=origin, room=Room(wait=0),
        close=lambda connection: draws.finish(connection, job, claim, claim.stop, samples=size, skipped=0),
    )  # fmt: skip


def state(cache: CacheDir) -> tuple[Any, ...]:
    """Return the state that a rebuild must restore."""
    row = cache.source(SOURCE)
    assert row is not None
    shards = cache.catalog.rows("SELECT part, pass_number, draws FROM shards WHERE state = 'ready'")
    claims = cache.catalog.rows("SELECT part, pass_number, start, stop FROM claims")
    return row.cut, row.pass_number, row.parts, sorted(map(tuple, shards)), sorted(map(tuple, claims))


@settings(max_examples=8)
@given(
    steps=st.lists(
        st.tuples(st.sampled_from(["take", "release", "draw", "draw", "leave", "pass", "recut"]), st.integers(0, 3)),
        max_size=14,
    )
)
def test_a_rebuild_keeps_parts_and_their_shards_after_any_changes(
    steps: list[tuple[str, int]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("p")
    with cachetool.open_cache(folder / "cache", max_size="8MB") as cache:
        new_source(cache, folder / "listing", 4, [1])
        job, left = begin(cache), []
        for what, part in steps:
            row = cache.source(SOURCE)
            assert row is not None
            own = {part.number for part in row.parts}
            if what == "take" and part < row.cut:
                redeal(cache, own | {part}, row.cut)
            elif what == "release":
                redeal(cache, own - {part}, row.cut)
            elif what == "recut":
                redeal(cache, [0], 5 - part)
            elif what == "pass":
                with cache.catalog.write() as connection:
                    draws.begin_next_pass(connection, SOURCE)
            elif (claim := claimed(cache, job, most=9)) is not None:
                if what == "draw":
                    commit(cache, job, claim)
                else:
                    left.append(claim)
            assert contradiction(cache.catalog, cache.layout) is None, (what, part, own)
        with cache.catalog.write() as connection:
            draws.give_back(connection, cache.holder.id, job)
        before = state(cache)
    (folder / "cache" / "catalog.sqlite3").unlink()
    rebuild(Layout(folder / "cache"))
    with cachetool.open_cache(folder / "cache") as cache:
        cut, pass_number, parts, shards, claims = state(cache)
        assert (cut, {part.number for part in parts}) == (before[0], {part.number for part in before[2]})
        # The records contain neither a pass without draws nor draws claimed since the last record.
        if pass_number == before[1]:
            assert shards == before[3]
            for now, then in zip(parts, before[2], strict=True):
                open_ = sum(stop - start for number, turn, start, stop in claims if number == now.number)
                open_before = sum(stop - start for number, turn, start, stop in before[4] if number == then.number)
                assert now.frontier - open_ == then.frontier - open_before
        assert contradiction(cache.catalog, cache.layout) is None


def test_workers_claim_from_their_least_drawn_part(tmp_path: Path) -> None:
    with cachetool.open_cache(tmp_path / "cache", max_size="8MB") as cache:
        new_source(cache, tmp_path / "listing", 4, [1, 3])
        job = begin(cache)
        claims = [claimed(cache, job) for _ in range(5)]
        assert [(c.part, c.start, c.stop) for c in claims if c] == [
            (1, 0, 4), (3, 0, 4), (1, 4, 8), (3, 4, 8), (1, 8, 12),
        ]  # fmt: skip


def test_a_requested_position_limits_each_part(tmp_path: Path) -> None:
    with cachetool.open_cache(tmp_path / "cache", max_size="8MB") as cache:
        new_source(cache, tmp_path / "listing", 4, [1, 2])
        job = begin(cache, upto=10)  # 0 1 2 3 0 1 2 3 0 1
        first = [claimed(cache, job, most=9) for _ in range(3)]
        assert [(c.part, c.start, c.stop) for c in first if c] == [(1, 0, 3), (2, 0, 2)]
        other = begin(cache, upto=6)  # at the same time: no draw is left for it
        assert claimed(cache, other) is None
        with cache.catalog.write() as connection:
            draws.give_back(connection, cache.holder.id, job)
        shorter = [claimed(cache, other, most=9) for _ in range(3)]
        assert [(c.part, c.start, c.stop) for c in shorter if c] == [(1, 0, 2), (2, 0, 1)]
        longer = begin(cache, upto=12)
        rest = [claimed(cache, longer, most=9) for _ in range(5)]
        assert [(c.part, c.start, c.stop) for c in rest if c] == [(2, 1, 2), (1, 2, 3), (2, 2, 3)]


def test_a_claim_of_a_released_part_commits_nothing_even_after_the_part_returned(tmp_path: Path) -> None:
    """Another worker may have claimed the positions by then."""
    with cachetool.open_cache(tmp_path / "cache", max_size="8MB") as cache:
        new_source(cache, tmp_path / "listing", 4, [1])
        job = begin(cache)
        old = claimed(cache, job)
        assert old is not None
        redeal(cache, [])
        assert claimed(cache, job) is None
        redeal(cache, [1])
        new = claimed(cache, job)
        assert new is not None
        assert (new.part, new.start, new.stop) == (old.part, old.start, old.stop)
        with pytest.raises(ClaimGone):
            commit(cache, job, old)
        commit(cache, job, new)
        assert [tuple(row) for row in cache.catalog.rows("SELECT state, samples FROM shards")] == [("ready", 4)]


def test_a_released_part_is_removed_with_its_shards_while_a_reader_keeps_them(tmp_path: Path) -> None:
    with cachetool.open_cache(tmp_path / "cache", max_size="8MB") as cache:
        new_source(cache, tmp_path / "listing", 4, [1, 2])
        job = begin(cache)
        for _ in range(4):
            claim = claimed(cache, job)
            assert claim is not None
            commit(cache, job, claim)
        with cache.snapshot() as snapshot:
            redeal(cache, [1])
            assert len(snapshot.shards) == 4
            assert all(shard.path.exists() for shard in snapshot.shards)
            assert {row["part"] for row in cache.catalog.rows("SELECT part FROM shards WHERE state = 'ready'")} == {1}
            assert contradiction(cache.catalog, cache.layout) is None
        assert cache.catalog.rows("SELECT 1 FROM shards WHERE part = 2") == []
        (row,) = cache.stats().evictions
        assert (row["reason"], row["samples"]) == ("moved", 8)


def test_a_rebuild_omits_remaining_shards_of_a_released_part(tmp_path: Path) -> None:
    root, aside = tmp_path / "cache", tmp_path / "aside"
    with cachetool.open_cache(root, max_size="8MB") as cache:
        new_source(cache, tmp_path / "listing", 4, [1, 2])
        job = begin(cache)
        shards = {}
        for _ in range(2):
            claim = claimed(cache, job)
            assert claim is not None
            shards[claim.part] = commit(cache, job, claim)
        shutil.copytree(root / "shards" / shards[2], aside)
        redeal(cache, [1])
    (root / "catalog.sqlite3").unlink()
    shutil.move(aside, root / "shards" / shards[2])
    assert rebuild(Layout(root)).deleted == (shards[2],)
    assert os.listdir(root / "shards") == [shards[1]]
    with cachetool.open_cache(root) as cache:
        row = cache.source(SOURCE)
        assert row is not None
        assert row.parts == (Part(1, 4, 15),)


def test_the_next_pass_begins_when_all_parts_of_the_cache_are_drawn(tmp_path: Path) -> None:
    with cachetool.open_cache(tmp_path / "cache", max_size="8MB") as cache:
        new_source(cache, tmp_path / "listing", 4, [1, 2])
        job = begin(cache)
        for part in (1, 2):
            with cache.catalog.write() as connection:
                assert not draws.begin_next_pass(connection, SOURCE)
            claim = claimed(cache, job, most=99)
            assert claim is not None
            assert (claim.part, claim.stop) == (part, 15)
            commit(cache, job, claim)
        with cache.catalog.write() as connection:
            assert draws.begin_next_pass(connection, SOURCE)
            row = source_row(connection, SOURCE)
        assert row is not None
        assert (row.pass_number, row.parts) == (1, (Part(1, 0, 15), Part(2, 0, 15)))


# -- pulls -------------------------------------------------------------------------------------------------------------


def write(folder: Path, numbers: Iterable[int]) -> None:
    """Write samples named by their numbers."""
    folder.mkdir(exist_ok=True)
    for number in numbers:
        np.save(folder / f"{number:04d}.npy", np.full(30, number, "f4"))


def pulled(root: Path, source: Path, **options: Any) -> cachetool.pull.run.PullResult:
    """Return the result of a pull into its own cache."""
    with cachetool.open_cache(root, max_size="20MB") as cache:
        return cache.pull(source, **{"workers": 1, "shard_size": 2000, **options})


def keys_in(*roots: Path) -> Counter[str]:
    """Return how often each key is in these caches."""
    count: Counter[str] = Counter()
    for root in roots:
        with cachetool.open_cache(root) as cache:
            count.update(keys(cache))
            assert contradiction(cache.catalog, cache.layout) is None
    return count


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Create a hundred samples."""
    made = tmp_path_factory.mktemp("source") / "samples"
    write(made, range(100))
    return made


@pytest.mark.parametrize(("parts", "nodes"), [(None, 3), (8, 2)])
def test_caches_of_all_parts_together_have_the_draws_of_one_machine(
    folder: Path, tmp_path: Path, parts: int | None, nodes: int
) -> None:
    pulled(tmp_path / "one", folder, samples=41, seed=5)
    one = keys_in(tmp_path / "one")
    roots = [tmp_path / str(number) for number in range(nodes)]
    for number, root in enumerate(roots):
        arguments = {"samples": 41, "seed": 5, "part": f"{number}/{nodes}", "parts": parts}
        result = pulled(root, folder, **arguments)
        assert (result.cut, result.reason) == (parts or nodes, "done")
        assert result.parts == tuple(range(number, parts or nodes, nodes))
        assert pulled(root, folder, **arguments).samples == 0, "the same command adds nothing"
    assert keys_in(*roots) == one
    for root in roots:
        result = pulled(root, folder, all=True)  # the cache knows its parts
        assert (result.pass_complete, result.cut) == (True, parts or nodes)
    assert keys_in(*roots) == Counter(f"{number:04d}" for number in range(100))


def test_rows_that_are_fetched_together_belong_to_the_same_part(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.create_dataset("x", data=np.arange(210).reshape(70, 3), chunks=(4, 3), compression="gzip")
    pulled(tmp_path / "one", tmp_path / "a.h5", samples=23, seed=2)
    roots = [tmp_path / str(number) for number in range(3)]
    for number, root in enumerate(roots):
        pulled(root, tmp_path / "a.h5", samples=23, seed=2, part=f"{number}/3")
    assert keys_in(*roots) == keys_in(tmp_path / "one")
    for number, root in enumerate(roots):
        pulled(root, tmp_path / "a.h5", part=f"{number}/3")
    chunks = [{int(key.rpartition("#")[2]) // 4 for key in keys_in(root)} for root in roots]
    assert sum(map(len, chunks)) == len(set().union(*chunks)) == 18
    assert keys_in(*roots).total() == 70


def test_a_further_pass_draws_the_same_parts(folder: Path, tmp_path: Path) -> None:
    pulled(tmp_path / "cache", folder, part="1/4", all=True)
    before = keys_in(tmp_path / "cache")
    with cachetool.open_cache(tmp_path / "cache") as cache:
        cache.evict(cache.usage().total - 1)
        assert len(keys(cache)) < before.total()
        with cachetool.BackgroundPull(cache, folder) as pull:
            until(lambda: cache.stats().samples == before.total())
            until(lambda: pull.progress().phase == "all is in the cache")
            assert pull.progress().pass_number > 1
            assert pull.progress().units == before.total() == 25
        assert Counter(keys(cache)) == before


def test_parts_that_a_pull_added_meanwhile_are_not_lost(folder: Path, tmp_path: Path) -> None:
    """A change that was planned before is refused when it would remove them."""
    pulled(tmp_path / "cache", folder, samples=40, part="0/2")
    with CacheDir(tmp_path / "cache") as cache:
        [source] = cache.catalog.rows("SELECT id FROM sources")
        before = keys_in(tmp_path / "cache")
        with pytest.raises(UsageError, match="would lose"):
            assign(cache, source["id"], 2, {1: 50}, (), repart=False)
        assert [part["part"] for part in cache.catalog.rows("SELECT part FROM parts")] == [0]
        assert keys_in(tmp_path / "cache") == before


def test_an_interrupted_change_of_parts_changes_nothing(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pulled(tmp_path / "cache", folder, samples=40, part="0/2")

    def cut_off(*_: object) -> None:
        raise KeyboardInterrupt

    with CacheDir(tmp_path / "cache") as cache:
        [source] = cache.catalog.rows("SELECT id FROM sources")
        before = keys_in(tmp_path / "cache")
        monkeypatch.setattr("cachetool.cache.own_parts._take", cut_off)
        with pytest.raises(KeyboardInterrupt):
            assign(cache, source["id"], 2, {1: 50}, (), repart=True)
        assert [part["part"] for part in cache.catalog.rows("SELECT part FROM parts")] == [0]
    assert keys_in(tmp_path / "cache") == before


def test_parts_are_not_taken_from_a_pull_that_draws_them(folder: Path, tmp_path: Path) -> None:
    pulled(tmp_path / "cache", folder, samples=2, part="0/2")
    with CacheDir(tmp_path / "cache") as cache:
        [source] = cache.catalog.rows("SELECT id FROM sources")
        with cache.catalog.write() as connection:
            cache.holder.register(connection)
            connection.execute("DELETE FROM shards")
            draws.open_job(
                connection, source["id"], holder=cache.holder.id, wanted=1, seed=None, room=Room(), next_pass=False
            )
        for repart in (False, True):
            with pytest.raises(UsageError, match="another pull is drawing other parts"):
                assign(cache, source["id"], 2, {1: 50}, (), repart=repart)
        assign(cache, source["id"], 2, {1: 50}, (), repart=True, beside=True)
        assert [part["part"] for part in cache.catalog.rows("SELECT part FROM parts")] == [1]


def test_a_source_that_its_pull_withdrew_meanwhile_has_no_parts(tmp_path: Path) -> None:
    with cachetool.open_cache(tmp_path / "cache", max_size="8MB") as cache:
        new_source(cache, tmp_path / "listing", 4, [1])
        with pytest.raises(UsageError, match="another pull of this source failed"):
            assign(cache, "88" * 8, 2, {1: 50}, (), repart=False)


def test_the_same_units_in_other_part_numbers_continue_with_the_caches_numbers(folder: Path, tmp_path: Path) -> None:
    pulled(tmp_path / "cache", folder, samples=40, part="1/2")
    before = keys_in(tmp_path / "cache")
    for asked in ({"part": "1,3/4"}, {"part": "1/2", "parts": 64}):
        result = pulled(tmp_path / "cache", folder, samples=40, **asked)
        assert (result.samples, result.parts, result.cut) == (0, (1,), 2)
    assert keys_in(tmp_path / "cache") == before
    result = pulled(tmp_path / "cache", folder, samples=40, part="1,3/4", repart=True)
    assert (result.released, result.samples, result.cut) == (20, 20, 4)
    assert keys_in(tmp_path / "cache") == before


@given(
    shares=st.lists(
        st.integers(1, 12).flatmap(lambda cut: st.tuples(st.just(cut), st.sets(st.integers(0, cut - 1)))),
        min_size=2,
        max_size=2,
    )
)
def test_two_sets_of_parts_are_equal_if_they_have_the_same_units(shares: list[tuple[int, set[int]]]) -> None:
    first, second = ({unit for unit in range(12 * 11) if unit % cut in parts} for cut, parts in shares)
    assert is_same_share(*shares) == (first == second)


def test_a_background_pull_of_other_parts_than_a_running_pull_is_refused(folder: Path, tmp_path: Path) -> None:
    with (
        cachetool.open_cache(tmp_path / "cache", max_size="20MB") as cache,
        cachetool.BackgroundPull(cache, folder, part="0/2") as first,
    ):
        until(lambda: first.progress().phase == "all is in the cache")
        with pytest.raises(UsageError, match="another pull is drawing other parts"):
            cachetool.BackgroundPull(cache, folder, part="1/2")
        with cachetool.BackgroundPull(cache, folder, part="0,2/4") as same:
            assert same.error is None


def test_a_waiting_background_pull_ends_if_the_running_pull_draws_other_parts(
    folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    options = PullOptions(part="1/2", follow=True)
    with cachetool.open_cache(tmp_path / "cache", max_size="20MB") as cache:
        with cache.catalog.write() as connection:  # a pull that is listing the source
            take_over(connection, source_id(str(folder), options), url="", dataset="default", holder=cache.holder)
        with cachetool.BackgroundPull(cache, folder, part="1/2") as pull:
            assert pull.error is None
            cache.pull(folder, samples=10, part="0/2")
            assert "another pull is drawing other parts" in until(lambda: pull.error)
            assert "another pull is drawing other parts" in capfd.readouterr().err
            with pytest.raises(UsageError):
                pull.check()


def test_a_change_of_parts_that_loses_samples_is_refused_without_repart(folder: Path, tmp_path: Path) -> None:
    root = tmp_path / "cache"
    pulled(root, folder, samples=40, part="0,1/4")
    before = keys_in(root)
    for asked in ({"part": "0/4"}, {"part": "0,1/8"}, {"part": "0,1/4", "parts": 6}, {"part": "0/1"}):
        with pytest.raises(UsageError, match=r"(?s)would lose \d+ samples? .*--repart"):
            pulled(root, folder, **asked)
        assert keys_in(root) == before
    result = pulled(root, folder, samples=40, part="0/4", repart=True)
    assert (result.samples, result.parts, result.released) == (0, (0,), 10)
    half = keys_in(root)
    assert len(half) == 10
    assert half < before
    pulled(root, folder, samples=40, part="0,1/4")  # the part again, from its start
    assert keys_in(root) == before
    said = run_command(
        "pull", str(folder), "--part", "0/1", "--samples", "40", "--repart", "--cache", str(root), folder=tmp_path
    ).stdout
    assert "\nremoved 20 samples of other parts\n" in said
    pulled(tmp_path / "one", folder, samples=40)
    assert keys_in(root) == keys_in(tmp_path / "one")


def test_the_first_of_several_nodes_lists_for_all(tmp_path: Path) -> None:
    source, shared = tmp_path / "source", tmp_path / "shared"
    shared.mkdir()
    write(source, range(40))
    options = {"listing": shared, "all": True}
    first = pulled(tmp_path / "0", source, part="0/2", **options)
    write(source, range(40, 60))
    second = pulled(tmp_path / "1", source, part="1/2", **options)
    assert first.listing == second.listing
    assert keys_in(tmp_path / "0", tmp_path / "1") == Counter(f"{number:04d}" for number in range(40))
    (source / "0003.npy").unlink()
    again = [pulled(tmp_path / str(number), source, part=f"{number}/2", refresh=True, **options) for number in (1, 0)]
    assert again[0].listing == again[1].listing != first.listing
    assert [(result.added, result.vanished) for result in again] == [(20, 1), (20, 1)]
    assert keys_in(tmp_path / "0", tmp_path / "1") == Counter(f"{number:04d}" for number in range(60))
    late = pulled(tmp_path / "late", source, part="0/2", samples=50, listing=shared)
    assert late.listing == again[0].listing
    assert keys_in(tmp_path / "late") < keys_in(tmp_path / "0")
    pulled(tmp_path / "own", source, part="0/2", samples=2)
    with pytest.raises(UsageError, match="--listing"):
        pulled(tmp_path / "own", source, part="0/2", samples=2, listing=shared)


def test_a_pull_continues_when_one_of_its_parts_is_released(folder: Path, tmp_path: Path) -> None:
    """The pull's worker drops the unfinished samples of that part, and takes a new claim."""
    pulled(tmp_path / "cache", folder, part="0,1/4", samples=1)
    with cachetool.open_cache(tmp_path / "cache") as cache:
        (source,) = cache.catalog.rows("SELECT id FROM sources")
        row = cache.source(source["id"])
        assert row is not None
        with cache.catalog.write() as connection:
            cache.holder.register(connection)
            job, _ = draws.open_job(connection, row.id, holder=cache.holder.id, wanted=None, seed=None)
        claims = Claims(
            cache, lambda row: open_source(str(folder), cache.listing(row.id), units=row.units), job=job,
            source=row.id, most=6,
        )  # fmt: skip
        plan = WorkerJob(
            job,
            row.id,
            "default",
            get_format("lmdb"),
            cache.schema(),
            2000,
            Room(),
            False,
            1,
            FirstShard(None),
            StepTimes(),
        )
        claim = claims.take()
        assert isinstance(claim, draws.Claim)
        drawing = Drawing(cache, claims, plan, claim, Quiet())
        coming: list[draws.Claim | None] = []

        def ahead() -> None:
            rest = {part.number: part.size for part in row.parts if part.number != claim.part}
            assign(cache, row.id, row.cut, rest, (), repart=True, beside=True)
            coming.append(claims.ahead())

        assert drawing.run(ahead) is None
        assert coming[0] is not None
        assert coming[0].part == 1 - claim.part
        assert {row["part"] for row in cache.catalog.rows("SELECT part FROM shards")} <= {1 - claim.part}
        claims.give_back()
    pulled(tmp_path / "cache", folder)
    assert len(keys_in(tmp_path / "cache")) == 25


@pytest.mark.soak  # tests/faults/test_pull_kills.py kills pulls by default
def test_eight_randomly_killed_nodes_together_have_the_draws_of_one_machine(digits: Path, tmp_path: Path) -> None:
    """SIGKILL hits whole trees of processes. The same command restarts a node."""
    nodes, samples, rng = 8, 700, random.Random(8)
    roots, shared = [tmp_path / str(number) for number in range(nodes)], tmp_path / "shared"
    shared.mkdir()

    def start(number: int) -> subprocess.Popen[bytes]:
        command = [
            *(sys.executable, "-m", "cachetool", "pull", str(digits), "--cache", str(roots[number])),
            *("--part", f"{number}/{nodes}", "--samples", str(samples), "--seed", "3", "--listing", str(shared)),
            *("--workers", "1", "--shard-size", "4kB", "--max-size", "20MB", "--max-rate", "20kB", "--quiet"),
        ]
        return subprocess.Popen(
            command, env={**os.environ, "PYTHONPATH": str(REPOSITORY)}, start_new_session=True,
            stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
        )  # fmt: skip

    def shards(number: int) -> int:
        return len(list((roots[number] / "shards").glob("*/shard.json")))

    running, kills = {number: start(number) for number in range(nodes)}, 0
    while kills < 12 and (alive := [number for number in running if running[number].poll() is None]):
        number = rng.choice(alive)
        process, before = running[number], shards(number)
        while process.poll() is None and shards(number) == before:
            time.sleep(0.01)
        time.sleep(0.1 * rng.random())  # the random moment of a kill is the fault itself
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
            kills, running[number] = kills + 1, start(number)
    for process in running.values():
        assert (process.wait(), process.communicate()[1]) == (0, b"")
    assert kills > 6
    pulled(tmp_path / "one", digits, samples=samples, seed=3, shard_size=64_000)
    together = keys_in(*roots)
    assert max(together.values()) == 1, "a sample on two nodes"
    assert together == keys_in(tmp_path / "one")


# -- options -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("part", "parts", "share"),
    [
        ("0/1", None, (1, (0,))),
        ("2/3", None, (3, (2,))),
        ("0,2/3", 7, (7, (0, 2, 3, 5, 6))),
        ("1/4", 64, (64, tuple(range(1, 64, 4)))),
        (None, None, None),
    ],
)
def test_a_node_has_the_parts_congruent_to_its_number_modulo_the_nodes(
    part: str | None, parts: int | None, share: object
) -> None:
    assert PullOptions(part=part, parts=parts).node_parts == share


@pytest.mark.parametrize(
    "options",
    [
        {"part": "3"}, {"part": "3/3"}, {"part": "-1/3"}, {"part": "0/0"}, {"part": "0,/2"}, {"part": "x/2"},
        {"part": "0/4", "parts": 3}, {"part": "0/1", "parts": 129}, {"part": "0/1", "parts": 10**9}, {"parts": 4},
        {"part": 3}, {"listing": ""},
    ],
)  # fmt: skip
def test_impossible_parts_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        PullOptions(**options)


def test_options_that_need_a_source_in_one_part_are_refused_for_more(folder: Path, tmp_path: Path) -> None:
    pulled(tmp_path / "cache", folder, samples=4, part="0/2")
    for options in ({"refresh": True}, {"start_early": True}, {"listing": tmp_path / "none"}):
        with pytest.raises(UsageError):
            pulled(tmp_path / "cache", folder, **options)
    with pytest.raises(UsageError):
        pulled(tmp_path / "new", folder, start_early=True, part="0/2")
    assert not (tmp_path / "new").exists()


_SLURM = {"SLURM_NODEID": "2", "SLURM_NNODES": "5"}
_TORCHRUN = {"GROUP_RANK": "1", "WORLD_SIZE": "12", "LOCAL_WORLD_SIZE": "4"}


@pytest.fixture
def no_job(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*_SLURM, *_TORCHRUN):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("environment", "part"), [(_SLURM, "2/5"), (_TORCHRUN, "1/3"), ({**_SLURM, **_TORCHRUN}, "2/5")]
)
def test_a_background_pull_reads_its_part_from_the_jobs_environment(
    environment: dict[str, str], part: str, folder: Path, tmp_path: Path, no_job: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    number, nodes = map(int, part.split("/"))
    with (
        cachetool.open_cache(tmp_path / "cache", max_size="20MB") as cache,
        cachetool.BackgroundPull(cache, folder, part="auto", shard_size=2000) as pull,
        cachetool.BackgroundPull(cache, folder, part="auto", shard_size=2000),  # of another process of this node
    ):
        until(lambda: pull.progress().phase == "all is in the cache")
        (source,) = cache.stats().sources
        assert (source["parts"], source["cut"], source["coverage"]) == ([number], nodes, 1.0)
        assert len(keys(cache)) == part_size(100, number, nodes)


@pytest.mark.parametrize(
    ("environment", "missing"),
    [
        ({}, "SLURM_NODEID and SLURM_NNODES"),
        ({"SLURM_NODEID": "0"}, "SLURM_NNODES, or GROUP_RANK"),
        ({"SLURM_NODEID": "0", "SLURM_NNODES": "many"}, "SLURM_NNODES='many'"),
        ({**_TORCHRUN, "LOCAL_WORLD_SIZE": "5"}, "LOCAL_WORLD_SIZE='5'"),
        ({"SLURM_NODEID": "2", "SLURM_NNODES": "2"}, "SLURM_NODEID='2'"),
        ({**_TORCHRUN, "LOCAL_WORLD_SIZE": "0"}, "LOCAL_WORLD_SIZE='0'"),
    ],
)
def test_a_job_without_the_number_of_the_node_is_refused(
    environment: dict[str, str], missing: str, tmp_path: Path, no_job: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UsageError, match=rf"{missing}.*give --part I/N"):
        cachetool.BackgroundPull(tmp_path / "cache", tmp_path, part="auto")
    assert not (tmp_path / "cache").exists()


def test_a_pull_and_stats_report_the_parts_and_the_listing(folder: Path, tmp_path: Path) -> None:
    cache = ("--cache", str(tmp_path / "cache"))
    said = run_command(
        "pull", str(folder), "--part", "1/4", "--parts", "8", "--samples", "9", *cache, folder=tmp_path
    ).stdout
    assert "parts 1,5 of 8, listing " in said
    digest = said.partition("listing ")[2].split()[0]
    again = run_command("pull", str(folder), "--samples", "9", *cache, folder=tmp_path).stdout
    assert "nothing was left to draw: with --part, --samples counts for all nodes" in again
    assert f"parts 1,5 of 8, listing {digest}" in run_command("stats", *cache, folder=tmp_path).stdout
