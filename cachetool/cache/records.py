"""Records from which a lost catalog is rebuilt: ``shard.json`` of every shard, and one more record of each source.

``shard.json`` describes its shard. Under ``progress`` it has everything that the catalog knew of the source at the
commit: the source's row, and the draws that were done. It is written inside the committing transaction, so the record
with the highest ``since`` knows every draw that was ever committed. That record is never deleted::

    shards/<id>/shard.json  -- the shard is deleted, and no shard that stays is newer -->  listings/<source>.json

This is a rename, which needs no space on a full disk. Every record carries its own checksum.
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
"""Maximum ranges of open draws in a record, one less for each further part. If there are more, the smallest are left
out: after a rebuild they wait for the next pass."""

MOST_REOPENED = 64
"""Maximum ranges of reopened draws in a record. The largest are kept: after a rebuild the others wait for the next
pass."""


_MOST = 2**62
"""Maximum position of a draw, and maximum number of a pass."""
RANGE_BYTES = 64
"""Bytes in ``shard.json`` for a range of draws, or for the id of a shard."""


def seal(value: Mapping[str, Any]) -> bytes:
    """Return a record as the bytes of a file. The last line is a checksum of all bytes before it."""
    body = json.dumps(value, indent=1).removesuffix("\n}").encode()
    return body + _checksum(body)


def unseal(path: Path) -> Record:
    """Return the record in a file. Raises ``OSError``, and ``ValueError`` when one byte differs from what :func:`seal`
    made."""
    raw = read_json(path)
    body = raw[: -len(_checksum(b""))]
    if raw != body + _checksum(body):
        raise ValueError(f"{path} does not match its checksum")
    try:
        value = json.loads(raw)
    # Thousands of brackets in a hostile file end Python's parser with this error, which is no
    # `ValueError`.
    except RecursionError as error:
        raise ValueError(f"{path} is nested too deeply") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path} is no record")
    del value["checksum"]
    # The checksum only says that the record is as it was written, not who wrote it. So every field
    # is checked before its value becomes a path or part of a row.
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
"""Fields of every record, and their types."""
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
        raise ValueError(f"{path} has the source id {ascii(source)[:100]}, which cachetool never writes")


def _require_ranges(path: Path, name: str, ranges: Sequence[Any], numbers: int) -> None:
    """Raise ``ValueError`` unless each value is a list of ``numbers`` integers, the last two of which are ``start`` and
    ``stop``."""
    for value in ranges:
        # `type(n) is int` and not `isinstance`: True and False are integers to Python.
        fitting = isinstance(value, list) and len(value) == numbers
        if not (fitting and all(type(n) is int and 0 <= n <= _MOST for n in value) and value[-2] <= value[-1]):
            raise ValueError(f"{path} has {shown(value)} in its {name}, which cachetool never writes")


def _require(path: Path, value: Mapping[str, Any], wanted: Mapping[str, tuple[type, ...]]) -> None:
    for name, kinds in wanted.items():
        if name not in value or not isinstance(value[name], kinds):
            raise ValueError(f"{path} has no {name}, or a {name} of the wrong type")
        if not fits(name, value[name]):
            raise ValueError(f"{path} has {name} {shown(value[name])}, which cachetool never writes")


def _checksum(body: bytes) -> bytes:
    return b',\n "checksum": "' + hashlib.sha256(body).hexdigest().encode() + b'"\n}'


def read_shard_json(folder: Path) -> Record:
    """Return ``shard.json`` of a shard. Raises ``ValueError`` when its checksum, its id or a field is wrong."""
    value = unseal(folder / SHARD_FILE)
    # A valid record in a wrong folder: somebody renamed or copied the folder.
    if value.get("id") != folder.name:
        raise ValueError(f"{folder / SHARD_FILE} belongs to shard {value.get('id')}")
    _require(folder / SHARD_FILE, value, _SHARD)
    if not Name.fits(value["data"]):
        raise ValueError(f"{folder / SHARD_FILE} has an invalid name of its data file: {value['data']!r}")
    if value["source"] is not None:
        _require_id(folder / SHARD_FILE, value["source"])
    _require_ranges(folder / SHARD_FILE, "draws", value["draws"], 2)
    if len(value["draws"]) > MOST_PENDING + value["samples"]:
        raise ValueError(f"{folder / SHARD_FILE} has more ranges of draws than samples")
    for name in "ancestors", "together":
        if not all(Id.fits(id) for id in value.get(name) or ()):
            raise ValueError(f"{folder / SHARD_FILE} has invalid shard ids in its {name}")
    return value


def record_bound(schema: Sequence[Mapping[str, Any]], disk_block: int, nbytes: int = 0) -> int:
    """Return the upper bound in bytes of a record on disk, for a schema in its JSON form and a shard of ``nbytes``
    bytes.

    The bound holds one disk block, the record's own lines, its schema, its source with :data:`MOST_PENDING` parts and
    ranges, and the digests of its files.
    """
    # A format makes at most three files a field, and one for every 32 MiB.
    return disk_block + 28672 + 4 * len(json.dumps(schema)) + 512 * len(schema) + (nbytes >> 16)


def source_progress(connection: Connection, source: str | None) -> Record | None:
    """Return the progress of a source, or None for an unknown source. Call this inside a transaction.

    The record has the source's row; its parts here (number, frontier, size); the draws of its present pass that are not
    done (part, start, stop); and the reopened draws of any pass (pass, part, start, stop).
    """
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
    # The record must stay within `record_bound`, which is reserved before. The largest ranges are
    # kept, since a lost one waits for the next pass.
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
    """Before shards are deleted, move ``shard.json`` of those that hold the newest record of their source.

    Call this inside a writing transaction, so that two processes cannot put an older record over a newer one.
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
        # Another shard, or the file beside the listing, knows at least as much.
        if newer is not None or _version(path) >= row["since"]:
            continue
        try:
            # By a descriptor of the folder that follows no link: a rename by path would move a file
            # of the place to which a planted link leads.
            folder = os.open(layout.shard(shard), os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except (FileNotFoundError, NotADirectoryError):
            # The folder was deleted, or a link was put in its place. A link leads to no shard.
            continue
        try:
            os.rename(SHARD_FILE, path, src_dir_fd=folder)
        except FileNotFoundError:
            # A process was killed between this rename and the end of the deletion: the record was
            # moved then.
            continue
        except OSError as error:
            # The error would name only `shard.json`, because the rename is relative to a
            # descriptor.
            error.filename = str(layout.shard(shard) / SHARD_FILE)
            raise
        finally:
            os.close(folder)
        fsync_folder(layout.listings)


def write_source_record(connection: Connection, layout: Layout, source: str) -> None:
    """Write a new record of a source when the records in its shards are outdated. Call this inside a writing
    transaction."""
    progress = source_progress(connection, source)
    if progress is None:
        return
    dataset = connection.execute("SELECT * FROM datasets WHERE name = ?", (progress["dataset"],)).fetchone()
    about = {"dataset": dataset["name"], "declared": dataset["created"], "schema": json.loads(dataset["schema"])}
    version = connection.execute("SELECT version FROM cache").fetchone()[0]
    path = layout.record(Id(source))
    aside = path.with_name(f"{path.name}.new")
    # A killed process may have left this file. Its name is shared, but the caller's transaction
    # keeps other writers out.
    layout.remove(aside)
    write_durable(aside, seal({"layout": 1, "since": int(version), "source": source, **about, "progress": progress}))
    os.replace(aside, path)
    fsync_folder(layout.listings)


def take_back_records(connection: Connection, layout: Layout) -> None:
    """Write new records for sources whose record comes from a transaction that did not end. Call this inside a writing
    transaction."""
    version = connection.execute("SELECT version FROM cache").fetchone()[0]
    for row in connection.execute("SELECT id FROM sources").fetchall():
        # A record newer than the catalog was written by a transaction that was rolled back. A
        # rebuild would believe its parts and delete good shards.
        if _version(layout.record(Id(row["id"]))) > version:
            write_source_record(connection, layout, row["id"])


def _version(path: Path) -> int:
    try:
        return int(unseal(path)["since"])
    except (OSError, ValueError, KeyError):
        return 0
