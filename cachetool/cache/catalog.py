"""The catalog: one SQLite file. Its transactions are the cache's only lock, and its version is the cache's only clock.

A transaction waits for its turn by SQLite's locks and by a lock file beside the catalog, which no process loses by
accident (:mod:`cachetool.cache.transaction_lock`).

This module owns the connection and the version. Its neighbours decide what the rows mean (draws, admission, commit,
snapshots, removal).

::

    shards   staging -> ready -> retiring -> trash -> (row deleted)
    claims   held by a living worker, or open (holder NULL) after its death; all else below a source's frontier is done
    jobs     running pulls; ``bytes_wanted`` of the shard that found no space, 0 before
    leases   one row a snapshot: which process may read the shards visible at which version

The journal mode is ``PERSIST`` with ``synchronous=FULL``. It is not WAL, because SQLite 3.7.0 to 3.51.2 has the
WAL-reset race. It is not ``DELETE``, which lost the last commit at every power cut that was tried.

Connections wait in their own loop: first they look every half millisecond. SQLite's own wait looks again after 1, 2, 5,
10, 15, 20, 25 ms and so on. Beside a pull that commits one shard after another, a trainer then waited 30 to 55 ms for
its turn among transactions of 3 ms.
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
"""Seconds between two looks at first, and the number of these looks. Together 50 ms, longer than most transactions
take."""
_LONG, _LOOKS = 0.005, 12_100
"""Seconds between later looks, and the number of all looks. Together one minute. Looks are counted instead of seconds,
so a process that is stopped (SIGSTOP) meanwhile loses no patience."""
_OLDEST = (3, 37)
"""First version of SQLite that has STRICT tables."""
# The low byte of an error code of SQLite is its kind; the other bits tell more about it.
_KIND = 0xFF
_MAGIC = bytes.fromhex("d9d505f920a163d7")
"""First bytes of a journal; the name of a super-journal ends with the same bytes."""
_CHANGES = ("INSERT", "UPDATE", "DELETE", "CREATE")


_STEPS, _FREE_STEPS, _BYTES_PER_STEPS = 1_000_000, 10, 10_000
"""Bounds on one statement: instructions of SQLite's machine in one piece; pieces that every statement may use; and
bytes of the file that allow one more piece. A scan of a table takes about one instruction for two bytes."""
_MOST_BYTES = 32 * 2**20
"""Maximum bytes of a value and of a row. The largest values that cachetool writes, draws and options, have about 100
kB."""


class PatientConnection(sqlite3.Connection):
    """A connection whose statements wait for other processes, and stop when a file claims to have rows without end."""

    path = ""
    _pieces = 0
    before_change: Callable[[], None] | None = None
    """Called once, before the next statement that changes something."""

    def _allow_steps(self) -> None:
        """Bound the work of the next statement by the size of the file."""
        # In a hostile file a page may be named many times in a tree, which makes rows without end.
        # SQLite would follow them in a C loop that no signal interrupts, so the size of the file
        # bounds the instructions. Inside a transaction the size was already read.
        if not self.in_transaction:
            with contextlib.suppress(OSError):
                self._pieces = os.stat(self.path).st_size // _BYTES_PER_STEPS
        # The counter consists of C functions only. A Python function here could run a signal's
        # handler, and sqlite3 swallows an exception that is raised inside a progress handler.
        go_on = itertools.repeat(0, _FREE_STEPS + self._pieces)
        self.set_progress_handler(itertools.chain(go_on, itertools.repeat(1)).__next__, _STEPS)

    def executemany(self, sql: str, rows: Iterable[Any], /) -> sqlite3.Cursor:
        """Execute an inserting statement once for each of ``rows``, without a bound on the work."""
        # No bound: the number of rows comes from cachetool's own code here, not from a file that
        # may lie.
        self.set_progress_handler(None, 0)
        return super().executemany(sql, rows)

    def execute(self, sql: str, values: Any = (), /) -> sqlite3.Cursor:
        """Execute a statement; wait while other processes hold the lock."""
        self._allow_steps()
        if self.before_change is not None and sql.lstrip().startswith(_CHANGES):
            self.before_change()
            self.before_change = None
        looks = 0
        while True:
            try:
                return super().execute(sql, values)
            except sqlite3.OperationalError as error:
                # A retry is safe: SQLite did nothing when it returned BUSY, also for a COMMIT. No
                # reader here becomes a writer inside its transaction, a case in which waiting would
                # never help.
                looks += 1
                if error.sqlite_errorcode & _KIND != sqlite3.SQLITE_BUSY or looks > _LOOKS:
                    raise
            time.sleep(_SHORT if looks <= _SHORTS else _LONG)


def connect(path: Path) -> PatientConnection:
    """Open the file, or create it. The caller begins and ends the transactions, on any thread, one at a time.

    Raises :class:`sqlite3.Error`, also when other processes hold the lock for a minute, and :class:`CatalogError` for a
    journal that cachetool did not write.
    """
    # Before the file is opened, because SQLite plays a hot journal back at the first statement.
    _refuse_foreign(path.with_name(f"{path.name}-journal"))
    if sqlite3.sqlite_version_info < _OLDEST:
        raise CatalogError(
            f"cachetool needs SQLite 3.37 or newer, and this Python has {sqlite3.sqlite_version}; use a newer Python"
        )
    # timeout=0 turns off SQLite's own waiting, which reaches 33 ms after five looks; `execute`
    # waits instead. isolation_level=None lets us write BEGIN and COMMIT ourselves.
    opened = sqlite3.connect(path, timeout=0, isolation_level=None, check_same_thread=False, factory=PatientConnection)
    opened.path = os.path.abspath(path)
    opened.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, _MOST_BYTES)
    # Views and triggers may call nothing. A catalog of cachetool has neither, but a foreign file
    # may.
    opened.execute("PRAGMA trusted_schema = OFF")
    return opened


def _refuse_foreign(journal: Path) -> None:
    """Raise :class:`CatalogError` for a journal whose last bytes name another file (a super-journal)."""
    try:
        # SQLite deletes the file that a hot journal names at its end, wherever that file lies
        # (sqlite.org/fileformat.html, "The Rollback Journal"; tried with SQLite 3.40.1). A hostile
        # cache could delete any file of the user in this way. No transaction of cachetool writes
        # such a journal. O_NONBLOCK, because opening a pipe would wait for its other end.
        fd = os.open(journal, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        # There is no journal, or nothing that SQLite would read: SQLite opens no link here either.
        return
    try:
        size = os.fstat(fd).st_size
        foreign = size >= len(_MAGIC) and os.pread(fd, len(_MAGIC), size - len(_MAGIC)) == _MAGIC
    finally:
        os.close(fd)
    if foreign:
        raise CatalogError(
            f"{journal} was not written by cachetool: it names another file, which SQLite would delete;\n"
            "do not use this cache if somebody else made it; if the cache is yours, delete this journal"
        )


def failure(path: Path, error: sqlite3.Error | UnicodeDecodeError, *, mend: str) -> CatalogError | CapacityError:
    """Return the error of cachetool for SQLite's ``error``. ``mend`` is the advice for a file that is no catalog."""
    name = getattr(error, "sqlite_errorname", "")
    if isinstance(error, sqlite3.ProgrammingError) and "closed" in str(error):
        return CatalogError(f"catalog {path} was closed in the middle of a call; open the cache again")
    if name.startswith("SQLITE_BUSY"):
        return locked(path, path)
    if os.path.isdir(path):
        return CatalogError(f"catalog {path} is a folder; remove it, then {mend}")
    if name == "SQLITE_INTERRUPT":
        return CatalogError(f"catalog {path} has more rows than fit into a file of its size; {mend}")
    if name == "SQLITE_FULL":
        return CapacityError(f"catalog {path}: no space on the disk ({error}); free some space")
    if name.startswith(("SQLITE_READONLY", "SQLITE_IOERR", "SQLITE_CANTOPEN")):
        # SQLite reports the same code for a file that this user may not use and for a disk that
        # fails. The permissions of the files tell the two cases apart.
        denied = refused_in(path.parent, path, path.with_name(f"{path.name}-journal"), path.parent)
        if denied is not None:
            return denied
    if name.startswith("SQLITE_READONLY"):
        return CapacityError(
            f"catalog {path} cannot be written: the disk is read-only; make it writable again, for example by"
            " mount -o remount,rw"
        )
    if name.startswith(("SQLITE_IOERR", "SQLITE_CANTOPEN")):
        # SQLite also reports CANTOPEN when this process has no free descriptor, and the advice
        # differs.
        if (limit := _no_descriptor()) is not None:
            return CatalogError(f"catalog {path} cannot be opened: {limit}")
        return CapacityError(f"catalog {path}: {error}; is the disk full, failing or read-only?")
    # A `UnicodeDecodeError` has no name of SQLite. `integer overflow` comes from sum() over numbers
    # that cachetool never writes.
    if name in ("", "SQLITE_NOTADB") or name.startswith("SQLITE_CORRUPT") or str(error) == "integer overflow":
        return CatalogError(f"catalog {path}: {error}; {mend}")
    return CatalogError(f"catalog {path}: {error}")


