"""Which processes are alive: one lock file each, judged by the kernel and never by a pid.

The lock (:class:`~cachetool.proc.locks.OwnLock`) ends with its process, however that ended and whatever it forked, and
with nothing else: neither a program that copies or hashes its cache nor one that closes all its descriptors loses it.

All open :class:`~cachetool.cache.root.CacheDir` of a process share one holder of a cache; the last one that is closed
takes it out. Whatever of that may happen in two threads at once, or in a signal's handler, happens in :func:`leave`.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

from cachetool.cache.catalog import Connection
from cachetool.core.errors import CacheToolError, CapacityError, CatalogError, UsageError
from cachetool.core.names import Id, Name
from cachetool.core.text import program
from cachetool.proc.disk import disk_error, permission_denied
from cachetool.proc.folders import remove as remove_from
from cachetool.proc.locks import OwnLock, lock_owners, try_lock

__all__ = ["Holder", "dead_holders", "holder_of", "is_alive"]


class Holder:
    """This process, as one cache knows it."""

    __slots__ = ("_lock", "id", "path", "pid", "retired")

    def __init__(self, folder: Path) -> None:
        self.pid = os.getpid()
        self.retired = False
        while True:
            self.id = Id.new()
            self.path = folder / f"{self.id}.lock"
            lock = _make_locked(self.path)
            if lock is not None:
                self._lock = lock
                _ours.add((self.pid, self.id))
                return

    def register(self, connection: Connection) -> None:
        """Write this process into the catalog unless it is there; inside a transaction.

        A lock file that somebody deleted is made again: until then others go by the pid (:func:`dead_holders`).
        """
        with _lock:
            if self.retired:  # by another thread or a signal's handler, in the middle of the call
                raise _closed(self.path.parent)
            if not self.path.exists() and (lock := _make_locked(self.path)) is not None:
                self._lock, gone = lock, self._lock
                gone.release()
        connection.execute(
            "INSERT OR IGNORE INTO holders VALUES (?, ?, ?, ?, ?)",
            (self.id, self.pid, socket.gethostname(), program(), time.time()),
        )

    def retire(self, *, signed_out: bool = True) -> None:
        """Let the lock go and remove its file; the row is the caller's. Where that is still there, not ``signed_out``,
        the file stays: by its free lock the next process knows that this holder is gone, while its pid still runs."""
        with _lock:
            self.retired = True
            if signed_out:
                with contextlib.suppress(OSError):  # on a disk that cannot be written the free lock must do
                    self.path.unlink()
            self._lock.release()
            _ours.discard((self.pid, self.id))


def _make_locked(path: Path) -> OwnLock | None:
    """A new lock file, locked; None when a recovery elsewhere took it for that of a dead process before it was."""
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        fd = os.open(path, flags, 0o600)
    except FileNotFoundError:  # somebody deleted the folder, which only holds what is made anew by each process
        path.parent.mkdir(mode=0o700, exist_ok=True)
        fd = os.open(path, flags, 0o600)
    try:
        if try_lock(fd) and path.exists():
            return OwnLock(fd)
    except OSError:
        os.close(fd)
        path.unlink(missing_ok=True)
        raise
    os.close(fd)
    return None


_Key = tuple[int, str]
_holders: dict[_Key, Holder] = {}
_users: dict[_Key, set[User]] = {}
"""Who shares each of them."""
_ours: set[_Key] = set()
"""Process and id of every holder that has a lock, of those that are on their way out too."""
_lock = threading.RLock()  # a signal's handler may close a cache while its thread makes a holder


def _after_fork() -> None:
    global _lock
    _lock = threading.RLock()  # the other one may have been held by a thread that does not exist here


os.register_at_fork(after_in_child=_after_fork)


def _key(folder: Path) -> _Key:
    return os.getpid(), str(folder)


class User:
    """A use of a cache, from :func:`enter` to :func:`leave`."""

    left = False


def enter(folder: Path) -> User:
    """Somebody of this process uses the cache whose lock files lie in ``folder``."""
    user = User()
    with _lock:
        _users.setdefault(_key(folder), set()).add(user)
    return user


def leave(folder: Path, user: User) -> Holder | None:
    """The end of a use. Gives the last one the holder, to be signed out and retired: nobody gets it any more, and
    whoever comes meanwhile another one."""
    key = _key(folder)
    with _lock:
        user.left = True
        users = _users.get(key, set())  # none in a forked child that made no use of it: they are its parent's
        users.discard(user)
        return None if users else _holders.pop(key, None)


def _closed(folder: Path) -> UsageError:
    return UsageError(f"cache {folder.parent} is closed; open it again with cachetool.open_cache")


def holder_of(folder: Path, user: User | None = None) -> Holder:
    """This process's holder for the cache whose lock files lie in ``folder``: made at first use, one per process.

    Raises :class:`UsageError` when this ``user`` has left.
    """
    key = _key(folder)
    with _lock:
        if user is not None:
            if user.left:
                raise _closed(folder)
            _users.setdefault(key, set()).add(user)  # a forked child's own use begins here
        if key not in _holders:
            try:
                _holders[key] = Holder(folder)
            except OSError as error:
                raise _unwritable(folder, error) from error
        return _holders[key]


def _unwritable(folder: Path, error: OSError) -> CacheToolError:
    """Whoever reads or writes a cache must leave a lock there: why this process cannot."""
    if isinstance(error, PermissionError):
        denied = permission_denied(folder, folder.parent)
        denied.readable = True
        return denied
    if not folder.parent.is_dir():
        return CatalogError(f"the cache folder {folder.parent} is gone; pull again to fill a new one")
    explanation = disk_error(error)
    why = str(explanation).partition(": ")[2] if explanation is not None and error.filename else error.strerror
    if error.errno == errno.EROFS:
        why = "the disk is mounted read-only; make it writable again, for example by mount -o remount,rw"
    return CapacityError(f"cache {folder.parent} takes no new reader or writer, which must leave a lock there: {why}")


def retire_ours(folder: Path) -> None:
    """Let go of what this process holds in a cache whose folder was taken away, with the catalog."""
    with _lock:
        own = _holders.pop(_key(folder), None)
    if own is not None:
        own.retire()


def dead_holders(connection: Connection, folder: Path) -> list[Id]:
    """Ids in the catalog whose process is gone; inside ``BEGIN IMMEDIATE``: nobody else tests locks then.

    Judged by the kernel's lock. Only where the lock file itself was deleted by somebody, by whether the process that
    registered still runs here: its pid, started before it registered.
    """
    dead: list[Id] = []
    for row in connection.execute("SELECT id, pid, host, started FROM holders"):
        id = Id(row["id"])
        path = folder / f"{id}.lock"
        if is_ours(id):
            continue
        alive = (
            _alive(path) if path.exists() else row["host"] == socket.gethostname() and _runs(row["pid"], row["started"])
        )
        if not alive:
            dead.append(id)
    return dead


def is_alive(connection: Connection, folder: Path, id: str) -> bool:
    """Return True when a registered holder lives; inside ``BEGIN IMMEDIATE``. A recovery deletes those that died."""
    row = connection.execute("SELECT 1 FROM holders WHERE id = ?", (id,)).fetchone()
    return row is not None and id not in dead_holders(connection, folder)


def _runs(pid: int, since: float) -> bool:
    """Whether the process ``pid`` of this machine was there at the time ``since``."""
    try:
        # proc(5): field 22 is the start in clock ticks after boot, behind the name in parentheses; btime is the boot.
        ticks = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
        boot = int(Path("/proc/stat").read_text().partition("btime ")[2].split()[0])
    except (OSError, IndexError, ValueError):
        return False
    return boot + ticks / os.sysconf("SC_CLK_TCK") <= since + 2


def remove_stale_locks(connection: Connection, folder: Path) -> None:
    """Remove lock files of processes that died before they came into the catalog; inside ``BEGIN IMMEDIATE``."""
    with _lock:  # no other thread makes a holder now, whose file our test of its lock would remove
        registered = {row["id"] for row in connection.execute("SELECT id FROM holders")}
        for path in _others(folder):
            if path.stem not in registered:
                _alive(path, remove=True)


def live_locks(folder: Path) -> list[int]:
    """Pids of the other processes that hold a lock here, whether or not a catalog knows them; 0 where it is unknown."""
    with _lock:
        return [(*lock_owners(path), 0)[0] for path in _others(folder) if _alive(path)]


def lock_states(folder: Path) -> dict[str, bool]:
    """Every holder that has a lock file here, and whether its process is alive; this process always is."""
    with _lock:
        return {path.stem: is_ours(path.stem) or _alive(path) for path in folder.glob("*.lock")}


def locks_work(folder: Path) -> bool:
    """Whether a lock that this process holds in ``folder`` keeps another process out, and lets it in afterwards.

    A recovery beside us tries the same lock, and removes the file of one that is free: then another file is looked at.
    """
    for _ in range(_LOOKS):
        path = folder / f"{Id.new()}.lock"
        lock = _make_locked(path)
        if lock is None:
            continue
        try:
            if _other_gets(path):
                return False
            if not path.exists():  # whoever removed it got past the lock, or deletes by hand
                continue
            lock.release()
            # Gone: a recovery removes what it could lock, so the lock did let it in.
            if _other_gets(path) or not path.exists():
                return True
        finally:
            lock.release()
            path.unlink(missing_ok=True)
    return False


_LOOKS = 5
"""Files that :func:`locks_work` looks at before it believes that locks do not work."""


def _other_gets(path: Path) -> bool:
    """Whether a process of its own can lock the file now."""
    code = "import fcntl, sys; fcntl.flock(open(sys.argv[1]), fcntl.LOCK_EX | fcntl.LOCK_NB)"
    return subprocess.run([sys.executable, "-c", code, path], stderr=subprocess.DEVNULL, check=False).returncode == 0


def _others(folder: Path) -> list[Path]:
    return [path for path in folder.glob("*.lock") if Id.fits(path.stem) and not is_ours(path.stem)]


def is_ours(id: str) -> bool:
    """Whether a holder is this process, or was until a moment ago."""
    return (os.getpid(), id) in _ours


def _alive(path: Path, *, remove: bool = False) -> bool:
    """Whether a process holds the lock; ``remove`` the file while it is certain that none does."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)  # of a FIFO it would wait
    except FileNotFoundError:
        return False
    except OSError as error:
        if error.errno == errno.ELOOP:
            return False  # a link, which no process of ours makes
        raise
    try:
        if not try_lock(fd, shared=True):  # shared: several may look at once
            return True
        if remove:
            remove_from(path.parent.parent, Name(path.parent.name), Name(path.name))
        return False
    finally:
        os.close(fd)
