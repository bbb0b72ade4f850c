"""What a lost catalog is rebuilt from: ``shard.json`` of every shard, and one record more of each source.

``shard.json`` says what its shard holds and, under ``progress``, all that the catalog knew of its source once the shard
was committed: the row, and which draws were done. It is written inside the committing transaction, so the record with
the highest ``since`` tells of every draw that was ever committed. That one is never deleted::

    shards/<id>/shard.json  -- the shard goes, and none of its source that stays is newer -->  listings/<source>.json

A rename, which needs no room on a full disk. Every record carries its own checksum.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from cachetool.cache.catalog import Connection
from cachetool.cache.layout import SHARD_FILE, Layout
from cachetool.cache.values import fits
from cachetool.core.names import Id, Name
from cachetool.core.ranges import Range, union
from cachetool.core.text import shown
from cachetool.proc.folders import fsync_folder, read_json, write_durable

__all__ = [
    "RANGE_BYTES",
    "Record",
    "keep_newest",
    "read_shard_json",
    "record_bound",
    "seal",
    "source_progress",
    "take_back_records",
    "unseal",
    "write_source_record",
]

Record = dict[str, Any]

MOST_PENDING = 256
"""Ranges of open draws in a record, one less for each further part. Of more, the smallest are left out: after a rebuild
they wait for the next pass."""

MOST_REOPENED = 64
"""Ranges of reopened draws in a record, the largest: after a rebuild the others wait for the next pass."""


_MOST = 2**62
"""Position of a draw, or number of a pass."""
RANGE_BYTES = 64
"""Of ``shard.json`` for a range of draws, or the id of a shard."""


def seal(value: Mapping[str, Any]) -> bytes:
    """A record as a file's bytes; its last line is a checksum of all bytes before it."""
    body = json.dumps(value, indent=1).removesuffix("\n}").encode()
    return body + _checksum(body)


def unseal(path: Path) -> Record:
    """The record in a file. Raises ``ValueError`` when one byte is not what :func:`seal` made, and OSError."""
    raw = read_json(path)
    body = raw[: -len(_checksum(b""))]
    if raw != body + _checksum(body):
        raise ValueError(f"{path} does not match its checksum")
    try:
        value = json.loads(raw)
    except RecursionError as error:
        raise ValueError(f"{path} is nested too deeply") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path} is no record")
    del value["checksum"]
    _require(path, value, _RECORD)
    if value["progress"] is not None:
        _require(path, value["progress"], _PROGRESS)
        _require_id(path, value["progress"]["id"])
        _require_ranges(path, "pending", value["progress"]["pending"], 3)
        _require_ranges(path, "reopened", value["progress"]["reopened"], 4)
    return value


_RECORD: Mapping[str, tuple[type, ...]] = {
    "layout": (int,), "since": (int,), "declared": (int, float, type(None)), "progress": (dict, type(None)),
}  # fmt: skip
"""What every record has, and of which types: the checksum says only that it is as it was written, not by whom."""
_SHARD = {
    "dataset": (str,), "format": (str,), "data": (str,), "schema": (list,), "files": (dict,), "lineage": (str,),
    "seq": (int, float), "samples": (int,), "payload": (int,), "created": (int, float), "epochs": (int,),
    "used": (int, float), "source": (str, type(None)), "pass_number": (int, type(None)), "part": (int,), "cut": (int,),
    "draws": (list,),
    "content": (str,), "digest": (str,),
}  # fmt: skip
_PROGRESS = {
    "id": (str,), "url": (str,), "options": (dict,), "identity": (str,), "dataset": (str,), "units": (int,),
    "samples": (int,), "seed": (int,), "cut": (int,), "pass_number": (int,), "skipped": (int,), "bytes": (int,),
    "created": (int, float), "fetched": (int,), "segments": (str,), "sequential": (int,), "complete": (int,),
    "past": (str,), "parts": (str,), "pending": (list,), "reopened": (list,),
}  # fmt: skip


def _require_id(path: Path, source: str) -> None:
    if not Id.fits(source):
        raise ValueError(f"{path} calls its source {ascii(source)[:100]}, which cachetool does not")


def _require_ranges(path: Path, name: str, ranges: Sequence[Any], numbers: int) -> None:
    """Raise ``ValueError`` unless each is a list of so many numbers, the last two ``start`` and ``stop``."""
    for value in ranges:
        fitting = isinstance(value, list) and len(value) == numbers
        if not (fitting and all(type(n) is int and 0 <= n <= _MOST for n in value) and value[-2] <= value[-1]):
            raise ValueError(f"{path} has {shown(value)} in its {name}, which cachetool never writes")


def _require(path: Path, value: Mapping[str, Any], wanted: Mapping[str, tuple[type, ...]]) -> None:
    for name, kinds in wanted.items():
        if name not in value or not isinstance(value[name], kinds):
            raise ValueError(f"{path} has no {name}, or one of another type than cachetool writes")
        if not fits(name, value[name]):
            raise ValueError(f"{path} has {name} {shown(value[name])}, which cachetool never writes")


def _checksum(body: bytes) -> bytes:
    return b',\n "checksum": "' + hashlib.sha256(body).hexdigest().encode() + b'"\n}'


