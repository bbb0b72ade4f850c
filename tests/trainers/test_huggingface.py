"""The Hugging Face Trainer, with one rank and with two.

Two cells cannot work, and have tests: a plain Trainer keeps the length of the first epoch (one line reports it), and a
``CacheDataset`` as ``train_dataset`` is read at its first length, which ``GrowthMixin`` refuses.
"""

from __future__ import annotations

import ast
import inspect
import re
from pathlib import Path
from typing import Any

import pytest

from cachetool.core.errors import UsageError
from tests.trainers.conftest import Cell, Trained
from tests.trainers.examples import run_example
from tests.trainers.growing import LAST

pytestmark = pytest.mark.trainers

GREW = [(96, 0), (144, 0), (192, 0), (240, 0)]
SIDES = ([65, 101, 131, 166], [43, 61, 74, 74])
"""Samples of each side of the split, as the cache grows."""
CUT = "cachetool: epoch 1 ended after 6 of 9 batches, "


def watched(trained: Trained) -> list[dict[str, Any]]:
    """Return the notes of rank 0 besides the samples, one for each call of ``train()``."""
    rows: list[dict[str, Any]] = trained.ranks[0]["watched"]
    return rows


def whole(trained: Trained, name: str = "record") -> list[int]:
    """Return the sizes of the snapshots of all passes. Assert that each pass was complete and no sample repeated."""
    passes = trained.passes(name)
    assert [(distinct, again) for _, distinct, again in passes] == [(snapshot, 0) for snapshot, _, _ in passes]
    return [snapshot for snapshot, _, _ in passes]


@pytest.mark.first
def test_every_epoch_trains_on_the_grown_cache(cell: Cell) -> None:
    trained = cell("hf", "grow")
    assert trained.epochs() == GREW
    (row,) = watched(trained)
    assert row["steps"] == [42, 42]
    assert [epoch for epoch in row["epochs"] if epoch == int(epoch)] == [1, 2, 3, 4]
    assert trained.warnings == []


def test_the_linear_schedule_ends_too_early_and_one_line_reports_it(cell: Cell) -> None:
    trained = cell("hf", "linear")
    assert trained.epochs() == GREW
    rates = watched(trained)[0]["rates"]
    assert rates[22] > 0 == rates[23] == rates[41]
    (line,) = trained.warnings
    assert line.startswith(
        "cachetool: the cache grew, so training takes 33 steps, but the learning-rate schedule 'linear'"
    )


def test_max_steps_ends_the_schedule_with_the_training(cell: Cell) -> None:
    trained = cell("hf", "max_steps")
    assert trained.epochs() == GREW
    rates = watched(trained)[0]["rates"]
    assert len(rates) == 42
    assert rates[40] > 0 == rates[41]
    assert trained.warnings == []


def test_a_fraction_of_an_epoch_ends_in_its_middle_without_a_warning(cell: Cell) -> None:
    """The last epoch is left on purpose after 6 of 12 batches, the length of the first epoch."""
    trained = cell("hf", "half")
    assert trained.epochs() == [(96, 0), (144, 0), (96, 0)]
    assert watched(trained)[0]["epochs"][-1] == 2.5
    assert trained.warnings == []


def test_the_last_group_of_gradient_accumulation_is_stepped_after_a_resume_too(cell: Cell) -> None:
    trained = cell("hf", "accumulate")
    assert trained.epochs() == [(96, 0), (144, 0), (240, 0), (240, 0)]
    before, after = watched(trained)
    assert before["groups"] == [2, 2, 2, 2, 2]  # 6 batches of epoch 0, 4 of 9 of epoch 1
    assert after["groups"] == [2, 2, 1, *[2] * 7, 1, *[2] * 7, 1]
    assert after["steps"] == [24, 24]
    assert after["epochs"][:3] == [1.666667, 1.888889, 2.0]
    assert trained.warnings == []


def test_without_the_mixin_growth_is_cut_and_one_line_reports_it(cell: Cell) -> None:
    trained = cell("hf", "unaware")
    assert trained.epochs() == [(96, 0)] * 4
    (line,) = trained.warnings
    assert line.startswith(CUT)


def test_training_resumes_in_the_middle_of_an_epoch_from_another_folder(cell: Cell) -> None:
    trained = cell("hf", "resume")
    assert trained.epochs() == [(LAST, 0)] * 4
    before, after = watched(trained)
    assert before["steps"][0] == 20
    assert after["steps"] == [60, 60]
    assert after["epochs"][:2] == [1.4, 1.466667]
    assert trained.warnings == []


def test_training_resumes_after_growth(cell: Cell) -> None:
    trained = cell("hf", "resume_grown")
    assert trained.epochs() == [(96, 0), (144, 0), (240, 0), (240, 0)]
    assert watched(trained)[1]["steps"] == [45, 45]
    assert trained.warnings == []


