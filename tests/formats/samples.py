"""Schemas and blocks for the tests of the formats: one with every kind of field, and random ones."""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import strategies as st

from cachetool.block import Block
from cachetool.formats import Format, Written
from cachetool.schema import Field, Schema

DTYPES = (
    *("?", "i1", "<i2", "<i4", "<i8", "u1", "<u2", "<u4", "<u8", "<f2", "<f4", "<f8", "<c8", "<c16"),
    *("<M8[ns]", "<M8[D]", "<m8[us]"),
)

EVERY_KIND = Schema(
    (
        *(Field("scalar/" + np.dtype(d).name.replace("[", "-").replace("]", ""), d) for d in DTYPES),
        *(Field(f"array/{rank}", d, tuple(range(2, 2 + rank))) for rank, d in enumerate(DTYPES[5:10], start=1)),
        Field("none", "<f4", (3, 0, 2)),
        Field("a name with blanks", "<f8", (2,)),
        *(Field(f"ragged.{rank}", d, (None,) * rank) for rank, d in enumerate(("<c8", "<i2", "?"), start=1)),
        Field("times", "<M8[s]", (None,)),
        Field("raw", "bytes"),
        Field("text", "str"),
    )
)
"""Every dtype as a scalar, arrays of 1 to 5 dimensions, no values at all, ragged ones, bytes and str."""


def values(dtype: np.dtype[Any], shape: Sequence[int], rng: np.random.Generator) -> np.ndarray[Any, Any]:
    """Random bits: NaNs with any payload, subnormals, NaT and the extremes come by themselves."""
    count = int(np.prod(shape, dtype=np.int64))
    if dtype.kind == "b":
        return rng.integers(0, 2, size=count).astype(bool).reshape(shape)
    return np.frombuffer(rng.bytes(count * dtype.itemsize), dtype=dtype).reshape(shape)


def sample(schema: Schema, rng: np.random.Generator, *, largest: int = 5) -> dict[str, Any]:
    """One random sample; sizes of ragged fields, bytes and str from 0 to ``largest``."""
    out: dict[str, Any] = {}
    for field in schema:
        if field.kind == "bytes":
            out[field.name] = rng.bytes(int(rng.integers(largest + 1)))
        elif field.kind == "str":
            out[field.name] = "".join(rng.choice(list("aé\0漢🙂"), size=int(rng.integers(largest + 1))))
        else:
            ragged = rng.integers(0, largest + 1, size=field.rank).tolist()
            value = values(field.numpy, field.sizes if field.kind == "fixed" else ragged, rng)
            out[field.name] = value if field.shape else value[()]
    return out


def block(schema: Schema, count: int, *, seed: int = 0, largest: int = 5) -> Block:
    """``count`` random samples."""
    rng = np.random.default_rng(seed)
    return Block.from_samples(schema, [sample(schema, rng, largest=largest) for _ in range(count)])


_NAMES = ("x", "y/a", "y/b", "with blank", "0", "a.b", "q-+_", "__key__")


@st.composite
def schemas(draw: st.DrawFn) -> Schema:
    """Random schemas of one to five fields of any kind."""
    names = draw(st.lists(st.sampled_from(_NAMES), min_size=1, max_size=5, unique=True))
    fields = []
    for name in names:
        kind = draw(st.sampled_from(("scalar", "fixed", "fixed", "ragged", "bytes", "str")))
        if kind in ("bytes", "str"):
            fields.append(Field(name, kind))
            continue
        dtype = draw(st.sampled_from(DTYPES))
        sizes = st.lists(st.integers(0, 4), min_size=1, max_size=5 if kind == "fixed" else 3)
        shape: tuple[int | None, ...] = () if kind == "scalar" else tuple(draw(sizes))
        fields.append(Field(name, dtype, (None,) * len(shape) if kind == "ragged" else shape))
    return Schema(tuple(fields))


@st.composite
def blocks(draw: st.DrawFn) -> Block:
    """Random blocks of 0 to 30 samples; now and then with values of several pages."""
    return block(
        draw(schemas()),
        draw(st.integers(0, 30)),
        seed=draw(st.integers(0, 2**32)),
        largest=draw(st.sampled_from((0, 3, 12))),
    )


def write(
    kind: Format,
    path: Path,
    content: Block,
    *,
    cuts: Sequence[int] = (),
    spare: int = 0,
    compression: str | None = None,
) -> Written:
    """Write ``content`` as one shard, in blocks cut at ``cuts``, after announcing ``spare`` more samples."""
    announced = {"samples": content.samples + spare, "nbytes": content.nbytes + 1000 * spare}
    writer = kind.create(path, content.schema, compression=compression, **announced)
    edges = [0, *sorted(cuts), content.samples]
    for start, stop in itertools.pairwise(edges):
        writer.write(content.slice(start, stop))
    return writer.finish()


def on_disk(path: Path) -> int:
    """Bytes that ``path`` and everything in it takes, allocated or apparent, whichever is larger."""
    paths = [path, *(path.rglob("*") if path.is_dir() else ())]
    found = [os.lstat(p) for p in paths]
    return max(sum(s.st_blocks * 512 for s in found), sum(s.st_size for s in found))
