"""The cache's own files: the faults that ``verify`` finds in them, and their repair before shards are checked.

::

    CACHEDIR.TAG, holders/, listings/, shards/         missing: made again
    a shard's folder under another name, and whole     renamed back
    catalog.sqlite3 sound, not older than the shards   else: rebuilt from the shards
    cachetool.json                                     missing, damaged, another cap: written again from the catalog

:func:`contradiction` decides if the catalog must be rebuilt. SQLite's own check sees the structure of its pages. It
does not see a changed number in a row, nor that the whole file is an old copy. So everything that a rebuild would write
is compared with the catalog, under the catalog's lock, while no commit is in progress.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from cachetool.cache import open_cache
from cachetool.cache.catalog import FIRST_PAGES, Catalog, Connection
from cachetool.cache.layout import SHARD_FILE, Layout
from cachetool.cache.marker import mark, settings
from cachetool.cache.rebuild import Found, current, open_draws, rebuild, scan
from cachetool.cache.records import Record
from cachetool.cache.repair import misnamed, rename_back
from cachetool.check.one_shard import bad_files
from cachetool.core.errors import CacheToolError, CapTooSmall, CatalogError
from cachetool.core.names import Id
from cachetool.core.ranges import difference
from cachetool.core.schema import Schema
from cachetool.core.units import format_size, parse_size
from cachetool.proc.folders import tree_bytes

__all__ = ["Missing", "Problem", "Verified", "check_own", "contradiction"]


@dataclass(frozen=True, slots=True)
class Problem:
    """One fault."""

    what: str
    """The fault in words."""
    shard: str | None = None
    file: str | None = None
    """Path of the file, relative to the shard's folder or the cache's."""
    action: str | None = None
    """The repair that was done; None if there was none."""


@dataclass(frozen=True, slots=True)
class Missing:
    """Damaged draws of one source, which the next pull fetches again."""

    source: str
    """URL of the source."""
    dataset: str
    draws: int
    tried: int
    """Number of these draws for which a later pull returned no sample."""
    failed: str | None
    """The reason why they could not be pulled again now; None if no pull was tried."""
    last_error: str
    """The last error of any pull of that source; empty if none is known."""


@dataclass(slots=True)
class Verified:
    """The result of a verification: faults found and repairs done."""

    root: str
    shards: int = 0
    """Number of shards in the catalog."""
    checked: int = 0
    """Number of shards that were read completely."""
    gone: int = 0
    """Number of shards whose folder or ``shard.json`` is missing, so nothing could be read."""
    samples: int = 0
    """Number of samples in the shards that were read."""
    bytes: int = 0
    """Bytes on disk of the shards that were read."""
    problems: list[Problem] = field(default_factory=list)
    foreign: list[str] = field(default_factory=list)
    """Files in the cache's folder that cachetool did not create. They are left alone."""
    reopened: dict[str, int] = field(default_factory=dict)
    """Number of draws that the next pull fetches again, by the URL of their source."""
    repulled: int = 0
    """Number of samples that were fetched again."""
    missing: list[Missing] = field(default_factory=list)
    """Damaged draws, found now or earlier, that are not fetched again yet."""
    notes: list[str] = field(default_factory=list)

    @property
    def sound(self) -> bool:
        """True if there is no fault, or all faults were repaired, and no damaged draw waits to be fetched again."""
        # Draws whose source returned nothing again hold nothing up: nobody knows if they ever had a sample.
        waiting = any(row.draws > row.tried for row in self.missing)
        return not waiting and all(problem.action is not None for problem in self.problems)

    def as_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return {**asdict(self), "sound": self.sound}


def check_own(
    layout: Layout, result: Verified, marker: str | None, *, repair: bool, max_size: int | str | None
) -> bool:
    """Check and repair the cache's own files; return True if the shards can be checked.

    ``marker`` says what is wrong with ``cachetool.json``. Raises the errors of :func:`cachetool.cache.rebuild.rebuild`.
    """
    cap = None if max_size is None else parse_size(max_size, what="--max-size")
    for path in (*layout.missing(), *([] if layout.tag.exists() else [layout.tag])):
        result.problems.append(Problem("it is missing", file=path.name, action="created again" if repair else None))
    if repair:
        layout.make()
    catalog = Catalog(layout.catalog)
    try:
        trouble = catalog.trouble()
        query = "SELECT id FROM shards WHERE state IN ('ready', 'retiring')"
        catalog_ids = None if trouble is not None else {row["id"] for row in catalog.rows(query)}
        # Names first: a rebuild looks for a shard's files under its id, so a renamed folder must have its own name
        # again.
        _check_names(layout, result, catalog_ids, repair=repair)
        if marker is not None and trouble is None and repair:
            _write_marker(layout, catalog, result, marker)
        if trouble is None and layout.shards.is_dir() and (repair or marker is None):
            # Opening the cache finishes what killed processes left half done, which would otherwise look like a
            # contradiction.
            with open_cache(layout.root, create=False) as cache:
                trouble = contradiction(cache.catalog, layout)
        if trouble is not None:
            _rebuild(layout, result, trouble, marker, cap, repair=repair)
        elif marker is not None and not repair:
            result.problems.append(Problem(f"it {marker}", file=layout.marker.name))
        if repair or trouble is None:
            _check_marker(layout, catalog, result, None if repair else marker, cap, repair=repair)
        result.shards = len(catalog_ids or ())
        return repair or (marker is None and trouble is None and layout.shards.is_dir())
    finally:
        catalog.close()


