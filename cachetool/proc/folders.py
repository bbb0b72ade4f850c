"""Files and folders of ours: made new, put in place as a whole, removed without leaving their root.

Other users may write to the folder in which we work (``/tmp``, a group's folder), or may have made the folder that we
were given. Three rules protect their files, and files that their links lead to:

* A working file or folder has a random name and is made by an exclusive call, never found: nobody can plant it. One
  that a killed process left is recognised by a mark inside (:mod:`cachetool.proc.scratch`).
* A file under a name that the user gave appears by a rename of such a working file.
* Removal descends by directory descriptors from a root. It follows no link, enters no mount and no folder of another
  user, and takes a :class:`~cachetool.core.names.Name`, which text from a file becomes only after a check.

Nothing else in the package removes or makes files; ``tests/test_own_paths.py`` looks for that in the code.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, BinaryIO

from cachetool.core.errors import UsageError
from cachetool.core.names import Name
from cachetool.proc.disk import naming_inodes

__all__ = [
    "ALLOW_SHARED",
    "MAX_JSON",
    "disk_bytes",
    "fsync_folder",
    "make_folder",
    "make_missing",
    "new_descriptor",
    "new_file",
    "new_folder",
    "put_in_place",
    "read_json",
    "remove",
    "remove_held",
    "remove_path",
    "replacing",
    "resolved",
    "shared_file",
    "shortened",
    "tree_bytes",
    "write_durable",
    "write_piece",
]

ALLOW_SHARED = "CACHETOOL_ALLOW_SHARED"
"""Environment variable that allows a cache in a folder that others may write to."""

# In memory such a document may take 30 times as many bytes.
MAX_JSON = 16 * 2**20
"""Maximum of bytes of a JSON document that somebody else may have written."""

# Ours are four deep. Each folder that is entered holds a descriptor, so a hostile tree would use up
# all of them.
_DEEPEST = 64
"""Maximum depth of folders that a removal enters."""
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_ANY_FOLDER = getattr(os, "O_PATH", os.O_RDONLY) | os.O_DIRECTORY | os.O_CLOEXEC
"""Flags to open a folder in which names are looked up. The folder may be closed to reading."""
_NEW = os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


def new_folder(parent: Path, prefix: str) -> Path:
    """Make a new folder for this user alone in ``parent``, with a random end to its name, and return it."""
    while True:
        path = parent / f"{prefix}{secrets.token_hex(6)}"
        try:
            with naming_inodes(path):
                path.mkdir(mode=0o700)
        except FileExistsError:
            continue
        return path


def make_folder(path: Path) -> None:
    """Make one folder in a folder of ours. Raises ``FileExistsError`` if anything has that name, a link too."""
    with naming_inodes(path):
        path.mkdir()


def make_missing(folder: Path) -> None:
    """Make a folder that a user named, or one below a folder of ours, and the missing folders above it.

    Nothing is emptied. Links to folders are followed, because the user made them.
    """
    folder.mkdir(parents=True, exist_ok=True)


def new_file(path: Path, buffering: int = -1) -> BinaryIO:
    """Make a new file to read and write. Raises ``FileExistsError`` if anything has that name, a link too."""
    return open(new_descriptor(path), "w+b", buffering)


def new_descriptor(path: Path, mode: int = 0o666) -> int:
    """Make a new file as :func:`new_file` does, and return its descriptor."""
    with naming_inodes(path):
        return os.open(path, os.O_RDWR | _NEW, mode)


def write_durable(path: Path, data: bytes) -> None:
    """Write a new file and fsync it. Raises ``FileExistsError`` if anything has that name."""
    with new_file(path) as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def shared_file(path: Path) -> BinaryIO:
    """Open a file in a folder of ours that several processes of a command read and write; the first of them makes it.

    Raises ``OSError`` for a link and for what is no file.
    """
    # Without a buffer, so that the other processes see at once what is written.
    return open(_regular(path.name, path, os.O_RDWR | os.O_CREAT), "r+b", buffering=0)


def write_piece(root: Path, names: Sequence[Name], at: int, piece: memoryview) -> None:
    """Write a piece of the file ``root/names[0]/...`` from byte ``at`` on.

    Missing folders and the file are made. A piece at 0 begins the file anew. No link below the root is followed.
    """
    if not names or not all(isinstance(name, Name) for name in names):
        raise TypeError("write_piece needs names of the class Name")
    with contextlib.ExitStack() as stack:
        folder = os.open(root, _ANY_FOLDER)
        stack.callback(os.close, folder)
        for name in names[:-1]:
            # Another worker may make the same folder at this moment. An existing folder is opened
            # below without following a link, so a planted link is an error.
            with contextlib.suppress(FileExistsError):
                os.mkdir(name, dir_fd=folder)
            folder = os.open(name, _FOLDER, dir_fd=folder)
            stack.callback(os.close, folder)
        flags = os.O_WRONLY | os.O_CREAT | (0 if at else os.O_TRUNC)
        with open(_regular(names[-1], root.joinpath(*names), flags, folder), "wb") as file:
            file.seek(at)
            file.write(piece)


def _regular(name: str, path: Path, flags: int, folder: int | None = None) -> int:
    """Return a descriptor of a plain file in a folder of ours."""
    # With O_NONBLOCK a pipe without a reader is an error; otherwise this process would wait for
    # one.
    flags |= os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    fd = os.open(path if folder is None else name, flags, 0o600, dir_fd=folder)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(errno.EEXIST, "it is not a plain file", str(path))
    return fd


def read_json(path: Path, *, links: bool = False) -> bytes:
    """Return the bytes of a JSON file that somebody else may have written.

    ``links`` follows a link that the user made. Raises ``ValueError`` for more than :data:`MAX_JSON` bytes, and
    ``OSError`` for a link and for what is no plain file.
    """
    # With O_NONBLOCK, because a pipe would wait for its other end.
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        fd = os.open(path, flags if links else flags | os.O_NOFOLLOW)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise OSError(errno.ELOOP, "it is a link, which is not followed here", str(path)) from None
        raise
    mode = os.fstat(fd).st_mode
    if not stat.S_ISREG(mode):
        os.close(fd)
        raise OSError(errno.EISDIR if stat.S_ISDIR(mode) else errno.EINVAL, "it is not a plain file", str(path))
    with open(fd, "rb") as file:
        # One byte more than allowed is read, which shows that a file is too large, whatever size it
        # states.
        raw = file.read(MAX_JSON + 1)
    if len(raw) > MAX_JSON:
        raise ValueError(f"{path} has more than {MAX_JSON} bytes, but cachetool never writes more")
    return raw


@contextlib.contextmanager
def replacing(target: Path, *, mode: int = 0o666, durable: bool = True) -> Iterator[IO[bytes]]:
    """Yield a new file to write to, which replaces ``target`` at the end by one rename: completely or not at all.

    A link at ``target`` is replaced, not followed. ``mode`` is that of a new file, before the umask; an existing file
    keeps its own.
    """
    while True:
        aside = target.with_name(f".{shortened(target.name)}.{secrets.token_hex(6)}")
        try:
            fd = new_descriptor(aside, mode)
        except FileExistsError:
            continue
        break
    try:
        with open(fd, "w+b") as file:
            with contextlib.suppress(FileNotFoundError):
                if stat.S_ISREG(before := os.lstat(target).st_mode):
                    os.fchmod(fd, before & 0o777)
            yield file
            file.flush()
            # fsync before the rename: after a power cut a file renamed without it may have 0 bytes.
            if durable:
                os.fsync(fd)
        os.replace(aside, target)
    except BaseException:
        # No working file may stay beside the user's, even after Ctrl-C.
        with contextlib.suppress(OSError):
            os.unlink(aside)
        raise
    if durable:
        # The folder as well, because its entry is what the rename changed.
        fsync_folder(target.parent)


def put_in_place(folder: Path, parent: int, name: str) -> None:
    """Give a folder of ours the name that the user chose, in the folder with the descriptor ``parent``; durably.

    Raises ``FileExistsError`` if anything has that name, a link or an empty folder too.
    """
    try:
        os.stat(name, dir_fd=parent, follow_symlinks=False)
    except FileNotFoundError:
        pass
    else:
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), name)
    try:
        # Something that was made since the check stays as well: a rename replaces an empty folder
        # only, never a link.
        os.rename(folder, name, dst_dir_fd=parent)
    except OSError as error:
        if error.errno in (errno.ENOTEMPTY, errno.ENOTDIR, errno.EEXIST):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), name) from error
        raise
    os.fsync(parent)


def resolved(path: Path, option: str) -> Path:
    """Return where ``path`` leads, over the links of this user.

    Raises :class:`UsageError` for a link on the way that another user made in a folder which does not belong to that
    user.
    """
    at, parts, links = Path("/"), list(reversed(path.absolute().parts[1:])), 0
    while parts and links < _MOST_LINKS:
        above, part = at, parts.pop()
        at = above.parent if part == ".." else above / part
        try:
            status = at.lstat()
            if not stat.S_ISLNK(status.st_mode):
                continue
            # The other user may not write where the link leads, and would use this process to do
            # so. Linux refuses these links in folders like /tmp only.
            if status.st_uid not in (0, os.geteuid(), above.stat().st_uid):
                raise UsageError(
                    f"{option} {str(path)!r} leads through {at}, a link that another user ({status.st_uid}) made;\n"
                    "remove that link, or name another place"
                )
            leads = Path(os.readlink(at))
        # A path that does not exist, or that may not be looked at, leads nowhere.
        except OSError:
            break
        at, links = Path("/") if leads.is_absolute() else above, links + 1
        parts += reversed(leads.parts[leads.is_absolute() :])
    return at.joinpath(*reversed(parts))


_MOST_LINKS = 40
"""Number of links after which Linux gives up, too."""


def shortened(name: str) -> str:
    """Return the beginning of a name, so that what cachetool adds to it still fits into a file name."""
    return os.fsencode(name)[:100].decode("utf-8", "ignore")


def fsync_folder(folder: Path) -> None:
    """Make names added to or removed from ``folder`` durable."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def disk_bytes(status: os.stat_result) -> int:
    """Return the bytes that a file is charged with: allocated or apparent ones, whichever is more."""
    # The larger of both, so that du stays below the cap in either of its modes.
    return max(status.st_blocks * 512, status.st_size)


