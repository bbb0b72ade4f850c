"""Comparison of the catalog with the disk, and the functions that make the two fit again.

Each function here is safe beside living processes. Rows change inside transactions. A folder counts as stray only when
rows that are read after it do not know it. A shard counts as missing only when its row still exists afterwards.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from cachetool.cache.catalog import Catalog, Row, bump, event
from cachetool.cache.draws import reopen, source_row
from cachetool.cache.holders import Holder
from cachetool.cache.layout import SHARD_FILE, Layout
from cachetool.cache.records import Record, unseal, write_source_record
from cachetool.cache.removal import delete_trash, retire, sweep
from cachetool.core.names import Id
from cachetool.proc.folders import disk_bytes, fsync_folder, tree_bytes

__all__ = [
    "GivenUp",
    "Stray",
    "charge",
    "correct_row",
    "give_up",
    "misnamed",
    "remove_stray",
    "rename_back",
    "row_differs",
    "strays",
]

_OF_DATA = ("dataset", "format", "samples", "payload", "content", "digest", "source", "part", "pass_number")
_BOUND = (*_OF_DATA, "since", "seq", "created", "lineage")
"""Columns of a row that ``shard.json`` has too."""


@dataclass(frozen=True, slots=True)
class Stray:
    """A file or folder in the cache's folder that the catalog does not know."""

    path: Path
    ours: bool
    """True if cachetool made it. Anything else is reported and left alone."""
    bytes: int


def strays(catalog: Catalog, layout: Layout) -> list[Stray]:
    """Return every file and folder that no row accounts for, largest first."""
    # The folders are read before the rows. The other way round, a shard whose row is inserted in
    # between would look like a stray and be deleted.
    shards, listings = _entries(layout.shards), _entries(layout.listings)
    with catalog.read() as connection:
        shard_ids = {row["id"] for row in connection.execute("SELECT id FROM shards")}
        sources = {row["id"] for row in connection.execute("SELECT id FROM sources")}
        holders = {row["id"] for row in connection.execute("SELECT id FROM holders")}
    unknown = [(path, Id.fits(path.name)) for path in shards if path.name not in shard_ids]
    for path in listings:
        source, _, owner = path.name.partition(".")
        if not (source in sources and owner in ("", "json", *holders)):
            unknown.append((path, Id.fits(source)))
    names = {path.name for path in (layout.tag, layout.marker, layout.catalog, *layout.folders)}
    names |= {layout.history.name, layout.history_aside.name}
    names |= {f"{layout.catalog.name}-journal", f"{layout.catalog.name}-lock"}
    for path in layout.root.iterdir():
        if path.name not in names:
            unknown.append((path, path in (layout.marker_aside, *layout.catalog_asides)))
    unknown += [(path, False) for path in _entries(layout.holders) if path.suffix != ".lock"]
    # A path that no longer exists was being deleted when the folder was read.
    there = [Stray(path, ours, _bytes(path)) for path, ours in unknown if os.path.lexists(path)]
    return sorted(there, key=lambda stray: (-stray.bytes, stray.path))


def _entries(folder: Path) -> list[Path]:
    try:
        with os.scandir(folder) as entries:
            return [Path(entry.path) for entry in entries]
    except (FileNotFoundError, NotADirectoryError):
        # Other checks report a deleted folder.
        return []


def _bytes(path: Path) -> int:
    try:
        return tree_bytes(path) if path.is_dir() and not path.is_symlink() else disk_bytes(path.lstat())
    except FileNotFoundError:
        return 0


def remove_stray(catalog: Catalog, layout: Layout, stray: Stray) -> str:
    """Delete a stray that cachetool made; return what was done."""
    with catalog.write() as connection:
        in_catalog = connection.execute("SELECT 1 FROM shards WHERE id = ?", (stray.path.name,)).fetchone()
        # A writer may have inserted the row since the stray was found.
        if stray.path.parent == layout.shards and in_catalog:
            return "kept, because it is in the catalog now"
        layout.remove(stray.path)
    return "deleted"


def misnamed(layout: Layout, catalogued: Collection[str] | None) -> list[tuple[Path, Record]]:
    """Return folders that hold a shard under a wrong name while the right name is free: their paths and records.

    Only shards that are ``catalogued`` are returned; None means any, for a catalog that cannot be read.
    """
    folders = []
    for path in _entries(layout.shards):
        if (
            path.is_symlink()
            or (catalogued is not None and path.name in catalogued)
            or not (path / SHARD_FILE).is_file()
        ):
            continue
        try:
            value = unseal(path / SHARD_FILE)
        except (OSError, ValueError):
            continue
        id = value.get("id")
        if not Id.fits(id):
            continue
        free = not os.path.lexists(layout.shard(Id(id)))
        if free and id != path.name and (catalogued is None or id in catalogued):
            folders.append((path, value))
    return folders


def rename_back(layout: Layout, path: Path, id: Id) -> None:
    """Give a shard's folder its own name again."""
    # The rename fails where a folder with contents appeared meanwhile, so nothing is overwritten.
    os.rename(path, layout.shard(id))
    fsync_folder(layout.shards)


def row_differs(row: Row, value: Record) -> list[str]:
    """Return the names of the columns in which a row and its ``shard.json`` disagree."""
    wrong = [name for name in _BOUND if row[name] != value[name]]
    if json.loads(row["draws"] or "[]") != value["draws"]:
        wrong.append("draws")
    return wrong


def correct_row(catalog: Catalog, id: str, value: Record) -> None:
    """Write the values of ``shard.json`` into the shard's row."""
    columns = {name: value[name] for name in _BOUND} | {"draws": json.dumps(value["draws"])}
    with catalog.write() as connection:
        connection.execute(
            f"UPDATE shards SET {', '.join(f'{name} = :{name}' for name in columns)} WHERE id = :id",
            {**columns, "id": id},
        )
        # A loader that knows the shards of this version would otherwise not look again.
        bump(connection)


def charge(catalog: Catalog, id: str, nbytes: int) -> None:
    """Correct the bytes that a shard is charged."""
    with catalog.write() as connection:
        connection.execute("UPDATE shards SET bytes = ? WHERE id = ?", (nbytes, id))


@dataclass(frozen=True, slots=True)
class GivenUp:
    """The result of giving up a damaged shard."""

    action: str
    source: str | None = None
    """Id of the source whose draws were opened."""
    draws: int = 0


def give_up(catalog: Catalog, layout: Layout, holder: Holder, id: Id, why: str) -> GivenUp:
    """Retire a damaged shard and open its draws again, so that the next pull fetches exactly those."""
    with catalog.write() as connection:
        row = connection.execute("SELECT * FROM shards WHERE id = ? AND state = 'ready'", (id,)).fetchone()
        if row is None:
            return GivenUp("it was evicted already")
        event(connection, time.time(), "corrupt", id, why)
        retire(connection, [id], reason="corrupt", policy="verify")
        count, source = 0, source_row(connection, row["source"] or "")
        if source is not None:
            count = reopen(connection, source, row["pass_number"], row["part"], json.loads(row["draws"]))
            # The records in the shards still count these draws as done. Without this one, a rebuild
            # of a lost catalog would forget that they are open.
            write_source_record(connection, layout, source.id)
        trash = sweep(connection, holder)
    delete_trash(catalog, layout, trash)
    done = "removed" if id in trash else "it is deleted when its readers end"
    return GivenUp(f"{done}, {count} draws must be repeated", None if source is None else source.id, count)
