"""A shard from its reservation to its commit.

::

    admit: row `staging` with the upper bound  ->  shards/<id>/ is made, the caller writes its files there
      ->  one transaction: draws closed, replaced shards retired; shard.json written last, fsync of the file and of both
          folders; row `ready` with the real bytes

If the process is killed before this transaction ends, the row is still `staging` and recovery deletes the folder. After
the transaction the shard is complete, because every file was durable before. ``shard.json`` is written inside the
transaction. It records the shard's place in the order of commits and the progress of its source, and both are only
known there (:mod:`cachetool.cache.records`).
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
    """The contents of a written shard, as its format reports them.

    Example:
        facts = Facts(samples=10, payload=1600, content="c0", digest="d0", data="data.lmdb")
    """

    samples: int
    """Number of samples."""
    payload: int
    """Bytes of the values, without any overhead of the format."""
    content: str
    """Digest of the values; the same in every format."""
    digest: str
    """Digest over every byte of every file."""
    data: str
    """Name of the data file in the shard's folder."""
    files: Mapping[str, str] = field(default_factory=dict)
    """Digest of each file in the shard's folder, by file name."""


@dataclass(frozen=True, slots=True)
class Origin:
    """The place in a source from which a shard's samples came. All fields keep their defaults for data that was not
    pulled.

    Example:
        origin = Origin(source=row.id, url=row.url, pass_number=0, draws=((0, 500),))
    """

    source: str | None = None
    """Id of the source."""
    url: str | None = None
    """URL of the source."""
    pass_number: int | None = None
    """Number of the pass, from 0."""
    draws: Ranges = ()
    """Ranges of positions of the part in this pass, for used and for skipped draws."""
    part: int = 0
    """Number of the part of the source."""


def folder_bound(schema: Schema, nbytes: int, disk_block: int) -> int:
    """Return the upper bound in bytes of a shard's folder and its ``shard.json``, for ``nbytes`` bytes of files in the
    folder."""
    return disk_block + record_bound(schema.to_json(), disk_block, nbytes)


