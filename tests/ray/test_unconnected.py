"""Without a cluster: ``cachetool.loaders.ray`` before a connection, and the Ray cluster that an address selects."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from cachetool.cluster import connect as raylink
from cachetool.core.errors import Unreachable, UsageError
from cachetool.loaders.ray import batches


def test_a_program_without_a_connection_is_told_how_to_connect() -> None:
    with pytest.raises(UsageError, match=r"Ray is not connected; call ray\.init"):
        batches("cache", batch_size=5)


def test_an_address_that_never_answers_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(raylink, "_PATIENCE", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        with pytest.raises(Unreachable, match=rf"^no Ray cluster answers at {address}: timed out; "):
            raylink._join(address)


def frame(kind: int, flags: int, stream: int, body: bytes) -> bytes:
    return len(body).to_bytes(3) + bytes((kind, flags)) + stream.to_bytes(4) + body


SETTINGS = frame(4, 0, 0, b"")
NOBODY = "is not a Ray cluster"


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (frame(1, 4, 1, b"\x88") + frame(0, 0, 1, b"\0\0\0\0\x02ok"), None),  # a head node
        (frame(8, 0, 0, bytes(4)) + frame(1, 5, 1, b"\x88\x40\x0bgrpc-status\x0216"), None),  # requires a token
        (frame(1, 5, 1, b"\x88\x40\x0bgrpc-status\x0212"), NOBODY),  # another server of a cluster
        (frame(1, 5, 1, b"\x88\x40\x88\x9a\xca\xc8\xb2\x12\x34\xda\x8f\x82\x08\x9f"), NOBODY),  # the same, compressed
        (frame(1, 4, 1, b"\x8d") + frame(0, 1, 1, b"<html>not found"), NOBODY),
        (frame(7, 0, 0, bytes(8)), NOBODY),
        (frame(3, 0, 1, bytes(4)), NOBODY),
        (b"", NOBODY),
    ],
)
def test_a_server_that_is_no_ray_head_node_is_recognised_by_its_first_answer(answer: bytes, says: str | None) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            line, _ = server.accept()
            with line:
                for byte in SETTINGS:  # in the smallest possible pieces
                    line.sendall(bytes((byte,)))
                line.recv(65536)
                line.sendall(answer)
                line.shutdown(socket.SHUT_WR)
                while line.recv(65536):  # closing with unread bytes would reset the connection
                    pass

        with ThreadPoolExecutor() as pool:
            served = pool.submit(serve)
            refused = contextlib.nullcontext() if says is None else pytest.raises(Unreachable, match=says)
            with refused:
                raylink._greet(f"127.0.0.1:{server.getsockname()[1]}")
            served.result()


def test_for_a_head_node_with_tls_only_the_port_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_USE_TLS", "1")
    with socket.create_server(("127.0.0.1", 0)) as server:
        raylink._greet(f"127.0.0.1:{server.getsockname()[1]}")


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> pytest.MonkeyPatch:
    """Simulate a machine without any Ray, whose address file is ``tmp_path/file``."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(raylink, "_raylets", lambda: (set(), set()))
    monkeypatch.setattr("ray._common.utils.get_ray_address_file", lambda folder: str(tmp_path / "file"))
    return monkeypatch


@pytest.mark.parametrize("address", [None, "auto"])
def test_without_a_running_ray_one_is_started(alone: pytest.MonkeyPatch, address: str | None) -> None:
    begun: list[str] = []
    alone.setattr(raylink, "_started", lambda: contextlib.nullcontext(begun.append("local")))
    alone.setattr("ray.shutdown", lambda: None)
    with raylink.opened(address):
        pass
    assert begun == ["local"]


