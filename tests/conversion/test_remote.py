"""``convert URL``: whatever lies in a store is read as if it lay here, and nothing of it stays behind."""

from __future__ import annotations

import contextlib
import io
import json
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
from cachetool.api import open_cache
from cachetool.conversion import remote
from cachetool.conversion.inputs import describe, open_input
from cachetool.core.block import Block
from cachetool.core.errors import BadObject, CapacityError, NotFound, UsageError
from cachetool.proc.folders import tree_bytes
from cachetool.proc.scratch import scratch
from cachetool.pull.prepare import check_place
from cachetool.sources.doors import FileOptions
from tests.commands import run_command
from tests.servers import Http, Moto, Scripted, folder_server, hub_server, scripted_server, sftp_server

KILLED = Path(__file__).parent / "scripts" / "killed_convert.py"
X = np.arange(600, dtype=np.float32).reshape(100, 2, 3)


class Silent:
    """A channel to nobody, which remembers."""

    def __init__(self) -> None:
        self.sent: list[dict[str, Any]] = []

    def send(self, message: dict[str, Any]) -> None:
        self.sent.append(message)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every kind of input, each with the same 100 samples."""
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


def everything(description: dict[str, Any]) -> Block:
    source = open_input(description)
    try:
        return Block.concat(list(source.blocks(0, source.samples)))
    finally:
        source.close()


def bring(url: str, folder: Path, **options: Any) -> dict[str, Any]:
    """As the child process does it; through JSON, as it answers."""
    folder.mkdir()
    return json.loads(
        json.dumps(remote.bring(Silent(), url=url, folder=str(folder), options=FileOptions(**options).to_json()))
    )


KINDS = ["x.npy", "both.npz", "a.h5", "many/", "z.zarr", "folder.lmdb", "a.tar", "lone.tfrecord", "ours/", "objects/"]


STORES = ("s3", "sftp", "hf")


@pytest.mark.parametrize(
    ("store", "kind"),
    [
        *(("http", kind) for kind in KINDS),
        *(  # by default every kind in one store more, and all of them in the long runs
            pytest.param(store, kind, marks=[pytest.mark.soak] * (KINDS.index(kind) % 3 != STORES.index(store)))
            for store in STORES
            for kind in KINDS
        ),
    ],
)
def test_what_lies_in_a_store_is_read_as_if_it_lay_here(
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
        found = everything(bring(f"{url}/{kind}", tmp_path / "in", **options))
    expected = everything(describe(place / kind, FileOptions(**options)))

    assert found.schema == expected.schema
    assert [str(found.sample(i)) for i in range(len(found))] == [str(expected.sample(i)) for i in range(len(expected))]
    assert len(found) == (100 if kind != "lone.tfrecord" else 37)


def test_the_same_url_gives_the_same_identity_until_something_changes(tmp_path: Path) -> None:
    (tmp_path / "srv" / "objects").mkdir(parents=True)
    for name in ("x.npy", "objects/a.x.npy", "objects/b.x.npy"):
        np.save(tmp_path / "srv" / name, X[:3])
    found = []
    with folder_server(tmp_path / "srv", index="json") as server:
        for number, name in enumerate((*(f"x.npy?X-Amz-Signature={s}" for s in "ab"), "objects/", "objects")):
            found.append(bring(f"{server.url}/{name}", tmp_path / f"{number}")["identity"])
        other = bring(f"{server.url}/x.npy", tmp_path / "other", fields=("x",))["identity"]
        for name in ("x.npy", "objects/a.x.npy"):
            os.utime(tmp_path / "srv" / name, (1, 1))
        after = [
            bring(f"{server.url}/{name}", tmp_path / f"after-{name[0]}")["identity"] for name in ("x.npy", "objects/")
        ]

    assert found[0] == found[1] != other
    assert found[2] == found[3]
    assert set(after).isdisjoint(found)


def test_a_large_file_comes_whole_by_ranges_and_over_one_connection(
    moto: Moto, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Beyond the size that is fetched at once, from both kinds of store."""
    large = np.random.default_rng(0).integers(0, 255, (70, 300_001), dtype=np.uint8)
    (tmp_path / "srv").mkdir()
    np.save(tmp_path / "srv" / "large.npy", large)
    for name, value in moto.env.items():
        monkeypatch.setenv(name, value)
    moto.put("large", {"large.npy": (tmp_path / "srv" / "large.npy").read_bytes()})
    with folder_server(tmp_path / "srv") as server:
        for number, url in enumerate((server.url, "s3://large")):
            bring(f"{url}/large.npy", tmp_path / f"{number}")
            assert np.array_equal(np.load(tmp_path / f"{number}" / "large.npy"), large)
        assert len(server.requests) == 2


