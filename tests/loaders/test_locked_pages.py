"""Page-locked slots: only while cachetool copies from them, and as long as an object refers to them.

The tests use a lock that takes notes; ``test_gpu.py`` uses a real one.
"""

from __future__ import annotations

import contextlib
import os
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from cachetool.cache import CacheDir
from cachetool.loaders import torch_device
from cachetool.loaders.epoch import Epoch
from cachetool.loaders.feed.processes import Processes
from cachetool.loaders.numpy import Loader
from cachetool.loaders.read.arena import HUGE
from cachetool.loaders.ring.ring import Ring, RingWriter
from cachetool.loaders.torch import Loader as TorchLoader
from tests.loaders import processes
from tests.loaders.test_ring import send


class Locks:
    """A :data:`~cachetool.loaders.ring.ring.Lock` that records which memory is locked now."""

    def __init__(self) -> None:
        self.now: list[tuple[int, int]] = []

    def __call__(self, memory: memoryview) -> object:
        class Held:
            pass

        held, start = Held(), int(np.frombuffer(memory, dtype=np.uint8).ctypes.data)
        assert not self.cover(start), "locked twice"
        self.now.append((start, memory.nbytes))
        weakref.finalize(held, self._end, start, memory)
        return held

    def _end(self, start: int, memory: memoryview) -> None:
        bytes(memory[:1])  # raises if the process is gone: the memory must still exist
        self.now.remove((start, memory.nbytes))

    def cover(self, address: int) -> bool:
        return any(start <= address < start + nbytes for start, nbytes in self.now)


def covered(locks: Locks, batch: dict[str, Any]) -> set[bool]:
    return {locks.cover(int(batch[name].ctypes.data)) for name in ("x", "number")}


@pytest.mark.parametrize("workers", [1, 2])
def test_slots_are_locked_for_one_epoch_and_not_for_the_next(cache: CacheDir, workers: int) -> None:
    locks = Locks()
    loader = Loader(cache, batch_size=4, workers=workers, prefetch=2, fields=["x", "number"])
    for _ in range(3):
        batches: Any = iter(loader)
        batches.progress.feed.lock_pages(locks)
        kept = [batch for batch in batches if covered(locks, batch) == {True}]
        assert len(kept) == 15
        seen = [covered(locks, batch) for batch in loader]
        assert seen == [{False}] * 15
        assert [covered(locks, batch) for batch in kept] == [{True}] * 15, "they may be on their way to a device"
        del kept
    loader.close()
    del batches, loader
    assert locks.now == []


def test_a_batch_keeps_its_lock_after_the_loader_was_closed(cache: CacheDir) -> None:
    locks = Locks()
    loader = Loader(cache, batch_size=4, workers=1, fields=["x", "number"])
    batches: Any = iter(loader)
    batches.progress.feed.lock_pages(locks)
    batch = next(batches)
    loader.close()
    del loader, batches
    assert covered(locks, batch) == {True}
    del batch
    assert locks.now == []


def test_an_enlarged_slot_is_locked_at_its_new_address() -> None:
    ring, locks = Ring(), Locks()
    writer = RingWriter(ring.fd)
    writer.permit(1)
    ring.lock = locks
    ends = ring, writer
    for size in (5000, 5000, HUGE + 5000, 3 * HUGE):
        memory = send(ends, size)
        assert [nbytes for _, nbytes in locks.now] == [len(memory)]
        assert locks.cover(memory.obj.ctypes.data)  # type: ignore[attr-defined]
        del memory
        ring.poll()
    ring.close()
    del ends, ring
    assert locks.now == []


