"""The source that reads a place: a folder of objects, or files of many samples (:mod:`~cachetool.sources.files`)."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from cachetool.core.errors import BadObject, CorruptError, NotFound, SourceError, Unreachable, UsageError
from cachetool.core.text import shown
from cachetool.formats.exported import parse_dataset
from cachetool.proc.folders import MAX_JSON, remove_path
from cachetool.sources.base import Source
from cachetool.sources.braces import Braces, braces_of
from cachetool.sources.contents import HEAD
from cachetool.sources.globs import Selection
from cachetool.sources.grouping import Grouping, Kept
from cachetool.sources.listing import TABLE_FILE, Listing, write_listing
from cachetool.sources.options import OF_FILES, READ_AS, SourceOptions
from cachetool.sources.rate_limit import RateLimit, paced
from cachetool.sources.segments import SegmentedListing
from cachetool.sources.store_list import StoreList
from cachetool.sources.value_format import is_raw
from cachetool.sources.zarr_keys import keys_of_zarr, without_mark
from cachetool.stores import Limits, Object, Store, local_path, redact, split_url
from cachetool.stores.base import HTTP_SCHEMES, SCHEMES, LeftOut, check_listed
from cachetool.stores.registry import open_store

if TYPE_CHECKING:
    from cachetool.sources.file_listing import Survey
    from cachetool.sources.kinds import Kind

    Located = tuple[str, str, Kind]

__all__ = ["check_place", "list_source", "open_source", "refuse_empty"]


_LONGEST_NAME = 80
_SHOWN = 3
"""Names of what was left out in the error of a place without samples."""


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
    kept: Kept | None = None,
    skip_bad: bool = False,
) -> Listing:
    """List ``url`` into ``folder``, which is made and is whole once ``listing.json`` is in it.

    ``progress`` is told now and then how many objects have been seen. ``survey="all"``: samples will all be asked for,
    in order, so that they are all counted. ``kept``: the fields that an earlier listing of the same objects kept.
    ``skip_bad``: keys that no request can name are left out by name. Raises :class:`NotFound` when there is no sample,
    :class:`UsageError` for a URL that cannot be one and for globs that take nothing, and the errors of
    :func:`cachetool.stores.open_store`.
    """
    from cachetool.sources.kinds import check_read_as, locate, refuse_file

    options, url = options or SourceOptions(), without_mark(url)
    check_read_as(options.read_as)
    lister = _Lister(folder, options, limits, progress, survey, kept=kept, skip_bad=skip_bad)
    if (braces := braces_of(url)) is not None:
        return lister.place(braces.place, braces)
    located = _as_kind(url, locate(url), options.read_as) if options.read_as != "objects" else None
    if located is None and is_raw(options.value_format) and options.read_as != "objects":
        located = _raw_file(url)
    missing: NotFound | None = None
    if located is not None:
        try:
            return lister.one_file(*located, named=url)
        except NotFound as error:
            if is_local(url) or lister.is_begun:
                raise
            missing = error  # a folder may be called so, too
    elif is_local(url) and options.read_as != "objects":
        refuse_file(local_path(url))
    try:
        return lister.place(url)
    except SourceError as error:  # some servers have no list of what lies below a file, or in a folder
        if (listing := lister.zarr_without_list(url, error)) is not None:
            return listing
        wanted = options.read_as != "objects" and missing is None
        if wanted and (located := _by_head(url, limits, options.read_as)) is not None:
            remove_path(folder)  # an object store lists nothing below a file, and that is written by now
            return lister.one_file(*located, named=url)
        if options.include and split_url(url)[0] in HTTP_SCHEMES and "manifest" not in str(error):
            raise type(error)(
                f"{error};\na glob needs a list of the names there: an index page, or a manifest (.txt, .jsonl)"
            ) from error
        raise missing or error from None


def _as_kind(url: str, located: Located | None, read_as: str | None) -> Located | None:
    """Where a file lies, and its kind: the one asked for, whatever its name."""
    from cachetool.sources.kinds import kind_named

    if read_as in (None, *OF_FILES):
        return located
    kind = kind_named(read_as)
    is_file = is_local(url) and os.path.isfile(local_path(url))
    if (kind.marks and not kind.by_path) or (is_local(url) and not is_file):
        return located if located is not None and located[2] is kind else None
    if located is None and is_file:
        path = local_path(url)
        return str(path.parent), path.name, kind
    return None if located is None else (*located[:2], kind)


class _Files(Exception):
    """Raised at the end of a listing: the names are those of files of this kind."""

    def __init__(self, kind: Kind) -> None:
        self.kind = kind


class _Lister:
    """Lists one place into a folder."""

    def __init__(
        self,
        folder: Path,
        options: SourceOptions,
        limits: Limits | None,
        progress: Callable[[int], None] | None,
        survey: Survey,
        *,
        kept: Kept | None,
        skip_bad: bool,
    ) -> None:
        self._kept, self._skip_bad = kept, skip_bad
        self._folder, self._options, self._limits = folder, options, limits
        self._progress, self._survey = progress, survey
        self._chosen = Selection(options)
        self._is_listed = False
        self.is_begun = False
        """Whether something was there to be listed."""

    def one_file(self, place: str, name: str, kind: Kind, *, named: str) -> Listing:
        """The file ``name`` at ``place``, of the source that a user ``named``; its first bytes decide whether it is of
        that kind."""
        from cachetool.sources.kinds import kind_by

        follow_links = self._options.follow_links or _named_link(named)
        with contextlib.closing(open_store(place, limits=self._limits, follow_links=follow_links)) as store:
            item = store.find(name)
            self.is_begun = True
            if not is_local(place):
                kind = kind_by(name, _head_of(store, item)) or kind
            listing = self._files(store, iter([[item]]), kind, place, alone=True)
            self._chosen.refuse_nothing(f"{store.url.rstrip('/')}/{name}")
        refuse_empty(listing)
        return listing

    def place(self, url: str, braces: Braces | None = None) -> Listing:
        """All that lies at ``url``, or what ``braces`` name there."""
        from cachetool.sources.kinds import RAW, Census

        access = {"follow_links": self._options.follow_links, "skip_unusable": self._skip_bad}
        purpose = "" if self._kept is None else "refresh"
        with (
            contextlib.closing(open_store(url, limits=self._limits, **access)) as store,
            StoreList(store, workers=self._options.list_workers, purpose=purpose) as of_store,
        ):
            census, grouping = Census(store.url), Grouping(self._options, kept=self._kept, bounded=False)
            unusable = LeftOut()
            listed = of_store.pages if braces is None else functools.partial(braces.pages, store)

            def pages() -> Iterator[list[Object]]:
                names = _usable(listed(), store.url, unusable) if self._skip_bad else listed()
                yield from census.count(self._chosen.of(names))
                self._chosen.refuse_nothing(store.url, is_zarr=census.is_zarr)
                census.look_inside(lambda item: _head_of(store, item), self._options.read_as)
                if (kind := RAW if self._reads_raw else census.kind(self._options.read_as)) is not None:
                    raise _Files(kind)

            try:
                listing = write_listing(
                    self._folder, pages(), stem=grouping.stem, url=store.url,
                    left_out=lambda: unusable.joined(self._passed_over(of_store)), progress=self._progress,
                    inside=lambda: census.inside, grouping=grouping,
                )  # fmt: skip
            except _Files as files:
                self._is_listed = True
                # Only now is it known that these are files: listed again, without grouping by names.
                remove_path(self._folder)
                listing = self._files(store, listed(), files.kind, url, learned=census.learned, passed_over=of_store)
            else:
                self._is_listed = bool(listing.objects or listing.left_out)
                if census.exported is not None and census.exported.size <= MAX_JSON:
                    _refuse_custom(bytes(store.get(census.exported)), store.url)
        refuse_empty(listing)
        return listing

    def zarr_without_list(self, url: str, error: SourceError) -> Listing | None:
        """The Zarr at ``url``, whose place cannot be listed because of ``error``; None where none lies."""
        if self._is_listed or self._options.read_as == "objects" or is_local(url):
            return None
        if isinstance(error, BadObject | Unreachable):
            return None
        from cachetool.sources.kinds import kind_named

        with contextlib.closing(open_store(url, limits=self._limits)) as store:
            try:
                pages = keys_of_zarr(store, self._options)
            except Unreachable:  # the error of the list says more
                return None
            if pages is None:
                return None
            remove_path(self._folder)
            listing = self._files(store, pages, kind_named("zarr"), url)
        refuse_empty(listing)
        return listing

    @property
    def _reads_raw(self) -> bool:
        return self._options.read_as == "files" and is_raw(self._options.value_format)

    def _passed_over(self, store: Store | StoreList) -> LeftOut:
        return LeftOut().joined(store.left_out).joined(self._chosen.left_out())

    def _files(
        self,
        store: Store,
        pages: Iterable[list[Object]],
        kind: Kind,
        place: str,
        *,
        alone: bool = False,
        learned: Mapping[str, Kind] | None = None,
        passed_over: StoreList | None = None,
    ) -> Listing:
        from cachetool.sources.file_listing import list_files

        return list_files(
            store, self._folder, self._chosen.of(pages), kind, self._options, progress=self._progress, alone=alone,
            survey=self._survey, local=_folder_of(place), learned=learned or {},
            left_out=lambda: self._passed_over(passed_over or store),
        )  # fmt: skip


def _usable(pages: Iterable[list[Object]], url: str, left_out: LeftOut) -> Iterator[list[Object]]:
    """The pages of a listing without what no store can mean, such as names without end, which goes to ``left_out``."""
    for page in pages:
        usable = []
        for item in page:
            try:
                check_listed(item, url)
                usable.append(item)
            except BadObject as error:
                left_out.add(
                    item.key[:_LONGEST_NAME], "objects that cannot be asked for", str(error).partition(";\n")[0]
                )
        yield usable


def _refuse_custom(raw: bytes, place: str) -> None:
    """Raise :class:`UsageError` for the ``dataset.json`` of a folder in a format of somebody's package: its files are
    no kind that is read here, and would be taken for objects."""
    from cachetool.sources.kinds import kinds

    try:
        format = parse_dataset(raw).format
    except (ValueError, CorruptError):
        return
    if format not in kinds():
        raise UsageError(
            f"{place} is an exported folder in the format {shown(format)}, which the loaders read, but no kind"
            " of source; convert the cache that it came from, or add a kind (docs/formats.md)"
        )


def is_local(url: str) -> bool:
    """Whether ``url`` is a place of this machine."""
    return split_url(url)[0] in ("", "file")


def _named_link(url: str) -> str:
    """The name of the link to a file that a user named as the source, which is followed wherever it leads; empty for
    anything else: of a folder only the folder was named."""
    path = local_path(url) if is_local(url) else None
    return path.name if path is not None and path.is_symlink() and not path.is_dir() else ""


def _folder_of(place: str) -> Path | None:
    return Path(os.path.realpath(local_path(place))) if is_local(place) else None


def _raw_file(url: str) -> tuple[str, str, Kind] | None:
    """A single file of raw numbers: where it lies, its name there, and its kind."""
    from cachetool.sources.kinds import RAW, parent_of

    if is_local(url):
        path = local_path(url)
        return (str(path.parent), path.name, RAW) if path.is_file() else None
    place, name = parent_of(url)
    return (place, name, RAW) if "." in name else None


def _by_head(url: str, limits: Limits | None, read_as: str | None) -> Located | None:
    """For the URL of one file without a telling name: that of its folder, its name there, and its kind, or the kind
    that is asked for."""
    from cachetool.sources.kinds import kind_named, kind_of_head, parent_of

    place, name = parent_of(url)
    if not name or is_local(url):
        return None
    with contextlib.closing(open_store(place, limits=limits)) as store, contextlib.suppress(SourceError):
        item = store.find(name)
        if read_as is not None and read_as not in READ_AS:
            return place, name, kind_named(read_as)
        kind = kind_of_head(_head_of(store, item))
        return None if kind is None else (place, name, kind)
    return None


def _head_of(store: Store, item: Object) -> bytes:
    """The first bytes of an object; none where they are not to be had."""
    with contextlib.suppress(SourceError):  # a server without ranges; who reads the object says so
        if item.size < 0:
            item = store.find(item.key)
        if item.size > 0:
            return bytes(store.get_range(item, 0, min(HEAD, item.size)))
    return b""


def refuse_empty(listing: Listing) -> None:
    """Raise :class:`NotFound` when a listing has no sample, with what was left out."""
    if listing.units == 0:
        reasons = ", ".join(f"{count} {reason}" for reason, count in sorted(listing.left_out.items()))
        named = "; ".join(f"{name!r}: {why}" for name, why in listing.left_out.listed()[:_SHOWN])
        left_out = (f" (left out: {reasons})" if reasons else "") + (f";\n{named}" if named else "")
        raise NotFound(f"no samples under {listing.url}{left_out}")


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
    options, url = options or SourceOptions(), without_mark(url)
    braces = braces_of(url)
    place = url if braces is None else braces.place
    if (folder / TABLE_FILE).exists():
        from cachetool.sources.files import open_files_source
        from cachetool.sources.kinds import locate, parent_of

        if Listing.open(folder).stem.startswith("file:"):
            located = locate(url) or (_raw_file(url) if is_raw(options.value_format) else None)
            place = located[0] if located else parent_of(url)[0]
        store = open_store(place, limits=limits, follow_links=options.follow_links or _named_link(url))
        return open_files_source(
            through(paced(store, pace)),
            folder,
            options,
            url=redact(url if "://" in url else os.path.abspath(url)),
            local=_folder_of(place),
            number=number,
        )
    from cachetool.sources.objects import ObjectsSource

    listing = SegmentedListing.open(folder, units=units)
    if options.stem is not None and listing.stem != options.stem:
        raise UsageError(
            f"{redact(url)} was listed with --stem {listing.stem}, not {options.stem}; use another --dataset or cache"
        )
    store = open_store(place, limits=limits, follow_links=options.follow_links)
    return ObjectsSource(through(paced(store, pace)), listing, options)
