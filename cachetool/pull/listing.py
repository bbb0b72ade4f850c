"""The listing process of a pull: it lists a source, or continues a listing, and looks at the first samples.

These functions are the targets of tasks (:mod:`cachetool.proc`), as those of :mod:`cachetool.pull.worker` are::

    prepare   not listed yet      -> all of it, or with `early` its first segment
              listed, `refresh`   -> all of it again, and a segment of what changed
              first draws         -> schema, mean size
    list_on   segment after segment into the cache, while workers draw from those that are there
"""

from __future__ import annotations

import contextlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from cachetool.cache import CacheDir
from cachetool.cache.growth import grow_source
from cachetool.core.errors import UsageError
from cachetool.core.schema import Schema
from cachetool.formats import get_format
from cachetool.formats.compression import chosen, compression_of
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
"""Number of first draws that fix the schema."""
_AT_ONCE = 2**20
"""Most draws that are searched at once for draws that have not vanished."""


def prepare(channel: Channel, **arguments: Any) -> Message:
    """List a source into a folder unless the listing exists, and find the schema of its first draws.

    ``arguments`` are the fields of :class:`PrepareArguments`. Return :class:`Prepared` as plain values.
    """
    task = PrepareArguments(**arguments)
    options = SourceOptions.from_json(task.options)
    folder = Path(task.listing)
    # Looked at before _list(), which writes the listing.
    was_listed = (folder / "listing.json").exists()
    complete, change, gone = _list(channel, task, options)
    segments = [] if change is None else [Path(task.refresh or "", name) for name, *_ in change.segments]
    # The numbers of labels must cover the folders of the new segments, too.
    if task.refresh is not None:
        options = numbered(options, [folder, *segments])
    elif not was_listed or not options.classes:
        options = numbered(options, [folder])
    # The bytes of the probed samples are kept, so that the workers do not fetch them a second time.
    through = (lambda store: store) if task.looked is None else LookedAt(Path(task.looked)).kept_of
    source = open_source(task.url, folder, options, units=task.units, pace=pace_of(task.pace), through=through)
    probing, order = source, task.order
    # A new source has no segments in the catalog yet; they come from the listing just made.
    if task.units is None:
        order = {**order, "segments": source.segments}
    try:
        probed = _first(source, order, gone)
        # All units of before are gone, so the newest segment says what samples look like now.
        if segments and not len(probed):
            probing = open_source(task.url, segments[-1], options, pace=pace_of(task.pace))
            probed = probing.order(**{**order, "segments": ()})[np.arange(min(probing.units, PROBED))]
        channel.send({"probing": len(probed)})
        with naming_skip(skip_bad=task.skip_bad):
            probe = probing.probe(probed, skip_bad=task.skip_bad)
        fresh = Path(task.refresh or "", "fresh")
        upto = None if task.samples is None else -(-task.samples // probe.per_unit)
        # Pass 0 without segments: which draws are the first N must mean the same on all nodes, whatever pass each of
        # them is in.
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
            compression=None if task.probed is None else _compression(task.probed, probing, probed, probe.schema),
        ).to_json()
    finally:
        probing.close()
        source.close()


def _compression(format: str, source: Source, units: npt.NDArray[np.int64], schema: Schema) -> str | None:
    """Return the compression that the samples of ``units`` are worth."""
    # Bad samples are left out: the worker that draws one has a message for it.
    with contextlib.closing(source.read(units, schema=schema, skip_bad=True)) as reading:
        return compression_of(chosen(get_format(format), (result.block for result in reading)))


def list_on(
    channel: Channel, *, root: str, url: str, source: str, options: Message, early: int, skip_keys: bool
) -> Message:
    """Continue an incomplete listing to its end. Workers can draw from each segment at once."""
    parsed = SourceOptions.from_json(options)
    with CacheDir(Path(root)) as cache, listing_scratch() as scratch:
        row = cache.source(source)
        assert row is not None
        # Only as many units as the catalog knows. A segment whose transaction did not end may lie in the folder, but is
        # no part of the listing.
        parts = SegmentedListing.open(cache.listing(source), units=row.units).parts
        after, kept = last_key(parts[-1].folder), parts[0].kept
        count = len(parts)
        listed = sum(part.objects for part in parts)
        with EarlyListing(
            url, parsed, size=early, after=after, number=count, kept=kept or (), skip_bad=skip_keys
        ) as more:
            while not row.complete:
                folder = Path(scratch, segment_name(count))
                more.write(folder, progress=lambda keys: channel.send({"listed": listed + keys}))
                grown = [*parts, Listing.open(folder)]
                identity = SegmentedListing(grown).identity
                units = sum(part.units for part in grown)
                # One transaction renames the segment into place and raises the units, so workers never see units
                # without keys.
                row = grow_source(
                    cache, row, folder, segment_name(count), units=units, identity=identity, complete=more.ended
                )
                parts, count = SegmentedListing.open(cache.listing(source), units=row.units).parts, count + 1
    return {}


