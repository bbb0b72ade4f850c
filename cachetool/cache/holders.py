"""Holders: the living processes of a cache. Each has a lock file, and the kernel's lock decides who lives, never a pid.

The lock (:class:`~cachetool.proc.locks.OwnLock`) ends with its process, however the process ended and whatever it
forked, and with nothing else. A program that copies or hashes its cache does not lose the lock, and neither does one
that closes all its descriptors.

All open :class:`~cachetool.cache.root.CacheDir` objects of a process share one holder of a cache. The last one that is
closed retires the holder. Two threads, or a signal's handler, may close at the same time; :func:`leave` decides who is
last.
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
    """The registration of this process in one cache: its id and its locked file."""

    __slots__ = ("_lock", "id", "path", "pid", "retired")

    def __init__(self, folder: Path) -> None:
        self.pid = os.getpid()
        self.retired = False
        while True:
            self.id = Id.new()
            self.path = folder / f"{self.id}.lock"
            # In a loop: a recovery in another process may take the new file for that of a dead
            # process and delete it before it is locked.
            lock = _make_locked(self.path)
            if lock is not None:
                self._lock = lock
                _ours.add((self.pid, self.id))
                return

    def register(self, connection: Connection) -> None:
        """Write this process into the catalog if it is not in it yet. Call this inside a transaction."""
        with _lock:
            # Another thread or a signal's handler may close the cache in the middle of the call.
            if self.retired:
                raise _closed(self.path.parent)
            # Somebody deleted the lock file. Until it exists again, other processes judge this one
            # by its pid (`dead_holders`), which means nothing in another PID namespace. So a new
            # file is made here.
            if not self.path.exists() and (lock := _make_locked(self.path)) is not None:
                self._lock, gone = lock, self._lock
                gone.release()
        connection.execute(
            "INSERT OR IGNORE INTO holders VALUES (?, ?, ?, ?, ?)",
            (self.id, self.pid, socket.gethostname(), program(), time.time()),
        )

    def retire(self, *, signed_out: bool = True) -> None:
        """Release the lock and remove its file. The caller deletes the row.

        If the row still exists (not ``signed_out``), the file stays: its free lock tells the next process that this
        holder is gone, although its pid still runs.
        """
        with _lock:
            self.retired = True
            if signed_out:
                # On a disk that cannot be written the free lock alone must do.
                with contextlib.suppress(OSError):
                    self.path.unlink()
            self._lock.release()
            _ours.discard((self.pid, self.id))


def _make_locked(path: Path) -> OwnLock | None:
    """Return a new locked file, or None when a recovery in another process deleted the file before it was locked."""
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        fd = os.open(path, flags, 0o600)
    except FileNotFoundError:
        # Somebody deleted the folder. It holds only files that each process makes anew, so it can
        # be made again.
        path.parent.mkdir(mode=0o700, exist_ok=True)
        fd = os.open(path, flags, 0o600)
    try:
        # The order matters: only after the lock is taken can no recovery delete the file, so the
        # name is checked afterwards.
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
"""The users that share each holder."""
_ours: set[_Key] = set()
"""Process id and id of every holder that has a lock, including those that are about to retire."""
# An RLock, because a signal's handler may close a cache while the same thread makes a holder.
_lock = threading.RLock()


def _after_fork() -> None:
    global _lock
    # In the child the lock may be held by a thread that does not exist there.
    _lock = threading.RLock()


os.register_at_fork(after_in_child=_after_fork)


def _key(folder: Path) -> _Key:
    return os.getpid(), str(folder)


class User:
    """One use of a cache, from :func:`enter` to :func:`leave`."""

    left = False


def enter(folder: Path) -> User:
    """Begin a use of the cache whose lock files lie in ``folder``."""
    user = User()
    with _lock:
        _users.setdefault(_key(folder), set()).add(user)
    return user


def leave(folder: Path, user: User) -> Holder | None:
    """End a use. Return the holder to the last user, who must sign it out and retire it; return None to all others."""
    key = _key(folder)
    with _lock:
        user.left = True
        # Empty in a forked child that made no use of its own: the users are those of its parent.
        users = _users.get(key, set())
        users.discard(user)
        # Under the lock and removed from the table at once, so that two threads cannot both retire
        # it. When two did, one closed a descriptor that was SQLite's by then ("disk I/O error" in
        # 10 of 180 runs). A thread that comes meanwhile gets a new holder.
        return None if users else _holders.pop(key, None)


def _closed(folder: Path) -> UsageError:
    return UsageError(f"cache {folder.parent} is closed; open it again with cachetool.open_cache")


def holder_of(folder: Path, user: User | None = None) -> Holder:
    """Return this process's holder for the cache whose lock files lie in ``folder``. The first use makes it; there is
    one per process.

    Raises :class:`UsageError` when this ``user`` has left.
    """
    key = _key(folder)
    with _lock:
        if user is not None:
            if user.left:
                raise _closed(folder)
            # A forked child inherits the user object but not the table entry of its own pid, so its
            # use begins here.
            _users.setdefault(key, set()).add(user)
        if key not in _holders:
            try:
                _holders[key] = Holder(folder)
            except OSError as error:
                raise _unwritable(folder, error) from error
        return _holders[key]


def _unwritable(folder: Path, error: OSError) -> CacheToolError:
    """Return the error for a process that cannot leave a lock file in a cache, which every reader and writer must
    do."""
    if isinstance(error, PermissionError):
        denied = permission_denied(folder, folder.parent)
        denied.readable = True
        return denied
    if not folder.parent.is_dir():
        return CatalogError(f"the cache folder {folder.parent} does not exist any more; pull again to fill a new one")
    explanation = disk_error(error)
    why = str(explanation).partition(": ")[2] if explanation is not None and error.filename else error.strerror
    if error.errno == errno.EROFS:
        why = "the disk is mounted read-only; make it writable again, for example by mount -o remount,rw"
    return CapacityError(f"cache {folder.parent} cannot be used because no lock file can be created in it: {why}")


def retire_ours(folder: Path) -> None:
    """Retire the holder of this process in a cache whose folder and catalog were removed."""
    with _lock:
        own = _holders.pop(_key(folder), None)
    if own is not None:
        own.retire()


def dead_holders(connection: Connection, folder: Path) -> list[Id]:
    """Return the ids in the catalog whose process is gone. Call this inside ``BEGIN IMMEDIATE``, so that no other
    process tests locks."""
    dead: list[Id] = []
    for row in connection.execute("SELECT id, pid, host, started FROM holders"):
        # The id becomes a path, so it is checked: a foreign catalog may name any file.
        id = Id(row["id"])
        path = folder / f"{id}.lock"
        if is_ours(id):
            continue
        # The kernel's lock decides. Only where somebody deleted the lock file, the pid decides: a
        # process that runs on this host and started before it registered.
        alive = (
            _alive(path) if path.exists() else row["host"] == socket.gethostname() and _runs(row["pid"], row["started"])
        )
        if not alive:
            dead.append(id)
    return dead


def is_alive(connection: Connection, folder: Path, id: str) -> bool:
    """Return True when a registered holder lives. Call this inside ``BEGIN IMMEDIATE``; a recovery deletes the rows of
    dead holders."""
    row = connection.execute("SELECT 1 FROM holders WHERE id = ?", (id,)).fetchone()
    return row is not None and id not in dead_holders(connection, folder)


def _runs(pid: int, since: float) -> bool:
    """Return True if process ``pid`` of this machine was already running at the time ``since`` (seconds since 1970)."""
    try:
        # proc(5): field 22 is the start in clock ticks after boot, behind the name in parentheses;
        # btime is the boot. The name may contain spaces and parentheses, so the split begins behind
        # the last one.
        ticks = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
        boot = int(Path("/proc/stat").read_text().partition("btime ")[2].split()[0])
    except (OSError, IndexError, ValueError):
        return False
    # btime has whole seconds, and the start is rounded too, so 2 s are allowed.
    return boot + ticks / os.sysconf("SC_CLK_TCK") <= since + 2


def remove_stale_locks(connection: Connection, folder: Path) -> None:
    """Remove lock files of processes that died before they were written into the catalog. Call this inside ``BEGIN
    IMMEDIATE``."""
    # No other thread may make a holder now: the test would lock its new file first, and then delete
    # it.
    with _lock:
        registered = {row["id"] for row in connection.execute("SELECT id FROM holders")}
        for path in _others(folder):
            if path.stem not in registered:
                _alive(path, remove=True)


def live_locks(folder: Path) -> list[int]:
    """Return the pids of other processes that hold a lock here, also of those that no catalog knows; 0 for an unknown
    pid."""
    with _lock:
        return [(*lock_owners(path), 0)[0] for path in _others(folder) if _alive(path)]


def lock_states(folder: Path) -> dict[str, bool]:
    """Return, for each lock file here, the holder's id and whether its process lives. This process always does."""
    with _lock:
        return {path.stem: is_ours(path.stem) or _alive(path) for path in folder.glob("*.lock")}


