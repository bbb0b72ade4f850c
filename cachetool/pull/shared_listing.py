"""One listing of a source for the caches of several nodes, in a folder that all of them see::

    DIR/<source>/                 who lists first renames its listing into place
    DIR/<source>/segment-0001/    likewise, who lists again first
    DIR/<source>.lock             locked by who lists: all others wait, and then copy what is there

A unit has the same number in every cache. On a file system without locks nobody waits, and several list.
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

_POLL = 1.0, 3.0
"""Seconds between two tries to get a lock, at random: a thousand nodes may wait."""
_OLD = 24 * 3600.0
"""Seconds after which a copy that nobody finished is deleted: no listing takes so long to be copied."""


class Turn(Closing):
    """The lock of a shared listing, waited for. A context manager."""

    def __init__(self, shared: Path, waits: Callable[[], None]) -> None:
        """``waits`` is called now and then. Raises :class:`UsageError` where the lock cannot be made."""
        self.others_looked = False
        """Whether another process listed the source again while this one waited."""
        path = shared.parent / f"{shared.name}.lock"
        try:
            self._file = shared_file(path)
        except OSError as error:
            raise UsageError(f"the listing cannot be left in {shared.parent}: {error}") from error
        with contextlib.suppress(OSError):  # another user made it
            path.chmod(shared.parent.stat().st_mode & 0o666)
        before = self._looks()
        while _is_locked(self._file):
            waits()
            time.sleep(random.uniform(*_POLL))
        self.others_looked = self._looks() != before

    def looked(self) -> None:
        """Tell those who wait that the source was listed again."""
        looks = self._looks() + 1
        self._file.seek(0)
        self._file.write(b"%d\n" % looks)

    def _looks(self) -> int:
        self._file.seek(0)
        with contextlib.suppress(ValueError):
            return int(self._file.read(20))
        return 0

    def close(self) -> None:
        """Let the next process list."""
        self._file.close()


def _is_locked(file: IO[bytes]) -> bool:
    """Whether another process has the lock; else this one has it, if there are locks."""
    try:
        fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno in (errno.EAGAIN, errno.EACCES)
    return False


def fetch_newer(shared: Path, folder: Path, number: int) -> list[Path]:
    """Copy all segments from ``number`` on into ``folder``. Raises as :func:`fetch`."""
    copied: list[Path] = []
    while fetch(shared / (name := segment_name(number + len(copied))), folder / name):
        copied.append(folder / name)
    return copied


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
    _sweep(shared)
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


def _sweep(shared: Path) -> None:
    """Delete copies that killed processes did not finish."""
    with contextlib.suppress(OSError):
        for path in shared.parent.iterdir():
            is_copy = re.fullmatch(re.escape(shared.name) + r"\.[0-9a-f]{12}", path.name)
            if is_copy and time.time() - path.lstat().st_mtime > _OLD:
                with contextlib.suppress(OSError):  # of another user
                    remove_path(path)


def agree(parts: Sequence[Listing], shared: Path) -> None:
    """Give others what they lack of the listing of a cache. Raises :class:`UsageError` when they have another one, so
    that a number would mean another unit there."""
    for number, part in enumerate(parts):
        theirs = shared / segment_name(number) if number else shared
        if not (theirs / LISTING_FILE).exists():
            publish(part.folder, theirs)
        if part.identity != Listing.open(theirs).identity:
            raise UsageError(
                f"{shared} has another listing than this cache; name another folder with --listing, or draw into"
                " another --dataset"
            )


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
