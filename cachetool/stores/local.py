"""A folder of this machine as a store.

Walked with :func:`os.scandir`. Left out, and counted: hidden names (beginning with a dot), everything that is no
regular file, links to folders, and links that lead out of the folder. The "ETag" of a file is its time of modification
and its size.
"""

from __future__ import annotations

import errno
import io
import os
import stat
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cachetool.core.errors import AccessDenied, BadObject, NotFound, SourceError, Unreachable, UsageError
from cachetool.stores.base import EXHAUSTED, Object, Pages, check_identity, check_length
from cachetool.stores.redact import printable
from cachetool.stores.walk import Walk

__all__ = ["LocalStore", "open_local_store"]

_BATCH = 1000
# Not blocking: a FIFO put in a file's place must not hang the open. The final name is not followed: see _open.
_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW


def open_local_store(root: str | Path) -> LocalStore:
    """The store of the folder ``root``.

    Raises :class:`NotFound` when it is not there, :class:`UsageError` when it is a file, :class:`AccessDenied`.
    """
    shown = printable(str(root))
    try:
        real = os.path.realpath(root)
        mode = os.stat(real).st_mode
    except PermissionError as error:
        raise AccessDenied(f"{shown!r}: permission denied") from error
    except (OSError, ValueError) as error:
        raise NotFound(f"there is no file or folder {shown!r}") from error
    if not stat.S_ISDIR(mode):
        raise UsageError(f"{shown!r} is a file; give the folder that holds the samples")
    return LocalStore(real)


