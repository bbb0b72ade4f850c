"""History of a cache: at most 240 points of its whole life, and the newest 200 epochs.

::

    history.jsonl   first line: points   bytes charged, held, fetched, served and evicted at a moment
                                epochs   samples that one epoch of a training run read, and its waits for batches
                    one line for each epoch since then

Only the report reads this file. It is written after a transaction that commits, deletes or counts an epoch; if writing
fails, only a point or an epoch is lost. An epoch is appended, because writing the whole file takes 5 ms, as long as ten
batches. A point writes the file anew. Points come at most once a second, and less often the older the cache is. Points
also come where a pull begins or ends and where an eviction ends, so the pause between two pulls is shown. Beyond
:data:`MOST_POINTS` the point that is missed least is dropped: a year is told evenly and the last hour in detail.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import fcntl
import json
import math
import os
import stat
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
# A larger number would not fit into the 64 bits of any report.
_MOST = 2**63
_AGE_SHARE = 100_000
"""A point is due after one part in this many of the time since the first point."""
_NEAR = 1.0
"""Minimum seconds between two points."""

T = TypeVar("T")


class Delivered(NamedTuple):
    """Figures of an epoch for the process that trained, as its loader counted them."""

    seconds: float
    """Seconds from asking for the epoch to its last batch."""
    batches: int
    waits: int | None
    """Batches that were not ready when the trainer asked for them; None if the loader cannot tell."""
    waited: float | None
    """Seconds of these waits and of the wait for the epoch to begin."""
    samples: int | None = None
    """Samples read of the snapshot, if not all were read: one side of a split, or a selection."""
    causes: dict[str, float] | None = None
    """Seconds of the waits by cause, with the names of :data:`cachetool.core.causes.CAUSES`."""
    longest: Sequence[float] | None = None
    """Seconds of a wait that 50, 95 and 99 % of the waits do not exceed."""


@dataclass(frozen=True, slots=True)
class History:
    """Points and epochs of a cache, oldest first."""

    points: list[dict[str, Any]]
    """Rows with at (seconds since 1970), used, max_size, shards, samples, fetched, served, evicted (reason -> bytes so
    far)."""
    epochs: list[dict[str, Any]]
    """Rows with ended, dataset, run, epoch, shards, samples, bytes, seconds; from loaders that count them also batches,
    waits, waited, causes, longest. ``new`` counts the samples of shards that no epoch had read before, ``pid`` is the
    process that had the lease.
    """
    running: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    """Such rows of epochs that were under way when they were written, the newest of each process, without samples and
    bytes."""
    pulls: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    """The newest row of each pull: at, url, dataset, pid, samples, bytes, seconds, retries, causes.
    """


def present(connection: Connection, layout: Layout) -> dict[str, Any]:
    """Return a point of this moment, in the form of :attr:`History.points`."""
    numbers = connection.execute("SELECT max_size, served FROM cache").fetchone()
    # `+state` keeps SQLite from using the index of states, through which it would look up each row
    # by itself.
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
    """Return the point of this moment if one is due, else None.

    The caller is inside a transaction that writes something else. At an ``edge``, where the cache begins or ends to
    change, a point is always due.
    """
    # The file's time is that of the newest point (`write` sets it), so the file need not be read
    # here. Without a file a point is due.
    with contextlib.suppress(OSError):
        if not edge and abs(time.time() - os.lstat(layout.history).st_mtime) < _NEAR:
            return None
    return present(connection, layout)


def _add_point(points: list[dict[str, Any]], point: dict[str, Any], *, edge: bool) -> None:
    """Add a point if it is due. Of many points close to each other only the newest stays."""
    now = point["at"]
    if points:
        near = max(_NEAR, (points[-1]["at"] - points[0]["at"]) / _AGE_SHARE)
        if abs(now - points[-1]["at"]) < near:
            if not edge:
                return
            # Two edges close together: the new point replaces the last one while the point before
            # that is also recent. So the first point of the group stays and marks its begin.
            if len(points) > 1 and abs(now - points[-2]["at"]) < near:
                points.pop()
    points.append(point)
    # The clock may have been set back.
    points.sort(key=lambda row: float(row["at"]))
    if len(points) > MOST_POINTS:
        del points[least_missed([row["at"] for row in points], now)]


def least_missed(times: Sequence[float], now: float) -> int:
    """Return the index of the time to drop: not the first or last, and the one whose removal leaves the smallest gap
    for its age."""

    def gap(number: int) -> float:
        # Gaps may grow with the power 3/4 of the age: of points that are ten thousand times as old,
        # the gaps are a thousand times as wide. Of a week, the oldest day then keeps gaps of three
        # hours and the last hour gaps of a minute. Halving all points was tried without gain.
        return (times[number + 1] - times[number - 1]) / math.pow(max(1.0, now - times[number]), 0.75)

    return min(range(1, len(times) - 1), key=gap)


def epoch_row(connection: Connection, lease: int | None, delivered: Delivered | None, **read: Any) -> dict[str, Any]:
    """Return the row of an epoch that ended. ``read`` are the figures dataset, shards, samples, new, bytes.

    The seconds come from the loader, or else from the time since the snapshot was taken.
    """
    now = time.time()
    about = connection.execute(
        "SELECT run, epoch, taken, pid FROM leases JOIN holders ON holders.id = holder WHERE leases.id = ?", (lease,)
    ).fetchone()
    row: dict[str, Any] = {**dict.fromkeys(_EPOCH), "ended": now, **read}
    if about is not None:
        row |= {"run": about["run"], "epoch": about["epoch"], "seconds": max(0.0, now - about["taken"])}
        row |= {"pid": about["pid"]}
    if delivered is not None:
        row |= _told(delivered)
    return row


def write_running(layout: Layout, delivered: Delivered, *, dataset: str, pid: int, epoch: int) -> None:
    """Write the figures so far of an epoch that is under way. They are dropped if that fails."""
    about = {"ended": time.time(), "dataset": dataset, "pid": pid, "epoch": epoch, "running": True}
    write(layout, epoch={**dict.fromkeys(_EPOCH), **_told(delivered), **about, "shards": 0, "samples": 0, "bytes": 0})


def write_pull(layout: Layout, **about: Any) -> None:
    """Write the figures so far of a pull that runs. They are dropped if that fails.

    ``about``: url, dataset, pid, samples, bytes, seconds, retries, causes (seconds by step).
    """
    write(layout, epoch={"pull": {"at": time.time(), **about}})


def _told(delivered: Delivered) -> dict[str, Any]:
    """Return what a loader counted, but for the number of samples, which is a part of the row already."""
    return {name: value for name, value in delivered._asdict().items() if name != "samples"}


def edged(catalog: Catalog, layout: Layout, work: Callable[[Connection], T]) -> T:
    """Run ``work`` in one transaction with which the cache begins or ends to change, and then write a point of that
    moment."""
    with catalog.write() as connection:
        done = work(connection)
        point = due_point(connection, layout, edge=True)
    # After the transaction, so that a history that cannot be written never undoes the work.
    write(layout, point=point, edge=True)
    return done


def write(
    layout: Layout, *, point: dict[str, Any] | None = None, epoch: dict[str, Any] | None = None, edge: bool = False
) -> None:
    """Write a point and an epoch into the history. Both are dropped if the file cannot be written, or if another
    process writes it at this moment."""
    if point is None and epoch is None:
        return
    with contextlib.suppress(CacheToolError, OSError, ValueError):
        try:
            file = new_file(layout.history_aside)
        except FileExistsError:
            # A process that died while it wrote left the file. A living writer holds the lock, and
            # then the second attempt fails as well.
            remove_left(layout)
            file = new_file(layout.history_aside)
        with file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Between the creation and the lock of this file, another process may have taken it for
            # one left by a dead process and deleted it. A rename of the name would then fail or
            # move a file of that process.
            if not os.fstat(file.fileno()).st_nlink:
                return
            try:
                if point is None and _is_appended(layout, epoch):
                    layout.remove(layout.history_aside)
                    return
                history = _loaded(layout)
                if point is not None:
                    _add_point(history.points, point, edge=edge)
                history.epochs.extend([] if epoch is None else [epoch])
                file.write(_bytes(history))
                file.flush()
                newest = history.points[-1]["at"] if history.points else 0.0
                # `due_point` reads this time instead of the file.
                os.utime(file.fileno(), (newest, newest))
                # No fsync, because nothing is decided from the history: a bad file is deleted, and
                # only the report misses it.
                os.replace(layout.history_aside, layout.history)
            except BaseException:
                layout.remove(layout.history_aside)
                raise


_BEGIN = b'{"points":['
"""The first bytes of the file."""


def _is_appended(layout: Layout, epoch: dict[str, Any] | None) -> bool:
    """Append an epoch to the file, and return True, unless there is no such file, or it would grow too large.

    The caller holds the lock of those who write.
    """
    # The end of a line is written first: it ends a line that a full disk cut off.
    line = b"\n" + json.dumps(epoch, separators=(",", ":")).encode()
    with contextlib.suppress(OSError):
        fd = os.open(layout.history, os.O_RDWR | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            about = os.fstat(fd)
            # A file of other contents is replaced.
            fits = stat.S_ISREG(about.st_mode) and about.st_size <= HISTORY_LIMIT - len(line)
            if fits and os.pread(fd, len(_BEGIN), 0) == _BEGIN and os.write(fd, line) == len(line):
                # `due_point` reads the time of the newest point here.
                os.utime(fd, ns=(about.st_atime_ns, about.st_mtime_ns))
                return True
        finally:
            os.close(fd)
    return False


def remove_left(layout: Layout) -> None:
    """Delete the file that a process left when it died while writing. A living writer has the lock and keeps its
    file."""
    with contextlib.suppress(CacheToolError, OSError):
        try:
            fd = os.open(layout.history_aside, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as error:
            # A link, which cachetool never makes; it would block all writers for ever.
            if error.errno == errno.ELOOP:
                layout.remove(layout.history_aside)
            return
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Without a name of its own this file was renamed or deleted since it was opened, and
            # the name now belongs to another writer.
            if os.fstat(fd).st_nlink:
                layout.remove(layout.history_aside)
        finally:
            os.close(fd)


def _bytes(history: History) -> bytes:
    """Return the bytes of the file, with as many of the newest epochs as fit into its limit."""
    epochs = history.epochs[-MOST_EPOCHS:]
    while True:
        newest = [*history.running, *({"pull": pull} for pull in history.pulls[-_MOST_PULLS:])]
        value = {"points": history.points[-MOST_POINTS:], "epochs": [*epochs, *newest]}
        raw = json.dumps(value, separators=(",", ":")).encode()
        if len(raw) <= HISTORY_LIMIT:
            return raw
        if not epochs:
            raise ValueError("the points alone are too large")
        # A quarter at a time, because each round builds the whole text again.
        epochs = epochs[1 + len(epochs) // 4 :]


def _loaded(layout: Layout) -> History:
    """Return the history for an update; a bad file is deleted."""
    try:
        return _read(layout)
    except (OSError, ValueError):
        layout.remove(layout.history)
        return History([], [])


def history_of(layout: Layout, *, dataset: str | None = None) -> History:
    """Return all points of the cache, and the epochs of one dataset or of all. A bad file counts as empty."""
    try:
        history = _read(layout)
    except (OSError, ValueError):
        return History([], [])
    epochs, running = (
        [row for row in rows if dataset in (None, row["dataset"])] for rows in (history.epochs, history.running)
    )
    return History(history.points, epochs, running, history.pulls)


_POINT = ("at", "used", "max_size", "shards", "samples", "fetched", "served")
_EPOCH = (
    *("ended", "dataset", "run", "epoch", "shards", "samples", "bytes", "seconds"),
    *("batches", "waits", "waited"),
)
_MORE = ("new", "causes", "longest", "pid", "running")
_PULL = ("at", "pid", "samples", "bytes", "seconds", "retries")
_MOST_PULLS = 20
_CAUSES, _LONGEST = 32, 3
"""Most causes of a row, and how many waits :attr:`Delivered.longest` has."""


def _read(layout: Layout) -> History:
    """Return the rows of the file that make sense. Raises ``ValueError`` for a file that cachetool did not write, and
    ``OSError``."""
    try:
        raw = read_json(layout.history)
    except FileNotFoundError:
        return History([], [])
    # The cap charges this limit, so cachetool never writes more. A larger file comes from somebody
    # else.
    if len(raw) > HISTORY_LIMIT:
        raise ValueError(f"{layout.history} is larger than cachetool makes it")
    try:
        first, *lines = raw.split(b"\n")
        value = json.loads(first)
        points, epochs = list(value["points"]), [*value["epochs"], *map(_row, lines)]
    except (LookupError, TypeError, RecursionError) as error:
        raise ValueError(f"{layout.history} is no history") from error
    points = [
        {**{name: row[name] for name in _POINT}, "evicted": row["evicted"]} for row in points if _point_is_sound(row)
    ]
    pulls = {row["pull"]["pid"]: row["pull"] for row in epochs if _pull_is_sound(row)}
    epochs = [
        {
            **{name: row[name] for name in _EPOCH},
            **{name: row.get(name) for name in _MORE},
        }
        for row in epochs
        if _epoch_is_sound(row)
    ]
    # The newest row of a process tells whether an epoch of it is under way.
    # By time: a file that was written anew has the rows of running epochs last.
    in_time = sorted(epochs, key=lambda row: float(row["ended"]))
    newest = {row["pid"]: row for row in in_time if row["pid"] is not None}
    running = [row for row in newest.values() if row["running"]]
    ended = [{name: row[name] for name in row if name != "running"} for row in epochs if not row["running"]]
    return History(sorted(points, key=lambda row: float(row["at"])), ended[-MOST_EPOCHS:], running, [*pulls.values()])


def _row(line: bytes) -> object:
    """Return the row of a line; None for one that was not written whole."""
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None


def _point_is_sound(row: object) -> bool:
    if not isinstance(row, dict) or not all(_is_number(row.get(name)) for name in _POINT):
        return False
    evicted = row.get("evicted")
    return isinstance(evicted, dict) and all(_is_number(value) for value in evicted.values())


def _pull_is_sound(row: object) -> bool:
    pull = row.get("pull") if isinstance(row, dict) else None
    if not isinstance(pull, dict) or pull.keys() != {*_PULL, "url", "dataset", "causes"}:
        return False
    causes = pull["causes"]
    if not isinstance(causes, dict) or len(causes) > _CAUSES or not all(map(_is_number, causes.values())):
        return False
    return isinstance(pull["url"], str) and isinstance(pull["dataset"], str) and all(_is_number(pull[n]) for n in _PULL)


def _epoch_is_sound(row: object) -> bool:
    if not isinstance(row, dict) or not row.keys() >= set(_EPOCH) or row["ended"] is None:
        return False
    names = ("dataset", "run")
    numbers = [row[name] for name in _EPOCH if name not in names]
    causes, longest = row.get("causes"), row.get("longest")
    if causes is not None:
        if not isinstance(causes, dict) or len(causes) > _CAUSES:
            return False
        numbers += causes.values()
    if longest is not None:
        if not isinstance(longest, list) or len(longest) != _LONGEST:
            return False
        numbers += longest
    return all(isinstance(row[name], str | None) for name in names) and all(
        value is None or _is_number(value) for value in (*numbers, row.get("new"), row.get("pid"))
    )


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and 0 <= value < _MOST
