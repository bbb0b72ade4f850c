"""The contract of a loader with trainers: lengths, repeated ``iter()``, ranks found at first use, epochs of fixed
length, and the one warning about an epoch that a trainer cut short.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import tempfile
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from cachetool.cache import CacheDir, open_cache
from cachetool.core.errors import UsageError
from cachetool.loaders import numpy as numpy_loader
from cachetool.loaders import torch as torch_loader
from cachetool.loaders import torch_device
from cachetool.loaders.fixed_epochs import require_one_epoch
from tests.loaders.numbered import KEYED, leases, put
from tests.loaders.processes import until

Make = Callable[..., Any]
KINDS = {"numpy": numpy_loader.Loader, "torch": torch_loader.Loader}
OLD = "ended because its loader was iterated again"


FIRST = [("numpy", 0), ("torch", 2)]
"""The default combinations; the long runs have the others."""


@pytest.fixture(
    params=[
        pytest.param((kind, workers), id=f"{kind}-{workers}", marks=[pytest.mark.soak] * ((kind, workers) not in FIRST))
        for kind in KINDS
        for workers in (0, 2)
    ]
)
def make(request: pytest.FixtureRequest) -> Iterator[Make]:
    """Return a function that creates loaders of one kind with some workers and closes them at the end."""
    kind, workers = request.param
    made: weakref.WeakSet[Any] = weakref.WeakSet()

    def opened(cache: CacheDir, **options: Any) -> Any:
        loader = KINDS[kind](cache, **{"batch_size": 4, "fields": ["number"], "workers": workers, **options})
        made.add(loader)
        return loader

    yield opened
    for loader in list(made):
        loader.close()


def numbers(batches: Any) -> list[int]:
    """Return the numbers of the samples of these batches, in order."""
    return [int(number) for batch in batches for number in batch["number"]]


def taken(batches: Iterator[Any], count: int) -> list[int]:
    """Return the numbers of the samples of the next ``count`` batches."""
    return numbers(next(batches) for _ in range(count))


def grow(cache: CacheDir) -> None:
    """Commit 20 more samples."""
    there = sum(shard.samples for shard in cache.shards())
    put(cache, range(there, there + 20))


# -- len() -------------------------------------------------------------------------------------------------------------


def test_len_is_that_of_the_whole_epoch_before_during_and_after_it(make: Make, cache: CacheDir) -> None:
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


def test_len_of_a_resumed_epoch_is_that_of_the_whole_epoch(make: Make, cache: CacheDir) -> None:
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


def test_len_of_a_resumed_epoch_includes_the_steps_before_the_resume(make: Make, cache: CacheDir) -> None:
    loader = make(cache, steps=8)
    taken(iter(loader), 6)
    state = loader.state_dict()

    again = make(cache, steps=8)
    again.load_state_dict(state)

    assert len(again) == 8
    assert len(numbers(again)) == 8
    assert len(again) == 8


# -- iter() ------------------------------------------------------------------------------------------------------------


def test_iter_again_repeats_the_epoch_on_the_same_snapshot_although_the_cache_grew(make: Make, cache: CacheDir) -> None:
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


def test_an_older_iterator_raises_after_a_newer_one_was_created(make: Make, cache: CacheDir) -> None:
    loader = make(cache)
    first, second = iter(loader), iter(loader)
    with pytest.raises(UsageError, match=OLD):
        next(first)
    got = taken(second, 3)
    with pytest.raises(UsageError, match=OLD):
        next(first)
    got += numbers(second)
    assert sorted(got) == list(range(60))


def test_garbage_collection_of_an_older_iterator_does_not_affect_the_newer_one(make: Make, cache: CacheDir) -> None:
    loader = make(cache, hold=0.2)
    first, second = iter(loader), iter(loader)
    del first
    gc.collect()
    assert leases(cache)
    time.sleep(0.7)
    assert leases(cache), "the newer one keeps the snapshot"
    assert sorted(numbers(second)) == list(range(60))


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


def test_a_dropped_iterator_releases_its_snapshot_after_hold_seconds(make: Make, cache: CacheDir) -> None:
    loader = make(cache, hold=0.0)
    batches = iter(loader)
    del batches
    gc.collect()
    until(lambda: not leases(cache))
    grow(cache)
    assert sorted(numbers(loader)) == list(range(80))
    assert loader.epoch == 1


def test_an_epoch_with_a_delivered_batch_is_not_repeated(make: Make, cache: CacheDir) -> None:
    loader = make(cache, seed=3)
    first = taken(iter(loader), 1)
    second = taken(iter(loader), 1)
    assert loader.epoch == 1
    assert first != second


# -- set_epoch() and attributes ----------------------------------------------------------------------------------------


def test_set_epoch_chooses_the_order_like_the_epoch_attribute(make: Make, cache: CacheDir) -> None:
    loader, other = make(cache), make(cache)
    loader.set_epoch(7)
    other.epoch = 7
    order = numbers(loader)
    assert order == numbers(other)
    assert loader.epoch == other.epoch == 8
    loader.set_epoch(7)
    assert numbers(loader) == order


def test_set_epoch_before_every_epoch_is_allowed_and_changes_nothing(make: Make, cache: CacheDir) -> None:
    loader, other = make(cache), make(cache)
    for epoch in range(3):
        loader.set_epoch(epoch)
        assert numbers(loader) == numbers(other)


def test_set_epoch_with_the_current_epoch_changes_nothing(make: Make, cache: CacheDir) -> None:
    loader = make(cache)
    batches = iter(loader)
    loader.set_epoch(0)
    grow(cache)
    assert len(loader) == 15
    again = iter(loader)
    assert len(loader) == 15
    assert sorted(numbers(again)) == list(range(60))
    del batches


def test_set_epoch_with_another_number_begins_that_epoch(make: Make, cache: CacheDir) -> None:
    loader, other = make(cache), make(cache)
    other.epoch = 5
    batches = iter(loader)
    loader.set_epoch(5)
    assert numbers(loader) == numbers(other)
    with pytest.raises(UsageError, match=OLD):
        next(batches)


def test_set_epoch_is_ignored_directly_after_load_state_dict(make: Make, cache: CacheDir) -> None:
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


def test_batch_size_and_drop_last_are_read_only(make: Make, cache: CacheDir) -> None:
    loader = make(cache, drop_last=True)
    assert (loader.batch_size, loader.drop_last) == (4, True)
    assert (loader.epochs_of(steps=2).batch_size, loader.epochs_of(steps=2).drop_last) == (4, True)
    assert make(cache).drop_last is False
    with pytest.raises(AttributeError):
        loader.batch_size = 8


def test_a_loader_lacks_the_attributes_by_which_trainers_recognise_a_data_loader(make: Make, cache: CacheDir) -> None:
    """Lightning sets ``_iterator``. Every trainer takes an object with ``dataset`` or ``sampler`` for a DataLoader."""
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
    """Return a function that sets RANK and WORLD_SIZE."""
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


def test_a_world_size_without_a_run_is_refused_at_first_use(
    make: Make, cache: CacheDir, place: Callable[[int, int], None]
) -> None:
    loader = make(cache)
    place(0, 2)
    for first in (iter, len):
        with pytest.raises(UsageError, match="run=NAME"):
            first(loader)
    place(0, 1)
    assert len(loader) == 15


def test_a_changed_world_size_divides_the_next_epoch(
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


def test_a_begun_epoch_starts_again_with_another_world_size(
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
    """Lightning's ddp_fork forks the ranks after the loader was created, and perhaps after its length was asked."""
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
            try:  # no code of pytest may run in the child
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
    """Train two epochs like a trainer that keeps the first length, or takes ``count`` batches. The cache grows in
    between.
    """
    kept = len(loader)
    for epoch in range(2):
        batches = iter(loader)
        for _ in range(kept if epoch == 0 or not count else count):
            next(batches)
        if epoch == 0:
            grow(cache)
            loader.refresh()
    del batches


