"""Whether a source is drawn into a cache as one of several nodes that share its draws, or that have all of them each.

To a node that shared them the draws of others are done, and a replica's are double to a node that shares: a cache that
has any of a source stays with the one or the other. The nodes know it, so that it outlives the catalog of the whole.
"""

from __future__ import annotations

from cachetool.cache.catalog import Connection
from cachetool.cache.draws import positions_done, source_row
from cachetool.core.errors import UsageError

__all__ = ["PLACEMENTS", "bind", "bound", "refuse_other", "unbind"]

PLACEMENTS = ("split", "replicate")


def bound(connection: Connection, source: str) -> bool | None:
    """Whether a source is replicated; None where it is open."""
    row = connection.execute("SELECT replicated FROM bound WHERE source = ?", (source,)).fetchone()
    return None if row is None else bool(row["replicated"])


def refuse_other(url: str, before: bool | None, replicate: bool) -> None:
    """Raise :class:`UsageError` when a source that is to be drawn was drawn the other way."""
    if before is not None and before != replicate:
        raise UsageError(
            f"{url} is drawn with --placement {PLACEMENTS[before]} into these caches; go on with that, or draw into"
            " another --dataset"
        )


def bind(connection: Connection, source: str, url: str, *, replicate: bool) -> None:
    """From now on a source is drawn so. Raises :class:`UsageError` when it was drawn the other way."""
    refuse_other(url, bound(connection, source), replicate)
    connection.execute("INSERT OR REPLACE INTO bound VALUES (?, ?)", (source, replicate))


def unbind(connection: Connection, source: str) -> None:
    """Leave it open again where nothing was drawn."""
    row = source_row(connection, source)
    used = connection.execute("SELECT 1 FROM shards WHERE source = ? LIMIT 1", (source,)).fetchone()
    if row is None or not (used or row.pass_number or positions_done(connection, row)):
        connection.execute("DELETE FROM bound WHERE source = ?", (source,))
