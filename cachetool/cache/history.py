"""What a cache was like over time: some hundred points of its whole life, and the newest epochs.

::

    history.json   points   what was charged, held, fetched, served and evicted by then
                   epochs   what one epoch of a training run read, and how often and how long it waited for batches

The file is for the report alone. It is written after a transaction that commits, deletes or counts an epoch, and where
that fails nothing is lost but a point. Points come at most once a second, more seldom the older the cache is, and where
a pull begins or ends or an eviction ends, so that the pause between two pulls is told as one. Of more than
:data:`MOST_POINTS` the one goes that is missed least: a year is told evenly and the last hour in detail.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import math
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

from cachetool.cache.catalog import Catalog, Connection
from cachetool.cache.layout import HISTORY_LIMIT, Layout
from cachetool.cache.usage import measure
from cachetool.core.errors import CacheToolError
from cachetool.proc.folders import new_file, read_json

__all__ = [
    "Delivered",
    "History",
    "due_point",
    "edged",
    "epoch_row",
    "history_of",
    "least_missed",
    "present",
    "write",
]

MOST_POINTS = 240
MOST_EPOCHS = 200
_MOST = 2**63  # a whole number that any report can show
_AGE_SHARE = 100_000
"""A point is due after this share of the time since the first one."""
_NEAR = 1.0
"""And after so many seconds at least."""

T = TypeVar("T")


class Delivered(NamedTuple):
    """How an epoch went for the process that trained, as its loader saw it."""

    seconds: float
    """From asking for the epoch to its last batch."""
    batches: int
    waits: int | None
    """Batches that were not ready when they were asked for; None where the loader cannot tell."""
    waited: float | None
    """Seconds of these waits, and of the one for the epoch to begin."""
    samples: int | None = None
    """Samples read of the snapshot, where these are not all: a side of a split, or a selection."""


@dataclass(frozen=True, slots=True)
class History:
    """What was written down, oldest first."""

    points: list[dict[str, Any]]
    """at, used, max_size, shards, samples, fetched, served, evicted (reason -> bytes so far)."""
    epochs: list[dict[str, Any]]
    """ended, dataset, run, epoch, shards, samples, bytes, seconds, and of loaders that tell: batches, waits, waited.
    Samples of shards that no epoch had read before are ``new``, None in rows of earlier versions."""


def present(connection: Connection, layout: Layout) -> dict[str, Any]:
    """What the cache is like now: a point, as :attr:`History.points` has them."""
    numbers = connection.execute("SELECT max_size, served FROM cache").fetchone()
    # `+state`: through the index of states each row would be looked up by itself.
    totals = connection.execute(
        "SELECT count(*) AS shards, coalesce(sum(samples), 0) AS samples FROM shards"
        " WHERE +state IN ('ready', 'retiring')"
    ).fetchone()
    return {
        "at": time.time(),
        "used": measure(connection, layout).total,
        "max_size": numbers["max_size"],
        **dict(totals),
        "fetched": connection.execute("SELECT coalesce(sum(fetched), 0) FROM sources").fetchone()[0],
        "served": numbers["served"],
        "evicted": dict(connection.execute("SELECT reason, sum(bytes) FROM evictions GROUP BY reason").fetchall()),
    }


def due_point(connection: Connection, layout: Layout, *, edge: bool = False) -> dict[str, Any] | None:
    """Return the point of this moment if one is due, else None. The caller is inside a transaction that writes
    something else. At an ``edge``, where the cache begins or ends to change, a point is always due."""
    with contextlib.suppress(OSError):  # its time is that of the newest point: the file need not be read for this
        if not edge and abs(time.time() - os.lstat(layout.history).st_mtime) < _NEAR:
            return None
    return present(connection, layout)


def _add_point(points: list[dict[str, Any]], point: dict[str, Any], *, edge: bool) -> None:
    """Add a point if it is due. Of many that follow close on each other only the newest stays: it takes the place of
    the last point while the one before that is as new."""
    now = point["at"]
    if points:
        near = max(_NEAR, (points[-1]["at"] - points[0]["at"]) / _AGE_SHARE)
        if abs(now - points[-1]["at"]) < near:
            if not edge:
                return
            if len(points) > 1 and abs(now - points[-2]["at"]) < near:
                points.pop()
    points.append(point)
    points.sort(key=lambda row: float(row["at"]))
    if len(points) > MOST_POINTS:
        del points[least_missed([row["at"] for row in points], now)]


def least_missed(times: Sequence[float], now: float) -> int:
    """Which of these times, in order, to leave out: not the first or last, and the one whose going leaves the smallest
    gap for its age. Gaps may grow with the power 3/4 of the age: where all is ten thousand times as old they are a
    thousand times as wide."""

    def gap(number: int) -> float:
        return (times[number + 1] - times[number - 1]) / math.pow(max(1.0, now - times[number]), 0.75)

    return min(range(1, len(times) - 1), key=gap)


def epoch_row(connection: Connection, lease: int | None, delivered: Delivered | None, **read: Any) -> dict[str, Any]:
    """An epoch that ended; ``read``: dataset, shards, samples, new, bytes. How long it took is known from the loader,
    else from when its snapshot was taken."""
    now = time.time()
    about = connection.execute("SELECT run, epoch, taken FROM leases WHERE id = ?", (lease,)).fetchone()
    row: dict[str, Any] = {**dict.fromkeys(_EPOCH), "ended": now, **read}
    if about is not None:
        row |= {"run": about["run"], "epoch": about["epoch"], "seconds": max(0.0, now - about["taken"])}
    if delivered is not None:  # the samples are counted among what was read
        row |= {name: value for name, value in delivered._asdict().items() if name != "samples"}
    return row


def edged(catalog: Catalog, layout: Layout, work: Callable[[Connection], T]) -> T:
    """One transaction for ``work``, with which the cache begins or ends to change, and then a point of that moment."""
    with catalog.write() as connection:
        done = work(connection)
        point = due_point(connection, layout, edge=True)
    write(layout, point=point, edge=True)
    return done


def write(
    layout: Layout, *, point: dict[str, Any] | None = None, epoch: dict[str, Any] | None = None, edge: bool = False
) -> None:
    """Write down a point and an epoch. Best effort: where the file cannot be written, or another process writes it at
    this moment, they are left out."""
    if point is None and epoch is None:
        return
    with contextlib.suppress(CacheToolError, OSError, ValueError):
        try:
            file = new_file(layout.history_aside)
        except FileExistsError:
            remove_left(layout)
            file = new_file(layout.history_aside)
        with file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not os.fstat(file.fileno()).st_nlink:  # taken for one that was left, before the lock was had
                return
            try:
                history = _loaded(layout)
                if point is not None:
                    _add_point(history.points, point, edge=edge)
                history.epochs.extend([] if epoch is None else [epoch])
                file.write(_bytes(history))
                file.flush()
                newest = history.points[-1]["at"] if history.points else 0.0
                os.utime(file.fileno(), (newest, newest))
                os.replace(layout.history_aside, layout.history)
            except BaseException:
                layout.remove(layout.history_aside)
                raise


def remove_left(layout: Layout) -> None:
    """Remove what a process left that died while it wrote: one that lives has the lock, and keeps it."""
    with contextlib.suppress(CacheToolError, OSError):
        try:
            fd = os.open(layout.history_aside, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as error:
            if error.errno == errno.ELOOP:
                layout.remove(layout.history_aside)
            return
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(fd).st_nlink:  # else it was removed, or renamed, and the name is another's
                layout.remove(layout.history_aside)
        finally:
            os.close(fd)


def _bytes(history: History) -> bytes:
    """The file's bytes, with as many of the newest epochs as it may hold."""
    epochs = history.epochs[-MOST_EPOCHS:]
    while True:
        value = {"points": history.points[-MOST_POINTS:], "epochs": epochs}
        raw = json.dumps(value, separators=(",", ":")).encode()
        if len(raw) <= HISTORY_LIMIT:
            return raw
        if not epochs:
            raise ValueError("the points alone are too large")
        epochs = epochs[1 + len(epochs) // 4 :]


def _loaded(layout: Layout) -> History:
    """The history, to be written again; a bad file is deleted."""
    try:
        return _read(layout)
    except (OSError, ValueError):
        layout.remove(layout.history)
        return History([], [])


def history_of(layout: Layout, *, dataset: str | None = None) -> History:
    """All points of the cache, and the epochs of one dataset or of all; nothing of a bad file."""
    try:
        history = _read(layout)
    except (OSError, ValueError):
        return History([], [])
    return History(history.points, [row for row in history.epochs if dataset in (None, row["dataset"])])


_POINT = ("at", "used", "max_size", "shards", "samples", "fetched", "served")
_EPOCH = (
    *("ended", "dataset", "run", "epoch", "shards", "samples", "bytes", "seconds"),
    *("batches", "waits", "waited"),
)


def _read(layout: Layout) -> History:
    """The rows of the file that make sense. Raises ``ValueError`` for what is none of ours, and ``OSError``."""
    try:
        raw = read_json(layout.history)
    except FileNotFoundError:
        return History([], [])
    if len(raw) > HISTORY_LIMIT:
        raise ValueError(f"{layout.history} is larger than cachetool makes it")
    try:
        value = json.loads(raw)
        points, epochs = list(value["points"]), list(value["epochs"])
    except (LookupError, TypeError, RecursionError) as error:
        raise ValueError(f"{layout.history} is no history") from error
    points = [
        {**{name: row[name] for name in _POINT}, "evicted": row["evicted"]} for row in points if _point_is_sound(row)
    ]
    epochs = [{**{name: row[name] for name in _EPOCH}, "new": row.get("new")} for row in epochs if _epoch_is_sound(row)]
    return History(sorted(points, key=lambda row: float(row["at"])), epochs)


def _point_is_sound(row: object) -> bool:
    if not isinstance(row, dict) or not all(_is_number(row.get(name)) for name in _POINT):
        return False
    evicted = row.get("evicted")
    return isinstance(evicted, dict) and all(_is_number(value) for value in evicted.values())


def _epoch_is_sound(row: object) -> bool:
    if not isinstance(row, dict) or not row.keys() >= set(_EPOCH) or row["ended"] is None:
        return False
    names = ("dataset", "run")
    numbers = [row[name] for name in _EPOCH if name not in names]
    return all(isinstance(row[name], str | None) for name in names) and all(
        value is None or _is_number(value) for value in (*numbers, row.get("new"))
    )


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and 0 <= value < _MOST
