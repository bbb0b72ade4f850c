"""Samples whose values follow from their number, caches filled with them, and checks of what a loader delivers.

Imported by the tests, and by the scripts of this folder, which run as separate processes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from cachetool.cache import CacheDir, Facts, Origin
from cachetool.core.block import Block
from cachetool.core.schema import Field, Schema
from cachetool.formats.compression import compressed
from cachetool.formats.shard import ShardFiles, shard_bound

SMALL = Schema(
    (
        Field("x", "<f4", (4, 3)),
        Field("number", "<i8"),
        Field("words", "str"),
        Field("raw", "bytes"),
        Field("ragged", "<i2", (None, None)),
    )
)
"""One field of each kind."""

WIDE = Schema(
    (Field("x", "<f4", (800,)), Field("when", "<M8[us]", (150,)), Field("number", "<i8"), Field("words", "str"))
)
"""Arrays of more than 1 KiB, a number and a text."""
NUMBERS = 1200
"""Samples of :data:`WIDE` in a cache: more than one system call writes."""

KEYED = Schema((Field("__key__", "str"), Field("number", "<i8")))
"""Samples that have their own key."""

NUMERIC = ("bool", "i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8", "f2", "f4", "f8", "c8", "c16", "M8[us]", "m8[s]")
_NAMES = [np.dtype(d).name.replace("[", " ").replace("]", "") for d in NUMERIC]
EVERY = Schema(
    (
        *(Field(f"scalar {n}", d) for n, d in zip(_NAMES, NUMERIC, strict=True)),
        *(Field(f"array {n}", d, (2, 3)) for n, d in zip(_NAMES, NUMERIC, strict=True)),
        *(Field(f"ragged {n}", d, (None, None)) for n, d in zip(_NAMES, NUMERIC, strict=True)),
        Field("deep", "<f4", (2, 1, 2, 1, 3)),
        Field("wide", "<M8[us]", (150,)),
        Field("none", "<f4", (0, 3)),
        Field("line", "<u2", (None,)),
        Field("cube", "<f8", (None, None, None)),
        Field("words", "str"),
        Field("raw", "bytes"),
    )
)
"""Every dtype as scalar, array and ragged array; empty shapes; five dimensions; more than 1 KiB."""


def sample(schema: Schema, number: int) -> dict[str, Any]:
    """Return the sample with this number."""
    rng = np.random.default_rng(number)
    out: dict[str, Any] = {}
    for field in schema:
        if field.name == "__key__" and field.kind == "str":
            out[field.name] = f"scan{number}"
        elif field.kind == "str":
            out[field.name] = f"sample {number} ☂" * (number % 3)
        elif field.kind == "bytes":
            out[field.name] = rng.bytes(number % 7)
        elif field.name == "number":
            out[field.name] = number
        else:
            shape = field.sizes if field.kind == "fixed" else tuple(rng.integers(0, 4, field.rank).tolist())
            raw = rng.integers(0, 2, shape) if field.numpy.kind == "b" else rng.integers(-(2**62), 2**62, shape)
            if field.numpy.kind in "fc":
                raw = rng.standard_normal(shape)
            array = np.asarray(raw).astype(field.numpy)
            out[field.name] = array if field.shape else array[()]
    return out


def put(
    cache: CacheDir,
    numbers: Iterable[int],
    *,
    format: str = "lmdb",
    schema: Schema = SMALL,
    dataset: str = "default",
    compression: str | None = None,
) -> str:
    """Commit one shard of the samples with these numbers. Return its id."""
    samples = [sample(schema, n) for n in numbers]
    return put_samples(cache, samples, format=format, schema=schema, dataset=dataset, compression=compression)


def put_samples(
    cache: CacheDir,
    samples: Sequence[Mapping[str, Any]],
    *,
    schema: Schema,
    format: str = "lmdb",
    dataset: str = "default",
    compression: str | None = None,
) -> str:
    """Commit one shard of these samples. Return its id."""
    kind, block = compressed(format, compression), Block.from_samples(schema, samples)
    cache.declare(dataset, schema)
    bound = shard_bound(kind, schema, block.samples, block.nbytes)
    with cache.stage(dataset=dataset, schema=schema, format=format, bound=bound) as staging:
        files = ShardFiles(staging.path, kind, schema, samples=block.samples, nbytes=block.nbytes)
        files.write(block)
        facts = files.facts()
        row = Facts(facts.samples, facts.payload, facts.content, facts.digest, facts.data, facts.files)
        return staging.commit(row, origin=Origin())


def digest(schema: Schema, values: Mapping[str, Any]) -> str:
    """Return 16 hexadecimal digits over field names, shapes and bytes of one sample. Values may be any NumPy-like
    arrays.
    """
    hashed = hashlib.blake2b(digest_size=8)
    for field in schema:
        value = values[field.name]
        if field.kind == "str":
            data = value.encode() if isinstance(value, str) else bytes(value)
            shape: tuple[int, ...] = ()
        elif field.kind == "bytes":
            data, shape = bytes(value), ()
        else:
            array = np.asarray(value)
            data, shape = array.tobytes(), array.shape
        hashed.update(repr((field.name, shape, len(data))).encode() + data)
    return hashed.hexdigest()


def digests(schema: Schema, numbers: Iterable[int]) -> list[str]:
    """Return the sorted digests of the samples with these numbers as they were written."""
    return sorted(digest(schema, sample(schema, n)) for n in numbers)


def leases(cache: CacheDir) -> list[int]:
    """Return the versions that live leases hold, after dead processes were recovered."""
    cache.recover()
    return [row["version"] for row in cache.catalog.rows("SELECT version FROM leases ORDER BY version")]
