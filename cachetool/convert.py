"""``convert``: the shards of a cache into another format, in place or as plain files.

In place, shard by shard, each in one transaction: the new shard becomes visible and the old one retires, so the cache
needs room for one shard more and no snapshot sees a sample twice or not at all. Every value is hashed on its way, and
the new shard's content digest must be the old one's.
"""

from __future__ import annotations

import json
import os
import secrets
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from cachetool.block import BLOCK_BYTES, Block
from cachetool.cache import CacheDir, Facts, Origin, Room, Shard, Snapshot
from cachetool.cache.layout import fsync_folder, remove_tree, write_durable
from cachetool.engines import LocalEngine, Task
from cachetool.engines.task import Channel, Message
from cachetool.errors import CatalogError, CorruptError, UsageError
from cachetool.formats import get_format
from cachetool.formats.base import Format, Reader
from cachetool.formats.digest import ContentDigest, checksums
from cachetool.formats.reading import write_extents
from cachetool.formats.shard import ShardFiles, open_shard, shard_bound, stored_checksums
from cachetool.progress import Progress, Report, silent
from cachetool.schema import Schema
from cachetool.units import parse_duration, parse_size

__all__ = ["ConvertResult", "convert", "convert_shards", "export"]

DEFAULT_PART = 256 * 10**6
"""Bytes of values in a plain file that ``--out`` writes; one part's blocks may have to wait in memory."""


@dataclass(frozen=True, slots=True)
class ConvertResult:
    """What a conversion came to."""

    to: str
    dataset: str
    shards: int
    """Shards or files written."""
    samples: int
    bytes: int
    """On disk."""
    digest: str
    """Content digest of all samples in order: the same in every format."""
    out: str | None
    """The folder of plain files, or None for the cache."""
    seconds: float
    verified: bool
    """Whether everything was read back through the format's own library."""

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return asdict(self)


def convert(
    cache: CacheDir,
    *,
    to: str,
    dataset: str | None = None,
    compression: str | None = None,
    workers: int = 2,
    verify: bool = False,
    wait: float | str = 60.0,
    report: Report = silent,
) -> ConvertResult:
    """Replace the shards of a dataset that are in another format, one by one, by shards in format ``to``.

    With ``compression`` also those that are in it already. Raises :class:`CapTooSmall` or :class:`CapBlocked` when
    there is no room for one shard more, :class:`CorruptError` naming a shard whose bytes are not what was written.
    """
    began = time.monotonic()
    kind = _format(to, compression)
    if workers < 1:
        raise UsageError(f"--workers must be at least 1, got {workers}")
    seconds = parse_duration(wait, what="--wait")
    name = cache.dataset(dataset)
    todo = [shard for shard in cache.shards(name) if shard.format != to or compression is not None]
    total = sum(shard.samples for shard in todo)
    done = moved = 0

    def on_message(_: int, message: Message) -> None:
        nonlocal done, moved
        done += message["samples"]
        moved += message["bytes"]
        report(Progress("convert", done, total, moved))

    count = min(workers, len(todo))
    tasks = [
        Task(
            "cachetool.convert:convert_shards",
            {
                "root": str(cache.root.resolve()),
                "dataset": name,
                "shards": [shard.id for shard in todo[each::count]],
                "to": to,
                "compression": compression,
                "verify": verify,
                "wait": seconds,
            },
        )
        for each in range(count)
    ]
    written = [id for outcome in LocalEngine().run(tasks, on_message) for id in outcome["shards"]]
    after = cache.shards(name)
    made = [shard for shard in after if shard.id in set(written)]
    return ConvertResult(
        to=kind.name,
        dataset=name,
        shards=len(made),
        samples=sum(shard.samples for shard in made),
        bytes=sum(shard.bytes for shard in made),
        digest=_digest(after),
        out=None,
        seconds=round(time.monotonic() - began, 3),
        verified=verify,
    )


