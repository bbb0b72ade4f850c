"""Batches on a JAX device before they are asked for.

::

    with Loader("data/cache", batch_size=64) as loader:          # cachetool.loaders.numpy
        for epoch in range(90):
            for batch in prefetch_to_device(loader):
                state = step(state, batch["image"])

A loader's arrays lie in memory that is used again once nothing sees it, and on the CPU JAX takes the memory of a NumPy
array for its own where it can. So there the values are copied first; for any other device the NumPy batch is kept until
its copy has arrived.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from cachetool.core.errors import UsageError, without
from cachetool.core.units import parse_whole
from cachetool.loaders.device import copied_ahead
from cachetool.loaders.epoch import check_batches
from cachetool.loaders.fixed_epochs import FixedEpochs

try:
    import jax
except ModuleNotFoundError as error:
    raise without("jax", "jax", error) from None

__all__ = ["prefetch_to_device"]


def prefetch_to_device(iterable: Iterable[Any], size: int = 2, device: Any = None) -> Iterator[Any]:
    """The batches of ``iterable`` as JAX arrays on ``device``, up to ``size`` of them there ahead of the one in use.

    A batch is any pytree: NumPy arrays in dicts, lists, tuples, named tuples. ``device`` is a device or a sharding of
    JAX, by default its default device. 64-bit numbers arrive in 32 bits unless ``jax_enable_x64`` is set, as always in
    JAX. What JAX has no arrays for stays as it is: dates, columns of str and bytes, ragged columns.

    Works for any iterable; of a loader an epoch counts when its last batch is handed out, not when that is on its way.
    What the iterable raises is raised after the batches before it. Raises :class:`UsageError` for a size below 1, a
    device given by its name, tensors of other frameworks, and text or what is not iterable.
    """
    if hasattr(size, "platform") or isinstance(size, str):
        raise UsageError(f"size={size!r} is not a whole number; a device is given by its name: device=")
    check_batches(iterable)
    size = parse_whole(size, what="size=", least=1)
    if isinstance(device, str):
        raise UsageError(f"device={device!r} is no device of JAX; give one, as jax.devices({device!r})[0]")
    if isinstance(iterable, FixedEpochs):  # whose passes are prefetched, each by itself
        return iterable.begun_by(lambda: _prefetched(iterable.loader, size, device), how=("jax", device))
    return _prefetched(iterable, size, device)


def _prefetched(iterable: Iterable[Any], size: int, device: Any) -> Iterator[Any]:
    devices = jax.device_put(np.int8(0), device).devices()
    on_cpu = any(target.platform == "cpu" for target in devices)
    yield from copied_ahead(iter(iterable), functools.partial(_Copy, device, on_cpu=on_cpu), size)


class _Copy:
    """See :class:`~cachetool.loaders.device.Copy`."""

    __slots__ = ("_device", "_on_cpu", "_there")

    def __init__(self, device: Any, *, on_cpu: bool) -> None:
        self._device, self._on_cpu, self._there = device, on_cpu, None

    def begin(self, batch: Any) -> Any:
        self._there = jax.tree.map(self._put, batch)
        return self._there

    def _put(self, leaf: Any) -> Any:
        if isinstance(leaf, np.ndarray | np.generic):
            if leaf.dtype.kind in "mMOSU":
                return leaf
            return jax.device_put(np.array(leaf) if self._on_cpu else leaf, self._device)
        if hasattr(leaf, "__dlpack__") and not isinstance(leaf, jax.Array):  # tensors of another framework
            what = f"{type(leaf).__module__}.{type(leaf).__qualname__}"
            raise UsageError(f"a batch holds a {what}; JAX takes NumPy's, as of cachetool.loaders.numpy.Loader")
        return leaf

    def arrive(self) -> None:
        self.wait()
        self._there = None

    def wait(self) -> None:
        jax.block_until_ready(self._there)

    @property
    def done(self) -> bool:
        return self._on_cpu or self._there is None
