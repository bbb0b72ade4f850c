"""A :class:`tf.data.Dataset` over the TFRecord shards of a cache that grows.

::

    from_generator              one element an epoch: the names of all files of a new snapshot. Python's only turn.
      flat_map -> interleave    TFRecordDataset over each file
      shuffle -> batch          of records, not yet parsed
      map                       a whole batch parsed at once: parse_example, decode_raw, reshape
      repeat

The snapshot's lease ends when the last file of the epoch has been read, or with an iterator that was abandoned. Nothing
here imports the ``tfrecord`` package, which cannot be loaded beside TensorFlow.
"""

from __future__ import annotations

import copy
import itertools
import secrets
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from cachetool.cache import CacheDir
from cachetool.errors import UsageError
from cachetool.formats.example import shape_name, storage_kind
from cachetool.loaders.order import order
from cachetool.loaders.subscription import subscribe
from cachetool.loaders.view import View
from cachetool.schema import Field, Schema

__all__ = ["feature_spec", "make_dataset", "parse_batch"]

_OPEN_FILES = 16


def make_dataset(
    cache: CacheDir | str | Path,
    *,
    batch_size: int,
    shuffle_buffer: int = 0,
    fields: Sequence[str] | None = None,
    dataset: str | None = None,
    seed: int | None = None,
    repeat: bool = False,
    drop_remainder: bool = False,
    run: str | None = None,
) -> tf.data.Dataset:
    """Batches of the samples that are in the cache when an epoch begins.

    Each time the dataset is iterated over (and at each turn of ``repeat``) it takes a new snapshot: it grows with the
    cache. With a ``shuffle_buffer`` of so many records the files are shuffled too, by ``seed`` and epoch; without one
    the samples come oldest first. ``repeat`` goes on for ever. ``run`` names a training run of several processes: they
    get the same snapshot for the same epoch.

    Its length is unknown to TensorFlow. Keras takes the number of batches of the first epoch for that of all: to see a
    growing cache whole, call ``model.fit(..., initial_epoch=k, epochs=k + 1)`` for each epoch, or repeat the dataset
    and give ``steps_per_epoch``.

    An element is a dict of batches: fixed fields as dense tensors (batch, *shape), bytes and str as ``tf.string``
    (batch,), ragged arrays as ``tf.RaggedTensor`` with as many ragged dimensions as the array has; datetime64 and
    timedelta64 as int64.

    ``cache`` is a cache or its folder, or a folder that ``cachetool convert --out`` wrote. Raises :class:`UsageError`
    for a cache, dataset or field that is not there, and when shards are in another format than TFRecord.
    """
    if batch_size < 1 or shuffle_buffer < 0:
        raise UsageError(f"batch_size must be at least 1 and shuffle_buffer 0, got {batch_size} and {shuffle_buffer}")
    subscription = subscribe(cache, dataset=dataset, run=run)
    try:
        first = subscription.now()
        _files(first)
        schema = first.schema if fields is None else first.schema.select(fields)
    finally:
        subscription.close()
    shuffle = shuffle_buffer > 0
    chosen_seed = secrets.randbits(32) if seed is None else seed
    numbers = itertools.count()

    def epoch() -> Iterator[tuple[list[str], list[str]]]:
        number, mine = next(numbers), copy.copy(subscription)  # the copy has a lease of its own
        try:
            view = mine.newest(epoch=None if run is None else number)
            names, compressions = _files(view)
            turns = order(len(names), shuffle=shuffle, seed=chosen_seed, epoch=number)
            at = [int(i) for block in turns for i in block]
            yield [names[i] for i in at], [compressions[i] for i in at]
            mine.served()
        finally:
            mine.close()

    names = tf.TensorSpec((None,), tf.string)
    out = tf.data.Dataset.from_generator(epoch, output_signature=(names, names))
    out = out.flat_map(lambda files, kinds: _records(files, kinds, shuffle=shuffle, fixed=seed is not None))
    if shuffle:
        out = out.shuffle(shuffle_buffer, seed=seed)
    out = out.batch(batch_size, drop_remainder=drop_remainder)
    out = out.map(lambda records: parse_batch(records, schema), num_parallel_calls=tf.data.AUTOTUNE)
    # Prefetching ends with the epoch: behind `repeat`, where TensorFlow puts one by itself, it would take the next
    # snapshot before the last batches of this one are out.
    out = out.prefetch(tf.data.AUTOTUNE)
    if repeat:
        options = tf.data.Options()
        options.experimental_optimization.inject_prefetch = False
        out = out.repeat().with_options(options)
    return out


