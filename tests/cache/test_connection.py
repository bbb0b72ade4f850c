"""The catalog's connection waits while another process holds the lock, and no longer."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest

import cachetool
from cachetool.cache import CacheDir, catalog
from cachetool.cache.catalog import connect


@pytest.fixture
def path(tmp_path: Path) -> Path:
    with sqlite3.connect(tmp_path / "file") as made:
        made.execute("CREATE TABLE t (x)")
    return tmp_path / "file"


@pytest.fixture
def lets_go(path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], list[str]]:
    """Open another connection that holds a lock and ends its transaction while the tested connection sleeps for the
    second time. Return the statements of that moment.
    """
    other = sqlite3.connect(path, isolation_level=None)
    done: list[str] = []

    def sleep(seconds: float) -> None:
        done.append("COMMIT" if done else "")
        if done[-1]:
            other.execute("COMMIT")

    def hold(*statements: str) -> list[str]:
        for statement in statements:
            other.execute(statement).fetchall()
        monkeypatch.setattr(catalog.time, "sleep", sleep)
        return done

    return hold


def test_a_writer_waits_for_a_writer(path: Path, lets_go: Callable[..., list[str]]) -> None:
    done = lets_go("BEGIN IMMEDIATE", "INSERT INTO t VALUES (1)")
    own = connect(path)
    own.execute("BEGIN IMMEDIATE")

    assert done == ["", "COMMIT"]
    assert own.execute("SELECT x FROM t").fetchall() == [(1,)]


def test_a_reader_waits_for_a_commit(path: Path, lets_go: Callable[..., list[str]]) -> None:
    done = lets_go("BEGIN EXCLUSIVE", "INSERT INTO t VALUES (1)")

    assert connect(path).execute("SELECT x FROM t").fetchall() == [(1,)]
    assert done == ["", "COMMIT"]


def test_a_commit_waits_for_a_reader_and_is_complete(path: Path, lets_go: Callable[..., list[str]]) -> None:
    done = lets_go("BEGIN", "SELECT * FROM t")
    own = connect(path)
    own.execute("BEGIN IMMEDIATE")
    own.execute("INSERT INTO t VALUES (1)")
    own.execute("COMMIT")

    assert done == ["", "COMMIT"]
    assert sqlite3.connect(path).execute("SELECT x FROM t").fetchall() == [(1,)]


def test_a_wait_for_the_lock_ends_with_an_error(cache: CacheDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalog, "_LOOKS", 2)
    with sqlite3.connect(cache.layout.catalog, isolation_level=None) as other:
        other.execute("BEGIN EXCLUSIVE")
        with pytest.raises(cachetool.CatalogError, match="locked"), cache.catalog.write():
            pass
