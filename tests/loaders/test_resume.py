"""Where training stands: states at the edges of epochs, and what a loader does after it was interrupted."""

from __future__ import annotations

import ctypes
import json
from pathlib import Path
from typing import Any

import pytest

from cachetool.cache import CacheDir
from cachetool.errors import CacheToolError, UsageError
from cachetool.loaders import ring_memory, threads
from cachetool.loaders.numpy import Loader
from cachetool.loaders.ring import Ring, RingWriter
from tests.loaders.processes import children, until

EACH = [0, 2]


def numbers(batches: Any) -> list[int]:
    """The numbers of the samples of these batches, in order."""
    return [int(number) for batch in batches for number in batch["number"]]


def opened(cache: CacheDir, **options: Any) -> Loader:
    return Loader(cache, **{"batch_size": 4, "fields": ["number"], "seed": 1, **options})


@pytest.mark.parametrize("workers", EACH)
def test_a_state_after_break_goes_on_behind_the_batches_that_were_delivered(workers: int, cache: CacheDir) -> None:
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


@pytest.mark.parametrize("workers", EACH)
def test_a_resumed_epoch_of_which_no_batch_is_left_is_over(workers: int, cache: CacheDir) -> None:
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
def test_batches_before_a_resume_count_among_the_steps(workers: int, cache: CacheDir) -> None:
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
        assert len(loader) == 3
        assert len(numbers(batches)) == 12
        assert len(numbers(loader)) == 40
    with opened(cache, workers=workers, steps=5) as loader:
        loader.load_state_dict(state)
        assert numbers(loader) == []
        assert loader.epoch == 1


@pytest.mark.parametrize("workers", EACH)
def test_the_length_of_an_epoch_to_resume_is_what_is_left_of_it(workers: int, cache: CacheDir) -> None:
    with opened(cache, workers=workers) as loader:
        batches = iter(loader)
        for _ in range(4):
            next(batches)
        state = loader.state_dict()
    with opened(cache, workers=workers) as loader:
        loader.load_state_dict(state)
        assert len(loader) == 11
        assert len(list(loader)) == 11
        assert len(loader) == 15


@pytest.mark.parametrize("workers", EACH)
def test_another_epoch_than_the_one_that_was_left_begins_at_its_beginning(workers: int, cache: CacheDir) -> None:
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


def test_feeders_that_die_when_all_batches_are_out_do_not_cost_the_last_one(
    cache: CacheDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(cache, workers=1) as loader:
        batches = iter(loader)
        feed = loader._feed
        assert feed is not None
        deliver = feed.delivered

        def dead(generation: int, count: int) -> None:
            for process in feed._processes:  # type: ignore[attr-defined]
                process.kill()
                process.wait()
            deliver(generation, count)

        monkeypatch.setattr(feed, "delivered", dead)
        assert sorted(numbers(batches)) == list(range(60))
        assert loader.epoch == 1
        assert sorted(numbers(loader)) == list(range(60))


@pytest.mark.parametrize("workers", EACH)
def test_a_state_that_is_not_known_any_more_is_an_error_that_says_so(workers: int, cache: CacheDir) -> None:
    loader = opened(cache, workers=workers)
    batches = iter(loader)
    next(batches)
    loader.close()
    with pytest.raises(UsageError, match="feeders ended, after 1 of 15 batches of epoch 0"):
        loader.state_dict()
    numbers(loader)
    loader.close()
    assert loader.state_dict()["epoch"] == 1


@pytest.mark.parametrize("workers", EACH)
def test_a_transform_that_leaves_the_process_is_an_error(workers: int, cache: CacheDir) -> None:
    def leave(sample: dict[str, Any]) -> dict[str, Any]:
        raise SystemExit(3)

    loader = opened(cache, workers=workers, transform=leave)
    with loader, pytest.raises(UsageError, match="transform= raised SystemExit: 3"):
        next(iter(loader))


def test_a_feeder_thread_that_fails_is_an_error_and_another_one_is_started(
    cache: CacheDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise MemoryError("no room")

    with opened(cache, workers=0) as loader:
        with monkeypatch.context() as patch:
            patch.setattr(threads, "work", fail)
            with pytest.raises(CacheToolError, match="a feeder failed: MemoryError: no room"):
                next(iter(loader))
        assert sorted(numbers(loader)) == list(range(60))


def test_a_look_ahead_that_fails_does_not_end_the_present_epoch(
    cache: CacheDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise OSError(24, "Too many open files")

    with opened(cache, workers=0) as loader:
        batches = iter(loader)
        first = numbers([next(batches)])
        with monkeypatch.context() as patch:
            patch.setattr("cachetool.loaders.turns.Turns._look_ahead", fail)
            assert sorted(first + numbers(batches)) == list(range(60))
        assert sorted(numbers(loader)) == list(range(60))


def test_values_that_come_in_several_reads_are_whole(cache: CacheDir, monkeypatch: pytest.MonkeyPatch) -> None:
    """Linux reads 2 GiB at a time at most."""
    with opened(cache, workers=0, fields=None) as loader:
        whole = [batch["x"].tobytes() for batch in loader]
    preadv = threads.os.preadv
    monkeypatch.setattr(threads.os, "preadv", lambda fd, views, at: preadv(fd, [views[0][:7]], at))
    with opened(cache, workers=0, fields=None) as loader:
        assert [batch["x"].tobytes() for batch in loader] == whole


def test_an_interrupt_while_batches_are_counted_loses_none_of_the_epochs_after_it(cache: CacheDir) -> None:
    with opened(cache, workers=1, prefetch=2, epochs=1) as loader:
        batches = iter(loader)
        numbers([next(batches)])
        ring = loader._feed._rings[0]  # type: ignore[union-attr]
        trywait = ring._trywait

        def interrupted(semaphore: Any) -> int:
            if trywait(semaphore) == 0 and semaphore is ring._head.filled:
                raise KeyboardInterrupt  # as a signal after the batch was taken out, before it was counted
            return 1

        feeders = children()
        until(lambda: _waits(ring._head.filled))
        ring._trywait = interrupted
        with pytest.raises(KeyboardInterrupt):
            next(batches)
        assert sorted(numbers(loader)) == list(range(60))
        assert not set(feeders) & set(children())
        assert loader.epoch == 1


def _waits(semaphore: ctypes.c_void_p) -> bool:
    value = ctypes.c_int()
    ring_memory.library(keeps_gil=True).sem_getvalue(semaphore, ctypes.byref(value))
    return value.value > 0


def test_slots_beyond_the_addresses_that_are_reserved_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ring_memory, "_RESERVED", 2**24)
    ring = Ring()
    writer = RingWriter(ring.fd)
    writer.permit(9)
    for _ in range(3):
        assert len(writer.memory(writer.acquire(), 2**22)) == 2**22
    last = writer.acquire()
    with pytest.raises(UsageError, match=r"than the \d+ MiB of addresses"):
        writer.memory(last, 2**22)
    ring.close()


def test_the_state_of_an_epoch_that_another_one_replaced_is_refused(cache: CacheDir, tmp_path: Path) -> None:
    with opened(cache, workers=2) as loader:
        batches = iter(loader)
        next(batches)
        feed = loader._feed
        assert feed is not None
        feed.begin(0)  # as an iter() that was interrupted before it could say so
        with pytest.raises(UsageError, match="is over: another one was begun"):
            loader.state_dict()
