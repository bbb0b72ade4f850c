"""A plain DDP loop under torchrun, with two ranks on one cache.

All ranks read one snapshot per epoch: the one from which the epoch's first batches were built during the previous
epoch. So growth appears one or two epochs later than with one process, and every pass is complete.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.trainers.conftest import Cell, Trained
from tests.trainers.growing import FIRST, LAST

pytestmark = pytest.mark.trainers


def assert_whole(trained: Trained, name: str = "record") -> None:
    """Assert that every pass of the loader trained its snapshot, without a lost or repeated sample."""
    for snapshot, distinct, again in trained.passes(name):
        assert (distinct, again) == (snapshot, 0)


def assert_grew(trained: Trained, name: str = "record") -> None:
    """Assert also that later passes have more samples, and none has fewer than the previous one."""
    assert_whole(trained, name)
    snapshots = [snapshot for snapshot, _, _ in trained.passes(name)]
    assert snapshots == sorted(snapshots)
    assert snapshots[0] < snapshots[-1]


@pytest.mark.first
def test_every_epoch_trains_the_complete_snapshot_while_the_cache_grows(cell: Cell) -> None:
    trained = cell("ddp_loop", "grow", ranks=2)
    assert_grew(trained)
    assert trained.epochs()[0] == (FIRST, 0)
    assert len(trained.epochs()) == 4
    assert [len(row["epochs"]["0"]["ids"]) for row in trained.ranks] == [48, 48]
    assert trained.warnings == []


def test_an_epoch_left_in_the_middle_resumes(cell: Cell) -> None:
    before = cell("ddp_loop", "leave", ranks=2)
    assert before.epochs() == [(LAST, 0), (90, 0)]  # 3 of 8 steps
    after = cell("ddp_loop", "resume", ranks=2)
    assert [row["len"] for row in after.ranks] == [8, 8]
    assert after.epochs() == [(150, 0), (LAST, 0), (LAST, 0)]
    assert together(before, after, 1) == (LAST, 0)
    assert before.warnings == after.warnings == []


def test_an_epoch_resumes_with_its_samples_after_the_cache_grew(cell: Cell) -> None:
    before = cell("ddp_loop", "leave-growing", ranks=2)
    assert before.epochs() == [(144, 0), (60, 0)]  # 2 of 5 steps
    after = cell("ddp_loop", "resume", ranks=2)
    assert after.epochs() == [(84, 0), (LAST, 0), (LAST, 0)]
    assert together(before, after, 1) == (144, 0)
    assert before.warnings == after.warnings == []


def test_an_epoch_of_two_ranks_can_be_resumed_by_one(cell: Cell, tmp_path: Path) -> None:
    before = cell("ddp_loop", "leave", ranks=2)
    (tmp_path / "record-1.json").unlink()  # of a rank that no longer exists
    after = cell("ddp_loop", "resume")
    assert after.epochs() == [(150, 0), (LAST, 0), (LAST, 0)]
    assert together(before, after, 1) == (LAST, 0)


def test_an_epoch_of_one_rank_can_be_resumed_by_two(cell: Cell) -> None:
    before = cell("ddp_loop", "leave")
    assert before.epochs() == [(LAST, 0), (48, 0)]
    after = cell("ddp_loop", "resume", ranks=2)
    assert after.epochs() == [(192, 0), (LAST, 0), (LAST, 0)]
    assert together(before, after, 1) == (LAST, 0)


def together(before: Trained, after: Trained, epoch: int) -> tuple[int, int]:
    """Return the distinct samples of an epoch that two jobs trained, and the number of repeated ones."""
    ids = [
        number
        for trained in (before, after)
        for row in trained.ranks
        for number in row["epochs"].get(str(epoch), {"ids": []})["ids"]
    ]
    return len(set(ids)), len(ids) - len(set(ids))


def test_both_sides_of_a_validation_split_grow(cell: Cell) -> None:
    trained = cell("ddp_loop", "validation", ranks=2)
    assert_grew(trained)
    assert_grew(trained, "validated")
    assert not ids_of(trained.ranks) & ids_of(trained.more["validated"])
    assert trained.epochs()[0][0] + trained.epochs("validated")[0][0] >= FIRST
    assert trained.warnings == []


def ids_of(records: list[dict[str, Any]]) -> set[int]:
    """Return all samples of these records."""
    return {number for record in records for row in record["epochs"].values() for number in row["ids"]}


def test_default_fields_arrive_with_their_values(cell: Cell) -> None:
    """Ragged, str, bytes and the key; the script compares them in each step."""
    trained = cell("ddp_loop", "fields", ranks=2)
    assert trained.epochs() == [(FIRST, 0)]
    assert trained.warnings == []


def test_a_loop_left_early_is_not_reported_as_a_cut_epoch(cell: Cell) -> None:
    trained = cell("ddp_loop", "stop", ranks=2)
    assert trained.epochs()[0] == (FIRST, 0)
    assert trained.epochs()[1][1] == 0
    assert trained.warnings == []


def test_a_second_fit_continues_with_the_next_epoch(cell: Cell) -> None:
    trained = cell("ddp_loop", "twice", ranks=2)
    assert len(trained.passes()) == 4
    assert_grew(trained)
    assert trained.warnings == []


def test_a_loader_created_before_the_process_group_finds_its_rank_and_answers_len_on_one_rank(cell: Cell) -> None:
    trained = cell("ddp_loop", "before", ranks=2)
    assert trained.ranks[0]["len"] == 3
    assert [len(row["epochs"]["0"]["ids"]) for row in trained.ranks] == [48, 48]
    assert_grew(trained)


def test_two_processes_without_a_launcher_share_a_run_through_torch_distributeds_store(cell: Cell) -> None:
    trained = cell("ddp_loop", "spawned")
    assert [len(row["epochs"]["0"]["ids"]) for row in trained.ranks] == [48, 48]
    assert_grew(trained)
    assert trained.warnings == []


def test_a_schedule_that_counts_steps_ends_with_the_training(cell: Cell) -> None:
    trained = cell("ddp_loop", "schedule", ranks=2)
    passes = trained.passes()
    assert all((distinct, again) == (snapshot, 0) for snapshot, distinct, again in passes[:-1])
    assert passes[-1][2] == 0
    assert passes[0][0] < passes[-1][0]
    for row in trained.ranks:
        assert row["steps"] == 28
        assert 0 < row["lr"] < 1e-6, "of the last step: that of the end of OneCycle"
