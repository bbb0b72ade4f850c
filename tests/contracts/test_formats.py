"""The contract of every format, including those of other packages: each test runs for every registered name."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cachetool.core.block import Block, Ragged
from cachetool.core.errors import CapacityError, CorruptError, UsageError
from cachetool.core.extents import Extents
from cachetool.core.schema import Field, Schema
from cachetool.formats import Format, Written, format_for, format_names, get_format
from cachetool.formats.digest import checksums
from cachetool.formats.reading import ExtentsReader, check_values, extents_bound, load_extents, write_extents
from tests.formats.samples import DTYPES, EVERY_KIND, block, blocks, on_disk, write

SIMPLE = Schema((Field("x", "<f4", (4, 3)), Field("label", "<i8"), Field("note", "str")))


@pytest.fixture(params=format_names())
def kind(request: pytest.FixtureRequest) -> Format:
    """Return each format in turn."""
    return get_format(request.param)


@pytest.fixture
def path(kind: Format, tmp_path: Path) -> Path:
    """Return the path for a shard of the format."""
    return tmp_path / ("data" + kind.suffix)


def assert_same(found: Block, expected: Block) -> None:
    """Assert equal schemas and bit for bit equal values."""
    assert found.schema == expected.schema
    assert found.samples == expected.samples
    for field in expected.schema:
        a, b = found.columns[field.name], expected.columns[field.name]
        if isinstance(b, Ragged):
            assert isinstance(a, Ragged)
            assert a.values.dtype == field.numpy
        else:
            assert isinstance(a, np.ndarray)
            assert a.dtype == field.numpy
            assert a.shape == b.shape
    np.testing.assert_array_equal(checksums(found), checksums(expected))


def compressions(kind: Format) -> tuple[str | None, ...]:
    return (None, *kind.compressions)


def test_every_kind_of_field_is_read_back(kind: Format, tmp_path: Path) -> None:
    """All dtypes, 0 to 5 dimensions, empty arrays, ragged arrays, bytes and str: bit for bit, with every
    compression.
    """
    content = block(EVERY_KIND, 37)
    for number, compression in enumerate(compressions(kind)):
        path = tmp_path / f"{number}{kind.suffix}"
        written = write(kind, path, content, cuts=(1, 20), compression=compression)
        assert (written.samples, written.payload) == (37, content.nbytes)
        np.testing.assert_array_equal(written.checksums, checksums(content))
        with kind.open(path, schema=EVERY_KIND) as reader:
            assert (reader.schema, reader.samples) == (EVERY_KIND, 37)
            assert_same(reader.read(0, 37), content)
            assert_same(reader.read(19, 22), content.slice(19, 22))


def test_big_endian_and_strided_columns_are_stored_as_values(kind: Format, path: Path) -> None:
    """The byte order and strides of a source leave no trace in the shard."""
    schema = Schema((Field("a", ">i4", (2,)), Field("b", ">f8"), Field("c", ">M8[s]", (None,))))
    a = np.arange(40, dtype=">i4").reshape(10, 4)[::2, 1:3]
    c = Ragged(np.arange(9).astype(">M8[s]"), np.array([2, 2, 3, 5, 8, 9]), np.array([[0], [1], [2], [3], [1]]))
    content = Block(schema, {"a": a, "b": np.arange(10, dtype=">f8")[::2], "c": c})
    write(kind, path, content)
    with kind.open(path, schema=schema) as reader:
        found = reader.read(0, 5)
    np.testing.assert_array_equal(found.columns["a"], a)
    np.testing.assert_array_equal(found.columns["b"], [0, 2, 4, 6, 8])
    times = found.columns["c"]
    assert isinstance(times, Ragged)
    np.testing.assert_array_equal(times.values, np.arange(2, 9).astype("<M8[s]"))
    assert found.columns["a"].dtype == np.dtype("<i4")  # type: ignore[union-attr]


def test_take_returns_samples_in_any_order_with_repeats(kind: Format, tmp_path: Path) -> None:
    """Both through the library and through extents."""
    content = block(EVERY_KIND, 23, seed=1)
    indices = np.array([22, 0, 0, 7, 21, 7, 1], dtype=np.int64)
    for number, compression in enumerate(compressions(kind)):
        path = tmp_path / f"{number}{kind.suffix}"
        written = write(kind, path, content, compression=compression)
        with kind.open(path, schema=EVERY_KIND) as reader:
            assert_same(reader.take(indices), content.take(indices))
            assert_same(reader.take(np.array([], dtype=np.int64)), content.slice(0, 0))
        if written.extents is not None:
            with ExtentsReader(tmp_path, written.extents, EVERY_KIND) as reader:
                assert_same(reader.take(indices), content.take(indices))
                assert_same(reader.take(np.array([], dtype=np.int64)), content.slice(0, 0))


@pytest.mark.parametrize("largest", [5, 60])
def test_extents_read_the_same_bytes_as_the_library(kind: Format, path: Path, largest: int) -> None:
    """Every sample is compared after the extents were written to their file and read again."""
    content = block(EVERY_KIND, 120, seed=2, largest=largest)
    written = write(kind, path, content, cuts=(50,))
    assert written.extents is not None
    where = write_extents(path.parent, written.extents)
    assert where.stat().st_size <= extents_bound(EVERY_KIND, 120)
    extents = load_extents(where, EVERY_KIND)
    with kind.open(path, schema=EVERY_KIND) as library, ExtentsReader(path.parent, extents, EVERY_KIND) as reader:
        assert_same(reader.read(0, 120), library.read(0, 120))
        assert_same(reader.read(33, 61), content.slice(33, 61))
        for n in range(120):
            one = np.array([n], dtype=np.int64)
            check_values(reader.take(one), extents.checksums[:, one], name=str(path), indices=one)


def test_a_shard_may_have_fewer_samples_than_announced(kind: Format, tmp_path: Path) -> None:
    """A shard may be cut short; the samples that arrived are complete."""
    content = block(EVERY_KIND, 5)
    for number, compression in enumerate(compressions(kind)):
        path = tmp_path / f"{number}{kind.suffix}"
        written = write(kind, path, content, spare=1000, compression=compression)
        with kind.open(path, schema=EVERY_KIND) as reader:
            assert reader.samples == 5
            assert_same(reader.read(0, 5), content)
        if written.extents is not None:
            with ExtentsReader(tmp_path, written.extents, EVERY_KIND) as reader:
                assert_same(reader.read(0, 5), content)


@pytest.mark.parametrize("announced", [0, 10])
def test_a_shard_without_samples_is_valid(kind: Format, tmp_path: Path, announced: int) -> None:
    """An empty shard is a shard."""
    content = block(EVERY_KIND, 0)
    for number, compression in enumerate(compressions(kind)):
        path = tmp_path / f"{number}{kind.suffix}"
        written = write(kind, path, content, spare=announced, compression=compression)
        assert (written.samples, written.payload, written.checksums.shape) == (0, 0, (len(EVERY_KIND), 0))
        with kind.open(path, schema=EVERY_KIND) as reader:
            assert reader.samples == 0
            assert_same(reader.read(0, 0), content)
        if written.extents is not None:
            again = Extents.from_buffer(written.extents.to_bytes(), schema=EVERY_KIND)
            with ExtentsReader(tmp_path, again, EVERY_KIND) as reader:
                assert_same(reader.read(0, 0), content)


@pytest.mark.parametrize(
    ("schema", "count", "largest"),
    [
        (SIMPLE, 3, 5),
        (SIMPLE, 700, 40),
        (Schema((Field("x", "u1"),)), 20_000, 0),
        (Schema((Field("x", "<f4", (1024,)),)), 300, 0),  # two pages of LMDB per sample
        (Schema((Field("x", "u1", (1000,)), Field("y", "<f8"))), 500, 0),
        (Schema((Field("x", "u1", (None,)),)), 400, 5000),
        (Schema((Field("x", "u1", (None,)), Field("y", "bytes"))), 300, 2600),
        (Schema((Field("t", "str"),)), 3000, 30),
    ],
)
def test_the_bound_is_never_exceeded_while_a_shard_is_written(
    kind: Format, tmp_path: Path, schema: Schema, count: int, largest: int
) -> None:
    """The allocated and the apparent size never exceed the bound, from the first byte to the last."""
    content = block(schema, count, largest=largest)
    for number, compression in enumerate(compressions(kind)):
        path = tmp_path / f"{number}{kind.suffix}"
        bound = kind.bound(schema, count, content.nbytes, compression=compression)
        writer = kind.create(path, schema, samples=count, nbytes=content.nbytes, compression=compression)
        sizes = [on_disk(path)]
        for start in range(0, count, -(-count // 4)):
            writer.write(content.slice(start, min(start + -(-count // 4), count)))
            sizes.append(on_disk(path))
        writer.finish()
        sizes.append(on_disk(path))
        assert max(sizes) <= bound, (compression, sizes, bound)
        assert sizes[-1] <= sizes[0] or compression or kind.name == "zarr"  # excess reservation is returned


def test_more_samples_or_bytes_than_announced_are_refused(kind: Format, path: Path) -> None:
    """Neither the samples nor the bytes that the caller reserved can be exceeded."""
    content = block(SIMPLE, 10)
    writer = kind.create(path, SIMPLE, samples=9, nbytes=content.nbytes)
    with pytest.raises(UsageError, match="10 samples"):
        writer.write(content)
    writer.abort()
    other = path.with_name("other" + kind.suffix)
    writer = kind.create(other, SIMPLE, samples=10, nbytes=content.nbytes - 1)
    with pytest.raises(UsageError, match="announced"):
        writer.write(content)
    writer.abort()
    writer.abort()


def test_an_existing_path_is_never_overwritten(kind: Format, path: Path) -> None:
    """The writer never overwrites a file, a folder or a dangling link."""
    content = block(SIMPLE, 2)
    write(kind, path, content)
    with pytest.raises(UsageError, match="exists"):
        write(kind, path, content)
    with kind.open(path, schema=SIMPLE) as reader:
        assert_same(reader.read(0, 2), content)
    link = path.with_name("link" + kind.suffix)
    link.symlink_to(path.with_name("nowhere"))
    with pytest.raises(UsageError, match="exists"):
        write(kind, link, content)
    assert not path.with_name("nowhere").exists()


def test_a_block_of_another_schema_is_refused(kind: Format, path: Path) -> None:
    """Another schema, object arrays, and another dtype or shape under the right name."""
    writer = kind.create(path, SIMPLE, samples=10, nbytes=10_000)
    good = block(SIMPLE, 2)
    with pytest.raises(UsageError, match="another schema"):
        writer.write(block(Schema((Field("x", "<f4"),)), 2))
    for column in (
        np.zeros((2, 4, 3), dtype=object),
        np.zeros((2, 4, 3), dtype="<f8"),
        np.zeros((2, 12), dtype="<f4"),
    ):
        with pytest.raises(UsageError, match="'x'"):
            writer.write(Block(SIMPLE, {**good.columns, "x": column}))
    writer.write(good)
    writer.finish()
    with kind.open(path, schema=SIMPLE) as reader:
        assert_same(reader.read(0, 2), good)


def test_unknown_compression_is_refused(kind: Format, path: Path) -> None:
    """The message names the compression, and no file is created."""
    with pytest.raises(UsageError, match="'rot13'"):
        kind.create(path, SIMPLE, samples=1, nbytes=100, compression="rot13")
    assert not path.exists()


def test_samples_outside_the_shard_are_refused(kind: Format, path: Path) -> None:
    """A negative index never wraps around, and the answer is never short."""
    written = write(kind, path, block(SIMPLE, 4))
    assert written.extents is not None
    for reader in (kind.open(path, schema=SIMPLE), ExtentsReader(path.parent, written.extents, SIMPLE)):
        with reader:
            for bad in ((0, 5), (-1, 2), (3, 2)):
                with pytest.raises(UsageError):
                    reader.read(*bad)
            for index in (-1, 4):
                with pytest.raises(UsageError, match=str(index)):
                    reader.take(np.array([0, index], dtype=np.int64))


def test_blocks_stay_valid_after_their_reader_is_closed(kind: Format, path: Path) -> None:
    """``close`` does not invalidate blocks, may be called twice, and ends reading."""
    content = block(EVERY_KIND, 9)
    written = write(kind, path, content)
    assert written.extents is not None
    for reader in (kind.open(path, schema=EVERY_KIND), ExtentsReader(path.parent, written.extents, EVERY_KIND)):
        found = reader.read(0, 9)
        reader.close()
        reader.close()
        assert_same(found, content)


def test_one_shard_has_several_readers_in_one_process(kind: Format, path: Path) -> None:
    """Closing one reader does not close the other."""
    content = block(SIMPLE, 6)
    write(kind, path, content)
    with kind.open(path, schema=SIMPLE) as first:
        with kind.open(path, schema=SIMPLE) as second:
            assert_same(second.read(0, 6), first.read(0, 6))
        assert_same(first.read(0, 6), content)


def test_a_forked_child_can_read(kind: Format, path: Path) -> None:
    """The parent's open readers do not prevent the child from opening the same shard."""
    content = block(SIMPLE, 6)
    write(kind, path, content)
    with kind.open(path, schema=SIMPLE) as parent:
        pid = os.fork()
        if pid == 0:
            good = 1
            try:
                with kind.open(path, schema=SIMPLE) as reader:
                    good = 0 if (checksums(reader.read(0, 6)) == checksums(content)).all() else 2
            finally:
                os._exit(good)
        _, status = os.waitpid(pid, 0)
        assert os.waitstatus_to_exitcode(status) == 0
        assert_same(parent.read(0, 6), content)


