"""``pull``: from a source to committed shards, by worker processes that this module only plans and watches.

::

    check options -> list and probe in a child (nothing written to the cache yet) -> check the cap
      -> fix the schema, take in the listing, open a job -> workers claim, fetch, write, commit -> result

A pull that fails before the job leaves the cache as it was, byte for byte.
"""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from cachetool.cache import CacheDir, SourceRow, draws
from cachetool.cache.catalog import Connection
from cachetool.cache.draws import close_job, job_row
from cachetool.cache.growth import grow_source
from cachetool.cache.history import edged
from cachetool.cache.layout import cache_option
from cachetool.cache.own_parts import assign
from cachetool.cache.unmaking import leaving_nothing, withdraw_unused
from cachetool.core.errors import AccessDenied, BadObject, CacheToolError, CapBlocked, Interrupted, Unreachable
from cachetool.core.names import Id
from cachetool.core.progress import Progress, Report, silent
from cachetool.core.text import count as counted
from cachetool.core.units import size_option
from cachetool.formats import get_format
from cachetool.proc.parent import LocalEngine
from cachetool.proc.scratch import listing_scratch
from cachetool.proc.task import Message, Task
from cachetool.pull.job import AT_ITS_END, Prepared, PullJob, PullResult, why_ended
from cachetool.pull.options import PullOptions
from cachetool.pull.prepare import (
    cap_for_all,
    drawn_as,
    drawn_of,
    faults_of,
    format_of,
    looked_at,
    pace,
    parts_of,
    prepare,
    refuse_cache,
    refuse_other_names,
    refuse_small_cap,
    samples_per_shard,
    shard_bytes,
    source_id,
    source_row,
    with_classes,
)
from cachetool.pull.reports import CacheFill, WorkerReports
from cachetool.sources.listing import TABLE_FILE
from cachetool.sources.options import SourceOptions
from cachetool.sources.readers import notes_of
from cachetool.sources.registry import check_place
from cachetool.sources.segments import SEGMENT, SegmentedListing
from cachetool.stores.credentials import marks

__all__ = ["PullResult", "fields_as_before", "pull", "pull_and_follow", "pull_on", "pull_within"]

RETRY = (5.0, 60.0)
"""Seconds until a store that was reached before is tried again: at first, and at most."""
_LOOK = 1.0
"""Seconds between two looks whether there are other credentials meanwhile."""

_FEW = 64
"""Samples that are seldom more than one shard, so that one process is started for them."""


def pull(cache: CacheDir, url: str, options: PullOptions, *, report: Report = silent) -> PullResult:
    """Draw samples of ``url`` into ``cache``.

    ``report`` receives :class:`Progress` values. Raises :class:`UsageError` for options that do not fit the cache,
    :class:`SourceError` for the remote side, :class:`CapTooSmall` before the first byte when the cap cannot hold one
    shard, :class:`CapBlocked` when fewer samples than asked for fit.
    """
    result, blocked = pull_within(cache, url, options, report=report)
    if blocked is not None:
        raise blocked
    return result


