"""Locks on files that other processes see, and that only their owner releases.

::

                                                     fcntl.lockf   flock   flock, here
    closing another descriptor of the file           drops it      -       -
    a forked child that outlives its parent          -             keeps   -
    closing all descriptors of the process           drops it      drops   -

``fcntl.lockf`` cannot be used, because a program that copies or hashes the folder opens and closes the file. ``flock``
belongs to the open file, which forked children share. So :class:`OwnLock` lets a mapped page keep the open file, and
then closes the descriptor. The kernel gives that page to no child (``MADV_DONTFORK``), not even to a child that C code
forks. Where that is impossible (macOS, a folder) the descriptor stays open, and children that Python forks close it.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import functools
import mmap
import os
import struct
from pathlib import Path
from typing import Any

__all__ = ["OwnLock", "close_in_children", "close_kept", "is_wanted", "lock_owners", "try_lock", "want"]

_FAILED = ctypes.c_void_p(-1).value
_kept: dict[int, tuple[int, int]] = {}
"""Descriptors that a forked child closes, with the device and inode of the file of each."""


def try_lock(fd: int, *, shared: bool = False) -> bool:
    """Lock the file of a descriptor. Return False when another descriptor has a lock that excludes this one.

    Raises OSError where the file system has no locks.
    """
    try:
        fcntl.flock(fd, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


# Locks of the open file. Python has no names for them on systems that lack them, such as macOS.
_SET, _GET = getattr(fcntl, "F_OFD_SETLK", None), getattr(fcntl, "F_OFD_GETLK", None)
# struct flock of Linux with 64 bits: type, whence, start, length, pid.
_FLOCK = struct.Struct("hhqqi4x")


def want(fd: int) -> None:
    """Tell the holders of a file that this descriptor waits to have it alone, until the descriptor is closed."""
    # flock has no queue: readers who come again and again would keep a writer out for ever. So the
    # waiting writer takes a lock of another kind on the same file, which readers look at.
    if _SET is not None:
        # Another writer waits already and has this lock.
        with contextlib.suppress(OSError):
            fcntl.fcntl(fd, _SET, _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 1, 0))


def is_wanted(fd: int) -> bool:
    """Return True if another descriptor waits to have the file alone."""
    if _GET is None:
        return False
    asked = fcntl.fcntl(fd, _GET, _FLOCK.pack(fcntl.F_RDLCK, os.SEEK_SET, 0, 1, 0))
    return bool(_FLOCK.unpack(asked)[0] != fcntl.F_UNLCK)


class OwnLock:
    """A lock that lasts until :meth:`release` or the end of this process. It takes over a file descriptor that
    already holds the lock; the caller must not close the descriptor."""

    def __init__(self, fd: int) -> None:
        # Release does nothing in a forked child, which has the number of the page but not the page.
        self._pid, self._fd = os.getpid(), -1
        self._page = _map_for_us_alone(fd)
        if self._page is None:
            self._fd = fd
            close_in_children(fd)
        else:
            # The page keeps the open file, and with it the lock. No close() in this process can
            # drop it now.
            os.close(fd)

    def release(self) -> None:
        """Release the lock. In a forked child this does nothing."""
        if self._pid != os.getpid():
            return
        page, self._page = self._page, None
        fd, self._fd = self._fd, -1
        if page is not None:
            _libc("munmap")(page, mmap.PAGESIZE)
        elif fd >= 0:
            close_kept(fd)


def close_in_children(fd: int) -> None:
    """Let forked children close this descriptor, until :func:`close_kept`."""
    _kept[fd] = _file(fd)


def close_kept(fd: int) -> None:
    """Close a descriptor, unless the program closed it and its number belongs to another file now."""
    file = _kept.pop(fd, None)
    with contextlib.suppress(OSError):
        if _file(fd) == file:
            os.close(fd)


def _close_all_kept() -> None:
    for fd in list(_kept):
        close_kept(fd)


os.register_at_fork(after_in_child=_close_all_kept)


def _file(fd: int) -> tuple[int, int]:
    status = os.fstat(fd)
    return status.st_dev, status.st_ino


def _map_for_us_alone(fd: int) -> int | None:
    """Return the address of a page that keeps the open file and that no child gets; None if there can be none."""
    never_forked = getattr(mmap, "MADV_DONTFORK", None)
    if never_forked is None:
        return None
    # No access is needed: the map exists to refer to the open file, and its bytes are never read.
    page: int | None = _libc("mmap")(None, mmap.PAGESIZE, 0, mmap.MAP_PRIVATE, fd, 0)
    if page is None or page == _FAILED:
        return None
    # Without this call a forked child would inherit the map, and hold the lock after its parent's
    # death.
    if _libc("madvise")(page, mmap.PAGESIZE, never_forked):
        _libc("munmap")(page, mmap.PAGESIZE)
        return None
    return page


@functools.cache
def _libc(name: str) -> Any:
    function = getattr(ctypes.CDLL(None, use_errno=True), name)
    function.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_int64]
    function.argtypes = function.argtypes[: {"mmap": 6, "madvise": 3, "munmap": 2}[name]]
    if name == "mmap":
        function.restype = ctypes.c_void_p
    return function


def lock_owners(path: Path, *, byte: int | None = None) -> list[int]:
    """Return the pids of the processes that have a lock on a file, on ``byte`` of it; none if Linux does not tell."""
    try:
        status = path.stat()
        lines = Path("/proc/locks").read_text().splitlines()
    except OSError:
        return []
    device = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}"
    pids: dict[bool, list[int]] = {True: [], False: []}
    for line in lines:
        # A line of proc_locks(5): 1: POSIX ADVISORY WRITE 3568 fd:00:2531452 0 EOF
        words = line.split()
        # A lock that is waited for has an arrow here.
        if len(words) != 8 or words[1] == "->":
            continue
        *where, inode = words[5].split(":")
        first, last = words[6:]
        here = byte is None or (int(first) <= byte and (last == "EOF" or byte <= int(last)))
        # A pid of 0 or less is a process outside of this container, or a lock without an owner.
        if inode == str(status.st_ino) and here and int(words[4]) > 0:
            pids[":".join(where) == device].append(int(words[4]))
    # On btrfs and overlays the kernel lists another device than stat() returns, so the inode must
    # do.
    return pids[True] or pids[False]
