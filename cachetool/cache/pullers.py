"""Which process pulls a source in the background: one at a time, decided by a row of the catalog.

::

    no row, or its holder is gone   -> whoever asks takes it
    its holder lives                -> whoever asks waits its turn, and asks again
    its pull failed                 -> the row keeps the error, for those who wait and for ``stats``

Nothing is written while samples arrive but what is written anyway: how far a pull is follows from its job, its source
and its shards.
"""

from __future__ import annotations

import os
import time
from dataclasses import asdict, dataclass
from typing import Any

from cachetool.cache.catalog import Connection
from cachetool.cache.draws import drawn, source_row
from cachetool.cache.holders import Holder
from cachetool.cache.layout import Layout
from cachetool.cache.usage import measure

__all__ = [
    "ALL_THERE",
    "FAILED",
    "PAUSED",
    "STOPPED",
    "PullState",
    "failure_since",
    "leave",
    "note",
    "pull_state",
    "pull_states",
    "take_turn",
]

FAILED, PAUSED, STOPPED, ALL_THERE = "failed", "waiting for room", "stopped", "all is in the cache"
_PAUSE = 2.0
"""Seconds after its last commit from which a pull that wants room counts as paused."""


@dataclass(frozen=True, slots=True)
class PullState:
    """How far the background pull of one source is."""

    source: str
    """Its id."""
    url: str
    dataset: str
    pid: int
    """The process that pulls, or pulled."""
    phase: str
    """``starting``, ``listing``, ``looking at samples``, ``pulling``, ``waiting for room`` (the cache is full, and all
    of it is being read or was not read yet), ``all is in the cache`` (there is nothing left to fetch), ``retrying``,
    ``failed``, ``stopped``."""
    listed: int
    """Objects listed so far, in the phase ``listing``."""
    samples: int
    """Committed by this pull."""
    skipped: int
    """Draws of this pull that could not be used."""
    fetched: int
    """Bytes over the wire, for all that was ever committed of the source."""
    drawn: int
    """Units of the present pass that are done."""
    units: int
    """Units in a pass; 0 until the source is listed."""
    turn: int
    """Which pass, from 1."""
    used: int
    """Bytes charged against the cap."""
    max_size: int
    evicted: int
    """Shards evicted so far, by whomever."""
    seconds: float
    """Since it began."""
    error: str | None
    """Why it failed, or retries."""

    @property
    def alive(self) -> bool:
        """Whether somebody pulls."""
        return self.phase not in (FAILED, STOPPED)

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return asdict(self)


def take_turn(connection: Connection, source: str, *, url: str, dataset: str, holder: Holder) -> bool:
    """Become the one that pulls ``source``, unless another living process does; whether that came true.

    Inside a writing transaction, after a recovery: holders in the catalog are alive then.
    """
    holder.register(connection)
    row = connection.execute(
        "SELECT 1 FROM pullers p JOIN holders h ON h.id = p.holder WHERE p.source = ? AND p.holder != ?",
        (source, holder.id),
    ).fetchone()
    if row is not None:
        return False
    now = time.time()
    connection.execute(
        "INSERT OR REPLACE INTO pullers VALUES (?, ?, ?, ?, ?, 'starting', 0, NULL, ?, ?)",
        (source, holder.id, os.getpid(), url, dataset, now, now),
    )
    return True


def note(
    connection: Connection, source: str, holder: Holder, phase: str, *, listed: int = 0, error: str | None = None
) -> None:
    """Write down what the pull of this process is at."""
    connection.execute(
        "UPDATE pullers SET phase = ?, listed = ?, error = ?, updated = ? WHERE source = ? AND holder = ?",
        (phase, listed, error, time.time(), source, holder.id),
    )


def leave(connection: Connection, source: str, holder: Holder, *, error: str | None = None) -> None:
    """End this process's turn: without a trace, or with the error that ended it."""
    if error is None:
        connection.execute("DELETE FROM pullers WHERE source = ? AND holder = ?", (source, holder.id))
    else:
        note(connection, source, holder, FAILED, error=error)


def failure_since(connection: Connection, source: str, since: float) -> str | None:
    """The error of a pull of ``source`` that failed after ``since``."""
    row = connection.execute(
        "SELECT error FROM pullers WHERE source = ? AND phase = ? AND updated > ?", (source, FAILED, since)
    ).fetchone()
    return None if row is None else str(row["error"])


def pull_state(connection: Connection, layout: Layout, source: str) -> PullState | None:
    """How far the pull of ``source`` is; None when there was none, or it ended as it should."""
    row = connection.execute("SELECT * FROM pullers WHERE source = ?", (source,)).fetchone()
    if row is None:
        return None
    known = source_row(connection, source)
    fetched = connection.execute("SELECT fetched FROM sources WHERE id = ?", (source,)).fetchone()
    job = connection.execute(
        "SELECT id, committed, skipped, hungry FROM jobs WHERE source = ? AND holder = ?", (source, row["holder"])
    ).fetchone()
    phase = row["phase"]
    if phase != FAILED and not connection.execute("SELECT 1 FROM holders WHERE id = ?", (row["holder"],)).fetchone():
        phase = STOPPED
    elif job is not None and known is not None and _idle(connection, job["id"]):
        if known.whole and drawn(connection, known) >= known.units:
            phase = ALL_THERE
        elif job["hungry"]:
            phase = PAUSED
    cap = connection.execute("SELECT value FROM meta WHERE key = 'max_size'").fetchone()[0]
    evicted = connection.execute("SELECT coalesce(sum(shards), 0) FROM evictions").fetchone()[0]
    return PullState(
        source=source,
        url=row["url"],
        dataset=row["dataset"],
        pid=row["pid"],
        phase=phase,
        listed=row["listed"],
        samples=job["committed"] if job else 0,
        skipped=job["skipped"] if job else 0,
        fetched=fetched["fetched"] if fetched else 0,
        drawn=drawn(connection, known) if known else 0,
        units=known.units if known else 0,
        turn=known.turn + 1 if known else 1,
        used=measure(connection, layout).total,
        max_size=int(cap),
        evicted=int(evicted),
        seconds=time.time() - row["started"],
        error=row["error"],
    )


def _idle(connection: Connection, job: str) -> bool:
    """Whether no worker of a pull has a shard open, and none did a moment ago."""
    row = connection.execute(
        "SELECT count(*) FILTER (WHERE state = 'staging') AS open, max(created) AS last FROM shards WHERE job = ?",
        (job,),
    ).fetchone()
    return not row["open"] and time.time() - (row["last"] or 0) > _PAUSE


def pull_states(connection: Connection, layout: Layout, *, dataset: str | None = None) -> list[PullState]:
    """All background pulls, or those into one dataset, oldest first."""
    rows = connection.execute("SELECT source, dataset FROM pullers ORDER BY started").fetchall()
    found = (pull_state(connection, layout, row["source"]) for row in rows if dataset in (None, row["dataset"]))
    return [state for state in found if state is not None]