LINE = "cachetool: epoch 1 ended after 15 of 20 batches, "


def said(capfd: pytest.CaptureFixture[str]) -> list[str]:
    """Return cachetool's lines on stderr."""
    return [line for line in capfd.readouterr().err.splitlines() if line.startswith("cachetool: ")]


@pytest.mark.parametrize("when", ["iterated", "closed", "collected"])
def test_a_cut_epoch_is_reported_once(
    when: str, make: Make, cache: CacheDir, capfd: pytest.CaptureFixture[str]
) -> None:
    loader = make(cache)
    cut(loader, cache)
    assert said(capfd) == []
    if when == "iterated":
        iter(loader)
    elif when == "closed":
        loader.close()
    else:
        del loader
        gc.collect()
    assert [line[: len(LINE)] for line in said(capfd)] == [LINE]


def test_several_cut_epochs_are_reported_once(make: Make, cache: CacheDir, capfd: pytest.CaptureFixture[str]) -> None:
    loader = make(cache)
    cut(loader, cache)
    for _ in range(3):
        taken(iter(loader), 15)
        grow(cache)
        loader.refresh()
    loader.close()
    assert [line[: len(LINE)] for line in said(capfd)] == [LINE]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_cut_epoch_is_reported_when_the_process_ends_without_close(
    workers: int, cache: CacheDir, script: Any
) -> None:
    process = script(
        """
        import sys
        from cachetool.cache import open_cache
        from cachetool.loaders.numpy import Loader
        from tests.loaders.numbered import put

        cache = open_cache(sys.argv[1], create=False)
        loader = Loader(sys.argv[1], batch_size=4, fields=["number"], workers=int(sys.argv[2]))
        kept = len(loader)
        for epoch in range(2):
            for step, batch in enumerate(loader, 1):
                if step == kept:
                    break
            if epoch == 0:
                put(cache, range(60, 80))
                loader.refresh()
        """,
        cache.root,
        workers,
    )
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    assert [line[: len(LINE)] for line in errors.splitlines()] == [LINE]


