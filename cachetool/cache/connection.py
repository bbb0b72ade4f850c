"""A connection to the catalog's file, which at first looks every half millisecond whether it is its turn; and what its
errors mean.

SQLite's own wait looks again after 1, 2, 5, 10, 15, 20, 25 milliseconds and so on: beside a pull that commits one shard
after another, a trainer waited 30 to 55 ms for its turn among transactions of 3.
"""

from __future__ import annotations

import os
import sqlite3
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cachetool.cache.transaction_lock import locked
from cachetool.disk import refused_in
from cachetool.errors import CapacityError, CatalogError

__all__ = ["PatientConnection", "connect", "failure", "statements"]

_SHORT, _SHORTS = 0.0005, 100
"""Seconds between looks, and how many there are of these: longer than most transactions take."""
_LONG, _LOOKS = 0.005, 12_100
"""From then on; and how many looks there are in all, in a minute. A process that is stopped meanwhile loses none."""
_KIND = 0xFF  # of an error code, whose other bits tell more
_MAGIC = bytes.fromhex("d9d505f920a163d7")
"""What a journal begins with, and the name of a super-journal ends with."""
_statements = 0


def statements() -> int:
    """How many statements this process has done so far, of any catalog: whether it may know or have made news."""
    return _statements


_CHANGES = ("INSERT", "UPDATE", "DELETE", "CREATE")


class PatientConnection(sqlite3.Connection):
    """A connection whose statements wait for others."""

    before_change: Callable[[], None] | None = None
    """Called once, before the next statement that changes something."""

    def execute(self, sql: str, values: Any = (), /) -> sqlite3.Cursor:
        """Do a statement."""
        global _statements
        if self.before_change is not None and sql.lstrip().startswith(_CHANGES):
            self.before_change()
            self.before_change = None
        looks = 0
        while True:
            try:
                done = super().execute(sql, values)
                _statements += 1
                return done
            except sqlite3.OperationalError as error:
                # Nothing was done then, not by a COMMIT either; readers that become writers, for whom waiting would
                # be no use, there are none.
                looks += 1
                if error.sqlite_errorcode & _KIND != sqlite3.SQLITE_BUSY or looks > _LOOKS:
                    raise
            time.sleep(_SHORT if looks <= _SHORTS else _LONG)


def connect(path: Path) -> PatientConnection:
    """Open the file, or make it. Transactions are as the caller begins and ends them, on any thread, one at a time.

    Raises :class:`sqlite3.Error`; one of its kinds after a minute in which others held the lock; and
    :class:`CatalogError` for a journal that cachetool did not write.
    """
    _refuse_foreign(path.with_name(f"{path.name}-journal"))
    opened = sqlite3.connect(path, timeout=0, isolation_level=None, check_same_thread=False, factory=PatientConnection)
    opened.execute("PRAGMA trusted_schema = OFF")  # views and triggers, of which ours has none, may call nothing
    return opened


def _refuse_foreign(journal: Path) -> None:
    """Raise :class:`CatalogError` for a journal that names another file at its end. SQLite takes that for the journal
    of a transaction over several databases and deletes it, wherever it lies, when it plays this one back
    (sqlite.org/fileformat.html, "The Rollback Journal": the super-journal). No transaction of ours has one.
    """
    try:
        fd = os.open(journal, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:  # none, or nothing that SQLite would read: it opens no link either
        return
    try:
        size = os.fstat(fd).st_size
        foreign = size >= len(_MAGIC) and os.pread(fd, len(_MAGIC), size - len(_MAGIC)) == _MAGIC
    finally:
        os.close(fd)
    if foreign:
        raise CatalogError(
            f"{journal} names another file, which would be deleted with it: cachetool did not write this;\n"
            "do not use this cache if somebody else made it; if it is yours, delete that journal"
        )


def failure(path: Path, error: sqlite3.Error | UnicodeDecodeError, *, mend: str) -> CatalogError | CapacityError:
    """What went wrong with the catalog at ``path``; ``mend`` is what to do about a file that is no catalog."""
    name = getattr(error, "sqlite_errorname", "")
    if isinstance(error, sqlite3.ProgrammingError) and "closed" in str(error):
        return CatalogError(f"catalog {path} was closed in the middle of a call; open the cache again")
    if name.startswith("SQLITE_BUSY"):
        return locked(path, path)
    if os.path.isdir(path):
        return CatalogError(f"catalog {path} is a folder; remove it, then {mend}")
    if name == "SQLITE_FULL":
        return CapacityError(f"catalog {path}: no room on the disk ({error}); free some space")
    if name.startswith(("SQLITE_READONLY", "SQLITE_IOERR", "SQLITE_CANTOPEN")):
        # SQLite says the same of a file that this user may not use and of a disk that fails.
        denied = refused_in(path.parent, path, path.with_name(f"{path.name}-journal"), path.parent)
        if denied is not None:
            return denied
    if name.startswith("SQLITE_READONLY"):
        return CapacityError(
            f"catalog {path} cannot be written: the disk is read-only; make it writable again, for example by"
            " mount -o remount,rw"
        )
    if name.startswith(("SQLITE_IOERR", "SQLITE_CANTOPEN")):
        return CapacityError(f"catalog {path}: {error}; is the disk full, failing or read-only?")
    if name in ("", "SQLITE_NOTADB") or name.startswith("SQLITE_CORRUPT") or str(error) == "integer overflow":
        return CatalogError(f"catalog {path}: {error}; {mend}")
    return CatalogError(f"catalog {path}: {error}")
