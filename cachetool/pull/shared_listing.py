"""One listing of a source for the caches of several nodes, in a folder that all of them see::

    DIR/<source>/                 who lists first renames its listing into place
    DIR/<source>/segment-0001/    likewise, who lists again first

All others copy what is there: a unit has the same number in every cache.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from cachetool.core.errors import CacheToolError, UsageError
from cachetool.proc.folders import fsync_folder, make_folder, new_file, new_folder, put_in_place, remove_path
from cachetool.sources.listing import LISTING_FILE, Listing
from cachetool.sources.segments import segment_name

__all__ = ["agree", "fetch", "publish"]


def fetch(shared: Path, folder: Path) -> bool:
    """Copy a listing, or a segment of one, into ``folder``, which is made; False when it is not there. Raises
    :class:`UsageError` when it cannot be read."""
    try:
        if not (shared / LISTING_FILE).exists():
            return False
        make_folder(folder)
        _copy(shared, folder)
    except OSError as error:
        raise UsageError(f"the listing in {shared} cannot be read: {error}") from error
    try:
        Listing.open(folder)
    except CacheToolError as error:
        raise UsageError(
            f"the listing in {shared} is damaged; remove that folder, and the next pull with --listing lists again"
        ) from error
    return True


def publish(folder: Path, shared: Path) -> bool:
    """Put a copy of a listing, or of a segment, where others find it, whole; False when another process was first.
    Raises :class:`UsageError` when nothing can be written there."""
    aside: Path | None = None
    try:
        aside = new_folder(shared.parent, f"{shared.name}.")
        _copy(folder, aside)
        _open_to_readers(aside, shared.parent)
        parent = os.open(shared.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            put_in_place(aside, parent, shared.name)
        finally:
            os.close(parent)
    except OSError as error:
        with contextlib.suppress(OSError):
            if aside is not None:
                remove_path(aside)
        if (shared / LISTING_FILE).exists():
            return False
        raise UsageError(f"the listing cannot be left in {shared.parent}: {error}") from error
    return True


def agree(folder: Path, shared: Path) -> None:
    """Give others what they lack of the listing of a cache. Raises :class:`UsageError` when they have another one, so
    that a number would mean another unit there."""
    part, theirs, number = folder, shared, 0
    while part.exists():
        if not (theirs / LISTING_FILE).exists():
            publish(part, theirs)
        if Listing.open(part).identity != Listing.open(theirs).identity:
            raise UsageError(
                f"{shared} has another listing than this cache; name another folder with --listing, or draw into"
                " another --dataset"
            )
        number += 1
        part, theirs = folder / segment_name(number), shared / segment_name(number)


def _open_to_readers(folder: Path, like: Path) -> None:
    """Let whoever may read ``like`` read a folder with all that is in it: pulls of other users use it, too. The folder
    itself is last, so that nobody gets in before."""
    mode = like.stat().st_mode
    for path in reversed((folder, *folder.rglob("*"))):
        path.chmod(mode & (0o777 if path.is_dir() else 0o666))


def _copy(source: Path, target: Path) -> None:
    """Copy a listing with its segments, durably; a segment that is still being put there has a dot in its name."""
    for path in source.iterdir():
        if path.is_dir():
            if "." not in path.name:
                make_folder(target / path.name)
                _copy(path, target / path.name)
            continue
        with open(path, "rb") as old, new_file(target / path.name) as new:
            while piece := old.read(2**20):
                new.write(piece)
            new.flush()
            os.fsync(new.fileno())
    fsync_folder(target)
