"""Where things lie under a cache's root, and who may write there.

::

    ROOT/                0700
      CACHEDIR.TAG       backup tools leave the folder out
      cachetool.json     layout version: a newer one is refused; the cap, for when the catalog is lost
      catalog.sqlite3    the truth; beside it its journal, and the file that a transaction locks
      history.json       what the report shows of the past; may be missing
      holders/<id>.lock  one per live process
      shards/<id>/       one immutable shard each
      listings/<id>/     what a source holds
      listings/<id>.json how far it was drawn, when no shard says so any more

This module knows paths and bytes on disk; it knows nothing of what the catalog says.

Whose a cache is. One that others may write to is refused: they could put links and shards of their own into it.

A new cache's folder is made for its user alone (0700), whatever the umask, and so is safe from others with all that is
in it. A folder that is there already has the rights that somebody gave it.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import re
import shlex
import stat
from pathlib import Path

from cachetool.core.errors import UsageError
from cachetool.core.names import Id, Name
from cachetool.core.text import shown
from cachetool.proc.disk import cache_around, disk_block, parse_location, too_long
from cachetool.proc.folders import ALLOW_SHARED, disk_bytes, remove, write_durable

__all__ = [
    "ALLOW_SHARED",
    "HISTORY_LIMIT",
    "LAYOUT_VERSION",
    "Layout",
    "SHARD_FILE",
    "cache_option",
    "default_root",
    "loose",
    "place_of",
    "refuse_in_cache",
    "refuse_long",
    "refuse_loose",
    "root_of",
]


LAYOUT_VERSION = 1
_LONGEST_ROOT = 512 - 8 - len("/catalog.sqlite3.new")
"""Bytes: SQLite takes names of 512, and of those it wants 8 for ``-journal``."""
SHARD_FILE = Name("shard.json")
HISTORY_LIMIT = 256 * 1024
"""Bytes of the history file at most."""
_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/")
_TAG = b"Signature: 8a477f597d28d172789f06886806bc55\n# This folder is a cache made by cachetool; it can be remade.\n"


def default_root() -> Path:
    """``$CACHETOOL_CACHE``, else the platform's cache folder of this user."""
    named = os.environ.get("CACHETOOL_CACHE")
    if named:
        return Path(os.path.expanduser(named))
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
    root = Path(parse_location(default_root() if named is None else named, what="the cache folder"))
    if min(str(root)) < " ":
        raise UsageError(f"the cache folder {shown(str(root))} has control characters; name another one with --cache")
    if too_long(root):
        raise UsageError(f"cache {shown(str(root))} is longer than a name may be here; name a shorter one with --cache")
    return root


def place_of(root: Path) -> Path:
    """The folder to which a name leads now: a link in it may be switched to another cache while this one is used. What
    is no folder yet keeps its name."""
    return Path(os.path.realpath(root)) if os.path.isdir(root) else root


def refuse_long(root: Path) -> None:
    """Raise :class:`UsageError` for the folder of a cache in which SQLite cannot open the catalog."""
    length = len(os.fsencode(os.path.realpath(root)))
    if length > _LONGEST_ROOT:
        raise UsageError(
            f"the path of cache {shown(str(root))} has {length} bytes, links in it resolved; SQLite, which keeps the"
            f" catalog, takes at most {_LONGEST_ROOT}:\nname a shorter one with --cache or CACHETOOL_CACHE"
        )


def cache_option(root: Path) -> str:
    """`` --cache DIR`` for a command in a message; empty where the command takes that cache by itself."""
    return "" if root.resolve() == default_root().resolve() else f" --cache {shlex.quote(str(root))}"


def refuse_in_cache(path: Path, option: str) -> None:
    """Raise :class:`UsageError` for something to write in the folder of a cache: all in there counts against its cap,
    and this would not."""
    if (root := cache_around(path)) is not None:
        raise UsageError(f"{option} {str(path)!r} lies in the cache {root}; name a place outside of the cache")


