"""The cache as one object: opens the root, and hands each request to the module that owns it."""

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
from cachetool.core.schema import KEY, Schema
from cachetool.core.text import plain, shown
from cachetool.core.units import format_size, parse_duration, parse_flag, parse_size, parse_text, parse_whole

if TYPE_CHECKING:  # what fills or empties a cache is loaded when it does: a feeder only reads
    from cachetool.cache.commit import Staging
    from cachetool.cache.draws import SourceRow
    from cachetool.cache.policies import Room
    from cachetool.cache.removal import Removal
    from cachetool.cache.stats import Stats

__all__ = ["CacheDir"]

_open: weakref.WeakSet[CacheDir] = weakref.WeakSet()


def _close_all() -> None:
    """At the end of a program that closed nothing: leases and locks go back now, not when the next process looks."""
    for cache in members(_open):
        with contextlib.suppress(CacheToolError):
            cache.close()


class CacheDir(Closing):
    """A cache folder. Made by :func:`cachetool.open_cache`; a context manager; for any thread, also in a forked child.

    A new cache is put on disk at the first use of its catalog, so that a command that fails before it leaves nothing.
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
        # Once: a program may go to another folder, or switch a link, while it is open.
        self.root = place_of(root.absolute())
        self.layout = Layout(self.root)
        self._wanted = {"max_size": max_size, "min_free": min_free}
        self._exists = exists
        self._notify = notify
        self._catalog = Catalog(self.layout.catalog)
        self.closed = False
        self._user = holders.enter(self.layout.holders)
        if not _open:
            atexit.register(_close_all)
        _open.add(self)

    # -- the parts its verbs are built from ---------------------------------------------------------------------------

    @property
    def exists(self) -> bool:
        """Whether the cache is on disk already."""
        return self._exists

    @property
    def catalog(self) -> Catalog:
        """The catalog; puts a new cache on disk. Raises :class:`UsageError` once the cache is closed."""
        if self.closed:
            raise UsageError(f"cache {self.root} is closed; open it again with cachetool.open_cache")
        if not self._exists:
            self._make({key: value or 0 for key, value in self._wanted.items()})
            self._exists = True
        return self._catalog

    def _make(self, settings: dict[str, int]) -> None:
        """Put the cache on disk; harmless where another process was first."""
        self.layout.make()
        self._catalog.create(**settings)
        with self._catalog.write() as connection:
            self._mark()
            charge_anew(connection, self.layout)
        if self._notify:
            self._notify(f"new cache {self.root}, cap {format_size(settings['max_size'])}")

    def make_again(self, settings: dict[str, int]) -> None:
        """From now on make the cache anew, with ``settings`` where none were asked for, when its folder is found gone:
        the pull that made it failed and took it away again. Not once this process has declared what it brings."""
        asked = {key: value for key, value in self._wanted.items() if value is not None}
        self._catalog.make_again = lambda: self._make({**settings, **asked})

    @property
    def holder(self) -> Holder:
        """This process as the cache knows it; made at first use, which is also when a new cap takes effect."""
        if not self.root.exists():
            self.catalog.number("version")  # makes it again, if that may be
        self.settle_cap()
        return holders.holder_of(self.layout.holders, self._user)

    def settle_cap(self) -> None:
        """Make the cap that this was opened with the cache's own."""
        catalog = self.catalog
        wanted = {key: value for key, value in self._wanted.items() if value is not None}
        if any(catalog.number(key) != value for key, value in wanted.items()):
            from cachetool.cache.capping import change

            with catalog.write() as connection:
                change(connection, self.layout, wanted)
                self._mark()
        self._wanted = dict.fromkeys(self._wanted)

    def renew(self, wanted: dict[str, int]) -> None:
        """Be a cache that is not on disk yet: its folder is gone. ``wanted`` is what the next one begins with."""
        self._catalog.close()
        self._wanted = {"max_size": wanted["max_size"], "min_free": wanted["min_free"]}
        self._catalog, self._exists = Catalog(self.layout.catalog), False

    def _mark(self) -> None:
        """Write the settings into the marker; inside the transaction that wrote them into the catalog."""
        mark(self.layout, **{key: self._catalog.number(key) for key in ("max_size", "min_free")})

    def recover(self, *, patience: float = PATIENCE) -> int:
        """Finish what dead processes left behind; gives how many died. ``patience``: as of :meth:`Catalog.write`."""
        if is_copied(self.catalog, self.layout):
            with self.catalog.write(patience=patience) as connection:
                charge_anew(connection, self.layout)
        # Inside of a transaction, where :attr:`holder` could not put a new cap in force.
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
        """Bytes of the disk that stay free."""
        if (wanted := self._wanted["min_free"]) is not None:
            return wanted
        return self.catalog.number("min_free") if self._exists else 0

    @property
    def version(self) -> int:
        """The catalog's version: raised by every commit and every eviction."""
        return self.catalog.number("version")

    def datasets(self) -> list[str]:
        """Names of the datasets, oldest first."""
        if not self._exists:
            return []
        return [row["name"] for row in self.catalog.rows("SELECT name FROM datasets ORDER BY created")]

    def dataset(self, name: str | None = None) -> str:
        """``name`` if there is such a dataset; None means ``default``, or the only one. Raises :class:`UsageError`."""
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
            hint = "; name one of them: --dataset, dataset=" if names else ""
            raise UsageError(f"cache {self.root}: {have}{hint}")
        return names[0]

    def schema(self, dataset: str | None = None) -> Schema:
        """Schema of a dataset; None means the only one. Raises :class:`UsageError` naming what there is."""
        row = self.catalog.one("SELECT schema FROM datasets WHERE name = ?", (self.dataset(dataset),))
        assert row is not None
        with self.catalog.understood():
            return schema_of(row["schema"])

    def shards(self, dataset: str | None = None, *, version: int | None = None, retiring: bool = False) -> list[Shard]:
        """Shards visible now, or at a leased ``version``, oldest first; with ``retiring`` also those that only older
        leases see. Takes no lease."""
        dataset = None if dataset is None else parse_text(dataset, what="dataset=")
        version = None if version is None else parse_whole(version, what="version=")
        retiring = parse_flag(retiring, what="retiring=")
        if not self._exists:
            return []
        with self.catalog.read() as connection:
            return snapshots.visible(connection, self.layout, dataset, version, retiring=retiring)

    def usage(self) -> Usage:
        """What is charged against the cap now."""
        with self.catalog.read() as connection:
            return measure(connection, self.layout)

    def stats(self, dataset: str | None = None) -> Stats:
        """Counts, bytes, coverage, holders, events. Raises :class:`UsageError` for an unknown dataset."""
        from cachetool.cache.stats import collect

        if dataset is not None:
            self.dataset(dataset)
        return collect(self.catalog, self.layout, dataset)

    # -- reading -------------------------------------------------------------------------------------------------------

    def snapshot(
        self, *, dataset: str | None = None, run: str | None = None, epoch: int | None = None, peek: bool = False,
        sparing: bool = False, instead: Snapshot | None = None,
        known: tuple[int, int | None] | None = None,
    ) -> Snapshot:  # fmt: skip
        """Lease the present version of a dataset, or the one that this ``run`` already leases for this ``epoch``.

        ``peek``: not to train on; a pull makes no room by it, and nothing of it counts as read. ``sparing``: in a full
        cache of which little was read, the newest shards may be left for the next one. ``instead``: one that goes back
        unread at the same time. ``known``: version and stamp of the one whose shards the caller has already."""
        name = self.dataset(dataset)
        run = None if run is None else parse_text(run, what="run=")
        epoch = None if epoch is None else parse_whole(epoch, what="epoch=")
        peek, sparing = (parse_flag(flag, what="snapshot") for flag in (peek, sparing))
        self.recover()
        taken = snapshots.take(
            self.catalog, self.layout, self.holder, dataset=name, schema=self.schema(name), run=run, epoch=epoch,
            peek=peek, sparing=sparing, instead=instead, previous=known,
        )  # fmt: skip
        self._catalog.make_again = None  # nobody takes away a folder in which this process has a lease
        return taken

    # -- writing -------------------------------------------------------------------------------------------------------

    def check_schema(self, name: str, schema: Schema) -> None:
        """Raise :class:`UsageError` when a dataset of this name has another schema."""
        if name not in self.datasets() or (have := self.schema(name)) == schema:
            return
        if have.is_reordered(schema):
            names = ",".join(name for name in have.names if name != KEY)
            raise UsageError(f"dataset {name!r} has the fields of this source in another order; add --fields {names}")
        raise UsageError(
            f"dataset {name!r} holds {have.describe()}; this source has {schema.describe()}: name another --dataset"
        )

    def declare(self, name: str, schema: Schema) -> None:
        """Fix the schema of a dataset. Raises :class:`UsageError` when it has another one already."""
        with self.catalog.write() as connection:
            connection.execute(
                "INSERT OR IGNORE INTO datasets (name, schema, created) VALUES (?, ?, ?)",
                (name, json.dumps(schema.to_json()), time.time()),
            )
        self._catalog.make_again = None
        self.check_schema(name, schema)

    def stage(
        self, *, dataset: str, schema: Schema, format: str, bound: int, job: str | None = None,
        room: Room | None = None, waiting: Callable[[str], None] | None = None,
    ) -> Staging:  # fmt: skip
        """Reserve ``bound`` bytes and open a folder for a shard. Raises what :func:`admission.admit` raises."""
        return self.stage_together(
            dataset=dataset, schema=schema, format=format, bounds=[bound], job=job, room=room, waiting=waiting
        )[0]

    def stage_together(
        self, *, dataset: str, schema: Schema, format: str, bounds: Sequence[int], job: str | None = None,
        room: Room | None = None, waiting: Callable[[str], None] | None = None,
    ) -> list[Staging]:  # fmt: skip
        """As :meth:`stage` for several shards that are committed together: room for all is reserved at once."""
        from cachetool.cache.commit import stage_together
        from cachetool.cache.policies import Room

        return stage_together(
            self.catalog, self.layout, self.holder, dataset=dataset, schema=schema, format=format, bounds=bounds,
            job=job, room=room or Room(), waiting=waiting,
        )  # fmt: skip

    def source(self, id: str) -> SourceRow | None:
        """The source with this id, if this cache has drawn from it."""
        from cachetool.cache.draws import source_row

        id = parse_text(id, what="source")
        if not self._exists:
            return None
        with self.catalog.read() as connection:
            return source_row(connection, id)

    def listing(self, source: str) -> Path:
        """Where the listing of a source lies."""
        return self.layout.listing(Id(source))

    def add_source(self, row: SourceRow, listing: Path, *, new: bool = False) -> None:
        """Take in a source: its listing and room for its record are charged, then it is copied beside the others.
        Raises :class:`UsageError` when a ``new`` one came in by another process meanwhile, listed otherwise."""
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
        """Delete shards until at most ``max_size`` bytes are charged; the cap itself stays as it is.

        ``dry_run`` only makes the plan. Victims that a live snapshot reads are retired and go when it ends: with
        ``wait`` seconds the call waits for that. Raises :class:`CapBlocked` naming the readers when the target is not
        reached because of them, :class:`CapTooSmall` when even an empty cache is larger.
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
        """Close the catalog; the last one of a process takes its holder and its leases out. May be called twice."""
        if self.closed:
            return
        self.closed = True
        own = holders.leave(self.layout.holders, self._user)
        if own is not None:
            signed_out = False
            try:
                # What cannot be written now is finished by the next process, which finds this one's lock free.
                with contextlib.suppress(CapacityError, CatalogError):
                    sign_out(self._catalog, self.layout, own)
                    signed_out = True
            finally:
                own.retire(signed_out=signed_out)
        self._catalog.close()

    def __reduce__(self) -> tuple[type[Self], tuple[Path]]:
        _ = self._exists or self.catalog  # another process must find it on disk
        return type(self), (self.root,)
