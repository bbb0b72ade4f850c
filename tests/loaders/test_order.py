"""The order of an epoch, and the version numbers in indices."""

from __future__ import annotations

from itertools import chain

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from cachetool.core.errors import UsageError
from cachetool.loaders.order import EpochOrder, Shuffle, Steps, decode, encode, order, share


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
    """Without ``drop_last`` every sample exactly once; with it equal shares, and fewer samples left out than there are
    ranks.
    """
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


def test_a_long_order_is_computed_in_blocks_that_fit_memory() -> None:
    blocks = order(200_000, seed=3)
    first = next(blocks)

    assert len(first) == 65_536
    assert np.array_equal(np.sort(np.concatenate([first, *blocks])), np.arange(200_000))


@given(version=st.integers(1, 2**40), index=st.integers(0, 2**40 - 1))
def test_an_encoded_index_contains_its_version_and_never_equals_a_plain_index(version: int, index: int) -> None:
    assert decode(encode(version, index)) == (version, index)
    assert encode(version, index) >= 2**40
    assert decode(index) == (0, index)


@pytest.mark.parametrize(("rank", "world_size"), [(-1, 2), (2, 2), (0, 0)])
def test_a_rank_outside_the_world_size_is_refused(rank: int, world_size: int) -> None:
    with pytest.raises(UsageError, match="ranks are 0 to world_size - 1"):
        share(10, rank=rank, world_size=world_size)


@given(
    samples=st.integers(1, 3000),
    batch_size=st.integers(1, 70),
    world_size=st.integers(1, 9),
    drop_last=st.booleans(),
    taken=st.integers(0, 20),
    again=st.tuples(st.integers(1, 50), st.integers(1, 5)),
)
def test_steps_divide_an_epoch_evenly_and_resume_with_another_world_size(
    samples: int, batch_size: int, world_size: int, drop_last: bool, taken: int, again: tuple[int, int]
) -> None:
    """All ranks take the same number of steps, and batch sizes differ by at most one. Any number of ranks completes an
    interrupted epoch, and each position is read once.
    """

    def read(start: int, size: int, world: int, steps: int | None = None) -> list[range]:
        found = []
        for rank in range(world):
            cut = Steps(samples, size, rank, world, drop_last, start)
            first, last = cut.bounds(np.arange(cut.count if steps is None else steps, dtype=np.int64))
            found += [range(a, b) for a, b in zip(first.tolist(), last.tolist(), strict=True)]
        return found

    whole = read(0, batch_size, world_size)
    sizes = {len(batch) for batch in whole}
    assert max(sizes, default=batch_size) <= batch_size
    if drop_last:
        assert sizes <= {batch_size}
        assert samples - sum(map(len, whole)) < batch_size * world_size
    else:
        assert max(sizes) - min(sizes) <= 1
        assert sorted(chain.from_iterable(whole)) == list(range(samples))

    cut = Steps(samples, batch_size, 0, world_size, drop_last)
    taken = min(taken, cut.count)
    begun, position = read(0, batch_size, world_size, taken), cut.reached(taken)
    rest = read(position, *again)
    assert sorted(chain.from_iterable(begun)) == list(range(position))
    assert sorted(chain.from_iterable(rest)) == list(range(position, position + sum(map(len, rest))))
    if not drop_last:
        assert position + sum(map(len, rest)) == samples


@given(
    samples=st.integers(0, 20_000),
    seed=st.integers(0, 2**40),
    epoch=st.integers(0, 1000),
    shuffle=st.sampled_from(["full", "window", "no"]),
    nbytes=st.integers(0, 2**18),
)
def test_an_order_contains_every_sample_once(
    samples: int, seed: int, epoch: int, shuffle: Shuffle, nbytes: int
) -> None:
    order = EpochOrder(samples, shuffle=shuffle, seed=seed, epoch=epoch, nbytes=nbytes)
    positions = np.arange(samples, dtype=np.int64)
    found = order[positions]

    assert np.array_equal(np.sort(found), positions)
    assert np.array_equal(order[positions[::-3]], found[::-3])  # any positions, in any slice


@given(
    samples=st.integers(1, 20_000),
    epoch=st.integers(0, 1000),
    nbytes=st.integers(1, 2**18),
    cut=st.tuples(st.floats(0, 1), st.floats(0, 1)),
)
@example(samples=20_000, epoch=3, nbytes=2**14, cut=(0.3, 0.9))
def test_the_runs_of_a_window_contain_its_samples(
    samples: int, epoch: int, nbytes: int, cut: tuple[float, float]
) -> None:
    order = EpochOrder(samples, shuffle="window", epoch=epoch, nbytes=nbytes)
    start, stop = sorted(int(each * samples) for each in cut)
    windows = list(order.runs(start, stop))

    assert sum(count for count, _ in windows) == stop - start
    position = start
    for count, rows in windows:
        assert rows.shape[1] <= 128
        assert int(np.diff(rows, axis=1).max(initial=0)) <= max(1, order._run // 60)
        assert 0 <= int(rows.min()) <= int(rows.max()) < samples
        inside = np.zeros(samples, dtype=np.bool_)
        for row in rows.tolist():
            inside[row[0] : row[-1] + 1] = True
            assert row == sorted(row)
        assert inside[order[np.arange(position, position + count)]].all()
        assert inside.sum() <= order.window + 2 * 2**18 // nbytes + 2  # and few other samples
        position += count


def test_a_window_reads_neighbours_together_and_mixes_them() -> None:
    """64 neighbours of 4 KiB stay within one window, and inside the window two of them are adjacent only by chance."""
    found = EpochOrder(100_000, shuffle="window", seed=1, nbytes=4096)[np.arange(100_000)]
    windows = [set((found[at : at + 64 * 256] // 64).tolist()) for at in range(0, 100_000, 64 * 256)]

    assert all(len(a & b) <= 1 for at, a in enumerate(windows) for b in windows[at + 1 :])
    assert (np.abs(np.diff(found)) == 1).mean() < 0.01
    assert not np.array_equal(
        found, EpochOrder(100_000, shuffle="window", seed=1, epoch=1, nbytes=4096)[np.arange(100_000)]
    )
