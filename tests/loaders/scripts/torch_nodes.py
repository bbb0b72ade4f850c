"""One process of a job on nodes that have a part of one source each. Prints the keys that it read in each epoch as one
line of JSON. Arguments: the node's cache, the source, and the samples that the node pulls after its first epochs.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[3]))

import cachetool
from cachetool.core.errors import UsageError
from cachetool.loaders.torch import CacheDataset, EpochSampler, Loader


def keys(batches: Iterable[dict[str, Any]]) -> list[list[str]]:
    return [list(batch["__key__"]) for batch in batches]


def main(root: str, source: str, samples: str) -> None:
    torch.distributed.init_process_group("gloo", timeout=timedelta(seconds=60))
    options: dict[str, Any] = {"batch_size": 4, "fields": ["__key__"], "workers": 1}
    out: dict[str, Any] = {}
    with CacheDataset(root, fields=["__key__"], run="job") as dataset:
        sampler = EpochSampler(dataset)
        batches = torch.utils.data.DataLoader(dataset, batch_size=4, sampler=sampler, collate_fn=dataset.collate)
        out["sampler"] = keys(batches)
    with Loader(root, **options) as loader:
        out["epochs"] = [keys(loader), keys(loader)]
        torch.distributed.barrier()
        if int(os.environ["LOCAL_RANK"]) == 0:
            with cachetool.open_cache(root) as cache:
                cache.pull(source, samples=int(samples), shard_size=2000)
        torch.distributed.barrier()
        loader.refresh()
        torch.distributed.barrier()
        out["epochs"].append(keys(loader))
        begun = [batch["__key__"] for _, batch in zip(range(2), loader, strict=False)]
        state = loader.state_dict()
        torch.distributed.barrier()
    with Loader(root, **options) as loader:
        loader.load_state_dict(state)
        out["epochs"].append([*begun, *keys(loader)])
    torch.distributed.barrier()
    rank = {"rank": int(os.environ.pop("LOCAL_RANK")), "world_size": 2}
    out["refused"] = []
    try:
        iter(Loader(root, **options))
    except UsageError as error:
        out["refused"].append(str(error))
    with CacheDataset(root) as dataset:
        try:
            EpochSampler(dataset)
        except UsageError as error:
            out["refused"].append(str(error))
    with Loader(root, **options, **rank, run="told") as loader:
        out["told"] = keys(loader)
        torch.distributed.barrier()
    print(json.dumps(out))
    torch.distributed.destroy_process_group()


main(*sys.argv[1:])
