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
from dataclasses import asdict, dataclass, replace
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
from cachetool.formats import get_format
from cachetool.formats.base import Format
from cachetool.proc.task import Asking, Channel, Message
from cachetool.pull.job import Prepared
from cachetool.pull.options import PullOptions
from cachetool.pull.prepare import drawn_of, format_of, refuse_small_cap
from cachetool.sources.options import SourceOptions
from cachetool.sources.registry import open_source

__all__ = ["NodePart", "attend", "extend", "listing", "look"]

_LOOK = 1.0
_PIECE = 2**20


@dataclass(frozen=True, slots=True)
class NodePart:
    """A pull, as a node that takes part in it must know it."""

    job: str
    url: str
    source: SourceRow
    options: PullOptions
    kind: Format
    prepared: Prepared
    """What the listing and the first samples told: the size of a shard follows from it."""
    listing: Path | None
    """The folder on this node in which the listing of the source lies, where its cache needs that."""
    replicate: bool
    """Whether this node draws by itself; else as a coordinator says."""
    upto: int | None
    """Where it draws by itself: the position of the pass that it draws to."""

    def to_json(self) -> Message:
        """Plain values for the arguments of a task."""
        return {
            "job": self.job,
            "url": self.url,
            "source": self.source.to_json(),
            "options": self.options.to_json(),
            "format": self.kind.name,
            "prepared": self.prepared.to_json(),
            "listing": None if self.listing is None else str(self.listing),
            "replicate": self.replicate,
            "upto": self.upto,
        }

    @classmethod
    def from_json(cls, value: Message) -> NodePart:
        """What :meth:`to_json` gave."""
        return cls(
            job=value["job"],
            url=value["url"],
            source=SourceRow.from_json(value["source"]),
            options=PullOptions.from_json(value["options"]),
            kind=get_format(value["format"]),
            prepared=Prepared.from_json(value["prepared"]),
            listing=None if value["listing"] is None else Path(value["listing"]),
            replicate=value["replicate"],
            upto=value["upto"],
        )


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
    max_size: int | str | None,
    min_free: int | str | None,
    part: Message,
) -> Message:
    """Take part in a pull, as the :class:`NodePart` says whose JSON form ``part`` is.

    Gives ``evicted``, the shards that went for it, when it is stopped.
    """
    pull = NodePart.from_json(part)
    row, options = pull.source, pull.options
    with ExitStack() as stack:
        cache = stack.enter_context(
            open_cache(root, max_size=max_size, min_free=min_free, notify=lambda line: channel.send({"note": line}))
        )
        stack.enter_context(leaving_nothing(cache))
        refuse_small_cap(cache, options, pull.kind, pull.prepared, listing=pull.listing)
        holder = cache.holder  # first: another node that has the same folder must not take it away when it is refused
        with cache.catalog.write() as connection:
            holder.register(connection)
            identity = share.identity(connection)
        word = share.part_of(pull.job)
        channel.ask({"what": "enter", "cache": identity, "word": word})
        existing = cache.source(row.id)
        if existing is None:
            stack.callback(withdraw_unused, cache, options.dataset, row.id)
        stack.callback(_unbind, cache, row.id)
        cache.declare(options.dataset, pull.prepared.schema)
        if pull.listing is not None:
            _check_grown(cache, pull.url, existing, pull.listing)
            cache.add_source(replace(row, parts=(), skipped=0), pull.listing, new=existing is None)
        with cache.catalog.write() as connection:
            bind(connection, row.id, row.url, replicate=pull.replicate)
        if pull.replicate:
            ready = _begin(cache, row, pull.job, options.room, pull.upto)
        else:
            ready = _join(channel, cache, row, word, options.room)
        try:
            channel.send({"ready": ready})
            return _watch(channel, cache, row.id, ready["job"], report_evicted=not pull.replicate)
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


def _check_grown(cache: CacheDir, url: str, existing: SourceRow | None, listing: Path) -> None:
    """Raise :class:`UsageError` when a listing that is to replace that of a source has other units where it had some:
    the numbers of what was drawn would mean something else."""
    if existing is None:
        return
    with contextlib.suppress(CacheToolError):
        before = open_source(url, listing, SourceOptions.from_json(existing.options), units=existing.units)
        before.close()
        if before.identity == existing.identity:
            return
    raise UsageError(
        f"the cache {cache.root} has another listing of {existing.url} than the others; give it an empty folder, or"
        " draw into another --dataset"
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
        {"what": "tell", "shards": [asdict(shard) for shard in shards], "source": there.to_json()}
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
        wanted = None if upto is None else max(0, upto - draws.positions_done(connection, now))
        own_job, _ = draws.open_job(
            connection, row.id, holder=holder.id, wanted=wanted, seed=None, room=room, next_pass=False
        )  # fmt: skip
    left = now.units - drawn_of(cache, now) if wanted is None else wanted
    return {"job": own_job, "left": left, "samples": 0, "shards": 0, "bytes": 0}


def _evict(cache: CacheDir, ids: Sequence[str]) -> None:
    """Let shards go whose samples other nodes have; those that are read stay until their readers end."""
    if not ids:
        return
    with cache.catalog.write() as connection:
        cache.holder.register(connection)
        retire(connection, ids, reason="evict", policy="doubled")
        trash = sweep(connection, cache.holder)
    delete_trash(cache.catalog, cache.layout, trash, edge=True)


def _watch(channel: Asking, cache: CacheDir, source: str, job: str, *, report_evicted: bool) -> Message:
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
        if report_evicted and ready - now:
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