def locks_work(folder: Path) -> bool:
    """Return True if a lock that this process holds in ``folder`` keeps another process out, and lets it in after the
    release."""
    # A recovery in another process tries the same lock, and removes the file when its lock is free.
    # Then another file is tested.
    for _ in range(_LOOKS):
        path = folder / f"{Id.new()}.lock"
        lock = _make_locked(path)
        if lock is None:
            continue
        try:
            if _other_gets(path):
                return False
            # Another process got past the lock, or a user deleted the file by hand. The next file
            # tells which.
            if not path.exists():
                continue
            lock.release()
            # A missing file is a success too: a recovery removes only what it could lock, so the
            # released lock let it in.
            if _other_gets(path) or not path.exists():
                return True
        finally:
            lock.release()
            path.unlink(missing_ok=True)
    return False


_LOOKS = 5
"""Files that :func:`locks_work` tests before it decides that locks do not work."""


def _other_gets(path: Path) -> bool:
    """Return True if another process can lock the file now."""
    # A child process, because a lock that is tested inside the process that holds it says nothing
    # about other processes.
    code = "import fcntl, sys; fcntl.flock(open(sys.argv[1]), fcntl.LOCK_EX | fcntl.LOCK_NB)"
    return subprocess.run([sys.executable, "-c", code, path], stderr=subprocess.DEVNULL, check=False).returncode == 0


def _others(folder: Path) -> list[Path]:
    return [path for path in folder.glob("*.lock") if Id.fits(path.stem) and not is_ours(path.stem)]


def is_ours(id: str) -> bool:
    """Return True if a holder is this process, or was until a moment ago."""
    return (os.getpid(), id) in _ours


def _alive(path: Path, *, remove: bool = False) -> bool:
    """Return True if a process holds the lock. With ``remove``, delete the file while it is certain that no process
    does."""
    try:
        # O_NONBLOCK, because opening a FIFO would wait for its other end.
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    except OSError as error:
        if error.errno == errno.ELOOP:
            # No process of cachetool makes links here.
            return False
        raise
    try:
        # Shared, because several processes may look at the same time. With exclusive tests each
        # would take the other's test for a living holder.
        if not try_lock(fd, shared=True):
            return True
        if remove:
            # While the test's lock is still held: a new owner checks after locking that its file
            # still exists.
            remove_from(path.parent.parent, Name(path.parent.name), Name(path.name))
        return False
    finally:
        os.close(fd)
