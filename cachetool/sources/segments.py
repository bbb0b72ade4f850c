"""A listing that grew: its first part as it was, and what later looks at the store added and missed.

::

    listings/<source>/               units 0 .. a        never changed again
    listings/<source>/segment-0001/  units a .. b        what a later listing had beside it
                      vanished.npy   units below a that were gone by then, or had another content

A unit keeps its number for ever. An object whose size or ETag changed is another one: its old unit has vanished, and it
comes again as a new one.
"""

from __future__ import annotations

import hashlib
import heapq
import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import numpy as np
import numpy.typing as npt

from cachetool.core.errors import CorruptError
from cachetool.proc.arrays import load_array
from cachetool.proc.folders import new_file
from cachetool.sources.keys import Stem
from cachetool.sources.listing import Listing, Record, write_sorted
from cachetool.stores import Object

__all__ = ["Change", "SegmentedListing", "segment_name", "write_changes"]

_VANISHED = "vanished.npy"
NAMED = 20
"""How many vanished keys a change names."""

_Units = npt.NDArray[np.int64]


def segment_name(number: int) -> str:
    """Name of the folder of a segment; the first part, number 0, has none."""
    return f"segment-{number:04d}"


class SegmentedListing:
    """The parts of a listing as one."""

    def __init__(self, parts: list[Listing]) -> None:
        self.parts = parts
        self._starts = np.cumsum([0, *(part.units for part in parts)])
        self.units = int(self._starts[-1])
        self.url, self.stem = parts[0].url, parts[0].stem
        self.vanished: _Units = np.unique(np.concatenate([_vanished(part.folder) for part in parts]))
        """Numbers of units that were gone when last looked, ascending."""

    @classmethod
    def open(cls, folder: Path, *, units: int | None = None) -> SegmentedListing:
        """Map the parts that make up ``units`` (None: all that are there). Raises :class:`CorruptError`."""
        parts = [Listing.open(folder)]
        count = parts[0].units
        # A segment may add nothing and only say what vanished: those come along.
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
    def identity(self) -> str:
        """Digest of what every unit number means."""
        parts = [part.identity for part in self.parts if part.units]
        return parts[0] if len(parts) == 1 else hashlib.sha256(json.dumps(parts).encode()).hexdigest()

    def unit_bytes(self, units: _Units, *, unknown: int = 0) -> _Units:
        """Bytes of each of these units, (len(units),); an object of unknown size counts as ``unknown``."""
        out = np.zeros(len(units), dtype=np.int64)
        at = np.searchsorted(self._starts, units, side="right") - 1
        for number in np.unique(at).tolist():
            here = at == number
            out[here] = self.parts[number].unit_bytes(units[here] - self._starts[number], unknown=unknown)
        return out

    def unit(self, number: int) -> list[Object]:
        """The objects of one unit, in order of their keys. Raises :class:`IndexError` for a number out of range."""
        if not 0 <= number < self.units:
            raise IndexError(f"unit {number} of {self.units}")
        part = int(np.searchsorted(self._starts, number, side="right")) - 1
        return self.parts[part].unit(number - int(self._starts[part]))

    def present(self, stem: Stem) -> Iterator[tuple[int, list[Record]]]:
        """The units that have not vanished, with their objects, in the order of their samples' keys."""
        gone = set(self.vanished.tolist())

        def of(part: Listing, start: int) -> Iterator[tuple[bytes, int, list[Record]]]:
            for unit, group in groupby(part.records(stem), key=lambda pair: pair[0]):
                if unit + start not in gone:
                    records = [record for _, record in group]
                    yield records[0][0], unit + start, records

        parts = (of(part, start) for part, start in zip(self.parts, self._starts.tolist(), strict=False))
        for _, unit, records in heapq.merge(*parts):
            yield unit, records


def _vanished(folder: Path) -> _Units:
    path = folder / _VANISHED
    if not path.exists():
        return np.zeros(0, dtype=np.int64)
    return load_array(path)


@dataclass(frozen=True, slots=True)
class Change:
    """What a later listing has that the one before it has not, and the other way round."""

    added: int
    """Units that are new, or have another content."""
    vanished: int
    """Units that are gone, or have another content."""
    names: tuple[str, ...]
    """Keys of the first samples that vanished."""

    @property
    def any(self) -> bool:
        """Whether anything changed."""
        return bool(self.added or self.vanished)


def write_changes(folder: Path, old: SegmentedListing, fresh: Listing) -> Change:
    """Write into ``folder`` the segment that makes ``old`` say what ``fresh`` does. Both are read once, in order."""
    stem = Stem(fresh.stem)
    vanished: list[int] = []
    names: list[str] = []

    def added() -> Iterator[Record]:
        before, now = old.present(stem), _grouped(fresh, stem)
        mine, theirs = next(before, None), next(now, None)
        while mine is not None or theirs is not None:
            order = _compare(mine, theirs)
            if order == 0 and mine is not None and theirs is not None and mine[1] == theirs:
                mine, theirs = next(before, None), next(now, None)
                continue
            if order <= 0 and mine is not None:
                vanished.append(mine[0])
                if len(names) < NAMED and order < 0:
                    names.append(mine[1][0][0].decode("utf-8", "surrogateescape"))
                mine = next(before, None)
            if order >= 0 and theirs is not None:
                yield from theirs
                theirs = next(now, None)

    listing = write_sorted(folder, added(), stem=stem, url=fresh.url, left_out=lambda: fresh.left_out)
    with new_file(folder / _VANISHED) as file:
        np.save(file, np.array(sorted(vanished), dtype=np.int64), allow_pickle=False)
    return Change(listing.units, len(vanished), tuple(names))


def _grouped(listing: Listing, stem: Stem) -> Iterator[list[Record]]:
    for _, group in groupby(listing.records(stem), key=lambda pair: pair[0]):
        yield [record for _, record in group]


def _compare(mine: tuple[int, list[Record]] | None, theirs: list[Record] | None) -> int:
    """Below 0 when the old unit comes first, above when the new one does."""
    if mine is None or theirs is None:
        return 1 if mine is None else -1
    a, b = mine[1][0][0], theirs[0][0]
    return (a > b) - (a < b)
