"""Specific properties of TFRecord: frames and their checksums, the Example wire format, gzip, foreign records."""

from __future__ import annotations

import gzip
import itertools
import struct
from pathlib import Path
from typing import Any

import crc32c
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cachetool.core.block import Block
from cachetool.core.errors import CorruptError, UsageError
from cachetool.core.schema import Field, Schema
from cachetool.core.tf_example import FLOAT, INT64, Feature, Gathered, parse_example
from cachetool.formats import get_format
from cachetool.formats.digest import checksums
from cachetool.formats.example import ExampleLayout, unpad_varints, varint, varints
from cachetool.formats.framing import GzipFile, scan_records
from cachetool.formats.tfrecord import shape_name, storage_kind
from tests.formats.samples import DTYPES, EVERY_KIND, block, blocks, write

KIND = get_format("tfrecord")
SIMPLE = Schema((Field("x", "<f4", (3,)), Field("n", "<i8"), Field("f", "<f4"), Field("t", "str")))


def frame(data: bytes) -> bytes:
    """Return one record, built from the format's documentation."""

    def masked(raw: bytes) -> bytes:
        crc = crc32c.crc32c(raw)
        return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)

    length = struct.pack("<Q", len(data))
    return length + masked(length) + data + masked(data)


def message(number: int, content: bytes) -> bytes:
    return bytes([number << 3 | 2]) + varint(len(content)) + content


def example(features: dict[str, bytes]) -> bytes:
    """Return an Example of serialised Feature messages with minimal varints."""
    entries = b"".join(message(1, message(1, name.encode()) + message(2, f)) for name, f in features.items())
    return message(1, entries)


def numbers(feature: Feature) -> np.ndarray[Any, Any]:
    """Return the numbers of a parsed feature."""
    gathered = Gathered(feature.kind)
    gathered.add(feature)
    return gathered.values()


def read_all(path: Path, schema: Schema) -> Block:
    with KIND.open(path, schema=schema) as reader:
        return reader.read(0, reader.samples)


def test_frames_are_those_of_tensorflow(tmp_path: Path) -> None:
    """Lengths and both checksums, byte for byte."""
    content = block(EVERY_KIND, 5)
    write(KIND, tmp_path / "f", content)
    raw = (tmp_path / "f").read_bytes()
    starts, sizes = scan_records(np.frombuffer(raw, dtype=np.uint8), name="f")
    assert raw == b"".join(frame(raw[a : a + n]) for a, n in zip(starts.tolist(), sizes.tolist(), strict=True))
    assert len(starts) == 5


def test_the_same_samples_make_the_same_file(tmp_path: Path) -> None:
    """The division into blocks does not matter."""
    content = block(EVERY_KIND, 40)
    write(KIND, tmp_path / "a", content)
    write(KIND, tmp_path / "b", content, cuts=(3, 4, 30))
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


@given(content=blocks())
def test_every_written_record_can_be_decoded(content: Block) -> None:
    """Any schema and values are decoded, also shards without values."""
    layout = ExampleLayout(content.schema)
    decoded = layout.decode(*layout.encode(content))
    assert decoded is not None
    np.testing.assert_array_equal(checksums(decoded), checksums(content))


def test_a_shape_that_does_not_fit_its_values_is_corrupt(tmp_path: Path) -> None:
    """Valid frames and lengths, but wrong numbers in ``r/shape``, also huge numbers whose product wraps around."""
    schema = Schema((Field("r", "<i2", (None, None)),))
    content = Block.from_samples(schema, [{"r": np.zeros((2, 3), "<i2")}])
    buffer, _, _ = ExampleLayout(schema).encode(content)
    at = buffer.tobytes().index(varint(2, 9) + varint(3, 9))
    for rows, columns in ((3, 3), (2**62, 4), (2**61 + 2, 3), (0, 3)):
        raw = bytearray(buffer.tobytes())
        raw[at : at + 18] = varint(rows, 9) + varint(columns, 9)
        (tmp_path / "f").write_bytes(frame(bytes(raw)))
        with pytest.raises(CorruptError, match="f: sample 0"):
            read_all(tmp_path / "f", schema)


@given(content=blocks(), data=st.data())
def test_a_damaged_record_is_never_a_crash(content: Block, data: st.DataObject) -> None:
    """Without frames and their checksums, a changed byte results in a sample or in an error."""
    if not content.samples:
        return
    layout = ExampleLayout(content.schema)
    buffer, starts, sizes = layout.encode(content.slice(0, 1))
    at = data.draw(st.integers(0, len(buffer) - 1))
    buffer[at] ^= data.draw(st.integers(1, 255))
    decoded = layout.decode(buffer, starts, sizes)
    assert decoded is None or decoded.samples == 1