def test_a_break_before_the_first_length_is_not_reported_as_a_cut(
    make: Make, cache: CacheDir, capfd: pytest.CaptureFixture[str]
) -> None:
    loader = make(cache)
    cut(loader, cache, count=14)
    loader.close()
    assert said(capfd) == []


def test_epochs_read_to_their_own_length_are_not_reported_as_cut(
    make: Make, cache: CacheDir, capfd: pytest.CaptureFixture[str]
) -> None:
    loader = make(cache)
    for epoch in range(3):
        batches = iter(loader)
        assert len(taken(batches, len(loader))) == 60 + 20 * epoch  # never asks for one batch more, like trainers
        grow(cache)
        loader.refresh()
    del batches
    loader.close()
    assert said(capfd) == []


def test_epochs_of_steps_are_not_reported_as_cut(
    make: Make, cache: CacheDir, capfd: pytest.CaptureFixture[str]
) -> None:
    loader = make(cache, steps=8)
    for _ in range(3):
        assert len(taken(iter(loader), len(loader))) == 32
        grow(cache)
    loader.close()
    assert said(capfd) == []


def test_epochs_of_fixed_length_are_not_reported_as_cut(
    make: Make, cache: CacheDir, capfd: pytest.CaptureFixture[str]
) -> None:
    loader = make(cache)
    view = loader.epochs_of(steps=len(loader))
    for _ in range(4):
        for _ in range(len(view)):
            pass
        numbers(view)
        grow(cache)
    loader.close()
    assert said(capfd) == []


