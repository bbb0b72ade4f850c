"""The command ``pull``: from a source to committed shards. This module plans, and watches the worker processes.

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
from cachetool.cache.shares import set_share
from cachetool.cache.unmaking import leaving_nothing, withdraw_unused
from cachetool.core.errors import AccessDenied, BadObject, CacheToolError, CapBlocked, Interrupted, Unreachable
from cachetool.core.names import Id
from cachetool.core.progress import Progress, Report, silent
from cachetool.core.text import count as counted
from cachetool.core.units import size_option
from cachetool.formats import get_format
from cachetool.formats.compression import AUTO, check_compression, compressed
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
    space_of,
    target_format,
    with_classes,
)
from cachetool.pull.reports import CacheFill, PullNews, WorkerReports
from cachetool.sources.listing import TABLE_FILE
from cachetool.sources.options import SourceOptions
from cachetool.sources.readers import notes_of
from cachetool.sources.registry import check_place
from cachetool.sources.segments import SEGMENT, SegmentedListing
from cachetool.stores.credentials import marks

__all__ = ["PullResult", "fields_as_before", "pull", "pull_and_follow", "pull_on", "pull_within"]

RETRY = (5.0, 60.0)
"""Seconds until a store that was reached before is tried again: the first time, and at most."""
_LOOK = 1.0
"""Seconds between two looks for changed files of credentials."""

_FEW = 64
"""Samples that usually fit into one shard, so that one process is enough for them."""


def pull(cache: CacheDir, url: str, options: PullOptions, *, report: Report = silent) -> PullResult:
    """Draw samples of ``url`` into ``cache``.

    ``report`` receives :class:`Progress` values.

    Raises:
        UsageError: If an option does not fit the cache.
        SourceError: If the store or an object fails.
        CapTooSmall: If the cap cannot hold one shard. Raised before the first byte.
        CapBlocked: If fewer samples than asked for fit.
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
    """Pull as :func:`pull` does, and return the result beside the error of a cap that stopped the pull.

    Args:
        cache: The cache.
        url: The source.
        options: The options of the pull.
        report: Receives :class:`Progress` values.
        next_pass: If True, a complete pass is followed by a new one. Without it, only ``follow`` begins a new pass of a
            source in parts.
        pace_file: The file with the limit on bytes a second, if another process changes this node's share of the limit.

    Returns:
        The result, and the error of the cap; None if the cap did not stop the pull.
    """
    began = time.monotonic()
    # Before anything is started: mistakes in the URL must not cost the start of a process, nor leave a new cache
    # behind.
    check_place(url)
    refuse_cache(url)
    id = source_id(url, options)
    with ExitStack() as stack:
        # Outermost, so that it runs last: a new cache is removed if this pull fails before it stored anything.
        stack.enter_context(leaving_nothing(cache))
        # One process lists the source and then draws. The other workers are started at once and load their modules
        # while it lists.
        engine = stack.enter_context(LocalEngine())
        few = options.samples is not None and options.samples <= _FEW
        engine.expect(1 if few else options.workers, "cachetool.pull.worker")
        source = cache.source(id)
        # A new id may be an old place under other options. Its samples would then be in the dataset twice.
        if source is None:
            refuse_other_names(cache, url, options)
        cut, _ = share = parts_of(cache, source, options)
        options = fields_as_before(options, source)
        # Outside of the cache, because everything inside the cache is charged, and the size of a listing is unknown
        # until it is complete.
        scratch = stack.enter_context(listing_scratch())
        is_listed = source is not None and (cache.listing(id) / "listing.json").exists()
        new_listing = None if is_listed else scratch / "listing"
        # An earlier pull with --start-early was stopped in the middle of the listing. A pull without that option needs
        # the whole source.
        if source is not None and is_listed and not (source.complete or options.start_early):
            engine.run([_listing(cache, url, options, id)], _reported(report))
            source = cache.source(id)
        order = drawn_as(source, options)
        prepared = prepare(
            engine, cache, url, options, listing=new_listing or cache.listing(id), order=order, source=source,
            share=share, scratch=scratch, report=report,
        )  # fmt: skip
        # The numbers of labels are decided by the listing of all folders. Workers get them as names, so that all of
        # them use the same numbers.
        options = options.with_source(with_classes(options.source, prepared.schema))
        # Read before the workers start: afterwards the dataset also has the shards of this pull.
        formats = {shard.format for shard in cache.shards(options.dataset)}
        plan = _plan(cache, url, options, prepared, id=id, cut=cut, scratch=scratch, began=began)
        if pace_file is not None and plan.pace is not None:
            plan = replace(plan, pace={**plan.pace, "path": str(pace_file)})
        # Before the cache is changed: with this cap no shard could ever be written.
        refuse_small_cap(cache, options, plan.kind, prepared, listing=new_listing)
        # Pushed before the source is added, so that a failure at any later step takes source and dataset back, unless
        # another process draws from them.
        if source is None:
            stack.callback(withdraw_unused, cache, options.dataset, id)
        # The dataset first: the row of the source refers to it by a foreign key.
        cache.declare(options.dataset, prepared.schema)
        row, change = source_row(id, options, prepared, order, cut, source), prepared.change
        if new_listing is not None:
            cache.add_source(row, new_listing, new=source is None)
        released = 0
        if source is not None and options.node_parts is not None:
            sizes = {part: size for part, size, _ in prepared.parts}
            released = assign(cache, source.id, cut, sizes, prepared.segments, repart=options.repart)
        # A refresh adds the changed units as segments behind the old ones, so that numbers of units in existing shards
        # keep their meaning.
        for name, units, identity in () if new_listing is not None or change is None else change.segments:
            row = grow_source(cache, row, scratch / name, name, units=units, identity=identity, complete=True)
        result, blocked = _draw(engine, cache, plan, report, next_pass=next_pass)
        # A repair draws only damaged draws and says nothing about the pass. A full cache has an error of its own.
        if not options.reopened and blocked is None:
            result = _checked(cache, id, result)
        skipped, counts = prepared.left_out, prepared.left_out_counts
        # Other segments were listed while the workers drew, so the names from the first segment are not all.
        if not prepared.complete:
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
    """Pull without an end. Wait and try again while the store is out of reach or refuses the credentials.

    The pauses grow, and end at once when a file of credentials changes. ``may_wait`` returns True if the pull should
    wait after an error. ``waits`` receives the error. Other errors are raised as by :func:`pull`.
    """
    pause = RETRY[0]
    while True:
        began = time.monotonic()
        try:
            return pull(cache, url, options, report=report)
        except (AccessDenied, Unreachable) as error:
            if not may_wait():
                raise
            # A pull that ran for more than a minute had most likely reached the store, so the pauses begin anew.
            pause = RETRY[0] if time.monotonic() - began > RETRY[1] else min(2 * pause, RETRY[1])
            waits(error)
            # A refused login usually ends when somebody renews a file of credentials. The pull continues within a
            # second then, and does not wait for the pause.
            until, before = time.monotonic() + pause, marks()
            while (left := until - time.monotonic()) > 0 and marks() == before:
                time.sleep(min(_LOOK, left))


