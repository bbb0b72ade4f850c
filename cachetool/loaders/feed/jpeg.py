"""JPEG images as arrays: decoded, cropped, resized and mirrored into the memory of a batch.

::

    bytes --simplejpeg, at 1/d of the size--> pixels --box--> OpenCV: Gauss, bilinear --> memory of the sample --> flip

A decoder of JPEG can decode at a half, a quarter or an eighth of the size, which takes less time. It does so while at
least :data:`_GAP` pixels a side remain for each pixel of the result. The other sizes that it offers (5/8, ...) take
longer than the full size.

A resize to fewer pixels must average, or fine patterns become coarse ones (aliasing). OpenCV's ``INTER_AREA`` does, but
takes longer than the decoder. A Gaussian filter before bilinear interpolation has nearly the same effect as the
antialiased resize of Pillow, in a third of the time. Pillow's filter for a reduction by r has a variance of r**2 / 6,
interpolation one of 1 / 6, so the Gaussian filter has the difference.
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Mapping
from typing import Any

import cv2
import numpy as np
import numpy.typing as npt
import simplejpeg

from cachetool.core.block import Column, Ragged
from cachetool.core.errors import BadObject, CorruptError, UsageError
from cachetool.core.image_limits import check_scans, check_sides
from cachetool.core.schema import Field
from cachetool.loaders.crop import uniforms
from cachetool.loaders.feed.crops import DRAWS, centre_boxes, random_boxes
from cachetool.loaders.order import Int64s

__all__ = ["JPEGDecoder"]

Pixels = npt.NDArray[Any]
Named = Callable[[int], str]

_GAP = 1.5
"""Pixels a side that remain for each pixel of the result, at least, when the decoder reduces the size."""
_AREA = 4.0
"""Reduction from which on areas are averaged first, because the kernel of the filter would be long."""
_LEAST = 0.1
"""Least variance for which a filter is used: below it the weights beside the middle are under 1 %."""
_JPEG = b"\xff\xd8\xff"
_OTHERS = {b"\x89PNG": "PNG", b"GIF8": "GIF", b"RIFF": "WebP", b"II*\x00": "TIFF", b"MM\x00*": "TIFF", b"BM": "BMP"}


class JPEGDecoder:
    """The decoder of one field; a :class:`~cachetool.loaders.feed.decoders.Decoder`.

    ``options`` are those of :class:`~cachetool.loaders.decode.JPEG` as plain values.
    """

    def __init__(self, options: Mapping[str, Any], *, seed: int) -> None:
        self._seed = seed
        self._size: tuple[int, int] | None = options["size"] and tuple(options["size"])
        self._crop, self._share = options["crop"], options["crop_pct"]
        self._scale, self._ratio = tuple(options["scale"]), tuple(options["ratio"])
        self._flip, self._planes = options["flip"], options["layout"] == "CHW"
        self._channels = 1 if options["grayscale"] else 3
        self._space = "GRAY" if options["grayscale"] else "RGB"
        self._stored: tuple[int, int] | None = None
        """Height and width of all images if no size was asked for."""
        # Memory for the pixels of one image, kept, because new memory costs a page fault for each 4 KiB.
        self._pixels, self._filtered, self._small = (np.empty(0, dtype=np.uint8) for _ in range(3))

    def field(self, stored: Field, first: Callable[[], tuple[Column, Named]]) -> Field:
        """See :class:`~cachetool.loaders.feed.decoders.Decoder`."""
        if not (stored.kind == "bytes" or (stored.kind, stored.rank, stored.dtype) == ("ragged", 1, "|u1")):
            raise UsageError(
                f"decode= of field {stored.name!r} needs the bytes of JPEG images, but it holds {stored.describe()};"
                " leave it out of decode="
            )
        if self._size is None and self._stored is None:
            column, named = first()
            self._stored = self._header(_value(column, 0), named, 0)
        height, width = self._size or self._stored or (0, 0)
        shape = (self._channels, height, width) if self._planes else (height, width, self._channels)
        return Field(stored.name, "|u1", shape)

    def decode(self, column: Column, out: Pixels, *, epoch: int, indices: Int64s, named: Named) -> None:
        """See :class:`~cachetool.loaders.feed.decoders.Decoder`."""
        images = [_value(column, at) for at in range(len(column))]
        headers = [self._header(data, named, at) for at, data in enumerate(images)]
        sides = np.array(headers, dtype=np.int64).reshape(-1, 2)
        draws = uniforms(indices, DRAWS + 1, of="decode", seed=self._seed, epoch=epoch)
        boxes = self._boxes(sides, draws[:, 1:]).tolist()
        flips = (draws[:, 0] < 0.5).tolist() if self._flip else [False] * len(images)
        for at, data in enumerate(images):
            try:
                if self._size is None:
                    self._copy(data, out[at], flip=flips[at])
                else:
                    self._resize(data, out[at], headers[at], boxes[at], flip=flips[at])
            # Pillow raises many kinds of errors for damaged data.
            except (ValueError, OSError, SyntaxError, EOFError, KeyError, IndexError, OverflowError) as error:
                raise _damaged(named(at), error) from error

    def _header(self, data: memoryview, named: Named, at: int) -> tuple[int, int]:
        """Return height and width."""
        if data[:3] != _JPEG:
            raise _not_jpeg(named(at), bytes(data[:4]))
        try:
            height, width, _, _ = simplejpeg.decode_jpeg_header(data, strict=False)
            check_sides(width, height, len(data))
            check_scans(bytes(data))
        # simplejpeg looks up the colours of a header that it could not read.
        except KeyError as error:
            raise _damaged(named(at), ValueError("its header has no image")) from error
        except ValueError as error:
            raise _damaged(named(at), error) from error
        except BadObject as error:
            raise CorruptError(f"{named(at)}: {error}") from error
        if self._stored is not None and self._stored != (height, width):
            raise UsageError(
                f"{named(at)}: the image has {height} x {width} pixels, but the first one had"
                f" {self._stored[0]} x {self._stored[1]}; give all images one size: decode= with JPEG(size=...)"
            )
        return height, width

    def _boxes(self, sides: Int64s, draws: npt.NDArray[np.float64]) -> Int64s:
        if self._crop == "random":
            return random_boxes(sides, draws, scale=self._scale, ratio=self._ratio)
        if self._crop == "center":
            assert self._size is not None
            return centre_boxes(sides, ratio=self._size[1] / self._size[0], share=self._share)
        return np.concatenate([np.zeros_like(sides), sides], axis=1)

    def _copy(self, data: memoryview, out: Pixels, *, flip: bool) -> None:
        """Write an image in its stored size."""
        if self._planes:
            pixels = self._decoded(data, self._stored or (0, 0))
        else:
            pixels = self._decoded(data, buffer=out.reshape(-1))
            if np.shares_memory(pixels, out):
                if flip:
                    cv2.flip(out, 1, dst=out)
                return
        pixels = pixels[:, ::-1] if flip else pixels
        out[...] = pixels.transpose(2, 0, 1) if self._planes else pixels

    def _resize(self, data: memoryview, out: Pixels, sides: tuple[int, int], box: list[int], *, flip: bool) -> None:
        """Write a box of an image, resized."""
        assert self._size is not None
        height, width = self._size
        most = min(box[2] / height, box[3] / width) / _GAP
        part = next(part for part in (8, 4, 2, 1) if part <= most or part == 1)
        pixels = self._decoded(data, sides, part)
        if pixels.shape[0] == sides[0]:
            # Pillow decoded the image, in its full size.
            part = 1
        # The box in pixels that were decoded, and the whole pixels that it touches.
        y, x, tall, broad = (value / part for value in box)
        rows, columns = slice(math.floor(y), math.ceil(y + tall)), slice(math.floor(x), math.ceil(x + broad))
        pixels = pixels[rows, columns]
        y, x = y - rows.start, x - columns.start
        steps = tall / height, broad / width
        if max(steps) > _AREA:
            scales = [2 / step if step > _AREA else 1.0 for step in steps]
            to = [max(1, math.ceil(n * scale)) for n, scale in zip(pixels.shape, scales, strict=False)]
            scales = [a / b for a, b in zip(to, pixels.shape, strict=False)]
            pixels = cv2.resize(pixels, (to[1], to[0]), interpolation=cv2.INTER_AREA)
            y, tall, x, broad = y * scales[0], tall * scales[0], x * scales[1], broad * scales[1]
        pixels = self._smooth(pixels, tall / height, broad / width)
        direct = not self._planes or self._channels == 1
        target = out.reshape(height, width, self._channels) if direct else self._room("_small", (height, width, 3))
        if (y, x, tall, broad) == (0, 0, *pixels.shape[:2]):
            cv2.resize(pixels, (width, height), dst=target, interpolation=cv2.INTER_LINEAR)
        else:
            _sample(pixels, target, (y, x, tall, broad))
        if flip:
            cv2.flip(target, 1, dst=target)
        if not direct:
            cv2.split(target, list(out))

    def _smooth(self, pixels: Pixels, *steps: float) -> Pixels:
        """Return the pixels averaged for a reduction by these steps down and across."""
        down, across = (math.sqrt(v) if (v := (step * step - 1) / 6) >= _LEAST else 0.0 for step in steps)
        if not down and not across:
            return pixels
        # As many weights as are above 1 % of all.
        kernel = [2 * max(1, round(2.5 * sigma)) + 1 if sigma else 1 for sigma in (across, down)]
        out = self._room("_filtered", pixels.shape)
        filtered: Pixels = cv2.GaussianBlur(
            pixels, kernel, across or 1.0, dst=out, sigmaY=down or 1.0, borderType=cv2.BORDER_REPLICATE
        )
        return filtered

    def _decoded(
        self, data: memoryview, sides: tuple[int, int] = (0, 0), part: int = 1, *, buffer: Pixels | None = None
    ) -> Pixels:
        """Return an image of ``sides`` at a ``part`` of its size, in memory that the next image uses again."""
        if buffer is None:
            height, width = sides if part == 1 else ((side + part - 1) // part for side in sides)
            buffer = self._room("_pixels", (max(height, 1) * max(width, 1) * self._channels,))
        least = {} if part == 1 else {"min_height": sides[0] // part, "min_width": sides[1] // part}
        try:
            pixels: Pixels = simplejpeg.decode_jpeg(data, self._space, buffer=buffer, **least)
        except ValueError:
            # Colours that simplejpeg cannot convert. Or a warning, such as bytes between segments: strict decoding
            # refuses these, Pillow does not. Both refuse an image that is cut short.
            pixels = self._by_pillow(data)
        return pixels

    def _by_pillow(self, data: memoryview) -> Pixels:
        """Return an image that simplejpeg cannot decode, in its full size."""
        from PIL import Image

        with Image.open(io.BytesIO(data), formats=("JPEG",)) as image:
            pixels = np.asarray(image.convert("L" if self._channels == 1 else "RGB"))
        return pixels.reshape(*pixels.shape[:2], self._channels)

    def _room(self, name: str, shape: tuple[int, ...]) -> Pixels:
        """Return memory for so many pixels, the same at each call."""
        memory: Pixels = getattr(self, name)
        size = math.prod(shape)
        if memory.size < size:
            memory = np.empty(size, dtype=np.uint8)
            setattr(self, name, memory)
        return memory[:size].reshape(shape)


def _sample(pixels: Pixels, out: Pixels, box: tuple[float, ...]) -> None:
    """Write the box of these pixels into ``out`` by bilinear interpolation; the box may begin between two pixels."""
    y, x, tall, broad = box
    down, across = tall / out.shape[0], broad / out.shape[1]
    # The centre of pixel i of the result is at x + (i + 0.5) * across, that of pixel j of the image at j + 0.5.
    matrix = np.array([[across, 0, x + across / 2 - 0.5], [0, down, y + down / 2 - 0.5]])
    how = cv2.INTER_LINEAR | cv2.WARP_INVERSE_MAP
    size = out.shape[1], out.shape[0]
    cv2.warpAffine(pixels, matrix, size, dst=out, flags=how, borderMode=cv2.BORDER_REPLICATE)


def _value(column: Column, at: int) -> memoryview:
    assert isinstance(column, Ragged)
    return column[at].data


def _not_jpeg(named: str, head: bytes) -> UsageError:
    kind = next((name for begins, name in _OTHERS.items() if head.startswith(begins)), "")
    what = f"a {kind} image" if kind else "no image that is known" if head else "empty"
    return UsageError(
        f"{named}: the value is {what}, not a JPEG; decode it in transform=, or pull it decoded: pull --decode image"
    )


def _damaged(named: str, error: Exception) -> CorruptError:
    why = " ".join(str(error).split())[:100]
    return CorruptError(
        f"{named}: the JPEG is damaged ({why}); if cachetool verify finds no error, the source has it so: leave it out"
        " with pull --decode image --on-error skip"
    )
