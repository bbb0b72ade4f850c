"""The contract of a loader with trainers: lengths, ``iter()`` more than once, ranks at first use, epochs of fixed length,
and the one line about an epoch that a trainer cut."""

from __future__ import annotations

import gc
import json
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from cachetool.cache import CacheDir, open_cache
from cachetool.errors import UsageError
from cachetool.loaders import numpy as numpy_loader
from cachetool.loaders import torch as torch_loader
from cachetool.loaders import torch_device
from tests.loaders.numbered import leases, put
from tests.loaders.processes import until

Make = Callable[..., Any]
KINDS = {"numpy": numpy_loader.Loader, "torch": torch_loader.Loader}
OLD = "ended when its loader was iterated again"


@pytest.fixture(params=[(kind, workers) for kind in KINDS for workers in (0, 2)], ids=lambda each: f"{each[0]}-{each[1]}")
def make(request: pytest.FixtureRequest) -> Iterator[Make]:
    """Makes loaders of one kind, with so many workers, which are closed at the end."""
    kind, workers = request.param
    made = []

    def opened(cache: CacheDir, **options: Any) -> Any:
        made.append(KINDS[kind](cache, **{"batch_size": 4, "fields": ["number"], "workers": workers, **options}))
        return made[-1]

    yield opened
    for loader in made:
        loader.close()


def some(make: Make, cache: CacheDir, **options: Any) -> Any:
    """A loader for tests that need no feeder processes."""
    return make(cache, **options)


def numbers(batches: Any) -> list[int]:
    """The numbers of the samples of these batches, in order."""
    return [int(number) for batch in batches for number in batch["number"]]


def taken(batches: Iterator[Any], count: int) -> list[int]:
    """The numbers of the samples of the next ``count`` batches."""
    return numbers(next(batches) for _ in range(count))


def grow(cache: CacheDir) -> None:
    """Commit 20 more samples, behind those that are there."""
    there = sum(shard.samples for shard in cache.shards())
    put(cache, range(there, there + 20))


# -- len() -------------------------------------------------------------------------------------------------------------


def test_len_is_the_whole_epoch_before_in_the_middle_of_and_after_it(make: Make, cache: CacheDir) -> None:
    loader = make(cache)
    assert len(loader) == 15
    batches = iter(loader)
    assert len(loader) == 15
    taken(batches, 5)
    assert len(loader) == 15
    grow(cache)
    taken(batches, 9)
    assert len(loader) == 15, "of the epoch that is under way, although the cache grew"
    taken(batches, 1)
    assert next(batches, None) is None
    assert len(loader) == 20, "of the next epoch"
    assert len(numbers(loader)) == 80


def test_len_is_the_whole_epoch_before_and_after_its_rest_was_begun(make: Make, cache: CacheDir) -> None:
    loader = make(cache)
    before = taken(iter(loader), 6)
    state = json.loads(json.dumps(loader.state_dict()))
    grow(cache)

    again = make(cache)
    assert len(again) == 20
    again.load_state_dict(state)
    assert len(again) == 15
    batches = iter(again)
    assert len(again) == 15
    after = taken(batches, 1)
    assert len(again) == 15
    after += numbers(batches)
    assert sorted(before + after) == list(range(60))
    assert len(again) == 20
    assert sorted(numbers(again)) == list(range(80))


def test_len_counts_steps_with_those_before_the_epoch_was_resumed(make: Make, cache: CacheDir) -> None:
    loader = make(cache, steps=8)
    taken(iter(loader), 6)
    state = loader.state_dict()

    again = make(cache, steps=8)
    again.load_state_dict(state)

    assert len(again) == 8
    assert len(numbers(again)) == 8
    assert len(again) == 8


# -- iter() ------------------------------------------------------------------------------------------------------------


def test_iter_again_is_the_same_epoch_on_the_same_snapshot_although_the_cache_grew(make: Make, cache: CacheDir) -> None:
    loader, other = make(cache, seed=3), make(cache, seed=3)
    expected = numbers(other)

    for _ in range(3):
        batches = iter(loader)
        length = len(loader)
        grow(cache)
        assert length == len(loader) == 15

    assert numbers(batches) == expected
    assert loader.epoch == 1
    assert sorted(numbers(loader)) == list(range(120)), "the next epoch has all that came"


def test_an_older_iterator_raises_once_there_is_a_newer_one(make: Make, cache: CacheDir) -> None:
    loader = make(cache)
    first, second = iter(loader), iter(loader)
    with pytest.raises(UsageError, match=OLD):
        next(first)
    got = taken(second, 3)
    with pytest.raises(UsageError, match=OLD):
        next(first)
    got += numbers(second)
    assert sorted(got) == list(range(60))