def test_only_rank_0_reports_a_cut_epoch(
    make: Make, cache: CacheDir, place: Callable[[int, int], None], capfd: pytest.CaptureFixture[str]
) -> None:
    for rank in (1, 0):
        place(rank, 2)
        loader = make(cache, run=f"r{rank}")
        kept = len(loader)
        for _ in range(2):
            taken(iter(loader), kept)
            grow(cache)
            loader.refresh()
        loader.close()
        lines = said(capfd)
        assert len(lines) == (rank == 0)


# -- epochs of fixed length --------------------------------------------------------------------------------------------


def test_epochs_of_a_fixed_length_continue_through_growing_passes(make: Make, cache: CacheDir) -> None:
    loader = make(cache)
    view = loader.epochs_of(steps=10)
    got: list[list[int]] = []
    for _ in range(5):
        assert len(view) == 10
        got.append(numbers(view))
        grow(cache)
        loader.refresh()
    together = [number for each in got for number in each]
    # 60 samples, then a pass that began after one and a half epochs, when 40 more samples had arrived
    assert sorted(together[:60]) == list(range(60))
    assert sorted(together[60 : 60 + 80]) == list(range(80))
    assert len(together[140:]) == 60
    assert len(set(together[140:])) == 60
    assert max(together[140:]) >= 80


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder for the caches of the property test."""
    return tmp_path_factory.mktemp("fixed")


@hypothesis_settings(max_examples=25)
@given(
    steps=st.integers(1, 9),
    batch_size=st.integers(1, 7),
    first=st.integers(1, 12),
    more=st.lists(st.integers(0, 5), min_size=1, max_size=4),
    stop=st.integers(0, 20),
    drop_last=st.booleans(),
    kind=st.sampled_from(sorted(KINDS)),
)
def test_passes_are_complete_and_states_exact_for_any_length_of_an_epoch(
    shards: Path, steps: int, batch_size: int, first: int, more: list[int], stop: int, drop_last: bool, kind: str
) -> None:
    """Another loader resumes from the state in the middle, after ``stop`` batches."""
    samples = first + batch_size
    with open_cache(tempfile.mkdtemp(dir=shards) + "/cache", max_size="20MB") as cache:
        put(cache, range(samples))
        options = {"batch_size": batch_size, "fields": ["number"], "workers": 0, "drop_last": drop_last}
        loader = KINDS[kind](cache, **options)
        view = loader.epochs_of(steps=steps)
        lengths: list[int] = []
        snapshots: dict[int, int] = {}
        got: dict[int, list[int]] = {}
        count = 0
        for grown in more:
            at = count % steps if count else 0
            for batch in view:
                progress = view.loader._progress
                snapshots[progress.begun.epoch] = progress.begun.steps.samples
                got.setdefault(progress.begun.epoch, []).extend(map(int, batch["number"]))
                del batch
                at, count = at + 1, count + 1
                if count == stop:
                    state = json.loads(json.dumps(view.state_dict()))
                    loader.close()
                    loader = KINDS[kind](cache, **options)
                    view = loader.epochs_of(steps=steps)
                    view.load_state_dict(state)
                    break
            if at < steps:
                for batch in view:  # the remaining batches of the resumed epoch
                    progress = view.loader._progress
                    snapshots[progress.begun.epoch] = progress.begun.steps.samples
                    got.setdefault(progress.begun.epoch, []).extend(map(int, batch["number"]))
                    at, count = at + 1, count + 1
            lengths.append(at)
            if grown:
                put(cache, range(samples, samples + grown))
                samples += grown
        loader.close()

    assert lengths == [steps] * len(more)
    for number, ids in got.items():
        assert len(set(ids)) == len(ids), "no sample twice in a pass"
        if number != max(got):
            whole = snapshots[number] - (snapshots[number] % batch_size if drop_last else 0)
            assert len(ids) == whole, "no sample is lost"
    assert sorted(got) == list(range(len(got)))


def test_a_state_at_any_position_resumes_with_the_next_batch(make: Make, cache: CacheDir) -> None:
    """The positions include the end of a pass, the end of an epoch, and the start before the first batch."""
    options = {"batch_size": 12, "seed": 5}  # passes of 5 batches
    whole = make(cache, **options).epochs_of(steps=4)
    expected = [batch for _ in range(3) for batch in map(numbers, ([each] for each in whole))]
    whole.close()
    loader = make(cache, **options)
    view, got, lengths = loader.epochs_of(steps=4), [], []
    at = 0
    while len(got) < 12:
        state = json.loads(json.dumps(view.state_dict()))
        view.close()
        view = make(cache, **options).epochs_of(steps=4)
        view.load_state_dict(state)
        for batch in view:
            got.append(numbers([batch]))
            at += 1
            break
        if state["at"] == 3:
            lengths.append(at)
            at = 0
    assert got == expected
    assert lengths == [4, 4, 4]


def test_the_remaining_batches_of_an_epoch_follow_after_its_state_was_loaded(make: Make, cache: CacheDir) -> None:
    view = make(cache).epochs_of(steps=10)
    numbers(view)
    before = taken(iter(view), 7)
    state = view.state_dict()

    again = make(cache).epochs_of(steps=10)
    again.load_state_dict(state)
    assert len(again) == 10
    iter(again)  # trainers call iter() more than once
    rest = numbers(again)
    assert len(rest) == 12
    assert not set(rest) & set(before[20:]), "the second pass, of which 2 batches were delivered"
    assert len(numbers(again)) == 40

    other = make(cache).epochs_of(steps=8)  # another length; 7 steps of it are done
    other.load_state_dict(state)
    assert numbers(other) == rest[:4]
    assert len(numbers(other)) == 32


def test_a_break_ends_an_epoch_but_not_the_pass(make: Make, cache: CacheDir) -> None:
    view = make(cache).epochs_of(steps=10)
    got = []
    for batch in view:
        got += numbers([batch])
        if len(got) == 12:
            break
    del batch
    rest = numbers(view)
    assert len(rest) == 40
    rest += taken(iter(view), 2)
    assert sorted(got + rest) == list(range(60))


def test_iter_again_before_the_first_batch_repeats_the_epoch(make: Make, cache: CacheDir) -> None:
    view, other = make(cache).epochs_of(steps=10), make(cache).epochs_of(steps=10)
    expected = numbers(other)
    for _ in range(3):
        kept = iter(view)
    assert numbers(kept) == expected
    assert next(kept, None) is None
    with pytest.raises(StopIteration):
        next(kept)


def test_an_older_iterator_of_an_epoch_of_fixed_length_raises(make: Make, cache: CacheDir) -> None:
    view = make(cache).epochs_of(steps=10)
    older = iter(view)
    got = taken(older, 2)
    newer = iter(view)
    with pytest.raises(UsageError, match=OLD):
        next(older)
    got += taken(newer, 10)
    assert len(set(got)) == 48
    with view:
        kept = iter(view)
    with pytest.raises(UsageError, match=OLD):
        next(kept)


def test_after_an_error_the_next_pass_can_begin(make: Make, cache: CacheDir, tmp_path: Path) -> None:
    """A notebook's user runs the cell again."""
    once = tmp_path / "once"

    def fails_once(sample: dict[str, Any]) -> dict[str, Any]:
        if sample["number"] == 33 and not once.exists():
            once.touch()
            raise ValueError("once")
        return sample

    view = make(cache, transform=fails_once, shuffle=False).epochs_of(steps=15)
    with pytest.raises(UsageError, match="ValueError: once"):
        numbers(view)
    assert sorted(numbers(view)) == list(range(60))