def _checked(id: Id) -> Id:
    if not isinstance(id, Id):  # what the catalog says is Any to the type checker
        raise TypeError(f"{id!r} was not checked")
    return id


class Layout:
    """The paths of one cache."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.tag = root / "CACHEDIR.TAG"
        self.marker = root / "cachetool.json"
        self.marker_aside = root / "cachetool.json.new"
        self.catalog = root / "catalog.sqlite3"
        self.catalog_asides = tuple(root / f"catalog.sqlite3.new{part}" for part in ("", "-journal", "-lock"))
        self.history = root / "history.json"
        self.history_aside = root / "history.json.new"
        self.holders = root / "holders"
        self.shards = root / "shards"
        self.listings = root / "listings"

    def shard(self, id: Id) -> Path:
        """The folder of a shard."""
        return self.shards / _checked(id)

    def listing(self, source: Id) -> Path:
        """The folder of what a source holds."""
        return self.listings / _checked(source)

    def listing_aside(self, source: Id, holder: Id) -> Path:
        """Where a process copies a listing before it is whole."""
        return self.listings / f"{_checked(source)}.{_checked(holder)}"

    def record(self, source: Id) -> Path:
        """Where the newest record of a source is kept once the shard that held it is gone."""
        return self.listings / f"{_checked(source)}.json"

    def lock(self, holder: Id) -> Path:
        """The lock file of a process."""
        return self.holders / f"{_checked(holder)}.lock"

    def remove(self, path: Path, *, first: Name | None = None) -> None:
        """Delete a file or folder of this cache that lies in its root or right in one of its folders, with
        :func:`cachetool.proc.folders.remove`; ``first`` of what is in it."""
        names = path.relative_to(self.root).parts
        if len(names) == 2 and self.root / names[0] not in self.folders:
            raise ValueError(f"{path} is no place of a cache")
        remove(self.root, *map(Name, names), first=first)

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
                total += self.disk_block  # not made yet
        return total

    @functools.cached_property
    def disk_block(self) -> int:
        """Bytes that the smallest file or folder takes on the cache's disk; larger ones take multiples of it. Measured
        by each process, because a cache may be copied to another file system."""
        return disk_block(self._above())

    @property
    def history_bytes(self) -> int:
        """Bytes charged for the history: twice its limit, because a new file is written beside the old one."""
        return 2 * -(-HISTORY_LIMIT // self.disk_block) * self.disk_block

    def free_disk(self) -> int:
        """Bytes an unprivileged user may still write on the cache's disk; also where the root does not exist yet."""
        space = self._statvfs()
        return space.f_bavail * space.f_frsize

    def free_inodes(self) -> int | None:
        """Files that may still be made on the cache's disk; None where the file system sets no limit."""
        space = self._statvfs()
        return space.f_favail if space.f_files else None

    def _statvfs(self) -> os.statvfs_result:
        return os.statvfs(self._above())

    def _above(self) -> Path:
        """The root, or the nearest folder above it that is there."""
        path = self.root
        while not os.path.exists(path) and path != path.parent:  # nor does what may not be looked at count
            path = path.parent
        return path


def loose(root: Path) -> str | None:
    """Why others could change the cache at ``root``; None when they cannot, or nothing is there yet.

    A folder of root's is fine, and to root one of anybody's: in a container the user of a mounted folder is another.
    """
    try:
        status = root.stat()
    except OSError:
        return None
    if status.st_mode & stat.S_IWOTH:
        return f"any user may write to it; run: chmod o-w {shlex.quote(str(root))}"
    if os.geteuid() and status.st_uid not in (0, os.geteuid()):
        return f"it belongs to another user ({status.st_uid})"
    return None


def refuse_loose(root: Path) -> None:
    """Raise :class:`UsageError` for a folder that others could change, unless :data:`ALLOW_SHARED` allows it."""
    if (why := loose(root)) is not None and os.environ.get(ALLOW_SHARED) != "1":
        raise UsageError(
            f"cache {root} is refused: {why},\nor set {ALLOW_SHARED}=1 if you trust all who may write there"
        )
