"""SFTP: whom it trusts, what it offers, and that a broken connection is made anew."""

from __future__ import annotations

import contextlib
import os
import socket
import socketserver
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import asyncssh
import pytest

from cachetool.errors import AccessDenied, BadObject, MissingExtra, SourceError, Unreachable, UsageError
from cachetool.stores import Limits, Object, open_store
from cachetool.stores import sftp as client
from tests.servers import HOST, free_port, sftp_server

QUICK = Limits(connect=2, silence=2, retry=1)
LARGE = os.urandom(5 * 2**20)
CUT = 5 * 2**19
"""Two parts and a half, of the size in which a file is read."""


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


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Seconds by which the store's clock is ahead; pauses are added."""
    ahead: list[float] = []

    class Clock:
        monotonic = staticmethod(lambda: time.monotonic() + sum(ahead))
        sleep = staticmethod(ahead.append)

    monkeypatch.setattr(client, "time", Clock)
    return ahead


@pytest.mark.parametrize("known", ["none", "another", "another algorithm"])
def test_a_server_whose_key_is_not_known_is_refused_at_once(
    home: Path, folder: Path, known: str, late: list[float]
) -> None:
    """It may be new, or somebody else in its place: what to do is said for both."""
    with sftp_server(folder, home) as url, contextlib.closing(open_store(url)) as store:
        port = url.rpartition(":")[2]
        kind = {"another": "ssh-ed25519", "another algorithm": "ecdsa-sha2-nistp256"}.get(known)
        key = asyncssh.generate_private_key(kind).export_public_key().decode() if kind else ""
        (home / ".ssh" / "known_hosts").write_text(f"[{HOST}]:{port} {key}" if key else "")
        with pytest.raises(AccessDenied) as caught:
            list(store.list())

    assert str(caught.value) == (
        f"{store.url}: the key that {HOST} shows is not in ~/.ssh/known_hosts; if the server is new, connect once with:"
        f" ssh -p {port} {HOST}\n"
        "if it was known, its key was changed, or somebody else answers in its place: ask whoever runs it"
    )
    assert late == []


def test_of_several_keys_of_a_server_one_known_is_enough(home: Path, folder: Path) -> None:
    """The server has a key of an algorithm that is preferred to that of the known one."""
    with (
        sftp_server(folder, home, more_keys=("ssh-ed448", "ecdsa-sha2-nistp256", "ssh-rsa")) as url,
        contextlib.closing(open_store(url)) as store,
    ):
        assert [item.key for page in store.list() for item in page] == ["a.npy"]


@pytest.mark.usefixtures("late")
def test_a_server_with_no_algorithm_in_common_is_not_asked_until_the_limit(home: Path, folder: Path) -> None:
    """It hangs up as well, and where that is seen first, the connection was lost: that alone is tried again."""
    with sftp_server(folder, home) as url, contextlib.closing(open_store(url)) as store:
        (home / ".ssh" / "config").write_text("Ciphers aes128-cbc\n")
        with pytest.raises(SourceError, match="No matching encryption algorithm") as caught:
            list(store.list())
    assert not isinstance(caught.value, Unreachable)


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


