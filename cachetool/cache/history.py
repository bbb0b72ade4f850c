"""What a cache was like over time: some hundred points of its whole life, and the newest epochs.

::

    history   a point: what was charged, held, fetched, served and evicted by then
    epochs    what one epoch of a training run read, and how often and how long it waited for batches

Nothing is written for these alone: rows go with transactions that commit, delete or count an epoch in any case. Points
come at most once a second, more seldom the older the cache is, and where a pull begins or ends or an eviction ends, so
that the pause between two pulls is told as one. Of more than :data:`MOST_POINTS` the one goes that is missed least: a
year is told evenly and the last hour in detail. What has no room is left out.
"""

from __future__ import annotations

import contextlib
import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

from cachetool.cache.catalog import Catalog, Connection
from cachetool.cache.layout import Layout
from cachetool.cache.usage import measure
from cachetool.core.errors import CapacityError

__all__ = [
    "Delivered",
    "History",
    "edged",
    "history_of",
    "least_missed",
    "note_epoch",
    "note_point",
    "noting",
    "present",
    "restore",
]

MOST_POINTS = 240
MOST_EPOCHS = 200
_MOST = 2**63  # what the catalog holds as a whole number
_AGE_SHARE = 100_000
"""A point is due after this share of the time since the first one."""

T = TypeVar("T")


class Delivered(NamedTuple):
    """How an epoch went for the process that trained, as its loader saw it."""

    seconds: float
    """From asking for the epoch to its last batch."""
    batches: int
    waits: int
    """Batches that were not ready when they were asked for."""
    waited: float
    """Seconds of these waits, and of the one for the epoch to begin."""


@dataclass(frozen=True, slots=True)
class History:
    """What was written down, oldest first."""

    points: list[dict[str, Any]]
    """at, used, max_size, shards, samples, fetched, served, evicted (reason -> bytes so far)."""
    epochs: list[dict[str, Any]]
    """ended, dataset, run, epoch, shards, samples, bytes, seconds, and of loaders that tell: batches, waits, waited."""


def present(connection: Connection, layout: Layout) -> dict[str, Any]:
    """What the cache is like now: a point, as :attr:`History.points` has them."""
    meta = {row["key"]: row["value"] for row in connection.execute("SELECT key, value FROM meta")}
    # `+state`: through the index of states each row would be looked up by itself.
    totals = connection.execute(
        "SELECT count(*) AS shards, coalesce(sum(samples), 0) AS samples FROM shards"
        " WHERE +state IN ('ready', 'retiring')"
    ).fetchone()
    return {
        "at": time.time(),
        "used": measure(connection, layout).total,
        "max_size": meta["max_size"],
        **dict(totals),
        "fetched": connection.execute("SELECT coalesce(sum(fetched), 0) FROM sources").fetchone()[0],
        "served": meta["served"],
        "evicted": dict(connection.execute("SELECT reason, sum(bytes) FROM evictions GROUP BY reason").fetchall()),
    }


def note_point(connection: Connection, layout: Layout, *, edge: bool = False) -> None:
    """Write down what the cache is like now, if a point is due; inside a transaction that writes something else.

    At an ``edge``, where it begins or ends to change, one is due at any time. Of many that follow close on each other
    only the newest stays: it takes the place of the last point while the one before that is as new.
    """
    now = time.time()
    first = connection.execute("SELECT min(at) FROM history").fetchone()[0]
    newest = connection.execute("SELECT id, at FROM history ORDER BY at DESC, id DESC LIMIT 2").fetchall()
    if newest:
        near = max(1.0, (newest[0]["at"] - first) / _AGE_SHARE)
        if abs(now - newest[0]["at"]) < near:
            if not edge:
                return
            if len(newest) > 1 and abs(now - newest[1]["at"]) < near:
                connection.execute("DELETE FROM history WHERE id = ?", (newest[0]["id"],))
    _insert(connection, "history", _flat(present(connection, layout)))
    rows = connection.execute("SELECT id, at FROM history ORDER BY at, id").fetchall()
    if len(rows) > MOST_POINTS:
        gone = rows[least_missed([row["at"] for row in rows], now)]
        connection.execute("DELETE FROM history WHERE id = ?", (gone["id"],))


