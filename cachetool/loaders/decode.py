"""The values of ``decode=``: which fields the feeders decode, how, and the checks of these options.

::

    decode={"image": JPEG(size=224)}  --parse_decode-->  (("image", "jpeg", {"size": (224, 224), ...}),)   in Settings
    decode={"t2m": "cf"}                                 (("t2m", "cf", {}),)
    decode="cf"                                          (("*", "cf", {}),)
                                                          Decoders of each feeder (cachetool.loaders.feed.decoders)

A further decoder has a name in :data:`_NAMES`, with a dataclass of its options if it has some, and an entry in
:mod:`cachetool.loaders.feed.decoders`.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import math
import operator
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, TypeAlias

from cachetool.core.errors import MissingExtra, UsageError
from cachetool.core.text import shown
from cachetool.core.units import is_one_of, parse_flag

__all__ = ["ALL", "JPEG", "Decode", "DecodeOption", "parse_decode"]

Decode: TypeAlias = tuple[tuple[str, str, Mapping[str, Any]], ...]
"""For each field its name, the name of its decoder, and the decoder's options as plain values."""

ALL = "*"
"""In place of the name of a field: all fields that have CF attributes. No field can have this name."""

_MOST = 8000
"""Most pixels of one side of ``size``, because OpenCV addresses 2**15 pixels of a side, and four are averaged."""


@dataclass(frozen=True, kw_only=True, slots=True)
class JPEG:
    """Options of ``decode=`` for a field of JPEG images, which become arrays of ``uint8``.

    An image becomes an array of shape (height, width, 3). The result of a resize is antialiased. Random boxes and flips
    are decided by ``seed`` of the loader, the epoch and the sample, as for ``transform``; fields with equal options and
    images of equal size get the same box and flip. Orientation tags are not followed.

    Args:
        size: Height and width of the result in pixels, or one number for both. Default: the size that is stored; all
            images must then have the same size.
        crop: Box of the image that is resized to ``size``. None: the whole image, which is stretched. ``"center"``: the
            largest box in the middle that has the ratio of sides of ``size``. ``"random"``: a random box, another one
            in each epoch. Needs ``size``. Default: None.
        crop_pct: Sides of the box of ``"center"`` as a share of the largest ones, above 0 and at most 1: 0.875 is the
            usual resize to 256 and crop of 224. Default: 1.
        scale: Least and largest share of the image's area for a box of ``"random"``. Default: (0.08, 1.0).
        ratio: Least and largest width divided by height for a box of ``"random"``. Default: (3/4, 4/3).
        flip: True: an image is mirrored left to right with a chance of one half. Default: False.
        layout: ``"HWC"``, or ``"CHW"`` for arrays of shape (3, height, width). Default: ``"HWC"``.
        grayscale: True: one channel of gray in place of three of colour, such as (height, width, 1). Default: False.

    Raises:
        UsageError: An option cannot be used.

    Example:
        >>> from cachetool.loaders.numpy import JPEG
        >>> JPEG(size=224, crop="random", flip=True).size
        (224, 224)
    """

    decoder: ClassVar = "jpeg"

    size: tuple[int, int] | int | None = None
    crop: str | None = None
    crop_pct: float = 1.0
    scale: tuple[float, float] = (0.08, 1.0)
    ratio: tuple[float, float] = (3 / 4, 4 / 3)
    flip: bool = False
    layout: str = "HWC"
    grayscale: bool = False

    def __post_init__(self) -> None:
        # The dataclass is frozen; its checks may still bring a value into the form that the decoder reads.
        for name, value in {
            "size": None if self.size is None else _size(self.size),
            "crop_pct": _share(self.crop_pct),
            "scale": _numbers("scale", self.scale, most=1),
            "ratio": _numbers("ratio", self.ratio),
            "flip": parse_flag(self.flip, what="flip="),
            "grayscale": parse_flag(self.grayscale, what="grayscale="),
        }.items():
            object.__setattr__(self, name, value)
        _require(is_one_of(self.crop, (None, "center", "random")), "crop", self.crop, "'random', 'center' or None")
        _require(is_one_of(self.layout, ("HWC", "CHW")), "layout", self.layout, "'HWC' or 'CHW'")
        if self.crop is not None and self.size is None:
            raise UsageError(f"crop={self.crop!r} needs a size that boxes are resized to: size=(224, 224)")


DecodeOption: TypeAlias = Mapping[str, str | JPEG] | str
"""Names of fields, each with the name of a decoder or with its options; or ``"cf"`` for all fields with CF
attributes."""

_CF = "cf"
_NAMES = (JPEG.decoder, _CF)


def parse_decode(value: object) -> Decode:
    """Return the option ``decode=`` as plain values. Raises :class:`UsageError`, and :class:`MissingExtra` if a library
    that decodes is not installed."""
    if value is None:
        return ()
    if is_one_of(value, (_CF,)):
        return ((ALL, _CF, {}),)
    if not isinstance(value, Mapping) or not value or not all(isinstance(name, str) for name in value):
        raise UsageError(
            f"decode={shown(value)} cannot be used; it must be a dict such as {{'image': 'jpeg'}}, or 'cf'"
        )
    parsed: list[tuple[str, str, Mapping[str, Any]]] = []
    for field, decoder in value.items():
        options: Any = decoder
        if is_one_of(decoder, (_CF,)):
            parsed.append((field, _CF, {}))
            continue
        if is_one_of(decoder, (JPEG.decoder,)):
            options = JPEG()
        if type(options) is not JPEG:
            raise UsageError(
                f"decode={{{field!r}: {shown(decoder)}}} cannot be used; the decoders are"
                f" {', '.join(map(repr, _NAMES))}, or with options JPEG(size=(224, 224))"
            )
        parsed.append((field, options.decoder, dataclasses.asdict(options)))
    # Looked up and not imported: only the feeders need them.
    images = any(decoder == JPEG.decoder for _, decoder, _ in parsed)
    if images and not all(map(importlib.util.find_spec, ("simplejpeg", "cv2", "PIL"))):
        raise MissingExtra("decode= of JPEG images", "image")
    return tuple(parsed)


def _size(value: object) -> tuple[int, int]:
    sides = value if isinstance(value, tuple | list) else (value, value)
    try:
        height, width = (0 if isinstance(side, bool) else operator.index(side) for side in sides)
    except (TypeError, ValueError):
        height = width = 0
    _require(1 <= min(height, width) <= max(height, width) <= _MOST, "size", value, f"two sides of 1 to {_MOST} pixels")
    return height, width


def _share(value: object) -> float:
    number = float(value) if isinstance(value, int | float) else 0.0
    _require(0 < number <= 1, "crop_pct", value, "a number above 0 and at most 1")
    return number


def _numbers(name: str, value: object, *, most: float = math.inf) -> tuple[float, float]:
    try:
        least, largest = map(float, value)  # type: ignore[call-overload]
    except (TypeError, ValueError):
        least = largest = 0.0
    wanted = "above 0" + (" and at most 1" if most == 1 else "")
    _require(0 < least <= largest <= most and largest < math.inf, name, value, f"two numbers {wanted}, the lower first")
    return least, largest


def _require(good: bool, name: str, value: object, wanted: str) -> None:
    if not good:
        raise UsageError(f"{name}={shown(value)} cannot be used; it must be {wanted}")