_DESCRIPTORS = 4
"""Descriptors that SQLite needs for a catalog, its journal and their folder."""


def _no_descriptor() -> CacheToolError | None:
    """Return an error if this process may not open :data:`_DESCRIPTORS` more files, else None. SQLite does not report
    this case."""
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
"""Pages (of 4,096 bytes) to which a new catalog may grow. Admission raises the limit, and charges it, as the catalog
fills."""
MAX_EVENTS = 1000
"""Rows in the event log; older ones are deleted."""

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
"""Exceptions that the SQLite library raises. ``UnicodeDecodeError`` comes from a damaged file whose text, or whose name
in SQLite's message, is not UTF-8."""


def library_version() -> str:
    """Return the version of the SQLite library."""
    return sqlite3.sqlite_version


def foreign(error: BaseException) -> CatalogError | None:
    """Return the error to raise instead of ``error`` if a catalog that this process has used holds a value that
    cachetool never writes. See :meth:`Catalog.foreign`."""
    # A copy of the set, because another thread may open a catalog during the loop.
    return next((found for each in list(_used) if (found := each.foreign(error)) is not None), None)


def allowance(pages: int, disk_block: int = DISK_BLOCK) -> int:
    """Return the bytes charged for a catalog of ``pages`` pages: the file at its limit, a journal of the same size, the
    lock file, and small files that are written beside an older one and renamed."""
    # The factor is 2 because a journal may hold every page once; 0.01 covers its headers. Five of
    # the small files may end in the middle of a disk block, so larger blocks cost five times the
    # difference.
    return int(2.01 * pages * PAGE_BYTES) + 65536 + 5 * (disk_block - DISK_BLOCK)


