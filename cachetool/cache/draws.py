"""Sources, pulls and claims, as rows of the catalog: each draw of a source is done, claimed or open.

A source is cut into parts. A cache draws some of them, or the only one. The draws of a part are the positions of one
seeded order per pass::

    0 ................ frontier ................ size
      done, but for rows in `claims`              not claimed yet

When a source grows, each part gets more positions behind its own; positions that exist do not change. A claim has a
holder while a worker draws it. It has none after the worker died or gave it back; then it is claimed again before the
frontier moves.

Jobs: the pulls that run, how much each of them may still draw, and how room is made for it.

Copies: the draws of a source, by pass, that lie in ready shards of the cache or will be drawn again.

Draws whose samples were committed and then damaged are open again, and are drawn before all others::

    damaged shard  -- reopen -->  claims, `reopened`  -- drawn again -------------->  row deleted
                                                      -- mark_tried: no sample ---->  `tried` by that pull; the next
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
    """The positions of a claim belong to another worker now, or to no part of this cache."""


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a source that this cache draws."""

    number: int
    frontier: int
    """Positions below it are done, or have a row in ``claims``."""
    size: int
    """Number of draws in a pass."""


@dataclass(frozen=True, slots=True)
class SourceRow:
    """A source as the catalog knows it.

    Example:
        row = cache.source(source_id)
        if row is not None:
            print(row.url, row.pass_number, row.frontier, "of", row.size)
    """

    id: Id
    """Id of the source: a digest of its URL, of the options that number its samples, and of its dataset."""
    url: str
    """URL of the source, without credentials."""
    options: Mapping[str, Any]
    """The options that say how its objects are read, as plain values."""
    identity: str
    """Digest of the listing."""
    dataset: str
    """Name of the dataset that gets its samples."""
    units: int
    """Number of units in the listing."""
    samples: int
    """Number of samples, as far as it is known from the listing."""
    seed: int
    """Seed of the random order."""
    pass_number: int
    """Number of the present pass over the units, from 0."""
    skipped: int
    """Draws of this pass that could not be used."""
    segments: tuple[int, ...] = ()
    """Positions between the segments of this pass. Each segment is drawn in an order of its own."""
    sequential: bool = False
    """True when the units are drawn in the order of the listing instead of a random order."""
    complete: bool = True
    """True when the listing is complete; False while more segments may come."""
    past: tuple[Pass, ...] = ()
    """Earlier passes from which shards may be left."""
    cut: int = 1
    """Number of parts into which the source is cut."""
    parts: tuple[Part, ...] = ()
    """The parts that this cache draws. Empty for a source that is not in the catalog yet and has one part."""

    @property
    def frontier(self) -> int:
        """Number of positions, over all parts here, that are done or have a row in ``claims``."""
        return sum(part.frontier for part in self.parts)

    @property
    def size(self) -> int:
        """Number of draws of all parts here in a pass."""
        return sum(part.size for part in self.parts)

    @classmethod
    def of(cls, row: Row, parts: Iterable[Row]) -> SourceRow:
        """Make a value from rows of the tables ``sources`` and ``parts``.

        Args:
            row: Row of the table ``sources``.
            parts: Rows of the table ``parts`` for this source.

        Returns:
            The source.

        Raises:
            ForeignValue: A row holds a value that cachetool never writes.
        """
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
        """Return plain values for JSON."""
        return {**asdict(self), "options": dict(self.options)}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> SourceRow:
        """Return the source that :meth:`to_json` described.

        Args:
            value: The result of :meth:`to_json`.

        Returns:
            The source.
        """
        past = tuple((pass_number, units, tuple(segments)) for pass_number, units, segments in value["past"])
        parts = tuple(Part(**part) for part in value["parts"])
        made = {"id": Id(value["id"]), "segments": tuple(value["segments"]), "past": past, "parts": parts}
        return cls(**{**value, **made})


@dataclass(frozen=True, slots=True)
class Claim:
    """Positions ``start`` to ``stop`` of a part in a pass, which one worker may draw.

    Example:
        with cache.catalog.write() as connection:
            claimed = draws.claim(connection, job, holder=cache.holder.id, most=100)
    """

    id: int
    """Id of the row in ``claims``. Ids are never used again."""
    pass_number: int
    """Number of the pass, from 0."""
    start: int
    """First position."""
    stop: int
    """Position behind the last one."""
    source: SourceRow
    """The source at the moment of the claim. Its units and segments say what the positions mean."""
    reopened: bool = False
    """True if samples of these draws were in a shard that was damaged."""
    part: int = 0
    """Number of the part."""


def source_row(connection: Connection, source: str) -> SourceRow | None:
    """Return the source with this id, or None."""
    row = connection.execute("SELECT * FROM sources WHERE id = ?", (source,)).fetchone()
    parts = connection.execute("SELECT * FROM parts WHERE source = ? ORDER BY part", (source,)).fetchall()
    return None if row is None else SourceRow.of(row, parts)


def known_source(connection: Connection, source: str) -> SourceRow:
    """Return a source that a pull has already seen. Raises :class:`UsageError` when the source was deleted since."""
    if (row := source_row(connection, source)) is None:
        raise UsageError("another pull of this source failed and removed the source; run this again")
    return row


