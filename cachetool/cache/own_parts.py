"""The parts of a source that this cache draws, and their change.

A change is one transaction: rows and claims of parts that go are deleted, their shards retire; new parts begin at
position 0 of the present pass; another cut begins at pass 0. A pull that is under way goes on with the parts that are
there: who draws from a claim of another meets ClaimGone, and claims again. It is recorded beside the listing at the
same time: a catalog that is rebuilt has the same parts, and no shard of another.
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
"""A cut: the number of parts of a source; and some of these parts."""
_MOST_COMPARED = 2**16
"""Parts of the common cut that two shares may have, for them to be compared."""


def held(connection: Connection, source: SourceRow) -> dict[int, tuple[int, int]]:
    """Samples that snapshots to come have, and draws of the present pass that are done, of each part drawn here."""
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
    """How many samples snapshots to come have of a source that are in none of these ``parts`` of ``cut``."""
    rows = connection.execute(
        "SELECT s.part, o.cut, sum(s.samples) AS samples FROM shards s JOIN sources o ON o.id = s.source"
        " WHERE s.source = ? AND s.state = 'ready' GROUP BY s.part",
        (source,),
    )
    return sum(row["samples"] for row in rows if row["cut"] != cut or row["part"] not in parts)


def is_same_share(one: Share, other: Share) -> bool:
    """Return True when two ways to cut a source give the same units: part 1 of 2 is parts 1 and 3 of 4."""
    cut = math.lcm(one[0], other[0])
    counts = {len(parts) * (cut // of) for of, parts in (one, other)}
    if len(counts) > 1 or max(counts) > _MOST_COMPARED:
        return False
    first, second = ({part + more for part in parts for more in range(0, cut, of)} for of, parts in (one, other))
    return first == second


def refuse_beside(connection: Connection, root: object, source: str, share: Share) -> None:
    """Raise :class:`UsageError` unless this is the share that a pull draws which has the turn; nothing is said of a
    source that is not listed yet."""
    row = source_row(connection, source)
    if row is not None and not is_same_share(share, (row.cut, [part.number for part in row.parts])):
        raise _others_draw(root)


def _others_draw(root: object) -> UsageError:
    return UsageError(f"another pull draws other parts into {root} at this moment; stop it, or wait for its end")


def assign(
    cache: CacheDir, source: str, cut: int, sizes: Mapping[int, int], segments: Sequence[int], *, repart: bool,
    beside: bool = False,
) -> int:  # fmt: skip
    """Draw parts of these ``sizes`` of a source, cut into ``cut``, and no other from now on, whatever other pulls have
    done meanwhile; ``segments`` are the places between all segments of the source, where the cut is another one.
    Returns how many samples went by that.

    Raises :class:`UsageError` when samples would go and ``repart`` is False, when a pull that draws now would lose its
    parts and ``beside`` is False, and when another pull took the source back meanwhile.
    """
    with cache.catalog.read() as connection:
        if _now(connection, source) == (cut, set(sizes)):
            return 0
    with _changing(cache, source) as connection:
        before, parts = _now(connection, source)
        if not repart:
            refuse_loss(connection, cache.root, source, cut, sizes)
        drawing = connection.execute("SELECT 1 FROM jobs WHERE source = ? LIMIT 1", (source,)).fetchone()
        if drawing and not beside and (before != cut or parts - sizes.keys()):
            raise _others_draw(cache.root)
        released = samples_besides(connection, source, cut, sizes)
        if before != cut:
            _recut(connection, source, cut, segments)
        else:
            _release(connection, source, parts - sizes.keys())
        _take(connection, source, sizes)
    return released


def _now(connection: Connection, source: str) -> tuple[int, set[int]]:
    """Return the number of parts that a source is cut into, and those that are drawn here."""
    row = known_source(connection, source)
    return row.cut, {part.number for part in row.parts}


def refuse_loss(connection: Connection, root: object, source: str, cut: int, parts: Collection[int]) -> None:
    """Raise :class:`UsageError` when snapshots to come would lose samples by drawing these ``parts`` of ``cut``."""
    if not (lost := samples_besides(connection, source, cut, parts)):
        return
    row = connection.execute("SELECT url, cut FROM sources WHERE id = ?", (source,)).fetchone()
    rows = connection.execute("SELECT part FROM parts WHERE source = ? ORDER BY part", (source,))
    now = f"parts {','.join(str(part['part']) for part in rows)} of {row['cut']}" if row["cut"] > 1 else "all"
    raise UsageError(
        f"cache {root} draws {now} of {row['url']}, and would lose {count(lost, 'sample')} by drawing parts"
        f" {','.join(map(str, sorted(parts)))} of {cut};\n"
        "leave --part and --parts out to go on with those, or let the others go with --repart"
    )


def _take(connection: Connection, source: str, sizes: Mapping[int, int]) -> None:
    connection.executemany(
        "INSERT OR IGNORE INTO parts VALUES (?, ?, 0, ?)", [(source, part, size) for part, size in sizes.items()]
    )
    allow_growth(connection)


def _recut(connection: Connection, source: str, cut: int, segments: Sequence[int]) -> None:
    parts = connection.execute("SELECT part FROM parts WHERE source = ?", (source,)).fetchall()
    _release(connection, source, [row["part"] for row in parts])
    connection.execute(
        "UPDATE sources SET cut = ?, pass_number = 0, skipped = 0, segments = ?, past = '[]',"
        " began_at_moves = NULL WHERE id = ?",
        (cut, json.dumps(list(segments)), source),
    )


def _release(connection: Connection, source: str, parts: Collection[int]) -> None:
    for part in parts:
        connection.execute("DELETE FROM parts WHERE source = ? AND part = ?", (source, part))
        connection.execute("DELETE FROM claims WHERE source = ? AND part = ?", (source, part))
    shards = connection.execute(
        "SELECT id, part FROM shards WHERE source = ? AND state = 'ready'", (source,)
    ).fetchall()
    retire(connection, [row["id"] for row in shards if row["part"] in parts], reason="moved", policy="parts")


@contextlib.contextmanager
def _changing(cache: CacheDir, source: str) -> Iterator[Connection]:
    holder = cache.holder
    with cache.catalog.write() as connection:
        holder.register(connection)  # if it dies below, whoever recovers that takes the record back
    with cache.catalog.write() as connection:
        yield connection
        bump(connection)
        write_source_record(connection, cache.layout, source)
        trash = sweep(connection, holder)
    delete_trash(cache.catalog, cache.layout, trash, edge=True)
