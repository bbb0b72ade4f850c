"""The kind of a file by its first bytes, for any name: alike in ``pull`` and ``convert``, locally and at URLs."""

from __future__ import annotations

import gzip
import io
import re
import shlex
import subprocess
import sys
import tarfile
import unicodedata
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from urllib.parse import quote

import h5py
import lmdb
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import zarr

import cachetool
from cachetool.core.errors import BadObject, UsageError
from cachetool.sources.contents import HEAD
from cachetool.sources.kinds import kind_of_head
from cachetool.sources.options import SourceOptions
from tests.servers import Moto, folder_server
from tests.sources.classic import classic
from tests.sources.files import open_files
from tests.sources.test_files_tfrecord import example
from tests.sources.test_files_tfrecord import write as write_records

ROWS = 12
Write = Callable[[Path], object]


def hdf5(path: Path, user_block: int = 0) -> None:
    with h5py.File(path, "w", userblock_size=user_block) as file:
        file["x"] = np.arange(ROWS * 3, dtype="f4").reshape(ROWS, 3)


def netcdf3(path: Path) -> None:
    path.write_bytes(classic({"x": (("x", "y"), np.zeros((ROWS, 3), "f4"), {})}, {"x": ROWS, "y": 3}))


def npy(path: Path) -> None:
    with path.open("wb") as file:
        np.save(file, np.zeros((ROWS, 3)))


def npz(path: Path) -> None:
    with path.open("wb") as file:
        np.savez(file, x=np.zeros((ROWS, 3)))


def tar(path: Path) -> None:
    with tarfile.open(path, "w") as file:
        for number in range(ROWS):
            member = tarfile.TarInfo(f"{number:03d}.txt")
            member.size = 3
            file.addfile(member, io.BytesIO(b"abc"))


def tfrecord(path: Path) -> None:
    write_records(path, *(example(x=b"\x1a\x03\x0a\x01" + bytes([number])) for number in range(ROWS)))


def parquet(path: Path) -> None:
    pyarrow.parquet.write_table(pyarrow.table({"x": list(range(ROWS))}), path)


def lmdb_file(path: Path) -> None:
    with lmdb.open(str(path), subdir=False, lock=False) as env, env.begin(write=True) as txn:
        for number in range(ROWS):
            txn.put(b"%03d" % number, b"v")


def page(path: Path) -> None:
    path.write_text("<!DOCTYPE html><html><body>403 Forbidden</body></html>\n" * 20)


def packed(write: Write, pack: Callable[[bytes], bytes] = gzip.compress) -> Write:
    def written(path: Path) -> None:
        write(path)
        path.write_bytes(pack(path.read_bytes()))

    return written


def zarr_zip(path: Path) -> None:
    with zarr.storage.ZipStore(path, mode="w") as store:
        zarr.open_group(store, mode="w").create_array("x", data=np.zeros((ROWS, 3)))


@pytest.mark.parametrize(
    ("name", "write"),
    [
        *((name, hdf5) for name in ("a.nc", "a.h5ad", "a.loom", "a.jld2", "a.hdf", "a.mat", "a.keras")),
        *((f"{size}.mat", lambda path, size=size: hdf5(path, size)) for size in (512, 1024, 2048, 4096, 8192)),
        *((name, netcdf3) for name in ("a.nc", "a.cdf", "netcdf3.h5", "a")),
        ("a.tfr", tfrecord),
        ("a.record", tfrecord),
        ("a.record.gz", packed(tfrecord)),
        ("a.zz", packed(tfrecord, zlib.compress)),
        ("a.webdataset", tar),
        ("a.bin", packed(tar)),
        ("a", parquet),
        ("a.pq", parquet),
        ("a.db", lmdb_file),
        ("a.arrays", npz),
        ("a.dat", npy),
        ("parquet.h5", parquet),
        ("hdf5.tar", hdf5),
        ("hdf5.npy", hdf5),
        ("tar.parquet", tar),
        ("npz.tfrecord", npz),
        ("hdf5.lmdb", hdf5),
        ("tfrecord.npz", tfrecord),
    ],
)
def test_pull_and_convert_recognise_a_file_by_its_content(name: str, write: Write, tmp_path: Path) -> None:
    write(tmp_path / name)
    with cachetool.open_cache(tmp_path / "cache", max_size="20MB") as cache:
        assert cache.pull(str(tmp_path / name), all=True, workers=1).samples == ROWS
        assert cachetool.convert(tmp_path / name, to="lmdb", out=tmp_path / "out", workers=1).samples == ROWS


