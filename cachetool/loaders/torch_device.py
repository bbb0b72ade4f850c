"""Batches on a device before they are asked for, copied beside the computation.

A CUDA device can fetch a batch from host memory by itself, while the training process continues, if the memory is
locked (page-locked). From ordinary memory the training process has to copy piece by piece through a buffer of the
driver, which occupies a processor all the time: 7.5 to 8.2 GB/s instead of 55 on an H200.

So the slots of the feeders are locked. The feeders need not know, because the memory stays where it is. A batch in
locked memory must be kept until its copy is done, so no array of such a batch is ever handed out.
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


# The flag cudaHostRegisterPortable: the memory counts as locked for every device, not only for the present one.
_PORTABLE = 1


def page_lock(device: torch.device) -> PageLock | None:
    """Return the lock of slots for copies to a device, one object for each device; None if the device needs none."""
    if device.type != "cuda":
        return None
    return _page_lock(torch.cuda.current_device() if device.index is None else device.index)


@functools.cache
def _page_lock(index: int) -> PageLock:
    return PageLock(index)


class PageLock:
    """A lock of host memory for copies to one CUDA device (:data:`~cachetool.loaders.ring.ring.Lock`).

    If the driver refuses, the memory stays unlocked, which is slower but correct, and the driver is not asked again.
    """

    def __init__(self, index: int) -> None:
        self._index, self._runtime = index, torch.cuda.cudart()  # type: ignore[no-untyped-call]
        self.locked = 0
        """Bytes that are locked now."""
        self.refused = False

    def __call__(self, memory: memoryview) -> object:
        """Lock the memory for as long as the returned object lives."""
        if self.refused or not memory.nbytes:
            return memory
        address, nbytes = int(np.frombuffer(memory, dtype=np.uint8).ctypes.data), memory.nbytes
        # The unlocker exists before the lock, and assumes success until the driver has refused: an interrupt may come
        # together with the answer, and memory that stays locked could never be given back.
        locked, registered = _Locked(), [True]
        weakref.finalize(locked, self._unlock, address, memory, os.getpid(), registered).atexit = False
        self.locked += nbytes
        # Without this the call would also initialise the first device, which takes half a gigabyte of its memory.
        with torch.cuda.device(self._index):
            if int(self._runtime.cudaHostRegister(address, nbytes, _PORTABLE)):
                registered.clear()
                self.refused = True
                self._forget_error()
                return memory
        return locked

    def _unlock(self, address: int, memory: memoryview, pid: int, registered: list[bool]) -> None:
        """Unlock the memory when nothing refers to the lock any more, before the memory may be unmapped."""
        # In a forked child the finalizer runs too, but the lock belongs to the parent, and CUDA cannot be used here.
        if os.getpid() != pid:
            return
        self.locked -= memory.nbytes
        if not registered:
            return
        with contextlib.suppress(RuntimeError), torch.cuda.device(self._index):
            if int(self._runtime.cudaHostUnregister(address)):
                self._forget_error()

    def _forget_error(self) -> None:
        """Clear the error that the CUDA runtime remembers of a failed call."""
        with contextlib.suppress(RuntimeError):
            # PyTorch would take the remembered error for one of the next kernel. A small call that raises it here
            # clears it.
            torch.zeros(1, device=f"cuda:{self._index}")


class _Locked:
    """An object whose life is that of a lock."""

    __slots__ = ("__weakref__",)


def parse_device(device: torch.device | str | int) -> torch.device:
    """Return the device, without a check that it exists. Raise :class:`UsageError` for a value that is no device."""
    try:
        return torch.device(device)
    except (RuntimeError, TypeError, ValueError) as error:
        raise UsageError(f"device={shown(device)} cannot be used: {str(error).splitlines()[0]}") from None


def prefetched(
    begin: Callable[[], Iterator[Any]], device: torch.device, depth: int = 2, *, lock: bool = True
) -> Iterator[Any]:
    """Return the batches of the iterator that ``begin`` returns on a device, as :class:`DevicePrefetcher` does.

    If PyTorch does not find the device, raises :class:`UsageError` before anything is begun. ``lock`` is True if memory
    that feeders share may be locked; neither this function nor any other code may then hand that memory out.
    """
    if device.type == "cpu":
        return begin()
    module = _module(device)
    # PyTorch has no streams for mps, so nothing can be copied beside the computation.
    if not hasattr(module, "Stream"):
        return (_map(batch, lambda tensor: tensor.to(device)) for batch in begin())
    batches = begin()
    if isinstance(batches, Epoch) and lock:
        batches.progress.feed.lock_pages(page_lock(device))
    return copied_ahead(batches, functools.partial(_Copy, device, module, module.Stream(device)), depth)


def _module(device: torch.device) -> Any:
    """Return PyTorch's module for a device. Raises :class:`UsageError` if PyTorch does not find the device."""
    try:
        module = torch.get_device_module(device)
        there = getattr(module, "is_available", lambda: True)()
    except RuntimeError:
        there = False
    if not there:
        raise UsageError(
            f"device={str(device)!r} cannot be used: PyTorch {torch.__version__} finds no such device here; leave out"
            " device=, or install a PyTorch that supports it"
        )
    count = module.device_count() if hasattr(module, "device_count") else None
    if device.index is not None and count is not None and device.index >= count:
        raise UsageError(
            f"device={str(device)!r} cannot be used: this machine has {count} such devices, numbered from 0"
        )
    return module


