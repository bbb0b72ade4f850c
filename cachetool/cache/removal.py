"""How shards leave: ready -> retiring -> trash -> gone, and their bytes come back only when their files are gone.

A retiring shard is in no new snapshot; it becomes trash when no live lease has a version below its ``until``. Leases
and these steps are transactions of one database, so they cannot interleave.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

from cachetool.cache import history
from cachetool.cache.catalog import Catalog, Connection, Row, bump, event
from cachetool.cache.holders import Holder, dead_holders, remove_stale_locks
from cachetool.cache.layout import SHARD_FILE, Layout
from cachetool.cache.listings import remove_unfinished
from cachetool.cache.policies import Candidate, Victim
from cachetool.cache.records import keep_newest, take_back_records
from cachetool.cache.transaction_lock import PATIENCE
from cachetool.core.errors import CatalogError
from cachetool.core.names import Id
from cachetool.proc.disk import holds_open_files
from cachetool.proc.folders import fsync_folder

__all__ = [
    "Lease",
    "LeasedShards",
    "Removal",
    "candidates",
    "delete_trash",
    "held_back",
    "leaseholders",
    "leases",
    "recover",
    "retire",
    "sign_out",
    "sweep",
    "sweep_all",
]


@dataclass(frozen=True, slots=True)
class Removal:
    """What an eviction did, or with ``dry_run`` would do."""

    plan: tuple[Victim, ...]
    """The shards chosen."""
    removed_shards: int
    removed_samples: int
    freed: int
    """Bytes that are on the disk no more."""
    used: int
    """Bytes charged afterwards."""
    max_size: int
    """The target."""
    retiring_shards: int = 0
    """Shards that are in no new snapshot and go when the leases end that still hold them, whenever they were chosen;
    with ``dry_run`` those that would be."""
    retiring_bytes: int = 0
    blocked: tuple[str, ...] = ()
    """Who holds them, a line each."""
    unreached: str = ""
    """With ``dry_run``: why the target would not be reached, which an eviction raises; empty when it would be."""

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "plan": [victim.as_dict() for victim in self.plan],
            "removed_shards": self.removed_shards,
            "removed_samples": self.removed_samples,
            "freed": self.freed,
            "used": self.used,
            "max_size": self.max_size,
            "retiring_shards": self.retiring_shards,
            "retiring_bytes": self.retiring_bytes,
            "blocked": list(self.blocked),
            "unreached": self.unreached,
        }


def candidates(connection: Connection, *, seen: bool = False) -> list[Candidate]:
    """All ready shards, or only those that some snapshot contained: a pull without an end must not throw away what
    nobody has read, or it would fetch for ever while nobody trains."""
    rows = connection.execute(
        "SELECT id, dataset, samples, bytes, seq, epochs, used, job FROM shards WHERE state = 'ready'"
        " AND (NOT ? OR since <= (SELECT seen FROM cache))",
        (seen,),
    )
    return [Candidate(*row) for row in rows]


def retire(
    connection: Connection, chosen: Sequence[str | Victim], *, reason: str, policy: str, job: str | None = None
) -> int:
    """Take ready shards out of every snapshot to come, and count them as evicted, for the pull ``job`` if they go for
    one; inside a transaction.

    ``reason`` is ``room`` (for a writer), ``renewal``, ``evict`` (asked for), ``moved`` (with its part) or ``corrupt``.
    Raises the version once, and gives it.
    """
    version = bump(connection) if chosen else 0
    now = time.time()
    for each in chosen:
        shard, why = (each.id, each.reason) if isinstance(each, Victim) else (each, policy)
        row = connection.execute(
            "UPDATE shards SET state = 'retiring', until = ? WHERE id = ? AND state = 'ready'"
            " RETURNING dataset, samples, bytes",
            (version, shard),
        ).fetchone()
        if row is None:
            continue
        event(connection, now, "evict", shard, f"{reason}, {why}")
        connection.execute(
            "INSERT INTO evictions VALUES (?, ?, ?, 1, ?, ?) ON CONFLICT (dataset, reason, policy) DO UPDATE SET"
            " shards = shards + 1, samples = samples + excluded.samples, bytes = bytes + excluded.bytes",
            (row["dataset"], reason, policy, row["samples"], row["bytes"]),
        )
        connection.execute("UPDATE jobs SET evicted = evicted + 1 WHERE id = ?", (job,))
        connection.execute("UPDATE cache SET moves = moves + 1")
    return version


_UNHELD = "holder NOT IN (SELECT id FROM holders)"
_ORPHANED = f"state IN ('staging', 'trash') AND {_UNHELD}"
_UNREAD = (
    "state = 'retiring' AND NOT EXISTS"
    " (SELECT 1 FROM leases WHERE leases.version < shards.until AND leases.version >= shards.since"
    " AND leases.dataset = shards.dataset)"
)


def sweep(connection: Connection, holder: Holder) -> list[Id]:
    """Turn retiring shards that nobody reads any more into this process's trash; gives their ids."""
    holder.register(connection)
    rows = connection.execute(
        f"UPDATE shards SET state = 'trash', holder = ? WHERE {_UNREAD} RETURNING id", (holder.id,)
    )
    return [Id(row["id"]) for row in rows]


