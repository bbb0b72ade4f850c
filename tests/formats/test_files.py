"""Preallocated files, copies of byte runs, names of formats."""

from __future__ import annotations

import errno
import os
import resource
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cachetool.core.errors import CapacityError, CorruptError, UsageError
from cachetool.core.extents import Extents, FieldExtents
from cachetool.core.schema import Field, Schema
from cachetool.formats import format_for, format_names, get_format
from cachetool.formats.files import (
    BulkFile,
    allocated_bound,
    capacity_errors,
    fsync_folder,
    map_file,
    write_durably,
)
from cachetool.formats.reading import ExtentsReader, field_extents, load_extents, write_extents
from cachetool.formats.runs import copy_runs, ends, windows


def test_a_bulk_file_allocates_its_bound_at_creation_and_returns_the_excess(tmp_path: Path) -> None:
    """Allocated at creation, within :func:`allocated_bound`; truncated to the written bytes."""
    path = tmp_path / "f"
    file = BulkFile.create(path, 1_000_000)
    assert 1_000_000 <= path.stat().st_blocks * 512 <= allocated_bound(1_000_000)
    assert file.append(b"abc", memoryview(b"de"), np.arange(3, dtype="u1")) == 0
    assert file.append(b"", b"f") == 8
    assert file.write_at(1, [b"X"]) == 1
    assert file.finish() == 9
    assert path.read_bytes() == b"aXcde\0\1\2f"
    assert path.stat().st_blocks * 512 <= allocated_bound(9)
    file.close()


def test_all_bytes_are_written_despite_many_buffers_and_short_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The buffers are more than one system call accepts, and the kernel writes fewer bytes than requested."""
    real, rng = os.pwritev, np.random.default_rng(0)

    def short(fd: int, views: list[memoryview], offset: int) -> int:
        given = b"".join(views)[: int(rng.integers(1, 5000))]
        return real(fd, [given], offset)

    monkeypatch.setattr(os, "pwritev", short)
    parts = [rng.bytes(int(n)) for n in rng.integers(0, 50, size=3000)]
    file = BulkFile.create(tmp_path / "f", 200_000)
    file.append(b"head")
    assert file.append(*parts) == 4
    file.finish()
    assert (tmp_path / "f").read_bytes() == b"head" + b"".join(parts)


def test_complete_huge_pages_are_written_by_one_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    really, calls = os.pwritev, []

    def pwritev(fd: int, buffers: list[memoryview], offset: int) -> int:
        count = really(fd, buffers, offset)
        calls.append((offset, count))
        return count

    monkeypatch.setattr("cachetool.formats.files.os.pwritev", pwritev)
    data = np.random.default_rng(0).integers(0, 256, 5 * 2**20, dtype=np.uint8)
    file = BulkFile.create(tmp_path / "f", 2**23)
    file.append(b"abc")
    file.append(data[: 2**20], data[2**20 :])
    file.finish()
    assert calls == [(0, 3), (3, 2**21 - 3), (2**21, 2**21), (2**22, 2**20 + 3)]
    assert (tmp_path / "f").read_bytes() == b"abc" + data.tobytes()


def test_finish_may_shrink_or_grow_the_file(tmp_path: Path) -> None:
    """A given size overrides the number of appended bytes."""
    file = BulkFile.create(tmp_path / "f", 100)
    file.append(b"abcdef")
    assert file.finish(4) == 4
    assert (tmp_path / "f").read_bytes() == b"abcd"


def test_an_existing_path_is_refused(tmp_path: Path) -> None:
    """The path is a file or a link; its contents stay."""
    (tmp_path / "f").write_bytes(b"old")
    (tmp_path / "l").symlink_to(tmp_path / "nowhere")
    for name in ("f", "l"):
        with pytest.raises(UsageError, match="exists"):
            BulkFile.create(tmp_path / name, 10)
    assert (tmp_path / "f").read_bytes() == b"old"
    assert not (tmp_path / "nowhere").exists()


def test_too_little_space_names_the_bytes_and_leaves_no_file(tmp_path: Path) -> None:
    """The size is larger than any file can be (EFBIG)."""
    with pytest.raises(CapacityError, match=str(2**61)):
        BulkFile.create(tmp_path / "f", 2**61)
    assert not (tmp_path / "f").exists()


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
def test_a_full_disk_is_a_capacity_error(number: int, tmp_path: Path) -> None:
    """The kernel has three such errors. Other errors keep their class."""
    with pytest.raises(CapacityError, match="1234 bytes"), capacity_errors(tmp_path, 1234):
        raise OSError(number, os.strerror(number))
    with pytest.raises(PermissionError), capacity_errors(tmp_path, 1234):
        raise PermissionError(errno.EACCES, "no")


def test_a_file_size_limit_is_a_capacity_error(tmp_path: Path) -> None:
    """LMDB's memory map would otherwise raise SIGBUS or SIGXFSZ under ``ulimit -f``."""
    code = (
        "import sys, pathlib, numpy, cachetool.core.errors as e\n"
        "from cachetool.formats import get_format\n"
        "from cachetool.core.schema import Schema, Field\n"
        "kind = get_format(sys.argv[1])\n"
        "schema = Schema((Field('x', '<f4', (1000,)),))\n"
        "try: kind.create(pathlib.Path(sys.argv[2]), schema, samples=1000, nbytes=4000000)\n"
        "except e.CapacityError as error: print(error); sys.exit(4)\n"
    )
    for name in ("lmdb", "tfrecord"):
        done = subprocess.run(
            [sys.executable, "-c", code, name, str(tmp_path / name)],
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (10**6, 10**6)),
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 4, done.stderr
        assert "no space for" in done.stdout


