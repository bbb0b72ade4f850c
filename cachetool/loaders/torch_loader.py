"""The loader for PyTorch: batches as tensors over the shared memory of the feeders, without a copy and without a
thread."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any, ClassVar, NoReturn

import torch
from torch import distributed

from cachetool.core.docstrings import arguments_of
from cachetool.core.errors import UsageError
from cachetool.core.units import parse_flag
from cachetool.loaders.loader import BaseLoader, CacheOrPaths
from cachetool.loaders.mixture import Weights
from cachetool.loaders.padding import opened
from cachetool.loaders.ranks import launched
from cachetool.loaders.ring.slot import Batch
from cachetool.loaders.torch_device import parse_device, prefetched
from cachetool.loaders.torch_values import finished, initialised, least, shared_run, world

__all__ = ["Loader"]


@arguments_of(BaseLoader)
class Loader(BaseLoader[dict[str, Any]]):
    """Batches of a cache as dicts of PyTorch tensors.

    ``batch[name]`` is a tensor of shape (k, *shape) for a field of numbers, a :class:`TensorList` for a ragged field,
    and a list of k values for a field of ``str`` or ``bytes``; k is at most ``batch_size``. The dtype is that of the
    field; ``datetime64`` and ``timedelta64`` become int64. Tensors on the CPU are views of shared memory, which is
    filled again only when nothing refers to them any more.

    Without ``rank`` and ``world_size`` the loader takes those of torch.distributed, if it is initialised when an epoch
    or its length is first asked for. All ranks then agree on the number of steps by one ``all_reduce`` for each epoch,
    unless ``steps`` is given.

    Args:
        device: Device of the tensors, such as ``"cuda"`` or ``"cuda:1"``. Batches are copied there ahead of the
            training step, on a stream of their own. Default: host memory.
        agree: True: all ranks of torch.distributed agree on the least number of steps that any of them can take, also
            where ``rank`` and ``world_size`` are given. Use it where each node has a cache of its own;
            torch.distributed must be initialised when the first epoch begins. Default: False.

    Example:
        >>> from cachetool.loaders.torch import Loader
        >>> with Loader("data/cache", batch_size=8, fields=["volume", "label"]) as loader:
        ...     for batch in loader:
        ...         volumes, labels = batch["volume"], batch["label"]
        >>> volumes.shape, volumes.dtype
        (torch.Size([8, 16, 16, 16]), torch.float32)
    """

    # DevicePrefetcher locks the memory of such a loader. Tensors are copied to the device and never handed out then,
    # but NumPy arrays would be.
    gives_tensors: ClassVar = True

    def __init__(
        self,
        cache_or_paths: CacheOrPaths | Weights,
        *,
        device: torch.device | str | int | None = None,
        agree: bool = False,
        **options: Any,
    ) -> None:
        self.device = None if device is None else parse_device(device)
        self._agree = parse_flag(agree, what="agree=")
        self._fixed_steps = options.get("steps") is not None
        super().__init__(cache_or_paths, **options)

    @property
    def _collective(self) -> bool:
        """See :class:`BaseLoader`."""
        return initialised() and (self._agree or self._given is None)

    def _world(self) -> tuple[int, int]:
        rank, world_size = self._given or world()
        if self._agree and not initialised() and max(world_size, launched()[1]) > 1:
            raise UsageError("agree=True needs torch.distributed; call torch.distributed.init_process_group() first")
        return rank, world_size

    def _shared_run(self) -> str | None:
        return shared_run() if self._collective and distributed.get_world_size() > 1 else None

    def _agreed(self, steps: int) -> int:
        # With steps= all ranks take the same number without asking, so the collective is saved.
        if not self._collective or self._fixed_steps or distributed.get_world_size() == 1:
            return steps
        # One all_reduce gives the least number of steps and, by the minimum of e and -e, the lowest and highest number
        # of the epoch.
        steps, first, last = least(steps, self._last, -self._last)
        if first != -last:
            raise UsageError(
                f"the ranks begin different epochs ({first} to {-last}), so samples would be read twice; on all ranks"
                " leave the same loops with break, and set the same loader.epoch"
            )
        return steps

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Begin an epoch, on ``device`` if one was given; older iterators of this loader end with an error."""
        return self.begin() if self.device is None else prefetched(self.begin, self.device)

    def __getitem__(self, index: object) -> NoReturn:
        """Raise :class:`UsageError`, because a ``DataLoader`` would ask a loader for single samples."""
        raise UsageError(
            "a Loader makes batches in its own processes: iterate it, or pass it to the trainer directly, not inside a"
            " DataLoader; docs/README.md lists a page for each trainer"
        )

    def _finish(self, batch: Batch) -> dict[str, Any]:
        columns = opened(batch.columns, self._settings.pad, self._settings.varlen)
        return {
            field.name: finished(field, column) if not isinstance(column := columns[field.name], int) else column
            for field in batch.schema
        }


def _signature() -> inspect.Signature:
    """Return the signature with all arguments, for ``help()`` and notebooks, which would only see ``**options``."""
    own, base = (inspect.signature(cls.__init__) for cls in (Loader, BaseLoader))
    added = [own.parameters[name] for name in own.parameters if name not in (*base.parameters, "options")]
    return base.replace(parameters=[*base.parameters.values(), *added])


Loader.__init__.__signature__ = _signature()  # type: ignore[attr-defined]
