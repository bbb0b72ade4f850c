"""What a node of a pull over several does beside its samplers: take the source in, tell what it has, watch its cache.

The targets of tasks (:mod:`cachetool.proc`)::

    look      whether there is a cache, of which cap, and what it knows of the source      changes nothing
    listing   the files of the listing of a source, in pieces
    extend    a replica draws so many positions more
    attend    the cache is made, the source taken in, a job opened; {"ready": ...};
              then what is evicted is told, and how full the cache is, until it is stopped
"""

from __future__ import annotations

import base64
import contextlib
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path

from cachetool.cache import CacheDir, Room, SourceRow, draws, open_cache
from cachetool.cache import parts as share
from cachetool.cache.bound import bind, bound, unbind
from cachetool.cache.draws import close_job, job_row
from cachetool.cache.history import edged
from cachetool.cache.listings import segments
from cachetool.cache.removal import delete_trash, retire, sweep
from cachetool.cache.unmaking import leaving_nothing, withdraw_unused
from cachetool.cache.usage import measure
from cachetool.core.errors import CacheToolError, Interrupted, UsageError
from cachetool.core.schema import Schema
from cachetool.formats import get_format
from cachetool.proc.task import Asking, Channel, Message
from cachetool.pull.job import Prepared
from cachetool.pull.options import PullOptions
from cachetool.pull.prepare import drawn_of, format_of, refuse_small_cap
from cachetool.sources import SourceOptions, open_source

__all__ = ["attend", "extend", "listing", "look"]

_LOOK = 1.0
_PIECE = 2**20


def look(
    channel: Channel,
    *,
    root: str,
    max_size: int | str | None,
    min_free: int | str | None,
    source: str,
    dataset: str,
) -> Message:
    """What there is. Raises what :func:`cachetool.cache.open_cache` raises."""
    with open_cache(root, max_size=max_size, min_free=min_free) as cache:
        row = cache.source(source)
        listed = row is not None and cache.listing(source).exists()
        return {
            "cap": cache.max_size,
            "source": row.to_json() if row is not None and listed else None,
            "segments": segments(cache.listing(source)) if listed else [],
            "schema": cache.schema(dataset).to_json() if listed else None,
            "format": format_of(cache, dataset),
            "drawn": 0 if row is None else drawn_of(cache, row),
            "replicate": None if row is None else _bound(cache, source),
        }


def attend(
    channel: Asking,
    *,
    root: str,
    url: str,
    max_size: int | str | None,
    min_free: int | str | None,
    options: Message,
    source: Message,
    listing: str | None,
    schema: list[Message],
    format: str,
    prepared: Message,
    job: str,
    upto: int | None,
    replicate: bool,
) -> Message:
    """Take part in the pull ``job`` of ``source``, whose listing lies in the folder ``listing`` where this cache needs
    it. With ``replicate`` this node draws by itself, up to that position of the pass; else as a coordinator says.

    Gives ``evicted``, the shards that went for it, when it is stopped.
    """
    pull, row, shape = PullOptions.from_json(options), SourceRow.from_json(source), Schema.from_json(schema)
    with ExitStack() as stack:
        cache = stack.enter_context(
            open_cache(root, max_size=max_size, min_free=min_free, notify=lambda line: channel.send({"note": line}))
        )
        stack.enter_context(leaving_nothing(cache))
        folder = None if listing is None else Path(listing)
        refuse_small_cap(cache, pull, get_format(format), Prepared.from_json(prepared), listing=folder)
        holder = cache.holder  # first: another node that has the same folder must not take it away when it is refused
        with cache.catalog.write() as connection:
            holder.register(connection)
            mine = share.identity(connection)
        part = share.part_of(job)
        channel.ask({"what": "enter", "cache": mine, "word": part})
        known = cache.source(row.id)
        if known is None:
            stack.callback(withdraw_unused, cache, pull.dataset, row.id)
        stack.callback(_unbind, cache, row.id)
        cache.declare(pull.dataset, shape)
        if folder is not None:
            _check_grown(cache, url, known, folder)
            cache.add_source(replace(row, frontier=0, skipped=0), folder, new=known is None)
        with cache.catalog.write() as connection:
            bind(connection, row.id, row.url, replicate=replicate)
        ready = _begin(cache, row, job, pull.room, upto) if replicate else _join(channel, cache, row, part, pull.room)
        try:
            channel.send({"ready": ready})
            return _watch(channel, cache, row.id, ready["job"], told=not replicate)
        finally:
            with contextlib.suppress(UsageError):  # it has ended: this node takes part anew
                edged(cache.catalog, cache.layout, lambda connection: close_job(connection, ready["job"]))


