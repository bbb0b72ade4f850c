"""The decoding of images into arrays, and ``--decode image`` for the values of files.

:func:`decode_image` makes uint8 arrays (height, width, 3) with simplejpeg and Pillow (extra ``image``). Gray,
palette and CMYK images become RGB, an alpha channel is dropped, and the first frame counts. Orientation tags are not
followed, so pixels are as they are stored. Images of more than 8 bits a channel are refused, because they would be
rounded. An image that claims to be far larger than its bytes can mean is refused before it is unpacked.

``masks`` is for the labels of segmentation and for depth. Lossless images of one channel keep the numbers that are
stored, (height, width): the indices of a palette, gray, 0 and 1 as uint8; 16 bits as uint16. JPEG and WebP, whose
numbers are not exact, and images of colours are decoded as without ``masks``.

Given a size, images get that height and width, without keeping their ratio of sides. The filter is bicubic over all
pixels that fall into one. Before it, blocks of pixels are averaged while at least three pixels a side remain for
each pixel of the result. The decoder of a JPEG does the averaging, so a large JPEG takes less time resized than in
full. A pixel of a mask is the nearest one.

``--decode image`` also works for files whose values have no name that tells what they are: TFRecord, HDF5, Zarr,
Parquet, LMDB. A field of bytes, or of lists of uint8, is a field of images if its first value begins as an image
does. Every value must then be an image. :func:`with_images` looks at the first draws, and :class:`ImageSurvey` at
all samples::

    bytes, or a list of uint8, whose first value begins as an image does  ->  uint8 (height, width, 3), or a mask
    all of one size  ->  a fixed field            several sizes  ->  a ragged one

:func:`unpacked` decodes the values of such a field when they are read.
"""

from __future__ import annotations

import contextlib
import io
import math
import re
import threading
import warnings
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from cachetool.core.block import Block, Column, Ragged
from cachetool.core.errors import BadObject, MissingExtra, UsageError
from cachetool.core.image_limits import check_scans, check_sides
from cachetool.core.schema import KEY, Field, Schema
from cachetool.sources.base import ReadResult, Skipped
from cachetool.sources.limits import quoted
from cachetool.sources.options import ImageSize, Pixels

__all__ = [
    "PACKED",
    "begins_as_image",
    "decode_image",
    "ImageSurvey",
    "image_outline",
    "image_shape",
    "no_images",
    "is_list_of_bytes",
    "packed",
    "unpacked",
    "with_images",
]


