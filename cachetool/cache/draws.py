"""Sources, pulls and claims, as rows of the catalog: the draws of a source are done, claimed or open.

A source is cut into parts, of which a cache draws some, or its only one. The draws of a part are the positions of one
seeded order per pass::

    0 ................ frontier ................ size
      done, but for rows in `claims`              never claimed yet

A source that grows gives each part more positions behind those it has; the others stay what they are. A claim has a
holder while a worker is on it, none after that died or gave it back: then it is handed out before the frontier moves.

Pulls that are under way: what each may still draw, and how room is made for it.

What the cache has of a source: which draws of which passes lie in its ready shards, or are to be there again.

Draws whose samples were committed and then damaged are open again, and are drawn before all others::

    shard given up  -- reopen -->  claims, `reopened`  -- drawn again -------------->  row gone
                                                       -- mark_tried: gave nothing ->  `tried` by that pull; the next
                                                                                       pull tries again, no pass waits
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from cachetool.cache.catalog import Connection, Row, event
from cachetool.cache.policies import Room
from cachetool.cache.values import ForeignValue, check_row
from cachetool.core.errors import CatalogError, UsageError
from cachetool.core.names import Id
from cachetool.core.ranges import Ranges, pairs, total, union

__all__ = [
    "Claim",
    "ClaimGone",
    "Copies",
    "Job",
    "Part",
    "Pass",
    "Reopened",
    "SourceRow",
    "add_source",
    "claim",
    "close_job",
    "copies",
    "draws_left",
    "finish",
    "give_back",
    "idle",
    "job_row",
    "known_source",
    "mark_tried",
    "begin_next_pass",
    "open_job",
    "positions_done",
    "promised",
    "reopen",
    "reopened",
    "source_row",
    "still_there",
]


Pass = tuple[int, int, tuple[int, ...]]
"""A pass: its number, its units and its segments."""


class ClaimGone(CatalogError):
    """The positions of a claim belong to somebody else by now."""


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a source that a cache draws."""

    number: int
    frontier: int
    """Positions below it are done, or have a row in ``claims``."""
    size: int
    """Draws of a pass."""


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
    skipped: int
    """Draws of this pass that could not be used."""
    segments: tuple[int, ...] = ()
    """Places between the segments of this pass, each of which is drawn in an order of its own."""
    sequential: bool = False
    """Drawn in the order of the listing instead of a random one."""
    complete: bool = True
    """Whether the listing is: else more segments come."""
    past: tuple[Pass, ...] = ()
    """Earlier passes of which shards may be left."""
    cut: int = 1
    """Into how many parts it is cut."""
    parts: tuple[Part, ...] = ()
    """Those that this cache draws; none for a source that is in no catalog yet and comes in one part."""

    @property
    def frontier(self) -> int:
        """Positions of all parts here that are done, or have a row in ``claims``."""
        return sum(part.frontier for part in self.parts)

    @property
    def size(self) -> int:
        """Draws of all parts here in a pass."""
        return sum(part.size for part in self.parts)

    @classmethod
    def of(cls, row: Row, parts: Iterable[Row]) -> SourceRow:
        """From rows of the tables. Raises :class:`ForeignValue` for a value that cachetool never writes."""
        check_row("sources", row)
        values = {name: row[name] for name in cls.__dataclass_fields__ if name != "parts"}
        values["parts"] = tuple(Part(part["part"], part["frontier"], part["size"]) for part in parts)
        values |= {"options": json.loads(row["options"]), "segments": tuple(json.loads(row["segments"]))}
        values["id"] = Id(row["id"])
        values["past"] = tuple(
            (pass_number, units, tuple(segments)) for pass_number, units, segments in json.loads(row["past"])
        )
        return cls(**values | {"sequential": bool(row["sequential"]), "complete": bool(row["complete"])})

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {**asdict(self), "options": dict(self.options)}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> SourceRow:
        """The row that :meth:`to_json` described."""
        past = tuple((pass_number, units, tuple(segments)) for pass_number, units, segments in value["past"])
        parts = tuple(Part(**part) for part in value["parts"])
        made = {"id": Id(value["id"]), "segments": tuple(value["segments"]), "past": past, "parts": parts}
        return cls(**{**value, **made})


