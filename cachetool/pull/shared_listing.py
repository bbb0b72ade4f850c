"""One listing of a source for the caches of several nodes, in a folder that all of them see.

::

    DIR/<source>/                 the listing; the first node to list renames its own to this name
    DIR/<source>/segment-0001/    a segment; likewise by the first node to list again
    DIR/<source>.lock             locked by the node that lists; all others wait, and then copy its listing

A unit has the same number in every cache. On a file system without locks nobody waits, and several nodes list.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import random
import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO

from cachetool.core.closing import Closing
from cachetool.core.errors import CacheToolError, UsageError
from cachetool.proc.folders import (
    fsync_folder,
    make_folder,
    new_file,
    new_folder,
    put_in_place,
    remove_path,
    shared_file,
)
from cachetool.sources.listing import LISTING_FILE, Listing
from cachetool.sources.segments import segment_name

__all__ = ["Turn", "agree", "fetch", "fetch_newer", "publish"]

# Random pauses, because a thousand nodes may wait, and must not ask the file server at the same moment.
_POLL = 1.0, 3.0
"""Least and most seconds between two tries to get the lock."""
# No listing takes a day to copy, so the process of an older copy was killed.
_OLD = 24 * 3600.0
"""Seconds after which an unfinished copy is deleted."""


class Turn(Closing):
    """The lock of a shared listing, as a context manager. The constructor waits for the lock.

    ``waits`` is called at each try. Raise :class:`UsageError` if the lock file cannot be made.
    """

    def __init__(self, shared: Path, waits: Callable[[], None]) -> None:
        self.others_looked = False
        """True if another process listed the source again while this one waited."""
        path = shared.parent / f"{shared.name}.lock"
        try:
            self._file = shared_file(path)
        except OSError as error:
            raise UsageError(f"the listing cannot be stored in {shared.parent}: {error}") from error
        # Safe to suppress: another user made the lock file, and then only that user may change its mode.
        with contextlib.suppress(OSError):
            path.chmod(shared.parent.stat().st_mode & 0o666)
        # Read before waiting: if the count changed meanwhile, another node has listed again and found nothing new, or
        # published a segment.
        before = self._looks()
        # A `flock`: the kernel or file server frees it when its process dies, so a killed node does not stop the
        # others.
        while _is_locked(self._file):
            waits()
            time.sleep(random.uniform(*_POLL))
        self.others_looked = self._looks() != before

    def looked(self) -> None:
        """Tell the waiting processes that the source was listed again."""
        looks = self._looks() + 1
        # The count is written into the lock file itself, which all waiting processes have open.
        self._file.seek(0)
        self._file.write(b"%d\n" % looks)

    def _looks(self) -> int:
        self._file.seek(0)
        # Safe to suppress: a new lock file is empty, which counts as 0.
        with contextlib.suppress(ValueError):
            return int(self._file.read(20))
        return 0

    def close(self) -> None:
        """Let the next process list."""
        self._file.close()


def _is_locked(file: IO[bytes]) -> bool:
    """Return True if another process has the lock. Otherwise this process has it, if the file system has locks."""
    try:
        fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        # Any other error means that the file system has no locks. Then every node lists, and the first to rename its
        # listing wins.
        return error.errno in (errno.EAGAIN, errno.EACCES)
    return False


def fetch_newer(shared: Path, folder: Path, number: int) -> list[Path]:
    """Copy all segments from ``number`` on into ``folder``, and return their folders. Errors as in :func:`fetch`."""
    copied: list[Path] = []
    # Segments are numbered without gaps, so the first missing number is the end.
    while fetch(shared / (name := segment_name(number + len(copied))), folder / name):
        copied.append(folder / name)
    return copied


def fetch(shared: Path, folder: Path) -> bool:
    """Copy a listing, or a segment, into ``folder``, which is made. Return False if there is none.

    Raises:
        UsageError: If the listing cannot be read or is damaged.
    """
    try:
        # The folder appears by a rename and is complete from then on, so this look needs no lock.
        if not (shared / LISTING_FILE).exists():
            return False
        make_folder(folder)
        _copy(shared, folder)
    except OSError as error:
        raise UsageError(f"the listing in {shared} cannot be read: {error}") from error
    try:
        # Opened to check the copy: other nodes and users write to the shared folder, and a damaged listing would number
        # units differently.
        Listing.open(folder)
    except CacheToolError as error:
        raise UsageError(
            f"the listing in {shared} is damaged; remove that folder, and the next pull with --listing lists again"
        ) from error
    return True


def publish(folder: Path, shared: Path) -> bool:
    """Put a copy of a listing, or of a segment, into the shared folder. Return False if another process was first.

    Raises:
        UsageError: If the shared folder cannot be written.
    """
    aside: Path | None = None
    _sweep(shared)
    try:
        # Built aside and renamed: a reader sees a complete listing or none, and a node that is killed leaves only a
        # copy that _sweep() deletes.
        aside = new_folder(shared.parent, f"{shared.name}.")
        _copy(folder, aside)
        # Before the rename, so that no other user meets a listing that it may not read.
        _open_to_readers(aside, shared.parent)
        parent = os.open(shared.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            # The rename fails if the folder exists. So of several nodes that listed, exactly one wins, and all others
            # copy its numbers.
            put_in_place(aside, parent, shared.name)
        finally:
            os.close(parent)
    except OSError as error:
        with contextlib.suppress(OSError):
            if aside is not None:
                remove_path(aside)
        # Another node was first. Its listing is as good, and this node copies it.
        if (shared / LISTING_FILE).exists():
            return False
        raise UsageError(f"the listing cannot be stored in {shared.parent}: {error}") from error
    return True


def _sweep(shared: Path) -> None:
    """Delete the copies that killed processes did not finish."""
    with contextlib.suppress(OSError):
        for path in shared.parent.iterdir():
            # Exactly the names that new_folder() makes: nothing else in the user's folder may be deleted.
            is_copy = re.fullmatch(re.escape(shared.name) + r"\.[0-9a-f]{12}", path.name)
            if is_copy and time.time() - path.lstat().st_mtime > _OLD:
                # Safe to suppress: a copy of another user, who deletes it at the next listing.
                with contextlib.suppress(OSError):
                    remove_path(path)


def agree(parts: Sequence[Listing], shared: Path) -> None:
    """Give the other nodes the parts of this cache's listing that they lack.

    Raises:
        UsageError: If the shared listing is another one, so that a number would mean another unit there.
    """
    for number, part in enumerate(parts):
        theirs = shared / segment_name(number) if number else shared
        if not (theirs / LISTING_FILE).exists():
            publish(part.folder, theirs)
        # The numbers of units in this cache's shards come from its own listing. Under another one, two nodes would draw
        # one unit, and nobody another.
        if part.identity != Listing.open(theirs).identity:
            raise UsageError(
                f"the listing in {shared} is not that of this cache; choose another folder with --listing, or pull into"
                " another --dataset"
            )


def _open_to_readers(folder: Path, like: Path) -> None:
    """Let everybody who may read ``like`` read a folder and its files, because pulls of other users use them."""
    mode = like.stat().st_mode
    # The folder itself comes last, so that nobody gets in before its files are readable.
    for path in reversed((folder, *folder.rglob("*"))):
        path.chmod(mode & (0o777 if path.is_dir() else 0o666))


def _copy(source: Path, target: Path) -> None:
    """Copy a listing with its segments, and sync the copy to the disk."""
    for path in source.iterdir():
        if path.is_dir():
            # A dot marks a segment that another node is still copying into place.
            if "." not in path.name:
                make_folder(target / path.name)
                _copy(path, target / path.name)
            continue
        with open(path, "rb") as old, new_file(target / path.name) as new:
            while piece := old.read(2**20):
                new.write(piece)
            new.flush()
            # A copy must survive a power cut before it is renamed into place: the rename may reach the disk before the
            # contents do.
            os.fsync(new.fileno())
    fsync_folder(target)
