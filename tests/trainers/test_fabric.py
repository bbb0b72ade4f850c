"""Fabric: a custom loop in which ``fabric.to_device(batch)`` moves the Loader's batches.

``fabric.setup_dataloaders(loader)`` raises Fabric's own error for everything except torch's ``DataLoader``. The Loader
does not need that call, because it finds rank and world size itself.
"""

from __future__ import annotations

import pytest

from tests.trainers.conftest import Cell, Trained

pytestmark = pytest.mark.trainers

LAUNCHERS = ["one", "fabric", "torchrun"]
"""One process; two ranks of which ``fabric.launch()`` starts the second; two ranks of torchrun."""


def run(cell: Cell, case: str, launcher: str) -> Trained:
    """Run one cell with any launcher."""
    ranks = 2 if launcher == "torchrun" else 1
    trained = cell("fabric_loop", case, ranks=ranks, arguments=["1" if launcher == "one" else "2"])
    assert len(trained.ranks) == (1 if launcher == "one" else 2)
    assert trained.warnings == []
    return trained


def assert_whole(passes: list[tuple[int, int, int]]) -> None:
    """Assert that every pass trained all samples of its snapshot once, and that the last snapshot is larger than the
    first.
    """
    assert all(snapshot == distinct and twice == 0 for snapshot, distinct, twice in passes)
    assert passes[-1][0] > passes[0][0]


@pytest.mark.first
def test_every_epoch_trains_the_cache_as_it_has_grown(cell: Cell) -> None:
    trained = run(cell, "grow", "one")

    assert trained.passes() == [(count, count, 0) for count in (96, 144, 192, 240)]


@pytest.mark.parametrize("launcher", LAUNCHERS[1:])
def test_two_ranks_divide_every_snapshot(cell: Cell, launcher: str) -> None:
    trained = run(cell, "grow", launcher)

    assert len(trained.passes()) == 4
    assert_whole(trained.passes())


@pytest.mark.parametrize("launcher", LAUNCHERS)
@pytest.mark.parametrize(("case", "snapshot", "first"), [("resume", 240, 80), ("resume_grown", 144, 48)])
def test_a_loader_saved_in_fabrics_state_resumes(
    cell: Cell, case: str, snapshot: int, first: int, launcher: str
) -> None:
    trained = run(cell, case, launcher)

    assert trained.passes("before") == [(snapshot, first, 0)]
    assert trained.passes() == [(snapshot, snapshot - first, 0), *[(240, 240, 0)] * 3]
    before, after = (
        {one for record in records for one in record["epochs"]["0"]["ids"]}
        for records in (trained.more["before"], trained.ranks)
    )
    assert len(before) == first
    assert before.isdisjoint(after)


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_validation_split_grows_with_the_cache(cell: Cell, launcher: str) -> None:
    trained = run(cell, "validation", launcher)

    if launcher == "one":
        assert [snapshot for snapshot, _, _ in trained.passes()] == [71, 109, 143, 179]
        assert [snapshot for snapshot, _, _ in trained.passes("validated")] == [35, 49, 61, 61]
    assert_whole(trained.passes())
    assert_whole(trained.passes("validated"))


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_fields_of_every_kind_are_moved_unchanged(cell: Cell, launcher: str) -> None:
    assert run(cell, "fields", launcher).passes() == [(96, 96, 0)]


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_loop_that_is_left_prints_no_warning(cell: Cell, launcher: str) -> None:
    first, second = run(cell, "stop", launcher).passes()

    assert first == (96, 96, 0)
    assert second[1:] == (64, 0)


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_second_loop_continues_with_whole_epochs(cell: Cell, launcher: str) -> None:
    passes = run(cell, "second_fit", launcher).passes()

    assert passes[1][1:] == (64, 0)
    assert_whole([passes[0], *passes[2:]])


def test_fabric_refuses_a_loader_in_setup_dataloaders(cell: Cell) -> None:
    """Fabric raises its own error, which code outside Fabric cannot change."""
    trained = run(cell, "set_up", "one")

    assert "setup_dataloaders" in trained.ranks[0]["message"] or "DataLoader" in trained.ranks[0]["message"]
    assert trained.passes() == [(96, 96, 0)]