def test_a_file_of_a_read_only_folder_opens(kind: Format, path: Path) -> None:
    """Reading leaves no lock file and changes no byte."""
    write(kind, path, block(SIMPLE, 6))
    before = sorted((str(p), p.stat().st_mtime_ns, p.stat().st_size) for p in path.parent.rglob("*"))
    with kind.open(path, schema=SIMPLE) as reader:
        reader.read(0, 6)
    assert sorted((str(p), p.stat().st_mtime_ns, p.stat().st_size) for p in path.parent.rglob("*")) == before


def is_corrupt(kind: Format, path: Path, schema: Schema, written: Written) -> bool:
    """Return True if reading and checking everything raises CorruptError. Other errors propagate."""
    try:
        with kind.open(path, schema=schema) as reader:
            if reader.samples != written.samples:
                return True  # a TFRecord cut between two records: shard.json has the count
            everything = np.arange(written.samples)
            check_values(reader.take(everything), written.checksums, name=str(path), indices=everything)
    except CorruptError as error:
        return path.name in str(error)
    return False


def files_of(path: Path) -> list[Path]:
    return sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path]


@pytest.mark.parametrize("compressed", [False, True])
def test_a_truncated_file_is_corrupt_or_reads_right(kind: Format, path: Path, compressed: bool) -> None:
    """After a cut at any byte, reading raises an error that names the file, or returns fewer samples, or the right
    values.
    """
    if compressed and not kind.compressions:
        pytest.skip("this format has no compression")
    schema = Schema((Field("x", "<f4", (50,)), Field("n", "<i8"), Field("t", "str")))
    content = block(schema, 60)
    written = write(kind, path, content, compression=kind.compressions[0] if compressed else None)
    rng = np.random.default_rng(0)
    corrupt = 0
    for file in files_of(path):
        whole = file.read_bytes()
        for size in sorted({0, 1, len(whole) - 1, *rng.integers(len(whole), size=12).tolist()}):
            file.write_bytes(whole[:size])
            corrupt += is_corrupt(kind, path, schema, written)
        file.write_bytes(whole)
    assert corrupt > 0
    with kind.open(path, schema=schema) as reader:
        assert_same(reader.read(0, 60), content)


