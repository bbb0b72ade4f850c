"""Pulling evicted shards again, each as it was: for an epoch that was broken off and is to go on with its samples.

A pulled shard is a range of draws of one pass. That range is drawn once more by one worker into one shard, which then
has the same samples in the same order, and the same content digest. In a full cache other shards go for it, not those
that the epoch still has; one that comes to nothing leaves the draws done, so that it can be tried again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from cachetool.cache import CacheDir, again, draws, open_cache
from cachetool.cache.admission import asked
from cachetool.cache.catalog import Connection
from cachetool.cache.draws import SourceRow
from cachetool.cache.removal import candidates
from cachetool.cache.usage import measure
from cachetool.engines.task import Channel, Message
from cachetool.errors import CapBlocked, UsageError
from cachetool.options import PullOptions
from cachetool.planning import source_id
from cachetool.progress import Progress
from cachetool.pull import pull
from cachetool.sources import SourceOptions
from cachetool.units import format_size, size_option

__all__ = ["refetch"]

_POLL, _PATIENCE = 0.2, 600.0
_SPARE = 4096
"""Bytes of values beyond those of the largest shard, so that none is cut in two."""


def refetch(channel: Channel, *, root: str, shards: Sequence[Message], keep: Sequence[str]) -> Message:
    """The task: pull these shards again, rows of the catalog that were ready once, while those to ``keep`` stay. Gives
    nothing; tells how many samples came so far, and what it waits for.

    One that another process pulls again at this moment is waited for. Raises :class:`UsageError` for one that cannot be
    the same again, :class:`CapBlocked` before anything goes where all that may go is too little, and what
    :func:`~cachetool.pull.pull` raises.
    """
    kept, done = list(keep), 0
    with open_cache(root, create=False) as cache:
        _refuse_too_many(cache, [shard for shard in shards if _there(cache, shard) is None], kept)
        for alike in _alike(shards):

            def tell(samples: int, note: str, before: int = done) -> None:
                channel.send({"samples": before + samples, "note": note})

            kept += _brought(cache, alike, kept, tell)
            done += sum(shard["samples"] for shard in alike)
    return {}


def _alike(shards: Sequence[Message]) -> list[list[Message]]:
    """Those that one pull can bring."""
    groups: dict[tuple[str, str, str], list[Message]] = {}
    for shard in shards:
        groups.setdefault((shard["source"] or "", shard["dataset"], shard["format"]), []).append(shard)
    return list(groups.values())


def _brought(
    cache: CacheDir, shards: Sequence[Message], keep: Sequence[str], tell: Callable[[int, str], None]
) -> list[str]:
    """The ids of these shards as they are again."""
    end, tried = time.monotonic() + _PATIENCE, set[str]()
    while missing := [shard for shard in shards if _there(cache, shard) is None]:
        cache.recover()  # claims of whoever died meanwhile
        with cache.catalog.read() as connection:
            sources = [_source(connection, shard) for shard in missing]
            states = [
                again.state_of(connection, source, *shard["draws"][0])
                for source, shard in zip(sources, missing, strict=True)
            ]
        open = [shard for shard, state in zip(missing, states, strict=True) if state == again.OPEN]
        for shard, state in zip(missing, states, strict=True):
            if _there(cache, shard) is None:
                _refuse(shard, state, sources[0].url, tried=shard["id"] in tried)
        if time.monotonic() > end:
            raise UsageError(f"shard {missing[0]['id']} did not come back: another process draws its samples")
        if not open:
            tell(0, "another process pulls them")
            time.sleep(_POLL)
            continue
        tried |= {shard["id"] for shard in open}

        def report(progress: Progress) -> None:
            if progress.phase == "pull":
                tell(progress.done, progress.note)

        pull(cache, sources[0].url, _options(sources[0], open, keep), report=report)
        end = time.monotonic() + _PATIENCE
    return [id for shard in shards if (id := _there(cache, shard)) is not None]


def _refuse(shard: Message, state: str, url: str, *, tried: bool) -> None:
    """Raise :class:`UsageError` for a shard that pulling does not bring."""
    why = {
        again.TAKEN: f"{url} is not what it was, or they are" if tried else "they are",
        again.LOST: "some of its samples were damaged since, which cachetool verify --repair pulls again",
        again.OPEN: "nothing came of its draws" if tried else "",
    }.get(state, "")
    if why:
        why = f"{why} in other shards now" if state == again.TAKEN else why
        raise UsageError(f"shard {shard['id']} did not come back as it was: {why}")


def _there(cache: CacheDir, shard: Message) -> str | None:
    """The id of a shard that has these samples, in this order."""
    query = "SELECT id FROM shards WHERE content = ? AND dataset = ? AND state = 'ready'"
    row = cache.catalog.one(query, (shard["content"], shard["dataset"]))
    return None if row is None else str(row["id"])


def _source(connection: Connection, shard: Message) -> SourceRow:
    source = draws.source_row(connection, shard["source"] or "")
    if source is None:
        raise UsageError(f"shard {shard['id']} cannot be pulled again: it was not pulled, or its source is gone")
    if source.turn != shard["turn"] or len(shard["draws"]) != 1:
        raise UsageError(f"shard {shard['id']} cannot be pulled again as it was: its pass over {source.url} is over")
    if source_id(source.url, _options(source, [shard], ())) != source.id:
        raise UsageError(
            f"shard {shard['id']} cannot be pulled again: {source.url} is not all that its source was named; pull it"
        )
    return source


def _options(source: SourceRow, shards: Sequence[Message], keep: Sequence[str]) -> PullOptions:
    return PullOptions(
        to=shards[0]["format"],
        samples=sum(shard["samples"] for shard in shards),
        dataset=shards[0]["dataset"],
        shard_size=max(shard["payload"] for shard in shards) + _SPARE,
        renew=0,
        again=tuple((start, stop) for shard in shards for start, stop in shard["draws"]),
        keep=tuple(keep),
        source=SourceOptions.from_json(source.options),
    )


def _refuse_too_many(cache: CacheDir, shards: Sequence[Message], keep: Sequence[str]) -> None:
    """Raise :class:`CapBlocked` where these shards do not fit, whatever goes that may."""
    need = sum(shard["payload"] for shard in shards)
    stay = frozenset(keep)
    with cache.catalog.read() as connection:
        going = sum(row.bytes for row in candidates(connection) if not row.sole and row.id not in stay)
        going += connection.execute(
            "SELECT coalesce(sum(bytes), 0) FROM shards WHERE state IN ('retiring', 'trash', 'staging')"
        ).fetchone()[0]
        beside = measure(connection, cache.layout).total - going
        growth = len(shards) * asked(connection, _SPARE)
    if beside + need > cache.max_size:
        cap = beside + need + need // 8 + growth
        raise CapBlocked(
            f"{format_size(need)} do not fit into {cache.root}, capped at {format_size(cache.max_size)}, beside the"
            f" {format_size(beside)} that may not go for them;\nraise --max-size to about {size_option(cap)}"
        )