@pytest.mark.parametrize("dtype", DTYPES)
def test_scalars_are_bit_exact(dtype: str, tmp_path: Path) -> None:
    """The extremes of every type, NaN payloads, NaT, and uint64 above 2**63."""
    kind = np.dtype(dtype)
    if kind.kind == "b":
        values = np.array([True, False])
    else:
        patterns = np.random.default_rng(0).bytes(40 * kind.itemsize)
        values = np.frombuffer(patterns + bytes(kind.itemsize) + b"\xff" * kind.itemsize, dtype=kind)
        signalling = {"<f2": 0x7C01, "<f4": 0x7F800001, "<f8": 0x7FF0000000000001}.get(dtype)
        if signalling is not None:
            values = np.append(values, np.array([signalling], dtype=f"<u{kind.itemsize}").view(kind))
    schema = Schema((Field("v", dtype),))
    write(KIND, tmp_path / "f", Block(schema, {"v": values}))
    assert np.asarray(read_all(tmp_path / "f", schema).columns["v"]).tobytes() == values.tobytes()


def test_each_dtype_is_stored_in_the_documented_list() -> None:
    """Integers are int64, float32 is float, everything else is bytes."""
    kinds = {d: storage_kind(Field("x", d)) for d in DTYPES}
    assert {d for d, k in kinds.items() if k == "int64"} == {"?", "i1", "<i2", "<i4", "<i8", "u1", "<u2", "<u4", "<u8"}
    assert {d for d, k in kinds.items() if k == "float"} == {"<f4"}
    for field in (Field("x", "<i8", (1,)), Field("x", "<f4", (None,)), Field("x", "bytes"), Field("x", "str")):
        assert storage_kind(field) == "bytes"
    assert shape_name(Field("x", "<f4", (None,))) == "x/shape"


def test_the_features_are_the_documented_ones() -> None:
    """Every field of a sample is in the list that the documentation names."""
    content = block(EVERY_KIND, 1, seed=5)
    buffer, _, _ = ExampleLayout(EVERY_KIND).encode(content)
    features, one = parse_example(buffer.data), content.sample(0)
    assert set(features) == {*EVERY_KIND.names, *(shape_name(f) for f in EVERY_KIND if f.kind == "ragged")}
    for field in EVERY_KIND:
        feature, value = features[field.name], one[field.name]
        kind = storage_kind(field)
        if kind == "int64":
            assert numbers(feature).tolist() == [int(np.asarray(value).astype(np.int64))]
        elif kind == "float":
            assert numbers(feature).tobytes() == np.asarray(value).tobytes()
        else:
            text = field.kind == "str"
            raw = value.encode("utf-8", "surrogateescape") if text else value
            raw = raw if isinstance(raw, bytes) else raw.tobytes()
            assert [bytes(s) for s in feature.parts] == [raw]
        if field.kind == "ragged":
            assert tuple(numbers(features[shape_name(field)])) == value.shape


@pytest.mark.parametrize(
    "record",
    [
        b"",
        example({}),
        example({"x": message(1, message(1, bytes(12))), "n": message(3, message(1, b"\1"))}),
        b"\x0b",
        b"\xff" * 100,
    ],
)
def test_foreign_records_are_refused_with_file_and_sample(record: bytes, tmp_path: Path) -> None:
    """Valid frames around other data, even around a valid Example: another reader is for foreign files."""
    path = tmp_path / "odd.tfrecord"
    write(KIND, path, block(SIMPLE, 3))
    path.write_bytes(path.read_bytes() + frame(record))
    with KIND.open(path, schema=SIMPLE) as reader:
        assert len(reader.read(0, 3)) == 3
        with pytest.raises(CorruptError, match=r"odd\.tfrecord: sample 3 is not a record .*\n.*cachetool convert"):
            reader.take(np.array([1, 3, 0]))


def test_checksums_are_checked(tmp_path: Path) -> None:
    """One flipped bit anywhere in any record, of equal and of different sizes: the error names the file."""
    for schema in (SIMPLE, SIMPLE.select(["x", "n"])):
        path = tmp_path / f"{len(schema)}.tfrecord"
        write(KIND, path, block(schema, 4))
        whole = path.read_bytes()
        for at in range(len(whole)):
            path.write_bytes(whole[:at] + bytes([whole[at] ^ 1 << at % 8]) + whole[at + 1 :])
            with pytest.raises(CorruptError, match=path.name):
                read_all(path, schema)


def test_a_huge_length_allocates_nothing(tmp_path: Path) -> None:
    """The length has a valid checksum, but no file could hold the record."""
    length = struct.pack("<Q", 2**62)
    (tmp_path / "f").write_bytes(length + frame(b"x" * 8)[8:12] + bytes(100))
    with pytest.raises(CorruptError, match="damaged length"):
        KIND.open(tmp_path / "f", schema=SIMPLE)
    crc = crc32c.crc32c(length)
    right = struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)
    (tmp_path / "f").write_bytes(frame(b"fine") + length + right + bytes(100))
    with pytest.raises(CorruptError, match="cut short: sample 1 needs 4611686018427387904 bytes"):
        KIND.open(tmp_path / "f", schema=SIMPLE)
    (tmp_path / "g").write_bytes(gzip.compress(length + right + bytes(100)))
    with pytest.raises(CorruptError, match="cut short"):
        KIND.open(tmp_path / "g", schema=SIMPLE)


