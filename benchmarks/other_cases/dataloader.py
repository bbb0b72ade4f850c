"""PyTorch's ``DataLoader`` over ``LMDBDataset`` and ``CacheDataset``, beside a py-lmdb data set written by hand.

    python benchmarks/other_cases/dataloader.py FOLDER [ROUNDS]

The data set by hand has one value a sample, which ``np.frombuffer`` and ``torch.from_numpy`` turn into tensors without
a copy, out of one transaction a worker. Each way is one process with two workers, and all take turns. Samples are warm
and shuffled. The loop touches each page of each batch. Ours run with PyTorch's own collate function and with
``dataset.collate``; both ask for batches by ``__getitems__``.

*Private memory* is the private dirty memory of the process and its workers after the last round, in MiB. Pages of the
files count for no one: how many processes map them is no property of a loader.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

SIZES = {"3 KiB": (50_000, 3 * 2**10, 256, 3), "128 KiB": (4096, 2**17, 64, 8)}
"""Samples, bytes of each, samples of a batch, and shards."""
PEER = "py-lmdb by hand"
OURS = [
    (kind, collate) for kind in ("LMDBDataset", "CacheDataset") for collate in ("dataset.collate", "default_collate")
]
LEAST, MOST = 1.0, 1.2
"""Targets: the least share of the peer's rate, and the most of its private memory."""


def measure(folder: Path, rounds: int) -> list[dict[str, str | float]]:
    """Return the rate and the private memory of each way, for each size of sample."""
    rows: list[dict[str, str | float]] = []
    for size in SIZES:
        with tempfile.TemporaryDirectory(dir=folder) as own:
            _write(Path(own), size)
            rows += _sized(Path(own), size, rounds)
    return rows


def _sized(folder: Path, size: str, rounds: int) -> list[dict[str, str | float]]:
    ways = [(PEER, "default_collate"), *OURS]
    processes = [_started(folder, size, *way) for way in ways]
    try:
        for process in processes:
            _asked(process)  # fills the page tables
        found = [[_asked(process) for process in processes] for _ in range(rounds)]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    rows: list[dict[str, str | float]] = []
    for at, (kind, collate) in enumerate(ways[1:], 1):
        for what, unit, target in (("rate", "MB/s", LEAST), ("memory", "private memory, MiB", MOST)):
            rows.append(
                {
                    "case": f"DataLoader, {size}, {kind}, {collate}",
                    "ours": round(statistics.median(each[at][what] for each in found), 1),
                    "peer": PEER,
                    "ratio": round(statistics.median(each[at][what] / each[0][what] for each in found), 2),
                    "target": target,
                    "unit": unit,
                }
            )
    return rows


def _started(folder: Path, size: str, kind: str, collate: str) -> subprocess.Popen[str]:
    command = [sys.executable, __file__, "--one", str(folder), size, kind, collate]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def _asked(process: subprocess.Popen[str]) -> dict[str, float]:
    """Let a process run one epoch."""
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write("\n")
    process.stdin.flush()
    answer: dict[str, float] = json.loads(process.stdout.readline())
    return answer


def _write(folder: Path, size: str) -> None:
    """Write the same samples into a cache and into an LMDB file."""
    import lmdb

    from cachetool.bench.samples import fill
    from cachetool.cache import open_cache
    from cachetool.core.block import Block
    from cachetool.core.schema import Field, Schema

    count, nbytes, _, shards = SIZES[size]
    raw = np.random.default_rng(0).integers(0, 2**63, size=count * nbytes // 8, dtype=np.int64)
    x = raw.view("<f4").reshape(count, -1)
    with open_cache(folder / "cache", max_size="4GB") as cache:
        schema = Schema((Field("x", "<f4", (nbytes // 4,)), Field("y", "<i8")))
        fill(cache, "lmdb", Block(schema, {"x": x, "y": np.arange(count)}), shards)
    with lmdb.open(str(folder / "hand"), map_size=4 * x.nbytes + 2**26) as env, env.begin(write=True) as txn:
        for number, row in enumerate(x):
            txn.put(b"%012d" % number, row.tobytes() + np.int64(number).tobytes())


def _touched(loader: Iterable[Any]) -> float:
    """Return the MB/s of an epoch, of which each page is touched."""
    from cachetool.bench.consumer import rate, touched

    def arrays() -> Iterator[dict[str, Any]]:
        return ({name: tensor.numpy() for name, tensor in batch.items()} for batch in loader)

    return rate(lambda: touched(arrays()))


def _private(process: str) -> float:
    """Return the private dirty memory of a process and its children, in MiB."""
    text = Path(f"/proc/{process}/smaps_rollup").read_text()
    own = next(int(line.split()[1]) for line in text.splitlines() if line.startswith("Private_Dirty"))
    children = [
        pid for task in Path(f"/proc/{process}/task").iterdir() for pid in (task / "children").read_text().split()
    ]
    return own / 1024 + sum(map(_private, children))


def _loader(folder: Path, size: str, kind: str, collate: str) -> Iterable[Any]:
    import torch
    from torch.utils.data import DataLoader, Dataset

    from cachetool.loaders import torch as ours

    count, nbytes, batch, _ = SIZES[size]
    options: dict[str, Any] = {"batch_size": batch, "drop_last": True, "num_workers": 2, "persistent_workers": True}
    if kind != PEER:
        dataset = getattr(ours, kind)(folder / "cache")
        own = {"collate_fn": dataset.collate} if collate == "dataset.collate" else {}
        return DataLoader(dataset, sampler=ours.EpochSampler(dataset), **options, **own)

    class ByHand(Dataset[Any]):
        txn: Any = None

        def __len__(self) -> int:
            return count

        def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
            if self.txn is None:
                import lmdb

                # In the worker: an environment must not be used in a forked child.
                self.env = lmdb.open(str(folder / "hand"), readonly=True, lock=False)
                self.txn = self.env.begin(buffers=True)
            value = self.txn.get(b"%012d" % index)
            return {
                "x": torch.from_numpy(np.frombuffer(value, np.float32, nbytes // 4)),
                "y": torch.from_numpy(np.frombuffer(value, np.int64, 1, nbytes)),
            }

    return DataLoader(ByHand(), shuffle=True, **options)


def _one(folder: str, size: str, kind: str, collate: str) -> None:
    """Run an epoch for each line of standard input."""
    warnings.filterwarnings("ignore", "The given NumPy array is not writable")
    loader = _loader(Path(folder), size, kind, collate)
    for _ in sys.stdin:
        print(json.dumps({"rate": _touched(loader), "memory": _private("self")}), flush=True)


if __name__ == "__main__":
    if sys.argv[1] == "--one":
        _one(*sys.argv[2:])
    else:
        for row in measure(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 5):
            print(row)