def sweep_all(connection: Connection, holder: Holder) -> list[Id]:
    """:func:`sweep`; gives all trash of this process, also what it could not delete before."""
    sweep(connection, holder)
    rows = connection.execute("SELECT id FROM shards WHERE state = 'trash' AND holder = ?", (holder.id,))
    return [Id(row["id"]) for row in rows]


def delete_trash(catalog: Catalog, layout: Layout, ids: Sequence[Id], *, edge: bool = False) -> tuple[int, int, int]:
    """Unlink the files of trash, ``shard.json`` first, then give the bytes back: shards, samples and bytes removed.
    ``edge``: for the history, what is deleted may be the last for long.

    Killed in the middle, the rows stay ``trash`` and the next recovery goes on. Raises :class:`OSError` for files that
    cannot be deleted, once all others are.
    """
    if not ids:
        return 0, 0, 0
    with catalog.write() as connection:
        keep_newest(connection, layout, ids)
    gone: list[Id] = []
    failed: OSError | None = None
    for shard in ids:
        try:
            layout.remove(layout.shard(shard), first=SHARD_FILE)
            gone.append(shard)
        except OSError as error:
            if not holds_open_files(layout.shards / shard):  # else the next recovery deletes the folder
                failed = failed or error
    with contextlib.suppress(FileNotFoundError):  # somebody deleted the folder: nothing of them is left
        fsync_folder(layout.shards)

    def forget(connection: Connection) -> tuple[int, int]:
        samples = freed = 0
        for shard in gone:
            row = connection.execute(
                "DELETE FROM shards WHERE id = ? AND state = 'trash' RETURNING samples, bytes", (shard,)
            ).fetchone()
            if row is not None:
                samples += int(row["samples"] or 0)
                freed += int(row["bytes"])
        return samples, freed

    with catalog.write() as connection:
        samples, freed = forget(connection)
        point = history.due_point(connection, layout, edge=edge)
    history.write(layout, point=point, edge=edge)
    if failed is not None:
        raise failed
    return len(gone), samples, freed


@dataclass(frozen=True, slots=True)
class Lease:
    """Who reads what."""

    dataset: str
    version: int
    who: str
    """In words: pid, host, program, version, since when."""

    def holds(self, shard: Row) -> bool:
        """Whether a row of ``shards`` is visible to it."""
        until = shard["until"]
        visible = shard["since"] <= self.version and (until is None or self.version < until)
        return bool(shard["dataset"] == self.dataset and visible)


def leases(connection: Connection) -> list[Lease]:
    """All leases, oldest first."""
    rows = connection.execute(
        "SELECT h.pid, h.host, h.what, l.version, l.taken, l.dataset FROM leases l JOIN holders h ON h.id = l.holder"
        " ORDER BY l.taken"
    )
    return [
        Lease(
            row["dataset"],
            row["version"],
            f"pid {row['pid']} on {row['host']} ({row['what']}) reads {row['dataset']} at version {row['version']}"
            f" since {time.strftime('%H:%M:%S', time.localtime(row['taken']))}",
        )
        for row in rows
    ]


def leaseholders(connection: Connection) -> list[str]:
    """Who reads what, one line a lease."""
    return list(dict.fromkeys(lease.who for lease in leases(connection)))


@dataclass(frozen=True, slots=True)
class LeasedShards:
    """Shards that leases keep from going."""

    sizes: tuple[int, ...]
    who: tuple[str, ...]


