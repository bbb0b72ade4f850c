"""Reads PyTorch's datasets with few descriptors. ``torch_many.py ROOT DESCRIPTORS``; prints one line of JSON.

ROOT is a cache with the datasets ``mixed`` (all formats) and ``lmdb``.
"""

from __future__ import annotations

import json
import resource
import sys
from typing import Any

from torch.utils.data import DataLoader

from cachetool.loaders.torch import CacheDataset, EpochSampler, LMDBDataset


def numbers(loader: DataLoader[Any]) -> list[int]:
    return sorted(n for batch in loader for n in batch["number"].tolist())


def main(root: str, descriptors: int) -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (descriptors, descriptors))
    out = {}
    for workers in (0, 2):
        for kind, name in ((CacheDataset, "mixed"), (LMDBDataset, "lmdb")):
            with kind(root, dataset=name, fields=["number", "x"]) as dataset:
                sampler = EpochSampler(dataset)
                loader = DataLoader(dataset, 40, sampler=sampler, num_workers=workers, collate_fn=dataset.collate)
                out[f"{kind.__name__} {workers}"] = [numbers(loader) for _ in range(2)]
    print(json.dumps(out))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
