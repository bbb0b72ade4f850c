"""Images into arrays: their decoding, and ``--decode image`` for the values of files.

:func:`decode_image` makes uint8 arrays (height, width, 3), by simplejpeg and Pillow (extra ``image``). Gray, palette
and CMYK images become RGB, an alpha channel is dropped, the first frame counts, and orientation tags are not followed,
so that pixels are as they are stored. Images of more than 8 bits a channel are refused rather than rounded. An image
that claims to be far larger than its bytes can mean is refused before it is unpacked.

``masks`` is for the labels of segmentation and for depth: images of one channel that lose nothing keep the numbers
that are stored, (height, width): the indices of a palette, gray, 0 and 1, uint8; 16 bits, uint16. JPEG and WebP, whose
numbers are not exact, and images of colours are as without.

Given a size, images are made that high and wide, sides stretched apart where their ratio differs: filtered bicubically
over all pixels that fall into one, averaged in blocks first as long as three a side are left of each. The decoder of a
JPEG does that, which is why a large one takes less time resized than whole. A pixel of a mask is the nearest one.

:func:`decoded` is ``--decode image`` for files whose values do not say by a name what they are: TFRecord, HDF5, Zarr.

A field of bytes, or of lists of uint8, whose first value begins as an image does is a field of images; every value must
then be one. All of them are looked at first, so that images of one size become a fixed field, and others a ragged one.

:func:`with_images` is ``--decode image`` for remote files of rows and records: values that hold images become arrays.

Which fields those are, and how large, is seen in the first draws, as with objects::

    bytes, or a list of uint8, whose first value begins as an image does  ->  uint8 (height, width, 3), or a mask
    all of one size  ->  a fixed field            several sizes  ->  a ragged one

Where the dataset has such a field and a file has bytes, each of them must be an image.
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
"""The numbers that Pillow multiplies gray of 2 and 4 bits by."""
_JPEG = b"\xff\xd8\xff"

T = TypeVar("T")
Array = npt.NDArray[Any]
Outline = tuple[str, tuple[int, ...]]
"""dtype and shape of an array."""

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


def decode_image(data: memoryview, size: ImageSize | None = None, *, masks: bool = False) -> Array:
    """The pixels, uint8 (height, width, 3), of this height and width when ``size`` is given; of ``masks`` the numbers
    stored, (height, width).

    Raises :class:`BadObject` for what is no image or too large, :class:`MissingExtra` without Pillow.
    """
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
    """The shape that :func:`decode_image` would give, out of the image's header; same errors."""
    return image_outline(data, Pixels(size))[1]


def image_outline(data: memoryview, pixels: Pixels) -> tuple[str, tuple[int, ...]]:
    """The dtype and shape that :func:`decode_image` would give, out of the image's header; same errors."""
    dtype, *sides = _outline(data, masks=pixels.masks)
    height, width = pixels.size or sides
    return (dtype, (height, width)) if dtype else ("|u1", (height, width, 3))


def _outline(data: memoryview, *, masks: bool) -> tuple[str, int, int]:
    """The dtype of a mask, else nothing; height and width."""
    if bytes(data[:3]) == _JPEG:
        with contextlib.suppress(ImportError, ValueError):
            import simplejpeg

            height, width, _, _ = simplejpeg.decode_jpeg_header(data)
            _check(width, height, len(data))
            return "", height, width
    return _by_pillow(data, lambda image: (_mask_dtype(image) if masks else "", *_stored_sides(image)), masks=masks)


def _mask_dtype(image: Any) -> str:
    """The dtype of the numbers of an image of one channel that loses nothing; empty for others."""
    if image.format in ("JPEG", "WEBP"):
        return ""
    return {"1": "|u1", "L": "|u1", "P": "|u1", "I": "<u2" if image.format == "PNG" else ""}.get(
        image.mode, "<u2" if image.mode.startswith("I;16") else ""
    )


