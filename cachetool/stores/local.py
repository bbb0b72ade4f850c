"""Folders of this machine as stores.

The folder is walked with :func:`os.scandir`. Hidden names (beginning with a dot) are left out and counted. Everything
that is no regular file, links to folders, and links that lead out of the folder are left out and named. The "ETag" of a
file is its time of modification and its size.

A link to a file is followed if its target belongs to the folder, whatever made the link:

- inside the folder itself;
- in a snapshot of the Hugging Face hub's cache, from ``.../snapshots/REVISION/x`` to a file in ``.../blobs``;
- in a repository of git-annex or DataLad, to content in ``.git/annex/objects`` of that repository, or of one that
contains it.

So a folder made by a stranger cannot have other files of this machine read. ``follow_links`` follows every other link.
"""

from __future__ import annotations

import bisect
import errno
import io
import os
import re
import stat
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from cachetool.core.errors import AccessDenied, BadObject, NotFound, SourceError, Unreachable, UsageError
from cachetool.proc.disk import limit_error
from cachetool.stores.base import EXHAUSTED, LeftOut, Object, Page, Pages, check_identity, check_length
from cachetool.stores.redact import printable
from cachetool.stores.walk import FOLLOW, Walk

__all__ = ["LocalStore", "open_local_store"]

_BATCH = 1000
# O_NONBLOCK: a FIFO in a file's place must not hang the open. O_NOFOLLOW: the last part of the path may have become a
# link since it was listed, and _open() decides about links.
_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW
_ANNEX = re.compile(r"(modules/.+/)?annex/objects/.+")
"""Path of content below ``.git``. A repository inside another one has its content in ``modules`` of the outer one."""


def open_local_store(root: str | Path, *, follow_links: bool | str = False) -> LocalStore:
    """Open the store of the folder ``root``.

    ``follow_links``: True follows all links to files; a key follows only the link of this name.

    Raises:
        NotFound: If ``root`` does not exist.
        UsageError: If ``root`` is a file.
        AccessDenied: If ``root`` may not be read.
    """
    shown = printable(str(root))
    try:
        real = os.path.realpath(root)
        mode = os.stat(real).st_mode
    except PermissionError as error:
        raise AccessDenied(f"{shown!r}: permission denied") from error
    # ValueError: the path contains a NUL byte.
    except (OSError, ValueError) as error:
        raise NotFound(f"there is no file or folder {shown!r}") from error
    if not stat.S_ISDIR(mode):
        raise UsageError(f"{shown!r} is a file; give the folder that holds the samples")
    return LocalStore(real, follow_links)


