"""Checks leases, copies, ranks and errors of the datasets without a DataLoader's workers. ``torch_single.py ROOT``."""

from __future__ import annotations

import gc
import json
import multiprocessing
import os
import pickle
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lmdb
import torch
from torch.utils.data import ConcatDataset, DataLoader, Subset

import cachetool
from cachetool import CacheToolError
from cachetool.cache import CacheDir, open_cache
from cachetool.loaders.torch import CacheDataset, EpochSampler, LMDBDataset, Samples, TensorList
from tests.loaders.numbered import EVERY, SMALL, digest, leases, put


def refused(call: Callable[[], Any]) -> str:
    """Return the message of the error that a call raises, or "" without an error."""
    try:
        call()
    except (CacheToolError, IndexError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def forked(work: Callable[[], Any]) -> int:
    """Return the exit code of a forked child that does ``work`` and ends like any program."""
    child = multiprocessing.get_context("fork").Process(target=work)
    child.start()
    child.join()
    return child.exitcode or 0


def lifetime(cache: CacheDir, out: dict[str, Any]) -> None:
    """Check that a lease lives exactly as long as its dataset."""
    dataset = CacheDataset(cache)
    out["one dataset"] = len(leases(cache))
    forked(dataset.close)
    forked(gc.collect)
    out["after forked children"] = len(leases(cache))
    copy = pickle.loads(pickle.dumps(dataset))
    out["copy is equal"] = digest(SMALL, copy[17]) == digest(SMALL, dataset[17])
    out["copy holds none"] = len(leases(cache))
    copy.refresh()
    out["copy after refresh"] = len(leases(cache))
    del copy
    out["copy deleted"] = len(leases(cache))
    dataset.close()
    dataset.close()
    out["closed"] = len(leases(cache))
    out["read after close"] = refused(lambda: dataset[0])

    cycle: list[Any] = [CacheDataset(cache)]
    cycle.append(cycle)
    out["in a cycle"] = len(leases(cache))
    del cycle
    with cache.catalog.write():  # the garbage collector may run in the middle of a transaction
        gc.collect()
    for thread in threading.enumerate():
        if thread.name == "cachetool-release":
            thread.join()
    out["collected"] = len(leases(cache))
    with CacheDataset(cache) as dataset, open_cache(cache.root, create=False) as other:
        other.close()
        out["another handle closed"] = len(leases(cache))


def ranks(cache: CacheDir, out: dict[str, Any]) -> None:
    """Check that two ranks of one run take the same snapshot for the same epoch, and divide its samples."""
    with CacheDataset(cache, run="job 1") as zero, CacheDataset(cache, run="job 1") as one:
        samplers = [EpochSampler(d, rank=r, world_size=2) for r, d in enumerate((zero, one))]
        iterators = [iter(s) for s in samplers]
        mine = [next(iterators[0])]
        put(cache, range(60, 81))
        theirs = [next(iterators[1])]
        out["rank versions"] = zero.version == one.version
        mine, theirs = mine + list(iterators[0]), theirs + list(iterators[1])
        out["rank counts"] = [len(mine), len(theirs), len(set(mine) | set(theirs))]
        out["next epoch"] = [len(list(s)) for s in samplers]
        out["rank numbers"] = int(zero[mine[0]]["number"]) != int(one[theirs[0]]["number"])
        samplers[0].set_epoch(5)
        fifth, sixth = list(samplers[0]), list(samplers[0])
        samplers[0].set_epoch(5)
        out["order of an epoch"] = [fifth == list(samplers[0]), fifth == sixth]
    with CacheDataset(cache) as alone:
        out["ranks without run"] = refused(lambda: EpochSampler(alone, rank=0, world_size=2))
        out["rank outside"] = refused(lambda: EpochSampler(CacheDataset(cache, run="r"), rank=2, world_size=2))
        os.environ.update(RANK="1", WORLD_SIZE="3")
        with CacheDataset(cache, run="job 2") as dataset:
            sampler = EpochSampler(dataset)
            out["from environment"] = [sampler.rank, sampler.world_size, len(sampler), len(dataset)]


def shapes(cache: CacheDir, out: dict[str, Any]) -> None:
    """Record the form of a sample and a batch."""
    with CacheDataset(cache, dataset="default") as dataset:
        sample, batch = dataset[3], dataset.__getitems__([5, 3, -1])
        out["kinds"] = {k: type(v).__name__ for k, v in sample.items()}
        out["writable"] = sample["x"].add_(1) is sample["x"]
        columns = dataset.collate(batch)
        out["batch"] = {k: type(v).__name__ for k, v in columns.items()}
        ragged = columns["ragged"]
        assert isinstance(batch, Samples)
        assert isinstance(ragged, TensorList)
        out["ragged"] = [list(t.shape) for t in ragged] == [list(dataset[i]["ragged"].shape) for i in (5, 3, -1)]
        out["ragged slice"] = len(ragged[1:]), len(batch[:2]), ragged[-1].shape == ragged[2].shape
        single = dataset.collate([dataset[5], dataset[3], dataset[-1]])
        out["collate of dicts"] = all(
            digest(SMALL, {k: v[i] for k, v in single.items()}) == digest(SMALL, batch[i]) for i in range(3)
        )
        out["subset"] = [int(b["number"][0]) for b in DataLoader(Subset(dataset, [7, 9]), collate_fn=dataset.collate)]
        out["concat"] = len(next(iter(DataLoader(ConcatDataset([dataset] * 2), 100, collate_fn=dataset.collate)))["x"])
        out["outside"] = [refused(lambda at=at: dataset[at]) for at in (len(dataset), -len(dataset) - 1, -(2**70))]
        out["two snapshots"] = refused(lambda: dataset.__getitems__([(dataset.version << 40) + 1, 1]))
        out["empty"] = len(dataset.__getitems__([]))
        out["tensor index"] = digest(SMALL, dataset[torch.tensor(3)]) == digest(SMALL, dataset[3])
    with CacheDataset(cache, dataset="default", fields=["words", "x"]) as dataset:
        out["fields"] = list(dataset[0])
    numeric = [f.name for f in EVERY if f.kind == "fixed"]
    with CacheDataset(cache, dataset="every", fields=numeric) as dataset:
        default = next(iter(DataLoader(dataset, batch_size=4)))  # PyTorch's own collate function
        own = dataset.collate(dataset.__getitems__(range(4)))
        out["default collate"] = all(torch.equal(default[name], own[name]) for name in numeric)
        out["dtypes"] = {name: str(default[name].dtype) for name in numeric if name.startswith("scalar")}


def errors(cache: CacheDir, out: dict[str, Any]) -> None:
    """Check the errors, and that no lease remains after them."""
    before = len(leases(cache))
    root = str(cache.root)
    out["no dataset"] = refused(lambda: CacheDataset(root, dataset="nothere"))
    out["unknown field"] = refused(lambda: CacheDataset(root, dataset="every", fields=["nothing"]))
    out["other format"] = refused(lambda: LMDBDataset(root, dataset="every"))
    out["no cache"] = refused(lambda: CacheDataset(root + "/nothing"))
    out["value format"] = refused(lambda: LMDBDataset(root, dataset="default", value_format="raw"))
    gc.collect()
    out["left by errors"] = len(leases(cache)) - before


def files(cache: CacheDir, out: dict[str, Any]) -> None:
    """Read LMDB files outside a cache: one of ours, one foreign file."""
    ours = cache.shards("default")[0].path / "data.lmdb"
    with LMDBDataset(ours) as dataset:
        out["file"] = [len(dataset), [int(dataset[i]["number"]) for i in (0, 19)], dataset.refresh()]
        out["file epoch"] = sorted(
            int(dataset[i]["number"]) for i in EpochSampler(dataset, rank=0, world_size=1)
        ) == list(range(20))
    folder = cache.root.parent / "files"
    with cachetool.open_cache(cache.root) as opened:
        opened.convert(to="lmdb", out=folder, dataset="default", shard_size=2000)
    for kind in (CacheDataset, LMDBDataset):
        with kind(folder) as dataset, CacheDataset(cache, dataset="default") as same:
            sampler = EpochSampler(dataset, shuffle=False, rank=0, world_size=1)
            out[f"folder, {kind.__name__}"] = [digest(SMALL, dataset[i]) for i in sampler] == [
                digest(SMALL, same[i]) for i in range(len(same))
            ]
    out["files in the folder"] = len(list(folder.glob("part-*")))
    foreign = cache.root.parent / "foreign"
    with lmdb.open(str(foreign), map_size=2**20) as env, env.begin(write=True) as txn:
        for n in range(5):
            txn.put(b"key%d" % n, bytes([n]) * n)
    out["foreign"] = refused(lambda: LMDBDataset(foreign))
    with LMDBDataset(foreign, value_format="raw") as dataset:
        out["raw"] = [[s["key"].decode(), list(s["value"])] for s in (dataset[i] for i in range(len(dataset)))]
        loader = DataLoader(dataset, batch_size=2, num_workers=2, multiprocessing_context="fork")
        out["raw in workers"] = sorted(key.decode() for batch in loader for key in batch["key"])
    out["raw format"] = refused(lambda: LMDBDataset(foreign, value_format="pickle"))


def main(root: str) -> None:
    cache = open_cache(Path(root) / "cache", max_size="20MB")
    for start in (0, 20, 40):
        put(cache, range(start, start + 20))
    out: dict[str, Any] = {}
    lifetime(cache, out)
    ranks(cache, out)
    put(cache, range(9), schema=EVERY, dataset="every", format="zarr")
    shapes(cache, out)
    errors(cache, out)
    files(cache, out)
    with open_cache(cache.root) as handle:
        dataset = CacheDataset(handle, dataset="default")
    out["left open"] = len(leases(cache)), len(dataset)
    print(json.dumps(out))


if __name__ == "__main__":
    main(*sys.argv[1:])