@pytest.mark.parametrize("way", ["fixed", "fixed_callback"])
def test_epochs_of_ten_steps_see_growth_and_the_schedule_ends_with_the_training(cell: Cell, way: str) -> None:
    """Both with the mixin, and with a Trainer that does not know the loader."""
    trained = cell("hf", way)
    assert trained.passes() == [(96, 96, 0), (144, 144, 0), (192, 192, 0), (240, 208, 0)]
    (row,) = watched(trained)
    assert row["steps"] == [40, 40]
    assert row["rates"][38] > 0 == row["rates"][39]
    assert trained.warnings == []


@pytest.mark.parametrize("way", ["fixed_resume", "fixed_callback_resume"])
def test_epochs_of_ten_steps_resume_in_the_middle_after_growth(cell: Cell, way: str) -> None:
    """Training stops at step 15, in the third pass of 96 samples. The next passes have 240. The second variant also
    restores all callbacks from the checkpoint, which creates a new LoaderStateCallback.
    """
    trained = cell("hf", way)
    assert trained.passes() == [(96, 96, 0), (96, 96, 0), (96, 96, 0), (240, 240, 0), (240, 112, 0)]
    row = watched(trained)[1]
    assert row["steps"] == [40, 40]
    assert row["epochs"][-1] == 4
    if way == "fixed_resume":
        assert row["epochs"][:2] == [1.6, 1.7]
    assert row["rates"][-2] > 0 == row["rates"][-1]
    assert trained.warnings == []


def test_epochs_of_nine_steps_accumulate_two_batches_after_a_resume_too(cell: Cell) -> None:
    trained = cell("hf", "fixed_accumulate")
    before, after = watched(trained)
    assert before["groups"] == [2, 2, 2, 2, 1, 2, 2]
    assert after["groups"] == [2, 2, 1, 2, 2, 2, 2, 1, 2, 2, 2, 2, 1]
    assert after["steps"] == [20, 20]
    # The Trainer takes two batches together, so the record does not know the pass of the first one.
    stream = [number for row in trained.ranks[0]["epochs"].values() for number in row["ids"]]
    passes = [stream[:96], stream[96:192], stream[192:288], stream[288:528], stream[528:]]
    assert [len(set(ids)) for ids in passes] == [96, 96, 96, 240, 48]
    assert len(stream) == 576
    assert trained.warnings == []


def test_both_sides_of_a_split_grow(cell: Cell) -> None:
    trained = cell("hf", "evaluate")
    assert trained.epochs() == [(samples, 0) for samples in SIDES[0]]
    assert trained.epochs("validation") == [(samples, 0) for samples in SIDES[1]]
    assert watched(trained)[0]["evaluated"] == ["eval_loss"] * 4
    assert trained.warnings == []


def test_a_dict_of_loaders_is_evaluated_and_a_loader_predicted(cell: Cell) -> None:
    trained = cell("hf", "evaluate_two")
    assert trained.epochs("validation") == [(43, 0), (144, 0), (144, 0)]  # the third is predict()
    assert watched(trained)[0]["evaluated"] == ["eval_a_loss", "eval_b_loss"]
    assert trained.ranks[0]["predicted"] == list(range(144))


def test_all_fields_arrive_unchanged(cell: Cell) -> None:
    """str, bytes, keys and ragged fields: the script compares their values in ``forward()``."""
    trained = cell("hf", "all_fields")
    assert trained.epochs() == GREW
    assert trained.warnings == []


def test_early_stopping_loads_the_best_model_and_trains_again_without_a_warning(cell: Cell) -> None:
    trained = cell("hf", "early_stop")
    assert trained.epochs() == [(65, 0), (15, 0)]  # 1 of 9 batches
    assert trained.epochs("second") == [(89, 0)]  # stopped again, of 131
    assert trained.warnings == []


def test_a_second_train_call_reads_the_newest_cache(cell: Cell) -> None:
    trained = cell("hf", "second_fit")
    assert trained.epochs() == GREW[:2]
    assert trained.epochs("second") == GREW[2:]
    assert trained.warnings == []


def test_a_checkpoint_or_object_without_a_loaders_state_is_an_error(cell: Cell) -> None:
    trained = cell("hf", "refuse")
    unsaved, unknown, empty = trained.ranks[0]["errors"]
    assert unsaved.startswith("the checkpoint of step 3 has no state of a loader")
    assert unknown.startswith("the trainer's get_train_dataloader() returned a list, not a loader")
    assert empty.startswith("LoaderStateCallback needs a Loader")
    assert empty.endswith(", not list")


