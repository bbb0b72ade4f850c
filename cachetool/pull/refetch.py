"""Pulling evicted shards again, each as it was: for an epoch that was broken off and is to go on with its samples.

A pulled shard has some draws of one pass. One worker draws them once more into one shard, which then has the same
samples in the same order, and the same content digest; one that has another is refused. In a full cache other shards go
for it, not those that the epoch still has; one that comes to nothing leaves the draws done, so that it can be tried
again.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence

from cachetool.cache import CacheDir, again, draws, open_cache
from cachetool.cache.admission import asked
from cachetool.cache.again import Wanted
from cachetool.cache.catalog import Connection
from cachetool.cache.commit import folder_bound
from cachetool.cache.draws import SourceRow
from cachetool.cache.removal import candidates
from cachetool.cache.usage import measure
from cachetool.core.errors import CapBlocked, UsageError
from cachetool.core.progress import Progress
from cachetool.core.units import format_size, size_option
from cachetool.formats import get_format
from cachetool.formats.shard import shard_bound
from cachetool.proc.task import Channel, Message
from cachetool.pull.options import PullOptions
from cachetool.pull.prepare import source_id
from cachetool.pull.run import pull
from cachetool.sources import SourceOptions

__all__ = ["refetch"]

_POLL, _PATIENCE, _TRIES = 0.5, 600.0, 3
"""Seconds between two looks at what another process brings, and until one that brings nothing is given up; pulls."""
_NEVER = {
    again.TAKEN: "its samples are in other shards now, or in quarantine",
    again.LOST: "some of its samples were damaged since, which cachetool verify --repair pulls again",
}
_SPARE = 4096
"""Bytes of values beyond those of the largest shard, so that none is cut in two."""


def refetch(channel: Channel, *, root: str, shards: Sequence[Message], keep: Sequence[str]) -> Message:
    """The task: pull these shards again, rows of the catalog that were ready once, while those to ``keep`` stay. Gives
    nothing; tells how many samples came so far, and what it waits for.

    One that another process pulls again at this moment is waited for. Raises :class:`UsageError` for one that cannot be
    the same again, :class:`CapBlocked` before anything goes where all that may go is too little, and what
    :func:`~cachetool.pull.run.pull` raises.
    """
    done = 0
    with open_cache(root, create=False) as cache:
        groups = _alike(shards)
        kept = [*keep, *(id for alike in groups for id in _there(cache, alike).values())]
        missing = [absent for alike in groups if (absent := _missing(cache, alike))]
        for alike in missing:
            _look(cache, alike)
        _refuse_too_many(cache, missing, kept)
        for alike in groups:

            def tell(samples: int, note: str, before: int = done) -> None:
                channel.send({"samples": before + samples, "note": note})

            _bring(cache, alike, kept, tell)
            kept += _there(cache, alike).values()
            done += sum(shard["samples"] for shard in alike)
    return {}


def _alike(shards: Sequence[Message]) -> list[list[Message]]:
    """Those that one pull can bring."""
    groups: dict[tuple[str, str, str], list[Message]] = {}
    for shard in shards:
        groups.setdefault((shard["source"] or "", shard["dataset"], shard["format"]), []).append(shard)
    return list(groups.values())


def _bring(cache: CacheDir, shards: Sequence[Message], keep: Sequence[str], tell: Callable[[int, str], None]) -> None:
    """Have all of these there, which one pull can bring."""
    tries, least, end = _TRIES, len(shards), 0.0
    while missing := _missing(cache, shards):
        if len(missing) <= least:  # others bring some
            least, end = len(missing) - 1, time.monotonic() + _PATIENCE
        source, open = _look(cache, missing)
        if (open and not tries) or time.monotonic() > end:
            why = "had to make room for another pull; raise --max-size" if open else "are drawn by another process"
            raise UsageError(f"{len(missing)} of {len(shards)} evicted shards did not come back: they {why}")
        if not open:
            tell(0, "another process pulls them")
            time.sleep(_POLL)
            continue
        tries -= 1

        def report(progress: Progress) -> None:
            drawing = progress.phase == "pull"
            tell(progress.done if drawing else 0, progress.note if drawing else "the source is looked at")

        pull(cache, source.url, _options(source, open, [*keep, *_there(cache, shards).values()]), report=report)


def _look(cache: CacheDir, shards: Sequence[Message]) -> tuple[SourceRow, list[Message]]:
    """The source of these shards, which are not there, and those that nobody else brings now. Raises
    :class:`UsageError` for one that nobody can bring any more."""
    cache.recover()  # claims of whoever died meanwhile
    with cache.catalog.read() as connection:
        source = _source(connection, shards)
        states = again.states_of(connection, source, [_wanted(shard) for shard in shards])
    there, open = _there(cache, shards), []
    for shard, state in zip(shards, states, strict=True):
        if shard["content"] in there:  # by another process, just now
            continue
        if state in _NEVER:
            raise UsageError(f"shard {shard['id']} cannot be pulled again as it was: {_NEVER[state]}")
        open += [shard] if state == again.OPEN else []
    return source, open


def _there(cache: CacheDir, shards: Sequence[Message]) -> dict[str, str]:
    """Of the contents of these shards, of one dataset, those that are in it, with the ids that they have now."""
    query = "SELECT content, id FROM shards WHERE dataset = ? AND state = 'ready'"
    wanted = {shard["content"] for shard in shards}
    rows = cache.catalog.rows(query, (shards[0]["dataset"],))
    return {row["content"]: row["id"] for row in rows if row["content"] in wanted}


def _missing(cache: CacheDir, shards: Sequence[Message]) -> list[Message]:
    there = _there(cache, shards)
    return [shard for shard in shards if shard["content"] not in there]


def _wanted(shard: Message) -> Wanted:
    ranges = tuple((start, stop) for start, stop in shard["draws"])
    if not ranges or any(a[1] > b[0] for a, b in itertools.pairwise(ranges)):
        raise UsageError(f"shard {shard['id']} cannot be pulled again as it was: it was made of others")
    return Wanted(shard["id"], shard["turn"], ranges, shard["samples"], shard["content"])


def _source(connection: Connection, shards: Sequence[Message]) -> SourceRow:
    """The source of these shards."""
    source = draws.source_row(connection, shards[0]["source"] or "")
    if source is None:
        raise UsageError(f"shard {shards[0]['id']} cannot be pulled again: it was not pulled, or its source is gone")
    if source_id(source.url, _options(source, shards, ())) != source.id:
        raise UsageError(
            f"shard {shards[0]['id']} cannot be pulled again: {source.url} is not all that its source was named;"
            " pull it"
        )
    return source


def _options(source: SourceRow, shards: Sequence[Message], keep: Sequence[str]) -> PullOptions:
    return PullOptions(
        to=shards[0]["format"],
        samples=sum(shard["samples"] for shard in shards),
        dataset=shards[0]["dataset"],
        shard_size=max(shard["payload"] for shard in shards) + _SPARE,
        on_error="skip",  # what gave nothing the first time; anything else would make another shard, which is refused
        renew=0,
        redraw=tuple(_wanted(shard) for shard in shards),
        keep=tuple(keep),
        source=SourceOptions.from_json(source.options),
    )


def _refuse_too_many(cache: CacheDir, groups: Sequence[Sequence[Message]], keep: Sequence[str]) -> None:
    """Raise :class:`CapBlocked` where the shards of these groups do not fit, whatever goes that may."""
    need, most, stay = 0, 0, frozenset(keep)
    for alike in groups:
        need += sum(max(shard.get("bytes", 0), shard["payload"]) for shard in alike)
        schema, nbytes = cache.schema(alike[0]["dataset"]), max(shard["payload"] for shard in alike) + _SPARE
        kind, samples = get_format(alike[0]["format"]), max(shard["samples"] for shard in alike)
        bound = shard_bound(kind, schema, samples, nbytes, cache.layout.disk_block)
        most = max(most, bound + folder_bound(schema, bound, cache.layout.disk_block))
    with cache.catalog.read() as connection:
        going = sum(row.bytes for row in candidates(connection) if not row.sole and row.id not in stay)
        going += connection.execute(
            "SELECT coalesce(sum(bytes), 0) FROM shards WHERE state IN ('retiring', 'trash', 'staging')"
        ).fetchone()[0]
        beside = measure(connection, cache.layout).total - going
        growth = asked(connection, cache.layout, 0)
    if beside + need > cache.max_size:
        cap = beside + need + 2 * most + growth  # each of two workers reserves a whole one
        raise CapBlocked(
            f"{format_size(need)} do not fit into {cache.root}, capped at {format_size(cache.max_size)}, beside the"
            f" {format_size(beside)} that may not go for them;\nraise --max-size to about {size_option(cap)}"
        )
