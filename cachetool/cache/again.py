"""Draws of evicted shards that are drawn again, each into one shard as it was.

Such draws are done, and stay done whatever becomes of the pull: a claim of them is never open to any other, and is gone
with the process that has it (:func:`cachetool.cache.jobs.let_go`).
"""

from __future__ import annotations

import json
from collections.abc import Iterable

from cachetool.cache.catalog import Connection
from cachetool.cache.draws import Claim, SourceRow, source_row
from cachetool.cache.jobs import job_row

__all__ = ["LOST", "OPEN", "TAKEN", "UNDER_WAY", "reserve", "state_of", "take"]

OPEN, UNDER_WAY, LOST, TAKEN = "open", "under way", "lost", "taken"
"""Of a range of draws: may be drawn again; somebody draws some of it; some of it was lost, which any pull draws first;
some of it is in another shard."""


def state_of(connection: Connection, source: SourceRow, start: int, stop: int) -> str:
    """What can be done about the draws ``start`` to ``stop`` of the present pass."""
    rows = connection.execute(
        "SELECT draws FROM shards WHERE source = ? AND turn = ? AND state IN ('ready', 'quarantine')",
        (source.id, source.turn),
    )
    if any(a < stop and b > start for row in rows for a, b in json.loads(row["draws"] or "[]")):
        return TAKEN
    claims = connection.execute(
        "SELECT holder, lost FROM claims WHERE source = ? AND turn = ? AND start < ? AND stop > ?",
        (source.id, source.turn, stop, start),
    ).fetchall()
    if any(row["holder"] is not None for row in claims):
        return UNDER_WAY
    return LOST if any(row["lost"] is not None for row in claims) else OPEN


def reserve(
    connection: Connection, job: str, source: SourceRow, ranges: Iterable[tuple[int, int]], *, holder: str
) -> None:
    """Claim those of ``ranges`` for the workers of ``job`` that are not somebody else's by now."""
    for start, stop in ranges:
        if state_of(connection, source, start, stop) != OPEN:
            continue
        _cut_out(connection, source, start, stop)
        _insert(connection, source, start, stop, holder, job)


def take(connection: Connection, job: str, *, holder: str) -> Claim | None:
    """One of the claims that were reserved for ``job``, whole, for a worker."""
    row = connection.execute(
        "UPDATE claims SET holder = :worker WHERE id = (SELECT min(id) FROM claims WHERE job = :job AND holder ="
        " (SELECT holder FROM jobs WHERE id = :job) AND holder <> :worker) RETURNING id, turn, start, stop",
        {"job": job, "worker": holder},
    ).fetchone()
    source = source_row(connection, job_row(connection, job).source)
    return None if row is None or source is None else Claim(row["id"], row["turn"], row["start"], row["stop"], source)


def _cut_out(connection: Connection, source: SourceRow, start: int, stop: int) -> None:
    """What is open of a range is not any more."""
    rows = connection.execute(
        "DELETE FROM claims WHERE source = ? AND turn = ? AND start < ? AND stop > ? RETURNING start, stop",
        (source.id, source.turn, stop, start),
    ).fetchall()
    for row in rows:
        for first, end in ((row["start"], start), (stop, row["stop"])):
            if first < end:
                _insert(connection, source, first, end, None, None)


def _insert(
    connection: Connection, source: SourceRow, start: int, stop: int, holder: str | None, job: str | None
) -> None:
    connection.execute(
        "INSERT INTO claims (source, turn, start, stop, holder, job) VALUES (?, ?, ?, ?, ?, ?)",
        (source.id, source.turn, start, stop, holder, job),
    )
