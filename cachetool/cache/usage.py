"""What is charged against the cap, at this instant.

``used = shards in every state + listings + folders and small files + catalog allowance``. A shard in state ``staging``
is charged its whole reservation, one in state ``trash`` until its files are gone.
"""

from __future__ import annotations

import contextlib
import json
from dataclasses import asdict, dataclass

from cachetool.cache.catalog import FIRST_PAGES, Catalog, Connection, allowance
from cachetool.cache.layout import Layout
from cachetool.cache.records import record_bound
from cachetool.proc.folders import tree_bytes

__all__ = ["WORDS", "Usage", "charge_anew", "is_copied", "least_overhead", "measure"]


@dataclass(frozen=True, slots=True)
class Usage:
    """Bytes charged by kind."""

    ready: int
    """Shards that new snapshots have."""
    retiring: int
    """Shards that go when their readers end."""
    trash: int
    """Shards whose files are being deleted."""
    reserved: int
    """Upper bounds of shards being written."""
    listings: int
    """Listings and records of sources."""
    catalog: int
    """The catalog and its journal, as large as they may grow."""
    history: int
    """The history, and a new one beside it."""
    files: int
    """Folders, lock files of holders and other small files."""

    @property
    def shards(self) -> int:
        """Shards on the disk."""
        return self.ready + self.retiring + self.trash

    @property
    def overhead(self) -> int:
        """What is charged for a cache without shards and sources."""
        return self.catalog + self.history + self.files

    @property
    def total(self) -> int:
        """All of it: what must stay at or below the cap."""
        return self.shards + self.reserved + self.listings + self.overhead

    def rows(self) -> dict[str, int]:
        """The total, row by row."""
        return asdict(self)


WORDS = {
    "ready": "shards",
    "retiring": "shards that go when their readers end",
    "trash": "shards being deleted",
    "reserved": "reserved for shards being written",
    "listings": "listings and records of sources",
    "catalog": "catalog, as large as it may grow",
    "history": "history, and a new one beside it",
    "files": "folders, lock files of holders, small files",
}
"""The rows of :meth:`Usage.rows` in words."""


def least_overhead(layout: Layout) -> int:
    """What is charged for a new cache before any shard and source."""
    return layout.fixed_bytes() + layout.history_bytes + allowance(FIRST_PAGES, layout.disk_block)


def measure(connection: Connection, layout: Layout) -> Usage:
    """Usage as the catalog and the folders have it now; exact inside a transaction."""
    by_state = dict(connection.execute("SELECT state, sum(bytes) FROM shards GROUP BY state").fetchall())
    listings = connection.execute("SELECT coalesce(sum(bytes), 0) FROM sources").fetchone()[0]
    pages = connection.execute("SELECT pages FROM cache").fetchone()[0]
    return Usage(
        ready=int(by_state.get("ready", 0)),
        retiring=int(by_state.get("retiring", 0)),
        trash=int(by_state.get("trash", 0)),
        reserved=int(by_state.get("staging", 0)),
        listings=int(listings),
        catalog=allowance(int(pages), layout.disk_block),
        history=layout.history_bytes,
        files=layout.fixed_bytes(),
    )


def is_copied(catalog: Catalog, layout: Layout) -> bool:
    """Whether what is charged was measured on a file system with other blocks: the same files take other room here."""
    return catalog.number("disk_block") != layout.disk_block


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
    connection.execute("UPDATE cache SET disk_block = ?", (layout.disk_block,))