def test_of_several_rays_of_this_user_the_newest_is_used_silently(
    alone: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    alone.setattr(raylink, "_raylets", lambda: ({"127.0.0.1:1", "127.0.0.1:2", "127.0.0.1:3"}, {"127.0.0.1:4"}))
    (tmp_path / "file").write_text("127.0.0.1:2\n")
    alone.setattr(raylink, "_greet", lambda address: None)
    said: list[str] = []

    assert raylink._running(said.append) == "127.0.0.1:2"
    assert said == []
    assert capfd.readouterr() == ("", "")
    assert not caplog.records


# -- what another user may have made -----------------------------------------------------------------------------------


@pytest.fixture
def bait() -> Iterator[tuple[str, Callable[[], bool]]]:
    """Return an address that answers, and a function that returns True if a client connected to it."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setblocking(False)

        def taken() -> bool:
            try:
                server.accept()[0].close()
            except BlockingIOError:
                return False
            return True

        yield f"127.0.0.1:{server.getsockname()[1]}", taken


def _owned(path: Path) -> None:
    os.chown(path, 65534, 65534)


def _writable(path: Path) -> None:
    path.chmod(0o666)


def _link(path: Path) -> None:
    path.rename(path.with_name("theirs"))
    path.symlink_to(path.with_name("theirs"))


def _twice(path: Path) -> None:
    os.link(path, path.with_name("again"))


def _pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


@pytest.mark.parametrize("made", [_owned, _writable, _link, _twice, _pipe, None])
def test_the_address_file_alone_causes_no_connection(
    alone: pytest.MonkeyPatch, tmp_path: Path, bait: tuple[str, Callable[[], bool]], made: Callable[[Path], None] | None
) -> None:
    """An address in the file is not used, whoever wrote it, because this user runs no node."""
    address, taken = bait
    file = tmp_path / "file"
    file.write_text(address)
    file.chmod(0o644)
    if made is _owned and os.geteuid():
        pytest.skip("only root gives a file to somebody else")
    if made is not None:
        made(file)
    said: list[str] = []

    assert raylink._running(said.append) == "local"
    assert not taken()
    if made in (_owned, _writable, _twice):
        (line,) = said
        assert line.startswith(f"the Ray cluster at {address} is not used")
        assert line.endswith("--address HOST:PORT")
    else:
        assert said == []


def test_a_node_process_of_another_user_is_not_used(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, bait: tuple[str, Callable[[], bool]]
) -> None:
    address, taken = bait
    if os.geteuid():
        pytest.skip("only root starts a process of somebody else")
    monkeypatch.setattr("ray._common.utils.get_ray_address_file", lambda folder: str(tmp_path / "none"))
    command = ["raylet", "-c", "import sys; print(1, flush=True); sys.stdin.read()", f"--gcs-address={address}"]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    python = Path("/usr/bin/python3")
    if not python.exists():
        pytest.skip("no Python here that every user may run")
    with subprocess.Popen(command, executable=python, user=65534, cwd="/", env={}, **pipes) as theirs:
        assert theirs.stdout is not None
        theirs.stdout.readline()
        own, others = raylink._raylets()
        monkeypatch.setattr(raylink, "_raylets", lambda: (set(), others))  # other tests may run a cluster
        said: list[str] = []
        place = raylink._running(said.append)
        theirs.communicate()

    assert address not in own
    assert address in others
    assert place == "local"
    assert len(said) == 1
    assert not taken()


def test_a_line_break_in_the_address_file_forges_no_line_of_output(alone: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"1.2.3.4:5\nerror: \x1b[2J" + b"x" * 10**6)
    (tmp_path / "file").chmod(0o666)
    said: list[str] = []
    raylink._running(said.append)

    assert len(said) == 1
    assert len(said[0]) < 300
    assert "\n" not in said[0]
    assert "\x1b" not in said[0]


LOCAL = """
import json, os, pathlib, ray
from cachetool.cluster import connect as raylink

def listening():
    inodes = {}
    for table in ("tcp", "tcp6"):
        for line in pathlib.Path("/proc/net", table).read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == "0A":
                inodes[words[9]] = words[1]
    found = {}
    for process in pathlib.Path("/proc").glob("[0-9]*"):
        try:
            of_ours = str(folder) in (process / "cmdline").read_text() or os.getpid() == int(process.name)
            of_ours = of_ours or os.environ["RAY_AUTH_TOKEN"] in (process / "environ").read_text()
            names = [os.readlink(fd) for fd in (process / "fd").iterdir()] if of_ours else []
        except OSError:
            continue
        for name in names:
            if name.startswith("socket:[") and name[8:-1] in inodes:
                found[inodes[name[8:-1]]] = process.name
    return found

before = dict(os.environ)
with raylink.opened("local"):
    folder = pathlib.Path(ray._private.worker._global_node.get_temp_dir_path()).parent
    sockets = listening()
    told = {
        "sockets": list(sockets), "processes": len(set(sockets.values())), "mode": oct(folder.stat().st_mode & 0o777),
        "token": len(os.environ["RAY_AUTH_TOKEN"]), "followed": str(folder) in str(raylink._raylets()),
        "own": [each for each in raylink._raylets()[0] if each == ray.get_runtime_context().gcs_address],
        "answer": ray.get(ray.remote(lambda: 7).remote()),
    }
told["left"] = folder.exists()
told["environment"] = [n for n in os.environ if n.startswith("RAY_AUTH") and os.environ[n] != before.get(n)]
print(json.dumps(told))
"""


def test_a_ray_started_here_accepts_only_this_user_on_this_machine() -> None:
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(
        [sys.executable, "-c", LOCAL], capture_output=True, text=True, timeout=240, check=False, env=environment
    )
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout.splitlines()[-1])

    assert told["processes"] >= 3, told  # the driver, the head's catalog, the node
    loopback = {"0100007F", "0000000000000000FFFF00000100007F", "00000000000000000000000001000000"}
    assert {address.partition(":")[0] for address in told["sockets"]} <= loopback, told
    assert told["mode"] == "0o700"
    assert told["token"] == 64
    assert told["answer"] == 7
    assert told["own"] == []  # another command starts its own Ray, because this one ends with its program
    assert not told["left"]
    assert told["environment"] == []
