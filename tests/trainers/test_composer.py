"""MosaicML Composer: growth and resume with :mod:`cachetool.loaders.composer`.

``mosaicml`` pins torch below 2.7.1. So pip installs it without its dependencies into pytest's cache folder, once for
all runs, with the few of them that nothing else brings. ``composer_stubs`` replaces torchvision and mcli, whose names
``import composer`` needs. Without an index for pip the tests are skipped.

Cells that cannot work: without the callback Composer keeps the first length (the one warning line); a ragged field
without a ``DataSpec`` ends with Composer's own error, which names the missing argument.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.trainers.conftest import REPOSITORY, Cell, Trained

pytestmark = pytest.mark.trainers

REQUIREMENTS = (
    *("mosaicml==0.32.1", "torch_optimizer==0.3.0", "pytorch_ranger==0.1.1", "coolname==2.2.0", "py-cpuinfo==9.0.0"),
    *("tabulate==0.9.0", "importlib_metadata==8.7.0", "zipp==3.23.0"),
)
STUBS = Path(__file__).parent / "composer_stubs"
Compose = Callable[..., Trained]


@pytest.fixture(scope="session")
def site(request: pytest.FixtureRequest) -> Path:
    """Install Composer beside this environment, unless an earlier run did."""
    folder = request.config.cache.mkdir("composer")
    site = folder / ",".join(REQUIREMENTS)
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # pytest's workers arrive at the same time
        if not site.exists():
            aside = folder / "new"
            shutil.rmtree(aside, ignore_errors=True)  # left by a killed run
            command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(aside), *REQUIREMENTS]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                pytest.skip(f"pip cannot install {' '.join(REQUIREMENTS)}: {done.stderr.strip().splitlines()[-1]}")
            os.rename(aside, site)
    return site


@pytest.fixture
def compose(cell: Cell, site: Path) -> Compose:
    """Run a case of the script."""

    def run(case: str, **options: Any) -> Trained:
        path = os.pathsep.join(map(str, (REPOSITORY, site, STUBS)))
        return cell("composer_run", case, environment={"PYTHONPATH": path, "NODE_RANK": "0"}, **options)

    return run


def whole(cell: Trained) -> list[int]:
    """Return the sizes of the trained passes. Assert that each was complete and no sample repeated."""
    passes = cell.passes()
    assert all(snapshot == distinct and again == 0 for snapshot, distinct, again in passes), passes
    return [snapshot for snapshot, _, _ in passes]


@pytest.mark.first
def test_every_epoch_trains_the_grown_cache(compose: Compose) -> None:
    cell = compose("grow")

    assert whole(cell) == [96, 144, 192, 240]
    assert cell.epochs() == [(96, 0), (144, 0), (192, 0), (240, 0)]
    assert cell.warnings == []


def test_without_the_callback_growth_is_cut_and_reported_once(compose: Compose) -> None:
    cell = compose("kept_length")

    assert cell.passes() == [(96, 96, 0), (144, 96, 0), (192, 96, 0), (240, 96, 0)]
    assert len(cell.warnings) == 1
    assert "epoch 1 ended after 6 of 9 batches, " in cell.warnings[0]


def test_a_checkpoint_in_mid_epoch_resumes_after_its_last_batch(compose: Compose) -> None:
    cell = compose("resume")

    assert whole(cell) == [240] * 4
    assert cell.epochs() == [(240, 0)] * 4
    assert cell.warnings == []


def test_a_resumed_epoch_has_its_samples_and_the_next_one_the_new_ones(compose: Compose) -> None:
    cell = compose("resume_with_growth")

    assert whole(cell) == [144, 240, 240]
    assert cell.epochs() == [(144, 0), (240, 0), (240, 0)]
    assert cell.warnings == []


def test_a_checkpoint_after_the_last_batch_of_an_epoch_adds_no_epoch(compose: Compose) -> None:
    """Composer counts the epoch as running for a checkpoint counted in batches, while the loader counts it as
    finished.
    """
    cell = compose("resume_at_an_end")

    assert whole(cell) == [96, 144, 144]
    assert cell.epochs() == [(96, 0), (144, 0), (144, 0)]
    assert cell.warnings == []


def test_epochs_of_a_fixed_length_train_every_pass_and_the_schedule_ends_with_them(compose: Compose) -> None:
    cell = compose("fixed")

    assert whole(cell) == [96, 144, 192, 240]
    assert cell.ranks[0]["batches"] == 42
    assert cell.ranks[0]["rate"] == pytest.approx(0.001 / 42)  # of the last of 42 steps from 0.001 to 0
    assert cell.warnings == []


def test_all_fields_arrive_unchanged_in_the_loss_with_a_data_spec(compose: Compose) -> None:
    cell = compose("default_fields")

    assert whole(cell) == [96, 96]
    assert cell.ranks[0]["right"] == {"name": 192, "blob": 192, "ragged": 192}
    assert cell.warnings == []


def test_text_and_bytes_need_no_data_spec(compose: Compose) -> None:
    cell = compose("plain_fields")

    assert whole(cell) == [96, 96]
    assert cell.warnings == []


def test_a_ragged_field_without_a_data_spec_is_composers_error_with_advice(compose: Compose) -> None:
    cell = compose("ragged_alone")

    assert cell.ranks[0]["error"].startswith("ValueError: Unable to determine the batch size")
    assert "use a DataSpec" in cell.ranks[0]["error"]


def test_a_growing_validation_split_is_evaluated_completely(compose: Compose) -> None:
    cell = compose("validation")

    trained, validated = whole(cell), cell.passes("validation")
    assert all(snapshot == distinct and again == 0 for snapshot, distinct, again in validated), validated
    assert [one + snapshot for one, (snapshot, _, _) in zip(trained, validated, strict=True)] == [
        *(108, 162, 205, 240, 240)  # an epoch has the samples with which its training side began
    ]
    assert cell.warnings == []


def test_after_a_stop_in_mid_epoch_the_next_fit_continues(compose: Compose) -> None:
    cell = compose("early_stop")

    assert cell.ranks[0]["stopped"] == 8
    assert whole(cell) == [96, 96, 96]
    assert cell.epochs() == [(96, 0)] * 3
    assert cell.warnings == []


def test_a_second_fit_sees_new_samples(compose: Compose) -> None:
    cell = compose("second_fit")

    assert whole(cell) == [96, 144, 192, 240]
    assert cell.epochs() == [(96, 0), (144, 0), (192, 0), (240, 0)]
    assert cell.warnings == []


def test_two_ranks_train_every_snapshot_completely(compose: Compose) -> None:
    cell = compose("grow", ranks=2)

    sizes = whole(cell)
    assert len(cell.ranks) == 2
    assert (len(sizes), sizes[0], sizes[-1]) == (6, 96, 240)
    assert sizes == sorted(sizes)
    assert cell.warnings == []


@pytest.mark.parametrize(("case", "sizes"), [("resume", [240] * 4), ("resume_with_growth", [144, 240, 240])])
def test_two_ranks_resume(compose: Compose, case: str, sizes: list[int]) -> None:
    cell = compose(case, ranks=2)

    assert whole(cell) == sizes
    assert cell.epochs() == [(size, 0) for size in sizes]
    assert cell.warnings == []
