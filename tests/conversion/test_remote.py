"""``convert URL``: an input in a store is read by ranges like a local one, and leaves no local files."""

from __future__ import annotations

import contextlib
import io
import os
import signal
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import h5py
import lmdb
import numpy as np
import pytest
import zarr

import cachetool
from cachetool.conversion.inputs import described
from cachetool.core.block import Block
from cachetool.core.errors import BadObject, NotFound, UsageError
from cachetool.proc.scratch import scratch
from cachetool.sources.options import SourceOptions
from cachetool.sources.registry import check_place
from tests.commands import run_command
from tests.servers import Http, Moto, folder_server, hub_server, sftp_server
from tests.sources.files import open_files

KILLED = Path(__file__).parent / "scripts" / "killed_convert.py"
X = np.arange(600, dtype=np.float32).reshape(100, 2, 3)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Create every kind of input, each with the same 100 samples."""
    root = tmp_path_factory.mktemp("place")
    np.save(root / "x.npy", X)
    np.savez(root / "both.npz", x=X, y=np.arange(100))
    for path, rows in ((root / "a.h5", X), (root / "many" / "a.h5", X[:40]), (root / "many" / "b.h5", X[40:])):
        path.parent.mkdir(exist_ok=True)
        with h5py.File(path, "w") as file:
            file["x"] = rows
    zarr.open_group(root / "z.zarr", mode="w", zarr_format=3).create_array("x", data=X, chunks=(30, 2, 3))
    (root / "objects").mkdir()
    env = lmdb.open(str(root / "folder.lmdb"), lib_version=0)
    with tarfile.open(root / "a.tar", "w") as tar, env.begin(write=True) as txn:
        for number, value in enumerate(X):
            out = io.BytesIO()
            np.save(out, value)
            info = tarfile.TarInfo(f"{number:03d}.x.npy")
            info.size = len(out.getvalue())
            tar.addfile(info, io.BytesIO(out.getvalue()))
            (root / "objects" / f"{number:03d}.x.npy").write_bytes(out.getvalue())
            txn.put(b"%03d" % number, out.getvalue())
    env.close()
    (root / "folder.lmdb" / "lock.mdb").unlink()
    cachetool.convert(root / "x.npy", to="tfrecord", out=root / "ours", shard_size=900, workers=1)
    (root / "lone.tfrecord").write_bytes((root / "ours" / "part-00000.tfrecord").read_bytes())
    return root


@pytest.fixture(scope="module")
def web(place: Path) -> Iterator[Http]:
    with folder_server(place, index="json") as server:
        yield server


def everything(place: str | Path, **options: Any) -> Block:
    with open_files(place, SourceOptions(**options)) as source:
        return Block.concat(list(source.blocks()))


KINDS = ["x.npy", "both.npz", "a.h5", "many/", "z.zarr", "folder.lmdb", "a.tar", "lone.tfrecord", "ours/", "objects/"]


STORES = ("s3", "sftp", "hf")


@pytest.mark.parametrize(
    ("store", "kind"),
    [
        *(("http", kind) for kind in KINDS),
        *(  # by default each kind in one further store, in the long runs in all stores
            pytest.param(store, kind, marks=[pytest.mark.soak] * (KINDS.index(kind) % 3 != STORES.index(store)))
            for store in STORES
            for kind in KINDS
        ),
    ],
)
def test_an_input_in_a_store_is_read_like_a_local_one(
    place: Path, web: Http, moto: Moto, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kind: str, store: str
) -> None:
    if store == "s3":
        for name, value in moto.env.items():
            monkeypatch.setenv(name, value)
        top = place / kind
        files = [top] if top.is_file() else [path for path in top.rglob("*") if path.is_file()]
        moto.put("place", {str(path.relative_to(place)): path.read_bytes() for path in files})
    options = {"value_format": "npy"} if kind == "folder.lmdb" else {}
    with contextlib.ExitStack() as stack:
        url = {"http": web.url, "s3": "s3://place", "hf": "hf://datasets/owner/name"}.get(store, "")
        if store == "hf":
            monkeypatch.setenv("HF_ENDPOINT", stack.enter_context(hub_server(place)).url)
        if store == "sftp":
            monkeypatch.setenv("HOME", str(tmp_path / "home"))
            monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)
            url = stack.enter_context(sftp_server(place, tmp_path / "home"))
        found = everything(f"{url}/{kind}", **options)
    expected = everything(place / kind, **options)

    assert found.schema == expected.schema
    assert [str(found.sample(i)) for i in range(len(found))] == [str(expected.sample(i)) for i in range(len(expected))]
    assert len(found) == (100 if kind != "lone.tfrecord" else 37)


def identity(url: str, **options: Any) -> str:
    with described(url, SourceOptions(**options)) as description:
        return str(description["identity"])


def test_the_same_url_has_the_same_identity_until_an_object_changes(tmp_path: Path) -> None:
    (tmp_path / "srv" / "objects").mkdir(parents=True)
    for name in ("x.npy", "objects/a.x.npy", "objects/b.x.npy"):
        np.save(tmp_path / "srv" / name, X[:3])
    with folder_server(tmp_path / "srv", index="json") as server:
        names = (*(f"x.npy?X-Amz-Signature={s}" for s in "ab"), "objects/", "objects")
        found = [identity(f"{server.url}/{name}") for name in names]
        other = identity(f"{server.url}/x.npy", fields=("x",))
        for name in ("x.npy", "objects/a.x.npy"):
            os.utime(tmp_path / "srv" / name, (1, 1))
        after = [identity(f"{server.url}/{name}") for name in ("x.npy", "objects/")]

    assert found[0] == found[1] != other
    assert found[2] == found[3]
    assert set(after).isdisjoint(found)


@pytest.mark.parametrize("name", ["x.npy", "a.h5", "a.tar", "objects/"])
def test_an_object_that_changes_while_it_is_converted_is_refused(place: Path, tmp_path: Path, name: str) -> None:
    """The ETag reveals the change: the size and the bytes that are read stay the same."""
    srv = tmp_path / "srv"
    for path in [place / name] if (place / name).is_file() else (place / name).iterdir():
        there = srv / path.relative_to(place)
        there.parent.mkdir(parents=True, exist_ok=True)
        there.write_bytes(path.read_bytes())
    with folder_server(srv, index="json") as server:

        def change(step: object) -> None:
            for path in srv.rglob("*"):
                if path.is_file():
                    os.utime(path, (1, 1))

        with pytest.raises(BadObject, match="changed since it was listed"):
            cachetool.convert(
                f"{server.url}/{name}", to="hdf5", out=tmp_path / "out", shard_size=500, workers=1, progress=change
            )
    assert not (tmp_path / "out").exists()


def test_hardly_more_bytes_are_fetched_than_a_large_file_has(tmp_path: Path) -> None:
    """Each byte is fetched once, by ranges, for any number of parts."""
    large = np.random.default_rng(0).integers(0, 255, (70, 300_001), dtype=np.uint8)
    (tmp_path / "srv").mkdir()
    np.save(tmp_path / "srv" / "large.npy", large)
    with h5py.File(tmp_path / "srv" / "large.h5", "w") as file:
        file.create_dataset("large", data=large, chunks=(7, 300_001))
    with folder_server(tmp_path / "srv") as server:
        for name in ("large.npy", "large.h5"):
            server.sent = 0
            made = cachetool.convert(f"{server.url}/{name}", to="hdf5", out=tmp_path / name, workers=1)
            assert made.samples == 70
            assert large.nbytes <= server.sent <= 1.2 * large.nbytes, name


def test_a_folder_with_a_file_like_name_is_read_as_a_folder(place: Path, web: Http) -> None:
    assert len(everything(f"{web.url}/folder.lmdb", value_format="npy")) == 100
    assert len(everything(f"{web.url}/folder.lmdb/", value_format="npy")) == 100


def test_a_file_without_an_extension_is_recognised_by_its_first_bytes(place: Path, tmp_path: Path) -> None:
    (tmp_path / "srv").mkdir()
    for name in ("x.npy", "a.h5", "a.tar", "lone.tfrecord"):
        (tmp_path / "srv" / name.partition(".")[2]).write_bytes((place / name).read_bytes())
    with folder_server(tmp_path / "srv", index="json") as server:
        for path in (tmp_path / "srv").iterdir():
            for where in (path, f"{server.url}/{path.name}"):
                assert len(everything(where)) == (37 if path.name == "tfrecord" else 100)


# --- the whole command ----------------------------------------------------------------------------------------------


def test_a_url_is_converted_to_plain_files_and_leaves_no_other_files(place: Path, web: Http, tmp_path: Path) -> None:
    url = web.url.replace("http://", "http://user:CANARY@")
    expected = cachetool.convert(place / "x.npy", to="hdf5", out=tmp_path / "expected", workers=1)
    steps = []
    for name in ("x.npy?token=CANARY", "objects/"):
        out = tmp_path / f"{name[0]}-out"
        found = cachetool.convert(f"{url}/{name}", to="hdf5", out=out, workers=1, verify=True, progress=steps.append)
        assert (found.samples, found.digest == expected.digest) == (100, name != "objects/")
    assert sorted(os.listdir(tmp_path)) == ["expected", "o-out", "x-out"]
    assert not any(b"CANARY" in path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    assert {step.phase for step in steps} <= {"list", "convert"}


def test_a_missing_url_is_one_line_and_exit_code_3(web: Http, tmp_path: Path) -> None:
    line = ["convert", f"{web.url}/nothing.zarr?sig=CANARY", "--to", "lmdb", "--out", tmp_path / "out"]
    ran = run_command(*line, folder=tmp_path)

    assert (ran.returncode, ran.stdout) == (3, "")
    assert ran.stderr.startswith("error: ")
    assert ran.stderr.count("\n") == 1
    assert "nothing" in ran.stderr
    assert "CANARY" not in ran.stderr
    assert os.listdir(tmp_path) == []


def test_an_error_in_a_remote_file_names_it(place: Path, tmp_path: Path) -> None:
    (tmp_path / "srv").mkdir()
    (tmp_path / "srv" / "bad.h5").write_bytes((place / "a.h5").read_bytes()[:2500])
    with folder_server(tmp_path / "srv") as server, pytest.raises(BadObject) as told:
        cachetool.convert(f"{server.url}/bad.h5", to="lmdb", out=tmp_path / "out")

    assert "bad.h5" in str(told.value)
    assert str(tmp_path) not in str(told.value)
    assert os.listdir(tmp_path) == ["srv"]


def test_a_file_url_is_a_path(place: Path, tmp_path: Path) -> None:
    result = cachetool.convert(f"file://{place}/x.npy", to="lmdb", out=tmp_path / "out", workers=1)
    assert result.samples == 100
    with pytest.raises(UsageError, match="a file URL is"):
        cachetool.convert("file://elsewhere/x.npy", to="lmdb", out=tmp_path / "other")


@pytest.mark.parametrize("name", ["x.npy", "objects/"])
def test_a_killed_conversion_of_a_url_continues_with_its_complete_parts(web: Http, tmp_path: Path, name: str) -> None:
    """The listing of the killed conversion is removed."""
    out, url = tmp_path / "out", f"{web.url}/{name}"
    killed = subprocess.run([sys.executable, KILLED, url, out, "720"], check=False)
    assert killed.returncode == -signal.SIGKILL
    left = sorted(os.listdir(tmp_path))
    assert len(left) == 2
    assert left[0].startswith(".out.input-")
    (aside,) = tmp_path.glob(".out.partial-*")
    stamps = {path.name: path.stat().st_mtime_ns for path in (aside / "made").glob("part-*.h5")}

    result = cachetool.convert(url, to="hdf5", out=out, shard_size=720, workers=1)
    assert result.samples == 100
    assert os.listdir(tmp_path) == ["out"]
    for part in ("part-00000.h5", "part-00001.h5"):
        assert (out / part).stat().st_mtime_ns == stamps[part], "a whole part is not made again"


@pytest.mark.parametrize("name", ["nothing.h5", "nothing/", "nothing"])
def test_a_missing_object_is_reported_in_the_terms_of_its_store(web: Http, tmp_path: Path, name: str) -> None:
    with pytest.raises(NotFound, match=r"nothing.*not found"):
        everything(f"{web.url}/{name}")


def test_temporary_files_of_a_killed_process_are_removed_by_the_next_one(tmp_path: Path) -> None:
    """Temporary files of other programs stay."""
    code = "import os, sys, pathlib, cachetool.proc.scratch as s; held = s.scratch(pathlib.Path(sys.argv[1]), 'a-');"
    subprocess.run([sys.executable, "-c", code + "held.__enter__(); os._exit(0)", tmp_path], check=True)
    (tmp_path / "b-1").mkdir()
    left = os.listdir(tmp_path)
    with scratch(tmp_path, "a-") as made, scratch(tmp_path, "a-") as another:
        assert sorted(os.listdir(tmp_path)) == sorted([made.name, another.name, "b-1"])
    assert len(left) == 2
    assert os.listdir(tmp_path) == ["b-1"]


@pytest.mark.parametrize(("url", "meant"), [("file:/no/x", "file:///no/x"), ("s3:/b/x", "s3://b/x")])
def test_a_url_with_a_missing_slash_is_refused_with_the_right_url(url: str, meant: str) -> None:
    with pytest.raises(UsageError, match=f"did you mean {meant} "):
        check_place(url)


@pytest.mark.parametrize("web", ["http", "HTTP", "sftp", "SFTP"])
def test_a_name_with_a_percent_escape_is_the_same_file_for_pull_and_convert(tmp_path: Path, web: str) -> None:
    folder, home = tmp_path / "srv" / "my d", tmp_path / "home"
    folder.mkdir(parents=True)
    home.mkdir()
    np.save(folder / "x y.npy", X)
    serving: Any = folder_server(folder.parent) if web.lower() == "http" else sftp_server(folder.parent, home)
    with serving as server, pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOME", str(home))
        url = f"{server if isinstance(server, str) else server.url}/my%20d/x%20y.npy"
        url = url.replace(url.partition(":")[0], web, 1)
        assert len(everything(url)) == 100
        with cachetool.open_cache(tmp_path / "cache", max_size="20MB") as cache:
            assert cache.pull(url, samples=3, workers=1).samples == 3
