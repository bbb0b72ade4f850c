"""The pull worker: a process that draws samples of a source into shards.

This module is the target of a task (:mod:`cachetool.proc`): plain arguments in, plain messages out. Remote stores are
used in such processes only, because their client hangs in a process that was forked after its first use::

    claim positions -> draw them into shards (cachetool.pull.shards) -> the next claim, until none is left
                          all of it asked for? -> take the next claim already, and ask for that behind it

So the network is busy while a shard is committed. No sample crosses between processes.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from cachetool.cache import CacheDir, Claim, Room, SourceRow
from cachetool.core.errors import CapBlocked
from cachetool.core.schema import Schema
from cachetool.formats.compression import compressed
from cachetool.proc.task import Channel, Message
from cachetool.pull.claims import Claims
from cachetool.pull.job import WorkerArguments
from cachetool.pull.listing import pace_of
from cachetool.pull.reports import Heartbeat
from cachetool.pull.shards import Drawing, FirstShard, WorkerJob
from cachetool.pull.step_times import StepTimes
from cachetool.sources.base import Source
from cachetool.sources.blame import naming_skip
from cachetool.sources.looked import LookedAt
from cachetool.sources.options import SourceOptions
from cachetool.sources.registry import open_source

__all__ = ["draw"]


def draw(channel: Channel, **arguments: Any) -> Message:
    """Claim, fetch and commit until the job or the source has nothing left, or no space can be made.

    ``arguments`` are the fields of :class:`WorkerArguments`. Return ``{"full": reason}``; the reason is None unless the
    worker stopped for lack of room.
    """
    task = WorkerArguments(**arguments)
    plan = _plan(task)
    with naming_skip(skip_bad=task.skip_bad), CacheDir(Path(task.root)) as cache:
        claims = _claims(cache, task)

        def drawing_of(claim: Claim | None) -> Drawing | None:
            return None if claim is None else Drawing(cache, claims, plan, claim, channel)

        heartbeat = Heartbeat(channel, plan.times)
        coming: Drawing | None = None
        try:
            while True:
                if coming is None:
                    claim = claims.take()
                    if claim is None:
                        break
                    if not isinstance(claim, Claim):
                        # A number is a pause in seconds: other workers still have open claims, or more of the listing
                        # is to come.
                        time.sleep(claim)
                        continue
                    coming = drawing_of(claim)
                    assert coming is not None
                # `coming` is empty while the drawing runs, so that the `finally` below closes only a drawing that was
                # begun and is not running.
                drawing, coming = coming, None
                # The next claim is taken when all requests of this one are made: the network stays busy while the shard
                # is written, synced and committed.
                coming = drawing.run(lambda: drawing_of(claims.ahead()))
            return {"full": None}
        # A full cache is a result and not an error: the process that started the workers decides, by what was asked
        # for.
        except CapBlocked as error:
            return {"full": str(error)}
        finally:
            heartbeat.stop()
            if coming is not None:
                coming.close()
            # Also after an error: other workers can take these positions at once, and need not wait until this process
            # is found dead.
            claims.give_back()


def _plan(task: WorkerArguments) -> WorkerJob:
    """Return the parameters that are the same for all shards of the worker. The time of the first shard starts now."""
    return WorkerJob(
        job=task.job,
        source=task.source,
        dataset=task.dataset,
        kind=compressed(task.format, task.compression),
        schema=Schema.from_json(task.schema),
        shard_bytes=task.shard_bytes,
        room=Room(**task.room),
        skip_bad=task.skip_bad,
        per_unit=task.per_unit,
        first=FirstShard(task.first_shard_in),
        times=StepTimes(),
    )


def _claims(cache: CacheDir, task: WorkerArguments) -> Claims:
    options = SourceOptions.from_json(task.options)
    # The listing process kept the objects that it read for the schema, so they are not fetched twice.
    through = (lambda store: store) if task.looked is None else LookedAt(Path(task.looked)).over

    def opened(row: SourceRow) -> Source:
        return open_source(
            task.url, cache.listing(task.source), options, units=row.units, pace=pace_of(task.pace), through=through
        )

    return Claims(
        cache, opened, job=task.job, source=task.source, most=task.units_per_shard, follow=task.follow,
        reopened=task.reopened,
    )  # fmt: skip
