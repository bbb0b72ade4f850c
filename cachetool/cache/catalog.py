"""The catalog: one SQLite file whose transactions are the cache's only lock and whose version is its only clock.

A transaction has its turn among processes by SQLite's locks and by one beside the file, which is not lost by accident
(:mod:`cachetool.cache.transaction_lock`).

This module owns the connection, the schema and the version; what the rows mean is decided by its neighbours (draws,
admission, commit, snapshots, removal). Journal ``PERSIST`` with ``synchronous=FULL``: not WAL, because SQLite 3.7.0 to
3.51.2 has the WAL-reset race, not ``DELETE``, which lost the last commit at every power cut tried.

::

    shards   staging -> ready -> retiring -> trash -> (row gone)
    claims   held by a live worker, or open (holder NULL) after it died; below a source's frontier all else is done
    jobs     live pulls; ``bytes_wanted`` of the shard that found no room, 0 before that
    leases   one row a snapshot: who may still read the shards visible at which version

A connection to the catalog's file, which at first looks every half millisecond whether it is its turn; and what its
errors mean.

SQLite's own wait looks again after 1, 2, 5, 10, 15, 20, 25 milliseconds and so on: beside a pull that commits one shard
after another, a trainer waited 30 to 55 ms for its turn among transactions of 3.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shlex
import sqlite3
import stat
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from cachetool.cache.forking import forks_wait_for
from cachetool.cache.layout import cache_option
from cachetool.cache.schema import APPLICATION_ID, SCHEMA_VERSION, create, difference
from cachetool.cache.transaction_lock import PATIENCE, TransactionLock, locked
from cachetool.cache.values import ForeignValue, foreign_value
from cachetool.core.errors import CacheToolError, CapacityError, CatalogError
from cachetool.core.names import Id
from cachetool.core.text import shown
from cachetool.proc.disk import DISK_BLOCK, limit_error, refused_in

__all__ = [
    "Catalog",
    "Connection",
    "PatientConnection",
    "Row",
    "allowance",
    "connect",
    "failure",
    "foreign",
    "library_version",
]


_SHORT, _SHORTS = 0.0005, 100
"""Seconds between looks, and how many there are of these: longer than most transactions take."""
_LONG, _LOOKS = 0.005, 12_100
"""From then on; and how many looks there are in all, in a minute. A process that is stopped meanwhile loses none."""
_OLDEST = (3, 37)
"""The first version of SQLite with STRICT tables."""
_KIND = 0xFF  # of an error code, whose other bits tell more
_MAGIC = bytes.fromhex("d9d505f920a163d7")
"""The first bytes of a journal, which are also the last bytes of a super-journal's name."""
_CHANGES = ("INSERT", "UPDATE", "DELETE", "CREATE")


_STEPS, _FREE_STEPS, _BYTES_PER_STEPS = 1_000_000, 10, 10_000
"""Instructions of SQLite's machine; how often so many are allowed for any statement, and for how many bytes of the file
once more. A scan of a table does about one for two bytes."""
_MOST_BYTES = 32 * 2**20
"""The most bytes of a value and of a row. The largest that cachetool writes, draws and options, have some 100 kB."""


