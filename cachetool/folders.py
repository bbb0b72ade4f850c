"""Files and folders of ours: made new, put in place whole, removed without leaving their root.

Others may write to the folder in which we work (``/tmp``, a group's folder), or may have made the one that we were
given. Three rules keep what is theirs, or leads to theirs, untouched:

* A working file or folder has a random name and is made by an exclusive call, never found: nobody can plant it.
* What appears under a name that the user gave appears by a rename of such a file.
* Removal descends by directory descriptors from a root. It follows no link, enters no mount and no folder of another
  user, and takes a :class:`~cachetool.names.Name`, which no text from a file becomes unchecked.

Nothing else in the package removes or makes files; ``tests/test_own_paths.py`` walks the code for it.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from cachetool.disk import naming_inodes
from cachetool.names import Name

__all__ = [
    "ALLOW_SHARED",
    "disk_bytes",
    "fsync_folder",
    "new_folder",
    "remove",
    "remove_path",
    "replacing",
    "tree_bytes",
    "write_durable",
]

ALLOW_SHARED = "CACHETOOL_ALLOW_SHARED"
"""Environment variable that lets a cache be in a folder that others may write to all the same."""

_DEEPEST = 64
"""Folders in each other that a removal enters. Ours are four; each that is entered holds a descriptor."""
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_NEW = os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


def new_folder(parent: Path, prefix: str) -> Path:
    """A new folder of this user alone in ``parent``, with a random end to its name."""
    while True:
        path = parent / f"{prefix}{secrets.token_hex(6)}"
        try:
            with naming_inodes(path):
                path.mkdir(mode=0o700)
        except FileExistsError:
            continue
        return path


def write_durable(path: Path, data: bytes) -> None:
    """Write a new file and fsync it. Raises ``FileExistsError`` where one is: names are never shared."""
    with naming_inodes(path):
        fd = os.open(path, os.O_WRONLY | _NEW, 0o666)
    try:
        view = memoryview(data)
        while view:
            view = view[os.write(fd, view) :]
        os.fsync(fd)
    finally:
        os.close(fd)


@contextlib.contextmanager
def replacing(target: Path, *, mode: int = 0o666, durable: bool = True) -> Iterator[IO[bytes]]:
    """A new file to write to, which takes the place of ``target`` at the end by one rename: whole or not at all. A link
    at ``target`` is replaced, not followed. ``mode`` is that of a new file, before the umask."""
    while True:
        aside = target.with_name(f".{target.name[:200]}.{secrets.token_hex(6)}")
        try:
            with naming_inodes(aside):
                fd = os.open(aside, os.O_RDWR | _NEW, mode)
        except FileExistsError:
            continue
        break
    try:
        with open(fd, "w+b") as file:
            yield file
            file.flush()
            if durable:
                os.fsync(fd)
        os.replace(aside, target)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(aside)
        raise
    if durable:
        fsync_folder(target.parent)


def fsync_folder(folder: Path) -> None:
    """Make names added to or removed from ``folder`` durable."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


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


def remove(root: Path, *names: Name, first: Name | None = None) -> None:
    """Delete ``names[-1]``, a file, a link or a folder with all in it, in the folder ``root/names[0]/...``; the file
    ``first`` in it before the rest. What is gone already is fine. A link goes alone, wherever it leads.

    Raises ``OSError`` with the path for what may not be removed: where a folder on the way is a link or a mount, or
    belongs neither to this user nor to whom the root belongs (another user's file in a folder of ours goes with it).
    Nothing of it was removed then, but what was reached before.
    """
    if not names or not all(isinstance(name, Name) for name in names) or not isinstance(first, Name | None):
        raise TypeError("removal takes Names")
    with contextlib.ExitStack() as stack:
        tree = _Tree(root)
        stack.callback(os.close, tree.fd)
        fd, path = tree.fd, root
        for name in names[:-1]:
            path = path / name
            try:
                fd = tree.enter(fd, name, path)
            except FileNotFoundError:
                return
            stack.callback(os.close, fd)
        tree.remove(fd, names[-1], path / names[-1], first)


def remove_path(path: Path) -> None:
    """:func:`remove` for a file or folder that this process made and named itself."""
    remove(path.parent, Name(path.name))


class _Tree:
    """All below a root that may be removed with it."""

    def __init__(self, root: Path) -> None:
        self.fd = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        found = os.fstat(self.fd)
        self._device, self._mount = found.st_dev, _mount(self.fd)
        self._owners = {os.geteuid(), found.st_uid}
        self._shared = os.environ.get(ALLOW_SHARED) == "1"

    def enter(self, parent: int, name: str, path: Path) -> int:
        """A descriptor of a folder, if it may be entered."""
        try:
            fd = os.open(name, _FOLDER, dir_fd=parent)
        except OSError as error:
            error.filename = str(path)
            raise
        try:
            found = os.fstat(fd)
            if found.st_dev != self._device or _mount(fd) != self._mount:
                raise OSError(errno.EBUSY, "another file system is mounted here, so it is not removed", str(path))
            if found.st_uid not in self._owners and not self._shared:
                raise OSError(
                    errno.EBUSY,  # not a PermissionError: what to do is not what is done about one
                    f"it belongs to another user ({found.st_uid}), so it is not removed",
                    str(path),
                )
        except BaseException:
            os.close(fd)
            raise
        return fd

    def remove(self, parent: int, name: str, path: Path, first: str | None = None, depth: int = 0) -> None:
        try:
            if not stat.S_ISDIR(os.stat(name, dir_fd=parent, follow_symlinks=False).st_mode):
                os.unlink(name, dir_fd=parent)
                return
            if depth > _DEEPEST:
                raise OSError(errno.ELOOP, f"more than {_DEEPEST} folders in each other", str(path))
            fd = self.enter(parent, name, path)
        except FileNotFoundError:
            return
        except OSError as error:
            error.filename = str(path)
            raise
        try:
            inside = os.listdir(fd)
            for each in ([first] if first in inside else []) + [each for each in inside if each != first]:
                self.remove(fd, each, path / each, None, depth + 1)
        finally:
            os.close(fd)
        try:
            os.rmdir(name, dir_fd=parent)
        except FileNotFoundError:
            pass
        except OSError as error:
            error.filename = str(path)
            raise


def _mount(fd: int) -> bytes | None:
    """Which mount a descriptor lies on: two that show the same file system differ in this alone. None where the system
    does not say."""
    try:
        with open(f"/proc/self/fdinfo/{fd}", "rb") as file:
            return next((line for line in file if line.startswith(b"mnt_id:")), None)
    except OSError:
        return None
