"""Checks the batches of the loader for PyTorch, and the objects that keep a batch in use. Prints one line of JSON.
Argument: an empty folder.
"""

from __future__ import annotations

import io
import json
import pickle
import sys
from collections import OrderedDict
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[3]))

from cachetool.cache import open_cache
from cachetool.loaders.torch import DevicePrefetcher, Loader, TensorList
from tests.loaders.numbered import EVERY, SMALL, digest, digests, leases, put


def seen(batch: dict[str, Any], schema: Any) -> list[str]:
    out = []
    for i in range(len(batch[schema.names[0]])):
        sample = {}
        for field in schema:
            value = batch[field.name][i]
            if isinstance(value, torch.Tensor):
                value = value.numpy()
                if field.numpy.kind in "mM":
                    value = value.view(field.numpy) if value.ndim else value.reshape(1).view(field.numpy)[0]
            sample[field.name] = value
        out.append(digest(schema, sample))
    return out


KINDS = 9
"""Kinds of objects derived from a batch."""


class Graph(NamedTuple):
    """The part of a batch that autograd keeps: the product of the batch and a leaf, whose gradient will be the
    batch.
    """

    leaf: torch.Tensor
    product: torch.Tensor


def derived(batch: dict[str, Any], step: int) -> tuple[Any, Any]:
    """Derive an object that refers to a batch's memory or holds its bytes. Return it with a copy of those bytes."""
    x = batch["x"]
    if step % KINDS == 0:
        leaf = torch.ones_like(x, requires_grad=True)
        return Graph(leaf, leaf * x), x.clone()
    made: list[Any] = [
        x,
        x[1:],
        x.numpy(),
        x.view(-1)[3:].numpy()[::2],
        torch.from_dlpack(x),
        x.untyped_storage(),
        x.detach(),
        pickle.loads(pickle.dumps(x)),
    ]
    look = made[step % KINDS - 1]
    if isinstance(look, torch.UntypedStorage):
        return look, bytes(look.tolist())
    return look, look.copy() if isinstance(look, np.ndarray) else look.detach().clone()


def same(look: Any, copy: Any) -> bool:
    if isinstance(look, Graph):
        look.product.sum().backward()
        return torch.equal(look.leaf.grad, copy)  # type: ignore[arg-type]
    if isinstance(look, bytes):
        return torch.equal(pickle.loads(look)["x"], copy)
    if isinstance(look, torch.UntypedStorage):
        return bytes(look.tolist()) == copy
    if isinstance(look, np.ndarray):
        return np.array_equal(look, copy)
    return torch.equal(look.detach(), copy)


class FakeModule:
    """A device module on a machine without a device. It records the calls."""

    log: ClassVar[list[str]] = []

    class Stream:
        device_index = 0

        def __init__(self, device: Any = None) -> None:
            pass

        def __enter__(self) -> None:
            FakeModule.log.append("on its own stream")

        def __exit__(self, *error: Any) -> None:
            pass

        def wait_event(self, event: Any) -> None:
            FakeModule.log.append(f"wait {event.number}")

        def synchronize(self) -> None:
            FakeModule.log.append("synchronize")

    class Event:
        count = 0

        def __init__(self) -> None:
            FakeModule.Event.count += 1
            self.number = FakeModule.Event.count

        def record(self, stream: Any) -> None:
            FakeModule.log.append(f"record {self.number}")

        def query(self) -> bool:
            return False  # no copy ever counts as finished, so all batches must be kept

    @staticmethod
    def current_stream(device: Any) -> Any:
        return FakeModule.Stream()


def positions(loader: Loader, batches: Any) -> list[int | None]:
    """Return the number of samples that the loader counts as delivered after each batch."""
    found = []
    for _ in batches:
        resume = loader.state_dict()["resume"]
        found.append(resume["position"] if resume else None)
    return found


