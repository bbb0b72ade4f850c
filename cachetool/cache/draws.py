"""Which draws of a source are done, claimed or open, kept as ranges of positions.

A source's draws are the positions ``0 .. units - 1`` of one seeded order per turn (pass)::

    0 ................ frontier ................ units
      done, but for rows in `claims`              never claimed yet

A source that grows gets more positions behind those it has; the others stay what they are. A claim has a holder while a
worker is on it, none after that died or gave it back: then it is handed out before the frontier moves, ``lost`` first.
Lost draws that gave nothing again stay open (:func:`cachetool.cache.losses.regain`), and no pass is held up by them.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from cachetool.cache.catalog import Connection, Row, event
from cachetool.cache.copies import Pass, still_there
from cachetool.cache.jobs import add_job, job_row
from cachetool.cache.kinds import AGAIN, NOT_AGAIN, OVER, let_go
from cachetool.cache.room import Room
from cachetool.core.errors import CatalogError, UsageError
from cachetool.core.names import Id

__all__ = [
    "Claim",
    "SourceRow",
    "add_source",
    "claim",
    "drawn",
    "finish",
    "give_back",
    "idle",
    "next_turn",
    "open_job",
    "source_row",
]


@dataclass(frozen=True, slots=True)
class SourceRow:
    """A source as the catalog knows it."""

    id: Id
    url: str
    options: Mapping[str, Any]
    identity: str
    """Digest of the listing."""
    dataset: str
    units: int
    samples: int
    seed: int
    turn: int
    """Which pass over the units is under way, from 0."""
    frontier: int
    """Positions below it are done, or have a row in ``claims``."""
    skipped: int
    """Draws of this turn that could not be used."""
    cuts: tuple[int, ...] = ()
    """Places between the segments of this turn, each of which is drawn in an order of its own."""
    sequential: bool = False
    """Drawn in the order of the listing instead of a random one."""
    whole: bool = True
    """Whether the listing is: else more segments come."""
    past: tuple[Pass, ...] = ()
    """Earlier passes of which shards may be left."""

    @classmethod
    def of(cls, row: Row) -> SourceRow:
        """From a row of the table."""
        values = {name: row[name] for name in cls.__dataclass_fields__}
        values |= {"options": json.loads(row["options"]), "cuts": tuple(json.loads(row["cuts"]))}
        values["id"] = Id(row["id"])
        values["past"] = tuple((turn, units, tuple(cuts)) for turn, units, cuts in json.loads(row["past"]))
        return cls(**values | {"sequential": bool(row["sequential"]), "whole": bool(row["whole"])})

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {**asdict(self), "options": dict(self.options)}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> SourceRow:
        """The row that :meth:`to_json` described."""
        past = tuple((turn, units, tuple(cuts)) for turn, units, cuts in value["past"])
        return cls(**{**value, "id": Id(value["id"]), "cuts": tuple(value["cuts"]), "past": past})


@dataclass(frozen=True, slots=True)
class Claim:
    """Positions ``start`` to ``stop`` of a turn that one worker may draw."""

    id: int
    turn: int
    start: int
    stop: int
    source: SourceRow
    """As it was at that moment: its units and cuts say what the positions mean."""
    lost: bool = False
    """Whether samples of it were there before, and were lost."""


def source_row(connection: Connection, source: str) -> SourceRow | None:
    """The source with this id."""
    row = connection.execute("SELECT * FROM sources WHERE id = ?", (source,)).fetchone()
    return None if row is None else SourceRow.of(row)


def add_source(connection: Connection, row: SourceRow, nbytes: int, *, new: bool = False) -> None:
    """Write a source, or what is new about a known one, with the bytes that its listing is charged.
    Raises :class:`UsageError` when it is to be ``new`` and is there, listed otherwise."""
    now = source_row(connection, row.id) if new else None
    if now is not None and (now.identity, now.units) != (row.identity, row.units):
        raise UsageError(f"another process began to draw from {row.url} at this moment; run this again")
    if now is not None:
        return
    columns = {
        **asdict(row),
        "options": json.dumps(dict(row.options)),
        "cuts": json.dumps(row.cuts),
        "past": json.dumps(row.past),
        "bytes": nbytes,
        "created": time.time(),
    }
    names, marks = ", ".join(columns), ", ".join(f":{name}" for name in columns)
    connection.execute(
        f"INSERT INTO sources ({names}) VALUES ({marks}) ON CONFLICT (id) DO UPDATE SET options = excluded.options,"
        " identity = excluded.identity, units = excluded.units, samples = excluded.samples, bytes = excluded.bytes",
        columns,
    )


def drawn(connection: Connection, source: SourceRow) -> int:
    """Positions of the present turn that are done, skipped ones included; less what was lost of earlier ones."""
    query = f"SELECT coalesce(sum(stop - start), 0) FROM claims WHERE source = ? AND {NOT_AGAIN}"
    pending = connection.execute(query, (source.id,)).fetchone()[0]
    return max(0, source.frontier - int(pending))


def open_job(
    connection: Connection,
    source: str,
    *,
    holder: str,
    wanted: int | None,
    seed: int | None,
    room: Room | None = None,
    turn: bool = True,
    kind: str = "",
) -> tuple[str, SourceRow]:
    """Begin a pull: its id, which begins with its ``kind``, and the source. A complete turn is followed by a new one
    when samples are asked for by number, unless ``turn`` is False. ``room`` says how room may be made for it, also by
    the trainers' snapshots.

    Raises :class:`UsageError` when ``seed`` is another than the one this source is drawn with.
    """
    row = source_row(connection, source)
    if row is None:
        raise UsageError("another pull of this source failed and took it back at this moment; run this again")
    if seed is not None and seed != row.seed:
        raise UsageError(
            f"{row.url} is drawn with --seed {row.seed} in this cache; leave --seed out, or use another cache"
        )
    if connection.execute("SELECT 1 FROM jobs WHERE source = ? AND id LIKE ?", (source, f"{OVER}%")).fetchone():
        raise UsageError(f"a pull over several nodes draws from {row.url} at this moment; wait for its end")
    if turn and wanted is not None and _over(connection, row):
        if not next_turn(connection, source):
            raise UsageError(
                f"evicted shards of {row.url} come back at this moment, for an epoch that goes on; run this again"
            )
        row = source_row(connection, source) or row
    job = kind + secrets.token_hex(6)
    add_job(connection, job, source, holder=holder, wanted=wanted, room=room or Room())
    return job, row


def claim(
    connection: Connection, job: str, *, holder: str, most: int, whole: Callable[[int, int, int], int] | None = None,
    lost: bool = False,
) -> Claim | None:  # fmt: skip
    """Up to ``most`` positions for a worker of ``job``, or None when the job or the turn has none left to give.
    ``whole(turn, start, stop)`` says where a claim should rather end; ``lost``: only of lost draws. A job's budget
    counts what is committed and what its workers are on, so that together they never draw too many.
    """
    state = job_row(connection, job)
    source = source_row(connection, state.source)
    assert source is not None
    budget = source.units
    if state.wanted is not None:
        pending = connection.execute(
            "SELECT coalesce(sum(stop - start), 0) FROM claims WHERE job = ? AND holder IS NOT NULL", (job,)
        ).fetchone()[0]
        budget = state.wanted - state.committed - int(pending)
    if budget <= 0:
        return None

    def end(turn: int, start: int, limit: int) -> int:
        stop = min(limit, start + most)
        return min(limit, start + budget, stop if whole is None else whole(turn, start, stop))

    row = connection.execute(
        "SELECT id, turn, start, stop, lost FROM claims WHERE source = ? AND holder IS NULL AND tried IS NOT ?"
        " ORDER BY lost IS NULL, turn, start LIMIT 1",
        (source.id, job),
    ).fetchone()
    if lost and (row is None or row["lost"] is None):
        return None
    if row is not None:
        start, stop = row["start"], end(row["turn"], row["start"], row["stop"])
        mine = None if row["lost"] is None else row["lost"] * (stop - start) // (row["stop"] - start)
        connection.execute(
            "UPDATE claims SET stop = ?, holder = ?, job = ?, lost = ?, tried = NULL WHERE id = ?",
            (stop, holder, job, mine, row["id"]),
        )
        if stop < row["stop"]:
            rest = None if mine is None else row["lost"] - mine
            _insert(connection, source, stop, row["stop"], lost=rest, turn=row["turn"])
        return Claim(row["id"], row["turn"], start, stop, source, lost=row["lost"] is not None)
    start = source.frontier
    if start >= source.units:
        return None
    stop = end(source.turn, start, source.units)
    connection.execute("UPDATE sources SET frontier = ? WHERE id = ?", (stop, source.id))
    return Claim(_insert(connection, source, start, stop, holder, job), source.turn, start, stop, source)


def finish(
    connection: Connection,
    job: str,
    held: Claim,
    upto: int,
    *,
    samples: int,
    skipped: int,
    vanished: int = 0,
    fetched: int = 0,
    gaps: Iterable[tuple[int, int]] = (),
) -> None:
    """Close the first positions of a claim, up to but without ``upto``, and count them for the job; inside the
    transaction that commits their samples, for which ``fetched`` bytes came over the wire. What ``vanished`` from the
    source, as a refresh found, is no fault of the objects and counts for the source alone. ``gaps`` among them stay
    open, for whoever claims next."""
    if upto >= held.stop:
        closed = connection.execute("DELETE FROM claims WHERE id = ?", (held.id,))
    else:
        closed = connection.execute("UPDATE claims SET start = ? WHERE id = ?", (upto, held.id))
    if closed.rowcount != 1:  # its samples may be somebody else's by now
        raise CatalogError("what this pull was drawing was taken from it; run it again")
    for start, stop in gaps:
        _insert(connection, held.source, start, stop, turn=held.turn)
    connection.execute(
        "UPDATE jobs SET committed = committed + ?, skipped = skipped + ? WHERE id = ?", (samples, skipped, job)
    )
    unused = 0 if job.startswith(AGAIN) else skipped + vanished  # those were counted when they were drawn first
    connection.execute(
        "UPDATE sources SET skipped = skipped + ?, fetched = fetched + ?"
        " WHERE id = (SELECT source FROM jobs WHERE id = ?)",
        (unused, fetched, job),
    )


def give_back(connection: Connection, holder: str, job: str) -> None:
    """Open the claims that this process still has of a pull that it leaves."""
    let_go(connection, "holder = ? AND job = ?", holder, job)


def _insert(
    connection: Connection,
    source: SourceRow,
    start: int,
    stop: int,
    holder: str | None = None,
    job: str | None = None,
    lost: int | None = None,
    turn: int | None = None,
) -> int:
    cursor = connection.execute(
        "INSERT INTO claims (source, turn, start, stop, holder, job, lost) VALUES (?, ?, ?, ?, ?, ?, ?)",
        (source.id, source.turn if turn is None else turn, start, stop, holder, job, lost),
    )
    return int(cursor.lastrowid or 0)


def _over(connection: Connection, source: SourceRow) -> bool:
    """Whether the present pass is complete."""
    query = "SELECT coalesce(sum(stop - start), 0) FROM claims WHERE source = ? AND tried IS NOT NULL"
    barren = connection.execute(query, (source.id,)).fetchone()[0]
    return source.whole and drawn(connection, source) + int(barren) >= source.units


def next_turn(connection: Connection, source: str) -> bool:
    """Begin the next pass, in one new order of all units, when the present one is complete; whether it was. Not while
    evicted shards of the present one come back."""
    row = source_row(connection, source)
    returning = f"SELECT 1 FROM claims WHERE source = ? AND NOT {NOT_AGAIN} LIMIT 1"
    if row is None or not _over(connection, row) or connection.execute(returning, (source,)).fetchone():
        return False
    connection.execute("DELETE FROM claims WHERE source = ? AND turn = ? AND tried IS NULL", (source, row.turn))
    past = still_there(connection, source, [*row.past, (row.turn, row.units, row.cuts)])
    connection.execute(
        "UPDATE sources SET turn = turn + 1, frontier = 0, skipped = 0, cuts = '[]', past = ? WHERE id = ?",
        (json.dumps(past), source),
    )
    connection.execute("INSERT OR REPLACE INTO meta VALUES (?, ?)", (f"turned:{source}", _moves(connection)))
    connection.execute("UPDATE jobs SET skipped = 0 WHERE source = ?", (source,))
    event(connection, time.time(), "turn", row.url, f"pass {row.turn + 2} begins", dataset=row.dataset)
    return True


def idle(connection: Connection, source: str) -> bool:
    """Whether nothing came into the cache or went since the present pass began: when it is at its end, the next would
    bring nothing either. What is left out by ``--on-error skip`` is in no shard, and would be fetched for ever."""
    row = connection.execute("SELECT value FROM meta WHERE key = ?", (f"turned:{source}",)).fetchone()
    return row is not None and int(row[0]) == _moves(connection)


def _moves(connection: Connection) -> int:
    """A number that every commit and every eviction raises."""
    query = "SELECT (SELECT value FROM meta WHERE key = 'seq') + (SELECT coalesce(sum(shards), 0) FROM evictions)"
    return int(connection.execute(query).fetchone()[0])
