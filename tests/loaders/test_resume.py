"""The position of the training: states at the edges of epochs, and loaders after an interrupt."""

from __future__ import annotations

import ctypes
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cachetool.cache import CacheDir, open_cache
from cachetool.core.errors import CacheToolError, UsageError
from cachetool.loaders.feed.batches import Maker
from cachetool.loaders.numpy import Loader
from cachetool.loaders.read import unmapped
from cachetool.loaders.ring import memory as ring_memory
from cachetool.loaders.ring.ring import Ring, RingWriter
from tests.commands import run_command
from tests.loaders.numbered import KEYED, put
from tests.loaders.processes import children, until

EACH = [0, 2]


def numbers(batches: Any) -> list[int]:
    """Return the numbers of the samples of these batches, in order."""
    return [int(number) for batch in batches for number in batch["number"]]


@pytest.fixture
def keyed(tmp_path: Path) -> Iterator[CacheDir]:
    """Create a cache of three shards of 20 samples with keys, which decide the sides of a split."""
    with open_cache(tmp_path / "keyed", max_size="20MB") as opened:
        for start in (0, 20, 40):
            put(opened, range(start, start + 20), schema=KEYED)
        yield opened


def opened(cache: CacheDir, **options: Any) -> Loader:
    return Loader(cache, **{"batch_size": 4, "fields": ["number"], "seed": 1, **options})


@pytest.mark.parametrize("workers", EACH)
def test_a_state_after_break_resumes_after_the_delivered_batches(workers: int, cache: CacheDir) -> None:
    with opened(cache, workers=workers) as loader:
        first: list[int] = []
        for batch in loader:
            first += batch["number"].tolist()
            if len(first) == 20:
                break
        del batch
        state = json.loads(json.dumps(loader.state_dict()))
    with opened(cache, workers=workers) as loader:
        loader.load_state_dict(state)
        assert sorted(first + numbers(loader)) == list(range(60))
        assert loader.epoch == 1
        assert sorted(numbers(loader)) == list(range(60))


def test_a_state_in_the_middle_of_an_epoch_belongs_to_its_order_and_side(keyed: CacheDir) -> None:
    with opened(keyed, workers=1, split="train", validation=0.3) as loader:
        start = loader.state_dict()
        batches = iter(loader)
        next(batches)
        state = json.loads(json.dumps(loader.state_dict()))
        del batches
    for other, says in (
        ({"shuffle": False}, "saved with shuffle='full', but this loader has False; create it with shuffle='full'"),
        ({"split": "validation"}, "saved with split='train', but this loader has 'validation'"),
        ({"split": None, "validation": None}, "saved with split='train', but this loader has None"),
        ({"validation": 0.2}, r"saved with validation=0\.3, but this loader has 0\.2"),
    ):
        with opened(keyed, workers=1, **{"split": "train", "validation": 0.3, **other}) as loader:
            with pytest.raises(UsageError, match=says):
                loader.load_state_dict(state)
            loader.load_state_dict(start)  # another order is allowed for a whole epoch


@pytest.mark.parametrize("workers", EACH)
def test_a_side_without_samples_is_an_error_that_names_the_validation_share(workers: int, keyed: CacheDir) -> None:
    loader = opened(keyed, workers=workers, split="validation", validation=1e-9, wait=0.1)
    with loader, pytest.raises(UsageError, match=r"0 of 1 samples of split='validation' in .*, or change validation=$"):
        iter(loader)


@pytest.mark.parametrize("workers", EACH)
def test_a_state_of_another_cache_is_distinguished_from_one_with_evicted_shards(
    workers: int, cache: CacheDir, keyed: CacheDir
) -> None:
    with opened(cache, workers=0) as loader:
        batches = iter(loader)
        next(batches)
        state = loader.state_dict()
    with opened(keyed, workers=workers) as loader:
        loader.load_state_dict(state)
        says = f"none of the 3 shards of the epoch to resume is in {keyed.root}: the state belongs to another cache"
        with pytest.raises(UsageError, match=says):
            iter(loader)


