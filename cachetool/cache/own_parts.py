"""The parts of a source that this cache draws, changed in one transaction each.

::

    assign    these parts and no other, as a pull is asked for: takes, releases and cuts anew, unless samples would go
    take      rows of `parts` at frontier 0 of the present pass
    release   rows and claims are deleted, shards retire; who draws from a claim meets ClaimGone, and claims again
    recut     all parts are released, some of another cut are taken, from the beginning of pass 0
    reach     the position that a job draws up to is raised

A change of parts is recorded beside the listing at the same time: a catalog that is rebuilt has the same parts, and no
shard of another.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Collection, Iterator, Mapping, Sequence

from cachetool.cache.admission import allow_growth
from cachetool.cache.catalog import Connection, bump
from cachetool.cache.records import write_source_record
from cachetool.cache.removal import delete_trash, retire, sweep
from cachetool.cache.root import CacheDir
from cachetool.core.errors import UsageError
from cachetool.core.text import count

__all__ = ["assign", "reach", "recut", "refuse_loss", "release", "samples_besides", "take"]


def samples_besides(connection: Connection, source: str, cut: int, parts: Collection[int]) -> int:
    """How many samples snapshots to come have of a source that are in none of these ``parts`` of ``cut``."""
    rows = connection.execute(
        "SELECT s.part, o.cut, sum(s.samples) AS samples FROM shards s JOIN sources o ON o.id = s.source"
        " WHERE s.source = ? AND s.state = 'ready' GROUP BY s.part",
        (source,),
    )
    return sum(row["samples"] for row in rows if row["cut"] != cut or row["part"] not in parts)


def assign(
    cache: CacheDir, source: str, cut: int, sizes: Mapping[int, int], segments: Sequence[int], *, repart: bool
) -> None:
    """Draw these parts of a source and no other from now on: what :func:`take`, :func:`release` and :func:`recut` do,
    in one transaction, whatever other pulls have done meanwhile.

    Raises :class:`UsageError` when samples would go, or another pull loses its parts, and ``repart`` is False.
    """
    with cache.catalog.read() as connection:
        if _now(connection, source) == (cut, set(sizes)):
            return
    with _changing(cache, source) as connection:
        before, parts = _now(connection, source)
        if not repart:
            refuse_loss(connection, cache.root, source, cut, sizes)
            drawing = connection.execute("SELECT 1 FROM jobs WHERE source = ? LIMIT 1", (source,)).fetchone()
            if drawing and (before != cut or parts - sizes.keys()):
                raise UsageError(
                    f"another pull draws other parts into {cache.root} at this moment; wait for its end, or take its"
                    " parts away with --repart"
                )
        if before != cut:
            _recut(connection, source, cut, segments)
        else:
            _release(connection, source, parts - sizes.keys())
        _take(connection, source, sizes)


def _now(connection: Connection, source: str) -> tuple[int, set[int]]:
    """Into how many parts a source is cut, and which of them are drawn here."""
    cut = connection.execute("SELECT cut FROM sources WHERE id = ?", (source,)).fetchone()["cut"]
    return cut, {row["part"] for row in connection.execute("SELECT part FROM parts WHERE source = ?", (source,))}


def refuse_loss(connection: Connection, root: object, source: str, cut: int, parts: Collection[int]) -> None:
    """Raise :class:`UsageError` when snapshots to come would lose samples by drawing these ``parts`` of ``cut``."""
    if not (lost := samples_besides(connection, source, cut, parts)):
        return
    row = connection.execute("SELECT url, cut FROM sources WHERE id = ?", (source,)).fetchone()
    rows = connection.execute("SELECT part FROM parts WHERE source = ? ORDER BY part", (source,))
    now = f"parts {','.join(str(part['part']) for part in rows)} of {row['cut']}" if row["cut"] > 1 else "all"
    raise UsageError(
        f"cache {root} draws {now} of {row['url']}, and would lose {count(lost, 'sample')} of other parts than"
        f" {','.join(map(str, sorted(parts)))} of {cut};\n"
        "leave --part and --parts out to go on with those, or let the others go with --repart"
    )


def take(cache: CacheDir, source: str, sizes: Mapping[int, int]) -> None:
    """Draw from parts of these sizes too from now on."""
    with _changing(cache, source) as connection:
        _take(connection, source, sizes)


def release(cache: CacheDir, source: str, parts: Collection[int]) -> None:
    """Draw from these parts no more; what is here of them goes when its readers end."""
    with _changing(cache, source) as connection:
        _release(connection, source, parts)


def recut(cache: CacheDir, source: str, cut: int, sizes: Mapping[int, int], segments: Sequence[int]) -> None:
    """Draw from parts of these sizes of another cut from now on, and from no other; ``segments`` are the places between
    all segments of the source."""
    with _changing(cache, source) as connection:
        _recut(connection, source, cut, segments)
        _take(connection, source, sizes)


def reach(cache: CacheDir, job: str, upto: int) -> None:
    """Let a pull draw up to a later position of the source."""
    with cache.catalog.write() as connection:
        connection.execute("UPDATE jobs SET upto = max(upto, ?) WHERE id = ?", (upto, job))


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
