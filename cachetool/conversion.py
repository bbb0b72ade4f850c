"""``convert``: samples into another format, bit for bit; the door to its three ways.

- no input, no ``out``: a cache's shards, replaced one by one (here)
- ``out``: plain files, from a cache or any input (:mod:`cachetool.export`)
- an input without ``out``: into a cache (:mod:`cachetool.intake`)

In place, shard by shard, each in one transaction: the new shard becomes visible and the old one retires, so the cache
needs room for one shard more and no snapshot sees a sample twice or not at all. Every value is hashed on its way, and
the new shard's content digest must be the old one's.
"""

from __future__ import annotations

import hashlib
import json
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from cachetool.cache import CacheDir, Facts, Origin, Room, Shard
from cachetool.engines import LocalEngine, Task
from cachetool.engines.task import Channel, Message
from cachetool.errors import CatalogError, CorruptError, UsageError
from cachetool.export import DEFAULT_PART, export, require_new
from cachetool.formats import get_format
from cachetool.formats.base import Format
from cachetool.formats.digest import ContentDigest
from cachetool.formats.shard import (
    ShardFiles,
    check_content,
    check_samples,
    open_shard,
    shard_bound,
    stored_checksums,
    verify_file,
)
from cachetool.inputs import run_of_blocks, survey
from cachetool.intake import take_in
from cachetool.progress import Progress, Report, silent
from cachetool.remote import described
from cachetool.sources.files import FileOptions
from cachetool.units import parse_duration, parse_size

__all__ = ["ConvertOptions", "ConvertResult", "Preview", "content_digest", "convert", "convert_shards", "preview"]


