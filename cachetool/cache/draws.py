"""Sources, pulls and claims, as rows of the catalog: the draws of a source are done, claimed, open or lost.

A source's draws are the positions ``0 .. units - 1`` of one seeded order per turn (pass)::

    0 ................ frontier ................ units
      done, but for rows in `claims`              never claimed yet

A source that grows gets more positions behind those it has; the others stay what they are. A claim has a holder while a
worker is on it, none after that died or gave it back: then it is handed out before the frontier moves, ``lost`` first.
Lost draws that gave nothing again stay open (:func:`cachetool.cache.draws.regain`), and no pass is held up by them.

Pulls that are under way: what each may still draw, and how room is made for it.

What the cache has of a source: which draws of which passes lie in its ready shards, or are to be there again. To the
catalog of several nodes their shards are its own.

Samples that were committed and then damaged: which are still missing, and how their loss is accepted.

::

    shard given up  -- reopen -->  claims with `lost` samples  -- drawn again, before all others -->  row gone
                                                               -- regain: gave nothing ---------->  `tried`, still lost
                                                               -- accept ------------------------->  open like any
    exists nowhere else          ->  state `quarantine`        -- purge -------------------------->  trash, recorded

Whatever is in one of the two middle columns is what ``verify`` calls missing or in quarantine.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from cachetool.cache.catalog import Catalog, Connection, Row, bump, event
from cachetool.cache.holders import Holder
from cachetool.cache.layout import Layout
from cachetool.cache.policies import Room
from cachetool.cache.records import write_source_record
from cachetool.cache.removal import delete_trash
from cachetool.core.errors import CatalogError, UsageError
from cachetool.core.names import Id

__all__ = [
    "Claim",
    "Copies",
    "Job",
    "Loss",
    "OF_NODE",
    "Pass",
    "SourceRow",
    "accept",
    "add_job",
    "add_source",
    "claim",
    "close_job",
    "copies",
    "finish",
    "give_back",
    "idle",
    "job_row",
    "losses",
    "begin_next_pass",
    "open_job",
    "positions_done",
    "promised",
    "purge",
    "quarantined",
    "regain",
    "reopen",
    "source_row",
    "still_there",
]


Pass = tuple[int, int, tuple[int, ...]]
"""What the positions of a pass are of: its number, units, cuts."""


OF_NODE = "id LIKE 'over-%'"
"""Of a job: it is a node's part of a pull over several."""


_COLUMNS = {"pass_number": "turn", "complete": "whole"}
"""Fields of :class:`SourceRow` whose column has another name."""


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
    pass_number: int
    """Which pass over the units is under way, from 0."""
    frontier: int
    """Positions below it are done, or have a row in ``claims``."""
    skipped: int
    """Draws of this turn that could not be used."""
    cuts: tuple[int, ...] = ()
    """Places between the segments of this turn, each of which is drawn in an order of its own."""
    sequential: bool = False
    """Drawn in the order of the listing instead of a random one."""
    complete: bool = True
    """Whether the listing is: else more segments come."""
    past: tuple[Pass, ...] = ()
    """Earlier passes of which shards may be left."""

    @classmethod
    def of(cls, row: Row) -> SourceRow:
        """From a row of the table."""
        values = {name: row[_COLUMNS.get(name, name)] for name in cls.__dataclass_fields__}
        values |= {"options": json.loads(row["options"]), "cuts": tuple(json.loads(row["cuts"]))}
        values["id"] = Id(row["id"])
        values["past"] = tuple(
            (pass_number, units, tuple(cuts)) for pass_number, units, cuts in json.loads(row["past"])
        )
        return cls(**values | {"sequential": bool(row["sequential"]), "complete": bool(row["whole"])})

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {**asdict(self), "options": dict(self.options)}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> SourceRow:
        """The row that :meth:`to_json` described."""
        past = tuple((pass_number, units, tuple(cuts)) for pass_number, units, cuts in value["past"])
        return cls(**{**value, "id": Id(value["id"]), "cuts": tuple(value["cuts"]), "past": past})