def test_a_lock_ends_before_the_memory_is_locked_for_another_device() -> None:
    ring, first, second = Ring(), Locks(), Locks()
    second.now = first.now
    writer = RingWriter(ring.fd)
    writer.permit(1)
    for lock in (first, second):
        ring.lock = lock
        memory = send((ring, writer), 5000)
        assert [nbytes for _, nbytes in first.now] == [len(memory)]
        del memory
        ring.poll()
    ring.close()


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Return a device that copies at once, into ordinary memory."""

    class Event:
        query = staticmethod(lambda: True)
        record = staticmethod(lambda *_: None)

    module = SimpleNamespace(
        Stream=lambda _: SimpleNamespace(synchronize=lambda: None, device_index=0),
        Event=Event,
        stream=lambda _: contextlib.nullcontext(),
        current_stream=lambda _: SimpleNamespace(wait_event=lambda _: None),
    )
    monkeypatch.setattr(torch_device, "_module", lambda _: module)
    monkeypatch.setattr(torch_device, "_record", lambda *_, **__: None)


def behind_the_first(arrived: Path, once: Path | None = None) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Return a ``transform`` that makes all samples except the first eight wait for the file ``arrived``, after
    ``once`` exists.
    """

    def after(sample: dict[str, Any]) -> dict[str, Any]:
        until = time.monotonic() + 60
        while sample["number"] >= 8 and (once is None or once.exists()) and not arrived.exists():
            assert time.monotonic() < until, "the first batch did not arrive"
            time.sleep(0.01)
        return {"number": sample["number"]}

    return after


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("workers", [0, 1, 2])
def test_a_batch_is_delivered_without_waiting_for_the_next_one(cache: CacheDir, tmp_path: Path, workers: int) -> None:
    """The next batches are only built after the first one has arrived."""
    arrived = tmp_path / "arrived"
    after = behind_the_first(arrived)
    with TorchLoader(
        cache, batch_size=8, shuffle=False, fields=["number"], workers=workers, device="meta", transform=after
    ) as loader:
        batches = iter(loader)
        first = next(batches)
        arrived.touch()
        rest = list(batches)
    assert isinstance(first["number"], torch.Tensor)
    assert len(rest) == 7


@pytest.mark.usefixtures("device")
def test_memory_is_locked_only_for_a_device_that_supports_it(cache: CacheDir, monkeypatch: pytest.MonkeyPatch) -> None:
    locks = Locks()
    monkeypatch.setattr(torch_device, "page_lock", lambda _: locks)

    def addresses(batches: Iterator[dict[str, torch.Tensor]]) -> list[int]:
        return [batch["x"].data_ptr() for batch in batches]

    with TorchLoader(cache, batch_size=4, workers=1, fields=["x"], prefetch=2) as loader:
        assert not any(map(locks.cover, addresses(iter(loader))))
        there = list(torch_device.DevicePrefetcher(loader, "meta"))
        assert len(there) == 15
        assert locks.now
        assert not any(map(locks.cover, addresses(iter(loader))))
    del loader
    assert locks.now == []


@pytest.mark.usefixtures("device")
def test_the_first_batch_of_an_epoch_is_delivered_despite_a_waiting_batch_of_the_left_epoch(
    cache: CacheDir, tmp_path: Path
) -> None:
    """The waiting batch is in the ring of another feeder, at the position of the second batch."""
    left, arrived = tmp_path / "left", tmp_path / "arrived"
    after = behind_the_first(arrived, once=left)
    options: dict[str, Any] = {"workers": 2, "prefetch": 2, "device": "meta", "transform": after}
    with TorchLoader(cache, batch_size=8, shuffle=False, fields=["number"], **options) as loader:
        batches: Any = iter(loader)
        next(batches)
        feed = loader._feed
        assert isinstance(feed, Processes)
        processes.until(lambda: all(ring.poll() for ring in feed._rings))
        left.touch()
        del batches
        batches = iter(loader)
        next(batches)
        arrived.touch()
        assert len(list(batches)) == 7


