"""A listing in segments: of a store that grew, or of a store that is still being listed.

:class:`SegmentedListing` has the first listing unchanged, and the additions and losses that later listings found::

    listings/<source>/               units 0 .. a        never changed again
    listings/<source>/segment-0001/  units a .. b        units that a later listing found in addition
                      vanished.npy   units below a that were gone by then, or had other contents

A unit keeps its number for ever. An object whose size or ETag changed counts as another object: its old unit has
vanished, and it gets a new unit.

:class:`EarlyListing` is used while the listing is still in progress. It is cut into segments of a fixed number of keys,
each complete by itself.

It needs a store that lists in the order of its keys, and samples that are cut at the first dot. Then the objects of one
sample come together, and a segment ends after the last object of a sample. So the store's contents alone decide the
segments, and an interrupted listing continues after the last key of its last segment.
"""

from __future__ import annotations

import hashlib
import heapq
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import numpy as np
import numpy.typing as npt

from cachetool.core.closing import Closing
from cachetool.core.errors import CorruptError, SourceError, UsageError
from cachetool.proc.arrays import load_array
from cachetool.proc.folders import new_file
from cachetool.sources.globs import Selection
from cachetool.sources.grouping import Grouping, Kept
from cachetool.sources.keys import Stem
from cachetool.sources.kinds import Census, locate
from cachetool.sources.listing import Listing, Record, write_listing, write_sorted
from cachetool.sources.options import SourceOptions
from cachetool.sources.readers import NOTE
from cachetool.stores import Object, OrderedStore, open_store
from cachetool.stores.base import Batch, LeftOut, Page, SortedStore

__all__ = ["Change", "EarlyListing", "SEGMENT", "SegmentedListing", "last_key", "segment_name", "write_changes"]

_VANISHED = "vanished.npy"
NAMED = 20
"""Most vanished keys that a change names."""

_Units = npt.NDArray[np.int64]


def segment_name(number: int) -> str:
    """Return the name of a segment's folder. The first part, number 0, has none."""
    return f"segment-{number:04d}"


class SegmentedListing:
    """The parts of a listing as one listing."""

    def __init__(self, parts: list[Listing]) -> None:
        self.parts = parts
        self._starts = np.cumsum([0, *(part.units for part in parts)])
        self.units = int(self._starts[-1])
        self.url, self.stem = parts[0].url, parts[0].stem
        self.vanished: _Units = np.unique(np.concatenate([_vanished(part.folder) for part in parts]))
        """Numbers of units that were gone at the latest refresh, ascending."""
        refreshed = [number for number, part in enumerate(parts) if (part.folder / _VANISHED).exists()]
        # A refresh looks at the whole store, so its counts replace those of all earlier parts. Segments of an early
        # listing each count only their own keys.
        latest = parts[refreshed[-1] :] if refreshed else parts
        self.left_out = LeftOut()
        """Objects that belong to no sample, by reason, at the latest refresh."""
        for part in latest:
            self.left_out.joined(part.left_out)
        notes = [(NOTE, note) for note in parts[0].notes]
        self.names = (*notes, *self.left_out.listed())
        """Notes on how the source is read, then the first left-out names with their reasons."""
        self.kept = parts[0].kept

    @classmethod
    def open(cls, folder: Path, *, units: int | None = None) -> SegmentedListing:
        """Map the parts that make up ``units`` units (None: all parts that exist). Raises :class:`CorruptError`."""
        parts = [Listing.open(folder)]
        count = parts[0].units
        # A segment may add no unit and only say which units vanished. It belongs to the same number of units, so it is
        # opened too.
        while (more := folder / segment_name(len(parts))).exists() and (units is None or count <= units):
            part = Listing.open(more)
            if units is not None and count + part.units > units:
                break
            parts.append(part)
            count += part.units
        if units is not None and count != units:
            raise CorruptError(f"listing {str(folder)!r} has {count} units instead of {units}; use another --dataset")
        return cls(parts)

    @property
    def segments(self) -> tuple[int, ...]:
        """The numbers of units at which another part with units begins."""
        return tuple(sorted({int(start) for start in self._starts} - {0, self.units}))

    @property
    def identity(self) -> str:
        """Digest of the meaning of every unit number."""
        parts = [part.identity for part in self.parts if part.units]
        # With one part this is the identity of a listing that never grew.
        return parts[0] if len(parts) == 1 else hashlib.sha256(json.dumps(parts).encode()).hexdigest()

    def unit_bytes(self, units: _Units, *, unknown: int = 0) -> _Units:
        """Return the bytes of each of these units, (len(units),); an object of unknown size counts as ``unknown``."""
        out = np.zeros(len(units), dtype=np.int64)
        at = np.searchsorted(self._starts, units, side="right") - 1
        for number in np.unique(at).tolist():
            here = at == number
            out[here] = self.parts[number].unit_bytes(units[here] - self._starts[number], unknown=unknown)
        return out

    def unit(self, number: int) -> list[Object]:
        """Return the objects of one unit in order of their keys. Raises :class:`IndexError` for a number out of
        range."""
        if not 0 <= number < self.units:
            raise IndexError(f"unit {number} of {self.units}")
        part = int(np.searchsorted(self._starts, number, side="right")) - 1
        return self.parts[part].unit(number - int(self._starts[part]))

    def present(self, stem: Stem) -> Iterator[tuple[int, list[Record]]]:
        """Yield the units that have not vanished, with their objects, in the order of their samples' keys."""
        gone = set(self.vanished.tolist())

        # A function, so that each generator of the merge keeps its own part and start.
        def of(part: Listing, start: int) -> Iterator[tuple[bytes, int, list[Record]]]:
            for unit, group in groupby(part.records(stem), key=lambda pair: pair[0]):
                if unit + start not in gone:
                    records = [record for _, record in group]
                    yield records[0][0], unit + start, records

        parts = (of(part, start) for part, start in zip(self.parts, self._starts.tolist(), strict=False))
        for _, unit, records in heapq.merge(*parts):
            yield unit, records


