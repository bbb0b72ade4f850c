"""ignite: an Engine asks for the length once, and keeps one iterator over epochs of that many iterations.

So it trains complete passes for any length of its epochs, and cuts only the pass in which ``run`` ends. ``epochs_of``
continues that pass, also in a second ``run``. ignite's own state counts iterations of one length. If each epoch has
another length, its state does not know the position, so resuming needs ``epochs_of``.
"""

from __future__ import annotations

import pytest

from tests.trainers.conftest import Cell
from tests.trainers.growing import FIRST, LAST

pytestmark = pytest.mark.trainers


@pytest.mark.first
def test_epochs_of_a_fixed_length_train_every_pass_completely_and_end_a_schedule(cell: Cell) -> None:
    trained = cell("ignite_run", "fixed")
    assert [sum(epoch) for epoch in trained.epochs()] == [160, 160, 160, 160]
    assert trained.passes() == [(96, 96, 0), (144, 144, 0), (144, 144, 0), (192, 192, 0), (240, 64, 0)]
    assert trained.ranks[0]["lr"] == pytest.approx(0.0, abs=1e-9)
    assert trained.warnings == []


def test_the_loader_itself_is_trained_in_complete_passes_except_the_last(cell: Cell) -> None:
    """24 iterations: passes of 6 and 9 batches, and 9 of the 12 batches of the third, whose snapshot was taken in the
    middle of the second.
    """
    trained = cell("ignite_run", "grow")
    assert trained.passes() == [(96, 96, 0), (144, 144, 0), (192, 144, 0)]
    assert trained.warnings == []


def test_a_run_that_ends_at_the_kept_length_reports_the_cut(cell: Cell) -> None:
    trained = cell("ignite_run", "cut")
    assert trained.passes() == [(96, 96, 0), (144, 96, 0)]
    assert len(trained.warnings) == 1
    assert "epoch 1 ended after 6 of 9 batches, " in trained.warnings[0]


def test_a_handler_can_make_each_epoch_one_pass(cell: Cell) -> None:
    trained = cell("ignite_run", "passes")
    assert trained.epochs() == [(96, 0), (144, 0), (192, 0), (240, 0)]
    assert trained.passes() == [(96, 96, 0), (144, 144, 0), (192, 192, 0), (240, 240, 0)]
    assert trained.warnings == []


def test_a_run_left_in_the_middle_is_resumed(cell: Cell) -> None:
    """The run is left after 5 of 15 batches of the pass. In all 40 steps: 15, 15 and 10 of 15 batches."""
    trained = cell("ignite_run", "resume")
    assert trained.passes() == [(LAST, LAST, 0), (LAST, LAST, 0), (LAST, 160, 0)]
    assert trained.ranks[0]["iterations"] == 40
    assert trained.warnings == []


def test_a_pass_resumes_with_its_samples_after_the_cache_grew(cell: Cell) -> None:
    """The run is left after 13 steps: 9 batches of 144 samples, and 4 of 9 of the next pass, which then resumes with
    its samples.
    """
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
    """The fields pass through convert_tensor and prepare_batch of a supervised trainer. The script compares them in
    each step.
    """
    trained = cell("ignite_run", "fields")
    assert trained.epochs() == [(FIRST, 0)]
    assert trained.warnings == []


def test_a_run_terminated_in_the_middle_is_not_reported_as_a_cut_epoch(cell: Cell) -> None:
    trained = cell("ignite_run", "stop")
    assert trained.passes() == [(96, 96, 0), (144, 48, 0)]
    assert trained.warnings == []


def test_a_second_run_continues_the_pass_in_which_the_first_one_ended(cell: Cell) -> None:
    """The passes of two runs of 20 steps are those of one run of 40."""
    trained = cell("ignite_run", "twice")
    assert trained.passes() == [(96, 96, 0), (144, 144, 0), (144, 144, 0), (192, 192, 0), (240, 64, 0)]
    assert trained.warnings == []
