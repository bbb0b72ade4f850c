"""SFTP: the trusted servers, the offered keys, and reconnecting after a broken connection."""

from __future__ import annotations

import contextlib
import os
import socket
import socketserver
import stat
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import asyncssh
import pytest

from cachetool.core.errors import AccessDenied, BadObject, MissingExtra, SourceError, Unreachable, UsageError
from cachetool.stores import Limits, Object, open_store
from cachetool.stores import sftp as client
from tests.servers import HOST, free_port, sftp_server

QUICK = Limits(connect=2, silence=2, retry=1)
LARGE = os.urandom(5 * 2**20)
CUT = 5 * 2**19
"""Two and a half times the size of one read."""


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
    """Return a list of the seconds by which the store's clock is ahead; pauses are added."""
    ahead: list[float] = []

    class Clock:
        monotonic = staticmethod(lambda: time.monotonic() + sum(ahead))
        sleep = staticmethod(ahead.append)

    monkeypatch.setattr(client, "time", Clock)
    return ahead


@pytest.mark.parametrize("known", ["none", "another", "another algorithm"])
def test_a_server_with_an_unknown_key_is_refused_at_once(
    home: Path, folder: Path, known: str, late: list[float]
) -> None:
    """The server may be new, or an impostor. The error has advice for both."""
    with sftp_server(folder, home) as url, contextlib.closing(open_store(url)) as store:
        port = url.rpartition(":")[2]
        kind = {"another": "ssh-ed25519", "another algorithm": "ecdsa-sha2-nistp256"}.get(known)
        key = asyncssh.generate_private_key(kind).export_public_key().decode() if kind else ""
        (home / ".ssh" / "known_hosts").write_text(f"[{HOST}]:{port} {key}" if key else "")
        with pytest.raises(AccessDenied) as caught:
            list(store.list())

    line, otherwise = str(caught.value).splitlines()
    assert line.startswith(f"{store.url}: ")
    assert "~/.ssh/known_hosts" in line
    assert line.endswith(f" connect once with: ssh -p {port} {HOST}")
    assert "the key has changed" in otherwise
    assert late == []


def test_one_known_key_of_several_is_enough(home: Path, folder: Path) -> None:
    """The server has a key of an algorithm that is preferred over that of the known key."""
    with (
        sftp_server(folder, home, more_keys=("ssh-ed448", "ecdsa-sha2-nistp256", "ssh-rsa")) as url,
        contextlib.closing(open_store(url)) as store,
    ):
        assert [item.key for page in store.list() for item in page] == ["a.npy"]


@pytest.mark.usefixtures("late")
def test_a_server_without_a_common_algorithm_is_not_retried_until_the_limit(home: Path, folder: Path) -> None:
    """The server also disconnects. If the client sees that first, the connection counts as lost, and only that is
    retried.
    """
    with sftp_server(folder, home) as url, contextlib.closing(open_store(url)) as store:
        (home / ".ssh" / "config").write_text("Ciphers aes128-cbc\n")
        with pytest.raises(SourceError, match="No matching encryption algorithm") as caught:
            list(store.list())
    assert not isinstance(caught.value, Unreachable)


def test_a_user_without_a_key_is_refused_in_one_line(home: Path, folder: Path) -> None:
    with sftp_server(folder, home) as url:
        (home / ".ssh" / "id_ed25519").unlink()
        with contextlib.closing(open_store(url.replace("user@", "user:CANARY@"), limits=QUICK)) as store:
            with pytest.raises(AccessDenied, match="none of the keys") as caught:
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


def test_a_broken_connection_is_opened_again(home: Path, folder: Path) -> None:
    with sftp_server(folder, home) as url, contextlib.closing(open_store(url)) as store:
        item = store.find("a.npy")
        store._connection.abort()  # type: ignore[attr-defined]  # as a router does that forgot it

        assert bytes(store.get(item)) == b"alpha"


@contextlib.contextmanager
def cutting(url: str, home: Path, cut: Callable[[], None], *, ends: bool = True) -> Iterator[str]:
    """Return another URL for the server at ``url``. Each connection ends after :data:`CUT` bytes with a call of
    ``cut``; without ``ends`` it continues after the call.
    """
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
                self.request.shutdown(socket.SHUT_WR)  # sent bytes still arrive, unlike after close

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


def test_a_long_broken_read_continues_where_it_stopped(home: Path, folder: Path, late: list[float]) -> None:
    """Each connection lasts longer than ``retry``, which only limits the time without progress."""
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


def test_a_broken_read_that_is_too_slow_is_an_error(home: Path, folder: Path, late: list[float]) -> None:
    (folder / "a.npy").write_bytes(LARGE)
    with (
        sftp_server(folder, home) as direct,
        cutting(direct, home, lambda: late.append(20.0)) as url,
        contextlib.closing(open_store(url, limits=Limits(min_rate=2**20))) as store,
        pytest.raises(Unreachable, match="1 times in 2"),
    ):
        store.get(store.find("a.npy"))


@pytest.mark.parametrize("listed", [True, False])
def test_parts_of_two_versions_are_never_combined(home: Path, folder: Path, *, listed: bool) -> None:
    """The file is replaced by one of the same size when the connection breaks. Without an ETag the new file is accepted
    whole.
    """
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
def test_a_file_that_changes_while_it_is_read_is_refused(home: Path, folder: Path, way: str) -> None:
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


def test_a_missing_server_is_an_error_within_the_time_limit(home: Path) -> None:
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
def test_a_url_without_a_host_is_a_usage_error(url: str) -> None:
    with pytest.raises(UsageError):
        open_store(url)


