"""Draws of evicted shards that are drawn again, each into one shard as it was.

Such draws are done, and stay done whatever becomes of the pull: a claim of them is never open to any other, and is gone
with the process that has it (:func:`cachetool.cache.kinds.let_go`).
"""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from cachetool.cache.catalog import Connection, bump
from cachetool.cache.draws import Claim, SourceRow, job_row, source_row
from cachetool.cache.layout import Layout
from cachetool.cache.records import without, write_source_record
from cachetool.core.errors import UsageError

__all__ = ["LOST", "OPEN", "TAKEN", "UNDER_WAY", "Wanted", "reserve", "states_of", "take"]


@dataclass(frozen=True, slots=True)
class Wanted:
    """An evicted shard that is to be as it was."""

    id: str
    """The one that it had."""
    pass_number: int
    """Of which pass it has draws."""
    ranges: tuple[tuple[int, int], ...]
    """These draws, ascending; what is between them was in the cache when they were drawn."""
    samples: int
    content: str
    """Content digest."""

    @property
    def start(self) -> int:
        """The first of its draws."""
        return self.ranges[0][0]

    @property
    def stop(self) -> int:
        """Behind the last of its draws."""
        return self.ranges[-1][1]

    @property
    def draws(self) -> int:
        """How many they are."""
        return sum(stop - start for start, stop in self.ranges)

    @property
    def per_unit(self) -> int:
        """Samples that one draw brings, at least so many that the shard's all have room."""
        return -(-self.samples // max(1, self.draws))

    def require(self, source: SourceRow) -> None:
        """Raise :class:`UsageError` unless these draws are still what they were."""
        if source.pass_number != self.pass_number:
            raise UsageError(f"shard {self.id} cannot be pulled again as it was: its pass over {source.url} is over")
        if self.stop > source.frontier:
            raise UsageError(
                f"shard {self.id} cannot be pulled again as it was: this cache has not drawn its samples yet, so the"
                " state is of another one"
            )


OPEN, UNDER_WAY, LOST, TAKEN = "open", "under way", "lost", "taken"
"""Of a range of draws: may be drawn again; somebody draws some of it; some of it was lost, which any pull draws first;
some of it is in another shard."""


def states_of(connection: Connection, source: SourceRow, shards: Sequence[Wanted]) -> list[str]:
    """What can be done about each of these. Raises :class:`UsageError` when it is nothing any more."""
    for shard in shards:
        shard.require(source)
    rows = connection.execute(
        "SELECT draws FROM shards WHERE source = ? AND turn = ? AND state IN ('ready', 'quarantine')",
        (source.id, source.pass_number),
    )
    taken = _Parts((start, stop) for row in rows for start, stop in json.loads(row["draws"] or "[]"))
    claims = connection.execute(
        "SELECT start, stop, holder, lost FROM claims WHERE source = ? AND turn = ?", (source.id, source.pass_number)
    ).fetchall()
    claimed = _Parts((row["start"], row["stop"]) for row in claims if row["holder"] is not None)
    lost = _Parts((row["start"], row["stop"]) for row in claims if row["holder"] is None and row["lost"] is not None)
    which = ((taken, TAKEN), (claimed, UNDER_WAY), (lost, LOST))
    return [next((state for parts, state in which if parts.meet(shard.start, shard.stop)), OPEN) for shard in shards]


class _Parts:
    """Ranges of which no two meet."""

    def __init__(self, parts: Iterable[tuple[int, int]]) -> None:
        self._parts = sorted(parts)

    def meet(self, start: int, stop: int) -> bool:
        last = bisect_left(self._parts, (stop, 0))
        return last > 0 and self._parts[last - 1][1] > start


def reserve(
    connection: Connection, layout: Layout, job: str, source: SourceRow, shards: Sequence[Wanted], *, holder: str
) -> None:
    """Claim the draws of ``shards`` for the workers of ``job``, but for those that are somebody else's by now. What of
    them is open, as earlier versions left it, is not any more. Raises :class:`UsageError` when the pass is over."""
    states = states_of(connection, source, shards)
    ranges = [(shard.start, shard.stop) for shard, state in zip(shards, states, strict=True) if state == OPEN]
    rows = connection.execute(
        "SELECT id, start, stop FROM claims WHERE source = ? AND turn = ? AND holder IS NULL AND lost IS NULL",
        (source.id, source.pass_number),
    ).fetchall()
    cut = False
    for row in rows:
        open_range = [[row["start"], row["stop"]]]
        if (remaining := without(open_range, ranges)) != open_range:
            connection.execute("DELETE FROM claims WHERE id = ?", (row["id"],))
            _insert(connection, source, remaining)
            cut = True
    _insert(connection, source, ranges, holder, job)
    if cut:
        bump(connection)
        write_source_record(connection, layout, source.id)


def take(connection: Connection, job: str, *, holder: str) -> Claim | None:
    """One of the claims that were reserved for ``job``, whole, for a worker."""
    row = connection.execute(
        "UPDATE claims SET holder = :worker WHERE id = (SELECT min(id) FROM claims WHERE job = :job AND holder ="
        " (SELECT holder FROM jobs WHERE id = :job) AND holder <> :worker) RETURNING id, turn, start, stop",
        {"job": job, "worker": holder},
    ).fetchone()
    source = source_row(connection, job_row(connection, job).source)
    return None if row is None or source is None else Claim(row["id"], row["turn"], row["start"], row["stop"], source)


def _insert(
    connection: Connection,
    source: SourceRow,
    ranges: Iterable[Sequence[int]],
    holder: str | None = None,
    job: str | None = None,
) -> None:
    connection.executemany(
        "INSERT INTO claims (source, turn, start, stop, holder, job) VALUES (?, ?, ?, ?, ?, ?)",
        [(source.id, source.pass_number, start, stop, holder, job) for start, stop in ranges],
    )
