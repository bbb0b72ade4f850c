"""Draws of a source over the caches of several nodes: what the catalog of the whole keeps, and what a node's own does.

::

    catalog of the whole (no shards)                         a node's cache
    claims   open, or held by a node                   ->    nothing: a claim leaves no trace until it is committed
    placed   a row for each shard of a node, its draws <-    settle: in the committing transaction, if the pull lives
    nodes    which cache a node has                          identity: a number that no other cache has
    members  in which pull of a source a node takes part     jobs: its part of that pull

What a node has committed is true, whatever the whole knows: a node that begins tells all its shards (:func:`take_in`).
What it lost sight of is open again (:func:`lose`): then the same draws may come to lie in two caches, until the node
comes back and tells. What a node's own catalog keeps: :mod:`cachetool.cache.parts`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from cachetool.cache.admission import allow_growth
from cachetool.cache.catalog import Connection, bump, next_seq
from cachetool.cache.draws import Claim, SourceRow, finish, source_row
from cachetool.core.errors import CatalogError, UsageError
from cachetool.core.ranges import Ranges

__all__ = [
    "Placed",
    "carve",
    "enter",
    "forget_shards",
    "give_back",
    "held_by",
    "insert",
    "lose",
    "lose_others",
    "note_claim",
    "place",
    "placed_elsewhere",
    "release",
    "take_in",
]

_LET_GO = "UPDATE claims SET holder = NULL, job = NULL, node = NULL, token = NULL"
"""Opens claims of nodes again."""


@dataclass(frozen=True, slots=True)
class Placed:
    """A shard of a node, as the whole knows it."""

    shard: str
    pass_number: int
    draws: Ranges
    samples: int
    payload: int
    job: str | None
    """The pull over several nodes that it came with."""

    @property
    def brought(self) -> int:
        """How many draws it counts for: not more than it has, since some may have been skipped."""
        return min(self.samples, sum(stop - start for start, stop in self.draws))


def enter(connection: Connection, node: str, cache: int, job: str, source: str, word: str) -> None:
    """A node takes part in a pull of a source with the cache of that identity. Where it had another one, what was in
    that is lost, of all sources. By the ``word`` its claims are known from those of an earlier time in this pull.

    Raises :class:`UsageError` when another node of this pull has the same cache.
    """
    other = connection.execute("SELECT name FROM nodes WHERE cache = ? AND name <> ?", (cache, node)).fetchone()
    query = "SELECT 1 FROM members WHERE node = ? AND job = ?"
    if other is not None and connection.execute(query, (other["name"], job)).fetchone():
        raise UsageError(
            f"nodes {other['name']} and {node} have one cache folder between them, and each must have its own;"
            " put {node} into --cache, as in --cache /data/{node}"
        )
    if other is not None:  # renamed
        lose(connection, other["name"])
    row = connection.execute("SELECT cache FROM nodes WHERE name = ?", (node,)).fetchone()
    if row is not None and row["cache"] != cache:
        lose(connection, node)
    connection.execute("INSERT OR REPLACE INTO nodes VALUES (?, ?)", (node, cache))
    connection.execute("INSERT OR REPLACE INTO members VALUES (?, ?, ?, ?)", (source, node, job, word))


def held_by(connection: Connection, node: str, token: str, job: str, word: str) -> Claim | None:
    """The claim that was made for this word already. Raises :class:`CatalogError` for a node that is none of the pull,
    or came back to it since: it was given up."""
    query = "SELECT 1 FROM members WHERE node = ? AND job = ? AND word = ?"
    if not connection.execute(query, (node, job, word)).fetchone():
        raise CatalogError(f"node {node} was given up by the pull that it worked for; run it again")
    row = connection.execute(
        "SELECT id, pass_number, start, stop, source FROM claims WHERE token = ? AND holder IS NOT NULL", (token,)
    ).fetchone()
    source = None if row is None else source_row(connection, row["source"])
    return None if source is None else Claim(row["id"], row["pass_number"], row["start"], row["stop"], source)


def note_claim(connection: Connection, claim: Claim, node: str, token: str) -> None:
    """Write down which node is on a claim; inside the transaction that made it."""
    connection.execute("UPDATE claims SET node = ?, token = ? WHERE id = ?", (node, token, claim.id))
    allow_growth(connection)


def place(
    connection: Connection,
    job: str,
    node: str,
    token: str,
    claim: Claim,
    upto: int,
    placed: Placed | None,
    *,
    brought: int,
    **counts: int,
) -> None:
    """A node has committed its claim below ``upto``, in the shard ``placed`` if that gave any sample. Harmless when it
    was told before. ``counts`` are skipped, vanished and fetched, as :func:`~cachetool.cache.draws.finish` has them.
    Raises :class:`CatalogError` when the claim was taken from the node."""
    if placed is not None and connection.execute("SELECT 1 FROM placed WHERE shard = ?", (placed.shard,)).fetchone():
        return
    query = "SELECT start FROM claims WHERE id = ? AND node = ? AND token = ?"  # the id may be another claim's by now
    row = connection.execute(query, (claim.id, node, token)).fetchone()
    if placed is None and (row is None or row["start"] >= upto):
        return
    if row is None:
        raise CatalogError("what this pull was drawing was taken from it; run it again")
    skipped, vanished, fetched = counts["skipped"], counts["vanished"], counts["fetched"]
    finish(connection, job, claim, upto, samples=brought, skipped=skipped, vanished=vanished, fetched=fetched)
    if placed is not None:
        insert(connection, node, claim.source.id, placed, brought)
        next_seq(connection)


def insert(connection: Connection, node: str, source: str, placed: Placed, brought: int) -> None:
    """Write down that a node has a shard, which ``brought`` so many draws of a pull."""
    connection.execute(
        "INSERT OR REPLACE INTO placed VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
        (placed.shard, node, source, placed.pass_number, json.dumps(placed.draws), placed.samples, placed.job, brought),
    )
    allow_growth(connection)


def lose(connection: Connection, node: str, source_id: str | None = None) -> None:
    """Open again all that a node was on and had, of one source or of all: it is gone. What it had evicted stays done.
    Pulls of other sources see for themselves whether the node is there."""
    where, values = "node = :node AND (:source IS NULL OR source = :source)", {"node": node, "source": source_id}
    connection.execute(f"{_LET_GO} WHERE {where}", values)
    rows = connection.execute(f"SELECT * FROM placed WHERE {where}", values).fetchall()
    for row in rows:
        source = source_row(connection, row["source"])
        connection.execute("UPDATE jobs SET committed = committed - ? WHERE id = ?", (row["brought"], row["job"]))
        if source is None or source.pass_number != row["pass_number"]:
            continue  # a later pass brings it
        ranges = json.loads(row["draws"])
        connection.executemany(
            "INSERT INTO claims (source, pass_number, start, stop) VALUES (?, ?, ?, ?)",
            [(source.id, source.pass_number, start, stop) for start, stop in ranges],
        )
        allow_growth(connection)
        skipped = sum(stop - start for start, stop in ranges) - row["brought"]
        for table, id in (("sources", source.id), ("jobs", row["job"])):
            connection.execute(f"UPDATE {table} SET skipped = max(0, skipped - ?) WHERE id = ?", (skipped, id))
    if rows:
        next_seq(connection)  # draws of earlier passes are to be brought by the next one
    for table in ("placed", "members"):
        connection.execute(f"DELETE FROM {table} WHERE {where}", values)
    if source_id is None:
        connection.execute("DELETE FROM nodes WHERE name = ?", (node,))
    bump(connection)


def lose_others(connection: Connection, source: str, here: Iterable[str]) -> None:
    """What nodes have of a source that are not ``here`` is lost."""
    rows = connection.execute(
        "SELECT node FROM placed WHERE source = :source UNION SELECT node FROM members WHERE source = :source"
        " UNION SELECT node FROM claims WHERE source = :source AND node IS NOT NULL",
        {"source": source},
    ).fetchall()
    for node in sorted({row["node"] for row in rows} - set(here)):
        lose(connection, node, source)


def release(connection: Connection, job: str) -> None:
    """Open the claims that a pull leaves."""
    connection.execute(f"{_LET_GO} WHERE job = ?", (job,))


def give_back(connection: Connection, node: str, claims: Iterable[tuple[int, str]]) -> None:
    """Open the claims that a node does not want to work on, by their ids and tokens."""
    connection.executemany(
        f"{_LET_GO} WHERE id = ? AND node = ? AND token = ?", [(claim, node, token) for claim, token in claims]
    )


def forget_shards(connection: Connection, shards: Iterable[str]) -> None:
    """These were evicted: their draws stay done in this pass, and the next one does not go around them."""
    for shard in shards:
        connection.execute("DELETE FROM placed WHERE shard = ?", (shard,))
        next_seq(connection)
    bump(connection)


def placed_elsewhere(connection: Connection, source: str, node: str) -> list[tuple[int, Ranges]]:
    """The draws, by pass, that other nodes have in shards or are on."""
    rows = connection.execute(
        "SELECT pass_number, draws FROM placed WHERE source = :source AND node <> :node UNION ALL"
        " SELECT pass_number, json_array(json_array(start, stop)) FROM claims"
        " WHERE source = :source AND holder IS NOT NULL",
        {"source": source, "node": node},
    )
    return [(row["pass_number"], tuple((start, stop) for start, stop in json.loads(row["draws"]))) for row in rows]


def take_in(
    connection: Connection,
    source: SourceRow,
    node: str,
    shards: Sequence[Placed],
    *,
    job: str,
    doubled: Callable[[Placed], bool],
) -> list[str]:
    """What a node has, as it tells when it begins: its shards and no others. Gives the ids of those that are
    ``doubled`` and have to go there: others have the same draws, or are on them."""
    connection.execute("DELETE FROM placed WHERE node = ? AND source = ?", (node, source.id))
    double = {placed.shard for placed in shards if doubled(placed)}
    for placed in shards:
        if placed.shard in double:
            continue
        insert(connection, node, source.id, placed, placed.brought)
        if placed.pass_number != source.pass_number:
            continue
        fresh = carve(connection, source.id, source.pass_number, placed.draws)
        skipped = sum(stop - start for start, stop in placed.draws) - placed.brought
        if fresh:
            connection.execute("UPDATE sources SET skipped = skipped + ? WHERE id = ?", (skipped, source.id))
        if placed.job == job and fresh:  # committed by this pull, and not told of, or lost and found again
            query = "UPDATE jobs SET committed = committed + ?, skipped = skipped + ? WHERE id = ?"
            connection.execute(query, (placed.brought, skipped, job))
    if double:
        next_seq(connection)
    bump(connection)
    return sorted(double)


def carve(connection: Connection, source: str, pass_number: int, ranges: Ranges) -> bool:
    """Call draws of the present pass done, wherever its frontier is; whether any of them was open. Those that were
    reopened stay what they are."""
    fresh = False
    for start, stop in ranges:
        frontier = connection.execute("SELECT frontier FROM parts WHERE source = ?", (source,)).fetchone()[0]
        if stop > frontier:
            _open(connection, source, pass_number, frontier, start)
            connection.execute("UPDATE parts SET frontier = ? WHERE source = ?", (stop, source))
            fresh = True
        rows = connection.execute(
            "DELETE FROM claims WHERE source = ? AND pass_number = ? AND start < ? AND stop > ? AND holder IS NULL"
            " AND NOT reopened RETURNING start, stop",
            (source, pass_number, stop, start),
        ).fetchall()
        for row in rows:
            fresh = True
            _open(connection, source, pass_number, row["start"], min(row["stop"], start))
            _open(connection, source, pass_number, max(row["start"], stop), row["stop"])
    return fresh


def _open(connection: Connection, source: str, pass_number: int, start: int, stop: int) -> None:
    if start < stop:
        connection.execute(
            "INSERT INTO claims (source, pass_number, start, stop) VALUES (?, ?, ?, ?)",
            (source, pass_number, start, stop),
        )
