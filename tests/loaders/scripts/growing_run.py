"""Trains ten epochs beside a background pull into a cache of a fifth of the data.

``growing_run.py torch|tensorflow|loader SOURCE CACHE CAP RENEW SHARE EPOCHS``. Samples are ``x``, an array whose first
number is the sample's number. After each epoch the program waits until SHARE samples are new to every snapshot, or
until the pull cannot continue before the next snapshot. During one epoch the pull is frozen, which the epoch must not
notice. Prints one line of JSON.
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
from cachetool.cache.transaction_lock import TransactionLock
from cachetool.cache.usage import measure
from cachetool.core.errors import CatalogError

kind, source, root, cap, renew, share, epochs = sys.argv[1:]
FROZEN = 3
"""The epoch that runs beside a frozen pull."""


def batches_of(cache: Any) -> Any:
    """Return an iterable whose every iteration is an epoch, over arrays of the first numbers."""
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
    for place, _, names in os.walk(folder):  # files that are deleted meanwhile are skipped
        for name in ("", *names):
            with contextlib.suppress(FileNotFoundError):
                found = os.lstat(os.path.join(place, name))
                total += max(found.st_size, found.st_blocks * 512)
    return total


def processes(pid: int) -> list[int]:
    return [pid, *map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())]


def freeze(pids: list[int]) -> None:
    """Stop the processes at a moment when none of them is in a transaction, because others would wait for it."""
    catalog = Path(root) / "catalog.sqlite3"
    while True:
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        try:
            with (
                TransactionLock(catalog).hold(shared=False, patience=0.2),
                contextlib.closing(sqlite3.connect(catalog, timeout=0.2, isolation_level=None)) as connection,
            ):
                connection.execute("BEGIN IMMEDIATE")
                connection.execute("ROLLBACK")
                return
        except (CatalogError, sqlite3.OperationalError):
            thaw(pids)


def thaw(pids: list[int]) -> None:
    for pid in pids:
        os.kill(pid, signal.SIGCONT)


def train(batches: Iterator[Any], out: dict[str, Any], *, frozen: list[int] | None = None) -> None:
    """Run one epoch. Record the numbers of its samples and the time of its steps."""
    numbers: list[int] = []
    steps = []
    weights = np.ones((256, 256), dtype=np.float32)
    began = time.perf_counter()
    out["waits"].append(began)
    for step, batch in enumerate(batches):
        if step == 0:
            out["waits"][-1] = time.perf_counter() - began
        numbers += np.asarray(batch["x"])[:, 0].astype(int).tolist()
        weights = np.tanh(weights @ weights / 256)
        steps.append(time.perf_counter() - began)
        if frozen and step == 0:
            freeze(frozen)
        began = time.perf_counter()
    if frozen:
        thaw(frozen)
    out["epochs"].append(numbers)
    out["steps"].append(statistics.median(steps[1:] or steps))


def fresh(cache: Any) -> int:
    """Return the number of samples that no snapshot contained."""
    query = "SELECT sum(samples) FROM shards WHERE state = 'ready' AND since > (SELECT seen FROM cache)"
    return int(cache.catalog.rows(query)[0][0] or 0)


def stuck(cache: Any) -> bool:
    """Return True if the pull cannot get space before the next snapshot. Then the free space is too small for the
    waiting shard, no shard is retiring or being written, and all shards are in use or unread.
    """
    with cache.catalog.read() as connection:

        def found(query: str) -> Any:
            return connection.execute(query).fetchone()

        hungry = found("SELECT coalesce(max(bytes_wanted), 0) FROM jobs")[0]
        moving = found("SELECT 1 FROM shards WHERE state IN ('retiring', 'trash', 'staging')")
        idle = found("SELECT 1 FROM shards WHERE state = 'ready' AND since <= (SELECT seen FROM cache)")
        free = cache.max_size - measure(connection, cache.layout).total
        return hungry > free and moving is None and (idle is None or found("SELECT 1 FROM leases") is not None)


def main() -> None:
    out: dict[str, Any] = {"epochs": [], "steps": [], "used": [], "disk": [], "committed": [], "full": [], "waits": []}
    with cachetool.open_cache(root, max_size=int(cap)) as cache:
        to = "tfrecord" if kind == "tensorflow" else "lmdb"
        with cachetool.BackgroundPull(
            cache, source, to=to, shard_size=int(cap) // 35, renew=float(renew)
        ) as background:
            batches = batches_of(cache)
            for epoch in range(int(epochs)):
                before = background.progress()
                out["committed"].append(before.samples)
                out["full"].append(bool(cache.catalog.rows("SELECT 1 FROM jobs WHERE bytes_wanted > 0")))
                if kind == "loader":
                    batches.refresh()  # the pull continued after the end of the previous epoch
                train(batches, out, frozen=processes(before.pid) if epoch == FROZEN else None)
                deadline = time.monotonic() + 200
                while fresh(cache) < int(share) and not stuck(cache):
                    out["disk"].append(tree_bytes(root))
                    background.check()
                    assert time.monotonic() < deadline, background.progress()
                    time.sleep(0.05)
                out["used"].append(background.progress().used)
            out["state"] = background.progress().as_dict()
        out["alone"] = {"epochs": [], "steps": [], "waits": []}
        train(batches, out["alone"])
    print(json.dumps(out), flush=True)


main()
os._exit(0)  # PyTorch waits five seconds for each persistent worker