@dataclass(frozen=True, slots=True)
class Claim:
    """Positions ``start`` to ``stop`` of a turn that one worker may draw."""

    id: int
    pass_number: int
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
        **{_COLUMNS.get(name, name): value for name, value in asdict(row).items()},
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


def positions_done(connection: Connection, source: SourceRow) -> int:
    """Positions of the present turn that are done, skipped ones included; less what was lost of earlier ones."""
    query = "SELECT coalesce(sum(stop - start), 0) FROM claims WHERE source = ?"
    pending = connection.execute(query, (source.id,)).fetchone()[0]
    return max(0, source.frontier - int(pending))


@dataclass(frozen=True, slots=True)
class Job:
    """One run of ``pull``."""

    id: str
    source: str
    wanted: int | None
    """Samples to commit; None for the rest of the turn."""
    committed: int
    skipped: int
    """Draws that could not be used, since the present pass began."""
    evicted: int
    """Shards that went to make room for it."""

    @property
    def left(self) -> int | None:
        """Samples that it may still commit, those under way included; None without a budget."""
        return None if self.wanted is None else self.wanted - self.committed


def add_job(connection: Connection, job: str, source: str, *, holder: str, wanted: int | None, room: Room) -> None:
    """Enter a pull of ``source``, which lives as long as its holder."""
    row = {
        "id": job,
        "holder": holder,
        "source": source,
        "wanted": wanted,
        "committed": 0,
        "skipped": 0,
        "created": time.time(),
        "renew": room.renew,
        "policy": room.policy,
        "min_epochs": room.min_epochs,
        "keep_own": int(room.keep_own),
        "hungry": 0,
    }
    names, marks = ", ".join(row), ", ".join(f":{name}" for name in row)
    connection.execute(f"INSERT INTO jobs ({names}) VALUES ({marks})", row)


def job_row(connection: Connection, job: str) -> Job:
    """The state of a pull. Raises :class:`UsageError` when it ended."""
    columns = ", ".join(Job.__dataclass_fields__)
    row = connection.execute(f"SELECT {columns} FROM jobs WHERE id = ?", (job,)).fetchone()
    if row is None:
        raise UsageError(f"pull {job} has ended")
    return Job(*row)


def close_job(connection: Connection, job: str) -> Job:
    """End a pull; gives what it came to."""
    state = job_row(connection, job)
    connection.execute("DELETE FROM jobs WHERE id = ?", (job,))
    return state


def open_job(
    connection: Connection,
    source: str,
    *,
    holder: str,
    wanted: int | None,
    seed: int | None,
    room: Room | None = None,
    next_pass: bool = True,
) -> tuple[str, SourceRow]:
    """Begin a pull: its id and the source. A complete turn is followed by a new one
    when samples are asked for by number, unless ``next_pass`` is False. ``room`` says how room may be made for it, also
    by the trainers' snapshots.

    Raises :class:`UsageError` when ``seed`` is another than the one this source is drawn with.
    """
    row = source_row(connection, source)
    if row is None:
        raise UsageError("another pull of this source failed and took it back at this moment; run this again")
    if seed is not None and seed != row.seed:
        raise UsageError(
            f"{row.url} is drawn with --seed {row.seed} in this cache; leave --seed out, or use another cache"
        )
    if connection.execute(f"SELECT 1 FROM jobs WHERE source = ? AND {OF_NODE}", (source,)).fetchone():
        raise UsageError(f"a pull over several nodes draws from {row.url} at this moment; wait for its end")
    if next_pass and wanted is not None and _over(connection, row):
        begin_next_pass(connection, source)
        row = source_row(connection, source) or row
    job = secrets.token_hex(6)
    add_job(connection, job, source, holder=holder, wanted=wanted, room=room or Room())
    return job, row


