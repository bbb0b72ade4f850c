"""The iterable-style dataset under one start method of workers. ``torch_iterable.py METHOD ROOT``, ROOT to be made."""

from __future__ import annotations

import json
import multiprocessing
import sys
import time
from typing import Any

import torch
from torch.utils.data import DataLoader

from cachetool import CacheToolError, CapBlocked
from cachetool.cache import CacheDir, open_cache
from cachetool.loaders.snapshots.follow import CacheSubscription
from cachetool.loaders.torch import CacheIterableDataset
from tests.loaders.numbered import EVERY, digest, leases, put


def numbers(loader: Any) -> list[int]:
    """The numbers of all samples in the order in which they came."""
    return [n for batch in loader for n in batch["number"].tolist()]


def once(found: list[int]) -> list[int]:
    """First and last number, how many there are, and how many different ones."""
    return [min(found), max(found), len(found), len(set(found))]


def evict_oldest(cache: CacheDir) -> bool:
    """Choose the oldest shard for eviction; whether it has to wait for a reader."""
    try:
        cache.evict(cache.usage().total - 1)
    except CapBlocked:
        return True
    return False


def growing(cache: CacheDir, workers: int, persistent: bool) -> dict[str, Any]:
    """Three rounds of growth and one of eviction, an epoch that was broken off in between."""
    dataset = CacheIterableDataset(cache, batch_size=8, fields=["number", "x"], seed=3)
    options: dict[str, Any] = {"num_workers": workers, "persistent_workers": persistent} if workers else {}
    loader = DataLoader(dataset, batch_size=None, **options)
    out: dict[str, Any] = {"len": len(loader), "leases before": len(leases(cache))}
    epochs = [numbers(loader)]
    start = len(epochs[0])
    for at in range(2):
        for step, _ in enumerate(loader):
            if step == 0:
                put(cache, range(start + 20 * at, start + 20 * at + 20))
        epochs.append(numbers(loader))
    out["shuffled"] = epochs[0] != sorted(epochs[0])
    next(iter(loader))  # broken off with batches in flight
    out["leases after break"] = None if workers else len(leases(cache))
    epochs.append(numbers(loader))
    out["new order"] = epochs[-1] != epochs[-2]
    out["waits"] = None
    for step, _ in enumerate(loader):
        if step == 0:
            out["waits"] = evict_oldest(cache)
    epochs.append(numbers(loader))
    torch.manual_seed(1)  # workers then have the seeds of an earlier epoch
    again = DataLoader(dataset, batch_size=None, **options)
    numbers(again)
    put(cache, range(start + 40, start + 45))
    torch.manual_seed(1)
    out["same seeds"] = len(numbers(DataLoader(dataset, batch_size=None, **options))) == sum(
        shard.samples for shard in cache.shards()
    )
    out["epochs"] = [once(epoch) for epoch in epochs]
    dataset.close()
    del loader, again
    out["leases"] = len(leases(cache))
    return out


def other_workers(root: str) -> list[list[int]]:
    """Two loaders whose workers have the same seeds, the first one with fewer of them, which live on."""
    dataset = CacheIterableDataset(root, dataset="default", batch_size=8, fields=["number"])
    newest = CacheSubscription.newest

    def slow(self: CacheSubscription, **options: Any) -> Any:
        info = torch.utils.data.get_worker_info()
        if info is not None and info.id == 0:
            time.sleep(0.2)  # as on a busy catalog: the others look first
        return newest(self, **options)

    CacheSubscription.newest = slow  # type: ignore[method-assign]
    try:
        torch.manual_seed(0)
        first = DataLoader(dataset, batch_size=None, num_workers=1, persistent_workers=True)
        found = [once(numbers(first))]
        torch.manual_seed(0)
        found.append(once(numbers(DataLoader(dataset, batch_size=None, num_workers=3))))
    finally:
        CacheSubscription.newest = newest  # type: ignore[method-assign]
        dataset.close()
    return found


def every(root: str, workers: int) -> list[str]:
    """Digests of all samples of every kind of field, one by one."""
    dataset = CacheIterableDataset(root, dataset="every", shuffle="window")
    loader = DataLoader(dataset, batch_size=None, num_workers=workers)
    return sorted(digest(EVERY, sample) for sample in loader)