def tree_bytes(folder: Path) -> int:
    """Return :func:`disk_bytes` of a folder and everything in it."""
    total = disk_bytes(folder.lstat())
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                total += tree_bytes(Path(entry.path))
            else:
                total += disk_bytes(entry.stat(follow_symlinks=False))
    return total


def remove(root: Path, *names: Name, first: Name | None = None) -> None:
    """Delete ``names[-1]``, a file, a link or a folder with its contents, in the folder ``root/names[0]/...``.

    The file ``first`` in it is deleted before the others. A missing file is no error. A link is deleted itself,
    wherever it leads.

    Raises ``OSError`` with the path for what may not be removed: when a folder on the way is a link or a mount, or
    belongs neither to this user nor to the owner of the root. Another user's file in a folder of ours is deleted with
    that folder. Files that were reached before are deleted then.
    """
    if not names or not all(isinstance(name, Name) for name in names) or not isinstance(first, Name | None):
        raise TypeError("remove needs names of the class Name")
    with contextlib.ExitStack() as stack:
        fd, path = os.open(root, _ANY_FOLDER), root
        stack.callback(os.close, fd)
        tree = _Tree(fd)
        for name in names[:-1]:
            path = path / name
            try:
                fd = tree.enter(fd, name, path)
            except FileNotFoundError:
                return
            stack.callback(os.close, fd)
        tree.remove(fd, names[-1], path / names[-1], first)


