"""A shard from its reservation to its commit.

::

    admit: row `staging` with the upper bound  ->  shards/<id>/ is made, the caller writes its files there
      ->  one transaction: draws closed, what it replaces retired; shard.json last, fsync of it and of both folders;
          row `ready` with its real bytes

Killed before that transaction ends the row is `staging`, and recovery deletes the folder. Killed after it the shard is
whole: everything was durable before. ``shard.json`` is written inside of it, because it records the shard's place in
the order of commits and what is drawn of its source with it (:mod:`cachetool.cache.records`).
"""

from __future__ import annotations

import contextlib
import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from cachetool.cache import history
from cachetool.cache.admission import admit
from cachetool.cache.catalog import Catalog, Connection, bump, next_seq
from cachetool.cache.holders import Holder
from cachetool.cache.layout import SHARD_FILE, Layout
from cachetool.cache.policies import Room
from cachetool.cache.records import read_shard_json, record_bound, seal, source_progress
from cachetool.cache.removal import delete_trash, sweep
from cachetool.core.errors import CacheToolError, CatalogError
from cachetool.core.names import Id
from cachetool.core.ranges import Ranges
from cachetool.core.schema import Schema
from cachetool.proc.disk import file_system, naming_inodes
from cachetool.proc.folders import fsync_folder, tree_bytes, write_durable

__all__ = ["Facts", "Origin", "Staging", "commit_together", "folder_bound", "stage_together"]


@dataclass(frozen=True, slots=True)
class Facts:
    """What a written shard holds, as its format found it."""

    samples: int
    payload: int
    """Bytes of the values."""
    content: str
    """Content digest: the same in every format."""
    digest: str
    """File digest: over every byte of every file."""
    data: str
    """Name of the data file in the shard's folder."""
    files: Mapping[str, str] = field(default_factory=dict)
    """Digest of each file in the shard's folder, by name."""


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a shard's samples came from; all None for data that was not pulled."""

    source: str | None = None
    url: str | None = None
    pass_number: int | None = None
    draws: Ranges = ()
    """Ranges of positions of the part in the pass, whether used or skipped."""
    part: int = 0


def folder_bound(schema: Schema, nbytes: int, disk_block: int) -> int:
    """Upper bound of a shard's folder and ``shard.json``, for files of ``nbytes`` in it."""
    return disk_block + record_bound(schema.to_json(), disk_block, nbytes)