def read_shard_json(folder: Path) -> Record:
    """``shard.json`` of a shard, its own checksum and id checked. Raises ``ValueError`` when they do not hold."""
    value = unseal(folder / SHARD_FILE)
    if value.get("id") != folder.name:
        raise ValueError(f"{folder / SHARD_FILE} belongs to shard {value.get('id')}")
    _require(folder / SHARD_FILE, value, _SHARD)
    if not Name.fits(value["data"]):
        raise ValueError(f"{folder / SHARD_FILE} calls its data file {value['data']!r}")
    if value["source"] is not None:
        _require_id(folder / SHARD_FILE, value["source"])
    _require_ranges(folder / SHARD_FILE, "draws", value["draws"], 2)
    if len(value["draws"]) > MOST_PENDING + value["samples"]:
        raise ValueError(f"{folder / SHARD_FILE} has more ranges of draws than samples")
    for name in "ancestors", "together":
        if not all(Id.fits(id) for id in value.get(name) or ()):
            raise ValueError(f"{folder / SHARD_FILE} names {name} that are no shards")
    return value


def record_bound(schema: Sequence[Mapping[str, Any]], disk_block: int, nbytes: int = 0) -> int:
    """Upper bound of a record on disk, for a schema in its JSON form and a shard of ``nbytes``: a block more than its
    lines, its schema, its source with :data:`MOST_PENDING` parts and ranges, and the digests of its files."""
    # A format makes at most three files a field, and one for every 32 MiB.
    return disk_block + 28672 + 4 * len(json.dumps(schema)) + 512 * len(schema) + (nbytes >> 16)


def source_progress(connection: Connection, source: str | None) -> Record | None:
    """The row of a source; its parts here: number, frontier, size; which draws of its present pass are not done: part,
    start, stop; and which of any pass were reopened: pass, part, start, stop; inside a transaction."""
    row = connection.execute("SELECT * FROM sources WHERE id = ?", (source,)).fetchone()
    if row is None:
        return None
    rows = connection.execute("SELECT part, frontier, size FROM parts WHERE source = ? ORDER BY part", (source,))
    claims = connection.execute(
        "SELECT part, start, stop FROM claims WHERE source = ? AND pass_number = ?", (source, row["pass_number"])
    )
    by_part: dict[int, list[Range]] = {}
    for part, start, stop in claims:
        by_part.setdefault(part, []).append((start, stop))
    pending = [[part, *run] for part, runs in sorted(by_part.items()) for run in union(runs)]
    parts = [list(part) for part in rows]
    if len(pending) > (most := max(0, MOST_PENDING + 1 - len(parts))):
        pending = sorted(sorted(pending, key=lambda run: run[1] - run[2])[:most])
    reopened = connection.execute(
        "SELECT pass_number, part, start, stop FROM claims WHERE source = ? AND reopened"
        " ORDER BY stop - start DESC LIMIT ?",
        (source, MOST_REOPENED),
    )
    return {
        **dict(row),
        "options": json.loads(row["options"]),
        "parts": json.dumps(parts, separators=(",", ":")),
        "pending": pending,
        "reopened": [list(claim) for claim in reopened],
    }


def keep_newest(connection: Connection, layout: Layout, ids: Iterable[Id]) -> None:
    """Before shards are deleted: move ``shard.json`` of those that tell the newest of their source out of the way.

    Inside a writing transaction, so that two processes cannot put an older record over a newer one.
    """
    for shard in ids:
        row = connection.execute(
            "SELECT source, since FROM shards WHERE id = ? AND state = 'trash'", (shard,)
        ).fetchone()
        if row is None or row["source"] is None or row["since"] is None:
            continue
        newer = connection.execute(
            "SELECT 1 FROM shards WHERE source = ? AND state IN ('ready', 'retiring') AND since > ? LIMIT 1", tuple(row)
        ).fetchone()
        path = layout.record(Id(row["source"]))
        if newer is not None or _version(path) >= row["since"]:
            continue
        try:
            folder = os.open(layout.shard(shard), os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except (FileNotFoundError, NotADirectoryError):
            continue  # it is gone, or somebody put a link in its place: what that leads to is no shard
        try:
            os.rename(SHARD_FILE, path, src_dir_fd=folder)
        except FileNotFoundError:
            continue  # killed between this and the end of the deletion: it was done then
        except OSError as error:
            error.filename = str(layout.shard(shard) / SHARD_FILE)  # not the last part alone
            raise
        finally:
            os.close(folder)
        fsync_folder(layout.listings)


def write_source_record(connection: Connection, layout: Layout, source: str) -> None:
    """Record a source anew, where what its shards say of it is no longer true; inside a writing transaction."""
    progress = source_progress(connection, source)
    if progress is None:
        return
    dataset = connection.execute("SELECT * FROM datasets WHERE name = ?", (progress["dataset"],)).fetchone()
    about = {"dataset": dataset["name"], "declared": dataset["created"], "schema": json.loads(dataset["schema"])}
    version = connection.execute("SELECT version FROM cache").fetchone()[0]
    path = layout.record(Id(source))
    aside = path.with_name(f"{path.name}.new")
    layout.remove(aside)
    write_durable(aside, seal({"layout": 1, "since": int(version), "source": source, **about, "progress": progress}))
    os.replace(aside, path)
    fsync_folder(layout.listings)


def take_back_records(connection: Connection, layout: Layout) -> None:
    """Record anew what a transaction recorded that was cut off before its end; inside a writing transaction."""
    version = connection.execute("SELECT version FROM cache").fetchone()[0]
    for row in connection.execute("SELECT id FROM sources").fetchall():
        if _version(layout.record(Id(row["id"]))) > version:
            write_source_record(connection, layout, row["id"])


def _version(path: Path) -> int:
    try:
        return int(unseal(path)["since"])
    except (OSError, ValueError, KeyError):
        return 0
