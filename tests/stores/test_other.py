"""Schemes that fsspec serves, if it is installed and knows them."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import uuid

import pytest

from cachetool.core.errors import (
    AccessDenied,
    BadObject,
    CacheToolError,
    MissingExtra,
    NotFound,
    Unreachable,
    UsageError,
)
from cachetool.stores import Object, open_store
from cachetool.stores.other import FsspecStore


class Failing:
    """A file system whose every call fails in one way."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def exists(self, _: str) -> bool:
        return True

    def find(self, *_: object, **__: object) -> None:
        raise self.error

    def cat_file(self, *_: object, **__: object) -> bytes:
        raise self.error


def test_without_fsspec_an_unknown_scheme_names_the_package_that_serves_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fsspec", None)

    with pytest.raises(UsageError, match="pip install fsspec"):
        open_store("smb://host/a")


@pytest.mark.parametrize(("url", "module"), [("smb://u:CANARY@h/a", "smbprotocol")])
def test_a_package_that_fsspec_lacks_is_an_error_of_one_line(
    monkeypatch: pytest.MonkeyPatch, url: str, module: str
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    for name in ("fsspec.implementations.sftp", "fsspec.implementations.smb"):
        monkeypatch.delitem(sys.modules, name, raising=False)

    with pytest.raises(MissingExtra, match="not installed") as caught:
        open_store(url)

    assert "CANARY" not in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (FileNotFoundError("x"), NotFound),
        (PermissionError("token=CANARY"), AccessDenied),
        (ConnectionRefusedError("https://u:CANARY@host"), Unreachable),
        (TimeoutError(), Unreachable),
        (RuntimeError("password=CANARY\nand a second line"), CacheToolError),
        (type("AuthenticationException", (Exception,), {})("no"), AccessDenied),
    ],
)
def test_every_exception_of_fsspec_becomes_an_error_of_cachetool(error: Exception, kind: type[CacheToolError]) -> None:
    store = FsspecStore(Failing(error), "/root", "x://host/root")

    for attempt in (lambda: list(store.list()), lambda: store.get(Object("a.npy", 1))):
        with pytest.raises(kind) as caught:
            attempt()
        assert "CANARY" not in str(caught.value)
        assert "\n" not in str(caught.value)


def test_a_body_of_the_wrong_length_is_refused() -> None:
    import fsspec

    system = fsspec.filesystem("memory")
    folder = f"/{uuid.uuid4().hex}"
    system.pipe(f"{folder}/a.npy", b"12345")
    with contextlib.closing(open_store(f"memory:/{folder}")) as store:
        assert bytes(store.get(Object("a.npy", -1))) == b"12345"
        with pytest.raises(BadObject, match=r"a\.npy"):
            store.get(Object("a.npy", 4))


def test_a_forked_child_gets_an_error_and_not_the_connections_of_its_parent() -> None:
    script = """
import os, sys
from cachetool.core.errors import CacheToolError
from cachetool.stores import Object, open_store
store = open_store("memory://a")
item = Object("x", 1)
if os.fork() == 0:
    failed = 0
    for attempt in (lambda: list(store.list()), lambda: store.find("x"), lambda: store.get(item)):
        try:
            attempt()
        except CacheToolError as error:
            failed += "memory://a" in str(error) and "forked" in str(error)
    list(open_store("memory://").list())
    os._exit(failed)
sys.exit(os.waitstatus_to_exitcode(os.wait()[1]))
"""
    done = subprocess.run([sys.executable, "-c", script], timeout=60, check=False)
    assert done.returncode == 3


@pytest.mark.parametrize("marker", ["", "/"])
@pytest.mark.parametrize("root", ["", "a"])
def test_keys_are_relative_to_the_path_with_and_without_a_leading_slash(marker: str, root: str) -> None:
    files = {f"{marker}{name}": name.encode() for name in ("a/1.txt", "a/a/2.txt", "b/1.txt", "top.txt", "xtop.txt")}

    class Plain:
        """A minimal file system: the names that it was created with, and no other methods."""

        def exists(self, path: str) -> bool:
            return True

        def find(self, path: str, *, detail: bool) -> dict[str, dict[str, object]]:
            return {name: {"size": len(data)} for name, data in files.items() if name.startswith(path)}

        def info(self, path: str) -> dict[str, object]:
            return {"size": len(self.cat_file(path))}

        def cat_file(self, path: str, **_: int) -> bytes:
            if path not in files:
                raise FileNotFoundError(path)
            return files[path]

    place = f"{marker}{root}"
    store = FsspecStore(Plain(), place, f"x://{root}")

    found = {item.key: bytes(store.get(item)) for page in store.list() for item in page}

    below = f"{root}/" if root else ""
    expected = {name.removeprefix(marker): data for name, data in files.items()}
    assert found == {key.removeprefix(below): data for key, data in expected.items() if key.startswith(below)}
    assert all(store.find(key).size == len(data) for key, data in found.items())
