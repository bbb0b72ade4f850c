"""Decisions before the workers of a pull start: source, order, schema, and size of the shards.

Nothing in this module writes to the cache; :mod:`cachetool.pull.run` stores the results.
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
from cachetool.formats import get_format
from cachetool.formats.base import Format
from cachetool.formats.compression import AUTO, check_compression
from cachetool.formats.shard import samples_within, shard_bound
from cachetool.proc.parent import LocalEngine
from cachetool.proc.task import Message, Task
from cachetool.pull.job import PrepareArguments, Prepared, too_many
from cachetool.pull.options import PullOptions
from cachetool.sources.classes import LABEL
from cachetool.sources.listing import LISTING_FILE, TABLE_FILE, Listing
from cachetool.sources.options import SourceOptions
from cachetool.sources.segments import SEGMENT, SegmentedListing
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
    "target_format",
    "with_classes",
]

# The process that listed so many names keeps the memory for them, so a fresh process draws instead.
_MANY = 2**17
"""Units above which the listing process ends instead of drawing as well."""
DEFAULT_SHARD = 64 * 10**6
"""Bytes of values in a shard, unless a sixteenth of the cap is less."""


def source_id(url: str, options: PullOptions) -> Id:
    """Return the id of a source: one place, grouped in one way, for one dataset. Draws are counted by this id."""
    # canonical() leaves out signatures, which change from day to day. A signed URL must be the same source tomorrow.
    text = json.dumps([canonical(url), options.source.numbering(), options.dataset])
    return Id(hashlib.sha256(text.encode()).hexdigest()[:16])


def refuse_cache(url: str) -> None:
    """Raise :class:`UsageError` for a source that is the folder of a cache: its files are no samples."""
    if split_url(url)[0] in ("", "file") and Layout(path := local_path(url)).is_cache:
        as_files = f"cachetool convert --to lmdb --out DIR{cache_option(path)}"
        raise UsageError(
            f"{path} is a cache; give it with --cache, and give the place of the samples as SOURCE;\n"
            f"to copy its samples, write them to files and pull the files: {as_files}"
        )


def refuse_other_names(cache: CacheDir, url: str, options: PullOptions) -> None:
    """Raise :class:`UsageError` if the dataset has this place already, but with another choice or grouping of names.

    The samples would come a second time: with other names chosen, as another kind of files, or cut as it is asked for
    now.
    """
    new, rows = options.source, cache.catalog.rows("SELECT id, url, options FROM sources") if cache.exists else ()
    for row in rows:
        old = SourceOptions.from_json(json.loads(row["options"]))
        # The catalog has no secrets, so the URL of a row may lack parts. Only the id tells whether the row is of this
        # place.
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
            raise UsageError(f"{place} --stem {new.stem}, chosen from its names; leave --stem out")


def parts_of(cache: CacheDir, source: SourceRow | None, options: PullOptions) -> tuple[int, tuple[int, ...]]:
    """Return the number of parts of the source, and the parts that the cache is to draw.

    Raises:
        UsageError: If the cache would lose samples, or an option needs a source in one part or a listing for all nodes.
    """
    if options.repart and options.node_parts is None:
        raise UsageError("--repart needs --part or --on ray; add one of them, or leave --repart out")
    cut, parts = options.node_parts or (1, (0,))
    if source is not None:
        own = source.cut, tuple(part.number for part in source.parts)
        # A source keeps its parts unless --repart says otherwise: a pull without --part would draw the units of other
        # nodes as well.
        if options.node_parts is None or (is_same_share(own, options.node_parts) and not options.repart):
            cut, parts = own
        if not options.repart:
            with cache.catalog.read() as connection:
                refuse_loss(connection, cache.root, source.id, cut, parts)
    if options.start_early and (cut > 1 or options.listing is not None):
        raise UsageError("--start-early cannot be used with --listing or for a source in several parts; leave it out")
    # Each node would list at another moment, and give its new units other numbers than the other nodes.
    if options.refresh and cut > 1 and options.listing is None:
        raise UsageError(
            "--refresh of a source in parts needs one listing for all nodes; give --listing a folder that they share"
        )
    if options.listing is not None and not Path(options.listing).is_dir():
        raise UsageError(f"--listing {options.listing} is not a folder; make it where all nodes see it")
    return cut, parts


def drawn_as(source: SourceRow | None, options: PullOptions) -> tuple[int, bool]:
    """Return the seed of a source, and True if it is drawn in the order of names.

    Raises:
        UsageError: If the options ask for another seed or order than the source has in this cache.
    """
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
    """Return the number of draws of the source's present pass that are done."""
    with cache.catalog.read() as connection:
        return draws.positions_done(connection, source)


