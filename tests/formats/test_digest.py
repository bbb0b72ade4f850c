"""Checksums over the canonical encoding of values, and the two digests of a shard."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from cachetool.core.block import Block, Ragged
from cachetool.core.errors import CorruptError, UsageError
from cachetool.core.schema import Field, Schema
from cachetool.formats.digest import ContentDigest, canonical, checksums, file_digest
from tests.formats.samples import block, blocks


def test_the_encoding_is_the_documented_one() -> None:
    """Little-endian bytes in C order; ragged values begin with the shape as int64; bytes and str are raw."""
    schema = Schema(
        (
            Field("a", "<i2", (2, 2)),
            Field("s", "<f8"),
            Field("r", "<f4", (None, None)),
            Field("b", "bytes"),
            Field("t", "str"),
        )
    )
    a, r = np.array([[1, 2], [3, 4]], dtype="<i2"), np.arange(6, dtype="<f4").reshape(2, 3)
    found = checksums(
        Block.from_samples(
            schema,
            [{"a": a, "s": 1.5, "r": r, "b": b"\0x", "t": "é"}, {"a": a, "s": 0.0, "r": r[:0], "b": b"", "t": ""}],
        )
    )
    expected = [
        [a.tobytes()] * 2,
        [np.float64(1.5).tobytes(), np.float64(0).tobytes()],
        [np.array([2, 3], "<i8").tobytes() + r.tobytes(), np.array([0, 3], "<i8").tobytes()],
        [b"\0x", b""],
        ["é".encode(), b""],
    ]
    assert found.dtype == np.uint64
    assert found.tolist() == [[xxhash.xxh3_64_intdigest(raw) for raw in row] for row in expected]


def test_byte_order_and_strides_leave_no_trace() -> None:
    """The same values in a source's own memory layout have the same checksums."""
    schema = Schema((Field("x", "<f4", (3,)),))
    x = np.random.default_rng(0).random((8, 6), dtype=np.float32)
    plain = checksums(Block(schema, {"x": np.ascontiguousarray(x[::2, ::2])}))
    assert (checksums(Block(schema, {"x": x[::2, ::2]})) == plain).all()
    assert (checksums(Block(schema, {"x": x[::2, ::2].astype(">f4")})) == plain).all()


def test_the_checksum_of_a_ragged_value_includes_its_shape() -> None:
    """Shapes (2, 3) and (3, 2) of the same bytes differ."""
    schema = Schema((Field("r", "u1", (None, None)),))
    a, b = np.arange(6, dtype="u1").reshape(2, 3), np.arange(6, dtype="u1").reshape(3, 2)
    (found,) = checksums(Block.from_samples(schema, [{"r": a}, {"r": b}]))
    assert found[0] != found[1]


def test_canonical_columns_are_not_copied() -> None:
    """A column that is already canonical is returned as it is."""
    content = block(Schema((Field("x", "<f4", (3,)), Field("t", "str"))), 5)
    again = canonical(content)
    assert np.shares_memory(again.columns["x"], content.columns["x"])  # type: ignore[arg-type]
    assert np.shares_memory(again.columns["t"].values, content.columns["t"].values)  # type: ignore[union-attr]


def test_columns_that_contradict_the_schema_are_refused() -> None:
    """Every possible contradiction, each with the field's name in the error."""
    fixed, ragged = Schema((Field("x", "<f4", (2,)),)), Schema((Field("x", "<f4", (None,)),))
    values, offsets = np.zeros(4, "<f4"), np.array([0, 2, 4])
    for schema, column in (
        (fixed, np.zeros((3, 2), "<f8")),
        (fixed, np.zeros((3, 3), "<f4")),
        (fixed, Ragged(values, offsets, np.array([[2], [2]]))),
        (ragged, np.zeros((3, 2), "<f4")),
        (ragged, Ragged(values, offsets)),
        (ragged, Ragged(values, offsets, np.array([[2], [3]]))),
        (ragged, Ragged(values, offsets, np.array([[2, 1], [2, 1]]))),
        (ragged, Ragged(values.astype("<i4"), offsets, np.array([[2], [2]]))),
    ):
        with pytest.raises(UsageError, match="'x'"):
            checksums(Block(schema, {"x": column}))


