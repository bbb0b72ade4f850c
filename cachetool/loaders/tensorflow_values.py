"""Records as tensors: any ``tf.train.Example`` by parsing it, those that we wrote by where their values lie."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import tensorflow as tf

from cachetool.core.schema import Field, Schema
from cachetool.formats.example import ExampleLayout, shape_name, storage_kind

__all__ = ["feature_spec", "fields_of", "parse_batch"]


def feature_spec(schema: Iterable[Field]) -> dict[str, tf.io.FixedLenFeature]:
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
    return fields_of(records, schema, None)


def fields_of(
    records: tf.Tensor, schema: Schema, layout: ExampleLayout | None
) -> dict[str, tf.Tensor | tf.RaggedTensor]:
    """As :func:`parse_batch`; of records of a ``layout``, which we wrote, fixed fields are cut out where they lie."""
    heads = () if layout is None else layout.places
    places = {place.field.name: place for place in heads if place.field.kind == "fixed"}
    others = [field for field in schema if field.name not in places]
    count = tf.shape(records)[0]
    parsed = tf.io.parse_example(records, feature_spec(others)) if others else {}
    out = {}
    for field in schema:
        if field.name in places:
            place = places[field.name]
            raw = tf.strings.substr(records, place.offset, place.nbytes)
            if place.mode == "int":
                out[field.name] = _integers(_varints(raw, place.nbytes), field)
            else:
                out[field.name] = tf.reshape(_numbers(raw, field), [count, *field.sizes])
        else:
            out[field.name] = _decode(field, parsed, count)
    return out


def _varints(raw: tf.Tensor, nbytes: int) -> tf.Tensor:
    """Padded varints as int64: seven bits of each byte, the lowest first."""
    bits = tf.cast(tf.io.decode_raw(raw, tf.uint8), tf.int64) & 0x7F
    return tf.reduce_sum(tf.bitwise.left_shift(bits, np.arange(0, 7 * nbytes, 7)), axis=1)


def _integers(value: tf.Tensor, field: Field) -> tf.Tensor:
    if field.numpy == np.uint64:
        return tf.bitcast(value, tf.uint64)  # numbers above 2**63 - 1 are stored as their two's complement
    return tf.cast(value, field.numpy)


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
    return value if storage_kind(field) == "float" else _integers(value, field)


def _numbers(raw: tf.Tensor, field: Field) -> tf.Tensor:
    """Strings of equal length as numbers, with one dimension more."""
    dtype = field.numpy
    # decode_raw knows neither dates nor unsigned numbers of more than 16 bits.
    known = np.dtype(f"i{dtype.itemsize}") if dtype.kind in "mM" or dtype in (np.uint32, np.uint64) else dtype
    numbers: Any = tf.io.decode_raw(raw, tf.as_dtype(known))
    return tf.bitcast(numbers, tf.as_dtype(dtype)) if dtype.kind == "u" and known != dtype else numbers
