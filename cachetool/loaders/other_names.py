"""Names of arguments in PyTorch's ``DataLoader`` and other loaders, and the argument of cachetool for the same
purpose."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, ParamSpec, TypeVar

from cachetool.core.errors import UsageError
from cachetool.core.options import unknown_option
from cachetool.core.text import shown

__all__ = ["OF_DATASETS", "OF_LOADERS", "OF_TENSORFLOW", "answering"]

P = ParamSpec("P")
R = TypeVar("R")

_ORDER = "the loader orders the samples itself; use shuffle=, seed=, rank= and world_size=, or where= to select some"
OF_LOADERS: Mapping[str, str] = {
    "num_workers": "use workers=",
    "prefetch_factor": "use prefetch=, the number of batches that each feeder keeps ready",
    "persistent_workers": "leave it out, because feeders always persist until close()",
    "pin_memory": "leave it out; device='cuda' of cachetool.loaders.torch.Loader copies batches ahead",
    "pin_memory_device": "use device= of cachetool.loaders.torch.Loader",
    "collate_fn": "use pad= to pad samples of different lengths, or transform= with transform_each='batch', which is"
    " called with a dict of columns",
    "sampler": _ORDER,
    "batch_sampler": _ORDER,
    "generator": "use seed=",
    "worker_init_fn": "leave it out; a transform= with a parameter rng gets a generator for each sample",
    "timeout": "use wait=, the time to wait for the first samples",
    "drop_remainder": "use drop_last=",
    "multiprocessing_context": "leave it out, because feeders are always separate processes",
    "filter": "use where=, a dict of fields and their values",
}
"""Arguments of other loaders, each with the answer that a loader of cachetool gives."""
_CROPS = ("crop", "crops", "stride", "corner", "crop_pad")
_RATIOS = ("cache", "mix", "epoch_samples", "epoch_of", "weights", "balance", "weights_by", "sample_weights")
_LOADER = "a dataset for a DataLoader returns all samples; use cachetool.loaders.torch.Loader with"
OF_DATASETS: Mapping[str, str] = {
    "where": f"{_LOADER} where=",
    "decode": "decode the bytes of a sample in your own code, or use cachetool.loaders.torch.Loader with decode=",
    "split": f"{_LOADER} split=",
    "validation": f"{_LOADER} split= and validation=",
    "pad": f"{_LOADER} pad=",
    **dict.fromkeys(_CROPS, f"{_LOADER} crop="),
    "offsets": f"{_LOADER} offsets=",
    "varlen": f"{_LOADER} varlen=",
    **{name: f"{_LOADER} {name}=" for name in _RATIOS if name != "cache"},
    "batch_size": "pass it to the DataLoader, or use cachetool.loaders.torch.Loader, which makes the batches itself",
}
"""Arguments of loaders, each with the answer that a dataset for a ``DataLoader`` gives."""
_RAGGED = "a ragged field is a tf.RaggedTensor, which"
OF_TENSORFLOW: Mapping[str, str] = {
    "pad": f"{_RAGGED} dataset.map() pads with .to_tensor(default_value=0)",
    "varlen": f"{_RAGGED} has .flat_values and .row_splits",
    **dict.fromkeys(
        ("decode", "offsets", *_CROPS, *_RATIOS),
        "give it to cachetool.loaders.numpy.Loader, and the loader to make_dataset()",
    ),
}
"""Arguments of loaders, each with the answer that a dataset of TensorFlow gives."""


def answering(names: Mapping[str, str]) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorate a constructor or a function: an argument in ``names``, or a misspelt one, raises a :class:`UsageError`
    of one line."""

    def decorate(init: Callable[P, R]) -> Callable[P, R]:
        own = inspect.signature(init).parameters

        @functools.wraps(init)
        def checked(*args: P.args, **options: P.kwargs) -> R:
            for name, value in options.items():
                if name in names:
                    raise UsageError(f"{name}={shown(value)} is not an argument here: {names[name]}")
                if name not in own:
                    # The signature of the object's own class: a subclass such as the loader for PyTorch has more
                    # arguments than the constructor that is decorated here.
                    of: Callable[..., Any] = type(args[0]) if init.__name__ == "__init__" else init
                    parameters = inspect.signature(of).parameters.values()
                    raise unknown_option(name, [one.name for one in parameters if one.kind is one.KEYWORD_ONLY])
            return init(*args, **options)

        return checked

    return decorate