def pace_of(value: Message | None) -> RateLimit | None:
    """Return the limit on bytes a second that a task names; None if it names none."""
    return None if value is None else RateLimit(Path(value["path"]), value["rate"])


def _list(
    channel: Channel, task: PrepareArguments, options: SourceOptions
) -> tuple[bool, ListingChange | None, list[int]]:
    """List the source if it has no listing, or is to be listed again.

    Return True if the listing is complete, the changes that a refresh found, and the units that it did not find any
    more.
    """
    folder = Path(task.listing)

    def progress(count: int) -> None:
        channel.send({"listed": count})

    shared = None if task.shared is None else Path(task.shared)
    if not (folder / "listing.json").exists():
        # Names in braces are known without a listing, so there is nothing to wait for.
        if task.early is not None and braces_of(task.url) is None:
            with EarlyListing(task.url, options, size=task.early, skip_bad=task.skip_keys) as listed:
                refuse_empty(listed.write(folder, progress=progress))
                return listed.ended, None, []

        def list_all() -> None:
            list_source(task.url, folder, options, progress=progress, skip_bad=task.skip_keys)

        if shared is None:
            list_all()
        # First without the lock: for all nodes but the first the listing is there already.
        elif not fetch(shared, folder):
            with Turn(shared, lambda: progress(0)):
                # Again under the lock: another node may have published its listing while this one waited.
                if not fetch(shared, folder):
                    list_all()
                    # On a file system without locks another node was faster. Its numbers count, so this node drops its
                    # own listing and copies that one.
                    if not publish(folder, shared):
                        remove_path(folder)
                        fetch(shared, folder)
        return True, None, []
    is_of_files = (folder / TABLE_FILE).exists()
    old = SegmentedListing.open(folder, units=None if is_of_files else task.units)
    if shared is not None:
        # Before a refresh, so that a new segment begins at the same number on all nodes.
        agree(old.parts, shared)
    if task.refresh is None:
        return True, None, []
    if is_of_files:
        raise UsageError("--refresh works only for folders of objects; pull changed files into another --dataset")
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
    # No other node has published newer segments, so this node lists, under the lock.
    if not segments:
        with Turn(shared, lambda: progress(0)) as turn:
            segments = fetch_newer(shared, scratch, number)
            # If another node looked while this one waited and found nothing new, its answer counts here, too: a
            # thousand nodes then list once.
            if not (segments or turn.others_looked):
                changes = list_again()
                names, segments = changes.names, [scratch / segment_name(number)] if changes.any else []
                if segments and not publish(segments[0], shared / segments[0].name):
                    remove_path(segments[0])
                    segments = fetch_newer(shared, scratch, number)
                # Also without changes: those who wait learn that there is nothing new, and do not list again.
                turn.looked()
    return True, *_change(old, segments, names)


def _first(source: Source, order: Message, gone: list[int]) -> Any:
    """Return the units of the first draws that have not vanished; none if all have."""
    vanished = np.concatenate([source.vanished, np.array(gone, dtype=np.int64)])
    # Few units vanish as a rule, so the first step is small; it doubles for sources of which most have vanished.
    draws, start, count = source.order(**order), 0, 16 * PROBED
    while True:
        units = draws[np.arange(start, min(source.units, start + count))]
        there = units[~np.isin(units, vanished)]
        start += count
        if len(there) or start >= source.units:
            return there[:PROBED]
        count = min(2 * count, _AT_ONCE)


def _change(old: SegmentedListing, folders: list[Path], names: tuple[str, ...]) -> tuple[ListingChange, list[int]]:
    """Return the difference that the segments in ``folders`` make, and the units that have vanished."""
    vanished: list[int] = []
    steps, after = [], old
    for folder in folders:
        after = SegmentedListing([*after.parts, Listing.open(folder)])
        steps.append((folder.name, after.units, after.identity))
        vanished += load_array(folder / "vanished.npy").tolist()
    change = ListingChange(added=after.units - old.units, vanished=len(vanished), names=names, segments=tuple(steps))
    return change, vanished
