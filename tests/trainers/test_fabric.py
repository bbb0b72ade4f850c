"""Fabric: a loop of one's own, in which ``fabric.to_device(batch)`` moves what the Loader gives.

``fabric.setup_dataloaders(loader)`` raises an error of Fabric's own for everything that is no ``DataLoader`` of torch.
The Loader does not need that call: it finds rank and world size itself.
"""

from __future__ import annotations

import pytest

from tests.trainers.conftest import Cell, Trained

pytestmark = pytest.mark.trainers

LAUNCHERS = ["one", "fabric", "torchrun"]
"""One process; two ranks of which ``fabric.launch()`` starts the second; two that torchrun has started."""


def run(cell: Cell, case: str, launcher: str) -> Trained:
    """One cell with any launcher."""
    ranks = 2 if launcher == "torchrun" else 1
    trained = cell("fabric_loop", case, ranks=ranks, arguments=["1" if launcher == "one" else "2"])
    assert len(trained.ranks) == (1 if launcher == "one" else 2)
    assert trained.warnings == []
    return trained


def assert_whole(passes: list[tuple[int, int, int]]) -> None:
    """Every pass trained all samples of its snapshot once, and the last snapshot is larger than the first."""
    assert all(snapshot == distinct and twice == 0 for snapshot, distinct, twice in passes)
    assert passes[-1][0] > passes[0][0]


@pytest.mark.first
def test_every_epoch_trains_the_cache_as_it_has_grown(cell: Cell) -> None:
    trained = run(cell, "grow", "one")

    assert trained.passes() == [(count, count, 0) for count in (96, 144, 192, 240)]


@pytest.mark.parametrize("launcher", LAUNCHERS[1:])
def test_two_ranks_share_every_snapshot(cell: Cell, launcher: str) -> None:
    trained = run(cell, "grow", launcher)

    assert len(trained.passes()) == 4
    assert_whole(trained.passes())


@pytest.mark.parametrize("launcher", LAUNCHERS)
@pytest.mark.parametrize(("case", "snapshot", "first"), [("resume", 240, 80), ("resume_grown", 144, 48)])
def test_a_loader_in_the_state_of_fabric_resumes(
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
def test_fields_of_every_kind_are_moved_as_they_are(cell: Cell, launcher: str) -> None:
    assert run(cell, "fields", launcher).passes() == [(96, 96, 0)]


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_loop_that_is_left_prints_no_line(cell: Cell, launcher: str) -> None:
    first, second = run(cell, "stop", launcher).passes()

    assert first == (96, 96, 0)
    assert second[1:] == (64, 0)


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_second_loop_goes_on_with_whole_epochs(cell: Cell, launcher: str) -> None:
    passes = run(cell, "second_fit", launcher).passes()

    assert passes[1][1:] == (64, 0)
    assert_whole([passes[0], *passes[2:]])


def test_set_up_of_a_loader_is_refused_by_fabric(cell: Cell) -> None:
    """An error of Fabric's own, which nothing outside of Fabric can change."""
    trained = run(cell, "set_up", "one")

    assert "setup_dataloaders" in trained.ranks[0]["message"] or "DataLoader" in trained.ranks[0]["message"]
    assert trained.passes() == [(96, 96, 0)]
