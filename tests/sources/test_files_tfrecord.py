"""TFRecord files of TensorFlow and of the package ``tfrecord``, read as samples without either.

Each writes in its own child process, because the two cannot be imported into one process.
"""

from __future__ import annotations

import gzip
import struct
import subprocess
import sys
import zlib
from pathlib import Path
from typing import Any

import crc32c
import numpy as np
import pytest

from cachetool.core.errors import BadObject, UsageError
from cachetool.sources.options import SourceOptions
from tests.sources.files import damaged, file_kind, open_files, outcome, same, samples


def run(script: str, folder: Path) -> None:
    path = Path(__file__).parent / "scripts" / script
    done = subprocess.run([sys.executable, str(path), str(folder)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.fixture(scope="module")
def tensorflow_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tensorflow")
    run("write_tensorflow.py", folder)
    return folder


def split(written: Any, name: str) -> list[Any]:
    return np.split(written[name], np.cumsum(written[f"{name}_sizes"])[:-1])


@pytest.mark.parametrize("name", ["plain.tfrecord", "packed.tfrecord.gz", "zlib.tfrecord"])
@pytest.mark.parametrize("block_bytes", [1000, 2**23])
def test_files_of_tensorflow_are_read(tensorflow_folder: Path, name: str, block_bytes: int) -> None:
    """Scalars, fixed lists, ragged lists, byte strings, negative and large numbers, missing lists."""
    written = np.load(tensorflow_folder / "written.npz")
    tokens, scores, images = (split(written, each) for each in ("tokens", "scores", "images"))

    with open_files(tensorflow_folder / name) as source:
        assert source.schema.describe() == (
            "box: float32 (4,), image/encoded: bytes, label: int64, scores: float32 ragged rank 1, shape: int64 (3,),"
            " small: int64, tokens: int64 ragged rank 1, weight: float32"
        )
        assert source.skipped == (
            ("nothing", "always empty"),
            ("tags", "0 to 2 byte strings per record, but a field holds only one"),
        )
    found = samples(tensorflow_folder / name, block_bytes=block_bytes)

    assert len(found) == 40
    for i, sample in enumerate(found):
        assert all(same(sample[key], written[key][i]) for key in ("label", "small", "box", "weight", "shape"))
        assert same(sample["tokens"], tokens[i])
        assert same(sample["scores"], scores[i])
        assert sample["image/encoded"] == images[i].tobytes()


def test_files_of_the_tfrecord_package_are_read(tmp_path: Path) -> None:
    run("write_tfrecord_package.py", tmp_path)
    written = np.load(tmp_path / "package.npz")
    lists = split(written, "l")

    found = samples(tmp_path / "package.tfrecord")

    assert len(found) == 30
    for i, sample in enumerate(found):
        assert all(same(sample[key], written[key][i]) for key in ("id", "v"))
        assert sample["raw"] == written["raw"][i].tobytes()
        assert same(sample["l"], lists[i])


def test_sequence_examples_are_refused_by_name(tensorflow_folder: Path) -> None:
    with pytest.raises(
        BadObject, match=r"sequence\.tfrecord: record 0 is not a tf\.train\.Example \(a SequenceExample"
    ):
        open_files(tensorflow_folder / "sequence.tfrecord")


def masked(data: bytes) -> bytes:
    crc = crc32c.crc32c(data)
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)


def frame(record: bytes) -> bytes:
    length = struct.pack("<Q", len(record))
    return length + masked(length) + record + masked(record)


def entry(name: str, feature: bytes) -> bytes:
    """Return one feature of an Example whose parts are all shorter than 128 bytes."""
    key = b"\x0a" + bytes([len(name)]) + name.encode()
    inner = key + b"\x12" + bytes([len(feature)]) + feature
    return b"\x0a" + bytes([len(inner)]) + inner


def example(**features: bytes) -> bytes:
    content = b"".join(entry(name, feature) for name, feature in features.items())
    return b"\x0a" + bytes([len(content)]) + content


INTS = b"\x1a\x05\x0a\x03\x01\x02\x03"
ONE = b"\x1a\x03\x0a\x01\x01"
FLOAT = b"\x12\x06\x0a\x04\x00\x00\x80\x3f"
BYTES = b"\x0a\x03\x0a\x01x"


def write(path: Path, *records: bytes) -> Path:
    path.write_bytes(b"".join(map(frame, records)))
    return path


def test_unpacked_numbers_are_read(tmp_path: Path) -> None:
    """Older writers put each number into its own field. One list may use both forms."""
    mixed = b"\x1a\x08" + b"\x08\x07" + b"\x0a\x02\x08\x09" + b"\x08\x0a"
    floats = b"\x12\x0a\x0d\x00\x00\x80\x3f\x0d\x00\x00\x00\x40"
    path = write(tmp_path / "x.tfrecord", example(a=mixed, b=floats))

    (found,) = samples(path)

    assert found["a"].tolist() == [7, 8, 9, 10]
    assert found["b"].tolist() == [1.0, 2.0]


def test_files_of_a_folder_are_one_input_with_one_schema(tmp_path: Path) -> None:
    """A list of one number in one file and of three in the next is ragged. Names without an extension are accepted."""
    write(tmp_path / "train-00000-of-00002", example(a=ONE, b=BYTES), example(a=ONE, b=BYTES))
    write(tmp_path / "train-00001-of-00002", example(a=INTS, b=BYTES))
    (tmp_path / "dataset_info.json").write_text("{}")

    found = samples(tmp_path)

    assert [sample["a"].tolist() for sample in found] == [[1], [1], [1, 2, 3]]
    with open_files(tmp_path) as source:
        assert source.samples == 3
    assert samples(tmp_path, fields=("image",), rename={"b": "image"}) == [{"image": b"x"}] * 3


def test_a_feature_of_two_kinds_is_refused_with_its_record(tmp_path: Path) -> None:
    path = write(tmp_path / "x.tfrecord", example(a=ONE, b=ONE), example(a=FLOAT, b=ONE))

    with pytest.raises(BadObject, match=r"x\.tfrecord: record 1: feature 'a' is a float_list, but an int64_list in"):
        open_files(path)
    assert samples(path, fields=("b",)) == [{"b": 1}, {"b": 1}]


def test_missing_fields_and_invalid_names_are_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "x.tfrecord", example(**{"a:0": ONE, "b": ONE}))

    assert samples(path) == [{"b": 1}]
    assert samples(path, rename={"a:0": "a"}) == [{"a": 1, "b": 1}]
    with pytest.raises(UsageError, match="unknown field 'c'; the file has 'a:0', 'b'"):
        open_files(path, SourceOptions(fields=("c",)))
    with pytest.raises(UsageError, match="--rename c: unknown field; the file has 'a:0', 'b'"):
        open_files(path, SourceOptions(rename={"c": "d"}))