class Staging:
    """A shard that this process is writing, made by :meth:`CacheDir.stage`.

    Use it as a context manager. Leaving the ``with`` block without a commit deletes the files and returns the
    reservation.

    Args:
        catalog: The catalog with the row ``staging`` of this shard.
        layout: The paths of the cache.
        holder: This process.
        id: Id of the shard.
        schema: Schema of its samples.
        format: Name of its format.
        bound: Reserved bytes: the upper bound of the folder with all its files.

    Raises:
        OSError: The shard's folder cannot be made. The reservation is returned first.

    Example:
        with cache.stage(dataset="default", schema=schema, format="lmdb", bound=1_000_000) as staging:
            (staging.path / "data.lmdb").write_bytes(data)
            staging.commit(facts, origin=Origin())
    """

    def __init__(
        self, catalog: Catalog, layout: Layout, holder: Holder, *, id: Id, schema: Schema, format: str, bound: int
    ) -> None:
        self.id = id
        self.path = layout.shard(id)
        self.bound = bound
        self.nbytes = 0
        """Bytes on disk, known after the commit. Other processes may delete the shard by then, so the number is kept
        here."""
        self._catalog, self._layout, self._holder = catalog, layout, holder
        self._schema, self._format = schema, format
        self._open = True
        try:
            # ENOSPC with free bytes means that the disk ran out of inodes. Only the code that makes
            # a file can tell the difference.
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
        """Make the shard visible and return its id.

        Args:
            facts: The contents of the shard.
            origin: The place from which its samples came.
            close: Called with the connection inside the committing transaction, to close claims.
            replaces: Id of a ready shard that this shard replaces; empty for none.

        Returns:
            The id of the shard.

        Raises:
            CatalogError: The reservation was taken back, or the replaced shard is no longer ready.
            CacheToolError: The files take more bytes than were reserved.
        """
        return commit_together([(self, facts, origin)], close=close, replaces=[replaces] if replaces else [])[0]

    def abort(self) -> None:
        """Delete the written files and return the reservation."""
        self._open = False
        with self._catalog.write() as connection:
            connection.execute("UPDATE shards SET state = 'trash' WHERE id = ? AND state = 'staging'", (self.id,))
            state = self._state(connection)
        # A row in the state `ready` must stay. The commit may have raised an error after its
        # transaction was durable, and then readers may already use the shard.
        if state in ("trash", None):
            delete_trash(self._catalog, self._layout, [self.id])

    def _state(self, connection: Connection) -> str | None:
        """Return the state of the shard's row, or None if there is no row."""
        row = connection.execute("SELECT state FROM shards WHERE id = ?", (self.id,)).fetchone()
        return None if row is None else str(row["state"])

    def ready(self, connection: Connection, facts: Facts, origin: Origin, heir: _Heir, together: Sequence[str]) -> None:
        """Write ``shard.json`` and the shard's row, inside the committing transaction."""
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
        """Write ``shard.json``, make everything durable, and return the bytes on disk of the complete shard."""
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
        # The order matters after a power cut: a folder without `shard.json` was never committed, so
        # this file comes after all others. The fsync of the two folders makes the names durable; a
        # file renamed or made without it can come back with length 0 or not at all.
        write_durable(self.path / SHARD_FILE, seal(value))
        fsync_folder(self.path)
        fsync_folder(self._layout.shards)
        # Only the blocks that the disk really uses are known to be right, so they are measured
        # after the fsync. More than the reserved bytes would mean that the cap was exceeded without
        # anybody noticing.
        real = tree_bytes(self.path)
        if real > self.bound:
            raise CacheToolError(
                f"a {self._format} shard took {real} bytes, but {self.bound} were reserved ({file_system(self.path)},"
                f" blocks of {self._layout.disk_block}): a bug, unless the disk was remounted in the meantime"
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
    """Reserve room for several shards of up to ``bounds`` bytes each, all or none, and open a folder for each.

    Raises the errors of :func:`cachetool.cache.admission.admit`.
    """
    shards = [(Id.new(), bound + folder_bound(schema, bound, layout.disk_block)) for bound in bounds]

    def insert(connection: Connection) -> None:
        connection.executemany(
            "INSERT INTO shards (id, dataset, format, state, bytes, holder, job) VALUES (?, ?, ?, 'staging', ?, ?, ?)",
            [(shard, dataset, format, bound, holder.id, job) for shard, bound in shards],
        )

    # One reservation for all shards. With one reservation each, two conversions could hold half of
    # their shards and wait for each other for ever.
    need = sum(bound for _, bound in shards)
    admit(catalog, layout, holder, need, insert, room=room, dataset=dataset, waiting=waiting)
    with contextlib.ExitStack() as stack:
        stagings = [
            stack.enter_context(Staging(catalog, layout, holder, id=shard, schema=schema, format=format, bound=bound))
            for shard, bound in shards
        ]
        # All folders were made, so the callers close the stagings. If one folder could not be made,
        # the stack aborts those that exist.
        stack.pop_all()
    return stagings


@dataclass(frozen=True, slots=True)
class _Heir:
    """The values that a new shard inherits from the shards that it replaces: its place in the order, its history of
    epochs, and its ancestors."""

    since: int
    now: float
    seq: float
    epochs: int
    used: float
    job: str | None
    lineage: str | None
    """Lineage of the one shard that the new shard replaces alone; None for a shard that begins a lineage."""
    ancestors: tuple[str, ...]
    """Lineages whose folders may still lie on the disk. A rebuild must not read their samples a second time."""


def commit_together(
    parts: Sequence[tuple[Staging, Facts, Origin]],
    *,
    close: Callable[[Connection], None] | None = None,
    replaces: Sequence[str] = (),
) -> list[str]:
    """Make several shards visible in one transaction, in this order.

    Shards in ``replaces`` retire in the same transaction, so no snapshot contains a sample twice or misses it. The new
    shards take the place of the old ones in the order of commits. They inherit the pull, the fewest epochs and the
    latest use.

    Args:
        parts: The written shards: staging, contents and origin of each.
        close: Called with the connection inside the transaction, to close claims or draws.
        replaces: Ids of ready shards that the new shards replace. They must be neighbours in the order of commits.

    Returns:
        The ids of the shards, in the order of ``parts``.

    Raises:
        CatalogError: A reservation was taken back, or a shard of ``replaces`` is no longer ready.
        CacheToolError: The files of a shard take more bytes than were reserved.

    Example:
        ids = commit_together([(staging, facts, Origin())], replaces=[old.id])
    """
    first = parts[0][0]
    catalog, layout, holder = first._catalog, first._layout, first._holder
    with catalog.write() as connection:
        for staging, _, _ in parts:
            # Recovery takes the reservation of a process that looks dead. A living writer looks
            # dead when somebody deleted its lock file on another host or in another PID namespace.
            if staging._state(connection) != "staging":
                raise CatalogError(
                    f"shard {staging.id} lost its reservation because the lock file of this process was deleted;"
                    " run this again"
                )
        heirs = _heirs(connection, layout, replaces, len(parts), bump(connection))
        # Before `ready` writes the `progress` of the source into shard.json: the record must count
        # the draws of this commit as done, or a rebuild would draw them again.
        if close is not None:
            close(connection)
        together = [staging.id for staging, _, _ in parts] if len(parts) > 1 else []
        for (staging, facts, origin), heir in zip(parts, heirs, strict=True):
            staging.ready(connection, facts, origin, heir, together)
        # A replaced shard that nobody reads becomes trash at once, so that a conversion of many
        # shards does not need room for all of them twice.
        trash = sweep(connection, holder) if replaces else []
        point = history.due_point(connection, layout)
    for staging, _, _ in parts:
        # Only now. If the transaction had failed, leaving the `with` block would still abort the
        # staging.
        staging._open = False
    # Outside of the transaction, because the history is only for the report and must not lengthen
    # or fail a commit.
    history.write(layout, point=point)
    delete_trash(catalog, layout, trash, edge=True)
    return [staging.id for staging, _, _ in parts]


def _heirs(connection: Connection, layout: Layout, replaces: Sequence[str], count: int, version: int) -> list[_Heir]:
    """Retire the replaced shards, and return the values that each of ``count`` new shards inherits."""
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
        # Not by `removal.retire`: a replaced shard loses no sample, so it is not counted as an
        # eviction.
        connection.execute("UPDATE shards SET state = 'retiring', until = ? WHERE id = ?", (version, shard))
    ancestors = dict.fromkeys(name for shard in replaces for name in _living_ancestors(connection, layout, shard))
    # One shard in place of one keeps the lineage, because it holds the same samples. After a merge
    # or a cut the new shards begin lineages of their own and name the old ones as ancestors.
    alone = len(replaces) == count == 1
    if not alone:
        ancestors |= dict.fromkeys(old["lineage"] for old in olds)
    start, end = min(old["seq"] for old in olds), max(old["seq"] for old in olds)
    # By state, because the index over states and places then has the answer; otherwise all rows would be read for each
    # shard that is replaced.
    by_state = " UNION ALL ".join(
        f"SELECT min(seq) AS seq FROM shards WHERE state = '{state}' AND seq > :end"
        for state in ("staging", "ready", "retiring", "trash")
    )
    after = connection.execute(f"SELECT min(seq) FROM ({by_state})", {"end": end}).fetchone()[0]
    # Without a later shard, the next commit will get the next whole number, so the new places must
    # stay below that number.
    after = after or math.floor(end) + 1
    jobs = {old["job"] for old in olds}
    return [
        _Heir(
            since=version,
            now=now,
            # The new places lie between the old place and the next one, so that the order of all
            # other shards stays. The first one keeps the whole number, the others are fractions.
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
    """Return those ancestors of a shard whose files are still on the disk for a reader."""
    # A damaged shard.json is no reason to fail: the samples of this shard were just read and
    # checked, and only its list of ancestors is lost.
    with contextlib.suppress(OSError, ValueError):
        named = read_shard_json(layout.shard(Id(id))).get("ancestors", [])
        return [a for a in named if connection.execute("SELECT 1 FROM shards WHERE lineage = ?", (a,)).fetchone()]
    return []