@pytest.mark.parametrize("user", ["us\udcff:CANARY", "us%ff:CANARY", "user:CANARY%ff", "user:CANARY%0a"])
def test_user_and_password_that_cannot_be_sent_are_refused_and_not_shown(user: str) -> None:
    with pytest.raises(UsageError, match="cannot be sent") as caught:
        open_store(f"sftp://{user}@host/e")
    assert "CANARY" not in str(caught.value)


def lying(size: int | None = 0, **lies: object) -> type[asyncssh.SFTPServer]:
    """Return a server that reports a wrong size of each file (by ``size`` bytes more; None: no size), and has these
    other methods.
    """

    def attributes(found: os.stat_result | asyncssh.SFTPAttrs) -> asyncssh.SFTPAttrs:
        about = asyncssh.SFTPAttrs.from_local(found) if isinstance(found, os.stat_result) else found
        if stat.S_ISREG(about.permissions or 0):
            about.size = None if size is None else (about.size or 0) + size
        return about

    class Server(asyncssh.SFTPServer):
        def stat(self, path: bytes) -> asyncssh.SFTPAttrs:
            return attributes(super().stat(path))  # type: ignore[arg-type]

        def fstat(self, file_obj: object) -> asyncssh.SFTPAttrs:
            return attributes(super().fstat(file_obj))  # type: ignore[arg-type]

        async def scandir(self, path: bytes) -> AsyncIterator[asyncssh.SFTPName]:
            async for entry in super().scandir(path):
                yield asyncssh.SFTPName(entry.filename, entry.longname, attributes(entry.attrs))

    return type("Lying", (Server,), lies)


def entries(mode: int, *names: bytes, endless: bool = False) -> Callable[..., AsyncIterator[asyncssh.SFTPName]]:
    """Return a ``scandir`` that lists these names in every folder, repeatedly with ``endless``."""

    async def scandir(self: asyncssh.SFTPServer, path: bytes) -> AsyncIterator[asyncssh.SFTPName]:
        while True:
            for name in names:
                yield asyncssh.SFTPName(name, name, asyncssh.SFTPAttrs(permissions=mode, size=5, mtime=1, atime=1))
            if not endless:
                return

    return scandir


@pytest.mark.parametrize(
    ("server", "error"),
    [
        (lying(10), "5 bytes came instead of 15"),
        (lying(None), "0 bytes came instead of -1"),
        (lying(2**62), "5 bytes came instead of 4611686018427387909"),
        (lying(read=lambda self, file, offset, size: b""), "0 bytes came instead of 5"),
        (lying(read=lambda self, file, offset, size: b"x" * (size + 100)), "105 bytes came instead of 5"),
    ],
    ids=["larger than it is", "without a size", "immense", "that is empty", "that does not end"],
)
def test_a_file_of_a_lying_server_is_refused(
    home: Path, folder: Path, server: type[asyncssh.SFTPServer], error: str
) -> None:
    with sftp_server(folder, home, kind=server) as url, contextlib.closing(open_store(url, limits=QUICK)) as store:
        (item,) = (item for page in store.list() for item in page)
        with pytest.raises(BadObject, match=error):
            store.get(item)


def test_short_reads_are_continued(home: Path, folder: Path) -> None:
    def read(self: asyncssh.SFTPServer, file: object, offset: int, size: int) -> bytes:
        return bytes(asyncssh.SFTPServer.read(self, file, offset, min(size, 3)))  # type: ignore[arg-type]

    server = lying(read=read)
    with sftp_server(folder, home, kind=server) as url, contextlib.closing(open_store(url, limits=QUICK)) as store:
        (item,) = (item for page in store.list() for item in page)
        assert bytes(store.get(item)) == b"alpha"


def test_names_from_a_lying_server_reach_no_other_folder(home: Path, folder: Path) -> None:
    names = (b"../../etc/passwd", b"a/../../b", b"x\0y", b".", b"..", b"ok.npy")
    asked: list[bytes] = []

    def open_(self: asyncssh.SFTPServer, path: bytes, pflags: int, attrs: asyncssh.SFTPAttrs) -> object:
        asked.append(path)
        return asyncssh.SFTPServer.open(self, path, pflags, attrs)

    server = lying(scandir=entries(stat.S_IFREG | 0o644, *names), open=open_)
    with sftp_server(folder, home, kind=server) as url, contextlib.closing(open_store(url, limits=QUICK)) as store:
        items = [item for page in store.list() for item in page]
        for item in items:
            with pytest.raises((BadObject, SourceError)):
                store.get(item)

    assert len(items) == 4
    assert asked == [b"/ok.npy"], "no other was asked for"


@pytest.mark.parametrize(
    ("listing", "error"),
    [
        (entries(stat.S_IFDIR | 0o755, b"d"), "more than 64 deep"),
        (entries(stat.S_IFREG | 0o644, b"f.npy", endless=True), "no answer in time"),
    ],
    ids=["folders in folders", "an endless folder"],
)
def test_an_endless_listing_is_an_error(
    home: Path, folder: Path, listing: Callable[..., AsyncIterator[asyncssh.SFTPName]], error: str
) -> None:
    limits = Limits(connect=2, silence=2, retry=1, listing=2)
    with (
        sftp_server(folder, home, kind=lying(scandir=listing)) as url,
        contextlib.closing(open_store(url, limits=limits)) as store,
        pytest.raises(SourceError, match=error),
    ):
        list(store.list())
