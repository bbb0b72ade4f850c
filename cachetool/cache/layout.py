"""Paths under a cache's root, and the users who may write there.

::

    ROOT/                0700
      CACHEDIR.TAG       backup tools leave the folder out
      cachetool.json     layout version (a newer one is refused), and the cap for when the catalog is lost
      catalog.sqlite3    the catalog; beside it its journal, and the file that a transaction locks
      history.jsonl      figures of the past for the report; may be missing
      holders/<id>.lock  one per living process
      shards/<id>/       one immutable shard each
      listings/<id>/     listing of a source
      listings/<id>.json progress of a source, when no shard records it any more

This module knows paths and bytes on disk, and nothing of the catalog's contents.

A cache that other users may write to is refused, because they could put links and shards of their own into it. A new
cache's folder is made for its user alone (0700) under any umask, which protects everything in it. A folder that exists
already keeps the mode that somebody gave it.
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
"""Maximum bytes of a root's path. SQLite takes names of 512 bytes, 8 of which it needs for ``-journal``."""
SHARD_FILE = Name("shard.json")
HISTORY_LIMIT = 256 * 1024
"""Maximum bytes of the history file."""
_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/")
_TAG = b"Signature: 8a477f597d28d172789f06886806bc55\n# This folder is a cache made by cachetool; it can be remade.\n"


def default_root() -> Path:
    """Return ``$CACHETOOL_CACHE``, else the platform's cache folder of this user."""
    named = os.environ.get("CACHETOOL_CACHE")
    if named:
        return Path(os.path.expanduser(named))
    import platformdirs

    return Path(platformdirs.user_cache_dir("cachetool"))


def root_of(named: str | Path | None) -> Path:
    """Return the folder of the named cache; for None the default one.

    Raises :class:`UsageError` for a name that is empty, too long, has control characters, or is a URL.
    """
    if not isinstance(named, str | os.PathLike | None):
        raise UsageError(f"the cache folder must be a str or a Path, not {type(named).__name__}")
    if named is not None and not str(named).strip():
        raise UsageError("the name of the cache folder is empty; name one with --cache")
    # The message shows only the scheme, because the rest of a URL may hold a password.
    if (url := _URL.match(str(named))) is not None:
        raise UsageError(
            f"a cache is a local folder, not a URL ({url[1]}://...); to pull samples from a URL, run: cachetool pull"
            " URL --cache FOLDER"
        )
    root = Path(parse_location(default_root() if named is None else named, what="the cache folder"))
    if min(str(root)) < " ":
        raise UsageError(f"the cache folder {shown(str(root))} has control characters; name another one with --cache")
    if too_long(root):
        raise UsageError(f"the path of cache {shown(str(root))} is too long; choose a shorter one with --cache")
    return root


def place_of(root: Path) -> Path:
    """Return the folder to which a name leads now. A name that is no folder yet stays as it is."""
    # Resolved once: a link in the name may be switched to another cache while this one is in use.
    return Path(os.path.realpath(root)) if os.path.isdir(root) else root


def refuse_long(root: Path) -> None:
    """Raise :class:`UsageError` for a cache folder whose path is too long for SQLite to open the catalog."""
    length = len(os.fsencode(os.path.realpath(root)))
    if length > _LONGEST_ROOT:
        raise UsageError(
            f"the path of cache {shown(str(root))} has {length} bytes after its links are resolved; SQLite, which"
            f" stores the catalog, allows {_LONGEST_ROOT};\nchoose a shorter path with --cache or CACHETOOL_CACHE"
        )


def cache_option(root: Path) -> str:
    """Return `` --cache DIR`` for a command in a message, or an empty string when the command uses that cache by
    default."""
    return "" if root.resolve() == default_root().resolve() else f" --cache {shlex.quote(str(root))}"


def refuse_in_cache(path: Path, option: str) -> None:
    """Raise :class:`UsageError` for an output inside the folder of a cache."""
    # Everything in the folder of a cache counts against its cap, but such an output would not be
    # charged.
    if (root := cache_around(path)) is not None:
        raise UsageError(f"{option} {str(path)!r} lies in the cache {root}; name a place outside of the cache")


