"""Without a cluster: ``cachetool.loaders.ray`` that is not connected, and which Ray is meant by an address."""

from __future__ import annotations

import socket

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
