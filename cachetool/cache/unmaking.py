"""Removal of a newly created cache if the command failed before it stored anything.

::

    the folder is missing -> the command makes the cache and fails -> no shard, source, dataset or other holder in it,
      and no file of somebody else? -> renamed under the catalog's lock, then its own files are deleted
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
    """Remove an empty cache, and the new folders above it, if the body of ``with`` created them and then failed.

    A folder that existed before stays. The object stays usable: the next command creates the cache again.
    """
    # Noted before the body runs, because afterwards nobody can tell which folders are new.
    missing = [path for path in (cache.root, *cache.root.parents) if not path.exists()]
    try:
        yield
    # Not after an interrupt (KeyboardInterrupt): the same command may be started again at once,
    # while another process already waits for this cache.
    except Exception:
        if missing and cache.exists:
            # The error of the command is the one to report, so errors of the removal are dropped;
            # an empty cache does no harm.
            with contextlib.suppress(CacheToolError, OSError):
                _unmake(cache, missing)
        raise


def withdraw_unused(cache: CacheDir, dataset: str, source: str) -> None:
    """Delete the source and dataset that a failed command declared and did not use."""
    # An empty dataset would bind the next command to its schema. If the deletion fails, nothing
    # worse remains, and the command's own error is reported.
    with contextlib.suppress(CacheToolError):
        with cache.catalog.write() as connection:
            gone = _withdraw(connection, dataset, source)
        if gone:
            cache.layout.remove(cache.listing(source))
            cache.layout.remove(cache.layout.record(Id(source)))


def _withdraw(connection: Connection, dataset: str, source: str) -> bool:
    """Delete a source from which nothing was drawn and no pull draws, and its dataset if that is empty then. Return
    True if the source was deleted."""
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
    # A file of somebody else is in the folder, so the folder stays.
    if any(not stray.ours for stray in strays(cache.catalog, layout)):
        return
    # The open descriptor leads to this same folder after the rename, whatever another user puts in
    # the place of either name.
    fd = os.open(layout.root, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        with cache.catalog.write() as connection:
            for table in ("shards", "sources", "datasets"):
                if connection.execute(f"SELECT 1 FROM {table} LIMIT 1").fetchone():
                    return
            # Another process has opened the cache since. The lock files are asked as well, for a
            # process that is not in the catalog yet.
            if any(not holders.is_ours(row["id"]) for row in connection.execute("SELECT id FROM holders").fetchall()):
                return
            if holders.live_locks(layout.holders):
                return
            wanted = {key: cache.catalog.number(key) for key in ("max_size", "min_free")}
            # Under the catalog's lock and before any deletion. Another process that waits for this
            # lock, or opens the folder from now on, finds no cache: to write it makes a new one, to
            # read it reports that the cache is gone.
            os.rename(layout.root, aside)
        holders.retire_ours(layout.holders)
        cache.renew(wanted)
        remove_held(fd, aside)
    finally:
        os.close(fd)
    for path in folders[1:]:
        # rmdir and no recursive removal: a folder that somebody else uses by now is not empty, and
        # stays.
        path.rmdir()
