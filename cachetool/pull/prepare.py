"""What a pull settles before its workers start: which source, which order, which schema, how large its shards are.

Nothing in here writes to the cache; what is found is taken in by :mod:`cachetool.pull.run`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

from cachetool.cache import CacheDir, SourceRow, draws
from cachetool.cache.admission import asked, refuse_full_disk
from cachetool.cache.capping import least_cap
from cachetool.cache.commit import folder_bound
from cachetool.cache.draws import Part
from cachetool.cache.layout import Layout, cache_option
from cachetool.cache.own_parts import is_same_share, refuse_loss
from cachetool.cache.records import RANGE_BYTES
from cachetool.cache.usage import measure
from cachetool.core.errors import CapTooSmall, UsageError
from cachetool.core.names import Id
from cachetool.core.progress import Progress, Report
from cachetool.core.schema import Schema
from cachetool.core.units import format_size, parse_rate, parse_size
from cachetool.formats.base import Format
from cachetool.formats.shard import samples_within, shard_bound
from cachetool.proc.parent import LocalEngine
from cachetool.proc.task import Message, Task
from cachetool.pull.job import PrepareArguments, Prepared, too_many
from cachetool.pull.options import PullOptions
from cachetool.sources.classes import LABEL
from cachetool.sources.listing import LISTING_FILE, TABLE_FILE, Listing
from cachetool.sources.options import SourceOptions
from cachetool.sources.segments import SEGMENT
from cachetool.stores import canonical, local_path, split_url

__all__ = [
    "cap_for_all",
    "drawn_as",
    "drawn_of",
    "faults_of",
    "format_of",
    "looked_at",
    "pace",
    "parts_of",
    "prepare",
    "refuse_cap",
    "refuse_other_names",
    "refuse_small_cap",
    "samples_per_shard",
    "shard_bytes",
    "source_id",
    "source_row",
    "with_classes",
]

_MANY = 2**17
DEFAULT_SHARD = 64 * 10**6
"""Bytes of values in a shard, unless a sixteenth of the cap is less."""


def source_id(url: str, options: PullOptions) -> Id:
    """One source is one place, grouped in one way, for one dataset: what its draws are counted by."""
    text = json.dumps([canonical(url), options.source.numbering(), options.dataset])
    return Id(hashlib.sha256(text.encode()).hexdigest()[:16])


def refuse_cache(url: str) -> None:
    """Raise :class:`UsageError` for a source that is the folder of a cache: its files are no samples."""
    if split_url(url)[0] in ("", "file") and Layout(path := local_path(url)).is_cache:
        as_files = f"cachetool convert --to lmdb --out DIR{cache_option(path)}"
        raise UsageError(
            f"{path} is a cache; give it by --cache, and as SOURCE the place of the samples;\n"
            f"to copy its samples, write them into files and pull these: {as_files}"
        )


def refuse_other_names(cache: CacheDir, url: str, options: PullOptions) -> None:
    """Raise :class:`UsageError` for a place that was pulled into this dataset already with other names chosen, with
    another kind of files, or cut as it is now asked for: its samples would come once more."""
    new, rows = options.source, cache.catalog.rows("SELECT id, url, options FROM sources") if cache.exists else ()
    for row in rows:
        old = SourceOptions.from_json(json.loads(row["options"]))
        if source_id(url, options.with_source(old)) != row["id"]:
            continue
        place = f"{row['url']} was pulled into dataset {options.dataset!r} with"
        if (set(old.include), set(old.exclude)) != (set(new.include), set(new.exclude)):
            globs = [f"--{name} {glob!r}" for name in ("include", "exclude") for glob in getattr(old, name)]
            raise UsageError(
                f"{place} {' '.join(globs) or 'all its names'};\nchoose the same names, or another --dataset"
            )
        kinds = {old.read_as, new.read_as}
        if len(kinds) == 2 and not kinds <= {None, "objects", "files"}:
            with_kind = f"--read-as {old.read_as}" if old.read_as else "no --read-as"
            raise UsageError(f"{place} {with_kind};\nread it in the same way, or use another --dataset")
        about = cache.listing(row["id"]) / LISTING_FILE
        if old.stem is None and new.stem is not None and about.exists() and Listing.open(about.parent).stem == new.stem:
            raise UsageError(f"{place} --stem {new.stem}, decided by its names; leave --stem out")


def parts_of(cache: CacheDir, source: SourceRow | None, options: PullOptions) -> tuple[int, tuple[int, ...]]:
    """Into how many parts the source is cut, and which of them the cache is to draw. Raises :class:`UsageError` when
    the cache would lose samples, and for options that need a source in one part or a listing for all nodes."""
    if options.repart and options.share is None:
        raise UsageError("--repart goes with --part or --on ray; add one of them, or leave it out")
    cut, parts = options.share or (1, (0,))
    if source is not None:
        own = source.cut, tuple(part.number for part in source.parts)
        if options.share is None or (is_same_share(own, options.share) and not options.repart):
            cut, parts = own
        if not options.repart:
            with cache.catalog.read() as connection:
                refuse_loss(connection, cache.root, source.id, cut, parts)
    if options.start_early and (cut > 1 or options.listing is not None):
        raise UsageError("--start-early is for a source in one part, listed by one cache; leave it out")
    if options.refresh and cut > 1 and options.listing is None:
        raise UsageError(
            "--refresh of a source in parts needs one listing for all nodes: name a folder they share with --listing"
        )
    if options.listing is not None and not Path(options.listing).is_dir():
        raise UsageError(f"--listing {options.listing} is no folder; make it where all nodes see it")
    return cut, parts


def drawn_as(source: SourceRow | None, options: PullOptions) -> tuple[int, bool]:
    """Seed, and whether sequential, that a source is drawn with. Raises :class:`UsageError` when it is another way."""
    seed, order = options.seed, options.order
    if source is None:
        return seed or 0, order == "sequential"
    current = "sequential" if source.sequential else "random"
    for name, wanted, have in (("--seed", seed, source.seed), ("--order", order, current)):
        if wanted is not None and wanted != have:
            raise UsageError(
                f"{source.url} is drawn with {name} {have} in this cache; leave {name} out, or use another cache"
            )
    return source.seed, source.sequential


def drawn_of(cache: CacheDir, source: SourceRow) -> int:
    """How many draws of a source's present pass are done."""
    with cache.catalog.read() as connection:
        return draws.positions_done(connection, source)


