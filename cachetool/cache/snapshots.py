"""Snapshots: the shards visible at one version, leased until they are released. One epoch trains on one snapshot.

A shard is visible at version v when it was committed at or before v and is not yet retiring at v. A lease is one row
(holder, version): no shard that is visible at a leased version is deleted. The lease ends with :meth:`Snapshot.release`
or with its process, whichever comes first.
"""

from __future__ import annotations

import contextlib
import functools
import json
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
    """One committed shard.

    Example:
        for shard in cache.shards("default"):
            print(shard.id, shard.samples, shard.data)
    """

    folder: Path
    """The folder that has the folders of all shards; one path for a snapshot of many shards."""
    schema: Schema
    """The fields of its samples."""
    id: Id
    """Id of the shard."""
    dataset: str
    """Name of its dataset."""
    format: str
    """Its format."""
    samples: int
    """Number of its samples."""
    bytes: int
    """Bytes on disk that count against the cap."""
    payload: int
    """Bytes of its values."""
    since: int
    """The version of the catalog that made the shard visible."""
    state: str
    """``ready`` or ``retiring``."""
    created: float
    """Time of the commit in seconds since 1970."""
    epochs: int
    """Number of epochs that read the shard."""
    content: str
    """Digest of its values."""
    digest: str
    """Digest of its files."""

    @property
    def path(self) -> Path:
        """The folder of the shard."""
        return self.folder / self.id

    @property
    def data(self) -> Path:
        """The data file of the shard; for Zarr the data folder."""
        path = self.path
        # The extension is the format's own, and the cache does not know the formats.
        for entry in os.scandir(path):
            if entry.name.startswith("data."):
                return path / entry.name
        return path / "data"


_COLUMNS = "id, dataset, format, samples, bytes, payload, since, state, created, epochs, content, digest"
"""Columns of a row, in the order of the fields of :class:`Shard`."""
_NAMES = _COLUMNS.split(", ")


def visible(
    connection: Connection,
    layout: Layout,
    dataset: str | None,
    version: int | None,
    *,
    retiring: bool = False,
    ids: Sequence[str] | None = None,
) -> list[Shard]:
    """Return the shards visible at ``version`` (None: now) of one dataset or of all, oldest first.

    With ``retiring`` the result also has shards that only older versions see. ``ids`` are those to look for; default:
    all.
    """
    schemas = {row["name"]: row["schema"] for row in connection.execute("SELECT name, schema FROM datasets")}
    # Parsed once for each dataset: thousands of shards share one schema object.
    parsed = {name: schema_of(text) for name, text in schemas.items()}
    rows = _rows(connection, dataset, version, retiring=retiring, ids=ids)
    return [Shard(layout.shards, parsed[row["dataset"]], Id(row["id"]), *row[1:]) for row in rows]


def _rows(
    connection: Connection,
    dataset: str | None,
    version: int | None,
    *,
    retiring: bool = False,
    ids: Sequence[str] | None = None,
) -> list[Row]:
    # The unary plus keeps SQLite from the index over states. Nearly all shards have one of these, so reading the table
    # takes 26 ms for 10,000 shards instead of 34.
    query = f"SELECT {_COLUMNS} FROM shards WHERE +state IN ('ready', 'retiring')"
    values: list[object] = []
    if ids is not None:
        # One parameter for any number of ids.
        query += " AND id IN (SELECT value FROM json_each(?))"
        values.append(json.dumps(list(ids)))
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
    """A lease as :func:`take` wrote it, and the numbers of the catalog at that moment."""

    id: int
    version: int
    newest: int
    """The version of the catalog at that moment."""
    stamp: int | None
    """Together with the version, it identifies the set of shards; None where nothing does."""
    seen: int | None
    """The newest version that a snapshot had contained before; None if this snapshot shows nothing beyond it."""
    in_parts: bool
    """True when this cache draws some parts of a source of the dataset, and other caches draw the others."""


