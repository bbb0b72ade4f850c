"""A :class:`tf.data.Dataset` over the batches of a loader, for mixtures, crops, padding, ranks and states.

Each batch is one call into Python and one copy, so samples of 1 MiB and more lose nothing by it, and small ones need
large batches. The feeders read and prepare the batches in processes of their own.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import numpy as np

from cachetool.core.block import Ragged
from cachetool.core.errors import UsageError, without
from cachetool.loaders.fixed_epochs import FixedEpochs
from cachetool.loaders.numpy import Loader

try:
    import tensorflow as tf
except ModuleNotFoundError as error:
    raise without("tensorflow", "tensorflow", error) from None

__all__ = ["Batches", "batches_of"]

Batches: TypeAlias = Loader | FixedEpochs[dict[str, Any]]


def batches_of(loader: Batches, *, repeat: bool, element: Callable[[dict[str, Any]], Any]) -> tf.data.Dataset:
    """Return a dataset whose elements are the batches of ``loader`` as tensors, and then what ``element`` makes of one.

    Each iteration is an epoch of the loader. Raises :class:`UsageError` if ``loader`` makes no NumPy arrays, or has no
    batch.
    """
    base = loader.loader if isinstance(loader, FixedEpochs) else loader
    if not isinstance(base, Loader):
        raise UsageError("make_dataset() takes the loader of cachetool.loaders.numpy, whose arrays become tensors")
    # An epoch of fixed length may be in the middle of a pass, which ends when another one begins.
    before = loader.state_dict() if isinstance(loader, FixedEpochs) and loader._progress is not None else None
    # The first batch tells the types of all. It is not counted as delivered, so training begins with it.
    first = next(base.begin().uncounted(), None)
    if first is None:
        raise UsageError("the loader has no batch; use smaller batches, or pull more")
    # TensorFlow asks for batches in other threads. With concurrent=True this one must not keep the first epoch.
    base._home = None
    if before is not None:
        loader.load_state_dict(before)
    padded = {name for name, _ in base._settings.pad}
    padded |= {pad.mask for _, pad in base._settings.pad if pad.mask is not None}
    signature = {name: _spec(column, static=name not in padded) for name, column in first.items()}
    del first

    def epoch() -> Iterator[dict[str, Any]]:
        batches, count = iter(loader), 0
        if isinstance(loader, FixedEpochs):
            # What is left of a resumed epoch is followed by batches of the next one, because TensorFlow and Keras keep
            # the number of steps.
            batches = itertools.islice(itertools.chain.from_iterable(itertools.repeat(loader)), len(loader))
        for batch in batches:
            count += 1
            yield {name: _tensor(column) for name, column in batch.items()}
            # The loader may use the memory of this batch for the next one.
            del batch
        # TensorFlow would ask for empty epochs for ever.
        if repeat and not count:
            raise UsageError("an epoch has no batch; use smaller batches, or pull more")

    out = tf.data.Dataset.from_generator(epoch, output_signature=signature)
    if isinstance(loader, FixedEpochs):
        out = out.apply(tf.data.experimental.assert_cardinality(len(loader)))
    out = out.map(element)
    # Feeders work ahead. What TensorFlow took ahead as well would count as trained in the state of the loader.
    options = tf.data.Options()
    options.autotune.enabled = False
    options.experimental_optimization.inject_prefetch = False
    return (out.repeat() if repeat else out).with_options(options)


def _spec(column: Any, *, static: bool) -> tf.TypeSpec:
    """Return the type of a column of all batches. If it is ``static``, all samples have the sizes of those here."""
    if isinstance(column, Ragged):
        assert column.shapes is not None
        rank = column.shapes.shape[1]
        return tf.RaggedTensorSpec([None] * (1 + rank), _values(column.values).dtype, rank, tf.int64)
    if isinstance(column, list):
        return tf.TensorSpec((None,), tf.string)
    values = _values(np.asarray(column))
    sizes = values.shape[1:] if static else [None] * (values.ndim - 1)
    return tf.TensorSpec((None, *sizes) if values.ndim else (), values.dtype)


def _values(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return an array of a type that TensorFlow has: dates as the whole numbers that they are stored as."""
    return array.view(f"i{array.itemsize}") if array.dtype.kind in "mM" else array


def _tensor(column: Any) -> Any:
    if isinstance(column, Ragged):
        assert column.shapes is not None
        shapes = column.shapes
        lengths = [np.repeat(shapes[:, axis], shapes[:, :axis].prod(axis=1)) for axis in range(shapes.shape[1])]
        values = column.values[column.offsets[0] : column.offsets[-1]]
        return tf.RaggedTensor.from_nested_row_lengths(_values(values), lengths)
    return np.array(column, dtype=object) if isinstance(column, list) else _values(np.asarray(column))
