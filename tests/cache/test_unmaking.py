"""A cache that a command created is removed again if the command fails before it stored anything."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from cachetool.cache import open_cache
from cachetool.cache.unmaking import leaving_nothing
from cachetool.core.errors import CatalogError, SourceError
from tests.cache.conftest import SCHEMA, put_shard


def test_an_empty_new_cache_is_removed_with_its_new_parent_folders_and_its_object_stays_usable(tmp_path: Path) -> None:
    with open_cache(tmp_path / "a" / "b", max_size="4MB", min_free=1000) as cache:
        for _ in range(2):
            with pytest.raises(SourceError), leaving_nothing(cache):  # noqa: PT012 (the cache is created inside)
                assert cache.holder.path.exists()
                assert cache.exists
                raise SourceError("refused")
            assert list(tmp_path.iterdir()) == []
            assert not cache.exists
        cache.declare("default", SCHEMA)
        put_shard(cache)
        assert (cache.catalog.number("max_size"), cache.catalog.number("min_free")) == (4_000_000, 1000)
    with open_cache(tmp_path / "a" / "b") as again:
        assert len(again.shards()) == 1


@pytest.mark.parametrize(
    "what",
    ["nothing fails", "a dataset", "a shard", "another process", "there before", "folder", "a file", "an interrupt"],
)
def test_a_cache_in_use_or_an_older_cache_is_not_removed(tmp_path: Path, what: str) -> None:
    root = tmp_path / "cache"
    if what == "there before":
        open_cache(root, max_size="4MB").holder  # noqa: B018 (creates the cache on disk)
    if what == "folder":
        root.mkdir()
    with open_cache(root, max_size="4MB") as cache:
        try:
            with leaving_nothing(cache):
                with cache.catalog.write() as connection:
                    if what == "another process":
                        connection.execute("INSERT INTO holders VALUES ('0123456789abcdef', 1, 'host', 'what', 0)")
                if what in ("a dataset", "a shard"):
                    cache.declare("default", SCHEMA)
                if what == "a shard":
                    put_shard(cache)
                if what == "a file":
                    (root / "notes.txt").write_text("of the user")
                if what == "an interrupt":
                    raise KeyboardInterrupt
                if what != "nothing fails":
                    raise SourceError("failed")
        except (SourceError, KeyboardInterrupt):
            pass
        assert cache.exists
        assert cache.layout.marker.exists()
        assert cache.max_size == 4_000_000


def test_after_a_cache_was_removed_another_opener_creates_it_to_write_and_fails_to_read(
    tmp_path: Path,
) -> None:
    """A first pull fails while a second pull, which found the first pull's cache, still lists its source."""
    root = tmp_path / "cache"
    with open_cache(root, max_size="4MB", min_free=1000) as first:
        with pytest.raises(SourceError), leaving_nothing(first):  # noqa: PT012 (both caches are opened inside)
            assert first.holder.path.exists()
            second, reader = open_cache(root), open_cache(root, create=False)
            raise SourceError("refused")
        assert not root.exists()
        with reader, pytest.raises(CatalogError, match="pull again"):
            reader.stats()
        with second:
            assert second.datasets() == []
            second.declare("default", SCHEMA)
            put_shard(second)
            assert (second.catalog.number("max_size"), second.catalog.number("min_free")) == (4_000_000, 1000)
    with open_cache(root) as again:
        assert len(again.shards()) == 1


def test_a_cache_with_another_processs_lock_is_not_removed(tmp_path: Path) -> None:
    """The other process may not have written a row yet."""
    root = tmp_path / "cache"
    code = "import sys, cachetool; c = cachetool.open_cache(sys.argv[1]); c.holder; print(1, flush=True); input()"
    with open_cache(root, max_size="4MB") as cache:
        with pytest.raises(SourceError), leaving_nothing(cache):  # noqa: PT012 (the other process comes in between)
            assert cache.holder.path.exists()
            other = subprocess.Popen(
                [sys.executable, "-c", code, str(root)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
            assert other.stdout is not None
            assert other.stdout.readline()
            raise SourceError("refused")
        assert cache.exists
        assert len(list((root / "holders").iterdir())) == 2
        other.communicate("\n", timeout=60)
