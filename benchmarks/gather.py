"""The speed of gathering shuffled batches from the extents of each format, as a share of ``np.take`` from memory.

    python benchmarks/gather.py FOLDER [--rounds 7] [--formats lmdb,hdf5] [--cases 3KiB] [--clock cpu] [--scale 1.0]
                                       [--json]

One thread reads warm files and keeps its maps. For each case and format the shards are written into FOLDER once and
read once. Then each round takes a new random order, first from two arrays in memory into a batch by the fastest way
of NumPy (``np.take(..., mode="clip")``), then from the shards into another reused batch. The table gives medians
over the rounds of the rate and of its share of ``np.take`` in the same round. ``--clock cpu`` counts processor time,
for a busy machine. FOLDER must have about 2.2 GB free, and the machine about 3 GB of memory. The benchmark deletes
its files at the end.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from tables import finish

from cachetool.core.block import BLOCK_BYTES, Block
from cachetool.core.schema import Field, Schema
from cachetool.formats import format_names, get_format
from cachetool.formats.shard import ShardFiles
from cachetool.loaders.read.mapped import MappedParts
from cachetool.loaders.view import ShardFile, View

CLOCKS: dict[str, Callable[[], float]] = {"wall": time.perf_counter, "cpu": time.thread_time}


@dataclass(frozen=True)
class Case:
    """Samples of one size in some shards, and the target share of ``np.take`` for gathering them."""

    samples: int
    nbytes: int
    batch: int
    shards: int
    target: float

    def scaled(self, share: float) -> Case:
        """Return the case with ``share`` of its samples, at least one batch and one sample per shard."""
        return replace(self, samples=max(self.batch, self.shards, int(self.samples * share)))


CASES = {
    "1MiB": Case(512, 2**20, 32, 8, 0.8),
    "128KiB": Case(4096, 2**17, 64, 8, 0.7),
    "3KiB": Case(50_000, 3 * 2**10, 256, 3, 0.65),
    "500-shards": Case(50_000, 3 * 2**10, 256, 500, 0.5),
}


def make(case: Case) -> Block:
    """Return random float32 arrays ``x`` with a number ``y``."""
    schema = Schema((Field("x", "<f4", (case.nbytes // 4,)), Field("y", "<i8")))
    raw = np.random.default_rng(0).integers(0, 2**63, size=case.samples * case.nbytes // 8, dtype=np.int64)
    x = raw.view("<f4").reshape(case.samples, -1)
    return Block(schema, {"x": x, "y": np.arange(case.samples, dtype=np.int64)})


def write(folder: Path, name: str, block: Block, shards: int) -> View:
    """Write the block as shards of a format."""
    parts = []
    step = max(1, BLOCK_BYTES // block.schema.fixed_nbytes)
    for number, rows in enumerate(np.array_split(np.arange(len(block)), shards)):
        start, stop = int(rows[0]), int(rows[-1]) + 1
        where = folder / f"{number:05d}"
        where.mkdir()
        nbytes = (stop - start) * block.schema.fixed_nbytes
        files = ShardFiles(where, get_format(name), block.schema, samples=stop - start, nbytes=nbytes)
        for at in range(start, stop, step):
            files.write(block.slice(at, min(at + step, stop)))
        files.finish()
        parts.append(ShardFile(where.name, name, stop - start, "", str(where)))
    return View(1, "default", block.schema, tuple(parts))


def batches(order: np.ndarray, size: int) -> Iterator[np.ndarray]:
    """Yield the whole batches of an order."""
    for at in range(0, len(order) - size + 1, size):
        yield order[at : at + size]


class Taken:
    """Batches that ``np.take`` copies from two arrays."""

    def __init__(self, block: Block, size: int) -> None:
        self.block = block
        self.out = {f.name: np.empty((size, *f.sizes), dtype=f.numpy) for f in block.schema}

    def read(self, order: np.ndarray, size: int) -> None:
        for indices in batches(order, size):
            for name, out in self.out.items():
                np.take(self.block.columns[name], indices, axis=0, out=out, mode="clip")


class Gathered:
    """Batches that are gathered from shards."""

    def __init__(self, view: View, size: int) -> None:
        self.view, self.parts = view, MappedParts()
        self.out = {f.name: np.empty((size, *f.sizes), dtype=f.numpy) for f in view.schema}

    def read(self, order: np.ndarray, size: int) -> None:
        out = self.out
        read = self.parts.batches(
            self.view, list(batches(order, size)), self.view.schema, empty=lambda field, shape: out[field.name]
        )
        for _ in read:
            pass

    def check(self, block: Block) -> None:
        """Check that the last batch holds the samples that its ``y`` names."""
        expected = np.asarray(block.columns["x"])[self.out["y"]]
        # compares bits, because some values are NaN
        if not np.array_equal(self.out["x"].view(np.uint32), expected.view(np.uint32)):
            raise AssertionError("gathered something else than was written")


def measure(case: Case, names: list[str], folder: Path, rounds: int, clock: Callable[[], float]) -> list[dict]:
    """Return one row per format."""
    block = make(case)
    taken = Taken(block, case.batch)
    read = {name: Gathered(write(made(folder / name), name, block, case.shards), case.batch) for name in names}
    rng = np.random.default_rng(1)
    seconds: dict[str, list[float]] = {name: [] for name in ("np.take", *names)}
    for turn in range(rounds + 1):  # the first round fills the page tables and does not count
        order = rng.permutation(case.samples)
        for name in seconds:
            begin = clock()
            (taken if name == "np.take" else read[name]).read(order, case.batch)
            if turn:
                seconds[name].append(clock() - begin)
    for each in read.values():
        each.check(block)
        each.parts.close()
    moved = case.samples // case.batch * case.batch * block.schema.fixed_nbytes
    shares = {n: [a / b for a, b in zip(seconds["np.take"], seconds[n], strict=True)] for n in seconds}
    return [
        {
            "format": name,
            "MB/s": round(moved / statistics.median(seconds[name]) / 1e6),
            "of np.take": round(statistics.median(shares[name]), 3),
        }
        for name in seconds
    ]


def made(folder: Path) -> Path:
    """Create the folder and return it."""
    folder.mkdir()
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--formats", default=",".join(format_names()))
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--clock", choices=CLOCKS, default="wall")
    parser.add_argument("--scale", type=float, default=1.0, help="share of the samples to write")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    found = []
    for title in options.cases.split(","):
        case = CASES[title].scaled(options.scale)
        with tempfile.TemporaryDirectory(dir=options.folder) as folder:
            rows = measure(case, options.formats.split(","), Path(folder), options.rounds, CLOCKS[options.clock])
        found += [{"case": title, "target": case.target, **row} for row in rows]
    finish({"gather": found}, as_json=options.json, clock=options.clock, rounds=options.rounds)


if __name__ == "__main__":
    main()