def faults_of(cache: CacheDir, source: SourceRow) -> tuple[str, str]:
    """That of a source's present pass more draws could not be used than may be left out, whichever pull met them, and
    what to do about it; both empty when it is not so. As many as a refresh did not find any more count no longer: they
    were mended or taken away, or, where much has vanished that had come, this says nothing."""
    draw_count = drawn_of(cache, source)
    if not too_many(source.skipped, draw_count):
        return "", ""
    unused, listing = source.skipped, cache.listing(source.id)
    advice = "mend the files, and draw them into another --dataset"
    if (listing / "listing.json").exists() and not (listing / TABLE_FILE).exists():
        from cachetool.sources.segments import SegmentedListing

        unused -= len(SegmentedListing.open(listing, units=source.units).vanished)
        advice = "mend these objects or take them away, and list again with --refresh"
    if not too_many(unused, draw_count):
        return "", ""
    return f"{unused} of {draw_count} draws could not be used, more than 1 %", advice


def prepare(
    engine: LocalEngine,
    cache: CacheDir,
    url: str,
    options: PullOptions,
    *,
    listing: Path,
    order: tuple[int, bool],
    source: SourceRow | None,
    share: tuple[int, tuple[int, ...]],
    scratch: Path,
    report: Report,
) -> Prepared:
    """List and probe in a process of its own. What a refresh finds lies in ``scratch / "segment"``."""

    def on_message(_: int, message: Message) -> None:
        if "listed" in message:
            report(Progress("list", message["listed"]))
        else:
            report(Progress("schema", 0, message["probing"]))

    has = options.dataset in cache.datasets()
    arguments = PrepareArguments(
        url=url,
        listing=str(listing),
        options=_as_before(cache, options).to_json(),
        order={
            "seed": order[0],
            "sequential": order[1],
            "pass_number": source.pass_number if source else 0,
            "segments": source.segments if source else (),
        },
        units=source.units if source else None,
        # Of a known dataset the fields are known: a bad object stops who draws it, not who only looks at it.
        skip_bad=options.on_error == "skip" or has,
        skip_keys=options.on_error == "skip",
        refresh=str(scratch) if options.refresh and source is not None and source.complete else None,
        early=SEGMENT if options.start_early else None,
        pace=pace(options, scratch),
        looked=looked_at(url, scratch),
        cut=share[0],
        parts=share[1],
        samples=options.samples,
        shared=None if options.listing is None else str(Path(options.listing, source_id(url, options))),
    )
    (message,) = engine.run([Task("cachetool.pull.listing:prepare", asdict(arguments))], on_message)
    prepared = Prepared.from_json(message)
    if prepared.units > _MANY:
        engine.dismiss()  # who listed so many names keeps their memory
    if has:
        cache.check_schema(options.dataset, prepared.schema)
    if source is not None and prepared.identity != source.identity:
        raise UsageError(
            f"the listing of {source.url} was lost and what is there now differs; draw it into another --dataset"
        )
    return prepared


