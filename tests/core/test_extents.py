"""The file with the position of each sample's fields."""

import mmap
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cachetool.core.errors import CorruptError
from cachetool.core.extents import Extents, FieldExtents
from cachetool.core.schema import Field, Schema

SCHEMA = Schema(
    (Field("image", "uint8", (4,)), Field("label", "<i8"), Field("wave", "<f4", (None, None)), Field("name", "str"))
)


def make(samples: int = 5) -> Extents:
    rng = np.random.default_rng(samples)
    numbers = rng.integers(0, 2**40, size=(3, samples))
    return Extents(
        samples=samples,
        files=("data.lmdb", "data.zarr/wave/c/0"),
        fields={
            "image": FieldExtents(start=96, stride=64, nbytes=4),
            "label": FieldExtents(column=numbers[0]),
            "wave": FieldExtents(file=1, offsets=numbers[0], sizes=numbers[1], shapes=rng.integers(0, 9, (samples, 2))),
            "name": FieldExtents(offsets=numbers[1], sizes=numbers[2]),
        },
        checksums=rng.integers(0, 2**64, size=(4, samples), dtype=np.uint64),
    )


def assert_equal(expected: Extents, got: Extents) -> None:
    assert (expected.samples, expected.files, list(expected.fields)) == (got.samples, got.files, list(got.fields))
    assert np.array_equal(expected.checksums, got.checksums)
    for name, field in expected.fields.items():
        other = got.fields[name]
        assert (field.file, field.start, field.stride, field.nbytes) == (
            other.file,
            other.start,
            other.stride,
            other.nbytes,
        )
        for part in ("offsets", "sizes", "shapes", "column"):
            one, two = getattr(field, part), getattr(other, part)
            assert (one is None) == (two is None)
            if one is not None:
                assert one.dtype == two.dtype
                assert np.array_equal(one, two)


@pytest.mark.parametrize("samples", [0, 1, 5, 1000])
def test_extents_are_read_back_from_their_bytes(samples: int) -> None:
    assert_equal(make(samples), Extents.from_buffer(make(samples).to_bytes(), schema=SCHEMA))


def test_arrays_are_views_of_a_memory_map(tmp_path: Path) -> None:
    path = tmp_path / "extents.bin"
    path.write_bytes(make().to_bytes())
    with path.open("rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    got = Extents.from_buffer(mapped, schema=SCHEMA)

    assert_equal(make(), got)
    assert np.shares_memory(np.frombuffer(mapped, dtype=np.uint8), got.checksums)


def test_arrays_lie_at_multiples_of_64_bytes() -> None:
    raw = make().to_bytes()
    start = np.frombuffer(raw, np.uint8).__array_interface__["data"][0]
    got = Extents.from_buffer(raw, schema=SCHEMA)

    assert (got.checksums.__array_interface__["data"][0] - start) % 64 == 0
    assert len(raw) % 64 == 0


def test_positions_come_from_a_constant_stride_or_from_a_table() -> None:
    extents = make()
    at = np.array([4, 0, 4])

    offsets, sizes = extents.fields["image"].locate(at)
    assert offsets.tolist() == [96 + 4 * 64, 96, 96 + 4 * 64]
    assert sizes.tolist() == [4, 4, 4]
    offsets, sizes = extents.fields["name"].locate(at)
    table = extents.fields["name"]
    assert table.offsets is not None
    assert table.sizes is not None
    assert table.offsets[at].tolist() == offsets.tolist()
    assert table.sizes[at].tolist() == sizes.tolist()


@settings(max_examples=200)
@given(st.integers(0, len(make().to_bytes()) - 1))
def test_a_file_truncated_anywhere_is_corrupt(length: int) -> None:
    whole = make().to_bytes()
    last = int(np.flatnonzero(np.frombuffer(whole, np.uint8))[-1]) + 1  # only padding follows
    try:
        got = Extents.from_buffer(whole[:length], schema=SCHEMA)
    except CorruptError:
        return
    assert length >= last
    assert_equal(make(), got)


@settings(max_examples=300)
@given(st.data())
def test_a_flipped_byte_is_an_error_or_other_numbers_but_never_a_crash(data: st.DataObject) -> None:
    """The shard's file digest protects the numbers. This parser may only raise CorruptError."""
    whole = bytearray(make().to_bytes())
    header = whole.index(b"\x00", 16) if b"\x00" in whole[16:] else len(whole)
    whole[data.draw(st.integers(0, header - 1))] ^= data.draw(st.integers(1, 255))
    try:
        got = Extents.from_buffer(bytes(whole), schema=SCHEMA)
    except CorruptError:
        return
    assert got.checksums.shape == (4, 5)


@pytest.mark.parametrize(
    "other",
    [
        Schema((Field("image", "uint8", (4,)),)),
        Schema((Field("pixels", "uint8", (4,)), *SCHEMA.fields[1:])),
        Schema((*SCHEMA.fields[:2], Field("wave", "<f4", (None,)), SCHEMA.fields[3])),
        Schema((*SCHEMA.fields, Field("more", "<f4"))),
    ],
)
def test_extents_of_another_schema_are_refused_with_their_file(other: Schema) -> None:
    with pytest.raises(CorruptError, match=r"^abc/extents\.bin is not a whole extents file"):
        Extents.from_buffer(make().to_bytes(), schema=other, name="abc/extents.bin")


@pytest.mark.parametrize(
    "content", [b"", b"CTEXT002", b"CTEXT001" + make().to_bytes()[8:], b"\x00" * 100, b"CTEXT002" + b"\xff" * 40]
)
def test_another_file_is_corrupt(content: bytes) -> None:
    with pytest.raises(CorruptError):
        Extents.from_buffer(content, schema=SCHEMA)


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("image", FieldExtents(start=96, stride=64, nbytes=5)),
        ("image", FieldExtents(start=96, stride=64, nbytes=4, sizes=np.full(5, 4))),
        ("image", FieldExtents(file=2, start=96, stride=64, nbytes=4)),
        ("image", FieldExtents(file=-1, start=96, stride=64, nbytes=4)),
        ("label", FieldExtents(start=96, stride=64, nbytes=8)),
        ("label", FieldExtents(column=np.zeros(5, dtype="<f4"))),
        ("wave", FieldExtents(file=1, offsets=np.zeros(5, dtype=np.int64), nbytes=4)),
        ("name", FieldExtents(offsets=np.zeros(5, dtype="<f8"), nbytes=4)),
    ],
)
def test_extents_that_contradict_their_field_are_refused(name: str, wrong: FieldExtents) -> None:
    """Another size, dtype or file would otherwise be read as if it were right."""
    extents = make()
    broken = Extents(extents.samples, extents.files, {**extents.fields, name: wrong}, extents.checksums)

    with pytest.raises(CorruptError, match=f"not extents of field '{name}'"):
        Extents.from_buffer(broken.to_bytes(), schema=SCHEMA)


