"""Figures of a cache, counted from its catalog in one reading transaction, and the state of its background pulls.

One process at a time pulls a source in the background. A row of the catalog decides which one.

::

    no row, or its holder is dead   -> the process that asks takes the row
    its holder lives                -> the process that asks waits, and asks again
    its pull failed                 -> the row keeps the error, for processes that wait and for ``stats``

While samples arrive, nothing is written for this. The progress of a pull follows from its job, its source and its
shards.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from cachetool.cache.catalog import Catalog, Connection, Row
from cachetool.cache.draws import SourceRow, positions_done, reopened, source_row
from cachetool.cache.history import History, history_of
from cachetool.cache.holders import Holder, dead_holders, is_ours
from cachetool.cache.layout import Layout
from cachetool.cache.usage import measure
from cachetool.cache.values import schema_of
from cachetool.core.causes import main_cause, pull_sentence, sentence
from cachetool.core.markup import Markup, element, joined
from cachetool.core.text import counted
from cachetool.core.units import format_size

__all__ = [
    "ALL_THERE",
    "FAILED",
    "PAUSED",
    "PullState",
    "STOPPED",
    "Stats",
    "collect",
    "failure_since",
    "leave",
    "note",
    "pull_state",
    "pull_states",
    "take_over",
]


FAILED, PAUSED, STOPPED, ALL_THERE = "failed", "waiting for space", "stopped", "all is in the cache"
_PAUSE = 2.0
"""Seconds after its last commit from which a pull that wants room counts as paused."""


@dataclass(frozen=True, slots=True)
class PullState:
    """The progress of the background pull of one source."""

    source: str
    """Id of the source."""
    url: str
    """The source, without user info and query."""
    dataset: str
    """Name of the dataset."""
    pid: int
    """The process that pulls, or pulled."""
    phase: str
    """``starting``, ``listing``, ``looking at samples``, ``pulling``, ``waiting for space`` (the cache is full, and
    every shard is being read or was not read yet), ``all is in the cache`` (nothing is left to fetch), ``retrying``,
    ``failed``, ``stopped``."""
    listed: int
    """Number of objects listed so far, in the phase ``listing``."""
    samples: int
    """Number of samples that this pull committed."""
    skipped: int
    """Number of draws of this pull that could not be used."""
    fetched: int
    """Bytes that came over the network for all committed samples of the source."""
    drawn: int
    """Number of units of the present pass that are done."""
    units: int
    """Number of units in a pass, of the parts of the source in this cache; 0 until the source is listed."""
    pass_number: int
    """Number of the pass, from 1."""
    used: int
    """Bytes that count against the cap."""
    max_size: int
    """The cap in bytes."""
    evicted: int
    """Number of shards evicted so far, for any reason."""
    seconds: float
    """Seconds since the pull began."""
    error: str | None
    """Why the pull failed or tries again; otherwise None."""

    @property
    def alive(self) -> bool:
        """True if a process pulls the source."""
        return self.phase not in (FAILED, STOPPED)

    def as_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return asdict(self)


def take_over(connection: Connection, source: str, *, url: str, dataset: str, holder: Holder) -> bool:
    """Become the process that pulls ``source``, unless another living process does. Return True on success.

    Call this inside a writing transaction after a recovery: all holders in the catalog are alive then.
    """
    holder.register(connection)
    row = connection.execute(
        "SELECT 1 FROM background p JOIN holders h ON h.id = p.holder WHERE p.source = ? AND p.holder != ?",
        (source, holder.id),
    ).fetchone()
    if row is not None:
        return False
    now = time.time()
    connection.execute(
        "INSERT OR REPLACE INTO background VALUES (?, ?, ?, ?, ?, 'starting', 0, NULL, ?, ?)",
        (source, holder.id, os.getpid(), url, dataset, now, now),
    )
    return True


def note(
    connection: Connection, source: str, holder: Holder, phase: str, *, listed: int = 0, error: str | None = None
) -> None:
    """Record the phase of this process's pull."""
    connection.execute(
        "UPDATE background SET phase = ?, listed = ?, error = ?, updated = ? WHERE source = ? AND holder = ?",
        (phase, listed, error, time.time(), source, holder.id),
    )