def listing(channel: Channel, *, root: str, source: str) -> Message:
    """Send the files of a listing: {"name", "at", "piece"}, the last of these in base 64."""
    with CacheDir(Path(root)) as cache:
        folder = cache.listing(source)
        for path in sorted(path for path in folder.rglob("*") if path.is_file()):
            with open(path, "rb") as file:
                for at in range(0, max(1, path.stat().st_size), _PIECE):
                    piece = base64.b64encode(file.read(_PIECE)).decode()
                    channel.send({"name": str(path.relative_to(folder)), "at": at, "piece": piece})
    return {}


def extend(channel: Channel, *, root: str, job: str, by: int) -> Message:
    """Let a replica draw ``by`` more positions."""
    with CacheDir(Path(root)) as cache, cache.catalog.write() as connection:
        connection.execute("UPDATE jobs SET wanted = wanted + ? WHERE id = ?", (by, job))
    return {}


def _bound(cache: CacheDir, source: str) -> bool | None:
    with cache.catalog.read() as connection:
        return bound(connection, source)


def _unbind(cache: CacheDir, source: str) -> None:
    with contextlib.suppress(CacheToolError), cache.catalog.write() as connection:
        unbind(connection, source)


def _check_grown(cache: CacheDir, url: str, known: SourceRow | None, listing: Path) -> None:
    """Raise :class:`UsageError` when a listing that is to replace that of a source has other units where it had some:
    the numbers of what was drawn would mean something else."""
    if known is None:
        return
    with contextlib.suppress(CacheToolError):
        before = open_source(url, listing, SourceOptions.from_json(known.options), units=known.units)
        before.close()
        if before.identity == known.identity:
            return
    raise UsageError(
        f"the cache {cache.root} has another listing of {known.url} than the others; give it an empty folder, or draw"
        " into another --dataset"
    )


def _join(channel: Asking, cache: CacheDir, row: SourceRow, part: str, room: Room) -> Message:
    """Open this node's part of the pull; tell all that it has, and give up what others have meanwhile."""
    holder = cache.holder
    with cache.catalog.write() as connection:
        holder.register(connection)
        share.join(connection, cache.layout, row, part, holder=holder.id, room=room)
        shards = share.ready_shards(connection, row.id)
        there = draws.source_row(connection, row.id)
    assert there is not None
    answer = channel.ask(
        {"what": "tell", "shards": [asdict(each) for each in shards], "source": there.to_json()}
    )  # fmt: skip
    _evict(cache, answer["gone"])
    with cache.catalog.write() as connection:
        share.follow(connection, SourceRow.from_json(answer["source"]))
    return {"job": part, **{name: answer[name] for name in ("samples", "shards", "bytes")}}


def _begin(cache: CacheDir, row: SourceRow, job: str, room: Room, upto: int | None) -> Message:
    """Open a pull of this node alone, of the draws below ``upto`` that it does not have yet."""
    holder = cache.holder
    with cache.catalog.write() as connection:
        holder.register(connection)
        share.follow(connection, row)
        now = draws.source_row(connection, row.id)
        assert now is not None
        wanted = None if upto is None else max(0, upto - draws.drawn(connection, now))
        mine, _ = draws.open_job(
            connection, row.id, holder=holder.id, wanted=wanted, seed=None, room=room, next_pass=False
        )  # fmt: skip
    left = now.units - drawn_of(cache, now) if wanted is None else wanted
    return {"job": mine, "left": left, "samples": 0, "shards": 0, "bytes": 0}


def _evict(cache: CacheDir, ids: Sequence[str]) -> None:
    """Let shards go whose samples other nodes have; those that are read stay until their readers end."""
    if not ids:
        return
    with cache.catalog.write() as connection:
        cache.holder.register(connection)
        retire(connection, ids, reason="evict", policy="doubled")
        trash = sweep(connection, cache.holder)
    delete_trash(cache.catalog, cache.layout, trash, edge=True)


def _watch(channel: Asking, cache: CacheDir, source: str, job: str, *, told: bool) -> Message:
    """Tell what goes and how full it is, whenever that has changed, until this task is stopped."""
    ready: set[str] = set()
    version, took = 0, 0.0

    def tell() -> int:
        nonlocal ready, version, took
        began = time.monotonic()
        version = cache.version
        with cache.catalog.read() as connection:
            used, evicted = measure(connection, cache.layout).total, job_row(connection, job).evicted
            query = "SELECT id FROM shards WHERE source = ? AND state = 'ready'"
            now = {row["id"] for row in connection.execute(query, (source,))}
        took = time.monotonic() - began  # not how long an answer takes, as while the coordinator is made again
        if told and ready - now:
            channel.ask({"what": "gone", "shards": sorted(ready - now)})
        ready = now
        channel.send({"fill": {"used": used, "cap": cache.max_size, "evicted": evicted}})
        return evicted

    evicted = tell()
    try:
        while True:
            took = 0.0
            if cache.version != version:
                evicted = tell()
            time.sleep(max(_LOOK, 100 * took))
    except Interrupted:
        with contextlib.suppress(CacheToolError):  # whoever stopped it may be gone
            evicted = tell()
        return {"evicted": evicted}
