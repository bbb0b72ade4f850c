"""What is charged against the cap, at this instant.

``used = shards in every state + listings + folders and small files + catalog allowance``. A shard in state ``staging``
is charged its whole reservation, one in state ``trash`` until its files are gone.
"""

from __future__ import annotations

from dataclasses import dataclass

from cachetool.cache.catalog import Connection, allowance
from cachetool.cache.layout import Layout

__all__ = ["Usage", "measure"]


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