@pytest.mark.parametrize("each", ["sample", "batch"])
@pytest.mark.parametrize("workers", EACH)
def test_a_failing_transform_is_reported_with_its_sample(workers: int, each: str, keyed: CacheDir) -> None:
    def fails(given: dict[str, Any]) -> dict[str, Any]:
        if 30 in np.atleast_1d(given["number"]):
            raise ValueError("no")
        return given

    options: dict[str, Any] = {"workers": workers, "fields": None, "transform": fails, "transform_each": each}
    which = r"sample 'scan30'" if each == "sample" else r"batch that begins with sample 'scan28'"
    loader = opened(keyed, shuffle=False, **options)
    with loader, pytest.raises(UsageError, match=rf"transform= raised ValueError: no \({which}\)$"):
        numbers(loader)
    loader = opened(keyed, shuffle=False, **{**options, "transform": lambda given: {}})
    first = which.replace("30", "0").replace("28", "0")
    with (
        loader,
        pytest.raises(UsageError, match=rf"must return a dict of fields, but it returned an empty dict \({first}\)$"),
    ):
        next(iter(loader))


WRONG: list[tuple[Any, str]] = [
    (None, "not a state of loaders of this version"),
    ([], "not a state of loaders of this version"),
    ({"state": 0}, "not a state of loaders of this version"),
    ({"state": 1}, "'epoch' is None"),
    ({"epoch": "x"}, "'epoch' is 'x'"),
    ({"epoch": -3}, "'epoch' is -3"),
    ({"taken": -1}, "'taken' is -1"),
    ({"order": 5}, "'order' is 5"),
    ({"seed": None}, "saved with seed=None"),
    *(({"resume": value}, "'resume' is") for value in (5, [], {"x": 1}, [1, 2])),
]


@pytest.mark.parametrize(("change", "says"), WRONG, ids=[str(change) for change, _ in WRONG])
def test_an_invalid_state_is_refused_without_changes(change: Any, says: str, cache: CacheDir) -> None:
    with opened(cache, workers=0) as loader:
        whole = numbers(loader)
        following = numbers(loader)
    with opened(cache, workers=0) as loader:
        first = iter(loader)
        next(first)
        state = loader.state_dict()
        wrong = {**state, **change} if isinstance(change, dict) and "state" not in change else change
        with pytest.raises(UsageError, match=says):
            loader.load_state_dict(wrong)
        assert numbers(first) == whole[4:]
        assert numbers(loader) == following


PARTS: list[Any] = [5, [5], [["id", "hdf5", "20", ""]]]
MIDDLES = [{"position": 61}, {"position": -1}, {"samples": "60"}, {"more": 1}]


@pytest.mark.parametrize("change", [*MIDDLES, *({"parts": parts} for parts in PARTS)], ids=str)
def test_a_state_with_an_invalid_position_is_refused(change: dict[str, Any], cache: CacheDir) -> None:
    with opened(cache, workers=0) as loader:
        batches = iter(loader)
        next(batches)
        state = loader.state_dict()
        loader.load_state_dict(state)
        with pytest.raises(UsageError, match=r"'resume' is .*; load the result of state_dict\(\)"):
            loader.load_state_dict({**state, "resume": {**state["resume"], **change}})


@pytest.mark.parametrize(("missing", "says"), [("error", "evicted after"), ("skip", "without evicted shards")])
def test_a_split_state_with_evicted_shards_is_refused_with_the_way_to_start_again(
    keyed: CacheDir, missing: str, says: str
) -> None:
    options: dict[str, Any] = {"workers": 1, "split": "train", "missing": missing}
    with opened(keyed, **options) as loader:
        batches = iter(loader)
        next(batches)
        state = loader.state_dict()
        del batches
    keyed.evict(keyed.usage().total - keyed.shards()[0].bytes)
    with opened(keyed, **options) as loader:
        loader.load_state_dict(state)
        with pytest.raises(UsageError, match=rf"{says}.*begin the next epoch with loader\.epoch = 1"):
            iter(loader)
        loader.epoch = 1
        assert set(numbers(loader)) <= set(range(20, 60))
        assert loader.epoch == 2


@pytest.mark.parametrize("workers", EACH)
def test_a_loop_that_is_left_every_epoch_sees_different_samples(workers: int, cache: CacheDir) -> None:
    found: list[tuple[int, list[int]]] = []
    with opened(cache, workers=workers) as loader:
        for _ in range(4):
            for batch in loader:
                found.append((loader.epoch, batch["number"].tolist()))
                break
        for _ in range(2):  # no batch was delivered, so the epoch did not begin
            iter(loader)
        whole = numbers(loader)
        assert loader.epoch == 5
    assert [epoch for epoch, _ in found] == [0, 1, 2, 3]
    assert len({tuple(batch) for _, batch in found}) == 4
    with opened(cache, workers=workers) as loader:  # the same as after epochs that were not left
        orders = [numbers(loader) for _ in range(5)]
    assert [batch for _, batch in found] == [order[:4] for order in orders[:4]]
    assert whole == orders[4]


