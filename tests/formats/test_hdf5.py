"""HDF5 files as h5py alone reads them, and files that must not be trusted."""

from __future__ import annotations

import fcntl
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cachetool.core.block import Block, Ragged
from cachetool.core.errors import CorruptError, UsageError
from cachetool.core.schema import Field, Schema
from cachetool.formats import get_format
from cachetool.formats.digest import checksums
from cachetool.formats.hdf5 import Recorder
from tests.formats.samples import EVERY_KIND, block, write

HDF5 = get_format("hdf5")

SIMPLE = Schema(
    (Field("image", "<f4", (4, 6)), Field("a/label", "<i8"), Field("name", "str"), Field("audio", "<i2", (None, None)))
)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "data.h5"


def test_h5py_reads_every_array_as_contiguous_and_with_its_dtype(path: Path) -> None:
    content = block(EVERY_KIND, 17)

    written = write(HDF5, path, content)

    assert written.extents is not None
    raw = path.read_bytes()
    with h5py.File(path, "r") as file:
        assert json.loads(file.attrs["cachetool"]) == {"layout": 1, "samples": 17, "schema": EVERY_KIND.to_json()}
        for field in EVERY_KIND:
            dataset, column = file[field.name], content.columns[field.name]
            assert dataset.chunks is None
            assert dataset.id.get_create_plist().get_layout() == h5py.h5d.CONTIGUOUS
            assert h5py.h5g.get_objinfo(file.id, field.name.encode()).mtime == 0  # no time stamp is stored
            values = column.values if isinstance(column, Ragged) else column
            stored = dataset[()]
            if field.numpy.kind in "mM":
                assert dataset.attrs["dtype"] == field.dtype
                stored = stored.view(dataset.attrs["dtype"])
            assert stored.dtype == field.numpy
            assert stored.shape == values.shape
            assert stored.tobytes() == values.tobytes()
            if not stored.nbytes:
                continue
            start = dataset.id.get_offset()
            assert raw[start : start + stored.nbytes] == values.tobytes()
            extents = written.extents.fields[field.name]
            if extents.column is None:
                assert int(extents.locate(np.array([0]))[0][0]) == start


def test_the_file_is_readable_by_hdf5_1_10_and_grows_only_with_its_samples(path: Path) -> None:
    """The superblock is version 0. One more byte of values makes the file one byte larger."""
    schema = Schema((Field("x", "|u1", (64,)), Field("y", "|u1", (64,))))
    sizes = []
    for samples in (50, 100):
        file = path.with_name(f"{samples}.h5")
        write(HDF5, file, block(schema, samples))
        sizes.append(file.stat().st_size)
        assert file.read_bytes()[:9] == b"\x89HDF\r\n\x1a\n\x00"

    assert sizes[1] - sizes[0] == 50 * 128
    assert sizes[0] - 50 * 128 < 8192


@settings(max_examples=30)
@given(
    rows=st.lists(st.sampled_from((1, 100, 3000, 4096, 9973, 40_000)), min_size=1, max_size=5),
    samples=st.integers(1, 120),
    announced=st.integers(0, 400),
)
def test_arrays_of_64_kib_begin_at_a_page_however_many_samples_were_announced(
    rows: list[int], samples: int, announced: int
) -> None:
    """Memory is copied faster from the begin of a page. Arrays move if fewer samples arrive, without damage."""
    schema = Schema(tuple(Field(f"{n % 2}/{n}", "|u1", (size,)) for n, size in enumerate(rows)))
    columns = {f.name: np.resize(np.arange(251, dtype="|u1") + n, (samples, *f.sizes)) for n, f in enumerate(schema)}
    content = Block(schema, columns)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "data.h5")
        write(HDF5, path, content, spare=max(0, announced - samples))
        with h5py.File(path, "r") as file:
            for name, values in columns.items():
                dataset = file[name]
                assert np.array_equal(dataset[()], values)
                assert dataset.nbytes < 2**16 or dataset.id.get_offset() % 4096 == 0


def test_the_same_samples_make_the_same_file(tmp_path: Path) -> None:
    """No time stamp is stored, and the division of the samples into blocks does not matter."""
    content = block(EVERY_KIND, 40)
    write(HDF5, tmp_path / "a.h5", content)
    write(HDF5, tmp_path / "b.h5", content, cuts=(3, 11, 12))

    assert (tmp_path / "a.h5").read_bytes() == (tmp_path / "b.h5").read_bytes()