@pytest.mark.parametrize("steps", [0, -1, 2.5, "3", None])
def test_an_invalid_number_of_steps_is_refused(steps: Any, cache: CacheDir) -> None:
    with numpy_loader.Loader(cache, batch_size=4, workers=0) as loader, pytest.raises(UsageError, match="steps="):
        loader.epochs_of(steps=steps)


@pytest.mark.parametrize("state", [{}, {"state": 1, "at": -1, "loader": {}}, {"state": 2, "at": 0, "loader": {}}, 3])
def test_an_invalid_state_of_epochs_of_fixed_length_is_refused(state: Any, cache: CacheDir) -> None:
    with numpy_loader.Loader(cache, batch_size=4, fields=["number"], workers=0) as loader:
        view = loader.epochs_of(steps=10)
        got = taken(iter(view), 3)
        with pytest.raises(UsageError, match="state"):
            view.load_state_dict(state)
        with pytest.raises(UsageError):
            view.load_state_dict({**view.state_dict(), "loader": {"state": 1}})
        assert len(set(got + numbers(view))) == 52, "nothing changed"


# -- on a device -------------------------------------------------------------------------------------------------------


@pytest.fixture
def meta(monkeypatch: pytest.MonkeyPatch) -> None:
    """Return a device with streams whose tensors have no values: numbers stay on the host."""

    class Stream:
        device_index = 0

        def __init__(self, _: object) -> None: ...
        def synchronize(self) -> None: ...

    class Event:
        def record(self, _: object) -> None: ...
        def query(self) -> bool:
            return True

    module = SimpleNamespace(
        Stream=Stream,
        Event=Event,
        stream=lambda _: contextlib.nullcontext(),
        current_stream=lambda _: SimpleNamespace(wait_event=lambda _: None),
    )
    monkeypatch.setattr(torch_device, "_module", lambda _: module)
    monkeypatch.setattr(torch_device, "_record", lambda *_, **__: None)
    monkeypatch.setattr(torch_device, "page_lock", lambda _: None)


