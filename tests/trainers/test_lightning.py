"""Lightning's Trainer, with one process and with two ranks: every case of the table of trainers.

A resumed run has two records: ``before``, up to the checkpoint, and the run that continues from there.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.trainers.conftest import REPOSITORY, Cell, Trained, completed

pytestmark = pytest.mark.trainers

RANKS = ["ddp", "ddp_fork"]
"""Lightning's own launchers: a script that is started again for each rank, and a fork of the process with the
loader.
"""


def whole(trained: Trained, *names: str) -> list[tuple[int, int, int]]:
    """Return the passes of several runs of one training: samples of the snapshot, distinct ones, repeated ones."""
    records = [record for name in names for record in (trained.more[name] if name != "record" else trained.ranks)]
    return Trained(records_as_one(records), "").passes()


def records_as_one(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Join records under new numbers of epochs, because a resumed epoch is in two records."""
    return [{"epochs": {str(n): row for n, row in enumerate(record["epochs"].values())}} for record in records]


def expected(*samples: int) -> list[tuple[int, int]]:
    """Return epochs with so many samples, none of them repeated."""
    return [(count, 0) for count in samples]


def complete(*samples: int) -> list[tuple[int, int, int]]:
    """Return passes that trained all samples of their snapshots once."""
    return [(count, count, 0) for count in samples]


# -- one process -------------------------------------------------------------------------------------------------------


@pytest.mark.first
def test_every_epoch_trains_the_cache_as_it_has_grown(cell: Cell) -> None:
    trained = cell("pl", "grow")

    assert trained.epochs() == expected(96, 144, 192, 240)
    assert trained.passes() == complete(96, 144, 192, 240)
    assert trained.warnings == []


def test_pytorch_lightning_is_supported_under_its_old_name(cell: Cell) -> None:
    trained = cell("pl", "grow", arguments=["one", "module", "old"])

    assert trained.passes() == complete(96, 144, 192, 240)
    assert trained.warnings == []


def test_growth_between_the_data_setup_and_the_first_step_appears_in_the_next_epoch(cell: Cell) -> None:
    trained = cell("pl", "grow_before_the_first_step")

    passes = trained.passes()
    assert all(snapshot == distinct and twice == 0 for snapshot, distinct, twice in passes)
    assert [snapshot for snapshot, _, _ in passes] == sorted(snapshot for snapshot, _, _ in passes)
    assert passes[-1][0] >= 192
    assert trained.warnings == []


def test_without_the_callback_a_cut_epoch_is_reported_in_one_line(cell: Cell) -> None:
    """Lightning asks for the length once. Only the callback can change that."""
    trained = cell("pl", "grow", arguments=["one", "alone"])

    assert trained.epochs() == expected(96, 96, 96, 96)
    [line] = trained.warnings
    assert line.startswith("cachetool: epoch 1 ended after 6 of 9 batches, ")


@pytest.mark.parametrize("way", ["alone", "with callback"])
def test_a_run_resumed_in_mid_epoch_trains_the_remaining_samples(cell: Cell, way: str) -> None:
    trained = cell("pl", "resume", arguments=["one", way])

    assert trained.epochs("before") == expected(80)
    assert trained.epochs() == expected(160, 240, 240, 240)
    assert whole(trained, "before", "record") == complete(240, 240, 240, 240)
    assert trained.warnings == []


def test_a_run_resumed_in_mid_epoch_by_a_step_counting_trainer_trains_the_remaining_samples(cell: Cell) -> None:
    trained = cell("pl", "resume_steps")

    assert whole(trained, "before", "record") == [*complete(240, 240), (240, 80, 0)]
    assert trained.warnings == []


def test_a_run_resumed_on_a_grown_cache_trains_the_remaining_and_then_all_samples(cell: Cell) -> None:
    trained = cell("pl", "resume_grown")

    assert trained.epochs("before") == expected(48)
    assert trained.epochs() == expected(96, 240, 240, 240)
    assert whole(trained, "before", "record") == complete(144, 240, 240, 240)
    assert trained.warnings == []


