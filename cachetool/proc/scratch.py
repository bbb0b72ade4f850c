"""Working folders beside a user's files or among temporary ones: new, of this user alone, locked while they are in use.

::

    .OUT.partial-3f2a9c81d04e/   0700, a random name
      .cachetool-working         the mark: made by cachetool, what for, a token; locked by the process that works here
      ...

A killed process leaves its folder; the next one that needs one like it goes on with it or deletes it. Others may have
made a folder of such a name, or have put one there. So a folder is taken for ours by its mark alone: it must say the
same purpose, and mark and folder must belong to this user and be closed to others. Everything else stays as it is.
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
_FIRST = "This folder was made by cachetool to work in; it deletes it."
_OPEN = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_OTHERS = stat.S_IWGRP | stat.S_IWOTH
_MOST = 4096
_TRIES = 5
"""So often a folder is made that is another one by the time it is opened: others may write to the folder above."""


class WorkFolder:
    """A working folder that this process has open, and locked unless it is ``busy``."""

    def __init__(self, path: Path, fd: int, mark: int, token: str, *, busy: bool = False) -> None:
        self.path = path
        """As it was made: for people, and for other machines."""
        self.token = token
        """Tells it from any other folder: nobody else can read it."""
        self.busy = busy
        """Whether another process works in it."""
        self._descriptors = [fd, mark]
        self.inside = _inside(path, fd)
        """By which processes of this machine reach its files while it is open here."""

    @classmethod
    def make(cls, parent: Path, prefix: str, purpose: str, *, durable: bool = False) -> WorkFolder:
        """A new one; ``durable``: to be gone on with after a loss of power, too. Raises ``OSError`` when none can be
        made there."""
        for _ in range(_TRIES):
            path = new_folder(parent, prefix)
            fd = mark = None
            try:
                fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | _OPEN)
                if os.listdir(fd):
                    continue
                mark = os.open(_MARK, os.O_RDWR | os.O_CREAT | os.O_EXCL | _OPEN, 0o600, dir_fd=fd)
                # Not compared with this user: some file systems show one owner for all, but then for both.
                if os.fstat(mark).st_uid == os.fstat(fd).st_uid:
                    with contextlib.suppress(OSError):  # some file systems lock nothing: then nobody sweeps there
                        fcntl.flock(mark, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    token = secrets.token_hex(16)
                    os.write(mark, _text(purpose, token))
                    if durable:
                        os.fsync(mark)
                        os.fsync(fd)
                    work = cls(path, fd, mark, token)
                    fd = mark = None
                    return work
            except (FileNotFoundError, NotADirectoryError):
                continue
            finally:
                if mark is not None:
                    os.unlink(_MARK, dir_fd=fd)
                    with contextlib.suppress(OSError):
                        os.rmdir(path)
                _close(fd, mark)
        raise PermissionError(errno.EACCES, "somebody else changes what is made there", str(parent))

    @classmethod
    def existing(cls, parent: Path, prefix: str, purpose: str) -> Iterator[WorkFolder]:
        """Those of this user that are there for the same purpose; locked, where no other process works in them."""
        try:
            names = sorted(os.listdir(parent))
        except OSError:  # it may be written to, but not read; or is not there
            return
        for name in names:
            if name.startswith(prefix) and (work := cls._open(parent / name, purpose)) is not None:
                yield work

    @classmethod
    def joined(cls, path: Path, token: str) -> WorkFolder | None:
        """The one that another process works in, for a task of that process; None where it is not at ``path``."""
        return cls._open(path, None, token)

    @classmethod
    def _open(cls, path: Path, purpose: str | None, token: str | None = None) -> WorkFolder | None:
        fd = mark = None
        with contextlib.suppress(OSError, ValueError):  # a link, another user's, none of ours
            fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | _OPEN)
            if token is None and os.fstat(fd).st_uid != os.geteuid():
                raise PermissionError
            mark = os.open(_MARK, os.O_RDWR | _OPEN, dir_fd=fd)
            said = _read(mark)
            if said == (purpose, said[1]) and _ours(fd, mark):
                return cls(path, fd, mark, said[1], busy=not _locked(mark))
            if token is not None and secrets.compare_digest(said[1], token):
                return cls(path, fd, mark, token, busy=True)
        _close(fd, mark)
        return None

    def close(self) -> None:
        """Let it go, and leave it to the next process that needs one like it."""
        _close(*self._descriptors)
        self._descriptors = []

    def remove(self) -> None:
        """Delete it and let it go."""
        try:
            remove_held(self._descriptors[0], self.path)
        finally:
            self.close()


@contextlib.contextmanager
def scratch(parent: Path, prefix: str) -> Iterator[Path]:
    """A new working folder in ``parent``, deleted at the end, and with it those that killed processes left. Raises
    ``OSError`` when none can be made there."""
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
    """For the listing of a source, in the folder for temporary files."""
    return scratch(Path(tempfile.gettempdir()), "cachetool-listing-")


def _text(purpose: str, token: str) -> bytes:
    return f"{_FIRST}\n{token}\n{json.dumps(purpose)}\n".encode()


def _read(mark: int) -> tuple[str, str]:
    """Purpose and token. Raises ``ValueError`` for what is no mark."""
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
    """A path to the open folder that stays good. Where others may rename it, or a folder above it, and put something in
    its place, that is a path by its descriptor, on systems that have such."""
    if not any(map(_open_to_others, Path(os.path.realpath(path)).parents)):
        return path
    by_descriptor = Path(f"/proc/{os.getpid()}/fd/{fd}")  # not "self": processes started by this one use it, too
    try:
        return by_descriptor if os.path.samestat(os.stat(by_descriptor), os.fstat(fd)) else path
    except OSError:
        return path


def _open_to_others(folder: Path) -> bool:
    status = os.stat(folder)
    if status.st_uid not in (0, os.geteuid()):
        return True
    return bool(status.st_mode & _OTHERS) and not status.st_mode & stat.S_ISVTX
