"""The files that a path selects, the promises of a file source, and the process that reads for this one."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import lmdb
import numpy as np
import pytest
import zarr

import cachetool
from cachetool.core.block import Block, Ragged
from cachetool.core.errors import BadObject, NotFound, UsageError
from cachetool.core.schema import Field, Schema
from cachetool.sources import guard
from cachetool.sources.guard import read_block
from cachetool.sources.kinds import Census
from cachetool.sources.options import SourceOptions
from cachetool.stores import Object
from tests.sources.classic import classic
from tests.sources.files import file_kind, open_files, read, same
from tests.sources.test_files_tar import write as write_tar
from tests.sources.test_files_tfrecord import INTS, ONE, example
from tests.sources.test_files_tfrecord import write as write_tfrecord


def write_hdf5(path: Path) -> None:
    with h5py.File(path, "w") as file:
        file["x"] = np.arange(20).reshape(10, 2)


def write_lmdb(path: Path) -> None:
    env = lmdb.open(str(path), subdir=False, lib_version=0)
    with env.begin(write=True) as txn:
        for i in range(10):
            txn.put(b"%d" % i, b"x" * i)
    env.close()


def write_netcdf3(path: Path) -> None:
    path.write_bytes(classic({"x": (("n",), np.arange(10, dtype="i4"), {})}, {"n": None}))


def write_zarr(path: Path) -> None:
    zarr.create_array(path, shape=(10,), dtype="i4")[:] = np.arange(10)


WRITERS: dict[str, tuple[str, Callable[[Path], Any]]] = {
    "npy": (".npy", lambda path: np.save(path, np.arange(10))),
    "npz": (".npz", lambda path: np.savez(path, x=np.arange(10))),
    "hdf5": (".h5", write_hdf5),
    "netcdf3": (".nc3", write_netcdf3),
    "zarr": (".zarr", write_zarr),
    "tar": (".tar", lambda path: write_tar(path, [(f"{i}.txt", b"x" * i) for i in range(10)])),
    "tfrecord": (".tfrecord", lambda path: write_tfrecord(path, *[example(a=INTS)] * 5, *[example(a=ONE)] * 5)),
    "lmdb": (".lmdb", write_lmdb),
}


@pytest.fixture(params=WRITERS)
def file(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Create a file of ten samples, of every kind in turn."""
    suffix, write = WRITERS[request.param]
    write(tmp_path / f"data{suffix}")
    return tmp_path / f"data{suffix}"


def test_every_kind_keeps_the_promises_of_a_file_source(file: Path) -> None:
    """Ten samples are read in order, in blocks of any size, repeatedly, also after close. A second close is allowed."""
    with open_files(file) as source:
        assert source.samples == 10
        whole = [block.sample(i) for block in source.blocks() for i in range(len(block))]
        for block_bytes in (1, 100):
            blocks = list(source.blocks(block_bytes=block_bytes))
            assert all(block.schema == source.schema for block in blocks)
            found = [block.sample(i) for block in blocks for i in range(len(block))]
            assert len(found) == 10
            for sample, wanted in zip(found, whole, strict=True):
                assert all(same(sample[name], wanted[name]) for name in source.schema.names)
        source.close()
        assert sum(map(len, source.blocks())) == 10
    source.close()


def test_blocks_do_not_change_after_close(file: Path) -> None:
    source = open_files(file)
    blocks = list(source.blocks(block_bytes=50))
    before = [block.sample(i) for block in blocks for i in range(len(block))]
    source.close()

    after = [block.sample(i) for block in blocks for i in range(len(block))]
    assert all(same(a[name], b[name]) for a, b in zip(after, before, strict=True) for name in b)


def test_any_run_of_samples_equals_that_of_the_blocks(file: Path) -> None:
    with open_files(file) as source:
        whole = Block.concat(list(source.blocks()))
        for start, stop in [(5, 10), (0, 3), (3, 5), (4, 4), (0, 10)]:
            part = source.read(start, stop)
            assert len(part) == stop - start
            for i in range(len(part)):
                assert all(same(part.sample(i)[name], whole.sample(start + i)[name]) for name in source.schema.names)


