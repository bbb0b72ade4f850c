"""A small cache, and a function that commits shards without a format: the catalog knows bytes, not samples."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from cachetool.cache import CacheDir, Facts, Origin, Room, open_cache
from cachetool.core.schema import Field, Schema

SCHEMA = Schema((Field("x", "<f4", (4,)),))
Put = Callable[..., str]


def put_shard(
    cache: CacheDir, nbytes: int = 100_000, *, samples: int = 10, room: Room | None = None, **more: Any
) -> str:
    """Commit a shard of ``nbytes`` bytes."""
    staging = cache.stage(
        dataset=more.pop("dataset", "default"),
        schema=SCHEMA,
        format="lmdb",
        bound=nbytes + 8192,
        room=room or Room(wait=0),
        job=more.pop("job", None),
    )
    with staging:
        (staging.path / "data.lmdb").write_bytes(bytes(nbytes))
        return staging.commit(
            Facts(samples, nbytes, "content", "digest", "data.lmdb"), origin=more.pop("origin", Origin()), **more
        )


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture
def cache(root: Path) -> Iterator[CacheDir]:
    with open_cache(root, max_size="4MB") as opened:
        opened.declare("default", SCHEMA)
        yield opened


@pytest.fixture
def put(cache: CacheDir) -> Put:
    def commit(nbytes: int = 100_000, **more: Any) -> str:
        return put_shard(cache, nbytes, **more)

    return commit
