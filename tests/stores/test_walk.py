"""Names that a walk through folders leaves out, on a disk and over SFTP. In a Zarr they are never read as fill
values.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import asyncssh
import numpy as np
import pytest
import zarr

import cachetool
from cachetool.core.errors import BadObject, Unreachable
from cachetool.loaders.numpy import Loader
from cachetool.sources.options import SourceOptions
from cachetool.stores import open_store
from cachetool.stores.base import MAX_NAMED, LeftOut
from tests.servers import sftp_server
from tests.sources.files import open_files

VALUES = np.arange(32, dtype=np.int32).reshape(8, 4) + 1


@pytest.fixture
def place(tmp_path: Path) -> Path:
    (tmp_path / "place").mkdir()
    return tmp_path / "place"


@pytest.fixture(params=["disk", "sftp"])
def url(request: pytest.FixtureRequest, place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    if request.param == "disk":
        yield str(place)
        return
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)
    with sftp_server(place, tmp_path / "home") as server:
        yield f"{server}/"


def ocean(folder: Path, version: int) -> None:
    """Write two arrays in chunks of two rows, one of them in a group."""
    group = zarr.open_group(folder, mode="w", zarr_format=version)  # type: ignore[arg-type]
    for name in ("a", "deep/b"):
        group.create_array(name, shape=(8, 4), chunks=(2, 4), dtype="i4")[...] = VALUES


def to_another_disk(chunk: Path, aside: Path) -> None:
    chunk.rename(aside / "moved")
    chunk.symlink_to(aside / "moved")


def to_nothing(chunk: Path, aside: Path) -> None:
    chunk.rename(aside / "moved")
    chunk.symlink_to(aside / "away")


def to_a_pipe(chunk: Path, aside: Path) -> None:
    chunk.rename(aside / "moved")
    os.mkfifo(chunk)


def test_any_left_out_names_can_be_written_as_json() -> None:
    left_out = LeftOut({"hidden": 2})
    for number in range(MAX_NAMED + 3):
        left_out.add("..." if number == 0 else f"{number}", "links", "a link")
    stored = json.loads(json.dumps([left_out, left_out.named, left_out.more]))
    for copy in (LeftOut(*stored), LeftOut().joined(left_out)):
        assert copy == {"hidden": 2, "links": MAX_NAMED + 3}
        assert copy.listed() == left_out.listed()
        assert copy.listed()[0][0] == copy.listed()[-1][0] == "..."
        assert copy.listed()[-1][1] == "and 3 more"


@pytest.mark.parametrize("odd", [to_another_disk, to_nothing, to_a_pipe])
@pytest.mark.parametrize(
    ("version", "chunk"), [(3, "deep/b/c/2"), (3, "a/c/2/0"), (3, "a/c"), (2, "a/1.0"), (2, "deep/b/3.0")]
)
def test_links_in_place_of_chunks_are_refused(
    version: int, chunk: str, odd: Callable[[Path, Path], None], place: Path, url: str, tmp_path: Path
) -> None:
    ocean(place / "ocean.zarr", version)
    odd(place / "ocean.zarr" / chunk, tmp_path)

    with pytest.raises(BadObject, match=rf"'ocean\.zarr/{chunk}' .*(links|special).*\nreplace it by a regular file"):
        list(open_store(url).list())


def test_a_link_in_a_zarr_is_not_left_out_when_its_metadata_is_unreachable(
    place: Path, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ocean(place / "ocean.zarr", 3)
    to_another_disk(place / "ocean.zarr" / "a" / "c" / "2", tmp_path)
    store = open_store(url)

    def away(*_: object) -> None:
        raise Unreachable("nobody answers")

    monkeypatch.setattr(store, "get_range", away)
    with pytest.raises(Unreachable, match="nobody answers"):
        list(store.list())


@pytest.mark.parametrize("version", [2, 3])
def test_links_that_are_not_chunks_are_left_out(version: int, place: Path, url: str) -> None:
    ocean(place / "run7.zarr", version)
    whole = {item.key for page in open_store(url).list() for item in page}
    (place / "latest.zarr").symlink_to("run7.zarr")
    (place / "run7.zarr" / "a" / "README.md").symlink_to("/nowhere/README.md")
    (place / "run7.zarr" / "b").symlink_to("a")
    (place / "run7.zarr" / "0").symlink_to("a")  # in a group, which has no chunks
    os.mkfifo(place / "pipe")
    store = open_store(url)

    assert {item.key for page in store.list() for item in page} == whole
    assert sum(store.left_out.values()) == 5


def test_links_are_followed_on_request_and_named_otherwise(place: Path, url: str) -> None:
    """Over SFTP a link is followed only on request, because only the server knows its target."""
    (place / "sub").mkdir()
    (place / "sub" / "a.npy").write_bytes(b"abc")
    for name, target in {"ok.npy": "sub/a.npy", "circle.npy": "circle.npy", "gone.npy": "x", "dir.npy": "sub"}.items():
        (place / name).symlink_to(target)
    store = open_store(url, follow_links=True)
    items = {item.key: item for page in store.list() for item in page}

    assert set(items) == {"sub/a.npy", "ok.npy"}
    assert bytes(store.get(items["ok.npy"])) == b"abc"
    assert {name for name, _ in store.left_out.listed()} == {"circle.npy", "gone.npy", "dir.npy"}  # type: ignore[attr-defined]
    store = open_store(url)
    keys = {item.key for page in store.list() for item in page}
    named = {name for name, _ in store.left_out.listed()}  # type: ignore[attr-defined]
    assert keys | named == {"sub/a.npy", "ok.npy", "circle.npy", "gone.npy", "dir.npy"}
    assert not keys & named


def test_a_hidden_folder_without_permission_is_left_out(place: Path, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder may belong to another user: nothing in it is requested, and it counts as not part of a Zarr."""

    def refused(self: asyncssh.SFTPServer, path: bytes) -> None:
        if b".private/" in path:
            raise asyncssh.SFTPPermissionDenied("")
        return stat(self, path)  # type: ignore[return-value]

    stat = asyncssh.SFTPServer.stat
    monkeypatch.setattr(asyncssh.SFTPServer, "stat", refused)
    ocean(place / "run7.zarr", 3)
    for folder in (place, place / "run7.zarr"):
        (folder / ".private").mkdir(mode=0)
    store = open_store(url)

    assert {item.key.partition("/")[0] for page in store.list() for item in page} == {"run7.zarr"}
    assert store.left_out["hidden"] == 2


@pytest.mark.parametrize("version", [2, 3])
def test_arrays_whose_names_begin_with_a_dot_are_pulled(version: int, place: Path, url: str, tmp_path: Path) -> None:
    group = zarr.open_group(place / "x.zarr", mode="w", zarr_format=version)  # type: ignore[arg-type]
    for factor, name in enumerate((".b", "a", ".h/c"), 1):
        group[name] = np.arange(6) * factor
    for hidden in (".git", "x.zarr/.git", ".cache.zarr"):
        (place / hidden).mkdir()
        (place / hidden / "0.0").write_bytes(b"x")
    (place / ".cache.zarr" / "zarr.json").write_text("{}")
    with open_files(place / "x.zarr", SourceOptions(key=False)) as source:
        direct = sorted(source.schema.names)

    with cachetool.open_cache(tmp_path / "c", max_size=20e6) as cache:
        cache.pull(url, all=True, key=False, workers=1)
        with Loader(cache, batch_size=6, shuffle=False, workers=0) as loader:
            [batch] = list(loader)

    assert sorted(batch) == direct == [".b", ".h/c", "a"]
    for factor, name in enumerate((".b", "a", ".h/c"), 1):
        assert sorted(batch[name].tolist()) == [factor * i for i in range(6)]
