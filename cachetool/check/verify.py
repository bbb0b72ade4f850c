"""``verify``: whether every byte is what was written, and whether catalog and disk agree; ``--repair`` makes it so.

::

    the cache's own files (cachetool.check.own_files)        else: made again, from each other and from the shards
    nothing on disk that no row accounts for          else: deleted
    each shard: folder, shard.json, every file, extents
                                                      else: removed, and its draws opened again
    each row: what shard.json and the disk say        else: corrected
    reopened draws, of now or earlier                 else: pulled again

A shard is read once, in pieces, so memory does not grow with it. Live processes may go on meanwhile: only a rebuild of
the catalog needs the cache for itself.
"""

from __future__ import annotations

import random
from pathlib import Path

from cachetool.cache import CacheDir, open_cache
from cachetool.cache import repair as mend
from cachetool.cache.catalog import Row
from cachetool.cache.draws import Reopened, reopened
from cachetool.cache.layout import SHARD_FILE, Layout, cache_option, place_of, refuse_long, refuse_loose, root_of
from cachetool.cache.marker import look
from cachetool.cache.records import read_shard_json
from cachetool.check.one_shard import Fault, faults_of
from cachetool.check.own_files import Missing, Problem, Verified, check_own
from cachetool.core.errors import CacheToolError, UsageError
from cachetool.core.names import Id
from cachetool.core.progress import Progress, Report, silent
from cachetool.core.units import format_size
from cachetool.formats.tfrecord_package import PackageReader
from cachetool.proc.folders import tree_bytes
from cachetool.pull.options import PullOptions
from cachetool.pull.prepare import source_id
from cachetool.pull.run import PullResult, pull

__all__ = ["Missing", "Problem", "Verified", "verify"]


def verify(
    root: str | Path | None = None,
    *,
    repair: bool = False,
    repull: bool = False,
    max_size: int | str | None = None,
    sample: float = 1.0,
    report: Report = silent,
) -> Verified:
    """Check the cache at ``root`` (None: the default one).

    ``sample`` is the share of shards, chosen anew each time, of which every byte is read; everything else is checked
    for all of them. ``repair`` does what can be done, and ``repull`` then fetches reopened draws again. ``max_size`` is
    the cap, where no file tells it.

    Raises :class:`UsageError` where there is no cache, and :class:`CatalogError` when the catalog must be rebuilt while
    other processes use the cache, or without a cap.
    """
    path = place_of(root_of(root))
    refuse_long(path)
    layout = Layout(path)
    refuse_loose(path)
    there, wrong = look(layout)
    if not there:
        raise UsageError(f"there is no cache at {path}; fill one with: cachetool pull SOURCE{cache_option(path)}")
    if max_size is not None and not repair:
        raise UsageError("--max-size changes the cache; give --repair too")
    result = Verified(str(path))
    if not check_own(layout, result, wrong, repair=repair, max_size=max_size):
        return result
    with open_cache(path, create=False) as cache:
        _check_strays(cache, result, repair=repair)
        query = "SELECT dataset, format FROM shards WHERE dataset IS NOT NULL ORDER BY seq"
        formats = {row["dataset"]: row["format"] for row in cache.catalog.rows(query)}  # also of those given up below
        opened = _check_shards(cache, result, repair=repair, sample=sample, report=report)
        for source, count in opened.items():
            _report_open(cache, result, source, count)
        failed: dict[str, str] = {}
        if repair and repull:
            failed = _pull_again(cache, result, formats, report)
        with cache.catalog.read() as connection:
            result.missing += [
                Missing(row.url, row.dataset, row.draws, row.tried, failed.get(row.source), row.why)
                for row in reopened(connection)
            ]
    return result


def _check_strays(cache: CacheDir, result: Verified, *, repair: bool) -> None:
    for stray in mend.strays(cache.catalog, cache.layout):
        name = str(stray.path.relative_to(cache.root))
        if any(problem.file == name for problem in result.problems):
            continue  # a shard under another name
        if not stray.ours:
            result.foreign.append(name)
            continue
        action = mend.remove_stray(cache.catalog, cache.layout, stray) if repair else None
        result.problems.append(Problem(f"left over, {format_size(stray.bytes)} in no row", file=name, action=action))


