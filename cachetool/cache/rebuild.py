"""Rebuild of the catalog from the shards, when it is lost, garbled, or older than the shards.

::

    every shards/<id>/shard.json, checksum and id checked   ->  shards in their order, datasets, draws done
    newest record of each source, in those or beside its listing  ->  sources, draws of shards evicted since
    cachetool.json, else the caller                         ->  the cap

Two shards with the same draws come from a conversion that replaced one, or from a commit that was interrupted and drawn
again. The shard that was committed last stays. A shard of a part that this cache no longer draws is deleted. A folder
without ``shard.json`` was never committed, or was being deleted, and is deleted. A folder whose ``shard.json`` is
damaged is deleted too, and its draws are open. Counters, events and history begin again.
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
from cachetool.core.schema import Schema, agreed
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
"""Approximate bytes of a shard in the catalog, indices included."""


@dataclass(frozen=True, slots=True)
class Rebuilt:
    """The result of a rebuild."""

    shards: int
    samples: int
    sources: int
    bad: tuple[tuple[str, str], ...]
    """Folders that were deleted because their ``shard.json`` is damaged, and the reason for each."""
    deleted: tuple[str, ...]
    """Folders that were never committed, whose samples a newer shard holds, or whose part another node draws."""
    max_size: int


@dataclass(slots=True)
class Found:
    """The contents of the folders, as their records describe them."""

    shards: list[Record] = field(default_factory=list)
    schemas: dict[str, tuple[float, Any]] = field(default_factory=dict)
    progress: dict[str, tuple[tuple[int, float], Record]] = field(default_factory=dict)
    """The newest record of each source: version, time of its commit (in the order of :func:`without_doubles`),
    record."""
    bad: list[tuple[Id, str]] = field(default_factory=list)
    unfinished: list[Id] = field(default_factory=list)

    def learn_schema(self, dataset: str, declared: float, plain: Any) -> None:
        """Keep the schema of a dataset, with the facts beside it that hold for all of its shards. Raise
        :class:`ValueError` if it differs from the one known so far."""
        schema = Schema.from_json(plain)
        known = self.schemas.setdefault(dataset, (declared, plain))
        if known[1] == plain:
            return
        if (have := Schema.from_json(known[1])) != schema:
            raise ValueError(f"its schema differs from that of dataset {dataset}")
        self.schemas[dataset] = known[0], agreed(have, schema).to_json()

    def learn(self, value: Record) -> None:
        """Keep the record of a source if it is newer than the one known so far."""
        progress, at = value.get("progress"), (value["since"], value.get("created", 0.0))
        if progress is not None and self.progress.get(progress["id"], ((-1, 0.0),))[0] < at:
            self.progress[progress["id"]] = (at, progress)


def rebuild(layout: Layout, *, max_size: int | None = None) -> Rebuilt:
    """Replace the catalog. ``max_size`` is the cap for the case that no file tells it any more.

    Raises :class:`CatalogError` while another process uses the cache, and when the cap is not known.
    """
    # Another process that rebuilds at the same moment sees this lock, and at least one of the two
    # gives up.
    holder_of(layout.holders)
    old = Catalog(layout.catalog)
    with _locked(old):
        # By the lock files and not by the catalog, which may not name the processes that use the
        # cache.
        if others := live_locks(layout.holders):
            who = ", ".join(
                f"pid {pid}" if pid else "a process on another machine or in another container" for pid in others
            )
            raise CatalogError(
                f"the catalog of {layout.root} cannot be rebuilt while {who} uses the cache; stop it first"
            )
        records = scan(layout)
        kept, superseded = current(records)
        settings: dict[str, Any] = {**marked(layout)}
        if settings.setdefault("max_size", max_size) is None:
            raise CatalogError(
                f"the cap of {layout.root} was lost with its catalog and {layout.marker.name}; set it again with:"
                f" cachetool verify --repair --max-size SIZE --cache {layout.root}"
            )
        # Written before anything is deleted, so that a rebuild that is killed leaves the cap on the
        # disk.
        if marked(layout) != (asked := {name: settings.get(name, 0) for name in ("max_size", "min_free")}):
            mark(layout, **asked)
        # shard.json is deleted first in each folder, so a folder that is deleted only halfway is no
        # shard for the next rebuild.
        for name in (*records.unfinished, *superseded, *(name for name, _ in records.bad)):
            layout.remove(layout.shard(name), first=SHARD_FILE)
        # The journal is deleted first, so that the new catalog beside the old one stays below the
        # cap. Nothing is in the journal while the catalog is locked.
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
    """Keep other processes from writing to the old catalog while it can still be locked. A garbled one keeps them out
    by itself."""
    transaction = old.write()
    try:
        transaction.__enter__()
    except CacheToolError:
        yield
        return
    try:
        yield
    finally:
        # Safe to ignore: nothing was written, and by now another file is in the old catalog's
        # place.
        with contextlib.suppress(CacheToolError):
            transaction.__exit__(None, None, None)


def scan(layout: Layout, *, leave_out: Collection[str] = ()) -> Found:
    """Read every ``shard.json``, except those of shards to ``leave_out``, and every record beside the listings."""
    records = Found()
    if not layout.shards.is_dir():
        return records
    # Sorted by name, so that the same folders give the same catalog and the same messages.
    for entry in sorted(os.scandir(layout.shards), key=lambda entry: entry.name):
        # Folders that cachetool did not make are left alone, and links are not followed.
        if not Id.fits(entry.name) or not entry.is_dir(follow_symlinks=False) or entry.name in leave_out:
            continue
        folder = Path(entry.path)
        if not (folder / SHARD_FILE).exists():
            records.unfinished.append(Id(entry.name))
            continue
        try:
            value = _checked(folder)
            records.learn_schema(value["dataset"], value["declared"] or value["created"], value["schema"])
        except PermissionError:
            # This error says nothing about the bytes. Treating it as damage would delete a good
            # shard.
            raise
        except (OSError, ValueError, KeyError, TypeError, UsageError) as error:
            # Too many open files is a limit of this process and no damage of the shard.
            if isinstance(error, OSError) and limit_error(error) is not None:
                raise
            records.bad.append((Id(entry.name), str(error)))
            continue
        records.learn(value)
        # There may be thousands of shards, so only the values for the catalog stay in memory.
        for name in ("progress", "schema", "files"):
            value.pop(name, None)
        records.shards.append(value)
    for path in layout.listings.glob("*.json"):
        # A damaged record beside the listings is dropped; the records in the shards must do then.
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            value = unseal(path)
            records.learn_schema(value["dataset"], value["declared"] or value.get("created", 0.0), value["schema"])
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
    """Return the shards for the catalog in the order of their commits, and the ids of the others.

    The others are shards whose samples are in newer ones, or whose part this cache no longer draws.
    """
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
    """Return the shards in the order of their commits without those whose samples newer shards hold, and the ids of the
    latter."""
    shards = list(shards)
    kept: list[Record] = []
    superseded = _torn(shards)
    lineages: set[str] = set()
    draws_by_pass: dict[tuple[str, int, int], list[Range]] = {}
    # Newest first, so that of two shards with the same draws or lineage the newer one is met first
    # and stays.
    for value in sorted(shards, key=lambda value: (value["since"], value["created"]), reverse=True):
        if value["id"] in superseded:
            continue
        # Draws alone would not find the old shard of a conversion of data that was not pulled, so
        # the lineages decide as well.
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
    """Return the ids of replacing shards whose commit was interrupted: the replaced shard is still there, while other
    shards of the same commit are missing."""
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
    # The limit becomes at least 1.5 times the expected rows. So the new catalog starts below the
    # three quarters at which admission doubles the limit.
    while 2 * pages * PAGE_BYTES < 3 * _ROW_BYTES * len(kept):
        pages *= 2
    catalog = Catalog(aside)
    catalog.create(max_size=settings["max_size"], min_free=settings.get("min_free", 0), pages=pages)
    with catalog.write() as connection:
        newest = max([at[0] for at, _ in records.progress.values()] + [value["since"] for value in kept], default=0)
        last = math.floor(max((value["seq"] for value in kept), default=0))
        # Above all recorded versions and places, so that every new commit is newer than every
        # record on the disk.
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
    # The counters in the history began before the rebuild, and the new catalog's counters begin at
    # 0.
    layout.remove(layout.history)
    # The old catalog stays until the new one is complete. If the process is killed before this
    # line, the next repair begins again.
    os.replace(aside, layout.catalog)
    fsync_folder(layout.root)


def _rows(layout: Layout, kept: list[Record]) -> Iterator[Record]:
    for value in kept:
        nbytes = tree_bytes(layout.shard(Id(value["id"])))
        yield {**value, "bytes": nbytes, "draws": json.dumps(value["draws"])}


def _add_progress(connection: Connection, layout: Layout, records: Found, progress: Record, kept: list[Record]) -> None:
    """Write a source's row and its open draws: those of the newest record without those of shards that are here."""
    listing = layout.listing(Id(progress["id"]))
    schema = records.schemas[progress["dataset"]][1]
    # The record also has fields that are no columns of this table (parts, pending, reopened).
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
    """Yield for each part of a source here: its number, its frontier, its size, and the open ranges below the frontier.

    The open ranges are those of the source's newest record, without the draws of shards that are here.
    """
    for part, before, size in {part[0]: part for part in json.loads(progress["parts"])}.values():
        here = _draws_in_shards(kept, progress["id"], progress["pass_number"], part)
        # A shard that was committed after the newest record may lie beyond its frontier.
        frontier = max([before] + [stop for _, stop in here])
        pending = [(start, stop) for other, start, stop in progress["pending"] if other == part]
        yield part, frontier, size, difference([*pending, (before, frontier)], here)


def _draws_in_shards(kept: Iterable[Record], source: str, pass_number: int, part: int) -> Ranges:
    """Return the draws of a part in a pass that are in shards."""
    of = source, pass_number, part
    shards = (value for value in kept if (value["source"], value["pass_number"], value["part"]) == of)
    return pairs(draws for value in shards for draws in value["draws"])
