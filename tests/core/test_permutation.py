"""The seeded order, which is computed and never stored."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cachetool.core.errors import UsageError
from cachetool.core.permutation import MAX_N, Permutation


@given(st.integers(0, 3000), st.integers(0, 2**63), st.integers(0, 1000))
def test_every_item_occurs_exactly_once(n: int, seed: int, turn: int) -> None:
    order = Permutation(n, seed=seed, pass_number=turn)[np.arange(n)]

    assert np.array_equal(np.arange(n), np.sort(order))


@pytest.mark.parametrize("n", [0, 1, 2, 3, 4, 5, 15, 16, 17, 255, 256, 257, 65535, 65536, 65537])
def test_every_item_occurs_exactly_once_for_sizes_near_powers_of_two(n: int) -> None:
    assert np.array_equal(np.arange(n), np.sort(Permutation(n, seed=3)[np.arange(n)]))


@given(st.integers(1, MAX_N), st.data())
def test_large_orders_have_distinct_items_inside_their_range(n: int, data: st.DataObject) -> None:
    positions = np.array(sorted(data.draw(st.sets(st.integers(0, n - 1), max_size=50))), dtype=np.int64)
    order = Permutation(n, seed=1)[positions]

    assert len(positions) == len(set(order.tolist()))
    assert all(0 <= thing < n for thing in order.tolist())


def test_the_order_is_the_same_in_every_release() -> None:
    """A cache records draws as positions. Another order would repeat and lose samples."""
    assert Permutation(1000, seed=7, pass_number=2)[np.arange(8)].tolist() == [478, 766, 294, 653, 84, 843, 371, 820]
    ends = Permutation(2**40, seed=7)[np.array([0, 1, 2**40 - 1])]
    assert ends.tolist() == [768937372490, 165397899685, 1086172114301]


@given(st.integers(1, 20_000), st.integers(0, 1000))
def test_many_positions_computed_by_tables_equal_few_computed_directly(n: int, seed: int) -> None:
    order, few = Permutation(n, seed=seed), np.arange(0, n, max(1, n // 7))
    computed = order[few]

    assert np.array_equal(order[np.arange(n)][few], computed)
    assert np.array_equal(order[few], computed)


def test_the_order_does_not_depend_on_how_positions_are_requested() -> None:
    order = Permutation(1000, seed=5)
    whole = order[np.arange(1000)]

    assert whole[17] == order[17]
    assert isinstance(order[17], int)
    assert np.array_equal(whole.reshape(10, 100), order[np.arange(1000).reshape(10, 100)])
    assert np.array_equal(whole[::-3], order[np.arange(1000)[::-3]])
    assert np.array_equal(whole[:4], order[[0, 1, 2, 3]])


@pytest.mark.parametrize("other", [{"seed": 1}, {"pass_number": 1}, {"seed": 2**70}])
def test_another_seed_or_pass_has_another_order(other: dict[str, int]) -> None:
    at = np.arange(2000)
    same = (Permutation(2000, seed=0, pass_number=0)[at] == Permutation(2000, **other)[at]).sum()

    assert same < 20  # two random orders agree in one place on average


def test_items_are_spread_over_the_range() -> None:
    """The first tenth of an order holds about a tenth of each tenth of the range, and no run of neighbours."""
    n = 100_000
    first = Permutation(n, seed=11)[np.arange(n // 10)]
    counts = np.histogram(first, bins=10, range=(0, n))[0]

    assert (np.abs(counts - 1000) < 150).all()  # five standard deviations
    assert (np.abs(np.diff(first)) == 1).mean() < 0.001


def test_positions_outside_the_order_are_refused() -> None:
    order = Permutation(10)
    for position in (10, -1):
        with pytest.raises(IndexError, match=r"outside 0 \.\. 9"):
            order[position]
    with pytest.raises(IndexError):
        Permutation(0)[0]
    assert len(order) == 10


@pytest.mark.parametrize("n", [-1, MAX_N + 1])
def test_sizes_outside_the_range_are_refused(n: int) -> None:
    with pytest.raises(UsageError, match="cannot order"):
        Permutation(n)