def test_compressed_arrays_are_chunked_by_whole_rows(path: Path) -> None:
    schema = Schema((Field("x", "<f4", (100, 256)), Field("y", "<f8", (2**17,)), Field("s", "bytes")))
    rows = [{"x": np.full((100, 256), i), "y": np.full(2**17, i), "s": b"z" * 30_000} for i in range(23)]
    rows = [{"x": r["x"].astype("<f4"), "y": r["y"].astype("<f8"), "s": r["s"]} for r in rows]  # type: ignore[attr-defined]
    content = Block.from_samples(schema, rows)

    write(HDF5, path, content, cuts=(1, 9, 10, 20), compression="gzip")

    assert path.stat().st_size < content.nbytes / 10
    with h5py.File(path, "r") as file:
        assert file["x"].chunks == (1, 100, 256)  # a large sample is a chunk of its own
        assert file["y"].chunks == (1, 2**17)
        assert file["s"].chunks == (2**18,)  # as large as a sample on average, but at most 256 KiB
        for name in ("x", "y", "s"):
            assert file[name].compression == "gzip"
            assert [file[name].id.get_create_plist().get_filter(i)[0] for i in range(2)] == [2, 1]
        assert np.array_equal(file["x"][:, 0, 0], np.arange(23))


def test_incompressible_bytes_stay_within_the_bound(path: Path) -> None:
    schema = Schema((Field("x", "|u1", (4096,)), Field("s", "bytes")))
    content = block(schema, 1000, largest=4000)
    for compression in HDF5.compressions:
        file = path.with_name(compression)
        write(HDF5, file, content, compression=compression)
        assert content.nbytes < file.stat().st_size <= HDF5.bound(schema, 1000, content.nbytes, compression=compression)