@dataclass(frozen=True, slots=True)
class Claim:
    """Positions ``start`` to ``stop`` of a part in a pass that one worker may draw."""

    id: int
    pass_number: int
    start: int
    stop: int
    source: SourceRow
    """As it was at that moment: its units and segments say what the positions mean."""
    reopened: bool = False
    """True if samples of these draws were in a shard that was damaged."""
    part: int = 0


def source_row(connection: Connection, source: str) -> SourceRow | None:
    """The source with this id."""
    row = connection.execute("SELECT * FROM sources WHERE id = ?", (source,)).fetchone()
    parts = connection.execute("SELECT * FROM parts WHERE source = ? ORDER BY part", (source,)).fetchall()
    return None if row is None else SourceRow.of(row, parts)


def known_source(connection: Connection, source: str) -> SourceRow:
    """The same, of one that a pull has seen. Raises :class:`UsageError` when it is gone since."""
    if (row := source_row(connection, source)) is None:
        raise UsageError("another pull of this source failed and took it back at this moment; run this again")
    return row


def add_source(connection: Connection, row: SourceRow, nbytes: int, *, new: bool = False) -> None:
    """Write a source, or what is new about a known one, with the bytes that its listing is charged.
    Raises :class:`UsageError` when it is to be ``new`` and is there, listed otherwise."""
    now, parts = source_row(connection, row.id), row.parts or (Part(0, 0, row.units),)
    if new and now is not None:
        same = {part.number for part in now.parts} == {part.number for part in parts}
        if not same or (now.identity, now.units, now.cut) != (row.identity, row.units, row.cut):
            raise UsageError(f"another process began to draw from {row.url} at this moment; run this again")
        return
    columns = {
        **{name: value for name, value in asdict(row).items() if name != "parts"},
        "options": json.dumps(dict(row.options)),
        "segments": json.dumps(row.segments),
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
    if now is None:
        connection.executemany(
            "INSERT INTO parts VALUES (?, ?, ?, ?)", [(row.id, part.number, part.frontier, part.size) for part in parts]
        )
    elif now.cut == 1:
        connection.execute("UPDATE parts SET size = ? WHERE source = ?", (row.units, row.id))


def positions_done(connection: Connection, source: SourceRow) -> int:
    """Positions of the present pass that are done, skipped and tried ones included; less the open ones of earlier
    passes."""
    query = "SELECT coalesce(sum(stop - start), 0) FROM claims WHERE source = ? AND tried IS NULL"
    pending = connection.execute(query, (source.id,)).fetchone()[0]
    return max(0, source.frontier - int(pending))


def draws_left(connection: Connection, source: SourceRow, limits: Mapping[int, int]) -> int:
    """Positions of the present pass below the limit of each part that are not done."""
    claims = connection.execute(
        "SELECT part, start, stop FROM claims WHERE source = ? AND pass_number = ? AND tried IS NULL",
        (source.id, source.pass_number),
    )
    pending = sum(max(0, min(stop, limits.get(part, 0)) - start) for part, start, stop in claims)
    return int(pending) + sum(max(0, limits.get(part.number, 0) - part.frontier) for part in source.parts)


@dataclass(frozen=True, slots=True)
class Job:
    """One run of ``pull``."""

    id: str
    source: str
    wanted: int | None
    """Samples to commit; None for the rest of the pass."""
    upto: int | None
    """So many first draws of a pass over the whole source, of which the parts here have some; None for all."""
    committed: int
    skipped: int
    """Draws that could not be used, since the present pass began."""
    evicted: int
    """Shards that went to make room for it."""

    @property
    def left(self) -> int | None:
        """Samples that it may still commit, those under way included; None without a budget."""
        return None if self.wanted is None else self.wanted - self.committed


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
    next_pass: bool = False,
    upto: int | None = None,
) -> tuple[str, SourceRow]:
    """Begin a pull: its id and the source. With ``next_pass`` a complete pass is followed by a new one. ``room`` says
    how room may be made for it, also by the trainers' snapshots.

    Raises :class:`UsageError` when ``seed`` is another than the one this source is drawn with.
    """
    row = known_source(connection, source)
    if seed is not None and seed != row.seed:
        raise UsageError(
            f"{row.url} is drawn with --seed {row.seed} in this cache; leave --seed out, or use another cache"
        )
    if next_pass and _over(connection, row):
        begin_next_pass(connection, source)
        row = source_row(connection, source) or row
    job = secrets.token_hex(6)
    room = room or Room()
    values = {
        "id": job,
        "holder": holder,
        "source": source,
        "wanted": wanted,
        "upto": upto,
        "committed": 0,
        "skipped": 0,
        "created": time.time(),
        "renew": room.renew,
        "policy": room.policy,
        "min_epochs": room.min_epochs,
        "keep_own": int(room.keep_own),
        "bytes_wanted": 0,
    }
    names, marks = ", ".join(values), ", ".join(f":{name}" for name in values)
    connection.execute(f"INSERT INTO jobs ({names}) VALUES ({marks})", values)
    return job, row


