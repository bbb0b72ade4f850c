"""A shard from its reservation to its commit.

::

    admit: row `staging` with the upper bound  ->  shards/<id>/ is made, the caller writes its files there
      ->  shard.json last, fsync of it and of both folders
      ->  one transaction: row `ready` with its real bytes, draws closed, what it replaces retired

Killed before the last transaction the row is `staging`, and recovery deletes the folder. Killed after it the shard is
whole: everything was durable before.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from cachetool.cache.catalog import Catalog, Connection, bump, next_seq
from cachetool.cache.holders import Holder
from cachetool.cache.layout import Layout, fsync_folder, remove_tree, tree_bytes, write_durable
from cachetool.cache.removal import SHARD_FILE, delete_trash, sweep
from cachetool.errors import CacheToolError, CatalogError
from cachetool.schema import Schema

__all__ = ["Facts", "Origin", "Staging", "folder_bound", "read_shard_json"]


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
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Anything else worth keeping in ``shard.json``."""


def folder_bound(schema: Schema) -> int:
    """Upper bound of a shard's folder and ``shard.json``: the folder one block, the file its schema and some lines."""
    return 16384 + 2 * len(json.dumps(schema.to_json()))


def read_shard_json(folder: Path) -> dict[str, Any]:
    """``shard.json`` of a shard, its own checksum and id checked. Raises ``ValueError`` when they do not hold."""
    value = json.loads((folder / SHARD_FILE).read_bytes())
    claimed = value.pop("checksum", None)
    if claimed != _checksum(value):
        raise ValueError(f"{folder / SHARD_FILE} does not match its checksum")
    if value["id"] != folder.name:
        raise ValueError(f"{folder / SHARD_FILE} belongs to shard {value['id']}")
    return dict(value)


def _checksum(value: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


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
        self.path.mkdir(mode=0o700)

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
        value = self._describe(facts, origin)
        write_durable(self.path / SHARD_FILE, json.dumps({**value, "checksum": _checksum(value)}, indent=1).encode())
        fsync_folder(self.path)
        fsync_folder(self._layout.shards)
        real = tree_bytes(self.path)
        if real > self.bound:
            raise CacheToolError(f"a {self._format} shard took {real} bytes, {self.bound} were reserved: a bug")
        now = time.time()
        with self._catalog.write() as connection:
            seq, epochs, used, job = next_seq(connection), 0, now, None
            version = bump(connection)
            if replaces is not None:
                old = connection.execute(
                    "SELECT seq, epochs, used, job FROM shards WHERE id = ? AND state = 'ready'", (replaces,)
                ).fetchone()
                if old is None:
                    raise CatalogError(f"shard {replaces} was evicted while it was converted")
                seq, epochs, used, job = old
                connection.execute("UPDATE shards SET state = 'retiring', until = ? WHERE id = ?", (version, replaces))
            row = {
                "seq": seq,
                "samples": facts.samples,
                "payload": facts.payload,
                "bytes": real,
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
                f"UPDATE shards SET state = 'ready', holder = NULL, job = coalesce(job, :job), {columns}"
                " WHERE id = :id",
                {**row, "job": job, "id": self.id},
            )
            if close is not None:
                close(connection)
            trash = sweep(connection, self._holder) if replaces is not None else []
        self._open = False
        delete_trash(self._catalog, self._layout, trash)
        return self.id

    def abort(self) -> None:
        """Delete what was written and return the reservation; the row stays until the files are gone."""
        self._open = False
        remove_tree(self.path, first=SHARD_FILE)
        with self._catalog.write() as connection:
            connection.execute("DELETE FROM shards WHERE id = ? AND state = 'staging'", (self.id,))

    def _describe(self, facts: Facts, origin: Origin) -> dict[str, Any]:
        return {
            "layout": 1,
            "id": self.id,
            "format": self._format,
            "data": facts.data,
            "schema": self._schema.to_json(),
            "samples": facts.samples,
            "payload": facts.payload,
            "content": facts.content,
            "digest": facts.digest,
            "created": time.time(),
            "source": origin.source,
            "url": origin.url,
            "turn": origin.turn,
            "draws": [list(part) for part in origin.draws],
            "sole": origin.sole,
            **dict(origin.extra),
        }
