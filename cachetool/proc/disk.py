"""Errors of the operating system as errors that a user can act on, and the kind of file system under a cache.

The errors are those of a disk that fails or is full, or of a cache in which another program works. :func:`known_error`
is used at the edges, where a command or a worker process ends; inside, an OSError stays as it is. One case must be
found at once, by :func:`naming_inodes`: a disk that is out of inodes.

The catalog's transactions and the holders' locks need working POSIX locks and one page cache for all processes. A
network file system promises neither, and SQLite says so (https://sqlite.org/faq.html#q5). The kind is the kernel's
number from ``statfs(2)``. Local file systems are not all listed, so an unknown one is allowed.
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

# ext2 and ext3 take 4 bytes for a block of 1 KiB, and a little more for the lists of lists.
MAP_SHARE = 250
"""The list of a file's blocks takes one byte for so many bytes of the file at most, if it counts in ``st_blocks``."""

_WORDS = {
    errno.ENOSPC: "the disk is full; free some space",
    errno.EDQUOT: "the disk quota is used up; free some space",
    errno.EFBIG: "the file would be larger than is allowed (ulimit -f); lower --shard-size",
    errno.EIO: "the disk reports an input/output error; this write was not committed",
    errno.EROFS: "the disk is mounted read-only; the cached samples can still be read",
}
_CHANGED = {errno.ENOENT, errno.EEXIST, errno.ENOTDIR, errno.EISDIR, errno.ENOTEMPTY, errno.ELOOP}
"""Errors of a file or folder that exists, or is missing, contrary to what cachetool did."""