def _vanished(folder: Path) -> _Units:
    """Return the units that the segment in ``folder`` says have vanished, by their numbers in the whole listing."""
    path = folder / _VANISHED
    if not path.exists():
        return np.zeros(0, dtype=np.int64)
    return load_array(path)


@dataclass(frozen=True, slots=True)
class Change:
    """The difference between a listing and a later one."""

    added: int
    """Number of units that are new or have other contents."""
    vanished: int
    """Number of units that are gone or have other contents."""
    names: tuple[str, ...]
    """Keys of the first samples that vanished."""

    @property
    def any(self) -> bool:
        """True if anything changed."""
        return bool(self.added or self.vanished)


def write_changes(folder: Path, old: SegmentedListing, fresh: Listing) -> Change:
    """Write the segment that turns ``old`` into ``fresh`` into ``folder``. Both listings are read once, in order."""
    stem = Stem(fresh.stem)
    vanished: list[int] = []
    names: list[str] = []

    def added() -> Iterator[Record]:
        before, now = old.present(stem), _grouped(fresh, stem)
        old_unit, new_unit = next(before, None), next(now, None)
        while old_unit is not None or new_unit is not None:
            order = _compare(old_unit, new_unit)
            if order == 0 and old_unit is not None and new_unit is not None and old_unit[1] == new_unit:
                old_unit, new_unit = next(before, None), next(now, None)
                continue
            if order <= 0 and old_unit is not None:
                vanished.append(old_unit[0])
                if len(names) < NAMED and order < 0:
                    names.append(old_unit[1][0][0].decode("utf-8", "surrogateescape"))
                old_unit = next(before, None)
            if order >= 0 and new_unit is not None:
                yield from new_unit
                new_unit = next(now, None)

    # added() fills `vanished` while write_sorted consumes it, so the file of vanished units can only be written
    # afterwards.
    listing = write_sorted(folder, added(), stem=stem, url=fresh.url, left_out=lambda: fresh.left_out)
    with new_file(folder / _VANISHED) as file:
        np.save(file, np.array(sorted(vanished), dtype=np.int64), allow_pickle=False)
    return Change(listing.units, len(vanished), tuple(names))


def _grouped(listing: Listing, stem: Stem) -> Iterator[list[Record]]:
    for _, group in groupby(listing.records(stem), key=lambda pair: pair[0]):
        yield [record for _, record in group]


def _compare(old_unit: tuple[int, list[Record]] | None, new_unit: list[Record] | None) -> int:
    """Return a number below 0 if the old unit comes first, above 0 if the new unit does, 0 for the same sample."""
    if old_unit is None or new_unit is None:
        return 1 if old_unit is None else -1
    a, b = old_unit[1][0][0], new_unit[0][0]
    return (a > b) - (a < b)


SEGMENT = 2**20
"""Most keys in a segment."""
# A folder of this machine and a manifest give a million names in some seconds, but training should begin in less. A
# bucket's list is slow in any case, and its segments keep the size that caches know.
_SHARES = (64, 16, 4, 1)
"""Divisors of the most keys, for the first segments of a quick list. The last one is that of all further segments."""
_LAST = "last_key"


def last_key(folder: Path) -> str | None:
    """Return the key after which the listing continues whose last segment lies in ``folder``; None if it was not
    cut."""
    path = folder / _LAST
    return path.read_bytes().decode("utf-8", "surrogateescape") if path.exists() else None


