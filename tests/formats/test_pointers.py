"""Rows that are copied from anywhere by one call."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cachetool.formats.pointers import join_rows


@given(st.integers(0, 40), st.integers(1, 5000), st.integers(0, 1000))
def test_rows_are_what_slices_are(rows: int, nbytes: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    source = rng.integers(0, 256, nbytes + 3000, dtype=np.uint8)
    starts = rng.integers(0, 3001, rows)
    out = np.full(rows * nbytes + 8, 7, dtype=np.uint8)
    join_rows(out, source, starts, nbytes)

    assert out[: rows * nbytes].tobytes() == b"".join(source[at : at + nbytes].tobytes() for at in starts)
    assert (out[rows * nbytes :] == 7).all()


@pytest.mark.parametrize("start", [-1, 91, 2**62, -(2**63)])
def test_a_row_outside_the_source_is_refused(start: int) -> None:
    out = np.zeros(20, dtype=np.uint8)
    with pytest.raises(IndexError, match="outside"):
        join_rows(out, np.ones(100, dtype=np.uint8), np.array([0, start]), 10)
    assert not out.any()


def test_rows_beyond_the_end_of_the_target_are_refused() -> None:
    with pytest.raises(IndexError, match="outside"):
        join_rows(np.zeros(19, dtype=np.uint8), np.ones(100, dtype=np.uint8), np.array([0, 10]), 10)


def test_a_source_shorter_than_a_row_is_refused() -> None:
    with pytest.raises(IndexError, match="outside"):
        join_rows(np.zeros(20, dtype=np.uint8), np.ones(9, dtype=np.uint8), np.array([0]), 10)
