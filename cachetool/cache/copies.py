"""What the cache has of a source: which draws of which passes lie in its ready shards, or are to be there again. To the
catalog of several nodes their shards are its own."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from cachetool.cache.catalog import Connection

__all__ = ["Copies", "Pass", "copies", "promised", "still_there"]

Pass = tuple[int, int, tuple[int, ...]]
"""What the positions of a pass are of: its number, units, cuts."""


@dataclass(frozen=True, slots=True)
class Copies:
    """The draws of one ready shard, or of one claim."""

    shard: str
    turn: int
    draws: str
    """As in the catalog: of thousands few are looked into."""

    @property
    def ranges(self) -> tuple[tuple[int, int], ...]:
        """Positions of that turn."""
        return tuple((start, stop) for start, stop in json.loads(self.draws))


def copies(connection: Connection, source: str, *, but: int | None = None) -> list[Copies]:
    """What snapshots to come have of ``source``, draws of the turn ``but`` left out; a retiring shard is in none of
    these."""
    rows = connection.execute(
        "SELECT id, turn, draws FROM shards WHERE source = :source AND state = 'ready' AND turn IS NOT :but"
        " UNION ALL SELECT shard, turn, draws FROM placed WHERE source = :source AND turn IS NOT :but",
        {"source": source, "but": but},
    )
    return [Copies(row["id"], row["turn"], row["draws"]) for row in rows]


def promised(connection: Connection, source: str) -> list[Copies]:
    """Draws of earlier passes that were lost and are drawn again as such, each by one claim: to the present pass they
    are as good as there, else it would bring them too."""
    rows = connection.execute(
        "SELECT c.id, c.turn, c.start, c.stop FROM claims c JOIN sources s ON s.id = c.source"
        " WHERE c.source = ? AND c.turn <> s.turn",
        (source,),
    )
    return [
        Copies(f"claim {row['id']} {row['start']} {row['stop']}", row["turn"], f"[[{row['start']}, {row['stop']}]]")
        for row in rows
    ]


def still_there(connection: Connection, source: str, passes: Sequence[Pass]) -> list[Pass]:
    """Those of ``passes`` of which there are ready shards, or draws that were lost."""
    left = {copy.turn for copy in copies(connection, source)}
    left |= {row["turn"] for row in connection.execute("SELECT turn FROM claims WHERE source = ?", (source,))}
    return [each for each in passes if each[0] in left]