def test_an_older_iterator_that_is_collected_takes_nothing_from_the_newer_one(make: Make, cache: CacheDir) -> None:
    loader = make(cache, hold=0.2)
    first, second = iter(loader), iter(loader)
    del first
    gc.collect()
    assert leases(cache)
    torch_free_wait(0.5)
    assert leases(cache), "the newer one keeps the snapshot"
    assert sorted(numbers(second)) == list(range(60))


def torch_free_wait(seconds: float) -> None:
    """Let feeders do what is due in so many seconds."""
    import time

    time.sleep(seconds)


def test_a_dropped_iterator_leaves_its_epoch_to_the_next_one(make: Make, cache: CacheDir) -> None:
    loader, other = make(cache, seed=3), make(cache, seed=3)
    expected = numbers(other)

    batches = iter(loader)
    del batches
    gc.collect()
    grow(cache)
    assert len(loader) == 15
    assert numbers(loader) == expected
    assert loader.epoch == 1


def test_a_dropped_iterator_gives_its_snapshot_up_after_hold_seconds(make: Make, cache: CacheDir) -> None:
    loader = make(cache, hold=0.0)
    batches = iter(loader)
    del batches
    gc.collect()
    until(lambda: not leases(cache))
    grow(cache)
    assert sorted(numbers(loader)) == list(range(80))
    assert loader.epoch == 1


def test_an_epoch_of_which_a_batch_was_taken_is_not_given_again(make: Make, cache: CacheDir) -> None:
    loader = make(cache, seed=3)
    first = taken(iter(loader), 1)
    second = taken(iter(loader), 1)
    assert loader.epoch == 1
    assert first != second


# -- set_epoch() and attributes ----------------------------------------------------------------------------------------


def test_set_epoch_chooses_the_order_as_epoch_does(make: Make, cache: CacheDir) -> None:
    loader, other = make(cache), make(cache)
    loader.set_epoch(7)
    other.epoch = 7
    order = numbers(loader)
    assert order == numbers(other)
    assert loader.epoch == other.epoch == 8
    loader.set_epoch(7)
    assert numbers(loader) == order


def test_set_epoch_before_every_epoch_changes_nothing(make: Make, cache: CacheDir) -> None:
    loader, other = make(cache), make(cache)
    for epoch in range(3):
        loader.set_epoch(epoch)
        assert numbers(loader) == numbers(other)


def test_set_epoch_of_the_epoch_that_was_begun_leaves_it_as_it_is(make: Make, cache: CacheDir) -> None:
    loader = make(cache)
    batches = iter(loader)
    loader.set_epoch(0)
    grow(cache)
    assert len(loader) == 15
    again = iter(loader)
    assert len(loader) == 15
    assert sorted(numbers(again)) == list(range(60))
    del batches


def test_set_epoch_of_another_number_begins_that_one(make: Make, cache: CacheDir) -> None:
    loader, other = make(cache), make(cache)
    other.epoch = 5
    batches = iter(loader)
    loader.set_epoch(5)
    assert numbers(loader) == numbers(other)
    with pytest.raises(UsageError, match=OLD):
        next(batches)


def test_set_epoch_is_ignored_right_behind_load_state_dict(make: Make, cache: CacheDir) -> None:
    loader = make(cache)
    before = taken(iter(loader), 6)

    again = make(cache)
    again.load_state_dict(loader.state_dict())
    again.set_epoch(4)
    assert again.epoch == 0
    assert sorted(before + numbers(again)) == list(range(60))
    again.set_epoch(4)
    assert again.epoch == 4
    with pytest.raises(UsageError, match="epoch"):
        again.set_epoch(-1)


def test_batch_size_and_drop_last_can_be_read_and_not_set(make: Make, cache: CacheDir) -> None:
    loader = make(cache, drop_last=True)
    assert (loader.batch_size, loader.drop_last) == (4, True)
    assert (loader.epochs_of(steps=2).batch_size, loader.epochs_of(steps=2).drop_last) == (4, True)
    assert make(cache).drop_last is False
    with pytest.raises(AttributeError):
        loader.batch_size = 8


def test_what_trainers_look_for_or_set_on_a_data_loader_is_not_there(make: Make, cache: CacheDir) -> None:
    """Lightning sets ``_iterator``; an object with ``dataset`` or ``sampler`` is taken for a DataLoader by all."""
    loader = make(cache)
    batches = iter(loader)
    got = taken(batches, 2)
    loader._iterator = None
    got += numbers(batches)
    assert sorted(got) == list(range(60))
    for name in ("dataset", "sampler", "batch_sampler", "num_workers", "collate_fn", "generator"):
        assert not hasattr(loader, name)
        assert not hasattr(loader.epochs_of(steps=3), name)


