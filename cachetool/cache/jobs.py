"""Pulls that are under way: what each may still draw, and how room is made for it."""

from __future__ import annotations

import time
from dataclasses import dataclass

from cachetool.cache.catalog import Connection
from cachetool.cache.room import Room
from cachetool.core.errors import UsageError

__all__ = ["Job", "add_job", "close_job", "job_row"]


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
