"""TFRecord shards read back through the ``tfrecord`` package, in a child process."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path

import crc32c
import numpy as np
import pytest

from cachetool.core.block import Block
from cachetool.core.errors import CorruptError
from cachetool.core.schema import Field, Schema
from cachetool.formats import get_format
from cachetool.formats.digest import checksums
from cachetool.formats.shard import verify_file
from cachetool.formats.tfrecord_package import PackageReader
from tests.formats.samples import EVERY_FIELD, block, write

KIND = get_format("tfrecord")
SIMPLE = Schema((Field("x", "<f4", (3,)), Field("n", "<i8"), Field("f", "<f4"), Field("t", "str")))


@pytest.fixture(scope="module")
def package() -> Iterator[PackageReader]:
    with PackageReader() as reader:
        yield reader


def simple(samples: int = 7) -> Block:
    return block(SIMPLE, samples, seed=3)


def framed(data: bytes) -> bytes:
    def masked(raw: bytes) -> bytes:
        crc = crc32c.crc32c(raw)
        return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)

    length = struct.pack("<Q", len(data))
    return length + masked(length) + data + masked(data)


@pytest.mark.parametrize("compression", [None, "gzip"])
def test_every_value_of_every_field_is_read_bit_for_bit(
    package: PackageReader, tmp_path: Path, compression: str | None
) -> None:
    path, samples = tmp_path / "a.tfrecord", block(EVERY_FIELD, 40, seed=1)
    write(KIND, path, samples, compression=compression)
    package.check(path, EVERY_FIELD, checksums(samples))


def test_a_signalling_nan_keeps_its_bits(package: PackageReader, tmp_path: Path) -> None:
    schema = Schema((Field("f", "<f4"),))
    bits = np.array([0x7F800001, 0xFFBFFFFF, 0x7FC00000, 0], dtype="<u4").view("<f4")
    samples = Block(schema, {"f": bits})
    write(KIND, path := tmp_path / "a.tfrecord", samples)
    package.check(path, schema, checksums(samples))


def test_a_wrong_value_is_named_with_its_sample_and_field(package: PackageReader, tmp_path: Path) -> None:
    samples = simple()
    write(KIND, path := tmp_path / "a.tfrecord", samples)
    expected = checksums(samples)
    expected[1, 5] ^= np.uint64(1)
    with pytest.raises(CorruptError, match=r"read by the tfrecord package: sample 5, field 'n' does not match"):
        package.check(path, SIMPLE, expected)


@pytest.mark.parametrize("change", [-1, 1])
def test_a_wrong_number_of_samples_is_reported(package: PackageReader, tmp_path: Path, change: int) -> None:
    write(KIND, path := tmp_path / "a.tfrecord", simple(7))
    with pytest.raises(CorruptError, match=f"reads 7 samples, not {7 + change}"):
        package.check(path, SIMPLE, checksums(simple(8))[:, : 7 + change] if change > 0 else checksums(simple())[:, :6])


def test_a_record_that_the_package_cannot_parse_is_reported_in_one_line(package: PackageReader, tmp_path: Path) -> None:
    path = tmp_path / "a.tfrecord"
    path.write_bytes(framed(b"\x0a\xff\xff"))
    with pytest.raises(CorruptError, match="the tfrecord package cannot read it") as caught:
        package.check(path, SIMPLE, checksums(simple(1)))
    assert "\n" not in str(caught.value)


def test_a_record_without_a_field_is_reported(package: PackageReader, tmp_path: Path) -> None:
    path = tmp_path / "a.tfrecord"
    path.write_bytes(framed(b"\x0a\x00"))
    with pytest.raises(CorruptError, match=r"field 'x' of sample 0 .* one value in bytes_list"):
        package.check(path, SIMPLE, checksums(simple(1)))


def test_a_conversion_with_verify_reads_its_shard_through_the_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    samples, checked = simple(), []
    write(KIND, path := tmp_path / "a.tfrecord", samples)
    monkeypatch.setattr(PackageReader, "check", lambda _, *arguments: checked.append(arguments[0]))
    verify_file(path, KIND, SIMPLE, checksums(samples))
    assert checked == [path]
