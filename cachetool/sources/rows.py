"""Rows of stored arrays: chunks of many rows read once, however rows are asked for; texts as columns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from cachetool.core.block import BLOCK_BYTES, Ragged

__all__ = ["Slab", "joined", "of_sizes", "unpadded"]

SLABS_BYTES = 256 * 2**20
"""Most bytes kept at a time by all arrays of a file, unless a row is larger; chunks that reach further are read several
times."""

Array = npt.NDArray[Any]


class Slab:
    """The last run of rows read, aligned to chunks; rows are handed out as views of it."""

    def __init__(
        self, fetch: Callable[[int, int], Array], *, rows: int, row_nbytes: int, chunk: int, ahead: int | None = None
    ) -> None:
        """``fetch(start, stop)`` gives fresh rows; ``chunk`` rows are stored together, of ``rows`` in all. At least
        ``ahead`` bytes are read at a time."""
        self._ahead = BLOCK_BYTES if ahead is None else ahead
        self._fetch, self._rows, self._row_nbytes, self._chunk = fetch, rows, max(1, row_nbytes), chunk
        self.share(1)
        self._start = self._stop = 0
        self._held: Array | None = None

    def read(self, start: int, stop: int) -> Array:
        """Rows ``start`` to ``stop``; ``start < stop``."""
        parts = []
        while start < stop:
            if self._held is None or not self._start <= start < self._stop:
                self._start = start // self._step * self._step
                self._stop = min(self._start + self._step, self._rows)
                self._held = None  # let go of it before the next one is made
                self._held = self._fetch(self._start, self._stop)
            end = min(stop, self._stop)
            parts.append(self._held[start - self._start : end - self._start])
            start = end
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def share(self, slabs: int) -> None:
        """Keep no more than this one's part, of so many."""
        fit = max(1, SLABS_BYTES // slabs // self._row_nbytes)
        want = max(1, self._ahead // self._row_nbytes)
        self._step = fit if self._chunk > fit else -(-min(want, fit) // self._chunk) * self._chunk

    def drop(self) -> None:
        """Let go of the rows kept; views that were handed out stay valid."""
        self._held = None


def of_sizes(values: Array, sizes: npt.NDArray[np.int64], *, shapes: bool = False) -> Ragged:
    """Samples of ``sizes`` values each, one after another in ``values``; with ``shapes`` arrays of rank 1."""
    offsets = np.zeros(len(sizes) + 1, dtype=np.int64)
    np.cumsum(sizes, out=offsets[1:])
    return Ragged(values, offsets, sizes[:, None] if shapes else None)


def joined(values: Sequence[bytes | memoryview]) -> Ragged:
    """A column of byte strings."""
    sizes = np.fromiter((len(value) for value in values), dtype=np.int64, count=len(values))
    return of_sizes(np.frombuffer(b"".join(values), dtype=np.uint8), sizes)


def unpadded(rows: Array) -> Ragged:
    """A column out of strings of one width, dtype ``S`` or ``U``, (k,), NULs at their ends left out; text as UTF-8."""
    if rows.dtype.kind == "U":
        rows = np.char.encode(rows, "utf-8")
    flat = np.ascontiguousarray(rows).view(np.uint8).reshape(len(rows), -1)
    sizes = np.char.str_len(rows).astype(np.int64)
    return of_sizes(flat[np.arange(flat.shape[1]) < sizes[:, None]], sizes)
