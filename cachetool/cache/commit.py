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

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

from cachetool.cache.catalog import Catalog, Connection, bump, next_seq
from cachetool.cache.holders import Holder
from cachetool.cache.layout import SHARD_FILE, Layout, fsync_folder, tree_bytes, write_durable
from cachetool.cache.records import record_bound, seal, source_progress
from cachetool.cache.removal import delete_trash, sweep
from cachetool.disk import naming_inodes
from cachetool.errors import CacheToolError, CatalogError
from cachetool.schema import Schema

__all__ = ["Facts", "Origin", "Staging", "folder_bound"]


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
    turn: int | None = None
    draws: tuple[tuple[int, int], ...] = ()
    """Ranges of positions of the turn, whether used or skipped."""
    sole: bool = False
    """Whether the data exists nowhere else, so that eviction must ask."""


def folder_bound(schema: Schema, nbytes: int) -> int:
    """Upper bound of a shard's folder and ``shard.json``, for files of ``nbytes`` in it."""
    return 4096 + record_bound(schema.to_json(), nbytes)


class Staging:
    """A shard being written by this process. Leaving the ``with`` block without a commit gives everything back."""

    def __init__(
        self, catalog: Catalog, layout: Layout, holder: Holder, *, id: str, schema: Schema, format: str, bound: int
    ) -> None:
        self.id = id
        self.path = layout.shards / id
        self.bound = bound
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

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._open:
            self.abort()

    def commit(
        self,
        facts: Facts,
        *,
        origin: Origin,
        close: Callable[[Connection], None] | None = None,
        replaces: str | None = None,
    ) -> str:
        """Make the shard visible; gives its id. ``close`` runs inside the transaction (draws, claims).

        ``replaces`` names a ready shard that goes in the same transaction: no snapshot sees both or neither, and this
        one inherits its age, its epochs and its pull. Raises :class:`CatalogError` when that shard is ready no more.
        """
        now = time.time()
        with self._catalog.write() as connection:
            if self._state(connection) != "staging":
                raise CatalogError(f"the reservation of shard {self.id} was taken back: its lock file was deleted")
            seq, epochs, used, job, lineage = next_seq(connection), 0, now, None, self.id
            version = bump(connection)
            if replaces is not None:
                old = connection.execute(
                    "SELECT seq, epochs, used, job, lineage FROM shards WHERE id = ? AND state = 'ready'", (replaces,)
                ).fetchone()
                if old is None:
                    raise CatalogError(f"shard {replaces} was evicted while it was converted")
                seq, epochs, used, job, lineage = old
                connection.execute("UPDATE shards SET state = 'retiring', until = ? WHERE id = ?", (version, replaces))
            if close is not None:
                close(connection)
            row = {
                "seq": seq,
                "lineage": lineage,
                "samples": facts.samples,
                "payload": facts.payload,
                "since": version,
                "created": now,
                "epochs": epochs,
                "used": used,
                "source": origin.source,
                "turn": origin.turn,
                "draws": json.dumps(origin.draws),
                "content": facts.content,
                "digest": facts.digest,
                "sole": int(origin.sole),
            }
            columns = ", ".join(f"{name} = :{name}" for name in row)
            connection.execute(
                "UPDATE shards SET state = 'ready', holder = NULL, bytes = :bytes, job = coalesce(job, :job),"
                f" {columns} WHERE id = :id",
                {**row, "job": job, "id": self.id, "bytes": self._seal(connection, facts, origin, row)},
            )
            trash = sweep(connection, self._holder) if replaces is not None else []
        self._open = False
        delete_trash(self._catalog, self._layout, trash)
        return self.id

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

    def _seal(self, connection: Connection, facts: Facts, origin: Origin, row: Mapping[str, Any]) -> int:
        """Write ``shard.json`` and make everything durable; gives the bytes on disk of the whole shard."""
        dataset = connection.execute(
            "SELECT name, d.created FROM shards s JOIN datasets d ON d.name = s.dataset WHERE s.id = ?", (self.id,)
        ).fetchone()
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
            "draws": [list(part) for part in origin.draws],
            "sole": origin.sole,
            "url": origin.url,
            "progress": source_progress(connection, origin.source),
        }
        write_durable(self.path / SHARD_FILE, seal(value))
        fsync_folder(self.path)
        fsync_folder(self._layout.shards)
        real = tree_bytes(self.path)
        if real > self.bound:
            raise CacheToolError(f"a {self._format} shard took {real} bytes, {self.bound} were reserved: a bug")
        return real
