"""The tables of the catalog, as numbered steps: a catalog of any earlier version is brought up to date by those it
lacks. A step that was ever released is not changed any more; the number of steps is the version of the schema.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cachetool.cache.catalog import Connection

__all__ = ["MIGRATIONS", "SCHEMA_VERSION", "migrate"]

MIGRATIONS = (
    """
    CREATE TABLE meta (key TEXT PRIMARY KEY, value INTEGER NOT NULL) WITHOUT ROWID;
    CREATE TABLE holders (id TEXT PRIMARY KEY, pid INTEGER, host TEXT, what TEXT, started REAL) WITHOUT ROWID;
    CREATE TABLE datasets (name TEXT PRIMARY KEY, schema TEXT NOT NULL, created REAL) WITHOUT ROWID;
    CREATE TABLE sources (
        id TEXT PRIMARY KEY, url TEXT, options TEXT, identity TEXT, dataset TEXT, units INTEGER, samples INTEGER,
        seed INTEGER, turn INTEGER, frontier INTEGER, skipped INTEGER, bytes INTEGER, created REAL
    ) WITHOUT ROWID;
    CREATE TABLE jobs (
        id TEXT PRIMARY KEY, holder TEXT, source TEXT, wanted INTEGER, committed INTEGER, skipped INTEGER, created REAL,
        renew REAL, policy TEXT, min_epochs INTEGER, keep_own INTEGER, hungry INTEGER
    ) WITHOUT ROWID;
    CREATE TABLE claims (
        id INTEGER PRIMARY KEY, source TEXT, turn INTEGER, start INTEGER, stop INTEGER, holder TEXT, job TEXT
    );
    CREATE TABLE shards (
        id TEXT PRIMARY KEY, seq INTEGER, dataset TEXT, format TEXT, state TEXT, samples INTEGER, payload INTEGER,
        bytes INTEGER, since INTEGER, until INTEGER, holder TEXT, job TEXT, created REAL, epochs INTEGER, used REAL,
        source TEXT, turn INTEGER, draws TEXT, content TEXT, digest TEXT, sole INTEGER
    ) WITHOUT ROWID;
    CREATE INDEX shards_by_state ON shards (state, seq);
    CREATE TABLE leases (
        id INTEGER PRIMARY KEY, holder TEXT, run TEXT, epoch INTEGER, version INTEGER, dataset TEXT, taken REAL
    );
    CREATE TABLE events (id INTEGER PRIMARY KEY AUTOINCREMENT, at REAL, kind TEXT, subject TEXT, text TEXT);
    """,
    # Integrity: which conversions came from one shard, what was evicted why, bytes fetched and served.
    """
    ALTER TABLE shards ADD COLUMN lineage TEXT;
    ALTER TABLE sources ADD COLUMN fetched INTEGER NOT NULL DEFAULT 0;
    CREATE TABLE evictions (
        reason TEXT, policy TEXT, shards INTEGER, samples INTEGER, bytes INTEGER, PRIMARY KEY (reason, policy)
    ) WITHOUT ROWID;
    CREATE INDEX claims_by_source ON claims (source, turn);
    INSERT INTO meta VALUES ('served', 0);
    """,
    # Background pulls: who pulls a source, and what became of it.
    """
    CREATE TABLE pullers (
        source TEXT PRIMARY KEY, holder TEXT, pid INTEGER, url TEXT, dataset TEXT, phase TEXT, listed INTEGER,
        error TEXT, started REAL, updated REAL
    ) WITHOUT ROWID;
    """,
    # Sources that grow: the places between the segments of the present pass; whether all of them are there.
    """
    ALTER TABLE sources ADD COLUMN cuts TEXT NOT NULL DEFAULT '[]';
    ALTER TABLE sources ADD COLUMN sequential INTEGER NOT NULL DEFAULT 0;
    ALTER TABLE sources ADD COLUMN whole INTEGER NOT NULL DEFAULT 1;
    """,
    # Whose evictions and errors: of which pull, of which dataset (of old ones it is known when there is but one).
    """
    ALTER TABLE jobs ADD COLUMN evicted INTEGER NOT NULL DEFAULT 0;
    ALTER TABLE events ADD COLUMN dataset TEXT;
    ALTER TABLE evictions RENAME TO evictions_before;
    CREATE TABLE evictions (
        dataset TEXT, reason TEXT, policy TEXT, shards INTEGER, samples INTEGER, bytes INTEGER,
        PRIMARY KEY (dataset, reason, policy)
    ) WITHOUT ROWID;
    INSERT INTO evictions SELECT (SELECT CASE count(*) WHEN 1 THEN min(name) ELSE '' END FROM datasets),
        reason, policy, shards, samples, bytes FROM evictions_before;
    DROP TABLE evictions_before;
    """,
    "ALTER TABLE sources ADD COLUMN past TEXT NOT NULL DEFAULT '[]'",  # what positions meant in earlier passes
    # Draws whose samples were in a shard that was damaged: how many, until they are pulled again; NULL for all others.
    """
    ALTER TABLE claims ADD COLUMN lost INTEGER;
    """,
    # What the cache was like over time, and the newest epochs (cachetool.cache.history).
    """
    CREATE TABLE history (
        id INTEGER PRIMARY KEY, at REAL, used INTEGER, max_size INTEGER, shards INTEGER, samples INTEGER,
        fetched INTEGER, served INTEGER, evicted TEXT
    );
    CREATE TABLE epochs (
        id INTEGER PRIMARY KEY, ended REAL, dataset TEXT, run TEXT, epoch INTEGER, shards INTEGER, samples INTEGER,
        bytes INTEGER, seconds REAL, batches INTEGER, waits INTEGER, waited REAL
    );
    """,
    # The pull that got nothing for lost draws, and tries them no more.
    "ALTER TABLE claims ADD COLUMN tried TEXT",
    # Several nodes, in the catalog of the whole: whose caches these are, and which of their shards hold which draws; of
    # a claim, which node is on it and by which word it was asked for.
    """
    CREATE TABLE nodes (name TEXT PRIMARY KEY, cache INTEGER, job TEXT) WITHOUT ROWID;
    CREATE TABLE placed (
        shard TEXT PRIMARY KEY, node TEXT, source TEXT, turn INTEGER, draws TEXT, samples INTEGER, job TEXT,
        brought INTEGER
    ) WITHOUT ROWID;
    CREATE INDEX placed_by_node ON placed (node);
    ALTER TABLE claims ADD COLUMN node TEXT;
    ALTER TABLE claims ADD COLUMN token TEXT
    """,
    # A node may take part in pulls of several sources at once: in which, and by which word it is known there.
    """
    ALTER TABLE nodes DROP COLUMN job;
    CREATE TABLE members (
        source TEXT, node TEXT, job TEXT, word TEXT, PRIMARY KEY (source, node)
    ) WITHOUT ROWID
    """,
    "ALTER TABLE claims ADD COLUMN reopened INTEGER NOT NULL DEFAULT 0",
)

SCHEMA_VERSION = len(MIGRATIONS)


def migrate(connection: Connection, meta: Mapping[str, int]) -> None:
    """Bring the tables to the newest schema, all or nothing: another process may be doing the same."""
    connection.execute("BEGIN IMMEDIATE")
    try:
        version = connection.execute("PRAGMA user_version").fetchone()[0]
        for script in MIGRATIONS[version:]:
            for statement in script.split(";"):
                connection.execute(statement)
        if not version:
            connection.executemany("INSERT INTO meta VALUES (?, ?)", meta.items())
        connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise
