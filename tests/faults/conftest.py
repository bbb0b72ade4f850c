"""One process that starts the children of all fault tests, and a way to record how often a fault was tried."""

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
    """Return a function: ``figures(kills=500)`` stores a count in the report, and in the table at the end of a soak."""

    def note(**counts: object) -> None:
        for name, count in counts.items():
            record_property(name.replace("_", " "), count)

    return note