class Staging:
    """A shard being written by this process. Leaving the ``with`` block without a commit gives everything back."""

    def __init__(
        self, catalog: Catalog, layout: Layout, holder: Holder, *, id: Id, schema: Schema, format: str, bound: int
    ) -> None:
        self.id = id
        self.path = layout.shard(id)
        self.bound = bound
        self.nbytes = 0
        """Bytes on disk; known once the shard is committed, when others may delete it."""
        self._catalog, self._layout, self._holder = catalog, layout, holder
        self._schema, self._format = schema, format
        self._open = True
        try:
            with naming_inodes(self.path):
                self.path.mkdir(mode=0o700)
        except BaseException:
            self.abort()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._open:
            self.abort()

    def commit(
        self, facts: Facts, *, origin: Origin, close: Callable[[Connection], None] | None = None, replaces: str = ""
    ) -> str:
        """Make the shard visible; gives its id. As :func:`commit_together`, for one shard in place of none or one."""
        return commit_together([(self, facts, origin)], close=close, replaces=[replaces] if replaces else [])[0]

    def abort(self) -> None:
        """Delete what was written and return the reservation."""
        self._open = False
        with self._catalog.write() as connection:
            connection.execute("UPDATE shards SET state = 'trash' WHERE id = ? AND state = 'staging'", (self.id,))
            state = self._state(connection)
        if state in ("trash", None):  # not a row that is ready: a commit may have failed after it was durable
            delete_trash(self._catalog, self._layout, [self.id])

    def _state(self, connection: Connection) -> str | None:
        row = connection.execute("SELECT state FROM shards WHERE id = ?", (self.id,)).fetchone()
        return None if row is None else str(row["state"])

    def ready(self, connection: Connection, facts: Facts, origin: Origin, heir: _Heir, together: Sequence[str]) -> None:
        """Seal the shard and write its row, inside the committing transaction."""
        row = {
            "seq": heir.seq,
            "lineage": heir.lineage or self.id,
            "samples": facts.samples,
            "payload": facts.payload,
            "since": heir.since,
            "created": heir.now,
            "epochs": heir.epochs,
            "used": heir.used,
            "source": origin.source,
            "part": origin.part,
            "pass_number": origin.pass_number,
            "draws": json.dumps(origin.draws),
            "content": facts.content,
            "digest": facts.digest,
        }
        columns = ", ".join(f"{name} = :{name}" for name in row)
        family = {"ancestors": list(heir.ancestors), "together": together}
        self.nbytes = self._seal(
            connection, facts, origin, {**row, **{name: ids for name, ids in family.items() if ids}}
        )
        connection.execute(
            "UPDATE shards SET state = 'ready', holder = NULL, bytes = :bytes, job = coalesce(job, :job),"
            f" {columns} WHERE id = :id",
            {**row, "job": heir.job, "id": self.id, "bytes": self.nbytes},
        )

    def _seal(self, connection: Connection, facts: Facts, origin: Origin, row: Mapping[str, Any]) -> int:
        """Write ``shard.json`` and make everything durable; gives the bytes on disk of the whole shard."""
        dataset = connection.execute(
            "SELECT name, d.created FROM shards s JOIN datasets d ON d.name = s.dataset WHERE s.id = ?", (self.id,)
        ).fetchone()
        progress = source_progress(connection, origin.source)
        value = {
            "layout": 1,
            "id": self.id,
            "dataset": dataset["name"] if dataset else None,
            "declared": dataset["created"] if dataset else None,
            "format": self._format,
            "data": facts.data,
            "schema": self._schema.to_json(),
            "files": dict(facts.files),
            **row,
            "cut": progress["cut"] if progress else 1,
            "draws": [list(run) for run in origin.draws],
            "url": origin.url,
            "progress": progress,
        }
        write_durable(self.path / SHARD_FILE, seal(value))
        fsync_folder(self.path)
        fsync_folder(self._layout.shards)
        real = tree_bytes(self.path)
        if real > self.bound:
            raise CacheToolError(
                f"a {self._format} shard took {real} bytes, {self.bound} were reserved, on {file_system(self.path)}"
                f" with blocks of {self._layout.disk_block}: a bug, unless the disk was mounted anew meanwhile"
            )
        return real


def stage_together(
    catalog: Catalog,
    layout: Layout,
    holder: Holder,
    *,
    dataset: str,
    schema: Schema,
    format: str,
    bounds: Sequence[int],
    job: str | None,
    room: Room,
    waiting: Callable[[str], None] | None = None,
) -> list[Staging]:
    """Reserve room for shards of up to ``bounds`` bytes each, all or none, and open a folder for each.

    Raises what :func:`cachetool.cache.admission.admit` raises.
    """
    shards = [(Id.new(), bound + folder_bound(schema, bound, layout.disk_block)) for bound in bounds]

    def insert(connection: Connection) -> None:
        connection.executemany(
            "INSERT INTO shards (id, dataset, format, state, bytes, holder, job) VALUES (?, ?, ?, 'staging', ?, ?, ?)",
            [(shard, dataset, format, bound, holder.id, job) for shard, bound in shards],
        )

    admit(catalog, layout, holder, sum(bound for _, bound in shards), insert, room=room, waiting=waiting)
    with contextlib.ExitStack() as stack:
        stagings = [
            stack.enter_context(Staging(catalog, layout, holder, id=shard, schema=schema, format=format, bound=bound))
            for shard, bound in shards
        ]
        stack.pop_all()
    return stagings


@dataclass(frozen=True, slots=True)
class _Heir:
    """What a new shard has that is not its own: its place, its past, and where its samples were before."""

    since: int
    now: float
    seq: float
    epochs: int
    used: float
    job: str | None
    lineage: str | None
    """Of the one shard that it replaces alone; None for a shard that begins one."""
    ancestors: tuple[str, ...]
    """Lineages whose folders may still lie beside it: not to be read again by a rebuild."""


