"""Samples that were committed and then damaged: which are still missing, and how their loss is accepted.

::

    shard given up  -- reopen -->  claims with `lost` samples  -- drawn again, before all others -->  row gone
                                                               -- regain: gave nothing ---------->  `tried`, still lost
                                                               -- accept ------------------------->  open like any
    exists nowhere else          ->  state `quarantine`        -- purge -------------------------->  trash, recorded

Whatever is in one of the two middle columns is what ``verify`` calls missing or in quarantine.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from cachetool.cache.catalog import Catalog, Connection, bump, event
from cachetool.cache.draws import Claim, SourceRow, source_row
from cachetool.cache.holders import Holder
from cachetool.cache.layout import Layout
from cachetool.cache.records import write_source_record
from cachetool.cache.removal import delete_trash
from cachetool.core.names import Id

__all__ = ["Loss", "accept", "losses", "purge", "quarantined", "regain", "reopen"]


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


def regain(
    connection: Connection, job: str, held: Claim, upto: int, *, samples: int, barren: Sequence[tuple[int, int]]
) -> None:
    """Before the positions of a claim of lost draws below ``upto`` are finished: count the ``samples`` that came, of
    those that were lost with any claim of this source.

    The ranges ``barren`` gave none, and the pull ``job`` tries them no more. Some of them may never have given any, and
    nobody knows which: so they stay open together as long as samples are missing, and are done once none is.
    """
    row = connection.execute("SELECT lost FROM claims WHERE id = ?", (held.id,)).fetchone()
    if row is None or row["lost"] is None:
        return
    source = held.source.id
    connection.executemany(
        "INSERT INTO claims (source, turn, start, stop, lost, tried) VALUES (?, ?, ?, ?, 0, ?)",
        [(source, held.turn, start, stop, job) for start, stop in barren],
    )
    count = sum(stop - start for start, stop in barren)
    connection.execute("UPDATE sources SET skipped = skipped - ? WHERE id = ?", (count, source))  # not yet
    left = row["lost"] - samples
    if left > 0 and upto >= held.stop:
        connection.execute(
            "UPDATE claims SET lost = lost + ? WHERE id = (SELECT max(id) FROM claims WHERE source = ? AND tried = ?)",
            (left, source, job),
        )
    connection.execute("UPDATE claims SET lost = ? WHERE id = ?", (max(0, left) if upto < held.stop else 0, held.id))
    others = connection.execute("SELECT id, lost FROM claims WHERE source = ? AND lost > 0", (source,)).fetchall()
    for other in others:  # their share was a guess
        more = min(max(0, -left), other["lost"])
        connection.execute("UPDATE claims SET lost = lost - ? WHERE id = ?", (more, other["id"]))
        left += more
    if not connection.execute("SELECT 1 FROM claims WHERE source = ? AND lost > 0", (source,)).fetchone():
        _close(connection, source, "lost = 0 AND holder IS NULL")


def _close(connection: Connection, source: str, which: str) -> None:
    """Call draws done that gave nothing."""
    gone = connection.execute(
        f"DELETE FROM claims WHERE source = ? AND {which} RETURNING stop - start AS draws, turn", (source,)
    ).fetchall()
    for row in gone:
        connection.execute(
            "UPDATE sources SET skipped = skipped + ? WHERE id = ? AND turn = ?", (row["draws"], source, row["turn"])
        )


def losses(connection: Connection) -> list[Loss]:
    """What is missing of each source."""
    rows = connection.execute(
        "SELECT s.id AS source, s.url, s.dataset, sum(c.lost) AS samples, sum(c.stop - c.start) AS draws FROM claims c"
        " JOIN sources s ON s.id = c.source WHERE c.lost IS NOT NULL GROUP BY s.id HAVING sum(c.lost) > 0"
        " ORDER BY s.created"
    ).fetchall()
    return [Loss(**dict(row), why=_newest(connection, "error", row["url"])) for row in rows]


def accept(catalog: Catalog, layout: Layout) -> None:
    """Call nothing missing any more: what was not pulled again is open like other draws, or done where it was tried."""
    with catalog.write() as connection:
        rows = connection.execute("SELECT DISTINCT source FROM claims WHERE lost IS NOT NULL").fetchall()
        for row in rows:
            _close(connection, row["source"], "tried IS NOT NULL")
        connection.execute("UPDATE claims SET lost = NULL")
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
    return delete_trash(catalog, layout, [Id(row["id"]) for row in rows])


def _newest(connection: Connection, kind: str, subject: str) -> str:
    row = connection.execute(
        "SELECT text FROM events WHERE kind = ? AND subject = ? ORDER BY id DESC LIMIT 1", (kind, subject)
    ).fetchone()
    return row["text"] if row else ""