def scripted(body: bytes, *, breaks: int = 0, ranges: bool = True, etag: str = '"a"', sized: bool = True) -> Any:
    """A server of one file that hangs up ``breaks`` times in the middle of it, and may not know ranges."""
    left = [breaks]

    def script(handler: Scripted) -> None:
        asked = handler.headers.get("Range", "")
        start = int(asked.removeprefix("bytes=").partition("-")[0]) if asked and ranges else 0
        part = body[start:] if not asked.endswith("=0-0") else body[:1]
        handler.send_response(206 if asked and ranges else 200)
        handler.send_header("ETag", etag)
        if sized:
            handler.send_header("Content-Length", str(len(part) if ranges else len(body)))
        if asked and ranges:
            handler.send_header("Content-Range", f"bytes {start}-{start + len(part) - 1}/{len(body)}")
        handler.end_headers()
        if left[0] and not asked.endswith("=0-0"):
            left[0] -= 1
            handler.wfile.write(part[: len(part) // 2])
            handler.close_connection = True
            return
        handler.wfile.write(part if ranges else body)
        handler.close_connection = not sized

    return scripted_server(script)


def npy(count: int) -> tuple[Any, bytes]:
    array, out = np.arange(count, dtype=np.int64).reshape(-1, 1000), io.BytesIO()
    np.save(out, array)
    return array, out.getvalue()


@pytest.mark.parametrize("ranges", [True, False])
def test_a_broken_transfer_is_gone_on_with_or_begun_again(tmp_path: Path, ranges: bool) -> None:
    array, body = npy(2_000_000)
    with scripted(body, breaks=2, ranges=ranges) as server:
        bring(f"{server.url}/x.npy", tmp_path / "in")
    asked = [headers.get("Range", "") for _, headers in server.requests]

    assert np.array_equal(np.load(tmp_path / "in" / "x.npy"), array)
    assert len(asked) == 4
    assert asked[0] == "bytes=0-0"
    if ranges:
        half = len(body) // 2
        assert asked[2:] == [f"bytes={half}-", f"bytes={half + (len(body) - half) // 2}-"]


def test_a_body_of_unknown_length_is_refused(tmp_path: Path) -> None:
    """Nobody could tell whether it is complete."""
    with scripted(npy(10_000)[1], sized=False, ranges=False) as server, pytest.raises(BadObject, match="no length"):
        bring(f"{server.url}/x.npy", tmp_path / "in")


def test_what_the_disk_cannot_hold_is_refused_before_it_is_fetched(tmp_path: Path) -> None:
    def script(handler: Scripted) -> None:
        handler.answer(206, b"x", Content_Range=f"bytes 0-0/{10**17}")

    with (
        scripted_server(script) as server,
        pytest.raises(CapacityError, match=r"x\.h5 has .* free") as told,
    ):
        cachetool.convert(f"{server.url}/x.h5", to="lmdb", out=tmp_path / "out")

    assert "--out on another disk" in str(told.value)
    assert len(server.requests) == 1
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("key", ["../x", "a/../b", "a//b", ".", "a\nb", "a/\udcff/b", "x" * 256, "/etc/x"])
def test_a_key_that_could_lead_out_of_the_folder_is_no_name(key: str) -> None:
    with pytest.raises(BadObject, match="cannot be the name of a file"):
        remote._local_name(key)


def test_a_folder_of_two_kinds_of_files_is_refused_as_a_local_one_is(tmp_path: Path) -> None:
    (tmp_path / "srv").mkdir()
    for name in ("a.h5", "b.tar"):
        (tmp_path / "srv" / name).write_bytes(b"x")
    with folder_server(tmp_path / "srv") as server, pytest.raises(UsageError, match="hdf5 and tar files"):
        bring(f"{server.url}/", tmp_path / "in")
    assert len(server.requests) == 1


# --- the whole command ----------------------------------------------------------------------------------------------


def test_a_url_becomes_plain_files_and_leaves_nothing_else(place: Path, web: Http, tmp_path: Path) -> None:
    url = web.url.replace("http://", "http://user:CANARY@")
    expected = cachetool.convert(place / "x.npy", to="hdf5", out=tmp_path / "expected", workers=1)
    steps = []
    for name in ("x.npy?token=CANARY", "objects/"):
        out = tmp_path / f"{name[0]}-out"
        found = cachetool.convert(f"{url}/{name}", to="hdf5", out=out, workers=1, verify=True, progress=steps.append)
        assert (found.samples, found.digest == expected.digest) == (100, name != "objects/")
    assert sorted(os.listdir(tmp_path)) == ["expected", "o-out", "x-out"]
    assert not any(b"CANARY" in path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    assert {"fetch", "list", "convert"} == {step.phase for step in steps}


def test_a_url_goes_into_a_cache_and_is_never_inside_of_it(web: Http, tmp_path: Path) -> None:
    """The cap is of the cache's folder: what is fetched lies beside it, and is gone afterwards."""
    url = f"{web.url}/x.npy?X-Amz-Signature=CANARY"
    with open_cache(tmp_path / "cache", max_size="3MB") as cache:
        found = cache.convert(url, to="tfrecord", shard_size=900, workers=1)
        again = cache.convert(url, to="tfrecord", shard_size=900, workers=1)
        source = cache.stats().sources[0]
    assert (found.samples, again.samples) == (100, 0)
    assert (source["url"], source["coverage"]) == (f"{web.url}/x.npy", 1.0)
    assert os.listdir(tmp_path) == ["cache"]
    assert tree_bytes(tmp_path / "cache") <= 3_000_000
    assert not any(b"CANARY" in path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())


def test_what_is_not_there_is_one_line_and_exit_code_3(web: Http, tmp_path: Path) -> None:
    line = ["convert", f"{web.url}/nothing.zarr?sig=CANARY", "--to", "lmdb", "--out", tmp_path / "out"]
    ran = run_command(*line, folder=tmp_path)

    assert (ran.returncode, ran.stdout) == (3, "")
    assert ran.stderr.startswith("error: ")
    assert ran.stderr.count("\n") == 1
    assert "nothing" in ran.stderr
    assert "CANARY" not in ran.stderr
    assert os.listdir(tmp_path) == []


def test_an_error_in_a_fetched_file_names_its_url(place: Path, tmp_path: Path) -> None:
    (tmp_path / "srv").mkdir()
    (tmp_path / "srv" / "bad.h5").write_bytes((place / "a.h5").read_bytes()[:2500])
    with folder_server(tmp_path / "srv") as server, pytest.raises(BadObject) as told:
        cachetool.convert(f"{server.url}/bad.h5", to="lmdb", out=tmp_path / "out")

    assert f"{server.url}/bad.h5" in str(told.value)
    assert str(tmp_path) not in str(told.value)
    assert os.listdir(tmp_path) == ["srv"]


def test_a_file_url_is_a_path(place: Path, tmp_path: Path) -> None:
    result = cachetool.convert(f"file://{place}/x.npy", to="lmdb", out=tmp_path / "out", workers=1)
    assert result.samples == 100
    with pytest.raises(UsageError, match="a file URL is"):
        cachetool.convert("file://elsewhere/x.npy", to="lmdb", out=tmp_path / "other")


@pytest.mark.parametrize("name", ["x.npy", "objects/"])
def test_a_killed_conversion_of_a_url_goes_on_with_the_parts_that_are_whole(
    web: Http, tmp_path: Path, name: str
) -> None:
    """And what the killed one had fetched is swept."""
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


def test_a_folder_that_another_conversion_uses_is_not_swept(tmp_path: Path) -> None:
    with remote._folder(tmp_path / "out") as first, remote._folder(tmp_path / "out") as second:
        assert first.is_dir()
        assert second.is_dir()
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("name", ["nothing.h5", "nothing/", "nothing"])
def test_missing_is_told_as_the_store_says_it(web: Http, tmp_path: Path, name: str) -> None:
    with pytest.raises(NotFound, match=r"nothing.*not found"):
        bring(f"{web.url}/{name}", tmp_path / "in")


def test_what_a_killed_process_kept_aside_is_swept_by_the_next(tmp_path: Path) -> None:
    """Of its own kind, and nothing of anybody else."""
    code = "import os, sys, pathlib, cachetool.proc.scratch as s; held = s.scratch(pathlib.Path(sys.argv[1]), 'a-');"
    subprocess.run([sys.executable, "-c", code + "held.__enter__(); os._exit(0)", tmp_path], check=True)
    (tmp_path / "b-1").mkdir()
    left = os.listdir(tmp_path)
    with scratch(tmp_path, "a-") as made, scratch(tmp_path, "a-") as another:
        assert sorted(os.listdir(tmp_path)) == sorted([made.name, another.name, "b-1"])
    assert len(left) == 2
    assert os.listdir(tmp_path) == ["b-1"]


@pytest.mark.parametrize(("url", "meant"), [("file:/no/x", "file:///no/x"), ("s3:/b/x", "s3://b/x")])
def test_a_url_with_a_slash_too_few_is_told_with_those_it_needs(url: str, meant: str) -> None:
    with pytest.raises(UsageError, match=f"did you mean {meant} "):
        check_place(url)


@pytest.mark.parametrize("web", ["http", "HTTP", "sftp", "SFTP"])
def test_a_name_with_an_escape_is_the_same_file_for_pull_and_convert(tmp_path: Path, web: str) -> None:
    folder, home = tmp_path / "srv" / "my d", tmp_path / "home"
    folder.mkdir(parents=True)
    home.mkdir()
    np.save(folder / "x y.npy", X)
    serving: Any = folder_server(folder.parent) if web.lower() == "http" else sftp_server(folder.parent, home)
    with serving as server, pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOME", str(home))
        url = f"{server if isinstance(server, str) else server.url}/my%20d/x%20y.npy"
        url = url.replace(url.partition(":")[0], web, 1)
        assert len(everything(bring(url, tmp_path / "in"))) == 100
        with cachetool.open_cache(tmp_path / "cache", max_size="20MB") as cache:
            assert cache.pull(url, samples=3, workers=1).samples == 3
