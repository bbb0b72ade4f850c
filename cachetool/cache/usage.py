"""The bytes that are charged against the cap at this moment.

``used = shards in every state + listings + folders and small files + catalog allowance``. A shard in the state
``staging`` is charged its complete reservation, and one in the state ``trash`` until its files are deleted.
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
    """The bytes that count against the cap, by kind."""

    ready: int
    """Shards that new snapshots contain."""
    retiring: int
    """Shards that are deleted when their readers end."""
    trash: int
    """Shards whose files are being deleted."""
    reserved: int
    """Upper bounds of shards being written."""
    listings: int
    """Listings and records of sources."""
    catalog: int
    """The catalog and its journal, at the size to which they may grow."""
    history: int
    """The history, and a new one beside it."""
    files: int
    """Folders, lock files of holders and other small files."""

    @property
    def shards(self) -> int:
        """Bytes of shards on the disk."""
        return self.ready + self.retiring + self.trash

    @property
    def overhead(self) -> int:
        """Bytes that count for a cache without shards and sources."""
        return self.catalog + self.history + self.files

    @property
    def total(self) -> int:
        """The sum of all kinds, which never exceeds the cap."""
        return self.shards + self.reserved + self.listings + self.overhead

    def rows(self) -> dict[str, int]:
        """Return the bytes by the name of each kind."""
        return asdict(self)


WORDS = {
    "ready": "shards",
    "retiring": "evicted shards that are still read",
    "trash": "shards being deleted",
    "reserved": "reserved for shards being written",
    "listings": "listings and records of sources",
    "catalog": "catalog, at its largest size",
    "history": "history, and space to replace it",
    "files": "folders, lock files of holders, small files",
}
"""The rows of :meth:`Usage.rows` in words."""


def least_overhead(layout: Layout) -> int:
    """Return the bytes charged for a new cache before any shard and source."""
    return layout.fixed_bytes() + layout.history_bytes + allowance(FIRST_PAGES, layout.disk_block)


def measure(connection: Connection, layout: Layout) -> Usage:
    """Return the present usage by the catalog and the folders. It is exact inside a transaction."""
    by_state = dict(connection.execute("SELECT state, sum(bytes) FROM shards GROUP BY state").fetchall())
    listings = connection.execute("SELECT coalesce(sum(bytes), 0) FROM sources").fetchone()[0]
    pages = connection.execute("SELECT pages FROM cache").fetchone()[0]
    return Usage(
        ready=int(by_state.get("ready", 0)),
        retiring=int(by_state.get("retiring", 0)),
        trash=int(by_state.get("trash", 0)),
        reserved=int(by_state.get("staging", 0)),
        listings=int(listings),
        # By the limit and not by the file's size, because a journal of the same size appears during
        # a transaction, and neither may pass the cap.
        catalog=allowance(int(pages), layout.disk_block),
        history=layout.history_bytes,
        files=layout.fixed_bytes(),
    )


def is_copied(catalog: Catalog, layout: Layout) -> bool:
    """Return True if the charges were measured on a file system with another block size."""
    # The same files take other bytes on other blocks, so the charges of a copied cache may be too
    # low.
    return catalog.number("disk_block") != layout.disk_block


def charge_anew(connection: Connection, layout: Layout) -> None:
    """Charge every committed shard and listing the bytes that it takes on the cache's present disk."""
    for row in connection.execute("SELECT id FROM shards WHERE state IN ('ready', 'retiring')").fetchall():
        # A missing shard keeps its old charge; `verify` reports it.
        with contextlib.suppress(OSError):
            nbytes = tree_bytes(layout.shards / row["id"])
            connection.execute("UPDATE shards SET bytes = ? WHERE id = ?", (nbytes, row["id"]))
    sources = "SELECT s.id, d.schema FROM sources s JOIN datasets d ON d.name = s.dataset"
    for row in connection.execute(sources).fetchall():
        with contextlib.suppress(OSError):
            nbytes = tree_bytes(layout.listings / row["id"])
            nbytes += record_bound(json.loads(row["schema"]), layout.disk_block)
            connection.execute("UPDATE sources SET bytes = ? WHERE id = ?", (nbytes, row["id"]))
    connection.execute("UPDATE cache SET disk_block = ?", (layout.disk_block,))