def _check_shards(cache: CacheDir, result: Verified, *, repair: bool, sample: float, report: Report) -> dict[str, int]:
    """Check every ready shard; gives the sources of which draws were opened again, and how many."""
    rows = cache.catalog.rows("SELECT * FROM shards WHERE state = 'ready' ORDER BY seq")
    result.shards = len(rows)
    count = max(1, round(sample * len(rows))) if rows else 0
    chosen = {row["id"] for row in (rows if sample >= 1 else random.sample(rows, count))}
    total = sum(row["samples"] for row in rows if row["id"] in chosen)
    opened: dict[str, int] = {}
    with PackageReader() as package:
        for row in rows:
            folder = cache.layout.shard(Id(row["id"]))
            faults = faults_of(folder, row, package, every_byte=row["id"] in chosen)
            gone = any(fault.kind == "gone" for fault in faults)
            if faults and _still_ready(cache, row["id"]):  # else it was evicted while it was looked at
                _handle(cache, result, row, faults, opened, repair=repair)
                result.gone += gone
            if row["id"] in chosen and not gone:
                result.checked += 1
                result.samples += row["samples"]
                result.bytes += row["bytes"]
                report(Progress("verify", result.samples, total, result.bytes))
    return opened


def _still_ready(cache: CacheDir, id: str) -> bool:
    return cache.catalog.one("SELECT 1 FROM shards WHERE id = ? AND state = 'ready'", (id,)) is not None


def _handle(
    cache: CacheDir, result: Verified, row: Row, faults: list[Fault], opened: dict[str, int], *, repair: bool
) -> None:
    """Report the faults of a shard, after doing about them what can be done."""
    id = Id(row["id"])
    folder = cache.layout.shard(id)
    actions: dict[str, str | None] = dict.fromkeys(("gone", "data", "row", "charge"))
    if repair:
        kinds = {fault.kind for fault in faults}
        if "row" in kinds:  # first: what becomes of the shard depends on what its row says
            mend.correct_row(cache.catalog, id, read_shard_json(folder))
            actions["row"] = f"the row was corrected from {SHARD_FILE}"
        if "charge" in kinds:
            mend.charge(cache.catalog, id, tree_bytes(folder))
            actions["charge"] = "the charge was corrected"
        if kinds & {"gone", "data"}:
            first = next(fault for fault in faults if fault.kind in ("gone", "data"))
            done = mend.give_up(
                cache.catalog, cache.layout, cache.holder, id, f"{first.file or 'folder'}: {first.what}"
            )
            actions["gone"] = actions["data"] = done.action
            if done.source is not None:
                opened[done.source] = opened.get(done.source, 0) + done.draws
    result.problems += [Problem(fault.what, shard=id, file=fault.file, action=actions[fault.kind]) for fault in faults]


def _report_open(cache: CacheDir, result: Verified, source: str, count: int) -> None:
    row = cache.source(source)
    if row is not None and count:
        result.reopened[row.url] = result.reopened.get(row.url, 0) + count


def _pull_again(cache: CacheDir, result: Verified, formats: dict[str, str], report: Report) -> dict[str, str]:
    """Fetch reopened draws, of now or since an earlier time; gives why not, by source. That it fails does not undo the
    repair: the draws stay open."""
    with cache.catalog.read() as connection:
        missing = reopened(connection)
    failed = {}
    for row in missing:
        why = ""
        try:
            pulled = _pull_reopened(cache, row, formats, report)
            result.repulled += pulled.samples
            if pulled.skipped_examples:
                last = pulled.skipped_examples[-1]
                why = f"of {pulled.skipped} objects that cannot be read, the last is {last['key']}: {last['reason']}"
        except CacheToolError as error:
            why = str(error)
        if why:
            failed[row.source] = " ".join(why.splitlines())
            cache.catalog.note_error(row.url, why, dataset=row.dataset)
    return failed


def _pull_reopened(cache: CacheDir, draws: Reopened, formats: dict[str, str], report: Report) -> PullResult:
    row = cache.source(draws.source)
    assert row is not None
    options = PullOptions(
        to=formats.get(row.dataset),
        all=True,
        dataset=row.dataset,
        on_error="skip",  # some of these draws may have given nothing before
        reopened=True,
        **row.options,
    )
    if source_id(row.url, options) != draws.source:
        # Of a URL with a query, or a path of another working directory, the catalog does not have all that it was.
        raise UsageError("what it names is not known here; pull it by its URL")
    return pull(cache, row.url, options, report=report)
