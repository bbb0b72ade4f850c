"""The order of an epoch and the numbers on indices: pure laws."""

from __future__ import annotations

from itertools import chain

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cachetool.errors import UsageError
from cachetool.loaders.order import decode, encode, order, share


def indices(samples: int, **more: object) -> list[int]:
    return [int(i) for block in order(samples, **more) for i in block]  # type: ignore[arg-type]


@given(
    samples=st.integers(0, 3000),
    world_size=st.integers(1, 9),
    seed=st.integers(0, 2**40),
    epoch=st.integers(0, 1000),
    shuffle=st.booleans(),
)
def test_ranks_divide_the_samples_among_them(
    samples: int, world_size: int, seed: int, epoch: int, shuffle: bool
) -> None:
    """Without ``drop_last`` every sample exactly once; with it equal shares and fewer left out than there are ranks."""
    common = {"shuffle": shuffle, "seed": seed, "epoch": epoch, "world_size": world_size}
    whole = [indices(samples, rank=rank, drop_last=False, **common) for rank in range(world_size)]
    equal = [indices(samples, rank=rank, drop_last=True, **common) for rank in range(world_size)]

    assert sorted(chain.from_iterable(whole)) == list(range(samples))
    assert max(map(len, whole)) - min(map(len, whole)) <= 1
    assert {len(part) for part in equal} == {samples // world_size}
    assert len(set(chain.from_iterable(equal))) == samples // world_size * world_size
    for rank in range(world_size):
        assert len(whole[rank]) == share(samples, rank=rank, world_size=world_size, drop_last=False)
        assert len(equal[rank]) == share(samples, rank=rank, world_size=world_size)


def test_the_order_follows_from_seed_and_epoch() -> None:
    assert indices(1000, seed=1, epoch=2) == indices(1000, seed=1, epoch=2)
    assert len({tuple(indices(1000, seed=s, epoch=e)) for s in range(3) for e in range(3)}) == 9
    assert indices(5, shuffle=False, rank=1, world_size=2, drop_last=False) == [1, 3]


def test_a_long_order_comes_in_blocks_that_fit_memory() -> None:
    blocks = order(200_000, seed=3)
    first = next(blocks)

    assert len(first) == 65_536
    assert np.array_equal(np.sort(np.concatenate([first, *blocks])), np.arange(200_000))


@given(version=st.integers(1, 2**40), index=st.integers(0, 2**40 - 1))
def test_an_encoded_index_gives_back_its_version_and_is_never_a_plain_one(version: int, index: int) -> None:
    assert decode(encode(version, index)) == (version, index)
    assert encode(version, index) >= 2**40
    assert decode(index) == (0, index)


@pytest.mark.parametrize(("rank", "world_size"), [(-1, 2), (2, 2), (0, 0)])
def test_a_rank_outside_its_world_is_refused(rank: int, world_size: int) -> None:
    with pytest.raises(UsageError, match="ranks are 0 to world_size - 1"):
        share(10, rank=rank, world_size=world_size)
