"""A seeded random order over n things that is computed, never stored.

A balanced Feistel network over the smallest even number of bits that holds n - 1, with cycle walking: a result of n or
more is put through the network again until it falls below n (Black and Rogaway, "Ciphers with Arbitrary Finite
Domains", 2002). The domain is under 4 n, so a walk takes fewer than four turns on average. Round function: the
finaliser of splitmix64 (Steele, Lea and Flood, 2014). Good mixing for sampling; not cryptography.
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

MAX_N = 2**40
_ROUNDS = 6
_SMALL = 2**12  # entries of a table that takes less than a call of NumPy for each step of a round


class Permutation:
    """The order of ``0 .. n - 1`` that ``seed`` and ``pass_number`` (the pass, the epoch) decide; same arguments, same
    order. ``segment`` and ``part`` make orders that differ within one pass.

    ``order[positions]`` takes an int64 array of positions of any shape and gives the things at those positions, int64,
    same shape; a plain int gives an int. Memory is that of the positions asked for. Raises :class:`UsageError` for n
    outside ``0 .. 2**40``, ``IndexError`` for a position outside ``0 .. n - 1``.
    """

    __slots__ = ("_half", "_keys", "_tables", "n")

    def __init__(self, n: int, *, seed: int = 0, pass_number: int = 0, segment: int = 0, part: str = "") -> None:
        if not 0 <= n <= MAX_N:
            raise UsageError(f"cannot order {n} things: 0 to 2**40")
        self.n = n
        self._half = max(1, ((max(n - 1, 1)).bit_length() + 1) // 2)
        name = f"cachetool order {seed} {pass_number}" + (f" {segment}" if segment or part else "")
        name += f" {part}" if part else ""
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
            mapped = self._network(out[outside])
            out[outside] = mapped
            outside = tuple(axis[mapped >= self.n] for axis in outside)
        return out

    def _network(self, values: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        half, mask = self._half, (1 << self._half) - 1
        # Then a table of each round costs less than the rounds of a walk, or than the round.
        if self._tables is None and values.size > (mask // 16 if mask < _SMALL else 4 * mask):
            every = np.arange(mask + 1, dtype=np.int64)
            self._tables = [self._mixed(number, every) for number in range(_ROUNDS)]
        left, right = values >> half, values & mask
        for number in range(_ROUNDS):
            mixed = self._mixed(number, right) if self._tables is None else self._tables[number].take(right)
            left, right = right, left ^ mixed
        return (left << half) | right

    def _mixed(self, number: int, values: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """The function of round ``number``."""
        mixed = values.view(np.uint64) + self._keys[number]
        mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        mixed ^= mixed >> np.uint64(31)
        out: npt.NDArray[np.int64] = mixed.view(np.int64) & ((1 << self._half) - 1)
        return out


class SegmentedOrder:
    """The order of ``0 .. n - 1`` segment by segment: what a pass goes through while its source still grows.

    ``segments`` are the places between segments, ascending. A segment is drawn in a seeded order of its own after all
    before it, so that one more segment changes nothing of what came before. ``sequential`` leaves all in place; other
    arguments and positions are those of :class:`Permutation`, but positions are arrays only.
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
        """Where a run from ``start`` to ``stop`` had better end: where it does, since nothing here belongs together."""
        return stop


def part_size(count: int, part: int, cut: int) -> int:
    """How many of the numbers below ``count`` are ``part`` modulo ``cut``."""
    return (count - part + cut - 1) // cut
