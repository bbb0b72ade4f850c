"""Crops and windows: boxes of the arrays of a sample, and values of its neighbours, as options of a loader.

::

    crop={"volume": (64, 64, 64)}, crops=16        an epoch has 16 random boxes of each sample
    crop={"volume": (64, 64, 64)}, crops="grid"    an epoch has every box of a grid over each sample
    offsets={"t2m": (-2, -1, 0, 1)}                t2m has the values of four rows of the source, (k, 4, *shape)

An epoch counts, shuffles and divides crops as it does samples. The corner of a random box depends on the seed, the
epoch, and the numbers of the sample and the crop. So it is the same for any number of feeders and ranks, and after a
resume. If shards of the resumed epoch are gone, samples have other numbers, and the boxes that are left are others.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from cachetool.core.errors import UsageError
from cachetool.core.schema import Field, Schema
from cachetool.core.text import shown
from cachetool.core.units import is_one_of, parse_whole
from cachetool.formats.runs import Int64s

__all__ = [
    "Corner",
    "CropOption",
    "Crops",
    "Offsets",
    "OffsetsOption",
    "corner_of",
    "hashed",
    "parse_crop",
    "parse_offsets",
    "uniforms",
    "window",
]

Box: TypeAlias = tuple[int | None, ...]
"""Sizes of a box; None: the whole axis."""
CropOption: TypeAlias = Mapping[str, int | Sequence[int | None]]
"""Type of ``crop=``: sizes of the boxes, by field."""
Corner: TypeAlias = Callable[[Mapping[str, Any], np.random.Generator], Sequence[int]]
"""Type of ``corner=``: a function from a sample and a random generator to the first element of a box."""
OffsetsOption: TypeAlias = Mapping[str, int | Iterable[int]]
"""Type of ``offsets=``: numbers of rows, by field."""
Offsets: TypeAlias = tuple[tuple[str, tuple[int, ...]], ...]
"""The checked argument ``offsets=``."""

_PADS = ("reflect", "edge")
_FARTHEST = 2**40
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def corner_of(name: str) -> str:
    """Return the name of the field that holds the corners of the crops of a field."""
    return f"{name}_corner"


@dataclass(frozen=True, slots=True)
class Crops:
    """The arguments ``crop``, ``crops``, ``stride`` and ``crop_pad`` of a loader."""

    boxes: tuple[tuple[str, Box], ...]
    """Fields, each with the sizes of its boxes."""
    count: int | None
    """Number of random crops of each sample; None: a grid."""
    stride: tuple[int, ...] | None = None
    """Distance of the boxes of a grid along each axis; None: boxes lie side by side."""
    pad: float | str | None = None
    """How a sample smaller than its box is filled up: a number, ``reflect`` or ``edge``; None: it is an error."""

    @classmethod
    def from_json(cls, value: Mapping[str, Any] | None) -> Crops | None:
        """Rebuild the value from plain values."""
        if value is None:
            return None
        boxes = tuple((name, tuple(box)) for name, box in value["boxes"])
        stride = None if value["stride"] is None else tuple(value["stride"])
        return cls(boxes, value["count"], stride, value["pad"])

    def state(self) -> str:
        """Return the value as text, for states and messages."""
        boxes = ", ".join(f"{name!r}: {box}" for name, box in self.boxes)
        text = f"{{{boxes}}}, crops={'grid' if self.count is None else self.count}"
        text += "" if self.stride is None else f", stride={self.stride}"
        return text if self.pad is None else f"{text}, crop_pad={self.pad}"

    def field(self, stored: Field) -> Field:
        """Return the field of the crops of a stored field. Raises :class:`UsageError` for one that has no such box."""
        box = dict(self.boxes)[stored.name]
        if not stored.shape or len(box) != stored.rank:
            raise UsageError(
                f"crop= gives field {stored.name!r} a box of {len(box)} sizes {shown(box)}, but a sample of it is"
                f" {stored.describe()}; give one size for each axis"
            )
        sizes = []
        for axis, (wanted, size) in enumerate(zip(box, stored.shape, strict=True)):
            if wanted is None and size is None:
                raise UsageError(
                    f"crop= keeps axis {axis} of field {stored.name!r} whole, but its size differs from sample to"
                    " sample; give a size"
                )
            if size is not None and wanted is not None and wanted > size and self.pad is None:
                raise UsageError(
                    f"crop= gives field {stored.name!r} a box of {wanted} along axis {axis}, but a sample has only"
                    f" {size}; give a smaller box, or fill up with crop_pad=0"
                )
            sizes.append(wanted if wanted is not None else size)
        return replace(stored, shape=tuple(sizes))

    def box(self, stored: Field) -> tuple[int, ...]:
        """Return the sizes of the boxes of a stored field."""
        return self.field(stored).sizes

    def each(self, schema: Schema) -> int | None:
        """Return the number of crops of each sample; None if it differs from sample to sample.

        Raises :class:`UsageError` if fields have grids of different numbers of boxes.
        """
        if self.count is not None:
            return self.count
        fields = [schema[name] for name, _ in self.boxes]
        if any(field.kind == "ragged" for field in fields):
            return None
        counts: dict[str, int] = {
            field.name: math.prod(self.grid(np.array([field.sizes]), self.box(field))[0].tolist()) for field in fields
        }
        if len(set(counts.values())) > 1:
            raise self.unequal(counts)
        return next(iter(counts.values()))

    def unequal(self, counts: Mapping[str, int]) -> UsageError:
        """Return the error for a sample of which each field has another number of boxes."""
        return UsageError(
            f"crops='grid' needs the same number of boxes in each field of crop=, but one sample has {counts}; give"
            " boxes in proportion to the sizes of the samples"
        )

    def grid(self, shapes: Int64s, box: tuple[int, ...]) -> Int64s:
        """Return the number of boxes along each axis of samples of these shapes, (k, rank). The last box of an axis
        ends where the sample ends."""
        stride = np.array(self._stride(box), dtype=np.int64)
        counts: Int64s = 1 + -(-np.maximum(shapes - np.array(box, dtype=np.int64), 0) // stride)
        return counts

    def corners(self, shapes: Int64s, box: tuple[int, ...], crops: Int64s, draws: npt.NDArray[np.float64]) -> Int64s:
        """Return the corners of boxes, (k, rank).

        ``shapes`` are those of the samples, (k, rank); ``crops`` the numbers of the crops, (k,); ``draws`` random
        numbers of 0 to below 1, (k, at least rank).
        """
        room = np.maximum(shapes - np.array(box, dtype=np.int64), 0)
        if self.count is not None:
            # The minimum, because a number just below 1 may round up when it is multiplied.
            chosen: Int64s = np.minimum((draws[:, : len(box)] * (room + 1)).astype(np.int64), room)
            return chosen
        counts = self.grid(shapes, box)
        at = np.empty_like(room)
        for axis in range(len(box) - 1, -1, -1):
            crops, at[:, axis] = np.divmod(crops, counts[:, axis])
        corners: Int64s = np.minimum(at * np.array(self._stride(box), dtype=np.int64), room)
        return corners

    def _stride(self, box: tuple[int, ...]) -> tuple[int, ...]:
        if self.stride is None:
            return box
        if len(self.stride) not in (1, len(box)):
            raise UsageError(f"stride={self.stride} cannot be used with a box of {len(box)} sizes; give one for each")
        return self.stride * len(box) if len(self.stride) == 1 else self.stride


def uniforms(numbers: Int64s, count: int, *, of: str, seed: int, epoch: int) -> npt.NDArray[np.float64]:
    """Return ``count`` random numbers of 0 to below 1 for each of ``numbers``, (k, count); ``of`` names their use.

    They are computed for a whole batch, because a generator of NumPy for each sample would take 20 us.
    """
    digest = hashlib.sha256(f"cachetool {of} {seed} {epoch}".encode()).digest()
    key = np.frombuffer(digest[:8], dtype="<u8").astype(np.uint64)
    state = hashed(key + numbers.astype(np.uint64) * _GOLDEN)
    mixed = hashed(state[:, None] + np.arange(1, count + 1, dtype=np.uint64) * _GOLDEN)
    out: npt.NDArray[np.float64] = (mixed >> np.uint64(11)).astype(np.float64) * 2.0**-53
    return out


def parse_crop(crop: object, crops: object, stride: object, corner: object, crop_pad: Any) -> Crops | None:
    """Return these arguments of a loader in their one form; None without ``crop``. Raises :class:`UsageError`."""
    if crop is None:
        for name, value in {"crops": crops, "stride": stride, "corner": corner, "crop_pad": crop_pad}.items():
            if value is not None:
                raise UsageError(f"{name}={shown(value)} needs crop=, a dict such as {{'volume': (64, 64, 64)}}")
        return None
    if not isinstance(crop, Mapping) or not crop or not all(isinstance(name, str) for name in crop):
        raise UsageError(
            f"crop={shown(crop)} cannot be used; use a dict of fields and the sizes of their boxes, such as"
            " {'volume': (64, 64, 64)}"
        )
    boxes = tuple((name, _box(name, box)) for name, box in crop.items())
    if isinstance(crops, str) and crops != "grid":
        raise UsageError(f"crops={shown(crops)} cannot be used; it must be a number of boxes, or 'grid'")
    if crops != "grid" and crops is not None:
        crops = parse_whole(crops, what="crops=", least=1)
    if stride is not None and crops != "grid":
        raise UsageError(f"stride={shown(stride)} needs crops='grid'")
    if corner is not None and crops == "grid":
        raise UsageError("corner= chooses the corners of crops, which crops='grid' fixes; leave one of them out")
    if corner is not None and not callable(corner):
        raise UsageError(f"corner={shown(corner)} cannot be used; it must be a function of a sample and rng")
    sizes = None if stride is None else tuple(_size("stride=", size) for size in _listed(stride))
    pad = crop_pad.item() if isinstance(crop_pad, np.generic) else crop_pad
    if pad is not None and not isinstance(pad, int | float) and not is_one_of(pad, _PADS):
        raise UsageError(f"crop_pad={shown(pad)} cannot be used; it must be a number, 'reflect' or 'edge'")
    return Crops(boxes, None if crops == "grid" else 1 if crops is None else int(str(crops)), sizes, pad)


def parse_offsets(offsets: object) -> Offsets:
    """Return the argument ``offsets`` of a loader in its one form. Raises :class:`UsageError`."""
    if offsets is None:
        return ()
    if not isinstance(offsets, Mapping) or not offsets or not all(isinstance(name, str) for name in offsets):
        raise UsageError(
            f"offsets={shown(offsets)} cannot be used; use a dict of fields and numbers of rows, such as"
            " {'t2m': (-1, 0, 1)}"
        )
    parsed = []
    for name, given in offsets.items():
        what = f"offsets= of field {shown(name)}:"
        numbers = [given] if isinstance(given, int) else list(given) if isinstance(given, Iterable) else []
        if isinstance(given, str) or not numbers:
            raise UsageError(f"{what} {shown(given)} cannot be used; give numbers of rows, such as (-1, 0, 1)")
        parsed.append((name, tuple(parse_whole(number, what=what) for number in numbers)))
        if any(abs(number) >= _FARTHEST for number in parsed[-1][1]):
            raise UsageError(f"{what} {shown(given)} reaches further than a series can be long")
    return tuple(parsed)


def window(field: Field, offsets: Mapping[str, tuple[int, ...]]) -> Field:
    """Return the field of windows of ``field``, whose values have one shape. Raises :class:`UsageError` for others."""
    if field.name not in offsets:
        return field
    if field.kind != "fixed":
        raise UsageError(
            f"offsets= puts several values of field {field.name!r} into one array, but it is {field.describe()}; choose"
            " a field whose values have one shape"
        )
    return replace(field, shape=(len(offsets[field.name]), *field.sizes), dims=(), classes=())


def _listed(value: Any) -> Sequence[Any]:
    return tuple(value) if isinstance(value, tuple | list) else (value,)


def _box(name: str, value: object) -> Box:
    sizes = _listed(value)
    if not sizes or all(size is None for size in sizes):
        raise UsageError(f"crop= of field {shown(name)} has no size; give one for each axis, or None for a whole axis")
    return tuple(None if size is None else _size(f"a size of crop= of field {shown(name)}:", size) for size in sizes)


def _size(what: str, value: object) -> int:
    return parse_whole(value, what=what, least=1)


def hashed(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Return the finaliser of splitmix64 of these values."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