def leave(connection: Connection, source: str, holder: Holder, *, error: str | None = None) -> None:
    """End this process's background pull: delete the row, or keep the error that ended the pull."""
    if error is None:
        connection.execute("DELETE FROM background WHERE source = ? AND holder = ?", (source, holder.id))
    else:
        note(connection, source, holder, FAILED, error=error)


def failure_since(connection: Connection, source: str, since: float) -> str | None:
    """Return the error of a pull of ``source`` that failed after ``since`` (seconds since 1970), or None."""
    row = connection.execute(
        "SELECT error FROM background WHERE source = ? AND phase = ? AND updated > ?", (source, FAILED, since)
    ).fetchone()
    return None if row is None else str(row["error"])


def pull_state(connection: Connection, layout: Layout, source: str) -> PullState | None:
    """Return the state of the pull of ``source``; None when there was none, or it ended without an error."""
    row = connection.execute("SELECT * FROM background WHERE source = ?", (source,)).fetchone()
    if row is None:
        return None
    source_now = source_row(connection, source)
    fetched = connection.execute("SELECT fetched FROM sources WHERE id = ?", (source,)).fetchone()
    job = connection.execute(
        "SELECT id, committed, skipped, bytes_wanted FROM jobs WHERE source = ? AND holder = ?", (source, row["holder"])
    ).fetchone()
    phase = row["phase"]
    # A recovery has deleted the dead holder, but the row still says `pulling`.
    if phase != FAILED and not connection.execute("SELECT 1 FROM holders WHERE id = ?", (row["holder"],)).fetchone():
        phase = STOPPED
    elif job is not None and source_now is not None and _idle(connection, job["id"]):
        if source_now.complete and positions_done(connection, source_now) >= source_now.size:
            phase = ALL_THERE
        elif job["bytes_wanted"]:
            phase = PAUSED
    cap = connection.execute("SELECT max_size FROM cache").fetchone()[0]
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
        drawn=positions_done(connection, source_now) if source_now else 0,
        units=source_now.size if source_now else 0,
        pass_number=source_now.pass_number + 1 if source_now else 1,
        used=measure(connection, layout).total,
        max_size=int(cap),
        evicted=int(evicted),
        seconds=time.time() - row["started"],
        error=row["error"],
    )


def _idle(connection: Connection, job: str) -> bool:
    """Return True if no worker of a pull has a shard open now, nor had one a moment ago."""
    row = connection.execute(
        "SELECT count(*) FILTER (WHERE state = 'staging') AS open, max(created) AS last FROM shards WHERE job = ?",
        (job,),
    ).fetchone()
    # A worker has no shard open for a moment between two shards, so a short gap does not count.
    return not row["open"] and time.time() - (row["last"] or 0) > _PAUSE


def pull_states(connection: Connection, layout: Layout, *, dataset: str | None = None) -> list[PullState]:
    """Return the states of all background pulls, or of those into one dataset, oldest first."""
    rows = connection.execute("SELECT source, dataset FROM background ORDER BY started").fetchall()
    states = (pull_state(connection, layout, row["source"]) for row in rows if dataset in (None, row["dataset"]))
    return [state for state in states if state is not None]