class PatientConnection(sqlite3.Connection):
    """A connection whose statements wait for others, and end where a file says that it has rows without end."""

    path = ""
    _pieces = 0
    before_change: Callable[[], None] | None = None
    """Called once, before the next statement that changes something."""

    def _allow_steps(self) -> None:
        """Bound the work of the next statement by the size of the file: pages of a tree that are named many times are
        rows without end, in a loop in C that no signal interrupts.

        The counter is made of C functions, in which no signal's handler can raise: SQLite's module would lose that.
        """
        if not self.in_transaction:
            with contextlib.suppress(OSError):
                self._pieces = os.stat(self.path).st_size // _BYTES_PER_STEPS
        go_on = itertools.repeat(0, _FREE_STEPS + self._pieces)
        self.set_progress_handler(itertools.chain(go_on, itertools.repeat(1)).__next__, _STEPS)

    def executemany(self, sql: str, rows: Iterable[Any], /) -> sqlite3.Cursor:
        """Do a statement that inserts, for each of ``rows``, however many these are."""
        self.set_progress_handler(None, 0)
        return super().executemany(sql, rows)

    def execute(self, sql: str, values: Any = (), /) -> sqlite3.Cursor:
        """Do a statement."""
        self._allow_steps()
        if self.before_change is not None and sql.lstrip().startswith(_CHANGES):
            self.before_change()
            self.before_change = None
        looks = 0
        while True:
            try:
                return super().execute(sql, values)
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
    if sqlite3.sqlite_version_info < _OLDEST:
        raise CatalogError(
            f"cachetool needs SQLite 3.37 or newer, and this Python has {sqlite3.sqlite_version}; use a newer Python"
        )
    opened = sqlite3.connect(path, timeout=0, isolation_level=None, check_same_thread=False, factory=PatientConnection)
    opened.path = os.path.abspath(path)
    opened.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, _MOST_BYTES)
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
    """Make an error of cachetool from SQLite's ``error``. ``mend`` is the advice for a file that is no catalog."""
    name = getattr(error, "sqlite_errorname", "")
    if isinstance(error, sqlite3.ProgrammingError) and "closed" in str(error):
        return CatalogError(f"catalog {path} was closed in the middle of a call; open the cache again")
    if name.startswith("SQLITE_BUSY"):
        return locked(path, path)
    if os.path.isdir(path):
        return CatalogError(f"catalog {path} is a folder; remove it, then {mend}")
    if name == "SQLITE_INTERRUPT":
        return CatalogError(f"catalog {path}: it has more rows than fit into a file of its size; {mend}")
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
        if (limit := _no_descriptor()) is not None:
            return CatalogError(f"catalog {path} cannot be opened: {limit}")
        return CapacityError(f"catalog {path}: {error}; is the disk full, failing or read-only?")
    if name in ("", "SQLITE_NOTADB") or name.startswith("SQLITE_CORRUPT") or str(error) == "integer overflow":
        return CatalogError(f"catalog {path}: {error}; {mend}")
    return CatalogError(f"catalog {path}: {error}")


_DESCRIPTORS = 4
"""That SQLite needs for a catalog, its journal and their folder."""


def _no_descriptor() -> CacheToolError | None:
    """That this process may open no more files, which SQLite does not say; None where it may open a few."""
    opened: list[int] = []
    try:
        while len(opened) < _DESCRIPTORS:
            opened.append(os.open(os.devnull, os.O_RDONLY))
    except OSError as error:
        return limit_error(error)
    finally:
        for fd in opened:
            os.close(fd)
    return None


Connection = sqlite3.Connection
Row = sqlite3.Row

PAGE_BYTES = 4096
FIRST_PAGES = 64
"""A new catalog may grow to this many pages; the limit is raised, and charged, as it fills."""
MAX_EVENTS = 1000

_ODD = (
    TypeError,
    ValueError,
    ArithmeticError,
    LookupError,
    AttributeError,
    AssertionError,
    RecursionError,
    MemoryError,
)
"""Exceptions that a value which cachetool never writes may raise when a row is read."""
_used: weakref.WeakSet[Catalog] = weakref.WeakSet()
_FAILURES = (sqlite3.Error, UnicodeDecodeError)
"""What the library raises: the second when a damaged file holds text, or its own message names it, that is none."""


def library_version() -> str:
    """Version of the SQLite library."""
    return sqlite3.sqlite_version


def foreign(error: BaseException) -> CatalogError | None:
    """What to raise in place of ``error`` where a catalog that this process has used holds a value that is none of
    cachetool's: :meth:`Catalog.foreign`."""
    return next((found for each in list(_used) if (found := each.foreign(error)) is not None), None)


def allowance(pages: int, disk_block: int = DISK_BLOCK) -> int:
    """Bytes charged for the catalog: the file at its limit, a journal of the same size, headers, the lock's file; and
    small files that are written beside an older one and renamed. Five of these may end in the middle of a block."""
    return int(2.01 * pages * PAGE_BYTES) + 65536 + 5 * (disk_block - DISK_BLOCK)


