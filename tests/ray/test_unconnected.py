"""Without a cluster: ``cachetool.loaders.ray`` that is not connected, and which Ray is meant by an address."""

from __future__ import annotations

import contextlib
import socket
from concurrent.futures import ThreadPoolExecutor

import pytest
from ray._private import services

from cachetool.engines import raylink
from cachetool.errors import Unreachable, UsageError
from cachetool.loaders.ray import batches


def test_a_program_that_is_not_connected_is_told_how() -> None:
    with pytest.raises(UsageError, match=r"Ray is not connected; call ray\.init"):
        batches("cache", batch_size=5)


def test_an_address_that_says_nothing_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(raylink, "_PATIENCE", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        with pytest.raises(Unreachable, match=rf"^no Ray cluster answers at {address}: timed out; "):
            raylink._init(address)


def frame(kind: int, flags: int, stream: int, body: bytes) -> bytes:
    return len(body).to_bytes(3) + bytes((kind, flags)) + stream.to_bytes(4) + body


SETTINGS = frame(4, 0, 0, b"")
NOBODY = "what answers at"


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (frame(1, 4, 1, b"\x88") + frame(0, 0, 1, b"\0\0\0\0\x02ok"), None),  # a head node
        (frame(8, 0, 0, bytes(4)) + frame(1, 5, 1, b"\x88\x40\x0bgrpc-status\x0216"), None),  # it wants a token
        (frame(1, 5, 1, b"\x88\x40\x0bgrpc-status\x0212"), NOBODY),  # another server of a cluster
        (frame(1, 5, 1, b"\x88\x40\x88\x9a\xca\xc8\xb2\x12\x34\xda\x8f\x82\x08\x9f"), NOBODY),  # the same, packed
        (frame(1, 4, 1, b"\x8d") + frame(0, 1, 1, b"<html>not found"), NOBODY),
        (frame(7, 0, 0, bytes(8)), NOBODY),
        (frame(3, 0, 1, bytes(4)), NOBODY),
        (b"", NOBODY),
    ],
)
def test_what_is_no_head_node_of_ray_is_known_by_its_first_answer(answer: bytes, says: str | None) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            line, _ = server.accept()
            with line:
                for byte in SETTINGS:  # in as many pieces as can be
                    line.sendall(bytes((byte,)))
                line.recv(65536)
                line.sendall(answer)
                line.shutdown(socket.SHUT_WR)
                while line.recv(65536):  # closed with some of it unread, the connection would be reset
                    pass

        with ThreadPoolExecutor() as pool:
            served = pool.submit(serve)
            refused = contextlib.nullcontext() if says is None else pytest.raises(Unreachable, match=says)
            with refused:
                raylink._greet(f"127.0.0.1:{server.getsockname()[1]}")
            served.result()


def test_of_a_head_node_with_tls_only_the_port_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_USE_TLS", "1")
    with socket.create_server(("127.0.0.1", 0)) as server:
        raylink._greet(f"127.0.0.1:{server.getsockname()[1]}")


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """No Ray runs on this machine."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(services, "find_gcs_addresses", set)
    monkeypatch.setattr(services, "find_bootstrap_address", lambda folder: None)
    return monkeypatch


@pytest.mark.parametrize("address", [None, "auto"])
def test_where_no_ray_runs_one_is_started(alone: pytest.MonkeyPatch, address: str | None) -> None:
    begun: list[str] = []
    alone.setattr(raylink, "_init", begun.append)
    alone.setattr("ray.get_runtime_context", lambda: type("Here", (), {"get_node_id": lambda self: "here"})())
    alone.setattr("ray.shutdown", lambda: None)
    with raylink.opened(address) as node:
        assert node == "here"
    assert begun == ["local"]


def test_of_several_that_run_one_is_taken_without_a_word(
    alone: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        alone.setattr(services, "find_gcs_addresses", lambda: {f"127.0.0.1:{port}", "127.0.0.1:1"})
        alone.setattr(services, "find_bootstrap_address", lambda folder: f"127.0.0.1:{port}")
        alone.setattr(raylink, "_greet", lambda address: None)
        assert raylink._running().endswith(f":{port}")
    assert capfd.readouterr() == ("", "")
    assert not caplog.records