def test_the_kind_is_recognised_by_name_and_by_first_bytes(file: Path, tmp_path: Path) -> None:
    kind = next(kind for kind, (suffix, _) in WRITERS.items() if suffix == file.suffix)
    assert file_kind(file) == kind
    if kind not in ("zarr", "npz"):
        file.rename(tmp_path / "data")
        assert file_kind(tmp_path / "data") == kind


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("x.tfrecords", "tfrecord"),
        ("x.tfrec", "tfrecord"),
        ("x.tfrecord.gz", "tfrecord"),
        ("mnist-train.tfrecord-00000-of-00010", "tfrecord"),
        ("train-00000-of-01024", "tfrecord"),
        ("X.TAR.GZ", "tar"),
        ("x.tgz", "tar"),
        ("x.HDF5", "hdf5"),
        ("x.he5", "hdf5"),
        ("x.mdb", "lmdb"),
    ],
)
def test_file_names_of_other_tools_are_recognised(tmp_path: Path, name: str, kind: str) -> None:
    (tmp_path / name).touch()

    assert file_kind(tmp_path / name) == kind


def test_a_folder_of_files_is_one_source_of_the_kind_with_most_bytes(tmp_path: Path) -> None:
    """Files that describe the others do not count."""
    objects = tmp_path / "objects"
    objects.mkdir()
    np.save(objects / "0.npy", np.arange(3))
    (objects / "0.json").write_text("{}")
    assert file_kind(objects) is None

    files = tmp_path / "files"
    files.mkdir()
    write_hdf5(files / "a.h5")
    for name in ("README.md", "dataset_info.json", "a.h5.md5", "lock.mdb"):
        (files / name).write_text("{}")
    assert file_kind(files) == "hdf5"
    write_lmdb(files / "b.lmdb")
    assert file_kind(files) == "lmdb"
    for options in (SourceOptions(), SourceOptions(read_as="files")):
        with open_files(files, options) as source:
            assert source.samples == 10
            assert dict(source.skipped) == {
                "a.h5": "no lmdb file; --read-as hdf5 reads it",
                **dict.fromkeys(("README.md", "dataset_info.json", "a.h5.md5"), "describes other files"),
            }


@pytest.mark.parametrize(
    "others",
    [
        ["a.pdf", "b.pdf"],
        ["a.h5.tmp"],
        ["metadata.jsonl", "labels.csv", "README.md", "a.idx", "_SUCCESS"],
        ["sub/notes.txt", "index.html"],
        ["a.json", "b.json"],
        ["a.npy"],
    ],
)
def test_other_files_beside_files_of_samples_are_skipped_and_named_by_pull_and_convert(
    others: list[str], tmp_path: Path
) -> None:
    folder = tmp_path / "files"
    folder.mkdir()
    for name in "ab":
        write_hdf5(folder / f"{name}.h5")
    for name in others:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("{}")

    with open_files(folder) as source:
        assert source.samples == 20
        skipped = source.skipped
    with cachetool.open_cache(tmp_path / "cache", max_size="20MB") as cache:
        result = cache.pull(str(folder), all=True, workers=1)
    assert result.samples == 20
    assert sorted(name for name, _ in result.left_out) == sorted(name for name, _ in skipped) == sorted(others)


def test_objects_beside_files_of_samples_are_read_on_request(tmp_path: Path) -> None:
    for name in "ab":
        write_hdf5(tmp_path / f"{name}.h5")
        (tmp_path / f"{name}.pdf").write_text("pdf")
    with open_files(tmp_path, SourceOptions(read_as="objects")) as source:
        assert source.samples == 2
        assert set(source.schema.names) == {"h5", "pdf", "__key__"}


def test_a_small_file_of_samples_among_objects_does_not_decide_the_kind(tmp_path: Path) -> None:
    for number in range(5):
        (tmp_path / f"{number}.jpg").write_bytes(bytes(20_000))
        (tmp_path / f"{number}.h5").write_bytes(bytes(100))
    assert file_kind(tmp_path) is None


