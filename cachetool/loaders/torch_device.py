"""Batches on a device before they are asked for, copied beside the computation.

Slots locked in memory for a GPU, which fetches batches out of them by itself while the training process goes on.

A copy out of ordinary memory is made by the training process: into a buffer of the driver, piece by piece, with a
processor all the time. Out of locked memory it is only asked for. The feeders do not know: the memory stays what and
where it is. Whoever has locked slots must keep a batch until its copy is done; so no array of
one is ever handed out.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import os
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from typing import Any

import numpy as np
import torch
from torch.nn.utils.rnn import PackedSequence

from cachetool.core.errors import UsageError
from cachetool.core.text import shown
from cachetool.core.units import parse_whole
from cachetool.loaders.device import copied_ahead
from cachetool.loaders.epoch import Epoch, check_batches
from cachetool.loaders.fixed_epochs import FixedEpochs
from cachetool.loaders.torch_values import TensorList

__all__ = ["DevicePrefetcher", "page_lock", "parse_device", "prefetched"]


_PORTABLE = 1  # cudaHostRegisterPortable: locked for every device


def page_lock(device: torch.device) -> PageLock | None:
    """What locks slots for copies to a device, the same object for the same device; None where nothing does."""
    if device.type != "cuda":
        return None
    return _page_lock(torch.cuda.current_device() if device.index is None else device.index)


@functools.cache
def _page_lock(index: int) -> PageLock:
    return PageLock(index)


class PageLock:
    """Locks memory for copies to one CUDA device (:data:`~cachetool.loaders.ring.ring.Lock`). Where the driver refuses,
    the memory stays as it is, which is slower and no less right; it is then not asked again."""

    def __init__(self, index: int) -> None:
        self._index, self._runtime = index, torch.cuda.cudart()  # type: ignore[no-untyped-call]
        self.locked = 0
        """Bytes that are locked now."""
        self.refused = False

    def __call__(self, memory: memoryview) -> object:
        """The memory, locked for as long as what this gives is there."""
        if self.refused or not memory.nbytes:
            return memory
        address, nbytes = int(np.frombuffer(memory, dtype=np.uint8).ctypes.data), memory.nbytes
        locked, registered = _Locked(), [True]  # until it is known not to be: an interrupt may come with the answer
        weakref.finalize(locked, self._unlock, address, memory, os.getpid(), registered).atexit = False
        self.locked += nbytes
        with torch.cuda.device(self._index):  # else the first device would be made ready too, half a gigabyte of it
            if int(self._runtime.cudaHostRegister(address, nbytes, _PORTABLE)):
                registered.clear()
                self.refused = True
                self._forget_error()
                return memory
        return locked

    def _unlock(self, address: int, memory: memoryview, pid: int, registered: list[bool]) -> None:
        """Before the memory may go: only now does nothing see it any more."""
        if os.getpid() != pid:
            return  # a forked copy
        self.locked -= memory.nbytes
        if not registered:
            return
        with contextlib.suppress(RuntimeError), torch.cuda.device(self._index):
            if int(self._runtime.cudaHostUnregister(address)):
                self._forget_error()

    def _forget_error(self) -> None:
        """PyTorch takes what the runtime remembers of a failed call for an error of the next kernel."""
        with contextlib.suppress(RuntimeError):
            torch.zeros(1, device=f"cuda:{self._index}")


class _Locked:
    """Keeps a lock."""

    __slots__ = ("__weakref__",)


def parse_device(device: torch.device | str | int) -> torch.device:
    """The device, which is not looked for. Raises :class:`UsageError` for what is none."""
    try:
        return torch.device(device)
    except (RuntimeError, TypeError, ValueError) as error:
        raise UsageError(f"device={shown(device)} cannot be used: {str(error).splitlines()[0]}") from None


def prefetched(
    begin: Callable[[], Iterator[Any]], device: torch.device, depth: int = 2, *, lock: bool = True
) -> Iterator[Any]:
    """The batches that ``begin`` gives an iterator of, on a device, as by :class:`DevicePrefetcher`. Raises
    :class:`UsageError` before anything is begun where PyTorch finds no such device.

    ``lock``: whether memory that feeders share may be locked: none of it is then handed out here, or by anybody else.
    """
    if device.type == "cpu":
        return begin()
    module = _module(device)
    if not hasattr(module, "Stream"):  # mps
        return (_map(batch, lambda tensor: tensor.to(device)) for batch in begin())
    batches = begin()
    if isinstance(batches, Epoch) and lock:
        batches.progress.feed.lock_pages(page_lock(device))
    return copied_ahead(batches, functools.partial(_Copy, device, module, module.Stream(device)), depth)


def _module(device: torch.device) -> Any:
    """PyTorch's module for a device. Raises :class:`UsageError` where PyTorch finds no such device."""
    try:
        module = torch.get_device_module(device)
        there = getattr(module, "is_available", lambda: True)()
    except RuntimeError:
        there = False
    if not there:
        raise UsageError(
            f"device={str(device)!r} cannot be used: PyTorch {torch.__version__} finds no such device here; leave out"
            " device=, or install a PyTorch for it"
        )
    count = module.device_count() if hasattr(module, "device_count") else None
    if device.index is not None and count is not None and device.index >= count:
        raise UsageError(f"device={str(device)!r} cannot be used: there are {count} here, numbered from 0")
    return module