class Snapshot:
    """The leased shards of one dataset at one version; a context manager. A forked child may read but not release it.

    Attributes:
        version: The version of the catalog that is leased.
        newest: The version of the catalog when the lease was taken; larger than ``version`` where the newest shards
            were left for the next snapshot.
        dataset: Name of the dataset.
        schema: The fields of its samples.
        in_parts: True if other caches draw other parts of a source of this dataset.
        is_unchanged: True if the caller had the shards already, by ``known``.
        stamp: Together with the version, identifies the shards; None where nothing does.
    """

    def __init__(
        self, catalog: Catalog, layout: Layout, holder: Holder, lease: _Lease, *, dataset: str, schema: Schema,
        rows: Sequence[Row] | None, is_unchanged: bool = False,
    ) -> None:  # fmt: skip
        self.version = lease.version
        self.newest = lease.newest
        """The version of the cache when the snapshot was taken. It is above :attr:`version` when the newest shards were
        left for the next snapshot."""
        self.dataset = dataset
        self.schema = schema
        self.in_parts = lease.in_parts
        """True when other caches draw other parts of a source of its dataset."""
        self.is_unchanged = is_unchanged
        """True if the taker had the shards already. They are then read from the catalog when they are asked for."""
        self.stamp = lease.stamp
        """Together with the version, it identifies the set of shards; None where nothing does."""
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
        """The shards, the oldest first."""
        return tuple(Shard(self.folder, self.schema, Id(row["id"]), *row[1:]) for row in self._rows)

    @property
    def folder(self) -> Path:
        """The folder that has the folders of the shards."""
        return self._layout.shards

    def has(self, ids: Sequence[str]) -> bool:
        """Return True if these shards are in the snapshot.

        Args:
            ids: Ids of shards.

        Returns:
            True or False.
        """
        with self._catalog.read() as connection:
            return len(_rows(connection, self.dataset, self.version, ids=ids)) == len(set(ids))

    def columns(self, *names: str) -> Iterator[tuple[Any, ...]]:
        """Yield two or more attributes of each shard, without making a :class:`Shard` for each.

        Args:
            *names: Names of attributes of :class:`Shard`.

        Yields:
            A tuple of values for each shard.
        """
        # Epochs of a thousand shards begin with this call; objects of Shard would take 6 ms.
        return map(operator.itemgetter(*(_NAMES.index(name) for name in names)), self._rows)

    @property
    def samples(self) -> int:
        """The number of samples in all shards."""
        with self.understood():
            return sum(row["samples"] for row in self._rows)

    def understood(self) -> contextlib.AbstractContextManager[None]:
        """Return a context manager that turns foreign values in the catalog into :class:`CatalogError`."""
        return self._catalog.understood()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def served(self, delivered: Delivered | None = None, *, last: bool = False) -> None:
        """Count one epoch for every shard: the loader calls this method after the last batch.

        Args:
            delivered: Figures of the epoch for the history. Default: none.
            last: True: the lease may end in the same transaction; call :meth:`release` next. Default: False.
        """
        if last and (lease := self._own_lease()) is not None:
            # If the joint transaction fails, the two steps follow one after the other: an epoch
            # counts even if its lease cannot be ended now.
            with contextlib.suppress(CacheToolError, OSError):
                # One transaction instead of two. Each takes 10 to 60 ms on a busy disk.
                with self._catalog.together():
                    epoch, point = self._count(delivered)
                    trash = self._ended(lease)
                self._lease, self._trash = None, trash
                history.write(self._layout, epoch=epoch, point=point)
                return
        epoch, point = self._count(delivered)
        history.write(self._layout, epoch=epoch, point=point)

    def under_way(self, delivered: Delivered, *, epoch: int) -> None:
        """Note the waits of an epoch that has not ended, for reports on running trainings.

        Args:
            delivered: The figures so far.
            epoch: Number of the epoch.
        """
        if self._own:
            history.write_running(self._layout, delivered, dataset=self.dataset, pid=self._holder.pid, epoch=epoch)

    def _count(self, delivered: Delivered | None) -> tuple[dict[str, Any], dict[str, Any] | None]:
        """Count an epoch in one transaction. Return its row of the history, and a point if one is due."""
        with self._catalog.write() as connection:
            # Shards that retired since are counted too, because the epoch read them.
            own = "dataset = ? AND state IN ('ready', 'retiring') AND since <= ? AND (until IS NULL OR until > ?)"
            which = self.dataset, self.version, self.version
            sums = connection.execute(
                "SELECT source, count(*) AS shards, sum(samples) AS samples, sum(payload) AS bytes,"
                f" sum(iif(epochs = 0, samples, 0)) AS new FROM shards WHERE {own} GROUP BY source",
                which,
            ).fetchall()
            connection.execute(f"UPDATE shards SET epochs = epochs + 1, used = ? WHERE {own}", (time.time(), *which))
            read = {name: sum(row[name] for row in sums) for name in ("shards", "samples", "bytes", "new")}
            share = 1.0
            if delivered is not None and delivered.samples is not None and read["samples"]:
                # Nobody counts the bytes of single samples, so the share by samples stands for the
                # share by bytes.
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
        """End the lease, and delete the shards that only this lease kept. May be called twice.

        On a disk that cannot be written the lease ends with the process instead.

        Args:
            unread: True: the snapshot was not read, so its shards do not count as read either, unless others lease
                them. Default: False.
        """
        lease, trash = self._own_lease(), self._trash if self._own else []
        self._lease, self._trash = None, []
        with contextlib.suppress(CapacityError):
            if lease is not None:
                trash = self._ended(lease, unread=unread)
            if trash:
                delete_trash(self._catalog, self._layout, trash)

    def _ended(self, lease: int, *, unread: bool = False) -> list[Id]:
        """End a lease; return the shards whose files must be deleted."""
        with self._catalog.write() as connection:
            self._end(connection, lease, unread=unread)
            return sweep(connection, self._holder)

    @property
    def _own(self) -> bool:
        """True if this process may end the lease. Closing the cache ends all leases of the process."""
        # A forked child has a copy of this object. Its release would take the shards away from the
        # parent, which still reads them.
        return not self._holder.retired and self._holder.pid == os.getpid()

    def _own_lease(self) -> int | None:
        """Return the id of the lease, if this process may end it."""
        return self._lease if self._own else None

    def _end(self, connection: Connection, lease: int, *, unread: bool) -> None:
        connection.execute("DELETE FROM leases WHERE id = ?", (lease,))
        # Only while this snapshot is still the newest that anybody took: else the shards were shown
        # by another one.
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
    reads: float = 1.0,
    instead: Snapshot | None = None,
    previous: tuple[int, int | None] | None = None,
) -> Snapshot:
    """Lease the present version; with ``run``, the version that another rank of that run leases for ``epoch``.

    ``peek`` is for a look without training: a pull evicts nothing because of it, and nothing counts as read.
    ``sparing`` may lease an older version, so that the next epoch has something new too
    (:mod:`cachetool.cache.renewal`). ``reads`` is the fraction of the dataset that an epoch reads. ``instead`` is an
    unread snapshot of this process, which is returned first in the same transaction. ``previous`` are the version and
    stamp of a snapshot whose shards the caller has. If these are still the present ones, the shards are not read again.
    """
    trash: list[Id] = []
    with catalog.write() as connection:
        holder.register(connection)
        # Before the new lease, so that shards that only the old snapshot was to show count as
        # unseen for `top_up`.
        if instead is not None and (former := instead._own_lease()) is not None:
            instead._end(connection, former, unread=True)
            trash = sweep(connection, holder)
        shared = None
        if run is not None:
            # Ranks of a run must train on the same shards, so a later rank takes the version of the
            # first, retired shards included.
            shared = connection.execute(
                "SELECT version FROM leases WHERE run = ? AND epoch IS ? AND dataset = ?", (run, epoch, dataset)
            ).fetchone()
        numbers = connection.execute("SELECT version, stamp, seen FROM cache").fetchone()
        newest = present = int(numbers["version"])
        seen = int(numbers["seen"])
        if shared is not None:
            version = newest = int(shared[0])
        else:
            # In the transaction that inserts the lease: shards that retire here are not in this
            # snapshot, and no writer can act in between.
            version = newest
            if not peek:
                version = top_up(connection, layout, newest, dataset=dataset, sparing=sparing, reads=reads)
        cursor = connection.execute(
            "INSERT INTO leases (holder, run, epoch, version, dataset, taken) VALUES (?, ?, ?, ?, ?, ?)",
            (holder.id, run, epoch, version, dataset, time.time()),
        )
        # The stamp belongs to the present version. Of an earlier version some shards may be deleted
        # since, so nothing identifies its set.
        stamp = int(numbers["stamp"]) if version == present else None
        # A loader that has these shards is not told them again: a thousand rows take 2 ms.
        unchanged = stamp is not None and previous == (version, stamp)
        # A look may need a few shards only, so it reads the rows when it asks for them.
        rows = None if unchanged or peek else _rows(connection, dataset, version)
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
    taken = Snapshot(
        catalog, layout, holder, lease, dataset=dataset, schema=schema, rows=rows, is_unchanged=unchanged
    )  # fmt: skip
    if instead is not None:
        # Only after the transaction: if it fails, the old lease still exists and must still be
        # released.
        instead._lease = None
    try:
        with contextlib.suppress(CapacityError):
            delete_trash(catalog, layout, trash)
    except BaseException:
        # No other code knows this lease yet, so nobody else could end it.
        taken.release(unread=True)
        raise
    return taken
