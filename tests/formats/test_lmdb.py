"""Specific properties of LMDB: a single file, its bound, its pages, one environment per process."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import lmdb
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cachetool.core.block import Block, Ragged
from cachetool.core.errors import CacheToolError, CorruptError, UsageError
from cachetool.core.schema import Field, Schema
from cachetool.formats import get_format, runs
from cachetool.formats.digest import checksums
from cachetool.formats.files import map_file
from cachetool.formats.lmdb import LMDB, file_bound, open_environment, read_header
from cachetool.formats.lmdb_pages import TreeWriter, read_leaves
from cachetool.formats.lmdb_values import ValueLayout
from tests.formats.samples import EVERY_KIND, block, blocks, on_disk, sample, write

SIMPLE = Schema((Field("x", "<f4", (4, 3)), Field("label", "<i8"), Field("note", "str")))
KIND = get_format("lmdb")


def test_a_shard_is_one_file_without_a_lock_file(tmp_path: Path) -> None:
    """No lock file exists while writing, after writing, or while reading."""
    path = tmp_path / "data.lmdb"
    writer = KIND.create(path, SIMPLE, samples=10, nbytes=10_000)
    writer.write(block(SIMPLE, 10))
    assert os.listdir(tmp_path) == ["data.lmdb"]
    writer.finish()
    with KIND.open(path) as reader:
        assert reader.schema == SIMPLE
        assert os.listdir(tmp_path) == ["data.lmdb"]


def test_the_same_samples_make_the_same_file(tmp_path: Path) -> None:
    """The division into blocks does not matter, so shards can be compared byte by byte."""
    content = block(EVERY_KIND, 40)
    write(KIND, tmp_path / "a", content)
    write(KIND, tmp_path / "b", content, cuts=(3, 4, 30))
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


@pytest.mark.parametrize("cuts", [(), (1, 2, 5)])
def test_large_values_written_without_a_copy_make_the_same_file(
    cuts: tuple[int, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The values have fixed fields, odd sizes with padding after them, and small values between large ones."""
    schema = Schema(
        (
            Field("fixed", "<f4", (70_001,)),
            Field("image", "|u1", (None, None)),
            Field("note", "str"),
            Field("raw", "bytes"),
            Field("n", "<i2"),
        )
    )
    rng = np.random.default_rng(0)
    samples = [
        {
            "fixed": rng.random(70_001, dtype="<f4"),
            "image": rng.integers(0, 255, (size, 101), dtype=np.uint8),
            "note": "x" * (size % 7),
            "raw": rng.bytes(raw),
            "n": np.int16(size),
        }
        for size, raw in [(4000, 3), (3, 300_001), (1, 0), (2595, 2**18), (2596, 2**18 - 1), (9000, 1_000_003)]
    ]
    content = Block.from_samples(schema, samples)
    write(KIND, tmp_path / "a", content, cuts=cuts)
    with KIND.open(tmp_path / "a") as reader:
        for number, wanted in enumerate(samples):
            found = reader.read(number, number + 1).sample(0)
            assert all(np.array_equal(found[name], wanted[name]) for name in wanted)
    monkeypatch.setattr(runs, "_UNCOPIED", 2**62)
    write(KIND, tmp_path / "b", content, cuts=cuts)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def packed(layout: ValueLayout, content: Block) -> tuple[np.ndarray, np.ndarray]:
    """Return the values of a block, one after another, and their offsets, (samples + 1,)."""
    starts = np.append(0, np.cumsum(layout.totals(content)))
    out = np.full(int(starts[-1]), 0xAB, dtype=np.uint8)
    layout.place(content, out, starts[:-1])
    other = np.full(int(starts[-1]), 0xCD, dtype=np.uint8)
    layout.place(content, other, starts[:-1])
    np.testing.assert_array_equal(out, other)  # no byte of an earlier sample remains
    return out, starts


def test_many_small_samples_are_stored_in_a_deep_tree(tmp_path: Path) -> None:
    """The tree has three levels of pages, with all samples in order."""
    count = 100_077
    schema = Schema((Field("n", "<i4"),))
    content = Block(schema, {"n": np.arange(count, dtype="<i4")})
    path = tmp_path / "data.lmdb"
    written = write(KIND, path, content, cuts=(1000, 50_001))
    assert on_disk(path) <= KIND.bound(schema, count, content.nbytes)
    assert written.extents is not None
    with KIND.open(path) as reader:
        np.testing.assert_array_equal(reader.read(count - 5, count).columns["n"], np.arange(count - 5, count))
        assert reader.samples == count