def _check_names(layout: Layout, result: Verified, catalog_ids: set[str] | None, *, repair: bool) -> None:
    """Report, and with ``repair`` rename back, shards that somebody renamed. ``shard.json`` has the right name."""
    for path, value in misnamed(layout, catalog_ids):
        if bad_files(path, value):
            # Its bytes are not those that its shard.json states, so it is no intact copy of that shard and keeps its
            # name.
            continue
        if repair:
            rename_back(layout, path, Id(value["id"]))
        name, action = str(path.relative_to(layout.root)), "renamed back" if repair else None
        result.problems.append(
            Problem("an undamaged shard in a folder with a wrong name", shard=value["id"], file=name, action=action)
        )


def _write_marker(layout: Layout, catalog: Catalog, result: Verified, wrong: str) -> None:
    """Write ``cachetool.json`` again with the catalog's cap."""
    with catalog.write():
        cap = catalog.number("max_size")
        mark(layout, max_size=cap, min_free=catalog.number("min_free"))
    action = f"created again, with the cap of the catalog, {format_size(cap)}"
    result.problems.append(Problem(f"it {wrong}", file=layout.marker.name, action=action))


def _rebuild(
    layout: Layout, result: Verified, trouble: str, marker: str | None, cap: int | None, *, repair: bool
) -> None:
    """Report a catalog that cannot be trusted, and with ``repair`` rebuild it from the shards."""
    action = written = None
    if repair:
        # Refused before anything is rebuilt, because a cap must never be below what the cache already takes.
        if cap is not None and cap < (there := tree_bytes(layout.root)):
            raise CapTooSmall(
                f"--max-size is {format_size(cap)}, but {layout.root} takes {there} bytes already; choose a larger one"
            )
        rebuilt = rebuild(layout, max_size=cap)
        action = f"rebuilt from {rebuilt.shards} shards with {rebuilt.samples} samples"
        written = f"created again, with a cap of {format_size(rebuilt.max_size)}"
        for name, why in rebuilt.bad:
            result.problems.append(Problem(why, shard=name, file=SHARD_FILE, action="deleted"))
        for name in rebuilt.deleted:
            result.problems.append(
                Problem("never committed, or its samples are in a newer shard", shard=name, action="deleted")
            )
    if marker is not None and not any(problem.file == layout.marker.name for problem in result.problems):
        result.problems.insert(0, Problem(f"it {marker}", file=layout.marker.name, action=written))
    result.problems.insert(0, Problem(f"cannot be trusted: {trouble}", file=layout.catalog.name, action=action))


def _check_marker(
    layout: Layout, catalog: Catalog, result: Verified, marker: str | None, cap: int | None, *, repair: bool
) -> None:
    """Compare the cap in ``cachetool.json`` with that of the catalog."""
    try:
        with catalog.write() if repair else catalog.read():
            # The catalog's cap counts. The other one is used when the catalog is lost, so it must be the same.
            real = {name: catalog.number(name) for name in ("max_size", "min_free")}
            said = settings(layout)
            differ = [name for name, value in real.items() if marker is None and said.get(name) != value]
            if differ and repair:
                mark(layout, **real)
    except CacheToolError:
        if repair:
            raise
        return
    if cap is not None and cap != real["max_size"]:
        result.notes.append(f"--max-size was ignored: the cache still has its cap of {format_size(real['max_size'])}")
    for name in differ:
        what = f"{name} is {said.get(name, 'missing')}, but {real[name]} in the catalog, which is used"
        action = "written again" if repair else None
        result.problems.append(Problem(what, file=layout.marker.name, action=action))


_FIXED = ("url", "identity", "dataset", "units", "samples", "seed", "cut")
"""Columns of a source that never change; the others change while it is drawn."""


def contradiction(catalog: Catalog, layout: Layout) -> str | None:
    """Return the first difference between a catalog that is sound as a file and the shards; None if there is none.

    A row that differs from its own shard is left to :func:`cachetool.cache.repair.row_differs`, because it can be
    corrected without a rebuild.
    """
    try:
        # A write transaction keeps all commits out. Otherwise a shard committed between the two looks would count as a
        # difference.
        with catalog.write() as connection:
            return next(_differences(connection, layout), None)
    except CatalogError as error:
        # SQLite's own check passes some damage, such as text that is no UTF-8, or a page that is read only now.
        return str(error)
    except (ValueError, TypeError, KeyError) as error:
        return f"a row cannot be read: {error}"


