"""Arguments of PyTorch's ``DataLoader`` and other loaders, and how the same thing is said here."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import ParamSpec

from cachetool.core.errors import UsageError
from cachetool.core.options import unknown_option
from cachetool.core.text import shown

__all__ = ["OF_DATASETS", "OF_LOADERS", "answering"]

P = ParamSpec("P")

_ORDER = "here the loader orders the samples: shuffle=, seed=, rank= and world_size=, and where= to select some"
OF_LOADERS: Mapping[str, str] = {
    "num_workers": "here it is workers=",
    "prefetch_factor": "here it is prefetch=, the batches that each feeder keeps ready",
    "persistent_workers": "here feeders persist until close(); leave it out",
    "pin_memory": "here device='cuda' of cachetool.loaders.torch.Loader copies batches ahead; leave it out",
    "pin_memory_device": "here it is device= of cachetool.loaders.torch.Loader",
    "collate_fn": "here it is transform= with transform_each='batch', called with a dict of columns",
    "sampler": _ORDER,
    "batch_sampler": _ORDER,
    "generator": "here it is seed=",
    "worker_init_fn": "here a transform= with a parameter rng gets a generator for each sample; leave it out",
    "timeout": "here it is wait=, for the first samples",
    "drop_remainder": "here it is drop_last=",
    "multiprocessing_context": "here feeders are processes of their own in any case; leave it out",
    "filter": "here it is where=, values by field",
}
"""What a loader of ours answers to another's argument."""
_LOADER = "a dataset for a DataLoader gives all samples; cachetool.loaders.torch.Loader has"
OF_DATASETS: Mapping[str, str] = {
    "where": f"{_LOADER} where=",
    "split": f"{_LOADER} split=",
    "validation": f"{_LOADER} split= and validation=",
    "batch_size": "the DataLoader around it makes batches; cachetool.loaders.torch.Loader makes them itself",
}
"""What a dataset for a ``DataLoader`` answers to an argument of a loader."""


def answering(
    names: Mapping[str, str],
) -> Callable[[Callable[P, None]], Callable[P, None]]:
    """Let a constructor answer to arguments of others, by ``names``, and to misspelt ones with an :class:`UsageError`
    of one line."""

    def decorate(init: Callable[P, None]) -> Callable[P, None]:
        own = inspect.signature(init).parameters

        @functools.wraps(init)
        def checked(*args: P.args, **options: P.kwargs) -> None:
            for name, value in options.items():
                if name in names:
                    raise UsageError(f"{name}={shown(value)} is no argument here: {names[name]}")
                if name not in own:
                    parameters = inspect.signature(type(args[0])).parameters.values()
                    raise unknown_option(name, [one.name for one in parameters if one.kind is one.KEYWORD_ONLY])
            init(*args, **options)

        return checked

    return decorate