def prefetched(root: Path) -> dict[str, Any]:
    """Run batches through a :class:`DevicePrefetcher` for a simulated device."""
    recorded = []
    real_module, real_record = torch.get_device_module, torch.Tensor.record_stream
    torch.get_device_module = lambda device: FakeModule  # type: ignore[assignment]
    torch.Tensor.record_stream = lambda tensor, stream: recorded.append(tensor)  # type: ignore[assignment]
    try:
        with Loader(root, batch_size=8, fields=["x", "ragged", "words"], dataset="small", workers=1, seed=2) as loader:
            here = [{"x": b["x"].clone(), "words": list(b["words"])} for b in loader]
            loader.load_state_dict({"state": 1, "epoch": 0, "seed": 2, "resume": None})
            there = list(DevicePrefetcher(loader, "meta", depth=3))
            loader.load_state_dict({"state": 1, "epoch": 0, "seed": 2, "resume": None})
            counted = [positions(loader, DevicePrefetcher(loader, "meta"))]
            loader.load_state_dict({"state": 1, "epoch": 0, "seed": 2, "resume": None})
            loader.device = torch.device("meta")
            counted.append(positions(loader, loader))
        out = {
            "device": {str(b["x"].device) for b in there} | {str(b["ragged"].values.device) for b in there} == {"meta"},
            "same": [
                b["words"] == h["words"] and b["x"].shape == h["x"].shape for b, h in zip(there, here, strict=True)
            ],
            "kept until done": FakeModule.log.count("on its own stream") == 3 * len(there),
            "recorded": len(recorded) == 3 * 2 * len(there),
            "counted": counted,
        }
        FakeModule.log.clear()
        FakeModule.Event.count = 0
        list(DevicePrefetcher([torch.zeros(1)] * 5, "meta", depth=3))
        out["order"] = FakeModule.log[:9]
        ordered = [OrderedDict(y=torch.ones(2), x=[torch.zeros(1), "text"])]
        (own,) = DevicePrefetcher(ordered, "meta")
        kinds = [own["y"].device.type, own["x"][1], ordered[0]["y"].device.type]
        packed = torch.nn.utils.rnn.pack_sequence([torch.ones(n) for n in (1, 3, 2)], enforce_sorted=False)
        (moved,) = DevicePrefetcher([packed], "meta")
        kinds += [moved.data.device.type, moved.batch_sizes.tolist(), moved.sorted_indices.device.type]
        return {**out, "own": [type(own).__name__, list(own), *kinds]}
    finally:
        torch.get_device_module, torch.Tensor.record_stream = real_module, real_record  # type: ignore[assignment]


def main(root: Path) -> None:
    out: dict[str, Any] = {}
    with open_cache(root, max_size="50MB") as cache:
        for at, name in enumerate(("lmdb", "hdf5", "zarr", "tfrecord")):
            put(cache, range(8 * at, 8 * at + 8), format=name, schema=EVERY, dataset="every")
        for at in range(0, 60, 20):
            put(cache, range(at, at + 20), dataset="small")
        with Loader(root, batch_size=5, dataset="every", workers=2) as loader:
            batches = list(loader)
            out["every"] = sorted(s for b in batches for s in seen(b, EVERY)) == digests(EVERY, range(32))
            out["ragged"] = isinstance(batches[0]["line"], TensorList)
        del batches
        with Loader(cache, batch_size=2, dataset="small", workers=2, prefetch=2) as loader:
            kept = [derived(batch, step) for _ in range(4) for step, batch in enumerate(loader)]
            kept += [(pickle.dumps(batch), batch["x"].clone()) for batch in loader]
            list(loader)
            out["gradients"] = sum(isinstance(look, Graph) for look, _ in kept)
            out["kept"] = [len(kept), [type(look).__name__ for look, copy in kept if not same(look, copy)]]
            batch = next(iter(loader))
            file = io.BytesIO()
            torch.save(batch["x"], file)
            out["saved bytes"] = len(file.getvalue()) - batch["x"].nbytes < 2000
            out["storage"] = batch["x"].untyped_storage().nbytes() == batch["x"].nbytes
            file.seek(0)
            out["loaded"] = torch.equal(torch.load(file, weights_only=True), batch["x"])
            again = pickle.loads(pickle.dumps(batch))
            out["pickled"] = seen(again, SMALL) == seen(batch, SMALL)
            shared = batch["x"].clone().share_memory_()
            out["shared"] = torch.equal(shared, batch["x"])
            batch["x"] += 1  # the user owns the batch and may change it
            del kept, batch, again
            out["held"] = [ring.batches_in_use for ring in loader._feed._rings]  # type: ignore[union-attr]
        out["prefetched"] = prefetched(root)
        out["leases"] = len(leases(cache))
    print(json.dumps(out))


main(Path(sys.argv[1]))
