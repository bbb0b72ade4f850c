"""The values that cachetool writes into the tables of a catalog, and a search for any other value.

SQLite keeps a value of any type in any column, and a catalog may come from somebody else. The rows are searched
after an error in reading them (:meth:`cachetool.cache.catalog.Catalog.foreign`), by ``verify``, and by a rebuild,
which takes over no row with such a value. Epochs do not pay for it: twenty thousand shards take a second.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from cachetool.core.schema import Schema
from cachetool.core.text import shown

if TYPE_CHECKING:
    from cachetool.cache.catalog import Connection

__all__ = ["KEYS", "fits", "foreign_value", "sound_rows"]

KEYS = ("max_size", "min_free", "version", "seq", "pages")
"""Of the table ``meta``, which every catalog has."""

_MOST = 2**62
_SUMMED = ("samples", "payload", "bytes")
_MOST_OF_SHARD = 2**50  # of each: the sums stay numbers of 64 bits
_LATEST = 250_000_000_000.0  # seconds since 1970: the year 9892
_SIGNED = {"seed", "epoch", "pid", "wanted"}
_READY = "seq dataset format samples payload since created epochs content digest"
_REQUIRED = {
    "meta": "key value",
    "holders": "id pid host what started",
    "datasets": "name schema",
    "sources": "id url options identity dataset units samples seed turn frontier skipped bytes fetched cuts past",
    "shards": "id state bytes",
    "leases": "holder version dataset taken",
    "events": "at kind subject text",
    "claims": "source turn start stop",
    "pullers": "source holder pid url dataset phase started updated",
    "evictions": "dataset reason policy shards samples bytes",
}


def _draws(text: str) -> bool:
    value = json.loads(text)
    return isinstance(value, list) and all(
        len(run) == 2 and all(type(number) is int and 0 <= number <= _MOST for number in run) for run in value
    )


def _numbers(text: str) -> bool:
    value = json.loads(text)
    return isinstance(value, list) and all(type(number) is int and 0 <= number <= _MOST for number in value)


def _past(text: str) -> bool:
    return all(_numbers(json.dumps([number, units, *cuts])) for number, units, cuts in json.loads(text))


def _schema(text: str) -> bool:
    return len(Schema.from_json(json.loads(text))) > 0


_JSON: Mapping[str, Callable[[str], bool]] = {
    "draws": _draws,
    "cuts": _numbers,
    "past": _past,
    "options": lambda text: isinstance(json.loads(text), dict),
    "schema": _schema,
    "evicted": lambda text: isinstance(json.loads(text), dict),
}


def fits(column: str, kind: str, value: object) -> bool:
    """Return True if cachetool may have written ``value`` into a column declared as ``kind``; None always fits."""
    if value is None:
        return True
    if kind == "TEXT":
        if not isinstance(value, str):
            return False
        try:
            return column not in _JSON or _JSON[column](value)
        except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError):
            return False
    if kind == "REAL" or column == "seq":  # a shard that was cut into others has parts of a number
        return isinstance(value, int | float) and math.isfinite(value) and abs(value) <= _LATEST
    if not isinstance(value, int):
        return False
    return column in _SIGNED or 0 <= value <= _MOST


def foreign_value(connection: Connection) -> str | None:
    """The first value that cachetool never writes: "its TABLE has COLUMN VALUE"; None where there is none."""
    keys = {row[0] for row in connection.execute("SELECT key FROM meta").fetchall()}
    if lacking := [key for key in KEYS if key not in keys]:
        return f"its table 'meta' lacks {', '.join(lacking)}"
    tables = [row[0] for row in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall()]
    datasets: set[object] = set()
    for table in sorted(tables):  # datasets before shards
        if table.startswith("sqlite_"):
            continue
        name = table.replace('"', '""')
        kinds = {row[1]: row[2] for row in connection.execute(f'PRAGMA table_info("{name}")').fetchall()}
        required = _REQUIRED.get(table, "").split()
        for values in connection.execute(f'SELECT * FROM "{name}"'):
            row = dict(zip(kinds, tuple(values), strict=True))
            if table == "datasets":
                datasets.add(row.get("name"))
            if (column := _wrong(table, kinds, row, required, datasets)) is not None:
                return f"its table {shown(table)} has {shown(column)} {shown(row[column])}"
    return None


def _wrong(
    table: str, kinds: Mapping[str, str], row: Mapping[str, Any], required: list[str], datasets: set[object]
) -> str | None:
    """The column of ``row`` whose value cachetool never writes, or None."""
    needed = required
    if table == "shards" and row.get("state") in ("ready", "retiring"):
        needed = [*required, *_READY.split()]
    for column, kind in kinds.items():
        value = row[column]
        if (value is None and column in needed) or not fits(column, kind, value):
            return column
        if table == "shards" and column in _SUMMED and (value or 0) > _MOST_OF_SHARD:
            return column
    if needed is not required and row["dataset"] not in datasets:
        return "dataset"
    return None


def sound_rows(
    columns: Mapping[str, str], rows: Iterable[tuple[Any, ...]], *, optional: Collection[str] = ()
) -> list[tuple[Any, ...]]:
    """Return the rows whose values all fit their columns; a value may be missing only in ``optional`` columns."""
    kinds = list(columns.items())
    return [
        row
        for row in rows
        if all(
            (value is not None or name in optional) and fits(name, kind, value)
            for (name, kind), value in zip(kinds, row, strict=True)
        )
    ]
