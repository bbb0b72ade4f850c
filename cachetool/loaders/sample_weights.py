"""Weights of single samples, by their keys, and the order of an epoch that draws samples by their weights.

A sample with twice the weight is drawn twice as often. So a loss that is summed over batches would count it twice: each
draw has the factor that takes this back, the mean weight divided by the weight of the sample.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from cachetool.core.block import Column, Ragged
from cachetool.core.errors import UsageError
from cachetool.core.permutation import Permutation
from cachetool.core.text import shown
from cachetool.loaders.crop import uniforms
from cachetool.loaders.order import Int64s

__all__ = ["WEIGHT", "SampleWeights", "WeightedOrder", "parse_sample_weights"]

WEIGHT = "__weight__"
"""Name of the field with the factor of each draw."""

Floats = npt.NDArray[np.float64]


class SampleWeights:
    """Weights by keys. A sample without one has the mean weight."""

    def __init__(self, weights: Mapping[bytes, float]) -> None:
        # Sorted arrays, because a dict of a million keys takes 100 MB in each feeder.
        self._keys = np.array(sorted(weights), dtype=np.bytes_)
        self._weights = np.array([weights[key] for key in sorted(weights)], dtype=np.float64)
        self._mean = float(self._weights.mean())
        digest = hashlib.blake2b(self._keys.tobytes(), digest_size=8)
        digest.update(self._weights.tobytes())
        self.digest = digest.hexdigest()
        """Text that differs if the weights differ, for states."""

    def of(self, column: Column) -> Floats:
        """Return the weights of samples by the column of their keys, (k,)."""
        assert isinstance(column, Ragged)
        if not len(column):
            return np.empty(0)
        raw, ends = column.values.tobytes(), column.offsets.tolist()
        keys = np.array([raw[a:b] for a, b in pairwise(ends)], dtype=np.bytes_)
        at = np.minimum(np.searchsorted(self._keys, keys), len(self._keys) - 1)
        return np.where(self._keys[at] == keys, self._weights[at], self._mean)


def parse_sample_weights(weights: object) -> SampleWeights | None:
    """Return the argument ``sample_weights=`` of a loader in its one form. Raises :class:`UsageError`."""
    if weights is None:
        return None
    if isinstance(weights, tuple | list) and len(weights) == 2:
        keys, values = (list(part) if isinstance(part, Iterable) else None for part in weights)
        if keys is not None and values is not None:
            if len(keys) != len(values):
                raise UsageError(f"sample_weights= has {len(keys)} keys, but {len(values)} weights; give one for each")
            if unusable := [key for key in keys if not isinstance(key, str | bytes)]:
                raise UsageError(f"sample_weights= names {shown(unusable[0])}; use the values of __key__")
            weights = dict(zip(keys, values, strict=True))
    if not isinstance(weights, Mapping) or not weights:
        raise UsageError(
            f"sample_weights={shown(weights)} cannot be used; use a dict of keys and weights, or a pair of keys and"
            " weights"
        )
    found: dict[bytes, float] = {}
    for key, value in weights.items():
        if not isinstance(key, str | bytes):
            raise UsageError(f"sample_weights= names {shown(key)}; use the values of __key__")
        try:
            weight = float(value)
        except (TypeError, ValueError):
            weight = -1.0
        if not 0 <= weight < math.inf:
            raise UsageError(
                f"sample_weights=: the weight of {shown(key)} is {shown(value)}; use a number of 0 or more"
            )
        found[key.encode() if isinstance(key, str) else bytes(key)] = weight
    if not any(found.values()):
        raise UsageError("sample_weights= has only weights of 0; give at least one sample a weight")
    return SampleWeights(found)


class WeightedOrder:
    """The order of an epoch that draws items by their weights: ``order[positions]`` returns the items at these
    positions; both int64, (k,).

    An item with the share s of all weights is drawn ``s * samples`` times, rounded down or up (systematic sampling:
    Madow and Madow, "On the Theory of Systematic Sampling", 1944).
    """

    window = 0
    """There are no windows that a disk reads as a whole."""

    def __init__(self, ends: Floats, samples: int, *, shuffle: bool, seed: int, epoch: int) -> None:
        self._ends, self._samples = ends, samples
        self._permutation = Permutation(samples, seed=seed, pass_number=epoch) if shuffle else None
        self._first = float(uniforms(np.zeros(1, np.int64), 1, of="sample_weights", seed=seed, epoch=epoch)[0, 0])

    def __getitem__(self, positions: Int64s) -> Int64s:
        draws = positions if self._permutation is None else self._permutation[positions]
        at = (draws + self._first) / self._samples * self._ends[-1]
        # Rounding may lead behind the last item, and past items of weight 0 at the end.
        last = int(np.searchsorted(self._ends, self._ends[-1]))
        items: Int64s = np.minimum(np.searchsorted(self._ends, at, side="right"), last).astype(np.int64)
        return items
