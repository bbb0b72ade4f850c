"""One process for all fault tests that starts their children, and a way to say how often a fault was tried."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.faults.tracing import Children

Figures = Callable[..., None]


@pytest.fixture(scope="session")
def children() -> Iterator[Children]:
    with Children() as started:
        yield started


@pytest.fixture
def figures(record_property: Callable[[str, object], None]) -> Figures:
    """``figures(kills=500)``: kept in the report, and shown in the table at the end of a soak."""

    def note(**counts: object) -> None:
        for name, count in counts.items():
            record_property(name.replace("_", " "), count)

    return note