def _mask(image: Any, size: ImageSize | None) -> Array:
    """The numbers as they are stored."""
    dtype = _mask_dtype(image)
    scale = _GRAYS.get(str(image.tile[0][3]) if image.tile else "", 1)
    _upright(image)
    numbers: Array = np.asarray(image)
    if size is not None:
        rows, columns = ((2 * np.arange(to) + 1) * own // (2 * to) for to, own in zip(size, numbers.shape, strict=True))
        numbers = numbers[rows[:, None], columns]
    return numbers.astype(dtype, copy=False) // np.uint8(scale)


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


def _resized(image: Any, height: int, width: int) -> Array:
    from PIL.Image import Resampling

    drafted = image.draft("RGB", (_GAP * width, _GAP * height))  # for a JPEG: an averaged one out of its decoder
    pixels = _rgb(image)
    box = drafted[1] if drafted else (0, 0, *pixels.size)
    return np.asarray(pixels.resize((width, height), Resampling.BICUBIC, box=box, reducing_gap=_GAP))


def _rgb(image: Any) -> Any:
    """The pixels as they are stored."""
    _upright(image)
    return image.convert("RGB")


def _upright(image: Any) -> None:
    """Keep Pillow from turning the pixels of a TIFF while it loads them: it is told that they are upright."""
    if image.format == "TIFF":
        image.getexif()[_ORIENTATION] = 1


def _stored_sides(image: Any) -> tuple[int, int]:
    """Height and width before Pillow turns the pixels."""
    if image.format == "TIFF":
        return int(image.tag_v2[_LENGTH]), int(image.tag_v2[_WIDTH])
    return image.height, image.width


def _by_pillow(data: memoryview, use: Callable[[Any], T], *, masks: bool) -> T:
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
            if masks and _mask_dtype(image):
                return use(image)
            if image.mode not in _MODES:
                mask = ", or take its numbers with --decode mask" if _mask_dtype(image) else ""
                raise BadObject(f"an image with pixels of type {image.mode}, not 8 bits; pull it as bytes{mask}")
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


def no_images(place: str, decode: str | None, schema: Schema, why: str) -> UsageError:
    """The error of ``--decode`` where nothing at ``place`` is to be decoded."""
    fields = ", ".join(f"{field.name} ({field.describe()})" for field in schema if field.name != KEY)
    return UsageError(f"--decode {decode} finds no image in {place}: {why}; there is {fields}")


def is_list_of_bytes(field: Field) -> bool:
    """Whether samples are lists of uint8 of any length, as HDF5 users keep images."""
    return field.kind == "ragged" and field.rank == 1 and field.numpy == np.uint8


def begins_as_image(column: Any) -> bool:
    """Whether the first value of a column that is not empty begins as an image does."""
    assert isinstance(column, Ragged)
    nonempty = np.flatnonzero(column.sizes)
    if not len(nonempty):
        return False
    head = column[int(nonempty[0])][:16].tobytes()
    return head.startswith(_SIGNATURES) or (head[:4] == b"RIFF" and head[8:12] == b"WEBP")


def with_images(schema: Schema, blocks: Sequence[Block], pixels: Pixels, *, skip_bad: bool) -> tuple[Schema, int]:
    """The schema of a source once its images are arrays, and the bytes that ``blocks``, its first samples, are then.

    Raises :class:`BadObject` for a value that is no image among images, unless ``skip_bad`` leaves it out.
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
    """What fields of images are once they are arrays: all samples are looked at, one block after another."""

    def __init__(self, schema: Schema, pixels: Pixels) -> None:
        self._schema, self._pixels = schema, pixels
        self._undecided = {field.name for field in schema if _may_hold_images(field)}
        self._outlines: dict[str, dict[Outline, None]] = {}

    def add(self, block: Block, name: Callable[[int], str]) -> int:
        """Take in some samples, called ``name(index)``; gives the bytes that they are once images are arrays.

        The first value that is not empty says whether a field holds images. Raises :class:`BadObject` for a value that
        is no image among images.
        """
        for field in [field for field in self._undecided if block.columns[field].nbytes]:
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
        """With arrays in place of images."""
        return Schema(tuple(map(self._field, self._schema)))

    def _field(self, field: Field) -> Field:
        outlines = self._outlines.get(field.name)
        return _images_field(field.name, outlines) if outlines else field


def _some(at: int) -> str:
    return f"sample {at} of some"


def _may_hold_images(field: Field) -> bool:
    return field.kind == "bytes" or is_list_of_bytes(field)


def _images_field(name: str, outlines: Mapping[Outline, None]) -> Field:
    """The field that holds images of these dtypes and shapes. Raises :class:`BadObject` where none can."""
    dtype, shape = next(iter(outlines))
    if len(outlines) == 1:
        return Field(name, dtype, shape)
    if len({(dtype, len(shape)) for dtype, shape in outlines}) > 1:
        raise BadObject(
            f"{quoted(name)} holds images of colours and masks, or masks of 8 and of 16 bits;\n--decode image makes all"
            f" of 8 bits images of colours, and --fields -{name} leaves the field out"
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
    """``schema`` with bytes in place of the images that a file, whose fields are ``file_schema``, has not decoded."""
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
    """The same samples under ``schema``, in pieces of about ``block_bytes`` as far as images shrink as they use to.
    ``name`` says what the sample of a draw is called, which has no key."""
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
    step = max(1, most * len(block) // max(1, PACKED * block.nbytes))
    start, skipped, fetched = 0, piece.skipped, piece.fetched
    while start < len(block):
        stop = min(start + step, len(block))
        while stop < len(block) and draws[stop] == draws[stop - 1]:  # a draw is never in two pieces
            stop += 1
        part, at = block.slice(start, stop), draws[start:stop]

        def called(index: int, at: npt.NDArray[np.int64] = at) -> str:
            return name(int(at[index]))

        columns, bad = _decoded(part, images, pixels, called)
        if bad and not skip_bad:
            raise next(iter(bad.values()))
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
    """The pixels of each field, and the samples with an image that cannot be decoded or does not fit."""
    arrays: dict[str, list[np.ndarray]] = {field.name: [] for field in images}
    bad: dict[int, BadObject] = {}
    for field in images:
        for at in range(len(block)):
            image = np.zeros(0, dtype=np.uint8)
            try:
                image = decode_image(_value(block, field.name, at), pixels.size, masks=pixels.masks)
                if image.ndim != field.rank or image.dtype != field.numpy:
                    raise BadObject(
                        f"an image that becomes {image.dtype} {image.shape}, but the dataset has {field.describe()}"
                    )
                if field.kind == "fixed" and image.shape != field.shape:
                    raise BadObject(
                        f"an image of shape {image.shape}, but the dataset has {field.shape}; --resize gives all one"
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
