"""One cluster of three nodes, whose start costs half a minute, for all test modules that lose no node."""

from __future__ import annotations

import contextlib
import logging
import signal
from collections.abc import Callable, Iterator

import pytest
import ray

import cachetool.cli.app
from cachetool.cluster import engine as engines
from cachetool.cluster.engine import RayEngine
from tests.cli.conftest import Ran
from tests.ray.nodes import Nodes


@pytest.fixture(scope="session")
def started() -> Iterator[list[Nodes]]:
    """Return the cluster of the previous module, if there is one."""
    found: list[Nodes] = []
    yield found
    for nodes in found:
        nodes.stop()


@pytest.fixture(scope="module")
def cluster(started: list[Nodes]) -> Nodes:
    """Return three nodes on this machine: a (the head, where the driver runs), b and c. Each test finds all of them."""
    if started and started[0].lost:
        started.pop().stop()
    if not started:
        started.append(Nodes())
    return started[0]


@pytest.fixture(scope="module")
def joined(cluster: Nodes) -> Iterator[str]:
    """Make this process a driver on node a and return the address. Commands in this process need not connect again."""
    ray.init(cluster.address, log_to_driver=False, logging_level=logging.ERROR, namespace="cachetool")
    yield cluster.address
    ray.shutdown()


@pytest.fixture(scope="module")
def engine(joined: str) -> Iterator[RayEngine]:
    """Connect for all tests of a module, with agents on the nodes."""
    with engines.connect(joined) as made:
        yield made


@pytest.fixture
def command(
    joined: str, engine: RayEngine, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., Ran]]:
    """Run a command ``--on ray`` in this process. It uses existing agents instead of starting some."""
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setattr(engines, "connect", lambda address, notify=None: contextlib.nullcontext(engine))

    def start(*args: object) -> Ran:
        capfd.readouterr()
        code = cachetool.cli.app.run([*map(str, args), "--on", "ray", "--address", joined])
        captured = capfd.readouterr()
        return Ran(code, captured.out, captured.err)

    before = signal.getsignal(signal.SIGTERM)
    yield start
    signal.signal(signal.SIGTERM, before)
