"""The decoding of stored values in the feeders: ``decode=`` of a loader.

::

    stored field        decoder                                    field of a batch
    image: bytes   -->  feed/jpeg.py     --> the memory of the batch  -->  image: uint8 (224, 224, 3)
    t2m: int16     -->  feed/cf.py       --> the memory of the batch  -->  t2m: float32

A decoder fills the memory of a whole batch, which is a slot when no transform follows. It is imported by the feeder
that needs it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import numpy.typing as npt

from cachetool.core.block import Block, Column
from cachetool.core.errors import UsageError
from cachetool.core.schema import Field, Schema
from cachetool.loaders.decode import ALL, Decode
from cachetool.loaders.order import Int64s
from cachetool.loaders.read.gather import Empty, new_array

__all__ = ["Decoder", "Decoders", "Named"]

Named = Callable[[int], str]
"""Names a sample of a batch for a message: file, number and key."""


class Decoder(Protocol):
    """A decoder of the values of one field."""

    def field(self, stored: Field, first: Callable[[], tuple[Column, Named]]) -> Field:
        """Return the fixed field that ``stored`` becomes.

        ``first()`` returns the stored value of the first sample of the epoch, as a column, and its name. Raises
        :class:`UsageError` for a field that cannot be decoded.
        """
        ...

    def decode(self, column: Column, out: npt.NDArray[Any], *, epoch: int, indices: Int64s, named: Named) -> None:
        """Write the decoded values of a batch into ``out``, (k, *shape) of the field.

        ``indices`` are the numbers of the samples, (k,). Raises :class:`CacheToolError` that begins with
        ``named(i)`` for the value of sample i.
        """
        ...


def _jpeg(options: Mapping[str, Any], seed: int) -> Decoder:
    from cachetool.loaders.feed.jpeg import JPEGDecoder

    return JPEGDecoder(options, seed=seed)


def _cf(options: Mapping[str, Any], seed: int) -> Decoder:
    from cachetool.loaders.feed.cf import CFDecoder

    return CFDecoder()


_DECODERS: Mapping[str, Callable[[Mapping[str, Any], int], Decoder]] = {"jpeg": _jpeg, "cf": _cf}


class Decoders:
    """The decoders of all fields of ``decode=``."""

    def __init__(self, decode: Decode, *, seed: int) -> None:
        self._decode, self._seed = decode, seed
        self._decoders: dict[str, Decoder] = {}
        self._of: tuple[Schema, Schema] | None = None

    def schema(self, stored: Schema, first: Callable[[], tuple[Block, Named]]) -> Schema:
        """Return the fields of decoded batches: the same object for the same ``stored`` object.

        ``first()`` returns the first sample of the epoch.
        """
        if self._of is None or self._of[0] is not stored:
            if missing := [name for name, _, _ in self._decode if name not in stored and name != ALL]:
                raise UsageError(f"decode= names the field {missing[0]!r}, but a batch has {', '.join(stored.names)}")
            if any(name == ALL for name, _, _ in self._decode) and not any(field.packing for field in stored):
                raise UsageError(
                    f"decode='cf' finds no field to decode: none of {', '.join(stored.names)} has CF attributes;"
                    " leave decode= out"
                )
            self._of = stored, Schema(tuple(self._field(field, first) for field in stored))
        return self._of[1]

    def _field(self, field: Field, first: Callable[[], tuple[Block, Named]]) -> Field:
        for name, decoder, options in self._decode:
            if name == field.name or (name == ALL and field.packing):
                # Made here and not in the constructor: an import that fails becomes the error of the first batch.
                if field.name not in self._decoders:
                    self._decoders[field.name] = _DECODERS[decoder](options, self._seed)
                return self._decoders[field.name].field(field, lambda: _column(field.name, *first()))
        return field

    def stored_in(self, empty: Empty) -> Empty:
        """Return a function that makes plain memory for fields that are decoded, and calls ``empty`` for the others."""

        def memory(field: Field, shape: tuple[int, ...]) -> npt.NDArray[Any]:
            return new_array(field, shape) if field.name in self._decoders else empty(field, shape)

        return memory

    def decoded(
        self,
        columns: Mapping[str, Column],
        *,
        epoch: int,
        indices: Int64s,
        named: Named,
        empty: Empty = new_array,
    ) -> dict[str, Column]:
        """Return the columns of a batch with decoded values, in memory that ``empty`` makes."""
        assert self._of is not None
        out = dict(columns)
        for name, decoder in self._decoders.items():
            field = self._of[1][name]
            out[name] = values = empty(field, (len(indices), *field.sizes))
            decoder.decode(columns[name], values, epoch=epoch, indices=indices, named=_of_field(named, name))
        return out


def _column(name: str, block: Block, named: Named) -> tuple[Column, Named]:
    return block.columns[name], _of_field(named, name)


def _of_field(named: Named, field: str) -> Named:
    return lambda at: f"{named(at)}, field {field!r}"
