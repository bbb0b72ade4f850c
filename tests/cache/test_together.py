"""Several writes as one transaction of the catalog, as the answers of a coordinator are written."""

from __future__ import annotations

import sqlite3

import pytest

import cachetool
from cachetool.cache import CacheDir


def enter(cache: CacheDir, key: str) -> None:
    with cache.catalog.write() as connection:
        connection.execute("INSERT INTO nodes VALUES (?, 1)", (key,))


def fail(cache: CacheDir, key: str) -> None:
    with cache.catalog.write() as connection:
        connection.execute("INSERT INTO nodes VALUES (?, 1)", (key,))
        raise KeyError


def fill(cache: CacheDir) -> None:
    with cache.catalog.write() as connection:
        connection.execute("ROLLBACK")
        raise sqlite3.OperationalError("full at 2")


def entered(cache: CacheDir) -> list[str]:
    return [row["name"] for row in cache.catalog.rows("SELECT name FROM nodes ORDER BY name")]


def test_a_part_that_raises_is_undone_by_itself(cache: CacheDir) -> None:
    with cache.catalog.together():
        enter(cache, "test:1")
        with pytest.raises(KeyError):
            fail(cache, "test:2")
        with pytest.raises(cachetool.CatalogError, match="UNIQUE"):
            enter(cache, "test:1")
        enter(cache, "test:3")
    assert entered(cache) == ["test:1", "test:3"]


def test_what_sqlite_undoes_by_itself_is_the_error_of_all_that_follows_and_of_the_whole(cache: CacheDir) -> None:
    """As when the disk is full in the middle."""

    def three() -> None:
        with cache.catalog.together():
            enter(cache, "test:1")
            with pytest.raises(cachetool.CatalogError, match="full at 2"):
                fill(cache)
            with pytest.raises(cachetool.CatalogError, match="full at 2"):
                enter(cache, "test:3")

    with pytest.raises(cachetool.CatalogError, match="full at 2"):
        three()
    assert entered(cache) == []
    enter(cache, "test:4")
    assert entered(cache) == ["test:4"]
