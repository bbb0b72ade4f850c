"""ignite: an Engine asks for the length once, and keeps one iterator from epoch to epoch of so many iterations.

So it trains passes whole however long its epochs are, and cuts only the pass in which ``run`` ends. ``epochs_of`` goes
on there, in a second ``run`` too. Its own state counts iterations of one length: with another length in each epoch it
cannot say where it stands, so resume goes with ``epochs_of``.
"""

from __future__ import annotations

import pytest

from tests.trainers.conftest import Cell
from tests.trainers.growing import FIRST, LAST

pytestmark = pytest.mark.trainers


@pytest.mark.first
def test_epochs_of_a_fixed_length_train_every_pass_whole_and_end_a_schedule(cell: Cell) -> None:
    trained = cell("ignite_run", "fixed")
    assert [sum(epoch) for epoch in trained.epochs()] == [160, 160, 160, 160]
    assert trained.passes() == [(96, 96, 0), (144, 144, 0), (144, 144, 0), (192, 192, 0), (240, 64, 0)]
    assert trained.ranks[0]["lr"] == pytest.approx(0.0, abs=1e-9)
    assert trained.warnings == []


def test_the_loader_itself_is_trained_in_whole_passes_up_to_the_last(cell: Cell) -> None:
    """24 iterations: passes of 6 and 9 batches, and 9 of the 12 of the third, taken in the middle of the second."""
    trained = cell("ignite_run", "grow")
    assert trained.passes() == [(96, 96, 0), (144, 144, 0), (192, 144, 0)]
    assert trained.warnings == []


def test_a_run_that_ends_at_the_length_that_was_kept_says_so(cell: Cell) -> None:
    trained = cell("ignite_run", "cut")
    assert trained.passes() == [(96, 96, 0), (144, 96, 0)]
    assert len(trained.warnings) == 1
    assert "epoch 1 was left after 6 of 9 batches, the length of epoch 0: " in trained.warnings[0]


def test_a_handler_makes_each_epoch_one_pass(cell: Cell) -> None:
    trained = cell("ignite_run", "passes")
    assert trained.epochs() == [(96, 0), (144, 0), (192, 0), (240, 0)]
    assert trained.passes() == [(96, 96, 0), (144, 144, 0), (192, 192, 0), (240, 240, 0)]
    assert trained.warnings == []


def test_a_run_left_in_the_middle_is_gone_on_with(cell: Cell) -> None:
    """Left after 5 of 15 batches of the pass; 40 steps in all: 15, 15 and 10 of 15 batches."""
    trained = cell("ignite_run", "resume")
    assert trained.passes() == [(LAST, LAST, 0), (LAST, LAST, 0), (LAST, 160, 0)]
    assert trained.ranks[0]["iterations"] == 40
    assert trained.warnings == []


def test_a_pass_is_gone_on_with_as_it_was_after_the_cache_grew(cell: Cell) -> None:
    """Left after 13 steps: 9 batches of 144 samples, and 4 of 9 of the next pass, which is then trained as it was."""
    trained = cell("ignite_run", "resume-growing")
    assert trained.passes() == [(144, 144, 0), (144, 144, 0), (LAST, LAST, 0), (LAST, 112, 0)]
    assert trained.ranks[0]["iterations"] == 40
    assert trained.warnings == []


def test_both_sides_of_a_validation_split_grow(cell: Cell) -> None:
    trained = cell("ignite_run", "validation")
    sizes = [train[0] + valid[0] for train, valid in zip(trained.epochs(), trained.epochs("validated"), strict=True)]
    assert trained.epochs() == [(snapshot, 0) for snapshot, _, _ in trained.passes()]
    assert trained.epochs("validated") == [(snapshot, 0) for snapshot, _, _ in trained.passes("validated")]
    assert sizes[0] > FIRST
    assert sizes[-1] == LAST
    assert trained.warnings == []


def test_default_fields_arrive_with_their_values(cell: Cell) -> None:
    """Through convert_tensor and prepare_batch of a supervised trainer; the script compares them in each step."""
    trained = cell("ignite_run", "fields")
    assert trained.epochs() == [(FIRST, 0)]
    assert trained.warnings == []


def test_a_run_that_is_terminated_in_the_middle_is_no_cut_epoch(cell: Cell) -> None:
    trained = cell("ignite_run", "stop")
    assert trained.passes() == [(96, 96, 0), (144, 48, 0)]
    assert trained.warnings == []


def test_a_second_run_goes_on_in_the_pass_where_the_first_one_ended(cell: Cell) -> None:
    """The passes of two runs of 20 steps are those of one run of 40."""
    trained = cell("ignite_run", "twice")
    assert trained.passes() == [(96, 96, 0), (144, 144, 0), (144, 144, 0), (192, 192, 0), (240, 64, 0)]
    assert trained.warnings == []