def commit_together(
    parts: Sequence[tuple[Staging, Facts, Origin]],
    *,
    close: Callable[[Connection], None] | None = None,
    replaces: Sequence[str] = (),
) -> list[str]:
    """Make shards visible in one transaction, in this order; gives their ids. ``close`` runs inside it (draws, claims).

    ``replaces`` names ready shards, neighbours in the order of commits, that go in the same transaction: no snapshot
    has a sample twice or not at all. The new ones take their place in that order, and inherit the pull, the fewest
    epochs and the latest use. Raises :class:`CatalogError` when one of them is ready no more.
    """
    first = parts[0][0]
    catalog, layout, holder = first._catalog, first._layout, first._holder
    with catalog.write() as connection:
        for staging, _, _ in parts:
            if staging._state(connection) != "staging":
                raise CatalogError(f"the reservation of shard {staging.id} was taken back: its lock file was deleted")
        heirs = _heirs(connection, layout, replaces, len(parts), bump(connection))
        if close is not None:
            close(connection)
        together = [staging.id for staging, _, _ in parts] if len(parts) > 1 else []
        for (staging, facts, origin), heir in zip(parts, heirs, strict=True):
            staging.ready(connection, facts, origin, heir, together)
        trash = sweep(connection, holder) if replaces else []
        point = history.due_point(connection, layout)
    for staging, _, _ in parts:
        staging._open = False
    history.write(layout, point=point)
    delete_trash(catalog, layout, trash, edge=True)
    return [staging.id for staging, _, _ in parts]


def _heirs(connection: Connection, layout: Layout, replaces: Sequence[str], count: int, version: int) -> list[_Heir]:
    """Retire what is replaced, and say what each of ``count`` new shards has of it."""
    now = time.time()
    if not replaces:
        return [
            _Heir(
                since=version,
                now=now,
                seq=next_seq(connection),
                epochs=0,
                used=now,
                job=None,
                lineage=None,
                ancestors=(),
            )
            for _ in range(count)
        ]
    olds = []
    for shard in replaces:
        old = connection.execute(
            "SELECT seq, epochs, used, job, lineage FROM shards WHERE id = ? AND state = 'ready'", (shard,)
        ).fetchone()
        if old is None:
            raise CatalogError(f"shard {shard} was evicted while it was converted")
        olds.append(old)
        connection.execute("UPDATE shards SET state = 'retiring', until = ? WHERE id = ?", (version, shard))
    ancestors = dict.fromkeys(name for shard in replaces for name in _living_ancestors(connection, layout, shard))
    alone = len(replaces) == count == 1
    if not alone:
        ancestors |= dict.fromkeys(old["lineage"] for old in olds)
    start, end = min(old["seq"] for old in olds), max(old["seq"] for old in olds)
    after = connection.execute("SELECT min(seq) FROM shards WHERE seq > ?", (end,)).fetchone()[0]
    after = after or math.floor(end) + 1  # what is committed next
    jobs = {old["job"] for old in olds}
    return [
        _Heir(
            since=version,
            now=now,
            # Between the old place and the next one: the first stays a whole number, others are fractions.
            seq=start + (after - start) * number / count if number else start,
            epochs=min(old["epochs"] for old in olds),
            used=max(old["used"] for old in olds),
            job=next(iter(jobs)) if len(jobs) == 1 else None,
            lineage=olds[0]["lineage"] if alone else None,
            ancestors=tuple(ancestors),
        )
        for number in range(count)
    ]


def _living_ancestors(connection: Connection, layout: Layout, id: str) -> list[str]:
    """Of the ancestors that a shard names, those whose files somebody still reads."""
    with contextlib.suppress(OSError, ValueError):  # its samples were read; what else it said is lost
        named = read_shard_json(layout.shard(Id(id))).get("ancestors", [])
        return [a for a in named if connection.execute("SELECT 1 FROM shards WHERE lineage = ?", (a,)).fetchone()]
    return []
