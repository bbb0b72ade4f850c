"""Batches on a JAX device before they are asked for.

::

    with Loader("data/cache", batch_size=64) as loader:          # cachetool.loaders.numpy
        for epoch in range(90):
            for batch in prefetch_to_device(loader):
                state = step(state, batch["image"])

The memory of a loader's arrays is used again as soon as nothing refers to them. On the CPU, JAX uses the memory of a
NumPy array for its own array if it can, so the values are copied first. For any other device the NumPy batch is kept
until its copy has arrived.
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
    """Yield the batches of ``iterable`` as JAX arrays on a device, copied ahead of the computation.

    A batch is any pytree: NumPy arrays in dicts, lists, tuples and named tuples. 64-bit numbers become 32-bit numbers
    unless ``jax_enable_x64`` is set, as always in JAX. Dates, lists of ``str`` and ``bytes``, and ragged columns stay
    as they are, because JAX has no arrays for them.

    Args:
        iterable: A :class:`cachetool.loaders.numpy.Loader`, its ``epochs_of(steps=N)``, or any other iterable of
            batches.
        size: Batches on the device ahead of the one in use, 1 or more. Default: 2.
        device: A device or a sharding of JAX. Default: the default device of JAX.

    Yields:
        The batches in order. An error of ``iterable`` is raised after the batches before it. A batch counts for the
        loader's ``state_dict()`` when it is yielded, not when its copy begins.

    Raises:
        UsageError: ``size`` is below 1; ``device`` is text; ``iterable`` is text or cannot be iterated; or a batch has
            tensors of another framework.

    Example:
        >>> from cachetool.loaders.jax import prefetch_to_device
        >>> from cachetool.loaders.numpy import Loader
        >>> with Loader("data/cache", batch_size=8, fields=["volume", "label"]) as loader:
        ...     for batch in prefetch_to_device(loader):
        ...         mean = batch["volume"].mean(axis=(1, 2, 3))
        >>> mean.shape
        (8,)
    """
    if hasattr(size, "platform") or isinstance(size, str):
        raise UsageError(f"size={size!r} is not a whole number; to choose a device use device=")
    check_batches(iterable)
    size = parse_whole(size, what="size=", least=1)
    if isinstance(device, str):
        raise UsageError(f"device={device!r} is a name, not a device of JAX; use device=jax.devices({device!r})[0]")
    # An epoch of fixed length goes over the end of a pass, so each pass is prefetched by itself.
    if isinstance(iterable, FixedEpochs):
        return iterable.begun_by(lambda: _prefetched(iterable.loader, size, device), how=("jax", device))
    return _prefetched(iterable, size, device)


def _prefetched(iterable: Iterable[Any], size: int, device: Any) -> Iterator[Any]:
    # The devices of a sharding, or JAX's default device, are known only from an array that was put there.
    devices = jax.device_put(np.int8(0), device).devices()
    on_cpu = any(target.platform == "cpu" for target in devices)
    yield from copied_ahead(iter(iterable), functools.partial(_Copy, device, on_cpu=on_cpu), size)


class _Copy:
    """The copy of one batch by JAX; see :class:`~cachetool.loaders.device.Copy`."""

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
            # On the CPU device_put() uses the memory of an aligned array, even with may_alias=False (JAX 0.10.2). The
            # JAX array would then keep the slot of the feeder, so the values are copied.
            return jax.device_put(np.array(leaf) if self._on_cpu else leaf, self._device)
        if hasattr(leaf, "__dlpack__") and not isinstance(leaf, jax.Array):
            what = f"{type(leaf).__module__}.{type(leaf).__qualname__}"
            raise UsageError(f"a batch holds a {what}, but JAX needs NumPy arrays; use cachetool.loaders.numpy.Loader")
        return leaf

    def arrive(self) -> None:
        self.wait()
        self._there = None

    def wait(self) -> None:
        jax.block_until_ready(self._there)

    @property
    def done(self) -> bool:
        # On the CPU the values were copied in begin(), so the batch in host memory is free at once.
        return self._on_cpu or self._there is None
