"""``doctor``: whether this place is fit for a cache, and whether the cache there is well.

It looks and reports, and changes nothing: a small lock file is made and removed again, to see locks work.
"""

from __future__ import annotations

import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from cachetool.cache.catalog import Catalog, library_version
from cachetool.cache.filesystem import ALLOW, file_system, is_network
from cachetool.cache.holders import lock_states, locks_work
from cachetool.cache.layout import Layout, cache_option, root_of
from cachetool.cache.removal import leaseholders
from cachetool.cache.repair import quarantined, strays
from cachetool.cache.usage import measure
from cachetool.units import format_size

__all__ = ["Finding", "examine"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at."""

    what: str
    state: Literal["ok", "note", "bad"]
    text: str
    """What was found, and what to do about it when that is not well."""

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return asdict(self)


def examine(root: str | Path | None = None) -> list[Finding]:
    """Look at the cache at ``root`` (None: the default one), or at the place where it would be made.

    Raises :class:`UsageError` for a folder of other things and :class:`CatalogError` for one of a newer cachetool.
    """
    path = root_of(root)
    layout = Layout(path)
    exists = layout.check()
    found = [Finding("cache", "ok" if exists else "note", f"{path}{'' if exists else ': not made yet'}")]
    found += _place(layout)
    if exists:
        found += _catalog(layout)
    return found


def _place(layout: Layout) -> list[Finding]:
    name = file_system(layout.root)
    if not is_network(name):
        kind = Finding("file system", "ok", name)
    elif os.environ.get(ALLOW) == "1":
        kind = Finding(
            "file system", "note", f"{name}, a network file system, allowed by {ALLOW}=1: nothing is promised"
        )
    else:
        kind = Finding("file system", "bad", f"{name}, a network file system: put the cache on a local disk")
    free, inodes = layout.free_disk(), layout.free_inodes()
    disk = Finding("disk", "ok", f"{format_size(free)} free")
    if inodes is not None and inodes < 1000:
        disk = Finding(
            "disk", "bad", f"{format_size(free)} free, but room for {inodes} files only: it runs out of inodes"
        )
    if not layout.holders.is_dir():
        return [kind, disk]
    works = locks_work(layout.holders)
    text = "a lock of one process keeps another out" if works else "they keep nobody out: put the cache on another disk"
    return [kind, disk, Finding("locks", "ok" if works else "bad", text)]


def _catalog(layout: Layout) -> list[Finding]:
    catalog = Catalog(layout.catalog)
    trouble = catalog.trouble()
    if trouble is not None:
        return [Finding("catalog", "bad", f"{trouble}; run: cachetool verify --repair{cache_option(layout.root)}")]
    try:
        with catalog.read() as connection:
            mode = connection.execute("PRAGMA journal_mode").fetchone()[0]
            schema = connection.execute("PRAGMA user_version").fetchone()[0]
            meta = {row["key"]: row["value"] for row in connection.execute("SELECT key, value FROM meta")}
            usage = measure(connection, layout)
            holders = connection.execute("SELECT id, pid, host, what, started FROM holders ORDER BY started").fetchall()
            leases = leaseholders(connection)
            aside = list(quarantined(connection))
            errors = connection.execute(
                "SELECT at, text FROM events WHERE kind = 'error' ORDER BY id DESC LIMIT 1"
            ).fetchall()
        left = [stray for stray in strays(catalog, layout) if stray.ours]
    finally:
        catalog.close()
    journal = layout.catalog.with_name(layout.catalog.name + "-journal")
    sizes = [format_size(path.stat().st_size) for path in (layout.catalog, journal) if path.exists()]
    found = [
        Finding("catalog", "ok", f"sound, schema {schema}, version {meta['version']}, {' + '.join(sizes)}"),
        Finding("SQLite", "ok" if mode == "persist" else "bad", f"{library_version()}, journal mode {mode}"),
        Finding(
            "cap",
            "ok" if usage.total <= meta["max_size"] else "bad",
            f"{format_size(usage.total)} of {format_size(meta['max_size'])} used, {format_size(usage.reserved)} of it"
            f" reserved, {format_size(meta['min_free'])} of the disk kept free",
        ),
    ]
    states = lock_states(layout.holders)
    for row in holders:
        alive = states.pop(row["id"], False)
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(row["started"]))
        text = f"pid {row['pid']} on {row['host']} ({row['what']}) since {since}"
        found.append(Finding("holder", "ok" if alive else "note", text if alive else f"{text}: dead; {_NEXT}"))
    found += [
        Finding("holder", "note", f"lock file of a dead process; {_NEXT}") for live in states.values() if not live
    ]
    found += [Finding("lease", "ok", text) for text in leases]
    if left:
        size = format_size(sum(stray.bytes for stray in left))
        found.append(
            Finding(
                "left over",
                "bad",
                f"{len(left)} files or folders, {size}; run: cachetool verify --repair{cache_option(layout.root)}",
            )
        )
    if aside:
        size = format_size(sum(each["bytes"] for each in aside))
        found.append(
            Finding(
                "quarantine", "note", f"{len(aside)} shards, {size}; see: cachetool verify{cache_option(layout.root)}"
            )
        )
    found += [
        Finding("last error", "note", f"{time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(row['at']))}: {row['text']}")
        for row in errors
    ]
    return found


_NEXT = "the next pull, evict or snapshot frees what it held"
