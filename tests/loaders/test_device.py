"""The time that a batch is kept while it is copied to a device. The device's copies end when the test says so."""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cachetool.cache import CacheDir
from cachetool.core.errors import UsageError
from cachetool.loaders import torch_device
from cachetool.loaders.torch import DevicePrefetcher, Loader


class Device:
    """A device that records its events in the order of the batches, and the live batches at each wait for an event."""

    def __init__(self) -> None:
        device = self
        self.done: set[int] = set()
        self.recorded: dict[int, bool] = {}
        self.waited: dict[int, bool] = {}
        self.batches: list[weakref.ref[torch.Tensor]] = []
        self.events = 0
        self.interrupts = 0

        class Stream:
            device_index = 0

            def __init__(self, _: object) -> None:
                pass

            def synchronize(self) -> None:
                if device.interrupts:
                    device.interrupts -= 1
                    raise KeyboardInterrupt
                device.waited |= {each: each in device.there for each in device.recorded if each not in device.done}
                device.done |= set(device.recorded)

        class Event:
            def __init__(self) -> None:
                self.number, device.events = device.events, device.events + 1

            def record(self, _: object) -> None:
                device.recorded[self.number] = True

            def query(self) -> bool:
                return self.number in device.done

        self.module = SimpleNamespace(
            Stream=Stream,
            Event=Event,
            stream=lambda _: contextlib.nullcontext(),
            current_stream=lambda _: SimpleNamespace(wait_event=lambda _: None),
        )

    def send(self, count: int) -> Iterator[Any]:
        """Yield batches that nothing else keeps."""
        for number in range(count):
            tensor = torch.tensor([number])
            self.batches.append(weakref.ref(tensor))
            batch = {"x": tensor}
            del tensor
            yield batch
            del batch

    @property
    def there(self) -> list[int]:
        """Return the batches that are still in host memory."""
        return [number for number, batch in enumerate(self.batches) if batch() is not None]