def test_without_listed_sizes_the_number_of_files_decides_the_kind(tmp_path: Path) -> None:
    census = Census("http://a/")
    pages = [[Object(f"{number}.h5", -1) for number in range(3)], [Object("x.pdf", 10**9)]]
    assert [list(page) for page in census.count(iter(pages))] == pages
    kind = census.kind(None)
    assert kind is not None
    assert kind.name == "hdf5"


def test_hidden_files_are_ignored(tmp_path: Path) -> None:
    write_hdf5(tmp_path / "a.h5")
    write_hdf5(tmp_path / ".b.h5")

    with open_files(tmp_path) as source:
        assert source.samples == 10


def test_paths_without_a_file_of_samples_are_refused(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("hello")

    with pytest.raises(UsageError, match=r"notes\.txt' is a file of an unknown kind;\ngive the folder"):
        open_files(tmp_path / "notes.txt")
    with pytest.raises(NotFound, match="nowhere"):
        open_files(tmp_path / "nowhere")
    os.mkfifo(tmp_path / "pipe.h5")
    with pytest.raises(UsageError, match=r"pipe\.h5 is a device, a pipe or a socket"):
        open_files(tmp_path / "pipe.h5")
    np.save(tmp_path / "x.npy", np.arange(3))
    with pytest.raises(
        UsageError, match=r"--value-format is for lmdb files and objects of bytes, but 'x\.npy' is a npy file"
    ):
        open_files(tmp_path / "x.npy", SourceOptions(value_format="npy"))
    with pytest.raises(UsageError, match=r"--decode image .*: 'x\.npy'"):
        open_files(tmp_path / "x.npy", SourceOptions(decode="image"))
    (tmp_path / "tables").mkdir()
    (tmp_path / "tables" / "a.parquet").touch()
    with pytest.raises(UsageError, match=r"lmdb files and .*/tables holds parquet files"):
        open_files(tmp_path / "tables", SourceOptions(value_format="npy"))


def test_options_cross_processes_as_json() -> None:
    options = SourceOptions(fields=("a", "b"), rename={"x": "a"}, value_format="raw:float32,3", rows=7, key=False)

    assert SourceOptions.from_json(json.loads(json.dumps(options.to_json()))) == options
    with pytest.raises(UsageError, match="--rows -1 cannot be used; it must be at least 1"):
        SourceOptions(rows=-1)
    with pytest.raises(UsageError, match="unknown --decode 'audio'"):
        SourceOptions(decode="audio")


def test_reading_imports_no_heavy_library_in_the_calling_process(tmp_path: Path) -> None:
    """The process that reads imports h5py, zarr and lmdb, not the calling one."""
    write_hdf5(tmp_path / "x.h5")
    program = (
        "import sys; from tests.sources.files import open_files\n"
        f"assert open_files({str(tmp_path / 'x.h5')!r}).samples == 10\n"
        "print([name for name in ('h5py', 'zarr', 'lmdb', 'tensorflow', 'tfrecord', 'obstore') if name in sys.modules])"
    )
    root = str(Path(__file__).parents[2])
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": root},
    )

    assert done.stdout.strip() == "[]"


SCHEMA = Schema((Field("x", "<f4", (2,)), Field("e", "<i8", (0,)), Field("r", "<i2", (None, None)), Field("t", "str")))


def arrays() -> list[Any]:
    """Return the arrays that the reading process sends for two samples of ``SCHEMA``."""
    return [
        np.arange(4, dtype="<f4"),
        np.array([2]),
        np.array([0, 2, 6]),
        np.array([[1, 2], [2, 2]]),
        np.arange(6, dtype="<i2"),
        np.array([0, 1, 3]),
        np.frombuffer(b"abc", dtype=np.uint8),
    ]


def receive(parts: list[Any]) -> Block:
    raw = b"".join(part.tobytes() for part in parts)
    at = 0

    def take(count: int) -> Any:
        nonlocal at
        at += count
        return np.frombuffer(raw[at - count : at], dtype=np.uint8)

    return read_block(SCHEMA, [part.nbytes for part in parts], take)


