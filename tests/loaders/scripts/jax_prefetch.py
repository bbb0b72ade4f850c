"""Runs ``prefetch_to_device`` on JAX's CPU device. ``jax_prefetch.py ROOT``, ROOT an empty folder."""

from __future__ import annotations

import functools
import gc
import json
import os
import sys
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import numpy as np

from cachetool import UsageError
from cachetool.cache import CacheDir, open_cache
from cachetool.loaders.device import copied_ahead
from cachetool.loaders.jax import _Copy, prefetch_to_device
from cachetool.loaders.numpy import Loader
from tests.loaders.numbered import SMALL, leases, put, sample


class Pair(NamedTuple):
    first: np.ndarray
    second: np.ndarray


def loader_batches(cache: CacheDir, out: dict[str, Any]) -> None:
    """Keep all batches of an epoch while the ring's slots are reused many times, and compare them at the end."""
    fields = ["number", "x", "words", "ragged"]
    with Loader(cache, batch_size=8, fields=fields, shuffle=False, workers=1, prefetch=3) as loader:
        kept, counted = [], []
        for batch in prefetch_to_device(loader):
            kept.append({name: batch[name] for name in ("number", "x")})
            counted.append(loader.state_dict()["epoch"])
        out["types"] = [isinstance(batch[name], jax.Array) for name in fields]
        out["strings"] = [list(batch["words"]), [sample(SMALL, int(n))["words"] for n in batch["number"]]]
        out["numbers"] = [int(n) for batch in kept for n in batch["number"]] == list(range(480))
        wrong = [
            int(n)
            for batch in kept
            for n, x in zip(batch["number"], batch["x"], strict=True)
            if np.asarray(x).tobytes() != sample(SMALL, int(n))["x"].tobytes()
        ]
        out["wrong"], out["batches"], out["epochs counted"] = wrong, len(kept), [counted[-2], counted[-1]]

        put(cache, range(480, 488))
        loader.refresh()
        again = prefetch_to_device(loader, size=4)
        first = next(again)
        out["counted ahead"] = loader.state_dict()["resume"]["position"]
        out["second epoch"] = len(list(again)) + 1
        del kept, batch, first, again
        abandoned = prefetch_to_device(loader)
        next(abandoned)
        del abandoned
        gc.collect()
        out["live"] = len(jax.live_arrays())
        out["third epoch"] = sum(len(batch["number"]) for batch in prefetch_to_device(loader))
    out["leases"] = len(leases(cache))


def refilled(out: dict[str, Any]) -> None:
    """Fill one aligned array again and again. JAX on a CPU would use its memory without a copy."""
    raw = np.empty(2**16 + 16, dtype=np.float32)
    start = (-raw.ctypes.data % 64) // 4
    array = raw[start : start + 2**16]

    def batches() -> Iterator[np.ndarray]:
        for number in range(60):
            array[:] = number
            yield array

    kept = list(prefetch_to_device(batches()))
    out["refilled"] = [[float(a.min()), float(a.max())] for a in kept] == [[n, n] for n in range(60)]


def trees(out: dict[str, Any]) -> None:
    def batches() -> Iterator[Any]:
        one = np.ones((2, 3), np.float16)
        yield {"list": [one, 2 * one], "tuple": (one,), "pair": Pair(one, 3 * one), "none": None, "text": "abc"}
        yield [np.float32(7), np.array(["2026-11-21"], "M8[D]"), np.array([True, False])]

    first, second = prefetch_to_device(batches(), device=jax.devices()[0])
    out["tree"] = [sorted(first), type(first["pair"]).__name__, first["text"], float(first["pair"].second[1, 2])]
    out["leaves"] = [type(leaf).__name__ for leaf in jax.tree.leaves(first)]
    out["other"] = [float(second[0]), type(second[1]).__name__, second[2].tolist()]


