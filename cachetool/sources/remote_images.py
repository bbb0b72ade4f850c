"""``--decode image`` for files of rows and records: values that hold images become arrays.

Which fields those are, and how large, is seen in the first draws, as with objects::

    bytes, or a list of uint8, whose first value begins as an image does  ->  uint8 (height, width, 3)
    all of one size  ->  a fixed field            several sizes  ->  a ragged one

Where the dataset has such a field and a file has bytes, each of them must be an image.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Iterator, Sequence

import numpy as np

from cachetool.core.block import Block, Column, Ragged
from cachetool.core.errors import BadObject
from cachetool.core.schema import KEY, Field, Schema
from cachetool.sources.base import Piece, Skipped
from cachetool.sources.decoded import PACKED, begins_as_image, is_list_of_bytes
from cachetool.sources.images import decode_image, image_shape
from cachetool.sources.limits import quoted
from cachetool.sources.options import ImageSize

__all__ = ["packed", "unpacked", "with_images"]


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


def packed(schema: Schema, found: Schema) -> Schema:
    """``schema`` with bytes in place of the images that a file, whose fields are ``found``, has not decoded."""
    fields = []
    for field in schema:
        image = field.rank == 3 and field.dtype == "|u1"
        raw = image and field.name in found and _may_hold_images(found[field.name])
        fields.append(found[field.name] if raw else field)
    return Schema(tuple(fields))


def unpacked(
    pieces: Generator[Piece], schema: Schema, size: ImageSize | None, *, skip_bad: bool, block_bytes: int
) -> Generator[Piece]:
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
    piece: Piece, images: Schema, schema: Schema, size: ImageSize | None, *, skip_bad: bool, most: int
) -> Iterator[Piece]:
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
            if all(int(at[index]) != each.draw for each in skipped):
                skipped = (*skipped, Skipped(int(at[index]), _key(part, index), " ".join(str(error).split("\n"))))
        made: dict[str, Column] = {}
        for field in schema:
            if field.name in images:
                values = [{field.name: columns[field.name][index]} for index in keep.tolist()]
                made[field.name] = Block.from_samples(Schema((field,)), values).columns[field.name]
            else:
                column = part.columns[field.name]
                kept = column if not bad else column.take(keep) if isinstance(column, Ragged) else column[keep]
                made[field.name] = kept
        done = int(draws[stop]) if stop < len(block) else piece.done
        yield Piece(Block(schema, made), at[keep], done, skipped, fetched)
        start, skipped, fetched = stop, (), 0


def _decoded(
    block: Block, images: Schema, size: ImageSize | None
) -> tuple[dict[str, list[np.ndarray]], dict[int, BadObject]]:
    """The pixels of each field, and the samples with an image that cannot be decoded or does not fit."""
    found: dict[str, list[np.ndarray]] = {field.name: [] for field in images}
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
            found[field.name].append(pixels)
    return found, bad


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