@dataclass(frozen=True, slots=True)
class Stats:
    """The figures of a cache at one moment; bytes are those that count against the cap."""

    root: str
    """The cache folder."""
    version: int
    """The catalog's version."""
    max_size: int
    """The cap in bytes."""
    used: int
    """All charged bytes: shards, reservations, listings, folders, the catalog's allowance."""
    reserved: int
    """Upper bounds of the shards being written, part of ``used``."""
    listings: int
    """Bytes of listings and records of sources."""
    overhead: int
    """Bytes of the catalog, the history, folders and small files."""
    charged: dict[str, int]
    """Charged bytes by kind: the fields of :class:`cachetool.cache.usage.Usage`, whose sum is ``used``."""
    free_disk: int
    """Free bytes on the disk of the cache."""
    min_free: int
    """Bytes of the disk that pulls leave free."""
    shards: int
    """Number of ready and retiring shards."""
    samples: int
    """Number of their samples."""
    shard_bytes: int
    """Bytes of the ready and retiring shards, which ``ls`` lists."""
    retiring: int
    """Number of those shards that are in no new snapshot, and are deleted when their readers end."""
    retiring_bytes: int
    """Bytes of these retiring shards."""
    gone: int
    """Number of ready and retiring shards whose folder is missing, because somebody deleted it."""
    datasets: list[dict[str, Any]]
    """One row a dataset: name, schema, formats (shards, samples, bytes, retiring, retiring_bytes of each), shards,
    samples, bytes, payload, share (of the cap, a fraction, or None), epochs (that the shards served: fewest, most)."""
    sources: list[dict[str, Any]]
    """One row a source: url, dataset, units (in a pass, of the parts here), samples, drawn, skipped, fetched, served,
    reuse (served over fetched), coverage (share of the pass), pass (from 1), seed, listing (its digest), cut (number of
    parts), parts (those here)."""
    pulls: list[dict[str, Any]]
    """Background pulls that run or failed: the fields of :class:`cachetool.cache.stats.PullState`."""
    holders: list[dict[str, Any]]
    """Living processes that use the cache, without this one: pid, host, what, started."""
    leases: list[dict[str, Any]]
    """One row a lease: pid, what, run, epoch, version, dataset, taken."""
    trainers: list[dict[str, Any]]
    """One row a running training program, with the waits of its present or its last epoch: pid, what, dataset, epoch,
    running (the epoch has not ended), seconds, batches, waits, waited, longest (50, 95 and 99 % of the waits are
    shorter), causes (seconds by cause), cause (the main one, or None), sentence."""
    pulling: list[dict[str, Any]]
    """One row a pull that runs: pid, url, dataset, at (of these figures), samples, bytes, seconds, retries, causes
    (seconds of its workers by step), sentence."""
    missing: list[dict[str, Any]]
    """Draws whose samples were damaged and which the next pull fetches again: the fields of
    :class:`cachetool.cache.draws.Reopened`."""
    evicted: int
    """Number of shards evicted so far."""
    evictions: list[dict[str, Any]]
    """Evictions by dataset, reason and policy: dataset, reason (room, renewal, evict, moved, corrupt), policy, shards,
    samples, bytes."""
    fetched: int
    """Bytes that came over the network for committed samples."""
    served: int
    """Bytes of values delivered to epochs."""
    reuse: float | None
    """Bytes served over bytes fetched; None when nothing was fetched."""
    errors: list[dict[str, Any]]
    """The newest 5 errors of pulls and damaged shards: at, kind (error, corrupt), subject, text."""
    events: list[dict[str, Any]]
    """The newest 20 events: at, kind, subject, text."""

    def as_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return asdict(self)

    def _repr_html_(self) -> str:
        """Return a small table with bars, which notebooks show."""
        rows = [("cache", format_size(self.max_size), self.used, f"{counted(self.samples, 'sample')}")]
        rows += [(row["name"], "", row["bytes"], f"{counted(row['samples'], 'sample')}") for row in self.datasets]
        free = max(0, self.max_size - self.used)
        rows.append(("free", "", free, f"{counted(self.evicted, 'shard')} evicted so far"))
        cells = [
            element(
                "tr",
                element("td", name, style=_CELL),
                element("td", _bar(size / self.max_size if self.max_size else 0.0), style=_CELL),
                element("td", f"{format_size(size)}{f' of {cap}' if cap else ''}", style=f"{_CELL};text-align:right"),
                element("td", about, style=_CELL),
            )
            for name, cap, size, about in rows
        ]
        lines = [f"pid {row['pid']} pulls {row['url']}: {row['sentence']}" for row in self.pulling]
        lines += [f"pid {row['pid']} ({row['what']}): {row['sentence']}" for row in self.trainers]
        return joined([element("table", *cells), *(element("div", line) for line in lines)])


_CELL = "padding:0 12px 0 0"


def _bar(part: float) -> Markup:
    """Return a bar that is filled to this part."""
    whole = "display:inline-block;width:160px;height:0.7em;background:rgba(128,128,128,0.25)"
    filled = f"display:block;width:{100 * min(1.0, part):.1f}%;height:100%;background:#4878a8"
    return element("span", element("span", style=filled), style=whole)


