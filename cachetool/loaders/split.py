"""Which samples are for training and which for validation: by a hash of each sample's ``__key__``.

A sample that was pulled again, converted, or moved to another shard stays on its side, however the cache grows.
"""

from __future__ import annotations

import hashlib
import itertools

import numpy as np

from cachetool.core.errors import UsageError
from cachetool.core.schema import KEY, Schema
from cachetool.core.text import shown
from cachetool.core.units import is_one_of, parse_fraction
from cachetool.loaders.order import Int64s
from cachetool.loaders.read.gather import gather
from cachetool.loaders.read.mapped import MappedParts
from cachetool.loaders.settings import SHARE
from cachetool.loaders.view import ShardFile, View

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
        self._by_part: dict[tuple[str, int], Int64s] = {}

    def chosen(self, view: View) -> Int64s:
        """The indices in ``view`` of the samples on this side, ascending.

        Raises :class:`UsageError` without keys, and for keys that are not text.
        """
        if KEY not in view.schema:
            raise UsageError(f"split= needs the field {KEY}; this dataset was pulled without it")
        if view.schema[KEY].kind not in ("str", "bytes"):
            raise UsageError(f"split= needs a field {KEY} of text; in this dataset it is {view.schema[KEY].describe()}")
        by_part = {_identity(part): self._by_part.get(_identity(part)) for part in view.parts}
        fresh = {_identity(part): part for part in view.parts if by_part[_identity(part)] is None}
        places = MappedParts()
        try:
            parts = View(view.version, view.dataset, view.schema, tuple(fresh.values()))
            for number, name in enumerate(fresh):
                by_part[name] = self._side_of(parts, number, places)
        finally:
            places.close()
        kept = {name: indices for name, indices in by_part.items() if indices is not None}
        self._by_part = kept  # others have left; a view that another thread asks for may be another one
        starts = view.starts.tolist()
        shifted = [kept[_identity(part)] + start for part, start in zip(view.parts, starts, strict=False)]
        return np.concatenate(shifted) if shifted else np.empty(0, dtype=np.int64)

    def _side_of(self, view: View, number: int, places: MappedParts) -> Int64s:
        start, stop = int(view.starts[number]), int(view.starts[number + 1])
        schema = Schema((view.schema[KEY],))
        column = gather(view, np.arange(start, stop, dtype=np.int64), places, schema)[KEY]
        keys = column.values.tobytes()  # type: ignore[union-attr]
        offsets = column.offsets.tolist()  # type: ignore[union-attr]
        sides = [self._held_out(keys[a:b]) == bool(self._side) for a, b in itertools.pairwise(offsets)]
        return np.flatnonzero(np.array(sides, dtype=np.bool_)).astype(np.int64)

    def _held_out(self, key: bytes) -> bool:
        return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little") < self._bound


def _identity(part: ShardFile) -> tuple[str, int]:
    return part.content or part.id, part.samples