def held_back(connection: Connection, *, also: Collection[str] = ()) -> LeasedShards:
    """The retiring shards, and of the ready ones ``also``, that somebody reads, and who does."""
    rows = connection.execute(
        "SELECT id, dataset, bytes, since, until, state FROM shards WHERE state IN ('ready', 'retiring')"
    ).fetchall()
    going = [row for row in rows if row["state"] == "retiring" or row["id"] in also]
    readers = leases(connection)
    leased = [row for row in going if any(lease.holds(row) for lease in readers)]
    who = dict.fromkeys(lease.who for lease in readers if any(lease.holds(row) for row in leased))
    return LeasedShards(tuple(row["bytes"] for row in leased), tuple(who))


def recover(catalog: Catalog, layout: Layout, holder: Callable[[], Holder], *, patience: float = PATIENCE) -> int:
    """Finish what dead processes left: leases freed, claims opened, staging and trash deleted. Gives how many died.

    Touches only ids of holders whose lock is free, under the cache's lock. What must be deleted becomes this process's
    own trash in the same transaction, so that two recoveries never share work and a crash here is recovered like any.
    Writes nothing when there is nothing to finish. Waits so many seconds for its turn.
    """
    with catalog.write(patience=patience) as connection:
        _make_folders(connection, layout)
        dead = dead_holders(connection, layout.holders)
        remove_stale_locks(connection, layout.holders)
        if layout.marker_aside.exists():  # on a read-only disk even a needless unlink is an error
            layout.remove(layout.marker_aside)
        for aside in layout.catalog_asides:  # of a rebuild that was cut off: one that goes on has this lock
            if aside.exists():
                layout.remove(aside)
        if os.path.lexists(layout.history_aside):
            history.remove_left(layout)
        if (
            not dead
            and not connection.execute(f"SELECT 1 FROM shards WHERE {_UNREAD} OR {_ORPHANED} LIMIT 1").fetchone()
        ):
            return 0
        own = holder()
        own.register(connection)
        for dead_id in dead:
            connection.execute("DELETE FROM holders WHERE id = ?", (dead_id,))
            layout.remove(layout.lock(dead_id))
        if dead:
            take_back_records(connection, layout)
        connection.execute(f"DELETE FROM leases WHERE {_UNHELD}")
        connection.execute(f"UPDATE claims SET holder = NULL, job = NULL WHERE {_UNHELD}")
        connection.execute(f"DELETE FROM jobs WHERE {_UNHELD}")
        connection.execute(f"UPDATE shards SET state = 'trash', holder = ? WHERE {_ORPHANED}", (own.id,))
        remove_unfinished(layout, dead)
        trash = sweep_all(connection, own)
    delete_trash(catalog, layout, trash)
    return len(dead)


def _make_folders(connection: Connection, layout: Layout) -> None:
    """Make a folder again that somebody deleted, unless data was in it. Raises :class:`CatalogError` then: an empty one
    in its place would look like a cache that is well."""
    for folder in layout.missing():
        if folder == layout.shards:
            row = connection.execute(
                "SELECT count(*) AS shards, coalesce(sum(samples), 0) AS samples FROM shards"
                " WHERE state IN ('ready', 'retiring')"
            ).fetchone()
            if row["shards"]:
                raise CatalogError(
                    f"{folder} is gone, and with it {row['shards']} shards of {row['samples']} samples;"
                    f" run: cachetool verify --repair --cache {layout.root}"
                )
        folder.mkdir(mode=0o700, exist_ok=True)


def sign_out(catalog: Catalog, layout: Layout, holder: Holder) -> None:
    """Give back all that this process holds, and take it out of the catalog."""
    with catalog.write() as connection:
        connection.execute("DELETE FROM leases WHERE holder = ?", (holder.id,))
        connection.execute("UPDATE claims SET holder = NULL, job = NULL WHERE holder = ?", (holder.id,))
        connection.execute("DELETE FROM jobs WHERE holder = ?", (holder.id,))
        trash = sweep(connection, holder)
    delete_trash(catalog, layout, trash)
    with catalog.write() as connection:
        # With files that could not be deleted it stays, for the next process to find it dead and try again.
        connection.execute(
            "DELETE FROM holders WHERE id = ? AND NOT EXISTS (SELECT 1 FROM shards WHERE holder = ?)", (holder.id,) * 2
        )