def words(batches: Any) -> list[str]:
    """Return the fields of the samples that stay in host memory."""
    return [word for batch in batches for word in batch["__key__"]]


@pytest.fixture
def keyed(tmp_path: Path) -> Iterator[CacheDir]:
    """Create 60 samples with keys."""
    with open_cache(tmp_path / "keyed", max_size="20MB") as opened:
        put(opened, range(60), schema=KEYED)
        yield opened


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("by", ["device=", "DevicePrefetcher"])
def test_the_contract_holds_on_a_device(by: str, workers: int, keyed: CacheDir, meta: None) -> None:
    def opened() -> tuple[Any, Any]:
        options = {"batch_size": 4, "workers": workers}
        if by == "device=":
            loader = torch_loader.Loader(keyed, device="meta", **options)
            return loader, loader
        loader = torch_loader.Loader(keyed, **options)
        return loader, torch_loader.DevicePrefetcher(loader, "meta")

    loader, batches = opened()
    with loader:
        iter(batches)
        kept = iter(batches)
        put(keyed, range(60, 80), schema=KEYED)
        assert len(batches) == 15
        first = next(kept)
        assert first["number"].device.type == "meta"
        got = words([first, *(next(kept) for _ in range(5))])
        state = loader.state_dict()
        del kept
    loader, batches = opened()
    with loader:
        loader.load_state_dict(state)
        assert len(batches) == 15
        assert sorted(got + words(batches)) == sorted(f"scan{number}" for number in range(60))
        assert len(words(batches)) == 80


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("by", ["device=", "DevicePrefetcher"])
def test_epochs_of_fixed_length_work_on_a_device(by: str, workers: int, keyed: CacheDir, meta: None) -> None:
    """Batches on their way to the device do not count: the state is the position of the training."""

    def opened() -> tuple[Any, Any]:
        options = {"batch_size": 4, "workers": workers}
        if by == "device=":
            view = torch_loader.Loader(keyed, device="meta", **options).epochs_of(steps=10)
            return view, view
        view = torch_loader.Loader(keyed, **options).epochs_of(steps=10)
        return view, torch_loader.DevicePrefetcher(view, "meta")

    view, source = opened()
    with view:
        assert len(source) == 10
        got = words(source)
        batches = iter(source)
        first = next(batches)
        assert first["number"].device.type == "meta"
        got += words([first, next(batches)])
        state = view.state_dict()
        assert state["at"] == 2
        del batches
    view, source = opened()
    with view:
        view.load_state_dict(state)
        got += words(source)
    assert len(got) == 80
    assert len(set(got[:60])) == 60
    assert len(set(got[60:])) == 20


