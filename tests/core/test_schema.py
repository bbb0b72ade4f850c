"""Fields and schemas: the possible contents of a sample."""

import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cachetool.core.errors import UsageError
from cachetool.core.schema import Field, Schema, storage_dtype


@pytest.mark.parametrize(
    ("field", "kind", "text"),
    [
        (Field("x", "float32", (3, 64)), "fixed", "float32 (3, 64)"),
        (Field("x", "<i8"), "fixed", "int64"),
        (Field("x", "uint8", (None, None, None)), "ragged", "uint8 ragged rank 3"),
        (Field("x", "bytes"), "bytes", "bytes"),
        (Field("x", "str"), "str", "str"),
        (Field("x", "<f2", (0, 4)), "fixed", "float16 (0, 4)"),
    ],
)
def test_dtype_and_shape_alone_decide_the_kind(field: Field, kind: str, text: str) -> None:
    assert kind == field.kind
    assert text == field.describe()


@pytest.mark.parametrize(
    ("dtype", "stored"),
    [
        (">f4", "<f4"),
        ("=i2", "<i2"),
        ("bool", "|b1"),
        ("uint8", "|u1"),
        (">c16", "<c16"),
        (">M8[ns]", "<M8[ns]"),
        (np.float64, "<f8"),
    ],
)
def test_values_are_stored_little_endian(dtype: object, stored: str) -> None:
    assert stored == storage_dtype(dtype).str


@pytest.mark.parametrize(
    "dtype", ["O", "U5", "S3", "V8", "i4,f4", np.longdouble, np.clongdouble, "M8", "m8", "no such", "(2,)i4"]
)
def test_dtypes_without_plain_bytes_are_refused(dtype: object) -> None:
    with pytest.raises(UsageError, match="dtype"):
        storage_dtype(dtype)


def test_objects_are_refused_because_they_would_be_pickled() -> None:
    with pytest.raises(UsageError, match="pickle"):
        Field("x", "object", (3,))


@pytest.mark.parametrize("name", ["x", "image", "a/b/c", "x y", "x-1", "npy.gz", "__key__", "A+B", "0"])
def test_names_that_every_format_can_store_are_accepted(name: str) -> None:
    assert name == Field(name, "<f4").name


@pytest.mark.parametrize(
    "name",
    ["", ".", "..", "a/..", "../a", "/a", "a/", "a//b", " ", "a\x00", "a\n", "ä", "a\\b", "x" * 201, "a/ /b", "%2e%2e"],
)
def test_names_with_path_or_control_characters_are_refused(name: str) -> None:
    with pytest.raises(UsageError, match=re.escape(repr(name)) + ".* --rename"):
        Field(name, "<f4")


@pytest.mark.parametrize(
    "name",
    [
        *("x.offsets", "x.shapes", "x.offsets/y", "a/x.shapes/y", "x/shape"),
        *("zarr.json", "a/zarr.json", "zarr.json/a", "__len__", "__schema__"),
    ],
)
def test_names_reserved_by_formats_are_refused_with_an_alternative(name: str) -> None:
    with pytest.raises(UsageError, match="--rename"):
        Field(name, "<f4")


@pytest.mark.parametrize("shape", [(None, 3), (3, None), (-1,), (1,) * 33])
def test_invalid_shapes_are_refused(shape: tuple[int | None, ...]) -> None:
    with pytest.raises(UsageError, match="'x'"):
        Field("x", "<f4", shape)


@pytest.mark.parametrize("dtype", ["bytes", "str"])
def test_text_and_bytes_have_no_shape(dtype: str) -> None:
    with pytest.raises(UsageError, match="no shape"):
        Field("x", dtype, (3,))


def test_nbytes_of_a_sample_counts_the_fixed_fields() -> None:
    schema = Schema((Field("a", "<f4", (3, 4)), Field("b", "<i8"), Field("c", "str"), Field("d", "<f8", (None,))))

    assert schema.fixed_nbytes == 48 + 8
    assert [field.nbytes for field in schema] == [48, 8, 0, 0]
    assert not schema.is_fixed
    assert schema.select(["b", "a"]).is_fixed
    assert list(schema.select(["b", "a"]).names) == ["b", "a"]


def test_a_ragged_field_has_no_fixed_size() -> None:
    with pytest.raises(UsageError, match="differs from sample to sample"):
        _ = Field("x", "<f4", (None,)).sizes


def test_the_error_about_a_missing_field_lists_the_existing_ones() -> None:
    schema = Schema((Field("volume", "<f4", (2,)), Field("label", "<i8")))

    with pytest.raises(UsageError, match="'image'; this dataset has volume, label"):
        schema["image"]
    assert "volume" in schema
    assert "image" not in schema
    assert len(schema) == 2


@pytest.mark.parametrize("names", [[], ["a", "a"], ["a", "a/b"], ["a/b", "a/b/c"]])
def test_schemas_whose_fields_collide_are_refused(names: list[str]) -> None:
    with pytest.raises(UsageError):
        Schema(tuple(Field(name, "<f4") for name in names))


FIELDS = st.builds(
    Field,
    st.from_regex(r"[a-z][a-z0-9_]{0,8}", fullmatch=True),
    st.sampled_from(["bool", "<i4", ">f8", "<c8", "<M8[s]"]),
    st.one_of(st.lists(st.integers(0, 9), max_size=4).map(tuple), st.integers(1, 4).map(lambda rank: (None,) * rank)),
) | st.builds(Field, st.from_regex(r"[A-Z][a-z]{0,8}", fullmatch=True), st.sampled_from(["bytes", "str"]))
SCHEMAS = st.lists(FIELDS, min_size=1, max_size=6, unique_by=lambda field: field.name).map(
    lambda fields: Schema(tuple(fields))
)


@given(SCHEMAS)
def test_a_schema_is_read_back_from_json_with_its_fingerprint(schema: Schema) -> None:
    again = Schema.from_json(schema.to_json())

    assert schema == again
    assert schema.fingerprint == again.fingerprint


@given(SCHEMAS, SCHEMAS)
def test_fingerprints_are_equal_exactly_for_equal_schemas(one: Schema, other: Schema) -> None:
    assert (one == other) == (one.fingerprint == other.fingerprint)


def test_the_fingerprint_is_the_same_in_every_release() -> None:
    schema = Schema((Field("image", "uint8", (28, 28)), Field("label", "<i8"), Field("name", "str")))

    assert schema.fingerprint == "b5810f1667b33b78"


@pytest.mark.parametrize(
    "value",
    [
        None,
        3,
        "x",
        [1],
        [{"name": "x"}],
        [{"name": "x", "dtype": "<f4", "shape": 3}],
        [{"name": "x", "dtype": "<f4", "shape": ["a"]}],
        [],
    ],
)
def test_json_that_is_not_a_schema_is_refused(value: object) -> None:
    with pytest.raises(UsageError):
        Schema.from_json(value)
