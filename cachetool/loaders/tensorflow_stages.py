"""Stages of a ``tf.data`` pipeline whose functions TensorFlow runs as they were traced.

It optimises every function of ``Dataset.map`` and its like anew for each iterator, 5 to 7 ms each, so an epoch of eight
functions begins after 40 ms. A function whose attributes put it on one device, as all of tf.data is on the CPU, is not
optimised; ``tf.function`` takes attributes, ``Dataset.map`` none. So these are the raw operations behind such methods.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import tensorflow as tf

__all__ = ["filtered", "flat_mapped", "from_generator", "interleaved", "mapped", "records_of"]


def from_generator(
    generator: Callable[[], Iterator[tuple[Any, ...]]], specs: tuple[tf.TensorSpec, ...]
) -> tf.data.Dataset:
    """As ``Dataset.from_generator``: for each iterator a generator, which is dropped with it."""
    running: dict[int, Iterator[tuple[Any, ...]]] = {}
    numbers = itertools.count()

    def begin() -> np.int64:
        number = next(numbers)
        running[number] = generator()
        return np.int64(number)

    def element(number: np.int64) -> list[np.ndarray]:
        values = next(running[int(number)])  # StopIteration is the end, to TensorFlow too
        # As objects: NumPy's own bytes lose the zeros at their end.
        types = [np.object_ if spec.dtype == tf.string else spec.dtype.as_numpy_dtype for spec in specs]
        return [np.asarray(value, dtype) for value, dtype in zip(values, types, strict=True)]

    def end(number: np.int64) -> np.int64:
        running.pop(int(number), None)
        return np.int64(0)

    number = tf.TensorSpec((), tf.int64)
    beginning = _plain(lambda: tf.numpy_function(begin, [], tf.int64))
    next_element = _plain(lambda which: tf.numpy_function(element, [which], [spec.dtype for spec in specs]), number)
    ending = _plain(lambda which: tf.numpy_function(end, [which], tf.int64), number)
    variant = tf.raw_ops.GeneratorDataset(
        init_func_other_args=beginning.captured_inputs,
        next_func_other_args=next_element.captured_inputs,
        finalize_func_other_args=ending.captured_inputs,
        init_func=beginning,
        next_func=next_element,
        finalize_func=ending,
        **_output(specs),
    )
    return tf.data.experimental.from_variant(variant, specs)


def flat_mapped(data: tf.data.Dataset, function: Callable[..., tf.data.Dataset]) -> tf.data.Dataset:
    """As ``Dataset.flat_map``."""
    plain, spec = _of_datasets(data, function)
    variant = tf.raw_ops.FlatMapDataset(
        input_dataset=_variant(data), other_arguments=plain.captured_inputs, f=plain, **_output(spec)
    )
    return tf.data.experimental.from_variant(variant, spec)


def interleaved(
    data: tf.data.Dataset,
    function: Callable[..., tf.data.Dataset],
    *,
    cycle: int,
    block: int = 1,
    parallel: bool = False,
    deterministic: bool = True,
) -> tf.data.Dataset:
    """As ``Dataset.interleave``, of ``cycle`` datasets at once, ``block`` elements of each in turn; ``parallel`` with
    ``AUTOTUNE``."""
    plain, spec = _of_datasets(data, function)
    common = {
        "input_dataset": _variant(data),
        "other_arguments": plain.captured_inputs,
        "cycle_length": tf.constant(cycle, tf.int64),
        "block_length": tf.constant(block, tf.int64),
        "f": plain,
        **_output(spec),
    }
    auto = tf.constant(tf.data.AUTOTUNE, tf.int64)
    if not parallel:
        variant = tf.raw_ops.InterleaveDataset(**common)
    else:
        variant = tf.raw_ops.ParallelInterleaveDatasetV4(
            **common,
            buffer_output_elements=auto,
            prefetch_input_elements=auto,
            num_parallel_calls=auto,
            deterministic="true" if deterministic else "false",
        )
    return tf.data.experimental.from_variant(variant, spec)


def filtered(data: tf.data.Dataset, function: Callable[..., tf.Tensor]) -> tf.data.Dataset:
    """As ``Dataset.filter``."""
    plain, spec = _plain(function, *tf.nest.flatten(data.element_spec)), data.element_spec
    variant = tf.raw_ops.FilterDataset(
        input_dataset=_variant(data), other_arguments=plain.captured_inputs, predicate=plain, **_output(spec)
    )
    return tf.data.experimental.from_variant(variant, spec)


def mapped(data: tf.data.Dataset, function: Callable[..., Any], *, parallel: bool = True) -> tf.data.Dataset:
    """As ``Dataset.map``, to tensors and ragged tensors; ``parallel`` with ``AUTOTUNE``, which takes a small element
    longer than the function."""
    results: list[Any] = []

    def flat(*values: tf.Tensor) -> list[tf.Tensor]:
        result = function(*values)
        results.append(tf.nest.map_structure(tf.type_spec_from_value, result))
        return [_encoded(value) for value in tf.nest.flatten(result)]

    plain = _plain(flat, *tf.nest.flatten(data.element_spec))
    common = {
        "input_dataset": _variant(data),
        "other_arguments": plain.captured_inputs,
        "f": plain,
        "preserve_cardinality": True,
        **_output(results[-1]),
    }
    if parallel:
        variant = tf.raw_ops.ParallelMapDatasetV2(**common, num_parallel_calls=tf.constant(tf.data.AUTOTUNE, tf.int64))
    else:
        variant = tf.raw_ops.MapDataset(**common)
    return tf.data.experimental.from_variant(variant, results[-1])


def records_of(file: tf.Tensor, *, compression: tf.Tensor, buffer: int) -> tf.data.Dataset:
    """As ``TFRecordDataset`` of one file, which has a function for several."""
    variant = tf.raw_ops.TFRecordDataset(
        filenames=file, compression_type=compression, buffer_size=tf.constant(buffer, tf.int64)
    )
    return tf.data.experimental.from_variant(variant, tf.TensorSpec((), tf.string))


def _plain(function: Callable[..., Any], *specs: tf.TypeSpec) -> Any:
    """A concrete function of tensors that is run on one device, as it is."""
    attributes = {"experimental_ints_on_device": True}
    traced = tf.function(function, input_signature=specs, autograph=False, experimental_attributes=attributes)
    return traced.get_concrete_function()


def _of_datasets(data: tf.data.Dataset, function: Callable[..., tf.data.Dataset]) -> tuple[Any, Any]:
    """The function, and what the elements of its datasets are."""
    specs: list[Any] = []

    def variant(*values: tf.Tensor) -> tf.Tensor:
        result = function(*values)
        specs.append(result.element_spec)
        return _variant(result)

    return _plain(variant, *tf.nest.flatten(data.element_spec)), specs[-1]


def _variant(data: tf.data.Dataset) -> tf.Tensor:
    return tf.data.experimental.to_variant(data)


def _encoded(value: tf.Tensor | tf.RaggedTensor) -> tf.Tensor:
    """One tensor, as a dataset hands it on."""
    if not isinstance(value, tf.RaggedTensor):
        return value
    return tf.raw_ops.RaggedTensorToVariant(
        rt_nested_splits=value.nested_row_splits, rt_dense_values=value.flat_values, batched_input=False
    )


def _output(spec: Any) -> dict[str, list[Any]]:
    """Types and shapes of the tensors of an element."""
    leaves = tf.nest.flatten(spec)
    ragged = [isinstance(leaf, tf.RaggedTensorSpec) for leaf in leaves]
    return {
        "output_types": [
            tf.variant if is_ragged else leaf.dtype for leaf, is_ragged in zip(leaves, ragged, strict=True)
        ],
        "output_shapes": [() if is_ragged else leaf.shape for leaf, is_ragged in zip(leaves, ragged, strict=True)],
    }