@pytest.mark.parametrize("workers", EACH)
def test_a_chosen_epoch_always_begins_at_its_start(workers: int, cache: CacheDir) -> None:
    with opened(cache, workers=workers) as loader:
        firsts = []
        for number in (0, 0, 3, 3):
            loader.epoch = number
            assert loader.state_dict()["resume"] is None
            firsts.append(numbers([next(iter(loader))]))
            assert loader.epoch == number
        assert (firsts[0], firsts[2]) == (firsts[1], firsts[3])
        state = loader.state_dict()
    with opened(cache, workers=workers) as loader:
        loader.load_state_dict(state)
        loader.epoch = 3  # like the variable of a loop over epochs
        assert sorted(firsts[3] + numbers(loader)) == list(range(60))


@pytest.mark.parametrize("workers", EACH)
def test_a_failed_epoch_begins_again(workers: int, cache: CacheDir, tmp_path: Path) -> None:
    bad = tmp_path / "bad"
    bad.touch()

    def picky(sample: dict[str, Any]) -> dict[str, Any]:
        if sample["number"] == 7 and bad.exists():
            raise ValueError("no sevens")
        return sample

    with opened(cache, workers=workers, transform=picky, prefetch=1) as loader:
        with pytest.raises(UsageError, match="no sevens"):
            numbers(loader)
        bad.unlink()
        assert sorted(numbers(loader)) == list(range(60))
        assert loader.epoch == 1


@pytest.mark.parametrize("workers", EACH)
def test_a_resumed_epoch_without_remaining_batches_is_over(workers: int, cache: CacheDir) -> None:
    with opened(cache, workers=workers) as loader:
        batches = iter(loader)
        for _ in range(13):
            next(batches)
        state = loader.state_dict()  # 8 samples are left
    with opened(cache, workers=workers, batch_size=16, drop_last=True) as loader:
        loader.load_state_dict(state)
        assert numbers(loader) == []
        assert loader.epoch == 1
        assert loader.state_dict()["resume"] is None
        assert len(numbers(loader)) == 48
        assert loader.epoch == 2


@pytest.mark.parametrize("workers", EACH)
def test_batches_before_a_resume_count_as_steps(workers: int, cache: CacheDir) -> None:
    def taken(loader: Loader, count: int) -> dict[str, Any]:
        batches = iter(loader)
        for _ in range(count):
            next(batches)
        return loader.state_dict()

    with opened(cache, workers=workers, steps=10) as loader:
        state = taken(loader, 4)
    with opened(cache, workers=workers, steps=10) as loader:
        loader.load_state_dict(state)
        state = taken(loader, 3)
    with opened(cache, workers=workers, steps=10) as loader:
        loader.load_state_dict(state)
        batches = iter(loader)
        assert len(loader) == 10
        assert len(numbers(batches)) == 12
        assert len(numbers(loader)) == 40
    with opened(cache, workers=workers, steps=5) as loader:
        loader.load_state_dict(state)
        assert numbers(loader) == []
        assert loader.epoch == 1


@pytest.mark.parametrize("workers", EACH)
def test_the_length_of_an_epoch_to_resume_is_that_of_the_whole_epoch(workers: int, cache: CacheDir) -> None:
    with opened(cache, workers=workers) as loader:
        batches = iter(loader)
        for _ in range(4):
            next(batches)
        state = loader.state_dict()
    with opened(cache, workers=workers) as loader:
        loader.load_state_dict(state)
        assert len(loader) == 15
        batches = iter(loader)
        assert len(batches) == 11  # type: ignore[arg-type]
        for _ in range(11):
            next(batches)
            assert len(loader) == 15  # also while the last batch is in use
        assert next(batches, None) is None
        assert len(loader) == 15  # of the next epoch, though the iterator still exists
        assert len(list(loader)) == 15


