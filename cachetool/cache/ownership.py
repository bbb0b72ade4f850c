"""Whose a cache is. One that others may write to is refused: they could put links and shards of their own into it.

A new cache's folder is made for its user alone (0700), whatever the umask, and so is safe from others with all that is
in it. A folder that is there already has the rights that somebody gave it.
"""

from __future__ import annotations

import os
import shlex
import stat
from pathlib import Path

from cachetool.core.errors import UsageError
from cachetool.proc.folders import ALLOW_SHARED

__all__ = ["ALLOW_SHARED", "loose", "refuse_loose"]


def loose(root: Path) -> str | None:
    """Why others could change the cache at ``root``; None when they cannot, or nothing is there yet.

    A folder of root's is fine, and to root one of anybody's: in a container the user of a mounted folder is another.
    """
    try:
        found = root.stat()
    except OSError:
        return None
    if found.st_mode & stat.S_IWOTH:
        return f"any user may write to it; run: chmod o-w {shlex.quote(str(root))}"
    if os.geteuid() and found.st_uid not in (0, os.geteuid()):
        return f"it belongs to another user ({found.st_uid})"
    return None


def refuse_loose(root: Path) -> None:
    """Raise :class:`UsageError` for a folder that others could change, unless :data:`ALLOW_SHARED` allows it."""
    if (why := loose(root)) is not None and os.environ.get(ALLOW_SHARED) != "1":
        raise UsageError(
            f"cache {root} is refused: {why},\nor set {ALLOW_SHARED}=1 if you trust all who may write there"
        )
