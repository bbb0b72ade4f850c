"""Images into arrays: their decoding, and ``--decode image`` for the values of files.

:func:`decode_image` makes uint8 arrays (height, width, 3), by simplejpeg and Pillow (extra ``image``). Gray, palette
and CMYK images become RGB, an alpha channel is dropped, the first frame counts, and orientation tags are not followed,
so that pixels are as they are stored. Images of more than 8 bits a channel are refused rather than rounded. An image
that claims to be far larger than its bytes can mean is refused before it is unpacked.

Given a size, images are made that high and wide, sides stretched apart where their ratio differs: filtered bicubically
over all pixels that fall into one, averaged in blocks first as long as three a side are left of each. The decoder of a
JPEG does that, which is why a large one takes less time resized than whole.

:func:`decoded` is ``--decode image`` for files whose values do not say by a name what they are: TFRecord, HDF5, Zarr.

A field of bytes, or of lists of uint8, whose first value begins as an image does is a field of images; every value must
then be one. All of them are looked at first, so that images of one size become a fixed field, and others a ragged one.

:func:`with_images` is ``--decode image`` for remote files of rows and records: values that hold images become arrays.

Which fields those are, and how large, is seen in the first draws, as with objects::

    bytes, or a list of uint8, whose first value begins as an image does  ->  uint8 (height, width, 3)
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
from collections.abc import Callable, Generator, Iterator, Sequence
from functools import partial
from typing import Any, TypeVar

import numpy as np

from cachetool.core.block import BLOCK_BYTES, Block, Column, Ragged
from cachetool.core.errors import BadObject, MissingExtra, UsageError
from cachetool.core.schema import KEY, Field, Schema
from cachetool.sources.base import ReadResult, Skipped
from cachetool.sources.limits import quoted
from cachetool.sources.options import ImageSize
from cachetool.sources.readers import ClosingFile, FileSource, RandomAccess

__all__ = [
    "DecodedFile",
    "PACKED",
    "begins_as_image",
    "decode_image",
    "decoded",
    "image_shape",
    "is_list_of_bytes",
    "packed",
    "unpacked",
    "with_images",
]


_SIGNATURES = (b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n", b"GIF8", b"II*\x00", b"MM\x00*")

PACKED = 16
"""About how many times larger a photograph is without compression."""

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
        pixels = _jpeg(data)
        if pixels is not None:
            return pixels
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


def decoded(source: FileSource, size: ImageSize | None = None) -> FileSource:
    """``source`` with its fields of images decoded, all to ``size`` if that is given; itself when it has none."""
    names = [field.name for field in source.schema if field.kind == "bytes" or is_list_of_bytes(field)]
    first = next(source.blocks(), None) if names else None
    source.close()
    images = [name for name in names if first is not None and begins_as_image(first.columns[name])]
    if not images:
        return source
    return _DecodedRandom(source, images, size) if hasattr(source, "read") else DecodedFile(source, images, size)


class DecodedFile(ClosingFile):
    """Another source with images in place of their bytes; see :class:`cachetool.sources.readers.FileSource`."""

    def __init__(self, source: FileSource, images: Sequence[str], size: ImageSize | None) -> None:
        """Looks at the header of every image, unless all get one ``size``.

        Raises :class:`BadObject` naming the sample that holds none.
        """
        self.path, self.samples, self.skipped = source.path, source.samples, source.skipped
        self._source, self._size = source, size
        shapes = self._shapes(images) if size is None else {name: {(*size, 3)} for name in images}
        fields = [
            Field(f.name, "|u1", next(iter(shapes[f.name])) if len(shapes[f.name]) == 1 else (None,) * 3)
            if f.name in shapes
            else f
            for f in source.schema
        ]
        self.schema = Schema(tuple(fields))
        self._images = self.schema.select(images)

    def _shapes(self, images: Sequence[str]) -> dict[str, set[tuple[int, ...]]]:
        shapes: dict[str, set[tuple[int, ...]]] = {name: set() for name in images}
        at = 0
        for block in self._source.blocks():
            for name, distinct in shapes.items():
                distinct.update(self._map_values(block, name, at, image_shape))
            at += len(block)
        self._source.close()
        return shapes

    def blocks(self, *, block_bytes: int = BLOCK_BYTES) -> Iterator[Block]:
        """All samples in order, in blocks of about ``block_bytes`` as far as images shrink as they use to."""
        at = 0
        for block in self._source.blocks(block_bytes=max(1, block_bytes // PACKED)):
            yield self._decode(block, at)
            at += len(block)

    def close(self) -> None:
        """Let go of the source's files."""
        self._source.close()

    def _decode(self, block: Block, at: int) -> Block:
        columns: dict[str, Column] = dict(block.columns)
        for field in self._images:
            use = partial(decode_image, size=self._size)
            values = [{field.name: pixels} for pixels in self._map_values(block, field.name, at, use)]
            try:
                columns[field.name] = Block.from_samples(Schema((field,)), values).columns[field.name]
            except UsageError as error:
                raise BadObject(f"{self.path}: it was changed while it was read: {error}") from error
        return Block(self.schema, columns)

    def _map_values(self, block: Block, name: str, at: int, use: Any) -> Iterator[Any]:
        column = block.columns[name]
        assert isinstance(column, Ragged)
        for index in range(len(column)):
            try:
                yield use(column[index].data)
            except BadObject as error:
                raise BadObject(f"{self.path}: sample {at + index}: {quoted(name)}: {error}") from error


