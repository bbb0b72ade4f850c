"""The values that stored numbers stand for by their CF attributes: ``decode="cf"`` of a loader.

::

    int16 (k, ...), 8 or 16 bits  --a table of all values-->  memory of the batch, float32
    wider numbers, times          --pieces of _PIECE------->  memory of the batch, float32, float64 or datetime64[ns]

The values are those of ``--decode cf`` of a pull: :mod:`cachetool.core.cf` computes both.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from cachetool.core.block import Column, Ragged
from cachetool.core.cf import decoder
from cachetool.core.errors import BadObject, UsageError
from cachetool.core.schema import Field
from cachetool.loaders.order import Int64s

__all__ = ["CFDecoder"]

Array = npt.NDArray[Any]
Named = Callable[[int], str]

_PIECE = 2**14
"""Numbers that are computed together. The arrays in between, of 8 bytes each, then stay in the cache of a core."""
_COUNTS = "; leave the field out of decode= to read the counts as numbers"
_PULL = "cachetool pull ... --decode cf into another --dataset"


class CFDecoder:
    """The decoder of one field; a :class:`~cachetool.loaders.feed.decoders.Decoder`."""

    def __init__(self) -> None:
        self._compute: Callable[[Array], Array] | None = None
        self._table: Array | None = None
        """The values of all numbers that 8 or 16 bits can hold, by their bits."""

    def field(self, stored: Field, first: Callable[[], tuple[Column, Named]]) -> Field:
        """See :class:`~cachetool.loaders.feed.decoders.Decoder`."""
        if "differ" in stored.packing:
            raise UsageError(
                f"decode= of field {stored.name!r}: its samples do not share their CF attributes; leave the field out"
                f" of decode=, or decode each file by its own: {_PULL}"
            )
        if not stored.packing:
            raise UsageError(
                f"decode= of field {stored.name!r}: it has no CF attributes, so its numbers stand for themselves; leave"
                f" it out of decode=, or, if an older cachetool pulled it: {_PULL}"
            )
        if stored.kind != "fixed":
            raise UsageError(
                f"decode= of field {stored.name!r}: its samples differ in shape, and 'cf' needs one shape; leave it out"
                f" of decode=, or decode while pulling: {_PULL}"
            )
        decoding = decoder(stored.numpy, stored.packing, counts=_COUNTS)
        if isinstance(decoding, str):
            raise UsageError(f"decode= of field {stored.name!r}: {decoding}")
        dtype, self._compute = decoding
        self._table = None
        # Times are computed piece by piece: some counts of the table may lie outside of datetime64, and no sample needs
        # to have them.
        if stored.numpy.itemsize <= 2 and dtype.kind == "f" and stored.numpy.kind in "iu":
            bits = np.arange(2 ** (8 * stored.numpy.itemsize), dtype=f"<u{stored.numpy.itemsize}")
            self._table = self._compute(bits.view(stored.numpy))
        return Field(stored.name, dtype.str, stored.shape, (), stored.dims)

    def decode(self, column: Column, out: Array, *, epoch: int, indices: Int64s, named: Named) -> None:
        """See :class:`~cachetool.loaders.feed.decoders.Decoder`."""
        assert not isinstance(column, Ragged)
        samples = len(column)
        if not column.size:
            return
        stored, values = np.ascontiguousarray(column).reshape(-1), out.reshape(-1)
        # Memory that is not contiguous would be copied by the reshape.
        assert np.may_share_memory(values, out)
        for start in range(0, len(stored), _PIECE):
            piece = stored[start : start + _PIECE]
            try:
                self._fill(piece, values[start : start + _PIECE])
            except ValueError as error:
                at = self._first_bad(stored.reshape(samples, -1), start)
                raise BadObject(f"{named(at)}: {error}") from error

    def _fill(self, stored: Array, values: Array) -> None:
        assert self._compute is not None
        if self._table is None:
            values[...] = self._compute(stored)
        else:
            # wrap: the default would check the indices and copy the result once more. All of them are in the table.
            np.take(self._table, stored.view(f"<u{stored.itemsize}"), out=values, mode="wrap")

    def _first_bad(self, samples: Array, start: int) -> int:
        """Return the first sample whose values cannot be computed, from the one on that number ``start`` is in."""
        assert self._compute is not None
        for at in range(start // int(samples.shape[1]), len(samples)):
            try:
                self._compute(samples[at])
            except ValueError:
                return at
        raise AssertionError("no sample is bad")
