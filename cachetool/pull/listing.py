"""What the listing process of a pull does: list a source, or go on listing it, and look at its first samples.

These are the targets of tasks (:mod:`cachetool.proc`), as those of :mod:`cachetool.pull.worker`::

    prepare   not listed yet      -> all of it, or with `early` its first segment
              listed, `refresh`   -> all of it again, and a segment of what changed
              first draws         -> schema, mean size
    list_on   segment after segment into the cache, while samplers draw from those that are there
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from cachetool.cache import CacheDir
from cachetool.cache.growth import grow_source
from cachetool.core.errors import AccessDenied, BadObject, NotFound, Unreachable, UsageError
from cachetool.proc.arrays import load_array
from cachetool.proc.scratch import listing_scratch
from cachetool.proc.task import Channel, Message
from cachetool.sources import RateLimit, Source, SourceOptions, list_source, open_source
from cachetool.sources.listing import TABLE_FILE, Listing
from cachetool.sources.looked import LookedAt
from cachetool.sources.registry import refuse_empty
from cachetool.sources.segments import EarlyListing, SegmentedListing, last_key, segment_name, write_changes

__all__ = ["PROBED", "list_on", "naming_skip", "pace_of", "prepare"]

PROBED = 64
"""The schema is fixed from this many first draws."""
_AT_ONCE = 2**20
"""Draws that are looked through at once for some that have not vanished."""


def prepare(
    channel: Channel,
    *,
    url: str,
    listing: str,
    options: Message,
    order: Message,
    units: int | None,
    skip_bad: bool,
    refresh: str | None,
    early: int | None,
    pace: Message | None,
    looked: str | None,
) -> Message:
    """List ``url`` into the folder ``listing`` unless it is there, and find the schema of its first draws.

    ``order`` are the arguments of :meth:`Source.order`, ``units`` how many the cache knows of, ``refresh`` a folder
    for what a new listing finds, ``pace`` the arguments of :class:`RateLimit`, ``looked`` the folder for what is looked
    at. Gives url (redacted), identity, units,
    samples, schema, ``mean``, the mean bytes of values of a sample, ``per_unit``, the samples of a unit,
    ``left_out``, what is in no sample, ``whole``, whether the listing is, and ``change``, what a refresh found.
    """
    folder, parsed = Path(listing), SourceOptions.from_json(options)
    whole, change = True, None

    def progress(count: int) -> None:
        channel.send({"listed": count})

    gone: list[int] = []
    if not (folder / "listing.json").exists():
        if early is None:
            list_source(url, folder, parsed, progress=progress)
        else:
            with EarlyListing(url, parsed, size=early) as listed:
                refuse_empty(listed.write(folder, progress=progress))
                whole = listed.ended
    elif refresh is not None:
        if (folder / TABLE_FILE).exists():
            raise UsageError("--refresh is for folders of objects; draw files that changed into another --dataset")
        fresh = list_source(url, Path(refresh, "fresh"), parsed, progress=progress)
        change = _changes(SegmentedListing.open(folder, units=units), fresh, Path(refresh, "segment"))
        gone = load_array(Path(refresh, "segment", "vanished.npy")).tolist()
    through = (lambda store: store) if looked is None else LookedAt(Path(looked)).kept_of
    source = open_source(url, folder, parsed, units=units, pace=pace_of(pace), through=through)
    probing = source
    try:
        probed = _first(source, order, gone)
        if refresh is not None and change is not None and not len(probed):  # all is gone: what came tells
            probing = open_source(url, Path(refresh, "segment"), parsed, pace=pace_of(pace))
            probed = probing.order(**{**order, "cuts": ()})[np.arange(min(probing.units, PROBED))]
        channel.send({"probing": len(probed)})
        with naming_skip(skip_bad=skip_bad):
            probe = probing.probe(probed, skip_bad=skip_bad)
        return {
            "url": source.url,
            "identity": source.identity,
            "units": source.units,
            "samples": source.samples,
            "schema": probe.schema.to_json(),
            "mean": probe.mean_bytes,
            "per_unit": probe.per_unit,
            "left_out": probe.left_out,
            "whole": whole,
            "change": change,
        }
    finally:
        probing.close()
        source.close()


def pace_of(value: Message | None) -> RateLimit | None:
    """The limit that a task names, if it names one."""
    return None if value is None else RateLimit(Path(value["path"]), value["rate"])


@contextlib.contextmanager
def naming_skip(*, skip_bad: bool) -> Iterator[None]:
    """Around the reading of samples: the error of one that cannot be used says how to go on without it. Where the store
    refuses an object, the error is the store's, as it may come later."""
    try:
        yield
    except (BadObject, NotFound) as error:
        cause = error.__cause__
        if isinstance(cause, AccessDenied | Unreachable) and not skip_bad:
            raise type(cause)(
                f"{cause};\nother objects come: leave such out, up to 1 % of all, with --on-error skip"
            ) from error
        if skip_bad or " --" in str(error):  # it says what to do; the name of an object may have such dashes, too
            raise
        again = "list again with --refresh, or " if isinstance(error, NotFound) else ""
        raise type(error)(f"{error};\n{again}leave such out, up to 1 % of all, with --on-error skip") from error


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


def _changes(old: SegmentedListing, fresh: Listing, folder: Path) -> Message:
    found = write_changes(folder, old, fresh)
    after = SegmentedListing([*old.parts, Listing.open(folder)])
    return {
        "added": found.added,
        "vanished": found.vanished,
        "names": list(found.names),
        "units": after.units,
        "identity": after.identity,
        "name": segment_name(len(old.parts)),
    }


def list_on(channel: Channel, *, root: str, url: str, source: str, options: Message, early: int) -> Message:
    """Go on with a listing that is not whole until it is; each segment can be drawn from at once."""
    parsed = SourceOptions.from_json(options)
    with CacheDir(Path(root)) as cache, listing_scratch() as scratch:
        row = cache.source(source)
        assert row is not None
        parts = SegmentedListing.open(cache.listing(source), units=row.units).parts
        after = last_key(parts[-1].folder)
        count = len(parts)
        listed = sum(part.objects for part in parts)
        with EarlyListing(url, parsed, size=early, after=after) as more:
            while not row.complete:
                folder = Path(scratch, segment_name(count))
                more.write(folder, progress=lambda keys: channel.send({"listed": listed + keys}))
                whole = [*parts, Listing.open(folder)]
                identity = SegmentedListing(whole).identity
                units = sum(part.units for part in whole)
                row = grow_source(
                    cache, row, folder, segment_name(count), units=units, identity=identity, complete=more.ended
                )
                parts, count = SegmentedListing.open(cache.listing(source), units=row.units).parts, count + 1
    return {}
