"""What a sampler process does: draw shards out of a source.

The target of a task (:mod:`cachetool.engines`): plain arguments in, plain messages out. Remote stores are
used in here and nowhere else, since their client hangs in a process that was forked after it was first used::

    claim positions -> draw them into shards (cachetool.drawing) -> the next claim, until none is left
                          all of it asked for? -> take the next claim already, and ask for that behind it

So the network is busy while a shard is committed. No sample crosses between processes.
"""

from __future__ import annotations

import time
from pathlib import Path

from cachetool.cache import CacheDir, Room, draws
from cachetool.drawing import Drawing, Plan
from cachetool.engines.task import Channel, Message
from cachetool.errors import CapBlocked
from cachetool.formats import get_format
from cachetool.lister import naming_skip, pace_of
from cachetool.passes import Cached, order_of_turn
from cachetool.pulse import Pulse
from cachetool.schema import Schema
from cachetool.sources import Source, SourceOptions, open_source

__all__ = ["draw"]


def draw(
    channel: Channel,
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
) -> Message:
    """Claim, fetch and commit until the job or the source has nothing left, or no room can be had.

    Gives ``{"full": None or why it stopped for lack of room}``.
    """
    plan = Plan(
        job,
        source,
        dataset,
        get_format(format),
        Schema.from_json(schema),
        shard_bytes,
        Room(**room),
        skip_bad,
        per_unit,
    )
    parsed = SourceOptions.from_json(options)
    with naming_skip(skip_bad=skip_bad), CacheDir(Path(root)) as cache:
        samples: Source | None = None
        cached = Cached()
        row = cache.source(source)

        def whole(turn: int, start: int, stop: int) -> int:
            assert row is not None
            assert samples is not None
            order = order_of_turn(samples, row, turn)
            return cached.reach(order, start, stop, end=row.units) if turn == row.turn else order.whole(start, stop)

        def ahead() -> Drawing | None:
            """The next claim, while this one is at its end; None when there is none, or the source has grown.

            Of what was lost there is none either: each claim of that decides what is left of it.
            """
            nonlocal row
            assert samples is not None
            if lost:
                return None
            with cache.catalog.write() as connection:
                now = draws.source_row(connection, source)
                if now is None or now.units != samples.units:
                    return None
                row = now
                cached.look(connection, samples, now)
                held = draws.claim(connection, job, holder=cache.holder.id, most=units_per_shard, whole=whole)
            return None if held is None else Drawing(cache, samples, plan, held, channel, cached)

        pulse, coming = Pulse(channel), None
        try:
            while row is not None:
                if coming is not None:
                    drawing, coming = coming, None
                    coming = drawing.run(ahead)
                    continue
                if samples is None or samples.units != row.units:
                    if samples is not None:
                        samples.close()  # it has grown
                    samples = open_source(url, cache.listing(source), parsed, units=row.units, pace=pace_of(pace))
                with cache.catalog.read() as connection:
                    cached.look(connection, samples, row)  # most of the work, before others must wait for it
                with cache.catalog.write() as connection:
                    cache.holder.register(connection)
                    now, row = row, draws.source_row(connection, source)
                    if row is None or row.units != now.units:
                        continue
                    cached.look(connection, samples, row)
                    held = draws.claim(
                        connection, job, holder=cache.holder.id, most=units_per_shard, whole=whole, lost=lost
                    )
                    rest = held is None and follow
                    rest = rest and (cached.all_there(connection, samples, row) or draws.idle(connection, source))
                    if held is None and follow and not rest:
                        draws.next_turn(connection, source)
                    left = draws.job_row(connection, job).left
                if held is not None:
                    coming = Drawing(cache, samples, plan, held, channel, cached)
                elif follow or not (row.whole or left == 0 or lost):
                    # Other workers finish the pass, more of the listing comes, or there is no more to fetch.
                    time.sleep(2.0 if rest else 0.2)
                else:
                    break
            return {"full": None}
        except CapBlocked as error:
            return {"full": str(error)}
        finally:
            pulse.stop()
            if coming is not None:
                coming.close()
            if samples is not None:
                samples.close()
            with cache.catalog.write() as connection:
                draws.give_back(connection, cache.holder.id, job)