def test_a_shard_can_be_opened_despite_locks_of_other_processes(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Shards never change, so no lock and no setting of HDF5 excludes a reader. A read-only file also opens."""
    content = block(SIMPLE, 3)
    write(HDF5, path, content)
    path.chmod(0o444)
    with path.open("rb") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        for setting in ("TRUE", "FALSE", "BEST_EFFORT"):
            monkeypatch.setenv("HDF5_USE_FILE_LOCKING", setting)
            with HDF5.open(path) as reader:
                assert np.array_equal(checksums(reader.read(0, 3)), checksums(content))


SECRET = np.frombuffer(b"SECRET" * 4, dtype="|u1")


def _external_link(file: Any, elsewhere: Path) -> None:
    file["x"] = h5py.ExternalLink(str(elsewhere), "/x")


def _external_link_above(file: Any, elsewhere: Path) -> None:
    file["x"] = np.zeros((3, 8), dtype="|u1")
    del file["g"]
    file["g"] = h5py.ExternalLink(str(elsewhere), "/")


def _soft_link(file: Any, elsewhere: Path) -> None:
    file["other"] = SECRET.reshape(3, 8)
    file["x"] = h5py.SoftLink("/other")


def _external_storage(file: Any, elsewhere: Path) -> None:
    file.create_dataset("x", (3, 8), "|u1", external=[(str(elsewhere), 0, 24)])


def _virtual(file: Any, elsewhere: Path) -> None:
    layout = h5py.VirtualLayout((3, 8), "|u1")
    layout[:] = h5py.VirtualSource(str(elsewhere), "x", (3, 8))
    file.create_virtual_dataset("x", layout)


def _group(file: Any, elsewhere: Path) -> None:
    file.create_group("x")


def _text(file: Any, elsewhere: Path) -> None:
    file["x"] = ["a", "b", "c"]


def _shape(file: Any, elsewhere: Path) -> None:
    file["x"] = np.zeros((3, 9), dtype="|u1")


def _bomb(file: Any, elsewhere: Path) -> None:
    file.create_dataset("x", (2**40, 8), "|u1", chunks=(2**20, 8), compression="gzip")


def _holes(file: Any, elsewhere: Path) -> None:
    file.create_dataset("x", (3, 8), "|u1", chunks=(1, 8))[1] = 1


def _gone(file: Any, elsewhere: Path) -> None:
    pass


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (_external_link, "through a ExternalLink, which is refused"),
        (_external_link_above, "through a ExternalLink, which is refused"),
        (_soft_link, "through a SoftLink, which is refused"),
        (_external_storage, "in other files, which is refused"),
        (_virtual, "in other files, which is refused"),
        (_group, "not rows of uint8"),
        (_text, "not rows of uint8"),
        (_shape, "not rows of uint8"),
        (_bomb, "has 0 of its 1048576 chunks"),
        (_holes, "has 1 of its 3 chunks"),
        (_gone, "is missing"),
    ],
)
def test_arrays_that_are_not_in_the_file_are_refused(path: Path, make: Any, message: str) -> None:
    """Fault 78: no byte of another file is read, and nothing is allocated for data that was never stored."""
    schema = Schema((Field("x", "|u1", (8,)), Field("g/y", "<i8")))
    elsewhere = path.with_name("elsewhere.h5")
    with h5py.File(elsewhere, "w") as file:
        file["x"] = SECRET.reshape(3, 8)
        file["y"] = np.arange(3)
    write(HDF5, path, block(schema, 3))
    with h5py.File(path, "r+") as file:
        del file["x"]
        make(file, elsewhere)

    with pytest.raises(CorruptError, match=message) as caught:
        HDF5.open(path)
    assert str(path) in str(caught.value)


def test_a_foreign_file_is_refused(path: Path) -> None:
    with h5py.File(path, "w") as file:
        file["x"] = np.arange(5)

    with pytest.raises(CorruptError, match=r"data\.h5 has no readable description"):
        HDF5.open(path)


def test_a_damaged_compressed_chunk_names_file_field_and_rows(path: Path) -> None:
    schema = Schema((Field("x", "<f8", (2**16,)),))
    write(HDF5, path, block(schema, 4), compression="gzip")
    with h5py.File(path, "r") as file:
        chunk = file["x"].id.get_chunk_info(2)
    with path.open("r+b") as raw:
        raw.seek(chunk.byte_offset + chunk.size // 2)
        raw.write(bytes(64))

    with HDF5.open(path) as reader:
        with pytest.raises(CorruptError, match=r"data\.h5: 'x', rows 2 to 4"):
            reader.read(2, 4)
        assert reader.read(0, 2).samples == 2


def test_dimensions_and_samples_that_hdf5_cannot_hold_are_refused(path: Path) -> None:
    deep = Schema((Field("x", "<f4", (1,) * 32),))
    huge = Schema((Field("x", "|u1", (2**31,)),))

    with pytest.raises(UsageError, match="'x': HDF5 holds 31 dimensions, got 32"):
        HDF5.create(path, deep, samples=1, nbytes=4)
    with pytest.raises(UsageError, match="'x': a sample of 2147483648 bytes is too large to compress"):
        HDF5.create(path, huge, samples=1, nbytes=2**31, compression="gzip")
    assert not path.exists()
    write(HDF5, path, block(Schema((Field("x", "<f4", (1,) * 31),)), 2))
    with HDF5.open(path) as reader:
        assert reader.read(0, 2).columns["x"].shape == (2, *(1,) * 31)  # type: ignore[union-attr]


def test_a_schema_of_many_fields_fits_its_attribute(path: Path) -> None:
    """HDF5 attributes are limited to 64 KiB; the description of 1,500 fields is larger."""
    schema = Schema(tuple(Field(f"group-{i % 7}/field-with-a-long-name-{i}", "<f4", (i % 3,)) for i in range(1500)))
    content = block(schema, 2)
    written = write(HDF5, path, content)

    assert path.stat().st_size <= HDF5.bound(schema, 2, content.nbytes)
    with HDF5.open(path) as reader:
        assert reader.schema == schema
        assert np.array_equal(checksums(reader.read(0, 2)), written.checksums)


def test_an_error_in_the_file_driver_is_kept_and_the_file_still_closes() -> None:
    """The test runs in a separate process: an exception inside HDF5's driver would kill the interpreter at its exit."""
    program = """
import errno, h5py, numpy as np
from cachetool.formats.hdf5 import Recorder
def write(at, data):
    if at > 100_000:
        raise OSError(errno.ENOSPC, "full")
record = Recorder(write, lambda at, count: b"")
file = h5py.File(record, "w")
for i in range(50):
    file[str(i)] = np.ones(5000)
file.close()
try:
    record.check()
except OSError as error:
    print(error.errno == errno.ENOSPC)
"""
    out = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)

    assert (out.returncode, out.stdout, out.stderr) == (0, "True\n", "")


def test_the_error_recorder_is_silent_without_an_error() -> None:
    kept: list[tuple[int, bytes]] = []
    record = Recorder(lambda at, data: kept.append((at, bytes(data))), lambda at, count: b"ab")
    record.seek(3)
    record.write(b"xyz")
    record.check()
    buffer = bytearray(b"....")
    record.seek(-2, 2)

    assert (record.tell(), record.readinto(buffer), buffer, record.size, kept) == (4, 4, b"ab\0\0", 6, [(3, b"xyz")])
