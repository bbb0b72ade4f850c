"""The turn of a transaction among all processes: a lock on a file beside the catalog.

::

    reading transactions share it, a writing one has it alone, from before its BEGIN until after its COMMIT
    its content: pid, host, program of the newest writer, time of its first change, for whoever waits in vain

SQLite locks the catalog itself by ``fcntl.lockf``, so a process loses those locks in the middle of a transaction when
it closes the file anywhere: its user copies or hashes the cache's folder. Two writers beside such threads lost 49 of
656 commits that SQLite had acknowledged. This lock is not lost by that (:mod:`cachetool.proc.locks`). SQLite keeps its
own, for programs that read a catalog without us.
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
"""Seconds for which a reader lets a waiting writer go first, which else never found the moment without a reader: beside
four that read all the time one waited for 5 s."""
_READER = 1.0
"""Seconds that a reader waits for a writer, which may be stopped in the middle of its transaction."""
_TRUSTED = 10.0
"""Seconds for which a reader that went past such a writer waits for it no more."""
_SHORT, _SHORTS, _LONG = 0.0005, 100, 0.005
"""Seconds between two looks at first, how many looks those are, and seconds from then on."""
_PENDING, _RESERVED = 0x40000000, 0x40000001
"""Bytes of a database that SQLite locks: a writer that waits for readers or commits; a writer
(https://sqlite.org/src/file/src/os.h)."""
_RECORD = 512
"""Bytes of the content."""


class TransactionLock:
    """The lock of one catalog."""

    def __init__(self, catalog: Path) -> None:
        self.path = f"{catalog}-lock"
        self._catalog = catalog
        self._passed = -_TRUSTED

    @contextlib.contextmanager
    def hold(self, *, shared: bool, patience: float = PATIENCE) -> Iterator[Callable[[], None]]:
        """Hold the lock; gives what is to be called before a first change. Raises :class:`CatalogError` that names who
        has it, after so many seconds.

        Where no such file can be made (the folder is gone, the disk is full or read-only) SQLite's own locks must do.
        """
        looks, began = 0, time.monotonic()
        fd = self._open(shared=shared)
        try:  # a signal's exception may come anywhere, and a lock that is left would stop all others
            while fd is not None and not self._taken(fd, shared=shared, waited=time.monotonic() - began):
                waited = time.monotonic() - began
                if shared and waited >= self._reader_patience() and self._is_passable():
                    break
                if waited > patience:
                    raise locked(self._catalog, Path(self.path))
                time.sleep(_SHORT if looks < _SHORTS else _LONG)
                looks += 1
                if not self._is_there(fd):  # somebody deleted it
                    close_kept(fd)
                    fd = self._open(shared=shared)
            yield functools.partial(_sign, fd)
        finally:
            if fd is not None:
                close_kept(fd)

    def _open(self, *, shared: bool) -> int | None:
        ways = (os.O_RDONLY, os.O_RDWR | os.O_CREAT)
        for way in ways if shared else reversed(ways):
            try:
                fd = os.open(self.path, way | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)
            except OSError as error:
                if error.errno in (errno.EMFILE, errno.ENFILE):
                    raise CapacityError(f"catalog {self._catalog}: {error.strerror}; close some") from error
            else:
                close_in_children(fd)
                return fd
        return None

    def _taken(self, fd: int, *, shared: bool, waited: float) -> bool:
        try:
            if shared and waited < _POLITE and is_wanted(fd):
                return False
            if try_lock(fd, shared=shared):
                return self._is_there(fd)
            if not shared:
                want(fd)
        except OSError:  # a file system without locks, as `doctor` says
            return True
        return False

    def _is_there(self, fd: int) -> bool:
        with contextlib.suppress(FileNotFoundError):
            return os.path.samestat(os.fstat(fd), os.lstat(self.path))
        return False

    def _reader_patience(self) -> float:
        return 0.0 if time.monotonic() - self._passed < _TRUSTED else _READER

    def _is_passable(self) -> bool:
        """Whether SQLite's own locks are enough for a reader beside the writer, which has them still and does not
        commit."""
        passable = bool(lock_owners(self._catalog, byte=_RESERVED)) and not lock_owners(self._catalog, byte=_PENDING)
        if passable and self._reader_patience():
            self._passed = time.monotonic()
        return passable


def _sign(fd: int | None) -> None:
    """Say who writes: not in a transaction that changes nothing, since a command that only looks writes nothing."""
    writer = {"pid": os.getpid(), "host": socket.gethostname(), "what": program(), "since": time.time()}
    if fd is not None:
        with contextlib.suppress(OSError):  # on a full disk nobody is told
            os.pwrite(fd, json.dumps(writer).encode().ljust(_RECORD), 0)


def locked(catalog: Path, file: Path) -> CatalogError:
    """The error for a catalog that waits in vain for whoever has a lock on ``file``, which is itself or beside it."""
    pids = [pid for pid in lock_owners(file) if pid != os.getpid() or file != catalog]
    signed = {} if file == catalog else _signed(file)
    if pids and pids[0] != signed.get("pid"):
        who = f"pid {pids[0]} ({_command(pids[0])})"
    elif signed:
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(signed["since"]))
        who = f"pid {signed['pid']} on {signed['host']} ({signed['what']}) since {since}"
    else:
        who = "another process"
    todo = f"wait for it, or end it{f' with: kill {pids[0]}' if pids else ''}"
    if pids and _is_stopped(pids[0]):
        who = f"{who}, which is stopped"
        todo = f"let it go on with: kill -CONT {pids[0]}, or end it with: kill -KILL {pids[0]}"
    error = CatalogError(f"catalog {catalog} is locked by {who}; {todo}")
    error.readable = True
    return error


def _signed(file: Path) -> dict[str, Any]:
    """The content of the lock's file; empty where it is none of ours."""
    try:
        fd = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(fd, "rb") as content:
            record = json.loads(content.read(_RECORD))
        pid, since = int(record["pid"]), float(record["since"])
        time.localtime(since)
    except (OSError, ValueError, TypeError, KeyError, OverflowError):
        return {}
    return {"pid": pid, "since": since, "host": plain(record.get("host")), "what": plain(record.get("what"))}


def _command(pid: int) -> str:
    """The name of a program; of its arguments some may be secrets."""
    try:
        return plain(Path(f"/proc/{pid}/comm").read_text().strip())
    except OSError:
        return "it has ended by now"


def _is_stopped(pid: int) -> bool:
    with contextlib.suppress(OSError, IndexError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in ("T", "t")
    return False
