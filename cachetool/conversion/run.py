"""``convert``: the entry to its two ways to write samples in another format, bit for bit.

- without input and ``out``: a cache's shards are replaced group by group (:mod:`cachetool.conversion.in_place`)
- with ``out``: plain files are written, from a cache or any input (:mod:`cachetool.conversion.to_files`)
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
    """The facts about an input that a conversion would read."""

    input: str
    kind: str
    """Kind of the input: ``files`` or ``objects``."""
    samples: int
    schema: dict[str, str]
    """Type and shape of each field, in words."""
    skipped: tuple[tuple[str, str], ...]
    """Names that would not be read, each with the reason; the first 100."""
    left_out_counts: Mapping[str, int]
    """Number of objects that would not be read, by reason."""
    notes: tuple[str, ...] = ()
    """Decisions about how the source is read, each with the option that changes it."""

    def as_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class ConvertResult:
    """The result of a conversion."""

    to: str
    """The format."""
    dataset: str | None
    """Name of the dataset; None if an input was converted."""
    shards: int
    """Number of shards or files written."""
    samples: int
    """Number of samples."""
    bytes: int
    """Bytes on disk."""
    digest: str
    """Content digest of all samples in order, the same in every format."""
    out: str | None
    """The folder of plain files; None for the cache."""
    seconds: float
    """Duration in seconds."""
    verified: bool
    """True if everything was read back through the format's own library."""
    skipped: tuple[tuple[str, str], ...] = ()
    """Names of the input that are in no sample, each with the reason; the first 100."""
    left_out_counts: Mapping[str, int] = field(default_factory=dict)
    """Number of objects of the input that are in no sample, by reason."""
    notes: tuple[str, ...] = ()
    """Decisions about how the source is read, each with the option that changes it."""

    def as_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return asdict(self)


def preview(source: str | Path, options: ConvertOptions, *, report: Report = silent) -> Preview:
    """Return the facts about an input without converting it. Objects of a URL are fetched for that. Raises the errors
    of opening it."""
    with described(source, options.source, report=report, skip_bad=options.on_error == "skip") as description:
        contents = survey(description, DEFAULT_PART)
        fields = {schema_field.name: schema_field.describe() for schema_field in contents.schema}
        skipped, notes = notes_of(contents.skipped)
        return Preview(
            redact(str(source)), description["kind"], contents.samples, fields, skipped, contents.left_out_counts, notes
        )


def needs_out(source: str | Path, cache: str | Path | None = None) -> UsageError:
    """Return the error of an input without ``out``. It says how the samples get into ``cache``, if one was named."""
    option = "" if cache is None else cache_option(Path(cache))
    return UsageError(
        "convert INPUT writes plain files: name a new folder for them with --out DIR;\n"
        f"to store the samples in a cache: cachetool pull {shlex.quote(redact(str(source)))} --all{option}"
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
    """Convert the cache's dataset in place or into ``out``, or convert ``source`` into ``out``.

    ``engine`` writes the files of ``out``; None: processes on this machine. Raises :class:`UsageError`,
    :class:`BadObject` for an input that cannot be read, :class:`CapacityError` when there is no space, and
    :class:`CorruptError` naming the damaged file.
    """
    began = time.monotonic()
    if source is not None and out is None:
        raise needs_out(source, None if cache is None else cache.root)
    if cache is None and source is None:
        raise UsageError("name a cache, or both an input and --out")
    if source is not None and options.dataset is not None:
        raise UsageError("--dataset is only for samples of a cache, not for INPUT with --out; leave it out")
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
            # A compression that is named, also none, is for shards that have the format already, too.
            again=options.compression is not None,
            probe=options.probes,
            workers=options.workers,
            verify=options.verify,
            wait=wait,
            report=report,
        )
        shard_sizes = [(shard.samples, shard.bytes) for shard in new]
        size = sum(nbytes for _, nbytes in shard_sizes)
        # A lease, because another process may evict these shards while their checksums are read. A peek does not count
        # as an epoch.
        with cache.snapshot(dataset=dataset, peek=True) as snapshot:
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
    """Write plain files from an input, or from a cache's dataset while its shards are leased."""

    def write(description: Message) -> tuple[list[Message], str, Survey]:
        return export(
            description,
            out,
            kind=options.kind,
            part_bytes=options.part_bytes(),
            probe=options.probes,
            workers=options.workers,
            verify=options.verify,
            report=report,
            engine=engine,
        )

    # Checked before anything is fetched and before a lease is written, so a mistyped --out costs nothing.
    require_new(out)
    if source is not None:
        skip_bad = options.on_error == "skip"
        with described(source, options.source, beside=out, report=report, skip_bad=skip_bad) as description:
            return None, write(description)
    assert cache is not None
    # The lease lasts until all files are written: worker processes open the shards of this version by themselves.
    with cache.snapshot(dataset=options.dataset, peek=True) as snapshot:
        # The digests of the shards identify the input, so a run that was interrupted continues only if the same shards
        # are there.
        shards = hashlib.sha256("".join(shard.content for shard in snapshot.shards).encode()).hexdigest()
        place = {"root": str(cache.root.resolve()), "dataset": snapshot.dataset, "version": snapshot.version}
        return snapshot.dataset, write({"kind": "cache", **place, "content": shards})


def content_digest(shards: Sequence[Shard]) -> str:
    """Return the content digest of all samples of these shards in order, free of how they are cut; empty for none."""
    checksums = (stored_checksums(shard.path, shard.schema) for shard in shards)
    return digest_of(shards[0].schema, checksums) if shards else ""