@pytest.mark.parametrize("workers", EACH)
def test_a_resumed_epoch_has_its_announced_length_despite_evictions(workers: int, cache: CacheDir) -> None:
    with opened(cache, workers=workers) as loader:
        batches = iter(loader)
        before = numbers(next(batches) for _ in range(4))
        del batches
        state = json.loads(json.dumps(loader.state_dict()))
    cache.evict(cache.usage().total - 1)
    left = {number for batch in opened(cache, workers=0) for number in batch["number"].tolist()}
    assert len(left) == 40

    # Fewer samples than `min_samples` are no reason to wait before an epoch is resumed.
    with opened(cache, workers=workers, missing="skip", min_samples=50, wait=0.2) as loader:
        loader.load_state_dict(state)
        said = len(loader)
        batches = iter(loader)
        assert len(batches) == said - 4 == -(-len(left - set(before)) // 4)  # type: ignore[arg-type]
        assert sorted(numbers(batches)) == sorted(left - set(before))


@pytest.mark.parametrize("workers", EACH)
def test_the_next_epoch_has_its_announced_length(workers: int, cache: CacheDir) -> None:
    usage, sizes = cache.usage(), [shard.bytes for shard in cache.shards()]
    root, empty = cache.root, usage.overhead + usage.listings
    cache.close()

    def evict_elsewhere(shards: int) -> None:
        size = empty + sum(sizes[:shards])
        done = run_command("evict", "--max-size", size, "--cache", root, folder=root.parent)
        assert "20 samples" in done.stdout + done.stderr or done.returncode == 4, done.stderr  # a loader holds them

    with opened(root, workers=workers) as loader:
        assert len(loader) == 15
        evict_elsewhere(2)
        assert len(list(loader)) == 15
        said = len(loader)
        assert len(list(loader)) == said == 10
        evict_elsewhere(1)
        said = len(loader)
        assert len(list(loader)) == said
        assert len(list(loader)) == 5


@pytest.mark.parametrize("workers", EACH)
def test_after_a_left_epoch_the_length_is_that_of_the_next_epoch(workers: int, cache: CacheDir) -> None:
    """The next epoch has the samples that arrived meanwhile. The state is still that of the left epoch."""
    with opened(cache, workers=workers) as loader:
        batches = iter(loader)
        before = numbers(next(batches) for _ in range(4))
        del batches
        put(cache, range(60, 100))
        assert len(loader) == 25
        state = json.loads(json.dumps(loader.state_dict()))
        assert len(list(loader)) == 25
        loader.epoch = np.int64(1)  # the same value again
        assert len(loader) == 25
        assert len(list(loader)) == 25
    with opened(cache, workers=workers) as loader:
        loader.load_state_dict(state)
        assert sorted(before + numbers(loader)) == list(range(60))


@pytest.mark.parametrize("workers", EACH)
def test_an_epoch_other_than_the_left_one_begins_at_its_start(workers: int, cache: CacheDir) -> None:
    with opened(cache, workers=workers) as loader:
        for _ in loader:
            break
        state = loader.state_dict()
        assert state["resume"] is not None
        loader.epoch = 7
        assert (loader.state_dict()["epoch"], loader.state_dict()["resume"]) == (7, None)
        loader.load_state_dict(state)
        loader.epoch = 7
        assert sorted(numbers(loader)) == list(range(60))
        assert loader.epoch == 8


@pytest.mark.parametrize("workers", EACH)
def test_threads_that_take_each_others_batches_get_an_error(workers: int, cache: CacheDir) -> None:
    with opened(cache, workers=workers) as loader:
        batches: Any = iter(loader)
        feed = batches.progress.feed
        with pytest.raises(UsageError, match="one thread at a time"):
            feed.take(batches.progress.begun.generation, 2, 32)  # another thread took two, and then this one the first


def test_the_last_batch_is_delivered_although_the_feeders_died_after_building_it(
    cache: CacheDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(cache, workers=1) as loader:
        batches = iter(loader)
        feed = loader._feed
        assert feed is not None
        deliver = feed.delivered

        def dead(generation: int, count: int) -> None:
            os.kill(feed.pids[0], signal.SIGKILL)  # type: ignore[attr-defined]
            feed._keeper.wait()  # type: ignore[attr-defined]
            deliver(generation, count)

        monkeypatch.setattr(feed, "delivered", dead)
        assert sorted(numbers(batches)) == list(range(60))
        assert loader.epoch == 1
        assert sorted(numbers(loader)) == list(range(60))


@pytest.mark.parametrize("workers", EACH)
def test_a_state_that_is_no_longer_known_is_an_error(workers: int, cache: CacheDir) -> None:
    loader = opened(cache, workers=workers)
    batches = iter(loader)
    next(batches)
    loader.close()
    with pytest.raises(UsageError, match="feeders ended, after 1 of 15 batches of epoch 0"):
        loader.state_dict()
    numbers(loader)
    loader.close()
    assert loader.state_dict()["epoch"] == 2


@pytest.mark.parametrize("workers", EACH)
def test_a_transform_that_exits_the_process_is_an_error(workers: int, cache: CacheDir) -> None:
    def leave(sample: dict[str, Any]) -> dict[str, Any]:
        raise SystemExit(3)

    loader = opened(cache, workers=workers, transform=leave)
    with loader, pytest.raises(UsageError, match="transform= raised SystemExit: 3"):
        next(iter(loader))


def test_a_failing_batch_without_workers_is_an_error_and_the_epoch_begins_again(
    cache: CacheDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise MemoryError("no room")

    with opened(cache, workers=0) as loader:
        with monkeypatch.context() as patch:
            patch.setattr(Maker, "_schema", fail)
            with pytest.raises(CacheToolError, match="a feeder failed: MemoryError: no room"):
                next(iter(loader))
        assert sorted(numbers(loader)) == list(range(60))


def test_values_read_by_several_system_calls_are_complete(cache: CacheDir, monkeypatch: pytest.MonkeyPatch) -> None:
    """Linux reads at most 2 GiB per call."""
    with opened(cache, workers=0, fields=None) as loader:
        whole = [batch["x"].tobytes() for batch in loader]
    preadv = unmapped.os.preadv
    monkeypatch.setattr(unmapped.os, "preadv", lambda fd, views, at, *flags: preadv(fd, [views[0][:7]], at, *flags))
    with opened(cache, workers=0, fields=None) as loader:
        assert [batch["x"].tobytes() for batch in loader] == whole


def test_an_interrupt_while_batches_are_counted_does_not_affect_later_epochs(cache: CacheDir) -> None:
    with opened(cache, workers=1, prefetch=2, epochs=1) as loader:
        batches = iter(loader)
        numbers([next(batches)])
        ring = loader._feed._rings[0]  # type: ignore[union-attr]
        trywait = ring._trywait

        def interrupted(semaphore: Any) -> int:
            if trywait(semaphore) == 0 and semaphore is ring._head.filled:
                raise KeyboardInterrupt  # as a signal after the batch was taken and before it was counted
            return 1

        feeders = children()
        until(lambda: _waits(ring._head.filled))
        ring._trywait = interrupted
        with pytest.raises(KeyboardInterrupt):
            next(batches)
        assert sorted(numbers(loader)) == list(range(60))
        assert not set(feeders) & set(children())
        assert loader.epoch == 2


def _waits(semaphore: ctypes.c_void_p) -> bool:
    value = ctypes.c_int()
    ring_memory.library(keeps_gil=True).sem_getvalue(semaphore, ctypes.byref(value))
    return value.value > 0


def test_slots_beyond_the_reserved_address_range_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ring_memory, "_RESERVED", 2**24)
    ring = Ring()
    writer = RingWriter(ring.fd)
    writer.permit(9)
    for _ in range(3):
        assert len(writer.memory(writer.acquire(), 2**22)) == 2**22
    last = writer.acquire()
    with pytest.raises(UsageError, match=r"than the \d+ MiB of address space"):
        writer.memory(last, 2**22)
    ring.close()


def test_the_state_of_an_epoch_that_another_one_replaced_is_refused(cache: CacheDir, tmp_path: Path) -> None:
    with opened(cache, workers=2) as loader:
        batches = iter(loader)
        next(batches)
        feed = loader._feed
        assert feed is not None
        feed.begin(0)  # as an iter() that was interrupted before it returned
        with pytest.raises(UsageError, match="another epoch began"):
            loader.state_dict()


@pytest.mark.parametrize("workers", EACH)
def test_an_earlier_state_delivers_the_later_batches_again(workers: int, cache: CacheDir) -> None:
    """A trainer that reads ahead saves the position of its training, also when the loader is at the end of its
    epoch.
    """
    with opened(cache, workers=workers) as loader:
        batches = list(loader)  # 15: the epoch has ended, and its plan is still known
        states = {behind: json.loads(json.dumps(loader.state_behind(behind))) for behind in (0, 1, 3, 15)}
        with pytest.raises(UsageError, match="has not delivered 16 batches"):
            loader.state_behind(16)
    for behind, state in states.items():
        with opened(cache, workers=workers) as loader:
            loader.load_state_dict(state)
            assert loader.epoch == (0 if behind else 1)
            assert numbers(loader) == numbers(batches[15 - behind :]) or behind == 0
