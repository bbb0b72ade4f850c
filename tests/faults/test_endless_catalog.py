"""A catalog that never ends: a pipe in its place, and tables whose pages name one page again and again."""

from __future__ import annotations

import contextlib
import os
import shutil
import sqlite3
import struct
from pathlib import Path

import numpy as np
import pytest

import cachetool
from cachetool.check.verify import verify
from cachetool.core.errors import CatalogError
from tests.commands import run_command

_PAGE, _FAN, _LEVELS = 4096, 400, 6
"""Bytes of a page, pointers in each page to one and the same, and how many such pages lie above the rows."""


@pytest.fixture(scope="module")
def pulled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pulled")
    (folder / "source").mkdir()
    for number in range(12):
        np.save(folder / "source" / f"{number}.npy", np.full(100, number, "f8"))
    with cachetool.open_cache(folder / "cache", max_size="8MB") as made:
        made.pull(folder / "source", everything=True, workers=1)
    return folder / "cache"


@pytest.fixture
def cache(pulled: Path, tmp_path: Path) -> Path:
    """That cache, which nobody has open."""
    shutil.copytree(pulled, tmp_path / "cache")
    return tmp_path / "cache"


def _pointers_to(page: int) -> bytes:
    """An interior page of a table (sqlite.org/fileformat.html, section 1.6) all of whose cells lead to ``page``."""
    body, end, cells = bytearray(_PAGE), _PAGE, []
    for number in range(_FAN):
        cell = struct.pack(">I", page) + bytes([number % 5 + 1])
        end -= len(cell)
        body[end : end + len(cell)] = cell
        cells.append(end)
    body[:12] = struct.pack(">BHHHB", 5, 0, _FAN, end, 0) + struct.pack(">I", page)
    body[12 : 12 + 2 * _FAN] = struct.pack(f">{_FAN}H", *cells)
    return bytes(body)


def _without_end(catalog: Path, table: str) -> None:
    """Have ``table`` of a catalog name its one page of rows 400 ** 6 times."""
    with contextlib.closing(sqlite3.connect(catalog)) as connection:
        (root,) = connection.execute("SELECT rootpage FROM sqlite_master WHERE name = ?", (table,)).fetchone()
        (pages,) = connection.execute("PRAGMA page_count").fetchone()
    with catalog.open("r+b") as file:
        file.seek((root - 1) * _PAGE)
        made = [file.read(_PAGE), *(_pointers_to(pages + level) for level in range(1, _LEVELS))]
        file.seek((root - 1) * _PAGE)
        file.write(_pointers_to(pages + _LEVELS))
        file.seek(pages * _PAGE)
        file.write(b"".join(made))
        file.seek(28)
        file.write(struct.pack(">I", pages + _LEVELS))


def test_a_table_of_rows_without_end_is_named_and_mended(cache: Path) -> None:
    with contextlib.closing(sqlite3.connect(cache / "catalog.sqlite3")) as connection, connection:
        connection.execute(
            "INSERT INTO leases (holder, run, epoch, version, dataset, taken) VALUES (?, 'r', 1, 1, 'default', 1.0)",
            ("1" * 16,),
        )
    _without_end(cache / "catalog.sqlite3", "leases")

    ran = run_command("stats", "--cache", str(cache), folder=cache.parent, environment=os.environ)
    assert ran.returncode == 6
    assert "more rows than fit into a file of its size; run: cachetool verify --repair" in ran.stderr
    assert verify(cache, repair=True).sound
    assert verify(cache).sound


@pytest.mark.parametrize("name", ["catalog.sqlite3", "catalog.sqlite3-journal"])
def test_a_pipe_in_place_of_a_catalog_is_named_and_not_waited_for(cache: Path, name: str) -> None:
    (cache / name).unlink(missing_ok=True)
    os.mkfifo(cache / name)
    with pytest.raises(CatalogError, match=f"{name} is no plain file; remove it, then run: cachetool verify --repair"):
        cachetool.open_cache(cache)
    (cache / name).unlink()
    verify(cache, repair=True)
    assert verify(cache).sound


def test_many_statements_in_one_transaction_are_no_such_thing(cache: Path) -> None:
    with cachetool.open_cache(cache) as used, used.catalog.write() as connection:
        connection.executemany(
            "INSERT INTO events (at, kind, dataset, subject, text) VALUES (?, 'x', '', 's', 't')",
            ((1.0,) for _ in range(2_000)),
        )
        for _ in range(3_000):  # 50 million instructions
            assert connection.execute("SELECT sum(at) FROM events").fetchone()[0] >= 2_000
