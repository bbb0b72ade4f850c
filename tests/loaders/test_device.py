"""How long a batch is kept that is on its way to a device: a device whose copies are done when the test says so."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cachetool.loaders import torch_device
from cachetool.loaders.torch import DevicePrefetcher


class Device:
    """Its events in the order of the batches, and which batches were there when an event was waited for."""

    def __init__(self) -> None:
        device = self
        self.done: set[int] = set()
        self.recorded: dict[int, bool] = {}
        self.waited: dict[int, bool] = {}
        self.batches: list[weakref.ref[torch.Tensor]] = []
        self.events = 0

        class Event:
            def __init__(self) -> None:
                self.number, device.events = device.events, device.events + 1

            def record(self, _: object) -> None:
                device.recorded[self.number] = True

            def query(self) -> bool:
                return self.number in device.done

            def synchronize(self) -> None:
                device.waited[self.number] = self.number in device.there
                device.done.add(self.number)

        self.module = SimpleNamespace(
            Stream=lambda _: None,
            Event=Event,
            stream=lambda _: contextlib.nullcontext(),
            current_stream=lambda _: SimpleNamespace(wait_event=lambda _: None),
        )

    def send(self, count: int) -> Iterator[Any]:
        """Batches that nobody else keeps."""
        for number in range(count):
            tensor = torch.tensor([number])
            self.batches.append(weakref.ref(tensor))
            batch = {"x": tensor}
            del tensor
            yield batch
            del batch

    @property
    def there(self) -> list[int]:
        """The batches that still lie in this host's memory."""
        return [number for number, batch in enumerate(self.batches) if batch() is not None]


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    device = Device()
    monkeypatch.setattr(torch_device, "_module", lambda _: device.module)
    monkeypatch.setattr(torch_device, "_record", lambda *_, **__: None)
    return device


def test_a_batch_is_kept_until_its_copy_is_done_and_no_longer(device: Device) -> None:
    batches = iter(DevicePrefetcher(device.send(6), "meta", depth=1))
    for _ in range(3):
        next(batches)
    assert device.there == [0, 1, 2, 3]  # three handed out, one on its way
    device.done = {0}
    next(batches)
    assert device.there == [1, 2, 3, 4]
    device.done = {0, 1, 2, 3, 4}
    next(batches)
    assert device.there == [5]


@pytest.mark.parametrize("how", ["closed", "forgotten", "failed"])
def test_a_loop_that_is_left_waits_for_all_its_copies_while_their_batches_are_there(device: Device, how: str) -> None:
    """Those of batches that were handed out, and those on their way: their memory would be filled again."""
    batches: Any = iter(DevicePrefetcher(device.send(9), "meta", depth=2))
    for _ in range(3):
        next(batches)
    device.done = {0}  # as is noticed with the next batch
    next(batches)
    if how == "closed":
        batches.close()
    elif how == "forgotten":
        del batches
    else:
        with pytest.raises(KeyboardInterrupt):
            batches.throw(KeyboardInterrupt)
    assert device.waited == dict.fromkeys([1, 2, 3, 4, 5], True)


def test_at_the_end_all_copies_are_waited_for(device: Device) -> None:
    assert len(list(DevicePrefetcher(device.send(4), "meta"))) == 4
    assert device.waited == dict.fromkeys(range(4), True)
    assert device.there == []


def test_copies_before_one_that_fails_are_waited_for(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch whose second tensor finds no memory there, while the first one is on its way."""
    copies: list[int] = []

    def to(tensor: torch.Tensor, *_: object, **__: object) -> torch.Tensor:
        copies.append(int(tensor))
        if len(copies) == 6:
            raise torch.OutOfMemoryError("the device is full")
        return tensor.clone()

    monkeypatch.setattr(torch.Tensor, "to", to)
    pairs = ({"x": batch["x"], "again": batch["x"]} for batch in device.send(5))
    batches = iter(DevicePrefetcher(pairs, "meta", depth=1))
    next(batches)
    with pytest.raises(torch.OutOfMemoryError):
        next(batches)
    assert copies == [0, 0, 1, 1, 2, 2]
    assert device.recorded == device.waited == dict.fromkeys([0, 1, 2], True)