def test_a_resumed_run_may_ask_for_the_estimated_steps(cell: Cell) -> None:
    """``configure_optimizers`` makes Lightning set up the data before it restores the states of loaders."""
    trained = cell("pl", "resume_estimated")

    assert trained.epochs("before") == expected(240, 80)
    assert whole(trained, "before", "record") == complete(240, 240, 240, 240)
    assert trained.ranks[0]["estimated"] == 60
    assert trained.warnings == []


def test_a_run_resumed_at_the_end_of_an_epoch_trains_in_another_order(cell: Cell) -> None:
    trained = cell("pl", "resume_at_the_end")

    assert whole(trained, "before", "record") == complete(240, 240, 240)
    [before], [after] = trained.more["before"], trained.ranks
    assert before["epochs"]["0"]["ids"] != after["epochs"]["1"]["ids"]
    assert trained.warnings == []


@pytest.mark.parametrize("case", ["resume_at_the_end_grown", "resume_at_the_last_batch"])
def test_a_run_resumed_after_the_last_batch_trains_the_grown_cache_completely(cell: Cell, case: str) -> None:
    trained = cell("pl", case)

    assert whole(trained, "before", "record") == complete(96, 240, 240)
    assert trained.epochs() == expected(240, 240)
    assert trained.warnings == []


def test_a_checkpoint_of_the_last_validation_of_an_epoch_resumes_with_the_next_epoch(cell: Cell) -> None:
    trained = cell("pl", "resume_after_validation")

    assert whole(trained, "before", "record") == complete(71, 179, 179)
    assert trained.passes("validated")[1:] == complete(61, 61)
    assert trained.warnings == []


@pytest.mark.parametrize(("grown", "samples"), [("grown", [240, 144]), ("same", [96, 96, 96, 96])])
def test_a_trainer_that_counts_steps_resumes_at_the_end_of_an_epoch(cell: Cell, grown: str, samples: list[int]) -> None:
    """Lightning alone trains one batch and leaves the pass, for a grown cache and for an unchanged one."""
    trained = cell("pl", "resume_at_the_end_steps", arguments=["one", grown])

    assert trained.epochs() == expected(*samples)
    assert trained.warnings == []


def test_a_stopped_epoch_continues_when_the_run_is_resumed(cell: Cell) -> None:
    """Lightning alone treats the remaining batches as an epoch of its own, without validation and without a step of
    schedules.
    """
    trained = cell("pl", "resume_stopped")

    assert trained.epochs("before") == expected(60)
    assert whole(trained, "before", "record") == complete(179, 179, 179)
    assert trained.passes("validated") == complete(61, 61, 61)
    rates = trained.ranks[0]["rates"]
    assert [rates.count(rate) for rate in sorted(set(rates), reverse=True)] == [8, 12, 12]
    assert trained.warnings == []


def test_training_with_limited_batches_resumes_at_the_start_of_an_epoch(cell: Cell) -> None:
    trained = cell("pl", "resume_limited")

    assert trained.epochs() == expected(80, 80)
    assert trained.warnings == []


def test_a_validation_split_grows_with_the_cache(cell: Cell) -> None:
    """Validation number 0 is the sanity check of two batches."""
    trained = cell("pl", "validation")

    assert trained.passes() == complete(71, 109, 143, 179)
    assert trained.passes("validated") == complete(25, 35, 49, 61, 61)
    assert trained.warnings == []


def test_each_validation_of_an_epoch_asks_for_its_length(cell: Cell) -> None:
    trained = cell("pl", "validation_twice")

    assert trained.passes() == complete(71, 109, 143)
    assert trained.passes("validated") == complete(25, 35, 35, 49, 49, 61, 61)
    assert trained.warnings == []


