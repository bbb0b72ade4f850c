"""SFTP: whom it trusts, what it offers, and that a broken connection is made anew."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path

import pytest

from cachetool.errors import AccessDenied, MissingExtra, Unreachable, UsageError
from cachetool.stores import Limits, open_store
from tests.servers import free_port, sftp_server

QUICK = Limits(connect=2, silence=2, retry=1)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)
    return tmp_path / "home"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "a.npy").write_bytes(b"alpha")
    return tmp_path / "data"


def test_a_server_that_known_hosts_does_not_know_is_refused(home: Path, folder: Path) -> None:
    with sftp_server(folder, home) as url, contextlib.closing(open_store(url, limits=QUICK)) as store:
        (home / ".ssh" / "known_hosts").write_text("")
        with pytest.raises(AccessDenied, match=r"known_hosts; connect once with: ssh 127\.0\.0\.1"):
            list(store.list())


def test_a_user_without_a_key_is_refused_in_one_line(home: Path, folder: Path) -> None:
    with sftp_server(folder, home) as url:
        (home / ".ssh" / "id_ed25519").unlink()
        with contextlib.closing(open_store(url.replace("user@", "user:CANARY@"), limits=QUICK)) as store:
            with pytest.raises(AccessDenied, match="takes none of the keys") as caught:
                list(store.list())
            assert "CANARY" not in f"{caught.value}{store.url}"
            assert "\n" not in str(caught.value)


def test_the_configuration_of_ssh_is_respected(home: Path, folder: Path) -> None:
    with sftp_server(folder, home) as url:
        port = url.rpartition(":")[2]
        (home / ".ssh" / "id_ed25519").rename(home / ".ssh" / "another")
        config = f"Host nick\n HostName 127.0.0.1\n Port {port}\n User user\n IdentityFile {home}/.ssh/another\n"
        (home / ".ssh" / "config").write_text(config)
        with contextlib.closing(open_store("sftp://nick/", limits=QUICK)) as store:
            assert [item.key for page in store.list() for item in page] == ["a.npy"]


def test_a_connection_that_breaks_is_made_anew(home: Path, folder: Path) -> None:
    with sftp_server(folder, home) as url, contextlib.closing(open_store(url)) as store:
        item = store.find("a.npy")
        store._connection.abort()  # type: ignore[attr-defined]  # as a router does that forgot it

        assert bytes(store.get(item)) == b"alpha"


def test_nobody_there_is_said_within_the_time_given(home: Path) -> None:
    with (
        contextlib.closing(open_store(f"sftp://127.0.0.1:{free_port()}/x", limits=QUICK)) as store,
        pytest.raises(Unreachable, match=r"sftp://127\.0\.0\.1.*times in"),
    ):
        list(store.list())


def test_links_and_hidden_names_are_left_out_and_counted(home: Path, folder: Path) -> None:
    (folder / "link.npy").symlink_to("a.npy")
    (folder / ".hidden").write_bytes(b"")
    with sftp_server(folder, home) as url, contextlib.closing(open_store(url)) as store:
        assert [item.key for page in store.list() for item in page] == ["a.npy"]
        assert store.left_out == {"links": 1, "hidden": 1}


def test_without_asyncssh_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "asyncssh", None)
    with pytest.raises(MissingExtra, match=r"pip install 'cachetool\[sftp\]'"):
        open_store("sftp://host/a")


@pytest.mark.parametrize("url", ["sftp://", "sftp:///path", "sftp://host:port/x", "sftp://host/x?y=z"])
def test_a_url_that_names_no_place_is_a_usage_error(url: str) -> None:
    with pytest.raises(UsageError):
        open_store(url)