@given(
    sizes=st.lists(st.sampled_from((0, 1, 500, 1000, 1990, 2000, 2010, 2030, 4070, 4080, 4090, 9000)), max_size=60),
    repeat=st.integers(1, 20),
    extra=st.integers(-25, 25),
)
def test_the_bound_holds_at_the_edges_of_pages(
    sizes: list[int], repeat: int, extra: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Values just below and above the size of a node or a page, in any mixture."""
    wanted = np.array([max(0, n + extra) for n in sizes] * repeat, dtype=np.int64)
    schema = Schema((Field("b", "bytes"),))
    offsets = np.zeros(len(wanted) + 1, dtype=np.int64)
    np.cumsum(wanted, out=offsets[1:])
    content = Block(schema, {"b": Ragged(np.zeros(int(offsets[-1]), dtype=np.uint8), offsets)})
    path = tmp_path_factory.mktemp("bound") / "data.lmdb"
    write(KIND, path, content)
    assert on_disk(path) <= KIND.bound(schema, len(wanted), content.nbytes)
    path.unlink()


@pytest.mark.parametrize("nbytes", [1, 1000, 1990, 1998, 2000, 2018, 2019, 4079, 4080, 4081, 4096, 100_000])
def test_the_bound_of_fixed_fields_is_tight(nbytes: int, tmp_path: Path) -> None:
    """The bound is at most a twentieth and 40 pages above the file's size."""
    schema = Schema((Field("x", "u1", (nbytes,)),))
    count = min(20_000, max(50, 3_000_000 // nbytes))
    content = Block(schema, {"x": np.zeros((count, nbytes), dtype=np.uint8)})
    path = tmp_path / "data.lmdb"
    write(KIND, path, content)
    size = path.stat().st_size
    assert size <= file_bound(schema, count, content.nbytes) <= size * 1.05 + 40 * 4096


def test_the_page_parser_agrees_with_lmdb(tmp_path: Path) -> None:
    """The parser finds the same keys and values as LMDB, in a file that LMDB wrote."""
    path = tmp_path / "theirs.lmdb"
    rng = np.random.default_rng(0)
    with lmdb.open(str(path), subdir=False, lock=False, lib_version=0, map_size=2**26) as env:
        for _ in range(3):  # overwrites and deletions leave free pages and half-empty leaves
            with env.begin(write=True) as txn:
                for n in rng.integers(3000, size=1500).tolist():
                    txn.put(b"key-%d" % n, rng.bytes(int(rng.choice([0, 5, 300, 2000, 5000, 20_000]))))
                for n in rng.integers(3000, size=300).tolist():
                    txn.delete(b"key-%d" % n)
        with env.begin() as txn:
            expected = list(txn.cursor())
    buffer = map_file(path)
    nodes = read_leaves(buffer, name="theirs")

    def cut(starts: np.ndarray, sizes: np.ndarray) -> list[bytes]:
        return [buffer[a : a + n].tobytes() for a, n in zip(starts.tolist(), sizes.tolist(), strict=True)]

    assert list(zip(cut(nodes.key_starts, nodes.key_sizes), cut(nodes.starts, nodes.sizes), strict=True)) == expected


def test_a_value_that_reaches_past_the_file_is_corrupt(tmp_path: Path) -> None:
    """LMDB would read beyond the end of its map."""
    path = tmp_path / "data.lmdb"
    write(KIND, path, Block(Schema((Field("x", "u1", (9000,)),)), {"x": np.zeros((3, 9000), dtype=np.uint8)}))
    raw = bytearray(path.read_bytes())
    at = raw.index(b"%012d" % 2) - 8  # the node: its first four bytes are the size of the data
    assert int.from_bytes(raw[at : at + 4], "little") == 9000
    raw[at : at + 4] = (9_000_000).to_bytes(4, "little")
    path.write_bytes(raw)
    with pytest.raises(CorruptError, match=r"data\.lmdb.*past the file"):
        KIND.open(path)


@pytest.mark.parametrize("flag", [0x20, 0x40, 0x80, 0x4000, 0x8000])
def test_a_page_that_lmdb_would_interpret_differently_is_corrupt(tmp_path: Path, flag: int) -> None:
    """A leaf page marked as having keys of equal size has no pointers, and LMDB would return data without a lookup."""
    path = tmp_path / "data.lmdb"
    write(KIND, path, block(EVERY_KIND, 20))
    raw = bytearray(path.read_bytes())
    pages = range(2 * 4096, len(raw), 4096)
    (leaf, *_) = [at for at in pages if int.from_bytes(raw[at + 10 : at + 12], "little") == 2]
    raw[leaf + 10 : leaf + 12] = (2 | flag).to_bytes(2, "little")
    path.write_bytes(raw)
    with pytest.raises(CorruptError, match=r"data\.lmdb.*a page of the wrong kind"):
        KIND.open(path)


def test_the_file_ends_with_its_last_page(tmp_path: Path) -> None:
    """Excess allocated pages are removed."""
    path = tmp_path / "data.lmdb"
    write(KIND, path, block(SIMPLE, 5), spare=10_000)
    environment = open_environment(path)
    assert path.stat().st_size == (environment.env.info()["last_pgno"] + 1) * environment.env.stat()["psize"]
    environment.close()


def test_wrong_extents_are_detected_before_the_shard_counts_as_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The writer reads some samples back through their extents."""
    real = TreeWriter.finish
    monkeypatch.setattr(TreeWriter, "finish", lambda self: real(self) - 4)
    with pytest.raises(CorruptError, match=r"data\.lmdb.* sample"):
        write(KIND, tmp_path / "data.lmdb", block(SIMPLE, 20))


def test_foreign_lmdb_files_are_distinguished(tmp_path: Path) -> None:
    """A foreign LMDB, an empty LMDB, the format of engine 1.0, and a shard without one of its samples."""
    foreign, empty, newer, gap = (tmp_path / f"{name}.lmdb" for name in ("foreign", "empty", "newer", "gap"))
    with lmdb.open(str(foreign), subdir=False, lock=False, lib_version=0) as env, env.begin(write=True) as txn:
        txn.put(b"a", b"b")
        txn.put(b"c", b"d")
    lmdb.open(str(empty), subdir=False, lock=False, lib_version=0).close()
    with lmdb.open(str(newer), subdir=False, lock=False, lib_version=1) as env, env.begin(write=True) as txn:
        txn.put(b"a", b"b")
    write(KIND, gap, block(SIMPLE, 5))
    with lmdb.open(str(gap), subdir=False, lock=False) as env, env.begin(write=True) as txn:
        txn.delete(b"%012d" % 2)
    for path, why in ((foreign, "not a shard"), (empty, "not a shard"), (newer, "whole LMDB"), (gap, "keys")):
        with pytest.raises(CorruptError, match=why) as caught:
            KIND.open(path)
        assert path.name in str(caught.value)
    with pytest.raises(CorruptError, match="missing"):
        KIND.open(tmp_path / "nowhere.lmdb")


def test_a_schema_other_than_expected_is_corrupt(tmp_path: Path) -> None:
    """A shard swapped with that of another dataset is not read as if it were right."""
    write(KIND, tmp_path / "data.lmdb", block(SIMPLE, 2))
    with pytest.raises(CorruptError, match="other fields"):
        KIND.open(tmp_path / "data.lmdb", schema=Schema((Field("x", "<f4"),)))


def test_compression_is_refused_with_the_formats_that_have_it(tmp_path: Path) -> None:
    """LMDB has no compression."""
    with pytest.raises(UsageError, match="use hdf5, zarr or tfrecord"):
        KIND.create(tmp_path / "data.lmdb", SIMPLE, samples=1, nbytes=1, compression="gzip")


def test_one_file_under_several_paths_has_one_environment(tmp_path: Path) -> None:
    """A hard link and a relative path are the same file. The last user closes the environment."""
    path = tmp_path / "data.lmdb"
    write(KIND, path, block(SIMPLE, 3))
    os.link(path, tmp_path / "link.lmdb")
    first, second = open_environment(path), open_environment(tmp_path / "link.lmdb")
    assert first is second
    first.close()
    assert second.env.stat()["entries"] == 5
    second.close()
    with pytest.raises(lmdb.Error):
        second.env.stat()
    third = open_environment(path)
    assert third is not first
    third.close()


def test_threads_can_open_read_and_close_at_the_same_time(tmp_path: Path) -> None:
    """Many threads share the environments."""
    path = tmp_path / "data.lmdb"
    content = block(SIMPLE, 30)
    expected = checksums(content)
    write(KIND, path, content)
    wrong: list[object] = []

    def work() -> None:
        try:
            for _ in range(30):
                with KIND.open(path) as reader:
                    if not (checksums(reader.read(0, 30)) == expected).all():
                        wrong.append("values")
        except CacheToolError as error:
            wrong.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_a_forked_child_opens_its_own_environment(tmp_path: Path) -> None:
    """The child closes the inherited environment; the parent's stays open."""
    path = tmp_path / "data.lmdb"
    write(KIND, path, block(SIMPLE, 3))
    parent = open_environment(path)
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            child = open_environment(path)
            code = 2 if child is parent or child.env.stat()["entries"] != 5 else 0
            parent.env.stat()
            code = 3
        except lmdb.Error:
            pass
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert parent.env.stat()["entries"] == 5
    parent.close()


def test_a_reader_raises_an_error_in_a_forked_child(tmp_path: Path) -> None:
    """The child's environment was closed. The error says what to do. The parent's reader still works."""
    path = tmp_path / "data.lmdb"
    write(KIND, path, block(SIMPLE, 3))
    with KIND.open(path) as reader:
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                reader.read(0, 1)
            except UsageError as error:
                reader.close()
                code = 0 if "open it again" in str(error) else 2
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        assert reader.read(0, 3).samples == 3


def test_a_closed_reader_raises_an_error(tmp_path: Path) -> None:
    """The C library must never crash."""
    write(KIND, tmp_path / "data.lmdb", block(SIMPLE, 3))
    reader = KIND.open(tmp_path / "data.lmdb")
    reader.close()
    with pytest.raises(UsageError, match="closed"):
        reader.read(0, 1)


def test_abort_lets_the_path_be_removed_and_used_again(tmp_path: Path) -> None:
    """Both before and after the first block."""
    path = tmp_path / "data.lmdb"
    for count in (0, 5):
        writer = KIND.create(path, SIMPLE, samples=10, nbytes=10_000)
        if count:
            writer.write(block(SIMPLE, count))
        writer.abort()
        path.unlink()
    write(KIND, path, block(SIMPLE, 2))


@given(content=blocks(), data=st.data())
def test_one_value_decodes_to_its_sample(content: Block, data: st.DataObject) -> None:
    """``ValueLayout.decode`` returns the block's values, for all fields or some."""
    layout = ValueLayout(content.schema)
    values, starts = packed(layout, content)
    names = data.draw(st.lists(st.sampled_from(content.schema.names), unique=True, min_size=1))
    for index in range(content.samples):
        value = values[starts[index] : starts[index + 1]].data
        expected = content.sample(index)
        for chosen in (None, names):
            found = layout.decode(value, chosen)
            assert list(found) == list(content.schema.names if chosen is None else names)
            for name, got in found.items():
                assert type(got) is type(expected[name])
                assert np.asarray(got).dtype == np.asarray(expected[name]).dtype
                assert np.asarray(got).shape == np.asarray(expected[name]).shape
                assert np.asarray(got).tobytes() == np.asarray(expected[name]).tobytes()


def test_decoded_arrays_are_copies(tmp_path: Path) -> None:
    """They are writable and do not point into the value, because LMDB's memory may disappear."""
    value = bytearray(packed(ValueLayout(SIMPLE), block(SIMPLE, 1))[0].tobytes())
    for schema in (SIMPLE, SIMPLE.select(["x"])):
        raw = value if schema is SIMPLE else value[:48]
        x = ValueLayout(schema).decode(memoryview(raw))["x"]
        before = x.copy()
        raw[:] = bytes(len(raw))
        assert x.tobytes() == before.tobytes()
        x[:] = 1
        value = bytearray(packed(ValueLayout(SIMPLE), block(SIMPLE, 1))[0].tobytes())


def test_values_that_do_not_fit_are_corrupt() -> None:
    """Values too short, too long, with negative or huge tables: the error has the number of the sample."""
    schema = Schema((Field("a", "<i4"), Field("r", "<f8", (None, None)), Field("t", "str")))
    layout = ValueLayout(schema)
    value = packed(layout, block(schema, 1, seed=3))[0].tobytes()

    def table(*numbers: int) -> bytes:
        return value[:8] + np.array(numbers, dtype="<i8").tobytes() + value[32:]

    for bad in (
        b"",
        value[:10],
        value[:-1],
        value + b"\0",
        table(-1, 1, 0),
        table(2**62, 2**62, 0),
        table(2**32, 2**32, 0),
        table(1, 1, 2**63 - 1),
    ):
        with pytest.raises(CorruptError, match="sample 0"):
            layout.decode(bad)
    fixed = ValueLayout(Schema((Field("a", "<i4"),)))
    for bad in (b"", b"123", b"12345"):
        with pytest.raises(CorruptError):
            fixed.decode(bad)
    joined, one = np.frombuffer(value + value[:-1], dtype=np.uint8), len(value)
    with pytest.raises(CorruptError, match="shard: the value of sample 17 does not fit"):
        layout.decode_block(
            joined, np.array([0, one]), np.array([one, one - 1]), where="shard", numbers=np.array([5, 17])
        )


def test_fields_are_aligned() -> None:
    """Each field begins at a multiple of its item size, at most 8, in schema order."""
    layout = ValueLayout(Schema((Field("a", "u1"), Field("b", "<c16"), Field("c", "<u2", (3,)), Field("d", "<f4"))))
    assert layout.fixed == {"a": 0, "b": 8, "c": 24, "d": 32}
    assert layout.head == 36
    assert ValueLayout(EVERY_KIND).table % 8 == 0


def test_a_sample_above_four_gib_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """LMDB's own limit is checked before anything is written (tested with a smaller limit)."""
    monkeypatch.setattr("cachetool.formats.lmdb._MAX_VALUE", 1000)
    writer = KIND.create(tmp_path / "data.lmdb", Schema((Field("b", "bytes"),)), samples=2, nbytes=5000)
    with pytest.raises(UsageError, match="lmdb holds at most 1000"):
        writer.write(Block.from_samples(Schema((Field("b", "bytes"),)), [{"b": bytes(2000)}]))
    writer.abort()


def test_the_header_is_read_without_lmdb(tmp_path: Path) -> None:
    """The parser reads count and schema from the pages."""
    write(KIND, tmp_path / "f", block(EVERY_KIND, 7))
    assert read_header(map_file(tmp_path / "f"), name="f") == (7, EVERY_KIND)
    assert isinstance(KIND, LMDB)


def test_random_samples_helper_covers_empty_values() -> None:
    """The test data contains the difficult cases."""
    seen = [sample(EVERY_KIND, np.random.default_rng(n)) for n in range(30)]
    assert {len(s["text"]) for s in seen} >= {0, 1}
    assert any(s["ragged.3"].size == 0 for s in seen)


@pytest.mark.parametrize("seed", range(4))
def test_lmdb_accepts_pages_that_cachetool_wrote(tmp_path: Path, seed: int) -> None:
    """LMDB finds every value of any size, its checker finds no error, and it can modify the file."""
    path = tmp_path / "data.lmdb"
    rng = np.random.default_rng(seed)
    count = int(rng.integers(1, 5000))
    choice = [(0, 5, 40), (0, 1, 2018, 2019, 2030), (300, 2000, 5000, 20_000, 2**21), (3072,)][seed]
    schema = Schema((Field("b", "bytes"), Field("n", "<i4")))
    values = [rng.bytes(int(n)) for n in rng.choice(choice, size=min(count, 40_000_000 // max(choice)))]
    content = Block.from_samples(schema, [{"b": b, "n": np.int32(n)} for n, b in enumerate(values)])
    cuts = sorted(set(rng.integers(1, len(values) + 1, size=4).tolist()))
    written = write(KIND, path, content, cuts=cuts)
    checker = subprocess.run(
        [sys.executable, "-m", "lmdb", "verify", path], capture_output=True, text=True, check=False
    )
    assert checker.returncode == 0, checker.stdout + checker.stderr

    layout = ValueLayout(schema)
    with lmdb.open(str(path), subdir=False, lock=False, map_size=2**28) as env:
        with env.begin() as txn:
            keys = list(txn.cursor().iternext(values=False))
            assert keys == [b"%012d" % n for n in range(len(values))] + [b"__len__", b"__schema__"]
            found = [layout.decode(txn.get(key))["b"] for key in keys[:-2]]
        assert found == values
        with env.begin(write=True) as txn:
            for key in keys[::3]:
                assert txn.delete(key)
            for key in keys[1::3]:
                txn.put(key, b"changed" * 1000)
            txn.put(b"another", b"one")
    with lmdb.open(str(path), subdir=False, lock=False, readonly=True) as env, env.begin() as txn:
        expected = sorted([*(key for n, key in enumerate(keys) if n % 3), b"another"])
        assert list(txn.cursor().iternext(values=False)) == expected
        assert all(txn.get(key) == b"changed" * 1000 for key in keys[1::3])
    assert written.samples == len(values)
