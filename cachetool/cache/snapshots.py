"""What one epoch trains on: the shards visible at one version, leased until they are let go.

A shard is visible at version v when it was committed at or before v and not yet retiring at v. A lease is one row
(holder, version): nothing that is visible at a leased version is deleted. It ends with :meth:`Snapshot.release`, or
with its process, whichever is first.
"""

from __future__ import annotations

import contextlib
import functools
import operator
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from cachetool.cache import history
from cachetool.cache.catalog import Catalog, Connection, Row
from cachetool.cache.history import Delivered
from cachetool.cache.holders import Holder
from cachetool.cache.layout import Layout
from cachetool.cache.removal import delete_trash, sweep
from cachetool.cache.renewal import top_up
from cachetool.cache.values import schema_of
from cachetool.core.errors import CacheToolError, CapacityError
from cachetool.core.names import Id
from cachetool.core.schema import Schema

__all__ = ["Shard", "Snapshot", "take", "visible"]


@dataclass(frozen=True, slots=True)
class Shard:
    """One committed shard."""

    folder: Path
    """Where the folders of all shards are: a snapshot of twenty thousand makes one path, not as many."""
    schema: Schema
    id: Id
    dataset: str
    format: str
    samples: int
    bytes: int
    """On disk, as charged against the cap."""
    payload: int
    """Bytes of the values."""
    since: int
    """The version that made it visible."""
    state: str
    """``ready`` or ``retiring``."""
    created: float
    """Seconds since 1970."""
    epochs: int
    """How many epochs it served."""
    content: str
    """Content digest."""
    digest: str
    """File digest."""

    @property
    def path(self) -> Path:
        """Its folder."""
        return self.folder / self.id

    @property
    def data(self) -> Path:
        """Its data file, or for Zarr its data folder."""
        path = self.path
        for entry in os.scandir(path):
            if entry.name.startswith("data."):
                return path / entry.name
        return path / "data"


_COLUMNS = "id, dataset, format, samples, bytes, payload, since, state, created, epochs, content, digest"
"""Of a row, in the order of the fields of :class:`Shard`."""
_NAMES = _COLUMNS.split(", ")


def visible(
    connection: Connection, layout: Layout, dataset: str | None, version: int | None, *, retiring: bool = False
) -> list[Shard]:
    """Shards visible at ``version`` (None: now) of one dataset or all, oldest first; ``retiring``: and those that are
    visible to older versions alone."""
    schemas = {row["name"]: row["schema"] for row in connection.execute("SELECT name, schema FROM datasets")}
    parsed = {name: schema_of(text) for name, text in schemas.items()}
    rows = _rows(connection, dataset, version, retiring=retiring)
    return [Shard(layout.shards, parsed[row["dataset"]], Id(row["id"]), *row[1:]) for row in rows]


def _rows(connection: Connection, dataset: str | None, version: int | None, *, retiring: bool = False) -> list[Row]:
    query = f"SELECT {_COLUMNS} FROM shards WHERE state IN ('ready', 'retiring')"
    values: list[object] = []
    if version is None:
        query += "" if retiring else " AND state = 'ready'"
    else:
        query += " AND since <= ? AND (until IS NULL OR until > ?)"
        values += [version, version]
    if dataset is not None:
        query += " AND dataset = ?"
        values.append(dataset)
    return connection.execute(query + " ORDER BY seq", values).fetchall()


@dataclass(frozen=True, slots=True)
class _Lease:
    """A lease as :func:`take` wrote it, and what the catalog said then."""

    id: int
    version: int
    newest: int
    """The version of the cache at that moment."""
    stamp: int | None
    """With the version, what tells its shards from those of any other; None where nothing does."""
    seen: int | None
    """The newest version that a snapshot had contained before; None where this one shows nothing beyond it."""
    in_parts: bool
    """True when this cache draws some of the parts of a source of the dataset, and other caches the others."""


