"""Whether the catalog says what the shards and records say: the check that decides if it must be rebuilt.

SQLite's own check sees the structure of its pages, not that a number in a row was changed, nor that the whole file is
an old copy. So everything that a rebuild would write is compared with what is there, under the catalog's lock, when no
commit is under way.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from typing import Any

from cachetool.cache.catalog import FIRST_PAGES, Catalog, Connection
from cachetool.cache.kinds import NOT_AGAIN
from cachetool.cache.layout import Layout
from cachetool.cache.rebuild import Found, open_draws, scan, without_doubles
from cachetool.cache.records import Record, without
from cachetool.core.errors import CatalogError

__all__ = ["contradiction"]

_TABLES = (
    *("meta", "holders", "datasets", "sources", "jobs", "claims", "shards", "leases", "events", "evictions"),
    *("pullers", "nodes", "placed"),
)
_STATES = ("staging", "ready", "retiring", "trash", "quarantine")
_FIXED = ("url", "identity", "dataset", "units", "samples", "seed")
"""Of a source; the rest changes while it is drawn."""


def contradiction(catalog: Catalog, layout: Layout) -> str | None:
    """The first thing in which a catalog that is sound as a file disagrees with the shards; None when there is none.

    What single rows say of single shards is left to :func:`cachetool.cache.repair.row_differs`: that can be corrected.
    """
    try:
        with catalog.write() as connection:
            return next(_differences(connection, layout), None)
    except CatalogError as error:  # text that cannot be decoded, a page that is only read now
        return str(error)
    except (ValueError, TypeError, KeyError) as error:
        return f"a row cannot be read: {error}"


def _differences(connection: Connection, layout: Layout) -> Iterator[str]:
    for table in _TABLES:
        for _ in connection.execute(f"SELECT * FROM {table}"):
            pass
    shards = connection.execute("SELECT id, state, source, turn, draws FROM shards").fetchall()
    rows = {row["id"]: row["state"] for row in shards}
    yield from (f"shard {id} is in the unknown state {state!r}" for id, state in rows.items() if state not in _STATES)
    found = scan(layout, leave_out={id for id, state in rows.items() if state in ("staging", "trash", "quarantine")})
    kept, _ = without_doubles(found.shards)
    yield from (f"shard {value['id']} is whole and not in it" for value in kept if value["id"] not in rows)
    yield from _meta(connection, found)
    schemas = {row["name"]: json.loads(row["schema"]) for row in connection.execute("SELECT * FROM datasets")}
    for name, (_, schema) in found.schemas.items():
        if schemas.get(name) != schema:
            yield f"dataset {name} has another schema in it than its shards"
    # Of shards whose own file cannot be read, which is found later, the row must do.
    read = {value["id"] for value in found.shards}
    unread = [
        {**dict(row), "draws": json.loads(row["draws"])}
        for row in shards
        if row["state"] in ("ready", "retiring") and row["id"] not in read and row["source"] is not None
    ]
    for _, progress in found.progress.values():
        yield from _source(connection, progress, kept + unread)


def _meta(connection: Connection, found: Found) -> Iterator[str]:
    meta = {row["key"]: row["value"] for row in connection.execute("SELECT key, value FROM meta")}
    wrong = [key for key, value in meta.items() if not isinstance(value, int) or value < 0]
    yield from (f"{key} is {meta[key]!r}" for key in wrong)
    newest = max([at[0] for at, _ in found.progress.values()] + [v["since"] for v in found.shards], default=0)
    if newest > meta["version"]:
        yield f"it is at version {meta['version']}, and version {newest} was committed"
    if math.floor(max((value["seq"] for value in found.shards), default=0)) > meta["seq"]:
        yield f"it counts {meta['seq']} commits, and there were more"
    if meta["pages"] < max(FIRST_PAGES, connection.execute("PRAGMA page_count").fetchone()[0]):
        yield f"it is larger than its limit of {meta['pages']} pages"


def _source(connection: Connection, progress: Record, kept: list[Record]) -> Iterator[str]:
    """Draws that were committed must be done in the catalog, and no others, but for some that were skipped since."""
    row: Mapping[str, Any] | None = connection.execute(
        "SELECT * FROM sources WHERE id = ?", (progress["id"],)
    ).fetchone()
    name = f"source {progress['id']}"
    if row is None:
        yield f"{name} is not in it"
        return
    yield from (f"{key} of {name} is {row[key]!r}" for key in _FIXED if row[key] != progress[key])
    if json.loads(row["options"]) != progress["options"]:
        yield f"options of {name} are others"
    if row["turn"] != progress["turn"]:
        if row["turn"] < progress["turn"]:
            yield f"{name} is in pass {row['turn'] + 1}, and pass {progress['turn'] + 1} was begun"
        return
    claims = connection.execute(
        f"SELECT start, stop FROM claims WHERE source = ? AND turn = ? AND {NOT_AGAIN}", (row["id"], row["turn"])
    ).fetchall()
    done = without([(0, row["frontier"])], [(each["start"], each["stop"]) for each in claims])
    frontier, pending = open_draws(progress, kept)
    committed = without([(0, frontier)], pending)
    if without(committed, done) or (row["skipped"] <= progress["skipped"] and without(done, committed)):
        yield f"{name} has other draws done in it than were committed"
