"""Which kind of file system a cache lies on.

The catalog's transactions and the holders' locks need POSIX locks that work and a cache of pages that is one for all
processes: a network file system promises neither, and SQLite says so itself (https://sqlite.org/faq.html#q5). The kind
is the kernel's own number from ``statfs(2)``; those of local disks are not listed, so an unknown one is allowed.
"""

from __future__ import annotations

import contextlib
import os
import struct
import sys
from collections.abc import Callable
from pathlib import Path

from cachetool.core.errors import UsageError
from cachetool.proc.disk import DISK_BLOCK

__all__ = ["ALLOW", "check_file_system", "disk_block", "file_system", "holds_open_files", "is_network"]

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

    found = ctypes.create_string_buffer(512)  # struct statfs: its first member is f_type, a long, on every 64-bit Linux
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.statfs(os.fsencode(path), found) != 0:
        return None
    return int.from_bytes(found.raw[: ctypes.sizeof(ctypes.c_long)], sys.byteorder) & 0xFFFFFFFF


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
