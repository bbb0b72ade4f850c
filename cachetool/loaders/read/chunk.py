"""Samples of several batches that were located together, copied one batch at a time.

What is the same for all of these batches is done once: of a batch of 256 samples of 3 KiB that is a tenth of the time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from cachetool.core.block import Column
from cachetool.core.schema import Field, Schema
from cachetool.formats.runs import Int64s, Rows
from cachetool.loaders.read.gather import Empty, Located, Runs, copied

__all__ = ["Chunk"]

_Copy = Callable[[npt.NDArray[Any], int, int], None]


class Chunk:
    """Where the fields of ``schema`` lie for some samples, in the order in which they are asked for."""

    def __init__(self, located: Located, schema: Schema) -> None:
        self._schema, self._groups = schema, located
        self._columns: list[tuple[Field, Runs, _Copy | None]] = []
        if len(located) == 1 and located[0][0] is None:
            runs = located[0][1]
            self._columns = [(field, runs[field.name], _copier(runs[field.name], field)) for field in schema]

    def take(self, start: int, stop: int, *, empty: Empty) -> dict[str, Column]:
        """The columns of samples ``start`` to ``stop - 1``, in memory that ``empty`` makes, C-contiguous."""
        columns: dict[str, Column] = {}
        count = stop - start
        if not self._columns:
            return copied(self._of(start, stop), count, self._schema, empty=empty)
        for field, runs, copy in self._columns:
            if copy is None:
                columns |= copied([(None, {field.name: runs.slice(start, stop)})], count, (field,), empty=empty)
            else:
                columns[field.name] = out = empty(field, (count, *field.sizes))
                copy(out, start, stop)
        return columns

    def _of(self, start: int, stop: int) -> Located:
        """What was located of these samples."""
        found: Located = []
        for to, runs in self._groups:
            if to is None:
                found.append((None, {name: each.slice(start, stop) for name, each in runs.items()}))
                continue
            begin, end = np.searchsorted(to, (start, stop)).tolist()
            if begin < end:
                rows = None if end - begin == stop - start else to[begin:end] - start
                found.append((rows, {name: each.slice(begin, end) for name, each in runs.items()}))
        return found


def _copier(runs: Runs, field: Field) -> _Copy | None:
    """Copies the values of samples ``start`` to ``stop - 1``; None where they are not all of one size."""
    if field.kind != "fixed":
        return None
    if not field.is_scalar:
        return Rows(runs.buffer, runs.starts, field.nbytes).copy
    return _scalars(runs.buffer, runs.starts)


def _scalars(buffer: npt.NDArray[Any], starts: Int64s) -> _Copy:
    def copy(out: npt.NDArray[Any], start: int, stop: int) -> None:
        buffer.take(starts[start:stop], out=out, mode="clip")

    return copy
