"""Ranges of whole numbers, compared with sets and lists of the same numbers."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from cachetool.core import ranges as of
from cachetool.core.ranges import Ranges

_ANY = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 12)).map(lambda pair: (pair[0], sum(pair))))


@st.composite
def _sequences(draw: st.DrawFn) -> list[tuple[int, int]]:
    """Generate disjoint ranges in any order. Some touch each other, some are empty."""
    bounds = sorted(draw(st.sets(st.integers(0, 60))))
    kept = [pair for pair in pairwise(bounds) if draw(st.booleans())]
    empty = [(number, number) for number in draw(st.lists(st.integers(0, 60), max_size=3))]
    return draw(st.permutations(kept + empty))


def _numbers(ranges: object) -> list[int]:
    return [number for start, stop in ranges for number in range(start, stop)]  # type: ignore[attr-defined]


def _is_a_set(ranges: Ranges) -> bool:
    """Return True if these ranges are sorted, disjoint and not empty."""
    apart = all(stop < start for (_, stop), (start, _) in pairwise(ranges))
    return apart and all(type(range_) is tuple and range_[0] < range_[1] for range_ in ranges)


@given(_ANY, _ANY)
def test_union_and_difference_are_those_of_sets(ranges: list[tuple[int, int]], others: list[tuple[int, int]]) -> None:
    here, there = set(_numbers(ranges)), set(_numbers(others))

    for result, expected in (
        (of.union(ranges), here),
        (of.union(ranges + others), here | there),
        (of.difference(ranges, others), here - there),
    ):
        assert _numbers(result) == sorted(expected)
        assert _is_a_set(result)


@given(_ANY, st.integers(0, 60), st.integers(1, 12))
def test_ranges_overlap_a_range_with_a_common_number(ranges: list[tuple[int, int]], start: int, length: int) -> None:
    common = set(_numbers(ranges)) & set(range(start, start + length))

    assert of.overlaps(of.union(ranges), start, start + length) == bool(common)


@given(_sequences(), st.integers(0, 70), st.integers(0, 70))
def test_a_slice_of_ranges_is_the_slice_of_their_numbers(ranges: list[tuple[int, int]], first: int, last: int) -> None:
    assert _numbers(of.between(ranges, first, last)) == _numbers(ranges)[first:last]
    assert of.total(ranges) == len(_numbers(ranges))


@given(_sequences())
def test_joined_ranges_keep_their_numbers_in_order_and_merge_adjacent_ranges(
    ranges: list[tuple[int, int]],
) -> None:
    joined = of.joined(ranges)

    assert _numbers(joined) == _numbers(ranges)
    assert all(start < stop for start, stop in joined)
    assert all(stop != start for (_, stop), (start, _) in pairwise(joined))


@given(_sequences())
def test_the_positions_of_ranges_are_their_numbers_in_order(ranges: list[tuple[int, int]]) -> None:
    positions = of.positions(ranges)

    assert positions.dtype == np.int64
    assert positions.tolist() == _numbers(ranges)


@given(st.lists(st.booleans(), max_size=40), st.integers(0, 9))
def test_runs_are_the_ranges_of_set_flags(flags: list[bool], start: int) -> None:
    found = of.runs(start, np.array(flags, dtype=np.bool_))

    assert _numbers(found) == [start + number for number, flag in enumerate(flags) if flag]
    assert _is_a_set(found)


def test_ranges_are_read_back_from_json_pairs() -> None:
    assert of.pairs([[4, 9], [0, 4], [2, 2]]) == ((4, 9), (0, 4), (2, 2))
