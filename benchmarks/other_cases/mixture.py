"""A mixture of three datasets beside one dataset of the same samples: samples of 1 MiB and of 3 KiB, warm and shuffled.

A rate covers whole epochs of two seconds or more, after one that does not count. The consumer reads one byte of each
page of a batch. Both read each sample once in an epoch. Then the mixture beside those of LitData
(``CombinedStreamingDataset``) and MosaicML Streaming (``streams``), in environments of their own.
"""

from __future__ import annotations

import contextlib
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
from peers.starting import MIXTURES, Peer, PeerError

from cachetool.bench.samples import fill
from cachetool.cache import open_cache
from cachetool.core.block import Block
from cachetool.core.schema import Field, Schema
from cachetool.loaders.numpy import Loader

CASES = {"1 MiB": (2**20, 8, 384, "hdf5"), "3 KiB": (3072, 256, 3 * 2**15, "lmdb")}
"""Bytes of a sample, samples of a batch and of a dataset, format."""
DATASETS = ("a", "b", "c")
_SECONDS = 2.0


def rate(loader: Loader) -> float:
    """Return samples for each second."""
    for _ in loader:
        pass
    began, count = time.perf_counter(), 0
    while time.perf_counter() - began < _SECONDS:
        for batch in loader:
            batch["x"].reshape(-1)[::4096].sum()
            count += len(batch["x"])
    return count / (time.perf_counter() - began)


def measure(folder: Path, rounds: int) -> list[dict[str, str | float]]:
    """Return a row for each size of samples."""
    rows: list[dict[str, str | float]] = []
    for name, (size, batch, count, kind) in CASES.items():
        root = folder / name.replace(" ", "")
        schema = Schema((Field("x", "|u1", (size,)),))
        values = np.random.default_rng(0).integers(0, 255, (count, size), dtype=np.uint8)
        with open_cache(root, max_size="4GB") as cache:
            fill(cache, kind, Block(schema, {"x": values}), 9, dataset="one")
            for part, of_each in zip(DATASETS, np.split(values, len(DATASETS)), strict=True):
                fill(cache, kind, Block(schema, {"x": of_each}), 3, dataset=part)
        mine, theirs = [], []
        with contextlib.ExitStack() as stack:
            one = stack.enter_context(Loader(root, dataset="one", batch_size=batch))
            mixed = stack.enter_context(Loader(dict.fromkeys(DATASETS, 1), cache=root, batch_size=batch))
            for _ in range(rounds):
                theirs.append(rate(one))
                mine.append(rate(mixed))
        rows.append(
            {
                "case": f"three datasets, {name}",
                "ours": round(statistics.median(mine)),
                "peer": "one dataset",
                "theirs": round(statistics.median(theirs)),
                "ratio": round(statistics.median(a / b for a, b in zip(mine, theirs, strict=True)), 2),
                "target": 0.95,
                "unit": "samples/s",
            }
        )
    return rows + [_beside(folder, name, case, rounds) for name in MIXTURES for case in CASES]


def _beside(folder: Path, name: str, case: str, rounds: int) -> dict[str, str | float]:
    """Return the row of a peer, whose samples are float32."""
    size, batch, count, _ = CASES[case]
    job = [count, size, batch, 2]
    mine, theirs = [], []
    try:
        with (
            tempfile.TemporaryDirectory(dir=folder) as own,
            Peer(folder.parent / "peers", name, *map(str, job), own) as peer,
            Loader(dict.fromkeys(DATASETS, 1), cache=folder / case.replace(" ", ""), batch_size=batch) as mixed,
        ):
            options = {"epochs": 100, "seconds": _SECONDS}
            peer.ask({"epochs": 1, "seconds": _SECONDS})
            for _ in range(rounds):
                theirs.append(peer.ask(options)["MB/s"] * 1e6 / size)
                mine.append(rate(mixed))
    except PeerError as error:
        return {"case": f"{name}, {case}", "error": str(error)}
    return {
        "case": f"three datasets, {case}",
        "ours": round(statistics.median(mine)),
        "peer": name,
        "theirs": round(statistics.median(theirs)),
        "ratio": round(statistics.median(a / b for a, b in zip(mine, theirs, strict=True)), 1),
        "target": 5,
        "unit": "samples/s",
    }