def ends(out: dict[str, Any]) -> None:
    """Record how far the prefetcher reads ahead, and what an error and an abandoned iterator leave."""
    taken: list[int] = []
    closed: list[bool] = []
    seen: list[weakref.ref[np.ndarray]] = []

    def batches() -> Iterator[dict[str, np.ndarray]]:
        try:
            for number in range(7):
                taken.append(number)
                array = np.full(1000, number)
                seen.append(weakref.ref(array))
                yield {"a": array}
                del array
            raise OSError("the disk is gone")
        finally:
            closed.append(True)

    ahead = prefetch_to_device(batches(), size=3)
    out["lazy"] = list(taken)
    out["ahead"] = [[int(next(ahead)["a"][0]), len(taken)] for _ in range(3)]
    found: list[Any] = []
    try:
        found.extend(int(batch["a"][0]) for batch in ahead)
    except OSError as error:
        found.append(str(error))
    out["error"] = found

    gc.collect()
    before = len(jax.live_arrays())
    closed.clear()
    ahead = prefetch_to_device(batches(), size=3)
    next(ahead)
    held = len(jax.live_arrays()) - before
    del ahead
    gc.collect()
    out["abandoned"] = [held, len(jax.live_arrays()) - before, closed, sum(ref() is not None for ref in seen)]
    out["refused"] = []
    sizes: list[Any] = [0, "cuda", jax.devices()[0], 2.5]
    wrong: list[tuple[Any, Any]] = [*(([], size) for size in sizes), ("data/cache", 2), (None, 2)]
    for batches_of, size in wrong:
        try:
            prefetch_to_device(batches_of, size=size)
        except UsageError as error:
            out["refused"].append(str(error))
    import torch

    for device, batch in (("cpu", np.zeros(2)), (None, {"x": torch.zeros(2)})):
        try:
            next(prefetch_to_device([batch], device=device))
        except UsageError as error:
            out["refused"].append(str(error))


def kept(out: dict[str, Any]) -> None:
    """Simulate a device that is not a CPU: a batch on the host is kept until its copy has arrived, as with the CPU's
    own copies.
    """
    seen: list[weakref.ref[np.ndarray]] = []

    def batches() -> Iterator[np.ndarray]:
        for number in range(5):
            array = np.full(1001, number, np.float32)[1:]  # at an address whose memory JAX does not use without a copy
            seen.append(weakref.ref(array))
            yield array
            del array

    there = copied_ahead(batches(), functools.partial(_Copy, None, on_cpu=False), 2)
    numbers = [float(next(there)[0]) for _ in range(2)]
    out["kept until they arrive"] = [numbers, [array() is not None for array in seen]]


def waiting(cache: CacheDir, arrived: Path, out: dict[str, Any]) -> None:
    """Check that the first batch is delivered although the next batches are only produced after it."""

    def after(sample: dict[str, Any]) -> dict[str, Any]:
        until = time.monotonic() + 60
        while sample["number"] >= 8 and not arrived.exists():
            if time.monotonic() > until:
                raise TimeoutError("the first batch did not arrive")
            time.sleep(0.01)
        return {"number": sample["number"]}

    with Loader(cache, batch_size=8, fields=["number"], shuffle=False, workers=1, transform=after) as loader:
        batches = prefetch_to_device(loader)
        first = next(batches)
        arrived.touch()
        out["not kept back"] = len(first["number"]) + sum(len(batch["number"]) for batch in batches)


def fixed_epochs(cache: CacheDir, out: dict[str, Any]) -> None:
    """Check that epochs of a fixed length count delivered batches, not those on their way."""
    with Loader(cache, batch_size=8, fields=["number"], workers=1) as loader:
        view = loader.epochs_of(steps=5)
        batches = prefetch_to_device(view, size=4)
        seen = [len(next(batches)["number"]) for _ in range(2)]
        state = view.state_dict()
        out["of a view"] = [sum(seen), state["at"], state["loader"]["resume"]["position"]]
        out["rest of a view"] = sum(1 for _ in batches)


def main(name: str) -> None:
    out: dict[str, Any] = {}
    with open_cache(Path(name) / "cache", max_size="50MB") as cache:
        for start in range(0, 480, 160):
            put(cache, range(start, start + 160))
        loader_batches(cache, out)
        fixed_epochs(cache, out)
        waiting(cache, Path(name) / "arrived", out)
    refilled(out)
    trees(out)
    out["frameworks"] = [name for name in ("torch", "tensorflow") if name in sys.modules]
    ends(out)
    kept(out)
    print(json.dumps(out))


if __name__ == "__main__":
    main(*sys.argv[1:])
