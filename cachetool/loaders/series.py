"""Series: the neighbours of a sample among the rows of its source, for the option ``offsets`` of a loader.

::

    key              series        number
    era5.zarr#17     era5.zarr#    17          neighbours are found by series and number, whatever their shards
    scan3/0042.npy   scan3/ .npy   42

The number of a sample is the last number in its ``__key__``, and the text around it names the series. So neighbours are
found after permuted draws, evictions, and conversions of a cache. A sample that lacks a neighbour is left out.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from cachetool.core.block import Ragged
from cachetool.core.errors import UsageError
from cachetool.core.schema import KEY
from cachetool.formats.runs import Int64s
from cachetool.loaders.read.gather import gather
from cachetool.loaders.read.mapped import MappedParts
from cachetool.loaders.selection import ByPart
from cachetool.loaders.view import View

__all__ = ["Series", "neighbours"]

_DIGITS = 12
"""Digits of the number of a key that count; 40 bits hold any such number."""
_BITS = 40
_TOGETHER_BITS = 7
"""A split keeps 2**7 rows of a series on one side. A window that reaches over both sides is left out."""


class Series:
    """The place of every sample of a view in its series, read from the keys once for each shard."""

    def __init__(self) -> None:
        self._by_part = ByPart()
        self._numbers: dict[bytes, int] = {}
        """Number of each series, by the text around the numbers in its keys."""

    def codes(self, view: View) -> Int64s:
        """Return series and number of each sample as one number, ``series << 40 | number``, (n,); -1 without a number.

        Raises :class:`UsageError` if the samples have no keys.
        """
        if KEY not in view.schema or view.schema[KEY].kind not in ("str", "bytes"):
            raise UsageError(f"offsets= finds neighbours by the field {KEY}; this dataset was pulled without it")
        schema = view.schema.select([KEY])

        def codes(parts: View, indices: Int64s, places: MappedParts) -> Int64s:
            keys = gather(parts, indices, places, schema)[KEY]
            assert isinstance(keys, Ragged)
            return self._codes(keys)

        return np.concatenate([*self._by_part.of(view, codes), np.empty(0, dtype=np.int64)])

    def _codes(self, keys: Ragged) -> Int64s:
        codes = np.full(len(keys.offsets) - 1, -1, dtype=np.int64)
        sizes = np.diff(keys.offsets)
        # Keys of one length together, because they are rows of one array then. Keys of one source have few lengths.
        for size in np.unique(sizes[sizes > 0]).tolist():
            rows = np.flatnonzero(sizes == size)
            letters = keys.values[keys.offsets[:-1][rows, None] + np.arange(size)]
            codes[rows] = self._of_one_length(letters)
        return codes

    def _of_one_length(self, letters: npt.NDArray[np.uint8]) -> Int64s:
        """Return the codes of keys of one length, (k, length)."""
        size = letters.shape[1]
        digits = (letters >= ord("0")) & (letters <= ord("9"))
        at = np.arange(size)
        stop = np.where(digits, at + 1, 0).max(axis=1)
        # The number begins behind the last other letter before its end, and has 12 digits at most.
        begin = np.where(~digits & (at < stop[:, None]), at + 1, 0).max(axis=1)
        begin = np.maximum(begin, stop - _DIGITS)
        inside = (at >= begin[:, None]) & (at < stop[:, None])
        power = np.where(inside, stop[:, None] - 1 - at, 0)
        numbers = np.where(inside, (letters - ord("0")) * 10 ** power.astype(np.int64), 0).sum(axis=1)
        # The digits are zeroed and their place is noted, so keys of one series become equal.
        around = np.where(inside, 0, letters).astype(np.uint8)
        unique, which = np.unique(np.ascontiguousarray(around).view(f"V{size}")[:, 0], return_inverse=True)
        codes = np.array([self._series(bytes(name)) for name in unique], dtype=np.int64)[which.reshape(-1)]
        # The key of a block ends in the first index of its last dimension, as in x=512, which counts no rows.
        of_block = (letters[np.arange(len(letters)), np.maximum(begin - 1, 0)] == ord("=")) & (begin > 0)
        return np.where((stop > 0) & ~of_block, codes << _BITS | numbers, -1)

    def _series(self, around: bytes) -> int:
        # All digits of the number count as one, so that era5#9 and era5#10 are of one series.
        before, zero, behind = around.partition(b"\0")
        name = before + zero + behind.lstrip(b"\0")
        return self._numbers.setdefault(name, len(self._numbers))

    def held_out(self, codes: Int64s, share: float) -> npt.NDArray[np.bool_]:
        """Return a mask of the samples that are for validation: whole runs of 128 rows, by a hash of series and run."""
        runs = np.where(codes < 0, -1, codes >> _TOGETHER_BITS)
        unique, which = np.unique(runs, return_inverse=True)
        names = {number: name for name, number in self._numbers.items()}
        bits, bound = _BITS - _TOGETHER_BITS, int(share * 2**64)
        sides = []
        for run in unique.tolist():
            text = names.get(run >> bits, b"") + b"\0%d" % (run & ((1 << bits) - 1))
            sides.append(int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") < bound)
        return np.array(sides, dtype=np.bool_)[which.reshape(-1)]


def neighbours(codes: Int64s, offsets: Iterable[int]) -> dict[int, Int64s]:
    """Return, for each of ``offsets``, the index of the sample so many rows behind each sample, (n,); -1 without one.

    ``codes`` are those of :meth:`Series.codes`.
    """
    order = np.argsort(codes, kind="stable").astype(np.int64)
    ranked = codes[order]
    numbers = ranked & ((1 << _BITS) - 1)
    out = {}
    for offset in offsets:
        wanted = ranked + offset
        at = np.minimum(np.searchsorted(ranked, wanted), max(0, len(ranked) - 1))
        # A number below 0 or above 40 bits would be that of another series.
        found = (ranked >= 0) & (numbers + offset >= 0) & (numbers + offset < 1 << _BITS)
        found &= ranked[at] == wanted
        indices = np.full(len(codes), -1, dtype=np.int64)
        indices[order[found]] = order[at[found]]
        out[offset] = indices
    return out
