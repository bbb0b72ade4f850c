"""What the operating system says of a disk that fails or is full, as an error that a user can act on.

Only for the edges: where a command or a worker process ends. Inside, an OSError stays what it is.
"""

from __future__ import annotations

import errno
import os

from cachetool.errors import CapacityError

__all__ = ["disk_error"]

_WORDS = {
    errno.ENOSPC: "the disk is full; free some space, or lower --max-size",
    errno.EDQUOT: "the disk quota is used up; free some space, or lower --max-size",
    errno.EFBIG: "the file would be larger than is allowed (ulimit -f); lower --shard-size",
    errno.EIO: "the disk reports an input/output error; nothing of this was committed",
    errno.EROFS: "the disk is mounted read-only; what is in the cache can still be read",
}


def disk_error(error: BaseException) -> CapacityError | None:
    """``error``, or the OSError that it was raised from, as a :class:`CapacityError`; None when no disk is to blame."""
    cause = error if isinstance(error, OSError) else error.__cause__
    if not isinstance(cause, OSError) or cause.errno not in _WORDS:
        return None
    name = os.fsdecode(cause.filename) if isinstance(cause.filename, str | bytes) else ""
    if cause.errno == errno.ENOSPC and name and _no_inodes(os.path.dirname(name)):
        return CapacityError(f"{name}: the disk can hold no more files (it is out of inodes); delete some files")
    if isinstance(error, CapacityError):
        return error  # says it better: how many bytes
    return CapacityError(": ".join(part for part in (name, _WORDS[cause.errno]) if part))


def _no_inodes(folder: str) -> bool:
    try:
        found = os.statvfs(folder or ".")
    except OSError:
        return False
    return found.f_files > 0 and found.f_favail == 0