class _DecodedRandom(DecodedFile):
    """The same over a source that reads any run of samples."""

    _source: RandomAccess

    def read(self, start: int, stop: int) -> Block:
        """Samples ``start`` to ``stop``."""
        return self._decode(self._source.read(start, stop), start)


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


def with_images(
    schema: Schema, blocks: Sequence[Block], size: ImageSize | None, *, skip_bad: bool
) -> tuple[Schema, int]:
    """The schema of a source once its images are arrays, and the bytes that ``blocks``, its first samples, are then.

    Raises :class:`BadObject` for a value that is no image among images, unless ``skip_bad`` leaves it out.
    """
    fields, nbytes = [], sum(block.nbytes for block in blocks)
    for field in schema:
        columns = [block.columns[field.name] for block in blocks] if _may_hold_images(field) else []
        if any(map(begins_as_image, columns)):
            shapes = [shape for block in blocks for shape in _shapes(block, field.name, size, skip_bad=skip_bad)]
            nbytes += sum(map(math.prod, shapes)) - sum(column.nbytes for column in columns)
            fields.append(Field(field.name, "|u1", shapes[0] if len(set(shapes)) == 1 else (None,) * 3))
        else:
            fields.append(field)
    return Schema(tuple(fields)), nbytes


def _may_hold_images(field: Field) -> bool:
    return field.kind == "bytes" or is_list_of_bytes(field)


def _shapes(block: Block, name: str, size: ImageSize | None, *, skip_bad: bool) -> Iterator[tuple[int, ...]]:
    for at in range(len(block)):
        try:
            yield image_shape(_value(block, name, at), size)
        except BadObject as error:
            if not skip_bad:
                raise _named(block, name, at, error) from error


def packed(schema: Schema, file_schema: Schema) -> Schema:
    """``schema`` with bytes in place of the images that a file, whose fields are ``file_schema``, has not decoded."""
    fields = []
    for field in schema:
        image = field.rank == 3 and field.dtype == "|u1"
        raw = image and field.name in file_schema and _may_hold_images(file_schema[field.name])
        fields.append(file_schema[field.name] if raw else field)
    return Schema(tuple(fields))


def unpacked(
    pieces: Generator[ReadResult], schema: Schema, size: ImageSize | None, *, skip_bad: bool, block_bytes: int
) -> Generator[ReadResult]:
    """The same samples under ``schema``, in pieces of about ``block_bytes`` as far as images shrink as they use to."""
    try:
        for piece in pieces:
            names = [field.name for field in schema if piece.block.schema[field.name] != field]
            if names:
                yield from _unpacked(piece, schema.select(names), schema, size, skip_bad=skip_bad, most=block_bytes)
            else:
                yield piece
    finally:
        pieces.close()


def _unpacked(
    piece: ReadResult, images: Schema, schema: Schema, size: ImageSize | None, *, skip_bad: bool, most: int
) -> Iterator[ReadResult]:
    block, draws = piece.block, piece.draws
    step = max(1, most * len(block) // max(1, PACKED * block.nbytes))
    start, skipped, fetched = 0, piece.skipped, piece.fetched
    while start < len(block):
        stop = min(start + step, len(block))
        while stop < len(block) and draws[stop] == draws[stop - 1]:  # a draw is never in two pieces
            stop += 1
        part, at = block.slice(start, stop), draws[start:stop]
        columns, bad = _decoded(part, images, size)
        if bad and not skip_bad:
            raise next(iter(bad.values()))
        keep = np.flatnonzero(~np.isin(at, at[list(bad)]))
        for index, error in bad.items():
            if all(int(at[index]) != skip.draw for skip in skipped):
                skipped = (*skipped, Skipped(int(at[index]), _key(part, index), " ".join(str(error).split("\n"))))
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
    block: Block, images: Schema, size: ImageSize | None
) -> tuple[dict[str, list[np.ndarray]], dict[int, BadObject]]:
    """The pixels of each field, and the samples with an image that cannot be decoded or does not fit."""
    arrays: dict[str, list[np.ndarray]] = {field.name: [] for field in images}
    bad: dict[int, BadObject] = {}
    nothing = np.zeros((0, 0, 0), dtype=np.uint8)
    for field in images:
        for at in range(len(block)):
            pixels = nothing
            try:
                pixels = decode_image(_value(block, field.name, at), size)
                if field.kind == "fixed" and pixels.shape != field.shape:
                    raise BadObject(
                        f"an image of shape {pixels.shape}, but the dataset has {field.shape}; --resize gives all one"
                    )
            except BadObject as error:
                bad.setdefault(at, _named(block, field.name, at, error))
            arrays[field.name].append(pixels)
    return arrays, bad


def _value(block: Block, name: str, at: int) -> memoryview:
    column = block.columns[name]
    assert isinstance(column, Ragged)
    return column[at].data


def _named(block: Block, name: str, at: int, error: BadObject) -> BadObject:
    return BadObject(f"{_key(block, at)!r}: {quoted(name)}: {error}")


def _key(block: Block, at: int) -> str:
    column = block.columns.get(KEY)
    if not isinstance(column, Ragged):
        return f"sample {at} of some"  # --no-key
    return column[at].tobytes().decode("utf-8", "surrogateescape")
