"""The objects of a listing as files by number, and as objects by key."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from cachetool.core.errors import CacheToolError
from cachetool.sources.byte_ranges import RangeServer
from cachetool.sources.listing import Listing
from cachetool.stores import Object, Store
from cachetool.stores.base import Telling, check_identity

__all__ = ["Files", "Seen", "renamed"]

Seen = Mapping[int, tuple[int, str | None]]
"""Size and identity of objects by number, as their answers told them, where the listing does not."""
_ZARR_METADATA = ("zarr.json", ".zarray", ".zgroup")


class Files:
    """Objects of one listing on their store. Used by many threads."""

    def __init__(self, store: Store, listing: Listing, seen: Seen | None = None) -> None:
        """``seen`` is what :meth:`seen` gave when they were listed: they must still be these."""
        self.store, self.listing = store, listing
        self._known = {
            number: replace(listing.object(number), size=size, etag=etag)
            for number, (size, etag) in (seen or {}).items()
        }
        self._lock = threading.Lock()

    def item(self, number: int) -> Object:
        """An object by its number, with its size: where the listing does not tell it, the store is asked once."""
        with self._lock:
            known = self._known.get(number)
        if known is not None:
            return known
        found = self.listing.object(number)
        return found if found.size >= 0 else self._asked(found, number)

    def identified(self, number: int) -> Object:
        """:meth:`item`, with its identity: where answers tell that and the listing does not, one is asked for."""
        found = self.item(number)
        return found if found.etag is not None or not isinstance(self.store, Telling) else self._asked(found, number)

    def _asked(self, found: Object, number: int) -> Object:
        known = self.store.find(found.key)
        if known.size < 0:  # not every server tells it
            known = replace(known, size=found.size)
        check_identity(found, size=known.size, etag=None)
        with self._lock:
            return self._known.setdefault(number, known)

    def seen(self) -> Seen:
        """What answers have told of the objects that the listing does not."""
        told = self.store.seen() if isinstance(self.store, Telling) else {}
        numbers = {number for key in told if (number := self.index(key)) is not None}
        out: dict[int, tuple[int, str | None]] = {}
        for number in sorted(numbers.union(self._known)):  # not all: there may be a million chunks
            listed = self.listing.object(number)
            item = self._known.get(number, listed)
            etag = told.get(item.key) or item.etag
            if (item.size, etag) != (listed.size, listed.etag):
                out[number] = item.size, etag
        return out

    def find(self, key: str) -> Object | None:
        """An object by its key; None when the listing has none."""
        index = self.index(key)
        return None if index is None else self.item(index)

    def index(self, key: str) -> int | None:
        """The number of an object by its key."""
        raw = key.encode("utf-8", "surrogateescape")
        low, high = 0, self.listing.objects
        while low < high:
            middle = (low + high) // 2
            if self.listing.object(middle).key.encode("utf-8", "surrogateescape") < raw:
                low = middle + 1
            else:
                high = middle
        if low == self.listing.objects or self.listing.object(low).key != key:
            return None
        return low

    def name(self, number: int) -> str:
        """For messages."""
        return self.listing.object(min(number, self.listing.objects - 1)).key

    def zarr_folders(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """All folders that hold metadata of Zarr, ``""`` or ending in ``/``, and those that lie in no other one."""
        found: dict[str, None] = {}
        for number in range(self.listing.objects):
            folder, slash, name = self.listing.object(number).key.rpartition("/")
            if name in _ZARR_METADATA:
                found[folder + slash] = None
        roots: list[str] = []
        for folder in sorted(found):
            if not any(folder.startswith(root) for root in roots[-1:]):
                roots.append(folder)
        return tuple(found), tuple(roots)


@contextlib.contextmanager
def renamed(at: Path, place: str, server: RangeServer | None = None) -> Iterator[None]:
    """Errors that speak of the local path ``at`` speak of ``place``; what the store raised comes first."""
    try:
        yield
    except CacheToolError as error:
        if server is not None and server.failure is not None:
            raise server.failure from error
        if str(at) in str(error):
            raise type(error)(str(error).replace(str(at), place)) from error
        raise