def _checked(id: Id) -> Id:
    # The type checker cannot help here, because it sees values from the catalog as Any. An
    # unchecked id could lead out of the cache (`../../thesis`).
    if not isinstance(id, Id):
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
        self.history = root / "history.jsonl"
        self.history_aside = root / "history.jsonl.new"
        self.holders = root / "holders"
        self.shards = root / "shards"
        self.listings = root / "listings"

    def shard(self, id: Id) -> Path:
        """Return the folder of a shard."""
        return self.shards / _checked(id)

    def listing(self, source: Id) -> Path:
        """Return the folder of a source's listing."""
        return self.listings / _checked(source)

    def listing_aside(self, source: Id, holder: Id) -> Path:
        """Return the folder into which a process copies a listing before it is complete."""
        return self.listings / f"{_checked(source)}.{_checked(holder)}"

    def record(self, source: Id) -> Path:
        """Return the file with the newest record of a source, which exists once the shard that held the record was
        deleted."""
        return self.listings / f"{_checked(source)}.json"

    def lock(self, holder: Id) -> Path:
        """Return the lock file of a holder."""
        return self.holders / f"{_checked(holder)}.lock"

    def remove(self, path: Path, *, first: Name | None = None) -> None:
        """Delete a file or folder in the root or directly in one of its folders, with
        :func:`cachetool.proc.folders.remove`.

        If ``first`` is given, that file is deleted before all others in the folder.
        """
        names = path.relative_to(self.root).parts
        # A guard: a wrong path would make this delete files that cachetool did not make.
        if len(names) == 2 and self.root / names[0] not in self.folders:
            raise ValueError(f"{path} is not a file or folder of a cache")
        remove(self.root, *map(Name, names), first=first)

    def refuse_place(self) -> None:
        """Raise :class:`UsageError` where a new cache cannot be made. Changes nothing."""
        above = self._above()
        # /proc and similar file systems have no blocks.
        if not self._statvfs().f_blocks:
            raise UsageError(f"cache {self.root} cannot be made: {above} cannot hold files; name another folder")
        if not os.access(above, os.W_OK | os.X_OK):
            raise UsageError(f"cache {self.root} cannot be made: {above} is not writable; name another folder")

    def make(self) -> None:
        """Make the folders; those that exist stay. The catalog comes next, and ``cachetool.json`` last.

        Raises :class:`UsageError` where no folder can be made, and ``OSError`` for a disk without room.
        """
        try:
            self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
            # Also for a link at this name, which is left alone wherever it leads.
            with contextlib.suppress(FileExistsError):
                write_durable(self.tag, _TAG)
            for folder in self.folders:
                with contextlib.suppress(FileExistsError):
                    folder.mkdir(mode=0o700)
                # Checked after the mkdir, so a link planted by another user between the two calls
                # is found as well.
                if folder.is_symlink() or not folder.is_dir():
                    what = "a link" if folder.is_symlink() else "not a folder"
                    raise UsageError(f"cache {self.root} cannot be made: its {folder.name} is {what}; remove it")
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO):
                raise
            raise UsageError(f"cache {self.root} cannot be made: {error.strerror}; name another folder") from error

    @property
    def is_cache(self) -> bool:
        """True if the folder holds a cache, also one that lost its ``cachetool.json`` or its catalog."""
        # `os.path.isfile` returns False where this user may not look, instead of raising an error:
        # such a folder is no cache for this user.
        isfile = os.path.isfile
        return (isfile(self.marker) or isfile(self.catalog)) and os.path.isdir(self.shards)

    @property
    def folders(self) -> tuple[Path, ...]:
        """The folders under the root."""
        return (self.holders, self.shards, self.listings)

    def missing(self) -> list[Path]:
        """Return those of :attr:`folders` that do not exist, or are no folders."""
        return [folder for folder in self.folders if not folder.is_dir()]

    def fixed_bytes(self) -> int:
        """Return the bytes that the root, its folders and small files take on the disk now. The catalog is charged
        apart."""
        total = 0
        for path in (self.root, *self.folders, self.tag, self.marker):
            try:
                total += disk_bytes(path.lstat())
            except FileNotFoundError:
                # The file or folder will be made soon, so it is charged as one block.
                total += self.disk_block
        return total

    @functools.cached_property
    def disk_block(self) -> int:
        """Bytes that the smallest file or folder takes on the cache's disk; larger ones take multiples of it."""
        # Each process measures it, because a cache may be copied to another file system.
        return disk_block(self._above())

    @property
    def history_bytes(self) -> int:
        """Bytes charged for the history: twice its limit, because a new file is written beside the old one."""
        return 2 * -(-HISTORY_LIMIT // self.disk_block) * self.disk_block

    def free_disk(self) -> int:
        """Return the bytes that an unprivileged user may still write on the cache's disk, also while the root does not
        exist."""
        space = self._statvfs()
        return space.f_bavail * space.f_frsize

    def free_inodes(self) -> int | None:
        """Return the number of files that may still be made on the cache's disk, or None where the file system has no
        limit."""
        space = self._statvfs()
        return space.f_favail if space.f_files else None

    def _statvfs(self) -> os.statvfs_result:
        return os.statvfs(self._above())

    def _above(self) -> Path:
        """Return the root, or the nearest folder above it that exists."""
        path = self.root
        # A folder that this user may not look into counts as missing.
        while not os.path.exists(path) and path != path.parent:
            path = path.parent
        return path


def loose(root: Path) -> str | None:
    """Return why other users could change the cache at ``root``, or None if they cannot or nothing exists there."""
    try:
        status = root.stat()
    except OSError:
        return None
    if status.st_mode & stat.S_IWOTH:
        return f"any user may write to it; run: chmod o-w {shlex.quote(str(root))}"
    # A folder of root is accepted, and root may use a folder of anybody: in a container the user of
    # a mounted folder is another one. A group may write, because umask 002 makes every folder so.
    if os.geteuid() and status.st_uid not in (0, os.geteuid()):
        return f"it belongs to another user ({status.st_uid})"
    return None


def refuse_loose(root: Path) -> None:
    """Raise :class:`UsageError` for a folder that other users could change, unless the variable :data:`ALLOW_SHARED` is
    set."""
    if (why := loose(root)) is not None and os.environ.get(ALLOW_SHARED) != "1":
        raise UsageError(
            f"cache {root} is refused: {why};\nif you trust all users who can write to it, set {ALLOW_SHARED}=1"
        )
