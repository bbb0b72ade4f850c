"""Where things lie under a cache's root.

::

    ROOT/                0700
      CACHEDIR.TAG       backup tools leave the folder out
      cachetool.json     layout version: a newer one is refused; the cap, for when the catalog is lost
      catalog.sqlite3    the truth; beside it its journal, and the file that a transaction locks
      holders/<id>.lock  one per live process
      shards/<id>/       one immutable shard each
      listings/<id>/     what a source holds
      listings/<id>.json how far it was drawn, when no shard says so any more

This module knows paths and bytes on disk; it knows nothing of what the catalog says.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shlex
import shutil
from pathlib import Path

from cachetool.disk import cache_around, naming_inodes, too_long
from cachetool.errors import UsageError

__all__ = [
    "LAYOUT_VERSION",
    "SHARD_FILE",
    "Layout",
    "cache_option",
    "default_root",
    "disk_bytes",
    "fsync_folder",
    "place_of",
    "refuse_in_cache",
    "remove_tree",
    "root_of",
    "tree_bytes",
    "write_durable",
]

LAYOUT_VERSION = 1
SHARD_FILE = "shard.json"
_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/")
_TAG = b"Signature: 8a477f597d28d172789f06886806bc55\n# This folder is a cache made by cachetool; it can be remade.\n"


def default_root() -> Path:
    """``$CACHETOOL_CACHE``, else the platform's cache folder of this user."""
    named = os.environ.get("CACHETOOL_CACHE")
    if named:
        return Path(named)
    import platformdirs

    return Path(platformdirs.user_cache_dir("cachetool"))


def root_of(named: str | Path | None) -> Path:
    """The folder of the cache that was named; of None the default one. Raises :class:`UsageError` for a name that is
    empty, too long or a URL."""
    if not isinstance(named, str | os.PathLike | None):
        raise UsageError(f"a cache is named by text or a Path, not by {type(named).__name__}")
    if named is not None and not str(named).strip():
        raise UsageError("the name of the cache folder is empty; name one with --cache")
    if (url := _URL.match(str(named))) is not None:  # not more of it: there may be a password in it
        raise UsageError(
            f"a cache is a folder, {url[1]}://... is none; samples come from there with: cachetool pull URL --cache"
            " FOLDER"
        )
    root = default_root() if named is None else Path(named)
    if too_long(root):
        raise UsageError(f"cache {str(root)!r} is longer than a name may be here; name a shorter one with --cache")
    return root


def place_of(root: Path) -> Path:
    """The folder to which a name leads now: a link in it may be switched to another cache while this one is used."""
    return Path(os.path.realpath(root))


def cache_option(root: Path) -> str:
    """`` --cache DIR`` for a command in a message; empty where the command takes that cache by itself."""
    return "" if root.resolve() == default_root().resolve() else f" --cache {shlex.quote(str(root))}"


def refuse_in_cache(path: Path, option: str) -> None:
    """Raise :class:`UsageError` for something to write in the folder of a cache: all in there counts against its cap,
    and this would not."""
    if (root := cache_around(path)) is not None:
        raise UsageError(f"{option} {str(path)!r} lies in the cache {root}; name a place outside of the cache")