def test_a_flipped_bit_is_an_error_or_harmless_and_never_kills_the_process(kind: Format, tmp_path: Path) -> None:
    """The error names the file, or the checksum differs, or the bit has no meaning. The process survives."""
    script = Path(__file__).parents[1] / "formats" / "scripts" / "flip_bits.py"
    done = subprocess.run(
        [sys.executable, str(script), kind.name, str(tmp_path), "200", "1"],
        capture_output=True,
        text=True,
        check=False,
        cwd=Path(__file__).parents[2],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[2]), *sys.path])},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    outcomes = json.loads(done.stdout)
    assert (sum(outcomes.values()), outcomes["unnamed"]) == (200, 0)
    assert outcomes["error"] + outcomes["caught"] > 50


def test_extents_of_a_truncated_file_are_corrupt(kind: Format, path: Path) -> None:
    """A memory map is never read beyond the end of its file."""
    written = write(kind, path, block(SIMPLE, 40))
    assert written.extents is not None
    for file in files_of(path):
        os.truncate(file, min(file.stat().st_size, 8))
    with ExtentsReader(path.parent, written.extents, SIMPLE) as reader, pytest.raises(CorruptError, match="cut short"):
        reader.read(0, 40)


def test_random_bytes_are_corrupt(kind: Format, path: Path) -> None:
    """The file has the right name."""
    path.write_bytes(np.random.default_rng(0).bytes(20_000))
    with pytest.raises(CorruptError, match=path.name):
        kind.open(path, schema=SIMPLE).read(0, 1)