def convert_shards(
    channel: Channel,
    *,
    root: str,
    dataset: str,
    shards: list[str],
    to: str,
    compression: str | None,
    verify: bool,
    wait: float,
) -> Message:
    """The task of one worker: replace these shards one after another. Gives ``{"shards": ids of the new ones}``."""
    kind, made = get_format(to), []
    with CacheDir(Path(root)) as cache:
        for id in shards:
            old = next((each for each in cache.shards(dataset) if each.id == id), None)
            if old is None:
                continue  # evicted by somebody meanwhile
            made.append(_replace(cache, old, kind, compression=compression, verify=verify, wait=wait))
            channel.send({"samples": old.samples, "bytes": old.payload})
    return {"shards": [id for id in made if id]}


def _replace(
    cache: CacheDir, old: Shard, kind: Format, *, compression: str | None, verify: bool, wait: float
) -> str | None:
    staging = cache.stage(
        dataset=old.dataset,
        schema=old.schema,
        format=kind.name,
        bound=shard_bound(kind, old.schema, old.samples, old.payload),
        room=Room(wait=wait),
    )
    # Leased only now: a lease held while waiting for room would keep the very shards whose end makes room.
    with staging, cache.snapshot(dataset=old.dataset) as snapshot:
        if old.id not in {shard.id for shard in snapshot.shards}:
            return None
        files = ShardFiles(
            staging.path, kind, old.schema, samples=old.samples, nbytes=old.payload, compression=compression
        )
        try:
            with _open(old) as reader:
                for block in _blocks(reader, old.payload):
                    files.write(block)
            facts = files.finish()
        except BaseException:
            files.abort()
            raise
        if facts.content != old.content:
            raise CorruptError(
                f"shard {old.id} ({old.format}) holds other bytes than were written; it was left as it is"
            )
        if verify:
            _verify(staging.path, kind, old.schema, facts.written.checksums)
        row = Facts(facts.samples, facts.payload, facts.content, facts.digest, facts.data, facts.files)
        return staging.commit(row, origin=_origin(cache, old), replaces=old.id)


def _origin(cache: CacheDir, old: Shard) -> Origin:
    """Where the samples came from goes on to the new shard."""
    row = cache.catalog.one(
        "SELECT s.source, s.turn, s.draws, s.sole, o.url FROM shards s LEFT JOIN sources o ON o.id = s.source"
        " WHERE s.id = ?",
        (old.id,),
    )
    if row is None:
        raise CatalogError(f"shard {old.id} was evicted while it was converted")
    ranges = tuple((int(a), int(b)) for a, b in json.loads(row["draws"] or "[]"))
    return Origin(row["source"], row["url"], row["turn"], ranges, bool(row["sole"]))


def export(
    cache: CacheDir,
    out: Path,
    *,
    to: str,
    dataset: str | None = None,
    shard_size: int | str | None = None,
    compression: str | None = None,
    verify: bool = False,
    report: Report = silent,
) -> ConvertResult:
    """Write a dataset's samples as plain files ``part-00000.*`` and ``dataset.json`` into the new folder ``out``.

    ``out`` appears whole or not at all. Raises :class:`UsageError` when it exists.
    """
    began = time.monotonic()
    kind = _format(to, compression)
    part_bytes = DEFAULT_PART if shard_size is None else parse_size(shard_size, what="--shard-size")
    if out.exists():
        raise UsageError(f"{out} exists already; name a new folder with --out")
    aside = out.with_name(f".{out.name}.{secrets.token_hex(4)}")
    aside.mkdir(parents=True)
    try:
        with cache.snapshot(dataset=dataset) as snapshot:
            parts, digest = _parts(snapshot, aside, kind, part_bytes, compression, verify, report)
            samples = sum(part["samples"] for part in parts)
            about = {
                "layout": 1,
                "format": kind.name,
                "schema": snapshot.schema.to_json(),
                "samples": samples,
                "content": digest,
                "parts": parts,
            }
            write_durable(aside / "dataset.json", json.dumps(about, indent=1).encode())
        fsync_folder(aside)
        os.rename(aside, out)
        fsync_folder(out.parent)
    except BaseException:
        remove_tree(aside)
        raise
    return ConvertResult(
        to=kind.name,
        dataset=snapshot.dataset,
        shards=len(parts),
        samples=samples,
        bytes=sum(path.stat().st_size for path in out.rglob("*") if path.is_file()),
        digest=digest,
        out=str(out),
        seconds=round(time.monotonic() - began, 3),
        verified=verify,
    )


