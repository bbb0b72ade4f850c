"""The source that reads a place: a folder of objects, or files of many samples (:mod:`~cachetool.sources.files`)."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from cachetool.core.errors import NotFound, SourceError, UsageError
from cachetool.core.text import shown
from cachetool.proc.folders import MAX_JSON, remove_path
from cachetool.sources.base import Source
from cachetool.sources.keys import Stem
from cachetool.sources.listing import TABLE_FILE, Listing, write_listing
from cachetool.sources.options import SourceOptions
from cachetool.sources.rate_limit import RateLimit, paced
from cachetool.sources.segments import SegmentedListing
from cachetool.stores import Limits, Object, Store, local_path, redact, split_url
from cachetool.stores.base import SCHEMES
from cachetool.stores.registry import open_store

if TYPE_CHECKING:
    from cachetool.sources.file_listing import Survey
    from cachetool.sources.kinds import Kind

__all__ = ["check_place", "list_source", "open_source", "refuse_empty"]


def check_place(url: str) -> None:
    """Raise :class:`UsageError` for the name of a source that is none, or that has a slash too few to be a URL."""
    if not url.strip():
        raise UsageError("the source is empty; name a folder or a URL such as s3://bucket/prefix/")
    scheme, colon, address = url.partition(":")
    if colon and scheme in SCHEMES and not address.startswith("//") and not Path(url).exists():
        slashes = "///" if scheme == "file" else "//"  # what follows two of them is a host
        meant = redact(f"{scheme}:{slashes}{address.lstrip('/')}")
        raise UsageError(f"{scheme}:... is no folder that is there, and a URL has two slashes; did you mean {meant} ?")


def list_source(
    url: str,
    folder: Path,
    options: SourceOptions | None = None,
    *,
    limits: Limits | None = None,
    progress: Callable[[int], None] | None = None,
    survey: Survey = "probe",
) -> Listing:
    """List ``url`` into ``folder``, which is made and is whole once ``listing.json`` is in it.

    ``progress`` is told now and then how many objects have been seen. ``survey="all"``: samples will all be asked for,
    in order, so that they are all counted. Raises :class:`NotFound` when there is no sample, :class:`UsageError` for a
    URL that cannot be one, and the errors of :func:`cachetool.stores.open_store`.
    """
    from cachetool.sources.kinds import locate

    options = options or SourceOptions()
    lister = _Lister(folder, options, limits, progress, survey)
    located = locate(url) if options.read_as != "objects" else None
    missing: NotFound | None = None
    if located is not None:
        try:
            return lister.one_file(*located)
        except NotFound as error:
            if is_local(url) or lister.is_begun:
                raise
            missing = error  # a folder may be called so, too
    try:
        return lister.place(url)
    except SourceError as error:  # some servers have no list of what lies below a file
        if options.read_as != "objects" and missing is None and (located := _by_head(url, limits)) is not None:
            return lister.one_file(*located)
        raise missing or error from None


class _Lister:
    """Lists one place into a folder."""

    def __init__(
        self,
        folder: Path,
        options: SourceOptions,
        limits: Limits | None,
        progress: Callable[[int], None] | None,
        survey: Survey,
    ) -> None:
        self._folder, self._options, self._limits = folder, options, limits
        self._progress, self._survey = progress, survey
        self.is_begun = False
        """Whether something was there to be listed."""

    def one_file(self, place: str, name: str, kind: Kind) -> Listing:
        """The file ``name`` at ``place``."""
        with contextlib.closing(open_store(place, limits=self._limits)) as store:
            item = store.find(name)
            self.is_begun = True
            listing = self._files(store, iter([[item]]), kind, place, alone=True)
        refuse_empty(listing)
        return listing

    def place(self, url: str) -> Listing:
        """All that lies at ``url``."""
        from cachetool.sources.kinds import Census

        with contextlib.closing(open_store(url, limits=self._limits)) as store:
            census = Census(store.url)
            listing = write_listing(
                self._folder, census.count(store.list()), stem=Stem(self._options.stem), url=store.url,
                left_out=lambda: store.left_out, progress=self._progress,
            )  # fmt: skip
            if (kind := census.kind(self._options.read_as)) is not None:
                # Only now is it known that these are files: listed again, without grouping by names.
                remove_path(self._folder)
                listing = self._files(store, store.list(), kind, url)
            elif census.exported is not None and census.exported.size <= MAX_JSON:
                _refuse_custom(bytes(store.get(census.exported)), store.url)
        refuse_empty(listing)
        return listing

    def _files(
        self, store: Store, pages: Iterable[list[Object]], kind: Kind, place: str, *, alone: bool = False
    ) -> Listing:
        from cachetool.sources.file_listing import list_files

        return list_files(
            store, self._folder, pages, kind, self._options, progress=self._progress, alone=alone,
            survey=self._survey, local=_folder_of(place),
        )  # fmt: skip


def _refuse_custom(raw: bytes, place: str) -> None:
    """Raise :class:`UsageError` for the ``dataset.json`` of a folder in a format of somebody's package: its files are
    no kind that is read here, and would be taken for objects."""
    from cachetool.sources.kinds import kinds

    try:
        value = json.loads(raw)
    except (ValueError, RecursionError):
        return
    if isinstance(value, dict) and {"layout", "format", "parts"} <= value.keys() and value["format"] not in kinds():
        raise UsageError(
            f"{place} is an exported folder in the format {shown(value['format'])}, which the loaders read, but no kind"
            " of source; convert the cache that it came from, or add a kind (docs/formats.md)"
        )


def is_local(url: str) -> bool:
    """Whether ``url`` is a place of this machine."""
    return split_url(url)[0] in ("", "file")


def _folder_of(place: str) -> Path | None:
    return Path(os.path.realpath(local_path(place))) if is_local(place) else None


def _by_head(url: str, limits: Limits | None) -> tuple[str, str, Kind] | None:
    """For the URL of one file without a telling name: that of its folder, its name there, and its kind."""
    from cachetool.sources.kinds import HEAD, kind_of_head, parent_of

    place, name = parent_of(url)
    if not name or is_local(url):
        return None
    with contextlib.closing(open_store(place, limits=limits)) as store, contextlib.suppress(SourceError):
        item = store.find(name)
        kind = kind_of_head(bytes(store.get_range(item, 0, min(HEAD, item.size)))) if item.size > 0 else None
        return None if kind is None else (place, name, kind)
    return None


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
    number: bool = True,
) -> Source:
    """The source at ``url`` as it was listed into ``folder``, with the first ``units`` of its units where it has grown
    since. Nothing is fetched yet. ``pace`` is asked before each request, which goes ``through`` another store before.
    ``number``: whether samples of files that have no keys get one of file and row.

    Raises :class:`CorruptError` for a listing that is not whole, :class:`UsageError` for one grouped otherwise, and the
    errors of :func:`cachetool.stores.open_store`.
    """
    options = options or SourceOptions()
    if (folder / TABLE_FILE).exists():
        from cachetool.sources.files import open_files_source
        from cachetool.sources.kinds import locate, parent_of

        place = url
        if Listing.open(folder).stem.startswith("file:"):
            located = locate(url)
            place = located[0] if located else parent_of(url)[0]
        return open_files_source(
            through(paced(open_store(place, limits=limits), pace)),
            folder,
            options,
            url=redact(url if "://" in url else os.path.abspath(url)),
            local=_folder_of(place),
            number=number,
        )
    from cachetool.sources.objects import ObjectsSource

    listing = SegmentedListing.open(folder, units=units)
    if listing.stem != options.stem:
        raise UsageError(
            f"{redact(url)} was listed with --stem {listing.stem}, not {options.stem}; use another --dataset or cache"
        )
    return ObjectsSource(through(paced(open_store(url, limits=limits), pace)), listing, options)
