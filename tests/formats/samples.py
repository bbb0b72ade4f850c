"""Schemas and blocks for the tests of the formats: one with every kind of field, and random ones."""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import strategies as st

from cachetool.core.block import Block, Column, Ragged
from cachetool.core.errors import UsageError
from cachetool.core.schema import Field, Schema
from cachetool.formats import Format, Written

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
"""Every dtype as a scalar, arrays of 1 to 5 dimensions, empty arrays, ragged arrays, bytes and str."""

EVERY_FIELD = Schema(
    (
        *(Field(f"scalar/{n}", d) for n, d in enumerate(DTYPES)),
        *(Field(f"array/{n}", d, (2, 1, 3, 1, 2)[: n % 5 + 1]) for n, d in enumerate(DTYPES)),
        *(Field(f"deep/{n}", d, (2,) * 5) for n, d in enumerate(("<f2", "<f4", "u1"))),
        *(Field(f"ragged/{n}", d, (None,) * (n % 4 + 1)) for n, d in enumerate(DTYPES)),
        *(Field(f"none/{n}", "<f2", shape) for n, shape in enumerate(((0,), (2, 0, 3)))),
        Field("raw", "bytes"),
        Field("text", "str"),
        Field("__key__", "str"),
    )
)
"""Every dtype as a scalar, as an array and ragged; 1 to 5 dimensions; empty values; bytes, str, and a key."""


def values(dtype: np.dtype[Any], shape: Sequence[int], rng: np.random.Generator) -> np.ndarray[Any, Any]:
    """Return random bits, which include NaNs with any payload, subnormals, NaT and the extremes."""
    count = int(np.prod(shape, dtype=np.int64))
    if dtype.kind == "b":
        return rng.integers(0, 2, size=count).astype(bool).reshape(shape)
    return np.frombuffer(rng.bytes(count * dtype.itemsize), dtype=dtype).reshape(shape)


def sample(schema: Schema, rng: np.random.Generator, *, largest: int = 5) -> dict[str, Any]:
    """Return one random sample. Sizes of ragged fields, bytes and str are 0 to ``largest``."""
    out: dict[str, Any] = {}
    for field in schema:
        if field.kind == "bytes":
            out[field.name] = rng.bytes(int(rng.integers(largest + 1)))
        elif field.kind == "str":
            out[field.name] = "".join(rng.choice(list("aé\0漢🙂\udcff"), size=int(rng.integers(largest + 1))))
        else:
            ragged = rng.integers(0, (largest if field.rank < 4 else 2) + 1, size=field.rank).tolist()
            ragged[3:-1] = [min(size, 1) for size in ragged[3:-1]]  # 32 dimensions, but few values
            value = values(field.numpy, field.sizes if field.kind == "fixed" else ragged, rng)
            out[field.name] = value if field.shape else value[()]
    return out


def block(schema: Schema, count: int, *, seed: int = 0, largest: int = 5) -> Block:
    """Return ``count`` random samples."""
    rng = np.random.default_rng(seed)
    return Block.from_samples(schema, [sample(schema, rng, largest=largest) for _ in range(count)])


def big_endian(content: Block) -> Block:
    """Return the same values in the other byte order, with other bytes between them."""

    def turned(values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        return np.repeat(values.astype(values.dtype.newbyteorder(">")), 2, axis=0)[::2]

    columns: dict[str, Column] = {}
    for name, column in content.columns.items():
        if isinstance(column, Ragged):
            columns[name] = Ragged(turned(column.values), column.offsets, column.shapes)
        else:
            columns[name] = turned(column)
    return Block(content.schema, columns)


_NAMES = ("x", "y/a", "y/b", "with blank", "0", "a.b", "q-+_", "__key__")
_AWKWARD = (
    *(
        "x.offset",
        "x.shape",
        "shape",
        "c",
        "c.0",
        "c/0",
        ".x",
        "x.",
        " x",
        "-",
        "...a",
        "data.h5",
        "cachetool",
        "a/b/c/d",
    ),
    *(".zarray", ".zattrs", "zarr", "attributes", "a/__len__", "length", "000000000000", "X", "y/A", "é"),
)
_ALPHABET = "aB0_+-. /é\0"


def _possible(*names: str) -> bool:
    try:
        Schema(tuple(Field(name, "str") for name in names))
    except UsageError:
        return False
    return True


_names = st.one_of(
    st.sampled_from(_NAMES), st.sampled_from(_AWKWARD), st.text(_ALPHABET, min_size=1, max_size=200)
).filter(_possible)


@st.composite
def schemas(draw: st.DrawFn) -> Schema:
    """Generate schemas of one to five fields of any kind, with any name that a field may have."""
    names = draw(st.lists(_names, min_size=1, max_size=5, unique=True).filter(lambda names: _possible(*names)))
    fields = []
    for name in names:
        kind = draw(st.sampled_from(("scalar", "fixed", "fixed", "ragged", "bytes", "str")))
        if kind in ("bytes", "str"):
            fields.append(Field(name, kind))
            continue
        dtype = draw(st.sampled_from(DTYPES))
        if kind == "ragged":
            fields.append(Field(name, dtype, (None,) * draw(st.sampled_from((1, 1, 2, 2, 3, 3, 7, 32)))))
            continue
        sizes = st.lists(st.integers(0, 4), min_size=1, max_size=5)
        fields.append(Field(name, dtype, () if kind == "scalar" else tuple(draw(sizes))))
    return Schema(tuple(fields))


@st.composite
def blocks(draw: st.DrawFn) -> Block:
    """Generate blocks of no sample, one sample, or up to 30 samples; some have values of several pages."""
    return block(
        draw(schemas()),
        draw(st.one_of(st.integers(0, 1), st.integers(2, 30))),
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
    """Return the bytes of ``path`` and its contents, allocated or apparent, whichever is larger."""
    paths = [path, *(path.rglob("*") if path.is_dir() else ())]
    found = [os.lstat(p) for p in paths]
    return max(sum(s.st_blocks * 512 for s in found), sum(s.st_size for s in found))