class Layout:
    """The paths of one cache."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.tag = root / "CACHEDIR.TAG"
        self.marker = root / "cachetool.json"
        self.marker_aside = root / "cachetool.json.new"
        self.catalog = root / "catalog.sqlite3"
        self.catalog_asides = tuple(root / f"catalog.sqlite3.new{part}" for part in ("", "-journal", "-lock"))
        self.holders = root / "holders"
        self.shards = root / "shards"
        self.listings = root / "listings"

    def record(self, source: str) -> Path:
        """Where the newest record of a source is kept once the shard that held it is gone."""
        return self.listings / f"{source}.json"

    def refuse_place(self) -> None:
        """Raise :class:`UsageError` where a new cache could not be made. Changes nothing."""
        above = self._above()
        if not self._statvfs().f_blocks:
            raise UsageError(f"cache {self.root} cannot be made: {above} is no place for files; name another folder")
        if not os.access(above, os.W_OK | os.X_OK):
            raise UsageError(f"cache {self.root} cannot be made: {above} may not be written to; name another folder")

    def make(self) -> None:
        """Make the folders; harmless where they are already. The catalog comes next, then ``cachetool.json``.

        Raises :class:`UsageError` where no folder can be made, ``OSError`` for a disk that has no room.
        """
        try:
            self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
            with contextlib.suppress(FileExistsError):  # also a link, wherever it leads
                write_durable(self.tag, _TAG)
            for folder in self.folders:
                with contextlib.suppress(FileExistsError):
                    folder.mkdir(mode=0o700)
                if folder.is_symlink() or not folder.is_dir():
                    what = "a link" if folder.is_symlink() else "no folder"
                    raise UsageError(f"cache {self.root} cannot be made: its {folder.name} is {what}; remove it")
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO):
                raise
            raise UsageError(f"cache {self.root} cannot be made: {error.strerror}; name another folder") from error

    @property
    def is_cache(self) -> bool:
        """Whether a cache lies here, be it one that lost its ``cachetool.json`` or its catalog."""
        isfile = os.path.isfile  # where it may not be looked at there is none for us
        return (isfile(self.marker) or isfile(self.catalog)) and os.path.isdir(self.shards)

    @property
    def folders(self) -> tuple[Path, ...]:
        """The folders under the root."""
        return (self.holders, self.shards, self.listings)

    def missing(self) -> list[Path]:
        """Which of them are not there, or no folders."""
        return [folder for folder in self.folders if not folder.is_dir()]

    def fixed_bytes(self) -> int:
        """Bytes of the root, its folders and small files, as the disk has them now; the catalog is charged apart."""
        total = 0
        for path in (self.root, *self.folders, self.tag, self.marker):
            try:
                total += disk_bytes(path.lstat())
            except FileNotFoundError:
                total += 4096  # not made yet
        return total

    def free_disk(self) -> int:
        """Bytes an unprivileged user may still write on the cache's disk; also where the root does not exist yet."""
        found = self._statvfs()
        return found.f_bavail * found.f_frsize

    def free_inodes(self) -> int | None:
        """Files that may still be made on the cache's disk; None where the file system sets no limit."""
        found = self._statvfs()
        return found.f_favail if found.f_files else None

    def _statvfs(self) -> os.statvfs_result:
        return os.statvfs(self._above())

    def _above(self) -> Path:
        """The root, or the nearest folder above it that is there."""
        path = self.root
        while not os.path.exists(path) and path != path.parent:  # nor does what may not be looked at count
            path = path.parent
        return path


def disk_bytes(found: os.stat_result) -> int:
    """What a file takes: allocated or apparent bytes, whichever is more, so that ``du`` in both modes stays below."""
    return max(found.st_blocks * 512, found.st_size)


def tree_bytes(folder: Path) -> int:
    """:func:`disk_bytes` of a folder and everything in it."""
    total = disk_bytes(folder.lstat())
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                total += tree_bytes(Path(entry.path))
            else:
                total += disk_bytes(entry.stat(follow_symlinks=False))
    return total


def remove_tree(folder: Path, *, first: str | None = None) -> None:
    """Delete a folder, the file ``first`` before the rest; a folder that is gone already is fine, and what
    somebody put in its place, a file or a link, goes alone."""
    if folder.is_symlink() or not folder.is_dir():
        folder.unlink(missing_ok=True)
        return
    if first is not None:
        (folder / first).unlink(missing_ok=True)
    try:
        shutil.rmtree(folder)
    except FileNotFoundError:
        pass
    except OSError as error:
        if not os.path.isabs(error.filename or ""):  # it names the last part alone, which says nothing of where
            error.filename = str(folder)
        raise


def write_durable(path: Path, data: bytes) -> None:
    """Write a new file and fsync it. Raises ``FileExistsError`` where one is: names are never shared."""
    with naming_inodes(path):
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
    try:
        view = memoryview(data)
        while view:
            view = view[os.write(fd, view) :]
        os.fsync(fd)
    finally:
        os.close(fd)


def fsync_folder(folder: Path) -> None:
    """Make names added to or removed from ``folder`` durable."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
