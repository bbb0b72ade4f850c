"""Boxes out of arrays in memory, against slices of NumPy."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cachetool.loaders.read import boxes as boxes_module
from cachetool.loaders.read.boxes import Boxes, copy_boxes, copy_packed

DTYPES = ("|b1", "|u1", "<i2", "<f4", "<f8", "<c16", "<M8[us]")


class Case(NamedTuple):
    """Boxes of values that lie somewhere in one buffer."""

    values: list[np.ndarray]
    buffer: np.ndarray
    starts: np.ndarray
    boxes: Boxes

    def expected(self, at: int) -> np.ndarray:
        corner = self.boxes.corners[at].tolist()
        inside = self.values[at][
            tuple(slice(first, first + size) for first, size in zip(corner, self.boxes.box, strict=True))
        ]
        missing = [(0, size - have) for size, have in zip(self.boxes.box, inside.shape, strict=True)]
        if isinstance(self.boxes.pad, str):
            filled: np.ndarray = np.pad(inside, missing, mode=self.boxes.pad)  # type: ignore[call-overload]
            return filled
        return np.pad(inside, missing, constant_values=self.boxes.pad if any(map(any, missing)) else 0)


@st.composite
def cases(draw: st.DrawFn, *, small: bool = True) -> Case:
    """Draw boxes and values of up to five axes, also of values smaller than their box."""
    rank, dtype = draw(st.integers(1, 5)), np.dtype(draw(st.sampled_from(DTYPES)))
    most = {1: 40, 2: 12, 3: 7, 4: 5, 5: 4}[rank]
    box = tuple(draw(st.lists(st.integers(1, most), min_size=rank, max_size=rank)))
    pad: Any = None
    if small and draw(st.booleans()):
        pad = draw(st.sampled_from(("reflect", "edge", 1)))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    one_shape = draw(st.booleans())
    values, corners, pieces, starts, position = [], [], [], [], 0
    shape: list[int] = []
    for _ in range(draw(st.integers(1, 5))):
        if not shape or not one_shape:
            shape = [draw(st.integers(1 if pad is not None else size, size + 3)) for size in box]
        corners.append([draw(st.integers(0, max(0, have - size))) for have, size in zip(shape, box, strict=True)])
        raw = rng.integers(0, 2 if dtype.kind == "b" else 200, math.prod(shape) * dtype.itemsize).astype(np.uint8)
        gap = rng.integers(0, 256, draw(st.integers(0, 9))).astype(np.uint8)
        pieces += [gap, raw]
        starts.append(position + len(gap))
        position += len(gap) + len(raw)
        values.append(raw.view(dtype).reshape(shape))
    fill = pad if isinstance(pad, str) or pad is None else np.array(pad).astype("<i8" if dtype.kind == "M" else dtype)
    if fill is not None and not isinstance(fill, str):
        fill = fill.view(dtype)[()]
    shapes = np.array([value.shape for value in values], dtype=np.int64)
    boxes = Boxes(box, np.array(corners, dtype=np.int64), shapes, dtype.itemsize, fill)
    return Case(values, np.concatenate(pieces), np.array(starts, dtype=np.int64), boxes)


@pytest.mark.parametrize("large", [0, 2**14])
@given(case=cases(), data=st.data())
def test_copied_boxes_are_slices_of_their_values(large: int, case: Case, data: st.DataObject) -> None:
    count = len(case.starts)
    to = data.draw(st.none() | st.permutations(range(count)).map(lambda order: np.array(order, dtype=np.int64)))
    out = np.empty((count, *case.boxes.box), dtype=case.values[0].dtype)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(boxes_module, "_LARGE", large)
        copy_boxes(out, to, case.buffer, case.starts, case.boxes)
    for at in range(count):
        row = at if to is None else int(to[at])
        assert out[row].tobytes() == case.expected(at).tobytes()


@given(case=cases(), near=st.sampled_from((0, 1, 7, 40, 10**6)))
def test_runs_cover_each_box_and_join_what_is_near(case: Case, near: int) -> None:
    boxes = case.boxes
    starts, sizes, axis = boxes.runs(near)
    assert starts.shape == (len(case.starts), math.prod(starts.shape[1:]))
    for at, value in enumerate(case.values):
        wanted, covered = np.zeros(value.shape, dtype=bool), np.zeros(value.nbytes, dtype=bool)
        corner = boxes.corners[at].tolist()
        wanted[tuple(slice(first, first + size) for first, size in zip(corner, boxes.box, strict=True))] = True
        for start in starts[at].tolist():
            assert 0 <= start <= start + int(sizes[at]) <= value.nbytes
            covered[start : start + int(sizes[at])] = True
        needed = np.repeat(wanted.reshape(-1), boxes.itemsize)
        assert covered[needed].all()
        # What is read beside the box lies in gaps between its rows, each at most as long as asked for.
        beside = np.flatnonzero(covered & ~needed)
        gaps = np.split(beside, np.flatnonzero(np.diff(beside) > 1) + 1) if len(beside) else []
        assert all(len(gap) <= near for gap in gaps)
    assert 0 <= axis < len(boxes.box)


@given(case=cases(), near=st.sampled_from((0, 5, 100, 10**6)))
def test_a_box_is_copied_out_of_its_runs(case: Case, near: int) -> None:
    for at, value in enumerate(case.values):
        one = case.boxes.slice(at, at + 1)
        starts, sizes, axis = one.runs(near)
        raw = case.buffer[int(case.starts[at]) : int(case.starts[at]) + value.nbytes]
        size = int(sizes[0])
        memory = np.concatenate([raw[start : start + size] for start in starts[0].tolist()])
        out = np.empty(one.box, dtype=value.dtype)
        copy_packed(out, memory, one, axis, size)
        assert out.tobytes() == case.expected(at).tobytes()


def test_no_boxes_and_boxes_of_nothing_are_copied() -> None:
    none = np.empty((0, 2), dtype=np.int64)
    copy_boxes(np.empty((0, 3, 3)), None, np.zeros(9, np.uint8), none[:, 0], Boxes((3, 3), none, none, 8))
    at = np.zeros((1, 2), dtype=np.int64)
    empty = Boxes((0, 3), at, np.array([[0, 3]]), 8)
    copy_boxes(np.empty((1, 0, 3)), None, np.zeros(0, np.uint8), at[:, 0], empty)
