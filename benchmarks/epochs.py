"""The wait at the beginning of an epoch while the cache grows and evicts, and the start time of a loader.

    python benchmarks/epochs.py FOLDER [--epochs 20] [--workers 2] [--rounds 5] [--busy-disk] [--json]

A ``BackgroundPull`` draws from a folder of 2,000 objects of 128 KiB and evicts, because the cap of the cache is a
fifth of them. Training steps sleep 50 ms after each batch of 8. *boundary* is the wait for the first batch of each
epoch except the first epoch, *others* the wait for all other batches. *start* is the time from creating a loader in
a new process until its feeders are ready, and until its first batch, with and without PyTorch imported before. The
time of the imports does not count. With ``--busy-disk`` another process writes and syncs files of 512 MB in FOLDER
during the whole measurement.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

import cachetool
from cachetool.loaders.numpy import Loader

OBJECTS, VALUES = 2000, 2**15
CAP = OBJECTS * VALUES * 4 // 5
STEP = 0.05
BATCH = 8
START = """
import json, sys, time
{imports}
from cachetool.loaders.numpy import Loader
begin = time.perf_counter()
with Loader(sys.argv[1], batch_size=8, workers=int(sys.argv[2])) as loader:
    made = time.perf_counter()
    batches = iter(loader)
    ready = time.perf_counter()
    next(batches)
    first = time.perf_counter()
print(json.dumps({{"made": made - begin, "ready": ready - begin, "first": first - begin}}))
"""


def waits(folder: Path, epochs: int, workers: int) -> dict[str, Any]:
    """Return the trainer's waits beside a pull, in seconds, and the samples of its epochs."""
    remote = folder / "remote"
    remote.mkdir()
    rng = np.random.default_rng(0)
    for number in range(OBJECTS):
        np.save(remote / f"{number:05d}.x.npy", rng.random(VALUES, dtype="<f4"))
    os.sync()  # otherwise the kernel writes these 256 MB back later, and commits of the catalog wait for the disk
    boundary, others, seen = [], [], []
    options = {"renew": "20%", "shard_size": 2**21, "policy": "oldest"}
    with (
        cachetool.open_cache(folder / "cache", max_size=CAP) as cache,
        cachetool.BackgroundPull(cache, str(remote), **options),
        Loader(cache, batch_size=BATCH, workers=workers, fields=["x"], min_samples=20 * BATCH, steps=40) as loader,
    ):
        for epoch in range(epochs):
            count, begin = 0, time.perf_counter()
            for batch in loader:
                (boundary if count == 0 and epoch else others).append(time.perf_counter() - begin)
                batch["x"].reshape(-1)[::1024].sum()
                count += 1
                del batch
                time.sleep(STEP)
                begin = time.perf_counter()
            seen.append(count)
        found = cache.stats()
    return {"boundary": boundary, "others": others[1:], "batches": seen, "evicted": found.evicted}


WRITER = """
import os, sys
block = os.urandom(2**23)
while True:
    with open(sys.argv[1], "wb") as file:
        for _ in range(64):
            file.write(block)
        os.fsync(file.fileno())
"""


@contextlib.contextmanager
def written(folder: Path) -> Iterator[None]:
    """Keep the folder's disk busy with another process that writes all the time."""
    writer = subprocess.Popen([sys.executable, "-c", WRITER, str(folder / "written")])
    try:
        yield
    finally:
        writer.kill()
        writer.wait()


def starts(folder: Path, workers: int, rounds: int, imports: str) -> dict[str, float]:
    """Return medians in seconds."""
    found: list[dict[str, float]] = []
    for _ in range(rounds):
        command = [sys.executable, "-c", START.format(imports=imports), str(folder.resolve() / "cache"), str(workers)]
        # In a folder outside a checkout: Python would import the checkout's modules first and might compile them at
        # each start.
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True)
        found.append(json.loads(done.stdout.splitlines()[-1]))
    return {name: statistics.median(each[name] for each in found) for name in found[0]}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--busy-disk", action="store_true")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        with written(Path(name)) if options.busy_disk else contextlib.nullcontext():
            found = waits(Path(name), options.epochs, options.workers)
        plain = starts(Path(name), options.workers, options.rounds, "")
        torch = starts(Path(name), options.workers, options.rounds, "import torch")
    median = statistics.median(found["others"])
    rows = {
        "boundary, median": statistics.median(found["boundary"]),
        "boundary, longest": max(found["boundary"]),
        "others, median": median,
        "boundary above others, longest": max(found["boundary"]) - median,
        "start to feeders ready": plain["ready"],
        "start to first batch": plain["first"],
        "start to first batch, after import torch": torch["first"],
    }
    if options.json:
        json.dump({"milliseconds": {what: 1e3 * each for what, each in rows.items()}, **found}, sys.stdout, indent=1)
        return
    print("| what | ms |\n|---|---|")
    for what, seconds in rows.items():
        print(f"| {what} | {1e3 * seconds:.2f} |")
    print(f"\nbatches of each epoch: {found['batches']}; shards evicted: {found['evicted']}")


if __name__ == "__main__":
    main()
