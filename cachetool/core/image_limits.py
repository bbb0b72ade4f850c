"""Limits of images, checked by their headers before memory is taken or time is spent."""

from __future__ import annotations

from cachetool.core.errors import BadObject

__all__ = ["check_scans", "check_sides"]

MAX_PIXELS = 2**27
"""Largest number of pixels of an image."""
PLAIN_PIXELS = 2**24
MAX_RATIO = 200
"""Largest number of bytes of pixels for one byte of an image that has more than ``PLAIN_PIXELS`` pixels."""
MAX_SCANS = 100
"""Largest number of scans of a JPEG. Encoders make about ten."""
_SCAN = b"\xff\xda"


def check_sides(width: int, height: int, nbytes: int) -> None:
    """Raise :class:`BadObject` for an image that claims to be far larger than its bytes can mean."""
    pixels = width * height
    # The header alone decides, before memory is reserved: a few hundred bytes can claim 60,000 x 60,000 pixels.
    if pixels > MAX_PIXELS or (pixels > PLAIN_PIXELS and 3 * pixels > MAX_RATIO * nbytes):
        raise BadObject(f"an image of {width} x {height} pixels in {nbytes} bytes is refused as too large")


def check_scans(data: bytes) -> None:
    """Raise :class:`BadObject` for a JPEG of too many scans."""
    # The decoder goes over all pixels for every scan, however few bytes a scan has. A hostile file could ask for a
    # million of them.
    if (scans := data.count(_SCAN)) > MAX_SCANS:
        raise BadObject(f"a JPEG of {scans} scans is refused; at most {MAX_SCANS} are read")
