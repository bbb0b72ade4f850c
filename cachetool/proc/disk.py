"""Errors of the operating system as errors that a user can act on, and the kind of file system that a cache lies on.

The errors are those of a disk that fails or is full, or of a cache in which something else works. :func:`known_error`
is for the edges, where a command or a worker process ends; inside, an OSError stays what it is. Only that inodes have
run out must be seen at once, by :func:`naming_inodes`: giving up what was half written frees some.

The catalog's transactions and the holders' locks need POSIX locks that work and a cache of pages that is one for all
processes: a network file system promises neither, and SQLite says so itself (https://sqlite.org/faq.html#q5). The kind
is the kernel's own number from ``statfs(2)``; those of local disks are not listed, so an unknown one is allowed.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import shlex
import stat
import struct
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from cachetool.core.errors import CacheToolError, CapacityError, CatalogError, UsageError
from cachetool.core.text import shown

__all__ = [
    "ALLOW",
    "DISK_BLOCK",
    "MAP_SHARE",
    "cache_around",
    "check_file_system",
    "disk_block",
    "disk_error",
    "file_system",
    "holds_open_files",
    "is_network",
    "known_error",
    "limit_error",
    "naming_inodes",
    "parse_location",
    "permission_denied",
    "refused_in",
    "too_long",
    "whole_blocks",
]


DISK_BLOCK = max(4096, mmap.PAGESIZE)
"""Bytes that the smallest file or folder takes on most file systems."""

MAP_SHARE = 250
"""Of the bytes of a file, the file system's own list of the file's blocks takes one in so many at most, where it is
counted in ``st_blocks``: 4 bytes for a block of 1 KiB on ext2 and ext3, and a little for the lists of lists."""

_WORDS = {
    errno.ENOSPC: "the disk is full; free some space",
    errno.EDQUOT: "the disk quota is used up; free some space",
    errno.EFBIG: "the file would be larger than is allowed (ulimit -f); lower --shard-size",
    errno.EIO: "the disk reports an input/output error; nothing of this was committed",
    errno.EROFS: "the disk is mounted read-only; what is in the cache can still be read",
}
_CHANGED = {errno.ENOENT, errno.EEXIST, errno.ENOTDIR, errno.EISDIR, errno.ENOTEMPTY, errno.ELOOP}
"""What comes of a file or folder that is there, or is not, against all that cachetool did."""


def whole_blocks(nbytes: int, disk_block: int) -> int:
    """Round ``nbytes`` up to whole blocks of a file system."""
    return -(-nbytes // disk_block) * disk_block


def known_error(error: BaseException) -> CacheToolError | None:
    """:func:`disk_error`; or a :class:`CatalogError` where this user may not use a file of a cache, or where one came
    or went without cachetool: nobody else has any business in there; or a :class:`UsageError` where the working folder
    went, for a name that no file can have, or a limit of this process, as :func:`limit_error` has it."""
    translated = disk_error(error) or _refused(error) or _nowhere(error) or _misnamed(error) or limit_error(error)
    if translated is not None:
        return translated
    if not isinstance(error, OSError) or error.errno not in _CHANGED or not isinstance(error.filename, str):
        return None
    if (root := cache_around(Path(error.filename))) is None:
        return None
    return CatalogError(
        f"{error.filename}: {error.strerror}: something else changes files of this cache;\n"
        f"end it, then run: cachetool verify --repair --cache {shlex.quote(str(root))}"
    )


def limit_error(error: BaseException) -> CacheToolError | None:
    """Name the limit of this process or machine that ``error`` met: open files, processes, memory, temporary files.
    None for any other error."""
    number = error.errno if isinstance(error, OSError) else None
    if number in (errno.EMFILE, errno.ENFILE):
        return CacheToolError("too many open files for one process (ulimit -n); raise that limit, 256 are enough")
    if number == errno.EAGAIN or (isinstance(error, RuntimeError) and "can't start new thread" in str(error)):
        return CacheToolError(
            "no more processes or threads may be started (ulimit -u, -v, or a container's limit); raise that limit, or"
            " use fewer --workers"
        )
    unmapped = isinstance(error, ImportError) and "failed to map segment" in str(error)  # of a library
    if number == errno.ENOMEM or unmapped or isinstance(error, MemoryError):
        return CacheToolError("out of memory (the machine's, a container's, or ulimit -v); use fewer --workers")
    if isinstance(error, FileNotFoundError) and "usable temporary directory" in str(error):
        return CacheToolError("no folder for temporary files can be written to; set TMPDIR to one that can")
    return None


def _nowhere(error: BaseException) -> UsageError | None:
    """That a path is relative to a folder which somebody removed."""
    if not isinstance(error, FileNotFoundError) or error.filename is not None:  # of a file, as most are
        return None
    try:
        os.getcwd()
    except FileNotFoundError:
        return UsageError("the current folder was removed, so no relative path leads anywhere; change to another one")
    return None


def _misnamed(error: BaseException) -> UsageError | None:
    """That a name, an argument or one that a source has, is none that the system takes."""
    if isinstance(error, UnicodeEncodeError) and error.reason == "surrogates not allowed":
        return UsageError(f"{shown(error.object)} is no text in UTF-8; what is called so needs another name")
    if isinstance(error, ValueError) and str(error) == "embedded null byte":
        return UsageError("a name has a zero byte in it, which no name of a file has; name another one")
    if isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG:
        return UsageError(f"{shown(error.filename)}: {error.strerror}; name another one")
    return None


def _refused(error: BaseException) -> CatalogError | None:
    """That a file in a cache may not be read or written: ``error`` itself, or what it was raised from."""
    if isinstance(error, CatalogError):
        return error  # says it better: which folder it is, not the file that could not be made in it
    cause: BaseException | None = error
    seen: list[BaseException] = []
    while cause is not None and cause not in seen:  # an error that was raised again may be its own cause
        seen.append(cause)
        if isinstance(cause, PermissionError) and isinstance(cause.filename, str):
            root = cache_around(Path(cause.filename))
            if root is not None:
                return permission_denied(cause.filename, root)
        cause = cause.__cause__
    return None


def permission_denied(path: str | Path, root: Path) -> CatalogError:
    """The error for a file or folder of the cache ``root`` that this user may not use."""
    return CatalogError(f"permission denied: {path}; {_remedy(root, Path(path))}")


def refused_in(root: Path, *paths: Path) -> CatalogError | None:
    """The error for one of ``paths``, files and folders of the cache ``root``, that this user may not read and write:
    one that may not be read if there is any. None where all may be used; what is not there counts for nothing.

    They are not opened: closing a file drops all locks that this process has on it.
    """
    unwritable: CatalogError | None = None
    for path in paths:
        try:
            needed = os.R_OK | (os.X_OK if stat.S_ISDIR(os.stat(path).st_mode) else 0)
            written = 0 if os.statvfs(path).f_flag & os.ST_RDONLY else os.W_OK  # nobody may where the disk does not let
        except PermissionError:
            return permission_denied(path, root)
        except OSError:
            continue
        if not os.access(path, needed):
            return permission_denied(path, root)
        if unwritable is None and not os.access(path, written):
            unwritable = permission_denied(path, root)
            unwritable.readable = True
    return unwritable


def _remedy(root: Path, path: Path) -> str:
    for folder in reversed(Path(os.path.realpath(root)).parents):
        if os.path.isdir(folder) and not os.access(folder, os.X_OK):
            if (owner := os.stat(folder).st_uid) != os.geteuid():
                return f"{folder} belongs to another user ({owner}), who lets nobody in"
            return f"{folder} may not be entered; run: chmod u+x {shlex.quote(str(folder))}"
    with contextlib.suppress(OSError):
        if (owner := root.stat().st_uid) != os.geteuid():
            return f"the cache belongs to another user ({owner}); run this as that one"
    user = os.geteuid()
    for folder in (path, *path.parents):  # what root wrote into a user's cache is root's
        with contextlib.suppress(OSError):
            if folder.is_relative_to(root) and (owner := folder.lstat().st_uid) != user:
                command = f"chown -R {user} {shlex.quote(str(root))}"
                return f"{folder} belongs to another user ({owner}); let that one run: {command}"
    return f"make the cache this user's: chmod -R u+rwX {shlex.quote(str(root))}"


def cache_around(path: Path) -> Path | None:
    """The folder of the cache in which ``path`` lies or would lie, wherever links lead; None outside of every cache."""
    folder = Path(os.path.realpath(path.parent))
    for root in (folder, *folder.parents):
        # os.path: what may not be looked at is no cache that this user could fill.
        if os.path.exists(root / "CACHEDIR.TAG") and os.path.exists(root / "cachetool.json"):
            return root
    return None


def disk_error(error: BaseException) -> CapacityError | None:
    """``error``, or the OSError that it was raised from, as a :class:`CapacityError`; None when no disk is to blame."""
    if isinstance(error, CapacityError):
        return error  # says it better: how many bytes, or that it is inodes
    cause = error if isinstance(error, OSError) else error.__cause__
    if not isinstance(cause, OSError) or cause.errno not in _WORDS:
        return None
    name = os.fsdecode(cause.filename) if isinstance(cause.filename, str | bytes) else ""
    words, in_cache = _WORDS[cause.errno], bool(name) and cache_around(Path(name)) is not None
    if cause.errno in (errno.ENOSPC, errno.EDQUOT) and in_cache:
        words += ", or lower --max-size"
    if cause.errno == errno.EROFS and name and not in_cache:
        words = "the disk is mounted read-only; name a place on another one"
    return CapacityError(": ".join(part for part in (name, words) if part))


def parse_location(value: object, *, what: str) -> str:
    """A path or URL as text; ``~`` and ``~user`` at the beginning become the home folder. Bytes of a path that are not
    UTF-8 stay, as surrogates. Raises :class:`UsageError`: an unset environment variable is None."""
    text = value.__fspath__() if hasattr(value, "__fspath__") else value
    if not isinstance(text, str):
        raise UsageError(f"{what} takes a path or URL as text, not {type(value).__name__}")  # it may hold a password
    if not text.strip():
        raise UsageError(f"{what} is empty; name a folder, a file or a URL")
    text = os.path.expanduser(str(text))
    try:
        os.fsencode(text)
    except UnicodeEncodeError:
        text = "\0"
    if "\0" in text:
        raise UsageError(
            f"{what} is no name of a file: it has a zero byte or half of a surrogate pair; name another one"
        )
    return text


def too_long(path: Path) -> bool:
    """Whether ``path``, with the names that go below it, is longer than the file system there takes. Asked before
    anything is made: the folders above a name that is too long would stay behind."""
    path = above = path.absolute()
    while not os.path.exists(above):
        above = above.parent
    try:
        name_max, path_max = os.pathconf(above, "PC_NAME_MAX"), os.pathconf(above, "PC_PATH_MAX")
    except OSError:
        return False
    long = any(len(os.fsencode(part)) > name_max > 0 for part in path.relative_to(above).parts)
    return long or len(os.fsencode(path)) + _BELOW > path_max > 0  # 0 and less: it does not say


_BELOW = 512
"""Bytes of the names that cachetool makes in a folder: of a shard, a file in it, and a field."""


@contextlib.contextmanager
def naming_inodes(path: Path) -> Iterator[None]:
    """Around the making of ``path``: a disk that has bytes left but can hold no more files is said to be that.

    Raises :class:`CapacityError`; every other OSError goes through as it is.
    """
    try:
        yield
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        usage = os.statvfs(path.parent)
        if not usage.f_files or usage.f_favail:  # some file systems have no such limit
            raise
        raise CapacityError(f"{path}: the disk is out of inodes: it can hold no more files; delete some") from error


ALLOW = "CACHETOOL_ALLOW_NETWORK"
"""Environment variable that lets a cache lie on a network file system all the same."""

# linux/magic.h, and the documentation of those outside the kernel's tree
_NETWORK = {
    0x6969: "NFS",
    0x517B: "SMB",
    0xFE534D42: "SMB2",
    0xFF534D42: "CIFS",
    0x01021997: "9p",
    0x65735546: "FUSE",  # virtiofs, sshfs, s3fs and all others of its kind
    0x00C36400: "Ceph",
    0x0BD00BD0: "Lustre",
    0x47504653: "GPFS",
    0x19830326: "BeeGFS",
    0x5346414F: "AFS",
    0x6B414653: "AFS",
    0x73757245: "Coda",
    0x20030528: "OrangeFS",
    0x786F4256: "vboxsf",
    0xAAD7AAEA: "PanFS",
}
_LOCAL = {
    0xEF53: "ext4",
    0x58465342: "xfs",
    0x9123683E: "btrfs",
    0x01021994: "tmpfs",
    0x794C7630: "overlay",
    0x2FC12FC1: "zfs",
    0xF2F52010: "f2fs",
    0xCA451A4E: "bcachefs",
    0x858458F6: "ramfs",
}


def _kind(path: Path) -> int | None:
    """``f_type`` of the file system under ``path``; None where it cannot be known."""
    if sys.platform != "linux":
        return None
    import ctypes  # here: no command but those that open a cache needs it

    buffer = ctypes.create_string_buffer(512)  # struct statfs: its first member is f_type, a long, on all 64-bit Linux
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.statfs(os.fsencode(path), buffer) != 0:
        return None
    return int.from_bytes(buffer.raw[: ctypes.sizeof(ctypes.c_long)], sys.byteorder) & 0xFFFFFFFF


def file_system(path: Path) -> str:
    """Name of the file system under ``path``, or under the nearest folder above it that is there."""
    kind = _kind(_existing(path))
    return "unknown" if kind is None else _NETWORK.get(kind) or _LOCAL.get(kind) or f"0x{kind:x}"


def is_network(name: str) -> bool:
    """Whether :func:`file_system` named one that a cache is refused on."""
    return name in _NETWORK.values()


def _existing(path: Path) -> Path:
    while not os.path.exists(path) and path != path.parent:  # nor does what may not be looked at count
        path = path.parent
    return path


def disk_block(folder: Path) -> int:
    """Bytes that the smallest file or folder in ``folder`` takes; larger ones take multiples of it.

    ``statvfs`` does not say it: ext4 with ``bigalloc`` reports blocks of 4 KiB and allocates clusters of 64 KiB, XFS
    has folders with an extent size for their files, and tmpfs may give a huge page to each. So a file without a name is
    written and measured (30 us). On a disk that takes none, full or read-only, ``statvfs`` must do.
    """
    import tempfile  # here: a loader only reads

    sizes = [DISK_BLOCK, os.statvfs(folder).f_frsize, _xfs_folder_block(folder)]
    with contextlib.suppress(OSError), tempfile.TemporaryFile(dir=folder, buffering=0) as file:
        file.write(os.urandom(DISK_BLOCK))  # fewer bytes, or such as compress, may need no block of their own
        status = os.fstat(file.fileno())
        sizes.append(status.st_blocks * 512)
        if file_system(folder) == "tmpfs":
            sizes.append(status.st_blksize)  # says "huge page" also while memory is too fragmented to give one
    return max(sizes)


_XFS_GEOMETRY = 0x80705864  # XFS_IOC_FSGEOMETRY_V1 of xfs_fs.h; its last number is the block size of folders


def _xfs_folder_block(folder: Path) -> int:
    """Block size of large folders on XFS (``mkfs.xfs -n size=``), which a small one does not show; 0 elsewhere."""
    if file_system(folder) != "xfs":
        return 0
    import fcntl

    geometry = bytearray(112)
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.ioctl(fd, _XFS_GEOMETRY, geometry)
    except OSError:
        return 0
    finally:
        os.close(fd)
    return int(struct.unpack_from("I", geometry, 104)[0])


def holds_open_files(folder: Path) -> bool:
    """Check that ``folder`` holds only files that were deleted while a process had them open. FUSE and NFS rename such
    a file, and delete it when it is closed."""
    names = [name for _, _, files in os.walk(folder) for name in files]
    return bool(names) and all(name.startswith((".fuse_hidden", ".nfs")) for name in names)


def check_file_system(path: Path, notify: Callable[[str], None] | None) -> None:
    """Raise :class:`UsageError` for a network file system, or say it through ``notify`` when it is allowed."""
    name = file_system(path)
    if not is_network(name):
        return
    why = f"{path} lies on a network file system ({name}), where locks and the catalog cannot be relied on"
    if os.environ.get(ALLOW) != "1":
        raise UsageError(f"{why}; put the cache on a local disk, or set {ALLOW}=1 at your own risk")
    if notify is not None:
        notify(f"warning: {why}; {ALLOW}=1 allows it: samples may be lost or read wrong")
