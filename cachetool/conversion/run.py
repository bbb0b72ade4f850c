"""``convert``: samples into another format, bit for bit; the door to its two ways.

- no input, no ``out``: a cache's shards, replaced group by group (:mod:`cachetool.conversion.in_place`)
- ``out``: plain files, from a cache or any input (:mod:`cachetool.conversion.to_files`)
"""

from __future__ import annotations

import hashlib
import shlex
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from cachetool.cache import CacheDir, Shard
from cachetool.cache.layout import cache_option
from cachetool.conversion.in_place import replace_shards
from cachetool.conversion.inputs import Survey, described, survey
from cachetool.conversion.options import DEFAULT_PART, ConvertOptions
from cachetool.conversion.to_files import export, require_new
from cachetool.core.errors import UsageError
from cachetool.core.progress import Report, silent
from cachetool.core.units import (
    parse_duration,
)
from cachetool.formats.digest import digest_of
from cachetool.formats.shard import stored_checksums
from cachetool.proc.task import Engine, Message
from cachetool.sources.readers import notes_of
from cachetool.stores import redact

__all__ = ["ConvertResult", "Preview", "content_digest", "convert", "needs_out", "preview"]


@dataclass(frozen=True, slots=True)
class Preview:
    """What a conversion would read."""

    input: str
    kind: str
    """``files``, ``objects``."""
    samples: int
    schema: dict[str, str]
    """Field to type and shape, in words."""
    skipped: tuple[tuple[str, str], ...]
    """Names that would not be taken, each with the reason; the first 100."""
    left_out_counts: Mapping[str, int]
    """How many objects would not be taken, by reason."""
    notes: tuple[str, ...] = ()
    """Decisions about how the source is read, each with the option that decides otherwise."""

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
    skipped: tuple[tuple[str, str], ...] = ()
    """Names of the input that were not taken, each with the reason; the first 100."""
    left_out_counts: Mapping[str, int] = field(default_factory=dict)
    """How many objects of the input were not taken, by reason."""
    notes: tuple[str, ...] = ()
    """Decisions about how the source is read, each with the option that decides otherwise."""

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return asdict(self)


def preview(source: str | Path, options: ConvertOptions, *, report: Report = silent) -> Preview:
    """Look at an input without converting it; what a URL names is fetched for that. Errors are those of opening it."""
    with described(source, options.source, report=report, skip_bad=options.on_error == "skip") as description:
        contents = survey(description, DEFAULT_PART)
        fields = {schema_field.name: schema_field.describe() for schema_field in contents.schema}
        skipped, notes = notes_of(contents.skipped)
        return Preview(
            redact(str(source)), description["kind"], contents.samples, fields, skipped, contents.left_out_counts, notes
        )


def needs_out(source: str | Path, cache: str | Path | None = None) -> UsageError:
    """The error of an input without ``out``, which says how samples come into ``cache``, as far as it is named."""
    option = "" if cache is None else cache_option(Path(cache))
    return UsageError(
        "convert INPUT writes plain files: name a new folder for them with --out DIR;\n"
        f"to have the samples in a cache: cachetool pull {shlex.quote(redact(str(source)))} --all{option}"
    )


def convert(
    options: ConvertOptions,
    *,
    cache: CacheDir | None = None,
    source: str | Path | None = None,
    out: Path | None = None,
    report: Report = silent,
    engine: Engine | None = None,
) -> ConvertResult:
    """Convert the cache's dataset in place or into ``out``, or ``source`` into ``out``.
    ``engine``: where the files of ``out`` are written; None: by processes here.

    Raises :class:`UsageError`, :class:`BadObject` for an input that cannot be read, :class:`CapacityError` when there
    is no room, :class:`CorruptError` naming what is damaged.
    """
    began = time.monotonic()
    if source is not None and out is None:
        raise needs_out(source, None if cache is None else cache.root)
    if cache is None and source is None:
        raise UsageError("name a cache, or both an input and --out")
    if source is not None and options.dataset is not None:
        raise UsageError("--dataset names samples in a cache and has no part in INPUT with --out; leave it out")
    if source is None:
        options.refuse_input()
    wait = parse_duration(options.wait)
    contents: Survey | None = None
    if out is not None:
        dataset, (parts, digest, contents) = _to_files(options, cache, source, out, report, engine)
        size = sum(path.stat().st_size for path in out.rglob("*") if path.is_file())
        shard_sizes = [(int(part["samples"]), 0) for part in parts]
    else:
        assert cache is not None
        dataset = cache.dataset(options.dataset)
        new = replace_shards(
            cache,
            dataset,
            kind=options.kind,
            most=None if options.shard_size is None else options.part_bytes(),
            compression=options.compression,
            workers=options.workers,
            verify=options.verify,
            wait=wait,
            report=report,
        )
        shard_sizes = [(shard.samples, shard.bytes) for shard in new]
        size = sum(nbytes for _, nbytes in shard_sizes)
        with cache.snapshot(dataset=dataset, peek=True) as snapshot:  # others may evict while it is read
            digest = content_digest(snapshot.shards)
    samples = sum(count for count, _ in shard_sizes)
    skipped, notes = notes_of(contents.skipped if contents else ())
    return ConvertResult(
        to=options.to,
        dataset=dataset,
        shards=len(shard_sizes),
        samples=samples,
        bytes=size,
        digest=digest,
        out=None if out is None else str(out),
        seconds=round(time.monotonic() - began, 3),
        verified=options.verify,
        skipped=skipped,
        left_out_counts=contents.left_out_counts if contents else {},
        notes=notes,
    )


def _to_files(
    options: ConvertOptions,
    cache: CacheDir | None,
    source: str | Path | None,
    out: Path,
    report: Report,
    engine: Engine | None,
) -> tuple[str | None, tuple[list[Message], str, Survey]]:
    """Plain files out of an input, or of a cache's dataset while its shards are leased."""

    def write(description: Message) -> tuple[list[Message], str, Survey]:
        return export(
            description,
            out,
            kind=options.kind,
            part_bytes=options.part_bytes(),
            compression=options.compression,
            workers=options.workers,
            verify=options.verify,
            report=report,
            engine=engine,
        )

    require_new(out)  # before anything is fetched, and before a lease is written
    if source is not None:
        skip_bad = options.on_error == "skip"
        with described(source, options.source, beside=out, report=report, skip_bad=skip_bad) as description:
            return None, write(description)
    assert cache is not None
    with cache.snapshot(dataset=options.dataset, peek=True) as snapshot:
        shards = hashlib.sha256("".join(shard.content for shard in snapshot.shards).encode()).hexdigest()
        place = {"root": str(cache.root.resolve()), "dataset": snapshot.dataset, "version": snapshot.version}
        return snapshot.dataset, write({"kind": "cache", **place, "content": shards})


def content_digest(shards: Sequence[Shard]) -> str:
    """Content digest of all samples of these shards in order, free of how they are cut; empty for none."""
    checksums = (stored_checksums(shard.path, shard.schema) for shard in shards)
    return digest_of(shards[0].schema, checksums) if shards else ""
