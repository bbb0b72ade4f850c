"""Compressed shards in the loaders: what is decoded, what is read ahead, and what a damaged frame says."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cachetool import Cache, open_cache
from cachetool.core.errors import CorruptError
from cachetool.core.schema import Field, Schema
from cachetool.loaders.numpy import Loader
from cachetool.loaders.read.mapped import MappedParts
from cachetool.loaders.view import View
from tests.loaders.numbered import put_samples

SCHEMA = Schema((Field("x", "<f4", (4096,)), Field("small", "<i4", (300,)), Field("text", "str"), Field("y", "<i8")))
COUNT = 40
PACKED = [("zarr", "blosc"), ("zarr", "zstd"), ("hdf5", "gzip"), ("tfrecord", "gzip")]


def sample(number: int) -> dict[str, Any]:
    """Return a sample from which its number can be read."""
    return {
        "x": np.arange(4096, dtype="<f4") + number,
        "small": np.arange(300, dtype="<i4") * number,
        "text": "word " * number,
        "y": number,
    }


@pytest.fixture(params=PACKED, ids=" ".join)
def cache(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    """A cache with two compressed shards."""
    name, compression = request.param
    with open_cache(tmp_path / "cache", max_size="50MB") as cache:
        for numbers in (range(25), range(25, COUNT)):
            put_samples(cache, [sample(n) for n in numbers], schema=SCHEMA, format=name, compression=compression)
        yield cache


@pytest.mark.parametrize("workers", [0, 2])
def test_batches_of_compressed_shards_hold_the_samples_that_were_written(cache: Cache, workers: int) -> None:
    with Loader(cache, batch_size=7, workers=workers, seed=3) as loader:
        seen = []
        for batch in loader:
            for row, number in enumerate(batch["y"].tolist()):
                expected = sample(number)
                assert np.array_equal(batch["x"][row], expected["x"])
                assert np.array_equal(batch["small"][row], expected["small"])
                assert batch["text"][row] == expected["text"]
                seen.append(number)
    assert sorted(seen) == list(range(COUNT))


def test_only_the_fields_that_are_asked_for_are_read(tmp_path: Path) -> None:
    with open_cache(tmp_path / "cache", max_size="50MB") as cache:
        put_samples(cache, [sample(n) for n in range(20)], schema=SCHEMA, format="zarr", compression="blosc")
        (shard,) = cache.shards()
        with Loader(cache, batch_size=5, workers=0, fields=["small", "y"]) as loader:
            # Without its file the field x cannot be read at all.
            (shard.path / "data.zarr" / "x" / "c.0.0").unlink()
            assert sum(len(batch["y"]) for batch in loader) == 20


def test_a_frame_that_cannot_be_decoded_names_its_file(cache: Cache) -> None:
    shard = cache.shards()[0]
    file = max((path for path in shard.path.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)
    raw = bytearray(file.read_bytes())
    raw[1000:-1000] = bytes(len(raw) - 2000)
    os.chmod(file, 0o644)
    file.write_bytes(raw)
    said = f"{file} has a damaged frame"
    with Loader(cache, batch_size=25, workers=0) as loader, pytest.raises(CorruptError, match=said):
        list(loader)


def test_the_frames_of_coming_batches_are_asked_for_together(cache: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, int]] = []
    monkeypatch.setattr("os.posix_fadvise", lambda fd, at, size, advice: asked.append((at, size)))
    with cache.snapshot() as snapshot:
        view, parts = View.of_snapshot(snapshot), MappedParts()
        (group,) = parts.locate(view, np.arange(25), view.schema)
        runs = group[1]["x"]
        assert runs.unmapped is not None
        assert not runs.unmapped.asleep(runs.starts).any()
        runs.unmapped.will_need(runs.starts, np.full(25, 4096 * 4))
        parts.close()
    assert asked == sorted(set(asked))
    # A sample of 16 KiB is a frame of its own, or a record that is one.
    assert len(asked) == 25
