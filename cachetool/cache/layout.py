"""Where things lie under a cache's root, and whether a folder is a cache at all.

::

    ROOT/                0700
      CACHEDIR.TAG       backup tools leave the folder out
      cachetool.json     layout version: a newer one is refused; the cap, for when the catalog is lost
      catalog.sqlite3    the truth, and its journal beside it
      holders/<id>.lock  one per live process
      shards/<id>/       one immutable shard each
      listings/<id>/     what a source holds
      listings/<id>.json how far it was drawn, when no shard says so any more

This module knows paths and bytes on disk; it knows nothing of what the catalog says.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shlex
import shutil
from pathlib import Path

from cachetool.disk import naming_inodes
from cachetool.errors import CatalogError, UsageError

__all__ = [
    "LAYOUT_VERSION",
    "SHARD_FILE",
    "Layout",
    "cache_option",
    "default_root",
    "disk_bytes",
    "fsync_folder",
    "remove_tree",
    "root_of",
    "tree_bytes",
    "write_durable",
]

LAYOUT_VERSION = 1
SHARD_FILE = "shard.json"
_TAG = b"Signature: 8a477f597d28d172789f06886806bc55\n# This folder is a cache made by cachetool; it can be remade.\n"


def default_root() -> Path:
    """``$CACHETOOL_CACHE``, else the platform's cache folder of this user."""
    named = os.environ.get("CACHETOOL_CACHE")
    if named:
        return Path(named)
    import platformdirs

    return Path(platformdirs.user_cache_dir("cachetool"))


def root_of(named: str | Path | None) -> Path:
    """The folder of the cache that was named; of None the default one. Raises :class:`UsageError` for an empty name."""
    if named is None:
        return default_root()
    if not str(named).strip():
        raise UsageError("the name of the cache folder is empty; name one with --cache")
    return Path(named)


def cache_option(root: Path) -> str:
    """`` --cache DIR`` for a command in a message; empty where the command takes that cache by itself."""
    return "" if root.resolve() == default_root().resolve() else f" --cache {shlex.quote(str(root))}"


class Layout:
    """The paths of one cache."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.tag = root / "CACHEDIR.TAG"
        self.marker = root / "cachetool.json"
        self.marker_aside = root / "cachetool.json.new"
        self.catalog = root / "catalog.sqlite3"
        self.holders = root / "holders"
        self.shards = root / "shards"
        self.listings = root / "listings"

    def record(self, source: str) -> Path:
        """Where the newest record of a source is kept once the shard that held it is gone."""
        return self.listings / f"{source}.json"

    def check(self) -> bool:
        """Whether a usable cache is here; False when nothing is. Changes nothing.

        Raises :class:`UsageError` for a file or a folder of other things, :class:`CatalogError` for a newer layout.
        """
        try:
            entries = os.listdir(self.root)
        except FileNotFoundError:
            if self.root.is_symlink():
                target = os.readlink(self.root)
                raise UsageError(
                    f"cache {self.root} is a link to {target}, which is not there; make that folder, or name another"
                    " with --cache"
                ) from None
            return False
        except NotADirectoryError:
            what = "is a file" if self.root.exists() else "lies below a file"
            raise UsageError(f"cache {self.root} {what}; name a folder with --cache") from None
        except OSError as error:
            raise UsageError(f"cache {self.root} cannot be read: {error.strerror}") from error
        if not entries:
            return False
        if self.marker.name not in entries:
            made = (self.tag.name, self.catalog.name, f"{self.marker.name}.", *(p.name for p in self.folders))
            if self.tag.name in entries and all(entry.startswith(made) for entry in entries):
                return False  # killed while it was made: made again
            raise UsageError(f"folder {self.root} holds other things and is no cache; name an empty or a new folder")
        try:
            found = json.loads(self.marker.read_bytes())["layout"]
        except (ValueError, KeyError, TypeError) as error:
            raise CatalogError(f"{self.marker} cannot be read; is {self.root} a cache?") from error
        if found > LAYOUT_VERSION:
            raise CatalogError(
                f"cache {self.root} was written by a newer cachetool (layout {found}, this one knows {LAYOUT_VERSION});"
                " upgrade cachetool"
            )
        return True

    def refuse_place(self) -> None:
        """Raise :class:`UsageError` where a new cache could not be made. Changes nothing."""
        above = self._above()
        if not self._statvfs().f_blocks:
            raise UsageError(f"cache {self.root} cannot be made: {above} is no place for files; name another folder")
        if not os.access(above, os.W_OK | os.X_OK):
            raise UsageError(f"cache {self.root} cannot be made: {above} may not be written to; name another folder")

    def make(self) -> None:
        """Make the folders; harmless where they are already. The catalog comes next, then :meth:`mark`.

        Raises :class:`UsageError` where no folder can be made, ``OSError`` for a disk that has no room.
        """
        try:
            self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
            if not self.tag.exists():
                self.tag.write_bytes(_TAG)
            for folder in self.folders:
                folder.mkdir(mode=0o700, exist_ok=True)
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO):
                raise
            raise UsageError(f"cache {self.root} cannot be made: {error.strerror}; name another folder") from error

    def mark(self, **settings: int) -> None:
        """Say that a whole cache is here, with the settings (``max_size``, ``min_free``) that it has; under the
        catalog's lock: the file beside is one for all."""
        self.marker_aside.unlink(missing_ok=True)
        write_durable(self.marker_aside, json.dumps({"layout": LAYOUT_VERSION, **settings}).encode())
        os.replace(self.marker_aside, self.marker)
        fsync_folder(self.root)

    def settings(self) -> dict[str, int]:
        """What :meth:`mark` was last told; as far as it can be read."""
        try:
            found = json.loads(self.marker.read_bytes())
        except (OSError, ValueError):
            return {}
        return {name: found[name] for name in ("max_size", "min_free") if isinstance(found.get(name), int)}

    @property
    def folders(self) -> tuple[Path, ...]:
        """The folders under the root."""
        return (self.holders, self.shards, self.listings)

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
        while not path.exists() and path != path.parent:
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
    """Delete a folder, the file ``first`` before the rest; a folder that is gone already is fine."""
    if first is not None:
        (folder / first).unlink(missing_ok=True)
    with contextlib.suppress(FileNotFoundError):
        shutil.rmtree(folder)


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
