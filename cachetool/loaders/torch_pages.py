"""Slots locked in memory for a GPU, which fetches batches out of them by itself while the training process goes on.

A copy out of ordinary memory is made by the training process: into a buffer of the driver, piece by piece, with a
processor all the time. Out of locked memory it is only asked for. The feeders do not know: the memory stays what and
where it is. Whoever has locked slots must keep a batch until its copy is done; so no array of
one is ever handed out.
"""

from __future__ import annotations

import contextlib
import functools
import os
import weakref

import numpy as np
import torch

__all__ = ["page_lock"]

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
