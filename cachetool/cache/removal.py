"""Removal of shards: ready -> retiring -> trash -> deleted. Their bytes are free only when their files are deleted.

A retiring shard is in no new snapshot. It becomes trash when no living lease has a version below its ``until``. Leases
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
    """The result of an eviction, or with ``dry_run`` its plan."""

    plan: tuple[Victim, ...]
    """The chosen shards."""
    removed_shards: int
    """Number of shards deleted."""
    removed_samples: int
    """Number of samples in them."""
    freed: int
    """Bytes that were freed on the disk."""
    used: int
    """Bytes that count against the cap afterwards."""
    max_size: int
    """The target in bytes."""
    retiring_shards: int = 0
    """Number of shards that are in no new snapshot and are deleted when their leases end; with ``dry_run`` those that
    would be."""
    retiring_bytes: int = 0
    """Bytes of these shards."""
    blocked: tuple[str, ...] = ()
    """The processes that lease them, one line each."""
    unreached: str = ""
    """With ``dry_run``: why the target would not be reached, which an eviction raises; otherwise empty."""

    def as_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
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
    """Return all ready shards, or with ``seen`` only those that some snapshot contained."""
    # A pull without an end may evict only shards that were read. Otherwise it fetches for ever
    # while nobody trains.
    rows = connection.execute(
        "SELECT id, dataset, samples, bytes, seq, epochs, used, job FROM shards WHERE state = 'ready'"
        " AND (NOT ? OR since <= (SELECT seen FROM cache))",
        (seen,),
    )
    return [Candidate(*row) for row in rows]


def retire(
    connection: Connection, chosen: Sequence[str | Victim], *, reason: str, policy: str, job: str | None = None
) -> int:
    """Retire ready shards, so that no new snapshot contains them, and count them as evicted. Call this inside a
    transaction.

    ``reason`` is ``room`` (for a writer), ``renewal``, ``evict`` (a command), ``moved`` (its part was released) or
    ``corrupt``. The eviction is counted for the pull ``job`` if it frees space for one. Returns the new version of the
    catalog, or 0 if no shard was chosen.
    """
    # One version for all victims: a snapshot contains all of them or none.
    version = bump(connection) if chosen else 0
    now = time.time()
    for each in chosen:
        shard, why = (each.id, each.reason) if isinstance(each, Victim) else (each, policy)
        row = connection.execute(
            "UPDATE shards SET state = 'retiring', until = ? WHERE id = ? AND state = 'ready'"
            " RETURNING dataset, samples, bytes",
            (version, shard),
        ).fetchone()
        # Another transaction retired this shard since it was chosen. Without this check it would be
        # counted twice.
        if row is None:
            continue
        event(connection, now, "evict", shard, f"{reason}, {why}")
        connection.execute(
            "INSERT INTO evictions VALUES (?, ?, ?, 1, ?, ?) ON CONFLICT (dataset, reason, policy) DO UPDATE SET"
            " shards = shards + 1, samples = samples + excluded.samples, bytes = bytes + excluded.bytes",
            (row["dataset"], reason, policy, row["samples"], row["bytes"]),
        )
        # In the row of the pull, because the event log is shared and keeps 1,000 entries: two pulls
        # at once each reported the evictions of both.
        connection.execute("UPDATE jobs SET evicted = evicted + 1 WHERE id = ?", (job,))
        connection.execute("UPDATE cache SET moves = moves + 1")
    return version


# Recovery deletes the rows of dead holders first, so these conditions then mean "its process is
# dead".
_UNHELD = "holder NOT IN (SELECT id FROM holders)"
_ORPHANED = f"state IN ('staging', 'trash') AND {_UNHELD}"
_UNREAD = (
    "state = 'retiring' AND NOT EXISTS"
    " (SELECT 1 FROM leases WHERE leases.version < shards.until AND leases.version >= shards.since"
    " AND leases.dataset = shards.dataset)"
)


def sweep(connection: Connection, holder: Holder) -> list[Id]:
    """Turn retiring shards that no lease needs into trash of this process; return their ids."""
    # Before the trash gets this holder's id. Trash whose holder is not in the catalog would be
    # taken over by another process.
    holder.register(connection)
    rows = connection.execute(
        f"UPDATE shards SET state = 'trash', holder = ? WHERE {_UNREAD} RETURNING id", (holder.id,)
    )
    return [Id(row["id"]) for row in rows]


def sweep_all(connection: Connection, holder: Holder) -> list[Id]:
    """Do :func:`sweep`, and return all trash of this process, including shards that it could not delete before."""
    sweep(connection, holder)
    rows = connection.execute("SELECT id FROM shards WHERE state = 'trash' AND holder = ?", (holder.id,))
    return [Id(row["id"]) for row in rows]


def delete_trash(catalog: Catalog, layout: Layout, ids: Sequence[Id], *, edge: bool = False) -> tuple[int, int, int]:
    """Delete the files of trash, then free its bytes. Return the numbers of shards, samples and bytes that were
    deleted.

    With ``edge`` the history gets a point, because no deletion may follow for long. If the process is killed in the
    middle, the rows stay ``trash`` and the next recovery continues. Raises :class:`OSError` for files that cannot be
    deleted, after all others are deleted.
    """
    if not ids:
        return 0, 0, 0
    with catalog.write() as connection:
        # Before the files are deleted: the newest record of each source must survive its shard.
        keep_newest(connection, layout, ids)
    gone: list[Id] = []
    failed: OSError | None = None
    for shard in ids:
        try:
            # shard.json is deleted first. A folder without it is no shard for a rebuild, so a
            # deletion that is killed halfway can never bring back half a shard.
            layout.remove(layout.shard(shard), first=SHARD_FILE)
            gone.append(shard)
        except OSError as error:
            # FUSE and NFS only rename a deleted file while a program has it open, so the folder
            # cannot be removed yet. The next recovery removes it.
            if not holds_open_files(layout.shards / shard):
                failed = failed or error
    # Somebody deleted the folder `shards`, so no file of these shards is left.
    with contextlib.suppress(FileNotFoundError):
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
        # Only after the fsync: bytes of files that could come back after a power cut must stay
        # charged.
        samples, freed = forget(connection)
        point = history.due_point(connection, layout, edge=edge)
    history.write(layout, point=point, edge=edge)
    if failed is not None:
        raise failed
    return len(gone), samples, freed


@dataclass(frozen=True, slots=True)
class Lease:
    """A lease: the dataset and version that a process reads."""

    dataset: str
    version: int
    who: str
    """The holder in words: pid, host, program, version, and the time of the lease."""

    def holds(self, shard: Row) -> bool:
        """Return True if the lease sees a shard, given as a row of ``shards``."""
        until = shard["until"]
        visible = shard["since"] <= self.version and (until is None or self.version < until)
        return bool(shard["dataset"] == self.dataset and visible)


def leases(connection: Connection) -> list[Lease]:
    """Return all leases, oldest first."""
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
    """Return the holders of leases and what they read, one line a lease."""
    return list(dict.fromkeys(lease.who for lease in leases(connection)))


@dataclass(frozen=True, slots=True)
class LeasedShards:
    """Shards that cannot be deleted because of leases."""

    sizes: tuple[int, ...]
    """Bytes of each shard."""
    who: tuple[str, ...]
    """The holders of the leases, one line each."""


def held_back(connection: Connection, *, also: Collection[str] = ()) -> LeasedShards:
    """Return the retiring shards, and those of the ready shards ``also``, that leases hold, with the holders of these
    leases."""
    rows = connection.execute(
        "SELECT id, dataset, bytes, since, until, state FROM shards WHERE state IN ('ready', 'retiring')"
    ).fetchall()
    going = [row for row in rows if row["state"] == "retiring" or row["id"] in also]
    readers = leases(connection)
    leased = [row for row in going if any(lease.holds(row) for lease in readers)]
    who = dict.fromkeys(lease.who for lease in readers if any(lease.holds(row) for row in leased))
    return LeasedShards(tuple(row["bytes"] for row in leased), tuple(who))


def recover(catalog: Catalog, layout: Layout, holder: Callable[[], Holder], *, patience: float = PATIENCE) -> int:
    """Finish the work that dead processes left: end leases, open claims, delete staging and trash. Return how many
    died.

    Only ids of holders whose lock is free are touched, under the cache's lock. Nothing is written when nothing is left
    to finish. Waits up to ``patience`` seconds for its turn.
    """
    with catalog.write(patience=patience) as connection:
        _make_folders(connection, layout)
        dead = dead_holders(connection, layout.holders)
        # After `dead_holders`, which needs the lock files to tell who lives.
        remove_stale_locks(connection, layout.holders)
        # On a read-only disk even a needless unlink is an error, so the file is looked for first.
        if layout.marker_aside.exists():
            layout.remove(layout.marker_aside)
        # A rebuild that was killed left these files. A rebuild in progress holds the lock that this
        # transaction has, so its files are not deleted here.
        for aside in layout.catalog_asides:
            if aside.exists():
                layout.remove(aside)
        if os.path.lexists(layout.history_aside):
            history.remove_left(layout)
        if (
            not dead
            and not connection.execute(f"SELECT 1 FROM shards WHERE {_UNREAD} OR {_ORPHANED} LIMIT 1").fetchone()
        ):
            return 0
        # Made only now, so that a command which only reads writes nothing to the disk when no
        # process died.
        own = holder()
        own.register(connection)
        # The row is deleted before all steps below, which find the property of dead processes by
        # "holder not in holders".
        for dead_id in dead:
            connection.execute("DELETE FROM holders WHERE id = ?", (dead_id,))
            layout.remove(layout.lock(dead_id))
        if dead:
            take_back_records(connection, layout)
        connection.execute(f"DELETE FROM leases WHERE {_UNHELD}")
        connection.execute(f"UPDATE claims SET holder = NULL, job = NULL WHERE {_UNHELD}")
        connection.execute(f"DELETE FROM jobs WHERE {_UNHELD}")
        # In this same transaction the trash gets this process as its holder. So two recoveries
        # never share work, and if this process dies now, its own trash is recovered in the same
        # way.
        connection.execute(f"UPDATE shards SET state = 'trash', holder = ? WHERE {_ORPHANED}", (own.id,))
        remove_unfinished(layout, dead)
        trash = sweep_all(connection, own)
    delete_trash(catalog, layout, trash)
    return len(dead)


def _make_folders(connection: Connection, layout: Layout) -> None:
    """Make the folders ``holders``, ``listings`` and ``shards`` again if somebody deleted them.

    Raises :class:`CatalogError` for a deleted ``shards`` that held data.
    """
    for folder in layout.missing():
        if folder == layout.shards:
            row = connection.execute(
                "SELECT count(*) AS shards, coalesce(sum(samples), 0) AS samples FROM shards"
                " WHERE state IN ('ready', 'retiring')"
            ).fetchone()
            # An empty folder in the place of a full one would look like a healthy cache.
            if row["shards"]:
                raise CatalogError(
                    f"{folder} was deleted, with {row['shards']} shards of {row['samples']} samples;"
                    f" run: cachetool verify --repair --cache {layout.root}"
                )
        folder.mkdir(mode=0o700, exist_ok=True)


def sign_out(catalog: Catalog, layout: Layout, holder: Holder) -> None:
    """Return everything that this process holds, and delete it from the catalog."""
    with catalog.write() as connection:
        connection.execute("DELETE FROM leases WHERE holder = ?", (holder.id,))
        connection.execute("UPDATE claims SET holder = NULL, job = NULL WHERE holder = ?", (holder.id,))
        connection.execute("DELETE FROM jobs WHERE holder = ?", (holder.id,))
        trash = sweep(connection, holder)
    delete_trash(catalog, layout, trash)
    with catalog.write() as connection:
        # The row stays while files could not be deleted. The next process then finds this holder
        # dead and deletes the files.
        connection.execute(
            "DELETE FROM holders WHERE id = ? AND NOT EXISTS (SELECT 1 FROM shards WHERE holder = ?)", (holder.id,) * 2
        )
