"""Which source reads which place. Today every place is a folder of objects; files that hold many samples come later."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from cachetool.errors import NotFound, UsageError
from cachetool.sources.base import Source
from cachetool.sources.keys import Stem
from cachetool.sources.listing import Listing, write_listing
from cachetool.sources.options import SourceOptions
from cachetool.stores import Limits, Object, open_store, redact

__all__ = ["list_source", "open_source"]


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
    stem = Stem((options or SourceOptions()).stem)
    store = open_store(url, limits=limits)

    def pages() -> Iterator[list[Object]]:
        for page in store.list():
            notice(page)
            yield page

    try:
        listing = write_listing(
            folder, pages(), stem=stem, url=store.url, left_out=lambda: store.left_out, progress=progress
        )
    finally:
        store.close()
    if listing.units == 0:
        reasons = ", ".join(f"{count} {reason}" for reason, count in sorted(listing.left_out.items()))
        raise NotFound(f"no samples under {store.url}{f' (left out: {reasons})' if reasons else ''}")
    return listing


def open_source(
    url: str, folder: Path, options: SourceOptions | None = None, *, limits: Limits | None = None
) -> Source:
    """The source at ``url`` as it was listed into ``folder``. Nothing is fetched yet.

    Raises :class:`CorruptError` for a listing that is not whole, :class:`UsageError` for one grouped otherwise, and the
    errors of :func:`cachetool.stores.open_store`.
    """
    from cachetool.sources.objects import ObjectsSource

    options = options or SourceOptions()
    listing = Listing.open(folder)
    if listing.stem != options.stem:
        raise UsageError(
            f"{redact(url)} was listed with --stem {listing.stem}, not {options.stem}; use another --dataset or cache"
        )
    return ObjectsSource(open_store(url, limits=limits), listing, options)
