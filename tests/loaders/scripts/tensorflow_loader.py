"""Runs ``make_dataset`` over loaders. ``tensorflow_loader.py ROOT``, ROOT an empty folder."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"

import keras
import numpy as np

from cachetool.cache import open_cache
from cachetool.core.schema import Field, Schema
from cachetool.loaders.numpy import Loader, Pad
from cachetool.loaders.tensorflow import make_dataset
from cachetool.loaders.torch import Loader as TorchLoader
from tests.loaders.numbered import EVERY, leases, put, put_samples, sample
from tests.loaders.scripts.tensorflow_growth import plain, refused

SCHEMA = Schema((Field("__key__", "str"), Field("n", "<i8"), Field("label", "<i4"), Field("x", "<f4", (3,))))


def one(number: int) -> dict[str, Any]:
    return {"__key__": f"key{number}", "n": number, "label": number % 4, "x": np.full(3, number, np.float32)}


def numbers(batches: Any) -> list[int]:
    return [int(n) for batch in batches for n in batch["n"]]


def every_type(root: Path, out: dict[str, Any]) -> None:
    with open_cache(root / "every", max_size="20MB") as cache:
        put(cache, range(10), schema=EVERY, format="hdf5")
        wrong, seen = [], 0
        with Loader(cache.root, batch_size=4, shuffle=False) as loader:
            for batch in make_dataset(loader):
                for field in EVERY:
                    for i in range(len(batch["raw"])):
                        if plain(batch[field.name][i]) != plain(sample(EVERY, seen + i)[field.name]):
                            wrong.append([field.name, seen + i])
                seen += len(batch["raw"])
            out["every dtype"] = [wrong, seen]
            spec = make_dataset(loader).element_spec
            out["fixed spec"] = list(spec["array int16"].shape)
        padded = Loader(cache.root, batch_size=2, shuffle=False, fields=["cube"], pad={"cube": Pad(0, mask="here")})
        with padded as loader:
            dataset = make_dataset(loader)
            out["padded spec"] = [list(dataset.element_spec[name].shape) for name in ("cube", "here")]
            with Loader(cache.root, batch_size=2, shuffle=False, fields=["cube"], pad={"cube": 0}) as other:
                out["padded"] = all(np.array_equal(a["cube"], b["cube"]) for a, b in zip(dataset, other, strict=True))
        with Loader(cache.root, batch_size=2, shuffle=False, fields=["deep"], varlen=["deep"]) as loader:
            out["varlen"] = sorted(next(iter(make_dataset(loader))))


def mixtures(root: Path, out: dict[str, Any]) -> None:
    with open_cache(root / "mixed", max_size="20MB") as cache:
        put_samples(cache, [one(n) for n in range(100)], schema=SCHEMA, dataset="sim")
        put_samples(cache, [one(n) for n in range(1000, 1030)], schema=SCHEMA, dataset="obs")
        ratio: Any = {"sim": 3, "obs": 1}

        def mixed(**options: Any) -> Loader:
            return Loader(ratio, cache=cache.root, batch_size=8, epoch_samples=80, seed=3, **options)

        with mixed() as loader, mixed() as other:
            dataset = make_dataset(loader)
            epochs = [numbers(dataset), numbers(dataset)]
            out["mixture"] = [epochs == [numbers(other), numbers(other)], epochs[0] == epochs[1]]
            out["ratio"] = [sum(n < 1000 for n in epoch) for epoch in epochs]
        # A state after three batches, taken up by two ranks, while a dataset has grown.
        with mixed() as loader, mixed() as other:
            expected = numbers(other)
            batches = iter(make_dataset(loader))
            found = numbers(next(batches) for _ in range(3))
            state = json.loads(json.dumps(loader.state_dict()))
            out["state"] = [found == expected[:24], state["taken"]]
            put_samples(cache, [one(n) for n in range(1030, 1060)], schema=SCHEMA, dataset="obs")
            rest = []
            for rank in range(2):
                with mixed(rank=rank, world_size=2, run="two") as part:
                    part.load_state_dict(state)
                    rest += numbers(make_dataset(part))
            out["resumed"] = sorted(rest) == sorted(expected[24:])
        with Loader(cache.root, dataset="sim", batch_size=20, balance="label", epoch_samples=200) as loader:
            labels = [int(label) for batch in make_dataset(loader) for label in batch["label"]]
            out["balanced"] = np.bincount(labels).tolist()
        with mixed() as loader:
            dataset = make_dataset(loader, repeat=True, as_supervised=("x", "label"))
            first = list(dataset.take(15))
            out["repeat"] = [len(first), [list(part.shape) for part in first[0]]]
            del first
            out["leases"] = [len(leases(cache)) > 0]
        out["leases"].append(len(leases(cache)))
        with mixed() as loader:
            dataset = make_dataset(loader.epochs_of(steps=7), as_supervised=("x", "label"))
            out["steps"] = [int(dataset.cardinality()), sum(1 for _ in dataset), sum(1 for _ in dataset)]
            model = keras.Sequential([keras.layers.Dense(4)])
            model.compile(loss="sparse_categorical_crossentropy", optimizer="sgd")
            model.fit(dataset, epochs=3, verbose=0)
            out["fit"] = model.optimizer.iterations.numpy().item()
        # Epochs of fixed length: one that is resumed has all steps, too.
        with mixed() as loader:
            fixed = loader.epochs_of(steps=5)
            expected = numbers(batch for _ in range(3) for batch in fixed)
        with mixed() as loader:
            fixed = loader.epochs_of(steps=5)
            found = numbers(make_dataset(fixed).take(2))
            state = fixed.state_dict()
        with mixed() as loader:
            fixed = loader.epochs_of(steps=5)
            fixed.load_state_dict(state)
            found += numbers(batch for _ in range(2) for batch in make_dataset(fixed))
        out["fixed"] = found == expected[: len(found)]
        out["fixed steps"] = len(found) // 8
        with mixed() as loader, mixed() as other:
            dataset = make_dataset(loader)
            for each in (loader, other):
                each.set_epoch(3)
            out["set_epoch"] = numbers(dataset) == numbers(other)
        with mixed(concurrent=True) as loader, mixed() as other:
            out["concurrent"] = numbers(make_dataset(loader)) == numbers(other)
        with Loader(cache.root, dataset="obs", batch_size=60) as loader:
            make_dataset(loader)
        out["delivered"] = max(shard.epochs for shard in cache.shards("obs"))
        with Loader(cache.root, dataset="obs", batch_size=60) as loader:
            list(make_dataset(loader))
        out["delivered"] = max(shard.epochs for shard in cache.shards("obs")) - out["delivered"]


def arguments(root: Path, out: dict[str, Any]) -> None:
    place = root / "mixed"
    with Loader(place, dataset="sim", batch_size=8) as loader:
        out["fields"] = refused(lambda: make_dataset(loader, fields=["x"]))
        out["batch_size"] = refused(lambda: make_dataset(loader, batch_size=8))
        out["supervised"] = refused(lambda: make_dataset(loader, as_supervised=("x", "y")))
    with TorchLoader(place, dataset="sim", batch_size=8) as tensors:
        out["torch"] = refused(lambda: make_dataset(tensors))  # type: ignore[arg-type]
    with Loader(place, dataset="sim", batch_size=1000, drop_last=True, wait=0) as large:
        out["no batch"] = refused(lambda: make_dataset(large))
    out["dict"] = refused(lambda: make_dataset({"sim": 3, "obs": 1}, cache=place, batch_size=8))  # type: ignore
    out["dict alone"] = refused(lambda: make_dataset({"sim": 3, "obs": 1}, batch_size=8))  # type: ignore[arg-type]
    out["no size"] = refused(lambda: make_dataset(place, dataset="sim"))


def main() -> None:
    root = Path(sys.argv[1])
    out: dict[str, Any] = {}
    every_type(root, out)
    mixtures(root, out)
    arguments(root, out)
    print(json.dumps(out))


if __name__ == "__main__":
    main()
