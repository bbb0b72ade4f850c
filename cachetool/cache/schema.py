"""The tables of the catalog.

A catalog with another schema is refused, never changed. Before the first release this file is edited, and caches that
were made before must be pulled again.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cachetool.cache.catalog import Connection

__all__ = ["APPLICATION_ID", "SCHEMA_VERSION", "create", "difference"]

# Stored in the header of the SQLite file; it tells a catalog from any other SQLite file, and from
# catalogs of pre-releases, which have 0.
APPLICATION_ID = 1667326824
SCHEMA_VERSION = 1

_TABLES = (
    """
    CREATE TABLE cache (
        one INTEGER NOT NULL PRIMARY KEY CHECK (one = 1), identity INTEGER NOT NULL, stamp INTEGER NOT NULL,
        version INTEGER NOT NULL, next_seq INTEGER NOT NULL, moves INTEGER NOT NULL, pages INTEGER NOT NULL,
        max_size INTEGER NOT NULL, min_free INTEGER NOT NULL, seen INTEGER NOT NULL, served INTEGER NOT NULL,
        disk_block INTEGER NOT NULL
    ) STRICT
    """,
    """
    CREATE TABLE holders (
        id TEXT NOT NULL PRIMARY KEY, pid INTEGER NOT NULL, host TEXT NOT NULL, what TEXT NOT NULL,
        started REAL NOT NULL
    ) STRICT, WITHOUT ROWID
    """,
    """
    CREATE TABLE datasets (
        name TEXT NOT NULL PRIMARY KEY, schema TEXT NOT NULL, served INTEGER NOT NULL DEFAULT 0, created REAL NOT NULL,
        share REAL CHECK (share BETWEEN 0 AND 1)
    ) STRICT, WITHOUT ROWID
    """,
    """
    CREATE TABLE sources (
        id TEXT NOT NULL PRIMARY KEY, dataset TEXT NOT NULL REFERENCES datasets, url TEXT NOT NULL,
        options TEXT NOT NULL, identity TEXT NOT NULL, units INTEGER NOT NULL, samples INTEGER NOT NULL,
        bytes INTEGER NOT NULL, seed INTEGER NOT NULL, sequential INTEGER NOT NULL CHECK (sequential IN (0, 1)),
        complete INTEGER NOT NULL CHECK (complete IN (0, 1)), cut INTEGER NOT NULL CHECK (cut > 0),
        pass_number INTEGER NOT NULL, began_at_moves INTEGER, segments TEXT NOT NULL, past TEXT NOT NULL,
        skipped INTEGER NOT NULL, fetched INTEGER NOT NULL DEFAULT 0, served INTEGER NOT NULL DEFAULT 0,
        created REAL NOT NULL
    ) STRICT, WITHOUT ROWID
    """,
    """
    CREATE TABLE parts (
        source TEXT NOT NULL REFERENCES sources ON DELETE CASCADE, part INTEGER NOT NULL, frontier INTEGER NOT NULL,
        size INTEGER NOT NULL, PRIMARY KEY (source, part)
    ) STRICT, WITHOUT ROWID
    """,
    """
    CREATE TABLE jobs (
        id TEXT NOT NULL PRIMARY KEY, source TEXT NOT NULL REFERENCES sources, holder TEXT NOT NULL, wanted INTEGER,
        upto INTEGER, committed INTEGER NOT NULL, skipped INTEGER NOT NULL,
        evicted INTEGER NOT NULL DEFAULT 0, bytes_wanted INTEGER NOT NULL, renew REAL NOT NULL, policy TEXT NOT NULL,
        min_epochs INTEGER NOT NULL, keep_own INTEGER NOT NULL CHECK (keep_own IN (0, 1)), created REAL NOT NULL
    ) STRICT, WITHOUT ROWID
    """,
    # AUTOINCREMENT, so that no id is ever used again: a worker whose part was released, and came back,
    # must not commit by the claim of another worker.
    """
    CREATE TABLE claims (
        id INTEGER NOT NULL PRIMARY KEY AUTOINCREMENT, source TEXT NOT NULL REFERENCES sources ON DELETE CASCADE,
        part INTEGER NOT NULL DEFAULT 0, pass_number INTEGER NOT NULL, start INTEGER NOT NULL,
        stop INTEGER NOT NULL CHECK (start < stop), holder TEXT, job TEXT,
        reopened INTEGER NOT NULL DEFAULT 0 CHECK (reopened IN (0, 1)), tried TEXT,
        CHECK ((holder IS NULL) = (job IS NULL))
    ) STRICT
    """,
    "CREATE INDEX claims_by_source ON claims (source, pass_number)",
    """
    CREATE TABLE shards (
        id TEXT NOT NULL PRIMARY KEY, seq REAL, dataset TEXT NOT NULL, format TEXT NOT NULL,
        state TEXT NOT NULL CHECK (state IN ('staging', 'ready', 'retiring', 'trash')), samples INTEGER,
        payload INTEGER, bytes INTEGER NOT NULL, since INTEGER, until INTEGER, holder TEXT, job TEXT, created REAL,
        epochs INTEGER NOT NULL DEFAULT 0, used REAL, source TEXT, part INTEGER NOT NULL DEFAULT 0, pass_number INTEGER,
        draws TEXT, content TEXT, digest TEXT, lineage TEXT,
        CHECK (state IN ('staging', 'trash') OR (seq IS NOT NULL AND samples IS NOT NULL AND payload IS NOT NULL
            AND since IS NOT NULL AND created IS NOT NULL AND draws IS NOT NULL AND content IS NOT NULL
            AND digest IS NOT NULL))
    ) STRICT, WITHOUT ROWID
    """,
    "CREATE INDEX shards_by_state ON shards (state, seq)",
    """
    CREATE TABLE leases (
        id INTEGER NOT NULL PRIMARY KEY, holder TEXT NOT NULL, run TEXT, epoch INTEGER, dataset TEXT NOT NULL,
        version INTEGER NOT NULL, taken REAL NOT NULL
    ) STRICT
    """,
    """
    CREATE TABLE background (
        source TEXT NOT NULL PRIMARY KEY, holder TEXT NOT NULL, pid INTEGER NOT NULL, url TEXT NOT NULL,
        dataset TEXT NOT NULL, phase TEXT NOT NULL, listed INTEGER NOT NULL, error TEXT, started REAL NOT NULL,
        updated REAL NOT NULL
    ) STRICT, WITHOUT ROWID
    """,
    """
    CREATE TABLE events (
        id INTEGER NOT NULL PRIMARY KEY AUTOINCREMENT, at REAL NOT NULL, kind TEXT NOT NULL, dataset TEXT NOT NULL,
        subject TEXT NOT NULL, text TEXT NOT NULL
    ) STRICT
    """,
    """
    CREATE TABLE evictions (
        dataset TEXT NOT NULL, reason TEXT NOT NULL, policy TEXT NOT NULL, shards INTEGER NOT NULL,
        samples INTEGER NOT NULL, bytes INTEGER NOT NULL, PRIMARY KEY (dataset, reason, policy)
    ) STRICT, WITHOUT ROWID
    """,
)
_STATEMENTS = tuple(statement.strip() for statement in _TABLES)
_OURS = {
    **{(words[1].lower(), words[2]): sql for sql in _STATEMENTS for words in (sql.split(maxsplit=3),)},
    ("table", "sqlite_sequence"): "CREATE TABLE sqlite_sequence(name,seq)",
}
"""The text that SQLite keeps of these statements, by kind and name."""


def create(connection: Connection, settings: Mapping[str, int]) -> None:
    """Make the tables, all or nothing, unless another process made them first.

    ``settings`` are the columns of the table ``cache`` that the caller decides.
    """
    # Two processes may make the same cache. The second waits here, and then finds the version set.
    connection.execute("BEGIN IMMEDIATE")
    try:
        if not connection.execute("PRAGMA user_version").fetchone()[0]:
            for statement in _STATEMENTS:
                connection.execute(statement)
            row = {
                "one": 1,
                "identity": secrets.randbits(62),
                "stamp": secrets.randbits(62),
                "version": 1,
                "next_seq": 1,
                "moves": 0,
                "min_free": 0,
                "seen": 0,
                "served": 0,
                "disk_block": 0,
                **settings,
            }
            names, marks = ", ".join(row), ", ".join(f":{name}" for name in row)
            connection.execute(f"INSERT INTO cache ({names}) VALUES ({marks})", row)
            connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
            # Set last: a version other than 0 tells other processes that all tables exist.
            connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
        connection.execute("COMMIT")
    except BaseException:
        # SQLite rolls back by itself when the disk is full, and a second ROLLBACK would be an
        # error.
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise


def difference(connection: Connection) -> str | None:
    """Return how the tables differ from those that cachetool makes, or None when they are the same."""
    # LIMIT 100, because a foreign file may have any number of tables; cachetool makes fewer than
    # 20.
    found = {
        (row[0], row[1]): row[2]
        for row in connection.execute("SELECT type, name, sql FROM sqlite_master WHERE sql IS NOT NULL LIMIT 100")
    }
    # The text of each statement is compared, because a view in place of a table may have rows
    # without end, and a table without checks may hold any value. Views come first, so that the
    # message names them.
    for (kind, name), sql in sorted(found.items(), reverse=True):
        if _OURS.get((kind, name)) != sql:
            return f"has a {kind} {ascii(name)[:80]}, which cachetool never makes"
    lacking = sorted(name for _, name in _OURS.keys() - found.keys())
    return f"lacks {', '.join(lacking)}" if lacking else None
