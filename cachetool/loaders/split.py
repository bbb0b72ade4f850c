"""The split of a dataset into samples for training and for validation, by a hash of each sample's ``__key__``.

A sample that is pulled again, converted, or moved to another shard stays on its side, however the cache grows.
"""

from __future__ import annotations

import hashlib
import itertools

import numpy as np
import numpy.typing as npt

from cachetool.core.block import Column, Ragged
from cachetool.core.errors import UsageError
from cachetool.core.schema import KEY, Schema
from cachetool.core.text import shown
from cachetool.core.units import is_one_of, parse_fraction
from cachetool.loaders.settings import SHARE

__all__ = ["Split", "parse_split"]

_SIDES = ("train", "validation")


def parse_split(split: str | None, validation: float | str | None) -> float:
    """Return the fraction of the keys that is for validation, from the arguments ``split`` and ``validation`` of a
    loader.

    Raises :class:`UsageError` for values that cannot be used, and for a fraction without a side.
    """
    share = SHARE if validation is None else parse_fraction(validation, what="validation=")
    if not is_one_of(split, (None, *_SIDES)):
        raise UsageError(f"split={shown(split)} cannot be used; it must be 'train' or 'validation'")
    if not 0 < share < 1:
        raise UsageError(f"validation={validation!r} cannot be used; it must be a fraction between 0 and 1")
    # Without a side the loader would read all samples, so the samples that the user means to hold out would be trained
    # on unnoticed.
    if split is None and validation is not None:
        raise UsageError(f"validation={validation!r} needs split='train' or split='validation'")
    return share


class Split:
    """One side of a dataset; ``share`` is the fraction of the keys that is for validation, between 0 and 1."""

    def __init__(self, side: str, share: float) -> None:
        self._side, self._bound = _SIDES.index(side), int(share * 2**64)

    @staticmethod
    def require(schema: Schema) -> None:
        """Raise :class:`UsageError` if the schema has no keys, or keys that are not text."""
        if KEY not in schema:
            raise UsageError(f"split= needs the field {KEY}; this dataset was pulled without it")
        if schema[KEY].kind not in ("str", "bytes"):
            raise UsageError(f"split= needs a field {KEY} of text; in this dataset it is {schema[KEY].describe()}")

    def mask(self, column: Column) -> npt.NDArray[np.bool_]:
        """Return a mask of the samples on this side, by the column of their keys."""
        assert isinstance(column, Ragged)
        keys, offsets = column.values.tobytes(), column.offsets.tolist()
        sides = [self._held_out(keys[a:b]) == bool(self._side) for a, b in itertools.pairwise(offsets)]
        return np.array(sides, dtype=np.bool_)

    def _held_out(self, key: bytes) -> bool:
        # A hash of the key alone, without seed or position, so all loaders, all ranks and all later runs agree.
        # Python's hash() differs from process to process.
        return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little") < self._bound
