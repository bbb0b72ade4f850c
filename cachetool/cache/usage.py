"""What is charged against the cap, at this instant.

``used = shards in every state + listings + folders and small files + catalog allowance``. A shard in state ``staging``
is charged its whole reservation, one in state ``trash`` until its files are gone.
"""

from __future__ import annotations

import contextlib
import json
from dataclasses import dataclass

from cachetool.cache.catalog import Catalog, Connection, allowance
from cachetool.cache.layout import Layout
from cachetool.cache.records import record_bound
from cachetool.proc.folders import tree_bytes

__all__ = ["Usage", "charge_anew", "is_copied", "measure"]


@dataclass(frozen=True, slots=True)
class Usage:
    """Bytes charged by kind."""

    shards: int
    """Ready and retiring shards, and trash that is not yet unlinked."""
    reserved: int
    """Upper bounds of shards being written."""
    listings: int
    """Listings of sources."""
    overhead: int
    """Folders, small files, and what the catalog may grow to."""

    @property
    def total(self) -> int:
        """All of it: what must stay at or below the cap."""
        return self.shards + self.reserved + self.listings + self.overhead


def measure(connection: Connection, layout: Layout) -> Usage:
    """Usage as the catalog and the folders have it now; exact inside a transaction."""
    row = connection.execute(
        "SELECT coalesce(sum(CASE WHEN state = 'staging' THEN 0 ELSE bytes END), 0) AS held,"
        " coalesce(sum(CASE WHEN state = 'staging' THEN bytes ELSE 0 END), 0) AS reserved FROM shards"
    ).fetchone()
    listings = connection.execute("SELECT coalesce(sum(bytes), 0) FROM sources").fetchone()[0]
    pages = connection.execute("SELECT value FROM meta WHERE key = 'pages'").fetchone()[0]
    return Usage(
        shards=int(row["held"]),
        reserved=int(row["reserved"]),
        listings=int(listings),
        overhead=layout.fixed_bytes() + allowance(int(pages), layout.disk_block),
    )


def is_copied(catalog: Catalog, layout: Layout) -> bool:
    """Whether what is charged was measured on a file system with other blocks: the same files take other room here."""
    row = catalog.one("SELECT value FROM meta WHERE key = 'disk_block'")
    return row is None or int(row["value"]) != layout.disk_block


def charge_anew(connection: Connection, layout: Layout) -> None:
    """Charge every committed shard and listing what it takes on the disk where the cache lies now."""
    for row in connection.execute("SELECT id FROM shards WHERE state IN ('ready', 'retiring')").fetchall():
        with contextlib.suppress(OSError):  # `verify` tells of a shard that is missing
            nbytes = tree_bytes(layout.shards / row["id"])
            connection.execute("UPDATE shards SET bytes = ? WHERE id = ?", (nbytes, row["id"]))
    sources = "SELECT s.id, d.schema FROM sources s JOIN datasets d ON d.name = s.dataset"
    for row in connection.execute(sources).fetchall():
        with contextlib.suppress(OSError):
            nbytes = tree_bytes(layout.listings / row["id"])
            nbytes += record_bound(json.loads(row["schema"]), layout.disk_block)
            connection.execute("UPDATE sources SET bytes = ? WHERE id = ?", (nbytes, row["id"]))
    connection.execute("INSERT OR REPLACE INTO meta VALUES ('disk_block', ?)", (layout.disk_block,))