def test_too_little_disk_space_is_a_capacity_error(kind: Format, path: Path) -> None:
    """A shard larger than any disk is refused before its first byte is written."""
    schema = Schema((Field("x", "u1", (2**20,)),))
    with pytest.raises(CapacityError, match="no space"):
        kind.create(path, schema, samples=2**30, nbytes=2**50)


def test_a_format_is_found_by_its_suffix(kind: Format) -> None:
    """``format_for`` recognises the files that the format writes."""
    assert format_for(Path("somewhere") / ("part-00000" + kind.suffix)) is kind


@given(content=blocks(), data=st.data())
@pytest.mark.parametrize("name", format_names())
def test_random_schemas_and_values_are_read_back(name: str, content: Block, data: st.DataObject) -> None:
    """Any schema, bits and cut into blocks, with fewer samples than announced, are read equally by the library and by
    extents.
    """
    kind = get_format(name)
    count = content.samples
    cuts = data.draw(st.lists(st.integers(0, count), max_size=3))
    spare = data.draw(st.sampled_from((0, 0, 7)))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / ("data" + kind.suffix)
        written = write(kind, path, content, cuts=cuts, spare=spare)
        assert on_disk(path) <= kind.bound(content.schema, count + spare, content.nbytes + 1000 * spare)
        indices = np.array(data.draw(st.lists(st.integers(0, max(0, count - 1)), max_size=8)), dtype=np.int64)
        indices = indices if count else indices[:0]
        assert written.extents is not None
        extents = Extents.from_buffer(written.extents.to_bytes(), schema=content.schema)
        with (
            kind.open(path, schema=content.schema) as library,
            ExtentsReader(Path(folder), extents, content.schema) as reader,
        ):
            for each in (library, reader):
                assert_same(each.read(0, count), content)
                assert_same(each.take(indices), content.take(indices))


def test_the_test_schema_has_every_dtype() -> None:
    """The schema of these tests contains every kind of field."""
    assert {np.dtype(d).kind for d in DTYPES} == set("biufcmM")
