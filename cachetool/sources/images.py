"""Images into uint8 arrays (height, width, 3), by simplejpeg and Pillow (extra ``image``).

Gray, palette and CMYK images become RGB, an alpha channel is dropped, the first frame counts, and orientation tags are
not followed, so that pixels are as they are stored. Images of more than 8 bits a channel are refused rather than
rounded. An image that claims to be far larger than its bytes can mean is refused before it is unpacked.

Given a size, images are made that high and wide, sides stretched apart where their ratio differs: filtered bicubically
over all pixels that fall into one, averaged in blocks first as long as three a side are left of each. The decoder of a
JPEG does that, which is why a large one takes less time resized than whole.
"""

from __future__ import annotations

import contextlib
import io
import re
import threading
import warnings
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np

from cachetool.core.errors import BadObject, MissingExtra

__all__ = ["decode_image", "image_shape"]

T = TypeVar("T")

MAX_PIXELS = 2**27
"""No image may be larger."""
PLAIN_PIXELS = 2**24
MAX_RATIO = 200
"""An image of more than PLAIN_PIXELS must have at least one byte for so many bytes of pixels."""

MAX_SCANS = 100
"""Of one JPEG; encoders make about ten."""
_SCAN = b"\xff\xda"

_GAP = 3
"""How many pixels a side are left at least of what becomes one, when blocks of pixels are averaged beforehand."""

_FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM")
_MODES = ("1", "L", "LA", "La", "P", "PA", "RGB", "RGBA", "RGBa", "RGBX", "CMYK", "YCbCr")
_WIDTH, _LENGTH, _BITS_PER_SAMPLE, _ORIENTATION = 256, 257, 258, 274
"""Tags of TIFF."""
_OPENING = threading.Lock()


def decode_image(data: memoryview, size: tuple[int, int] | None = None) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """The pixels, uint8 (height, width, 3), of this height and width when ``size`` is given.

    Raises :class:`BadObject` for what is no image or too large, :class:`MissingExtra` without Pillow.
    """
    if size is not None:
        return _by_pillow(data, lambda image: _resized(image, *size))
    if bytes(data[:3]) == b"\xff\xd8\xff":
        found = _jpeg(data)
        if found is not None:
            return found
    return _by_pillow(data, lambda image: np.asarray(_rgb(image)))


def image_shape(data: memoryview, size: tuple[int, int] | None = None) -> tuple[int, int, int]:
    """The shape that :func:`decode_image` would give, out of the image's header; same errors."""
    height, width, depth = _own_shape(data)
    return (height, width, depth) if size is None else (*size, depth)


def _own_shape(data: memoryview) -> tuple[int, int, int]:
    if bytes(data[:3]) == b"\xff\xd8\xff":
        with contextlib.suppress(ImportError, ValueError):
            import simplejpeg

            height, width, _, _ = simplejpeg.decode_jpeg_header(data)
            _check(width, height, len(data))
            return height, width, 3
    return _by_pillow(data, lambda image: (*_stored_sides(image), 3))


def _refuse_scans(data: memoryview) -> None:
    """Every scan of a JPEG goes over all pixels, however few bytes it has: a million could be asked for."""
    if (scans := bytes(data).count(_SCAN)) > MAX_SCANS:
        raise BadObject(f"a JPEG of {scans} scans is refused; at most {MAX_SCANS} are read")


def _jpeg(data: memoryview) -> np.ndarray[Any, np.dtype[np.uint8]] | None:
    """A JPEG by the faster library; None when it is not there or cannot: CMYK, damaged."""
    try:
        import simplejpeg
    except ImportError:
        return None
    try:
        height, width, _, _ = simplejpeg.decode_jpeg_header(data)
        _check(width, height, len(data))
        _refuse_scans(data)
        pixels: np.ndarray[Any, np.dtype[np.uint8]] = simplejpeg.decode_jpeg(data, colorspace="RGB")
    except ValueError:
        return None
    return pixels


def _resized(image: Any, height: int, width: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    from PIL.Image import Resampling

    drafted = image.draft("RGB", (_GAP * width, _GAP * height))  # for a JPEG: an averaged one out of its decoder
    pixels = _rgb(image)
    box = drafted[1] if drafted else (0, 0, *pixels.size)
    return np.asarray(pixels.resize((width, height), Resampling.BICUBIC, box=box, reducing_gap=_GAP))


def _rgb(image: Any) -> Any:
    """The pixels as they are stored: those of a TIFF Pillow turns while it loads them, unless told that they are
    upright."""
    if image.format == "TIFF":
        image.getexif()[_ORIENTATION] = 1
    return image.convert("RGB")


def _stored_sides(image: Any) -> tuple[int, int]:
    """Height and width before Pillow turns the pixels."""
    if image.format == "TIFF":
        return int(image.tag_v2[_LENGTH]), int(image.tag_v2[_WIDTH])
    return image.height, image.width


def _by_pillow(data: memoryview, use: Callable[[Any], T]) -> T:
    try:
        from PIL import Image
    except ImportError:
        raise MissingExtra("decoding images", "image") from None
    try:
        # Opening reads the header alone. Pillow warns of large images, which are checked here; its filters are global.
        with _OPENING, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            image = Image.open(io.BytesIO(data), formats=_FORMATS)
        with image:
            _check(image.width, image.height, len(data))
            if image.format == "JPEG":
                _refuse_scans(data)
            if image.mode not in _MODES:
                raise BadObject(f"an image with pixels of type {image.mode}, not 8 bits; pull it as bytes")
            if (bits := _bits(image)) > 8:
                raise BadObject(f"an image of {bits} bits a channel, not 8 bits; pull it as bytes")
            return use(image)
    except Image.DecompressionBombError:
        raise BadObject("an image too large to be one") from None
    except (OSError, ValueError, SyntaxError, EOFError, KeyError, IndexError, OverflowError) as error:
        text = re.sub(r"\s*+<[^>]*+>", "", str(error)[:200].partition("\n")[0])  # Pillow names the object it reads from
        raise BadObject(
            f"not an image that can be read{f' ({text[:80]})' if text.isprintable() else ''}; {', '.join(_FORMATS)} are"
        ) from error


def _bits(image: Any) -> int:
    """Bits a channel in the file, where they may be more than 8: Pillow rounds those of coloured pixels, and their mode
    does not tell."""
    if image.format == "TIFF":
        return int(max(image.tag_v2.get(_BITS_PER_SAMPLE, (1,))))
    codec, _, _, how = image.tile[0] if image.tile else ("", (), 0, "")
    if image.format == "PNG":
        return 16 if ";16" in str(how) else 8
    return int(how[1]).bit_length() if codec in ("ppm", "ppm_plain") else 8  # by the largest value of a PPM


def _check(width: int, height: int, nbytes: int) -> None:
    pixels = width * height
    if pixels > MAX_PIXELS or (pixels > PLAIN_PIXELS and 3 * pixels > MAX_RATIO * nbytes):
        raise BadObject(f"an image of {width} x {height} pixels in {nbytes} bytes is refused as too large")
