"""``pull``: from a source to committed shards, by worker processes that this module only plans and watches.

::

    check options -> list and probe in a child (nothing written to the cache yet) -> check the cap
      -> fix the schema, take in the listing, open a job -> workers claim, fetch, write, commit -> result

A pull that fails before the job leaves the cache as it was, byte for byte.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace

from cachetool.cache import CacheDir, SourceRow, again, draws
from cachetool.cache.catalog import Connection
from cachetool.cache.draws import close_job, job_row
from cachetool.cache.growth import grow_source
from cachetool.cache.history import edged
from cachetool.cache.kinds import AGAIN
from cachetool.cache.unmaking import leaving_nothing, withdraw_unused
from cachetool.core.errors import AccessDenied, BadObject, CacheToolError, CapBlocked, Interrupted, Unreachable
from cachetool.core.progress import Progress, Report, silent
from cachetool.core.text import count as counted
from cachetool.core.units import size_option
from cachetool.formats import get_format
from cachetool.proc.parent import LocalEngine
from cachetool.proc.scratch import listing_scratch
from cachetool.proc.task import Message, Task
from cachetool.pull.job import AT_ITS_END, Elsewhere, PullJob, PullResult, why_ended
from cachetool.pull.options import PullOptions
from cachetool.pull.prepare import (
    cap_for_all,
    check_place,
    drawn_as,
    drawn_of,
    faults_of,
    format_of,
    looked_at,
    pace,
    prepare,
    refuse_cache,
    refuse_small_cap,
    samples_per_shard,
    shard_bytes,
    source_id,
    source_row,
)
from cachetool.pull.reports import CacheFill, WorkerReports
from cachetool.sources import SourceOptions
from cachetool.sources.segments import SEGMENT
from cachetool.stores.credentials import marks

__all__ = ["PullResult", "ask_for_more", "pull", "pull_and_follow", "pull_on"]

RETRY = (5.0, 60.0)
"""Seconds until a store that was reached before is tried again: at first, and at most."""
_LOOK = 1.0
"""Seconds between two looks whether there are other credentials meanwhile."""

_FEW = 64
"""Samples that are seldom more than one shard, so that one process is started for them."""


def pull(
    cache: CacheDir, url: str, options: PullOptions, *, report: Report = silent, elsewhere: Elsewhere | None = None
) -> PullResult:
    """Draw samples of ``url`` into ``cache``, or into caches ``elsewhere`` that it has the catalog of.

    ``report`` receives :class:`Progress` values. Raises :class:`UsageError` for options that do not fit the cache,
    :class:`SourceError` for the remote side, :class:`CapTooSmall` before the first byte when the cap cannot hold one
    shard, :class:`CapBlocked` when fewer samples than asked for fit.
    """
    began = time.monotonic()
    check_place(url)
    refuse_cache(url)
    id = source_id(url, options)
    with ExitStack() as stack:
        stack.enter_context(leaving_nothing(cache))
        # One process lists the source and then draws, as the others do, which load what they need meanwhile.
        engine = stack.enter_context(LocalEngine())
        few = options.samples is not None and options.samples <= _FEW
        engine.expect(1 if few or elsewhere is not None else options.workers, "cachetool.pull.worker")
        if elsewhere is not None:
            elsewhere.refuse(cache, id, url)
            if cache.source(id) is None:
                elsewhere.restore(cache, id, stack.enter_context(listing_scratch()))
        known = cache.source(id)
        flight = options.source.concurrency
        plain = SourceOptions(stem=options.source.stem, read_as=options.source.read_as)
        if known is not None and replace(options.source, concurrency=None) == plain:
            # Pulled before, and nothing said now: the same fields by the same names.
            again = SourceOptions.from_json(known.options)
            options = replace(options, source=replace(again, concurrency=flight))
        # Outside of the cache until its size is known: what is in the cache is charged first.
        scratch = stack.enter_context(listing_scratch())
        kept = known is not None and (cache.listing(id) / "listing.json").exists()
        listing = cache.listing(id) if kept else scratch / "listing"
        new = None if listing == cache.listing(id) else listing
        if known is not None and new is None and not (known.complete or options.start_early or options.again):
            engine.run([_listing(cache, url, options, id)], _reported(report))
            known = cache.source(id)
        limit = pace(options, scratch)
        order = drawn_as(known if known is not None or elsewhere is None else elsewhere.known(), options)
        schema, found = prepare(engine, cache, url, options, listing, order, known, scratch, report)
        cap, newest = cache.max_size, format_of(cache, options.dataset)
        if elsewhere is not None:
            cap, newest = elsewhere.cap, elsewhere.format
        kind = get_format(options.to or newest or "lmdb")
        nbytes = shard_bytes(cap, options)
        per_shard = samples_per_shard(cap, options, schema, kind, found)
        if elsewhere is None:
            refuse_small_cap(cache, options, schema, kind, found, listing=new)
        if known is None:
            stack.callback(withdraw_unused, cache, options.dataset, id)
        cache.declare(options.dataset, schema)
        row, change = source_row(id, options, found, order, known), found["change"]
        if new is not None:
            cache.add_source(row, new, new=known is None)
        elif change is not None and (change["added"] or change["vanished"]):
            segment = {name: change[name] for name in ("name", "units", "identity")}
            grow_source(cache, row, scratch / "segment", complete=True, **segment)
        per_unit = max([found["per_unit"], *(each.per_unit for each in options.again)])
        per_shard = max(1, per_shard // per_unit)
        looked, is_new = looked_at(url, scratch) if elsewhere is None else None, newest is None
        settled = PullJob(
            url, options, id, schema, kind, nbytes, per_shard, per_unit, found, limit, began, looked, is_new
        )
        if elsewhere is None:
            made = _draw(engine, cache, settled, report)
        else:
            engine.dismiss()
            made = elsewhere.draw(cache, settled, report)
        if not options.lost:
            made = _checked(cache, id, made)
        made = replace(made, left_out=tuple((name, why) for name, why in found["left_out"]))
        if change is None:
            return made
        return replace(
            made, added=change["added"], vanished=change["vanished"], vanished_examples=tuple(change["names"])
        )


def pull_on(
    cache: CacheDir,
    url: str,
    options: PullOptions,
    *,
    report: Report,
    may_wait: Callable[[], bool],
    waits: Callable[[CacheToolError], None],
) -> PullResult:
    """A pull without an end, which goes on after the store was out of reach or took the credentials no longer, for as
    long as that takes: ever more rarely, and at once when a file of credentials changes.

    ``may_wait`` says whether an error is to be waited for, ``waits`` is told of it. Raises as :func:`pull` otherwise.
    """
    pause = RETRY[0]
    while True:
        began = time.monotonic()
        try:
            return pull(cache, url, options, report=report)
        except (AccessDenied, Unreachable) as error:
            if not may_wait():
                raise
            pause = RETRY[0] if time.monotonic() - began > RETRY[1] else min(2 * pause, RETRY[1])
            waits(error)
            until, before = time.monotonic() + pause, marks()
            while (left := until - time.monotonic()) > 0 and marks() == before:
                time.sleep(min(_LOOK, left))


def pull_and_follow(
    cache: CacheDir, url: str, options: PullOptions, *, report: Report, notify: Callable[[str], None]
) -> PullResult:
    """:func:`pull_on` for a command: once samples have come it is waited for the store, and ``notify`` says why."""
    reached = False
    told = ""

    def reported(step: Progress) -> None:
        nonlocal reached
        reached = reached or (step.phase == "pull" and step.done > 0)
        report(step)

    def waits(error: CacheToolError) -> None:
        nonlocal told
        if str(error) != told:
            told = str(error)
            notify(f"warning: {told}\ntrying again until that succeeds or this is stopped")

    return pull_on(cache, url, options, report=reported, may_wait=lambda: reached, waits=waits)


def _checked(cache: CacheDir, id: str, made: PullResult) -> PullResult:
    """Raises :class:`BadObject` when a pass is at its end without more samples than may be left out: the pull that met
    them said so, and one that is run again must not call it done."""
    source = cache.source(id)
    faults, advice = ("", "") if source is None else faults_of(cache, source)
    if faults and made.reason == AT_ITS_END:
        raise BadObject(f"all else was drawn, but {faults};\n{advice}")
    return replace(made, warning=faults)


def _listing(cache: CacheDir, url: str, options: PullOptions, id: str) -> Task:
    """The rest of a listing that is not whole."""
    root, source = str(cache.root.resolve()), options.source.to_json()
    return Task(
        "cachetool.pull.listing:list_on", {"root": root, "url": url, "source": id, "options": source, "early": SEGMENT}
    )


def _reported(report: Report) -> Callable[[int, Message], None]:
    return lambda _, message: report(Progress("list", message["listed"]))


def _draw(engine: LocalEngine, cache: CacheDir, settled: PullJob, report: Report) -> PullResult:
    """Open the job, run the workers, close it."""
    url, options, id, kind, wanted = settled.url, settled.options, settled.id, settled.kind, settled.wanted
    only = options.again
    per_shard, per_unit, schema = settled.per_shard, settled.per_unit, settled.schema
    holder = cache.holder  # before the transaction: a new cap takes effect in one of its own

    def begin(connection: Connection) -> tuple[str, SourceRow]:
        holder.register(connection)
        job, source = draws.open_job(
            connection, id, holder=holder.id, wanted=wanted, seed=options.seed, room=options.room,
            next_pass=not (options.lost or only), kind=AGAIN if only else "",
        )  # fmt: skip
        if only:
            again.reserve(connection, cache.layout, job, source, only, holder=holder.id)
        return job, source

    job, source = edged(cache.catalog, cache.layout, begin)
    left = source.units - drawn_of(cache, source)
    count = left if wanted is None else wanted if only else min(left, wanted)
    endless = options.follow or not (source.complete or only)
    workers = options.workers if endless else max(1, min(options.workers, -(-count // per_shard)))
    task = settled.task(str(cache.root.resolve()), job)
    tasks = [task] * workers if count or endless else []
    if not (source.complete or only):
        tasks.append(_listing(cache, url, options, id))
    tally = WorkerReports()
    target = None if endless and wanted is None else (wanted if endless and wanted is not None else count) * per_unit

    fill = CacheFill(cache, job)

    def on_message(worker: int, message: Message) -> None:
        if "listed" in message:
            return
        tally.add(worker, message)
        fill.look()
        report(
            Progress(
                "pull",
                tally.arrived,
                target,
                tally.moved,
                note=next(iter(tally.waiting.values()), ""),
                shards=tally.shards,
                flying=sum(flying for flying, _ in tally.busy.values()),
                retries=sum(retries for _, retries in tally.busy.values()),
                used=fill.used,
                cap=fill.cap,
                evicted=fill.evicted,
            )
        )

    full: list[str] = []
    try:
        report(Progress("pull", 0, target))
        more = True
        while more:
            outcomes = engine.run(tasks, on_message, last=True)
            full = [outcome["full"] for outcome in outcomes if outcome.get("full")]
            tasks = [settled.task(str(cache.root.resolve()), job, first_shard_in=None)] * min(workers, len(tasks))
            more = not full and ask_for_more(cache, job, tally.samples, options.samples)
    except Interrupted:
        raise
    except CacheToolError as error:
        cache.catalog.note_error(source.url, f"{type(error).__name__}: {error}", dataset=options.dataset)
        raise
    finally:
        ended = edged(cache.catalog, cache.layout, lambda connection: close_job(connection, job))
    source = cache.source(id) or source
    complete = not only and source.complete and drawn_of(cache, source) >= source.units
    if full and options.evicts and not complete and (options.samples is None or tally.samples < options.samples):
        asked = min(source.samples, count * per_unit) if options.samples is None else options.samples
        cap = cap_for_all(cache, job, options, schema, kind, samples=min(asked, source.samples or asked))
        larger = f"raise --max-size{f' to about {size_option(cap)} for all of them' if cap else ''}"
        renewed = "" if options.lost or only else ", or let --follow renew what this cap holds"
        went = f", for which {counted(ended.evicted, 'older shard')} went" if ended.evicted else ""
        raise CapBlocked(
            f"stopped at the cap with {tally.samples} of {asked} samples{went}: {full[0]};\n{larger}{renewed}"
        )
    return PullResult(
        source=source.url,
        dataset=options.dataset,
        format=kind.name,
        seed=source.seed,
        samples=tally.samples,
        skipped=tally.skipped,
        skipped_examples=tuple(tally.examples),
        bytes=tally.payload,
        fetched=tally.fetched,
        shards=tally.shards,
        evicted_shards=ended.evicted,
        seconds=round(time.monotonic() - settled.began, 3),
        pass_complete=complete,
        reason=why_ended(tally.samples, options.samples, complete=complete, full=bool(full)),
    )


def ask_for_more(cache: CacheDir, job: str, samples: int, wanted: int | None) -> bool:
    """Raise the draws of a job whose archives had fewer samples than was thought, by as many as what came of them so
    far says: the same ones, however many workers there are. False when it needs none, or has some left: the source
    ended."""
    if wanted is None or samples >= wanted:
        return False
    with cache.catalog.write() as connection:
        now = job_row(connection, job)
        if now.left != 0:
            return False
        more = max(1, (wanted - samples) * now.committed // max(1, samples))
        connection.execute("UPDATE jobs SET wanted = wanted + ? WHERE id = ?", (more, job))
    return True
