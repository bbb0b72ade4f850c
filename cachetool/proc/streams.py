"""Standard streams, which whoever started this process may have closed, as those who start daemons do."""

from __future__ import annotations

import os

__all__ = ["keep_standard_streams"]


def keep_standard_streams() -> None:
    """Open those that are closed on ``/dev/null``, for this process and those it starts.

    Else the next descriptor takes the number, that of a shard or of a pipe, and what a library says there is in it.
    SQLite does the same, but children of its process do not get what it opens: they call this too.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            # The lowest number that is free, which is this one, as those below it are open.
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