def claim(
    connection: Connection, job: str, *, holder: str, most: int,
    stop_at: Callable[[int, int, int, int], int] | None = None, limit: Callable[[int, int], int] | None = None,
    reopened: bool = False,
) -> Claim | None:  # fmt: skip
    """Up to ``most`` positions for a worker of ``job``, of one part, or None when the job or the pass has none left to
    give. ``stop_at(pass_number, part, start, stop)`` says where a claim should rather end; ``limit(part, upto)``, how
    many of the first ``upto`` draws of the source are in a part; ``reopened``: only of reopened draws. A
    job's budget counts what is committed and what its workers are on, so that together they never draw too many.
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

    def end(pass_number: int, part: int, start: int, limit: int) -> int:
        stop = min(limit, start + most)
        return min(limit, start + budget, stop if stop_at is None else stop_at(pass_number, part, start, stop))

    upto = state.upto
    ends = {
        part.number: part.size if upto is None or limit is None else min(part.size, limit(part.number, upto))
        for part in source.parts
    }

    def reach(row: Row) -> int:
        """The end of an open claim for this job, which fetches damaged draws wherever they are."""
        in_pass = row["pass_number"] == source.pass_number and not row["reopened"]
        return min(row["stop"], ends.get(row["part"], 0)) if in_pass else int(row["stop"])

    rows = connection.execute(
        "SELECT id, pass_number, part, start, stop, reopened FROM claims"
        " WHERE source = ? AND holder IS NULL AND tried IS NOT ? ORDER BY reopened DESC, pass_number, start LIMIT ?",
        (source.id, job, 1 if upto is None else -1),
    ).fetchall()
    row = next((row for row in rows if row["start"] < reach(row)), None)
    if reopened and not (row and row["reopened"]):
        return None
    if row is not None:
        part, start = row["part"], row["start"]
        stop = end(row["pass_number"], part, start, reach(row))
        connection.execute(
            "UPDATE claims SET stop = ?, holder = ?, job = ?, tried = NULL WHERE id = ?", (stop, holder, job, row["id"])
        )
        again = bool(row["reopened"])
        if stop < row["stop"]:
            _insert(connection, source, part, stop, row["stop"], reopened=again, pass_number=row["pass_number"])
        return Claim(row["id"], row["pass_number"], start, stop, source, again, part)
    begun = [part for part in source.parts if part.frontier < ends[part.number]]
    if not begun:
        return None
    start, part = min((part.frontier, part.number) for part in begun)
    stop = end(source.pass_number, part, start, ends[part])
    connection.execute("UPDATE parts SET frontier = ? WHERE source = ? AND part = ?", (stop, source.id, part))
    id = _insert(connection, source, part, start, stop, holder, job)
    return Claim(id, source.pass_number, start, stop, source, part=part)


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
    gaps: Ranges = (),
) -> None:
    """Close the first positions of a claim, up to but without ``upto``, and count them for the job; inside the
    transaction that commits their samples, for which ``fetched`` bytes came over the wire. What ``vanished`` from the
    source, as a refresh found, is no fault of the objects and counts for the source alone. ``gaps`` among them stay
    open, for whoever claims next. Raises :class:`ClaimGone`."""
    if upto >= claimed.stop:
        closed = connection.execute("DELETE FROM claims WHERE id = ?", (claimed.id,))
    else:
        closed = connection.execute("UPDATE claims SET start = ? WHERE id = ?", (upto, claimed.id))
    if closed.rowcount != 1:  # its samples may be somebody else's by now
        raise ClaimGone("what this pull was drawing was taken from it; run it again")
    for start, stop in gaps:
        _insert(connection, claimed.source, claimed.part, start, stop, pass_number=claimed.pass_number)
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
    part: int,
    start: int,
    stop: int,
    holder: str | None = None,
    job: str | None = None,
    reopened: bool = False,
    pass_number: int | None = None,
    tried: str | None = None,
) -> int:
    cursor = connection.execute(
        "INSERT INTO claims (source, part, pass_number, start, stop, holder, job, reopened, tried)"
        " VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
        (
            source.id,
            part,
            source.pass_number if pass_number is None else pass_number,
            start,
            stop,
            holder,
            job,
            reopened,
            tried,
        ),
    )
    return int(cursor.lastrowid or 0)


def _over(connection: Connection, source: SourceRow) -> bool:
    """Whether the present pass is complete."""
    return source.complete and bool(source.parts) and positions_done(connection, source) >= source.size


def begin_next_pass(connection: Connection, source: str) -> bool:
    """Begin the next pass, in one new order of all units, when the present one is complete; whether it was."""
    row = source_row(connection, source)
    if row is None or not _over(connection, row):
        return False
    connection.execute("DELETE FROM claims WHERE source = ?", (source,))  # tried in vain: this pass tries once more
    past = still_there(connection, source, [*row.past, (row.pass_number, row.units, row.segments)])
    connection.execute(
        "UPDATE sources SET pass_number = pass_number + 1, skipped = 0, segments = '[]', past = ?,"
        " began_at_moves = (SELECT moves FROM cache) WHERE id = ?",
        (json.dumps(past), source),
    )
    connection.execute("UPDATE parts SET frontier = 0 WHERE source = ?", (source,))
    connection.execute("UPDATE jobs SET skipped = 0 WHERE source = ?", (source,))
    event(connection, time.time(), "pass", row.url, f"pass {row.pass_number + 2} begins", dataset=row.dataset)
    return True


def idle(connection: Connection, source: str) -> bool:
    """Whether nothing came into the cache or went since the present pass began: when it is at its end, the next would
    bring nothing either. What is left out by ``--on-error skip`` is in no shard, and would be fetched for ever."""
    query = "SELECT began_at_moves IS (SELECT moves FROM cache) FROM sources WHERE id = ?"
    row = connection.execute(query, (source,)).fetchone()
    return row is not None and bool(row[0])


@dataclass(frozen=True, slots=True)
class Copies:
    """The draws of one ready shard, or of one claim."""

    shard: str
    pass_number: int
    part: int
    draws: str
    """As in the catalog: of thousands few are looked into."""

    def ranges(self, source: SourceRow) -> Ranges:
        """Positions of that pass. Raises :class:`ForeignValue` for more than the source ever had."""
        ranges = pairs(json.loads(self.draws))
        units = max([source.units, *(units for _, units, _ in source.past)])
        if not all(0 <= start <= stop <= units for start, stop in ranges):
            raise ForeignValue("shards", "draws", self.draws, f" of a source of {units} units")
        return ranges


def copies(connection: Connection, source: str, *, but: int | None = None) -> list[Copies]:
    """List what snapshots to come have of ``source``, draws of the pass ``but`` left out. No such snapshot has a
    retiring shard."""
    rows = connection.execute(
        "SELECT id, pass_number, part, draws FROM shards WHERE source = ? AND state = 'ready' AND pass_number IS NOT ?",
        (source, but),
    )
    return [Copies(*row) for row in rows]


def promised(connection: Connection, source: str) -> list[Copies]:
    """Open draws of earlier passes, which are drawn again as such, each by one claim: to the present pass they are as
    good as there, else it would bring them too."""
    rows = connection.execute(
        "SELECT c.id, c.pass_number, c.part, c.start, c.stop FROM claims c JOIN sources s ON s.id = c.source"
        " WHERE c.source = ? AND c.pass_number <> s.pass_number",
        (source,),
    )
    return [
        Copies(f"claim {id} {start} {stop}", pass_number, part, f"[[{start}, {stop}]]")
        for id, pass_number, part, start, stop in rows
    ]


def still_there(connection: Connection, source: str, passes: Sequence[Pass]) -> list[Pass]:
    """Those of ``passes`` of which there are ready shards, or open draws."""
    left = {copy.pass_number for copy in copies(connection, source)}
    left |= {
        row["pass_number"] for row in connection.execute("SELECT pass_number FROM claims WHERE source = ?", (source,))
    }
    return [candidate for candidate in passes if candidate[0] in left]


@dataclass(frozen=True, slots=True)
class Reopened:
    """Draws of one source whose samples were damaged, and which the next pull fetches again."""

    source: str
    """Its id."""
    url: str
    dataset: str
    draws: int
    tried: int
    """The number of these draws that gave nothing again."""
    why: str
    """The newest error of that source; empty when there was none."""


def reopen(
    connection: Connection, source: SourceRow, pass_number: int, part: int, ranges: Iterable[Sequence[int]]
) -> int:
    """Open draws again whose samples were damaged; gives how many. Draws of an earlier pass are drawn again as such:
    the present pass has been past them, or goes around them."""
    ranges = union(ranges)
    for start, stop in ranges:
        _insert(connection, source, part, start, stop, reopened=True, pass_number=pass_number)
    return total(ranges)


def mark_tried(connection: Connection, job: str, claimed: Claim, barren: Ranges) -> None:
    """Before positions of a claim of reopened draws are finished: the ranges ``barren`` gave nothing again. They stay
    open for the next pull, ``job`` tries them no more, and no pass waits for them."""
    for start, stop in barren:
        _insert(
            connection, claimed.source, claimed.part, start, stop, reopened=True, pass_number=claimed.pass_number,
            tried=job,
        )  # fmt: skip
    query = "UPDATE sources SET skipped = skipped - ? WHERE id = ?"  # not yet
    connection.execute(query, (total(barren), claimed.source.id))


def reopened(connection: Connection) -> list[Reopened]:
    """The reopened draws of each source."""
    rows = connection.execute(
        "SELECT s.id AS source, s.url, s.dataset, sum(c.stop - c.start) AS draws,"
        " coalesce(sum(c.stop - c.start) FILTER (WHERE c.tried IS NOT NULL), 0) AS tried FROM claims c"
        " JOIN sources s ON s.id = c.source WHERE c.reopened GROUP BY s.id ORDER BY s.created"
    ).fetchall()
    return [Reopened(**dict(row), why=_newest(connection, "error", row["url"])) for row in rows]


def _newest(connection: Connection, kind: str, subject: str) -> str:
    row = connection.execute(
        "SELECT text FROM events WHERE kind = ? AND subject = ? ORDER BY id DESC LIMIT 1", (kind, subject)
    ).fetchone()
    return row["text"] if row else ""
