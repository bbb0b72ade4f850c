"""Runs map-style datasets over a cache that grows three times and shrinks once, each time in the middle of an epoch.

``torch_rounds.py cache|lmdb METHOD ROOT WORKERS...``: a number of workers, ``8p`` for eight persistent ones; creates
ROOT.
"""

from __future__ import annotations

import json
import multiprocessing
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch.utils.data import DataLoader

from cachetool import CapBlocked
from cachetool.cache import CacheDir, open_cache
from cachetool.loaders.torch import CacheDataset, EpochSampler, LMDBDataset
from tests.loaders.numbered import SMALL, digest, leases, put


def evict_oldest(cache: CacheDir) -> bool:
    """Evict the oldest shard. Return True if the eviction waits for a reader."""
    try:
        cache.evict(cache.usage().total - 1)
    except CapBlocked:
        return True
    return False


def epoch(loader: DataLoader[Any], meanwhile: Callable[[], Any] = lambda: None) -> tuple[list[str], Any]:
    """Return the sorted digests of all samples, and the result of ``meanwhile``, which runs after the first batch."""
    seen, out = [], None
    for step, batch in enumerate(loader):
        if step == 0:
            out = meanwhile()
        seen += [digest(SMALL, {k: v[i] for k, v in batch.items()}) for i in range(len(batch["number"]))]
    return sorted(seen), out


def rounds(cache: CacheDir, kind: str, workers: int, persistent: bool) -> dict[str, Any]:
    """Run five epochs: one before the changes, one after each of three rounds of growth, one after an eviction."""
    formats = ["lmdb"] * 6 if kind == "lmdb" else ["lmdb", "hdf5", "zarr", "tfrecord", "hdf5", "zarr"]
    for at in range(3):
        put(cache, range(20 * at, 20 * at + 20), format=formats[at])
    oldest = cache.shards()[0].id
    dataset = (LMDBDataset if kind == "lmdb" else CacheDataset)(cache)
    loader = DataLoader(
        dataset,
        batch_size=8,
        sampler=EpochSampler(dataset, seed=workers),
        collate_fn=dataset.collate,
        num_workers=workers,
        persistent_workers=persistent,
    )
    epochs = []
    for at in (3, 4, 5):
        epochs.append(epoch(loader, lambda at=at: put(cache, range(20 * at, 20 * at + 20), format=formats[at]))[0])
    last, waits = epoch(loader, lambda: evict_oldest(cache))
    epochs += [last, epoch(loader)[0]]
    readers = [worker.pid for worker in loader._iterator._workers] if persistent else []
    maps = [Path(f"/proc/{pid}/maps").read_text() for pid in ("self", *readers)]
    out = {"epochs": epochs, "waits": waits, "still mapped": sum(oldest in each for each in maps)}
    dataset.close()
    return {**out, "leases": len(leases(cache))}


def main(kind: str, method: str, root: str, *cases: str) -> None:
    multiprocessing.set_start_method(method)
    multiprocessing.set_forkserver_preload(["torch"])
    out = {}
    for case in cases:
        with open_cache(f"{root}-{case}", max_size="20MB") as cache:
            out[case] = rounds(cache, kind, int(case.removesuffix("p")), case.endswith("p"))
    print(json.dumps(out))


if __name__ == "__main__":
    main(*sys.argv[1:])
