"""Division of parts among caches: rules for any caches, and for any history of nodes that are lost and come back."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

import cachetool
from cachetool.cache import CacheDir, draws
from cachetool.cache.own_parts import assign, held
from cachetool.cluster.deal import Held, deal
from cachetool.cluster.pull import reach_of
from cachetool.core.permutation import part_size
from tests.test_parts import SOURCE, UNITS, commit, new_source

CUT = 12
PARTS = st.dictionaries(st.integers(0, CUT - 1), st.integers(0, 5), max_size=CUT)


@st.composite
def caches(draw: st.DrawFn) -> dict[str, Held]:
    """Generate one to five caches. Any part may be in more than one cache."""
    found = {}
    for name in draw(st.lists(st.sampled_from("abcde"), min_size=1, max_size=5, unique=True)):
        parts = draw(PARTS)
        idle = frozenset(part for part in parts if not parts[part] and draw(st.booleans()))
        found[name] = Held(draw(st.integers(1, 4)), parts, idle, draw(st.booleans()))
    return found


@given(caches())
def test_each_part_is_assigned_to_one_cache_and_stays_where_most_of_it_is(held: dict[str, Held]) -> None:
    dealt = deal(CUT, held, most=CUT)
    assert sorted(part for parts in dealt.values() for part in parts) == [*range(CUT)]
    best = {part: max(cache.parts.get(part, -1) for cache in held.values()) for part in range(CUT)}
    alone = {
        name
        for part, samples in best.items()
        if len(found := [name for name in held if held[name].parts.get(part) == samples]) == 1
        for name in found
    }
    if alone == held.keys() and not any(cache.is_full for cache in held.values()):  # no cache is new
        for name, parts in dealt.items():
            assert all(best[part] in (-1, held[name].parts.get(part)) for part in parts)


@given(caches())
def test_a_cache_keeps_the_parts_that_it_has(held: dict[str, Held]) -> None:
    dealt = deal(CUT, held, most=CUT)
    again = {name: Held(held[name].cap, dict.fromkeys(parts, 1)) for name, parts in dealt.items() if parts}
    assert deal(CUT, again, most=CUT) == {name: dealt[name] for name in again}


@given(st.dictionaries(st.sampled_from("abcdef"), st.integers(1, 3), min_size=1), st.integers(1, 40))
def test_new_caches_get_parts_in_proportion_to_their_caps(caps: dict[str, int], cut: int) -> None:
    dealt = deal(cut, {name: Held(cap) for name, cap in caps.items()}, most=cut)
    assert sum(map(len, dealt.values())) == cut
    for name, parts in dealt.items():
        for other in dealt:
            assert len(parts) / caps[name] <= (len(dealt[other]) + 1) / caps[other]


def test_a_joining_cache_gets_the_parts_with_fewest_samples_until_all_caches_have_equally_many() -> None:
    parts = {part: part for part in range(6)}
    dealt = deal(12, {"a": Held(1, parts), "b": Held(1, {part + 6: 9 for part in parts}), "c": Held(1)}, most=12)
    assert {name: len(parts) for name, parts in dealt.items()} == {"a": 4, "b": 4, "c": 4}
    assert {0, 1} <= dealt["c"]


def test_no_cache_gets_more_parts_than_it_can_draw() -> None:
    dealt = deal(12, {"a": Held(1, {0: 1, 1: 1}), "b": Held(9)}, most=5)
    assert {name: len(parts) for name, parts in dealt.items()} == {"a": 5, "b": 5}


@given(st.integers(1, 9), st.integers(0, 200), st.integers(1, 250), st.data())
def test_the_assigned_parts_have_the_requested_number_of_draws(
    cut: int, units: int, draws: int, data: st.DataObject
) -> None:
    done = {part: data.draw(st.integers(0, part_size(units, part, cut))) for part in range(cut)}
    upto = reach_of(cut, done, units, draws)
    more = sum(max(0, part_size(upto, part, cut) - done[part]) for part in range(cut))
    assert more == min(draws, units - sum(done.values()))


# -- histories, in real catalogs ---------------------------------------------------------------------------------------

EVENTS = st.sampled_from(["lose", "back", "new", "drive", "drive", "killed", "draw", "draw"])


class Nodes:
    """Caches of living and lost nodes, and a driver that looks, divides and assigns in steps."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.living: dict[str, CacheDir] = {}
        self.away: dict[str, CacheDir] = {}
        self.count = 0
        self.add()

    def add(self) -> None:
        """Add a node whose cache knows the source and has no parts."""
        name = f"n{self.count}"
        self.count += 1
        cache = cachetool.open_cache(self.folder / name, max_size="8MB")
        new_source(cache, self.folder / f"listing-{name}", CUT, [])
        assign(cache, SOURCE, CUT, {}, (), repart=True, beside=True)
        self.living[name] = cache

    def held(self) -> dict[str, Held]:
        """Return the parts of each cache as the driver sees them."""
        found = {}
        for name, cache in self.living.items():
            with cache.catalog.read() as connection:
                row = draws.source_row(connection, SOURCE)
                assert row is not None
                parts = {part: samples for part, (samples, _) in held(connection, row).items()}
            found[name] = Held(1, parts)
        return found

    def drive(self) -> Iterator[None]:
        """Run a driver that may be killed between any two changes."""
        before = self.held()
        dealt = deal(CUT, before, most=CUT)
        for fewer in (True, False):
            for name, cache in self.living.items():
                parts = before[name].parts.keys() & dealt[name] if fewer else dealt[name]
                sizes = {part: part_size(UNITS, part, CUT) for part in parts}
                assign(cache, SOURCE, CUT, sizes, (), repart=True, beside=True)
                yield

    def draw(self, at: int) -> None:
        """Let one node claim and draw from its own parts."""
        cache = [*self.living.values()][at % len(self.living)]
        with cache.catalog.write() as connection:
            cache.holder.register(connection)
            job, _ = draws.open_job(connection, SOURCE, holder=cache.holder.id, wanted=None, seed=None)
            claim = draws.claim(connection, job, holder=cache.holder.id, most=3)
        if claim is not None:
            commit(cache, job, claim)
        with cache.catalog.write() as connection:
            draws.close_job(connection, job)

    def numbers(self) -> list[int]:
        """Return the home numbers of all samples of the living nodes."""
        found: list[int] = []
        for cache in self.living.values():
            for row in cache.catalog.rows("SELECT part, draws FROM shards WHERE state = 'ready'"):
                for start, stop in json.loads(row["draws"]):
                    found += [row["part"] + CUT * position for position in range(start, stop)]
        return sorted(found)


