"""``--decode image`` for files whose values do not say by a name what they are: TFRecord, HDF5, Zarr.

A field of bytes, or of lists of uint8, whose first value begins as an image does is a field of images; every value must
then be one. All of them are looked at first, so that images of one size become a fixed field, and others a ragged one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np

from cachetool.core.block import BLOCK_BYTES, Block, Column, Ragged
from cachetool.core.errors import BadObject, UsageError
from cachetool.core.schema import Field, Schema
from cachetool.sources.images import decode_image, image_shape
from cachetool.sources.limits import quoted
from cachetool.sources.options import ImageSize
from cachetool.sources.readers import ClosingFile, FileSource, RandomAccess

__all__ = ["PACKED", "DecodedFile", "begins_as_image", "decoded", "is_list_of_bytes"]

_SIGNATURES = (b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n", b"GIF8", b"II*\x00", b"MM\x00*")

PACKED = 16
"""About how many times larger a photograph is without compression."""


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
            for name, found in shapes.items():
                found.update(self._each(block, name, at, image_shape))
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
            values = [{field.name: pixels} for pixels in self._each(block, field.name, at, use)]
            try:
                columns[field.name] = Block.from_samples(Schema((field,)), values).columns[field.name]
            except UsageError as error:
                raise BadObject(f"{self.path}: it was changed while it was read: {error}") from error
        return Block(self.schema, columns)

    def _each(self, block: Block, name: str, at: int, use: Any) -> Iterator[Any]:
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
    held = np.flatnonzero(column.sizes)
    if not len(held):
        return False
    head = column[int(held[0])][:16].tobytes()
    return head.startswith(_SIGNATURES) or (head[:4] == b"RIFF" and head[8:12] == b"WEBP")
