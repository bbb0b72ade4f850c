"""A loop with Accelerate, with one rank and with two.

``skip_first_batches(loader, n)`` cannot work: it creates a new DataLoader of ``loader.dataset``. A test asserts its
AttributeError; ``register_for_checkpointing(loader)`` serves the same purpose.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.trainers.conftest import Cell, Trained
from tests.trainers.examples import run_example
from tests.trainers.growing import LAST

pytestmark = pytest.mark.trainers

GREW = [(96, 0), (144, 0), (192, 0), (240, 0)]
SIDES = ([65, 101, 131, 166], [43, 61, 74, 74])
TWICE = "cachetool: Accelerate divides the samples of this EpochSampler, rank 0 of 2, among the processes a second time"
RANKS = pytest.mark.parametrize("ranks", [1, 2])


def whole(trained: Trained, name: str = "record") -> list[int]:
    """Return the sizes of the snapshots of all passes. Assert that each pass was complete and no sample repeated."""
    passes = trained.passes(name)
    assert [(distinct, again) for _, distinct, again in passes] == [(snapshot, 0) for snapshot, _, _ in passes]
    return [snapshot for snapshot, _, _ in passes]


@pytest.mark.first
def test_prepare_returns_the_loader_and_every_epoch_trains_on_the_grown_cache(cell: Cell) -> None:
    """Groups of two batches continue across the ends of epochs: 42 batches are 21 updates."""
    trained = cell("accelerate_loop", "grow")
    assert trained.epochs() == GREW
    assert trained.ranks[0]["updates"] == 21
    assert trained.warnings == []


def test_two_ranks_train_every_snapshot_completely(cell: Cell) -> None:
    trained = cell("accelerate_loop", "grow", ranks=2)
    snapshots = whole(trained)
    assert snapshots[0] == 96
    assert snapshots == sorted(snapshots)
    assert snapshots[-1] == LAST
    assert trained.ranks[0]["updates"] == sum(-(-samples // 32) for samples in snapshots) // 2
    assert trained.warnings == []


@RANKS
def test_load_state_resumes_in_the_middle_of_an_epoch(cell: Cell, ranks: int) -> None:
    trained = cell("accelerate_loop", "resume", ranks=ranks)
    assert trained.epochs() == [(LAST, 0)] * 4
    assert trained.ranks[0]["left"] == [1, 15 if ranks == 1 else 8]
    assert trained.ranks[0]["skipped"] == "'Loader' object has no attribute 'dataset'"
    assert trained.warnings == []


@RANKS
def test_load_state_after_growth_resumes_with_the_samples_of_the_epoch(cell: Cell, ranks: int) -> None:
    trained = cell("accelerate_loop", "resume_grown", ranks=ranks)
    assert trained.epochs() == [(192, 0), (192, 0), (240, 0), (240, 0)]
    assert trained.warnings == []


@RANKS
def test_epochs_of_ten_steps_are_registered_and_the_schedule_ends_with_the_training(cell: Cell, ranks: int) -> None:
    trained = cell("accelerate_loop", "fixed", ranks=ranks)
    passes = trained.passes()
    assert all(again == 0 for _, _, again in passes)
    assert all(snapshot == distinct for snapshot, distinct, _ in passes[:-1])
    assert passes[-1][0] == LAST
    rates = trained.ranks[0]["rates"]
    assert len(rates) == 40
    assert rates[-2] > 1e-6
    assert rates[-1] == pytest.approx(0, abs=1e-12)
    assert trained.warnings == []


@RANKS
def test_both_sides_of_a_split_grow(cell: Cell, ranks: int) -> None:
    trained = cell("accelerate_loop", "validate", ranks=ranks)
    if ranks == 1:
        assert trained.epochs() == [(samples, 0) for samples in SIDES[0]]
        assert trained.epochs("validation") == [(samples, 0) for samples in SIDES[1]]
    assert whole(trained)[-1] == SIDES[0][-1]
    assert whole(trained, "validation")[-1] == SIDES[1][-1]
    assert trained.warnings == []


@RANKS
def test_send_to_device_keeps_all_fields_unchanged(cell: Cell, ranks: int) -> None:
    """str, bytes, keys and ragged fields: the script compares their values."""
    trained = cell("accelerate_loop", "all_fields", ranks=ranks)
    assert trained.epochs() == [(96, 0)]
    assert trained.warnings == []


@RANKS
def test_an_epoch_left_with_break_and_a_second_loop_print_no_warning(cell: Cell, ranks: int) -> None:
    """The epoch is left after 4 batches of 16 samples on one rank, or 2 of 15 on each of two: the 144 samples are 9 or
    5 steps.
    """
    trained = cell("accelerate_loop", "stop", ranks=ranks)
    passes = trained.passes()
    assert passes[1] == (144, 64 if ranks == 1 else 60, 0)
    assert all((snapshot, 0) == (distinct, again) for snapshot, distinct, again in passes[:1] + passes[2:])
    assert trained.ranks[0]["left"] == 1
    assert trained.warnings == []


@RANKS
def test_a_sampler_of_all_samples_is_divided_once_while_the_cache_grows(cell: Cell, ranks: int) -> None:
    """Both ranks use the same snapshot, although neither sampler knows of another rank."""
    trained = cell("accelerate_loop", "sampler", ranks=ranks)
    assert trained.epochs() == GREW
    assert trained.warnings == []


def test_a_sampler_of_all_samples_is_divided_once_with_workers(cell: Cell) -> None:
    trained = cell("accelerate_loop", "sampler_workers", ranks=2)
    assert trained.epochs() == GREW
    assert trained.warnings == []


def test_a_sampler_of_half_the_samples_is_divided_twice_and_one_line_reports_it(cell: Cell) -> None:
    trained = cell("accelerate_loop", "sampler_twice", ranks=2)
    assert trained.epochs() == [(48, 0)] * 4
    (line,) = trained.warnings
    assert line.startswith(TWICE)
    assert line.endswith("use EpochSampler(dataset, rank=0, world_size=1)")


def test_a_dataloader_that_is_not_prepared_is_divided_by_its_sampler_without_a_warning(cell: Cell) -> None:
    trained = cell("accelerate_loop", "sampler_unprepared", ranks=2)
    assert trained.epochs() == GREW
    assert trained.warnings == []


def test_ranks_without_a_common_run_are_an_error(cell: Cell) -> None:
    """Otherwise each rank would divide a snapshot of its own."""
    trained = cell("accelerate_loop", "sampler_no_run", ranks=2)
    assert len(trained.ranks) == 2
    assert all("need the same run=NAME" in record["error"] for record in trained.ranks)


@RANKS
def test_the_example_stops_resumes_and_learns(tmp_path: Path, ranks: int) -> None:
    printed = run_example("accelerate_growing_cache.py", tmp_path, ranks=ranks)
    epochs = re.findall(r"epoch (\d): (\d+) held-out samples, accuracy (\d\.\d\d)", printed)
    assert [int(epoch) for epoch, _, _ in epochs] == [0, 1, 2, 3]
    assert int(epochs[0][1]) <= int(epochs[-1][1]) == 356
    assert float(epochs[-1][2]) > 0.85
    assert "stopped in epoch 1 after 5 of" in printed
    assert "going on in epoch 1" in printed
