"""``doctor``: whether this place is fit for a cache, and whether the cache there is well.

It looks and reports, and changes nothing: a small lock file is made and removed again, to see locks work.
"""

from __future__ import annotations

import contextlib
import errno
import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from cachetool.cache.catalog import Catalog, library_version
from cachetool.cache.draws import reopened
from cachetool.cache.holders import lock_states, locks_work
from cachetool.cache.layout import ALLOW_SHARED, Layout, cache_option, loose, place_of, refuse_long, root_of
from cachetool.cache.marker import look, settings
from cachetool.cache.removal import leaseholders
from cachetool.cache.repair import strays
from cachetool.cache.usage import WORDS, is_copied, measure
from cachetool.core.errors import CatalogError
from cachetool.core.units import format_size
from cachetool.proc.disk import ALLOW, DISK_BLOCK, file_system, is_network, refused_in
from cachetool.proc.folders import tree_bytes

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
    path = place_of(root_of(root))
    refuse_long(path)
    layout = Layout(path)
    exists, wrong = look(layout)
    findings = [Finding("cache", "ok" if exists else "note", f"{path}{'' if exists else ': not made yet'}")]
    if wrong is not None:
        findings.append(Finding(layout.marker.name, "bad", f"it {wrong}; {_mended(layout)}"))
    if exists:
        findings += [
            Finding("folder", "bad", f"{folder.name}/ is missing; {_mended(layout)}")
            if folder == layout.shards
            else Finding("folder", "note", f"{folder.name}/ is missing; the next command makes it again")
            for folder in layout.missing()
        ]
    if (why := loose(layout.root)) is not None:
        allowed = os.environ.get(ALLOW_SHARED) == "1"
        text = f"{why}; {ALLOW_SHARED}=1 allows it" if allowed else f"refused: {why}, or set {ALLOW_SHARED}=1"
        findings.append(Finding("owner", "note" if allowed else "bad", text))
    findings += _place(layout)
    if not exists:
        return findings
    if (denied := _denied(layout)) is not None:
        findings.append(Finding("permission", "bad", str(denied)))
    if denied is None or denied.readable:
        findings += _catalog(layout)
    return findings


def _denied(layout: Layout) -> CatalogError | None:
    paths = [layout.root, *layout.folders, layout.catalog, _journal(layout)]
    if os.access(layout.shards, os.R_OK | os.X_OK):
        paths += sorted(path for path in layout.shards.iterdir() if path.is_dir())
    return refused_in(layout.root, *paths)


def _journal(layout: Layout) -> Path:
    return layout.catalog.with_name(f"{layout.catalog.name}-journal")


def _mended(layout: Layout) -> str:
    return f"run: cachetool verify --repair{cache_option(layout.root)}"


def _place(layout: Layout) -> list[Finding]:
    name = file_system(layout.root)
    if not is_network(name):
        block = layout.disk_block
        larger = f", where the smallest file takes {format_size(block)}" if block > DISK_BLOCK else ""
        kind = Finding("file system", "ok", name + larger)
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
    try:
        works = locks_work(layout.holders)
    except PermissionError:
        return [kind, disk, Finding("locks", "bad", "this user may make none: no pull and no new reader can begin")]
    except OSError as error:
        if error.errno not in (errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.EIO):
            raise
        return [
            kind,
            Finding("disk", "bad", f"{format_size(free)} free, but nothing can be written: {_refused(error)}"),
        ]
    text = "a lock of one process keeps another out" if works else "they keep nobody out: put the cache on another disk"
    return [kind, disk, Finding("locks", "ok" if works else "bad", text)]


def _refused(error: OSError) -> str:
    if error.errno == errno.EROFS:
        return (
            "the disk is mounted read-only; readers that have a snapshot go on, but no new one can begin: make it"
            " writable again, for example by mount -o remount,rw"
        )
    return f"{error.strerror}; no pull and no new reader can use this cache"


def _catalog(layout: Layout) -> list[Finding]:
    catalog = Catalog(layout.catalog)
    try:
        trouble = catalog.trouble()
    except CatalogError as error:
        return [Finding("catalog", "bad", str(error))]
    if trouble is not None:
        return [Finding("catalog", "bad", f"{trouble}; {_mended(layout)}")]
    try:
        with catalog.read() as connection:
            mode = connection.execute("PRAGMA journal_mode").fetchone()[0]
            schema = connection.execute("PRAGMA user_version").fetchone()[0]
            numbers = connection.execute("SELECT version, max_size, min_free FROM cache").fetchone()
            usage = measure(connection, layout)
            holders = connection.execute("SELECT id, pid, host, what, started FROM holders ORDER BY started").fetchall()
            leases = leaseholders(connection)
            missing = reopened(connection)
            errors = connection.execute(
                "SELECT at, text FROM events WHERE kind = 'error' ORDER BY id DESC LIMIT 1"
            ).fetchall()
        copied = is_copied(catalog, layout)
        left = [stray for stray in strays(catalog, layout) if stray.ours]
    finally:
        catalog.close()
    sizes = [format_size(path.stat().st_size) for path in (layout.catalog, _journal(layout)) if path.exists()]
    findings = [
        Finding("catalog", "ok", f"sound, schema {schema}, version {numbers['version']}, {' + '.join(sizes)}"),
        Finding("SQLite", "ok" if mode == "persist" else "bad", f"{library_version()}, journal mode {mode}"),
        Finding(
            "cap",
            "ok" if usage.total <= numbers["max_size"] else "bad",
            f"{format_size(usage.total)} of {format_size(numbers['max_size'])} used,"
            f" {format_size(usage.reserved)} of it reserved, {format_size(numbers['min_free'])} of the disk kept free",
        ),
    ]
    findings += [
        Finding("charged", "ok", f"{format_size(size)}: {WORDS[name]}") for name, size in usage.rows().items() if size
    ]
    with contextlib.suppress(OSError):  # what others delete meanwhile, and what this user may not look into
        findings.append(Finding("on disk", "ok", f"{format_size(tree_bytes(layout.root))} in all files and folders"))
    if copied:
        text = f"the cache came from a disk with other blocks; {_NEXT_COUNTS}"
        findings.append(Finding("cap", "note", text))
    states = lock_states(layout.holders)
    for row in holders:
        alive = states.pop(row["id"], False)
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(row["started"]))
        text = f"pid {row['pid']} on {row['host']} ({row['what']}) since {since}"
        findings.append(Finding("holder", "ok" if alive else "note", text if alive else f"{text}: dead; {_NEXT}"))
    findings += [
        Finding("holder", "note", f"lock file of a dead process; {_NEXT}") for live in states.values() if not live
    ]
    findings += [Finding("lease", "ok", text) for text in leases]
    if left:
        size = format_size(sum(stray.bytes for stray in left))
        findings.append(Finding("left over", "bad", f"{len(left)} files or folders, {size}; {_mended(layout)}"))
    findings += [
        Finding(
            "missing",
            "bad" if row.draws > row.tried else "note",
            f"{row.draws} damaged draws of {row.url} will be fetched again by the next pull",
        )
        for row in missing
    ]
    said = settings(layout)
    if any(numbers[name] != value for name, value in said.items()):
        text = f"{layout.marker.name} says {said}, the catalog, which decides, another cap; {_mended(layout)}"
        findings.append(Finding(layout.marker.name, "bad", text))
    findings += [
        Finding("last error", "note", f"{time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(row['at']))}: {row['text']}")
        for row in errors
    ]
    return findings


_NEXT_COUNTS = "the next command that uses it counts its bytes as they are here"
_NEXT = "the next pull, evict or snapshot frees what it held"
