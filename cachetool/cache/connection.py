"""A connection to the catalog's file, which looks every half millisecond whether it is its turn.

SQLite's own wait looks again after 1, 2, 5, 10, 15, 20, 25 milliseconds and so on: beside a pull that commits one shard
after another, a trainer waited 30 to 55 ms for its turn among transactions of 3.
"""

from __future__ import annotations

import sqlite3
import time
from pathlib import Path
from typing import Any

__all__ = ["commits", "connect"]

_LOOK = 0.0005
_PATIENCE = 60.0
"""Seconds for which a lock that others hold is waited for."""
_KIND = 0xFF  # of an error code, whose other bits tell more
_commits = 0


def commits() -> int:
    """How many transactions this process has ended so far, of any catalog; those that only read count too."""
    return _commits


class _Patient(sqlite3.Connection):
    def execute(self, sql: str, values: Any = (), /) -> sqlite3.Cursor:
        global _commits
        until: float | None = None
        while True:
            try:
                done = super().execute(sql, values)
                _commits += sql == "COMMIT"
                return done
            except sqlite3.OperationalError as error:
                # Nothing was done then, not by a COMMIT either; readers that become writers, for whom waiting would
                # be no use, there are none.
                now = time.monotonic()
                until = until or now + _PATIENCE
                if error.sqlite_errorcode & _KIND != sqlite3.SQLITE_BUSY or now > until:
                    raise
            time.sleep(_LOOK)


def connect(path: Path) -> sqlite3.Connection:
    """Open the file, or make it. Transactions are as the caller begins and ends them, on any thread, one at a time.

    Raises :class:`sqlite3.Error`; one of its kinds after a minute in which others held the lock.
    """
    return sqlite3.connect(path, timeout=0, isolation_level=None, check_same_thread=False, factory=_Patient)
