"""One process for all fault tests that starts their children."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.faults.tracing import Children


@pytest.fixture(scope="session")
def children() -> Iterator[Children]:
    with Children() as started:
        yield started
