"""A new cache that nothing came into goes again: a verb that is refused leaves the disk as it was.

::

    the folder is not there -> the verb makes the cache, fails -> no shard, source, dataset, other holder in it, and no
      file that somebody else put there? -> renamed away under the catalog's lock, then its own files are deleted
"""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterator
from pathlib import Path

from cachetool.cache import holders
from cachetool.cache.catalog import Connection
from cachetool.cache.draws import positions_done, source_row
from cachetool.cache.repair import strays
from cachetool.cache.root import CacheDir
from cachetool.core.errors import CacheToolError
from cachetool.core.names import Id
from cachetool.proc.folders import remove_held

__all__ = ["leaving_nothing", "withdraw_unused"]


@contextlib.contextmanager
def leaving_nothing(cache: CacheDir) -> Iterator[None]:
    """Around a verb: when it fails, a cache that it put on disk and left empty is taken away, and the folders that were
    made above it. The object stays good: the next verb makes the cache anew. A folder that was there stays."""
    missing = [path for path in (cache.root, *cache.root.parents) if not path.exists()]
    try:
        yield
    except Exception:  # what is interrupted may be begun again at once, by somebody who waits for it too
        if missing and cache.exists:
            with contextlib.suppress(CacheToolError, OSError):
                _unmake(cache, missing)
        raise


def withdraw_unused(cache: CacheDir, dataset: str, source: str) -> None:
    """Take back what a verb declared when it came to nothing: else an empty dataset would bind the next one."""
    with contextlib.suppress(CacheToolError):
        with cache.catalog.write() as connection:
            gone = _withdraw(connection, dataset, source)
        if gone:
            cache.layout.remove(cache.listing(source))
            cache.layout.remove(cache.layout.record(Id(source)))


def _withdraw(connection: Connection, dataset: str, source: str) -> bool:
    """Delete a source that nothing was drawn of and nobody draws from, and its dataset when that is empty then; whether
    the source went."""
    row = source_row(connection, source)
    busy = connection.execute("SELECT 1 FROM jobs WHERE source = ? LIMIT 1", (source,)).fetchone()
    used = connection.execute("SELECT 1 FROM shards WHERE source = ? LIMIT 1", (source,)).fetchone()
    gone = (
        row is not None
        and not used
        and not busy
        and row.pass_number == 0
        and row.skipped == 0
        and positions_done(connection, row) == 0
    )
    if gone:
        connection.execute("DELETE FROM sources WHERE id = ?", (source,))
    connection.execute(
        "DELETE FROM datasets WHERE name = ? AND NOT EXISTS (SELECT 1 FROM shards WHERE dataset = datasets.name)"
        " AND NOT EXISTS (SELECT 1 FROM sources WHERE dataset = datasets.name)",
        (dataset,),
    )
    return gone


def _unmake(cache: CacheDir, folders: list[Path]) -> None:
    layout = cache.layout
    aside = layout.root.with_name(f".{layout.root.name[:200]}.{secrets.token_hex(6)}.empty")
    if any(not stray.ours for stray in strays(cache.catalog, layout)):  # somebody else's file: the folder stays
        return
    fd = os.open(layout.root, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        with cache.catalog.write() as connection:
            for table in ("shards", "sources", "datasets"):
                if connection.execute(f"SELECT 1 FROM {table} LIMIT 1").fetchone():
                    return
            if any(not holders.is_ours(row["id"]) for row in connection.execute("SELECT id FROM holders").fetchall()):
                return
            if holders.live_locks(layout.holders):
                return
            wanted = {key: cache.catalog.number(key) for key in ("max_size", "min_free")}
            # Another process that waits for this lock, or opens the folder from now on, finds none: to write it makes a
            # new one, to read it says that the cache is gone.
            os.rename(layout.root, aside)
        holders.retire_ours(layout.holders)
        cache.renew(wanted)
        remove_held(fd, aside)
    finally:
        os.close(fd)
    for path in folders[1:]:
        path.rmdir()
