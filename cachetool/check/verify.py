"""``verify``: checks that every byte is what was written, and that catalog and disk agree; ``--repair`` repairs them.

::

    the cache's own files (cachetool.check.own_files)        else: made again, from each other and from the shards
    no files on disk without a row                           else: deleted
    each shard: folder, shard.json, every file, extents      else: removed, and its draws opened again
    each row: the same as shard.json and the disk            else: corrected
    reopened draws, of now or earlier                        else: pulled again

A shard is read once, in pieces, so memory does not grow with its size. Other processes may continue meanwhile; only a
rebuild of the catalog needs the cache for itself.
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
    for all shards. ``repair`` repairs what can be repaired, and ``repull`` then fetches reopened draws again.
    ``max_size`` is the cap, if no file contains it.

    Raises :class:`UsageError` if there is no cache, and :class:`CatalogError` when the catalog must be rebuilt while
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
        raise UsageError("--max-size is only for --repair; add --repair, or leave --max-size out")
    result = Verified(str(path))
    if not check_own(layout, result, wrong, repair=repair, max_size=max_size):
        return result
    with open_cache(path, create=False) as cache:
        _check_strays(cache, result, repair=repair)
        query = "SELECT dataset, format FROM shards WHERE dataset IS NOT NULL ORDER BY seq"
        # Read before shards are given up: they are pulled again in the format that their dataset had.
        formats = {row["dataset"]: row["format"] for row in cache.catalog.rows(query)}
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
    """Report, and with ``repair`` delete, files and folders that no row names."""
    for stray in mend.strays(cache.catalog, cache.layout):
        name = str(stray.path.relative_to(cache.root))
        if any(problem.file == name for problem in result.problems):
            # Already reported as a shard under another name.
            continue
        if not stray.ours:
            result.foreign.append(name)
            continue
        action = mend.remove_stray(cache.catalog, cache.layout, stray) if repair else None
        result.problems.append(
            Problem(f"left over, {format_size(stray.bytes)}, not in the catalog", file=name, action=action)
        )


def _check_shards(cache: CacheDir, result: Verified, *, repair: bool, sample: float, report: Report) -> dict[str, int]:
    """Check every ready shard; return the number of draws that were opened again, by source."""
    rows = cache.catalog.rows("SELECT * FROM shards WHERE state = 'ready' ORDER BY seq")
    result.shards = len(rows)
    count = max(1, round(sample * len(rows))) if rows else 0
    # A new random choice each time, so that repeated runs with --sample read other shards.
    chosen = {row["id"] for row in (rows if sample >= 1 else random.sample(rows, count))}
    total = sum(row["samples"] for row in rows if row["id"] in chosen)
    opened: dict[str, int] = {}
    # One process for all shards: the package `tfrecord` cannot be imported beside TensorFlow, and starting it takes
    # time.
    with PackageReader() as package:
        for row in rows:
            folder = cache.layout.shard(Id(row["id"]))
            faults = faults_of(folder, row, package, every_byte=row["id"] in chosen)
            gone = any(fault.kind == "gone" for fault in faults)
            # An eviction may have deleted files while they were read, which is no fault.
            if faults and _still_ready(cache, row["id"]):
                _handle(cache, result, row, faults, opened, repair=repair)
                result.gone += gone
            if row["id"] in chosen and not gone:
                result.checked += 1
                result.samples += row["samples"]
                result.bytes += row["bytes"]
                report(Progress("verify", result.samples, total, result.bytes))
    return opened


def _still_ready(cache: CacheDir, id: str) -> bool:
    """Return True if the shard is still visible."""
    return cache.catalog.one("SELECT 1 FROM shards WHERE id = ? AND state = 'ready'", (id,)) is not None


def _handle(
    cache: CacheDir, result: Verified, row: Row, faults: list[Fault], opened: dict[str, int], *, repair: bool
) -> None:
    """Report the faults of a shard, and with ``repair`` repair them first."""
    id = Id(row["id"])
    folder = cache.layout.shard(id)
    actions: dict[str, str | None] = dict.fromkeys(("gone", "data", "row", "charge"))
    if repair:
        kinds = {fault.kind for fault in faults}
        # The row comes first: giving the shard up opens the draws that its row names.
        if "row" in kinds:
            mend.correct_row(cache.catalog, id, read_shard_json(folder))
            actions["row"] = f"the row was corrected from {SHARD_FILE}"
        if "charge" in kinds:
            mend.charge(cache.catalog, id, tree_bytes(folder))
            actions["charge"] = "the charged bytes were corrected"
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
    """Add the reopened draws of a source to the result, by its URL."""
    row = cache.source(source)
    if row is not None and count:
        result.reopened[row.url] = result.reopened.get(row.url, 0) + count


def _pull_again(cache: CacheDir, result: Verified, formats: dict[str, str], report: Report) -> dict[str, str]:
    """Fetch reopened draws, of this run or earlier ones; return the reasons for those that failed, by source."""
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
                why = f"{pulled.skipped} objects cannot be read; the last of them is {last['key']}: {last['reason']}"
        except CacheToolError as error:
            # A failing source does not undo the repair: its draws stay open for the next pull.
            why = str(error)
        if why:
            failed[row.source] = " ".join(why.splitlines())
            cache.catalog.note_error(row.url, why, dataset=row.dataset)
    return failed


def _pull_reopened(cache: CacheDir, draws: Reopened, formats: dict[str, str], report: Report) -> PullResult:
    """Pull the reopened draws of one source with the options that it was pulled with."""
    row = cache.source(draws.source)
    assert row is not None
    options = PullOptions(
        to=formats.get(row.dataset),
        all=True,
        dataset=row.dataset,
        # A damaged shard's draws include those that gave no sample when it was written; they must not end this pull.
        on_error="skip",
        reopened=True,
        **row.options,
    )
    if source_id(row.url, options) != draws.source:
        # The catalog has no secrets, so a URL with a signed query is incomplete there, and a relative path means
        # another folder here. Pulling it could fetch other samples under this source's draws.
        raise UsageError("its stored URL is incomplete (a secret or a relative path); pull the source by its full URL")
    return pull(cache, row.url, options, report=report)
