"""Boxes out of arrays: the positions of the runs of a box, and its copy into a batch.

::

    value of a sample, (256, 256, 256)            box (64, 64, 64) at a corner
    start + corner * strides  --->  64 x 64 rows of 64 numbers, a stride apart  --->  one array of the batch

A large box is copied by one assignment of NumPy, a row of the box at a time. The rows of small boxes are copied
together, as rows of samples are, because an assignment for each box would take longer than the copy.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from cachetool.formats.runs import Bytes, Int64s, as_bytes, copy_rows, row_dtype

__all__ = ["Boxes", "copy_boxes", "copy_packed"]

_LARGE = 2**14
"""Bytes of a box from which it is copied by an assignment of its own."""


class Boxes(NamedTuple):
    """Boxes in the values of some samples: box i in the value whose first byte is that of sample i."""

    box: tuple[int, ...]
    """Sizes of a box, (rank,)."""
    corners: Int64s
    """First element of each box, (k, rank)."""
    shapes: Int64s
    """Shape of each value, (k, rank)."""
    itemsize: int
    pad: Any = None
    """How a box that is larger than its value is filled up: a number in the type of the values, ``reflect`` or
    ``edge``."""

    def slice(self, start: int, stop: int) -> Boxes:
        """Return boxes ``start`` to ``stop`` alone."""
        return self._replace(corners=self.corners[start:stop], shapes=self.shapes[start:stop])

    @property
    def strides(self) -> Int64s:
        """Bytes from one element to the next along each axis, (k, rank)."""
        strides = np.full_like(self.shapes, self.itemsize)
        strides[:, :-1] *= np.cumprod(self.shapes[:, :0:-1], axis=1)[:, ::-1]
        return strides

    @property
    def first_bytes(self) -> Int64s:
        """Position of the first element of each box in its value, (k,)."""
        starts: Int64s = (self.corners * self.strides).sum(axis=1)
        return starts

    def runs(self, near: int) -> tuple[Int64s, Int64s, int]:
        """Return runs of bytes that cover the boxes, with gaps of at most ``near`` bytes inside a run.

        Returns:
            The positions of the runs in their values, (k, runs of a box); the bytes of a run of each box, (k,); and
            the first axis that lies inside a run.
        """
        strides = self.strides
        # Of a box larger than its value, the part that exists.
        sizes = np.minimum(self.shapes, np.array(self.box, dtype=np.int64))
        axis, length = len(self.box) - 1, sizes[:, -1] * self.itemsize
        while axis and bool((strides[:, axis - 1] - length <= near).all()):
            axis -= 1
            length = (sizes[:, axis] - 1) * strides[:, axis] + length
        # Every box is given as many runs as the largest one; those beyond the sizes of a value repeat its last one.
        most = sizes[:, :axis].max(axis=0, initial=0).tolist()
        outer = np.indices(most, dtype=np.int64).reshape(axis, math.prod(most))
        numbers = np.minimum(outer.T, sizes[:, None, :axis] - 1)
        starts = self.first_bytes[:, None] + (numbers * strides[:, None, :axis]).sum(axis=2)
        # Nothing is read of a value without numbers.
        nothing = (sizes == 0).any(axis=1)
        starts[nothing], length[nothing] = 0, 0
        return starts, length, axis


def copy_boxes(out: npt.NDArray[Any], to: Int64s | None, buffer: Bytes, starts: Int64s, boxes: Boxes) -> None:
    """Copy box i, out of the value at byte ``starts[i]`` of ``buffer``, to ``out[to[i]]``.

    ``out`` is C-contiguous, (k, *box); ``to`` None: to ``out[i]``. The values must lie inside the buffer, and the boxes
    inside their values, except for what ``boxes.pad`` fills up.
    """
    if not len(starts) or not out.size:
        return
    rows = np.arange(len(starts), dtype=np.int64) if to is None else to
    small = (boxes.shapes < np.array(boxes.box, dtype=np.int64)).any(axis=1)
    if small.any():
        for at in np.flatnonzero(small).tolist():
            one = boxes.slice(at, at + 1)
            _copy(out[rows[at]], buffer, int(starts[at] + one.first_bytes[0]), one.strides[0].tolist(), one)
        if small.all():
            return
        whole = np.flatnonzero(~small)
        rows, starts = rows[whole], starts[whole]
        boxes = boxes._replace(corners=boxes.corners[whole], shapes=boxes.shapes[whole])
    # Axes that a box has completely are one run with the axis before them.
    axis = len(boxes.box) - 1
    while axis and bool((boxes.shapes[:, axis] == boxes.box[axis]).all()):
        axis -= 1
    outer, row = boxes.box[:axis], math.prod(boxes.box[axis:]) * boxes.itemsize
    if math.prod(outer) * row < _LARGE:
        inner, _, _ = boxes.runs(0)
        count = inner.shape[1]
        places = None if to is None and not small.any() else (rows[:, None] * count + np.arange(count)).ravel()
        copy_rows(as_bytes(out), places, buffer, (starts[:, None] + inner).ravel(), row)
        return
    dtype = row_dtype(row)
    target = as_bytes(out).view(dtype).reshape(len(out), *outer)
    first = (starts + boxes.first_bytes).tolist()
    for at, begin, strides in zip(rows.tolist(), first, boxes.strides[:, :axis].tolist(), strict=True):
        target[at] = np.ndarray(outer, dtype, buffer, begin, strides)


def copy_packed(out: npt.NDArray[Any], memory: Bytes, one: Boxes, axis: int, nbytes: int) -> None:
    """Copy a single box to ``out``, (*box), out of its runs, which lie one after another in ``memory``.

    ``axis`` is the first axis inside a run, and ``nbytes`` the size of a run, as :meth:`Boxes.runs` returns them.
    """
    strides = one.strides[0].tolist()
    for outer in range(axis - 1, -1, -1):
        strides[outer] = nbytes
        nbytes *= min(one.box[outer], int(one.shapes[0, outer]))
    _copy(out, memory, 0, strides, one)


def _copy(out: npt.NDArray[Any], buffer: Bytes, begin: int, strides: list[int], one: Boxes) -> None:
    """Copy a single box, whose first element is at byte ``begin``, and fill it up behind a value that is smaller."""
    sizes = [min(size, side) for size, side in zip(one.box, one.shapes[0].tolist(), strict=True)]
    whole = sizes == list(one.box)
    there = out if whole else np.empty(sizes, dtype=out.dtype)
    if there.size:
        # Rows as single values, because rows in a file may be unaligned.
        dtype = row_dtype(sizes[-1] * one.itemsize)
        as_bytes(there).view(dtype).reshape(sizes[:-1])[...] = np.ndarray(
            sizes[:-1], dtype, buffer, begin, strides[:-1]
        )
    if whole:
        return
    if isinstance(one.pad, str) and there.size:
        missing = [(0, size - have) for size, have in zip(one.box, sizes, strict=True)]
        out[...] = np.pad(there, missing, mode=one.pad)  # type: ignore[call-overload]
        return
    out.fill(0 if isinstance(one.pad, str) or one.pad is None else one.pad)
    out[tuple(map(slice, sizes))] = there
