"""Blocks of large arrays as samples, for ``--block z=128,y=512,x=512``.

A block is made of complete chunks, so each chunk is fetched and decoded for one sample alone. Several arrays may be
fields of one block::

    t2m  (time, latitude, longitude)  ->  (24, 181, 360)     the block
    lsm  (latitude, longitude)        ->  (181, 360)         repeated in the blocks of all times
    time (time,)                      ->  (24,)              coordinates of the block

Arrays that lack a dimension of ``--block`` are repeated. These arrays, and coordinates, are read once and kept, if they
are small.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from cachetool.core.block import Column, Ragged
from cachetool.core.errors import UsageError
from cachetool.core.text import counted
from cachetool.sources.limits import check_allocation, quoted
from cachetool.sources.options import SourceOptions
from cachetool.sources.readers import NOTE
from cachetool.sources.rows import Boxes, Grid, Part, StoredColumn

__all__ = ["Repeated", "blocks_of", "refuse_ours"]

REPEATED_BYTES = 64 * 2**20
"""Most bytes of arrays that are kept because they are repeated in several blocks."""
_SHOWN = 8
"""Most arrays in a message."""

Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class _Cut:
    """One dimension that is cut into blocks."""

    name: str
    size: int
    step: int
    count: int


class Repeated:
    """The arrays of a file that are kept because several blocks need them."""

    def __init__(self) -> None:
        self._left = REPEATED_BYTES
        self._kept: dict[str, Array] = {}

    def keeping(self, column: StoredColumn, boxes: Boxes) -> Callable[[tuple[slice, ...]], Array]:
        """Return a function that reads boxes of the array. The array is read once, if there is space for it."""
        if column.nbytes > self._left:
            return boxes.read
        self._left -= column.nbytes
        everything = tuple(slice(0, size) for size in column.shape)

        def read(bounds: tuple[slice, ...]) -> Array:
            if column.name not in self._kept:
                self._kept[column.name] = boxes.read(everything)
            return self._kept[column.name][bounds]

        return read

    def drop(self) -> None:
        """Free the arrays."""
        self._kept.clear()


def refuse_ours(path: object) -> UsageError:
    """Return the error for blocks of a file whose rows are samples already."""
    return UsageError(f"{path} was written by cachetool, and its rows are samples, not blocks; leave --block out")


def blocks_of(
    path: object,
    columns: Sequence[StoredColumn],
    options: SourceOptions,
    skipped: list[tuple[str, str]],
    *,
    stored: int,
    repeated: Repeated,
) -> tuple[list[StoredColumn], Grid]:
    """Return ``columns`` with blocks instead of rows, and the grid of the blocks.

    ``stored``: bytes of the file. Arrays that are no part of the blocks are added to ``skipped``. Raises
    :class:`UsageError` if no array has the dimensions, :class:`BadObject` if a block is too large for the file.
    """
    candidates = [column for column in columns if column.boxes is not None]
    skipped += [(c.name, "its values are no plain array, so it has no blocks") for c in columns if c.boxes is None]
    main = max((c for c in candidates if _axes(c, options.block)), key=lambda c: c.nbytes, default=None)
    if main is None:
        arrays = "; ".join(f"{quoted(c.name)} ({', '.join(_dims(c))})" for c in candidates[:_SHOWN]) or "none"
        raise UsageError(
            f"{path}: no array has the dimension{'s' * (len(options.block) > 1)} {', '.join(options.block)} of --block;"
            f" arrays and their dimensions: {arrays}"
        )
    wanted = {
        _dims(main)[axis]: (main.shape[axis], size)
        for axis, size in zip(_axes(main, options.block), options.block.values(), strict=True)
    }
    if len(wanted) < len(options.block):
        raise UsageError(f"--block names a dimension of {quoted(main.name)} twice; give each dimension one size")
    taken = []
    for column in candidates:
        if (reason := _unfit(column, wanted, options)) is not None:
            skipped.append((column.name, reason))
        else:
            taken.append(column)
    kept = {c.name for c in taken if not wanted.keys() <= set(_dims(c)) or len(c.shape) == 1 < len(main.shape)}
    large = [column for column in taken if column.name not in kept]
    cuts = [_cut(path, name, large, wanted[name], options, skipped) for name in wanted]
    samples = math.prod(cut.count for cut in cuts)
    if options.edges == "drop" and (lost := math.prod(-(-cut.size // cut.step) for cut in cuts) - samples):
        skipped.append((NOTE, f"{counted(lost, 'incomplete block')} at the edges left out by --edges drop"))
    out = [_column(c, cuts, samples, options.edges, repeated if c.name in kept else None) for c in taken]
    nbytes = sum(column.nbytes // max(1, samples) for column in out)
    check_allocation(f"{path}: a block of {', '.join(c.name for c in taken[:_SHOWN])}", nbytes, stored=stored)
    return [replace(c, piece=max(c.piece, nbytes)) for c in out], [(cut.name, cut.step, cut.count) for cut in cuts]


def _dims(column: StoredColumn) -> tuple[str, ...]:
    """Return a name for each dimension of an array: its number, if the file gives no name."""
    names = column.dims if len(column.dims) == len(column.shape) else [""] * len(column.shape)
    return tuple(name or str(axis) for axis, name in enumerate(names))


def _axes(column: StoredColumn, block: Mapping[str, int]) -> list[int]:
    """Return the dimensions of an array that ``block`` names; empty if one is missing."""
    dims = _dims(column)
    # A number always means the dimension at this position, also if the dimension has a name.
    axes = [int(name) if name.isdecimal() else dims.index(name) if name in dims else len(dims) for name in block]
    return axes if all(axis < len(dims) for axis in axes) else []


def _unfit(column: StoredColumn, wanted: Mapping[str, tuple[int, int]], options: SourceOptions) -> str | None:
    """Return the reason why an array is no field of the blocks; None if it is one."""
    dims = _dims(column)
    shared = [(axis, name) for axis, name in enumerate(dims) if name in wanted]
    if len({name for _, name in shared}) < len(shared):
        return "two of its dimensions have the same name"
    for axis, name in shared:
        if column.shape[axis] != wanted[name][0]:
            return f"its dimension {quoted(name)} is {column.shape[axis]}, not {wanted[name][0]}"
    if not shared and options.chosen is None:
        return f"it has none of the dimensions {', '.join(wanted)}; to repeat it in each block, name it in --fields"
    return None


def _cut(
    path: object,
    name: str,
    large: Sequence[StoredColumn],
    wanted: tuple[int, int],
    options: SourceOptions,
    skipped: list[tuple[str, str]],
) -> _Cut:
    """Return how one dimension is cut. A size that was changed is added to ``skipped`` as a note."""
    size, asked = wanted
    chunk = 1
    # Arrays that are repeated, and coordinates, are read once and kept. Their chunks need not fit the blocks.
    for column in large:
        assert column.boxes is not None
        chunk = math.lcm(chunk, max(1, min(column.boxes.chunks[_dims(column).index(name)], size)))
    step = max(1, min(-(-asked // chunk) * chunk, size))
    if step > asked:
        fit = "the chunks of all fields fit" if len(large) > 1 else "a chunk has"
        skipped.append((NOTE, f"blocks have {name}={step}, not {asked}, because {fit} {chunk}"))
    if options.edges != "drop":
        return _Cut(name, size, step, -(-size // step))
    if (step > asked and step == size) or asked <= size or not size:
        return _Cut(name, size, step, size // step)
    raise UsageError(
        f"{path}: --edges drop leaves no block, because dimension {quoted(name)} has {size} and a block {asked};"
        f" give at most {name}={size}, or --edges keep"
    )


def _column(
    column: StoredColumn, cuts: Sequence[_Cut], samples: int, edges: str, repeated: Repeated | None
) -> StoredColumn:
    """Return the column whose row ``i`` is block ``i`` of the array. ``repeated`` keeps the array if it is not None."""
    assert column.boxes is not None
    boxes, dims = column.boxes, _dims(column)
    at = {name: axis for axis, name in enumerate(dims)}
    own = [(number, cut, at[cut.name]) for number, cut in enumerate(cuts) if cut.name in at]
    shape = list(column.shape)
    for _, cut, axis in own:
        shape[axis] = cut.step
    ragged = edges == "keep" and any(cut.size % cut.step for _, cut, _ in own)
    read_box = boxes.read if repeated is None else repeated.keeping(column, boxes)
    counts = tuple(cut.count for cut in cuts)

    def block(index: int) -> Array:
        place = np.unravel_index(index, counts)
        bounds = [slice(0, size) for size in column.shape]
        for number, cut, axis in own:
            first = int(place[number]) * cut.step
            bounds[axis] = slice(first, min(first + cut.step, cut.size))
        return read_box(tuple(bounds))

    def read(start: int, stop: int) -> Column:
        if ragged:
            blocks = [block(index) for index in range(start, stop)]
            sizes = np.zeros(len(blocks) + 1, dtype=np.int64)
            np.cumsum([one.size for one in blocks], out=sizes[1:])
            values = blocks[0].reshape(-1) if len(blocks) == 1 else np.concatenate([one.reshape(-1) for one in blocks])
            return Ragged(values, sizes, np.array([one.shape for one in blocks], dtype=np.int64))
        if stop - start == 1 and (only := block(start)).shape == tuple(shape):
            return only[None]
        # Incomplete blocks, for --edges pad, keep the fill value behind their values.
        out = np.full((stop - start, *shape), boxes.fill(), dtype=column.dtype)
        for index in range(start, stop):
            one = block(index)
            out[index - start][tuple(slice(0, size) for size in one.shape)] = one
        return out

    def parts() -> Iterator[Part]:
        # The corner of a chunk tells its block, because blocks are made of complete chunks.
        for corner, first, nbytes, key in boxes.places(tuple(shape)):
            place = [corner[axis] // cut.step for _, cut, axis in own]
            if all(index < cut.count for index, (_, cut, _) in zip(place, own, strict=True)):
                yield int(np.ravel_multi_index(place, counts)), first, nbytes, key

    nbytes = math.prod(shape) * np.dtype(column.dtype).itemsize
    return replace(
        column, shape=(samples, *shape), nbytes=nbytes * samples, read=read, once=None, offset=-1, stored="", chunk=1,
        ragged=len(shape) if ragged else 0, parts=parts if repeated is None else None, boxes=None,
        dims=("block", *dims) if column.dims else (),
    )  # fmt: skip


def chunks_of(shape: Sequence[int], chunks: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Yield the first index of each chunk of an array."""
    return itertools.product(*(range(0, size, max(1, chunk)) for size, chunk in zip(shape, chunks, strict=True)))
