"""torchdata's StatefulDataLoader over a CacheDataset and an EpochSampler, with batches built in this process and in
workers.

The iterator of an EpochSampler has a state: the number of the epoch, its shards, and the number of drawn indices. A
CacheDataset has no validation split.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from cachetool.core.errors import UsageError
from cachetool.loaders.torch import CacheDataset
from tests.trainers.conftest import Cell
from tests.trainers.growing import FIRST, LAST, fill

pytestmark = pytest.mark.trainers
WORKERS = pytest.mark.parametrize("workers", ["0", "2"])


@pytest.mark.first
def test_every_epoch_trains_the_grown_cache(cell: Cell) -> None:
    trained = cell("stateful", "grow", arguments=["0"])
    assert trained.passes() == [(96, 96, 0), (144, 144, 0), (192, 192, 0), (240, 240, 0)]


def test_every_epoch_trains_the_grown_cache_with_persistent_workers(cell: Cell) -> None:
    trained = cell("stateful", "grow", arguments=["2"])
    assert trained.passes() == [(96, 96, 0), (144, 144, 0), (192, 192, 0), (240, 240, 0)]


@WORKERS
@pytest.mark.parametrize("case", ["resume", "resume-number"])
def test_an_epoch_left_in_the_middle_resumes(case: str, workers: str, cell: Cell) -> None:
    """The program may call ``sampler.set_epoch(n)`` or not."""
    trained = cell("stateful", case, arguments=[workers])
    assert trained.passes() == [(LAST, LAST, 0)] * 3


@WORKERS
def test_an_epoch_resumes_with_its_samples_after_the_cache_grew(workers: str, cell: Cell) -> None:
    trained = cell("stateful", "resume-growing", arguments=[workers])
    assert trained.epochs() == [(144, 0), (144, 0), (LAST, 0)]


@WORKERS
def test_default_fields_arrive_with_their_values(workers: str, cell: Cell) -> None:
    trained = cell("stateful", "fields", arguments=[workers])
    assert trained.epochs() == [(FIRST, 0)] * 4


@WORKERS
def test_an_epoch_left_early_is_followed_by_a_complete_one(workers: str, cell: Cell) -> None:
    trained = cell("stateful", "stop", arguments=[workers])
    assert trained.passes() == [(96, 96, 0), (144, 48, 0), (192, 192, 0), (240, 240, 0)]


@WORKERS
def test_a_second_fit_trains_the_grown_cache(workers: str, cell: Cell) -> None:
    trained = cell("stateful", "twice", arguments=[workers])
    assert trained.passes() == [(96, 96, 0), (144, 144, 0), (192, 192, 0), (240, 240, 0)]


def test_a_cache_dataset_has_no_validation_split(tmp_path: Path) -> None:
    """Use a separate dataset, or the ``Loader``, for validation."""
    cache = fill(tmp_path / "cache")
    with pytest.raises(UsageError, match=r"^split=.*cachetool\.loaders\.torch\.Loader"):
        CacheDataset(cache, split="train")  # type: ignore[call-arg]
