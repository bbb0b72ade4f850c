"""The wait of training for batches that producers compute meanwhile, compared with other ways to transfer batches.

    python benchmarks/producer.py [--rounds 3] [--steps 50] [--peers-dir DIR] [--ways cachetool,DataLoader] [--json]

A batch is float32 (4, 1000000, 3), 48 MB. Its producer sleeps 0.05 s, as for a disk or a network, and then computes
random numbers (about 0.04 s of a processor). A training step sleeps 0.1 s. Each way has two producers. cachetool's
feeders run the producer as a ``transform`` over a cache of seeds. The other ways are an inline generator, two
processes with a ``multiprocessing.Queue``, a DataLoader with two workers, and Ray's tasks and object store. Ray has
its own environment below ``--peers-dir``, which pip installs if it does not exist. In each round each way runs in
its own process. The table gives medians over the rounds of the mean wait after the first 5 steps. The first wait is
a separate column, because it includes the start of the producers.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from peers.producing import produced, trained
from peers.starting import HERE, PRODUCERS, PeerError, environment
from tables import finish

BATCH = 4
RAY = "Ray object store"


def cachetool_way(steps: int) -> dict[str, Any]:
    """Store seeds in a cache. A function in the feeders computes the batches."""
    from cachetool.bench.samples import fill
    from cachetool.cache import open_cache
    from cachetool.core.block import Block
    from cachetool.core.schema import Field, Schema
    from cachetool.loaders.numpy import Loader

    def transform(batch: dict[str, Any]) -> dict[str, Any]:
        return {"x": produced(int(batch["seed"][0]))}

    with tempfile.TemporaryDirectory() as folder:
        with open_cache(Path(folder) / "cache", max_size="50MB") as cache:
            seeds = np.arange(BATCH * (steps + 8))
            fill(cache, "lmdb", Block(Schema((Field("seed", "<i8"),)), {"seed": seeds}), 1)
        with Loader(
            Path(folder) / "cache", batch_size=BATCH, workers=2, transform=transform, transform_each="batch", epochs=1
        ) as loader:
            return trained(lambda: (batch["x"] for batch in loader), steps)


def inline_way(steps: int) -> dict[str, Any]:
    """Compute each batch in the training loop."""
    return trained(lambda: map(produced, range(steps)), steps)


def _put(queue: Any, seeds: range) -> None:
    for seed in seeds:
        queue.put(produced(seed))


def queue_way(steps: int) -> dict[str, Any]:
    """Use two processes and a queue of four batches."""

    def start() -> Iterator[np.ndarray]:
        queue: Any = multiprocessing.Queue(maxsize=4)
        processes = [
            multiprocessing.Process(target=_put, args=(queue, range(n, steps, 2)), daemon=True) for n in range(2)
        ]
        for process in processes:
            process.start()
        while True:
            yield queue.get()

    return trained(start, steps)


class _Produced:
    """A map-style dataset of batches."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Any:
        import torch

        return torch.from_numpy(produced(index))


def dataloader_way(steps: int) -> dict[str, Any]:
    """Use PyTorch's DataLoader with two workers."""
    from torch.utils.data import DataLoader

    loader: Any = DataLoader(_Produced(steps), batch_size=None, num_workers=2)  # type: ignore[arg-type]
    return trained(lambda: (batch.numpy() for batch in loader), steps)


WAYS = {
    "cachetool": cachetool_way,
    "inline generator": inline_way,
    "multiprocessing.Queue": queue_way,
    "DataLoader": dataloader_way,
}


def measured(way: str, steps: int, peers: Path | None) -> dict[str, Any]:
    """Measure one way in its own process."""
    if way == RAY:
        assert peers is not None
        command = [environment(peers, *PRODUCERS[RAY]), HERE / "ray_producer.py", str(steps)]
    else:
        command = [sys.executable, __file__, "--one", way, "--steps", str(steps)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise PeerError((done.stderr.strip().splitlines() or ["failed"])[-1])
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--peers-dir", type=Path)
    parser.add_argument("--ways")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--one", choices=WAYS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(WAYS[options.one](options.steps)))
        return
    ways = options.ways.split(",") if options.ways else [*WAYS, *([RAY] if options.peers_dir else [])]
    found: dict[str, list[dict[str, Any]]] = {way: [] for way in ways}
    for _ in range(options.rounds):
        for way in ways:
            found[way].append(measured(way, options.steps, options.peers_dir))
    table = [
        {
            "way": way,
            **{
                title: round(1000 * statistics.median(each[name] for each in runs), 2)
                for title, name in (("mean wait, ms", "mean"), ("longest, ms", "most"), ("first batch, ms", "first"))
            },
        }
        for way, runs in found.items()
    ]
    finish({"producer": table}, as_json=options.json, rounds=options.rounds, steps=options.steps)


if __name__ == "__main__":
    main()
