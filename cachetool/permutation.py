"""A seeded random order over n things that is computed, never stored.

A balanced Feistel network over the smallest even number of bits that holds n - 1, with cycle walking: a result of n or
more is put through the network again until it falls below n (Black and Rogaway, "Ciphers with Arbitrary Finite
Domains", 2002). The domain is under 4 n, so a walk takes fewer than four turns on average. Round function: the
finaliser of splitmix64 (Steele, Lea and Flood, 2014). Good mixing for sampling; not cryptography.
"""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import numpy.typing as npt

from cachetool.errors import UsageError

__all__ = ["MAX_N", "Permutation"]

MAX_N = 2**40
_ROUNDS = 6


class Permutation:
    """The order of ``0 .. n - 1`` that ``seed`` and ``turn`` (the pass, the epoch) decide; same arguments, same order.

    ``order[positions]`` takes an int64 array of positions of any shape and gives the things at those positions, int64,
    same shape; a plain int gives an int. Memory is that of the positions asked for. Raises :class:`UsageError` for n
    outside ``0 .. 2**40``, ``IndexError`` for a position outside ``0 .. n - 1``.
    """

    __slots__ = ("_half", "_keys", "n")

    def __init__(self, n: int, *, seed: int = 0, turn: int = 0) -> None:
        if not 0 <= n <= MAX_N:
            raise UsageError(f"cannot order {n} things: 0 to 2**40")
        self.n = n
        self._half = max(1, ((max(n - 1, 1)).bit_length() + 1) // 2)
        digest = hashlib.sha256(f"cachetool order {seed} {turn}".encode()).digest()
        digest += hashlib.sha256(digest).digest()
        self._keys = np.frombuffer(digest[: 8 * _ROUNDS], dtype="<u8").astype(np.uint64)

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, positions: Any) -> Any:
        at = np.asarray(positions, dtype=np.int64)
        if at.size and (int(at.min()) < 0 or int(at.max()) >= self.n):
            raise IndexError(f"position outside 0 .. {self.n - 1}")
        out = self._walk(np.atleast_1d(at).astype(np.uint64)).astype(np.int64)
        return int(out[0]) if at.ndim == 0 else out

    def _walk(self, values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
        out = self._network(values)
        outside = np.nonzero(out >= self.n)
        while outside[0].size:
            again = self._network(out[outside])
            out[outside] = again
            outside = tuple(axis[again >= self.n] for axis in outside)
        return out

    def _network(self, values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
        half = np.uint64(self._half)
        mask = np.uint64((1 << self._half) - 1)
        left, right = values >> half, values & mask
        for key in self._keys:
            mixed = right + key
            mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
            mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
            mixed ^= mixed >> np.uint64(31)
            left, right = right, left ^ (mixed & mask)
        return (left << half) | right
