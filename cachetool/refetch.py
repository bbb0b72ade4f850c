"""Pulling evicted shards again, each as it was: for an epoch that was broken off and is to go on with its samples.

A pulled shard is a range of draws of one pass. That range is opened again and drawn by one worker into one shard, which
then has the same samples in the same order, and the same content digest.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence

from cachetool.cache import CacheDir, draws, open_cache
from cachetool.cache.catalog import Connection
from cachetool.cache.draws import SourceRow
from cachetool.cache.losses import reopen
from cachetool.engines.task import Channel, Message
from cachetool.errors import UsageError
from cachetool.options import PullOptions
from cachetool.planning import source_id
from cachetool.pull import pull
from cachetool.sources import SourceOptions

__all__ = ["refetch"]

_POLL, _PATIENCE = 0.2, 600.0


def refetch(channel: Channel, *, root: str, shards: Sequence[Message]) -> Message:
    """The task: pull these shards again, rows of the catalog that were ready once. Gives nothing.

    One that another process pulls again at this moment is waited for. Raises :class:`UsageError` for one that cannot be
    the same again, and what :func:`~cachetool.pull.pull` raises.
    """
    with open_cache(root, create=False) as cache:
        for shard in shards:
            if _there(cache, shard):
                continue
            with cache.catalog.write() as connection:
                source = _source(connection, shard)
                mine = not _pending(connection, source, shard)
                if mine:
                    reopen(connection, source, shard["turn"], shard["draws"], None)
            if mine:
                pull(cache, source.url, _options(source, shard))
            _wait(cache, shard)
    return {}


def _there(cache: CacheDir, shard: Message) -> bool:
    query = "SELECT 1 FROM shards WHERE content = ? AND dataset = ? AND state = 'ready'"
    return cache.catalog.one(query, (shard["content"], shard["dataset"])) is not None


def _source(connection: Connection, shard: Message) -> SourceRow:
    source = draws.source_row(connection, shard["source"] or "")
    if source is None:
        raise UsageError(f"shard {shard['id']} cannot be pulled again: it was not pulled, or its source is gone")
    if source.turn != shard["turn"] or len(shard["draws"]) != 1:
        raise UsageError(f"shard {shard['id']} cannot be pulled again as it was: its pass over {source.url} is over")
    if source_id(source.url, _options(source, shard)) != source.id:
        raise UsageError(
            f"shard {shard['id']} cannot be pulled again: {source.url} is not all that its source was named; pull it"
        )
    return source


def _pending(connection: Connection, source: SourceRow, shard: Message) -> bool:
    """Whether its draws are open, being drawn, or in another shard."""
    [(start, stop)] = shard["draws"]
    rows = connection.execute(
        "SELECT draws FROM shards WHERE source = ? AND turn = ? AND state IN ('ready', 'retiring')",
        (source.id, source.turn),
    )
    ranges = [each for row in rows for each in json.loads(row["draws"] or "[]")]
    return any(a < stop and b > start for a, b in ranges) or _claimed(connection, source, shard, held=False)


def _claimed(connection: Connection, source: SourceRow, shard: Message, *, held: bool) -> bool:
    """Whether its draws are open or being drawn; with ``held`` only the latter."""
    [(start, stop)] = shard["draws"]
    found = connection.execute(
        "SELECT 1 FROM claims WHERE source = ? AND turn = ? AND start < ? AND stop > ?"
        + (" AND holder IS NOT NULL" if held else ""),
        (source.id, source.turn, stop, start),
    ).fetchone()
    return found is not None


def _options(source: SourceRow, shard: Message) -> PullOptions:
    return PullOptions(
        to=shard["format"],
        samples=shard["samples"],
        dataset=shard["dataset"],
        workers=1,
        shard_size=2 * shard["payload"] + 4096,
        source=SourceOptions.from_json(source.options),
    )


def _wait(cache: CacheDir, shard: Message) -> None:
    end = time.monotonic() + _PATIENCE
    while not _there(cache, shard):
        with cache.catalog.read() as connection:
            source = draws.source_row(connection, shard["source"])
            pending = source is not None and _claimed(connection, source, shard, held=True)
        if not pending and not _there(cache, shard):
            raise UsageError(f"shard {shard['id']} did not come back as it was: its samples are in other shards now")
        if time.monotonic() > end:
            raise UsageError(f"shard {shard['id']} did not come back: another process draws its samples")
        time.sleep(_POLL)
