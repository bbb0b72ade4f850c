"""Locks on files that other processes see, and that only their owner lets go of.

::

                                                     fcntl.lockf   flock   flock, here
    closing another descriptor of the file           drops it      -       -
    a forked child that outlives its parent          -             keeps   -
    closing all descriptors of the process           drops it      drops   -

``fcntl.lockf`` is of no use: a program that copies or hashes the folder opens and closes the file. ``flock`` belongs to
the open file, which forked children share. So :class:`OwnLock` leaves the open file to a page that is mapped and that
the kernel gives to no child (``MADV_DONTFORK``), not even to one that C code forks; then it closes the descriptor.
Where that cannot be done (macOS, a folder) it keeps the descriptor, and the children that Python forks close it.
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
"""Descriptors that a forked child closes, with the file that each belongs to."""


def try_lock(fd: int, *, shared: bool = False) -> bool:
    """Lock the file of a descriptor; False when another descriptor has a lock that excludes this one.

    Raises OSError where the file system has no locks.
    """
    try:
        fcntl.flock(fd, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


_SET, _GET = getattr(fcntl, "F_OFD_SETLK", None), getattr(fcntl, "F_OFD_GETLK", None)
_FLOCK = struct.Struct("hhqqi4x")  # struct flock of Linux with 64 bits: type, whence, start, length, pid


def want(fd: int) -> None:
    """Say that this descriptor waits to have a file alone, until it is closed; a lock of another kind says so. Where
    there is none (macOS) nobody is told."""
    if _SET is not None:
        with contextlib.suppress(OSError):  # another one waits already
            fcntl.fcntl(fd, _SET, _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 1, 0))


def is_wanted(fd: int) -> bool:
    """Whether another descriptor waits to have the file alone."""
    if _GET is None:
        return False
    asked = fcntl.fcntl(fd, _GET, _FLOCK.pack(fcntl.F_RDLCK, os.SEEK_SET, 0, 1, 0))
    return bool(_FLOCK.unpack(asked)[0] != fcntl.F_UNLCK)


class OwnLock:
    """A lock that lasts until :meth:`release` or the end of this process; takes over a descriptor that has it."""

    def __init__(self, fd: int) -> None:
        self._pid, self._fd = os.getpid(), -1
        self._page = _map_for_us_alone(fd)
        if self._page is None:
            self._fd = fd
            close_in_children(fd)
        else:
            os.close(fd)

    def release(self) -> None:
        """Let go of it; a forked child has nothing to let go of."""
        if self._pid != os.getpid():
            return
        page, self._page = self._page, None
        fd, self._fd = self._fd, -1
        if page is not None:
            _libc("munmap")(page, mmap.PAGESIZE)
        elif fd >= 0:
            close_kept(fd)


def close_in_children(fd: int) -> None:
    """From now on a forked child closes this descriptor, until :func:`close_kept`."""
    _kept[fd] = _file(fd)


def close_kept(fd: int) -> None:
    """Close a descriptor, unless the program closed it and its number belongs to another file by now."""
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
    """The address of a page that refers to the open file and that no child gets; None where there is no such thing."""
    never_forked = getattr(mmap, "MADV_DONTFORK", None)
    if never_forked is None:
        return None
    page: int | None = _libc("mmap")(None, mmap.PAGESIZE, 0, mmap.MAP_PRIVATE, fd, 0)
    if page is None or page == _FAILED:
        return None
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
    """Pids of the processes that have a lock on a file, on that ``byte`` of it; none where Linux does not tell, as of
    processes outside of this container."""
    try:
        status = path.stat()
        lines = Path("/proc/locks").read_text().splitlines()
    except OSError:
        return []
    device = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}"
    pids: dict[bool, list[int]] = {True: [], False: []}
    for line in lines:
        # proc_locks(5): 1: POSIX ADVISORY WRITE 3568 fd:00:2531452 0 EOF
        words = line.split()
        if len(words) != 8 or words[1] == "->":  # a lock that is waited for
            continue
        *where, inode = words[5].split(":")
        first, last = words[6:]
        here = byte is None or (int(first) <= byte and (last == "EOF" or byte <= int(last)))
        if inode == str(status.st_ino) and here and int(words[4]) > 0:
            pids[":".join(where) == device].append(int(words[4]))
    return pids[True] or pids[False]  # btrfs and overlays give the kernel's lists another device than stat()