def _as_before(cache: CacheDir, options: PullOptions) -> SourceOptions:
    """The options of the source, with the numbers that the dataset's folders have already."""
    source = options.source
    if source.label_from_folder != "int" or options.dataset not in cache.datasets():
        return source
    return with_classes(source, cache.schema(options.dataset))


def with_classes(source: SourceOptions, schema: Schema) -> SourceOptions:
    """The options of a source with the names that the numbers of its labels stand for in ``schema``."""
    if source.label_from_folder != "int":
        return source
    return replace(source, classes=schema[LABEL].classes if LABEL in schema else ())


def pace(options: PullOptions, scratch: Path) -> Message | None:
    """The limit on bytes a second that all processes of this pull share by a file in ``scratch``."""
    if options.max_rate is None:
        return None
    return {"path": str(scratch / "pace"), "rate": parse_rate(options.max_rate, what="--max-rate")}


def looked_at(url: str, scratch: Path) -> str | None:
    """The folder for what is looked at beforehand; None for local files, which nobody has to wait for."""
    return None if split_url(url)[0] in ("", "file") else str(scratch / "looked")


def source_row(
    id: Id, options: PullOptions, prepared: Prepared, order: tuple[int, bool], cut: int, source: SourceRow | None
) -> SourceRow:
    """The row of a source that is taken in; that of a known one stays."""
    if source is not None:
        return source
    return SourceRow(
        id=id,
        url=prepared.url,
        options=options.source.to_json(),
        identity=prepared.identity,
        dataset=options.dataset,
        units=prepared.units,
        samples=prepared.samples,
        seed=order[0],
        pass_number=0,
        skipped=0,
        segments=prepared.segments,
        sequential=order[1],
        complete=prepared.complete,
        cut=cut,
        parts=tuple(Part(part, 0, size) for part, size, _ in prepared.parts),
    )


def format_of(cache: CacheDir, dataset: str) -> str | None:
    """Format of the newest shard."""
    shards = cache.shards(dataset)
    return shards[-1].format if shards else None