def _files(view: View) -> tuple[list[str], list[str]]:
    """Names and compressions of the files of a view. Raises :class:`UsageError` for other formats and for none."""
    others = sorted({part.format for part in view.parts} - {"tfrecord"})
    if others:
        raise UsageError(
            f"dataset {view.dataset!r} has shards in {', '.join(others)}, TensorFlow reads tfrecord; run:"
            f" {view.conversion('tfrecord')}"
        )
    names = [str(part.folder / (part.file or "data.tfrecord")) for part in view.parts]
    # Only compressed files have no extents.
    return names, ["" if part.extents.exists() else "GZIP" for part in view.parts]


def _records(files: tf.Tensor, kinds: tf.Tensor, *, shuffle: bool, fixed: bool) -> tf.data.Dataset:
    named = tf.data.Dataset.from_tensor_slices((files, kinds))
    return named.interleave(
        lambda file, kind: tf.data.TFRecordDataset(file, compression_type=kind),
        cycle_length=_OPEN_FILES if shuffle else 1,
        num_parallel_calls=tf.data.AUTOTUNE,
        deterministic=fixed or not shuffle,
    )


def feature_spec(schema: Schema) -> dict[str, tf.io.FixedLenFeature]:
    """What ``tf.io.parse_example`` needs to parse records of this schema; :func:`parse_batch` decodes the result.

    Integer and bool scalars are int64 features, float32 scalars float32. All else is one string: the little-endian
    bytes of an array or of another scalar, UTF-8 text, plain bytes. A ragged field ``x`` has its shape in ``x/shape``.
    """
    spec: dict[str, tf.io.FixedLenFeature] = {}
    types = {"int64": tf.int64, "float": tf.float32, "bytes": tf.string}
    for field in schema:
        spec[field.name] = tf.io.FixedLenFeature([], types[storage_kind(field)])
        if field.kind == "ragged":
            spec[shape_name(field)] = tf.io.FixedLenFeature([field.rank], tf.int64)
    return spec


def parse_batch(records: tf.Tensor, schema: Schema) -> dict[str, tf.Tensor | tf.RaggedTensor]:
    """The fields of serialised records, (batch,) strings; see :func:`make_dataset` for the result."""
    parsed = tf.io.parse_example(records, feature_spec(schema))
    count = tf.shape(records)[0]
    return {field.name: _decode(field, parsed, count) for field in schema}


def _decode(field: Field, parsed: dict[str, tf.Tensor], count: tf.Tensor) -> tf.Tensor | tf.RaggedTensor:
    value = parsed[field.name]
    if field.kind in ("bytes", "str"):
        return value
    if field.kind == "ragged":
        shapes = parsed[shape_name(field)]
        flat = _numbers(tf.strings.reduce_join(value), field)
        lengths = [tf.repeat(shapes[:, axis], tf.reduce_prod(shapes[:, :axis], axis=1)) for axis in range(field.rank)]
        return tf.RaggedTensor.from_nested_row_lengths(flat, lengths)
    if storage_kind(field) == "bytes":
        return tf.reshape(_numbers(value, field), [count, *field.sizes])
    if field.numpy == np.uint64:
        return tf.bitcast(value, tf.uint64)  # numbers above 2**63 - 1 are stored as their two's complement
    return value if storage_kind(field) == "float" else tf.cast(value, field.numpy)


def _numbers(raw: tf.Tensor, field: Field) -> tf.Tensor:
    """Strings of equal length as numbers, with one dimension more."""
    dtype = field.numpy
    # decode_raw knows neither dates nor unsigned numbers of more than 16 bits.
    known = np.dtype(f"i{dtype.itemsize}") if dtype.kind in "mM" or dtype in (np.uint32, np.uint64) else dtype
    numbers: Any = tf.io.decode_raw(raw, tf.as_dtype(known))
    return tf.bitcast(numbers, tf.as_dtype(dtype)) if dtype.kind == "u" and known != dtype else numbers
