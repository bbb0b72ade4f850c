"""Epochs that are broken off and gone on with, by torchdata's loader and by hand. ``torch_resume.py ROOT``."""

from __future__ import annotations

import json
import pickle
import sys
from typing import Any

import torch
from torchdata.stateful_dataloader import StatefulDataLoader

from cachetool import CacheToolError
from cachetool.cache import open_cache
from cachetool.loaders.torch import CacheIterableDataset
from tests.loaders.numbered import leases, put


def numbers(batches: Any) -> list[int]:
    return [n for batch in batches for n in batch["number"].tolist()]


def collate(samples: Any) -> Any:
    return {"number": torch.stack([sample["number"] for sample in samples])}


def made(root: str, workers: int, size: int | None, **options: Any) -> Any:
    dataset = CacheIterableDataset(root, batch_size=size, fields=["number"], seed=4)
    rest = {} if size else {"batch_size": 7, "collate_fn": collate}
    return StatefulDataLoader(dataset, **({"batch_size": None} | rest), num_workers=workers, **options)


def broken_off(cache: Any, root: str, workers: int, size: int | None, persistent: bool) -> dict[str, Any]:
    """What came before a state was taken, what came after, and what a new loader gives from there."""
    out: dict[str, Any] = {}
    options = {"persistent_workers": True} if persistent else {}
    loader = made(root, workers, size, **options)
    epoch = numbers(loader)
    out["first"] = len(set(epoch)) == len(epoch) == len(cache_numbers(cache))
    batches = iter(loader)
    before = numbers(next(batches) for _ in range(5))
    state = pickle.loads(pickle.dumps(loader.state_dict()))
    rest = numbers(batches)
    out["whole"] = sorted(before + rest) == cache_numbers(cache)
    ended = loader.state_dict()
    start = len(before + rest)
    put(cache, range(start, start + 10))  # is in no epoch that was begun before

    again = made(root, workers, size, **options)
    again.load_state_dict(state)
    out["the same rest"] = numbers(again) == rest
    following = numbers(again)
    out["then the next epoch"] = sorted(following) == cache_numbers(cache) and following != before + rest

    after = made(root, workers, size, **options)
    after.load_state_dict(ended)
    out["after an end the next epoch"] = numbers(after) == following
    return out


def cache_numbers(cache: Any) -> list[int]:
    return list(range(sum(shard.samples for shard in cache.shards())))


def by_hand(root: str) -> dict[str, Any]:
    """The protocol without any DataLoader."""
    dataset = CacheIterableDataset(root, batch_size=6, fields=["number"], seed=4)
    out: dict[str, Any] = {"fresh": dataset.state_dict()}
    batches = iter(dataset)
    before = numbers(next(batches) for _ in range(3))
    state = json.loads(json.dumps(dataset.state_dict()))
    rest = numbers(batches)
    other = CacheIterableDataset(root, batch_size=6, fields=["number"], seed=4)
    other.load_state_dict(state)
    out["kept until used"] = other.state_dict() == state
    out["the same rest"] = numbers(other) == rest
    out["disjoint"] = not set(before) & set(rest)
    other.load_state_dict({**out["fresh"], "epoch": 7})
    seventh = numbers(other)
    other.set_epoch(7)
    out["epoch 7"] = numbers(other) == seventh
    gone = ["gone", *state["parts"][0][1:3], "", "", "", ""]
    out["refused"] = [
        refused(lambda: CacheIterableDataset(root, seed=5).load_state_dict(state)),
        refused(lambda: other.load_state_dict({})),
        refused(lambda: other.load_state_dict({**state, "epoch": "x"})),
        refused(lambda: other.load_state_dict({**state, "row": 0})),
        refused(lambda: other.load_state_dict({**state, "parts": [5]})),
        refused(lambda: (other.load_state_dict({**state, "of": [0, 2, 0, 1]}), iter(other))),
        refused(lambda: (other.load_state_dict({**state, "parts": [gone]}), iter(other))),
    ]
    own: dict[str, Any] = {"batch_size": 6, "seed": 4}
    out["other order"] = [
        refused(lambda changed=changed: CacheIterableDataset(root, **{**own, **changed}).load_state_dict(state))
        for changed in ({"shuffle": False}, {"batch_size": None}, {"batch_size": 12}, {"drop_last": True}, {})
    ]
    dataset.close()
    other.close()
    return out


def refused(action: Any) -> str:
    try:
        action()
    except CacheToolError as error:
        return f"{type(error).__name__}: {error}"
    return "accepted"


def main(root: str) -> None:
    cache = open_cache(root, max_size="20MB")
    for start in (0, 20, 40):
        put(cache, range(start, start + 20))
    out: dict[str, Any] = {"cases": {}}
    for workers, size, persistent in ((0, 4, False), (2, 4, False), (2, None, False), (3, 4, True)):
        out["cases"][f"{workers} {size} {persistent}"] = broken_off(cache, root, workers, size, persistent)
    out["by hand"] = by_hand(root)
    out["leases"] = len(leases(cache))
    print(json.dumps(out))


if __name__ == "__main__":
    main(*sys.argv[1:])