_OF_DATASET = "(:dataset IS NULL OR dataset = :dataset)"
_EVENTS = f"SELECT at, kind, subject, text FROM events WHERE {_OF_DATASET}"
_COUNTED = ("shards", "samples", "bytes", "retiring", "retiring_bytes")


def collect(catalog: Catalog, layout: Layout, dataset: str | None) -> Stats:
    """Count everything in the cache, or one dataset.

    For one dataset, the shards, sources, pulls, leases, evictions and events are its own. The charged bytes, the disk
    and the holders are those of the cache.
    """
    with catalog.read() as connection:
        usage = measure(connection, layout)
        numbers = connection.execute("SELECT * FROM cache").fetchone()
        datasets = [
            _dataset(connection, row)
            for row in connection.execute("SELECT name, schema, share FROM datasets ORDER BY created")
            if dataset is None or row["name"] == dataset
        ]
        sources = [
            _source(connection, source, row["fetched"], row["served"])
            for row in connection.execute("SELECT id, fetched, served FROM sources ORDER BY created").fetchall()
            if (source := source_row(connection, row["id"])) is not None and dataset in (None, source.dataset)
        ]
        wanted = {"dataset": dataset}
        events = connection.execute(f"{_EVENTS} ORDER BY id DESC LIMIT 20", wanted).fetchall()
        errors = connection.execute(
            f"{_EVENTS} AND kind IN ('error', 'corrupt') ORDER BY id DESC LIMIT 5", wanted
        ).fetchall()
        evictions = connection.execute(
            f"SELECT * FROM evictions WHERE {_OF_DATASET} ORDER BY dataset, reason, policy", wanted
        ).fetchall()
        fetched = sum(entry["fetched"] for entry in sources)
        of_dataset = "SELECT coalesce(sum(served), 0) FROM datasets WHERE name = ?"
        served = numbers["served"] if dataset is None else connection.execute(of_dataset, (dataset,)).fetchone()[0]
        # A dead process stays in the tables until the next recovery; its rows are not shown.
        gone = dead_holders(connection, layout.holders)
        leases = [
            {name: row[name] for name in ("pid", "what", "run", "epoch", "version", "dataset", "taken")}
            for row in connection.execute(
                f"SELECT h.pid, h.what, l.* FROM leases l JOIN holders h ON h.id = l.holder WHERE {_OF_DATASET}"
                " ORDER BY l.taken",
                wanted,
            )
            if row["holder"] not in gone
        ]
        holders = [
            {name: row[name] for name in ("pid", "host", "what", "started")}
            for row in connection.execute("SELECT * FROM holders ORDER BY started")
            if row["id"] not in gone and not is_ours(row["id"])
        ]
        told = history_of(layout, dataset=dataset)
        return Stats(
            root=str(layout.root),
            version=numbers["version"],
            max_size=numbers["max_size"],
            used=usage.total,
            reserved=usage.reserved,
            listings=usage.listings,
            overhead=usage.overhead,
            charged=usage.rows(),
            free_disk=layout.free_disk(),
            min_free=numbers["min_free"],
            shards=sum(entry["shards"] for entry in datasets),
            samples=sum(entry["samples"] for entry in datasets),
            shard_bytes=sum(entry["bytes"] for entry in datasets),
            retiring=sum(kind["retiring"] for entry in datasets for kind in entry["formats"].values()),
            retiring_bytes=sum(kind["retiring_bytes"] for entry in datasets for kind in entry["formats"].values()),
            gone=_gone(connection, layout, dataset),
            datasets=datasets,
            sources=sources,
            pulls=[
                state.as_dict() for state in pull_states(connection, layout, dataset=dataset) if state.phase != STOPPED
            ],
            holders=holders,
            leases=leases,
            trainers=_trainers(leases, told),
            pulling=[
                {**row, "sentence": pull_sentence(row["causes"], row["bytes"], row["seconds"])}
                for row in told.pulls
                if dataset in (None, row["dataset"]) and any(row["pid"] == holder["pid"] for holder in holders)
            ],
            missing=[asdict(draws) for draws in reopened(connection) if dataset in (None, draws.dataset)],
            evicted=sum(row["shards"] for row in evictions),
            evictions=[dict(row) for row in evictions],
            fetched=fetched,
            served=served,
            reuse=served / fetched if fetched else None,
            errors=[dict(row) for row in errors],
            events=[dict(row) for row in events],
        )


