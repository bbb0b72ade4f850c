"""``verify``: whether every byte is what was written, and whether catalog and disk agree; ``--repair`` makes it so.

::

    catalog file sound, not older than the shards     else: rebuilt from the shards
    nothing on disk that no row accounts for          else: deleted, or kept in quarantine
    each shard: folder, shard.json, every file, extents
                                                      else: evicted and its draws opened, or kept in quarantine
    each row: what shard.json and the disk say        else: corrected

A shard is read once, in pieces, so memory does not grow with it. Live processes may go on meanwhile: only a rebuild of
the catalog needs the cache for itself.
"""

from __future__ import annotations

import random
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from cachetool.cache import CacheDir, open_cache
from cachetool.cache import repair as mend
from cachetool.cache.agreement import contradiction
from cachetool.cache.catalog import Catalog, Row
from cachetool.cache.layout import SHARD_FILE, Layout, cache_option, root_of, tree_bytes
from cachetool.cache.rebuild import rebuild
from cachetool.cache.records import Record, read_shard_json
from cachetool.errors import CacheToolError, CorruptError, UsageError
from cachetool.extents import EXTENTS_FILE
from cachetool.formats.digest import ContentDigest, file_digests, joined_digest
from cachetool.formats.shard import CHECKSUMS_FILE, stored_checksums
from cachetool.options import PullOptions
from cachetool.planning import source_id
from cachetool.progress import Progress, Report, silent
from cachetool.pull import pull
from cachetool.schema import Schema
from cachetool.sources import SourceOptions
from cachetool.units import format_size

__all__ = ["Problem", "Verified", "verify"]


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong."""

    what: str
    """In words."""
    shard: str | None = None
    file: str | None = None
    """Relative to the shard's folder, or to the cache's."""
    action: str | None = None
    """What was done about it; None when nothing was."""


@dataclass(slots=True)
class Verified:
    """What a verification found and did."""

    root: str
    shards: int = 0
    """Shards in the catalog."""
    checked: int = 0
    """Of them, read whole."""
    samples: int = 0
    """In those."""
    bytes: int = 0
    """On disk, of those."""
    problems: list[Problem] = field(default_factory=list)
    foreign: list[str] = field(default_factory=list)
    """What is in the cache's folder and not of its making; it is left alone."""
    quarantine: list[dict[str, Any]] = field(default_factory=list)
    """Shards that exist nowhere else and are not whole: id, dataset, samples, bytes, why."""
    reopened: dict[str, int] = field(default_factory=dict)
    """URL of a source -> draws of it that the next pull fetches again."""
    repulled: int = 0
    """Samples fetched again."""
    notes: list[str] = field(default_factory=list)

    @property
    def sound(self) -> bool:
        """Whether nothing is wrong, or nothing any more."""
        return all(problem.action is not None for problem in self.problems)

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {**asdict(self), "sound": self.sound}


def verify(
    root: str | Path | None = None,
    *,
    repair: bool = False,
    repull: bool = False,
    sample: float = 1.0,
    report: Report = silent,
) -> Verified:
    """Check the cache at ``root`` (None: the default one).

    ``sample`` is the share of shards, chosen anew each time, of which every byte is read; everything else is checked
    for all of them. ``repair`` does what can be done, ``repull`` then fetches again what had to be removed.

    Raises :class:`UsageError` where there is no cache, and :class:`CatalogError` when the catalog must be rebuilt while
    other processes use the cache.
    """
    path = root_of(root)
    layout = Layout(path)
    if not layout.check():
        raise UsageError(f"there is no cache at {path}; fill one with: cachetool pull SOURCE{cache_option(path)}")
    result = Verified(str(path))
    if not _check_catalog(layout, result, repair=repair):
        return result
    with open_cache(path, create=False) as cache:
        _check_strays(cache, result, repair=repair)
        opened = _check_shards(cache, result, repair=repair, sample=sample, report=report)
        for source, count in opened.items():
            _report_open(cache, result, source, count)
            if repull:
                _pull_again(cache, result, source, count, report)
        with cache.catalog.read() as connection:
            result.quarantine = list(mend.quarantined(connection))
    return result


def _check_catalog(layout: Layout, result: Verified, *, repair: bool) -> bool:
    """Whether there is a catalog to go on with."""
    for folder in layout.folders:
        if not folder.is_dir():
            result.problems.append(Problem("missing", file=folder.name, action="made" if repair else None))
    if repair:
        layout.make()
    what = Catalog(layout.catalog).trouble()
    if what is None and layout.shards.is_dir():
        with open_cache(layout.root, create=False) as cache:  # what was cut off is finished first
            what = contradiction(cache.catalog, layout)
    if what is None:
        return not result.problems or repair
    action = None
    if repair:
        made = rebuild(layout)
        action = f"rebuilt from {made.shards} shards with {made.samples} samples"
        if made.cap_lost:
            size = format_size(made.max_size)
            result.notes.append(f"the cap was lost with the catalog: it is {size} now; --max-size sets another")
        for name, why in made.bad:
            result.problems.append(Problem(why, shard=name, file=SHARD_FILE, action="in quarantine"))
        for name in made.deleted:
            result.problems.append(
                Problem("never committed, or its samples are in a newer shard", shard=name, action="deleted")
            )
    result.problems.insert(0, Problem(f"cannot be trusted: {what}", file=layout.catalog.name, action=action))
    return repair