def test_fields_of_every_kind_arrive_unchanged_in_the_step(cell: Cell) -> None:
    """Without ``fields=``. The script checks keys, text, bytes and ragged values inside ``training_step``."""
    trained = cell("pl", "fields")

    assert trained.passes() == complete(96, 96)
    assert trained.warnings == []


def test_a_stopped_epoch_prints_no_warning(cell: Cell) -> None:
    """The stop may come exactly after as many batches as the previous epoch had."""
    trained = cell("pl", "stop")

    assert trained.passes() == [(96, 96, 0), (144, 96, 0)]
    assert trained.warnings == []


def test_early_stopping_between_two_validations_prints_no_warning(cell: Cell) -> None:
    trained = cell("pl", "early_stopping")

    assert trained.passes() == [(71, 57, 0)]
    assert trained.warnings == []


@pytest.mark.parametrize("way", ["alone", "with callback"])
def test_limited_batches_print_no_warning(cell: Cell, way: str) -> None:
    trained = cell("pl", "limit", arguments=["one", way])

    assert trained.passes() == [(96, 80, 0), (144, 80, 0), (192, 80, 0)]
    assert trained.warnings == []


def test_a_number_of_steps_prints_no_warning(cell: Cell) -> None:
    trained = cell("pl", "max_steps")

    assert trained.passes() == [(96, 96, 0), (144, 96, 0)]
    assert trained.warnings == []


def test_a_second_fit_continues_with_whole_epochs(cell: Cell) -> None:
    trained = cell("pl", "second_fit")

    assert trained.passes("before") == [(96, 96, 0), (144, 64, 0)]
    assert trained.passes() == complete(192, 240)
    assert trained.warnings == []


# -- epochs of a number of steps ---------------------------------------------------------------------------------------


def test_epochs_of_steps_train_every_pass(cell: Cell) -> None:
    """The callback is left out, because only checkpoints need it. Training ends in the last pass. The third pass has
    the samples that arrived before half of the second, which are fewer than those before its end.
    """
    trained = cell("pl", "grow", arguments=["one", "steps", "alone"])

    assert trained.passes() == [*complete(96, 144, 144, 192), (240, 64, 0)]
    assert trained.ranks[0]["lengths"] == [10, 10, 10, 10]
    assert trained.warnings == []


@pytest.mark.parametrize(
    ("case", "passes"),
    [
        ("resume", [*complete(240, 240), (240, 160, 0)]),
        ("resume_grown", [*complete(144, 240), (240, 240, 0), (240, 16, 0)]),
        ("resume_at_the_end", [*complete(240), (240, 240, 0)]),
    ],
)
def test_epochs_of_steps_can_be_resumed(cell: Cell, case: str, passes: list[tuple[int, int, int]]) -> None:
    trained = cell("pl", case, arguments=["one", "steps"])

    assert whole(trained, "before", "record") == passes
    assert trained.warnings == []


def test_a_one_cycle_schedule_ends_where_training_ends(cell: Cell) -> None:
    """40 steps were estimated before the cache grew, and 40 are trained: the last rate is the lowest of the cycle."""
    trained = cell("pl", "cycle", arguments=["one", "steps"])

    [record] = trained.ranks
    rates = record["rates"]
    assert record["estimated"] == len(rates) == 40
    assert max(rates) == pytest.approx(1e-3)
    assert min(rates) == rates[-1] == pytest.approx(1e-3 / 25 / 1e4)
    assert trained.warnings == []


# -- the data module ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", ["grow", "resume_grown", "resume_at_the_end"])
def test_a_data_module_adds_the_callback(cell: Cell, case: str) -> None:
    trained = cell("pl", case, arguments=["one", "module"])

    if case == "grow":
        assert trained.passes() == complete(96, 144, 192, 240)
    elif case == "resume_grown":
        assert whole(trained, "before", "record") == complete(144, 240, 240, 240)
    else:
        assert whole(trained, "before", "record") == complete(240, 240, 240)
        assert trained.more["before"][0]["epochs"]["0"]["ids"] != trained.ranks[0]["epochs"]["1"]["ids"]
    assert trained.warnings == []


