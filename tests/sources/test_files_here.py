"""Local files, read in order: each byte once, by the process that needs it, and only while the file is the listed
one.
"""

from __future__ import annotations

import io
import os
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import lmdb
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from cachetool.core.errors import BadObject
from cachetool.sources import guard, kinds
from cachetool.sources.byte_source import StoreRanges
from cachetool.sources.rows import Slab
from cachetool.stores import local
from tests.sources.files import open_files, read

N, VALUES = 20, 2**20
ARRAY = np.random.default_rng(0).integers(0, 255, (N, VALUES), dtype=np.uint8)


def write_tar(path: Path) -> None:
    with tarfile.open(path, "w:gz" if path.suffix == ".gz" else "w") as archive:
        for number, row in enumerate(ARRAY):
            file = io.BytesIO()
            np.save(file, row)
            info = tarfile.TarInfo(f"{number:04d}.npy")
            info.size = file.tell()
            file.seek(0)
            archive.addfile(info, file)


def write_hdf5(path: Path) -> None:
    with h5py.File(path, "w") as file:
        file.create_dataset("x", data=ARRAY, chunks=(1, VALUES))


def write_texts(path: Path) -> None:
    with h5py.File(path, "w") as file:
        file["x"] = ["a" * number for number in range(N)]


def write_parquet(path: Path) -> None:
    pq.write_table(pa.table({"x": [row.tobytes() for row in ARRAY]}), path, row_group_size=4)


def write_lmdb(path: Path) -> None:
    with lmdb.open(os.fspath(path), subdir=False, map_size=2**26) as env, env.begin(write=True) as txn:
        for number, row in enumerate(ARRAY):
            txn.put(f"{number:04d}".encode(), row.tobytes())


class Bytes:
    """A counter of the bytes that are read from local files, while they stay open and part by part."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.streamed = self.parts = 0
        readinto, get_range = local._ListedFile.readinto, local.LocalStore.get_range

        def counted(file: Any, buffer: Any) -> int | None:
            count = readinto(file, buffer)
            self.streamed += count or 0
            return count

        def counted_range(store: Any, item: Any, start: int, length: int) -> memoryview:
            body = get_range(store, item, start, length)
            self.parts += len(body)
            return body

        monkeypatch.setattr(local._ListedFile, "readinto", counted)
        monkeypatch.setattr(local.LocalStore, "get_range", counted_range)


def test_an_archive_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counting the samples skips their values."""
    path = tmp_path / "x.tar"
    write_tar(path)
    counted = Bytes(monkeypatch)

    with open_files(path) as source:
        looked = counted.streamed + counted.parts
        assert np.array_equal(read(source, 0, N).columns["npy"], ARRAY)

    assert looked < path.stat().st_size / 3
    assert counted.streamed + counted.parts - looked <= path.stat().st_size


@pytest.mark.parametrize(("name", "write"), [("x.h5", write_hdf5), ("x.parquet", write_parquet)])
def test_no_value_passes_through_another_process_before_it_is_decoded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, write: Callable[[Path], None]
) -> None:
    write(path := tmp_path / name)
    counted = Bytes(monkeypatch)
    monkeypatch.setattr(StoreRanges, "part", lambda *_: pytest.fail("a part was asked for"))

    with open_files(path) as source:
        read(source, 0, N)

    assert counted.streamed + counted.parts == 0


@pytest.mark.parametrize(
    ("name", "write"), [("x.h5", write_hdf5), ("x.tar.gz", write_tar), ("x.parquet", write_parquet)]
)
def test_a_file_that_is_written_to_while_it_is_open_is_refused(
    tmp_path: Path, name: str, write: Callable[[Path], None]
) -> None:
    write(path := tmp_path / name)

    with open_files(path) as source:
        read(source, 0, 1)
        os.utime(path, ns=(1, 1))
        with pytest.raises(BadObject, match=f"'{name}' changed since it was listed"):
            read(source, N - 1, N)


@pytest.mark.parametrize(("name", "write"), [("x.lmdb", write_lmdb), ("x.h5", write_texts)])
def test_one_process_probes_a_file_and_measures_its_samples(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, write: Callable[[Path], None]
) -> None:
    write(path := tmp_path / name)
    begun: list[Any] = []
    child = guard.Child

    def counted(task: Any, **options: Any) -> Any:
        begun.append(task)
        return child(task, **options)

    monkeypatch.setattr(guard, "Child", counted)
    with open_files(path):
        pass

    assert len(begun) == 1


def test_requests_for_samples_of_unknown_size_follow_the_size_of_earlier_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first request is for one sample. After that each unit takes one request."""
    write_lmdb(path := tmp_path / "x.lmdb")

    with open_files(path) as source:
        asked: list[Any] = []
        answer = guard.Child.answer
        monkeypatch.setattr(guard.Child, "answer", lambda child, it: (asked.append(it.get("read")), answer(child, it)))
        read(source, 0, N)

    assert [request for request in asked if request] == [[0, 1], [1, 7], [7, 14], [14, 20]]


def test_rows_requested_together_are_fetched_together() -> None:
    asked: list[tuple[int, int]] = []
    rows = np.arange(100)

    def fetch(start: int, stop: int) -> Any:
        asked.append((start, stop))
        return rows[start:stop]

    slab = Slab(fetch, rows=100, row_nbytes=8, chunk=3)

    assert slab.read(4, 50).tolist() == list(range(4, 50))
    assert slab.read(50, 52).tolist() == [50, 51]
    assert asked == [(3, 51), (51, 54)]


def test_packages_are_not_searched_for_built_in_kinds(monkeypatch: pytest.MonkeyPatch) -> None:
    """The search takes as long as everything else that opens a small file."""
    kinds.kinds.cache_clear()
    monkeypatch.setattr("importlib.metadata.entry_points", lambda **_: pytest.fail("packages were searched"))

    assert kinds.kind_named("tar").name == "tar"
    assert kinds.kind_of("a.h5") is kinds.kind_named("hdf5")
    assert kinds.kind_of_head(b"PAR1") is kinds.kind_named("parquet")
