"""The growth of a cache: with twenty thousand shards its catalog must still be small. ``benchmarks/scale_catalog.py``
measures times.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from benchmarks.scale_catalog import fill
from cachetool.cache import CacheDir, open_cache
from cachetool.check.doctor import examine

Put = Callable[..., str]


def test_a_shard_takes_less_than_a_kilobyte_of_catalog_and_journal(tmp_path: Path) -> None:
    root = tmp_path / "cache"
    fill(root, 2000)
    with open_cache(root) as cache, cache.snapshot() as snapshot:
        assert len(snapshot.shards) == 2000
        assert snapshot.samples == 10_000_000
        assert len(cache.evict(cache.usage().total // 2, dry_run=True).plan) in (1000, 1001)
    size = sum((root / name).stat().st_size for name in ("catalog.sqlite3", "catalog.sqlite3-journal"))
    assert size < 2000 * 1000


def test_leases_need_no_open_descriptor(cache: CacheDir, put: Put) -> None:
    """A program could close such a descriptor by accident."""
    for _ in range(3):
        put()

    def lock_files() -> list[Path]:
        opened = {path.resolve() for path in Path("/proc/self/fd").iterdir()}
        return [path for path in opened if path.parent == folder or path.name.endswith("-lock")]

    folder = (cache.root / "holders").resolve()
    with open_cache(cache.root) as other, cache.snapshot(), other.snapshot(), cache.snapshot(run="r", epoch=1):
        assert len(cache.stats().leases) == 3
        assert lock_files() == []
        examine(cache.root)
        cache.recover()
        put()
        assert lock_files() == []
        assert os.listdir(folder) == [cache.holder.path.name]