@settings(max_examples=12, deadline=None)
@given(events=st.lists(st.tuples(EVENTS, st.integers(0, 9)), max_size=14))
def test_after_any_history_each_part_is_on_one_living_node_and_no_sample_exists_twice(
    events: list[tuple[str, int]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    nodes = Nodes(tmp_path_factory.mktemp("nodes"))
    for what, at in events:
        if what == "lose" and len(nodes.living) > 1:
            name = sorted(nodes.living)[at % len(nodes.living)]
            nodes.away[name] = nodes.living.pop(name)
        elif what == "back" and nodes.away:
            name = sorted(nodes.away)[at % len(nodes.away)]
            nodes.living[name] = nodes.away.pop(name)
        elif what == "new" and nodes.count < 5:
            nodes.add()
        elif what == "drive":
            [*nodes.drive()]
        elif what == "killed":
            for _, _ in zip(range(at), nodes.drive(), strict=False):
                pass
        elif what == "draw":
            nodes.draw(at)
    [*nodes.drive()]
    owners = sorted(part for seen in nodes.held().values() for part in seen.parts)
    assert owners == [*range(CUT)]
    for _ in range(UNITS):
        for at in range(len(nodes.living)):
            nodes.draw(at)
        if len(nodes.numbers()) == UNITS:
            break
    assert nodes.numbers() == [*range(UNITS)]
    for cache in [*nodes.living.values(), *nodes.away.values()]:
        cache.close()


def test_a_part_that_two_nodes_drew_stays_on_the_node_with_more_of_it(tmp_path: Path) -> None:
    nodes = Nodes(tmp_path)
    [*nodes.drive()]
    nodes.add()
    first, second = nodes.living.values()
    every: dict[str, Any] = {"cut": CUT, "segments": (), "repart": True, "beside": True}
    assign(second, SOURCE, sizes={part: part_size(UNITS, part, CUT) for part in range(CUT)}, **every)
    for _ in range(3):
        nodes.draw(1)
    [*nodes.drive()]
    own = [{row["part"] for row in cache.catalog.rows("SELECT part FROM parts")} for cache in (first, second)]
    assert {0, 1, 2} <= own[1]
    assert own[0] == {*range(CUT)} - own[1]
    assert len(own[0]) == len(own[1])
    for cache in (first, second):
        cache.close()