@pytest.mark.usefixtures("device")
def test_an_interrupt_while_a_prefetcher_fetches_a_batch_loses_no_slot(
    cache: CacheDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    looking: list[bool] = []
    ready, free = Epoch.ready.fget, Ring._free
    assert ready is not None

    def looks(epoch: Any) -> Any:
        looking.append(True)
        found = ready(epoch)
        looking.pop()
        return found

    def interrupted(ring: Ring, number: int) -> None:
        if looking:
            raise KeyboardInterrupt  # the slot is neither in use nor returned
        free(ring, number)

    with TorchLoader(cache, batch_size=4, workers=1, prefetch=1, fields=["number"], device="meta") as loader:
        with monkeypatch.context() as patched:
            patched.setattr(Epoch, "ready", property(looks))
            patched.setattr(Ring, "_free", interrupted)
            with pytest.raises(KeyboardInterrupt):
                all(time.sleep(0.005) is None for _ in range(20) for _ in loader)  # the slot is returned in two places
        assert len(list(loader)) == 15


@pytest.mark.usefixtures("device")
def test_an_interrupt_by_a_handler_that_closes_the_loader_is_raised_while_a_prefetcher_fetches(
    cache: CacheDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    with TorchLoader(cache, batch_size=4, workers=1, prefetch=1, fields=["number"], device="meta") as loader:
        batches = iter(loader)
        next(batches)

        def handler(*_: object) -> bool:
            loader.close()
            raise KeyboardInterrupt

        monkeypatch.setattr(loader._feed, "ready", handler)
        with pytest.raises(KeyboardInterrupt):
            list(batches)


def test_a_held_last_batch_counts_as_ready(cache: CacheDir, monkeypatch: pytest.MonkeyPatch) -> None:
    with Loader(cache, batch_size=6, workers=0, fields=["number"]) as loader:
        epoch: Any = iter(loader)
        feed = epoch.progress.feed
        take = feed.take
        monkeypatch.setattr(
            feed, "take", lambda epoch, step, most: take(epoch, step, most) + take(epoch, step + 1, most)
        )
        for _ in range(9):
            next(epoch)
        assert (len(epoch._last), epoch.ready) == (1, True)
        assert len(list(epoch)) == 1


@pytest.mark.usefixtures("device")
def test_memory_of_batches_delivered_on_the_host_is_not_locked(
    cache: CacheDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    locks = Locks()
    monkeypatch.setattr(torch_device, "page_lock", lambda _: locks)
    with Loader(cache, batch_size=4, workers=1, fields=["x"], prefetch=2) as arrays:
        assert not any(locks.cover(batch["x"].ctypes.data) for batch in torch_device.DevicePrefetcher(arrays, "meta"))
    with TorchLoader(cache, batch_size=4, workers=1, fields=["x"], prefetch=2) as loader:
        epoch = iter(loader)
        next(iter(torch_device.DevicePrefetcher(epoch, "meta")))
        assert not any(locks.cover(batch["x"].data_ptr()) for batch in epoch)
    assert locks.now == []


class Runtime:
    """CUDA's runtime as far as it locks memory, with CUDA's error numbers."""

    def __init__(self, refuses: int = 0, interrupts: bool = False) -> None:
        self.refuses, self.interrupts = refuses, interrupts
        self.now: dict[int, int] = {}

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        assert flags == 1
        if self.refuses:
            return self.refuses
        self.now[address] = nbytes
        if self.interrupts:
            raise KeyboardInterrupt  # as a signal handler does after the call has returned
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        return 0 if self.now.pop(address, 0) else 713


@pytest.fixture
def page_lock(monkeypatch: pytest.MonkeyPatch) -> Callable[[Runtime], torch_device.PageLock]:
    def make(runtime: Runtime) -> torch_device.PageLock:
        monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
        monkeypatch.setattr(torch.cuda, "device", lambda _: contextlib.nullcontext())
        monkeypatch.setattr(torch_device.PageLock, "_forget_error", lambda _: None)
        return torch_device.PageLock(0)

    return make


def test_memory_is_locked_until_no_object_refers_to_it(page_lock: Callable[[Runtime], torch_device.PageLock]) -> None:
    runtime = Runtime()
    lock, memory = page_lock(runtime), np.zeros(8192, dtype=np.uint8)
    kept = lock(memory.data)
    assert (runtime.now, lock.locked) == ({memory.ctypes.data: 8192}, 8192)
    del kept
    assert (runtime.now, lock.locked) == ({}, 0)


def test_a_forked_child_unlocks_nothing(
    page_lock: Callable[[Runtime], torch_device.PageLock], monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime = Runtime()
    lock, memory = page_lock(runtime), np.zeros(8192, dtype=np.uint8)
    kept = lock(memory.data)
    with monkeypatch.context() as patched:
        patched.setattr(os, "getpid", lambda: 1)
        del kept
    assert (runtime.now, lock.locked) == ({memory.ctypes.data: 8192}, 8192)


def test_memory_that_cannot_be_locked_stays_unlocked_and_is_not_tried_again(
    page_lock: Callable[[Runtime], torch_device.PageLock],
) -> None:
    runtime = Runtime(refuses=2)
    lock, memory = page_lock(runtime), np.zeros(8192, dtype=np.uint8).data
    assert lock(memory) is memory
    runtime.refuses = 0
    assert lock(memory) is memory
    assert (runtime.now, lock.locked) == ({}, 0)


def test_an_interrupt_while_memory_is_being_locked_leaves_none_locked(
    page_lock: Callable[[Runtime], torch_device.PageLock],
) -> None:
    runtime = Runtime(interrupts=True)
    lock, memory = page_lock(runtime), np.zeros(8192, dtype=np.uint8)
    with contextlib.suppress(KeyboardInterrupt):
        lock(memory.data)
        pytest.fail("it was not interrupted")
    assert (runtime.now, lock.locked, lock.refused) == ({}, 0, False)