@pytest.mark.parametrize(
    ("record", "message"),
    [
        (b"\x0a\x7f", "reaches past the end"),
        (b"\x0a\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01", "reaches past the end"),
        (b"\x0b\x0b\x0b", "wire type 3"),
        (b"\xff" * 20, "varint is cut short"),
        (example(a=b"\x1a\x03\x0a\x01\x80"), "feature 'a': a varint is cut short"),
        (example(a=b"\x1a\x0d\x0a\x0b" + b"\x80" * 10 + b"\x01"), "feature 'a': a varint of more than 10 bytes"),
        (example(b=b"\x12\x05\x0a\x03abc"), "feature 'b': a float_list that is cut short"),
        (example(a=b"\x12\x02\x08\x01"), "a float_list holds wire type 0"),
        (b"\x0a\x08" + b"\x0a\x02\x12\x00" * 2, "feature '' appears twice"),
        (b"\x0a\x05\x0a\x03\x0a\x01\xff", "codec can't decode"),
    ],
)
def test_records_that_are_no_examples_are_named(tmp_path: Path, record: bytes, message: str) -> None:
    path = write(tmp_path / "x.tfrecord", example(a=ONE), record)

    with pytest.raises(BadObject, match=r"x\.tfrecord: record [01]") as caught:
        samples(path)
    assert message in str(caught.value)


def test_deeply_nested_messages_are_not_followed(tmp_path: Path) -> None:
    """A message inside a message, forty levels deep."""
    nested = b""
    for _ in range(40):
        nested = b"\x22" + bytes([len(nested)]) + nested
    path = write(tmp_path / "x.tfrecord", example(a=nested, b=ONE))

    assert samples(path) == [{"b": 1}]