def faults_of(cache: CacheDir, source: SourceRow) -> tuple[str, str]:
    """Return a sentence, and advice, if more draws of the present pass were unusable than may be left out; else empty
    texts.

    It does not matter which pull met them. Units that a refresh did not find any more are subtracted, because they were
    probably mended or removed.
    """
    draw_count = drawn_of(cache, source)
    if not too_many(source.skipped, draw_count):
        return "", ""
    unused, listing = source.skipped, cache.listing(source.id)
    advice = "repair the files, then pull them into another --dataset"
    if (listing / "listing.json").exists() and not (listing / TABLE_FILE).exists():
        # Vanished units were mended under another number, or removed, so they do not count. The listing does not say
        # which of them had failed. If many units vanished that had not failed, the warning may be missing.
        unused -= len(SegmentedListing.open(listing, units=source.units).vanished)
        advice = "repair or remove these objects, then list again with --refresh"
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
    """List and probe the source in a process of its own. A refresh leaves its segment in ``scratch / "segment"``."""

    def on_message(_: int, message: Message) -> None:
        if "listed" in message:
            report(Progress("list", message["listed"]))
        else:
            report(Progress("schema", 0, message["probing"]))

    has = options.dataset in cache.datasets()
    probed = None
    if options.compression is not None:
        # A wrong name ends the pull before the source is listed.
        format = target_format(options, format_of(cache, options.dataset))
        probed = format if check_compression(get_format(format), options.compression) == AUTO else None
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
        # The fields of a known dataset are known. A bad object then stops the worker that draws it, not a process that
        # only looks at it.
        skip_bad=options.on_error == "skip" or has,
        skip_keys=options.on_error == "skip",
        refresh=str(scratch) if options.refresh and source is not None and source.complete else None,
        early=SEGMENT if options.start_early else None,
        pace=pace(options, scratch),
        looked=looked_at(url, scratch),
        cut=share[0],
        parts=share[1],
        samples=options.samples,
        probed=probed,
        shared=None if options.listing is None else str(Path(options.listing, source_id(url, options))),
    )
    (message,) = engine.run([Task("cachetool.pull.listing:prepare", asdict(arguments))], on_message)
    prepared = Prepared.from_json(message)
    if prepared.units > _MANY:
        # The memory of the names would stay with this worker for the whole pull.
        engine.dismiss()
    if has:
        cache.check_schema(options.dataset, prepared.schema)
    # The listing was deleted and made again. With another digest the numbers in existing shards mean other units.
    if source is not None and prepared.identity != source.identity:
        raise UsageError(
            f"the listing of {source.url} was lost, and the source has changed since; pull it into another --dataset"
        )
    return prepared


def _as_before(cache: CacheDir, options: PullOptions) -> SourceOptions:
    """Return the source options with the numbers that the dataset already gives to folders."""
    source = options.source
    if source.label_from_folder != "int" or options.dataset not in cache.datasets():
        return source
    return with_classes(source, cache.schema(options.dataset))


def with_classes(source: SourceOptions, schema: Schema) -> SourceOptions:
    """Return the source options with the names that the label numbers of ``schema`` stand for."""
    if source.label_from_folder != "int":
        return source
    return replace(source, classes=schema[LABEL].classes if LABEL in schema else ())


def pace(options: PullOptions, scratch: Path) -> Message | None:
    """Return the limit on bytes a second, which all processes of this pull share through a file in ``scratch``."""
    if options.max_rate is None:
        return None
    return {"path": str(scratch / "pace"), "rate": parse_rate(options.max_rate, what="--max-rate")}


def looked_at(url: str, scratch: Path) -> str | None:
    """Return the folder for the bytes of the samples that are read for the schema; None for local files."""
    return None if split_url(url)[0] in ("", "file") else str(scratch / "looked")


def source_row(
    id: Id, options: PullOptions, prepared: Prepared, order: tuple[int, bool], cut: int, source: SourceRow | None
) -> SourceRow:
    """Return the catalog's row of a source: a new one, or the known one unchanged."""
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
    """Return the format of the newest shard; None without shards."""
    shards = cache.shards(dataset)
    return shards[-1].format if shards else None


def target_format(options: PullOptions, newest: str | None) -> str:
    """Return the format of the new shards. ``newest``: that of the dataset's newest shard, if it has one."""
    return options.to or newest or "lmdb"


