"""A node's share of a pull over several nodes: what its own catalog keeps of that.

The whole is kept elsewhere (:mod:`cachetool.cache.placing`). Here draws of others below the frontier are done: a pull
into this cache alone goes on behind them.
"""

from __future__ import annotations

import json
import secrets

from cachetool.cache.catalog import Connection, bump
from cachetool.cache.draws import OF_NODE, Claim, SourceRow, add_job, source_row
from cachetool.cache.layout import Layout
from cachetool.cache.placing import Placed, carve
from cachetool.cache.policies import Room
from cachetool.cache.records import write_source_record
from cachetool.core.errors import CatalogError, UsageError
from cachetool.core.ranges import pairs

__all__ = ["follow", "identity", "join", "part_of", "ready_shards", "settle"]


def identity(connection: Connection) -> int:
    """A number by which this cache is known from any other, wherever it is reached from."""
    return int(connection.execute("SELECT identity FROM cache").fetchone()[0])


def part_of(job: str) -> str:
    """The id of a node's job for its part of the pull ``job`` over several. Another one each time that it takes part:
    what it began before it was cut off from that pull commits nothing once it is back."""
    return f"{job}.{secrets.token_hex(4)}"


def join(connection: Connection, layout: Layout, source: SourceRow, part: str, *, holder: str, room: Room) -> None:
    """Take part in a pull over several nodes (:func:`part_of`), in the pass that ``source`` is in. From now on nothing
    is committed here for such a pull before.

    Raises :class:`UsageError` while a pull of this machine alone draws from the same source.
    """
    connection.execute(f"DELETE FROM jobs WHERE source = ? AND {OF_NODE}", (source.id,))
    if connection.execute("SELECT 1 FROM jobs WHERE source = ? LIMIT 1", (source.id,)).fetchone():
        raise UsageError(
            f"another pull draws from {source.url} into {layout.root} at this moment; wait for its end, or stop it"
        )
    before = part.partition(".")[0]
    add_job(connection, part, source.id, holder=holder, wanted=None, room=room, over=before)
    connection.execute("UPDATE shards SET job = ? WHERE job >= ? AND job < ?", (part, f"{before}.", f"{before}/"))
    if follow(connection, source):
        bump(connection)
        write_source_record(connection, layout, source.id)


def follow(connection: Connection, source: SourceRow) -> bool:
    """Bring a source to the pass and to the segments of ``source`` when it is behind; whether it was."""
    now = source_row(connection, source.id)
    assert now is not None
    if now.pass_number > source.pass_number or (now.pass_number, now.segments, now.complete) == (
        source.pass_number,
        source.segments,
        source.complete,
    ):
        return False
    new = now.pass_number < source.pass_number
    if new:
        connection.execute("DELETE FROM claims WHERE source = ? AND NOT reopened", (source.id,))
        connection.execute("UPDATE sources SET skipped = 0 WHERE id = ?", (source.id,))
        connection.execute("UPDATE parts SET frontier = 0 WHERE source = ?", (source.id,))
    connection.execute(
        "UPDATE sources SET pass_number = ?, segments = ?, past = ?, complete = ? WHERE id = ?",
        (source.pass_number, json.dumps(source.segments), json.dumps(source.past), source.complete, source.id),
    )
    return True


def settle(
    connection: Connection,
    job: str,
    claim: Claim,
    upto: int,
    start: int,
    *,
    samples: int,
    skipped: int,
    vanished: int,
    fetched: int,
) -> None:
    """Count the positions of a claim from ``start`` to ``upto`` as done here; inside the transaction that commits their
    samples. Raises :class:`CatalogError` when the pull is not that of this cache any more."""
    alive = connection.execute(
        "UPDATE jobs SET committed = committed + ?, skipped = skipped + ? WHERE id = ?", (samples, skipped, job)
    )
    if alive.rowcount != 1:  # whoever came after it may have handed out the same positions
        raise CatalogError("what this pull was drawing was taken from it; run it again")
    follow(connection, claim.source)
    now = source_row(connection, claim.source.id)
    if now is not None and now.pass_number == claim.pass_number:
        carve(connection, now.id, now.pass_number, ((start, upto),))
        # What others have below is none of this cache's business: to it, it is done.
        connection.execute(
            "DELETE FROM claims WHERE source = ? AND pass_number = ? AND stop <= ? AND holder IS NULL AND NOT reopened",
            (now.id, now.pass_number, start),
        )
    connection.execute(
        "UPDATE sources SET skipped = skipped + ?, fetched = fetched + ? WHERE id = ?",
        (skipped + vanished, fetched, claim.source.id),
    )


def ready_shards(connection: Connection, source: str) -> list[Placed]:
    """The shards of a source that snapshots to come contain, without copies of them."""
    rows = connection.execute(
        "SELECT id, pass_number, draws, samples, payload, job FROM shards"
        " WHERE source = ? AND state = 'ready' ORDER BY seq",
        (source,),
    )
    return [
        Placed(
            row["id"],
            row["pass_number"],
            pairs(json.loads(row["draws"])),
            row["samples"],
            row["payload"],
            row["job"].partition(".")[0] if "." in (row["job"] or "") else None,
        )
        for row in rows
    ]
