"""The cap and the floor of free disk: the least cap that works, and changing both settings of an existing cache.

The cap changes only while no other process uses the cache.
"""

from __future__ import annotations

from pathlib import Path

from cachetool.cache.admission import folder_slack, minimum
from cachetool.cache.catalog import Catalog, Connection
from cachetool.cache.commit import folder_bound
from cachetool.cache.holders import dead_holders, is_ours
from cachetool.cache.layout import Layout, cache_option
from cachetool.cache.listings import listing_bound
from cachetool.cache.records import record_bound
from cachetool.cache.usage import least_overhead, measure
from cachetool.core.errors import CapTooSmall, UsageError
from cachetool.core.schema import Schema
from cachetool.core.units import format_size

__all__ = ["change", "least_cap", "refuse"]


def least_cap(catalog: Catalog | None, layout: Layout, bound: int, schema: Schema, *, listing: Path | None) -> int:
    """Return the smallest cap in bytes that can hold one shard beside the cache's own files.

    ``bound`` is the size of the shard in bytes. ``listing`` is the folder of a new source's listing, or None when the
    source is known. ``catalog`` is None while the cache does not exist.
    """
    block = layout.disk_block
    need = bound + folder_bound(schema, bound, block)
    if listing is not None:
        need += listing_bound(listing, block) + record_bound(schema.to_json(), block) + folder_slack(layout)
    if catalog is None:
        return least_overhead(layout) + need + folder_slack(layout)
    with catalog.read() as connection:
        return minimum(connection, layout, need)


def refuse(connection: Connection, layout: Layout, size: int) -> None:
    """Raise :class:`UsageError` when another process uses the present cap, and :class:`CapTooSmall` when more than
    ``size`` bytes are used.

    Call this function inside a writing transaction.
    """
    present = connection.execute("SELECT max_size FROM cache").fetchone()[0]
    if size == present:
        return
    # Two processes with different caps would evict against each other. A dead process is no
    # obstacle, so the kernel's locks decide here and not the rows.
    dead = dead_holders(connection, layout.holders)
    for row in connection.execute("SELECT id, pid, what FROM holders").fetchall():
        if row["id"] not in dead and not is_ours(row["id"]):
            raise UsageError(
                f"the cap of {layout.root} is {format_size(present)} and cannot become {format_size(size)} while"
                f" pid {row['pid']} ({row['what']}) uses the cache; leave --max-size out"
            )
    usage = measure(connection, layout)
    used, least = usage.total, usage.overhead + usage.listings
    if least > size:
        raise CapTooSmall(
            f"the cap of {layout.root} cannot become {format_size(size)}: the cache needs {format_size(least)} even"
            f" without shards; the minimum is --max-size {least}"
        )
    if used > size:
        raise CapTooSmall(
            f"the cap of {layout.root} cannot become {format_size(size)} because {format_size(used)} are used; free"
            f" space first with: cachetool evict --max-size {size}{cache_option(layout.root)}"
        )


def change(connection: Connection, layout: Layout, wanted: dict[str, int]) -> None:
    """Write ``max_size`` and ``min_free`` into the catalog. Raises the errors of :func:`refuse`."""
    if "max_size" in wanted:
        refuse(connection, layout, wanted["max_size"])
    for key, value in wanted.items():
        connection.execute(f"UPDATE cache SET {key} = ?", (value,))