_SIGNATURES = (b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n", b"GIF8", b"II*\x00", b"MM\x00*")

PACKED = 16
"""About how many times larger a photograph is without compression."""

_GRAYS = {"L;2": 85, "L;4": 17}
"""Factors by which Pillow multiplies gray values of 2 and 4 bits."""
_JPEG = b"\xff\xd8\xff"

T = TypeVar("T")
Array = npt.NDArray[Any]
Outline = tuple[str, tuple[int, ...]]
"""Dtype and shape of an array."""

_GAP = 3
"""Pixels a side that remain for each pixel of the result, at least, when blocks of pixels are averaged before the
filter."""

_FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM")
_MODES = ("1", "L", "LA", "La", "P", "PA", "RGB", "RGBA", "RGBa", "RGBX", "CMYK", "YCbCr")
_WIDTH, _LENGTH, _BITS_PER_SAMPLE, _ORIENTATION = 256, 257, 258, 274
"""Numbers of TIFF tags."""
_OPENING = threading.Lock()


def decode_image(data: memoryview, size: ImageSize | None = None, *, masks: bool = False) -> Array:
    """Return the pixels of an image, uint8 (height, width, 3), or the numbers of a mask, (height, width).

    ``size``: height and width of the result; default: those of the image. Raise :class:`BadObject` for data that is
    no image or too large, and :class:`MissingExtra` without Pillow.
    """
    # simplejpeg is faster for whole images. Resizing is left to Pillow: simplejpeg's result is up to 80 steps apart at
    # sides that are no multiple of 8.
    if size is None and bytes(data[:3]) == _JPEG:
        pixels = _jpeg(data)
        if pixels is not None:
            return pixels

    def pixels_of(image: Any) -> Array:
        if masks and _mask_dtype(image):
            return _mask(image, size)
        return np.asarray(_rgb(image)) if size is None else _resized(image, *size)

    return _by_pillow(data, pixels_of, masks=masks)


def image_shape(data: memoryview, size: ImageSize | None = None) -> tuple[int, ...]:
    """Return the shape that :func:`decode_image` would return, read from the image's header. Errors are the same."""
    return image_outline(data, Pixels(size))[1]


def image_outline(data: memoryview, pixels: Pixels) -> tuple[str, tuple[int, ...]]:
    """Return the dtype and shape that :func:`decode_image` would return, read from the image's header. Errors are the
    same."""
    dtype, *sides = _outline(data, masks=pixels.masks)
    height, width = pixels.size or sides
    return (dtype, (height, width)) if dtype else ("|u1", (height, width, 3))


def _outline(data: memoryview, *, masks: bool) -> tuple[str, int, int]:
    """Return the dtype of a mask or an empty text, the height and the width."""
    if bytes(data[:3]) == _JPEG:
        with contextlib.suppress(ImportError, ValueError):
            import simplejpeg

            height, width, _, _ = simplejpeg.decode_jpeg_header(data)
            check_sides(width, height, len(data))
            return "", height, width
    return _by_pillow(data, lambda image: (_mask_dtype(image) if masks else "", *_stored_sides(image)), masks=masks)


def _mask_dtype(image: Any) -> str:
    """Return the dtype of the numbers of a lossless image of one channel, or an empty text for other images."""
    # Their compression changes numbers. A class 3 in a mask could come back as 2.
    if image.format in ("JPEG", "WEBP"):
        return ""
    return {"1": "|u1", "L": "|u1", "P": "|u1", "I": "<u2" if image.format == "PNG" else ""}.get(
        image.mode, "<u2" if image.mode.startswith("I;16") else ""
    )


def _mask(image: Any, size: ImageSize | None) -> Array:
    """Return the numbers of a mask as they are stored."""
    dtype = _mask_dtype(image)
    scale = _GRAYS.get(str(image.tile[0][3]) if image.tile else "", 1)
    _upright(image)
    numbers: Array = np.asarray(image)
    if size is not None:
        # Each pixel of the result takes the stored pixel at its centre. An average of two class numbers would be a
        # third class.
        rows, columns = ((2 * np.arange(to) + 1) * own // (2 * to) for to, own in zip(size, numbers.shape, strict=True))
        numbers = numbers[rows[:, None], columns]
    # Pillow scales gray of 2 and 4 bits up to 255. The division restores the stored numbers exactly.
    return numbers.astype(dtype, copy=False) // np.uint8(scale)


def _jpeg(data: memoryview) -> np.ndarray[Any, np.dtype[np.uint8]] | None:
    """Return the pixels of a JPEG by simplejpeg. Return None if simplejpeg is missing or cannot decode it: CMYK,
    damaged."""
    try:
        import simplejpeg
    except ImportError:
        return None
    try:
        height, width, _, _ = simplejpeg.decode_jpeg_header(data)
        check_sides(width, height, len(data))
        check_scans(bytes(data))
        pixels: np.ndarray[Any, np.dtype[np.uint8]] = simplejpeg.decode_jpeg(data, colorspace="RGB")
    except ValueError:
        return None
    return pixels


def _resized(image: Any, height: int, width: int) -> Array:
    from PIL.Image import Resampling

    # The decoder of a JPEG averages blocks of 2, 4 or 8 pixels: an image of 12 million pixels takes 18 ms instead of
    # 119. For other formats draft returns None.
    drafted = image.draft("RGB", (_GAP * width, _GAP * height))
    pixels = _rgb(image)
    box = drafted[1] if drafted else (0, 0, *pixels.size)
    return np.asarray(pixels.resize((width, height), Resampling.BICUBIC, box=box, reducing_gap=_GAP))


def _rgb(image: Any) -> Any:
    """Return the image in RGB, with its pixels as they are stored."""
    _upright(image)
    return image.convert("RGB")


def _upright(image: Any) -> None:
    """Set the orientation of a TIFF to upright, so that Pillow does not rotate the pixels."""
    if image.format == "TIFF":
        # Pillow rotates the pixels of a TIFF by its orientation tag while it loads them, and of no other format. Pixels
        # must be as stored.
        image.getexif()[_ORIENTATION] = 1


def _stored_sides(image: Any) -> tuple[int, int]:
    """Return height and width before Pillow rotates the pixels."""
    if image.format == "TIFF":
        return int(image.tag_v2[_LENGTH]), int(image.tag_v2[_WIDTH])
    return image.height, image.width


def _by_pillow(data: memoryview, use: Callable[[Any], T], *, masks: bool) -> T:
    try:
        from PIL import Image
    except ImportError:
        raise MissingExtra("decoding images", "image") from None
    try:
        # Image.open reads only the header. Pillow warns of large images, whose size is checked below. The filters of
        # warnings are global in a process, so threads must not change them at the same time.
        with _OPENING, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            image = Image.open(io.BytesIO(data), formats=_FORMATS)
        with image:
            check_sides(image.width, image.height, len(data))
            if image.format == "JPEG":
                check_scans(bytes(data))
            if masks and _mask_dtype(image):
                return use(image)
            if image.mode not in _MODES:
                mask = ", or read its numbers with --decode mask" if _mask_dtype(image) else ""
                raise BadObject(f"an image with pixels of type {image.mode}, not 8 bits; pull it as bytes{mask}")
            if (bits := _bits(image)) > 8:
                raise BadObject(f"an image of {bits} bits a channel, not 8 bits; pull it as bytes")
            return use(image)
    except Image.DecompressionBombError:
        raise BadObject("the image is too large (too many pixels)") from None
    except (OSError, ValueError, SyntaxError, EOFError, KeyError, IndexError, OverflowError) as error:
        # Pillow's message contains the Python object that it reads from, with an address in memory.
        text = re.sub(r"\s*+<[^>]*+>", "", str(error)[:200].partition("\n")[0])
        raise BadObject(
            f"not an image that can be read{f' ({text[:80]})' if text.isprintable() else ''}; supported formats:"
            f" {', '.join(_FORMATS)}"
        ) from error


def _bits(image: Any) -> int:
    """Return the bits a channel in the file, if they may be more than 8."""
    if image.format == "TIFF":
        # Pillow rounds coloured pixels of 16 bits to 8, and the image's mode does not tell. So the number of bits is
        # read from the file's own header.
        return int(max(image.tag_v2.get(_BITS_PER_SAMPLE, (1,))))
    codec, _, _, how = image.tile[0] if image.tile else ("", (), 0, "")
    if image.format == "PNG":
        return 16 if ";16" in str(how) else 8
    # A PPM states the largest value of a pixel instead of a number of bits.
    return int(how[1]).bit_length() if codec in ("ppm", "ppm_plain") else 8


def no_images(place: str, decode: str | None, schema: Schema, why: str) -> UsageError:
    """Return the error of ``--decode`` for a ``place`` where no value is to be decoded."""
    fields = ", ".join(f"{field.name} ({field.describe()})" for field in schema if field.name != KEY)
    return UsageError(f"--decode {decode} finds no image in {place}: {why}; the fields are {fields}")


def is_list_of_bytes(field: Field) -> bool:
    """Return True if samples are lists of uint8 of any length, as users of HDF5 store images."""
    return field.kind == "ragged" and field.rank == 1 and field.numpy == np.uint8


def begins_as_image(column: Any) -> bool:
    """Return True if the first value of a column that is not empty begins as an image does."""
    assert isinstance(column, Ragged)
    nonempty = np.flatnonzero(column.sizes)
    if not len(nonempty):
        return False
    head = column[int(nonempty[0])][:16].tobytes()
    return head.startswith(_SIGNATURES) or (head[:4] == b"RIFF" and head[8:12] == b"WEBP")


def with_images(schema: Schema, blocks: Sequence[Block], pixels: Pixels, *, skip_bad: bool) -> tuple[Schema, int]:
    """Return the schema of a source after its images are decoded, and the bytes that ``blocks``, its first samples,
    then have.

    Raise :class:`BadObject` for a value that is no image among images, unless ``skip_bad`` leaves it out.
    """
    fields, nbytes = [], sum(block.nbytes for block in blocks)
    for field in schema:
        columns = [block.columns[field.name] for block in blocks] if _may_hold_images(field) else []
        if any(map(begins_as_image, columns)):
            outlines = [o for block in blocks for o in _outlines(block, field.name, pixels, _some, skip_bad=skip_bad)]
            nbytes += sum(map(_nbytes, outlines)) - sum(column.nbytes for column in columns)
            fields.append(_images_field(field.name, dict.fromkeys(outlines)))
        else:
            fields.append(field)
    return Schema(tuple(fields)), nbytes


class ImageSurvey:
    """A look at all samples, block after block, to find the fields of images and the shapes of their arrays."""

    def __init__(self, schema: Schema, pixels: Pixels) -> None:
        self._schema, self._pixels = schema, pixels
        self._undecided = {field.name for field in schema if _may_hold_images(field)}
        self._outlines: dict[str, dict[Outline, None]] = {}

    def add(self, block: Block, name: Callable[[int], str]) -> int:
        """Look at the samples of a block, which are named ``name(index)``. Return their bytes after images are decoded.

        The first value that is not empty decides if a field holds images. Raise :class:`BadObject` for a value that
        is no image among images.
        """
        for field in [field for field in self._undecided if block.columns[field].nbytes]:
            # A field is decided once. If a later value could decide again, the schema would depend on where blocks are
            # cut.
            self._undecided.remove(field)
            if begins_as_image(block.columns[field]):
                self._outlines[field] = {}
        nbytes = block.nbytes
        for field, outlines in self._outlines.items():
            of_block = list(_outlines(block, field, self._pixels, name, skip_bad=False))
            nbytes += sum(map(_nbytes, of_block)) - block.columns[field].nbytes
            outlines.update(dict.fromkeys(of_block))
        return nbytes

    @property
    def schema(self) -> Schema:
        """The schema with arrays in place of images."""
        return Schema(tuple(map(self._field, self._schema)))

    def _field(self, field: Field) -> Field:
        outlines = self._outlines.get(field.name)
        return _images_field(field.name, outlines) if outlines else field


def _some(at: int) -> str:
    return f"sample {at} of those read first"


def _may_hold_images(field: Field) -> bool:
    return field.kind == "bytes" or is_list_of_bytes(field)


def _images_field(name: str, outlines: Mapping[Outline, None]) -> Field:
    """Return the field that holds images of these dtypes and shapes. Raise :class:`BadObject` if no field can hold
    them."""
    dtype, shape = next(iter(outlines))
    if len(outlines) == 1:
        return Field(name, dtype, shape)
    if len({(dtype, len(shape)) for dtype, shape in outlines}) > 1:
        raise BadObject(
            f"{quoted(name)} has both colour images and masks, or masks of 8 and of 16 bits;\nto read all images of 8"
            f" bits in colour: --decode image; to leave the field out: --fields -{name}"
        )
    return Field(name, dtype, (None,) * len(shape))


def _nbytes(outline: Outline) -> int:
    return math.prod(outline[1]) * np.dtype(outline[0]).itemsize


def _outlines(
    block: Block, field: str, pixels: Pixels, name: Callable[[int], str], *, skip_bad: bool
) -> Iterator[Outline]:
    for at in range(len(block)):
        try:
            yield image_outline(_value(block, field, at), pixels)
        except BadObject as error:
            if not skip_bad:
                raise _named(block, field, at, error, name) from error


def packed(schema: Schema, file_schema: Schema) -> Schema:
    """Return ``schema`` with the file's type of bytes in place of images that the file has not decoded."""
    fields = []
    for field in schema:
        image = (field.rank, field.dtype) in ((3, "|u1"), (2, "|u1"), (2, "<u2"))
        raw = image and field.name in file_schema and _may_hold_images(file_schema[field.name])
        fields.append(file_schema[field.name] if raw else field)
    return Schema(tuple(fields))


def unpacked(
    pieces: Generator[ReadResult],
    schema: Schema,
    pixels: Pixels,
    *,
    skip_bad: bool,
    block_bytes: int,
    name: Callable[[int], str],
) -> Generator[ReadResult]:
    """Yield the same samples with images decoded, under ``schema``.

    Results have about ``block_bytes`` if images grow as usual. ``name`` returns a name for the sample of a draw that
    has no key.
    """
    try:
        for piece in pieces:
            names = [field.name for field in schema if piece.block.schema[field.name] != field]
            if names:
                images = schema.select(names)
                yield from _unpacked(piece, images, schema, pixels, skip_bad=skip_bad, most=block_bytes, name=name)
            else:
                yield piece
    finally:
        pieces.close()


def _unpacked(
    piece: ReadResult,
    images: Schema,
    schema: Schema,
    pixels: Pixels,
    *,
    skip_bad: bool,
    most: int,
    name: Callable[[int], str],
) -> Iterator[ReadResult]:
    block, draws = piece.block, piece.draws
    # A block of 8 MB of encoded images becomes about 128 MB of pixels. So it is decoded in steps that each make about
    # one block.
    step = max(1, most * len(block) // max(1, PACKED * block.nbytes))
    start, skipped, fetched = 0, piece.skipped, piece.fetched
    while start < len(block):
        stop = min(start + step, len(block))
        # The samples of one draw must be in one result, because a draw is finished with all its samples or not at all.
        while stop < len(block) and draws[stop] == draws[stop - 1]:
            stop += 1
        part, at = block.slice(start, stop), draws[start:stop]

        def called(index: int, at: npt.NDArray[np.int64] = at) -> str:
            return name(int(at[index]))

        columns, bad = _decoded(part, images, pixels, called)
        if bad and not skip_bad:
            raise next(iter(bad.values()))
        # A bad sample takes all samples of its draw with it, because progress is recorded by draws.
        keep = np.flatnonzero(~np.isin(at, at[list(bad)]))
        for index, error in bad.items():
            if all(int(at[index]) != skip.draw for skip in skipped):
                key = _key(part, index, called)
                skipped = (*skipped, Skipped(int(at[index]), key, " ".join(str(error).split("\n"))))
        out: dict[str, Column] = {}
        for field in schema:
            if field.name in images:
                values = [{field.name: columns[field.name][index]} for index in keep.tolist()]
                out[field.name] = Block.from_samples(Schema((field,)), values).columns[field.name]
            else:
                column = part.columns[field.name]
                kept = column if not bad else column.take(keep) if isinstance(column, Ragged) else column[keep]
                out[field.name] = kept
        done = int(draws[stop]) if stop < len(block) else piece.done
        yield ReadResult(Block(schema, out), at[keep], done, skipped, fetched)
        start, skipped, fetched = stop, (), 0


def _decoded(
    block: Block, images: Schema, pixels: Pixels, name: Callable[[int], str]
) -> tuple[dict[str, list[np.ndarray]], dict[int, BadObject]]:
    """Return the pixels of each field, and the samples with an image that cannot be decoded or does not fit the
    dataset."""
    arrays: dict[str, list[np.ndarray]] = {field.name: [] for field in images}
    bad: dict[int, BadObject] = {}
    for field in images:
        for at in range(len(block)):
            image = np.zeros(0, dtype=np.uint8)
            try:
                image = decode_image(_value(block, field.name, at), pixels.size, masks=pixels.masks)
                if image.ndim != field.rank or image.dtype != field.numpy:
                    raise BadObject(
                        f"the image is {image.dtype} {image.shape} when decoded, but the dataset has {field.describe()}"
                    )
                if field.kind == "fixed" and image.shape != field.shape:
                    raise BadObject(
                        f"an image of shape {image.shape}, but the dataset has {field.shape}; give all images one"
                        " size with --resize"
                    )
            except BadObject as error:
                bad.setdefault(at, _named(block, field.name, at, error, name))
            arrays[field.name].append(image)
    return arrays, bad


def _value(block: Block, name: str, at: int) -> memoryview:
    column = block.columns[name]
    assert isinstance(column, Ragged)
    return column[at].data


def _named(block: Block, field: str, at: int, error: BadObject, name: Callable[[int], str]) -> BadObject:
    return BadObject(f"{_key(block, at, name)!r}: {quoted(field)}: {error}")


def _key(block: Block, at: int, name: Callable[[int], str]) -> str:
    column = block.columns.get(KEY)
    if not isinstance(column, Ragged):
        return name(at)
    return column[at].tobytes().decode("utf-8", "surrogateescape")