# -- where the contract is easily broken -------------------------------------------------------------------------------


def test_len_does_not_keep_the_snapshot_of_a_dropped_iterator(make: Make, cache: CacheDir) -> None:
    loader = make(cache, hold=0.3)
    iter(loader)
    assert len(loader) == 15
    until(lambda: leases(cache) == [])


def test_agreeing_ranks_continue_an_epoch_regardless_of_hold(
    make: Make, cache: CacheDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank that began the epoch again would wait for the others' ``all_reduce`` forever."""
    loader = make(cache, hold=0.0)
    monkeypatch.setattr(loader, "_agreed", lambda steps: steps)
    monkeypatch.setattr(loader, "_shared_run", lambda: None)
    monkeypatch.setattr(type(loader), "_collective", property(lambda self: True))
    iter(loader)
    feed = loader._feed

    def refused(generation: int) -> bool:
        raise AssertionError("the feeders were asked")

    monkeypatch.setattr(feed, "regain", refused)
    version = loader._progress.begun.version
    grow(cache)
    assert len(loader) == 15
    assert sorted(numbers(loader)) == list(range(60))
    assert loader._progress.begun.version == version


def test_a_view_as_long_as_the_first_pass_is_not_reported_as_cut(
    make: Make, cache: CacheDir, capfd: pytest.CaptureFixture[str]
) -> None:
    loader = make(cache)
    view = loader.epochs_of(steps=len(loader))
    numbers(view)
    grow(cache)
    for batch in view:
        del batch
    loader.close()
    assert said(capfd) == []


def test_a_view_starts_a_pass_again_after_its_loader_was_closed_or_iterated(make: Make, cache: CacheDir) -> None:
    loader = make(cache)
    view = loader.epochs_of(steps=5)
    assert len(numbers(view)) == 20
    loader.close()
    assert len(numbers(view)) == 20
    next(iter(loader))
    assert len(numbers(view)) == 20


def test_an_epoch_whose_start_failed_is_started_by_the_next_iter(
    make: Make, cache: CacheDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    loader = make(cache, seed=5)
    batches = iter(loader)
    before = taken(batches, 4)
    state = loader.state_dict()

    def interrupted(steps: int) -> int:
        raise KeyboardInterrupt

    for resumed in (True, False):
        if resumed:
            loader.load_state_dict(state)
        else:
            loader.epoch = 0
        with monkeypatch.context() as patch:
            patch.setattr(loader, "_agreed", interrupted)
            with pytest.raises(KeyboardInterrupt):
                iter(loader)
        loader.set_epoch(3 if resumed else 0)
        rest = numbers(loader)
        assert sorted(rest if not resumed else before + rest) == list(range(60))
        assert loader.epoch == 1


def test_a_dropped_view_is_freed_at_once_without_the_garbage_collector(make: Make, cache: CacheDir) -> None:
    loader = make(cache)
    view = loader.epochs_of(steps=20)
    assert len(numbers(view)) == 60 + 20
    gone = weakref.ref(view)
    gc.disable()
    try:
        del view
        assert gone() is None
    finally:
        gc.enable()


def test_integrations_refuse_a_concurrent_loader(make: Make, cache: CacheDir) -> None:
    loader = make(cache, concurrent=True)
    for each in (loader, loader.epochs_of(steps=2)):
        with pytest.raises(UsageError, match="concurrent=True"):
            require_one_epoch(each)
