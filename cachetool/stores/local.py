"""A folder of this machine as a store.

Walked with :func:`os.scandir`. Left out: hidden names (beginning with a dot), which are counted; everything that is no
regular file, links to folders and links that lead out of the folder, which are named. The "ETag" of a file is its time
of modification and its size.

A link to a file is followed where it leads to a place that belongs to the folder, whoever made the link:

- inside the folder itself;
- of a snapshot of the Hugging Face hub's cache, ``.../snapshots/REVISION/x``, to a file in ``.../blobs``;
- in a repository of git-annex or DataLad, to the content in ``.git/annex/objects`` of it or of one that it is part of.

So a folder that a stranger made has no other files of this machine read. ``follow_links`` follows every other link.
"""

from __future__ import annotations

import errno
import io
import os
import re
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cachetool.core.errors import AccessDenied, BadObject, NotFound, SourceError, Unreachable, UsageError
from cachetool.proc.disk import limit_error
from cachetool.stores.base import EXHAUSTED, LeftOut, Object, Pages, check_identity, check_length
from cachetool.stores.redact import printable
from cachetool.stores.walk import FOLLOW, Walk

__all__ = ["LocalStore", "open_local_store"]

_BATCH = 1000
# Not blocking: a FIFO put in a file's place must not hang the open. The final name is not followed: see _open.
_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW
_ANNEX = re.compile(r"(modules/.+/)?annex/objects/.+")
"""Below ``.git``; the content of a repository that is part of another one lies in ``modules`` of that one."""


def open_local_store(root: str | Path, *, follow_links: bool | str = False) -> LocalStore:
    """The store of the folder ``root``; ``follow_links``: wherever they lead, or the one link of this name.

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
    return LocalStore(real, follow_links)


class LocalStore:
    """Files under one folder; see :class:`cachetool.stores.base.Store`."""

    concurrency = 4

    def __init__(self, root: str, follow_links: bool | str = False) -> None:
        """``root`` is a folder's real path. Made by :func:`open_local_store`."""
        self._root, self._follow_links = root, follow_links
        self._blobs = {f"{root[: match.start()]}/blobs" for match in re.finditer("/snapshots(?=/|$)", root)}
        self.url = printable(root)
        self._left_out = LeftOut()

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
            status = entry.stat()
        except OSError as error:  # removed since, or a link to nothing
            if isinstance(error, PermissionError) and not entry.is_symlink():
                raise  # the folder may be listed, but not entered
            if entry.is_symlink():
                walk.leave_out(key, "links to nothing", _broken(entry.path, error))
            else:
                walk.left_out["vanished while listing"] += 1
            return None
        if stat.S_ISDIR(status.st_mode):
            walk.leave_out(key, "links to folders", "a link to a folder; name that folder as a source of its own")
        elif not stat.S_ISREG(status.st_mode):
            walk.leave_out(key, "special files", "no regular file")
        elif entry.is_symlink() and not self._follows(key, os.path.realpath(entry.path)):
            walk.leave_out(
                key, "links that lead out of the folder", f"a link that leads out of the folder; {FOLLOW} it"
            )
        else:
            return Object(key, status.st_size, _etag(status))
        return None

    def _follows(self, key: str, real: str) -> bool:
        """Whether the link of this key is followed to the file at ``real``, a path without links."""
        if self._follow_links in (True, key) or real.startswith(os.path.join(self._root, "")):
            return True
        above, _, below = real.partition("/.git/")
        annexed = f"{self._root}/".startswith(f"{above}/") and _ANNEX.fullmatch(below) is not None
        return annexed or os.path.dirname(real) in self._blobs

    def _open(self, item: Object) -> int:
        parts = item.key.split("/")
        if "\0" in item.key or any(part in ("", ".", "..") for part in parts):
            raise BadObject(f"{item.key!r} is no name of a file below the folder")
        path = os.path.join(self._root, item.key)
        try:
            try:
                return os.open(path, _FLAGS)
            except OSError as error:
                if error.errno != errno.ELOOP:
                    raise
                real = os.path.realpath(path)
                if not self._follows(item.key, real):
                    raise BadObject(
                        f"{self.url!r}: {item.key!r} is a link that leads out of the folder; {FOLLOW} it"
                    ) from error
                return os.open(real, _FLAGS)
        except (FileNotFoundError, NotADirectoryError) as error:
            self._refuse_away()
            raise NotFound(f"{item.key!r} is not there any more; it was when {self.url!r} was listed") from error
        except PermissionError as error:
            raise AccessDenied(f"{self.url!r}: {item.key!r} cannot be read: permission denied") from error
        except OSError as error:
            if error.errno in EXHAUSTED:
                raise SourceError(f"{item.key!r} cannot be opened: {limit_error(error) or error.strerror}") from error
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


def _broken(link: str, error: OSError) -> str:
    """Why a link is left out that leads to nothing, or to what may not be looked at."""
    if error.errno == errno.ELOOP:
        return "a link that leads in a circle"
    if isinstance(error, PermissionError):
        return "a link to what may not be read: permission denied"
    if ".git/annex/objects/" in os.readlink(link):
        return "a link to content that git-annex does not have here; fetch it with: git annex get"
    return "a link to nothing"


def _etag(status: os.stat_result) -> str:
    return f"{status.st_mtime_ns:x}-{status.st_size:x}"