def remove_path(path: Path) -> None:
    """Delete a file or folder that this process made and named itself."""
    remove(path.parent, Name(path.name))


def remove_held(fd: int, path: Path) -> None:
    """Delete a folder of ours, whose descriptor is ``fd`` and which was made as ``path``.

    It is emptied wherever it is now. A folder that others put at ``path`` in its place stays.
    """
    tree = _Tree(fd)
    for name in os.listdir(fd):
        tree.remove(fd, name, path / name)
    parent = os.open(path.parent, _ANY_FOLDER)
    # Removed only if it is still the same folder: somebody else may have put another one there.
    try:
        if os.path.samestat(os.stat(path.name, dir_fd=parent, follow_symlinks=False), os.fstat(fd)):
            os.rmdir(path.name, dir_fd=parent)
    except FileNotFoundError:
        pass
    finally:
        os.close(parent)


class _Tree:
    """The rules of what may be removed below the folder with the descriptor ``root``."""

    def __init__(self, root: int) -> None:
        status = os.fstat(root)
        self._device, self._mount = status.st_dev, _mount(root)
        self._owners = {os.geteuid(), status.st_uid}
        self._shared = os.environ.get(ALLOW_SHARED) == "1"

    def enter(self, parent: int, name: str, path: Path) -> int:
        """Return a descriptor of a folder, if it may be entered."""
        try:
            # Opened relative to the folder above and without following a link. A path could lead to
            # another folder as soon as somebody exchanges a folder in it.
            fd = os.open(name, _FOLDER, dir_fd=parent)
        except OSError as error:
            error.filename = str(path)
            raise
        try:
            status = os.fstat(fd)
            # The device alone does not tell a bind mount of the same file system, whose files are
            # not ours.
            if status.st_dev != self._device or _mount(fd) != self._mount:
                raise OSError(errno.EBUSY, "another file system is mounted here, so it is not removed", str(path))
            if status.st_uid not in self._owners and not self._shared:
                raise OSError(
                    # Not a PermissionError, because the advice for that one would not help here.
                    errno.EBUSY,
                    f"it belongs to another user ({status.st_uid}), so it is not removed",
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
                raise OSError(errno.ELOOP, f"more than {_DEEPEST} nested folders", str(path))
            fd = self.enter(parent, name, path)
        except FileNotFoundError:
            return
        except OSError as error:
            error.filename = str(path)
            raise
        try:
            inside = os.listdir(fd)
            # shard.json is such a first file: without it a shard counts as evicted, so no
            # half-deleted shard is ever read as whole.
            for child in ([first] if first in inside else []) + [child for child in inside if child != first]:
                self.remove(fd, child, path / child, None, depth + 1)
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
    """Return the number of the mount on which a descriptor lies, as the kernel writes it; None if the system does not
    say."""
    # Two mounts of one file system differ in this number alone.
    try:
        with open(f"/proc/self/fdinfo/{fd}", "rb") as file:
            return next((line for line in file if line.startswith(b"mnt_id:")), None)
    # No other error: a process that has no descriptor left must not take this for another mount.
    except (FileNotFoundError, PermissionError):
        return None
