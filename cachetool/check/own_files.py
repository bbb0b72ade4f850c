"""The cache's own files: what a verification finds in them, and mends before shards are looked at.

::

    CACHEDIR.TAG, holders/, listings/, shards/         missing: made again
    a shard's folder under another name, and whole     given its own name again
    catalog.sqlite3 sound, not older than the shards   else: rebuilt from the shards
    cachetool.json                                     missing, garbled, another cap: written anew, as the catalog says

Whether the catalog says what the shards and records say: the check that decides if it must be rebuilt.

SQLite's own check sees the structure of its pages, not that a number in a row was changed, nor that the whole file is
an old copy. So everything that a rebuild would write is compared with what is there, under the catalog's lock, when no
commit is under way.
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
from cachetool.core.units import format_size, parse_size
from cachetool.proc.folders import tree_bytes

__all__ = ["Missing", "Problem", "Verified", "check_own", "contradiction"]


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


@dataclass(frozen=True, slots=True)
class Missing:
    """Draws of one source whose samples were damaged, and which the next pull fetches again."""

    source: str
    """Its URL."""
    dataset: str
    draws: int
    tried: int
    """The number of these draws that gave nothing again."""
    failed: str | None
    """Why they could not be pulled again just now; None when that was not tried."""
    last_error: str
    """Of any pull of that source; empty when none is known."""


@dataclass(slots=True)
class Verified:
    """What a verification found and did."""

    root: str
    shards: int = 0
    """Shards in the catalog."""
    checked: int = 0
    """Of them, read whole."""
    gone: int = 0
    """Of them, those of which the folder or its ``shard.json`` is missing, so that nothing could be read."""
    samples: int = 0
    """In those that were read."""
    bytes: int = 0
    """On disk, of those."""
    problems: list[Problem] = field(default_factory=list)
    foreign: list[str] = field(default_factory=list)
    """What is in the cache's folder and not of its making; it is left alone."""
    reopened: dict[str, int] = field(default_factory=dict)
    """URL of a source -> draws of it that the next pull fetches again."""
    repulled: int = 0
    """Samples fetched again."""
    missing: list[Missing] = field(default_factory=list)
    """What was damaged, now or earlier, and is not fetched again yet."""
    notes: list[str] = field(default_factory=list)

    @property
    def sound(self) -> bool:
        """Whether nothing is wrong, or nothing any more, and no damaged draw waits to be fetched again; draws that gave
        nothing again wait for nothing."""
        waiting = any(row.draws > row.tried for row in self.missing)
        return not waiting and all(problem.action is not None for problem in self.problems)

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {**asdict(self), "sound": self.sound}


def check_own(
    layout: Layout, result: Verified, marker: str | None, *, repair: bool, max_size: int | str | None
) -> bool:
    """Whether there is a cache to go on with; ``marker`` says what is wrong with ``cachetool.json``.

    Raises what :func:`cachetool.cache.rebuild.rebuild` raises.
    """
    cap = None if max_size is None else parse_size(max_size, what="--max-size")
    for path in (*layout.missing(), *([] if layout.tag.exists() else [layout.tag])):
        result.problems.append(Problem("it is missing", file=path.name, action="made again" if repair else None))
    if repair:
        layout.make()
    catalog = Catalog(layout.catalog)
    try:
        trouble = catalog.trouble()
        query = "SELECT id FROM shards WHERE state IN ('ready', 'retiring')"
        catalog_ids = None if trouble is not None else {row["id"] for row in catalog.rows(query)}
        _check_names(layout, result, catalog_ids, repair=repair)
        if marker is not None and trouble is None and repair:
            _write_marker(layout, catalog, result, marker)
        if trouble is None and layout.shards.is_dir() and (repair or marker is None):
            with open_cache(layout.root, create=False) as cache:  # what was cut off is finished first
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
    """Shards that somebody renamed: they say themselves which they are."""
    for path, value in misnamed(layout, catalog_ids):
        if bad_files(path, value):
            continue  # whatever it is, it is not that shard as it was
        if repair:
            rename_back(layout, path, Id(value["id"]))
        name, action = str(path.relative_to(layout.root)), "renamed back" if repair else None
        result.problems.append(Problem("a whole shard under another name", shard=value["id"], file=name, action=action))


def _write_marker(layout: Layout, catalog: Catalog, result: Verified, wrong: str) -> None:
    with catalog.write():
        cap = catalog.number("max_size")
        mark(layout, max_size=cap, min_free=catalog.number("min_free"))
    action = f"made again, with the cap of {format_size(cap)} that the catalog has"
    result.problems.append(Problem(f"it {wrong}", file=layout.marker.name, action=action))