def test_one_data_module_fits_twice_validates_saves_and_resumes(cell: Cell) -> None:
    """A run that stops, its checkpoint after ``fit()``, another fit, ``validate``, and a new run from the
    checkpoint.
    """
    trained = cell("pl", "module")

    assert trained.passes("before") == [(71, 71, 0), (109, 32, 0)]
    assert trained.passes() == complete(143, 143)  # the second fit begins another epoch
    assert whole(trained, "before", "resumed") == complete(71, 109, 143)
    assert trained.passes("validated") == [(49, 25, 0), *complete(49, 49, 49)]  # a sanity check, two fits, validate
    assert trained.ranks[0]["length"] == 5
    assert trained.ranks[0]["text"].startswith("CacheDataModule(")
    assert "no samples for tests" in trained.ranks[0]["refused"]
    assert trained.warnings == []


def test_a_data_module_of_steps_continues_its_pass_in_a_second_fit(cell: Cell) -> None:
    trained = cell("pl", "module", arguments=["one", "steps"])

    passes = whole(trained, "before", "record")
    assert passes[:2] == complete(71, 109)
    assert [twice for _, _, twice in passes] == [0] * len(passes)
    assert trained.ranks[0]["length"] == 10
    assert trained.warnings == []


# -- the faults that the issue began with ------------------------------------------------------------------------------


def test_fail_01_a_resumed_plain_run_loses_no_samples(cell: Cell) -> None:
    trained = cell("pl", "fail_01", arguments=["one", "alone"])

    assert trained.epochs("before") == expected(60, 28)
    assert trained.epochs() == expected(32, 60, 60)
    assert whole(trained, "before", "record") == complete(60, 60, 60, 60)


def test_fail_02_a_cache_filled_by_another_process_is_trained_completely(cell: Cell) -> None:
    trained = cell("pl", "fail_02")

    assert trained.epochs() == expected(60, 120, 120)
    assert trained.warnings == []


# -- two ranks ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", RANKS)
def test_two_ranks_divide_every_snapshot(cell: Cell, strategy: str) -> None:
    """The ranks take a snapshot about a second before the epoch, so growth may appear an epoch later."""
    trained = cell("pl", "grow", arguments=[strategy])

    assert_growing(trained)


def test_two_forked_ranks_divide_the_samples_after_the_length_was_asked(cell: Cell) -> None:
    trained = cell("pl", "grow", arguments=["ddp_fork", "len"])

    assert_growing(trained)


@pytest.mark.parametrize("strategy", [*RANKS, "ddp_spawn"])
def test_two_ranks_of_any_strategy_can_use_a_data_module(cell: Cell, strategy: str) -> None:
    """The ranks create its loaders, so it can be pickled for ``ddp_spawn``."""
    trained = cell("pl", "grow", arguments=[strategy, "module"])

    assert_growing(trained)


def test_two_spawned_ranks_cannot_use_a_loader_of_their_parent(tmp_path: Path) -> None:
    """``ddp_spawn`` pickles the loader, and feeders cannot be pickled: use the data module, or another strategy."""
    script = REPOSITORY / "tests" / "trainers" / "scripts" / "pl.py"
    done = subprocess.run(
        [sys.executable, str(script), "grow", str(tmp_path), "ddp_spawn"],
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"},
    )

    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("cachetool.core.errors.UsageError: a loader cannot be pickled or copied")


@pytest.mark.parametrize("strategy", RANKS)
@pytest.mark.parametrize("way", ["with callback", "module"])
def test_two_ranks_resume_in_mid_epoch(cell: Cell, strategy: str, way: str) -> None:
    trained = cell("pl", "resume", arguments=[strategy, way])

    assert trained.epochs("before") == expected(80)
    assert whole(trained, "before", "record") == complete(240, 240, 240, 240)
    assert trained.warnings == []