def whole_blocks(nbytes: int, disk_block: int) -> int:
    """Round ``nbytes`` up to whole blocks of a file system."""
    return -(-nbytes // disk_block) * disk_block


def known_error(error: BaseException) -> CacheToolError | None:
    """Return ``error`` as an error that names the cause and what to do, or None.

    The result is that of :func:`disk_error` or :func:`limit_error`; a :class:`CatalogError` for a file of a cache that
    this user may not use, or that appeared or vanished without cachetool; or a :class:`UsageError` when the working
    folder was removed, or for a name that no file can have.
    """
    translated = disk_error(error) or _refused(error) or _nowhere(error) or _misnamed(error) or limit_error(error)
    if translated is not None:
        return translated
    if not isinstance(error, OSError) or error.errno not in _CHANGED or not isinstance(error.filename, str):
        return None
    if (root := cache_around(Path(error.filename))) is None:
        return None
    return CatalogError(
        f"{error.filename}: {error.strerror}: another program changes files of this cache;\n"
        f"end that program, then run: cachetool verify --repair --cache {shlex.quote(str(root))}"
    )


def limit_error(error: BaseException) -> CacheToolError | None:
    """Name the limit of this process or machine that ``error`` met: open files, processes, memory, temporary files.

    Return None for any other error.
    """
    number = error.errno if isinstance(error, OSError) else None
    if number in (errno.EMFILE, errno.ENFILE):
        return CacheToolError("too many open files for one process (ulimit -n); raise that limit, 256 are enough")
    # Python raises a RuntimeError for a thread that cannot be started, without a number.
    if number == errno.EAGAIN or (isinstance(error, RuntimeError) and "can't start new thread" in str(error)):
        return CacheToolError(
            "no more processes or threads can be started (ulimit -u, -v, or a container's limit); raise that limit, or"
            " use fewer --workers"
        )
    # A library of an extension module could not be mapped, which is how a lack of addresses looks
    # there.
    unmapped = isinstance(error, ImportError) and "failed to map segment" in str(error)
    if number == errno.ENOMEM or unmapped or isinstance(error, MemoryError):
        return CacheToolError("out of memory (the machine's, a container's, or ulimit -v); use fewer --workers")
    if isinstance(error, FileNotFoundError) and "usable temporary directory" in str(error):
        return CacheToolError("no folder for temporary files is writable; set TMPDIR to a writable folder")
    return None


def _nowhere(error: BaseException) -> UsageError | None:
    """Return the error for a relative path in a working folder that was removed."""
    # Errors of a file have its name; only the working folder's has none.
    if not isinstance(error, FileNotFoundError) or error.filename is not None:
        return None
    try:
        os.getcwd()
    except FileNotFoundError:
        return UsageError("the current folder was removed, so relative paths lead nowhere; change to another folder")
    return None


def _misnamed(error: BaseException) -> UsageError | None:
    """Return the error for a name that the system does not take, of an argument or of a sample of a source."""
    if isinstance(error, UnicodeEncodeError) and error.reason == "surrogates not allowed":
        return UsageError(f"{shown(error.object)} is not valid UTF-8; use another name")
    if isinstance(error, ValueError) and str(error) == "embedded null byte":
        return UsageError("a name has a zero byte, which no file name can have; use another name")
    if isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG:
        return UsageError(f"{shown(error.filename)}: {error.strerror}; use a shorter name")
    return None


def _refused(error: BaseException) -> CatalogError | None:
    """Return the error for a file in a cache that may not be read or written: of ``error``, or of what caused it."""
    if isinstance(error, CatalogError):
        # This error names the folder, which says more than the file that could not be made in it.
        return error
    cause: BaseException | None = error
    seen: list[BaseException] = []
    # An error that was raised again may be its own cause, and the loop would never end.
    while cause is not None and cause not in seen:
        seen.append(cause)
        if isinstance(cause, PermissionError) and isinstance(cause.filename, str):
            root = cache_around(Path(cause.filename))
            if root is not None:
                return permission_denied(cause.filename, root)
        cause = cause.__cause__
    return None


def permission_denied(path: str | Path, root: Path) -> CatalogError:
    """Return the error for a file or folder of the cache ``root`` that this user may not use."""
    return CatalogError(f"permission denied: {path}; {_remedy(root, Path(path))}")


def refused_in(root: Path, *paths: Path) -> CatalogError | None:
    """Return the error for one of ``paths`` of the cache ``root`` that this user may not read and write, or None.

    A path that may not be read comes before one that may not be written. Missing paths are ignored.
    """
    unwritable: CatalogError | None = None
    for path in paths:
        try:
            # Asked without opening: closing a file drops all POSIX locks that this process has on
            # it.
            needed = os.R_OK | (os.X_OK if stat.S_ISDIR(os.stat(path).st_mode) else 0)
            # On a disk that is mounted read-only no user may write, so only reading is asked for.
            written = 0 if os.statvfs(path).f_flag & os.ST_RDONLY else os.W_OK
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
                return f"{folder} belongs to another user ({owner}), who does not let this user in"
            return f"{folder} cannot be entered; run: chmod u+x {shlex.quote(str(folder))}"
    with contextlib.suppress(OSError):
        if (owner := root.stat().st_uid) != os.geteuid():
            return f"the cache belongs to another user ({owner}); run this as that user"
    user = os.geteuid()
    # Files that root wrote into a user's cache belong to root.
    for folder in (path, *path.parents):
        with contextlib.suppress(OSError):
            if folder.is_relative_to(root) and (owner := folder.lstat().st_uid) != user:
                command = f"chown -R {user} {shlex.quote(str(root))}"
                return f"{folder} belongs to another user ({owner}); let that user run: {command}"
    return f"give this user access with: chmod -R u+rwX {shlex.quote(str(root))}"


def cache_around(path: Path) -> Path | None:
    """Return the folder of the cache in which ``path`` lies or would lie, wherever links lead; None outside of every
    cache."""
    folder = Path(os.path.realpath(path.parent))
    for root in (folder, *folder.parents):
        # os.path returns False where pathlib raises: a folder that this user may not look into is
        # no cache that this user could fill.
        if os.path.exists(root / "CACHEDIR.TAG") and os.path.exists(root / "cachetool.json"):
            return root
    return None


def disk_error(error: BaseException) -> CapacityError | None:
    """Return ``error``, or the OSError that caused it, as a :class:`CapacityError`; None if no disk is to blame."""
    if isinstance(error, CapacityError):
        # This error says more: how many bytes were needed, or that inodes have run out.
        return error
    cause = error if isinstance(error, OSError) else error.__cause__
    if not isinstance(cause, OSError) or cause.errno not in _WORDS:
        return None
    name = os.fsdecode(cause.filename) if isinstance(cause.filename, str | bytes) else ""
    words, in_cache = _WORDS[cause.errno], bool(name) and cache_around(Path(name)) is not None
    if cause.errno in (errno.ENOSPC, errno.EDQUOT) and in_cache:
        words += ", or lower --max-size"
    if cause.errno == errno.EROFS and name and not in_cache:
        words = "the disk is mounted read-only; choose a place on another disk"
    return CapacityError(": ".join(part for part in (name, words) if part))


def parse_location(value: object, *, what: str) -> str:
    """Return a path or URL as text; ``~`` and ``~user`` at the beginning become the home folder.

    Bytes of a path that are not UTF-8 stay, as surrogates. Raises :class:`UsageError` for anything but text, such as
    None of an environment variable that is not set.
    """
    text = value.__fspath__() if hasattr(value, "__fspath__") else value
    if not isinstance(text, str):
        # The value itself is not shown, because it may hold a password.
        raise UsageError(f"{what} takes a path or URL as text, not {type(value).__name__}")
    if not text.strip():
        raise UsageError(f"{what} is empty; name a folder, a file or a URL")
    text = os.path.expanduser(str(text))
    try:
        os.fsencode(text)
    except UnicodeEncodeError:
        # Half of a surrogate pair is refused with the zero byte below: no file can have either in
        # its name.
        text = "\0"
    if "\0" in text:
        raise UsageError(
            f"{what} is not a valid file name: it has a zero byte or half of a surrogate pair; use another name"
        )
    return text


def too_long(path: Path) -> bool:
    """Return True if ``path``, with the names that cachetool makes below it, is too long for the file system."""
    # Asked before anything is made: the folders above a name that is too long would stay behind.
    path = above = path.absolute()
    while not os.path.exists(above):
        above = above.parent
    try:
        name_max, path_max = os.pathconf(above, "PC_NAME_MAX"), os.pathconf(above, "PC_PATH_MAX")
    except OSError:
        return False
    long = any(len(os.fsencode(part)) > name_max > 0 for part in path.relative_to(above).parts)
    # 0 or less means that the file system does not say.
    return long or len(os.fsencode(path)) + _BELOW > path_max > 0


_BELOW = 512
"""Bytes of the names that cachetool makes in a folder: of a shard, a file in it, and a field."""


@contextlib.contextmanager
def naming_inodes(path: Path) -> Iterator[None]:
    """Raise :class:`CapacityError` if making ``path`` fails because the disk is out of inodes.

    Every other OSError goes through unchanged.
    """
    try:
        yield
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        # Looked at here and now: giving up what was half written frees inodes, so later nothing is
        # missing.
        usage = os.statvfs(path.parent)
        # Some file systems have no limit of files, and report 0.
        if not usage.f_files or usage.f_favail:
            raise
        raise CapacityError(f"{path}: the disk is out of inodes: it can hold no more files; delete some") from error


ALLOW = "CACHETOOL_ALLOW_NETWORK"
"""Environment variable that allows a cache on a network file system."""

# Numbers of linux/magic.h, and of the documentation of file systems outside the kernel's tree.
_NETWORK = {
    0x6969: "NFS",
    0x517B: "SMB",
    0xFE534D42: "SMB2",
    0xFF534D42: "CIFS",
    0x01021997: "9p",
    # virtiofs, sshfs, s3fs and all other FUSE file systems have this one number, so all are
    # refused.
    0x65735546: "FUSE",
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
    """Return ``f_type`` of the file system under ``path``; None if it cannot be known."""
    if sys.platform != "linux":
        return None
    # Imported here, because only commands that open a cache need it.
    import ctypes

    # struct statfs is at most 512 bytes. Its first member is f_type, a long, on all 64-bit Linux.
    buffer = ctypes.create_string_buffer(512)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.statfs(os.fsencode(path), buffer) != 0:
        return None
    return int.from_bytes(buffer.raw[: ctypes.sizeof(ctypes.c_long)], sys.byteorder) & 0xFFFFFFFF


def file_system(path: Path) -> str:
    """Return the name of the file system under ``path``, or under the nearest folder above it that exists."""
    kind = _kind(_existing(path))
    return "unknown" if kind is None else _NETWORK.get(kind) or _LOCAL.get(kind) or f"0x{kind:x}"


def is_network(name: str) -> bool:
    """Return True if :func:`file_system` named a file system on which a cache is refused."""
    return name in _NETWORK.values()


def _existing(path: Path) -> Path:
    # A folder that this user may not look into counts as missing.
    while not os.path.exists(path) and path != path.parent:
        path = path.parent
    return path


def disk_block(folder: Path) -> int:
    """Return the bytes that the smallest file or folder in ``folder`` takes; larger ones take multiples of it."""
    # Imported here, because a loader only reads and never asks this.
    import tempfile

    # statvfs does not tell it. ext4 with bigalloc reports blocks of 4 KiB and allocates clusters of
    # 64 KiB, XFS has folders with an extent size for their files, and tmpfs may give a huge page to
    # each. So a file without a name is written and measured (30 us). If the disk takes none,
    # because it is full or read-only, statvfs must do.
    sizes = [DISK_BLOCK, os.statvfs(folder).f_frsize, _xfs_folder_block(folder)]
    with contextlib.suppress(OSError), tempfile.TemporaryFile(dir=folder, buffering=0) as file:
        # Random bytes of a whole block: fewer bytes, or such as compress well, may need no block of
        # their own.
        file.write(os.urandom(DISK_BLOCK))
        status = os.fstat(file.fileno())
        sizes.append(status.st_blocks * 512)
        if file_system(folder) == "tmpfs":
            # st_blksize tells huge pages of tmpfs, also while memory is too fragmented to give one
            # now.
            sizes.append(status.st_blksize)
    return max(sizes)


# XFS_IOC_FSGEOMETRY_V1 of xfs_fs.h. The last number of its answer is the block size of folders.
_XFS_GEOMETRY = 0x80705864


def _xfs_folder_block(folder: Path) -> int:
    """Return the block size of large folders on XFS (``mkfs.xfs -n size=``), which a small folder does not show.

    Return 0 on other file systems.
    """
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
    """Return True if ``folder`` holds only files that were deleted while a process had them open."""
    names = [name for _, _, files in os.walk(folder) for name in files]
    # FUSE and NFS rename such a file, and delete it when it is closed.
    return bool(names) and all(name.startswith((".fuse_hidden", ".nfs")) for name in names)


def check_file_system(path: Path, notify: Callable[[str], None] | None) -> None:
    """Raise :class:`UsageError` for a network file system, or tell it by ``notify`` if it is allowed."""
    name = file_system(path)
    if not is_network(name):
        return
    why = f"{path} lies on a network file system ({name}), where locks and the catalog are not reliable"
    if os.environ.get(ALLOW) != "1":
        raise UsageError(f"{why}; put the cache on a local disk, or set {ALLOW}=1 at your own risk")
    if notify is not None:
        notify(f"warning: {why}; {ALLOW}=1 allows it: samples may be lost or read wrong")