def _differences(connection: Connection, layout: Layout) -> Iterator[str]:
    """Yield the differences between the catalog's rows and the shards on disk."""
    shards = connection.execute("SELECT id, state, source, part, pass_number, draws FROM shards").fetchall()
    rows = {row["id"]: row["state"] for row in shards}
    # Shards that are being written or deleted may have any files, and belong to no committed state.
    on_disk = scan(layout, leave_out={id for id, state in rows.items() if state in ("staging", "trash")})
    kept, _ = current(on_disk)
    yield from (f"the undamaged shard {value['id']} is not in the catalog" for value in kept if value["id"] not in rows)
    yield from _numbers(connection, on_disk)
    schemas = {row["name"]: json.loads(row["schema"]) for row in connection.execute("SELECT * FROM datasets")}
    for name, (_, schema) in on_disk.schemas.items():
        # Compared as schemas: the catalog keeps only those facts beside the schema that hold for all shards.
        if name not in schemas or Schema.from_json(schemas[name]) != Schema.from_json(schema):
            yield f"dataset {name} has another schema in the catalog than in its shards"
    # A shard whose shard.json cannot be read is reported later. Until then its row says which draws it has.
    read = {value["id"] for value in on_disk.shards}
    unread = [
        {**dict(row), "draws": json.loads(row["draws"])}
        for row in shards
        if row["state"] in ("ready", "retiring") and row["id"] not in read and row["source"] is not None
    ]
    for _, progress in on_disk.progress.values():
        yield from _source(connection, progress, kept + unread)


def _numbers(connection: Connection, on_disk: Found) -> Iterator[str]:
    """Yield the differences in the counters of the catalog."""
    numbers = connection.execute("SELECT version, next_seq, pages FROM cache").fetchone()
    newest = max([at[0] for at, _ in on_disk.progress.values()] + [v["since"] for v in on_disk.shards], default=0)
    # The version only grows, so a shard of a later version shows that the catalog is an old copy.
    if newest > numbers["version"]:
        yield f"the catalog has version {numbers['version']}, but version {newest} was committed"
    if math.floor(max((value["seq"] for value in on_disk.shards), default=0)) >= numbers["next_seq"]:
        yield f"the catalog has {numbers['next_seq'] - 1} commits, but there were more"
    if numbers["pages"] < max(FIRST_PAGES, connection.execute("PRAGMA page_count").fetchone()[0]):
        yield f"the catalog is larger than its limit of {numbers['pages']} pages"


def _source(connection: Connection, progress: Record, kept: list[Record]) -> Iterator[str]:
    """Yield the differences between a source's rows and the progress that its shards recorded.

    Committed draws must be done in the catalog, and no others, except draws that were skipped since.
    """
    row: Mapping[str, Any] | None = connection.execute(
        "SELECT * FROM sources WHERE id = ?", (progress["id"],)
    ).fetchone()
    name = f"source {progress['id']}"
    if row is None:
        yield f"{name} is not in the catalog"
        return
    yield from (
        f"{key} of {name} is {row[key]!r} in the catalog, but {progress[key]!r} in its shards"
        for key in _FIXED
        if row[key] != progress[key]
    )
    if json.loads(row["options"]) != progress["options"]:
        yield f"the options of {name} differ from those in its shards"
    # A later pass may have begun without a commit yet. An earlier one than recorded means an old copy.
    if row["pass_number"] != progress["pass_number"]:
        if row["pass_number"] < progress["pass_number"]:
            yield f"{name} is in pass {row['pass_number'] + 1}, but pass {progress['pass_number'] + 1} had begun"
        return
    frontiers = dict(
        tuple(part) for part in connection.execute("SELECT part, frontier FROM parts WHERE source = ?", (row["id"],))
    )
    parts = list(open_draws(progress, kept))
    if frontiers.keys() != {part for part, _, _, _ in parts}:
        yield f"{name} has other parts in the catalog than in its shards"
        return
    for part, frontier, _, pending in parts:
        claims = connection.execute(
            "SELECT start, stop FROM claims WHERE source = ? AND pass_number = ? AND part = ?",
            (row["id"], row["pass_number"], part),
        ).fetchall()
        done = difference([(0, frontiers[part])], claims)
        committed = difference([(0, frontier)], pending)
        # Draws skipped since the last commit are done in the catalog only, so then more may be done there than was
        # committed.
        if difference(committed, done) or (row["skipped"] <= progress["skipped"] and difference(done, committed)):
            yield f"{name} has other finished draws in the catalog than were committed"
