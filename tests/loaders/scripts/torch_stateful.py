"""Interrupts epochs and resumes them with torchdata's StatefulDataLoader. ``torch_stateful.py ROOT``."""

from __future__ import annotations

import json
import pickle
import sys
from itertools import islice
from typing import Any

from torchdata.stateful_dataloader import StatefulDataLoader

from cachetool.cache import open_cache
from cachetool.loaders.torch import CacheDataset, EpochSampler
from tests.loaders.numbered import leases, put

BATCH, TAKEN = 4, 5


def numbers(batches: Any) -> list[int]:
    return [n for batch in batches for n in batch["number"].tolist()]


def made(root: str, workers: int, rank: int = 0, world_size: int = 1, **options: Any) -> tuple[CacheDataset, Any]:
    """Return a dataset and its loader, for one rank of a run."""
    dataset = CacheDataset(root, fields=["number"], run="run" if world_size > 1 else None)
    sampler = EpochSampler(dataset, seed=4, rank=rank, world_size=world_size)
    loader: Any = StatefulDataLoader(
        dataset, batch_size=BATCH, sampler=sampler, num_workers=workers, collate_fn=dataset.collate, **options
    )
    return dataset, loader


def count(cache: Any) -> int:
    return sum(shard.samples for shard in cache.shards())


def broken_off(cache: Any, root: str, workers: int, persistent: bool) -> dict[str, Any]:
    """Interrupt an epoch in one process. Record the samples before the state, after it, and those of other loaders that
    resume.
    """
    options: dict[str, Any] = {"persistent_workers": True} if persistent else {}
    out: dict[str, Any] = {}
    dataset, loader = made(root, workers, **options)
    batches = iter(loader)
    before = numbers(islice(batches, TAKEN))
    state = pickle.loads(pickle.dumps(loader.state_dict()))
    rest = numbers(batches)
    out["taken"] = len(before)
    out["whole"] = sorted(before + rest) == list(range(count(cache)))
    ended = loader.state_dict()
    del batches, loader
    dataset.close()

    put(cache, range(count(cache), count(cache) + 10))  # is in no epoch that began before
    dataset, loader = made(root, workers, **options)
    loader.load_state_dict(state)
    out["the same rest"] = numbers(loader) == rest
    following = numbers(loader)
    out["then the next epoch"] = sorted(following) == list(range(count(cache)))
    del loader
    dataset.close()

    dataset, loader = made(root, workers, **options)
    loader.load_state_dict(ended)
    out["after an end the next epoch"] = numbers(loader) == following
    del loader
    dataset.close()
    return out


def two_ranks(cache: Any, root: str, workers: int) -> dict[str, Any]:
    """Stop both ranks after the same number of steps, grow the cache, and resume both."""
    ranks = [made(root, workers, rank, 2) for rank in range(2)]
    begun = [iter(loader) for _, loader in ranks]
    before = [numbers(islice(batches, 3)) for batches in begun]
    states = [pickle.loads(pickle.dumps(loader.state_dict())) for _, loader in ranks]
    rest = [numbers(batches) for batches in begun]
    there = count(cache)
    del begun
    for dataset, _ in ranks:
        dataset.close()

    put(cache, range(there, there + 10))
    ranks = [made(root, workers, rank, 2) for rank in range(2)]
    for (_, loader), state in zip(ranks, states, strict=True):
        loader.load_state_dict(state)
    again = [numbers(loader) for _, loader in ranks]
    following = [numbers(loader) for _, loader in ranks]
    for dataset, _ in ranks:
        dataset.close()
    return {
        "the same rest": again == rest,
        "each sample once": sorted(n for part in (*before, *rest) for n in part) == list(range(there)),
        "then the next epoch": sorted(n for part in following for n in part) == list(range(there + 10)),
    }


def main(root: str) -> None:
    cache = open_cache(root, max_size="20MB")
    for start in (0, 20, 40):
        put(cache, range(start, start + 20))
    out: dict[str, Any] = {"cases": {}}
    for workers, persistent in ((0, False), (2, False), (2, True)):
        out["cases"][f"{workers} {persistent}"] = broken_off(cache, root, workers, persistent)
    for workers in (0, 2):
        out["cases"][f"two ranks, {workers}"] = two_ranks(cache, root, workers)
    out["leases"] = len(leases(cache))
    print(json.dumps(out))


if __name__ == "__main__":
    main(*sys.argv[1:])
