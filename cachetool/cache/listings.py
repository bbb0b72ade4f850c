"""Listings of sources inside the cache: charged before they are copied, whole or not there at all.

::

    a folder elsewhere  -- copied -->  listings/<source>.<holder>/  -- fsync, rename -->  listings/<source>/
                                                                              or -->  listings/<source>/segment-0001/

What a source has grown by lies in further segments beside its first listing, which never changes. Killed in between,
the copy is removed with everything else of a dead holder.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Collection
from pathlib import Path

from cachetool.cache.layout import Layout
from cachetool.core.names import Id, Name
from cachetool.proc.disk import MAP_SHARE, whole_blocks
from cachetool.proc.folders import fsync_folder, remove, tree_bytes

__all__ = ["append_segment", "copy_aside", "listing_bound", "remove_unfinished", "segments", "take_in"]


def listing_bound(listing: Path, disk_block: int) -> int:
    """Upper bound of what a copy of this folder takes on the cache's disk, whose blocks may be larger than here."""
    sizes = [path.stat().st_size for path in listing.iterdir()]
    return disk_block + sum(whole_blocks(size, disk_block) + size // MAP_SHARE + disk_block for size in sizes)


def segments(listing: Path) -> list[str]:
    """Names of what a listing has grown by; one that only says what vanished adds no unit."""
    return sorted(path.name for path in listing.iterdir() if path.is_dir())


def take_in(layout: Layout, source: Id, listing: Path, owner: Id) -> int:
    """Copy a listing to where that of ``source`` lies, durably; gives its bytes on disk."""
    target, aside = layout.listing(source), copy_aside(layout, source, listing, owner)
    layout.remove(target)
    os.rename(aside, target)
    fsync_folder(layout.listings)
    return tree_bytes(target)


def copy_aside(layout: Layout, source: Id, listing: Path, owner: Id) -> Path:
    """Copy a listing, or a segment of one, beside the others, durably."""
    aside = layout.listing_aside(source, owner)
    layout.remove(aside)
    try:
        shutil.copytree(listing, aside, copy_function=_copy)
        for path in aside.iterdir():
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                os.fsync(fd)
            finally:
                os.close(fd)
        fsync_folder(aside)
    except BaseException:
        layout.remove(aside)
        raise
    return aside


def _copy(source: str, target: str) -> None:
    """A file into one that is not there: never through a link."""
    fd = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
    with open(source, "rb") as old, open(fd, "wb") as new:
        shutil.copyfileobj(old, new)


def append_segment(layout: Layout, source: Id, aside: Path, name: Name) -> int:
    """Put a copied segment where it belongs; gives the bytes on disk of the whole listing. Under the catalog's lock:
    what lies there already was never entered into it."""
    target = layout.listing(source) / name
    remove(layout.root, Name(layout.listings.name), source, name)
    os.rename(aside, target)
    fsync_folder(target.parent)
    fsync_folder(layout.listings)
    return tree_bytes(target.parent)


def remove_unfinished(layout: Layout, owners: Collection[Id]) -> None:
    """Delete copies that these holders left unfinished."""
    for name in os.listdir(layout.listings):
        if name.rpartition(".")[2] in owners:
            layout.remove(layout.listings / name)
