"""A listing that is used while it is still under way: cut into segments of so many keys, each whole by itself.

Only for stores that list in the order of their keys, and samples that are cut at the first dot: there the objects of
one sample come together, and a segment ends behind the last object of a sample. So the segments are decided by what the
store holds, and a listing that was broken off goes on behind the last key of its last segment.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from cachetool.core.errors import SourceError, UsageError
from cachetool.proc.folders import new_file
from cachetool.sources.keys import Stem
from cachetool.sources.kinds import Census, locate
from cachetool.sources.listing import write_listing
from cachetool.sources.options import SourceOptions
from cachetool.stores import Object, OrderedStore, open_store

if TYPE_CHECKING:
    from cachetool.sources.listing import Listing

__all__ = ["SEGMENT", "EarlyListing", "last_key"]

SEGMENT = 2**20
"""Keys of a segment."""
_LAST = "last_key"


def last_key(folder: Path) -> str | None:
    """Behind which key the listing goes on whose last segment lies in ``folder``; None when that was not cut."""
    path = folder / _LAST
    return path.read_bytes().decode("utf-8", "surrogateescape") if path.exists() else None


class EarlyListing:
    """The segments of a store's listing, one after another. A context manager.

    ``after`` is the key behind which it goes on. Raises :class:`UsageError` for a store or a ``stem`` that cannot be
    listed so, and the errors of :func:`cachetool.stores.open_store`.
    """

    def __init__(self, url: str, options: SourceOptions, *, size: int = SEGMENT, after: str | None = None) -> None:
        self._stem, self._size = Stem(options.stem), size
        if locate(url) is not None and options.read_as != "objects":
            raise UsageError("--start-early is for folders of objects, not for a file of many samples; leave it out")
        self._store = open_store(url)
        if not isinstance(self._store, OrderedStore) or options.stem != "first":
            self._store.close()
            raise UsageError(
                "--start-early needs a store that lists in the order of its keys (s3, gs, az) and --stem first;"
                " leave it out"
            )
        self._census = Census(self._store.url)
        self._pages = self._census.count(self._store.list_after(after))
        self._read_as = options.read_as
        self._rest: list[Object] = []
        self._last = after
        self._seen = 0
        self.ended = False
        """Whether the store has no more keys."""

    def write(self, folder: Path, *, progress: Callable[[int], None] | None = None) -> Listing:
        """Write the next segment; it may have no unit at the store's end. ``progress`` is told how many keys came."""
        before = self._seen
        listing = write_listing(
            folder,
            self._segment(),
            stem=self._stem,
            url=self._store.url,
            left_out=lambda: self._store.left_out,
            progress=None if progress is None else lambda count: progress(before + count),
        )
        if self._census.kind(self._read_as) is not None:
            raise UsageError(f"--start-early is for folders of objects; {self._store.url} holds files of many samples")
        if self._last is not None:
            with new_file(folder / _LAST) as file:
                file.write(self._last.encode("utf-8", "surrogateescape"))
        return listing

    def _segment(self) -> Iterator[list[Object]]:
        count = 0
        while True:
            page: list[Object] | None = self._rest or next(iter(self._pages), None)
            self._rest = []
            if page is None:
                self.ended = True
                return
            self._refuse_disorder(page)
            cut = min(len(page), self._size - count)
            while cut < len(page) and self._goes_on(page, cut):
                cut += 1
            count += cut
            self._seen += cut
            if cut:
                self._last = page[cut - 1].key
                yield page[:cut]
            if cut < len(page):
                self._rest = page[cut:]
                return

    def _goes_on(self, page: list[Object], at: int) -> bool:
        """Whether the object at ``at`` belongs to the sample of the one before it."""
        before = page[at - 1].key if at else self._last
        if before is None:
            return False
        one, two = self._stem.split(before), self._stem.split(page[at].key)
        return not isinstance(one, str) and not isinstance(two, str) and one.sample == two.sample

    def _refuse_disorder(self, page: list[Object]) -> None:
        keys = [item.key.encode("utf-8", "surrogateescape") for item in page]
        before = b"" if self._last is None else self._last.encode("utf-8", "surrogateescape")
        if [before, *keys] != sorted([before, *keys]):
            raise SourceError(
                f"{self._store.url} does not list in the order of its keys, which --start-early needs; leave it out"
            )

    def close(self) -> None:
        """Let go of the store."""
        self._store.close()

    def __enter__(self) -> EarlyListing:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
