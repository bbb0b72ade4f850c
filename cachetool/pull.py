"""``pull``: from a source to committed shards, by worker processes that this module only plans and watches.

::

    check options -> list and probe in a child (nothing written to the cache yet) -> check the cap
      -> fix the schema, take in the listing, open a job -> workers claim, fetch, write, commit -> result

A pull that fails before the job leaves the cache as it was, byte for byte.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
import time
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from cachetool.cache import CacheDir, SourceRow, draws
from cachetool.engines import LocalEngine, Task
from cachetool.engines.task import Message
from cachetool.errors import CacheToolError, CapBlocked, CapTooSmall, Interrupted, UsageError
from cachetool.formats import get_format
from cachetool.formats.base import Format
from cachetool.formats.shard import shard_bound
from cachetool.options import PullOptions
from cachetool.progress import Progress, Report, silent
from cachetool.schema import Schema
from cachetool.sources import SourceOptions
from cachetool.stores import canonical
from cachetool.units import format_size, parse_size

__all__ = ["PullResult", "pull", "source_id"]

DEFAULT_SHARD = 64 * 10**6
"""Bytes of values in a shard, unless a sixteenth of the cap is less."""


@dataclass(frozen=True, slots=True)
class PullResult:
    """What a pull came to."""

    source: str
    """URL without user info and query."""
    dataset: str
    format: str
    seed: int
    samples: int
    """Committed by this pull."""
    skipped: int
    """Draws that could not be used."""
    skipped_examples: tuple[dict[str, str], ...]
    """The first 20: key and reason."""
    bytes: int
    """Of values committed."""
    fetched: int
    """Over the wire."""
    shards: int
    evicted_shards: int
    seconds: float
    pass_complete: bool
    """Whether every sample of the source was drawn in this pass."""
    reason: str
    """Why it stopped: ``done``, ``source at its end``, ``cache full``."""

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return asdict(self)


@dataclass(slots=True)
class _Tally:
    """What the workers have reported."""

    samples: int = 0
    payload: int = 0
    arrived: int = 0
    fetched: int = 0
    shards: int = 0
    skipped: int = 0
    examples: list[dict[str, str]] = field(default_factory=list)

    def add(self, message: Message) -> None:
        self.samples += message.get("committed", 0)
        self.payload += message.get("payload", 0)
        self.arrived += message.get("samples", 0)
        self.fetched += message.get("fetched", 0)
        self.shards += "shard" in message
        for each in message.get("skipped", ()):
            self.skipped += 1
            if len(self.examples) < 20:
                self.examples.append(each)


def pull(cache: CacheDir, url: str, options: PullOptions, *, report: Report = silent) -> PullResult:
    """Draw samples of ``url`` into ``cache``.

    ``report`` receives :class:`Progress` values. Raises :class:`UsageError` for options that do not fit the cache,
    :class:`SourceError` for the remote side, :class:`CapTooSmall` before the first byte when the cap cannot hold one
    shard, :class:`CapBlocked` when fewer samples than asked for fit.
    """
    began = time.monotonic()
    if not url.strip():
        raise UsageError("the source is empty; name a folder or a URL such as s3://bucket/prefix/")
    id = source_id(url, options)
    with ExitStack() as stack:
        known = cache.source(id)
        if known is not None and options.source == SourceOptions(
            stem=options.source.stem, read_as=options.source.read_as
        ):
            # Pulled before, and nothing said now: the same fields by the same names.
            options = replace(options, source=SourceOptions.from_json(known.options))
        if known is not None and cache.listing(id).exists():
            listing = cache.listing(id)
        else:
            # Outside of the cache until its size is known: what is in the cache is charged first.
            listing = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="cachetool-"))) / "listing"
        seed = _seed(known, options.seed)
        schema, found = _prepare(cache, url, options, listing, seed, known, report)
        kind = get_format(options.to or _format_of(cache, options.dataset) or "lmdb")
        shard_bytes = _shard_bytes(cache, options)
        per_shard = _samples_per_shard(schema, shard_bytes, found["mean"], options.samples)
        new = None if listing == cache.listing(id) else listing
        _refuse_small_cap(cache, schema, kind.name, per_shard, shard_bytes, mean=found["mean"], listing=new)
        if known is None:
            stack.callback(_withdraw_unused, cache, options.dataset, id)
        cache.declare(options.dataset, schema)
        if listing != cache.listing(id):
            cache.add_source(_source_row(id, options, found, seed, known), listing)
        per_shard = max(1, per_shard // found["per_unit"])
        return _draw(cache, url, options, id, schema, kind, shard_bytes, per_shard, found["per_unit"], began, report)


def _draw(
    cache: CacheDir,
    url: str,
    options: PullOptions,
    id: str,
    schema: Schema,
    kind: Format,
    shard_bytes: int,
    per_shard: int,
    per_unit: int,
    began: float,
    report: Report,
) -> PullResult:
    """Open the job, run the workers, close it. ``per_unit``: samples that one draw brings, ``per_shard``: draws that
    make a shard."""
    wanted = None if options.samples is None else -(-options.samples // per_unit)
    with cache.catalog.write() as connection:
        cache.holder.register(connection)
        job, source = draws.open_job(
            connection, id, holder=cache.holder.id, wanted=wanted, seed=options.seed, room=options.room
        )
        mark = int(connection.execute("SELECT coalesce(max(id), 0) FROM events").fetchone()[0])
    left = source.units - _drawn(cache, source)
    count = left if wanted is None else min(left, wanted)
    workers = options.workers if options.follow else max(1, min(options.workers, -(-count // per_shard)))
    task = Task(
        "cachetool.sampler:draw",
        {
            "root": str(cache.root.resolve()),
            "url": url,
            "options": options.source.to_json(),
            "job": job,
            "source": id,
            "dataset": options.dataset,
            "format": kind.name,
            "schema": schema.to_json(),
            "shard_bytes": shard_bytes,
            "units_per_shard": per_shard,
            "per_unit": per_unit,
            "seed": source.seed,
            "room": asdict(replace(options.room, job=job)),
            "follow": options.follow,
            "skip_bad": options.on_error == "skip",
        },
    )
    tally = _Tally()
    target = None if options.follow else count * per_unit

    def on_message(_: int, message: Message) -> None:
        tally.add(message)
        note = message.get("waiting", f"{tally.shards} shards")
        report(Progress("pull", tally.arrived, target, tally.fetched, note))

    full: list[str] = []
    try:
        report(Progress("pull", 0, target))
        outcomes = LocalEngine().run([task] * workers, on_message) if count or options.follow else []
        full = [outcome["full"] for outcome in outcomes if outcome["full"]]
    except Interrupted:
        raise
    except CacheToolError as error:
        cache.catalog.note_error(source.url, f"{type(error).__name__}: {error}")
        raise
    finally:
        with cache.catalog.write() as connection:
            draws.close_job(connection, job)
    complete = _drawn(cache, cache.source(id) or source) >= source.units
    if full and options.evicts and not complete and (options.samples is None or tally.samples < options.samples):
        asked = source.samples if options.samples is None else options.samples
        raise CapBlocked(f"stopped at the cap with {tally.samples} of {asked} samples: {full[0]}")
    return PullResult(
        source=source.url,
        dataset=options.dataset,
        format=kind.name,
        seed=source.seed,
        samples=tally.samples,
        skipped=tally.skipped,
        skipped_examples=tuple(tally.examples),
        bytes=tally.payload,
        fetched=tally.fetched,
        shards=tally.shards,
        evicted_shards=_evictions_since(cache, mark),
        seconds=round(time.monotonic() - began, 3),
        pass_complete=complete,
        reason=_reason(tally, options.samples, complete=complete, full=bool(full)),
    )


def _withdraw_unused(cache: CacheDir, dataset: str, source: str) -> None:
    """Take back what a pull declared when it came to nothing: else an empty dataset would bind the next one."""
    with suppress(CacheToolError):
        cache.withdraw(dataset, source)


def source_id(url: str, options: PullOptions) -> str:
    """One source is one place, grouped in one way, for one dataset: what its draws are counted by."""
    text = json.dumps([canonical(url), options.source.numbering(), options.dataset])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _seed(known: SourceRow | None, wanted: int | None) -> int:
    if known is None:
        return wanted or 0
    if wanted is not None and wanted != known.seed:
        raise UsageError(
            f"{known.url} is drawn with --seed {known.seed} in this cache; leave --seed out, or use another cache"
        )
    return known.seed


def _prepare(
    cache: CacheDir,
    url: str,
    options: PullOptions,
    listing: Path,
    seed: int,
    known: SourceRow | None,
    report: Report,
) -> tuple[Schema, Message]:
    """List and probe in a process of its own; gives the schema to use and what was found."""

    def on_message(_: int, message: Message) -> None:
        if "listed" in message:
            report(Progress("list", message["listed"]))
        else:
            report(Progress("schema", 0, message["probing"]))

    has = options.dataset in cache.datasets()
    task = Task(
        "cachetool.sampler:prepare",
        {
            "url": url,
            "listing": str(listing),
            "options": options.source.to_json(),
            "seed": seed,
            "turn": known.turn if known else 0,
            "skip_bad": options.on_error == "skip",
        },
    )
    found = LocalEngine().run([task], on_message)[0]
    schema = Schema.from_json(found["schema"])
    if has:
        cache.check_schema(options.dataset, schema)
    if known is not None and found["identity"] != known.identity:
        raise UsageError(
            f"the listing of {known.url} was lost and what is there now differs; draw it into another --dataset"
        )
    return schema, found


def _source_row(id: str, options: PullOptions, found: Message, seed: int, known: SourceRow | None) -> SourceRow:
    if known is not None:
        return known
    return SourceRow(
        id=id,
        url=found["url"],
        options=options.source.to_json(),
        identity=found["identity"],
        dataset=options.dataset,
        units=found["units"],
        samples=found["samples"],
        seed=seed,
        turn=0,
        frontier=0,
        skipped=0,
    )


def _format_of(cache: CacheDir, dataset: str) -> str | None:
    shards = cache.shards(dataset)
    return shards[-1].format if shards else None


def _shard_bytes(cache: CacheDir, options: PullOptions) -> int:
    if options.shard_size is not None:
        return parse_size(options.shard_size, what="--shard-size")
    return max(1, min(DEFAULT_SHARD, cache.max_size // 16))


def _samples_per_shard(schema: Schema, shard_bytes: int, mean: int, wanted: int | None) -> int:
    """How many samples a shard takes, by the mean size of those probed where they differ."""
    size = schema.fixed_nbytes if schema.is_fixed else mean
    most = max(1, shard_bytes // max(1, size))
    return most if wanted is None else min(most, wanted)


def _refuse_small_cap(
    cache: CacheDir, schema: Schema, format: str, samples: int, shard_bytes: int, *, mean: int, listing: Path | None
) -> None:
    nbytes = samples * schema.fixed_nbytes if schema.is_fixed else max(shard_bytes, mean)
    least = cache.least_cap(shard_bound(get_format(format), schema, samples, nbytes), schema, listing=listing)
    if least > cache.max_size:
        raise CapTooSmall(
            f"a cap of {format_size(cache.max_size)} cannot hold one {format} shard of {format_size(nbytes)};"
            f" the minimum is {least} bytes: raise --max-size or lower --shard-size"
        )


def _drawn(cache: CacheDir, source: SourceRow) -> int:
    with cache.catalog.read() as connection:
        return draws.drawn(connection, source)


def _evictions_since(cache: CacheDir, mark: int) -> int:
    row = cache.catalog.one("SELECT count(*) AS n FROM events WHERE kind = 'evict' AND id > ?", (mark,))
    return 0 if row is None else int(row["n"])


def _reason(tally: _Tally, wanted: int | None, *, complete: bool, full: bool) -> str:
    if wanted is not None and tally.samples >= wanted:
        return "done"
    if complete:
        return "source at its end"
    return "cache full" if full else "done"