class Catalog:
    """One process's connection to a catalog file, opened again by itself in a forked child.

    Methods may be called from any thread; transactions of one process take turns.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        _used.add(self)
        self._pid = 0
        self._file = (0, 0)
        self._among_processes = TransactionLock(path)
        self._connection: PatientConnection | None = None
        self._inherited: list[sqlite3.Connection] = []
        self._lock = threading.RLock()
        self._owner = os.getpid()
        self._inside = False  # whether a transaction is under way, in the thread that has the turn
        self._outer: sqlite3.Connection | None = None
        """In a transaction of :meth:`together`."""
        self._undone: Exception | None = None
        """Why SQLite gave up that transaction by itself, as it does when the disk is full."""
        self.make_again: Callable[[], None] | None = None
        """Called when the folder is found gone, in place of an error: makes it, and calls :meth:`create`."""
        forks_wait_for(self)

    def lock(self) -> threading.RLock:
        """The lock of this process: an inherited one may have been held by a thread that does not exist here."""
        if self._owner != os.getpid():
            self._lock, self._owner, self._inside, self._outer = threading.RLock(), os.getpid(), False, None
        return self._lock

    def create(self, *, max_size: int, min_free: int, pages: int = FIRST_PAGES) -> None:
        """Make the tables of a new cache; harmless when another process was first."""
        try:
            self._open(settings={"max_size": max_size, "min_free": min_free, "pages": pages})
        except _FAILURES as error:
            raise self._error(error) from error

    def close(self) -> None:
        """Close the connection of this process."""
        with self.lock():
            if self._connection is not None and self._pid == os.getpid():
                connection, self._connection = self._connection, None
                with contextlib.suppress(sqlite3.Error):  # nothing is written by this: what was, is committed
                    connection.close()

    def note_error(self, subject: str, text: str, *, dataset: str) -> None:
        """Keep an error, as one line, for ``stats`` and trainers that wait; where nothing can be written, let go."""
        with contextlib.suppress(CapacityError, CatalogError), self.write() as connection:
            event(connection, time.time(), "error", subject, " ".join(text.splitlines()), dataset=dataset)

    def untouched(self) -> bool:
        """Whether nothing was ever entered: there is no file, or it is that of a cache whose making was cut off."""
        if not self.path.exists():
            return True
        try:
            with self.lock(), self._look() as connection:
                if not connection.execute("PRAGMA user_version").fetchone()[0]:
                    return True
                tables = ("datasets", "sources", "shards")
                return not any(connection.execute(f"SELECT 1 FROM {name} LIMIT 1").fetchone() for name in tables)
        except _FAILURES:
            return False

    def trouble(self) -> str | None:
        """Name what is wrong with the file: missing, not a database, damaged, other tables; None when it is sound.
        Raises :class:`CatalogError` for one of another version, and that or :class:`CapacityError` when it cannot be
        found out."""
        if not self.path.exists():
            return "it is missing"
        try:
            with self.lock(), self._look() as connection:
                if connection.execute("PRAGMA user_version").fetchone()[0] == 0:
                    return "it is empty"
                if (other := self._difference(connection)) is not None:
                    return f"it {other}"
                findings = [row[0] for row in connection.execute("PRAGMA integrity_check(3)")]
                if findings != ["ok"]:
                    return "; ".join(findings)
                if (value := foreign_value(connection)) is not None:
                    return value
                for table in ("shards", "sources", "holders"):
                    for row in connection.execute(f"SELECT id FROM {table}"):
                        if not Id.fits(row[0]):
                            return f"it names one of its {table} {ascii(row[0])[:100]}, which cachetool does not"
        except _FAILURES as error:
            name = getattr(error, "sqlite_errorname", "")
            if name in ("", "SQLITE_NOTADB", "SQLITE_ERROR") or name.startswith("SQLITE_CORRUPT"):
                return str(error)
            raise self._error(error) from error
        return None

    @contextlib.contextmanager
    def _look(self) -> Iterator[sqlite3.Connection]:
        """A connection for once, to a file that may be anything."""
        self._refuse_links()
        with self._among_processes.hold(shared=True), contextlib.closing(connect(self.path)) as connection:
            yield connection

    def rows(self, query: str, values: tuple[Any, ...] = ()) -> list[Row]:
        """All rows of one reading statement, a consistent picture by itself."""
        with self.lock(), contextlib.ExitStack() as stack:
            try:
                own = self._open() if self._inside else self._begin(None, stack)
                return own.execute(query, values).fetchall()
            except _FAILURES as error:
                raise self._error(error) from error

    def one(self, query: str, values: tuple[Any, ...] = ()) -> Row | None:
        """The first row of one reading statement."""
        rows = self.rows(query, values)
        return rows[0] if rows else None

    def number(self, key: str) -> int:
        """A number of the table ``cache``: ``version``, ``max_size``, ``min_free``, ``pages``."""
        return self._number(key, self.one(f"SELECT {key} FROM cache"))

    @contextlib.contextmanager
    def read(self) -> Iterator[sqlite3.Connection]:
        """A transaction that only reads, for several statements that must agree with each other. Raises what
        :meth:`understood` does."""
        try:
            yield from self._transaction("BEGIN")
        except ForeignValue as error:
            raise CatalogError(f"catalog {self.path}: {error}; {self._mend()}") from error
        except _ODD as error:
            raise self.foreign(error) or error from error

    @contextlib.contextmanager
    def write(self, *, patience: float = PATIENCE) -> Iterator[sqlite3.Connection]:
        """A transaction that holds the cache's lock from its first moment; rolled back when the body raises. Waits so
        many seconds for others, and then raises :class:`CatalogError` that names one.

        ``BEGIN IMMEDIATE``: a reader that upgrades itself to a writer could fail at once instead of waiting.
        """
        try:
            yield from self._transaction("BEGIN IMMEDIATE", patience)
        except ForeignValue as error:
            raise CatalogError(f"catalog {self.path}: {error}; {self._mend()}") from error
        except _ODD as error:
            raise self.foreign(error) or error from error

    @contextlib.contextmanager
    def understood(self) -> Iterator[None]:
        """For code that makes something of rows outside of a transaction: raises :class:`CatalogError`, naming table,
        column and value, in place of an error that comes of a value which cachetool never writes."""
        try:
            yield
        except ForeignValue as error:
            raise CatalogError(f"catalog {self.path}: {error}; {self._mend()}") from error
        except _ODD as error:
            raise self.foreign(error) or error from error

    def foreign(self, error: BaseException) -> CatalogError | None:
        """Return the error to raise instead of ``error`` if the catalog holds a value that cachetool never writes, else
        None. The rows are searched only after an error, so a sound catalog costs nothing."""
        if isinstance(error, CacheToolError) or not isinstance(error, _ODD) or self._inside or self._outer is not None:
            return None  # of a part of a transaction the whole is asked
        try:
            with self.lock(), self._look() as connection:
                value = foreign_value(connection)
        except (CacheToolError, OSError, *_FAILURES):
            return None
        if value is None:
            return None
        return CatalogError(f"catalog {self.path}: {value}, which cachetool never writes; {self._mend()}")

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """One transaction of all that this thread writes in the body, so that it waits for the disk once: each
        :meth:`write` in it is a part, which is undone by itself when it raises."""
        with self.write() as connection:
            self._outer, self._undone = connection, None
            try:
                yield
                if self._undone is not None:
                    raise self._undone
            finally:
                self._outer = None

    def _transaction(self, begin: str, patience: float = PATIENCE) -> Iterator[sqlite3.Connection]:
        with self.lock(), contextlib.ExitStack() as stack:
            if self._outer is not None:
                yield from self._part(self._outer)
                return
            if self._inside:  # whose own transaction must not be undone by this one's error
                raise CatalogError(f"catalog {self.path}: a signal's handler interrupted its use; do this afterwards")
            connection: sqlite3.Connection | None = None
            self._inside = True
            try:
                connection = self._begin(begin, stack, patience)
                if begin != "BEGIN":  # another process may have raised the limit, which is this connection's alone
                    self._limit_pages(connection)
                yield connection
                connection.execute("COMMIT")
            except _FAILURES as error:
                self._rollback(connection)
                raise self._error(error) from error
            except BaseException:  # a signal's exception too, which may come between any two lines
                self._rollback(connection)
                raise
            finally:
                self._inside = False

    def _begin(self, begin: str | None, stack: contextlib.ExitStack, patience: float = PATIENCE) -> PatientConnection:
        """This process's connection once it has its turn, which lasts as long as ``stack``, in a transaction that is
        begun."""
        while True:
            connection = self._open(patience=patience)
            shared = begin != "BEGIN IMMEDIATE"
            sign = stack.enter_context(self._among_processes.hold(shared=shared, patience=patience))
            connection.before_change = None if shared else sign
            if begin is not None:
                connection.execute(begin)
            if self._is_there():
                return connection
            # Rebuilt by another process since it was opened: this connection leads to a deleted file.
            self._rollback(connection)
            self.close()
            stack.close()

    def _part(self, connection: sqlite3.Connection) -> Iterator[sqlite3.Connection]:
        if self._undone is not None:  # else what comes now would be a transaction of its own
            raise self._undone
        try:
            connection.execute("SAVEPOINT part")
            yield connection
            connection.execute("RELEASE part")
        except BaseException as error:
            ours = self._error(error) if isinstance(error, _FAILURES) else error
            if connection.in_transaction:
                connection.execute("ROLLBACK TO part")
                connection.execute("RELEASE part")
            elif isinstance(ours, Exception):
                self._undone = ours
            if ours is error:
                raise
            raise ours from error

    def _is_there(self) -> bool:
        try:
            return _identity(self.path) == self._file
        except FileNotFoundError:
            return False

    @staticmethod
    def _rollback(connection: sqlite3.Connection | None) -> None:
        with contextlib.suppress(sqlite3.ProgrammingError):  # a signal's handler closed it, which rolls back as well
            if connection is not None and connection.in_transaction:  # a full disk makes SQLite roll back by itself
                connection.execute("ROLLBACK")

    def _open(self, *, settings: Mapping[str, int] | None = None, patience: float = PATIENCE) -> PatientConnection:
        """This process's connection; ``settings`` are what a new catalog begins with."""
        if self._connection is not None and self._pid == os.getpid():
            return self._connection
        if self._connection is not None:
            # Inherited through fork: it must be neither used nor closed here, so it is kept for ever.
            self._inherited.append(self._connection)
        if settings is None and not self.path.exists():
            if not self.path.parent.exists():
                if self.make_again is not None:
                    self.make_again()
                    return self._open()
                raise CatalogError(f"the cache folder {self.path.parent} is gone; pull again to fill a new one")
            raise CatalogError(f"catalog {self.path} is missing; {self._mend()}")
        self._refuse_links()
        connection = connect(self.path)
        try:
            self._prepare(connection, settings, patience)
        except BaseException:
            connection.close()
            raise
        self._connection, self._pid = connection, os.getpid()
        self._file = _identity(self.path)
        return connection

    def _refuse_links(self) -> None:
        """Raise :class:`CatalogError` for a file that is another cache's too: SQLite follows a link at the catalog, and
        of two names of one file it locks the file but writes a journal for each, which rolls back the other's writes.
        """
        for path in (self.path.with_name(f"{self.path.name}{part}") for part in ("", "-journal", "-lock")):
            try:
                status = path.lstat()
            except OSError:
                continue
            if stat.S_ISLNK(status.st_mode):
                raise CatalogError(f"catalog {path} is a link, which leads to a file that is no part of the cache")
            if not stat.S_ISREG(status.st_mode):  # SQLite would wait for a pipe's other end for ever
                what = "a folder" if stat.S_ISDIR(status.st_mode) else "no plain file"
                raise CatalogError(f"catalog {path} is {what}; remove it, then {self._mend()}")
            if status.st_nlink > 1:
                command = 'cp -p "$f" "$f.own" && mv "$f.own" "$f"'
                raise CatalogError(
                    f"catalog {path} is shared with a copy of the cache that was made of hard links (cp -al, rsync"
                    " --link-dest); end what uses either, then make it this cache's own:"
                    f" cd {shlex.quote(str(path.parent))} && for f in {self.path.name}*; do {command}; done"
                )

    def _prepare(self, connection: sqlite3.Connection, settings: Mapping[str, int] | None, patience: float) -> None:
        connection.row_factory = Row
        with self._among_processes.hold(shared=True, patience=patience):
            connection.execute("PRAGMA journal_mode = PERSIST")
            connection.execute("PRAGMA synchronous = FULL")
            connection.execute("PRAGMA temp_store = MEMORY")
            connection.execute("PRAGMA foreign_keys = ON")
            version = connection.execute("PRAGMA user_version").fetchone()[0]
        if not version and settings is None:
            raise CatalogError(
                f"catalog {self.path} is empty, though the folder says that it is a cache; {self._mend()}"
            )
        if not version:
            with self._among_processes.hold(shared=False, patience=patience):
                create(connection, settings or {})
        with self._among_processes.hold(shared=True, patience=patience):
            if (other := self._difference(connection)) is not None:
                raise CatalogError(f"catalog {self.path} {other}; {self._mend()}")
            self._limit_pages(connection)

    def _difference(self, connection: Connection) -> str | None:
        """In what the file differs from those that cachetool makes; None for nothing. Raises :class:`CatalogError` for
        a catalog of another version of cachetool."""
        application = connection.execute("PRAGMA application_id").fetchone()[0]
        version = connection.execute("PRAGMA user_version").fetchone()[0]
        if not application:
            raise CatalogError(
                f"cache {self.path.parent} was made by a pre-release of cachetool; pull again into an empty folder"
            )
        if application != APPLICATION_ID:
            return f"has the application id {application}, which cachetool never writes"
        if version != SCHEMA_VERSION:
            raise CatalogError(
                f"catalog {self.path} was written by a newer cachetool (schema {version}, this one knows"
                f" {SCHEMA_VERSION}); upgrade cachetool"
            )
        return difference(connection)

    def _limit_pages(self, connection: Connection) -> None:
        row = connection.execute("SELECT pages FROM cache").fetchone()
        connection.execute(f"PRAGMA max_page_count = {self._number('pages', row)}")

    def _number(self, key: str, row: Row | None) -> int:
        """A number of the table ``cache``."""
        if row is None or not isinstance(row[0], int) or row[0] < 0:
            had = "no row" if row is None else f"{key} {shown(row[0])}"
            raise CatalogError(
                f"catalog {self.path}: its table 'cache' has {had}, which cachetool never writes; {self._mend()}"
            )
        return row[0]

    def _mend(self) -> str:
        """What to do about a file that is no catalog."""
        return f"run: cachetool verify --repair{cache_option(self.path.parent)}"

    def _error(self, error: sqlite3.Error | UnicodeDecodeError) -> CatalogError | CapacityError:
        return failure(self.path, error, mend=self._mend())


