"""Volumes whose values follow from their number, and checks of crops and windows of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from cachetool.cache import CacheDir, open_cache
from cachetool.core.schema import Field, Schema
from tests.loaders.numbered import put_samples

SHAPE = (12, 10, 8)
VOLUMES = Schema(
    (
        Field("__key__", "str"),
        Field("volume", "<f4", SHAPE),
        Field("label", "|u1", SHAPE),
        Field("plane", "<f8", (None, None)),
        Field("point", "<i8", (3,)),
        Field("number", "<i8"),
    )
)
"""An image and a label of one shape, a ragged field, and a point near which crops may be wanted."""
BOX = (4, 5, 3)


def volume(number: int) -> dict[str, Any]:
    """Return the sample with this number, row ``number % 20`` of its series."""
    rng = np.random.default_rng(number)
    return {
        "__key__": f"run{number // 20}.zarr#{number % 20}",
        "volume": rng.standard_normal(SHAPE).astype("<f4"),
        "label": rng.integers(0, 255, SHAPE).astype("|u1"),
        "plane": rng.standard_normal(tuple(rng.integers(5, 9, 2))),
        "point": rng.integers(0, SHAPE),
        "number": number,
    }


def put_volumes(cache: CacheDir, numbers: Iterable[int], **options: Any) -> str:
    """Commit one shard of these samples. Return its id."""
    return put_samples(cache, list(map(volume, numbers)), schema=VOLUMES, **options)


def volumes(place: Path, shards: Sequence[Iterable[int]] = (range(20), range(20, 33)), **options: Any) -> Path:
    """Create a cache with one shard for each of these ranges of numbers. Return its folder."""
    with open_cache(place, max_size="500MB") as cache:
        for numbers in shards:
            put_volumes(cache, numbers, **options)
    return place


def boxed(array: np.ndarray, corner: Sequence[int], box: Sequence[int | None], **pad: Any) -> np.ndarray:
    """Return the box of these sizes at ``corner``, filled up as ``np.pad`` does with ``pad``."""
    sizes = [have if size is None else size for have, size in zip(array.shape, box, strict=True)]
    inside = array[tuple(slice(int(first), int(first) + size) for first, size in zip(corner, sizes, strict=True))]
    if not pad:
        return inside
    return np.pad(inside, [(0, size - have) for size, have in zip(sizes, inside.shape, strict=True)], **pad)


def checked(batches: Iterable[Mapping[str, Any]], crop: Mapping[str, Any], **pad: Any) -> list[tuple[Any, ...]]:
    """Return number and corners of all crops, in order, after a comparison of each with its sample."""
    found = []
    for batch in batches:
        for at, number in enumerate(np.asarray(batch["number"]).tolist()):
            sample = volume(number)
            corners = []
            for name, box in crop.items():
                corner = np.asarray(batch[f"{name}_corner"][at]).tolist()
                expected = boxed(sample[name], corner, box, **pad)
                got = np.asarray(batch[name][at])
                assert got.dtype == expected.dtype
                assert got.shape == expected.shape
                assert got.tobytes() == np.ascontiguousarray(expected).tobytes()
                corners.append(tuple(corner))
            found.append((number, *corners))
    return found