class DevicePrefetcher:
    """The batches of ``loader`` on ``device``, up to ``depth`` of them on their way while one is computed with.

    Works for any iterable of tensors and of dicts, lists and tuples of them; what is no tensor stays as it is. The
    copies run on a stream of their own; the stream that asks for a batch waits for that batch's copy alone. A batch in
    host memory is kept until its copy is done. Where PyTorch has no streams (mps) a batch is copied when it is asked
    for; on the CPU batches pass through.

    Of a loader of ours no batch is waited for while there is one to hand out; a batch counts, for ``state_dict()``,
    when it is handed out; and the memory that feeders share is locked, so that a CUDA device copies by itself. Other
    iterables do well to give pinned tensors. Raises :class:`UsageError` for a ``depth`` below 1, what is no device and
    what gives no batches, and by ``iter()`` for a device that PyTorch does not find here.
    """

    def __init__(self, loader: Iterable[Any], device: torch.device | str | int, *, depth: int = 2) -> None:
        check_batches(loader)
        self._loader, self._device = loader, parse_device(device)
        self._depth = parse_whole(depth, what="depth=", least=1)

    def __len__(self) -> int:
        return len(self._loader)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Any]:
        loader: Any = self._loader
        if isinstance(loader, FixedEpochs):  # whose passes are prefetched, each by itself
            passes, device = DevicePrefetcher(loader.loader, self._device, depth=self._depth), self._device
            return loader.begun_by(lambda: iter(passes), how=("torch", device))
        # Not of an epoch, whose owner may go on with it himself, nor of arrays, which are handed out as they are.
        lock = getattr(loader, "gives_tensors", False)
        if self._device.type != "cpu" and lock:  # its epoch is counted here, also where it has a device of its own
            return prefetched(loader.begin, self._device, self._depth)
        return prefetched(lambda: iter(loader), self._device, self._depth, lock=lock)


class _Copy:
    """See :class:`~cachetool.loaders.device.Copy`. All copies of a loop run on one stream."""

    __slots__ = ("_device", "_event", "_module", "_stream", "_tensors")

    def __init__(self, device: torch.device, module: Any, stream: Any) -> None:
        self._device, self._module, self._stream = device, module, stream
        self._event = module.Event()
        self._tensors: list[torch.Tensor] = []

    def begin(self, batch: Any) -> Any:
        stream = self._stream  # a context manager by itself since PyTorch 2.7, and quicker
        with stream if hasattr(stream, "__enter__") else self._module.stream(stream):
            try:
                return _map(batch, functools.partial(_moved, self._device, self._tensors))
            finally:  # also behind the first tensor, when the second fails
                self._event.record(stream)

    def arrive(self) -> None:
        now = self._module.current_stream(self._stream.device_index)  # a number, which need not be looked up
        now.wait_event(self._event)
        # Memory that was made on the one stream and is used on the other must not be given out again in between.
        _record(self._tensors, now)
        self._tensors.clear()

    def wait(self) -> None:
        self._stream.synchronize()  # not the event, which an interrupt may have left without a record

    @property
    def done(self) -> bool:
        return bool(self._event.query())


def _record(tensors: Iterable[torch.Tensor], stream: Any) -> None:
    for tensor in tensors:
        tensor.record_stream(stream)


def _moved(device: torch.device, tensors: list[torch.Tensor], tensor: torch.Tensor) -> torch.Tensor:
    """The tensor on the device, noted in ``tensors``."""
    tensors.append(tensor.to(device, non_blocking=True))
    return tensors[-1]


def _map(value: Any, function: Callable[[torch.Tensor], Any]) -> Any:
    """``value`` with every tensor replaced."""
    if isinstance(value, torch.Tensor):
        return function(value)
    if isinstance(value, TensorList):
        return TensorList.of(function(value.values), value.offsets.copy(), value.shapes.copy())
    if isinstance(value, Mapping):
        there = {name: _map(element, function) for name, element in value.items()}
        if type(value) is dict or not isinstance(value, MutableMapping):
            return there
        like = copy.copy(value)  # an OrderedDict, or the batch of a tokenizer, stays one
        like.update(there)
        return like
    if isinstance(value, PackedSequence):  # its sizes belong to the host
        sorted_, unsorted = (None if element is None else function(element) for element in value[2:])
        return type(value)(function(value.data), value.batch_sizes, sorted_, unsorted)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_map(element, function) for element in value))
    if isinstance(value, list | tuple):
        return type(value)(_map(element, function) for element in value)
    return value