@pytest.mark.parametrize(
    "write", [hdf5, netcdf3, npy, npz, tar, tfrecord, parquet, lmdb_file, packed(tar), packed(tfrecord)]
)
def test_only_the_first_bytes_of_a_file_are_read_to_recognise_it(write: Write, tmp_path: Path) -> None:
    write(tmp_path / "x")
    head = (tmp_path / "x").read_bytes()[:HEAD]

    assert kind_of_head(head) is not None
    assert kind_of_head(head[:4]) is None or write in (parquet, netcdf3)
    assert kind_of_head(b"") is None
    for other in (b"x" * HEAD, b"\x1f\x8b" + bytes(HEAD), b"PK\x03\x04" + bytes(HEAD), bytes(HEAD)):
        assert kind_of_head(other) is None


@pytest.mark.parametrize("suffix", ["tar", "h5", "npz", "npy", "tfrecord", "parquet", "lmdb", "tar.gz"])
@pytest.mark.parametrize("place", ["here", "elsewhere"])
def test_an_html_error_page_is_reported_as_such(place: str, suffix: str, tmp_path: Path) -> None:
    page(tmp_path / f"train.{suffix}")

    with folder_server(tmp_path) as server:
        url = f"{server.url}/train.{suffix}" if place == "elsewhere" else tmp_path / f"train.{suffix}"
        with pytest.raises(BadObject, match=r"train\.\S+' is no \w+ file: it is an HTML or XML page"):
            open_files(url)


@pytest.mark.parametrize(
    ("suffix", "write"), [("h5", hdf5), ("tar", tar), ("parquet", parquet), ("tfrecord", tfrecord)]
)
@pytest.mark.parametrize(
    ("other", "words"), [(page, "an HTML or XML page"), (npy, r"of the kind npy; rename it, for example to b\.npy")]
)
def test_a_file_of_another_kind_in_a_folder_is_named(
    suffix: str, write: Write, other: Write, words: str, tmp_path: Path
) -> None:
    write(tmp_path / f"a.{suffix}")
    other(tmp_path / f"b.{suffix}")

    with pytest.raises(BadObject, match=rf"b\.{suffix} is no \w+ file: it is {words}"):
        open_files(tmp_path)


@pytest.mark.parametrize("name", ["x.h5", "x.zip", "x.zarr", "x.zarr.zip"])
def test_the_advice_to_unpack_a_zarr_in_a_zip_archive_works(name: str, tmp_path: Path) -> None:
    zarr_zip(tmp_path / name)

    with pytest.raises((BadObject, UsageError), match="a Zarr in a zip archive") as refused:
        open_files(tmp_path / name)
    (command,) = re.findall(r"(python3 [^;\n]+)", str(refused.value))
    words = shlex.split(command.replace("FILE", name).replace("NAME", "unpacked"))
    subprocess.run([sys.executable, *words[1:]], cwd=tmp_path, check=True)
    with open_files(tmp_path / "unpacked.zarr") as source:
        assert source.samples == ROWS


def test_an_archive_whose_arrays_are_not_first_is_still_an_npz(tmp_path: Path) -> None:
    npz(tmp_path / "arrays")
    with zipfile.ZipFile(tmp_path / "x.npz", "w") as file, zipfile.ZipFile(tmp_path / "arrays") as arrays:
        file.writestr("readme.txt", "about")
        file.writestr("x.npy", arrays.read("x.npy"))
    with open_files(tmp_path / "x.npz") as source:
        assert (source.samples, source.skipped) == (ROWS, (("readme.txt", "not an array"),))


