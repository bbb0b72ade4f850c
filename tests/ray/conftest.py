"""One cluster of three nodes for each module of tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.ray.nodes import Nodes, nodes_abc


@pytest.fixture(scope="module")
def cluster() -> Iterator[Nodes]:
    """Three nodes on this machine: a (the head, where the driver is), b and c. Each test finds all of them."""
    with nodes_abc() as nodes:
        yield nodes
