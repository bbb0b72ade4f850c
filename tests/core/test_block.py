"""Columns of many samples: slicing, taking, joining, and checks of values."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cachetool.core.block import Block, Ragged
from cachetool.core.errors import UsageError
from cachetool.core.schema import Field, Schema

SCHEMA = Schema(
    (
        Field("image", "uint8", (2, 3)),
        Field("label", "<i8"),
        Field("wave", "<f4", (None, None)),
        Field("raw", "bytes"),
        Field("name", "str"),
    )
)


@st.composite
def samples(draw: st.DrawFn) -> dict[str, Any]:
    rows, columns = draw(st.integers(0, 3)), draw(st.integers(0, 3))
    floats = st.floats(width=32, allow_nan=False)
    return {
        "image": np.array(draw(st.lists(st.integers(0, 255), min_size=6, max_size=6)), dtype=np.uint8).reshape(2, 3),
        "label": draw(st.integers(-(2**63), 2**63 - 1)),
        "wave": np.array(
            draw(st.lists(floats, min_size=rows * columns, max_size=rows * columns)), dtype=np.float32
        ).reshape(rows, columns),
        "raw": draw(st.binary(max_size=9)),
        "name": draw(st.text(max_size=6)),
    }


def assert_same(expected: dict[str, Any], got: dict[str, Any]) -> None:
    assert list(SCHEMA.names) == list(got)
    for name, value in expected.items():
        if isinstance(value, np.ndarray):
            assert value.shape == got[name].shape
            assert np.array_equal(value, got[name])
        else:
            assert value == got[name]


@settings(max_examples=60)
@given(st.lists(samples(), max_size=6), st.data())
def test_samples_are_the_same_in_whole_sliced_taken_and_joined_columns(
    given_: list[dict[str, Any]], data: st.DataObject
) -> None:
    block = Block.from_samples(SCHEMA, given_)
    n = len(given_)
    start = data.draw(st.integers(0, n))
    stop = data.draw(st.integers(start, n))
    at = data.draw(st.lists(st.integers(0, n - 1), max_size=8)) if n else []

    assert n == block.samples == len(block)
    for index, expected in enumerate(given_):
        assert_same(expected, block.sample(index))
    cut = block.slice(start, stop)
    for index, expected in enumerate(given_[start:stop]):
        assert_same(expected, cut.sample(index))
    for index, expected in enumerate(at):
        assert_same(given_[expected], block.take(at).sample(index))
    joined = Block.concat([cut, block.slice(0, start), block])
    for index, expected in enumerate([*given_[start:stop], *given_[:start], *given_]):
        assert_same(expected, joined.sample(index))


@settings(max_examples=60)
@given(st.lists(samples(), max_size=6))
def test_nbytes_of_a_block_is_the_sum_over_its_samples(given_: list[dict[str, Any]]) -> None:
    block = Block.from_samples(SCHEMA, given_)
    expected = [6 + 8 + s["wave"].nbytes + len(s["raw"]) + len(s["name"].encode()) for s in given_]

    assert expected == block.sample_nbytes.tolist()
    assert sum(expected) == block.nbytes
    assert sum(expected[1:]) == (block.slice(1, len(given_)).nbytes if given_ else 0)


def test_slices_share_memory_and_take_copies() -> None:
    block = Block(Schema((Field("x", "<f4", (4,)),)), {"x": np.zeros((10, 4), dtype=np.float32)})

    assert np.shares_memory(block.columns["x"], block.slice(2, 5).columns["x"])
    assert not np.shares_memory(block.columns["x"], block.take([2, 3]).columns["x"])


def test_compact_offsets_begin_at_zero_with_no_spare_values() -> None:
    ragged = Ragged(np.arange(10), np.array([2, 4, 4, 9]))
    compact = ragged.compact()

    assert compact.offsets.tolist() == [0, 2, 2, 7]
    assert list(range(2, 9)) == compact.values.tolist()
    assert compact.compact() is compact


def test_a_ragged_column_is_indexed_like_a_list() -> None:
    ragged = Ragged(np.arange(9), np.array([2, 4, 4, 9]))
    listed = [[2, 3], [], [4, 5, 6, 7, 8]]

    assert [ragged[index].tolist() for index in range(-3, 3)] == listed + listed
    for part in (slice(None), slice(1, None), slice(-1, None), slice(None, None, -2), slice(5, 9)):
        assert [each.tolist() for each in ragged[part]] == listed[part]


@pytest.mark.parametrize("index", [-4, 3])
def test_an_index_outside_a_ragged_column_is_an_error(index: int) -> None:
    with pytest.raises(IndexError):
        Ragged(np.arange(4), np.array([0, 1, 2, 4]))[index]


def test_columns_of_different_length_are_refused() -> None:
    schema = Schema((Field("a", "<f4"), Field("b", "<f4")))
    with pytest.raises(UsageError, match="differ in length"):
        Block(schema, {"a": np.zeros(3), "b": np.zeros(4)})


def test_text_that_is_not_utf8_survives() -> None:
    schema = Schema((Field("name", "str"),))
    name = b"\xff\xfe.npy".decode("utf-8", "surrogateescape")

    assert name == Block.from_samples(schema, [{"name": name}]).sample(0)["name"]


def test_big_endian_values_are_stored_little_endian() -> None:
    schema = Schema((Field("x", "<f4", (2,)),))
    column = Block.from_samples(schema, [{"x": np.array([1, 2], dtype=">f4")}]).columns["x"]

    assert isinstance(column, np.ndarray)
    assert column.dtype.str == "<f4"
    assert column.tolist() == [[1.0, 2.0]]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        (Field("x", "<f4", (2,)), np.zeros(3, np.float32)),
        (Field("x", "<f4", (2,)), np.zeros((2, 1), np.float32)),
        (Field("x", "<f4", (2,)), np.zeros(2, np.float64)),
        (Field("x", "<f4", (2,)), "ab"),
        (Field("x", "<f4", (None,)), np.zeros((2, 2), np.float32)),
        (Field("x", "<i8"), 1.5),
        (Field("x", "uint8"), 256),
        (Field("x", "uint8"), -1),
        (Field("x", "bool"), 2),
        (Field("x", "str"), b"ab"),
        (Field("x", "bytes"), "ab"),
        (Field("x", "bytes"), np.zeros(2, np.uint8)),
        (Field("x", "<i8"), None),
        (Field("x", "<i8"), 2**70),
        (Field("x", "<f8"), 2**53 + 1),
        (Field("x", "<f8"), -(2**53) - 1),
        (Field("x", "<f8"), 2**64 - 1),
        (Field("x", "<f4"), 2**24 + 1),
        (Field("x", "<f2"), 70_000),
        (Field("x", "<f2"), 70_000.0),
        (Field("x", "<f4"), 1e300),
        (Field("x", "<c16"), 2**53 + 1),
        (Field("x", "<i8"), True),
        (Field("x", "<f8"), False),
    ],
)
def test_a_value_that_does_not_fit_is_refused_with_its_field(field: Field, value: object) -> None:
    with pytest.raises(UsageError, match="'x'"):
        Block.from_samples(Schema((field,)), [{"x": value}])


def test_the_error_about_a_missing_value_lists_the_existing_fields() -> None:
    with pytest.raises(UsageError, match="no field 'x'; it has y, z"):
        Block.from_samples(Schema((Field("x", "<f4"),)), [{"y": 1, "z": 2}])


@pytest.mark.parametrize(
    ("dtype", "value", "expected"),
    [
        ("<f4", 2, 2.0),
        ("<f8", 2**53 + 2, 2.0**53 + 2),
        ("<f8", 2**60, 2.0**60),
        ("<f8", -(2**63), -(2.0**63)),
        ("<c8", 3, 3.0),
        ("uint8", 255, 255),
        ("<u8", 2**64 - 1, 2**64 - 1),
        ("bool", True, True),
        ("<f8", 0.1, 0.1),
    ],
)
def test_a_python_number_fits_a_dtype_that_represents_it_exactly(dtype: str, value: Any, expected: Any) -> None:
    assert expected == Block.from_samples(Schema((Field("x", dtype),)), [{"x": value}]).sample(0)["x"]


@pytest.mark.parametrize("value", [0.5, float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("exact", [False, True])
def test_a_python_float_that_a_narrower_dtype_represents_is_kept(value: float, *, exact: bool) -> None:
    column = Block.from_samples(Schema((Field("x", "<f4"),)), [{"x": value}], exact=exact).columns["x"]

    assert np.array_equal(column, [np.float32(value)], equal_nan=True)  # type: ignore[arg-type]


def test_a_python_float_is_rounded_to_a_narrower_dtype_unless_rounding_is_off() -> None:
    schema = Schema((Field("x", "<f4"),))

    assert Block.from_samples(schema, [{"x": 0.1}]).sample(0)["x"] == np.float32(0.1)
    with pytest.raises(UsageError, match=r"'x' holds float32, which cannot hold 0\.1"):
        Block.from_samples(schema, [{"x": 0.1}], exact=True)
