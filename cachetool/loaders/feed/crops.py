"""Boxes of images: which part of each image of a batch is kept, and which images are mirrored.

A box is a row of four numbers in stored pixels: top, left, height, width. Random numbers are computed from seed, epoch
and the number of the sample, so a sample gets the same box with any number of feeders, and after a resume.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from cachetool.loaders.order import Int64s

__all__ = ["DRAWS", "centre_boxes", "random_boxes"]

Floats = npt.NDArray[np.float64]
_TRIES = 10
"""Boxes that are tried, as in torchvision, until one fits into the image."""
DRAWS = 4 * _TRIES
"""Random numbers of one box."""


def random_boxes(sides: Int64s, draws: Floats, *, scale: tuple[float, float], ratio: tuple[float, float]) -> Int64s:
    """Return a random box of each image, as ``RandomResizedCrop`` of torchvision chooses it.

    Args:
        sides: Height and width of each image, (k, 2).
        draws: Random numbers of 0 to below 1, (k, 40).
        scale: Least and largest share of the area.
        ratio: Least and largest width divided by height.

    Returns:
        The boxes, (k, 4).
    """
    heights, widths = sides[:, :1], sides[:, 1:]
    area, shape, top, left = draws.reshape(len(sides), 4, _TRIES).swapaxes(0, 1)
    areas = heights * widths * (scale[0] + area * (scale[1] - scale[0]))
    low, high = np.log(ratio)
    ratios = np.exp(low + shape * (high - low))
    high_sides = np.rint(np.sqrt(areas / ratios)).astype(np.int64)
    wide_sides = np.rint(np.sqrt(areas * ratios)).astype(np.int64)
    fits = (high_sides > 0) & (wide_sides > 0) & (high_sides <= heights) & (wide_sides <= widths)
    tops = (top * (heights - high_sides + 1)).astype(np.int64)
    lefts = (left * (widths - wide_sides + 1)).astype(np.int64)
    boxes = np.stack([tops, lefts, high_sides, wide_sides], axis=-1)[np.arange(len(sides)), fits.argmax(axis=1)]
    # No box fitted: the largest box in the middle with the nearest ratio.
    stored = widths / heights
    nearest = _centred(sides, np.clip(stored, *ratio)[:, 0])
    return np.where(fits.any(axis=1)[:, None], boxes, nearest)


def centre_boxes(sides: Int64s, *, ratio: float, share: float) -> Int64s:
    """Return the box in the middle of each image with this ratio of width to height, (k, 4); its sides are ``share``
    of the largest ones."""
    return _centred(sides, np.full(len(sides), ratio), share)


def _centred(sides: Int64s, ratios: Floats, share: float = 1.0) -> Int64s:
    heights, widths = sides.T
    high_sides = np.minimum(heights, np.rint(share * np.minimum(heights, widths / ratios))).astype(np.int64)
    wide_sides = np.minimum(widths, np.rint(share * np.minimum(widths, heights * ratios))).astype(np.int64)
    high_sides, wide_sides = np.maximum(high_sides, 1), np.maximum(wide_sides, 1)
    return np.stack([(heights - high_sides) // 2, (widths - wide_sides) // 2, high_sides, wide_sides], axis=-1)
