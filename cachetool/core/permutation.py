"""A seeded random order of n things that is computed and never stored.

A balanced Feistel network works on the smallest even number of bits that holds n - 1. A result of n or more is put
through the network again until it is below n ("cycle walking": Black and Rogaway, "Ciphers with Arbitrary Finite
Domains", 2002). The domain has fewer than 4 n numbers, so a number goes through the network fewer than four times on
average. The round function is the finaliser of splitmix64 (Steele, Lea and Flood, 2014). The order is mixed well enough
for sampling, but it is not cryptography.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from cachetool.core.errors import UsageError

__all__ = ["MAX_N", "Permutation", "SegmentedOrder", "part_size"]

# An index takes 40 bits of an encoded index, the version of the snapshot takes those above
# (cachetool/loaders/order.py).
MAX_N = 2**40
# The number of rounds decides the order, and draws of a cache are recorded as positions in it. Another number would
# repeat and lose samples of existing caches; a test holds the order for all releases.
_ROUNDS = 6
# Below this number of entries, a table takes less time than one call of NumPy for each step of a round.
_SMALL = 2**12


class Permutation:
    """The order of ``0 .. n - 1`` for a seed and a pass (or epoch); equal arguments give equal orders.

    ``segment`` and ``part`` give different orders within one pass. ``order[positions]`` takes an int64 array of
    positions of any shape and returns the things at these positions, int64, in the same shape; an int returns an int.
    The memory needed is proportional to the positions that are asked for. Raises :class:`UsageError` for n below 0 or
    above 2**40, and ``IndexError`` for a position below 0 or above n - 1.
    """

    __slots__ = ("_half", "_keys", "_tables", "n")

    def __init__(self, n: int, *, seed: int = 0, pass_number: int = 0, segment: int = 0, part: str = "") -> None:
        if not 0 <= n <= MAX_N:
            raise UsageError(f"cannot order {n} things; the number must be 0 to 2**40")
        self.n = n
        self._half = max(1, ((max(n - 1, 1)).bit_length() + 1) // 2)
        # Segment and part are left out of the name if they are 0 and empty: the order of a source of one segment and
        # one part stays as it was before these existed.
        name = f"cachetool order {seed} {pass_number}" + (f" {segment}" if segment or part else "")
        name += f" {part}" if part else ""
        # A hash of the text accepts a seed of any size and makes the keys of neighbouring seeds unrelated. One SHA-256
        # has 32 bytes, but six keys need 48.
        digest = hashlib.sha256(name.encode()).digest()
        digest += hashlib.sha256(digest).digest()
        self._keys = np.frombuffer(digest[: 8 * _ROUNDS], dtype="<u8").astype(np.uint64)
        self._tables: list[npt.NDArray[np.int64]] | None = None

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, positions: Any) -> Any:
        at = np.asarray(positions, dtype=np.int64)
        if at.size and (int(at.min()) < 0 or int(at.max()) >= self.n):
            raise IndexError(f"position outside 0 .. {self.n - 1}")
        out = self._walk(np.atleast_1d(at))
        return int(out[0]) if at.ndim == 0 else out

    def _walk(self, values: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        out = self._network(values)
        outside = np.nonzero(out >= self.n)
        while outside[0].size:
            # Only the numbers that are still outside go through the network again. The walk ends, because the network
            # is a permutation: it returns to the number that it began with, which is below n.
            mapped = self._network(out[outside])
            out[outside] = mapped
            outside = tuple(axis[mapped >= self.n] for axis in outside)
        return out

    def _network(self, values: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        half, mask = self._half, (1 << self._half) - 1
        # Above this number of positions a table for each round costs less than the rounds of a walk, or, if the domain
        # is small, than the NumPy calls of one round. With tables the order of an epoch takes 13 instead of 40 ns a
        # sample, which matters in short epochs of small samples.
        if self._tables is None and values.size > (mask // 16 if mask < _SMALL else 4 * mask):
            every = np.arange(mask + 1, dtype=np.int64)
            self._tables = [self._mixed(number, every) for number in range(_ROUNDS)]
        left, right = values >> half, values & mask
        for number in range(_ROUNDS):
            mixed = self._mixed(number, right) if self._tables is None else self._tables[number].take(right)
            left, right = right, left ^ mixed
        return (left << half) | right

    def _mixed(self, number: int, values: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return the round function of round ``number`` for these values, in the bits of one half."""
        mixed = values.view(np.uint64) + self._keys[number]
        mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        mixed ^= mixed >> np.uint64(31)
        out: npt.NDArray[np.int64] = mixed.view(np.int64) & ((1 << self._half) - 1)
        return out


class SegmentedOrder:
    """The order of ``0 .. n - 1`` segment by segment: the order of a pass whose source still grows.

    ``segments`` are the boundaries between segments, ascending. Each segment is drawn after all segments before it, in
    a seeded order of its own, so a further segment does not change the earlier part of the order. With ``sequential``
    the order is 0, 1, 2, ... The other arguments and the positions are those of :class:`Permutation`, except that
    positions must be arrays.
    """

    __slots__ = ("_bounds", "_orders", "_sequential")

    def __init__(
        self,
        n: int,
        *,
        seed: int = 0,
        pass_number: int = 0,
        segments: Sequence[int] = (),
        part: str = "",
        sequential: bool = False,
    ):
        bounds = [0, *segments, n]
        if any(a >= b for a, b in pairwise(bounds)) and n:
            raise UsageError(f"the segments {list(segments)} do not ascend inside 0 .. {n}")
        self._bounds = np.array(bounds, dtype=np.int64)
        self._sequential = sequential
        sizes = np.diff(self._bounds).tolist()
        self._orders = [
            Permutation(size, seed=seed, pass_number=pass_number, segment=segment, part=part)
            for segment, size in enumerate(sizes)
        ]

    def __len__(self) -> int:
        return int(self._bounds[-1])

    def __getitem__(self, positions: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        at = np.asarray(positions, dtype=np.int64)
        if at.size and (int(at.min()) < 0 or int(at.max()) >= len(self)):
            raise IndexError(f"position outside 0 .. {len(self) - 1}")
        if self._sequential:
            return at.copy()
        out = np.empty_like(at)
        segments = np.searchsorted(self._bounds, at, side="right") - 1
        for segment in np.unique(segments).tolist():
            here, start = segments == segment, self._bounds[segment]
            out[here] = self._orders[segment][at[here] - start] + start
        return out

    def unit_end(self, start: int, stop: int) -> int:
        """Return where a claim from ``start`` to ``stop`` should end: at ``stop``, because here each unit is one
        draw."""
        return stop


def part_size(count: int, part: int, cut: int) -> int:
    """Return how many of the numbers below ``count`` belong to ``part``: those that are ``part`` modulo ``cut``."""
    return (count - part + cut - 1) // cut