def least_missed(times: Sequence[float], now: float) -> int:
    """Which of these times, in order, to leave out: not the first or last, and the one whose going leaves the smallest
    gap for its age. Gaps may grow with the power 3/4 of the age: where all is ten thousand times as old they are a
    thousand times as wide."""

    def gap(number: int) -> float:
        return (times[number + 1] - times[number - 1]) / math.pow(max(1.0, now - times[number]), 0.75)

    return min(range(1, len(times) - 1), key=gap)


def note_epoch(connection: Connection, lease: int | None, delivered: Delivered | None, **read: Any) -> None:
    """Write down an epoch that ended; ``read``: dataset, shards, samples, bytes. How long it took is known from the
    loader, else from when its snapshot was taken."""
    now = time.time()
    about = connection.execute("SELECT run, epoch, taken FROM leases WHERE id = ?", (lease,)).fetchone()
    row: dict[str, Any] = {"ended": now, "run": None, "epoch": None, "seconds": None, **read}
    if about is not None:
        row |= {"run": about["run"], "epoch": about["epoch"], "seconds": max(0.0, now - about["taken"])}
    if delivered is not None:
        row |= delivered._asdict()
    newest = _insert(connection, "epochs", row)
    connection.execute("DELETE FROM epochs WHERE id <= ?", (newest - MOST_EPOCHS,))


def noting(catalog: Catalog, work: Callable[[Connection], T], note: Callable[[Connection, T], None]) -> T:
    """One transaction for ``work`` and for ``note`` of what it gave; of the first alone when both have no room."""
    with contextlib.suppress(CapacityError), catalog.write() as connection:
        done = work(connection)
        note(connection, done)
        return done
    with catalog.write() as connection:
        return work(connection)


def edged(catalog: Catalog, layout: Layout, work: Callable[[Connection], T]) -> T:
    """One transaction for ``work``, with which the cache begins or ends to change, and for a point of that moment."""
    return noting(catalog, work, lambda connection, _: note_point(connection, layout, edge=True))


def history_of(catalog: Catalog, *, dataset: str | None = None) -> History:
    """All points of the cache, and the epochs of one dataset or of all. Of a damaged catalog what makes sense."""
    points = [dict(row) for row in catalog.rows("SELECT * FROM history ORDER BY at, id")]
    epochs = [dict(row) for row in catalog.rows("SELECT * FROM epochs ORDER BY id")]
    for row in (*points, *epochs):
        del row["id"]
    for row in points:
        row["evicted"] = _numbers(row["evicted"])
    return History(
        [row for row in points if all(row[name] is not None and _sound(row[name]) for name in row)],
        [row for row in epochs if dataset in (None, row["dataset"]) and _epoch_sound(row)],
    )


def _numbers(text: object) -> dict[str, int]:
    with contextlib.suppress(ValueError, TypeError, OverflowError, RecursionError):
        numbers = json.loads(str(text))
        return {str(name): int(value) for name, value in numbers.items()} if isinstance(numbers, dict) else {}
    return {}


def _sound(value: object) -> bool:
    return isinstance(value, dict) or (isinstance(value, int | float) and 0 <= value < _MOST)


def _epoch_sound(row: dict[str, Any]) -> bool:
    names = ("dataset", "run")
    values = [value for name, value in row.items() if name not in names]
    named = all(isinstance(row[name], str | None) for name in names)
    return named and row["ended"] is not None and all(value is None or _sound(value) for value in values)


def restore(connection: Connection, history: History) -> None:
    """Write what an earlier catalog held into a new one."""
    for row in history.points:
        _insert(connection, "history", _flat(row))
    for row in history.epochs:
        _insert(connection, "epochs", row)


def _flat(point: dict[str, Any]) -> dict[str, Any]:
    return {**point, "evicted": json.dumps(point["evicted"])}


def _insert(connection: Connection, table: str, row: dict[str, Any]) -> int:
    names, marks = ", ".join(row), ", ".join(f":{name}" for name in row)
    return int(connection.execute(f"INSERT INTO {table} ({names}) VALUES ({marks})", row).lastrowid or 0)
