"""The loader for PyTorch: batches as tensors over the feeders' shared memory, no copy and no thread in between."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any, ClassVar, NoReturn

import torch
from torch import distributed

from cachetool.core.errors import UsageError
from cachetool.core.units import parse_flag
from cachetool.loaders.loader import BaseLoader, CacheOrPaths
from cachetool.loaders.ranks import launched
from cachetool.loaders.ring.slot import Batch
from cachetool.loaders.torch_device import parse_device, prefetched
from cachetool.loaders.torch_values import finished, initialised, least, shared_run, world

__all__ = ["Loader"]


class Loader(BaseLoader[dict[str, Any]]):
    """Batches of a cache as dicts: a tensor (k, *shape) for each numeric field, a :class:`TensorList` for each ragged
    one, a list for str and bytes. datetime64 comes as int64.

    The arguments are those of :class:`cachetool.loaders.numpy.Loader`, and ``device``: where the tensors are to be,
    copied there on a stream of their own (:class:`DevicePrefetcher`). On the CPU every tensor is pageable memory of its
    own that stays as it is for as long as anything sees it: views, autograd, ``.numpy()``, a ``non_blocking`` copy.

    Without ``rank`` and ``world_size`` those of torch.distributed are taken, if it is initialised when an epoch or its
    length is first asked for. All ranks then agree by one ``all_reduce`` for each epoch on the least number of steps
    that any of them can take, unless ``steps`` says how many; a cache that holds one node's share of its source is
    divided by the ranks of that node alone. With ``agree`` they do so as well where ``rank`` and
    ``world_size`` are given: where each node has a cache of its own, which only the ranks of that node divide. Raises
    :class:`UsageError` for what no loader can be made of; the first epoch raises it for ``agree`` where
    torch.distributed is not initialised.
    """

    gives_tensors: ClassVar = True

    def __init__(
        self,
        cache_or_paths: CacheOrPaths,
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
            raise UsageError("agree=True: torch.distributed is not initialised; call init_process_group() before")
        return rank, world_size

    def _shared_run(self) -> str | None:
        return shared_run() if self._collective and distributed.get_world_size() > 1 else None

    def _agreed(self, steps: int) -> int:
        if not self._collective or self._fixed_steps or distributed.get_world_size() == 1:
            return steps
        steps, first, last = least(steps, self._last, -self._last)
        if first != -last:
            raise UsageError(
                f"the ranks begin epochs {first} to {-last}, where samples would be read twice; all of them must leave"
                " the same loops with break, and set the same loader.epoch"
            )
        return steps

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Begin an epoch; older iterators of this loader end with an error."""
        return self.begin() if self.device is None else prefetched(self.begin, self.device)

    def __getitem__(self, index: object) -> NoReturn:
        """A loader is no dataset for ``DataLoader``, which would ask for samples one by one."""
        raise UsageError(
            "a Loader makes batches in processes of its own: iterate it, or give it to the trainer as it is, without a"
            " DataLoader around it; docs/trainers.md has the way for each trainer"
        )

    def _finish(self, batch: Batch) -> dict[str, Any]:
        return {field.name: finished(field, batch.columns[field.name]) for field in batch.schema}


def _signature() -> inspect.Signature:
    """All arguments, for help() and notebooks, which would only see ``**options``."""
    own, base = (inspect.signature(cls.__init__) for cls in (Loader, BaseLoader))
    added = [own.parameters[name] for name in own.parameters if name not in (*base.parameters, "options")]
    return base.replace(parameters=[*base.parameters.values(), *added])


Loader.__init__.__signature__ = _signature()  # type: ignore[attr-defined]
