"""Folders for the time of a process, locked while they are in use: what a killed one left is swept by the next process
that makes a folder of the same prefix.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path

from cachetool.locks import OwnLock

__all__ = ["listing_scratch", "scratch"]


@contextlib.contextmanager
def scratch(parent: Path, prefix: str) -> Iterator[Path]:
    """A new folder in ``parent``, deleted at the end. Raises OSError when none can be made there."""
    _sweep(parent, prefix)
    while (fd := _held(made := tempfile.mkdtemp(prefix=prefix, dir=parent))) is None:
        pass  # somebody else swept it
    lock = OwnLock(fd)
    try:
        yield Path(made)
    finally:
        shutil.rmtree(made, ignore_errors=True)
        lock.release()


def listing_scratch() -> AbstractContextManager[Path]:
    """For the listing of a source, in the folder for temporary files."""
    return scratch(Path(tempfile.gettempdir()), "cachetool-listing-")


def _held(folder: str) -> int | None:
    """Lock a folder; None when it is gone by then."""
    try:
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    with contextlib.suppress(OSError):  # some file systems over a network lock no folders: then nobody sweeps there
        fcntl.flock(fd, fcntl.LOCK_EX)
    if os.path.exists(folder):
        return fd
    os.close(fd)
    return None


def _sweep(parent: Path, prefix: str) -> None:
    """Delete folders of processes that were killed: nobody holds their lock."""
    for path in parent.glob(f"{prefix}*"):
        with contextlib.suppress(OSError):  # another process sweeps as well, it is in use, or somebody else's
            fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path)
            finally:
                os.close(fd)
