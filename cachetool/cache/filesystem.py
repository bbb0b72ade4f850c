"""Which kind of file system a cache lies on.

The catalog's transactions and the holders' locks need POSIX locks that work and a cache of pages that is one for all
processes: a network file system promises neither, and SQLite says so itself (https://sqlite.org/faq.html#q5). The kind
is the kernel's own number from ``statfs(2)``; those of local disks are not listed, so an unknown one is allowed.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

from cachetool.errors import UsageError

__all__ = ["ALLOW", "check_file_system", "file_system", "is_network"]

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
