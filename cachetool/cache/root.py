"""The cache as one object, which opens the root and passes each request to the module that owns it."""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import time
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Self

from cachetool.cache import holders, snapshots
from cachetool.cache.catalog import Catalog
from cachetool.cache.forking import members
from cachetool.cache.holders import Holder
from cachetool.cache.layout import Layout, cache_option, place_of
from cachetool.cache.marker import mark
from cachetool.cache.removal import recover, sign_out
from cachetool.cache.snapshots import Shard, Snapshot
from cachetool.cache.transaction_lock import PATIENCE
from cachetool.cache.usage import Usage, charge_anew, is_copied, measure
from cachetool.cache.values import schema_of
from cachetool.core.closing import Closing
from cachetool.core.errors import CacheToolError, CapacityError, CatalogError, UsageError
from cachetool.core.names import Id
from cachetool.core.schema import KEY, Schema, agreed, same_notes
from cachetool.core.text import plain, shown
from cachetool.core.units import format_size, parse_duration, parse_flag, parse_size, parse_text, parse_whole

# Modules that fill or empty a cache are imported where they are used: a feeder only reads, and
# starts faster without them.
if TYPE_CHECKING:
    from cachetool.cache.commit import Staging
    from cachetool.cache.draws import SourceRow
    from cachetool.cache.policies import Room
    from cachetool.cache.removal import Removal
    from cachetool.cache.stats import Stats

__all__ = ["CacheDir"]

_open: weakref.WeakSet[CacheDir] = weakref.WeakSet()


def _close_all() -> None:
    """Close all open caches at the end of the program, so that leases and locks end now and not when the next process
    recovers them."""
    for cache in members(_open):
        with contextlib.suppress(CacheToolError):
            cache.close()


