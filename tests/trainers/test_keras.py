"""Keras 3 with the TensorFlow, JAX and torch backends: growth and resume in ``fit``.

A backend's cells run one after another in one process, because importing TensorFlow and torch takes seconds. The
samples are recorded inside the model, so batches that Keras only inspects or reads ahead do not count.

Cells that cannot work: a ``Loader`` without a fixed length in ``fit``, because Keras keeps the first length (the one
warning line); ragged and text fields, which Keras accepts only after a transform padded them (an error says so); two
ranks, which Keras has only by ``jax.distributed`` and ``tf.distribute`` on devices that do not exist here.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.trainers.conftest import REPOSITORY, Trained

pytestmark = [pytest.mark.trainers, pytest.mark.timeout(900)]  # importing TensorFlow from a busy disk took 150 s

SCRIPT = Path(__file__).parent / "scripts" / "keras_fit.py"
BACKENDS = ("tensorflow", "jax", "torch")
CASES = (
    *("grow_and_schedule", "resume", "resume_with_growth", "killed", "ended", "validation", "default_fields"),
    *("ragged_and_text", "early_stop", "early_stopping", "second_fit", "kept_length", "short_epochs", "wrong_steps"),
    "make_dataset",
)
Cases = Callable[[str, str], Trained]


def run(backend: str, cases: tuple[str, ...], folder: Path) -> None:
    """Run the cases in one process, and keep their stderr."""
    done = subprocess.run(
        [sys.executable, str(SCRIPT), ",".join(cases), str(folder)],
        capture_output=True,
        text=True,
        check=False,
        timeout=800,
        env={
            **os.environ,
            "PYTHONPATH": str(REPOSITORY),
            "PYTHONWARNINGS": "ignore",
            "KERAS_BACKEND": backend,
            "TF_CPP_MIN_LOG_LEVEL": "3",
            "OMP_NUM_THREADS": "1",
            "CUDA_VISIBLE_DEVICES": "",
            "JAX_PLATFORMS": "cpu",
        },
    )
    (folder / "stderr").write_text(done.stderr)


def trained(folder: Path, case: str) -> Trained:
    """Return the record of a case. Fail with its output if it did not end."""
    stderr = (folder / "stderr").read_text()
    parts = re.split(r"^case (\w+)\n", stderr, flags=re.MULTILINE)
    own = dict(zip(parts[1::2], parts[2::2], strict=True)).get(case, stderr)
    record = folder / case / "record-0.json"
    assert record.exists(), own[-6000:]
    validation = json.loads((folder / case / "validation-0.json").read_text())
    return Trained([json.loads(record.read_text())], own, {"validation": [validation]})


@pytest.fixture(scope="session")
def cases(tmp_path_factory: pytest.TempPathFactory) -> Cases:
    """Run all cases of a backend once, for the first of pytest's workers that asks."""
    shared = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        shared = shared.parent

    def of(backend: str, case: str) -> Trained:
        folder = shared / f"keras-{backend}"
        folder.mkdir(exist_ok=True)
        with open(folder / "lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not (folder / "stderr").exists():
                run(backend, CASES, folder)
        return trained(folder, case)

    return of


def whole(cell: Trained) -> list[int]:
    """Return the sizes of the trained passes. Assert that each was complete and no sample repeated."""
    passes = cell.passes()
    assert all(snapshot == distinct and again == 0 for snapshot, distinct, again in passes), passes
    return [snapshot for snapshot, _, _ in passes]


def assert_grown(cell: Trained) -> None:
    """Assert that every pass was complete, in 42 steps, and that the learning rate ended with them."""
    assert whole(cell) == [96, 144, 192, 240]
    assert cell.ranks[0]["steps"] == 42
    assert cell.ranks[0]["rate"] == 0.0
    assert cell.ranks[0]["wrong"] == 0  # values of another batch, in memory that was filled again
    assert cell.warnings == []


@pytest.mark.first
def test_one_backend_trains_a_growing_cache_completely(tmp_path: Path) -> None:
    run("jax", ("grow_and_schedule",), tmp_path)

    assert_grown(trained(tmp_path, "grow_and_schedule"))


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_growing_cache_is_trained_completely_and_the_schedule_ends_with_it(backend: str, cases: Cases) -> None:
    assert_grown(cases(backend, "grow_and_schedule"))


@pytest.mark.parametrize("backend", BACKENDS)
def test_training_resumes_in_the_middle_of_a_pass(backend: str, cases: Cases) -> None:
    cell = cases(backend, "resume")

    assert whole(cell) == [240, 240]
    assert cell.epochs() == [(80, 0)] * 6
    assert cell.warnings == []


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_resumed_pass_has_its_samples_and_the_next_one_the_new_ones(backend: str, cases: Cases) -> None:
    cell = cases(backend, "resume_with_growth")

    assert whole(cell) == [144, 240]
    assert cell.epochs() == [(48, 0)] * 8
    assert cell.warnings == []


@pytest.mark.parametrize("backend", BACKENDS)
def test_after_a_kill_training_resumes_after_the_last_saved_batch(backend: str, cases: Cases) -> None:
    """Keras may have read ahead beyond the end of the pass."""
    cell = cases(backend, "killed")

    assert whole(cell) == [96, 96]
    assert cell.warnings == []


@pytest.mark.parametrize("backend", BACKENDS)
def test_training_resumes_after_the_end_of_fit_between_two_saves(backend: str, cases: Cases) -> None:
    cell = cases(backend, "ended")

    assert whole(cell) == [96, 96, 96]
    assert cell.warnings == []


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_growing_validation_split_is_validated_completely(backend: str, cases: Cases) -> None:
    cell = cases(backend, "validation")

    validated = cell.passes("validation")
    assert all(snapshot == distinct and again == 0 for snapshot, distinct, again in validated), validated
    sizes = [snapshot for snapshot, _, _ in validated]
    assert len(sizes) == 5
    assert sizes == sorted(sizes)
    assert sizes[0] < sizes[-1]
    *done, (last, part, again) = cell.passes()
    assert all(snapshot == distinct and again == 0 for snapshot, distinct, again in done)
    assert again == 0
    assert part < last == 240 - sizes[-1]
    trained_ids = {one for row in cell.ranks[0]["epochs"].values() for one in row["ids"]}
    validated_ids = {one for row in cell.more["validation"][0]["epochs"].values() for one in row["ids"]}
    assert trained_ids.isdisjoint(validated_ids)
    assert cell.warnings == []


@pytest.mark.parametrize("backend", BACKENDS)
def test_fields_are_selected_from_batches_with_all_kinds(backend: str, cases: Cases) -> None:
    cell = cases(backend, "default_fields")

    assert whole(cell) == [96, 96]
    assert cell.warnings == []


@pytest.mark.parametrize("backend", BACKENDS)
def test_ragged_and_text_fields_are_refused_unless_a_transform_pads_them(backend: str, cases: Cases) -> None:
    cell = cases(backend, "ragged_and_text")

    ragged, text, blob, nothing = cell.ranks[0]["refused"]
    assert ragged.startswith("field 'ragged' is ragged")
    assert text.startswith("field 'name' is text")
    assert "'blob' is text" in blob
    assert "unknown field 'nothing'; choose one of __key__, id, x" in nothing
    assert whole(cell) == [96]
    assert cell.ranks[0]["right"] == 96
    assert cell.warnings == []


@pytest.mark.parametrize("backend", BACKENDS)
def test_after_a_stop_in_the_middle_of_an_epoch_the_next_fit_continues(backend: str, cases: Cases) -> None:
    cell = cases(backend, "early_stop")

    assert cell.ranks[0]["stopped"] == 8 * 16
    assert whole(cell) == [96, 96]
    assert [count for count, _ in cell.epochs()] == [96, 32, 16, 48]
    assert cell.warnings == []


@pytest.mark.parametrize("backend", BACKENDS)
def test_early_stopping_ends_training_between_two_epochs(backend: str, cases: Cases) -> None:
    cell = cases(backend, "early_stopping")

    assert whole(cell) == [96, 96]
    assert cell.warnings == []


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_second_fit_continues_without_a_callback(backend: str, cases: Cases) -> None:
    cell = cases(backend, "second_fit")

    assert whole(cell) == [100] * 4
    assert cell.ranks[0]["predicted"] == 100
    assert cell.passes("validation") == [(100, 100, 0)]
    if backend != "torch":  # torch compiles nothing; the others compile two batch sizes twice, for fit and for predict
        assert cell.ranks[0]["traces"] <= 6
    assert cell.warnings == []


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_loader_without_a_fixed_length_is_trained_partially_and_reported_once(backend: str, cases: Cases) -> None:
    cell = cases(backend, "kept_length")

    assert cell.passes() == [(96, 96, 0), (144, 96, 0), (192, 96, 0), (240, 96, 0)]
    assert len(cell.warnings) == 1
    assert "epoch 1 ended after 6 of 9 batches, " in cell.warnings[0]


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_shortest_epochs_and_validations_lose_no_sample(backend: str, cases: Cases) -> None:
    cell = cases(backend, "short_epochs")

    assert whole(cell) == [96, 96]
    assert cell.passes("validation") == [(96, 96, 0)] * 4
    assert cell.ranks[0]["refused"] == "epochs of 2 steps are too short for Keras; use at least 3 steps"
    assert cell.warnings == []


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_callback_refuses_another_number_of_steps_in_fit(backend: str, cases: Cases) -> None:
    assert re.search(r"\b4 steps.* 6; .*steps_per_epoch=", cases(backend, "wrong_steps").ranks[0]["refused"])


@pytest.mark.parametrize("backend", BACKENDS)
def test_make_dataset_with_repeat_is_trained_completely_and_can_stop_early(backend: str, cases: Cases) -> None:
    cell = cases(backend, "make_dataset")

    ids = cell.ranks[0]["ids"]  # oldest first, so every pass begins with 0
    begins = [place for place, one in enumerate(ids) if one == 0]
    passes = [ids[begin:end] for begin, end in zip(begins, [*begins[1:], len(ids)], strict=True)]
    assert all(one == list(range(len(one))) for one in passes)
    sizes = [len(one) for one in passes[:-1]]  # the last pass is not complete yet
    assert sizes == sorted(sizes)
    assert {96, 240} <= set(sizes) <= {96, 144, 192, 240}
    assert cell.ranks[0]["epochs until it stopped"] == 2


def test_the_example_resumes_where_it_stopped(tmp_path: Path) -> None:
    example = REPOSITORY / "examples" / "keras_growing_cache.py"
    done = subprocess.run(
        [sys.executable, str(example), str(tmp_path / "work")],
        capture_output=True,
        text=True,
        check=False,
        timeout=800,
        env={**os.environ, "KERAS_BACKEND": "jax", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
    )
    assert done.returncode == 0, done.stdout + done.stderr

    epochs = re.findall(r"epoch (\d): accuracy (\d\.\d\d)", done.stdout)
    assert [int(epoch) for epoch, _ in epochs] == list(range(8))
    assert float(epochs[0][1]) < float(epochs[-1][1])
    assert float(epochs[-1][1]) > 0.9
    first, last = map(int, re.findall(r"after (\d+) whole passes", done.stdout))
    assert 0 < first < last
    assert [line for line in done.stderr.splitlines() if line.startswith("cachetool: ")] == []
