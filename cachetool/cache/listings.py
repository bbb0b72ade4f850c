"""Listings of sources inside the cache: charged before they are copied, and either complete or absent.

::

    a folder outside  -- copied -->  listings/<source>.<holder>/  -- fsync, rename -->  listings/<source>/
                                                                              or -->  listings/<source>/segment-0001/

The growth of a source lies in further segments beside its first listing, which never changes. If the process is killed
in between, recovery removes the copy together with everything else of the dead holder.
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
    """Return the upper bound in bytes of a copy of this folder on the cache's disk, whose blocks may be larger than
    here."""
    sizes = [path.stat().st_size for path in listing.iterdir()]
    return disk_block + sum(whole_blocks(size, disk_block) + size // MAP_SHARE + disk_block for size in sizes)


def segments(listing: Path) -> list[str]:
    """Return the names of a listing's segments. A segment that only says which keys vanished adds no unit."""
    return sorted(path.name for path in listing.iterdir() if path.is_dir())


def take_in(layout: Layout, source: Id, listing: Path, owner: Id) -> int:
    """Copy a listing to its place for ``source``, durably; return its bytes on disk."""
    target, aside = layout.listing(source), copy_aside(layout, source, listing, owner)
    # A folder in this place was left by a killed process or belongs to an older listing; rename
    # needs the place free.
    layout.remove(target)
    os.rename(aside, target)
    fsync_folder(layout.listings)
    return tree_bytes(target)


def copy_aside(layout: Layout, source: Id, listing: Path, owner: Id) -> Path:
    """Copy a listing, or a segment of one, into a folder beside the others, durably."""
    aside = layout.listing_aside(source, owner)
    layout.remove(aside)
    try:
        shutil.copytree(listing, aside, copy_function=_copy)
        # fsync before the rename: after a power cut a renamed file that was not synced can have
        # length 0.
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
    """Copy a file to a new one."""
    # Made by an exclusive call that follows no link, so nobody can make us write through a planted
    # one.
    fd = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
    with open(source, "rb") as old, open(fd, "wb") as new:
        shutil.copyfileobj(old, new)


def append_segment(layout: Layout, source: Id, aside: Path, name: Name) -> int:
    """Move a copied segment to its place; return the bytes on disk of the complete listing. Call this under the
    catalog's lock."""
    target = layout.listing(source) / name
    # No transaction entered a folder that lies in this place: a killed process left it.
    remove(layout.root, Name(layout.listings.name), source, name)
    os.rename(aside, target)
    fsync_folder(target.parent)
    fsync_folder(layout.listings)
    return tree_bytes(target.parent)


def remove_unfinished(layout: Layout, owners: Collection[Id]) -> None:
    """Delete copies that these holders left unfinished."""
    for name in os.listdir(layout.listings):
        # The id of the holder is the suffix of the copy's name, so only copies of dead processes
        # match.
        if name.rpartition(".")[2] in owners:
            layout.remove(layout.listings / name)