def claim(
    connection: Connection, job: str, *, holder: str, most: int, stop_at: Callable[[int, int, int], int] | None = None,
    lost: bool = False,
) -> Claim | None:  # fmt: skip
    """Up to ``most`` positions for a worker of ``job``, or None when the job or the turn has none left to give.
    ``stop_at(pass_number, start, stop)`` says where a claim should rather end; ``lost``: only of lost draws. A job's
    budget counts what is committed and what its workers are on, so that together they never draw too many.
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

    def end(pass_number: int, start: int, limit: int) -> int:
        stop = min(limit, start + most)
        return min(limit, start + budget, stop if stop_at is None else stop_at(pass_number, start, stop))

    row = connection.execute(
        "SELECT id, turn, start, stop, lost FROM claims WHERE source = ? AND holder IS NULL AND tried IS NOT ?"
        " ORDER BY lost IS NULL, turn, start LIMIT 1",
        (source.id, job),
    ).fetchone()
    if lost and (row is None or row["lost"] is None):
        return None
    if row is not None:
        start, stop = row["start"], end(row["turn"], row["start"], row["stop"])
        share = None if row["lost"] is None else row["lost"] * (stop - start) // (row["stop"] - start)
        connection.execute(
            "UPDATE claims SET stop = ?, holder = ?, job = ?, lost = ?, tried = NULL WHERE id = ?",
            (stop, holder, job, share, row["id"]),
        )
        if stop < row["stop"]:
            remaining = None if share is None else row["lost"] - share
            _insert(connection, source, stop, row["stop"], lost=remaining, pass_number=row["turn"])
        return Claim(row["id"], row["turn"], start, stop, source, lost=row["lost"] is not None)
    start = source.frontier
    if start >= source.units:
        return None
    stop = end(source.pass_number, start, source.units)
    connection.execute("UPDATE sources SET frontier = ? WHERE id = ?", (stop, source.id))
    return Claim(_insert(connection, source, start, stop, holder, job), source.pass_number, start, stop, source)


def finish(
    connection: Connection,
    job: str,
    claimed: Claim,
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
    if upto >= claimed.stop:
        closed = connection.execute("DELETE FROM claims WHERE id = ?", (claimed.id,))
    else:
        closed = connection.execute("UPDATE claims SET start = ? WHERE id = ?", (upto, claimed.id))
    if closed.rowcount != 1:  # its samples may be somebody else's by now
        raise CatalogError("what this pull was drawing was taken from it; run it again")
    for start, stop in gaps:
        _insert(connection, claimed.source, start, stop, pass_number=claimed.pass_number)
    connection.execute(
        "UPDATE jobs SET committed = committed + ?, skipped = skipped + ? WHERE id = ?", (samples, skipped, job)
    )
    connection.execute(
        "UPDATE sources SET skipped = skipped + ?, fetched = fetched + ?"
        " WHERE id = (SELECT source FROM jobs WHERE id = ?)",
        (skipped + vanished, fetched, job),
    )


def give_back(connection: Connection, holder: str, job: str) -> None:
    """Open the claims that this process still has of a pull that it leaves."""
    connection.execute("UPDATE claims SET holder = NULL, job = NULL WHERE holder = ? AND job = ?", (holder, job))


def _insert(
    connection: Connection,
    source: SourceRow,
    start: int,
    stop: int,
    holder: str | None = None,
    job: str | None = None,
    lost: int | None = None,
    pass_number: int | None = None,
) -> int:
    cursor = connection.execute(
        "INSERT INTO claims (source, turn, start, stop, holder, job, lost) VALUES (?, ?, ?, ?, ?, ?, ?)",
        (source.id, source.pass_number if pass_number is None else pass_number, start, stop, holder, job, lost),
    )
    return int(cursor.lastrowid or 0)


def _over(connection: Connection, source: SourceRow) -> bool:
    """Whether the present pass is complete."""
    query = "SELECT coalesce(sum(stop - start), 0) FROM claims WHERE source = ? AND tried IS NOT NULL"
    barren = connection.execute(query, (source.id,)).fetchone()[0]
    return source.complete and positions_done(connection, source) + int(barren) >= source.units


def begin_next_pass(connection: Connection, source: str) -> bool:
    """Begin the next pass, in one new order of all units, when the present one is complete; whether it was."""
    row = source_row(connection, source)
    if row is None or not _over(connection, row):
        return False
    connection.execute("DELETE FROM claims WHERE source = ? AND turn = ? AND tried IS NULL", (source, row.pass_number))
    past = still_there(connection, source, [*row.past, (row.pass_number, row.units, row.cuts)])
    connection.execute(
        "UPDATE sources SET turn = turn + 1, frontier = 0, skipped = 0, cuts = '[]', past = ? WHERE id = ?",
        (json.dumps(past), source),
    )
    connection.execute("INSERT OR REPLACE INTO meta VALUES (?, ?)", (f"turned:{source}", _moves(connection)))
    connection.execute("UPDATE jobs SET skipped = 0 WHERE source = ?", (source,))
    event(connection, time.time(), "turn", row.url, f"pass {row.pass_number + 2} begins", dataset=row.dataset)
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


@dataclass(frozen=True, slots=True)
class Copies:
    """The draws of one ready shard, or of one claim."""

    shard: str
    pass_number: int
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
    left = {copy.pass_number for copy in copies(connection, source)}
    left |= {row["turn"] for row in connection.execute("SELECT turn FROM claims WHERE source = ?", (source,))}
    return [candidate for candidate in passes if candidate[0] in left]


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
    connection: Connection, source: SourceRow, pass_number: int, ranges: Iterable[tuple[int, int]], samples: int | None
) -> int:
    """Open draws again whose ``samples`` were lost (None: and are not missed); gives how many draws. What an
    earlier pass drew is drawn again as what it was, positions of that pass: the present one has been past it, or goes
    around it. When it is not missed, a later pass brings it."""
    if pass_number != source.pass_number and samples is None:
        return 0
    parts = [(start, stop) for start, stop in ranges if start < stop]
    left, count = samples, sum(stop - start for start, stop in parts)
    draws = count
    for start, stop in parts:
        share = None if left is None else left * (stop - start) // draws
        if left is not None and share is not None:
            left, draws = left - share, draws - (stop - start)
        connection.execute(
            "INSERT INTO claims (source, turn, start, stop, lost) VALUES (?, ?, ?, ?, ?)",
            (source.id, pass_number, start, stop, share),
        )
    if (
        pass_number == source.pass_number and samples is not None
    ):  # what was skipped among them is counted when it is again
        skipped = max(0, count - samples)
        connection.execute("UPDATE sources SET skipped = max(0, skipped - ?) WHERE id = ?", (skipped, source.id))
    return count


def regain(
    connection: Connection, job: str, claimed: Claim, upto: int, *, samples: int, barren: Sequence[tuple[int, int]]
) -> None:
    """Before the positions of a claim of lost draws below ``upto`` are finished: count the ``samples`` that came, of
    those that were lost with any claim of this source.

    The ranges ``barren`` gave none, and the pull ``job`` tries them no more. Some of them may never have given any, and
    nobody knows which: so they stay open together as long as samples are missing, and are done once none is.
    """
    row = connection.execute("SELECT lost FROM claims WHERE id = ?", (claimed.id,)).fetchone()
    if row is None or row["lost"] is None:
        return
    source = claimed.source.id
    connection.executemany(
        "INSERT INTO claims (source, turn, start, stop, lost, tried) VALUES (?, ?, ?, ?, 0, ?)",
        [(source, claimed.pass_number, start, stop, job) for start, stop in barren],
    )
    count = sum(stop - start for start, stop in barren)
    connection.execute("UPDATE sources SET skipped = skipped - ? WHERE id = ?", (count, source))  # not yet
    left = row["lost"] - samples
    if left > 0 and upto >= claimed.stop:
        connection.execute(
            "UPDATE claims SET lost = lost + ? WHERE id = (SELECT max(id) FROM claims WHERE source = ? AND tried = ?)",
            (left, source, job),
        )
    connection.execute(
        "UPDATE claims SET lost = ? WHERE id = ?", (max(0, left) if upto < claimed.stop else 0, claimed.id)
    )
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