def pull_within(
    cache: CacheDir,
    url: str,
    options: PullOptions,
    *,
    report: Report = silent,
    next_pass: bool = False,
    pace_file: Path | None = None,
) -> tuple[PullResult, CapBlocked | None]:
    """:func:`pull`, which gives the error of a cap that stopped it beside what came until then.

    ``next_pass``: a complete pass is followed by a new one, which of a source in parts happens with ``follow`` alone
    otherwise. ``pace_file``: what the limit on bytes a second is kept in, where somebody else changes the share.
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
        engine.expect(1 if few else options.workers, "cachetool.pull.worker")
        source = cache.source(id)
        if source is None:
            refuse_other_names(cache, url, options)
        cut, _ = share = parts_of(cache, source, options)
        options = fields_as_before(options, source)
        # Outside of the cache until its size is known: what is in the cache is charged first.
        scratch = stack.enter_context(listing_scratch())
        is_listed = source is not None and (cache.listing(id) / "listing.json").exists()
        new_listing = None if is_listed else scratch / "listing"
        if source is not None and is_listed and not (source.complete or options.start_early):
            engine.run([_listing(cache, url, options, id)], _reported(report))
            source = cache.source(id)
        order = drawn_as(source, options)
        prepared = prepare(
            engine, cache, url, options, listing=new_listing or cache.listing(id), order=order, source=source,
            share=share, scratch=scratch, report=report,
        )  # fmt: skip
        options = options.with_source(with_classes(options.source, prepared.schema))
        formats = {shard.format for shard in cache.shards(options.dataset)}
        plan = _plan(cache, url, options, prepared, id=id, cut=cut, scratch=scratch, began=began)
        if pace_file is not None and plan.pace is not None:
            plan = replace(plan, pace={**plan.pace, "path": str(pace_file)})
        refuse_small_cap(cache, options, plan.kind, prepared, listing=new_listing)
        if source is None:
            stack.callback(withdraw_unused, cache, options.dataset, id)
        cache.declare(options.dataset, prepared.schema)
        row, change = source_row(id, options, prepared, order, cut, source), prepared.change
        if new_listing is not None:
            cache.add_source(row, new_listing, new=source is None)
        released = 0
        if source is not None and options.share is not None:
            sizes = {part: size for part, size, _ in prepared.parts}
            released = assign(cache, source.id, cut, sizes, prepared.segments, repart=options.repart)
        for name, units, identity in () if new_listing is not None or change is None else change.segments:
            row = grow_source(cache, row, scratch / name, name, units=units, identity=identity, complete=True)
        result, blocked = _draw(engine, cache, plan, report, next_pass=next_pass)
        if not options.reopened and blocked is None:
            result = _checked(cache, id, result)
        skipped, counts = prepared.left_out, prepared.left_out_counts
        if not prepared.complete:  # other names came meanwhile
            listing = SegmentedListing.open(cache.listing(id))
            skipped, counts = listing.names, listing.left_out
        left_out, notes = notes_of(skipped)
        result = replace(
            result, left_out=left_out, left_out_counts=dict(counts), notes=notes,
            of_objects=not (cache.listing(id) / TABLE_FILE).exists(),
            warning=_other_format(result, formats, cache), released=released,
        )  # fmt: skip
        if change is not None:
            result = replace(result, added=change.added, vanished=change.vanished, vanished_examples=change.names)
        return result, blocked


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
    last_error = ""

    def reported(step: Progress) -> None:
        nonlocal reached
        reached = reached or (step.phase == "pull" and step.done > 0)
        report(step)

    def waits(error: CacheToolError) -> None:
        nonlocal last_error
        if str(error) != last_error:
            last_error = str(error)
            notify(f"warning: {last_error}\ntrying again until that succeeds or this is stopped")

    return pull_on(cache, url, options, report=reported, may_wait=lambda: reached, waits=waits)


def fields_as_before(options: PullOptions, source: SourceRow | None) -> PullOptions:
    """For a source that was pulled before, where nothing is said now: the same fields by the same names."""
    given = options.source
    plain = SourceOptions(
        stem=given.stem, read_as=given.read_as, include=given.include, exclude=given.exclude,
        follow_links=given.follow_links,
    )  # fmt: skip
    if source is None or replace(given, concurrency=None, list_workers=1) != plain:
        return options
    stored = SourceOptions.from_json(source.options)
    stored = replace(stored, stem=given.stem or stored.stem, concurrency=given.concurrency)
    return options.with_source(replace(stored, list_workers=given.list_workers))


def _plan(
    cache: CacheDir,
    url: str,
    options: PullOptions,
    prepared: Prepared,
    *,
    id: Id,
    cut: int,
    scratch: Path,
    began: float,
) -> PullJob:
    """What is settled before the first sample is drawn; changes nothing."""
    cap, newest, looked = cache.max_size, format_of(cache, options.dataset), looked_at(url, scratch)
    kind = get_format(options.to or newest or "lmdb")
    return PullJob(
        url=url,
        options=options,
        id=id,
        kind=kind,
        shard_bytes=shard_bytes(cap, options),
        per_shard=max(1, samples_per_shard(cap, options, kind, prepared) // prepared.per_unit),
        per_unit=prepared.per_unit,
        prepared=prepared,
        pace=pace(options, scratch),
        began=began,
        looked=looked,
        is_new=newest is None,
        cut=cut,
    )


def _other_format(result: PullResult, formats: set[str], cache: CacheDir) -> str:
    """The warning of a pull, and that the dataset has shards of other formats than those that came."""
    others = sorted(formats - {result.format})
    if not others or not result.shards:
        return result.warning
    dataset = "" if result.dataset == "default" else f" --dataset {shlex.quote(result.dataset)}"
    mixed = (
        f"dataset {result.dataset!r} has {' and '.join(others)} shards beside these in {result.format}; for one format:"
        f" cachetool convert --to {result.format}{dataset}{cache_option(cache.root)}"
    )
    return f"{result.warning}; {mixed}" if result.warning else mixed


def _checked(cache: CacheDir, id: str, result: PullResult) -> PullResult:
    """Raises :class:`BadObject` when a pass is at its end without more samples than may be left out: the pull that met
    them said so, and one that is run again must not call it done."""
    source = cache.source(id)
    faults, advice = ("", "") if source is None else faults_of(cache, source)
    if faults and result.reason == AT_ITS_END:
        raise BadObject(f"all else was drawn, but {faults};\n{advice}")
    return replace(result, warning=faults)


def _listing(cache: CacheDir, url: str, options: PullOptions, id: str) -> Task:
    """The rest of a listing that is not whole."""
    root, source = str(cache.root.resolve()), options.source.to_json()
    return Task(
        "cachetool.pull.listing:list_on",
        {
            "root": root, "url": url, "source": id, "options": source, "early": SEGMENT,
            "skip_keys": options.on_error == "skip",
        },
    )  # fmt: skip


def _reported(report: Report) -> Callable[[int, Message], None]:
    return lambda _, message: report(Progress("list", message["listed"]))


def _draw(
    engine: LocalEngine, cache: CacheDir, plan: PullJob, report: Report, *, next_pass: bool
) -> tuple[PullResult, CapBlocked | None]:
    """Open the job, run the workers, close it; gives what came, and the error of a cap that stopped it."""
    options, wanted, samples = plan.options, plan.wanted, plan.options.samples
    job, source = _open_job(cache, plan, next_pass=next_pass)
    if plan.upto is None:
        left = source.size - drawn_of(cache, source)
        count = left if wanted is None else min(left, wanted)
    else:
        with cache.catalog.read() as connection:
            count = draws.draws_left(connection, source, plan.limits(source))
        samples = count * plan.per_unit
    endless = options.follow or not source.complete
    workers = options.workers if endless else max(1, min(options.workers, -(-count // plan.per_shard)))
    root = str(cache.root.resolve())
    tasks = [plan.task(root, job)] * workers if count or endless or options.reopened else []
    if not source.complete:
        tasks.append(_listing(cache, plan.url, options, plan.id))
    reports = WorkerReports()
    goal = wanted if endless else count
    target = None if goal is None else goal * plan.per_unit
    on_message = _watched(reports, CacheFill(cache, job), target, report)
    full: list[str] = []
    try:
        report(Progress("pull", 0, target))
        more = True
        while more:
            outcomes = engine.run(tasks, on_message, last=True)
            full = [outcome["full"] for outcome in outcomes if outcome.get("full")]
            tasks = [plan.task(root, job, first_shard_in=None)] * min(workers, len(tasks))
            more = not full and plan.upto is None and _ask_for_more(cache, job, reports.samples, samples)
    except Interrupted:
        raise
    except CacheToolError as error:
        cache.catalog.note_error(source.url, f"{type(error).__name__}: {error}", dataset=options.dataset)
        raise
    finally:
        ended = edged(cache.catalog, cache.layout, lambda connection: close_job(connection, job))
    source = cache.source(plan.id) or source
    complete, blocked = source.complete and drawn_of(cache, source) >= source.size, None
    if full and options.evicts and not complete and (samples is None or reports.samples < samples):
        asked = min(source.samples, count * plan.per_unit) if samples is None else samples
        cap = cap_for_all(
            cache, job, options, plan.schema, plan.kind, samples=min(asked, source.samples or asked)
        )  # fmt: skip
        blocked = _stopped(options, f"{reports.samples} of {asked}", full[0], evicted=ended.evicted, cap=cap)
    result = PullResult(
        source=source.url,
        dataset=options.dataset,
        format=plan.kind.name,
        seed=source.seed,
        samples=reports.samples,
        skipped=reports.skipped,
        skipped_examples=tuple(reports.examples),
        bytes=reports.payload,
        fetched=reports.fetched,
        shards=reports.shards,
        evicted_shards=ended.evicted,
        seconds=round(time.monotonic() - plan.began, 3),
        pass_complete=complete,
        reason=why_ended(reports.samples, samples if plan.upto is None else None, complete=complete, full=bool(full)),
        listing=source.identity,
        cut=source.cut,
        parts=tuple(part.number for part in source.parts),
    )
    return result, blocked


def _open_job(cache: CacheDir, plan: PullJob, *, next_pass: bool) -> tuple[str, SourceRow]:
    """The id of a new job, and its source as it is then."""
    options = plan.options
    holder = cache.holder  # before the transaction: a new cap takes effect in one of its own

    def begin(connection: Connection) -> tuple[str, SourceRow]:
        holder.register(connection)
        return draws.open_job(
            connection, plan.id, holder=holder.id, wanted=plan.wanted, upto=plan.upto, seed=options.seed,
            room=options.room, next_pass=next_pass or (plan.wanted is not None and not options.reopened),
        )  # fmt: skip

    return edged(cache.catalog, cache.layout, begin)


def _watched(
    reports: WorkerReports, fill: CacheFill, target: int | None, report: Report
) -> Callable[[int, Message], None]:
    """For messages of workers: taken into ``reports``, and what they come to told to ``report``."""

    def on_message(worker: int, message: Message) -> None:
        if "listed" in message:
            return
        reports.add(worker, message)
        fill.look()
        report(
            Progress(
                "pull",
                reports.arrived,
                target,
                reports.moved,
                note=next(iter(reports.waiting.values()), ""),
                shards=reports.shards,
                flying=sum(flying for flying, _ in reports.busy.values()),
                retries=sum(retries for _, retries in reports.busy.values()),
                used=fill.used,
                cap=fill.cap,
                evicted=fill.evicted,
            )
        )

    return on_message


def _stopped(options: PullOptions, share: str, why: str, *, evicted: int, cap: int | None) -> CapBlocked:
    """The error of a pull that came to ``share`` of its samples; ``cap`` would hold all."""
    larger = f"raise --max-size{f' to about {size_option(cap)} for all of them' if cap else ''}"
    renewed = "" if options.reopened else ", or let --follow renew what this cap holds"
    went = f", for which {counted(evicted, 'older shard')} went" if evicted else ""
    return CapBlocked(f"stopped at the cap with {share} samples{went}: {why};\n{larger}{renewed}")


def _ask_for_more(cache: CacheDir, job: str, samples: int, wanted: int | None) -> bool:
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
