"""What the operating system says of a disk that fails or is full, as an error that a user can act on.

:func:`disk_error` is for the edges, where a command or a worker process ends; inside, an OSError stays what it is. Only
that inodes have run out must be seen at once, by :func:`naming_inodes`: giving up what was half written frees some.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path

from cachetool.errors import CapacityError

__all__ = ["disk_error", "naming_inodes"]

_WORDS = {
    errno.ENOSPC: "the disk is full; free some space, or lower --max-size",
    errno.EDQUOT: "the disk quota is used up; free some space, or lower --max-size",
    errno.EFBIG: "the file would be larger than is allowed (ulimit -f); lower --shard-size",
    errno.EIO: "the disk reports an input/output error; nothing of this was committed",
    errno.EROFS: "the disk is mounted read-only; what is in the cache can still be read",
}


def disk_error(error: BaseException) -> CapacityError | None:
    """``error``, or the OSError that it was raised from, as a :class:`CapacityError`; None when no disk is to blame."""
    if isinstance(error, CapacityError):
        return error  # says it better: how many bytes, or that it is inodes
    cause = error if isinstance(error, OSError) else error.__cause__
    if not isinstance(cause, OSError) or cause.errno not in _WORDS:
        return None
    name = os.fsdecode(cause.filename) if isinstance(cause.filename, str | bytes) else ""
    return CapacityError(": ".join(part for part in (name, _WORDS[cause.errno]) if part))


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
        found = os.statvfs(path.parent)
        if not found.f_files or found.f_favail:  # some file systems have no such limit
            raise
        raise CapacityError(f"{path}: the disk is out of inodes: it can hold no more files; delete some") from error
