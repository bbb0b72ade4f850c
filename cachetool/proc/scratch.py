"""Working folders beside a user's files or among temporary ones: new, for this user alone, locked while they are in
use.

::

    .OUT.partial-3f2a9c81d04e/   0700, a random name
      .cachetool-working         the mark: made by cachetool, what for, a token; locked by the process that works here
      ...

A killed process leaves its folder. The next process that needs one like it continues with it or deletes it. Other users
may have made a folder of such a name, or may have put one there. So only the mark tells a folder of ours: it must state
the same purpose, and mark and folder must belong to this user and be closed to others. Everything else stays.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import secrets
import stat
import tempfile
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path

from cachetool.proc.folders import ALLOW_SHARED, new_folder, remove_held

__all__ = ["WorkFolder", "listing_scratch", "scratch"]

_MARK = ".cachetool-working"
_FIRST = "cachetool made this folder for its work, and will delete it."
# No link and no wait: another user may have put a link or a pipe in the place of folder or mark.
_OPEN = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_OTHERS = stat.S_IWGRP | stat.S_IWOTH
# A mark is three lines long. More is not read, because the file may be another user's, of any size.
_MOST = 4096
# Others may write to the folder above, and exchange what was made there.
_TRIES = 5
"""Number of tries to make a folder, if each time it is another folder when it is opened."""


class WorkFolder:
    """A working folder that this process has open, and locked unless it is ``busy``."""

    def __init__(self, path: Path, fd: int, mark: int, token: str, *, busy: bool = False) -> None:
        self.path = path
        """The path as it was made: for people, and for other machines."""
        self.token = token
        """The secret by which a process of this command recognises the folder: nobody else can read it."""
        self.busy = busy
        """True if another process works in it."""
        self._descriptors = [fd, mark]
        self.inside = _inside(path, fd)
        """The path by which processes of this machine reach its files while it is open here."""

    @classmethod
    def make(cls, parent: Path, prefix: str, purpose: str, *, durable: bool = False) -> WorkFolder:
        """Make a new folder. With ``durable`` it can be continued after a power cut. Raises ``OSError`` if none can be
        made."""
        for _ in range(_TRIES):
            path = new_folder(parent, prefix)
            fd = mark = None
            try:
                fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | _OPEN)
                # Something is in it already, so it is not the folder that was made.
                if os.listdir(fd):
                    continue
                mark = os.open(_MARK, os.O_RDWR | os.O_CREAT | os.O_EXCL | _OPEN, 0o600, dir_fd=fd)
                # Compared with each other, not with this user: some file systems show one owner for
                # everything.
                if os.fstat(mark).st_uid == os.fstat(fd).st_uid:
                    # Some file systems have no locks. There no process sweeps, because it cannot
                    # tell an abandoned folder.
                    with contextlib.suppress(OSError):
                        fcntl.flock(mark, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    token = secrets.token_hex(16)
                    os.write(mark, _text(purpose, token))
                    if durable:
                        # The mark and its entry: without them a folder that survived a power cut
                        # would count as foreign.
                        os.fsync(mark)
                        os.fsync(fd)
                    work = cls(path, fd, mark, token)
                    fd = mark = None
                    return work
            except (FileNotFoundError, NotADirectoryError):
                continue
            finally:
                # The mark is deleted first, because a folder without it is never taken for ours.
                if mark is not None:
                    os.unlink(_MARK, dir_fd=fd)
                    with contextlib.suppress(OSError):
                        os.rmdir(path)
                _close(fd, mark)
        raise PermissionError(errno.EACCES, "another user changes the files that cachetool makes there", str(parent))

    @classmethod
    def existing(cls, parent: Path, prefix: str, purpose: str) -> Iterator[WorkFolder]:
        """Yield this user's folders for the same purpose, locked unless another process works in them."""
        try:
            names = sorted(os.listdir(parent))
        # The folder may be closed to reading, or missing.
        except OSError:
            return
        for name in names:
            if name.startswith(prefix) and (work := cls._open(parent / name, purpose)) is not None:
                yield work

    @classmethod
    def joined(cls, path: Path, token: str) -> WorkFolder | None:
        """Return the folder that another process works in, for a task of that process; None if it is not at
        ``path``."""
        return cls._open(path, None, token)

    @classmethod
    def _open(cls, path: Path, purpose: str | None, token: str | None = None) -> WorkFolder | None:
        fd = mark = None
        # A link, a folder of another user, or one that cachetool did not make.
        with contextlib.suppress(OSError, ValueError):
            fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | _OPEN)
            if token is None and os.fstat(fd).st_uid != os.geteuid():
                raise PermissionError
            mark = os.open(_MARK, os.O_RDWR | _OPEN, dir_fd=fd)
            said = _read(mark)
            if said == (purpose, said[1]) and _ours(fd, mark):
                return cls(path, fd, mark, said[1], busy=not _locked(mark))
            # In constant time, so that the time of the comparison tells another user, whose folder
            # this may be, nothing about the token.
            if token is not None and secrets.compare_digest(said[1], token):
                return cls(path, fd, mark, token, busy=True)
        _close(fd, mark)
        return None

    def close(self) -> None:
        """Close the folder without deleting it, so that the next process with the same purpose can use or delete it."""
        _close(*self._descriptors)
        self._descriptors = []

    def remove(self) -> None:
        """Delete the folder and close it."""
        try:
            remove_held(self._descriptors[0], self.path)
        finally:
            self.close()