class CacheDir(Closing):
    """A cache folder: catalog, cap, shards and snapshots. Made by :func:`cachetool.cache.open_cache`.

    A context manager. Threads may share it, and a forked child may use it. A new cache is written to disk at the first
    use of its catalog, so that a command that fails before leaves nothing behind.

    Args:
        root: The folder.
        exists: True if the cache is on disk already. Default: True.
        max_size: The cap in bytes. Default: the cap that the cache has.
        min_free: Bytes of the disk that pulls leave free. Default: the value that the cache has.
        notify: A function that gets one line of text for the user. Default: no lines.

    Attributes:
        root: The folder, with links resolved.
        closed: True once :meth:`close` was called.
    """

    def __init__(
        self,
        root: Path,
        *,
        exists: bool = True,
        max_size: int | None = None,
        min_free: int | None = None,
        notify: Callable[[str], None] | None = None,
    ) -> None:
        # Resolved once: while the cache is open, the program may change its working directory, or a
        # link in the path may be switched.
        self.root = place_of(root.absolute())
        self.layout = Layout(self.root)
        self._wanted = {"max_size": max_size, "min_free": min_free}
        self._exists = exists
        self._notify = notify
        self._catalog = Catalog(self.layout.catalog)
        self.closed = False
        self._user = holders.enter(self.layout.holders)
        # Registered with the first open cache only. A weak set does not keep a forgotten cache
        # alive.
        if not _open:
            atexit.register(_close_all)
        _open.add(self)

    # -- the parts its verbs are built from ---------------------------------------------------------------------------

    @property
    def exists(self) -> bool:
        """True if the cache is on disk already."""
        return self._exists

    @property
    def catalog(self) -> Catalog:
        """The catalog; its first use puts a new cache on disk.

        Raises:
            UsageError: The cache is closed.
        """
        if self.closed:
            raise UsageError(f"cache {self.root} is closed; open it again with cachetool.open_cache")
        if not self._exists:
            self._make({key: value or 0 for key, value in self._wanted.items()})
            self._exists = True
        return self._catalog

    def _make(self, settings: dict[str, int]) -> None:
        """Put the cache on disk; harmless if another process was first."""
        self.layout.make()
        self._catalog.create(**settings)
        with self._catalog.write() as connection:
            self._mark()
            charge_anew(connection, self.layout)
        if self._notify:
            self._notify(f"new cache {self.root}, cap {format_size(settings['max_size'])}")

    def make_again(self, settings: dict[str, int]) -> None:
        """Let this object make the cache anew if its folder disappears, because the pull that made the cache failed.

        This ends when the process declares a dataset or takes a lease.

        Args:
            settings: ``max_size`` and ``min_free`` in bytes, where :func:`open_cache` was given none.
        """
        asked = {key: value for key, value in self._wanted.items() if value is not None}
        self._catalog.make_again = lambda: self._make({**settings, **asked})

    @property
    def holder(self) -> Holder:
        """The registration of this process in the cache, made at first use; a new cap takes effect then."""
        if not self.root.exists():
            # Any use of the catalog makes the cache again, if that is allowed (`make_again`).
            self.catalog.number("version")
        self.settle_cap()
        return holders.holder_of(self.layout.holders, self._user)

    def settle_cap(self) -> None:
        """Store the cap that this cache was opened with in the catalog.

        Raises:
            UsageError: Another process uses the cache with the present cap.
            CapTooSmall: More bytes are in use.
        """
        catalog = self.catalog
        wanted = {key: value for key, value in self._wanted.items() if value is not None}
        if any(catalog.number(key) != value for key, value in wanted.items()):
            from cachetool.cache.capping import change

            with catalog.write() as connection:
                change(connection, self.layout, wanted)
                self._mark()
        self._wanted = dict.fromkeys(self._wanted)

    def renew(self, wanted: dict[str, int]) -> None:
        """Treat this cache as one that is not on disk yet, because its folder is gone.

        Args:
            wanted: ``max_size`` and ``min_free`` in bytes for the new cache.
        """
        self._catalog.close()
        self._wanted = {"max_size": wanted["max_size"], "min_free": wanted["min_free"]}
        self._catalog, self._exists = Catalog(self.layout.catalog), False

    def _mark(self) -> None:
        """Write the settings into the marker. Call this inside the transaction that writes them into the catalog."""
        mark(self.layout, **{key: self._catalog.number(key) for key in ("max_size", "min_free")})

    def recover(self, *, patience: float = PATIENCE) -> int:
        """Complete the unfinished work of dead processes.

        Args:
            patience: Seconds to wait for the catalog's transaction lock.

        Returns:
            The number of processes that died.
        """
        # The same files take other bytes on a file system with other blocks, so a copied cache is
        # charged anew before anybody relies on its cap.
        if is_copied(self.catalog, self.layout):
            with self.catalog.write(patience=patience) as connection:
                charge_anew(connection, self.layout)
        # Not `self.holder`: `recover` asks for it inside a transaction, where a new cap could not
        # be put in force.
        own = functools.partial(holders.holder_of, self.layout.holders, self._user)
        return recover(self.catalog, self.layout, own, patience=patience)

    # -- what is in it -------------------------------------------------------------------------------------------------

    @property
    def max_size(self) -> int:
        """The cap in bytes."""
        wanted = self._wanted["max_size"]
        return self.catalog.number("max_size") if wanted is None else wanted

    @property
    def min_free(self) -> int:
        """Bytes of the disk that pulls leave free."""
        if (wanted := self._wanted["min_free"]) is not None:
            return wanted
        return self.catalog.number("min_free") if self._exists else 0

    @property
    def version(self) -> int:
        """The version of the catalog; every commit and every eviction raises it."""
        return self.catalog.number("version")

    def datasets(self) -> list[str]:
        """Return the names of the datasets, the oldest first.

        Returns:
            A list of names; empty for a new cache.
        """
        if not self._exists:
            return []
        return [row["name"] for row in self.catalog.rows("SELECT name FROM datasets ORDER BY created")]

    def dataset(self, name: str | None = None) -> str:
        """Return the name of a dataset, after a check that the cache has it.

        Args:
            name: The name. Default: ``"default"``, or the only dataset.

        Returns:
            The name.

        Raises:
            UsageError: There is no such dataset, or several and no name; the message lists them.
        """
        names = self.datasets()
        if name is not None and parse_text(name, what="dataset=") in names:
            return name
        fill = f"it is empty; fill it with: cachetool pull SOURCE{cache_option(self.root)}"
        have = f"it holds {', '.join(map(plain, names))}" if names else fill
        if name is not None:
            raise UsageError(f"cache {self.root} has no dataset {shown(name)}; {have}")
        if "default" in names:
            return "default"
        if len(names) != 1:
            hint = "; choose one with --dataset or dataset=" if names else ""
            raise UsageError(f"cache {self.root}: {have}{hint}")
        return names[0]

    def schema(self, dataset: str | None = None) -> Schema:
        """Return the fields of a dataset.

        Args:
            dataset: The name. Default: ``"default"``, or the only dataset.

        Returns:
            A :class:`~cachetool.core.schema.Schema`.

        Raises:
            UsageError: There is no such dataset, or several and no name; the message lists them.

        Example:
            >>> import cachetool
            >>> with cachetool.open_cache("data/cache") as cache:
            ...     cache.schema().describe()
            'label: int64, volume: float32 (16, 16, 16), __key__: str'
        """
        row = self.catalog.one("SELECT schema FROM datasets WHERE name = ?", (self.dataset(dataset),))
        assert row is not None
        with self.catalog.understood():
            return schema_of(row["schema"])

    def shards(self, dataset: str | None = None, *, version: int | None = None, retiring: bool = False) -> list[Shard]:
        """Return the shards, the oldest first. Takes no lease, so a shard may be evicted at any time.

        Args:
            dataset: The name of a dataset. Default: all datasets.
            version: A version of the catalog that somebody leases: the shards visible then. Default: the present one.
            retiring: True: add the shards that only older leases see. Default: False.

        Returns:
            A list of :class:`~cachetool.cache.snapshots.Shard`.

        Raises:
            UsageError: An argument has another type.

        Example:
            >>> import cachetool
            >>> with cachetool.open_cache("data/cache") as cache:
            ...     sum(shard.samples for shard in cache.shards())
            24
        """
        dataset = None if dataset is None else parse_text(dataset, what="dataset=")
        version = None if version is None else parse_whole(version, what="version=")
        retiring = parse_flag(retiring, what="retiring=")
        if not self._exists:
            return []
        with self.catalog.read() as connection:
            return snapshots.visible(connection, self.layout, dataset, version, retiring=retiring)

    def usage(self) -> Usage:
        """Return the bytes that count against the cap now, by kind.

        Returns:
            A :class:`~cachetool.cache.usage.Usage`; its ``total`` never exceeds the cap.
        """
        with self.catalog.read() as connection:
            return measure(connection, self.layout)

    def stats(self, dataset: str | None = None) -> Stats:
        """Return the figures of ``cachetool stats``: samples, bytes, sources, pulls, readers, evictions.

        Args:
            dataset: The name of a dataset. Default: all datasets.

        Returns:
            A :class:`~cachetool.cache.stats.Stats`.

        Raises:
            UsageError: There is no such dataset.

        Example:
            >>> import cachetool
            >>> with cachetool.open_cache("data/cache") as cache:
            ...     cache.stats().samples
            24
        """
        from cachetool.cache.stats import collect

        if dataset is not None:
            self.dataset(dataset)
        return collect(self.catalog, self.layout, dataset)

    # -- reading -------------------------------------------------------------------------------------------------------

    def snapshot(
        self, *, dataset: str | None = None, run: str | None = None, epoch: int | None = None, peek: bool = False,
        sparing: bool = False, reads: float = 1.0, instead: Snapshot | None = None,
        known: tuple[int, int | None] | None = None,
    ) -> Snapshot:  # fmt: skip
        """Lease the present shards of a dataset: none of them is deleted until the snapshot is released.

        Processes of one ``run`` get the same snapshot for the same ``epoch``.

        Args:
            dataset: The name. Default: ``"default"``, or the only dataset.
            run: Name of a training run of several processes. Default: none.
            epoch: Number of the epoch of that run, 0 or more. Default: none.
            peek: True for a snapshot that is not trained on: a pull evicts nothing because of it, and its shards do not
                count as read. Default: False.
            sparing: True: in a full cache of which little was read, the newest shards may be left for the next
                snapshot. Default: False.
            reads: Fraction of the samples that an epoch reads: less of the dataset is then renewed. Default: 1.
            instead: A snapshot of this process that is released unread at the same time. Default: none.
            known: Version and stamp of the snapshot whose shards the caller has already. Default: none.

        Returns:
            A :class:`~cachetool.cache.snapshots.Snapshot`, a context manager.

        Raises:
            UsageError: There is no such dataset, or an argument cannot be used.

        Example:
            >>> import cachetool
            >>> with cachetool.open_cache("data/cache") as cache, cache.snapshot() as snapshot:
            ...     snapshot.samples
            24
        """
        name = self.dataset(dataset)
        run = None if run is None else parse_text(run, what="run=")
        epoch = None if epoch is None else parse_whole(epoch, what="epoch=")
        peek, sparing = (parse_flag(flag, what="snapshot") for flag in (peek, sparing))
        self.recover()
        taken = snapshots.take(
            self.catalog, self.layout, self.holder, dataset=name, schema=self.schema(name), run=run, epoch=epoch,
            peek=peek, sparing=sparing, reads=reads, instead=instead, previous=known,
        )  # fmt: skip
        # No process removes a folder in which this process has a lease.
        self._catalog.make_again = None
        return taken

    # -- writing -------------------------------------------------------------------------------------------------------

    def check_schema(self, name: str, schema: Schema) -> None:
        """Check that a dataset of this name, if there is one, has this schema.

        Args:
            name: Name of the dataset.
            schema: The fields of new samples.

        Raises:
            UsageError: The dataset has other fields, or the same fields in another order.
        """
        if name not in self.datasets() or (have := self.schema(name)) == schema:
            return
        if have.is_reordered(schema):
            names = ",".join(name for name in have.names if name != KEY)
            raise UsageError(f"dataset {name!r} has the fields of this source in another order; add --fields {names}")
        raise UsageError(
            f"dataset {name!r} holds {have.describe()}, but this source has {schema.describe()}; choose"
            " another --dataset"
        )

    def declare(self, name: str, schema: Schema) -> None:
        """Add a dataset with this schema, unless there is one of this name.

        Args:
            name: Name of the dataset.
            schema: The fields of its samples.

        Raises:
            UsageError: The dataset has another schema already.
        """
        with self.catalog.write() as connection:
            connection.execute(
                "INSERT OR IGNORE INTO datasets (name, schema, created) VALUES (?, ?, ?)",
                (name, json.dumps(schema.to_json()), time.time()),
            )
            # Before new samples are committed: a loader that sees them must not decode them by the attributes of
            # others.
            (row,) = connection.execute("SELECT schema FROM datasets WHERE name = ?", (name,))
            have = schema_of(row["schema"])
            if have == schema and not same_notes(wanted := agreed(have, schema), have):
                text = json.dumps(wanted.to_json())
                connection.execute("UPDATE datasets SET schema = ? WHERE name = ?", (text, name))
        self._catalog.make_again = None
        self.check_schema(name, schema)

    def stage(
        self, *, dataset: str, schema: Schema, format: str, bound: int, job: str | None = None,
        room: Room | None = None, waiting: Callable[[str], None] | None = None,
    ) -> Staging:  # fmt: skip
        """Reserve bytes for a shard and make its folder.

        Args:
            dataset: Name of the dataset, which is declared.
            schema: The fields of its samples.
            format: Format of the shard, such as ``"lmdb"``.
            bound: Most bytes that the shard takes on disk.
            job: Id of the pull that writes. Default: none.
            room: How room may be made. Default: ``Room()``: nothing is evicted.
            waiting: A function that gets a line of text while the call waits for room. Default: no lines.

        Returns:
            A :class:`~cachetool.cache.commit.Staging`, to be committed or aborted.

        Raises:
            CapTooSmall: The cap can never hold the shard.
            CapBlocked: Readers or writers hold the room.
            CapacityError: The disk is full.
        """
        return self.stage_together(
            dataset=dataset, schema=schema, format=format, bounds=[bound], job=job, room=room, waiting=waiting
        )[0]

    def stage_together(
        self, *, dataset: str, schema: Schema, format: str, bounds: Sequence[int], job: str | None = None,
        room: Room | None = None, waiting: Callable[[str], None] | None = None,
    ) -> list[Staging]:  # fmt: skip
        """Reserve bytes for several shards that are committed together; see :meth:`stage`.

        Args:
            dataset: Name of the dataset, which is declared.
            schema: The fields of its samples.
            format: Format of the shards, such as ``"lmdb"``.
            bounds: For each shard the most bytes that it takes on disk.
            job: Id of the pull that writes. Default: none.
            room: How room may be made. Default: ``Room()``: nothing is evicted.
            waiting: A function that gets a line of text while the call waits for room. Default: no lines.

        Returns:
            A list of :class:`~cachetool.cache.commit.Staging`, one for each shard.

        Raises:
            CapacityError: As :meth:`stage`.
        """
        from cachetool.cache.commit import stage_together
        from cachetool.cache.policies import Room

        return stage_together(
            self.catalog, self.layout, self.holder, dataset=dataset, schema=schema, format=format, bounds=bounds,
            job=job, room=room or Room(), waiting=waiting,
        )  # fmt: skip

    def source(self, id: str) -> SourceRow | None:
        """Return the record of a source that this cache has drawn from.

        Args:
            id: The id of the source.

        Returns:
            A :class:`~cachetool.cache.draws.SourceRow`, or None for an unknown id.
        """
        from cachetool.cache.draws import source_row

        id = parse_text(id, what="source")
        if not self._exists:
            return None
        with self.catalog.read() as connection:
            return source_row(connection, id)

    def listing(self, source: str) -> Path:
        """Return the folder of the listing of a source.

        Args:
            source: The id of the source.

        Returns:
            The path.
        """
        return self.layout.listing(Id(source))

    def add_source(self, row: SourceRow, listing: Path, *, new: bool = False) -> None:
        """Add a source: charge its listing and its record, then copy the listing into the cache.

        Args:
            row: The record of the source.
            listing: The folder of its listing, outside the cache.
            new: True if no other process may have added the source meanwhile. Default: False.

        Raises:
            UsageError: With ``new``, another process added the source with another listing.
            CapacityError: There is no space for the listing.
        """
        from cachetool.cache.growth import bring_in

        bring_in(self, row, listing, new=new)

    def evict(
        self,
        max_size: int | str,
        *,
        policy: str = "oldest",
        dataset: str | None = None,
        min_epochs: int = 0,
        dry_run: bool = False,
        wait: float = 0.0,
    ) -> Removal:
        """Delete shards until at most ``max_size`` bytes count against the cap. The cap itself does not change.

        Shards that a training run reads become retiring and are deleted when their readers end.

        Args:
            max_size: The target in bytes, or text such as ``"20GB"``.
            policy: Which shards are deleted first: ``"oldest"``, ``"most-used"``, ``"lru"`` (longest not used) or
                ``"random"``. Default: ``"oldest"``.
            dataset: Delete only shards of this dataset. Default: all datasets.
            min_epochs: Keep shards that fewer epochs of training have used. Default: 0.
            dry_run: True: only return the plan. Default: False.
            wait: Seconds to wait for readers, or text such as ``"1min"``. Default: 0.

        Returns:
            A :class:`~cachetool.cache.removal.Removal`: the plan, and what was deleted.

        Raises:
            CapBlocked: Readers, or the other arguments, keep too many shards; the message names the readers.
            CapTooSmall: Even a cache without shards takes more than ``max_size`` bytes.
            UsageError: An argument cannot be used, or there is no such dataset.

        Example:
            >>> import cachetool
            >>> with cachetool.open_cache("data/cache") as cache:
            ...     removal = cache.evict("20MB", policy="lru", dry_run=True)
            >>> removal.removed_shards
            0
        """
        from cachetool.cache.eviction import evict_to

        target = parse_size(max_size, what="--max-size")
        min_epochs, wait = parse_whole(min_epochs, what="--min-epochs"), parse_duration(wait, what="--wait")
        dry_run = parse_flag(dry_run, what="--dry-run")
        if dataset is not None:
            self.dataset(dataset)
        return evict_to(
            self.catalog, self.layout, lambda: self.holder, target, policy=policy, dataset=dataset,
            min_epochs=min_epochs, dry_run=dry_run, wait=wait,
        )  # fmt: skip

    def close(self) -> None:
        """Close the cache. May be called twice.

        The last open object of a process ends the process's leases in this cache.
        """
        if self.closed:
            return
        self.closed = True
        own = holders.leave(self.layout.holders, self._user)
        if own is not None:
            signed_out = False
            try:
                # Rows that cannot be written now are recovered by the next process, which finds the
                # lock of this one free.
                with contextlib.suppress(CapacityError, CatalogError):
                    sign_out(self._catalog, self.layout, own)
                    signed_out = True
            finally:
                own.retire(signed_out=signed_out)
        self._catalog.close()

    def __reduce__(self) -> tuple[type[Self], tuple[Path]]:
        # The receiving process must find the cache on disk.
        _ = self._exists or self.catalog
        return type(self), (self.root,)
