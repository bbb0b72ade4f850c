"""A cache that a verb put on disk goes again when the verb fails and nothing came into it."""

from __future__ import annotations

from pathlib import Path

import pytest

from cachetool.cache import open_cache
from cachetool.cache.unmaking import leaving_nothing
from cachetool.errors import SourceError
from tests.cache.conftest import SCHEMA, put_shard


def test_an_empty_new_cache_goes_with_the_folders_above_it_and_the_object_stays_good(tmp_path: Path) -> None:
    with open_cache(tmp_path / "a" / "b", max_size="4MB", min_free=1000) as cache:
        for _ in range(2):
            with pytest.raises(SourceError), leaving_nothing(cache):  # noqa: PT012 (it is made in between)
                assert cache.holder.path.exists()
                assert cache.exists
                raise SourceError("refused")
            assert list(tmp_path.iterdir()) == []
            assert not cache.exists
        cache.declare("default", SCHEMA)
        put_shard(cache)
        assert (cache.catalog.meta("max_size"), cache.catalog.meta("min_free")) == (4_000_000, 1000)
    with open_cache(tmp_path / "a" / "b") as again:
        assert len(again.shards()) == 1


@pytest.mark.parametrize(
    "what",
    ["nothing fails", "a dataset", "a shard", "another process", "there before", "folder", "a file", "an interrupt"],
)
def test_whatever_is_in_use_or_was_there_stays(tmp_path: Path, what: str) -> None:
    root = tmp_path / "cache"
    if what == "there before":
        open_cache(root, max_size="4MB").holder  # noqa: B018 (puts it on disk)
    if what == "folder":
        root.mkdir()
    with open_cache(root, max_size="4MB") as cache:
        try:
            with leaving_nothing(cache):
                with cache.catalog.write() as connection:
                    if what == "another process":
                        connection.execute("INSERT INTO holders VALUES ('other', 1, 'host', 'what', 0)")
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
