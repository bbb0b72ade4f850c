"""Ray Train with two workers: a ``Loader`` created in the workers' function.

Both workers share one snapshot per epoch, so growth appears one or two epochs later than with one process. Every pass
is complete. ``prepare_data_loader`` does not accept a ``Loader``: it needs the sampler of a DataLoader, and would
replace it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.trainers.conftest import REPOSITORY, Cell, Trained
from tests.trainers.growing import FIRST, LAST

pytest.importorskip("ray.train", reason="Ray Train needs pandas")
pytestmark = [pytest.mark.trainers, pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Trained]:
    """Run all cases in one cluster, because Ray Train takes ten seconds to start. Return the record of each case."""
    folder = tmp_path_factory.mktemp("ray")
    done = subprocess.run(
        [sys.executable, str(Path(__file__).parent / "scripts" / "ray_train.py"), "all", str(folder)],
        capture_output=True,
        text=True,
        check=False,
        timeout=380,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY), "PYTHONWARNINGS": "ignore", "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-6000:]}"

    def trained(case: str) -> Trained:
        more: dict[str, list[dict[str, Any]]] = {}
        for path in sorted((folder / case).glob("*-*.json")):
            more.setdefault(path.stem.rpartition("-")[0], []).append(json.loads(path.read_text()))
        return Trained(more.pop("record"), done.stderr, more)

    return trained


def assert_grew(trained: Trained, name: str = "record") -> None:
    """Assert that every pass trained its snapshot, without a lost or repeated sample, and that later passes have more
    samples.
    """
    passes = trained.passes(name)
    assert all((distinct, again) == (snapshot, 0) for snapshot, distinct, again in passes)
    snapshots = [snapshot for snapshot, _, _ in passes]
    assert snapshots == sorted(snapshots)
    assert snapshots[0] < snapshots[-1]


def together(*records: list[dict[str, Any]], epoch: int) -> tuple[int, int]:
    """Return the distinct samples of an epoch that several fits trained, and the number of repeated ones."""
    rows = [record["epochs"].get(str(epoch), {"ids": []}) for each in records for record in each]
    ids = [number for row in rows for number in row["ids"]]
    return len(set(ids)), len(ids) - len(set(ids))


@pytest.mark.first
def test_every_epoch_trains_the_complete_snapshot_while_the_cache_grows(cell: Cell) -> None:
    trained = cell("ray_train", "grow")
    assert trained.epochs()[0] == (FIRST, 0)
    assert [len(row["epochs"]["0"]["ids"]) for row in trained.ranks] == [48, 48]
    assert len(trained.epochs()) == 4
    assert_grew(trained)


def test_an_epoch_left_in_the_middle_resumes_from_the_checkpoint(ran: Callable[[str], Trained]) -> None:
    trained = ran("resume")
    assert trained.epochs("before") == [(LAST, 0), (90, 0)]  # 3 of 8 steps
    assert trained.epochs() == [(150, 0), (LAST, 0), (LAST, 0)]
    assert together(trained.more["before"], trained.ranks, epoch=1) == (LAST, 0)


def test_an_epoch_resumes_with_its_samples_after_the_cache_grew(ran: Callable[[str], Trained]) -> None:
    trained = ran("resume-growing")
    assert trained.epochs("before") == [(144, 0), (60, 0)]  # 2 of 5 steps
    assert trained.epochs() == [(84, 0), (LAST, 0), (LAST, 0)]
    assert together(trained.more["before"], trained.ranks, epoch=1) == (144, 0)


def test_both_sides_of_a_validation_split_grow(ran: Callable[[str], Trained]) -> None:
    trained = ran("validation")
    assert_grew(trained)
    assert_grew(trained, "validated")
    trains, validates = (
        {number for record in records for row in record["epochs"].values() for number in row["ids"]}
        for records in (trained.ranks, trained.more["validated"])
    )
    assert not trains & validates


def test_default_fields_arrive_with_their_values(ran: Callable[[str], Trained]) -> None:
    """Ragged, str, bytes and the key; the script compares them in each step."""
    assert ran("fields").epochs() == [(FIRST, 0)]


def test_a_loop_left_early_trains_no_sample_twice(ran: Callable[[str], Trained]) -> None:
    trained = ran("stop")
    assert trained.epochs()[0] == (FIRST, 0)
    assert trained.epochs()[1][1] == 0
    assert trained.epochs()[1][0] in (60, 64), "two steps of both workers, of 144 or 96 samples"


def test_a_second_fit_continues_with_the_next_epoch(ran: Callable[[str], Trained]) -> None:
    trained = ran("twice")
    assert [int(epoch) for epoch in trained.more["before"][0]["epochs"]] == [0, 1]
    assert [int(epoch) for epoch in trained.ranks[0]["epochs"]] == [2, 3]
    assert trained.passes()[0] == (192, 192, 0), "a fit of its own begins with all that came"
    assert all((distinct, again) == (snapshot, 0) for snapshot, distinct, again in trained.passes())


def test_prepare_data_loader_refuses_a_loader_and_keeps_a_sampler_only_on_request(
    ran: Callable[[str], Trained],
) -> None:
    """Each sample occurs once with its own DistributedSampler, in the order of epoch 0 and without growth. With
    add_dist_sampler=False the EpochSampler of the two workers stays, and growth appears.
    """
    trained = ran("prepared")
    for record in trained.ranks:
        assert record["samplers"] == ["DistributedSampler", "EpochSampler"]
        assert len(record["errors"]) == 2
        assert all("'sampler'" in error for error in record["errors"])
    epochs = trained.epochs()
    assert epochs[:2] == [(96, 0), (96, 0)], "192 samples are there in the second"
    assert epochs[2:] == [(192, 0), (240, 0)]