class EarlyListing(Closing):
    """The segments of a store's listing, one after another. A context manager.

    ``after`` is the key after which it continues, and ``number`` the number of the segment that begins there;
    ``skip_bad`` as in :func:`~cachetool.sources.registry.list_source`.
    Raises :class:`UsageError` for a store or a ``stem`` that cannot be listed in segments, and the errors of
    :func:`cachetool.stores.open_store`.
    """

    def __init__(
        self,
        url: str,
        options: SourceOptions,
        *,
        size: int = SEGMENT,
        after: str | None = None,
        number: int = 0,
        kept: Kept | None = None,
        skip_bad: bool = False,
    ) -> None:
        """``size``: most keys of a segment. ``kept``: the fields that the first segment kept."""
        self._options, self._kept = options, kept
        self._stem, self._size, self._number = Stem("first"), size, number
        if locate(url) is not None and options.read_as != "objects":
            raise UsageError("--start-early is for folders of objects, not for a file of many samples; leave it out")
        self._store = open_store(url, skip_unusable=skip_bad, follow_links=options.follow_links)
        self._is_quick = not isinstance(self._store, OrderedStore)
        pages = self._store.list_after(after) if isinstance(self._store, SortedStore) else None
        if pages is None or options.stem not in (None, "first"):
            self._store.close()
            raise UsageError(
                "--start-early needs names in order (s3, gs, az, a folder of this machine or a manifest) and --stem"
                " first; leave it out"
            )
        self._census = Census(self._store.url)
        self._chosen = Selection(options)
        self._pages = pages
        self._read_as = options.read_as
        self._pending = Page([], [], [])
        self._counted = LeftOut()
        self._last = after
        self._seen = 0
        self.ended = False
        """True once the store has no more keys."""

    def write(self, folder: Path, *, progress: Callable[[int], None] | None = None) -> Listing:
        """Write the next segment. It may have no unit at the end of the store.

        ``progress`` is called with the number of keys seen.
        """
        before, not_taken = self._seen, self._chosen.not_taken
        grouping = Grouping(self._options, kept=self._kept)
        listing = write_listing(
            folder,
            self._checked(),
            stem=self._stem,
            url=self._store.url,
            left_out=lambda: self._passed_over().joined(self._chosen.left_out(not_taken)),
            progress=None if progress is None else lambda count: progress(before + count),
            grouping=grouping,
        )
        if grouping.stem.rule != self._stem.rule:
            raise UsageError(
                f"--start-early cuts names at the first dot, but the names under {self._store.url} must be cut at the"
                " last dot; leave --start-early out, or give --stem first"
            )
        # The first segment decides the fields. Later segments must keep the same ones, or their samples would not fit.
        self._kept = listing.kept if self._kept is None else self._kept
        if self._last is not None:
            with new_file(folder / _LAST) as file:
                file.write(self._last.encode("utf-8", "surrogateescape"))
        return listing

    def _passed_over(self) -> LeftOut:
        """Return what the store left out since the last segment."""
        now = LeftOut().joined(self._store.left_out)
        before, self._counted = self._counted, now
        # The store counts from the beginning of its list, but the counts of all segments are added up.
        return LeftOut(now - before, now.named[len(before.named) :], now.more - before.more)

    def _checked(self) -> Iterator[Batch]:
        """Yield the next segment. Raises :class:`UsageError` if its names show files of many samples instead of
        objects."""
        taken = self._chosen.taken
        while True:
            yield from self._census.count(self._chosen.of(self._segment(), more=True))
            # With globs a whole segment may contain no name that is taken. The next keys are read until one is.
            if self.ended or not self._chosen.globs or self._chosen.taken > taken:
                break
        if self.ended:
            self._chosen.refuse_nothing(self._store.url)
        if self._census.kind(self._read_as) is not None:
            raise UsageError(
                f"--start-early is for folders of objects, but {self._store.url} holds files of many samples;"
                " leave it out"
            )

    def _segment(self) -> Iterator[Page]:
        """Yield the pages of the next segment."""
        count, most = 0, self._size
        if self._is_quick:
            most = max(1, most // _SHARES[min(self._number, len(_SHARES) - 1)])
        self._number += 1
        while True:
            page: Page | None = self._pending
            if not page:
                batch = next(self._pages, None)
                page = None if batch is None else Page.of(batch)
            self._pending = Page([], [], [])
            if page is None:
                self.ended = True
                return
            self._refuse_disorder(page)
            cut = min(len(page), most - count)
            # The objects of one sample must not fall into two segments: they would become two units.
            while cut < len(page) and self._goes_on(page, cut):
                cut += 1
            count += cut
            self._seen += cut
            if cut:
                self._last = page.keys[cut - 1]
                yield page[:cut]
            if cut < len(page):
                self._pending = page[cut:]
                return

    def _goes_on(self, page: Page, at: int) -> bool:
        """Return True if the object at ``at`` belongs to the sample of the object before it."""
        before = page.keys[at - 1] if at else self._last
        if before is None:
            return False
        one, two = self._stem.split(before), self._stem.split(page.keys[at])
        return not isinstance(one, str) and not isinstance(two, str) and one.sample == two.sample

    def _refuse_disorder(self, page: Page) -> None:
        """Raise :class:`SourceError` for a page whose keys are not in order."""
        keys = [key.encode("utf-8", "surrogateescape") for key in page.keys]
        before = b"" if self._last is None else self._last.encode("utf-8", "surrogateescape")
        # Python sorts text by code points and object stores by bytes, which differ for bytes that are no UTF-8. So the
        # bytes are compared.
        if [before, *keys] != sorted([before, *keys]):
            raise SourceError(
                f"{self._store.url} does not list in the order of its keys, which --start-early needs; leave it out"
            )

    def close(self) -> None:
        """Close the store."""
        self._store.close()