def test_a_declared_length_beyond_the_file_allocates_no_memory(tmp_path: Path) -> None:
    """Fault 61: a length has its own checksum, and is compared with the rest of the file."""
    good = frame(example(a=ONE))
    (tmp_path / "x.tfrecord").write_bytes(good + struct.pack("<Q", 2**63) + b"\0\0\0\0")
    with pytest.raises(BadObject, match=r"x\.tfrecord: record 1 has a damaged length"):
        open_files(tmp_path / "x.tfrecord")

    length = struct.pack("<Q", 2**63)
    (tmp_path / "x.tfrecord").write_bytes(good + length + masked(length) + b"abc")
    with pytest.raises(BadObject, match="record 1 is cut short: its 9223372036854775808 bytes reach past the end"):
        open_files(tmp_path / "x.tfrecord")

    with gzip.open(tmp_path / "x.tfrecord.gz", "wb") as file:
        file.write(good + length + masked(length) + b"abc")
    with pytest.raises(BadObject, match=r"record 1 claims .* in one piece"):
        open_files(tmp_path / "x.tfrecord.gz")


def test_a_decompression_bomb_in_a_record_is_refused(tmp_path: Path) -> None:
    record = bytes(100_000_000)
    with gzip.open(tmp_path / "x.tfrecord.gz", "wb", compresslevel=9) as file:
        file.write(frame(record))

    with pytest.raises(BadObject, match=r"record 0 claims 100\.0 MB in one piece"):
        open_files(tmp_path / "x.tfrecord.gz")


@pytest.mark.parametrize("level", [1, 6, 9])
def test_a_file_compressed_by_zlib_is_read(tmp_path: Path, level: int) -> None:
    """``TFRecordOptions(compression_type="ZLIB")``: the three levels have three different magic bytes."""
    raw = b"".join(frame(example(a=INTS, b=BYTES, c=FLOAT)) for _ in range(5000))
    (tmp_path / "plain.tfrecord").write_bytes(raw)
    (tmp_path / "x.tfrecord").write_bytes(zlib.compress(raw, level))

    found, wanted = samples(tmp_path / "x.tfrecord"), samples(tmp_path / "plain.tfrecord")
    assert len(found) == 5000
    assert all(same(sample[key], plain[key]) for sample, plain in zip(found, wanted, strict=True) for key in plain)


def test_a_plain_file_may_begin_like_zlib(tmp_path: Path) -> None:
    """0x78 0x01 is also the length of a record of 376 bytes."""
    content = b"".join(
        entry(name, b"\x0a" + bytes([size - 2, 0x0A, size - 4]) + bytes(size - 4))
        for name, size in zip("abcd", (100, 100, 100, 45), strict=True)
    )
    path = write(tmp_path / "x.tfrecord", b"\x0a" + bytes([len(content) & 127 | 128, len(content) >> 7]) + content)

    assert path.read_bytes()[:2] == b"\x78\x01"
    assert len(samples(path)) == 1


@pytest.mark.parametrize("suffix", [".tfrecord", ".tfrecord.gz", ".tfrecord.zlib"])
def test_a_damaged_file_never_returns_a_wrong_sample(tmp_path: Path, suffix: str) -> None:
    """Every truncation that is not between two records, and every flipped bit, is an error that names the file."""
    raw = b"".join(frame(example(a=INTS, b=BYTES, c=FLOAT)) for _ in range(20))
    path = tmp_path / f"x{suffix.removesuffix('.zlib')}"
    path.write_bytes({"d": raw, "z": gzip.compress(raw), "b": zlib.compress(raw)}[suffix[-1]])
    whole = samples(path)

    for how, copy in damaged(path, cuts=200, flips=600):
        found = outcome(copy)
        if isinstance(found, str):
            continue
        assert len(found) <= len(whole)
        assert all(
            same(sample[key], wanted[key]) for sample, wanted in zip(found, whole, strict=False) for key in wanted
        ), how
        if suffix == ".tfrecord":
            assert how.startswith("cut"), how


def test_an_empty_file_and_a_foreign_file_are_refused(tmp_path: Path) -> None:
    (tmp_path / "x.tfrecord").touch()
    (tmp_path / "y.tfrecord").write_bytes(b"hello world, this is not a record")

    with pytest.raises(BadObject, match=r"x\.tfrecord: no records in it"):
        open_files(tmp_path / "x.tfrecord")
    with pytest.raises(
        BadObject, match=r"y\.tfrecord: record 0 has a damaged length, or the file is not a TFRecord file"
    ):
        open_files(tmp_path / "y.tfrecord")


def test_a_single_file_is_recognised_by_its_first_bytes(tmp_path: Path) -> None:
    path = write(tmp_path / "records", example(a=ONE))

    assert file_kind(path) == "tfrecord"
    assert samples(path) == [{"a": 1}]


def test_too_many_features_are_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "x.tfrecord", *(example(**{f"f{i}": ONE}) for i in range(1001)))

    with pytest.raises(BadObject, match=r"x\.tfrecord: record \d+: more than 1000 different features"):
        open_files(path)