def test_a_file_of_an_unknown_kind_is_refused_with_the_list_of_kinds(tmp_path: Path) -> None:
    (tmp_path / "a.mat").write_bytes(b"MATLAB 5.0 MAT-file" + bytes(600))

    with pytest.raises(
        UsageError,
        match=r"a\.mat' is a file of an unknown kind;\ngive the folder .*, or a file of many samples \(npy, npz, hd",
    ):
        open_files(tmp_path / "a.mat")


@pytest.mark.parametrize(
    ("ending", "write"),
    [
        (".nc", hdf5),
        (".nc", netcdf3),
        (".h5ad", hdf5),
        (".mat", lambda path: hdf5(path, 512)),
        (".tfr", tfrecord),
        (".record.gz", packed(tfrecord)),
        (".webdataset", tar),
        (".db", lmdb_file),
        ("", parquet),
    ],
)
def test_a_folder_of_files_with_an_unknown_extension_is_recognised_by_two_of_them(
    ending: str, write: Write, tmp_path: Path
) -> None:
    folder = tmp_path / "runs"
    folder.mkdir()
    for name in ("a", "b", "c"):
        write(folder / f"{name}{ending}")
    (folder / "_SUCCESS").touch()
    (folder / "LICENSE").touch()

    with cachetool.open_cache(tmp_path / "cache", max_size="20MB") as cache:
        for options in ({}, {"read_as": "files"}):
            pulled = cache.pull(str(folder), all=True, workers=1, dataset=f"d{len(options)}", **options)
            assert (pulled.samples, len(pulled.notes)) == (3 * ROWS, 1)
        converted = cachetool.convert(folder, to="lmdb", out=tmp_path / "out", workers=1)
        assert (converted.samples, converted.notes) == (3 * ROWS, pulled.notes)
        for option in re.findall(r"--read-as (\w+)", pulled.notes[0]):
            assert cache.pull(str(folder), all=True, workers=1, dataset="raw", read_as=option).samples == 3


@pytest.mark.parametrize(("ending", "write"), [("dat", npy), ("arrays", npz)])
def test_a_note_reports_objects_of_bytes_that_contain_arrays(ending: str, write: Write, tmp_path: Path) -> None:
    folder = tmp_path / "runs"
    folder.mkdir()
    for name in ("a", "b", "c"):
        write(folder / f"{name}.{ending}")

    with cachetool.open_cache(tmp_path / "cache", max_size="20MB") as cache:
        pulled = cache.pull(str(folder), all=True, workers=1)
        converted = cachetool.convert(folder, to="lmdb", out=tmp_path / "out", workers=1)
        assert (pulled.samples, converted.samples, converted.notes) == (3, 3, pulled.notes)
        (note,) = pulled.notes
        assert f".{ending}" in note
        (option,) = re.findall(r"--read-as (\w+)", note)
        assert cache.pull(str(folder), all=True, workers=1, dataset="rows", read_as=option).samples == 3 * ROWS
        raw = cache.pull(str(folder), all=True, workers=1, dataset="raw", read_as="objects")
        assert (raw.samples, raw.notes) == (3, ())


@pytest.mark.parametrize("second", [page, npy, lambda path: path.write_bytes(b"x" * 3000)])
def test_objects_of_an_unknown_extension_with_different_contents_stay_objects(second: Write, tmp_path: Path) -> None:
    for name, write in (("a", hdf5), ("b", second)):
        write(tmp_path / f"{name}.dat")

    with open_files(tmp_path) as source:
        assert (source.samples, source.skipped) == (2, ())


