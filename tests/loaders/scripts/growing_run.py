"""A training of ten epochs beside a background pull into a cache of a fifth of the data.

``growing_run.py torch|tensorflow|loader SOURCE CACHE CAP RENEW EPOCHS``. The samples are ``x``, an array whose first
number names it. Each epoch lasts until the puller has no room left, as a long one would; in the middle of one the
puller is frozen, which the epoch must not notice. Prints one line of JSON.
"""

import contextlib
import json
import os
import signal
import sqlite3
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

import cachetool

kind, source, root, cap, renew, epochs = sys.argv[1:]
FROZEN = 3
"""The epoch that runs beside a frozen puller."""


def batches_of(cache: Any) -> Any:
    """An iterable whose every turn is an epoch, over arrays of the first numbers."""
    if kind == "torch":
        from torch.utils.data import DataLoader

        from cachetool.loaders.torch import CacheDataset, EpochSampler

        dataset = CacheDataset(cache, fields=["x"])
        return DataLoader(
            dataset,
            batch_size=16,
            sampler=EpochSampler(dataset, seed=0),
            collate_fn=dataset.collate,
            num_workers=2,
            persistent_workers=True,
            multiprocessing_context="fork",
        )
    if kind == "loader":
        from cachetool.loaders.numpy import Loader

        return Loader(cache, batch_size=16, fields=["x"], seed=0, min_samples=1)
    os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
    from cachetool.loaders.tensorflow import make_dataset

    return make_dataset(cache, batch_size=16, fields=["x"], shuffle_buffer=64, seed=0)


def tree_bytes(folder: str) -> int:
    total = 0
    for path in [Path(folder), *Path(folder).rglob("*")]:
        with contextlib.suppress(FileNotFoundError):
            found = path.lstat()
            total += max(found.st_size, found.st_blocks * 512)
    return total


def processes(pid: int) -> list[int]:
    return [pid, *map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())]


def freeze(pids: list[int]) -> None:
    """Stop the processes at a moment at which none of them is inside a transaction, which others would wait for."""
    while True:
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        connection = sqlite3.connect(Path(root) / "catalog.sqlite3", timeout=0.2, isolation_level=None)
        try:
            connection.execute("BEGIN IMMEDIATE")
            connection.execute("ROLLBACK")
            return
        except sqlite3.OperationalError:
            thaw(pids)
        finally:
            connection.close()


def thaw(pids: list[int]) -> None:
    for pid in pids:
        os.kill(pid, signal.SIGCONT)


def train(batches: Iterator[Any], out: dict[str, Any], *, frozen: list[int] | None = None) -> None:
    """One epoch: the numbers of its samples, the time of its steps."""
    numbers: list[int] = []
    steps = []
    weights = np.ones((256, 256), dtype=np.float32)
    began = time.perf_counter()
    for step, batch in enumerate(batches):
        numbers += np.asarray(batch["x"])[:, 0].astype(int).tolist()
        weights = np.tanh(weights @ weights / 256)
        steps.append(time.perf_counter() - began)
        if frozen and step == 0:
            freeze(frozen)
        began = time.perf_counter()
    if frozen:
        thaw(frozen)
    out["epochs"].append(numbers)
    out["steps"].append(statistics.median(steps[1:]))


def main() -> None:
    out: dict[str, Any] = {"epochs": [], "steps": [], "used": [], "disk": []}
    with cachetool.open_cache(root, max_size=int(cap)) as cache:
        to = "tfrecord" if kind == "tensorflow" else "lmdb"
        with cachetool.BackgroundPull(
            cache, source, to=to, shard_size=int(cap) // 35, renew=float(renew)
        ) as background:
            batches = batches_of(cache)
            for epoch in range(int(epochs)):
                before = background.progress()
                train(batches, out, frozen=processes(before.pid) if epoch == FROZEN else None)
                deadline = time.monotonic() + 200
                # This epoch's snapshot let go of some if the puller wanted room by then: it is to fetch others first.
                while epoch > 0 and (
                    (state := background.progress()).phase != "waiting for room"
                    or (before.phase == state.phase and before.samples == state.samples)
                ):
                    out["disk"].append(tree_bytes(root))
                    background.check()
                    assert time.monotonic() < deadline, background.progress()
                    time.sleep(0.05)
                out["used"].append(background.progress().used)
            out["state"] = background.progress().as_dict()
        out["alone"] = {"epochs": [], "steps": []}
        train(batches, out["alone"])
    print(json.dumps(out), flush=True)


main()
os._exit(0)  # PyTorch waits five seconds for each persistent worker