# -- ranks -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, int], None]:
    """Sets RANK and WORLD_SIZE."""
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.delenv("WORLD_SIZE", raising=False)

    def put_there(rank: int, world_size: int) -> None:
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setenv("WORLD_SIZE", str(world_size))

    return put_there


def test_rank_and_world_size_are_looked_up_at_first_use(
    make: Make, cache: CacheDir, place: Callable[[int, int], None]
) -> None:
    loaders = [make(cache, run="r") for _ in range(2)]
    got = []
    for rank, loader in enumerate(loaders):
        place(rank, 2)
        assert len(loader) == 8
        got.append(numbers(loader))
    assert sorted(got[0] + got[1]) == list(range(60))
    assert abs(len(got[0]) - len(got[1])) <= 4


def test_a_world_without_a_run_is_refused_at_first_use(
    make: Make, cache: CacheDir, place: Callable[[int, int], None]
) -> None:
    loader = make(cache)
    place(0, 2)
    for first in (iter, len):
        with pytest.raises(UsageError, match="run=NAME"):
            first(loader)
    place(0, 1)
    assert len(loader) == 15


def test_a_world_that_changed_divides_the_next_epoch(
    make: Make, cache: CacheDir, place: Callable[[int, int], None]
) -> None:
    loader = make(cache, run="r")
    assert len(numbers(loader)) == 60
    place(1, 2)
    assert len(loader) == 8
    assert len(numbers(loader)) == 30
    place(0, 1)
    assert sorted(numbers(loader)) == list(range(60))
    assert loader.epoch == 3


def test_an_epoch_that_was_begun_is_begun_anew_in_another_world(
    make: Make, cache: CacheDir, place: Callable[[int, int], None]
) -> None:
    loader = make(cache, run="r")
    batches = iter(loader)
    place(1, 2)
    assert len(numbers(loader)) == 30
    assert loader.epoch == 1
    with pytest.raises(UsageError, match=OLD):
        next(batches)


@pytest.mark.parametrize("used", ["unused", "counted", "begun", "in the middle"])
def test_forked_processes_look_their_rank_up_again(
    used: str, make: Make, cache: CacheDir, place: Callable[[int, int], None], tmp_path: Path
) -> None:
    """Lightning's ddp_fork forks the ranks of a loader that was made, and perhaps counted, before."""
    loader = make(cache, run="r")
    kept: Any = None
    if used == "counted":
        assert len(loader) == 15
    elif used != "unused":
        kept = iter(loader)
        mine = taken(kept, 3) if used == "in the middle" else []
    pids = []
    for rank in range(2):
        if (pid := os.fork()) == 0:
            try:  # nothing of pytest may run in the child
                os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2"}
                loader.epoch = 3
                got = {"len": len(loader), "got": numbers(loader)}
                (tmp_path / f"rank{rank}").write_text(json.dumps(got))
                loader.close()
            finally:
                os._exit(0)
        pids.append(pid)
    for pid in pids:
        os.waitpid(pid, 0)

    got = [json.loads((tmp_path / f"rank{rank}").read_text()) for rank in range(2)]
    assert [row["len"] for row in got] == [8, 8]
    assert sorted(got[0]["got"] + got[1]["got"]) == list(range(60))
    if used == "in the middle":
        assert sorted(mine + numbers(kept)) == list(range(60)), "the parent goes on"
    assert len(loader) == 15


# -- the line about a cut epoch ----------------------------------------------------------------------------------------


def cut(loader: Any, cache: CacheDir, *, count: int = 0) -> None:
    """Two epochs of a trainer that keeps the first length, or takes ``count`` batches; the cache grows in between."""
    kept = len(loader)
    for epoch in range(2):
        batches = iter(loader)
        for _ in range(kept if epoch == 0 or not count else count):
            next(batches)
        if epoch == 0:
            grow(cache)
    del batches


LINE = "cachetool: epoch 1 was left after 15 of 20 batches, the length of epoch 0: "


def said(capfd: pytest.CaptureFixture[str]) -> list[str]:
    """The lines of cachetool on stderr."""
    return [line for line in capfd.readouterr().err.splitlines() if line.startswith("cachetool: ")]


@pytest.mark.parametrize("when", ["iter", "close", "collected"])
def test_a_cut_epoch_is_said_once(when: str, make: Make, cache: CacheDir, capfd: pytest.CaptureFixture[str]) -> None:
    loader = make(cache)
    cut(loader, cache)
    assert said(capfd) == []
    if when == "iter":
        iter(loader)
        iter(loader)
    elif when == "close":
        loader.close()
        loader.close()
    else:
        make.__closure__[1 if callable(make.__closure__[0].cell_contents) else 0]  # noqa: B018
    assert len(said(capfd)) == (0 if when == "collected" else 1)