def pull_and_follow(
    cache: CacheDir, url: str, options: PullOptions, *, report: Report, notify: Callable[[str], None]
) -> PullResult:
    """Run :func:`pull_on` for the command line.

    The pull waits for the store once samples have come. ``notify`` receives the reason.
    """
    reached = False
    last_error = ""

    def reported(step: Progress) -> None:
        nonlocal reached
        # Only after samples came: until then an error ends the command, so that the user sees a wrong URL or key at
        # once.
        reached = reached or (step.phase == "pull" and step.done > 0)
        report(step)

    def waits(error: CacheToolError) -> None:
        nonlocal last_error
        # The same error at each retry would fill the terminal for hours.
        if str(error) != last_error:
            last_error = str(error)
            notify(f"warning: {last_error}\ntrying again until the pull succeeds or is stopped")

    return pull_on(cache, url, options, report=reported, may_wait=lambda: reached, waits=waits)


def fields_as_before(options: PullOptions, source: SourceRow | None) -> PullOptions:
    """Return the options with the stored source options if the user gave none that choose fields.

    So a source that was pulled before gives the same fields, by the same names.
    """
    given = options.source
    plain = SourceOptions(
        stem=given.stem, read_as=given.read_as, include=given.include, exclude=given.exclude,
        follow_links=given.follow_links,
    )  # fmt: skip
    # Options about speed say nothing about the samples, so they do not count as a choice of fields.
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
    """Return the parameters of the pull, fixed before the first sample is drawn. Change nothing."""
    cap, newest, looked = space_of(cache, options), format_of(cache, options.dataset), looked_at(url, scratch)
    name = target_format(options, newest)
    named = check_compression(get_format(name), options.compression)
    kind = compressed(name, prepared.compression if named == AUTO else named)
    return PullJob(
        url=url,
        options=options,
        id=id,
        kind=kind,
        shard_bytes=shard_bytes(cap, options),
        # At least one draw: an archive may have more samples than a shard should.
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
    """Return the warning of a pull, extended if the dataset has shards in other formats than this pull wrote."""
    others = sorted(formats - {result.format})
    if not others or not result.shards:
        return result.warning
    dataset = "" if result.dataset == "default" else f" --dataset {shlex.quote(result.dataset)}"
    mixed = (
        f"dataset {result.dataset!r} has {' and '.join(others)} shards beside the new {result.format} shards; for one"
        f" format, run: cachetool convert --to {result.format}{dataset}{cache_option(cache.root)}"
    )
    return f"{result.warning}; {mixed}" if result.warning else mixed


def _checked(cache: CacheDir, id: str, result: PullResult) -> PullResult:
    """Return the result with a warning if too many draws of the pass were skipped.

    Raises:
        BadObject: If the pass is at its end and too many draws were skipped.
    """
    source = cache.source(id)
    faults, advice = ("", "") if source is None else faults_of(cache, source)
    # The pull that met the bad objects ended with an error. The same command, run again, finds nothing to draw and must
    # not report success.
    if faults and result.reason == AT_ITS_END:
        raise BadObject(f"all other samples were drawn, but {faults};\n{advice}")
    return replace(result, warning=faults)


def _listing(cache: CacheDir, url: str, options: PullOptions, id: str) -> Task:
    """Return the task that lists the rest of an incomplete listing."""
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
    """Open the job, run the workers, close the job. Return the result, and the error of a cap that stopped the pull."""
    options, wanted, samples = plan.options, plan.wanted, plan.options.samples
    # The source is taken from this transaction, because other processes may have drawn from it since the look above.
    job, source = _open_job(cache, plan, next_pass=next_pass)
    if plan.upto is None:
        left = source.size - drawn_of(cache, source)
        count = left if wanted is None else min(left, wanted)
    else:
        with cache.catalog.read() as connection:
            count = draws.draws_left(connection, source, plan.limits(source))
        samples = count * plan.per_unit
    endless = options.follow or not source.complete
    # No more workers than shards are needed: a further one would start, find no claim, and end.
    workers = options.workers if endless else max(1, min(options.workers, -(-count // plan.per_shard)))
    root = str(cache.root.resolve())
    tasks = [plan.task(root, job)] * workers if count or endless or options.reopened else []
    # The rest of the listing is one more task beside the workers, which draw from the segments that are there.
    if not source.complete:
        tasks.append(_listing(cache, plan.url, options, plan.id))
    reports = WorkerReports()
    goal = wanted if endless else count
    target = None if goal is None else goal * plan.per_unit
    news = PullNews(cache, url=plan.url, dataset=options.dataset)
    on_message = _watched(reports, CacheFill(cache, job), news, target, report)
    full: list[str] = []
    try:
        report(Progress("pull", 0, target))
        more = True
        while more:
            # In a loop, because a source of archives may need more draws than expected (see _ask_for_more).
            outcomes = engine.run(tasks, on_message, last=True)
            full = [outcome["full"] for outcome in outcomes if outcome.get("full")]
            tasks = [plan.task(root, job, first_shard_in=None)] * min(workers, len(tasks))
            more = not full and plan.upto is None and _ask_for_more(cache, job, reports.samples, samples)
    # Ctrl-C is the user's decision, not an error that `stats` should show.
    except Interrupted:
        raise
    except CacheToolError as error:
        # Kept in the catalog, because trainers and `stats` run in other processes and cannot see this one's stderr.
        cache.catalog.note_error(source.url, f"{type(error).__name__}: {error}", dataset=options.dataset)
        raise
    finally:
        news.tell(reports, last=True)
        # Also after an error: an open job would let the trainers' snapshots free space for a pull that has ended.
        ended = edged(cache.catalog, cache.layout, lambda connection: close_job(connection, job))
    source = cache.source(plan.id) or source
    complete, blocked = source.complete and drawn_of(cache, source) >= source.size, None
    # A plain pull that fills the cache has done what it was asked for. Only a pull with a goal has failed when the cap
    # stops it.
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
    """Open a job. Return its id, and its source as it is then."""
    options = plan.options
    # Before the transaction below, because a new cap takes effect in a transaction of its own.
    holder = cache.holder

    def begin(connection: Connection) -> tuple[str, SourceRow]:
        holder.register(connection)
        if options.share is not None:
            share = None if options.share == "none" else float(options.share)
            set_share(connection, options.dataset, share)
        return draws.open_job(
            connection, plan.id, holder=holder.id, wanted=plan.wanted, upto=plan.upto, seed=options.seed,
            room=options.room, next_pass=next_pass or (plan.wanted is not None and not options.reopened),
        )  # fmt: skip

    return edged(cache.catalog, cache.layout, begin)


def _watched(
    reports: WorkerReports, fill: CacheFill, news: PullNews, target: int | None, report: Report
) -> Callable[[int, Message], None]:
    """Return the function that adds each worker's message to ``reports`` and passes the sums to ``report``."""

    def on_message(worker: int, message: Message) -> None:
        # The process that lists on reports in between. Its numbers are no samples.
        if "listed" in message:
            return
        reports.add(worker, message)
        news.tell(reports)
        # No progress: a worker tells for others what it waits for.
        if message.keys() == {"times"}:
            return
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
    """Return the error of a pull that stopped at the cap with ``share`` of its samples. A cap of ``cap`` would hold
    all."""
    larger = f"raise --max-size{f' to about {size_option(cap)} for all of them' if cap else ''}"
    if "has taken its share" in why:
        larger = "raise --share or --max-size"
    renewed = "" if options.reopened else ", or use --follow to replace old samples by new ones"
    went = f" after evicting {counted(evicted, 'older shard')}" if evicted else ""
    return CapBlocked(f"stopped at the cap with {share} samples{went}: {why};\n{larger}{renewed}")


def _ask_for_more(cache: CacheDir, job: str, samples: int, wanted: int | None) -> bool:
    """Raise the number of draws of a job whose archives had fewer samples than expected. Return True if the workers
    continue.

    The number is raised by the mean of all archives so far. Return False if enough samples came, or if draws are left:
    then the source has ended.
    """
    if wanted is None or samples >= wanted:
        return False
    with cache.catalog.write() as connection:
        now = job_row(connection, job)
        # Draws are left, and the workers ended all the same: the source has no more.
        if now.left != 0:
            return False
        # By the mean of all archives so far, because a mean of few is far off. The number does not depend on the
        # workers, so a seed gives the same samples with any number of workers.
        more = max(1, (wanted - samples) * now.committed // max(1, samples))
        connection.execute("UPDATE jobs SET wanted = wanted + ? WHERE id = ?", (more, job))
    return True