@pytest.mark.parametrize(
    "numbers",
    [
        {"start": -1},
        {"start": 2**63},
        {"stride": 2**62},  # the product with five samples wraps around to a position inside the file
        {"stride": -(2**40)},
        {"stride": 2**70},
    ],
)
def test_positions_beyond_64_bits_or_before_the_file_are_refused(numbers: dict[str, int]) -> None:
    extents = make()
    for name, value in numbers.items():
        object.__setattr__(extents.fields["image"], name, value)

    with pytest.raises(CorruptError, match="not extents of field 'image'"):
        Extents.from_buffer(extents.to_bytes(), schema=SCHEMA)


@pytest.mark.parametrize("name", ["../data.lmdb", "/etc/passwd", "data.zarr/../../x", ""])
def test_paths_outside_the_folder_are_refused(name: str) -> None:
    extents = make()
    object.__setattr__(extents, "files", (name, "data.zarr/wave/c/0"))

    with pytest.raises(CorruptError, match="is not a name inside of the folder"):
        Extents.from_buffer(extents.to_bytes(), schema=SCHEMA)


@pytest.mark.parametrize("dtype", [b"=u8", b">u8", b"|O8", b"<,8", b"<U8", b"(u8", b'"u8'])
def test_a_dtype_that_cachetool_never_writes_is_refused(dtype: bytes) -> None:
    """NumPy parses some names as Python code, and other names as another byte order."""
    raw = make().to_bytes()
    assert raw.count(b"<u8") == 1
    with pytest.raises(CorruptError, match="is not a whole extents file"):
        Extents.from_buffer(raw.replace(b"<u8", dtype), schema=SCHEMA)


def test_a_newer_version_is_refused_with_both_versions() -> None:
    raw = make().to_bytes().replace(b"CTEXT002", b"CTEXT012")

    with pytest.raises(CorruptError, match="version 12, this cachetool reads version 2; update cachetool"):
        Extents.from_buffer(raw, schema=SCHEMA)


def test_a_deeply_nested_header_is_refused() -> None:
    text = b"[" * 100_000

    with pytest.raises(CorruptError, match="is not a whole extents file"):
        Extents.from_buffer(b"CTEXT002" + len(text).to_bytes(8, "little") + text, schema=SCHEMA)