class LocalStore:
    """Files under one folder; see :class:`cachetool.stores.base.Store`. Made by :func:`open_local_store`.

    ``root`` is the folder's real path, without links.
    """

    concurrency = 4

    def __init__(self, root: str, follow_links: bool | str = False) -> None:
        self._root, self._follow_links = root, follow_links
        # The user may name any folder of a snapshot, so every `snapshots` part of the path may have its `blobs` beside
        # it.
        self._blobs = {f"{root[: match.start()]}/blobs" for match in re.finditer("/snapshots(?=/|$)", root)}
        self.url = printable(root)
        self._left_out = LeftOut()

    @property
    def left_out(self) -> Mapping[str, int]:
        """Counts and names of the files that the last finished :meth:`list` passed over."""
        return self._left_out

    def list(self) -> Pages:
        """Yield all files in the order of their keys. Raise :class:`AccessDenied` for a folder that cannot be read."""
        return self.list_after(None)

    def list_after(self, key: str | None) -> Pages:
        """Yield the files behind ``key``, ascending; see :class:`cachetool.stores.base.SortedStore`."""
        # lexists() and not exists(): a link in the place of Zarr metadata is there, whatever its target.
        walk = Walk(self, lambda key: os.path.lexists(os.path.join(self._root, key)))
        self._left_out = walk.left_out
        page = Page([], [], [])
        # The folders from the root to the one that is read now. Only the last one is open.
        levels = [_Level(self._root, "", key, walk)]
        try:
            while levels:
                level = levels[-1]
                try:
                    names = level.more()
                    if isinstance(names, str):
                        level.close()
                        levels.append(_Level(self._root, f"{level.folder}{names}", key, walk))
                    elif names:
                        self._take(level, names, walk, page)
                    else:
                        levels.pop().close()
                # Another process removed the folder between its listing and its walk. Only the store's own folder must
                # exist.
                except FileNotFoundError:
                    if not level.folder:
                        raise NotFound(f"no folder {self.url!r}") from None
                    levels.pop().close()
                except PermissionError as error:
                    shown = self._shown(level.folder)
                    raise AccessDenied(f"folder {shown!r} cannot be read: permission denied") from error
                except OSError as error:
                    shown = self._shown(level.folder)
                    raise SourceError(f"folder {shown!r} cannot be read: {error.strerror}") from error
                if len(page) >= _BATCH:
                    yield page
                    page = Page([], [], [])
            if page:
                yield page
        finally:
            for level in levels:
                level.close()

    def _take(self, level: _Level, names: Sequence[str], walk: Walk, page: Page) -> None:
        """Add files of a folder to ``page``."""
        folder, fd, stat_of = level.folder, level.fd, os.stat
        try:
            if level.special.isdisjoint(names):
                # By the folder's descriptor: the kernel need not walk the path for each file again.
                looked = [stat_of(name, dir_fd=fd, follow_symlinks=False) for name in names]
                if all(map(stat.S_ISREG, [status.st_mode for status in looked])):
                    page.keys += [folder + name for name in names]
                    page.sizes += [status.st_size for status in looked]
                    page.etags += _etags(looked)
                    return
        # A file was removed meanwhile, or may not be looked at. The loop below finds out which one.
        except OSError:
            pass
        for name in names:
            item = self._listed(f"{folder}{name}", walk)
            if item is not None:
                page.keys.append(item.key)
                page.sizes.append(item.size)
                page.etags.append(item.etag or "")

    def _shown(self, folder: str) -> str:
        """Return the path of a folder below the root as it may be shown."""
        return printable(os.path.join(self._root, folder.removesuffix("/"))) if folder else self.url

    def _listed(self, key: str, walk: Walk) -> Object | None:
        path = os.path.join(self._root, key)
        is_link = os.path.islink(path)
        try:
            # stat() follows the link, so size and time are those of the target, which is what a read returns.
            status = os.stat(path)
        # Another process removed the file since it was listed, or a link has no target.
        except OSError as error:
            # The folder may be listed but not entered. All its files would be left out as vanished, so this is an
            # error.
            if isinstance(error, PermissionError) and not is_link:
                raise
            if is_link:
                walk.leave_out(key, "broken links", _broken(path, error))
            else:
                walk.left_out["vanished while listing"] += 1
            return None
        if stat.S_ISDIR(status.st_mode):
            walk.leave_out(key, "links to folders", "a link to a folder; name that folder as a source of its own")
        elif not stat.S_ISREG(status.st_mode):
            walk.leave_out(key, "special files", "not a regular file")
        elif is_link and not self._follows(key, os.path.realpath(path)):
            walk.leave_out(
                key, "links that lead out of the folder", f"a link that leads out of the folder; {FOLLOW} it"
            )
        else:
            return Object(key, status.st_size, _etag(status))
        return None

    def _follows(self, key: str, real: str) -> bool:
        """Return True if the link ``key`` is followed to the file at ``real``, a path without links."""
        if self._follow_links in (True, key) or real.startswith(os.path.join(self._root, "")):
            return True
        # `_root` must lie below the repository that holds the content. A link into the repository of somebody else is
        # not followed.
        above, _, below = real.partition("/.git/")
        annexed = f"{self._root}/".startswith(f"{above}/") and _ANNEX.fullmatch(below) is not None
        return annexed or os.path.dirname(real) in self._blobs

    def _open(self, item: Object) -> int:
        parts = item.key.split("/")
        # Listings on disk and manifests may be foreign: a key with `..` would read a file outside of the folder.
        if "\0" in item.key or any(part in ("", ".", "..") for part in parts):
            raise BadObject(f"{item.key!r} is not the name of a file below the folder")
        path = os.path.join(self._root, item.key)
        try:
            try:
                # The file is opened first and checked afterwards by its descriptor, so nobody can swap it between check
                # and read.
                return os.open(path, _FLAGS)
            except OSError as error:
                # ELOOP is O_NOFOLLOW's answer to a link.
                if error.errno != errno.ELOOP:
                    raise
                real = os.path.realpath(path)
                if not self._follows(item.key, real):
                    raise BadObject(
                        f"{self.url!r}: {item.key!r} is a link that leads out of the folder; {FOLLOW} it"
                    ) from error
                # `real` has no links now. If another process puts a link in the file's place meanwhile, O_NOFOLLOW
                # refuses it.
                return os.open(real, _FLAGS)
        except (FileNotFoundError, NotADirectoryError) as error:
            self._refuse_away()
            raise NotFound(f"{item.key!r} does not exist any more; it did when {self.url!r} was listed") from error
        except PermissionError as error:
            raise AccessDenied(f"{self.url!r}: {item.key!r} cannot be read: permission denied") from error
        except OSError as error:
            # The machine lacks descriptors or memory. The object is not at fault, and `--on-error skip` must not leave
            # it out.
            if error.errno in EXHAUSTED:
                raise SourceError(f"{item.key!r} cannot be opened: {limit_error(error) or error.strerror}") from error
            self._refuse_away()
            raise BadObject(f"{item.key!r} cannot be read: {error.strerror}") from error

    def _refuse_away(self) -> None:
        """Raise :class:`Unreachable` if the folder is empty or unreadable, as when a mount is missing."""
        try:
            # An empty folder instead of a mount makes each file "not found". Without this check `--on-error skip` would
            # leave out one file after the other.
            with os.scandir(self._root) as entries:
                if next(entries, None) is not None:
                    return
            what = "is empty now"
        except OSError as error:
            what = f"cannot be read any more: {error.strerror}"
        raise Unreachable(f"the folder {self.url!r} {what}; if it is a mount, mount it again, and run this again")

    def find(self, key: str) -> Object:
        """Return the file with this name below the folder."""
        fd = self._open(Object(key, -1))
        try:
            status = os.fstat(fd)
        finally:
            os.close(fd)
        if not stat.S_ISREG(status.st_mode):
            raise NotFound(f"{self.url}: {key!r} is not a file")
        return Object(key, status.st_size, _etag(status))

    def get(self, item: Object) -> memoryview:
        """Return the whole file."""
        return self._read(item, 0, None)

    def get_range(self, item: Object, start: int, length: int) -> memoryview:
        """Return ``length`` bytes from ``start``."""
        return self._read(item, start, length)

    def opened(self, item: Object) -> io.RawIOBase:
        """Return the open file; see :class:`cachetool.stores.base.Opening`."""
        fd = self._open(item)
        try:
            _check(fd, item)
            return _ListedFile(fd, item, self.url)
        except BaseException:
            # On success the file object owns the descriptor; after an error nobody would close it.
            os.close(fd)
            raise

    def _read(self, item: Object, start: int, length: int | None) -> memoryview:
        fd = self._open(item)
        try:
            status = _check(fd, item)
            left = status.st_size if length is None else length
            want = left
            parts = []
            # pread() may return less than asked for: Linux reads at most 2 GiB - 4 KiB at once.
            while left and (part := os.pread(fd, left, start)):
                parts.append(part)
                start += len(part)
                left -= len(part)
            # Checked again after the read: another process may have written to the file meanwhile, and the bytes would
            # be of two versions.
            _check(fd, item)
        except OSError as error:
            raise SourceError(f"{self.url!r}: {item.key!r} cannot be read: {error.strerror}") from error
        finally:
            os.close(fd)
        # Nearly every file comes in one piece, which join() would copy.
        body = parts[0] if len(parts) == 1 else b"".join(parts)
        check_length(item, got=len(body), want=want)
        return memoryview(body)

    def close(self) -> None:
        """Do nothing: no file stays open."""


