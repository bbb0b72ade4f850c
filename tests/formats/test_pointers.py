"""Copying rows from any address by one call."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cachetool.formats.runs import Pointed


@given(st.integers(0, 40), st.integers(1, 5000), st.integers(0, 1000))
def test_copied_rows_equal_slices(rows: int, nbytes: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    source = rng.integers(0, 256, nbytes + 3000, dtype=np.uint8)
    starts = rng.integers(0, 3001, rows)
    out = np.full(rows * nbytes + 8, 7, dtype=np.uint8)
    Pointed(source, starts, nbytes).join(out, 0, 0, rows)

    assert out[: rows * nbytes].tobytes() == b"".join(source[at : at + nbytes].tobytes() for at in starts)
    assert (out[rows * nbytes :] == 7).all()


@pytest.mark.parametrize("start", [-1, 91, 2**62, -(2**63)])
def test_a_row_outside_the_source_is_refused(start: int) -> None:
    out = np.zeros(20, dtype=np.uint8)
    with pytest.raises(IndexError, match="outside"):
        Pointed(np.ones(100, dtype=np.uint8), np.array([0, start]), 10).join(out, 0, 0, 2)
    assert not out.any()


@given(st.integers(1, 40), st.integers(1, 3000), st.integers(0, 1000), st.data())
def test_any_run_of_rows_can_be_copied_to_any_position(rows: int, nbytes: int, seed: int, data: st.DataObject) -> None:
    rng = np.random.default_rng(seed)
    source = rng.integers(0, 256, nbytes + 3000, dtype=np.uint8)
    starts = rng.integers(0, 3001, rows)
    pointed = Pointed(source, starts, nbytes)
    for _ in range(3):
        first = data.draw(st.integers(0, rows))
        last, at = data.draw(st.integers(first, rows)), data.draw(st.integers(0, 10))
        out = np.full((last - first) * nbytes + 10, 7, dtype=np.uint8)
        pointed.join(out, at, first, last)

        expected = b"".join(source[start : start + nbytes].tobytes() for start in starts[first:last])
        assert out.tobytes() == b"\7" * at + expected + b"\7" * (10 - at)


@pytest.mark.parametrize(
    ("size", "at", "first", "last"),
    [(19, 0, 0, 2), (20, 1, 0, 2), (20, -1, 0, 1), (40, 0, 1, 3), (40, 0, -1, 1), (9, 0, 0, 1)],
)
def test_rows_beyond_the_end_of_the_target_or_of_the_rows_are_refused(
    size: int, at: int, first: int, last: int
) -> None:
    rows = Pointed(np.ones(100, dtype=np.uint8), np.array([0, 10]), 10)
    with pytest.raises(IndexError, match="outside"):
        rows.join(np.zeros(size, dtype=np.uint8), at, first, last)


def test_a_source_shorter_than_a_row_is_refused() -> None:
    with pytest.raises(IndexError, match="outside"):
        Pointed(np.ones(9, dtype=np.uint8), np.array([0]), 10)
