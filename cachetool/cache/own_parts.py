"""The parts of a source that this cache draws, and changes of them.

A change is one transaction. Rows and claims of released parts are deleted, and their shards retire. New parts begin at
position 0 of the present pass; with another number of parts (cut) the source begins at pass 0. A running pull continues
with the parts that are left: a worker that drew from a released part meets ClaimGone and claims again. The same
transaction records the change beside the listing, so that a rebuilt catalog has the same parts and no shard of a
released one.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import TypeAlias

from cachetool.cache.admission import allow_growth
from cachetool.cache.catalog import Connection, bump
from cachetool.cache.draws import SourceRow, known_source, source_row
from cachetool.cache.records import write_source_record
from cachetool.cache.removal import delete_trash, retire, sweep
from cachetool.cache.root import CacheDir
from cachetool.core.errors import UsageError
from cachetool.core.text import count

__all__ = ["Share", "assign", "held", "is_same_share", "refuse_beside", "refuse_loss", "samples_besides"]

Share: TypeAlias = tuple[int, Collection[int]]
"""A cut (number of parts of a source), and some of these parts."""
_MOST_COMPARED = 2**16
"""Maximum number of parts of the common cut for which two shares are compared."""


def held(connection: Connection, source: SourceRow) -> dict[int, tuple[int, int]]:
    """Return for each part drawn here the samples that snapshots to come contain, and the draws of the present pass
    that are done."""
    counted = "SELECT part, sum(samples) FROM shards WHERE source = ? AND state = 'ready' GROUP BY part"
    samples = dict(connection.execute(counted, (source.id,)).fetchall())
    pending = dict(
        connection.execute(
            "SELECT part, sum(stop - start) FROM claims WHERE source = ? AND pass_number = ? AND tried IS NULL"
            " GROUP BY part",
            (source.id, source.pass_number),
        ).fetchall()
    )
    return {
        part.number: (samples.get(part.number, 0), part.frontier - pending.get(part.number, 0)) for part in source.parts
    }


def samples_besides(connection: Connection, source: str, cut: int, parts: Collection[int]) -> int:
    """Return the number of samples, in snapshots to come, of a source that lie outside of these ``parts`` of
    ``cut``."""
    rows = connection.execute(
        "SELECT s.part, o.cut, sum(s.samples) AS samples FROM shards s JOIN sources o ON o.id = s.source"
        " WHERE s.source = ? AND s.state = 'ready' GROUP BY s.part",
        (source,),
    )
    return sum(row["samples"] for row in rows if row["cut"] != cut or row["part"] not in parts)


def is_same_share(one: Share, other: Share) -> bool:
    """Return True when two ways to cut a source select the same units: part 1 of 2 is parts 1 and 3 of 4."""
    cut = math.lcm(one[0], other[0])
    # Counted first, because the two sets of a very large common cut would take too much memory.
    counts = {len(parts) * (cut // of) for of, parts in (one, other)}
    if len(counts) > 1 or max(counts) > _MOST_COMPARED:
        return False
    first, second = ({part + more for part in parts for more in range(0, cut, of)} for of, parts in (one, other))
    return first == second


def refuse_beside(connection: Connection, root: object, source: str, share: Share) -> None:
    """Raise :class:`UsageError` when the pull that has the turn draws another share. A source that is not listed yet is
    accepted."""
    row = source_row(connection, source)
    if row is not None and not is_same_share(share, (row.cut, [part.number for part in row.parts])):
        raise _others_draw(root)


def _others_draw(root: object) -> UsageError:
    return UsageError(f"another pull is drawing other parts into {root}; stop that pull, or wait until it ends")


def assign(
    cache: CacheDir, source: str, cut: int, sizes: Mapping[int, int], segments: Sequence[int], *, repart: bool,
    beside: bool = False,
) -> int:  # fmt: skip
    """Draw the parts of ``sizes`` (part -> number of draws) of a source cut into ``cut`` parts, and no others from now
    on.

    ``segments`` are the positions between all segments of the source, used when the cut changes. Returns the number of
    samples that are lost by the change.

    Raises :class:`UsageError` when samples would be lost and ``repart`` is False, when a running pull would lose its
    parts and ``beside`` is False, and when another pull deleted the source meanwhile.
    """
    # The usual case changes nothing, and then no process has to wait for a writing transaction.
    with cache.catalog.read() as connection:
        if _now(connection, source) == (cut, set(sizes)):
            return 0
    with _changing(cache, source) as connection:
        # Read again inside the writing transaction, because another process may have changed the
        # parts since.
        before, parts = _now(connection, source)
        if not repart:
            refuse_loss(connection, cache.root, source, cut, sizes)
        drawing = connection.execute("SELECT 1 FROM jobs WHERE source = ? LIMIT 1", (source,)).fetchone()
        if drawing and not beside and (before != cut or parts - sizes.keys()):
            raise _others_draw(cache.root)
        # Counted before the shards retire, because retired shards are not in the count any more.
        released = samples_besides(connection, source, cut, sizes)
        if before != cut:
            _recut(connection, source, cut, segments)
        else:
            _release(connection, source, parts - sizes.keys())
        _take(connection, source, sizes)
    return released


def _now(connection: Connection, source: str) -> tuple[int, set[int]]:
    """Return the number of parts into which a source is cut, and the parts that are drawn here."""
    row = known_source(connection, source)
    return row.cut, {part.number for part in row.parts}


def refuse_loss(connection: Connection, root: object, source: str, cut: int, parts: Collection[int]) -> None:
    """Raise :class:`UsageError` when drawing these ``parts`` of ``cut`` would remove samples from snapshots to come."""
    if not (lost := samples_besides(connection, source, cut, parts)):
        return
    row = connection.execute("SELECT url, cut FROM sources WHERE id = ?", (source,)).fetchone()
    rows = connection.execute("SELECT part FROM parts WHERE source = ? ORDER BY part", (source,))
    now = f"parts {','.join(str(part['part']) for part in rows)} of {row['cut']}" if row["cut"] > 1 else "all"
    raise UsageError(
        f"cache {root} draws {now} of {row['url']}, and would lose {count(lost, 'sample')} by drawing parts"
        f" {','.join(map(str, sorted(parts)))} of {cut};\n"
        "leave --part and --parts out to continue as before, or remove these samples with --repart"
    )


def _take(connection: Connection, source: str, sizes: Mapping[int, int]) -> None:
    connection.executemany(
        "INSERT OR IGNORE INTO parts VALUES (?, ?, 0, ?)", [(source, part, size) for part, size in sizes.items()]
    )
    # These rows are not admitted like a shard, and thousands of parts may fill the catalog's pages.
    allow_growth(connection)


def _recut(connection: Connection, source: str, cut: int, segments: Sequence[int]) -> None:
    parts = connection.execute("SELECT part FROM parts WHERE source = ?", (source,)).fetchall()
    # All parts, because positions of another cut mean other units.
    _release(connection, source, [row["part"] for row in parts])
    connection.execute(
        "UPDATE sources SET cut = ?, pass_number = 0, skipped = 0, segments = ?, past = '[]',"
        " began_at_moves = NULL WHERE id = ?",
        (cut, json.dumps(list(segments)), source),
    )


def _release(connection: Connection, source: str, parts: Collection[int]) -> None:
    for part in parts:
        connection.execute("DELETE FROM parts WHERE source = ? AND part = ?", (source, part))
        # Deleted and not opened: nobody here may draw these positions. A worker that still holds
        # such a claim finds no row at its commit and gets ClaimGone.
        connection.execute("DELETE FROM claims WHERE source = ? AND part = ?", (source, part))
    shards = connection.execute(
        "SELECT id, part FROM shards WHERE source = ? AND state = 'ready'", (source,)
    ).fetchall()
    retire(connection, [row["id"] for row in shards if row["part"] in parts], reason="moved", policy="parts")


@contextlib.contextmanager
def _changing(cache: CacheDir, source: str) -> Iterator[Connection]:
    holder = cache.holder
    with cache.catalog.write() as connection:
        # In a transaction of its own before the change. The file with the record is written before
        # the change is committed; if this process dies in between, the process that recovers its holder
        # takes the record back.
        holder.register(connection)
    with cache.catalog.write() as connection:
        yield connection
        # The record must be newer than those in the shards, or a rebuild would believe the shards.
        bump(connection)
        write_source_record(connection, cache.layout, source)
        trash = sweep(connection, holder)
    delete_trash(cache.catalog, cache.layout, trash, edge=True)