def test_a_device_number_that_does_not_exist_is_refused_before_an_epoch_begins(
    cache: CacheDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = SimpleNamespace(is_available=lambda: True, device_count=lambda: 2, Stream=None)
    monkeypatch.setattr(torch, "get_device_module", lambda _: module)
    with Loader(cache, batch_size=4, device="cuda:2") as loader:
        with pytest.raises(UsageError, match="device='cuda:2' cannot be used: this machine has 2 "):
            iter(loader)
        assert loader._feed is None


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
    assert device.there == [0, 1, 2, 3]  # three delivered, one on its way
    device.done = {0}
    next(batches)
    assert device.there == [1, 2, 3, 4]
    device.done = {0, 1, 2, 3, 4}
    next(batches)
    assert device.there == [5]


@pytest.mark.parametrize("itself", [True, False])
def test_copies_are_issued_on_their_own_stream(device: Device, monkeypatch: pytest.MonkeyPatch, itself: bool) -> None:
    """``itself``: a stream that makes itself the current one, as since PyTorch 2.7."""
    current, asked = [False], []

    @contextlib.contextmanager
    def own(_: object) -> Iterator[None]:
        current[0] = True
        yield
        current[0] = False

    if itself:
        stream = device.module.Stream
        stream.__enter__ = lambda _: current.__setitem__(0, True)
        stream.__exit__ = lambda *_: current.__setitem__(0, False)
    else:
        device.module.stream = own

    def to(tensor: torch.Tensor, *_: object, **__: object) -> torch.Tensor:
        asked.append(current[0])
        return tensor

    monkeypatch.setattr(torch.Tensor, "to", to)
    found = [current[0] for _ in DevicePrefetcher(device.send(5), "meta")]
    assert asked == [True] * 5
    assert found == [False] * 5


@pytest.mark.parametrize("how", ["closed", "forgotten", "failed"])
def test_a_loop_that_is_left_keeps_its_batches_until_all_copies_end(device: Device, how: str) -> None:
    """Both delivered batches and those on their way; otherwise their memory would be filled again."""
    batches: Any = iter(DevicePrefetcher(device.send(9), "meta", depth=2))
    for _ in range(3):
        next(batches)
    device.done = {0}  # noticed with the next batch
    next(batches)
    if how == "closed":
        batches.close()
    elif how == "forgotten":
        del batches
    else:
        with pytest.raises(KeyboardInterrupt):
            batches.throw(KeyboardInterrupt)
    assert device.waited == dict.fromkeys([1, 2, 3, 4, 5], True)


@pytest.mark.parametrize(
    ("batches", "depth", "said"),
    [
        ("data/cache", 2, "'data/cache' is not an iterable of batches"),
        (None, 2, "None is not an iterable of batches"),
        ([], 0, "depth=0 cannot be used; it must be at least 1"),
        ([], "2", "depth='2' is not a whole number"),
    ],
)
def test_an_invalid_iterable_and_an_invalid_depth_are_refused(batches: Any, depth: Any, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        DevicePrefetcher(batches, "cpu", depth=depth)


def test_the_end_of_an_epoch_waits_for_all_copies(device: Device) -> None:
    assert len(list(DevicePrefetcher(device.send(4), "meta"))) == 4
    assert device.waited == dict.fromkeys(range(4), True)
    assert device.there == []


def test_a_failing_copy_waits_for_the_copies_before_it(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second tensor of a batch finds no memory on the device while the first one is being copied."""
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


def test_an_interrupt_during_a_wait_for_copies_is_raised_after_they_end(device: Device) -> None:
    batches: Any = iter(DevicePrefetcher(device.send(4), "meta"))
    next(batches)
    device.interrupts = 1
    with pytest.raises(KeyboardInterrupt):
        batches.close()
    assert device.waited == dict.fromkeys([0, 1, 2], True)


def test_a_batch_that_its_user_dropped_is_not_kept_while_the_next_one_is_copied(
    cache: CacheDir, device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    had: list[weakref.ref[torch.Tensor]] = []

    def to(tensor: torch.Tensor, *_: object, **__: object) -> torch.Tensor:
        assert not any(batch() is not None for batch in had)
        return tensor.clone()

    monkeypatch.setattr(torch.Tensor, "to", to)
    with Loader(cache, batch_size=8, fields=["x"], workers=0, device="meta") as loader:
        for batch in loader:
            had.append(weakref.ref(batch["x"]))
            del batch
    assert device.events == len(had) == 8


def test_a_device_without_streams_gets_batches_on_request(
    cache: CacheDir, device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch_device, "_module", lambda _: SimpleNamespace(Event=device.module.Event))
    with Loader(cache, batch_size=8, fields=["x"], workers=0, device="meta") as loader:
        seen = [(batch["x"].device.type, loader.state_dict()["taken"]) for batch in loader]
    assert seen == [("meta", taken) for taken in (*range(1, 8), 0)]


@pytest.mark.parametrize("own", [None, "meta"])
def test_a_prefetcher_of_a_loader_counts_delivered_batches(cache: CacheDir, device: Device, own: str | None) -> None:
    """The rule also holds for a loader that has a device of its own."""
    options: dict[str, Any] = {"batch_size": 8, "fields": ["x"], "workers": 0}
    with Loader(cache, device=own, **options) as loader:
        taken = [loader.state_dict()["taken"] for _ in DevicePrefetcher(loader, "meta", depth=3)]
    assert taken == [*range(1, 8), 0]


@pytest.mark.parametrize(("prefetched", "most"), [(False, 30), (True, 4)])
def test_a_prefetcher_takes_a_few_batches_at_a_time(
    cache: CacheDir, device: Device, monkeypatch: pytest.MonkeyPatch, prefetched: bool, most: int
) -> None:
    """The only step in a GPU's queue takes a third of a millisecond, which is shorter than taking dozens of batches. A
    loader alone takes dozens, but only from the first half of an epoch until that half was delivered.
    """
    with Loader(cache, batch_size=1, fields=["x"], workers=2, drop_last=True) as loader:
        taken: list[int] = []
        take = type(loader._fed()).take

        def noted(feed: Any, generation: int, step: int, *others: int) -> Any:
            while step == 0 and not all(ring.poll() and ring.ready == 16 for ring in feed._rings):
                assert feed._keeper.poll() is None
            batches = take(feed, generation, step, *others)
            taken.append(len(batches))
            return batches

        monkeypatch.setattr(type(loader._fed()), "take", noted)
        for _ in DevicePrefetcher(loader, "meta") if prefetched else loader:
            pass
    assert (taken[0], max(taken), sum(taken)) == (most, most, 60)


@pytest.mark.parametrize("own", [None, "meta"])
def test_an_epoch_interrupted_at_its_last_batch_continues_with_that_batch(
    cache: CacheDir, device: Device, own: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: dict[str, Any] = {"batch_size": 8, "fields": ["number"], "workers": 0, "shuffle": False}
    with Loader(cache, device=own, **options) as loader:
        got: list[Any] = []
        with monkeypatch.context() as patched:
            patched.setattr(type(loader._fed()), "delivered", interrupt)
            with pytest.raises(KeyboardInterrupt):
                got.extend(loader)
        state = loader.state_dict()
    assert (len(got), state["epoch"], state["taken"]) == (7, 0, 7)
    with Loader(cache, device=None, **options) as again:
        again.load_state_dict(state)
        assert [batch["number"].tolist() for batch in again] == [list(range(53, 60))]


def interrupt(*_: object) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("own", [None, "meta"])
def test_a_loop_that_is_left_before_an_error_keeps_no_batch(cache: CacheDir, device: Device, own: str | None) -> None:
    """The error waits after the batches before it, and its traceback refers to the epoch."""

    def fails(sample: dict[str, Any]) -> dict[str, Any]:
        if sample["number"] >= 16:
            raise OSError("the third batch")
        return sample

    options: dict[str, Any] = {"batch_size": 8, "fields": ["number"], "workers": 0, "shuffle": False}
    with Loader(cache, device=own, transform=fails, **options) as loader:
        gc.disable()
        try:
            batches: Any = iter(loader)
            next(batches)
            epoch = loader._latest
            assert epoch is not None
            del batches
            assert epoch() is None
        finally:
            gc.enable()
