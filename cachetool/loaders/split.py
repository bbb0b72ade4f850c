"""Which samples are for training and which for validation: by a hash of each sample's ``__key__``.

A sample that was pulled again, converted, or moved to another shard stays on its side, however the cache grows.
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
    """The share of the keys that is for validation, of the arguments ``split`` and ``validation`` of a loader.

    Raises :class:`UsageError`, also for a share without a side: what is held out would be trained on unnoticed.
    """
    share = SHARE if validation is None else parse_fraction(validation, what="validation=")
    if not is_one_of(split, (None, *_SIDES)):
        raise UsageError(f"split={shown(split)} cannot be used: 'train' or 'validation'")
    if not 0 < share < 1:
        raise UsageError(f"validation={validation!r} cannot be used: a share between 0 and 1")
    if split is None and validation is not None:
        raise UsageError(f"validation={validation!r} holds nothing out without split='train' or split='validation'")
    return share


class Split:
    """One side of a dataset; ``share`` of the keys, between 0 and 1, are for validation."""

    def __init__(self, side: str, share: float) -> None:
        self._side, self._bound = _SIDES.index(side), int(share * 2**64)

    @staticmethod
    def require(schema: Schema) -> None:
        """Raise :class:`UsageError` without keys, and for keys that are not text."""
        if KEY not in schema:
            raise UsageError(f"split= needs the field {KEY}; this dataset was pulled without it")
        if schema[KEY].kind not in ("str", "bytes"):
            raise UsageError(f"split= needs a field {KEY} of text; in this dataset it is {schema[KEY].describe()}")

    def mask(self, column: Column) -> npt.NDArray[np.bool_]:
        """Which samples are on this side, by the column of their keys."""
        assert isinstance(column, Ragged)
        keys, offsets = column.values.tobytes(), column.offsets.tolist()
        sides = [self._held_out(keys[a:b]) == bool(self._side) for a, b in itertools.pairwise(offsets)]
        return np.array(sides, dtype=np.bool_)

    def _held_out(self, key: bytes) -> bool:
        return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little") < self._bound