class Catalog:
    """The connection of one process to a catalog file. A forked child opens a connection of its own.

    Methods may be called from any thread; the transactions of one process take turns.
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
        self._inside = False
        """True while the thread that holds ``_lock`` is in a transaction."""
        self._outer: sqlite3.Connection | None = None
        """The connection of the transaction of :meth:`together`, while one is in progress."""
        self._undone: Exception | None = None
        """The error because of which SQLite rolled back that transaction by itself, as it does when the disk is
        full."""
        self.make_again: Callable[[], None] | None = None
        """Called instead of an error when the cache's folder is gone. The function makes the folder and calls
        :meth:`create`."""
        # A child that is forked inside another thread's transaction inherits SQLite's table of
        # locks. Nine of ten such children never got into the cache again and kept others out.
        forks_wait_for(self)

    def lock(self) -> threading.RLock:
        """Return the lock between the threads of this process; a forked child gets a new one."""
        # An inherited lock may be held by a thread that does not exist in the child, and would
        # never be released.
        if self._owner != os.getpid():
            self._lock, self._owner, self._inside, self._outer = threading.RLock(), os.getpid(), False, None
        return self._lock

    def create(self, *, max_size: int, min_free: int, pages: int = FIRST_PAGES) -> None:
        """Make the tables of a new cache. Does nothing if another process has made them first."""
        try:
            self._open(settings={"max_size": max_size, "min_free": min_free, "pages": pages})
        except _FAILURES as error:
            raise self._error(error) from error

    def close(self) -> None:
        """Close the connection of this process."""
        with self.lock():
            if self._connection is not None and self._pid == os.getpid():
                connection, self._connection = self._connection, None
                # Safe to ignore: closing writes nothing, because all transactions are committed or
                # rolled back by then.
                with contextlib.suppress(sqlite3.Error):
                    connection.close()

    def note_error(self, subject: str, text: str, *, dataset: str) -> None:
        """Record an error, as one line, for ``stats`` and for trainers that wait. The error is dropped if nothing can
        be written."""
        with contextlib.suppress(CapacityError, CatalogError), self.write() as connection:
            event(connection, time.time(), "error", subject, " ".join(text.splitlines()), dataset=dataset)

    def untouched(self) -> bool:
        """Return True if nothing was ever written into the catalog: the file is missing, or it belongs to a cache whose
        creation was interrupted."""
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
        """Return what is wrong with the file (missing, not a database, damaged, other tables), or None when it is
        sound.

        Raises :class:`CatalogError` for a catalog of another version, and that or :class:`CapacityError` when the check
        cannot be made.
        """
        if not self.path.exists():
            return "it is missing"
        try:
            with self.lock(), self._look() as connection:
                if connection.execute("PRAGMA user_version").fetchone()[0] == 0:
                    return "it is empty"
                if (other := self._difference(connection)) is not None:
                    return f"it {other}"
                # Three findings are enough for one message. The check sees the structure of pages
                # and not a changed number, so the values are checked as well.
                findings = [row[0] for row in connection.execute("PRAGMA integrity_check(3)")]
                if findings != ["ok"]:
                    return "; ".join(findings)
                if (value := foreign_value(connection)) is not None:
                    return value
                # Ids become paths. A foreign catalog named a shard `../../thesis`, and the folder
                # of that name was deleted.
                for table in ("shards", "sources", "holders"):
                    for row in connection.execute(f"SELECT id FROM {table}"):
                        if not Id.fits(row[0]):
                            return f"its table {table!r} has the id {ascii(row[0])[:100]}, which cachetool never writes"
        except _FAILURES as error:
            name = getattr(error, "sqlite_errorname", "")
            if name in ("", "SQLITE_NOTADB", "SQLITE_ERROR") or name.startswith("SQLITE_CORRUPT"):
                return str(error)
            raise self._error(error) from error
        return None

    @contextlib.contextmanager
    def _look(self) -> Iterator[sqlite3.Connection]:
        """Yield a connection for one use, to a file that may be anything."""
        self._refuse_links()
        # A connection of its own: the lasting one is only made for a file whose tables are ours.
        with self._among_processes.hold(shared=True), contextlib.closing(connect(self.path)) as connection:
            yield connection

    def rows(self, query: str, values: tuple[Any, ...] = ()) -> list[Row]:
        """Return all rows of one reading statement, which is a consistent picture by itself."""
        with self.lock(), contextlib.ExitStack() as stack:
            try:
                own = self._open() if self._inside else self._begin(None, stack)
                return own.execute(query, values).fetchall()
            except _FAILURES as error:
                raise self._error(error) from error

    def one(self, query: str, values: tuple[Any, ...] = ()) -> Row | None:
        """Return the first row of one reading statement, or None."""
        rows = self.rows(query, values)
        return rows[0] if rows else None

    def number(self, key: str) -> int:
        """Return a number of the table ``cache``: ``version``, ``max_size``, ``min_free``, ``pages``."""
        return self._number(key, self.one(f"SELECT {key} FROM cache"))

    @contextlib.contextmanager
    def read(self) -> Iterator[sqlite3.Connection]:
        """Yield the connection in a transaction that only reads, for statements that must agree with each other.

        Raises the errors of :meth:`understood`.
        """
        try:
            yield from self._transaction("BEGIN")
        except ForeignValue as error:
            raise CatalogError(f"catalog {self.path}: {error}; {self._mend()}") from error
        except _ODD as error:
            raise self.foreign(error) or error from error

    @contextlib.contextmanager
    def write(self, *, patience: float = PATIENCE) -> Iterator[sqlite3.Connection]:
        """Yield the connection in a transaction that holds the cache's lock from its begin. It is rolled back when the
        body raises.

        Waits up to ``patience`` seconds for other processes, then raises :class:`CatalogError` that names one of them.
        """
        try:
            # IMMEDIATE, because a reader that upgrades itself to a writer can fail at once with
            # BUSY instead of waiting.
            yield from self._transaction("BEGIN IMMEDIATE", patience)
        except ForeignValue as error:
            raise CatalogError(f"catalog {self.path}: {error}; {self._mend()}") from error
        except _ODD as error:
            raise self.foreign(error) or error from error

    @contextlib.contextmanager
    def understood(self) -> Iterator[None]:
        """Replace errors of the body that come from a value which cachetool never writes.

        For code that uses rows outside of a transaction. Raises :class:`CatalogError` that names the table, the column
        and the value.
        """
        try:
            yield
        except ForeignValue as error:
            raise CatalogError(f"catalog {self.path}: {error}; {self._mend()}") from error
        except _ODD as error:
            raise self.foreign(error) or error from error

    def foreign(self, error: BaseException) -> CatalogError | None:
        """Return the error to raise instead of ``error`` if the catalog holds a value that cachetool never writes, else
        None."""
        # The rows are searched only after an error, so a sound catalog costs nothing (a search of
        # 20,000 shards takes a second). Inside a part of a transaction no search is made, because
        # the code around the whole transaction asks again.
        if isinstance(error, CacheToolError) or not isinstance(error, _ODD) or self._inside or self._outer is not None:
            return None
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
        """Run all writes of this thread in the body as one transaction, so that they wait for the disk once.

        Each :meth:`write` in the body is a part, which is undone alone when it raises.
        """
        with self.write() as connection:
            self._outer, self._undone = connection, None
            try:
                yield
                if self._undone is not None:
                    # The caller must not believe that the parts were committed: SQLite rolled all
                    # of them back.
                    raise self._undone
            finally:
                self._outer = None

    def _transaction(self, begin: str, patience: float = PATIENCE) -> Iterator[sqlite3.Connection]:
        with self.lock(), contextlib.ExitStack() as stack:
            if self._outer is not None:
                yield from self._part(self._outer)
                return
            # A signal's handler may run between any two lines of this thread. Its error must not
            # roll back the transaction that it interrupted.
            if self._inside:
                raise CatalogError(
                    f"catalog {self.path} is in use by the code that a signal handler interrupted; use the cache after"
                    " the handler has returned"
                )
            connection: sqlite3.Connection | None = None
            self._inside = True
            try:
                connection = self._begin(begin, stack, patience)
                # Another process may have raised the page limit. SQLite keeps the limit in each
                # connection, so it is read at the begin of each writing transaction.
                if begin != "BEGIN":
                    self._limit_pages(connection)
                yield connection
                connection.execute("COMMIT")
            except _FAILURES as error:
                self._rollback(connection)
                raise self._error(error) from error
            # Also for the exception of a signal's handler, which may come between any two lines. A
            # transaction left open would keep all other processes out.
            except BaseException:
                self._rollback(connection)
                raise
            finally:
                self._inside = False

    def _begin(self, begin: str | None, stack: contextlib.ExitStack, patience: float = PATIENCE) -> PatientConnection:
        """Return the connection of this process once it has its turn. The turn lasts as long as ``stack``; a
        transaction is begun unless ``begin`` is None."""
        while True:
            connection = self._open(patience=patience)
            shared = begin != "BEGIN IMMEDIATE"
            sign = stack.enter_context(self._among_processes.hold(shared=shared, patience=patience))
            # The writer signs the lock file only before its first change, so a command that only
            # looks writes nothing to the disk.
            connection.before_change = None if shared else sign
            if begin is not None:
                connection.execute(begin)
            if self._is_there():
                return connection
            # Another process rebuilt the catalog after this process opened it, so this connection
            # leads to a deleted file.
            self._rollback(connection)
            self.close()
            stack.close()

    def _part(self, connection: sqlite3.Connection) -> Iterator[sqlite3.Connection]:
        # Once SQLite has rolled back the outer transaction, the next part would silently begin a
        # transaction of its own.
        if self._undone is not None:
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
            # No transaction is left: SQLite rolled back all parts, as it does for a full disk.
            # `together` raises this error at its end.
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
        # Safe to ignore: a signal's handler closed the connection, which also rolls back.
        with contextlib.suppress(sqlite3.ProgrammingError):
            # A full disk makes SQLite roll back by itself, and a second ROLLBACK would be an error.
            if connection is not None and connection.in_transaction:
                connection.execute("ROLLBACK")

    def _open(self, *, settings: Mapping[str, int] | None = None, patience: float = PATIENCE) -> PatientConnection:
        """Return the connection of this process. ``settings`` are the first values of a new catalog."""
        if self._connection is not None and self._pid == os.getpid():
            return self._connection
        if self._connection is not None:
            # Inherited through fork. Using or closing it in the child would break the parent's
            # locks, and the garbage collector would close it too, so it is kept for ever.
            self._inherited.append(self._connection)
        if settings is None and not self.path.exists():
            if not self.path.parent.exists():
                if self.make_again is not None:
                    self.make_again()
                    return self._open()
                raise CatalogError(
                    f"the cache folder {self.path.parent} does not exist any more; pull again to fill a new one"
                )
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
        """Raise :class:`CatalogError` for a catalog, journal or lock file that is a link, is not a plain file, or has a
        second name."""
        # SQLite follows a link at the catalog, so its writes would land in a file outside of the
        # cache. For a file with two names (`cp -al`) SQLite locks the one file but writes a journal
        # for each name, and playing one back undoes the other cache's writes.
        for path in (self.path.with_name(f"{self.path.name}{part}") for part in ("", "-journal", "-lock")):
            try:
                status = path.lstat()
            except OSError:
                continue
            if stat.S_ISLNK(status.st_mode):
                raise CatalogError(f"catalog {path} is a link, which is not followed; remove it, then {self._mend()}")
            # SQLite would wait for ever for the other end of a pipe.
            if not stat.S_ISREG(status.st_mode):
                what = "a folder" if stat.S_ISDIR(status.st_mode) else "not a plain file"
                raise CatalogError(f"catalog {path} is {what}; remove it, then {self._mend()}")
            if status.st_nlink > 1:
                command = 'cp -p "$f" "$f.own" && mv "$f.own" "$f"'
                raise CatalogError(
                    f"catalog {path} is shared with a copy of the cache made by hard links (cp -al, rsync --link-dest);"
                    " end the programs that use either cache, then separate the two with:"
                    f" cd {shlex.quote(str(path.parent))} && for f in {self.path.name}*; do {command}; done"
                )

    def _prepare(self, connection: sqlite3.Connection, settings: Mapping[str, int] | None, patience: float) -> None:
        connection.row_factory = Row
        with self._among_processes.hold(shared=True, patience=patience):
            # With PERSIST and FULL none of 10 power cuts lost an acknowledged transaction, with
            # DELETE and FULL all 10 did. PERSIST was also the fastest (0.54 against 0.67 ms).
            connection.execute("PRAGMA journal_mode = PERSIST")
            connection.execute("PRAGMA synchronous = FULL")
            connection.execute("PRAGMA temp_store = MEMORY")
            connection.execute("PRAGMA foreign_keys = ON")
            version = connection.execute("PRAGMA user_version").fetchone()[0]
        if not version and settings is None:
            raise CatalogError(f"catalog {self.path} is empty, although the cache is not new; {self._mend()}")
        if not version:
            with self._among_processes.hold(shared=False, patience=patience):
                create(connection, settings or {})
        with self._among_processes.hold(shared=True, patience=patience):
            if (other := self._difference(connection)) is not None:
                raise CatalogError(f"catalog {self.path} {other}; {self._mend()}")
            self._limit_pages(connection)

    def _difference(self, connection: Connection) -> str | None:
        """Return how the file differs from a catalog that cachetool makes, or None for no difference.

        Raises :class:`CatalogError` for a catalog of another version of cachetool.
        """
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
        """Return a number of the table ``cache``, checked."""
        if row is None or not isinstance(row[0], int) or row[0] < 0:
            had = "no row" if row is None else f"{key} {shown(row[0])}"
            raise CatalogError(
                f"catalog {self.path}: its table 'cache' has {had}, which cachetool never writes; {self._mend()}"
            )
        return row[0]

    def _mend(self) -> str:
        """Return the command that repairs a file that is no catalog."""
        return f"run: cachetool verify --repair{cache_option(self.path.parent)}"

    def _error(self, error: sqlite3.Error | UnicodeDecodeError) -> CatalogError | CapacityError:
        return failure(self.path, error, mend=self._mend())


def _identity(path: Path) -> tuple[int, int]:
    status = path.stat()
    return status.st_dev, status.st_ino


def bump(connection: sqlite3.Connection) -> int:
    """Raise the catalog's version inside a transaction, and return the new version."""
    # The stamp is random, because a catalog that is made again may reach the same version. A loader
    # recognises known shards by both numbers together.
    row = connection.execute(
        "UPDATE cache SET version = version + 1, stamp = random() & ? RETURNING version", (2**62 - 1,)
    ).fetchone()
    return int(row[0])


def next_seq(connection: sqlite3.Connection) -> int:
    """Return the next number in the order of commits."""
    row = connection.execute(
        "UPDATE cache SET next_seq = next_seq + 1, moves = moves + 1 RETURNING next_seq - 1"
    ).fetchone()
    return int(row[0])


def event(
    connection: sqlite3.Connection, at: float, kind: str, subject: str, text: str, *, dataset: str | None = None
) -> None:
    """Append a row to the event log, which keeps the newest 1,000. For a ``subject`` that is a shard the ``dataset`` is
    looked up."""
    cursor = connection.execute(
        "INSERT INTO events (at, kind, subject, text, dataset)"
        " VALUES (:at, :kind, :subject, :text,"
        " coalesce(:dataset, (SELECT dataset FROM shards WHERE id = :subject), ''))",
        {"at": at, "kind": kind, "subject": subject, "text": text[:500], "dataset": dataset},
    )
    connection.execute("DELETE FROM events WHERE id <= ?", ((cursor.lastrowid or 0) - MAX_EVENTS,))