def add_source(connection: Connection, row: SourceRow, nbytes: int, *, new: bool = False) -> None:
    """Write a source, or the new values of a known one, and the bytes that its listing is charged.

    Raises :class:`UsageError` when the source must be ``new`` but is in the catalog with another listing.
    """
    now, parts = source_row(connection, row.id), row.parts or (Part(0, 0, row.units),)
    if new and now is not None:
        # Two pulls may have listed the source at the same time. Their positions mean the same units
        # only if the listings, the cuts and the parts are equal.
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
    # Only for a source of one part, whose size is all units. Parts of a cut source get their new
    # sizes in `growth._grow`.
    elif now.cut == 1:
        connection.execute("UPDATE parts SET size = ? WHERE source = ?", (row.units, row.id))


def positions_done(connection: Connection, source: SourceRow) -> int:
    """Return the number of positions of the present pass that are done, including skipped and tried ones, less the open
    draws of earlier passes."""
    query = "SELECT coalesce(sum(stop - start), 0) FROM claims WHERE source = ? AND tried IS NULL"
    pending = connection.execute(query, (source.id,)).fetchone()[0]
    # Not below 0: the open draws of earlier passes count as well, and there may be more of them
    # than positions done here.
    return max(0, source.frontier - int(pending))


def draws_left(connection: Connection, source: SourceRow, limits: Mapping[int, int]) -> int:
    """Return the number of positions of the present pass that are not done, below the limit of each part."""
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
    """First draws of a pass over the whole source that must be done, of which the parts here have some; None for
    all."""
    committed: int
    skipped: int
    """Draws that could not be used since the present pass began."""
    evicted: int
    """Number of shards that were evicted to free space for this pull."""

    @property
    def left(self) -> int | None:
        """Samples that the pull may still commit, including those in progress; None without a budget."""
        return None if self.wanted is None else self.wanted - self.committed


def job_row(connection: Connection, job: str) -> Job:
    """Return the state of a pull. Raises :class:`UsageError` when the pull has ended."""
    columns = ", ".join(Job.__dataclass_fields__)
    row = connection.execute(f"SELECT {columns} FROM jobs WHERE id = ?", (job,)).fetchone()
    if row is None:
        raise UsageError(f"pull {job} has ended")
    return Job(*row)


def close_job(connection: Connection, job: str) -> Job:
    """End a pull and return its last state."""
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
    """Begin a pull; return its id and the source. With ``next_pass``, a complete pass is followed by a new one.

    ``room`` says how room may be made for the pull, also by the snapshots that trainers take.

    Raises :class:`UsageError` when ``seed`` differs from the seed with which this source is drawn.
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
    """Claim up to ``most`` positions of one part for a worker of ``job``. Return None when the job or the pass has none
    left.

    ``stop_at(pass_number, part, start, stop)`` returns the position at which a claim should end instead. ``limit(part,
    upto)`` returns how many of the first ``upto`` draws of the source lie in a part. With ``reopened`` only reopened
    draws are claimed.
    """
    state = job_row(connection, job)
    source = source_row(connection, state.source)
    assert source is not None
    budget = source.units
    if state.wanted is not None:
        # The budget counts committed samples and the positions that other workers are drawing.
        # Otherwise the workers together would draw more than `--samples`.
        pending = connection.execute(
            "SELECT coalesce(sum(stop - start), 0) FROM claims WHERE job = ? AND holder IS NOT NULL", (job,)
        ).fetchone()[0]
        budget = state.wanted - state.committed - int(pending)
    if budget <= 0:
        return None

    def end(pass_number: int, part: int, start: int, limit: int) -> int:
        stop = min(limit, start + most)
        # The budget is applied last, so that a rounding of `stop_at` up to the end of a unit cannot
        # exceed it.
        return min(limit, start + budget, stop if stop_at is None else stop_at(pass_number, part, start, stop))

    upto = state.upto
    ends = {
        part.number: part.size if upto is None or limit is None else min(part.size, limit(part.number, upto))
        for part in source.parts
    }

    def reach(row: Row) -> int:
        """Return the end of an open claim for this job. Damaged draws are fetched wherever they lie, also beyond the
        job's limit."""
        in_pass = row["pass_number"] == source.pass_number and not row["reopened"]
        return min(row["stop"], ends.get(row["part"], 0)) if in_pass else int(row["stop"])

    # Open claims come first, so that draws of dead workers do not stay behind while the frontier
    # moves on; reopened draws come before all of them. `tried IS NOT ?` leaves out draws that gave
    # nothing to this same job: it would fetch them for ever. With a limit `upto` the first row may
    # lie beyond it, so all rows are read.
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
        # Without a row of their own, the positions behind this claim would never be drawn, because
        # they lie below the frontier.
        if stop < row["stop"]:
            _insert(connection, source, part, stop, row["stop"], reopened=again, pass_number=row["pass_number"])
        return Claim(row["id"], row["pass_number"], start, stop, source, again, part)
    begun = [part for part in source.parts if part.frontier < ends[part.number]]
    if not begun:
        return None
    # The part with the lowest frontier: a cache begins all of its parts early and advances them
    # evenly. Ties go by number, so a seed decides all draws.
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
    """Close the first positions of a claim, below ``upto``, and count them for the job.

    Call this inside the transaction that commits their samples. ``fetched`` are the bytes that came over the network
    for them. Draws that ``vanished`` from the source, as a refresh found, are no fault of the objects and count for the
    source only. ``gaps`` among the positions stay open for the next claim. Raises :class:`ClaimGone`.
    """
    if upto >= claimed.stop:
        closed = connection.execute("DELETE FROM claims WHERE id = ?", (claimed.id,))
    else:
        closed = connection.execute("UPDATE claims SET start = ? WHERE id = ?", (upto, claimed.id))
    # No row means that recovery or a release of the part took the claim. Another worker may have
    # drawn these positions since, so committing would store their samples twice.
    if closed.rowcount != 1:
        raise ClaimGone("this pull lost its claim on the samples that it was drawing; run the pull again")
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
    """Open the claims that this process still has in a pull that it leaves."""
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
    """Return True if the present pass is complete."""
    return source.complete and bool(source.parts) and positions_done(connection, source) >= source.size


