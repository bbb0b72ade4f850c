"""What the listing process of a pull does: list a source, or go on listing it, and look at its first samples.

These are the targets of tasks (:mod:`cachetool.proc`), as those of :mod:`cachetool.pull.worker`::

    prepare   not listed yet      -> all of it, or with `early` its first segment
              listed, `refresh`   -> all of it again, and a segment of what changed
              first draws         -> schema, mean size
    list_on   segment after segment into the cache, while samplers draw from those that are there
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from cachetool.cache import CacheDir
from cachetool.cache.growth import grow_source
from cachetool.core.errors import UsageError
from cachetool.proc.arrays import load_array
from cachetool.proc.folders import remove_path
from cachetool.proc.scratch import listing_scratch
from cachetool.proc.task import Channel, Message
from cachetool.pull.job import ListingChange, PrepareArguments, Prepared
from cachetool.pull.shared_listing import Turn, agree, fetch, fetch_newer, publish
from cachetool.sources.base import Source
from cachetool.sources.blame import naming_skip
from cachetool.sources.braces import braces_of
from cachetool.sources.classes import numbered
from cachetool.sources.listing import TABLE_FILE, Listing
from cachetool.sources.looked import LookedAt
from cachetool.sources.options import SourceOptions
from cachetool.sources.rate_limit import RateLimit
from cachetool.sources.registry import list_source, open_source, refuse_empty
from cachetool.sources.segments import Change, EarlyListing, SegmentedListing, last_key, segment_name, write_changes

__all__ = ["PROBED", "list_on", "pace_of", "prepare"]

PROBED = 64
"""The schema is fixed from this many first draws."""
_AT_ONCE = 2**20
"""Draws that are looked through at once for some that have not vanished."""


def prepare(channel: Channel, **arguments: Any) -> Message:
    """List a source into a folder unless it is there, and find the schema of its first draws. ``arguments`` are the
    fields of :class:`PrepareArguments`; gives :class:`Prepared` as plain values."""
    task = PrepareArguments(**arguments)
    options = SourceOptions.from_json(task.options)
    folder = Path(task.listing)
    was_listed = (folder / "listing.json").exists()
    complete, change, gone = _list(channel, task, options)
    segments = [] if change is None else [Path(task.refresh or "", name) for name, *_ in change.segments]
    if task.refresh is not None:
        options = numbered(options, [folder, *segments])
    elif not was_listed or not options.classes:
        options = numbered(options, [folder])
    through = (lambda store: store) if task.looked is None else LookedAt(Path(task.looked)).kept_of
    source = open_source(task.url, folder, options, units=task.units, pace=pace_of(task.pace), through=through)
    probing, order = source, task.order
    if task.units is None:
        order = {**order, "segments": source.segments}
    try:
        probed = _first(source, order, gone)
        if segments and not len(probed):  # all is gone: what came last tells
            probing = open_source(task.url, segments[-1], options, pace=pace_of(task.pace))
            probed = probing.order(**{**order, "segments": ()})[np.arange(min(probing.units, PROBED))]
        channel.send({"probing": len(probed)})
        with naming_skip(skip_bad=task.skip_bad):
            probe = probing.probe(probed, skip_bad=task.skip_bad)
        fresh = Path(task.refresh or "", "fresh")
        upto = None if task.samples is None else -(-task.samples // probe.per_unit)
        first = {**order, "pass_number": 0, "segments": ()}
        orders = [(part, source.order(**first, part=part, cut=task.cut)) for part in task.parts]
        left_out = Listing.open(fresh).left_out if change is not None and fresh.exists() else None
        return Prepared(
            url=source.url,
            identity=source.identity,
            units=source.units,
            samples=source.samples,
            schema=probe.schema,
            mean_bytes=probe.mean_bytes,
            per_unit=probe.per_unit,
            left_out=probe.left_out if left_out is None else left_out.listed(),
            left_out_counts=probe.left_out_counts if left_out is None else left_out,
            complete=complete,
            change=change,
            segments=source.segments,
            parts=tuple((part, len(o), len(o) if upto is None else o.limit(upto)) for part, o in orders),
        ).to_json()
    finally:
        probing.close()
        source.close()


def list_on(
    channel: Channel, *, root: str, url: str, source: str, options: Message, early: int, skip_keys: bool
) -> Message:
    """Go on with a listing that is not whole until it is; each segment can be drawn from at once."""
    parsed = SourceOptions.from_json(options)
    with CacheDir(Path(root)) as cache, listing_scratch() as scratch:
        row = cache.source(source)
        assert row is not None
        parts = SegmentedListing.open(cache.listing(source), units=row.units).parts
        after, kept = last_key(parts[-1].folder), parts[0].kept
        count = len(parts)
        listed = sum(part.objects for part in parts)
        with EarlyListing(url, parsed, size=early, after=after, kept=kept or (), skip_bad=skip_keys) as more:
            while not row.complete:
                folder = Path(scratch, segment_name(count))
                more.write(folder, progress=lambda keys: channel.send({"listed": listed + keys}))
                grown = [*parts, Listing.open(folder)]
                identity = SegmentedListing(grown).identity
                units = sum(part.units for part in grown)
                row = grow_source(
                    cache, row, folder, segment_name(count), units=units, identity=identity, complete=more.ended
                )
                parts, count = SegmentedListing.open(cache.listing(source), units=row.units).parts, count + 1
    return {}


def pace_of(value: Message | None) -> RateLimit | None:
    """The limit that a task names, if it names one."""
    return None if value is None else RateLimit(Path(value["path"]), value["rate"])


def _list(
    channel: Channel, task: PrepareArguments, options: SourceOptions
) -> tuple[bool, ListingChange | None, list[int]]:
    """List the source where it was not, or is to be listed again. Gives whether the listing is complete, what a refresh
    found, and the numbers of the units that it did not find any more."""
    folder = Path(task.listing)

    def progress(count: int) -> None:
        channel.send({"listed": count})

    shared = None if task.shared is None else Path(task.shared)
    if not (folder / "listing.json").exists():
        if task.early is not None and braces_of(task.url) is None:  # whose names are known without a listing
            with EarlyListing(task.url, options, size=task.early, skip_bad=task.skip_keys) as listed:
                refuse_empty(listed.write(folder, progress=progress))
                return listed.ended, None, []

        def list_all() -> None:
            list_source(task.url, folder, options, progress=progress, skip_bad=task.skip_keys)

        if shared is None:
            list_all()
        elif not fetch(shared, folder):
            with Turn(shared, lambda: progress(0)):
                if not fetch(shared, folder):
                    list_all()
                    if not publish(folder, shared):
                        remove_path(folder)
                        fetch(shared, folder)
        return True, None, []
    is_of_files = (folder / TABLE_FILE).exists()
    old = SegmentedListing.open(folder, units=None if is_of_files else task.units)
    if shared is not None:
        agree(old.parts, shared)
    if task.refresh is None:
        return True, None, []
    if is_of_files:
        raise UsageError("--refresh is for folders of objects; draw files that changed into another --dataset")
    options, scratch, number = replace(options, stem=old.stem), Path(task.refresh), len(old.parts)

    def list_again() -> Change:
        fresh = list_source(
            task.url, scratch / "fresh", options, progress=progress, kept=old.kept or (), skip_bad=task.skip_keys
        )
        return write_changes(scratch / segment_name(number), old, fresh)

    if shared is None:
        changes = list_again()
        return True, *_change(old, [scratch / segment_name(number)] if changes.any else [], changes.names)
    segments, names = fetch_newer(shared, scratch, number), tuple[str, ...]()
    if not segments:
        with Turn(shared, lambda: progress(0)) as turn:
            segments = fetch_newer(shared, scratch, number)
            if not (segments or turn.others_looked):
                changes = list_again()
                names, segments = changes.names, [scratch / segment_name(number)] if changes.any else []
                if segments and not publish(segments[0], shared / segments[0].name):
                    remove_path(segments[0])
                    segments = fetch_newer(shared, scratch, number)
                turn.looked()
    return True, *_change(old, segments, names)


def _first(source: Source, order: Message, gone: list[int]) -> Any:
    """The units of the first draws, without those that have vanished: none when all have."""
    vanished = np.concatenate([source.vanished, np.array(gone, dtype=np.int64)])
    draws, start, count = source.order(**order), 0, 16 * PROBED
    while True:
        units = draws[np.arange(start, min(source.units, start + count))]
        there = units[~np.isin(units, vanished)]
        start += count
        if len(there) or start >= source.units:
            return there[:PROBED]
        count = min(2 * count, _AT_ONCE)


def _change(old: SegmentedListing, folders: list[Path], names: tuple[str, ...]) -> tuple[ListingChange, list[int]]:
    """The difference that the segments in ``folders`` make, and the units that have vanished."""
    vanished: list[int] = []
    steps, after = [], old
    for folder in folders:
        after = SegmentedListing([*after.parts, Listing.open(folder)])
        steps.append((folder.name, after.units, after.identity))
        vanished += load_array(folder / "vanished.npy").tolist()
    change = ListingChange(added=after.units - old.units, vanished=len(vanished), names=names, segments=tuple(steps))
    return change, vanished
