"""A folder: the listed and the left-out names, and no read outside the folder."""

from __future__ import annotations

import os
import resource
import shutil
import socket
from pathlib import Path

import pytest

from cachetool.core.errors import AccessDenied, BadObject, NotFound, SourceError, Unreachable
from cachetool.stores import Object, open_store
from cachetool.stores.local import LocalStore, open_local_store


def listed(folder: Path) -> tuple[set[str], dict[str, int]]:
    store = open_local_store(folder)
    keys = {item.key for page in store.list() for item in page}
    return keys, dict(store.left_out)


def test_hidden_names_and_special_files_are_left_out_and_counted(tmp_path: Path) -> None:
    (tmp_path / "a.npy").write_bytes(b"x")
    (tmp_path / ".hidden.npy").write_bytes(b"x")
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "b.npy").write_bytes(b"x")
    os.mkfifo(tmp_path / "pipe.npy")
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(str(tmp_path / "sock.npy"))

        assert listed(tmp_path) == ({"a.npy"}, {"hidden": 2, "special files": 2})


def test_links_are_followed_if_they_stay_inside(tmp_path: Path) -> None:
    inside, outside = tmp_path / "in", tmp_path / "out"
    for folder in (inside, outside, inside / "sub"):
        folder.mkdir()
    (inside / "sub" / "a.npy").write_bytes(b"in")
    (outside / "b.npy").write_bytes(b"out")
    (inside / "ok.npy").symlink_to("sub/a.npy")
    (inside / "leak.npy").symlink_to(outside / "b.npy")
    (inside / "again").symlink_to("sub")
    (inside / "gone.npy").symlink_to("nothing.npy")
    (inside / "loop.npy").symlink_to("loop.npy")

    keys, left_out = listed(inside)

    assert keys == {"sub/a.npy", "ok.npy"}
    assert left_out["links that lead out of the folder"] == 1
    assert left_out["links to folders"] == 1
    assert left_out["broken links"] == 2
    assert bytes(open_local_store(inside).get(Object("ok.npy", 2))) == b"in"


@pytest.mark.parametrize(
    "key", ["../out.npy", "/etc/hostname", "a/../../out.npy", "a//b", "./out.npy", "", "nul\0.npy"]
)
def test_no_key_reads_outside_the_folder(tmp_path: Path, key: str) -> None:
    (tmp_path / "out.npy").write_bytes(b"x")
    folder = tmp_path / "in"
    (folder / "a").mkdir(parents=True)

    with pytest.raises(BadObject, match="not the name of a file below"):
        open_local_store(folder).get(Object(key, 1))


def test_a_link_to_the_outside_in_place_of_a_file_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "secret").write_bytes(b"x")
    folder = tmp_path / "in"
    folder.mkdir()
    (folder / "a.npy").symlink_to(tmp_path / "secret")

    store = open_local_store(folder)
    for take in (store.get, store.opened):
        with pytest.raises(BadObject, match=r"a\.npy"):
            take(Object("a.npy", 1))