class Snapshot:
    """A leased version of one dataset; a context manager. In a forked child it can be read but not released."""

    def __init__(
        self, catalog: Catalog, layout: Layout, holder: Holder, lease: _Lease, *, dataset: str, schema: Schema,
        rows: Sequence[Row] | None,
    ) -> None:  # fmt: skip
        self.version = lease.version
        self.newest = lease.newest
        """The version of the cache when it was taken: beyond its own where the newest shards were left for the next."""
        self.dataset = dataset
        self.schema = schema
        self.in_parts = lease.in_parts
        """True when other caches draw other parts of a source of its dataset."""
        self.is_unchanged = rows is None
        """Whether its taker had its shards already: then they are looked up when they are asked for."""
        self.stamp = lease.stamp
        """With the version, what tells its shards from those of any other snapshot; None where nothing does."""
        if rows is not None:
            self._rows = rows
        self._lease: int | None = lease.id
        self._trash: list[Id] = []
        self._seen = lease.seen
        self._catalog, self._layout, self._holder = catalog, layout, holder

    @functools.cached_property
    def _rows(self) -> Sequence[Row]:
        with self._catalog.read() as connection:
            return _rows(connection, self.dataset, self.version)

    @functools.cached_property
    def shards(self) -> tuple[Shard, ...]:
        """Oldest first."""
        return tuple(Shard(self.folder, self.schema, Id(row["id"]), *row[1:]) for row in self._rows)

    @property
    def folder(self) -> Path:
        """Where the folders of its shards are."""
        return self._layout.shards

    def columns(self, *names: str) -> Iterator[tuple[Any, ...]]:
        """Two or more attributes of each shard: epochs of a thousand begin with this, and objects take 6 ms."""
        return map(operator.itemgetter(*(_NAMES.index(name) for name in names)), self._rows)

    @property
    def samples(self) -> int:
        """Number of samples in all its shards."""
        with self.understood():
            return sum(row["samples"] for row in self._rows)

    def understood(self) -> contextlib.AbstractContextManager[None]:
        """:meth:`Catalog.understood` for what is made of its rows."""
        return self._catalog.understood()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def served(self, delivered: Delivered | None = None, *, last: bool = False) -> None:
        """Count one epoch for every shard of this snapshot: its last batch was delivered, as the loader tells.

        ``last``: the lease may end in the same transaction, which saves one; :meth:`release` is called next and does
        the rest.
        """
        if last and (lease := self._own_lease()) is not None:
            with contextlib.suppress(CacheToolError, OSError):  # then one after the other
                with self._catalog.together():
                    epoch, point = self._count(delivered)
                    trash = self._ended(lease)
                self._lease, self._trash = None, trash
                history.write(self._layout, epoch=epoch, point=point)
                return
        epoch, point = self._count(delivered)
        history.write(self._layout, epoch=epoch, point=point)

    def _count(self, delivered: Delivered | None) -> tuple[dict[str, Any], dict[str, Any] | None]:
        """Count an epoch in one transaction; gives its row of the history, and a point if that is due."""
        with self._catalog.write() as connection:
            own = "dataset = ? AND state IN ('ready', 'retiring') AND since <= ? AND (until IS NULL OR until > ?)"
            which = self.dataset, self.version, self.version
            sums = connection.execute(
                "SELECT source, count(*) AS shards, sum(samples) AS samples, sum(payload) AS bytes,"
                f" sum(iif(epochs = 0, samples, 0)) AS new FROM shards WHERE {own} GROUP BY source",
                which,
            ).fetchall()
            connection.execute(f"UPDATE shards SET epochs = epochs + 1, used = ? WHERE {own}", (time.time(), *which))
            read = {name: sum(row[name] for row in sums) for name in ("shards", "samples", "bytes", "new")}
            share = 1.0  # of the snapshot, by samples: which bytes are those of the others nobody counts
            if delivered is not None and delivered.samples is not None and read["samples"]:
                share = min(1.0, delivered.samples / read["samples"])
                read |= {name: round(share * read[name]) for name in ("bytes", "new")}
                read |= {"samples": min(delivered.samples, read["samples"])}
            connection.execute("UPDATE cache SET served = served + ?", (read["bytes"],))
            connection.execute("UPDATE datasets SET served = served + ? WHERE name = ?", (read["bytes"], self.dataset))
            connection.executemany(
                "UPDATE sources SET served = served + ? WHERE id = ?",
                [(round(share * row["bytes"]), row["source"]) for row in sums],
            )
            epoch = history.epoch_row(connection, self._lease, delivered, dataset=self.dataset, **read)
            return epoch, history.due_point(connection, self._layout)

    def release(self, *, unread: bool = False) -> None:
        """Give the lease back; shards that only it kept are deleted now. May be called twice.

        If it went ``unread``, what it was the first to contain counts as not shown yet, unless others have it too.
        On a disk that cannot be written it ends with the process instead: the reader was served all the same.
        """
        lease, trash = self._own_lease(), self._trash if self._own else []
        self._lease, self._trash = None, []
        with contextlib.suppress(CapacityError):
            if lease is not None:
                trash = self._ended(lease, unread=unread)
            if trash:
                delete_trash(self._catalog, self._layout, trash)

    def _ended(self, lease: int, *, unread: bool = False) -> list[Id]:
        """End a lease; gives what is to be deleted then."""
        with self._catalog.write() as connection:
            self._end(connection, lease, unread=unread)
            return sweep(connection, self._holder)

    @property
    def _own(self) -> bool:
        """Whether it is this process's to give back: closing the cache takes the leases with it."""
        return not self._holder.retired and self._holder.pid == os.getpid()

    def _own_lease(self) -> int | None:
        """The lease that is to be given back."""
        return self._lease if self._own else None

    def _end(self, connection: Connection, lease: int, *, unread: bool) -> None:
        connection.execute("DELETE FROM leases WHERE id = ?", (lease,))
        if unread and self._seen is not None:
            connection.execute(
                "UPDATE cache SET seen = ? WHERE seen = ? AND NOT EXISTS (SELECT 1 FROM leases WHERE version >= ?)",
                (self._seen, self.version, self.version),
            )