def _check_strays(cache: CacheDir, result: Verified, *, repair: bool) -> None:
    for stray in mend.strays(cache.catalog, cache.layout):
        name = str(stray.path.relative_to(cache.root))
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
    for row in rows:
        folder = cache.layout.shards / row["id"]
        faults = _faults(folder, row, whole=row["id"] in chosen)
        if faults and _still_ready(cache, row["id"]):  # else it was evicted while it was looked at
            _handle(cache, result, row, faults, opened, repair=repair)
        if row["id"] in chosen:
            result.checked += 1
            result.samples += row["samples"]
            result.bytes += row["bytes"]
            report(Progress("verify", result.samples, total, result.bytes))
    return opened


def _still_ready(cache: CacheDir, id: str) -> bool:
    return cache.catalog.one("SELECT 1 FROM shards WHERE id = ? AND state = 'ready'", (id,)) is not None


@dataclass(frozen=True, slots=True)
class _Fault:
    """What is wrong with one shard, or with what the catalog says of it."""

    kind: Literal["data", "row", "charge"]
    what: str
    file: str | None = None


def _faults(folder: Path, row: Row, *, whole: bool) -> list[_Fault]:
    try:
        value = read_shard_json(folder)
    except FileNotFoundError:
        return [_Fault("data", "it is missing", SHARD_FILE if folder.is_dir() else None)]
    except (OSError, ValueError) as error:
        return [_Fault("data", f"it cannot be used: {error}", SHARD_FILE)]
    real = tree_bytes(folder)
    # Other bytes on disk than charged: then it is read whole in any case, to learn whether the data is.
    faults = _bad_files(folder, value) if whole or real != row["bytes"] else []
    if not faults and real != row["bytes"]:
        faults.append(_Fault("charge", f"{real} bytes on disk, {row['bytes']} charged"))
    if wrong := mend.row_differs(row, value):
        faults.append(_Fault("row", f"{', '.join(wrong)} in the catalog differ from {SHARD_FILE}", SHARD_FILE))
    return faults


def _bad_files(folder: Path, value: Record) -> list[_Fault]:
    """Read every byte of a shard and compare it with what was written."""
    wanted: dict[str, str] = value["files"]
    try:
        found = file_digests(folder)
    except (OSError, CorruptError) as error:
        return [_Fault("data", str(error))]
    if not wanted and joined_digest(found) == value["digest"]:
        return []  # of a time before the digests of single files were kept
    missing = [_Fault("data", "it is missing", name) for name in wanted if name not in found]
    more = [
        _Fault("data", "it was not there when the shard was committed", name) for name in found if name not in wanted
    ]
    other = [
        _Fault("data", "its bytes are not those that were written", name)
        for name, digest in wanted.items()
        if found.get(name, digest) != digest
    ]
    return missing + more + other or _bad_checksums(folder, value)


def _bad_checksums(folder: Path, value: Record) -> list[_Fault]:
    """The checksums beside the data must be those of the samples that the shard was committed with."""
    name = EXTENTS_FILE if EXTENTS_FILE in value["files"] else CHECKSUMS_FILE
    schema = Schema.from_json(value["schema"])
    try:
        digest = ContentDigest(schema)
        digest.update(stored_checksums(folder, schema))
    except CorruptError as error:
        return [_Fault("data", str(error), name)]
    if digest.hexdigest() != value["content"]:
        return [_Fault("data", "these are not the checksums of the samples that were committed", name)]
    return []


def _handle(
    cache: CacheDir, result: Verified, row: Row, faults: list[_Fault], opened: dict[str, int], *, repair: bool
) -> None:
    """Report the faults of a shard, after doing about them what can be done."""
    id, folder = row["id"], cache.layout.shards / row["id"]
    actions: dict[str, str | None] = dict.fromkeys(("data", "row", "charge"))
    if repair:
        kinds = {fault.kind for fault in faults}
        if "row" in kinds:  # first: what becomes of the shard depends on what its row says
            mend.correct_row(cache.catalog, id, read_shard_json(folder))
            actions["row"] = f"the row was corrected from {SHARD_FILE}"
        if "charge" in kinds:
            mend.charge(cache.catalog, id, tree_bytes(folder))
            actions["charge"] = "the charge was corrected"
        if "data" in kinds:
            first = next(fault for fault in faults if fault.kind == "data")
            done = mend.give_up(
                cache.catalog, cache.layout, cache.holder, id, f"{first.file or 'folder'}: {first.what}"
            )
            actions["data"] = done.action
            if done.source is not None:
                opened[done.source] = opened.get(done.source, 0) + done.draws
    result.problems += [Problem(fault.what, shard=id, file=fault.file, action=actions[fault.kind]) for fault in faults]


def _report_open(cache: CacheDir, result: Verified, source: str, count: int) -> None:
    row = cache.source(source)
    if row is not None and count:
        result.reopened[row.url] = result.reopened.get(row.url, 0) + count


def _pull_again(cache: CacheDir, result: Verified, source: str, count: int, report: Report) -> None:
    """Fetch opened draws. That it fails does not undo the repair: it is noted, and the draws stay open."""
    row = cache.source(source)
    if row is None or not count:
        return
    shards = cache.shards(row.dataset)
    options = PullOptions(
        to=shards[-1].format if shards else None,
        samples=count,
        dataset=row.dataset,
        source=SourceOptions.from_json(row.options),
    )
    if source_id(row.url, options) != source:
        # Of a URL with a query, or a path of another working directory, the catalog does not have all that it was.
        result.notes.append(f"{row.url} could not be pulled again: what it names is not known here; pull it by its URL")
        return
    try:
        result.repulled += pull(cache, row.url, options, report=report).samples
    except CacheToolError as error:
        result.notes.append(f"{row.url} could not be pulled again: {error}")