@contextlib.contextmanager
def scratch(parent: Path, prefix: str) -> Iterator[Path]:
    """Yield a new working folder in ``parent``, and delete it at the end, together with those that killed processes
    left.

    Raises ``OSError`` if none can be made there.
    """
    for left in WorkFolder.existing(parent, prefix, prefix):
        with contextlib.suppress(OSError):
            left.close() if left.busy else left.remove()
    work = WorkFolder.make(parent, prefix, prefix)
    try:
        yield work.inside
    finally:
        with contextlib.suppress(OSError):
            work.remove()


def listing_scratch() -> AbstractContextManager[Path]:
    """Return a working folder for the listing of a source, among the temporary files."""
    return scratch(Path(tempfile.gettempdir()), "cachetool-listing-")


def _text(purpose: str, token: str) -> bytes:
    return f"{_FIRST}\n{token}\n{json.dumps(purpose)}\n".encode()


def _read(mark: int) -> tuple[str, str]:
    """Return purpose and token of a mark. Raises ``ValueError`` for what is no mark."""
    if not stat.S_ISREG(os.fstat(mark).st_mode):
        raise ValueError
    data = os.pread(mark, _MOST, 0)
    first, token, purpose = data.decode("ascii").removesuffix("\n").split("\n")
    said = json.loads(purpose)
    if first != _FIRST or not isinstance(said, str) or data != _text(said, token):
        raise ValueError
    return said, token


def _ours(fd: int, mark: int) -> bool:
    folder, file = os.fstat(fd), os.fstat(mark)
    closed = not (folder.st_mode | file.st_mode) & _OTHERS or os.environ.get(ALLOW_SHARED) == "1"
    # A second name (a hard link) could be a mark of another folder of this user.
    return folder.st_uid == file.st_uid == os.geteuid() and file.st_nlink == 1 and closed


def _locked(mark: int) -> bool:
    try:
        fcntl.flock(mark, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _close(*fds: int | None) -> None:
    for fd in fds:
        if fd is not None:
            os.close(fd)


def _inside(path: Path, fd: int) -> Path:
    """Return a path to the open folder that stays valid."""
    # Other users who may rename the folder, or one above it, may put another one in its place. In
    # that case the path leads over the descriptor, on systems that have such paths.
    if not any(map(_open_to_others, Path(os.path.realpath(path)).parents)):
        return path
    # Not "self", because processes started by this one use the path, too.
    by_descriptor = Path(f"/proc/{os.getpid()}/fd/{fd}")
    try:
        return by_descriptor if os.path.samestat(os.stat(by_descriptor), os.fstat(fd)) else path
    except OSError:
        return path


def _open_to_others(folder: Path) -> bool:
    status = os.stat(folder)
    if status.st_uid not in (0, os.geteuid()):
        return True
    # In a sticky folder such as /tmp only the owner of an entry may rename it.
    return bool(status.st_mode & _OTHERS) and not status.st_mode & stat.S_ISVTX