@contextlib.contextmanager
def cutting(url: str, home: Path, cut: Callable[[], None], *, ends: bool = True) -> Iterator[str]:
    """Another way to the server at ``url``: each connection ends after :data:`CUT` bytes, with a call of ``cut``;
    without ``ends`` it goes on after the call."""
    behind = int(url.rpartition(":")[2])

    class Cut(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            with socket.create_connection((HOST, behind)) as server, contextlib.suppress(OSError):
                for sock in (server, self.request):
                    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                threading.Thread(target=self.ask, args=(server,), daemon=True).start()
                left = CUT
                while left and (came := server.recv(min(left, 65536))):
                    self.request.sendall(came)
                    left -= len(came)
                if not left:
                    cut()
                while not ends and (came := server.recv(65536)):
                    self.request.sendall(came)
                self.request.shutdown(socket.SHUT_WR)  # what was sent still arrives, unlike after close

        def ask(self, server: socket.socket) -> None:
            with contextlib.suppress(OSError):
                while asked := self.request.recv(65536):
                    server.sendall(asked)

    with socketserver.ThreadingTCPServer((HOST, 0), Cut) as proxy:
        proxy.daemon_threads = True
        thread = threading.Thread(target=proxy.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        port = proxy.server_address[1]
        known = home / ".ssh" / "known_hosts"
        known.write_text(known.read_text().replace(f":{behind}", f":{port}"))
        try:
            yield url.replace(f":{behind}", f":{port}")
        finally:
            proxy.shutdown()
            thread.join()


def test_a_long_read_that_breaks_goes_on_where_it_stopped(home: Path, folder: Path, late: list[float]) -> None:
    """Each connection lasts longer than ``retry``, of which only the time without progress counts."""
    (folder / "a.npy").write_bytes(LARGE)
    cuts: list[int] = []

    def cut() -> None:
        cuts.append(1)
        late.append(20.0)

    with (
        sftp_server(folder, home) as direct,
        cutting(direct, home, cut) as url,
        contextlib.closing(open_store(url)) as store,
    ):
        assert bytes(store.get(store.find("a.npy"))) == LARGE
        assert len(cuts) == 2
        assert bytes(store.get_range(store.find("a.npy"), 100, 2**22)) == LARGE[100 : 100 + 2**22]


def test_a_read_that_breaks_and_is_too_slow_is_given_up(home: Path, folder: Path, late: list[float]) -> None:
    (folder / "a.npy").write_bytes(LARGE)
    with (
        sftp_server(folder, home) as direct,
        cutting(direct, home, lambda: late.append(20.0)) as url,
        contextlib.closing(open_store(url, limits=Limits(min_rate=2**20))) as store,
        pytest.raises(Unreachable, match="1 times in 2"),
    ):
        store.get(store.find("a.npy"))


@pytest.mark.parametrize("listed", [True, False])
def test_parts_of_two_versions_are_never_put_together(home: Path, folder: Path, *, listed: bool) -> None:
    """Replaced by a file of the same size when the connection breaks; without an ETag the new one is as good."""
    (folder / "a.npy").write_bytes(LARGE)
    new = LARGE[::-1]

    def replace() -> None:
        (folder / "b.npy").write_bytes(new)
        os.utime(folder / "b.npy", (10**9, 10**9))
        os.replace(folder / "b.npy", folder / "a.npy")

    with (
        sftp_server(folder, home) as direct,
        cutting(direct, home, replace) as url,
        contextlib.closing(open_store(url)) as store,
    ):
        if listed:
            with pytest.raises(BadObject, match="another ETag"):
                store.get(store.find("a.npy"))
        else:
            assert bytes(store.get(Object("a.npy", len(LARGE)))) == new


@pytest.mark.parametrize("way", ["rewritten", "longer", "shorter"])
def test_a_file_that_is_written_to_while_it_is_read_is_refused(home: Path, folder: Path, way: str) -> None:
    (folder / "a.npy").write_bytes(LARGE)
    os.utime(folder / "a.npy", (10**9, 10**9))

    def write() -> None:
        with open(folder / "a.npy", "rb+") as file:
            if way == "rewritten":
                file.write(LARGE[::-1])
            else:
                file.truncate(len(LARGE) + 1 if way == "longer" else 100)

    with (
        sftp_server(folder, home) as direct,
        cutting(direct, home, write, ends=False) as url,
        contextlib.closing(open_store(url)) as store,
    ):
        item = store.find("a.npy")
        with pytest.raises(BadObject, match="changed since it was listed"):
            store.get(item)


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


@pytest.mark.parametrize("url", ["sftp://", "sftp:///path", "sftp://host:port/x", "sftp://host/x?y=z", "sftp://a..b/e"])
def test_a_url_that_names_no_place_is_a_usage_error(url: str) -> None:
    with pytest.raises(UsageError):
        open_store(url)


@pytest.mark.parametrize("user", ["us\udcff:CANARY", "us%ff:CANARY", "user:CANARY%ff", "user:CANARY%0a"])
def test_user_and_password_that_cannot_be_sent_are_refused_and_not_shown(user: str) -> None:
    with pytest.raises(UsageError, match="cannot be sent") as caught:
        open_store(f"sftp://{user}@host/e")
    assert "CANARY" not in str(caught.value)
