"""A source that comes in or grows: its listing, or one more segment of it, charged before it is copied.

A segment is in force with one transaction::

    a folder elsewhere  -- charged, copied beside -->  transaction: the source is still what it was
                                                       -> renamed into place, units and segments in its row, record

Killed before the transaction ends, the source is what it was: what lies in the segment's place then is removed by the
next that grows it.
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
    """See :meth:`CacheDir.add_source`."""
    catalog, layout = cache.catalog, cache.layout
    declared = catalog.one("SELECT * FROM datasets WHERE name = ?", (row.dataset,))
    record = record_bound(json.loads(declared["schema"]) if declared else [], layout.disk_block)
    exists = cache.source(row.id) is not None
    bound = listing_bound(listing, layout.disk_block) + record

    def insert(connection: Connection) -> None:
        if declared:  # who declared it too may have taken it back
            connection.execute("INSERT OR IGNORE INTO datasets VALUES (?, ?, ?, ?)", tuple(declared))
        add_source(connection, row, bound, new=new)

    admit(catalog, layout, cache.holder, bound, insert, room=Room(wait=0))
    if new and exists and cache.listing(row.id).exists():
        return  # the same, and workers of another process read it
    real = take_in(layout, row.id, listing, cache.holder.id)
    with catalog.write() as connection:
        connection.execute("UPDATE sources SET bytes = ? WHERE id = ?", (real + record, row.id))
        if exists or row.cut > 1:  # what its shards say of it may no longer be so, or none says its parts yet
            write_source_record(connection, layout, row.id)


def grow_source(
    cache: CacheDir, row: SourceRow, segment: Path, name: str, *, units: int, identity: str, complete: bool
) -> SourceRow:
    """Append the listing in the folder ``segment`` to that of a source, which then has ``units`` units.

    Raises :class:`UsageError` when the source is not as ``row`` says any more, :class:`CapBlocked` for lack of room.
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
            nbytes = append_segment(layout, row.id, aside, Name(name))
            nbytes += record_bound(json.loads(schema["schema"]), layout.disk_block)
            connection.execute("UPDATE sources SET bytes = ? WHERE id = ?", (nbytes, row.id))
            bump(connection)  # newer than any shard's record, which says what the source was before
            write_source_record(connection, layout, row.id)
        return grown
    except BaseException:
        layout.remove(layout.listing_aside(row.id, holder.id))
        with catalog.write() as connection:
            connection.execute(
                "UPDATE sources SET bytes = bytes - ? WHERE id = ? AND units = ?", (more, row.id, row.units)
            )
        raise


def _grow(connection: Connection, source: SourceRow, *, units: int, identity: str, complete: bool) -> SourceRow:
    """Append units to a source that is still as in ``source``: a segment of its present pass.

    Raises :class:`UsageError` when another process was first.
    """
    now = source_row(connection, source.id)
    if now is None or (now.units, now.identity) != (source.units, source.identity):
        raise UsageError(f"another process lists {source.url} into this cache at this moment; try again later")
    segments = [*now.segments, now.units] if 0 < now.units < units else now.segments
    connection.execute(
        "UPDATE sources SET units = ?, samples = ?, identity = ?, complete = ?, segments = ? WHERE id = ?",
        (units, units, identity, complete, json.dumps(segments), source.id),
    )
    connection.execute(
        # As `part_size` has it.
        "UPDATE parts SET size = (:units - part + :cut - 1) / :cut WHERE source = :source",
        {"units": units, "cut": now.cut, "source": source.id},
    )
    text = f"{units} units, {units - now.units} of them new"
    event(connection, time.time(), "grown", source.url, text, dataset=source.dataset)
    return source_row(connection, source.id) or now