@given(content=blocks(), data=st.data())
def test_the_content_digest_does_not_depend_on_the_blocks(content: Block, data: st.DataObject) -> None:
    """Any division into blocks has the same digest; swapping two different samples changes it."""
    whole, cut = ContentDigest(content.schema), ContentDigest(content.schema)
    whole.update(checksums(content))
    at = data.draw(st.integers(0, content.samples))
    cut.update(checksums(content.slice(0, at)))
    cut.update(checksums(content.slice(at, content.samples)))
    assert cut.hexdigest() == whole.hexdigest()
    assert len(whole.hexdigest()) == 32
    reverse = content.take(np.arange(content.samples)[::-1])
    other = ContentDigest(content.schema)
    other.update(checksums(reverse))
    assert (other.hexdigest() == whole.hexdigest()) == bool((checksums(reverse) == checksums(content)).all())


def test_the_content_digest_includes_the_schema() -> None:
    """Zero samples of two schemas are different contents."""
    assert (
        ContentDigest(Schema((Field("a", "u1"),))).hexdigest() != ContentDigest(Schema((Field("b", "u1"),))).hexdigest()
    )
    with pytest.raises(UsageError, match="do not fit"):
        ContentDigest(Schema((Field("a", "u1"),))).update(np.zeros((2, 3), dtype=np.uint64))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    shard = tmp_path / "shard"
    (shard / "sub").mkdir(parents=True)
    (shard / "a").write_bytes(b"abc")
    (shard / "sub" / "b").write_bytes(bytes(3_000_000))
    (shard / "shard.json").write_text("{}")
    return shard


def test_the_file_digest_changes_with_every_change_of_the_files(folder: Path) -> None:
    """A flipped bit, or a renamed, moved, added, emptied or grown file changes the digest; shard.json and times do
    not.
    """
    seen = {file_digest(folder)}
    os.utime(folder / "a", (0, 0))
    (folder / "shard.json").write_text('{"changed": 1}')
    assert {file_digest(folder)} == seen

    def changed() -> None:
        found = file_digest(folder)
        assert found not in seen
        seen.add(found)

    with (folder / "sub" / "b").open("r+b") as file:
        file.seek(2_999_999)
        file.write(b"\x01")
    changed()
    (folder / "a").rename(folder / "c")
    changed()
    (folder / "c").rename(folder / "sub" / "c")
    changed()
    (folder / "sub" / "shard.json").write_text("{}")
    changed()
    (folder / "sub" / "c").write_bytes(b"")
    changed()
    (folder / "sub" / "b").write_bytes(bytes(3_000_001))
    changed()
    assert file_digest(folder, skip=()) not in seen


def test_bytes_moved_between_files_change_the_digest(tmp_path: Path) -> None:
    """Names and lengths are part of the digest: ``ab`` + ``c`` differs from ``a`` + ``bc``."""
    for name, first, second in (("one", b"ab", b"c"), ("two", b"a", b"bc")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "x").write_bytes(first)
        (tmp_path / name / "y").write_bytes(second)
    assert file_digest(tmp_path / "one") != file_digest(tmp_path / "two")


def test_a_single_file_is_digested_without_its_name(tmp_path: Path) -> None:
    """A part keeps its digest when it is renamed."""
    (tmp_path / "a").write_bytes(b"abc")
    before = file_digest(tmp_path / "a")
    (tmp_path / "a").rename(tmp_path / "b")
    assert file_digest(tmp_path / "b") == before


def test_links_and_pipes_are_no_part_of_a_shard(folder: Path) -> None:
    """The error names them. A link is not followed, and no read waits for a pipe."""
    (folder / "link").symlink_to(folder / "a")
    with pytest.raises(CorruptError, match="link"):
        file_digest(folder)
    (folder / "link").unlink()
    os.mkfifo(folder / "pipe")
    with pytest.raises(CorruptError, match="pipe"):
        file_digest(folder)
