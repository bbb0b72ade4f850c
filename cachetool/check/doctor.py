"""``doctor``: checks if a place is fit for a cache, and if the cache there is sound.

It changes nothing, except that it creates a small lock file and removes it again to test locks.
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
    """The result of one check."""

    what: str
    state: Literal["ok", "note", "bad"]
    text: str
    """The result in words, and what to do if it is not good."""

    def as_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return asdict(self)


def examine(root: str | Path | None = None) -> list[Finding]:
    """Check the cache at ``root`` (None: the default one), or the place where it would be created.

    Raises :class:`UsageError` for a folder of other things and :class:`CatalogError` for a cache of a newer cachetool.
    """
    path = place_of(root_of(root))
    refuse_long(path)
    layout = Layout(path)
    exists, wrong = look(layout)
    findings = [Finding("cache", "ok" if exists else "note", f"{path}{'' if exists else ': not created yet'}")]
    if wrong is not None:
        findings.append(Finding(layout.marker.name, "bad", f"it {wrong}; {_mended(layout)}"))
    if exists:
        findings += [
            Finding("folder", "bad", f"{folder.name}/ is missing; {_mended(layout)}")
            if folder == layout.shards
            else Finding("folder", "note", f"{folder.name}/ is missing; the next command creates it again")
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
    # Without read permission the catalog cannot be checked; the finding above already says so.
    if denied is None or denied.readable:
        findings += _catalog(layout)
    return findings


def _denied(layout: Layout) -> CatalogError | None:
    """Return the error about the first file or folder that this user may not use; None if there is none."""
    paths = [layout.root, *layout.folders, layout.catalog, _journal(layout)]
    # Without this right the folder's entries cannot be listed; the folder itself is in `paths` and is reported.
    if os.access(layout.shards, os.R_OK | os.X_OK):
        paths += sorted(path for path in layout.shards.iterdir() if path.is_dir())
    return refused_in(layout.root, *paths)


def _journal(layout: Layout) -> Path:
    return layout.catalog.with_name(f"{layout.catalog.name}-journal")


def _mended(layout: Layout) -> str:
    """Return the command that repairs the cache, for a message."""
    return f"run: cachetool verify --repair{cache_option(layout.root)}"


def _place(layout: Layout) -> list[Finding]:
    """Return the findings about the file system, the free space and the locks of the place."""
    name = file_system(layout.root)
    if not is_network(name):
        block = layout.disk_block
        larger = f", where the smallest file takes {format_size(block)}" if block > DISK_BLOCK else ""
        kind = Finding("file system", "ok", name + larger)
    elif os.environ.get(ALLOW) == "1":
        kind = Finding(
            "file system",
            "note",
            f"{name}, a network file system, allowed by {ALLOW}=1: samples may be damaged or lost",
        )
    else:
        kind = Finding("file system", "bad", f"{name}, a network file system: put the cache on a local disk")
    free, inodes = layout.free_disk(), layout.free_inodes()
    disk = Finding("disk", "ok", f"{format_size(free)} free")
    # A file system without free inodes refuses new files while bytes are free, so the free bytes alone do not show it.
    if inodes is not None and inodes < 1000:
        disk = Finding(
            "disk",
            "bad",
            f"{format_size(free)} free, but only {inodes} more files fit: the disk is running out of inodes",
        )
    if not layout.holders.is_dir():
        return [kind, disk]
    try:
        works = locks_work(layout.holders)
    except PermissionError:
        return [
            kind,
            disk,
            Finding("locks", "bad", "this user cannot create lock files: no pull and no new reader can start"),
        ]
    except OSError as error:
        # These errors say that nothing can be written, which is a finding. Any other error is a fault of this check.
        if error.errno not in (errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.EIO):
            raise
        return [
            kind,
            Finding("disk", "bad", f"{format_size(free)} free, but nothing can be written: {_refused(error)}"),
        ]
    text = "locks between processes work" if works else "locks do not work here: put the cache on another disk"
    return [kind, disk, Finding("locks", "ok" if works else "bad", text)]


def _refused(error: OSError) -> str:
    """Return the reason why nothing can be written, in words."""
    if error.errno == errno.EROFS:
        return (
            "the disk is mounted read-only; running readers continue, but no new reader can start: make it writable,"
            " for example with: mount -o remount,rw"
        )
    return f"{error.strerror}; no pull and no new reader can use this cache"


def _catalog(layout: Layout) -> list[Finding]:
    """Return the findings about the catalog, the cap, the holders and the leases."""
    catalog = Catalog(layout.catalog)
    try:
        trouble = catalog.trouble()
    except CatalogError as error:
        return [Finding("catalog", "bad", str(error))]
    if trouble is not None:
        return [Finding("catalog", "bad", f"{trouble}; {_mended(layout)}")]
    try:
        # One transaction, so that all numbers belong to the same version while pulls and trainers continue.
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
    # Other processes may delete files meanwhile, and this user may not be allowed to look into every folder.
    with contextlib.suppress(OSError):
        findings.append(Finding("on disk", "ok", f"{format_size(tree_bytes(layout.root))} in all files and folders"))
    if copied:
        text = f"the cache was copied from a disk with another block size; {_NEXT_COUNTS}"
        findings.append(Finding("cap", "note", text))
    states = lock_states(layout.holders)
    for row in holders:
        # Kernel locks decide who lives: a pid may belong to another process by now. Locks that no row names remain in
        # `states`.
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
        findings.append(
            Finding(
                "left over",
                "bad",
                f"{len(left)} files or folders that the catalog does not have, {size}; {_mended(layout)}",
            )
        )
    findings += [
        Finding(
            "missing",
            "bad" if row.draws > row.tried else "note",
            f"{row.draws} damaged draws of {row.url} will be fetched again by the next pull",
        )
        for row in missing
    ]
    # cachetool.json gives the cap when the catalog is lost, so it must not differ from the catalog.
    said = settings(layout)
    if any(numbers[name] != value for name, value in said.items()):
        text = f"{layout.marker.name} has {said}, which is not the cap in the catalog; {_mended(layout)}"
        findings.append(Finding(layout.marker.name, "bad", text))
    findings += [
        Finding("last error", "note", f"{time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(row['at']))}: {row['text']}")
        for row in errors
    ]
    return findings


_NEXT_COUNTS = "the next command that uses it counts its bytes again"
_NEXT = "the next pull, evict or snapshot frees its leases and reservations"
