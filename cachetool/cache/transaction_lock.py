"""The turn of a transaction among all processes: a lock on a file beside the catalog.

::

    reading transactions share it, a writing one has it alone, from before its BEGIN until after its COMMIT
    its content: pid, host, program of the newest writer and the time of its first change, for processes that wait

SQLite locks the catalog itself by ``fcntl.lockf``. A process loses such locks, in the middle of a transaction, when it
closes the file anywhere, for example because its user copies or hashes the cache's folder. Two writers beside such
threads lost 49 of 656 commits that SQLite had acknowledged. The lock of this module is not lost in this way
(:mod:`cachetool.proc.locks`). SQLite keeps its own lock, for programs that read a catalog without cachetool.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import json
import os
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from cachetool.core.errors import CapacityError, CatalogError
from cachetool.core.text import plain, program
from cachetool.proc.locks import close_in_children, close_kept, is_wanted, lock_owners, try_lock, want

__all__ = ["PATIENCE", "TransactionLock", "locked"]

PATIENCE = 60.0
"""Seconds that a transaction waits for its turn."""
_POLITE = 0.25
"""Seconds for which a reader lets a waiting writer go first. Otherwise the writer never found a moment without a
reader: beside four that read all the time, one waited for 5 s."""
_READER = 1.0
"""Seconds that a reader waits for a writer, which may be stopped in the middle of its transaction."""
_TRUSTED = 10.0
"""Seconds for which a reader does not wait again, after it went past such a writer."""
_SHORT, _SHORTS, _LONG = 0.0005, 100, 0.005
"""Seconds between two looks at first, number of these looks, and seconds between later looks."""
_PENDING, _RESERVED = 0x40000000, 0x40000001
"""Bytes of a database that SQLite locks: for a writer that waits for readers or commits, and for a writer
(https://sqlite.org/src/file/src/os.h)."""
_RECORD = 512
"""Bytes of the lock file's content."""


class TransactionLock:
    """The lock of one catalog."""

    def __init__(self, catalog: Path) -> None:
        self.path = f"{catalog}-lock"
        self._catalog = catalog
        self._passed = -_TRUSTED

    @contextlib.contextmanager
    def hold(self, *, shared: bool, patience: float = PATIENCE) -> Iterator[Callable[[], None]]:
        """Hold the lock; yield a function to call before a first change.

        Raises :class:`CatalogError` that names the process with the lock, after ``patience`` seconds. If the lock file
        cannot be made (the folder is gone, the disk is full or read-only), SQLite's own locks must do.
        """
        looks, began = 0, time.monotonic()
        fd = self._open(shared=shared)
        # A signal's handler may raise between any two lines, and a lock that is left would stop all
        # other processes.
        try:
            while fd is not None and not self._taken(fd, shared=shared, waited=time.monotonic() - began):
                waited = time.monotonic() - began
                # A writer stopped by SIGSTOP would otherwise block every reader. A reader may pass
                # while SQLite's locks show that the writer does not commit.
                if shared and waited >= self._reader_patience() and self._is_passable():
                    break
                if waited > patience:
                    raise locked(self._catalog, Path(self.path))
                # Short pauses first, because most transactions take a few ms: with SQLite's own
                # growing pauses a trainer waited up to 55 ms. `flock` has a waiting call, but no
                # time limit.
                time.sleep(_SHORT if looks < _SHORTS else _LONG)
                looks += 1
                # Somebody deleted the file. Its lock means nothing any more, because new processes
                # lock a new file.
                if not self._is_there(fd):
                    close_kept(fd)
                    fd = self._open(shared=shared)
            yield functools.partial(_sign, fd)
        finally:
            if fd is not None:
                close_kept(fd)

    def _open(self, *, shared: bool) -> int | None:
        ways = (os.O_RDONLY, os.O_RDWR | os.O_CREAT)
        # A reader first tries without writing, so that a read-only cache can be read. A writer
        # needs write access to sign the file.
        for way in ways if shared else reversed(ways):
            try:
                fd = os.open(self.path, way | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)
            except OSError as error:
                # Going on without the lock would be unsafe just because this process has too many
                # open files.
                if error.errno in (errno.EMFILE, errno.ENFILE):
                    raise CapacityError(f"catalog {self._catalog}: {error.strerror}; close some") from error
            else:
                # A forked child shares the open file and would keep the lock after its parent ends.
                close_in_children(fd)
                return fd
        return None

    def _taken(self, fd: int, *, shared: bool, waited: float) -> bool:
        try:
            # `flock` has no queue: readers that overlap would keep a writer out for ever. So a
            # waiting writer says so, and readers let it go first for a moment.
            if shared and waited < _POLITE and is_wanted(fd):
                return False
            if try_lock(fd, shared=shared):
                # The file may have been deleted between open and lock.
                return self._is_there(fd)
            if not shared:
                want(fd)
        except OSError:
            # The file system has no locks; `doctor` reports this. Then SQLite's own locks must do.
            return True
        return False

    def _is_there(self, fd: int) -> bool:
        with contextlib.suppress(FileNotFoundError):
            return os.path.samestat(os.fstat(fd), os.lstat(self.path))
        return False

    def _reader_patience(self) -> float:
        return 0.0 if time.monotonic() - self._passed < _TRUSTED else _READER

    def _is_passable(self) -> bool:
        """Return True if SQLite's own locks are enough for a reader beside the writer."""
        # The writer must still have SQLite's RESERVED lock (no `close()` dropped it), and must not
        # be committing (PENDING), because then it changes the file's pages.
        passable = bool(lock_owners(self._catalog, byte=_RESERVED)) and not lock_owners(self._catalog, byte=_PENDING)
        if passable and self._reader_patience():
            self._passed = time.monotonic()
        return passable


def _sign(fd: int | None) -> None:
    """Write the writer's pid, host and program into the lock file, before its first change."""
    writer = {"pid": os.getpid(), "host": socket.gethostname(), "what": program(), "since": time.time()}
    if fd is not None:
        # On a full disk no process is told; the transaction itself continues.
        with contextlib.suppress(OSError):
            os.pwrite(fd, json.dumps(writer).encode().ljust(_RECORD), 0)


def locked(catalog: Path, file: Path) -> CatalogError:
    """Return the error for a catalog that waits in vain for the process that has a lock on ``file``.

    ``file`` is the catalog itself, or the lock file beside it.
    """
    pids = [pid for pid in lock_owners(file) if pid != os.getpid() or file != catalog]
    signed = {} if file == catalog else _signed(file)
    # The signature may be of an older writer: a transaction that only reads, or has changed nothing
    # yet, does not sign. So the kernel's answer wins.
    if pids and pids[0] != signed.get("pid"):
        who = f"pid {pids[0]} ({_command(pids[0])})"
    elif signed:
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(signed["since"]))
        who = f"pid {signed['pid']} on {signed['host']} ({signed['what']}) since {since}"
    else:
        who = "another process"
    todo = f"wait for it, or end it{f' with: kill {pids[0]}' if pids else ''}"
    # A stopped process ignores SIGTERM until it continues, so the advice differs.
    if pids and _is_stopped(pids[0]):
        who = f"{who}, which is stopped"
        todo = f"let it continue with: kill -CONT {pids[0]}, or end it with: kill -KILL {pids[0]}"
    error = CatalogError(f"catalog {catalog} is locked by {who}; {todo}")
    error.readable = True
    return error


def _signed(file: Path) -> dict[str, Any]:
    """Return the content of the lock file, or an empty dict if cachetool did not write it."""
    try:
        fd = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(fd, "rb") as content:
            record = json.loads(content.read(_RECORD))
        pid, since = int(record["pid"]), float(record["since"])
        # The number comes from a file; one that is out of range must fail here and not in the
        # message.
        time.localtime(since)
    except (OSError, ValueError, TypeError, KeyError, OverflowError):
        return {}
    return {"pid": pid, "since": since, "host": plain(record.get("host")), "what": plain(record.get("what"))}


def _command(pid: int) -> str:
    """Return the name of a program. Its arguments are left out, because some may be secrets."""
    try:
        return plain(Path(f"/proc/{pid}/comm").read_text().strip())
    except OSError:
        return "it has ended by now"


def _is_stopped(pid: int) -> bool:
    with contextlib.suppress(OSError, IndexError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in ("T", "t")
    return False