def space_of(cache: CacheDir, options: PullOptions) -> int:
    """Return the bytes of the cap that the pull may fill: the share of its dataset, or what others leave."""
    shares = {}
    if cache.exists:
        rows = cache.catalog.rows("SELECT name, share FROM datasets WHERE share IS NOT NULL")
        shares = {row["name"]: row["share"] for row in rows}
    own = shares.pop(options.dataset, None)
    if options.share is not None:
        own = None if options.share == "none" else float(options.share)
    return int((max(0.0, 1.0 - sum(shares.values())) if own is None else own) * cache.max_size)


def shard_bytes(cap: int, options: PullOptions) -> int:
    """Return the most bytes of values in one shard of a cache with this cap."""
    if options.shard_size is not None:
        return parse_size(options.shard_size, what="--shard-size")
    return max(1, min(DEFAULT_SHARD, cap // 16))


def samples_per_shard(cap: int, options: PullOptions, kind: Format, prepared: Prepared) -> int:
    """Return the number of samples in a shard.

    Samples of different sizes count with the mean size of the probed ones. The number is at most that of the samples
    that are there.
    """
    schema, most = prepared.schema, shard_bytes(cap, options)
    size = schema.fixed_nbytes if schema.is_fixed else prepared.mean_bytes
    count = samples_within(kind, schema, most, size) if options.shard_size is None else most // max(1, size)
    limits = [count, *([] if options.samples is None else [options.samples])]
    if prepared.complete:
        # Only a complete listing says how many samples there are; otherwise more come, and shards should be full.
        limits.append(prepared.units * prepared.per_unit)
    return max(1, min(limits))


def cap_for_all(
    cache: CacheDir, job: str, options: PullOptions, schema: Schema, kind: Format, *, samples: int
) -> int | None:
    """Return about the cap, in bytes, under which a pull that stopped at the cap would hold all its ``samples``.

    The estimate uses the shards of the job, or else of its dataset. Return None if there are none.
    """
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
    # Under a larger cap shards are larger, and each worker reserves a whole one. So cap and shard size are computed in
    # turn until they hardly change.
    for _ in range(8):
        nbytes = shard_bytes(cap, options)
        per_shard = -(-nbytes * seen["samples"] // max(1, seen["payload"]))
        bound = shard_bound(kind, schema, min(per_shard, samples), nbytes, block) + RANGE_BYTES
        cap = least + options.workers * (bound + folder_bound(schema, bound, block))
    return cap + cap // 50


def refuse_small_cap(
    cache: CacheDir, options: PullOptions, kind: Format, prepared: Prepared, *, listing: Path | None
) -> None:
    """Refuse a pull whose shards can never be written.

    Raises:
        CapTooSmall: If the cap can never hold one shard. The message has the minimum.
        CapacityError: If the disk of a new cache has no space for one shard above its floor.
    """
    schema = prepared.schema

    def one(cap: int) -> tuple[int, int]:
        """Return the bytes of values in a shard, and the most bytes that its files take."""
        samples = samples_per_shard(cap, options, kind, prepared)
        most = max(shard_bytes(cap, options), prepared.mean_bytes)
        nbytes = samples * schema.fixed_nbytes if schema.is_fixed else most
        return nbytes, shard_bound(kind, schema, samples, nbytes, cache.layout.disk_block) + RANGE_BYTES

    need = refuse_cap(cache, one, schema, kind, listing=listing)
    # An existing cache can evict older shards; a new one has none.
    if not cache.exists:
        refuse_full_disk(cache.layout, need, cache.min_free)


def refuse_cap(
    cache: CacheDir, one: Callable[[int], tuple[int, int]], schema: Schema, kind: Format, *, listing: Path | None
) -> int:
    """Return the least cap that holds a shard.

    ``one(cap)`` returns the bytes of values in a shard under a cap, and the most bytes that its files take.

    Raises:
        CapTooSmall: If the cap of the cache is smaller.
    """
    cap = least = cache.max_size
    while True:
        nbytes, bound = one(least)
        need = least_cap(cache.catalog if cache.exists else None, cache.layout, bound, schema, listing=listing)
        # A larger cap may mean larger shards, so the minimum in the message must hold its own shards.
        if need <= least:
            break
        least = need
    if least == cap:
        return need
    shard = bound + folder_bound(schema, bound, cache.layout.disk_block)
    raise CapTooSmall(
        f"a cap of {format_size(cap)} cannot hold one {kind.name} shard of {format_size(nbytes)} of values;\n"
        f"the minimum is {least} bytes ({format_size(shard)} for the shard, {format_size(least - shard)} for other"
        " files): raise --max-size or lower --shard-size"
    )
