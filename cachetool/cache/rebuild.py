"""A catalog made anew from the shards, when the old one is lost, garbled, or older than they are.

::

    every shards/<id>/shard.json, checksum and id checked   ->  shards in their order, datasets, draws done
    the newest record of each source, in those or beside its listing  ->  sources, draws of shards evicted since
    cachetool.json, else whoever asks                       ->  the cap

Of two shards with the same draws (a conversion that replaced one, a commit that was cut off and drawn again) the one
committed last stays; one of a part that this cache draws no more is deleted. A folder without ``shard.json`` was never
committed, or was being deleted, and is deleted; so is a folder whose ``shard.json`` is not whole, whose draws are then
open. Counters, events and history begin again.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import time
from bisect import insort
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cachetool.cache.catalog import FIRST_PAGES, PAGE_BYTES, Catalog, Connection, event
from cachetool.cache.holders import holder_of, live_locks
from cachetool.cache.layout import LAYOUT_VERSION, SHARD_FILE, Layout
from cachetool.cache.marker import mark
from cachetool.cache.marker import settings as marked
from cachetool.cache.records import Record, read_shard_json, record_bound, unseal
from cachetool.core.errors import CacheToolError, CatalogError, UsageError
from cachetool.core.names import Id
from cachetool.core.ranges import Range, Ranges, difference, overlaps, pairs, union
from cachetool.core.schema import Schema
from cachetool.proc.disk import limit_error
from cachetool.proc.folders import fsync_folder, tree_bytes

__all__ = [
    "Found",
    "Rebuilt",
    "current",
    "open_draws",
    "rebuild",
    "scan",
    "without_doubles",
]

_ROW_BYTES = 600
"""What a shard takes in the catalog, roughly, indices included."""


@dataclass(frozen=True, slots=True)
class Rebuilt:
    """What the shards gave."""

    shards: int
    samples: int
    sources: int
    bad: tuple[tuple[str, str], ...]
    """Folders that were deleted because their ``shard.json`` is not whole, and why."""
    deleted: tuple[str, ...]
    """Folders that were never committed, whose samples a newer shard holds, or whose part is drawn elsewhere."""
    max_size: int


@dataclass(slots=True)
class Found:
    """What the folders hold, newest knowledge first."""

    shards: list[Record] = field(default_factory=list)
    schemas: dict[str, tuple[float, Any]] = field(default_factory=dict)
    progress: dict[str, tuple[tuple[int, float], Record]] = field(default_factory=dict)
    """Of each source the newest: version, time of its commit (in the order of :func:`without_doubles`), record."""
    bad: list[tuple[Id, str]] = field(default_factory=list)
    unfinished: list[Id] = field(default_factory=list)

    def learn(self, value: Record) -> None:
        """Keep the newest record of a source."""
        progress, at = value.get("progress"), (value["since"], value.get("created", 0.0))
        if progress is not None and self.progress.get(progress["id"], ((-1, 0.0),))[0] < at:
            self.progress[progress["id"]] = (at, progress)


def rebuild(layout: Layout, *, max_size: int | None = None) -> Rebuilt:
    """Replace the catalog; ``max_size`` is the cap where no file tells it any more.

    Raises :class:`CatalogError` while another process uses the cache, and when the cap is not known.
    """
    holder_of(layout.holders)  # whoever rebuilds at the same moment sees this process, and one of the two gives up
    old = Catalog(layout.catalog)
    with _locked(old):
        if others := live_locks(layout.holders):
            who = ", ".join(f"pid {pid}" if pid else "a process elsewhere" for pid in others)
            raise CatalogError(
                f"the catalog of {layout.root} cannot be rebuilt while {who} uses the cache; stop it first"
            )
        records = scan(layout)
        kept, superseded = current(records)
        settings: dict[str, Any] = {**marked(layout)}
        if settings.setdefault("max_size", max_size) is None:
            raise CatalogError(
                f"the cap of {layout.root} was lost with its catalog and {layout.marker.name}; say what it was:"
                f" cachetool verify --repair --max-size SIZE --cache {layout.root}"
            )
        if marked(layout) != (asked := {name: settings.get(name, 0) for name in ("max_size", "min_free")}):
            mark(layout, **asked)
        for name in (*records.unfinished, *superseded, *(name for name, _ in records.bad)):
            layout.remove(layout.shard(name), first=SHARD_FILE)
        # First, and the new one stays below the cap beside the old. Nothing is in it while the catalog is locked.
        layout.remove(layout.catalog.with_name(layout.catalog.name + "-journal"))
        _write(layout, records, kept, settings)
    old.close()
    return Rebuilt(
        shards=len(kept),
        samples=sum(value["samples"] for value in kept),
        sources=len(records.progress),
        bad=tuple(records.bad),
        deleted=(*records.unfinished, *superseded),
        max_size=settings["max_size"],
    )


@contextlib.contextmanager
def _locked(old: Catalog) -> Iterator[None]:
    """Keep others from writing to a catalog that still can be; a garbled one keeps them out by itself."""
    transaction = old.write()
    try:
        transaction.__enter__()
    except CacheToolError:
        yield
        return
    try:
        yield
    finally:
        with contextlib.suppress(CacheToolError):  # nothing was written, and by now another file is in its place
            transaction.__exit__(None, None, None)


def scan(layout: Layout, *, leave_out: Collection[str] = ()) -> Found:
    """Read every ``shard.json``, but of shards to ``leave_out``, and every record beside the listings."""
    records = Found()
    if not layout.shards.is_dir():
        return records
    for entry in sorted(os.scandir(layout.shards), key=lambda entry: entry.name):
        if not Id.fits(entry.name) or not entry.is_dir(follow_symlinks=False) or entry.name in leave_out:
            continue  # what is not ours is left alone
        folder = Path(entry.path)
        if not (folder / SHARD_FILE).exists():
            records.unfinished.append(Id(entry.name))
            continue
        try:
            value = _checked(folder)
            schema = records.schemas.setdefault(
                value["dataset"], (value["declared"] or value["created"], value["schema"])
            )
            if schema[1] != value["schema"]:
                raise ValueError(f"its schema is not that of dataset {value['dataset']}")
        except PermissionError:  # says nothing of the bytes
            raise
        except (OSError, ValueError, KeyError, TypeError, UsageError) as error:
            if isinstance(error, OSError) and limit_error(error) is not None:
                raise
            records.bad.append((Id(entry.name), str(error)))
            continue
        records.learn(value)
        for name in ("progress", "schema", "files"):  # thousands of shards: keep what the catalog needs
            value.pop(name, None)
        records.shards.append(value)
    for path in layout.listings.glob("*.json"):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):  # then the shards alone must do
            value = unseal(path)
            Schema.from_json(value["schema"])
            records.schemas.setdefault(
                value["dataset"], (value["declared"] or value.get("created", 0.0), value["schema"])
            )
            records.learn(value)
    return records


def _checked(folder: Path) -> Record:
    value = read_shard_json(folder)
    if value["layout"] > LAYOUT_VERSION:
        raise ValueError(f"{folder / SHARD_FILE} has layout {value['layout']}, this cachetool knows {LAYOUT_VERSION}")
    Schema.from_json(value["schema"])
    if not (folder / value["data"]).exists():
        raise ValueError(f"{folder / value['data']} is missing")
    return value


def current(records: Found) -> tuple[list[Record], list[Id]]:
    """The shards that belong into the catalog, in the order of their commits, and the ids of the others: their samples
    are in newer ones, or they are of a part that their cache draws no more."""
    parts = {
        (id, progress["cut"], part)
        for id, (_, progress) in records.progress.items()
        for part, _, _ in json.loads(progress["parts"])
    }

    def is_ours(value: Record) -> bool:
        return value["source"] not in records.progress or (value["source"], value["cut"], value["part"]) in parts

    kept, superseded = without_doubles(filter(is_ours, records.shards))
    return kept, superseded + [Id(value["id"]) for value in records.shards if not is_ours(value)]


def without_doubles(shards: Iterable[Record]) -> tuple[list[Record], list[Id]]:
    """Shards in the order of their commits without those whose samples newer ones hold, and the ids of these."""
    shards = list(shards)
    kept: list[Record] = []
    superseded = _torn(shards)
    lineages: set[str] = set()
    draws_by_pass: dict[tuple[str, int, int], list[Range]] = {}
    for value in sorted(shards, key=lambda value: (value["since"], value["created"]), reverse=True):
        if value["id"] in superseded:
            continue
        lineages.update(value.get("ancestors", ()))
        ranges = union(value["draws"]) if value["source"] is not None else ()
        others = draws_by_pass.setdefault((value["source"], value["part"], value["pass_number"]), [])
        if value["lineage"] in lineages or any(overlaps(others, start, stop) for start, stop in ranges):
            superseded.append(Id(value["id"]))
            continue
        for draws in ranges:
            insort(others, draws)
        lineages.add(value["lineage"])
        kept.append(value)
    return sorted(kept, key=lambda value: (value["seq"], value["since"])), superseded


def _torn(shards: Sequence[Record]) -> list[Id]:
    """Ids of parts that were to replace a shard which is still there, while other parts are not: their commit was cut
    off, and the old shard holds all of it. (Or those parts were evicted since: then they come back with it.)"""
    here = {name for value in shards for name in (value["id"], value["lineage"])}
    named = here.union(*(value.get("ancestors", ()) for value in shards))
    return [
        Id(value["id"])
        for value in shards
        if not named.issuperset(value.get("together", ())) and not here.isdisjoint(value.get("ancestors", ()))
    ]


def _write(layout: Layout, records: Found, kept: list[Record], settings: dict[str, int]) -> None:
    aside, *beside = layout.catalog_asides
    for path in layout.catalog_asides:
        layout.remove(path)
    pages = FIRST_PAGES
    while 2 * pages * PAGE_BYTES < 3 * _ROW_BYTES * len(kept):
        pages *= 2
    catalog = Catalog(aside)
    catalog.create(max_size=settings["max_size"], min_free=settings.get("min_free", 0), pages=pages)
    with catalog.write() as connection:
        newest = max([at[0] for at, _ in records.progress.values()] + [value["since"] for value in kept], default=0)
        last = math.floor(max((value["seq"] for value in kept), default=0))
        connection.execute("UPDATE cache SET version = ?, next_seq = ?", (newest + 1, last + 1))
        for name, (declared, schema) in records.schemas.items():
            connection.execute(
                "INSERT INTO datasets (name, schema, created) VALUES (?, ?, ?)", (name, json.dumps(schema), declared)
            )
        connection.executemany(
            "INSERT INTO shards (id, seq, dataset, format, state, samples, payload, bytes, since, created, epochs,"
            " used, source, part, pass_number, draws, content, digest, lineage) VALUES (:id, :seq, :dataset, :format,"
            " 'ready', :samples, :payload, :bytes, :since, :created, :epochs, :used, :source, :part, :pass_number,"
            " :draws, :content, :digest, :lineage)",
            _rows(layout, kept),
        )
        for _, progress in records.progress.values():
            if progress["dataset"] in records.schemas:
                _add_progress(connection, layout, records, progress, kept)
        event(connection, time.time(), "rebuilt", str(layout.root), f"catalog made from {len(kept)} shards")
    catalog.close()
    for path in beside:
        layout.remove(path)
    layout.remove(layout.history)
    # The old one stays until this one is whole: killed before here, the next repair begins again.
    os.replace(aside, layout.catalog)
    fsync_folder(layout.root)


def _rows(layout: Layout, kept: list[Record]) -> Iterator[Record]:
    for value in kept:
        nbytes = tree_bytes(layout.shard(Id(value["id"])))
        yield {**value, "bytes": nbytes, "draws": json.dumps(value["draws"])}


def _add_progress(connection: Connection, layout: Layout, records: Found, progress: Record, kept: list[Record]) -> None:
    """A source's row, and its open draws: those of the newest record without those of shards that are here."""
    listing = layout.listing(Id(progress["id"]))
    schema = records.schemas[progress["dataset"]][1]
    columns = {column["name"] for column in connection.execute("PRAGMA table_info(sources)")}
    row = {name: value for name, value in progress.items() if name in columns} | {
        "began_at_moves": None,
        "served": 0,
        "options": json.dumps(progress["options"]),
        "bytes": (tree_bytes(listing) if listing.is_dir() else 0) + record_bound(schema, layout.disk_block),
    }
    names, marks = ", ".join(row), ", ".join(f":{name}" for name in row)
    connection.execute(f"INSERT INTO sources ({names}) VALUES ({marks})", row)
    source, present = progress["id"], progress["pass_number"]
    reopened = [
        (number, part, start, stop)
        for number, part, *draws in progress["reopened"]
        for start, stop in difference([draws], _draws_in_shards(kept, source, number, part))
    ]
    claims = [(source, *claim, 1) for claim in reopened]
    for part, frontier, size, pending in open_draws(progress, kept):
        connection.execute("INSERT INTO parts VALUES (?, ?, ?, ?)", (source, part, frontier, size))
        again = [(start, stop) for number, other, start, stop in reopened if (number, other) == (present, part)]
        claims += [(source, present, part, start, stop, 0) for start, stop in difference(pending, again)]
    connection.executemany(
        "INSERT INTO claims (source, pass_number, part, start, stop, reopened) VALUES (?, ?, ?, ?, ?, ?)", claims
    )


def open_draws(progress: Record, kept: Collection[Record]) -> Iterator[tuple[int, int, int, Ranges]]:
    """Each part of a source here: its number, how far its pass was drawn, its size, and which ranges below that are
    open: those of the source's newest record without those of shards that are here."""
    for part, before, size in {part[0]: part for part in json.loads(progress["parts"])}.values():
        here = _draws_in_shards(kept, progress["id"], progress["pass_number"], part)
        frontier = max([before] + [stop for _, stop in here])
        pending = [(start, stop) for other, start, stop in progress["pending"] if other == part]
        yield part, frontier, size, difference([*pending, (before, frontier)], here)


def _draws_in_shards(kept: Iterable[Record], source: str, pass_number: int, part: int) -> Ranges:
    """The draws of a part in a pass that are in shards."""
    of = source, pass_number, part
    shards = (value for value in kept if (value["source"], value["pass_number"], value["part"]) == of)
    return pairs(draws for value in shards for draws in value["draws"])