def _rebuild(
    layout: Layout, result: Verified, trouble: str, marker: str | None, cap: int | None, *, repair: bool
) -> None:
    action = written = None
    if repair:
        if cap is not None and cap < (there := tree_bytes(layout.root)):
            raise CapTooSmall(
                f"--max-size is {format_size(cap)}, what lies in {layout.root} takes {there} bytes; name a larger one"
            )
        rebuilt = rebuild(layout, max_size=cap)
        action = f"rebuilt from {rebuilt.shards} shards with {rebuilt.samples} samples"
        written = f"made again, with a cap of {format_size(rebuilt.max_size)}"
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
    """The cap that counts is the catalog's; the other is for when that is lost, and must not differ then."""
    try:
        with catalog.write() if repair else catalog.read():
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
        result.notes.append(f"--max-size was not needed: the cap is known to be {format_size(real['max_size'])}")
    for name in differ:
        what = f"{name} is {said.get(name, 'not')} in it, and {real[name]} in the catalog, which decides"
        action = "written again" if repair else None
        result.problems.append(Problem(what, file=layout.marker.name, action=action))


_FIXED = ("url", "identity", "dataset", "units", "samples", "seed", "cut")
"""Of a source; the rest changes while it is drawn."""


def contradiction(catalog: Catalog, layout: Layout) -> str | None:
    """The first thing in which a catalog that is sound as a file disagrees with the shards; None when there is none.

    What single rows say of single shards is left to :func:`cachetool.cache.repair.row_differs`: that can be corrected.
    """
    try:
        with catalog.write() as connection:
            return next(_differences(connection, layout), None)
    except CatalogError as error:  # text that cannot be decoded, a page that is only read now
        return str(error)
    except (ValueError, TypeError, KeyError) as error:
        return f"a row cannot be read: {error}"


def _differences(connection: Connection, layout: Layout) -> Iterator[str]:
    shards = connection.execute("SELECT id, state, source, part, pass_number, draws FROM shards").fetchall()
    rows = {row["id"]: row["state"] for row in shards}
    on_disk = scan(layout, leave_out={id for id, state in rows.items() if state in ("staging", "trash")})
    kept, _ = current(on_disk)
    yield from (f"shard {value['id']} is whole and not in it" for value in kept if value["id"] not in rows)
    yield from _numbers(connection, on_disk)
    schemas = {row["name"]: json.loads(row["schema"]) for row in connection.execute("SELECT * FROM datasets")}
    for name, (_, schema) in on_disk.schemas.items():
        if schemas.get(name) != schema:
            yield f"dataset {name} has another schema in it than its shards"
    # Of shards whose own file cannot be read, which is found later, the row must do.
    read = {value["id"] for value in on_disk.shards}
    unread = [
        {**dict(row), "draws": json.loads(row["draws"])}
        for row in shards
        if row["state"] in ("ready", "retiring") and row["id"] not in read and row["source"] is not None
    ]
    for _, progress in on_disk.progress.values():
        yield from _source(connection, progress, kept + unread)


def _numbers(connection: Connection, on_disk: Found) -> Iterator[str]:
    numbers = connection.execute("SELECT version, next_seq, pages FROM cache").fetchone()
    newest = max([at[0] for at, _ in on_disk.progress.values()] + [v["since"] for v in on_disk.shards], default=0)
    if newest > numbers["version"]:
        yield f"it is at version {numbers['version']}, and version {newest} was committed"
    if math.floor(max((value["seq"] for value in on_disk.shards), default=0)) >= numbers["next_seq"]:
        yield f"it counts {numbers['next_seq'] - 1} commits, and there were more"
    if numbers["pages"] < max(FIRST_PAGES, connection.execute("PRAGMA page_count").fetchone()[0]):
        yield f"it is larger than its limit of {numbers['pages']} pages"


def _source(connection: Connection, progress: Record, kept: list[Record]) -> Iterator[str]:
    """Draws that were committed must be done in the catalog, and no others, but for some that were skipped since."""
    row: Mapping[str, Any] | None = connection.execute(
        "SELECT * FROM sources WHERE id = ?", (progress["id"],)
    ).fetchone()
    name = f"source {progress['id']}"
    if row is None:
        yield f"{name} is not in it"
        return
    yield from (f"{key} of {name} is {row[key]!r}" for key in _FIXED if row[key] != progress[key])
    if json.loads(row["options"]) != progress["options"]:
        yield f"options of {name} are others"
    if row["pass_number"] != progress["pass_number"]:
        if row["pass_number"] < progress["pass_number"]:
            yield f"{name} is in pass {row['pass_number'] + 1}, and pass {progress['pass_number'] + 1} was begun"
        return
    frontiers = dict(
        tuple(part) for part in connection.execute("SELECT part, frontier FROM parts WHERE source = ?", (row["id"],))
    )
    parts = list(open_draws(progress, kept))
    if frontiers.keys() != {part for part, _, _, _ in parts}:
        yield f"{name} has other parts in it than were taken"
        return
    for part, frontier, _, pending in parts:
        claims = connection.execute(
            "SELECT start, stop FROM claims WHERE source = ? AND pass_number = ? AND part = ?",
            (row["id"], row["pass_number"], part),
        ).fetchall()
        done = difference([(0, frontiers[part])], claims)
        committed = difference([(0, frontier)], pending)
        if difference(committed, done) or (row["skipped"] <= progress["skipped"] and difference(done, committed)):
            yield f"{name} has other draws done in it than were committed"