def shard_bytes(cap: int, options: PullOptions) -> int:
    """Most bytes of values in one shard of a cache with this cap."""
    if options.shard_size is not None:
        return parse_size(options.shard_size, what="--shard-size")
    return max(1, min(DEFAULT_SHARD, cap // 16))


def samples_per_shard(cap: int, options: PullOptions, kind: Format, prepared: Prepared) -> int:
    """How many samples a shard takes, by the mean size of those probed where they differ; not more than there are."""
    schema, most = prepared.schema, shard_bytes(cap, options)
    size = schema.fixed_nbytes if schema.is_fixed else prepared.mean_bytes
    count = samples_within(kind, schema, most, size) if options.shard_size is None else most // max(1, size)
    limits = [count, *([] if options.samples is None else [options.samples])]
    if prepared.complete:
        limits.append(prepared.units * prepared.per_unit)
    return max(1, min(limits))


def cap_for_all(
    cache: CacheDir, job: str, options: PullOptions, schema: Schema, kind: Format, *, samples: int
) -> int | None:
    """About the cap under which a pull that stopped full would hold all its ``samples``, judged by those it has, or by
    those of its dataset; None where there are none."""
    sums = "SELECT sum(samples) AS samples, sum(bytes) AS bytes, sum(payload) AS payload"
    totals = f"{sums} FROM shards WHERE state = 'ready'"
    with cache.catalog.read() as connection:
        own = connection.execute(f"{totals} AND job = ?", (job,)).fetchone()
        alike = connection.execute(f"{totals} AND dataset = ?", (options.dataset,)).fetchone()
        growth = asked(connection, cache.layout, 0)
        beside = measure(connection, cache.layout).total - (own["bytes"] or 0)
    seen = own if own["samples"] else alike
    if not seen["samples"]:
        return None
    block = cache.layout.disk_block
    cap = least = int(beside + seen["bytes"] * samples // seen["samples"] + growth)
    for _ in range(8):  # under a larger cap shards are larger, and each worker reserves a whole one
        nbytes = shard_bytes(cap, options)
        per_shard = -(-nbytes * seen["samples"] // max(1, seen["payload"]))
        bound = shard_bound(kind, schema, min(per_shard, samples), nbytes, block) + RANGE_BYTES
        cap = least + options.workers * (bound + folder_bound(schema, bound, block))
    return cap + cap // 50


def refuse_small_cap(
    cache: CacheDir, options: PullOptions, kind: Format, prepared: Prepared, *, listing: Path | None
) -> None:
    """Raise :class:`CapTooSmall`, with the minimum, when the cap can never hold one shard of this pull, and
    :class:`CapacityError` when the disk of a new cache has no room for one above its floor."""
    schema = prepared.schema

    def one(cap: int) -> tuple[int, int]:
        """Bytes of values in a shard, and the most that it takes."""
        samples = samples_per_shard(cap, options, kind, prepared)
        most = max(shard_bytes(cap, options), prepared.mean_bytes)
        nbytes = samples * schema.fixed_nbytes if schema.is_fixed else most
        return nbytes, shard_bound(kind, schema, samples, nbytes, cache.layout.disk_block) + RANGE_BYTES

    need = refuse_cap(cache, one, schema, kind, listing=listing)
    if not cache.exists:  # where there is one, older shards may go
        refuse_full_disk(cache.layout, need, cache.min_free)


def refuse_cap(
    cache: CacheDir, one: Callable[[int], tuple[int, int]], schema: Schema, kind: Format, *, listing: Path | None
) -> int:
    """Raise :class:`CapTooSmall` when the cap does not hold a shard; else give the least cap that does. ``one(cap)``
    says how many bytes of values a shard has under a cap, and how many its files take at most.

    A larger cap may mean larger shards: the minimum in the message is one that holds its own.
    """
    cap = least = cache.max_size
    while True:
        nbytes, bound = one(least)
        need = least_cap(cache.catalog if cache.exists else None, cache.layout, bound, schema, listing=listing)
        if need <= least:
            break
        least = need
    if least == cap:
        return need
    shard = bound + folder_bound(schema, bound, cache.layout.disk_block)
    raise CapTooSmall(
        f"a cap of {format_size(cap)} cannot hold one {kind.name} shard of {format_size(nbytes)} of values;\n"
        f"the minimum is {least} bytes, up to {format_size(shard)} for such a shard and {format_size(least - shard)}"
        " beside it: raise --max-size or lower --shard-size"
    )