def test_reading_needs_a_schema(tmp_path: Path) -> None:
    """The file does not contain one."""
    write(KIND, tmp_path / "f", block(SIMPLE, 1))
    with pytest.raises(UsageError, match="schema="):
        KIND.open(tmp_path / "f")
    with pytest.raises(CorruptError, match="missing"):
        KIND.open(tmp_path / "nowhere", schema=SIMPLE)


def test_a_compressed_shard_opens_with_gzip(tmp_path: Path) -> None:
    """The compressed file is the plain file in plain gzip."""
    content = block(EVERY_KIND, 30)
    write(KIND, tmp_path / "plain", content)
    write(KIND, tmp_path / "packed", content, compression="gzip")
    assert gzip.decompress((tmp_path / "packed").read_bytes()) == (tmp_path / "plain").read_bytes()


def test_foreign_gzip_of_several_members_is_read(tmp_path: Path) -> None:
    """Members may be joined anywhere, as by ``cat a.gz b.gz``."""
    content = block(SIMPLE, 50)
    write(KIND, tmp_path / "plain", content)
    raw = (tmp_path / "plain").read_bytes()
    cuts = [0, 5, 1000, 1001, len(raw)]
    (tmp_path / "f").write_bytes(b"".join(gzip.compress(raw[a:b]) for a, b in itertools.pairwise(cuts)))
    np.testing.assert_array_equal(checksums(read_all(tmp_path / "f", SIMPLE)), checksums(content))


def test_gzip_is_read_from_any_position(tmp_path: Path) -> None:
    """Forwards, backwards, across pieces and saved states, the bytes equal the uncompressed ones."""
    rng = np.random.default_rng(0)
    raw = np.repeat(rng.integers(0, 256, size=3_000_000).astype("u1"), 5).tobytes()
    (tmp_path / "f").write_bytes(gzip.compress(raw, 1))
    stream = GzipFile(tmp_path / "f")
    assert stream.read(len(raw) - 3, 10) == raw[-3:]
    for _ in range(60):
        at, size = int(rng.integers(len(raw))), int(rng.choice([0, 1, 1000, 700_000]))
        assert stream.read(at, size) == raw[at : at + size]
    assert stream.read(len(raw) + 5, 10) == b""
    stream.close()
    stream.close()


def test_a_record_length_that_looks_like_gzip_is_not_mistaken(tmp_path: Path) -> None:
    """A first record of 0x8b1f bytes begins with the two magic bytes of gzip."""
    schema = Schema((Field("b", "bytes"),))
    layout = ExampleLayout(schema)
    content = Block.from_samples(schema, [{"b": bytes(0x8B1F - layout.overhead)}])
    write(KIND, tmp_path / "f", content)
    assert (tmp_path / "f").read_bytes()[:2] == b"\x1f\x8b"
    np.testing.assert_array_equal(checksums(read_all(tmp_path / "f", schema)), checksums(content))


def test_a_record_above_two_gib_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No reader of protocol buffers accepts it (tested with a smaller limit)."""
    monkeypatch.setattr("cachetool.formats.example.MAX_RECORD", 1000)
    with pytest.raises(UsageError, match="tfrecord holds at most 1000"):
        KIND.create(tmp_path / "f", Schema((Field("x", "u1", (2000,)),)), samples=1, nbytes=5000)
    schema = Schema((Field("b", "bytes"),))
    writer = KIND.create(tmp_path / "f", schema, samples=1, nbytes=5000)
    with pytest.raises(UsageError, match="tfrecord holds at most 1000"):
        writer.write(Block.from_samples(schema, [{"b": bytes(2000)}]))
    writer.abort()


@given(values=st.lists(st.integers(0, 2**64 - 1), max_size=20), width=st.integers(10, 10))
def test_minimal_and_padded_varints_are_equal(values: list[int], width: int) -> None:
    """A varint may be padded to any width."""
    expected: list[Any] = np.array(values, dtype=np.uint64).view(np.int64).tolist()
    minimal = np.frombuffer(b"".join(map(varint, values)), dtype=np.uint8)
    assert numbers(Feature(INT64, [minimal.data])).tolist() == expected
    padded = varints(np.array(values, dtype=np.uint64), width)
    assert numbers(Feature(INT64, [padded.reshape(-1).data])).tolist() == expected
    back = unpad_varints(padded)
    assert back is not None
    assert back.tolist() == expected
    assert b"".join(varint(v, width) for v in values) == padded.tobytes()


def test_a_float_list_keeps_its_bits() -> None:
    """A signalling NaN is not changed."""
    nan = struct.pack("<I", 0x7F800001)
    feature = parse_example(memoryview(example({"f": message(2, message(1, nan))})))["f"]
    assert (feature.kind, numbers(feature).tobytes()) == (FLOAT, nan)
