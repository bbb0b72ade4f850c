"""The source that reads a place: a folder of objects, or files of many samples (:mod:`~cachetool.sources.files`)."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

from cachetool.core.errors import NotFound, UsageError
from cachetool.proc.folders import remove_path
from cachetool.sources.base import Source
from cachetool.sources.keys import Stem
from cachetool.sources.listing import TABLE_FILE, Listing, write_listing
from cachetool.sources.options import SourceOptions
from cachetool.sources.rate_limit import RateLimit, paced
from cachetool.sources.segments import SegmentedListing
from cachetool.stores import Limits, Object, Store, redact
from cachetool.stores.registry import open_store

__all__ = ["list_source", "open_source", "refuse_empty"]


def list_source(
    url: str,
    folder: Path,
    options: SourceOptions | None = None,
    *,
    limits: Limits | None = None,
    progress: Callable[[int], None] | None = None,
    notice: Callable[[list[Object]], None] = lambda page: None,
) -> Listing:
    """List ``url`` into ``folder``, which is made and is whole once ``listing.json`` is in it.

    ``progress`` is told now and then how many objects have been seen, ``notice`` which. Raises :class:`NotFound` when
    there is no sample, :class:`UsageError` for a URL that cannot be one, and the errors of
    :func:`cachetool.stores.open_store`.
    """
    from cachetool.sources.kinds import Census, locate

    options = options or SourceOptions()
    stem = Stem(options.stem)
    located = locate(url) if options.read_as != "objects" else None
    store = open_store(located[0] if located else url, limits=limits)
    try:
        if located is not None:
            from cachetool.sources.file_listing import list_files

            item = store.find(located[1])
            return list_files(store, folder, iter([[item]]), located[2], options, progress=progress, alone=True)
        census = Census(store.url)

        def seen() -> Iterator[list[Object]]:
            for page in census.count(store.list()):
                notice(page)
                yield page

        listing = write_listing(
            folder, seen(), stem=stem, url=store.url, left_out=lambda: store.left_out, progress=progress
        )
        if (kind := census.kind(options.read_as)) is not None:
            from cachetool.sources.file_listing import list_files

            # Only now is it known that these are files: listed again, without grouping by names.
            remove_path(folder)
            listing = list_files(store, folder, store.list(), kind, options, progress=progress)
    finally:
        store.close()
    refuse_empty(listing)
    return listing


def refuse_empty(listing: Listing) -> None:
    """Raise :class:`NotFound` when a listing has no sample, with what was left out."""
    if listing.units == 0:
        reasons = ", ".join(f"{count} {reason}" for reason, count in sorted(listing.left_out.items()))
        raise NotFound(f"no samples under {listing.url}{f' (left out: {reasons})' if reasons else ''}")


def open_source(
    url: str,
    folder: Path,
    options: SourceOptions | None = None,
    *,
    units: int | None = None,
    pace: RateLimit | None = None,
    limits: Limits | None = None,
    through: Callable[[Store], Store] = lambda store: store,
) -> Source:
    """The source at ``url`` as it was listed into ``folder``, with the first ``units`` of its units where it has grown
    since. Nothing is fetched yet. ``pace`` is asked before each request, which goes ``through`` another store before.

    Raises :class:`CorruptError` for a listing that is not whole, :class:`UsageError` for one grouped otherwise, and the
    errors of :func:`cachetool.stores.open_store`.
    """
    from cachetool.sources.objects import ObjectsSource

    options = options or SourceOptions()
    if (folder / TABLE_FILE).exists():
        from cachetool.sources.files import open_files_source
        from cachetool.sources.kinds import locate

        located = locate(url)
        return open_files_source(
            through(paced(open_store(located[0] if located else url, limits=limits), pace)),
            folder,
            options,
            url=redact(url if "://" in url else os.path.abspath(url)),
        )
    listing = SegmentedListing.open(folder, units=units)
    if listing.stem != options.stem:
        raise UsageError(
            f"{redact(url)} was listed with --stem {listing.stem}, not {options.stem}; use another --dataset or cache"
        )
    return ObjectsSource(through(paced(open_store(url, limits=limits), pace)), listing, options)
