"""Checks that both datasets deliver every sample exactly once and unchanged, under one start method of workers.

``torch_once.py METHOD ROOT``: ROOT is a cache with the datasets ``mixed`` (all formats, every dtype) and ``lmdb``.
"""

from __future__ import annotations

import itertools
import json
import multiprocessing
import sys
from typing import Any

from torch.utils.data import DataLoader, RandomSampler

from cachetool.loaders.torch import CacheDataset, EpochSampler, LMDBDataset
from tests.loaders.numbered import EVERY, SMALL, digest

BATCH = 7


def batches(dataset: Any, loader: DataLoader[Any], epochs: int) -> list[list[str]]:
    """Return the sorted digests of each epoch's samples."""
    out = []
    for _ in range(epochs):
        seen = []
        for batch in loader:
            count = len(batch[dataset.schema.names[0]])
            seen += [digest(dataset.schema, {k: v[i] for k, v in batch.items()}) for i in range(count)]
        out.append(sorted(seen))
    return out


def main(method: str, root: str) -> None:
    if method == "forkserver":
        multiprocessing.set_forkserver_preload(["torch"])
    cases = list(itertools.product(("mixed", "lmdb"), (0, 2, 8), (False, True)))
    if method == "spawn":  # each spawned worker imports torch, which takes seconds
        cases = [("mixed", 2, True), ("lmdb", 4, False)]
    results = []
    for name, workers, persistent in cases:
        if persistent and not workers:
            continue
        dataset = CacheDataset(root, dataset=name) if name == "mixed" else LMDBDataset(root, dataset=name)
        assert dataset.schema == (EVERY if name == "mixed" else SMALL)
        with dataset:
            # Files that the parent has read and opened must not affect its workers.
            before = digest(dataset.schema, dataset[3])
            loader = DataLoader(
                dataset,
                batch_size=BATCH,
                sampler=EpochSampler(dataset, seed=workers) if persistent else RandomSampler(dataset),
                num_workers=workers,
                persistent_workers=persistent,
                multiprocessing_context=method if workers else None,
                collate_fn=dataset.collate,
            )
            epochs = batches(dataset, loader, 2 if persistent else 1)
            same = digest(dataset.schema, dataset[3]) == before
            results.append({"case": [name, workers, persistent], "epochs": epochs, "same": same, "steps": len(loader)})
            del loader
    print(json.dumps(results))


if __name__ == "__main__":
    main(*sys.argv[1:])