def test_a_pipe_or_folder_in_place_of_a_file_is_an_error_and_not_a_hang(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a.npy")
    (tmp_path / "b.npy").mkdir()
    store = open_local_store(tmp_path)

    for key in ("a.npy", "b.npy"):
        for take in (store.get, store.opened):
            with pytest.raises(BadObject, match="not a regular file"):
                take(Object(key, 1))


def test_a_file_that_changes_while_it_is_read_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.npy"
    path.write_bytes(b"1" * 8)
    store = open_local_store(tmp_path)
    (item,) = next(iter(store.list()))
    pread = os.pread

    def slow(fd: int, count: int, start: int) -> bytes:
        found = pread(fd, min(count, 4), start)
        path.write_bytes(b"2" * 8)
        return found

    monkeypatch.setattr(os, "pread", slow)
    with pytest.raises(BadObject, match="changed"):
        store.get(item)


def test_a_file_whose_folder_became_a_file_is_not_found(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"x")

    with pytest.raises(NotFound, match="does not exist any more"):
        open_local_store(tmp_path).get(Object("a/b.npy", 1))


@pytest.mark.parametrize("away", ["empty", "gone"])
def test_an_emptied_folder_is_a_source_error_and_not_a_bad_object(tmp_path: Path, away: str) -> None:
    folder = tmp_path / "mount"
    folder.mkdir()
    (folder / "a.npy").write_bytes(b"x")
    store = open_local_store(folder)
    (item,) = next(iter(store.list()))
    (folder / "a.npy").unlink()
    if away == "gone":
        folder.rmdir()

    with pytest.raises(Unreachable, match="if it is a mount"):
        store.get(item)


def test_running_out_of_descriptors_or_a_lost_mount_is_not_a_bad_object(tmp_path: Path) -> None:
    (tmp_path / "a.npy").write_bytes(b"x")
    store = open_local_store(tmp_path)
    [[item]] = store.list()
    lowest = os.open(os.devnull, os.O_RDONLY)
    os.close(lowest)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)

    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, hard))
    try:
        with pytest.raises(SourceError, match=r"'a\.npy' cannot be opened: too many open files") as caught:
            store.get(item)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))

    assert caught.type is SourceError  # not BadObject, which would skip the file
    assert bytes(store.get(item)) == b"x"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_without_read_permission_is_access_denied(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub").chmod(0)
    (tmp_path / "a.npy").write_bytes(b"x")
    (tmp_path / "a.npy").chmod(0)
    store = open_local_store(tmp_path)

    with pytest.raises(AccessDenied, match=r"a\.npy"):
        store.get(Object("a.npy", 1))
    with pytest.raises(AccessDenied, match="sub"):
        list(store.list())


@pytest.mark.parametrize("folder", ["", "sub"])
def test_a_folder_that_cannot_be_read_is_named_by_its_path(
    tmp_path: Path, folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused = tmp_path / folder
    refused.mkdir(exist_ok=True)
    open_file = os.open

    def refuse(path: str, flags: int) -> int:
        if Path(path) == refused:
            raise PermissionError
        return open_file(path, flags)

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(AccessDenied, match=rf"^folder '{refused}' cannot be read: permission denied$"):
        list(open_local_store(tmp_path).list())


def test_files_are_listed_in_the_order_of_the_bytes_of_their_keys_and_after_any_key(tmp_path: Path) -> None:
    names = [
        b"a/x",
        b"a.x",
        b"a-x",
        b"a0",
        b"a/b/c",
        b"a/b.c",
        b"b/\xff",
        b"b/\xc3\xa9",
        b"b/\xf0\x9f\x98\x80",
        b"c/.h",
        b"z",
    ]
    for name in names:
        path = Path(os.fsdecode(os.fsencode(tmp_path) + b"/" + name))
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"")
    wanted = sorted(name for name in names if name != b"c/.h")
    store = LocalStore(str(tmp_path))

    def keys(after: str | None) -> list[bytes]:
        return [os.fsencode(item.key) for page in store.list_after(after) for item in page]

    assert keys(None) == [os.fsencode(item.key) for page in store.list() for item in page] == wanted
    for after in (b"a", b"a/a", b"a/b", b"b/", b"zz", *wanted):
        assert keys(os.fsdecode(after)) == [name for name in wanted if name > after]


def test_a_folder_that_is_removed_during_the_walk_does_not_end_it(tmp_path: Path) -> None:
    for name in ("a/0", "b/0", "c/0"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_bytes(b"")
    for number in range(1500):
        (tmp_path / "a" / f"{number:04d}").write_bytes(b"")
    pages = LocalStore(str(tmp_path)).list()
    first = next(pages)
    shutil.rmtree(tmp_path / "b")

    assert [item.key for page in pages for item in page][-1] == "c/0"
    assert len(first) >= 1000


def test_names_that_are_not_utf8_are_read_back(tmp_path: Path) -> None:
    name = os.fsencode(tmp_path) + b"/\xff\xfe.npy"
    Path(os.fsdecode(name)).write_bytes(b"x")
    store = open_store(str(tmp_path))

    items = [item for page in store.list() for item in page]

    assert [os.fsencode(item.key) for item in items] == [b"\xff\xfe.npy"]
    assert bytes(store.get(items[0])) == b"x"


def test_a_large_folder_is_listed_in_batches(tmp_path: Path) -> None:
    for number in range(2500):
        (tmp_path / f"{number}.npy").touch()

    pages = list(open_local_store(tmp_path).list())

    assert [len(page) for page in pages] == [1000, 1000, 500]
    assert len({item.key for page in pages for item in page}) == 2500