class DevicePrefetcher:
    """The batches of an iterable on a device, copied ahead of the computation.

    A batch is a tensor, or a dict, list or tuple of tensors; other values stay as they are. The copies run on a stream
    of their own. On the CPU batches pass through unchanged; where PyTorch has no streams (``mps``), a batch is copied
    when it is asked for. A batch of a cachetool loader counts for ``state_dict()`` when it is handed out. Its shared
    memory is page-locked; for other iterables use pinned tensors.

    Args:
        loader: A loader of cachetool, its ``epochs_of(steps=N)``, or any other iterable of batches.
        device: The device, such as ``"cuda"``, ``"cuda:1"`` or a ``torch.device``.
        depth: Batches on their way to the device while one is in use, 1 or more. Default: 2.

    Raises:
        UsageError: ``loader`` gives no batches; ``device`` is not a device; ``depth`` is below 1; or, by ``iter()``,
            PyTorch does not find the device.

    Example:
        >>> import torch
        >>> from cachetool.loaders.torch import DevicePrefetcher
        >>> batches = [{"x": torch.zeros(4)}, {"x": torch.ones(4)}]
        >>> for batch in DevicePrefetcher(batches, "cpu"):  # "cuda" on a machine with a GPU
        ...     print(batch["x"].sum())
        tensor(0.)
        tensor(4.)
    """

    def __init__(self, loader: Iterable[Any], device: torch.device | str | int, *, depth: int = 2) -> None:
        check_batches(loader)
        self._loader, self._device = loader, parse_device(device)
        self._depth = parse_whole(depth, what="depth=", least=1)

    def __len__(self) -> int:
        return len(self._loader)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Any]:
        loader: Any = self._loader
        # An epoch of fixed length goes over the end of a pass, so each pass is prefetched by itself.
        if isinstance(loader, FixedEpochs):
            passes, device = DevicePrefetcher(loader.loader, self._device, depth=self._depth), self._device
            return loader.begun_by(lambda: iter(passes), how=("torch", device))
        # Not for an Epoch, because its owner may continue to iterate it, and not for a loader of arrays, which hands
        # them out as they are.
        lock = getattr(loader, "gives_tensors", False)
        # begin() and not iter(): a loader with a device= of its own would copy the batch there first, and count it as
        # delivered.
        if self._device.type != "cpu" and lock:
            return prefetched(loader.begin, self._device, self._depth)
        return prefetched(lambda: iter(loader), self._device, self._depth, lock=lock)


class _Copy:
    """The copy of one batch by PyTorch; see :class:`~cachetool.loaders.device.Copy`. All copies of a loop use one
    stream."""

    __slots__ = ("_device", "_event", "_module", "_stream", "_tensors")

    def __init__(self, device: torch.device, module: Any, stream: Any) -> None:
        self._device, self._module, self._stream = device, module, stream
        self._event = module.Event()
        self._tensors: list[torch.Tensor] = []

    def begin(self, batch: Any) -> Any:
        stream = self._stream
        # Since PyTorch 2.7 a stream is a context manager itself, which is quicker: 29 to 38 instead of 76 to 90 us a
        # batch.
        with stream if hasattr(stream, "__enter__") else self._module.stream(stream):
            try:
                return _map(batch, functools.partial(_moved, self._device, self._tensors))
            # Also if the second tensor fails: the first is on its way, and its copy must be awaited.
            finally:
                self._event.record(stream)

    def arrive(self) -> None:
        # A device index and not a device, because a number need not be looked up.
        now = self._module.current_stream(self._stream.device_index)
        now.wait_event(self._event)
        # The tensors were allocated on the copy stream and are used on this one. Without record_stream() the allocator
        # could give their memory out again while this stream still reads it.
        _record(self._tensors, now)
        self._tensors.clear()

    def wait(self) -> None:
        # The stream and not the event, because an interrupt may have prevented the record of the event.
        self._stream.synchronize()

    @property
    def done(self) -> bool:
        return bool(self._event.query())


def _record(tensors: Iterable[torch.Tensor], stream: Any) -> None:
    for tensor in tensors:
        tensor.record_stream(stream)


def _moved(device: torch.device, tensors: list[torch.Tensor], tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor on the device, and append it to ``tensors``."""
    tensors.append(tensor.to(device, non_blocking=True))
    return tensors[-1]


def _map(value: Any, function: Callable[[torch.Tensor], Any]) -> Any:
    """Return ``value`` with each tensor replaced by ``function(tensor)``."""
    if isinstance(value, torch.Tensor):
        return function(value)
    if isinstance(value, TensorList):
        return TensorList.of(function(value.values), value.offsets.copy(), value.shapes.copy())
    if isinstance(value, Mapping):
        there = {name: _map(element, function) for name, element in value.items()}
        if type(value) is dict or not isinstance(value, MutableMapping):
            return there
        # The type is kept: an OrderedDict, or the batch of a tokenizer, has methods that the user's code calls.
        like = copy.copy(value)
        like.update(there)
        return like
    # PyTorch requires that the sizes of a PackedSequence stay on the CPU.
    if isinstance(value, PackedSequence):
        sorted_, unsorted = (None if element is None else function(element) for element in value[2:])
        return type(value)(function(value.data), value.batch_sizes, sorted_, unsorted)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_map(element, function) for element in value))
    if isinstance(value, list | tuple):
        return type(value)(_map(element, function) for element in value)
    return value
