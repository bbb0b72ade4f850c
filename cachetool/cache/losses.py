"""Samples that were committed and then damaged: which are still missing, and how their loss is accepted.

::

    shard given up  -- reopen -->  claims with `lost` samples  -- drawn again, before all others -->  row gone
                                                               -- accept ------------------------->  open like any
    exists nowhere else          ->  state `quarantine`        -- purge -------------------------->  trash, recorded

Whatever is in one of the two middle columns is what ``verify`` calls missing or in quarantine.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from cachetool.cache.catalog import Catalog, Connection, bump, event
from cachetool.cache.draws import SourceRow, source_row
from cachetool.cache.holders import Holder
from cachetool.cache.layout import Layout
from cachetool.cache.records import write_source_record
from cachetool.cache.removal import delete_trash

__all__ = ["Loss", "accept", "losses", "purge", "quarantined", "reopen"]


@dataclass(frozen=True, slots=True)
class Loss:
    """Samples of one source that are missing."""

    source: str
    """Its id."""
    url: str
    dataset: str
    samples: int
    draws: int
    """Positions of the passes that drew them, which bring them again."""
    why: str
    """The newest error of that source; empty when there was none."""


def reopen(
    connection: Connection, source: SourceRow, turn: int, ranges: Iterable[tuple[int, int]], samples: int | None
) -> int:
    """Open draws again whose ``samples`` were lost (None: and are not missed); gives how many draws. What an
    earlier pass drew is drawn again as what it was, positions of that pass: the present one has been past it, or goes
    around it. When it is not missed, a later pass brings it."""
    if turn != source.turn and samples is None:
        return 0
    parts = [(start, stop) for start, stop in ranges if start < stop]
    left, count = samples, sum(stop - start for start, stop in parts)
    draws = count
    for start, stop in parts:
        mine = None if left is None else left * (stop - start) // draws
        if left is not None and mine is not None:
            left, draws = left - mine, draws - (stop - start)
        connection.execute(
            "INSERT INTO claims (source, turn, start, stop, lost) VALUES (?, ?, ?, ?, ?)",
            (source.id, turn, start, stop, mine),
        )
    if turn == source.turn and samples is not None:  # what was skipped among them is counted when it is again
        again = max(0, count - samples)
        connection.execute("UPDATE sources SET skipped = max(0, skipped - ?) WHERE id = ?", (again, source.id))
    return count


def losses(connection: Connection) -> list[Loss]:
    """What is missing of each source."""
    rows = connection.execute(
        "SELECT s.id AS source, s.url, s.dataset, sum(c.lost) AS samples, sum(c.stop - c.start) AS draws FROM claims c"
        " JOIN sources s ON s.id = c.source WHERE c.lost > 0 GROUP BY s.id ORDER BY s.created"
    ).fetchall()
    return [Loss(**dict(row), why=_newest(connection, "error", row["url"])) for row in rows]


def accept(catalog: Catalog, layout: Layout, source: str | None = None) -> None:
    """Call nothing missing any more, of one source or of any: what was not pulled again is open like other draws."""
    with catalog.write() as connection:
        which = "lost IS NOT NULL AND source = coalesce(?, source)"
        rows = connection.execute(f"SELECT DISTINCT source FROM claims WHERE {which}", (source,)).fetchall()
        connection.execute(f"UPDATE claims SET lost = NULL WHERE {which}", (source,))
        if rows:
            bump(connection)  # newer than what the shards say of their source
        for row in rows:
            write_source_record(connection, layout, row["source"])


def quarantined(connection: Connection) -> Iterator[dict[str, Any]]:
    """Shards in quarantine: id, dataset, samples, bytes, and why."""
    for row in connection.execute(
        "SELECT id, dataset, samples, bytes FROM shards WHERE state = 'quarantine'"
    ).fetchall():
        yield {**dict(row), "why": _newest(connection, "corrupt", row["id"])}


def purge(catalog: Catalog, layout: Layout, holder: Holder) -> tuple[int, int, int]:
    """Delete what is in quarantine, as a recorded eviction: shards, samples and bytes deleted.

    The draws of data that came from a file are open again, so that whoever has the file can convert it once more.
    """
    with catalog.write() as connection:
        rows = connection.execute("SELECT * FROM shards WHERE state = 'quarantine'").fetchall()
        if not rows:
            return 0, 0, 0
        holder.register(connection)
        bump(connection)
        for row in rows:
            event(connection, time.time(), "evict", row["id"], "purged, verify")
            connection.execute(
                "INSERT INTO evictions VALUES (?, 'purged', 'verify', 1, ?, ?)"
                " ON CONFLICT (dataset, reason, policy) DO UPDATE SET"
                " shards = shards + 1, samples = samples + excluded.samples, bytes = bytes + excluded.bytes",
                (row["dataset"] or "", row["samples"], row["bytes"]),
            )
            connection.execute("UPDATE shards SET state = 'trash', holder = ? WHERE id = ?", (holder.id, row["id"]))
            source = source_row(connection, row["source"] or "")
            if source is not None:
                reopen(connection, source, row["turn"], json.loads(row["draws"]), None)
                write_source_record(connection, layout, source.id)
    return delete_trash(catalog, layout, [row["id"] for row in rows])


def _newest(connection: Connection, kind: str, subject: str) -> str:
    row = connection.execute(
        "SELECT text FROM events WHERE kind = ? AND subject = ? ORDER BY id DESC LIMIT 1", (kind, subject)
    ).fetchone()
    return row["text"] if row else ""
