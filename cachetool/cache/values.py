"""The values that cachetool writes into the tables of a catalog, and a search for any other value.

SQLite itself refuses values of other types, NULL and unknown states (:mod:`cachetool.cache.schema`). It does not refuse
numbers out of range and JSON of another form, and a file may be written by other means. The rows are searched after an
error in reading them (:meth:`cachetool.cache.catalog.Catalog.foreign`) and by ``verify``. Epochs do not search, because
twenty thousand shards take a second.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from cachetool.core.errors import CacheToolError, CatalogError
from cachetool.core.schema import Schema
from cachetool.core.text import shown

if TYPE_CHECKING:
    from cachetool.cache.catalog import Connection, Row

__all__ = ["ForeignValue", "check_row", "fits", "foreign_value", "schema_of"]

_MOST = 2**62
_SUMMED = ("samples", "payload", "bytes")
# Bound on each of these columns of one shard, so that sums over thousands of shards stay within 64
# bits; SQLite ends a larger sum with "integer overflow".
_MOST_OF_SHARD = 2**50
# Seconds since 1970: the year 9892.
_LATEST = 250_000_000_000.0
_SIGNED = {"seed", "epoch", "pid", "wanted"}
_MOST_TEXT = 2**20


def _draws(text: str) -> bool:
    value = json.loads(text)
    return isinstance(value, list) and all(
        len(run) == 2 and all(type(number) is int and 0 <= number <= _MOST for number in run) for run in value
    )


def _numbers(text: str) -> bool:
    # `type(number) is int` below, because True and False are integers for `isinstance`.
    value = json.loads(text)
    return isinstance(value, list) and all(type(number) is int and 0 <= number <= _MOST for number in value)


def _past(text: str) -> bool:
    return all(_numbers(json.dumps([number, units, *segments])) for number, units, segments in json.loads(text))


def _parts(text: str) -> bool:
    return all(len(part) == 3 and _numbers(json.dumps(part)) for part in json.loads(text))


def _schema(text: str) -> bool:
    return len(Schema.from_json(json.loads(text))) > 0


_JSON: Mapping[str, Callable[[str], bool]] = {
    "draws": _draws,
    "segments": _numbers,
    "past": _past,
    "parts": _parts,
    "options": lambda text: isinstance(json.loads(text), dict),
    "schema": _schema,
}


def fits(column: str, value: object) -> bool:
    """Return True if cachetool may have written ``value`` into a record under the name of a column.

    The caller checks the contents of lists and dicts.
    """
    if isinstance(value, str):
        try:
            # JSON may hold half of a surrogate pair, which is no text to SQLite.
            value.encode()
        except UnicodeEncodeError:
            return False
        return len(value) <= _MOST_TEXT and _fits(column, "TEXT", value)
    if isinstance(value, int | float):
        small = column not in _SUMMED or value <= _MOST_OF_SHARD
        return small and _fits(column, "INTEGER" if isinstance(value, int) else "REAL", value)
    return True


class ForeignValue(CatalogError):
    """A value in the catalog that cachetool never writes. The code that has the catalog open adds the advice."""

    def __init__(self, table: str, column: str, value: object, why: str = "") -> None:
        super().__init__(f"its table {table!r} has {column!r} {shown(value)}{why}, which cachetool never writes")


def check_row(table: str, row: Row) -> None:
    """Raise :class:`ForeignValue` for a row with a value that cachetool never writes."""
    for column, value in zip(row.keys(), tuple(row), strict=True):
        if not fits(column, value):
            raise ForeignValue(table, column, value)


def schema_of(text: str) -> Schema:
    """Return the schema in a dataset's row. Raises :class:`ForeignValue` if the text is no schema."""
    try:
        return Schema.from_json(json.loads(text))
    except (CacheToolError, ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        raise ForeignValue("datasets", "schema", text) from error


def _fits(column: str, kind: str, value: object) -> bool:
    """Return True if cachetool may have written ``value`` into a column declared as ``kind``. None always fits."""
    if value is None:
        return True
    if kind == "TEXT":
        try:
            return isinstance(value, str) and (column not in _JSON or _JSON[column](value))
        except (CacheToolError, ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError):
            return False
    if kind == "REAL":
        return isinstance(value, int | float) and math.isfinite(value) and abs(value) <= _LATEST
    least, most = (-(2**63), 2**63 - 1) if column in _SIGNED else (0, _MOST)
    return isinstance(value, int) and least <= value <= most


def foreign_value(connection: Connection) -> str | None:
    """Return the first value that cachetool never writes, as "its table TABLE has COLUMN VALUE", or None."""
    # First, because a damaged page can raise any error in the loops below. `quick_check` also finds
    # values of a wrong type in STRICT tables.
    check = connection.execute("PRAGMA quick_check(1)").fetchone()[0]
    if check != "ok":
        return str(check)
    tables = connection.execute("SELECT name FROM sqlite_master WHERE type = 'table' AND name NOT LIKE 'sqlite_%'")
    for (table,) in [tuple(row) for row in tables.fetchall()]:
        kinds = {row[1]: row[2] for row in connection.execute(f"PRAGMA table_info({table})").fetchall()}
        for values in connection.execute(f"SELECT * FROM {table}"):
            for (column, kind), value in zip(kinds.items(), tuple(values), strict=True):
                large = table == "shards" and column in _SUMMED and (value or 0) > _MOST_OF_SHARD
                if large or not _fits(column, kind, value):
                    return f"its table {shown(table)} has {shown(column)} {shown(value)}"
    # The table has no foreign key for it, and a shard of an unknown dataset has no schema.
    query = "SELECT dataset FROM shards WHERE state <> 'trash' AND dataset NOT IN (SELECT name FROM datasets) LIMIT 1"
    if (row := connection.execute(query).fetchone()) is not None:
        return f"its table 'shards' has 'dataset' {shown(row[0])}"
    if connection.execute("SELECT count(*) FROM cache").fetchone()[0] != 1:
        return "its table 'cache' has no row"
    return None
