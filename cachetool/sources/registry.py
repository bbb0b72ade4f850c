"""The choice of the source that reads a place: a folder of objects, or files of many samples
(:mod:`~cachetool.sources.files`)."""

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
from cachetool.stores.base import HTTP_SCHEMES, SCHEMES, Batch, LeftOut, check_listed
from cachetool.stores.registry import open_store

if TYPE_CHECKING:
    from cachetool.sources.file_listing import Survey
    from cachetool.sources.kinds import Kind

    Located = tuple[str, str, Kind]

__all__ = ["check_place", "list_source", "open_source", "refuse_empty"]


_LONGEST_NAME = 80
"""Most characters of a key that are kept when the key cannot be used."""
_SHOWN = 3
"""Number of left-out names in the error about a place without samples."""


def check_place(url: str) -> None:
    """Raise an error if a name cannot be a source.

    Args:
        url: The folder, file or URL that a user named.

    Raises:
        UsageError: The name is empty, or looks like a URL whose slashes are missing.

    Example:
        >>> check_place("s3://bucket/train/")
    """
    if not url.strip():
        raise UsageError("the source is empty; name a folder or a URL such as s3://bucket/prefix/")
    scheme, colon, address = url.partition(":")
    if colon and scheme in SCHEMES and not address.startswith("//") and not Path(url).exists():
        slashes = "///" if scheme == "file" else "//"  # what follows two of them is a host
        meant = redact(f"{scheme}:{slashes}{address.lstrip('/')}")
        raise UsageError(f"folder {scheme}:... does not exist, and a URL needs two slashes; did you mean {meant} ?")


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
    """List a source into a folder.

    Args:
        url: The folder, file or URL to list.
        folder: Folder of the listing. It is created, and complete once ``listing.json`` exists in it.
        options: Options of the source. Default: :class:`SourceOptions` without arguments.
        limits: Time limits and retries of requests. Default: those of the store.
        progress: Function that is called now and then with the number of objects seen. Default: none.
        survey: ``"all"`` if all samples will be read in order, so all files are counted now. Default ``"probe"``.
        kept: Fields that an earlier listing of the same objects kept. Default: decided by this listing.
        skip_bad: True leaves out keys that no request can name, and reports them by name. Default False.

    Returns:
        The listing, mapped from ``folder``.

    Raises:
        NotFound: There is no sample.
        UsageError: ``url`` cannot be a source, or globs take nothing.
        SourceError: The store cannot be listed; see :func:`cachetool.stores.open_store`.

    Example:
        listing = list_source("photos/", Path("listing"), SourceOptions(decode="image"))
        print(listing.units, "samples")
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
            # A remote folder may have a name such as train.tar, so the place is listed before the error is raised.
            missing = error
    elif is_local(url) and options.read_as != "objects":
        refuse_file(local_path(url))
    try:
        return lister.place(url)
    except SourceError as error:
        # Some servers have no list of a file's contents or of a folder. A Zarr, and a file whose first bytes tell its
        # kind, can be read without a list.
        if (listing := lister.zarr_without_list(url, error)) is not None:
            return listing
        wanted = options.read_as != "objects" and missing is None
        if wanted and (located := _by_head(url, limits, options.read_as)) is not None:
            # An object store lists nothing below a file, so an empty listing has been written by now.
            remove_path(folder)
            return lister.one_file(*located, named=url)
        if options.include and split_url(url)[0] in HTTP_SCHEMES and "manifest" not in str(error):
            raise type(error)(
                f"{error};\na glob needs a list of names: an index page or a manifest (.txt, .jsonl)"
            ) from error
        raise missing or error from None


def _as_kind(url: str, located: Located | None, read_as: str | None) -> Located | None:
    """Return the place, name and kind of a file; the kind is the one asked for, whatever the file's name."""
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
    """Raised at the end of a listing when its names are those of files of this kind."""

    def __init__(self, kind: Kind) -> None:
        self.kind = kind


class _Lister:
    """The listing of one place into a folder."""

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
        """True once an object of the source was found."""

    def one_file(self, place: str, name: str, kind: Kind, *, named: str) -> Listing:
        """List the file ``name`` at ``place``; ``named`` is the source as the user named it.

        The first bytes of a remote file decide its kind.
        """
        from cachetool.sources.kinds import kind_by

        # A link that the user named is followed without --follow-links, because the user chose its target.
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
        """List everything at ``url``, or what ``braces`` name there."""
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

            def pages() -> Iterator[Batch]:
                names = _usable(listed(), store.url, unusable) if self._skip_bad else listed()
                yield from census.count(self._chosen.of(names))
                self._chosen.refuse_nothing(store.url, is_zarr=census.is_zarr)
                census.look_inside(lambda item: _head_of(store, item), self._options.read_as)
                # Known only after the last key: bytes and counts of all files decide. The exception leaves
                # write_listing() with its temporary files deleted.
                if (kind := RAW if self._reads_raw else census.kind(self._options.read_as)) is not None:
                    raise _Files(kind)
                if self._options.block:
                    raise UsageError(
                        f"--block needs arrays in Zarr, HDF5, netCDF or .npy files, but each object of {store.url} is"
                        " a sample;\nleave --block out, or for .npy files add --read-as npy"
                    )
                if self._options.runs is not None:
                    raise UsageError(
                        f"--runs draws neighbouring rows of files of arrays or records, but each object of {store.url}"
                        " is a sample;\nleave --runs out"
                    )

            try:
                listing = write_listing(
                    self._folder, pages(), stem=grouping.stem, url=store.url,
                    left_out=lambda: unusable.joined(self._passed_over(of_store)), progress=self._progress,
                    inside=lambda: census.inside, grouping=grouping,
                )  # fmt: skip
            except _Files as files:
                self._is_listed = True
                # These are files of many samples. They are listed again without grouping by names; StoreList returns
                # its pages again without new requests.
                remove_path(self._folder)
                listing = self._files(store, listed(), files.kind, url, learned=census.learned, passed_over=of_store)
            else:
                self._is_listed = bool(listing.objects or listing.left_out)
                if census.exported is not None and census.exported.size <= MAX_JSON:
                    _refuse_custom(bytes(store.get(census.exported)), store.url)
        refuse_empty(listing)
        return listing

    def zarr_without_list(self, url: str, error: SourceError) -> Listing | None:
        """List the Zarr at ``url``, whose place cannot be listed because of ``error``; return None if there is none."""
        if self._is_listed or self._options.read_as == "objects" or is_local(url):
            return None
        if isinstance(error, BadObject | Unreachable):
            return None
        from cachetool.sources.kinds import kind_named

        with contextlib.closing(open_store(url, limits=self._limits)) as store:
            try:
                pages = keys_of_zarr(store, self._options)
            except Unreachable:
                # The error of the list is the better explanation.
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
        pages: Iterable[Batch],
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


