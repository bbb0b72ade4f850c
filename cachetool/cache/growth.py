"""New sources and segments: a listing, or one more segment of it, is charged before it is copied into the cache.

One transaction puts a segment in force::

    a folder outside  -- charged, copied beside -->  transaction: check that the source did not change meanwhile
                                                       -> rename into place, units and segments in its row, record

If the process is killed before the transaction ends, the source stays as it was. The next growth removes a folder that
lies in the segment's place.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING

from cachetool.cache.admission import admit
from cachetool.cache.catalog import Connection, bump, event
from cachetool.cache.draws import SourceRow, add_source, source_row
from cachetool.cache.listings import append_segment, copy_aside, listing_bound, take_in
from cachetool.cache.policies import Room
from cachetool.cache.records import record_bound, write_source_record
from cachetool.core.errors import UsageError
from cachetool.core.names import Name

if TYPE_CHECKING:
    from cachetool.cache.root import CacheDir

__all__ = ["bring_in", "grow_source"]


def bring_in(cache: CacheDir, row: SourceRow, listing: Path, *, new: bool) -> None:
    """Take a source into the cache. See :meth:`CacheDir.add_source`."""
    catalog, layout = cache.catalog, cache.layout
    declared = catalog.one("SELECT * FROM datasets WHERE name = ?", (row.dataset,))
    record = record_bound(json.loads(declared["schema"]) if declared else [], layout.disk_block)
    exists = cache.source(row.id) is not None
    bound = listing_bound(listing, layout.disk_block) + record

    def insert(connection: Connection) -> None:
        # Another pull that declared the same dataset may have failed meanwhile and deleted it
        # again. The row of the source would then refer to no dataset.
        if declared:
            connection.execute("INSERT OR IGNORE INTO datasets VALUES (?, ?, ?, ?, ?)", tuple(declared))
        add_source(connection, row, bound, new=new)

    admit(catalog, layout, cache.holder, bound, insert, room=Room(wait=0))
    if new and exists and cache.listing(row.id).exists():
        # The listing is the same (`add_source` compared it), and workers of another process may be
        # reading it, so it is not replaced.
        return
    # Copied after the admission, so that the copy never exceeds the cap. Then the estimated charge
    # is replaced by the real bytes.
    real = take_in(layout, row.id, listing, cache.holder.id)
    with catalog.write() as connection:
        connection.execute("UPDATE sources SET bytes = ? WHERE id = ?", (real + record, row.id))
        # The records in the shards of this source may be outdated now. For a source in parts no
        # record names the parts yet. A rebuild of a lost catalog reads this record instead.
        if exists or row.cut > 1:
            write_source_record(connection, layout, row.id)


def grow_source(
    cache: CacheDir, row: SourceRow, segment: Path, name: str, *, units: int, identity: str, complete: bool
) -> SourceRow:
    """Append the listing in the folder ``segment`` to the listing of a source, which then has ``units`` units.

    Raises :class:`UsageError` when the source is no longer as ``row`` says, and :class:`CapBlocked` for lack of room.
    """
    catalog, layout, holder = cache.catalog, cache.layout, cache.holder
    more = listing_bound(segment, layout.disk_block)

    def charge(connection: Connection) -> None:
        connection.execute("UPDATE sources SET bytes = bytes + ? WHERE id = ?", (more, row.id))

    admit(catalog, layout, holder, more, charge, room=Room(wait=0))
    try:
        aside = copy_aside(layout, row.id, segment, holder.id)
        with catalog.write() as connection:
            grown = _grow(connection, row, units=units, identity=identity, complete=complete)
            schema = connection.execute("SELECT schema FROM datasets WHERE name = ?", (row.dataset,)).fetchone()
            # The rename happens inside the transaction, under the catalog's lock: a folder in this
            # place that no row knows was left by a killed process and can be removed.
            nbytes = append_segment(layout, row.id, aside, Name(name))
            nbytes += record_bound(json.loads(schema["schema"]), layout.disk_block)
            connection.execute("UPDATE sources SET bytes = ? WHERE id = ?", (nbytes, row.id))
            # The record must be newer than the records in all shards, which describe the source
            # before it grew.
            bump(connection)
            write_source_record(connection, layout, row.id)
        return grown
    except BaseException:
        # The charge is returned only if the units are still the old ones: when the transaction
        # above was committed before the error came, the row already has the real bytes.
        layout.remove(layout.listing_aside(row.id, holder.id))
        with catalog.write() as connection:
            connection.execute(
                "UPDATE sources SET bytes = bytes - ? WHERE id = ? AND units = ?", (more, row.id, row.units)
            )
        raise


def _grow(connection: Connection, source: SourceRow, *, units: int, identity: str, complete: bool) -> SourceRow:
    """Append units to a source that is still as in ``source``. The new units form a segment of its present pass.

    Raises :class:`UsageError` when another process changed the source first.
    """
    now = source_row(connection, source.id)
    if now is None or (now.units, now.identity) != (source.units, source.identity):
        raise UsageError(f"another process is listing {source.url} into this cache; try again later")
    # Old units keep their positions; the boundary makes the new ones a segment with an order of its
    # own.
    segments = [*now.segments, now.units] if 0 < now.units < units else now.segments
    connection.execute(
        "UPDATE sources SET units = ?, samples = ?, identity = ?, complete = ?, segments = ? WHERE id = ?",
        (units, units, identity, complete, json.dumps(segments), source.id),
    )
    connection.execute(
        # The same formula as `part_size` of cachetool.core.permutation: how many numbers below
        # `units` are `part` modulo `cut`.
        "UPDATE parts SET size = (:units - part + :cut - 1) / :cut WHERE source = :source",
        {"units": units, "cut": now.cut, "source": source.id},
    )
    text = f"{units} units, {units - now.units} of them new"
    event(connection, time.time(), "grown", source.url, text, dataset=source.dataset)
    return source_row(connection, source.id) or now