def _trainers(leases: Sequence[Mapping[str, Any]], history: History) -> list[dict[str, Any]]:
    """Return a row for each process that reads and has told its waits."""
    newest = {row["pid"]: row for row in [*history.epochs, *history.running] if row["causes"] is not None}
    return [
        {"pid": pid, "what": what}
        | {name: newest[pid][name] for name in _OF_TRAINER}
        | {"running": any(row["pid"] == pid for row in history.running)}
        | {"cause": main_cause(causes, seconds), "sentence": sentence(causes, seconds)}
        for pid, what in {row["pid"]: row["what"] for row in leases}.items()
        if pid in newest
        for causes, seconds in ((newest[pid]["causes"], newest[pid]["seconds"] or 0.0),)
    ]


_OF_TRAINER = ("dataset", "epoch", "seconds", "batches", "waits", "waited", "longest", "causes")


def _gone(connection: Connection, layout: Layout, dataset: str | None) -> int:
    """Return the number of shards that have no folder."""
    rows = connection.execute(
        f"SELECT id FROM shards WHERE state IN ('ready', 'retiring') AND {_OF_DATASET}", {"dataset": dataset}
    )
    # One listing of the folder instead of one look per shard. No shard can be half deleted here:
    # during this transaction no process commits, and a ready or retiring shard is deleted only
    # after a commit.
    there: set[str] = set()
    with contextlib.suppress(FileNotFoundError), os.scandir(layout.shards) as entries:
        there.update(entry.name for entry in entries)
    return sum(row["id"] not in there for row in rows)


def _dataset(connection: Connection, row: Row) -> dict[str, Any]:
    groups = connection.execute(
        "SELECT format, count(*) AS shards, sum(samples) AS samples, sum(bytes) AS bytes, sum(payload) AS payload,"
        " sum(state = 'retiring') AS retiring, sum(bytes * (state = 'retiring')) AS retiring_bytes,"
        " min(epochs) AS least, max(epochs) AS most FROM shards"
        " WHERE dataset = ? AND state IN ('ready', 'retiring') GROUP BY format",
        (row["name"],),
    ).fetchall()
    schema = schema_of(row["schema"])
    return {
        "name": row["name"],
        "schema": {field.name: field.describe() for field in schema},
        "formats": {group["format"]: {name: group[name] for name in _COUNTED} for group in groups},
        "shards": sum(group["shards"] for group in groups),
        "samples": sum(group["samples"] for group in groups),
        "bytes": sum(group["bytes"] for group in groups),
        "payload": sum(group["payload"] for group in groups),
        "share": row["share"],
        "epochs": [min((g["least"] for g in groups), default=0), max((g["most"] for g in groups), default=0)],
    }


def _source(connection: Connection, source: SourceRow, fetched: int, served: int) -> dict[str, Any]:
    done = positions_done(connection, source)
    return {
        "url": source.url,
        "dataset": source.dataset,
        "units": source.size,
        "samples": source.samples,
        "drawn": done,
        "skipped": source.skipped,
        "fetched": fetched,
        "served": served,
        "reuse": served / fetched if fetched else None,
        "coverage": done / source.size if source.size else 1.0,
        "pass": source.pass_number + 1,
        "seed": source.seed,
        "listing": source.identity,
        "cut": source.cut,
        "parts": [part.number for part in source.parts],
    }


def newest_pass(row: Mapping[str, Any]) -> tuple[int, float, int]:
    """Return the units drawn, the coverage and the pass number to show people for a row of :attr:`Stats.sources`."""
    # A pass that has drawn nothing yet would show a coverage of 0, so the complete pass before it
    # is shown.
    if row["pass"] > 1 and not row["drawn"]:
        return row["units"], 1.0, row["pass"] - 1
    return row["drawn"], row["coverage"], row["pass"]