def test_a_block_is_received_through_the_pipe() -> None:
    block = receive(arrays())

    assert len(block) == 2
    assert same(block.sample(1)["x"], np.array([2, 3], dtype="<f4"))
    assert same(block.sample(1)["r"], np.array([[2, 3], [4, 5]], dtype="<i2"))
    assert block.sample(1)["t"] == "bc"
    assert block.sample(1)["e"].shape == (0,)


@pytest.mark.parametrize(
    ("index", "value"),
    [
        (0, np.arange(6, dtype="<f4")),  # three samples, where other columns have two
        (0, np.arange(3, dtype="<f4")),  # one and a half samples
        (0, np.zeros(9, dtype=np.uint8)),  # not a whole number of values
        (1, np.array([3])),
        (1, np.empty(0, dtype="<i8")),
        (2, np.array([0, 2, 7])),
        (2, np.array([0, 7, 6])),
        (2, np.array([1, 2, 6])),
        (2, np.empty(0, dtype="<i8")),
        (3, np.array([[1, 2], [2, 3]])),
        (3, np.array([[1, 2], [-2, -2]])),
        (3, np.array([[1, 2], [2**62 + 1, 4]])),  # the product wraps around to 4
        (3, np.array([1, 2, 2])),
        (5, np.array([0, 2, 1])),
    ],
)
def test_a_reader_under_a_hostile_files_command_cannot_send_nonsense(index: int, value: Any) -> None:
    """The caller gets a valid block or an error for any sizes in the pipe."""
    parts = arrays()
    parts[index] = value

    with pytest.raises((ValueError, IndexError, UsageError)):
        receive(parts)
    with pytest.raises(ValueError, match="more arrays than fields"):
        receive([*arrays(), np.arange(1)])
    with pytest.raises(ValueError, match="an invalid size"):
        receive(arrays()[:-1])


def test_a_reader_that_dies_while_it_starts_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_hdf5(tmp_path / "x.h5")
    monkeypatch.setattr(sys, "executable", "/bin/false")

    with pytest.raises(BadObject, match=r"x\.h5: .*the process that read it ended with code 1"):
        open_files(tmp_path / "x.h5")


@pytest.mark.parametrize(
    "said",
    [
        "nonsense", "5", '{"ask": {"samples": 1}, "number": 1}', '{"message": "x"}', "[" * 40_000, " " * 100_000,
    ],
    ids=lambda said: said[:20],
)  # fmt: skip
def test_any_message_of_a_reader_under_a_hostile_files_command_is_an_error_of_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: str
) -> None:
    write_hdf5(tmp_path / "x.h5")
    (tmp_path / "said").write_text(f"{said}\n")
    (tmp_path / "reader").write_text(f"#!/bin/sh\ncat '{tmp_path}/said'\nexec cat >/dev/null\n")
    (tmp_path / "reader").chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "reader"))
    monkeypatch.setattr(guard, "MAX_ANSWER", 50_000)

    with pytest.raises(BadObject, match=r"x\.h5: the process that reads it returned invalid data"):
        open_files(tmp_path / "x.h5")


def test_a_reader_under_a_hostile_files_command_cannot_cause_endless_requests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before, a reader that sent no samples was asked for the same samples again, forever."""
    with lmdb.open(os.fspath(tmp_path / "x.lmdb"), subdir=False) as env, env.begin(write=True) as txn:
        txn.put(b"a", b"value")

    with open_files(tmp_path / "x.lmdb") as source:
        monkeypatch.setattr(guard, "read_block", lambda schema, *_: Block.from_samples(schema, []))
        with pytest.raises(
            BadObject, match=r"x\.lmdb: the process that reads it returned invalid data: 0 samples instead of 1"
        ):
            read(source, 0, 1)


def test_ragged_columns_are_views_of_the_received_bytes() -> None:
    column = receive(arrays()).columns["t"]

    assert isinstance(column, Ragged)
    assert column.sizes.tolist() == [1, 2]


def test_a_reader_whose_parent_ended_before_its_request_ends_silently() -> None:
    program = "from cachetool.proc.child import main; main()"
    done = subprocess.run([sys.executable, "-c", program], stdin=subprocess.DEVNULL, capture_output=True, check=False)

    assert done.returncode in (0, -signal.SIGTERM)  # it sends this signal to itself to end its work
    assert done.stderr == b""