def _parts(
    snapshot: Snapshot,
    folder: Path,
    kind: Format,
    part_bytes: int,
    compression: str | None,
    verify: bool,
    report: Report,
) -> tuple[list[Message], str]:
    """Write all samples of a snapshot, cut into parts of about ``part_bytes``; what each holds, and the digest."""
    schema, parts, digest, done = snapshot.schema, [], ContentDigest(snapshot.schema), 0
    (folder / ".extents").mkdir()
    for number, blocks in enumerate(_cut(_all_blocks(snapshot), part_bytes)):
        samples, nbytes = sum(map(len, blocks)), sum(block.nbytes for block in blocks)
        path = folder / f"part-{number:05d}{kind.suffix}"
        writer = kind.create(path, schema, samples=samples, nbytes=nbytes, compression=compression)
        try:
            for block in blocks:
                writer.write(block)
            written = writer.finish()
        except BaseException:
            writer.abort()
            raise
        if verify:
            _verify_file(path, kind, schema, written.checksums)
        if written.extents is not None:
            place = folder / ".extents" / path.name
            place.mkdir()
            write_extents(place, written.extents)
        digest.update(written.checksums)
        done += samples
        parts.append({"file": path.name, "samples": samples, "payload": nbytes})
        report(Progress("convert", done, snapshot.samples, sum(part["payload"] for part in parts)))
    return parts, digest.hexdigest()


def _all_blocks(snapshot: Snapshot) -> Iterator[Block]:
    for shard in snapshot.shards:
        with _open(shard) as reader:
            yield from _blocks(reader, shard.payload)


def _cut(blocks: Iterator[Block], part_bytes: int) -> Iterator[list[Block]]:
    """Blocks in lists of about ``part_bytes``; most are views of mapped shards and take no memory of their own."""
    part: list[Block] = []
    size = 0
    for block in blocks:
        if part and size + block.nbytes > part_bytes:
            yield part
            part, size = [], 0
        part.append(block)
        size += block.nbytes
    if part:
        yield part


def _open(shard: Shard) -> Reader:
    return open_shard(shard.path, get_format(shard.format), shard.schema)


def _blocks(reader: Reader, payload: int) -> Iterator[Block]:
    step = max(1, reader.samples * BLOCK_BYTES // max(1, payload))
    for start in range(0, reader.samples, step):
        yield reader.read(start, min(start + step, reader.samples))


def _verify(folder: Path, kind: Format, schema: Schema, expected: npt.NDArray[np.uint64]) -> None:
    _verify_file(folder / f"data{kind.suffix}", kind, schema, expected)


def _verify_file(path: Path, kind: Format, schema: Schema, expected: npt.NDArray[np.uint64]) -> None:
    """Read everything back through the format's own library."""
    at = 0
    with kind.open(path, schema=schema) as reader:
        for block in _blocks(reader, max(1, path.stat().st_size)):
            if not np.array_equal(checksums(block), expected[:, at : at + len(block)]):
                raise CorruptError(f"{path.name}: samples {at} to {at + len(block)} read back differently")
            at += len(block)
    if at != expected.shape[1]:
        raise CorruptError(f"{path.name}: {at} samples read back, {expected.shape[1]} were written")


def _format(name: str, compression: str | None) -> Format:
    kind = get_format(name)
    if compression is not None and compression not in kind.compressions:
        have = f"it has {', '.join(kind.compressions)}" if kind.compressions else "it has none"
        raise UsageError(f"{name} has no compression {compression!r}; {have}")
    return kind


def _digest(shards: list[Shard]) -> str:
    """Content digest of a whole dataset, free of how it is cut into shards."""
    digest = ContentDigest(shards[0].schema) if shards else None
    for shard in shards:
        assert digest is not None
        digest.update(stored_checksums(shard.path, get_format(shard.format), shard.schema))
    return "" if digest is None else digest.hexdigest()
