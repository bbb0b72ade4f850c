"""Slots locked in memory: only while copies of ours are made of them, and for as long as anything sees them.

By a lock that takes notes; ``test_gpu.py`` has a real one.
"""

from __future__ import annotations

import contextlib
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from cachetool.cache import CacheDir
from cachetool.loaders import torch_device
from cachetool.loaders.arena import HUGE
from cachetool.loaders.numpy import Loader
from cachetool.loaders.ring import Ring, RingWriter
from cachetool.loaders.torch import Loader as TorchLoader
from tests.loaders.test_ring import send


class Locks:
    """A :data:`~cachetool.loaders.ring.Lock`: which memory is locked now."""

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
        bytes(memory[:1])  # or the process is gone: it must be there yet
        self.now.remove((start, memory.nbytes))

    def cover(self, address: int) -> bool:
        return any(start <= address < start + nbytes for start, nbytes in self.now)


def covered(locks: Locks, batch: dict[str, Any]) -> set[bool]:
    return {locks.cover(int(batch[name].ctypes.data)) for name in ("x", "number")}


@pytest.mark.parametrize("workers", [1, 2])
def test_slots_are_locked_for_an_epoch_and_not_for_the_next(cache: CacheDir, workers: int) -> None:
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


def test_a_batch_keeps_its_lock_when_the_loader_is_gone(cache: CacheDir) -> None:
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


def test_a_slot_that_is_made_larger_is_locked_where_it_lies_then() -> None:
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


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device that copies at once, into memory like any other."""

    class Event:
        query = staticmethod(lambda: True)
        record = synchronize = staticmethod(lambda *_: None)

    module = SimpleNamespace(
        Stream=lambda _: None,
        Event=Event,
        stream=lambda _: contextlib.nullcontext(),
        current_stream=lambda _: SimpleNamespace(wait_event=lambda _: None),
    )
    monkeypatch.setattr(torch_device, "_module", lambda _: module)
    monkeypatch.setattr(torch_device, "_record", lambda *_, **__: None)


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("workers", [0, 1, 2])
def test_a_batch_is_not_kept_back_while_the_next_one_is_waited_for(
    cache: CacheDir, tmp_path: Path, workers: int
) -> None:
    """Those behind the first are only made once it has arrived."""
    arrived = tmp_path / "arrived"

    def after(sample: dict[str, Any]) -> dict[str, Any]:
        until = time.monotonic() + 60
        while sample["number"] >= 8 and not arrived.exists():
            assert time.monotonic() < until, "the first batch did not arrive"
            time.sleep(0.01)
        return {"number": sample["number"]}

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
def test_memory_is_locked_for_a_device_that_can_and_by_no_one_else(
    cache: CacheDir, monkeypatch: pytest.MonkeyPatch
) -> None:
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