def ranks(root: str, **options: Any) -> list[Any]:
    """What three ranks read in two epochs, of two workers each."""
    sets = [CacheIterableDataset(root, dataset="default", rank=r, world_size=3, run="r", **options) for r in range(3)]
    out = []
    for epoch in range(2):
        read = []
        for dataset in sets:
            dataset.set_epoch(epoch)
            rest = {} if dataset.batch_size else {"batch_size": 4}
            loader = DataLoader(dataset, **({"batch_size": None} | rest), num_workers=2, collate_fn=collate)
            read.append([batch["number"].tolist() for batch in loader])
            assert not dataset.batch_size or len(loader) == len(read[-1])
        found = [n for batches in read for batch in batches for n in batch]
        counts = [sum(map(len, batches)) for batches in read]
        out.append([[len(batches) for batches in read], counts, len(found), len(set(found)), found])
    out.append(out[0].pop() != out[1].pop())
    for dataset in sets:
        dataset.close()
    return out


def left_out(root: str) -> list[list[int]]:
    """Of 71 samples those that no rank gives, in each of some epochs."""
    own = {"dataset": "default", "drop_last": True, "world_size": 3, "run": "left out"}
    ranks = [CacheIterableDataset(root, rank=rank, **own) for rank in range(3)]
    found = []
    for epoch in range(6):
        for each in ranks:
            each.set_epoch(epoch)
        given = {int(sample["number"]) for each in ranks for sample in each}
        found.append(sorted(set(range(71)) - given))
    for each in ranks:
        each.close()
    return found


def collate(batch: Any) -> Any:
    return batch if isinstance(batch, dict) else {"number": torch.stack([s["number"] for s in batch])}


def refused(action: Any) -> str:
    try:
        action()
    except CacheToolError as error:
        return f"{type(error).__name__}: {error}"
    return "accepted"


def main(method: str, root: str) -> None:
    multiprocessing.set_start_method(method)
    multiprocessing.set_forkserver_preload(["torch"])
    out: dict[str, Any] = {}
    cache = open_cache(root, max_size="20MB")
    for at, name in enumerate(("lmdb", "hdf5", "zarr", "tfrecord")):
        put(cache, range(10 * at, 10 * at + 10), format=name, schema=EVERY, dataset="every")
    cases = [(0, False), (2, False), (2, True), (8, False)] if method == "fork" else [(2, True)]
    for workers, persistent in cases:
        with open_cache(f"{root}-{workers}-{persistent}", max_size="20MB") as grown:
            for start in (0, 20, 40):
                put(grown, range(start, start + 20))
            out[f"{workers} {persistent}"] = growing(grown, workers, persistent)
    out["every"] = [every(root, workers) for workers in ((0, 3) if method == "fork" else (2,))]
    if method == "fork":
        for start in range(0, 70, 35):
            put(cache, range(start, start + 35))
        put(cache, range(70, 71))
        out["ranks"] = ranks(root, batch_size=4)
        out["ranks, drop_last"] = ranks(root, batch_size=4, drop_last=True)
        out["ranks, samples"] = ranks(root)
        out["ranks, samples, drop_last"] = ranks(root, drop_last=True)
        out["left out"] = left_out(root)
        out["other workers"] = other_workers(root)
        few = {"batch_size": 24, "drop_last": True, "rank": 0, "world_size": 3, "run": "few"}
        out["too few"] = refused(lambda: list(CacheIterableDataset(root, dataset="default", **few)))
        with_workers = [
            numbers(DataLoader(CacheIterableDataset(root, dataset="default", batch_size=5), None, num_workers=w))
            for w in (0, 1, 3)
        ]
        out["same order"] = with_workers[0] == with_workers[1] == with_workers[2]
        out["errors"] = [
            refused(lambda: CacheIterableDataset(root, dataset="default", rank=0, world_size=2)),
            refused(lambda: CacheIterableDataset(root, dataset="default", batch_size=0)),
            refused(lambda: CacheIterableDataset(root, dataset="default", shuffle="half")),
            refused(lambda: CacheIterableDataset(root, dataset="default", fields=["nothing"])),
            refused(lambda: CacheIterableDataset(root + "/nothing")),
            refused(lambda: CacheIterableDataset(root, dataset="default", batch_size=4.0)),  # type: ignore[arg-type]
        ]
        out["leases"] = len(leases(cache))
    print(json.dumps(out))


if __name__ == "__main__":
    main(*sys.argv[1:])
