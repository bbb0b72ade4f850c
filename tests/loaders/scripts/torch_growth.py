"""Grows and shrinks a cache under persistent workers. ``torch_growth.py KIND METHOD ROOT``; creates ROOT."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import sys
from typing import Any

from torch.utils.data import BatchSampler, DataLoader

from cachetool import CacheToolError, CapBlocked
from cachetool.cache import CacheDir, open_cache
from cachetool.loaders.torch import CacheDataset, EpochSampler, LMDBDataset
from tests.loaders.numbered import leases, put


def evict_oldest(cache: CacheDir) -> bool:
    """Evict the oldest shard. Return True if the eviction waits for a reader."""
    try:
        cache.evict(cache.usage().total - 1)
    except CapBlocked:
        return True
    return False


def numbers(batches: Any) -> list[int]:
    """Return the first and last number of all samples, how many samples there are, and how many different ones."""
    found = [n for batch in batches for n in batch["number"].tolist()]
    return [min(found), max(found), len(found), len(set(found))]


def main(kind: str, method: str, root: str) -> None:
    multiprocessing.set_start_method(method)
    multiprocessing.set_forkserver_preload(["torch"])
    out: dict[str, Any] = {}
    cache = open_cache(root, max_size="20MB")
    for start in (0, 20, 40):
        put(cache, range(start, start + 20))
    dataset = (LMDBDataset if kind == "lmdb" else CacheDataset)(cache, fields=["number", "x"])
    sampler = EpochSampler(dataset, seed=3)
    options: dict[str, Any] = {"num_workers": 2, "persistent_workers": True, "prefetch_factor": 4}
    loader = DataLoader(dataset, batch_size=8, sampler=sampler, collate_fn=dataset.collate, **options)

    # A shard that arrives in the middle of an epoch is in the next epoch.
    first = []
    for step, batch in enumerate(loader):
        first.append(batch)
        if step == 0:
            put(cache, range(60, 80))
    out["epoch 1"], out["leases"] = numbers(first), len(leases(cache))
    second = list(loader)
    out["epoch 2"] = numbers(second)
    order = [n for batch in second for n in batch["number"].tolist()]
    out["shuffled"] = order != sorted(order)

    # An evicted shard stays until the epoch that reads it has ended, and is in no later epoch.
    third = []
    for step, batch in enumerate(loader):
        if step == 0:
            out["waits"] = evict_oldest(cache)
            out["on disk"] = len(list(cache.layout.shards.iterdir()))
        third.append(batch)
    out["epoch 3"] = numbers(third)
    put(cache, range(80, 100))
    out["epoch 4"], out["on disk later"] = numbers(loader), len(list(cache.layout.shards.iterdir()))

    # An interrupted epoch with batches in flight does not disturb the next epoch.
    next(iter(loader))
    out["waits again"] = evict_oldest(cache)
    put(cache, range(100, 120))
    out["epoch 6"], out["epochs"] = numbers(loader), sampler.epoch
    del loader

    # Batches of indices, the loader's own collate function, and workers for one epoch only.
    batched = DataLoader(dataset, batch_sampler=BatchSampler(sampler, 8, drop_last=False), num_workers=2)
    out["batched"] = numbers(batched)

    # Indices without a version are valid until a shard is evicted, and refused afterwards.
    plain = DataLoader(dataset, batch_size=8, shuffle=True, collate_fn=dataset.collate, **options)
    out["plain 1"] = numbers(plain)
    put(cache, range(120, 140))
    dataset.refresh()
    out["plain 2"] = numbers(plain)
    old = next(iter(sampler))
    evict_oldest(cache)
    dataset.refresh()
    fresh = DataLoader(dataset, batch_size=8, shuffle=True, collate_fn=dataset.collate, num_workers=2)
    out["plain, new workers"] = numbers(fresh)

    # An index of a snapshot that has ended.
    try:
        out["old index"] = int(dataset[old]["number"])
    except CacheToolError as error:
        out["old index"] = str(error)

    try:
        out["plain 3"] = numbers(plain)
    except CacheToolError as error:
        out["plain 3"] = str(error).splitlines()[-1]
    dataset.close()
    out["leases at the end"] = len(leases(cache))
    print(json.dumps(out))
    # otherwise PyTorch waits five seconds for each worker after an error in one of them
    for worker in plain._iterator._workers:
        with contextlib.suppress(RuntimeError):  # PyTorch raises this if the signal of a worker's end arrives
            worker.kill()


if __name__ == "__main__":
    main(*sys.argv[1:])