def test_write_durably_creates_a_new_complete_file(tmp_path: Path) -> None:
    """An existing path is refused."""
    write_durably(tmp_path / "f", b"data")
    assert (tmp_path / "f").read_bytes() == b"data"
    write_durably(tmp_path / "e", b"")
    assert (tmp_path / "e").read_bytes() == b""
    with pytest.raises(UsageError):
        write_durably(tmp_path / "f", b"other")
    fsync_folder(tmp_path)


def test_a_map_stays_readable_after_its_file_was_deleted(tmp_path: Path) -> None:
    """A map of an empty file is empty; an unlinked file stays readable."""
    (tmp_path / "e").write_bytes(b"")
    assert map_file(tmp_path / "e").tolist() == []
    (tmp_path / "f").write_bytes(b"abc")
    view = map_file(tmp_path / "f")[1:]
    (tmp_path / "f").unlink()
    assert view.tobytes() == b"bc"
    assert not view.flags.writeable


@given(
    sizes=st.lists(st.sampled_from((0, 1, 3, 200, 900)), max_size=12),
    equal=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_copy_runs_equals_a_loop_of_slices(sizes: list[int], equal: bool, seed: int) -> None:
    """Every strategy, for small and large, equal and mixed runs, copies the same bytes as a plain loop."""
    if equal and sizes:
        sizes = [sizes[0]] * len(sizes)
    rng = np.random.default_rng(seed)
    of = np.array(sizes, dtype=np.int64)
    source = rng.integers(0, 256, size=1500).astype("u1")
    starts = rng.integers(0, 1500 - 900, size=len(of))
    to = ends(of + 2)[:-1] + 1
    out, expected = np.zeros(int((of + 2).sum()), "u1"), np.zeros(int((of + 2).sum()), "u1")
    copy_runs(out, to, source, starts, of)
    for a, b, n in zip(to, starts, of, strict=True):
        expected[a : a + n] = source[b : b + n]
    np.testing.assert_array_equal(out, expected)


def test_runs_outside_their_buffer_are_refused() -> None:
    """Neither a negative position nor a position beyond the end is accepted, on either side."""
    small, large = np.zeros(4, "u1"), np.zeros(100, "u1")
    for to, start, size in ((0, -1, 2), (-1, 0, 2), (3, 0, 2), (0, 99, 2), (0, 0, -1)):
        with pytest.raises(IndexError):
            copy_runs(small, np.array([to]), large, np.array([start]), np.array([size]))
    with pytest.raises(IndexError):
        windows(small, 2)[np.array([3])]


def test_extents_with_a_constant_stride_keep_two_numbers() -> None:
    """Other extents keep arrays."""
    field = Field("x", "<f4", (2,))
    at = np.array([10, 30, 50])
    assert field_extents(field, offsets=at) == FieldExtents(start=10, stride=20, nbytes=8)
    assert field_extents(field, offsets=at[:1]) == FieldExtents(start=10, stride=8, nbytes=8)
    assert field_extents(field, offsets=at[:0]) == FieldExtents(start=0, stride=8, nbytes=8)
    uneven = field_extents(field, offsets=np.array([0, 8, 24]))
    assert uneven.offsets is not None
    text = Field("t", "str")
    assert field_extents(text, offsets=at, sizes=np.array([3, 3, 3])).sizes is None
    assert field_extents(text, offsets=at, sizes=np.array([3, 0, 3])).sizes is not None


def test_extents_of_another_schema_or_damaged_ones_are_corrupt(tmp_path: Path) -> None:
    """The error names the file."""
    schema = Schema((Field("x", "<f4", (2,)),))
    extents = Extents(3, ("f",), {"x": FieldExtents(nbytes=8, stride=8)}, np.zeros((1, 3), dtype=np.uint64))
    path = write_extents(tmp_path, extents)
    with pytest.raises(CorruptError, match=r"extents\.bin"):
        load_extents(path, Schema((Field("y", "<f4", (2,)),)))
    os.truncate(path, 100)
    with pytest.raises(CorruptError, match=r"extents\.bin"):
        load_extents(path, schema)


def test_an_extent_before_the_file_is_corrupt(tmp_path: Path) -> None:
    """A negative position would otherwise wrap around."""
    (tmp_path / "f").write_bytes(bytes(100))
    extents = Extents(3, ("f",), {"x": FieldExtents(start=-8, nbytes=8, stride=8)}, np.zeros((1, 3), dtype=np.uint64))
    with ExtentsReader(tmp_path, extents, Schema((Field("x", "<f4", (2,)),))) as reader, pytest.raises(CorruptError):
        reader.take(np.array([0]))


def test_formats_are_found_by_name_and_suffix() -> None:
    """Built-in formats come first. The error about an unknown name or suffix lists the known ones."""
    assert format_names()[:4] == ("lmdb", "hdf5", "zarr", "tfrecord")
    assert get_format("lmdb") is get_format("lmdb")
    assert format_for("a/B.LMDB").name == "lmdb"
    assert format_for("x.tfrecords").name == "tfrecord"
    with pytest.raises(UsageError, match="lmdb, hdf5, zarr, tfrecord"):
        get_format("parquet")
    for name in ("x", "x.csv", ".lmdb/x"):
        with pytest.raises(UsageError, match=r"\.tfrecord"):
            format_for(name)


def test_a_format_of_another_package_is_found(tmp_path: Path) -> None:
    """One entry point in the metadata of another package is enough. It cannot replace a built-in name."""
    info = tmp_path / "other-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: other\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[cachetool.formats]\nfifth = other_format:Fifth\nlmdb = other_format:Fifth\nbroken = no_such_module:X\n"
    )
    (tmp_path / "other_format.py").write_text("class Fifth:\n    name, suffix, compressions = 'fifth', '.fifth', ()\n")
    code = (
        "from cachetool.formats import *\nfrom cachetool.core.errors import UsageError\n"
        "assert format_names()[4:] == ('broken', 'fifth'), format_names()\n"
        "assert get_format('fifth').suffix == '.fifth' and get_format('lmdb').suffix == '.lmdb'\n"
        "try: get_format('broken')\n"
        "except UsageError as error: assert 'no_such_module' in str(error)\n"
        "else: raise SystemExit('broken was loaded')\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ, "PYTHONPATH": str(tmp_path)})


def test_naming_a_format_imports_no_library() -> None:
    """Neither by its name nor by its suffix."""
    code = (
        "import sys\nfrom cachetool.formats import format_for, format_names, get_format\n"
        "format_names(); get_format('tfrecord'); format_for('x.tfrecord')\n"
        "bad = {'lmdb', 'h5py', 'zarr', 'tfrecord', 'tensorflow', 'torch'} & set(sys.modules)\n"
        "assert not bad, bad\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