class LocalStore:
    """Files under one folder; see :class:`cachetool.stores.base.Store`."""

    concurrency = 4

    def __init__(self, root: str) -> None:
        """``root`` is a folder's real path. Made by :func:`open_local_store`."""
        self._root = root
        self.url = printable(root)
        self._left_out: Counter[str] = Counter()

    @property
    def left_out(self) -> Mapping[str, int]:
        """What the last finished :meth:`list` passed over."""
        return self._left_out

    def list(self) -> Pages:
        """All files, in batches; a folder that cannot be read raises :class:`AccessDenied`."""
        walk = Walk(self, lambda key: os.path.lexists(os.path.join(self._root, key)))
        batch: list[Object] = []
        folders = [""]
        while folders:
            folder = folders.pop()
            try:
                with os.scandir(os.path.join(self._root, folder)) as entries:
                    for entry in entries:
                        key = f"{folder}{entry.name}"
                        if walk.hides(key, folder=entry.is_dir(follow_symlinks=False)):
                            continue
                        if entry.is_dir(follow_symlinks=False):
                            folders.append(f"{key}/")
                        elif (item := self._listed(entry, key, walk)) is not None:
                            batch.append(item)
                            if len(batch) == _BATCH:
                                yield batch
                                batch = []
            except FileNotFoundError:
                if not folder:
                    raise NotFound(f"no folder {self.url!r}") from None
                # Removed by somebody between being listed and being walked: it is simply not there any more.
            except PermissionError as error:
                raise AccessDenied(f"{self.url!r}: folder {folder!r} cannot be read: permission denied") from error
            except OSError as error:
                raise SourceError(f"{self.url!r}: folder {folder!r} cannot be read: {error.strerror}") from error
        if batch:
            yield batch
        self._left_out = walk.left_out

    def _listed(self, entry: os.DirEntry[str], key: str, walk: Walk) -> Object | None:
        try:
            if entry.is_symlink() and not self._inside(entry.path):
                walk.leave_out(key, "links that lead out of the folder")
                return None
            status = entry.stat()
        except OSError as error:  # removed since, or a link to nothing
            if isinstance(error, PermissionError) and not entry.is_symlink():
                raise  # the folder may be listed, but not entered
            if entry.is_symlink():
                walk.leave_out(key, "links to nothing")
            else:
                walk.left_out["vanished while listing"] += 1
            return None
        if not stat.S_ISREG(status.st_mode):
            walk.leave_out(key, "links to folders" if stat.S_ISDIR(status.st_mode) else "special files")
            return None
        return Object(key, status.st_size, _etag(status))

    def _inside(self, path: str) -> bool:
        return os.path.realpath(path).startswith(os.path.join(self._root, ""))

    def _open(self, item: Object) -> int:
        parts = item.key.split("/")
        if "\0" in item.key or any(part in ("", ".", "..") for part in parts):
            raise BadObject(f"{item.key!r} is no name of a file below the folder")
        path = os.path.join(self._root, item.key)
        try:
            try:
                return os.open(path, _FLAGS)
            except OSError as error:
                if error.errno != errno.ELOOP or not self._inside(path):
                    raise
                return os.open(os.path.realpath(path), _FLAGS)
        except (FileNotFoundError, NotADirectoryError) as error:
            self._refuse_away()
            raise NotFound(f"{item.key!r} is not there any more; it was when {self.url!r} was listed") from error
        except PermissionError as error:
            raise AccessDenied(f"{self.url!r}: {item.key!r} cannot be read: permission denied") from error
        except OSError as error:
            if error.errno in EXHAUSTED:
                raise SourceError(f"{item.key!r} cannot be opened: {error.strerror}") from error
            self._refuse_away()
            raise BadObject(f"{item.key!r} cannot be read: {error.strerror}") from error

    def _refuse_away(self) -> None:
        """Raises :class:`Unreachable` when nothing at all is in the folder, as where a mount is away: then no object is
        at fault, and none may be left out for it."""
        try:
            with os.scandir(self._root) as entries:
                if next(entries, None) is not None:
                    return
            what = "is empty now"
        except OSError as error:
            what = f"cannot be read any more: {error.strerror}"
        raise Unreachable(f"the folder {self.url!r} {what}; if it is a mount, mount it again, and run this again")

    def find(self, key: str) -> Object:
        """The file with this name below the folder."""
        fd = self._open(Object(key, -1))
        try:
            status = os.fstat(fd)
        finally:
            os.close(fd)
        if not stat.S_ISREG(status.st_mode):
            raise NotFound(f"{self.url}: {key!r} is no file")
        return Object(key, status.st_size, _etag(status))

    def get(self, item: Object) -> memoryview:
        """The whole file."""
        return self._read(item, 0, None)

    def get_range(self, item: Object, start: int, length: int) -> memoryview:
        """``length`` bytes from ``start``."""
        return self._read(item, start, length)

    def opened(self, item: Object) -> io.RawIOBase:
        """The file, opened; see :class:`cachetool.stores.base.Opening`."""
        fd = self._open(item)
        try:
            _check(fd, item)
            return _ListedFile(fd, item, self.url)
        except BaseException:
            os.close(fd)
            raise

    def _read(self, item: Object, start: int, length: int | None) -> memoryview:
        fd = self._open(item)
        try:
            status = _check(fd, item)
            left = status.st_size if length is None else length
            want = left
            parts = []
            while left and (part := os.pread(fd, left, start)):
                parts.append(part)
                start += len(part)
                left -= len(part)
            _check(fd, item)  # again: it may have been written to meanwhile
        except OSError as error:
            raise SourceError(f"{self.url!r}: {item.key!r} cannot be read: {error.strerror}") from error
        finally:
            os.close(fd)
        body = parts[0] if len(parts) == 1 else b"".join(parts)
        check_length(item, got=len(body), want=want)
        return memoryview(body)

    def close(self) -> None:
        """Nothing is kept open."""


class _ListedFile(io.FileIO):
    """A file that still is the listed one after each read."""

    def __init__(self, fd: int, item: Object, url: str) -> None:
        super().__init__(fd)
        self._item, self._url = item, url

    def readinto(self, buffer: Any) -> int | None:
        """Read as any file does; see :meth:`cachetool.stores.base.Store.get` for the errors."""
        try:
            count = super().readinto(buffer)
            _check(self.fileno(), self._item)
        except OSError as error:
            raise SourceError(f"{self._url!r}: {self._item.key!r} cannot be read: {error.strerror}") from error
        return count


def _check(fd: int, item: Object) -> os.stat_result:
    """The status of an open file. Raises :class:`BadObject` unless it is the listed one."""
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode):
        raise BadObject(f"{item.key!r} is no regular file any more")
    check_identity(item, size=status.st_size, etag=_etag(status))
    return status


def _etag(status: os.stat_result) -> str:
    return f"{status.st_mtime_ns:x}-{status.st_size:x}"