@pytest.mark.parametrize("strategy", RANKS)
def test_two_ranks_resume_on_a_grown_cache(cell: Cell, strategy: str) -> None:
    trained = cell("pl", "resume_grown", arguments=[strategy])

    assert trained.epochs("before") == expected(48)
    assert whole(trained, "before", "record") == complete(144, 240, 240, 240)
    assert trained.warnings == []


@pytest.mark.parametrize("strategy", RANKS)
def test_two_ranks_validate_complete_splits(cell: Cell, strategy: str) -> None:
    trained = cell("pl", "validation", arguments=[strategy])

    assert len(trained.ranks) == 2
    for passes in (trained.passes(), trained.passes("validated")[1:]):
        assert len(passes) == 4
        assert all(snapshot == distinct and twice == 0 for snapshot, distinct, twice in passes)
        assert passes[-1][0] > passes[0][0]
    assert trained.warnings == []


@pytest.mark.parametrize("strategy", RANKS)
def test_two_ranks_get_fields_of_every_kind(cell: Cell, strategy: str) -> None:
    trained = cell("pl", "fields", arguments=[strategy])

    assert len(trained.ranks) == 2
    assert trained.passes() == complete(96, 96)
    assert trained.warnings == []


@pytest.mark.parametrize("strategy", RANKS)
def test_two_stopped_ranks_print_no_warning(cell: Cell, strategy: str) -> None:
    trained = cell("pl", "stop", arguments=[strategy])

    first, second = trained.passes()
    assert first == (96, 96, 0)
    assert second[1:] == (96, 0)  # six batches of each rank
    assert trained.warnings == []


@pytest.mark.parametrize("strategy", RANKS)
def test_two_ranks_can_fit_twice(cell: Cell, strategy: str) -> None:
    """Forked ranks of the second fit begin with epoch 0, because only the ranks of the first fit know its progress."""
    trained = cell("pl", "second_fit", arguments=[strategy])

    assert len(trained.ranks) == len(trained.more["before"]) == 2
    assert trained.passes("before")[0] == (96, 96, 0)
    assert trained.passes("before")[1][1:] == (64, 0)
    passes = trained.passes()
    assert len(passes) == 2
    assert all(snapshot == distinct and twice == 0 for snapshot, distinct, twice in passes)
    assert trained.warnings == []


# -- the example -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_example_trains_on_more_samples_and_resumes_its_epoch(tmp_path: Path, ranks: int) -> None:
    program = REPOSITORY / "examples" / "lightning_growing_cache.py"
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    line = [sys.executable, str(program), str(tmp_path / "work"), str(ranks)]
    said, warned = completed(line, environment=environment, folder=tmp_path, seconds=200)

    epochs = re.findall(rf"epoch (\d): (\d+) samples trained on {ranks} ranks, (\d+) held out, accuracy (.+)", said)
    [(left, count)] = re.findall(r"epoch (\d): left after (\d+) samples", said)
    samples = {int(number): int(trained) for number, trained, _, _ in epochs}
    assert sorted(samples) == list(range(6))
    samples[int(left)] += int(count)
    counts = [samples[number] for number in range(6)]
    assert counts == sorted(counts)
    assert 200 < counts[0] <= counts[-1]
    assert counts[-1] > 300
    assert float(epochs[0][3]) < float(epochs[-1][3])
    assert "cachetool: " not in warned


def assert_growing(trained: Trained) -> None:
    """Assert that both ranks trained every snapshot completely, without a common sample, and that the cache grew in
    between.
    """
    passes = trained.passes()
    assert len(trained.ranks) == 2
    assert len(passes) == len(trained.epochs()) == 4
    assert all(snapshot == distinct and twice == 0 for snapshot, distinct, twice in passes)
    assert passes[0][0] == 96
    assert passes[-1][0] >= 144
    counts = [sum(len(row["ids"]) for row in record["epochs"].values()) for record in trained.ranks]
    assert abs(counts[0] - counts[1]) <= 4  # neither rank trained the other's samples
    assert trained.warnings == []
