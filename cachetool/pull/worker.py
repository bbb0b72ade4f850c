"""What a sampler process does: draw shards out of a source.

The target of a task (:mod:`cachetool.proc`): plain arguments in, plain messages out. Remote stores are
used in here and nowhere else, since their client hangs in a process that was forked after it was first used::

    claim positions -> draw them into shards (cachetool.pull.shards) -> the next claim, until none is left
                          all of it asked for? -> take the next claim already, and ask for that behind it

So the network is busy while a shard is committed. No sample crosses between processes.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from cachetool.cache import CacheDir, Claim, Room, SourceRow
from cachetool.core.errors import CapBlocked
from cachetool.core.schema import Schema
from cachetool.formats import get_format
from cachetool.proc.task import Asking, Message
from cachetool.pull.claims import Claims, Handed, Own
from cachetool.pull.listing import naming_skip, pace_of
from cachetool.pull.reports import Heartbeat
from cachetool.pull.shards import Drawing, FirstShard, WorkerJob
from cachetool.sources import Source, SourceOptions, open_source
from cachetool.sources.looked import LookedAt

__all__ = ["draw"]


def draw(
    channel: Asking,
    *,
    root: str,
    url: str,
    options: Message,
    job: str,
    source: str,
    dataset: str,
    format: str,
    schema: list[Message],
    shard_bytes: int,
    units_per_shard: int,
    per_unit: int,
    room: Message,
    follow: bool,
    lost: bool,
    skip_bad: bool,
    pace: Message | None,
    again: Sequence[tuple[Sequence[tuple[int, int]], str]],
    first_shard_in: float | None = None,
    looked: str | None = None,
    handed: bool = False,
) -> Message:
    """Claim, fetch and commit until the job or the source has nothing left, or no room can be had. With ``handed`` the
    claims are asked for through ``channel``. With ``again`` each claim is one shard that was there before: its draws,
    and its content digest. The first shard is closed ``first_shard_in`` seconds from now with what it has by then.
    What was fetched before lies in ``looked``.

    Gives ``{"full": None or why it stopped for lack of room}``.
    """
    shards = {(ranges[0][0], ranges[-1][1]): (ranges, content) for ranges, content in again}
    plan = WorkerJob(
        job,
        source,
        dataset,
        get_format(format),
        Schema.from_json(schema),
        shard_bytes,
        Room(**room),
        skip_bad,
        per_unit,
        FirstShard(first_shard_in),
        {claim: content for claim, (_, content) in shards.items()},
    )
    parsed = SourceOptions.from_json(options)
    through = (lambda store: store) if looked is None else LookedAt(Path(looked)).over
    with naming_skip(skip_bad=skip_bad), CacheDir(Path(root)) as cache:

        def opened(row: SourceRow) -> Source:
            return open_source(url, cache.listing(source), parsed, units=row.units, pace=pace_of(pace), through=through)

        claims: Claims
        if handed:
            claims = Handed(channel, opened, job=job, most=units_per_shard)
        else:
            claims = Own(
                cache, opened, job=job, source=source, most=units_per_shard, follow=follow, lost=lost,
                again={claim: ranges for claim, (ranges, _) in shards.items()},
            )  # fmt: skip

        def drawing_of(held: Claim | None) -> Drawing | None:
            return None if held is None else Drawing(cache, claims, plan, held, channel)

        pulse, coming = Heartbeat(channel), None
        try:
            while True:
                if coming is None:
                    held = claims.take()
                    if held is None:
                        break
                    if not isinstance(held, Claim):
                        time.sleep(held)
                        continue
                    coming = drawing_of(held)
                    assert coming is not None
                drawing, coming = coming, None
                coming = drawing.run(lambda: drawing_of(claims.ahead()))
            return {"full": None}
        except CapBlocked as error:
            return {"full": str(error)}
        finally:
            pulse.stop()
            if coming is not None:
                coming.close()
            claims.give_back()