def test_a_few_files_of_an_unknown_extension_among_objects_are_not_read(tmp_path: Path) -> None:
    for number in range(20):
        np.save(tmp_path / f"{number}.npy", np.zeros(3000))
        (tmp_path / f"{number}.nc").write_bytes(b"\x89HDF\r\n\x1a\n")

    with open_files(tmp_path) as source:
        assert (source.samples, set(source.schema.names)) == (20, {"npy", "nc", "__key__"})


@pytest.mark.parametrize("index", ["html", "json"])
def test_a_remote_folder_is_examined_with_few_requests(index: str, tmp_path: Path) -> None:
    folder = tmp_path / "runs"
    folder.mkdir()
    for number in range(30):
        (folder / f"{number:02d}.bin").write_bytes(bytes(50_000))
        (folder / f"{number:02d}.raw").write_bytes(bytes(50_000))
    with folder_server(tmp_path, index=index) as server, open_files(f"{server.url}/runs/") as source:
        before = len(server.requests)
        assert source.samples == 30
    heads = [headers["Range"] for _, headers in server.requests[:before] if "Range" in headers]
    assert heads == [f"bytes=0-{HEAD - 1}"] * 4


def test_remote_files_are_recognised_by_their_content(
    moto: Moto, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in moto.env.items():
        monkeypatch.setenv(name, value)
    hdf5(tmp_path / "x", 512)
    tfrecord(tmp_path / "y")
    objects = {
        "runs/a.mat": "x",
        "runs/b.mat": "x",
        "one.mat": "x",
        "wrong.tar": "x",
        "part.record": "y",
        "wrong.h5": "y",
    }
    moto.put("contents", {key: (tmp_path / name).read_bytes() for key, name in objects.items()})

    with cachetool.open_cache(tmp_path / "cache", max_size="20MB") as cache:
        for number, key in enumerate(("runs/", "one.mat", "wrong.tar", "part.record", "wrong.h5")):
            url = f"s3://contents/{key}"
            count = 2 * ROWS if key == "runs/" else ROWS
            assert cache.pull(url, all=True, workers=1, dataset=f"d{number}").samples == count
            assert cachetool.convert(url, to="lmdb", out=tmp_path / f"o{number}", workers=1).samples == count


NAMES = (
    "a[1]",
    "é",
    unicodedata.normalize("NFD", "é"),
    "a b",
    "a#1",
    "a%20b",
    "a?b",
    "a*b",
    "a'b",
    'a"b',
    "日本",
    "a{1}",
)


@pytest.mark.parametrize("name", NAMES)
def test_names_with_any_unicode_letters_work_everywhere(name: str, tmp_path: Path) -> None:
    from cachetool.loaders.torch import CacheDataset, LMDBDataset, Loader

    folder = tmp_path / name
    folder.mkdir()
    hdf5(folder / f"{name}.nc")
    lmdb_file(folder / f"{name}.db")

    with folder_server(tmp_path) as server:
        for url in (folder / f"{name}.nc", f"{server.url}/{quote(name)}/{quote(name)}.nc"):
            with open_files(url) as source:
                assert source.samples == ROWS
    with open_files(folder, SourceOptions(read_as="files")) as source:
        assert source.samples == ROWS
    with cachetool.open_cache(tmp_path / f"cache {name}", max_size="20MB") as cache:
        assert cache.pull(str(folder / f"{name}.nc"), all=True, workers=1).samples == ROWS
        cache.convert(to="lmdb", out=tmp_path / f"out {name}", workers=1)
    for place in (tmp_path / f"cache {name}", tmp_path / f"out {name}", tmp_path / f"out {name}" / "part-00000.lmdb"):
        with CacheDataset(place) as dataset, LMDBDataset(place) as same, Loader(place, batch_size=4) as loader:
            assert len(dataset) == len(same) == sum(len(batch["x"]) for batch in loader) == ROWS
    with LMDBDataset(folder / f"{name}.db", value_format="raw") as raw:
        assert len(raw) == ROWS
