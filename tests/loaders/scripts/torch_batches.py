"""Reads batches of a dataset of LMDB shards in workers. ``torch_batches.py ROOT``; prints one line of JSON.

ROOT is a cache of ``NUMBERS`` samples of the schema ``WIDE``.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
from torch.utils.data import DataLoader, default_collate, get_worker_info

from cachetool.loaders.torch import CacheDataset, LMDBDataset
from tests.loaders.numbered import NUMBERS

BATCH = 1100
"""More values than one system call writes."""


class Watched:
    """A collate function that says of each batch whether its tensors are those that the dataset made."""

    def __init__(self, dataset: Any, *, own: bool) -> None:
        self._collate = dataset.collate if own else default_collate

    def __call__(self, samples: Any) -> dict[str, Any]:
        assert get_worker_info() is not None
        batch: dict[str, Any] = self._collate(samples)
        made = {name: column for name, column in samples.columns.items() if isinstance(column, torch.Tensor)}
        same = all(batch[name].data_ptr() == column.data_ptr() for name, column in made.items())
        return {**batch, "uncopied": same and all(column.is_shared() for column in made.values())}


def main(root: str) -> None:
    out = []
    for kind in (CacheDataset, LMDBDataset):
        for own in (True, False):
            with kind(root) as dataset:
                wanted = dataset.collate([dataset[i] for i in range(NUMBERS)])
                watched = Watched(dataset, own=own)
                loader = DataLoader(dataset, BATCH, num_workers=2, collate_fn=watched)
                batches = list(loader)
                same = all(
                    torch.equal(torch.cat([batch[name] for batch in batches]), wanted[name])
                    for name in ("x", "when", "number")
                )
                words = [word for batch in batches for word in batch["words"]] == wanted["words"]
                out.append([same, words, *(batch["uncopied"] for batch in batches)])
    with CacheDataset(root, fields=["number", "words"]) as dataset:
        samples = dataset.__getitems__([-1, 0, -NUMBERS])
        picked = [default_collate(some)["number"].tolist() for some in (samples, [samples[0], dataset[1]])]
    print(json.dumps({"batches": out, "picked": picked}))


if __name__ == "__main__":
    main(*sys.argv[1:])