def begin_next_pass(connection: Connection, source: str) -> bool:
    """Begin the next pass, in a new order of all units, if the present one is complete. Return True if it was."""
    row = source_row(connection, source)
    if row is None or not _over(connection, row):
        return False
    # Only draws that were tried in vain are left. The next pass draws these units like any others.
    connection.execute("DELETE FROM claims WHERE source = ?", (source,))
    # Positions in shards of earlier passes have a meaning only with the units and segments of their
    # pass. These are kept as long as a shard or an open draw needs them.
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
    """Return True if no shard was committed or evicted since the present pass began.

    At the end of such a pass the next one would bring nothing either. Objects that ``--on-error skip`` leaves out are
    in no shard, so they would be fetched again in every pass.
    """
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
    """JSON text as in the catalog. It is parsed on demand, because only few of thousands are looked into."""

    def ranges(self, source: SourceRow) -> Ranges:
        """Return the positions in that pass. Raises :class:`ForeignValue` for positions that the source never had."""
        ranges = pairs(json.loads(self.draws))
        units = max([source.units, *(units for _, units, _ in source.past)])
        if not all(0 <= start <= stop <= units for start, stop in ranges):
            raise ForeignValue("shards", "draws", self.draws, f" of a source of {units} units")
        return ranges


def copies(connection: Connection, source: str, *, but: int | None = None) -> list[Copies]:
    """List the draws of ``source`` that snapshots to come contain, without those of the pass ``but``."""
    rows = connection.execute(
        "SELECT id, pass_number, part, draws FROM shards WHERE source = ? AND state = 'ready' AND pass_number IS NOT ?",
        (source, but),
    )
    return [Copies(*row) for row in rows]


def promised(connection: Connection, source: str) -> list[Copies]:
    """Return the open draws of earlier passes, each claim as one value.

    They will be drawn again as draws of their pass. For the present pass they count as cached, or it would fetch the
    same samples too.
    """
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
    """Return those of ``passes`` from which ready shards or open draws are left."""
    left = {copy.pass_number for copy in copies(connection, source)}
    left |= {
        row["pass_number"] for row in connection.execute("SELECT pass_number FROM claims WHERE source = ?", (source,))
    }
    return [candidate for candidate in passes if candidate[0] in left]


@dataclass(frozen=True, slots=True)
class Reopened:
    """Draws of one source whose samples were damaged, and which the next pull fetches again."""

    source: str
    """Id of the source."""
    url: str
    dataset: str
    draws: int
    tried: int
    """Number of these draws that gave no sample again."""
    why: str
    """The newest error of the source; empty when there was none."""


def reopen(
    connection: Connection, source: SourceRow, pass_number: int, part: int, ranges: Iterable[Sequence[int]]
) -> int:
    """Open draws again whose samples were damaged; return how many."""
    ranges = union(ranges)
    # With the number of their own pass: the present pass is already behind these positions, or goes
    # around them.
    for start, stop in ranges:
        _insert(connection, source, part, start, stop, reopened=True, pass_number=pass_number)
    return total(ranges)


def mark_tried(connection: Connection, job: str, claimed: Claim, barren: Ranges) -> None:
    """Record that the ranges ``barren`` of a reopened claim gave no sample again. Call this before the claim is
    finished.

    These draws stay open for the next pull, ``job`` does not try them again, and no pass waits for them.
    """
    for start, stop in barren:
        _insert(
            connection, claimed.source, claimed.part, start, stop, reopened=True, pass_number=claimed.pass_number,
            tried=job,
        )  # fmt: skip
    # `finish` will count these draws as skipped, but they are still open. So they are taken off
    # here.
    query = "UPDATE sources SET skipped = skipped - ? WHERE id = ?"
    connection.execute(query, (total(barren), claimed.source.id))


def reopened(connection: Connection) -> list[Reopened]:
    """Return the reopened draws of each source."""
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