def _identity(path: Path) -> tuple[int, int]:
    status = path.stat()
    return status.st_dev, status.st_ino


def bump(connection: sqlite3.Connection) -> int:
    """Raise the catalog's version inside a transaction and give the new one.

    With it comes a random number: a catalog that is made anew may reach the same version.
    """
    row = connection.execute(
        "UPDATE cache SET version = version + 1, stamp = random() & ? RETURNING version", (2**62 - 1,)
    ).fetchone()
    return int(row[0])


def next_seq(connection: sqlite3.Connection) -> int:
    """The next number in the order of commits."""
    row = connection.execute(
        "UPDATE cache SET next_seq = next_seq + 1, moves = moves + 1 RETURNING next_seq - 1"
    ).fetchone()
    return int(row[0])


def event(
    connection: sqlite3.Connection, at: float, kind: str, subject: str, text: str, *, dataset: str | None = None
) -> None:
    """Append to the event log, which keeps the newest 1,000. A ``subject`` that is a shard tells its ``dataset``."""
    cursor = connection.execute(
        "INSERT INTO events (at, kind, subject, text, dataset)"
        " VALUES (:at, :kind, :subject, :text,"
        " coalesce(:dataset, (SELECT dataset FROM shards WHERE id = :subject), ''))",
        {"at": at, "kind": kind, "subject": subject, "text": text[:500], "dataset": dataset},
    )
    connection.execute("DELETE FROM events WHERE id <= ?", ((cursor.lastrowid or 0) - MAX_EVENTS,))