class _Level:
    """One folder of a walk: its names in order, and how far they were read.

    ``folder`` is its key, empty or with a ``/`` at its end. No key up to ``after`` is wanted.
    """

    def __init__(self, root: str, folder: str, after: str | None, walk: Walk) -> None:
        self.folder = folder
        self.special: frozenset[str] = frozenset()
        """Names that are neither regular files nor folders."""
        self._path, self._walk = os.path.join(root, folder), walk
        self._after = after if after is not None and after.startswith(folder) else None
        self._names: list[str] | None = None
        self._folders: list[int] = []
        """Positions of folders among the names that were not read, in descending order."""
        self._at = 0
        self._fd: int | None = None

    @property
    def fd(self) -> int:
        """The descriptor of the folder, which is opened if it is not open."""
        if self._fd is None:
            self._fd = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECTORY)
        return self._fd

    def close(self) -> None:
        """Close the folder until it is used again."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def more(self) -> list[str] | str:
        """Return the next names of files, or the next folder with a ``/`` at its end. Empty behind the last name."""
        if self._names is None:
            self._names = self._read()
        start = self._at
        stop = self._folders[-1] if self._folders else len(self._names)
        if start == stop and self._folders:
            self._at += 1
            return self._names[self._folders.pop()]
        self._at = min(stop, start + _BATCH)
        return self._names[start : self._at]

    def _read(self) -> list[str]:
        special, folders = [], 0
        others: list[os.DirEntry[str]] = []
        with os.scandir(self.fd) as entries:
            # One comprehension takes a third less time than a loop over millions of entries. append() returns None.
            aside: Callable[[os.DirEntry[str]], object] = others.append
            names = [entry.name for entry in entries if entry.is_file(follow_symlinks=False) or aside(entry)]
            for entry in others:
                # With the slash, because "a/x" comes behind "a.x" although "a" comes before it.
                if entry.is_dir(follow_symlinks=False):
                    names.append(f"{entry.name}/")
                    folders += 1
                else:
                    names.append(entry.name)
                    special.append(entry.name)
        # Python sorts text by code points and stores sort by bytes. They differ for bytes that are no UTF-8.
        names.sort(key=None if all(map(str.isascii, names)) else os.fsencode)
        if self._after is not None:
            head, slash, _ = self._after[len(self.folder) :].partition("/")
            # The folder in which the last key lies is read again; a file that is the last key is not.
            side = bisect.bisect_left if slash else bisect.bisect_right
            del names[: side(names, os.fsencode(head + slash), key=os.fsencode)]
        # All hidden names stand together, because "/" follows "." and is the first character of no name.
        hidden = slice(bisect.bisect_left(names, "."), bisect.bisect_left(names, "/"))
        names[hidden] = [name for name in names[hidden] if not self._hides(name)]
        if folders:
            self._folders = [at for at in range(len(names) - 1, -1, -1) if names[at][-1] == "/"]
        self.special = frozenset(special)
        return names

    def _hides(self, name: str) -> bool:
        return self._walk.hides(f"{self.folder}{name}".removesuffix("/"), folder=name.endswith("/"))


class _ListedFile(io.FileIO):
    """An open file that is compared with its listing after each read."""

    def __init__(self, fd: int, item: Object, url: str) -> None:
        super().__init__(fd)
        self._item, self._url = item, url

    def readinto(self, buffer: Any) -> int | None:
        """Read bytes into ``buffer``; see :meth:`cachetool.stores.base.Store.get` for the errors."""
        try:
            count = super().readinto(buffer)
            # After the read, not before: the file may be changed while it is read, and then these bytes must not be
            # used.
            _check(self.fileno(), self._item)
        except OSError as error:
            raise SourceError(f"{self._url!r}: {self._item.key!r} cannot be read: {error.strerror}") from error
        return count


def _check(fd: int, item: Object) -> os.stat_result:
    """Return the status of an open file. Raise :class:`BadObject` if it is not the listed file."""
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode):
        raise BadObject(f"{item.key!r} is not a regular file any more")
    check_identity(item, size=status.st_size, etag=_etag(status))
    return status


def _broken(link: str, error: OSError) -> str:
    """Return the reason why a link is left out whose target does not exist or may not be looked at."""
    if error.errno == errno.ELOOP:
        return "a link that leads in a circle"
    if isinstance(error, PermissionError):
        return "a link whose target cannot be read: permission denied"
    # git-annex leaves such a link for content that was never fetched. The advice names the command that fetches it.
    if ".git/annex/objects/" in os.readlink(link):
        return "a link to content that git-annex has not fetched; fetch it with: git annex get"
    return "a broken link: its target does not exist"


def _etag(status: os.stat_result) -> str:
    return _etags([status])[0]


def _etags(looked: list[os.stat_result]) -> list[str]:
    return [f"{status.st_mtime_ns:x}-{status.st_size:x}" for status in looked]