def test_the_mixin_must_precede_a_compatible_trainer() -> None:
    from transformers import Trainer

    from cachetool.loaders.huggingface import GrowthMixin

    with pytest.raises(UsageError, match=r"class Wrong\(GrowthMixin, Trainer\)"):

        class Wrong(Trainer, GrowthMixin):  # type: ignore[misc]
            pass

    with pytest.raises(UsageError, match=r"has no _run_epoch\(\), which GrowthMixin needs"):
        GrowthMixin()


def test_the_trainer_reads_its_epochs_as_the_mixin_expects() -> None:
    """A newer transformers may behave differently. The cells would fail, and this test shows the cause."""
    from transformers import Trainer

    source = inspect.getsource(Trainer._inner_training_loop)
    calls = [node for node in ast.walk(ast.parse("if 1:\n" + source)) if isinstance(node, ast.Call)]
    (call,) = [each for each in calls if isinstance(each.func, ast.Attribute) and each.func.attr == "_run_epoch"]
    names = {keyword.arg for keyword in call.keywords}
    assert names >= {"epoch", "train_dataloader", "steps_in_epoch", "num_update_steps_per_epoch", "epochs_trained"}
    assert call.args == []


def test_a_dataset_is_trained_at_its_first_length(cell: Cell) -> None:
    """The Trainer creates its own DataLoader and sampler once, so it does not see growth. The mixin refuses that."""
    trained = cell("hf", "dataset")
    assert trained.epochs() == [(96, 0)] * 4
    assert trained.ranks[0]["error"].startswith("train_dataset is a CacheDataset: the Trainer would read only the")


def test_a_dataset_is_trained_at_its_first_length_by_two_ranks(cell: Cell) -> None:
    trained = cell("hf", "dataset", ranks=2)
    assert trained.epochs() == [(96, 0)] * 4


def test_a_sampler_of_all_samples_is_divided_once_by_two_ranks(cell: Cell) -> None:
    trained = cell("hf", "ranks_sampler", ranks=2)
    assert trained.epochs() == [(96, 0)] * 4
    assert trained.warnings == []


def test_a_sampler_of_half_the_samples_is_divided_twice_and_one_line_reports_it(cell: Cell) -> None:
    trained = cell("hf", "ranks_sampler_twice", ranks=2)
    assert trained.epochs() == [(48, 0)] * 4
    (line,) = trained.warnings
    assert line.startswith("cachetool: Accelerate divides the samples of this EpochSampler, rank 0 of 2, among")


def test_two_ranks_train_every_snapshot_completely(cell: Cell) -> None:
    """Both ranks share snapshots that were taken earlier, so growth appears up to three epochs later."""
    trained = cell("hf", "ranks_grow", ranks=2)
    snapshots = whole(trained)
    assert len(snapshots) == 8
    assert snapshots[0] == 96
    assert snapshots == sorted(snapshots)
    assert snapshots[-1] == LAST
    assert watched(trained)[0]["steps"] == [sum(-(-samples // 32) for samples in snapshots)] * 2
    assert trained.warnings == []


def test_two_ranks_resume_in_the_middle_of_an_epoch(cell: Cell) -> None:
    trained = cell("hf", "ranks_resume", ranks=2)
    assert trained.epochs() == [(LAST, 0)] * 4
    assert watched(trained)[1]["steps"] == [32, 32]
    assert trained.warnings == []


def test_two_ranks_resume_after_growth(cell: Cell) -> None:
    trained = cell("hf", "ranks_resume_grown", ranks=2)
    assert trained.epochs() == [(144, 0), (144, 0), (240, 0), (240, 0)]
    assert watched(trained)[1]["steps"] == [26, 26]
    assert trained.warnings == []


def test_two_ranks_evaluate_completely_and_gather_each_prediction_once(cell: Cell) -> None:
    """The validation side has 31 samples, in batches of 16 and 15, for which the Trainer's own gathering fails."""
    trained = cell("hf", "ranks_evaluate", ranks=2)
    assert whole(trained)[-1] == SIDES[0][-1]
    validated = whole(trained, "validation")
    assert (validated[0], validated[-1]) == (31, SIDES[1][-1])
    assert [len(ids) for ids in trained.ranks[0]["predicted"]] == validated
    assert all(len(set(ids)) == len(ids) for ids in trained.ranks[0]["predicted"])
    assert trained.warnings == []


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_example_stops_resumes_and_ends_with_its_schedule(tmp_path: Path, ranks: int) -> None:
    printed = run_example("huggingface_growing_cache.py", tmp_path, ranks=ranks)
    evaluated = re.findall(r"(\d+) held-out samples, accuracy (\d\.\d\d)", printed)
    assert len(evaluated) == 5  # the second epoch also where it was stopped
    assert evaluated[-1][0] == "356"
    assert float(evaluated[-1][1]) > 0.85
    steps = re.findall(r"step (\d+) of (\d+), learning rate (.+)", printed)
    assert steps == [("60", "160", "0.00625"), ("160", "160", "0.00000")]