def take(
    catalog: Catalog,
    layout: Layout,
    holder: Holder,
    *,
    dataset: str,
    schema: Schema,
    run: str | None = None,
    epoch: int | None = None,
    peek: bool = False,
    sparing: bool = False,
    instead: Snapshot | None = None,
    previous: tuple[int, int | None] | None = None,
) -> Snapshot:
    """Lease the present version; with ``run``, the version that another rank of that run leases for ``epoch``.

    Whoever only wants to ``peek`` makes no room for a pull, and what is in there does not count as read. ``sparing``
    may lease an older version, so that the next epoch has something new too (:mod:`cachetool.cache.renewal`).
    ``instead`` of one of this process, which went unread, is given back first, in the same transaction. Whoever has the
    shards of a snapshot of the version and stamp ``previous`` is not told them again while that is the present one: a
    thousand take 2 ms.
    """
    trash: list[Id] = []
    with catalog.write() as connection:
        holder.register(connection)
        if instead is not None and (former := instead._own_lease()) is not None:
            instead._end(connection, former, unread=True)
            trash = sweep(connection, holder)
        shared = None
        if run is not None:
            shared = connection.execute(
                "SELECT version FROM leases WHERE run = ? AND epoch IS ? AND dataset = ?", (run, epoch, dataset)
            ).fetchone()
        numbers = connection.execute("SELECT version, stamp, seen FROM cache").fetchone()
        newest = present = int(numbers["version"])
        seen = int(numbers["seen"])
        if shared is not None:
            version = newest = int(shared[0])
        else:
            version = newest if peek else top_up(connection, layout, newest, sparing=dataset if sparing else None)
        cursor = connection.execute(
            "INSERT INTO leases (holder, run, epoch, version, dataset, taken) VALUES (?, ?, ?, ?, ?, ?)",
            (holder.id, run, epoch, version, dataset, time.time()),
        )
        # Of an earlier version some may be gone since.
        stamp = int(numbers["stamp"]) if version == present else None
        rows = None if stamp is not None and previous == (version, stamp) else _rows(connection, dataset, version)
        cut = connection.execute("SELECT 1 FROM sources WHERE dataset = ? AND cut > 1 LIMIT 1", (dataset,)).fetchone()
        if not peek:
            connection.execute("UPDATE cache SET seen = max(seen, ?)", (version,))
    lease = _Lease(
        id=int(cursor.lastrowid or 0),
        version=version,
        newest=max(newest, version),
        stamp=stamp,
        seen=None if peek or seen >= version else seen,
        in_parts=cut is not None,
    )
    taken = Snapshot(catalog, layout, holder, lease, dataset=dataset, schema=schema, rows=rows)
    if instead is not None:
        instead._lease = None
    try:
        with contextlib.suppress(CapacityError):
            delete_trash(catalog, layout, trash)
    except BaseException:  # nobody else knows of this lease
        taken.release(unread=True)
        raise
    return taken
