"""How fast a loader's batches reach the training loop, idle and beside a busy trainer, as a share of ``np.take``.

    python benchmarks/feed.py FOLDER [--rounds 5] [--formats lmdb,hdf5] [--cases 1MiB,3KiB] [--workers 2] [--json]
    python benchmarks/feed.py FOLDER --cold [...]            # see cold.py

Warm and shuffled, fields ``x`` and ``y``. Of every case and format a cache is written into FOLDER; then rounds of one
epoch each alternate between ``np.take`` of the same order from memory into one reused batch and the loader, first alone
(*idle*), then with a pure-Python thread spinning in this process (*busy*). The consumer touches one byte of every page
of every batch without letting go of the GIL. Shares are medians over pairs of the same round.

*blocked* is how much of its time that thread was neither running nor waiting for a processor, from
``/proc/thread-self/schedstat``: it waited for the GIL. Once at full speed, once with the consumer paced at 600 MB/s.
FOLDER must have about 1.2 GB free, and the machine about 3 GB of memory; what is written is deleted again.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from cachetool.block import Block
from cachetool.cache import CacheDir, Facts, Origin, open_cache
from cachetool.formats import format_names, get_format
from cachetool.formats.shard import ShardFiles, shard_bound
from cachetool.loaders.numpy import Loader
from cachetool.schema import Field, Schema

PACE = 600e6


@dataclass(frozen=True)
class Case:
    """Samples of one size in some shards; what share of ``np.take`` is wanted, and of its own idle rate when busy."""

    samples: int
    nbytes: int
    batch: int
    shards: int
    target: float
    busy: float


CASES = {
    "1MiB": Case(512, 2**20, 32, 8, 0.55, 0.5),
    "128KiB": Case(4096, 2**17, 64, 8, 0.45, 0.5),
    "3KiB": Case(50_000, 3 * 2**10, 256, 3, 0.75, 0.4),
    "780-shards": Case(50_000, 3 * 2**10, 256, 780, 0.5, 0.4),
}


def make(case: Case) -> Block:
    """Random float32 arrays ``x`` with a number ``y``."""
    schema = Schema((Field("x", "<f4", (case.nbytes // 4,)), Field("y", "<i8")))
    raw = np.random.default_rng(0).integers(0, 2**63, size=case.samples * case.nbytes // 8, dtype=np.int64)
    return Block(schema, {"x": raw.view("<f4").reshape(case.samples, -1), "y": np.arange(case.samples)})


def fill(cache: CacheDir, name: str, block: Block, shards: int) -> None:
    """Commit the block as shards of a format."""
    kind = get_format(name)
    cache.declare("default", block.schema)
    for rows in np.array_split(np.arange(len(block)), shards):
        part = block.slice(int(rows[0]), int(rows[-1]) + 1)
        bound = shard_bound(kind, block.schema, part.samples, part.nbytes)
        with cache.stage(dataset="default", schema=block.schema, format=name, bound=bound) as staging:
            files = ShardFiles(staging.path, kind, block.schema, samples=part.samples, nbytes=part.nbytes)
            files.write(part)
            facts = files.facts()
            row = Facts(facts.samples, facts.payload, facts.content, facts.digest, facts.data, facts.files)
            staging.commit(row, origin=Origin())


def touched(batches: Iterable[dict[str, Any]], pace: float | None = None) -> int:
    """Touch every page of every batch; gives the bytes of all. ``pace``: bytes a second at most."""
    total, begin = 0, time.perf_counter()
    for batch in batches:
        for column in batch.values():
            view = memoryview(column).cast("B")
            bytes(view[::4096])
            total += len(view)
        if pace is not None and (ahead := total / pace - (time.perf_counter() - begin)) > 0:
            time.sleep(ahead)
    return total


def taken(block: Block, size: int, order: np.ndarray) -> Iterator[dict[str, Any]]:
    """Batches taken from memory into one that is used again."""
    out = {f.name: np.empty((size, *f.sizes), dtype=f.numpy) for f in block.schema}
    for at in range(0, len(order) - size + 1, size):
        for name, column in out.items():
            np.take(block.columns[name], order[at : at + size], axis=0, out=column, mode="clip")
        yield out


class Spinner:
    """A thread that counts, and how much of its time it was kept from it by the GIL."""

    def __init__(self) -> None:
        self.blocked = 0.0
        self._stop = False
        self._thread = threading.Thread(target=self._spin)

    def _spin(self) -> None:
        def times() -> tuple[float, float]:
            running, waiting, _ = Path("/proc/thread-self/schedstat").read_text().split()
            return time.perf_counter(), (int(running) + int(waiting)) / 1e9

        wall, cpu = times()
        count = 0
        while not self._stop:
            count += 1
        wall_end, cpu_end = times()
        self.blocked = max(0.0, 1 - (cpu_end - cpu) / (wall_end - wall))

    def __enter__(self) -> Spinner:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop = True
        self._thread.join()


def rate(read: Callable[[], int]) -> float:
    """MB/s of one epoch."""
    begin = time.perf_counter()
    return read() / (time.perf_counter() - begin) / 1e6


def measure(case: Case, name: str, folder: Path, *, rounds: int, workers: int) -> dict[str, Any]:
    """One row."""
    block = make(case)
    rng = np.random.default_rng(1)
    with contextlib.ExitStack() as stack:
        cache = stack.enter_context(open_cache(folder / "cache", max_size="20GB"))
        fill(cache, name, block, case.shards)
        loader = stack.enter_context(Loader(cache, batch_size=case.batch, workers=workers, drop_last=True))
        for _ in range(2):  # fills the page tables
            touched(loader)

        def pairs(busy: bool) -> tuple[list[float], list[float], list[float]]:
            takes, feeds, blocked = [], [], []
            for _ in range(rounds):
                order = rng.permutation(case.samples)
                with Spinner() if busy else contextlib.nullcontext():
                    takes.append(rate(lambda order=order: touched(taken(block, case.batch, order))))
                with Spinner() if busy else contextlib.nullcontext() as spinner:
                    feeds.append(rate(lambda: touched(loader)))
                if spinner is not None:
                    blocked.append(spinner.blocked)
            return takes, feeds, blocked

        takes, idle, _ = pairs(busy=False)
        _, busy, blocked = pairs(busy=True)
        with Spinner() as paced:
            for _ in range(3):
                touched(loader, PACE)
    return {
        "format": name,
        "np.take MB/s": round(statistics.median(takes)),
        "MB/s": round(statistics.median(idle)),
        "of np.take": round(statistics.median(b / a for a, b in zip(takes, idle, strict=True)), 2),
        "busy MB/s": round(statistics.median(busy)),
        "of idle": round(statistics.median(busy) / statistics.median(idle), 2),
        "blocked": round(statistics.median(blocked), 3),
        "blocked, paced": round(paced.blocked, 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--formats", default=",".join(format_names()))
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--cold", action="store_true", help="from the disk instead, beside bare preadv")
    options = parser.parse_args()
    if options.cold:
        import cold

        cold.run(options.folder, options.formats.split(","), rounds=options.rounds, workers=options.workers)
        return
    found = []
    for title in options.cases.split(","):
        case = CASES[title]
        for name in options.formats.split(","):
            with tempfile.TemporaryDirectory(dir=options.folder) as folder:
                row = measure(case, name, Path(folder), rounds=options.rounds, workers=options.workers)
            found.append({"case": title, "target": case.target, "busy target": case.busy, **row})
    if options.json:
        json.dump({"rounds": options.rounds, "workers": options.workers, "rows": found}, sys.stdout, indent=1)
        return
    names = list(found[0])
    print(f"| {' | '.join(names)} |\n|{'---|' * len(names)}")
    for row in found:
        print(f"| {' | '.join(str(row[name]) for name in names)} |")


if __name__ == "__main__":
    main()