@dataclass(frozen=True, slots=True)
class ConvertOptions:
    """How to convert; checked when made. Raises :class:`UsageError`."""

    to: str
    dataset: str | None = None
    shard_size: int | str | None = None
    """Bytes of values in a shard or file."""
    compression: str | None = None
    workers: int = 2
    verify: bool = False
    """Read everything back through the target's own library."""
    wait: float | str = 60.0
    """Seconds to wait for room that readers hold."""
    files: FileOptions = field(default_factory=FileOptions)
    """How the samples of an input are made."""

    def __post_init__(self) -> None:
        kind = self.kind
        if self.compression is not None and self.compression not in kind.compressions:
            have = f"it has {', '.join(kind.compressions)}" if kind.compressions else "it has none"
            raise UsageError(f"{self.to} has no compression {self.compression!r}; {have}")
        if self.workers < 1:
            raise UsageError(f"--workers must be at least 1, got {self.workers}")
        if self.shard_size is not None and parse_size(self.shard_size, what="--shard-size") < 1:
            raise UsageError("--shard-size must be at least 1 byte")
        parse_duration(self.wait, what="--wait")

    @property
    def kind(self) -> Format:
        """The target's format."""
        return get_format(self.to)

    def part_bytes(self, cap: int | None = None) -> int:
        """Bytes of values in a shard or file; in a cache by default at most a sixteenth of its cap."""
        if self.shard_size is not None:
            return parse_size(self.shard_size, what="--shard-size")
        return DEFAULT_PART if cap is None else max(1, min(DEFAULT_PART, cap // 16))


@dataclass(frozen=True, slots=True)
class Preview:
    """What a conversion would read."""

    input: str
    kind: str
    """``files``, ``objects``, ``own``, ``parts``."""
    samples: int
    schema: dict[str, str]
    """Field to type and shape, in words."""
    skipped: tuple[tuple[str, str], ...]
    """What would not be taken: name and reason."""

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class ConvertResult:
    """What a conversion came to."""

    to: str
    dataset: str | None
    """None for plain files out of plain files."""
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


def preview(source: str | Path, options: FileOptions, *, report: Report = silent) -> Preview:
    """Look at an input without converting it; what a URL names is fetched for that. Errors are those of opening it."""
    with described(source, options, beside=None, report=report) as description:
        found = survey(description, DEFAULT_PART)
        fields = {each.name: each.describe() for each in found.schema}
        kind = "objects" if description["kind"] == "remote" else description["kind"]
        return Preview(description.get("shown") or str(source), kind, found.samples, fields, found.skipped)


def convert(
    options: ConvertOptions,
    *,
    cache: CacheDir | None = None,
    source: str | Path | None = None,
    out: Path | None = None,
    report: Report = silent,
) -> ConvertResult:
    """Convert ``source``, or the cache's dataset, into ``out``, or into the cache; at least one of them is the cache.

    Raises :class:`UsageError`, :class:`BadObject` for an input that cannot be read, :class:`CapacityError` when there
    is no room, :class:`CorruptError` naming what is damaged.
    """
    began = time.monotonic()
    if cache is None and (source is None or out is None):
        raise UsageError("name a cache, or both an input and --out")
    wait = parse_duration(options.wait)
    if out is not None:
        dataset, (parts, digest) = _to_files(options, cache, source, out, report)
        size = sum(path.stat().st_size for path in out.rglob("*") if path.is_file())
        made = [(int(part["samples"]), 0) for part in parts]
    else:
        assert cache is not None
        if source is None:
            if options.shard_size is not None:
                raise UsageError(
                    "in a cache each shard is replaced by one of the same samples; --shard-size needs --out"
                )
            dataset = cache.dataset(options.dataset)
            new = replace_shards(cache, dataset, options, wait=wait, report=report)
        else:
            dataset = options.dataset or "default"
            before = {shard.id for shard in cache.shards(dataset)}
            with described(source, options.files, beside=cache.root, report=report) as description:
                take_in(
                    cache,
                    description,
                    dataset=dataset,
                    kind=options.kind,
                    shard_bytes=options.part_bytes(cache.max_size),
                    compression=options.compression,
                    workers=options.workers,
                    verify=options.verify,
                    wait=wait,
                    report=report,
                )
            new = [shard for shard in cache.shards(dataset) if shard.id not in before]
        made, size = [(shard.samples, shard.bytes) for shard in new], sum(shard.bytes for shard in new)
        digest = content_digest(cache.shards(dataset))
    return ConvertResult(
        to=options.to,
        dataset=dataset,
        shards=len(made),
        samples=sum(samples for samples, _ in made),
        bytes=size,
        digest=digest,
        out=None if out is None else str(out),
        seconds=round(time.monotonic() - began, 3),
        verified=options.verify,
    )


def _to_files(
    options: ConvertOptions, cache: CacheDir | None, source: str | Path | None, out: Path, report: Report
) -> tuple[str | None, tuple[list[Message], str]]:
    """Plain files out of an input, or of a cache's dataset while its shards are leased."""

    def write(description: Message) -> tuple[list[Message], str]:
        return export(
            description,
            out,
            kind=options.kind,
            part_bytes=options.part_bytes(),
            compression=options.compression,
            workers=options.workers,
            verify=options.verify,
            report=report,
        )

    require_new(out)  # before anything is fetched, and before a lease is written
    if source is not None:
        with described(source, options.files, beside=out, report=report) as description:
            return None, write(description)
    assert cache is not None
    with cache.snapshot(dataset=options.dataset) as snapshot:
        shards = hashlib.sha256("".join(shard.content for shard in snapshot.shards).encode()).hexdigest()
        place = {"root": str(cache.root.resolve()), "dataset": snapshot.dataset, "version": snapshot.version}
        return snapshot.dataset, write({"kind": "cache", **place, "content": shards})


def replace_shards(
    cache: CacheDir, dataset: str, options: ConvertOptions, *, wait: float, report: Report
) -> list[Shard]:
    """Replace the shards of a dataset that are in another format, one by one; gives the new ones.

    With ``compression`` also those that are in it already. Raises :class:`CapTooSmall` or :class:`CapBlocked` when
    there is no room for one shard more, :class:`CorruptError` naming a shard whose bytes are not what was written.
    """
    again = options.compression is not None
    todo = [shard for shard in cache.shards(dataset) if shard.format != options.to or again]
    total = sum(shard.samples for shard in todo)
    done = moved = 0

    def on_message(_: int, message: Message) -> None:
        nonlocal done, moved
        done += message["samples"]
        moved += message["bytes"]
        report(Progress("convert", done, total, moved))

    count = min(options.workers, len(todo))
    tasks = [
        Task(
            "cachetool.conversion:convert_shards",
            {
                "root": str(cache.root.resolve()),
                "dataset": dataset,
                "shards": [shard.id for shard in todo[each::count]],
                "to": options.to,
                "compression": options.compression,
                "verify": options.verify,
                "wait": wait,
            },
        )
        for each in range(count)
    ]
    written = {id for outcome in LocalEngine().run(tasks, on_message) for id in outcome["shards"]}
    return [shard for shard in cache.shards(dataset) if shard.id in written]


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
            expected = check_content(old.path, old.schema, old.content)
            with open_shard(old.path, get_format(old.format), old.schema, digest=old.digest) as reader:
                for block in run_of_blocks(reader, 0, reader.samples):
                    files.write(block)
            facts = files.facts()
            check_samples(facts.written.checksums, expected, old.schema, name=str(old.data))
        except CorruptError as error:
            files.abort()
            raise CorruptError(f"{error};\nshard {old.id} was left as it is: cachetool verify --repair") from error
        except BaseException:
            files.abort()
            raise
        if verify:
            verify_file(files.path, kind, old.schema, facts.written.checksums)
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


def content_digest(shards: list[Shard]) -> str:
    """Content digest of all samples of these shards in order, free of how they are cut; empty for none."""
    if not shards:
        return ""
    digest = ContentDigest(shards[0].schema)
    for shard in shards:
        digest.update(stored_checksums(shard.path, shard.schema))
    return digest.hexdigest()
