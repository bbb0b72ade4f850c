"""The state of an EpochSampler's iterator, which torchdata's StatefulDataLoader saves and loads."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from cachetool.cache import CacheDir
from cachetool.core.errors import UsageError
from cachetool.loaders.torch import CacheDataset, EpochSampler
from tests.loaders.conftest import run_script
from tests.loaders.numbered import put


def begun(cache: CacheDir, *, epoch: int = 0, **options: Any) -> tuple[CacheDataset, Any]:
    """Return a dataset, and the iterator of a sampler that begins this epoch."""
    dataset = CacheDataset(cache, fields=["number"], run="one")
    sampler = EpochSampler(dataset, **{"seed": 3, **options})
    sampler.set_epoch(epoch)
    return dataset, iter(sampler)


def numbers(dataset: CacheDataset, indices: Any) -> list[int]:
    """Return the numbers of the samples at these indices."""
    return [int(dataset[index]["number"]) for index in indices]


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("taken", [0, 1, 31, 59, 60])
def test_an_epoch_resumes_with_its_samples_in_its_order(taken: int, shuffle: bool, cache: CacheDir) -> None:
    dataset, indices = begun(cache, epoch=4, shuffle=shuffle)
    with dataset:
        whole = numbers(dataset, islice(indices, 60))
    dataset, indices = begun(cache, epoch=4, shuffle=shuffle)
    with dataset:
        before = numbers(dataset, islice(indices, taken))
        state = json.loads(json.dumps(indices.state_dict()))
    put(cache, range(60, 100))
    dataset, indices = begun(cache, shuffle=shuffle)
    with dataset:
        indices.load_state_dict(state)
        after = numbers(dataset, indices)
        sampler = indices._sampler
        assert sampler.epoch == 5
        assert len(numbers(dataset, sampler)) == 100
    if taken:  # otherwise none of its samples was read, and the epoch takes the current samples
        assert before + after == whole
    else:
        assert sorted(after) == list(range(100))


def test_an_epoch_resumes_with_another_number_of_ranks(cache: CacheDir) -> None:
    ranks = [begun(cache, rank=rank, world_size=2) for rank in range(2)]
    before = [numbers(dataset, islice(indices, 11)) for dataset, indices in ranks]
    states = [indices.state_dict() for _, indices in ranks]
    for dataset, _ in ranks:
        dataset.close()
    assert states[0] == states[1]
    put(cache, range(60, 100))
    ranks = [begun(cache, rank=rank, world_size=3) for rank in range(3)]
    after = []
    for dataset, indices in ranks:
        indices.load_state_dict(states[0])
        after.append(numbers(dataset, indices))
    for dataset, _ in ranks:
        dataset.close()
    assert [len(part) for part in after] == [12, 12, 12]  # 38 are left, and drop_last leaves out two of them
    seen = [number for part in (*before, *after) for number in part]
    assert len(set(seen)) == len(seen) == 58


def test_a_loaded_state_is_returned_unchanged_before_the_first_index(cache: CacheDir) -> None:
    dataset, indices = begun(cache, epoch=2)
    with dataset:
        numbers(dataset, islice(indices, 31))
        state = indices.state_dict()
    dataset, indices = begun(cache)
    with dataset:
        indices.load_state_dict(state)
        assert indices.state_dict() == state


def test_a_finished_epoch_is_over_on_ranks_that_took_one_more_step(cache: CacheDir) -> None:
    put(cache, [60])
    dataset, indices = begun(cache, rank=0, world_size=2, drop_last=False)
    with dataset:
        assert len(numbers(dataset, indices)) == 31
        state = indices.state_dict()
    dataset, indices = begun(cache, rank=0, world_size=2, drop_last=False)
    with dataset:
        indices.load_state_dict(state)
        assert numbers(dataset, indices) == []


def test_an_epoch_whose_shards_were_evicted_is_refused(cache: CacheDir) -> None:
    dataset, indices = begun(cache)
    with dataset:
        next(indices)
        state = indices.state_dict()
    cache.evict(cache.usage().total - 1)
    dataset, indices = begun(cache)
    with dataset:
        indices.load_state_dict(state)
        with pytest.raises(
            UsageError, match=r"1 of 3 shards of the epoch to resume were evicted .* sampler.set_epoch\(n\)"
        ):
            next(indices)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"state": 9}, "not a state of EpochSamplers of this version"),
        ({"seed": 4}, "seed=4, but this EpochSampler has 3"),
        ({"shuffle": False}, "shuffle=False"),
        ({"position": -1}, "'position' is -1"),
        ({"parts": "all"}, "'parts' is 'all'"),
        ({"samples": None}, "'samples' is None"),
    ],
)
def test_an_invalid_state_of_the_sampler_is_refused(change: dict[str, Any], says: str, cache: CacheDir) -> None:
    dataset, indices = begun(cache)
    with dataset:
        next(indices)
        state = {**indices.state_dict(), **change}
        with pytest.raises(UsageError, match=says):
            indices.load_state_dict(state)


def test_a_stateful_data_loader_resumes_in_the_middle_of_an_epoch_while_the_cache_grows(tmp_path: Path) -> None:
    """The loader has 0 or 2 workers, persistent or not, and also runs as two ranks of one run."""
    seen = run_script("torch_stateful.py", tmp_path / "cache")
    assert len(seen["cases"]) == 5
    for case, facts in seen["cases"].items():
        assert all(facts.values()), (case, facts)
    assert seen["leases"] == 0