def _usable(pages: Iterable[Batch], url: str, left_out: LeftOut) -> Iterator[Batch]:
    """Yield pages without objects that no store can request, such as names of unlimited length. Those go to
    ``left_out``."""
    for page in pages:
        usable = []
        for item in page:
            try:
                check_listed(item, url)
                usable.append(item)
            except BadObject as error:
                left_out.add(
                    item.key[:_LONGEST_NAME], "objects that cannot be requested", str(error).partition(";\n")[0]
                )
        yield usable


def _refuse_custom(raw: bytes, place: str) -> None:
    """Raise :class:`UsageError` for an exported folder in a format that another package adds."""
    from cachetool.sources.kinds import kinds

    try:
        format = parse_dataset(raw).format
    except (ValueError, CorruptError):
        return
    # No kind of source reads its files, so they would be stored as bytes of objects.
    if format not in kinds():
        raise UsageError(
            f"{place} is an exported folder in the format {shown(format)}, which the loaders read, but pull"
            " does not; convert the original cache to another format, or add a kind"
            " (docs/how-to/add-a-kind-of-file.md)"
        )


def is_local(url: str) -> bool:
    """Return True if ``url`` is a place on this machine."""
    return split_url(url)[0] in ("", "file")


def _named_link(url: str) -> str:
    """Return the name of the link to a file that a user named as the source; empty for anything else.

    Such a link is followed wherever it leads. If a folder was named, links inside of it are not.
    """
    path = local_path(url) if is_local(url) else None
    # Only this name is allowed: other links beside it stay closed.
    return path.name if path is not None and path.is_symlink() and not path.is_dir() else ""


def _folder_of(place: str) -> Path | None:
    """Return the real path of a local place; None for a remote one."""
    return Path(os.path.realpath(local_path(place))) if is_local(place) else None


def _raw_file(url: str) -> tuple[str, str, Kind] | None:
    """Return the place, name and kind of a single file of raw numbers."""
    from cachetool.sources.kinds import RAW, parent_of

    if is_local(url):
        path = local_path(url)
        return (str(path.parent), path.name, RAW) if path.is_file() else None
    place, name = parent_of(url)
    return (place, name, RAW) if "." in name else None


def _by_head(url: str, limits: Limits | None, read_as: str | None) -> Located | None:
    """Return the place, name and kind of one file whose name tells nothing.

    Its first bytes decide the kind, unless ``read_as`` names one.
    """
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
    """Return the first bytes of an object; none if they cannot be fetched."""
    # A server may refuse ranges. The error is raised later, when the object is read.
    with contextlib.suppress(SourceError):
        if item.size < 0:
            item = store.find(item.key)
        if item.size > 0:
            return bytes(store.get_range(item, 0, min(HEAD, item.size)))
    return b""


def refuse_empty(listing: Listing) -> None:
    """Raise an error if a listing has no sample.

    Args:
        listing: The listing to check.

    Raises:
        NotFound: There is no sample; the message says what was left out and why.
    """
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
    """Open a source that was listed before. Nothing is fetched yet.

    Args:
        url: The source, as it was given to :func:`list_source`.
        folder: Folder of the listing.
        options: Options of the source, as for the listing. Default: :class:`SourceOptions` without arguments.
        units: Number of units to use if the source has grown since. Default: all.
        pace: Limit on bytes per second, which is asked before each request. Default: no limit.
        limits: Time limits and retries of requests. Default: those of the store.
        through: Function that wraps the store, for example in a cache of bodies. Default: the store itself.
        number: True gives samples of files without keys a key made of file and row. Default True.

    Returns:
        The source; the caller closes it.

    Raises:
        CorruptError: The listing is damaged or not complete.
        UsageError: The listing was grouped by another ``stem`` than ``options`` has.
        SourceError: The store cannot be opened; see :func:`cachetool.stores.open_store`.

    Example:
        source = open_source("photos/", Path("listing"), SourceOptions(decode="image"))
        units = np.arange(source.units)
        schema = source.probe(units[:64]).schema
        for piece in source.read(units, schema=schema):
            print(len(piece.block), "samples of", schema.names)
        source.close()
    """
    options, url = options or SourceOptions(), without_mark(url)
    braces = braces_of(url)
    place = url if braces is None else braces.place
    if (folder / TABLE_FILE).exists():
        from cachetool.sources.files import open_files_source
        from cachetool.sources.kinds import locate, parent_of

        # The source is one file, and the store is its folder.
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
