"""The speed of writing samples in each format and of converting between formats, beside a raw write and the peers.

    python benchmarks/convert.py FOLDER [--rounds 5] [--cases 1MiB,128KiB,3KiB] [--formats lmdb,zarr] [--scale 1.0]
                                        [--pairs all|chain|none|lmdb:zarr,...] [--peers-dir DIR] [--memory] [--json]

Each round runs these jobs in random order. The raw bytes go to one file, in 8 MiB writes with one fsync and without
preallocation. Each format writes a shard, with checksums, extents and fsync. Each pair of formats converts a shard
by the code of ``cachetool convert``: read, write, both digests, fsync. With ``--peers-dir`` each peer writes the
same samples, followed by an fsync of its files. The table gives medians over the rounds: the rate, its share of the
raw write in the same round, and the ratio to the fastest peer. A peer that fails becomes a row with its error.

Each peer has its own environment below ``--peers-dir``. Pip installs missing ones, about 3 GB in all. They stay that
small only if pip finds the CPU builds of PyTorch.

``--memory`` instead converts inputs of 512 MiB and 2 GiB, and one of eight huge samples. Each pair runs in its own
process, and the table gives the peak of its anonymous memory (RssAnon). The imports alone take about 60 MiB.

FOLDER must lie on the disk to be measured and have about 4 GB free. The benchmark deletes its files there at the end.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from peers.common import samples
from peers.starting import PEERS, Peer, PeerError
from tables import finish

from cachetool.conversion.inputs import run_of_blocks
from cachetool.core.block import BLOCK_BYTES, Block
from cachetool.core.schema import Field, Schema
from cachetool.formats import format_names, get_format
from cachetool.formats.shard import ShardFiles, open_shard

CHUNK = 8 * 2**20
MIB = 2**20
PAIR_TARGET = 0.4
MEMORY_TARGET = 400 * MIB
PEER_TARGET = 2.0


@dataclass(frozen=True)
class Case:
    """Samples of one size, the target share of the raw write for each format, and the pairs that convert to LMDB."""

    count: int
    nbytes: int
    lmdb: float = 0.6
    into_lmdb: float = PAIR_TARGET

    def target(self, into: str) -> float:
        """Return the target share of the raw write for writing a format."""
        return {"lmdb": self.lmdb, "hdf5": 0.8, "zarr": 0.5, "tfrecord": 0.6}.get(into, 0.5)

    def pair_target(self, into: str) -> float:
        """Return the target share of the raw write for converting to a format."""
        return self.into_lmdb if into == "lmdb" else PAIR_TARGET

    @property
    def schema(self) -> Schema:
        """Return the schema: a float32 array and a number."""
        return Schema((Field("x", "<f4", (self.nbytes // 4,)), Field("y", "<i8")))


CASES = {
    "1MiB": Case(512, 2**20),
    "128KiB": Case(4096, 2**17),
    "3KiB": Case(50_000, 3 * 2**10, lmdb=0.35, into_lmdb=0.3),
}
MEMORY_CASES = {
    "512 x 1 MiB": Case(512, 2**20),
    "2048 x 1 MiB": Case(2048, 2**20),
    "700000 x 3 KiB": Case(700_000, 3 * 2**10),
    "8 x 192 MiB": Case(8, 192 * 2**20),
}


def blocks_of(case: Case, x: np.ndarray) -> list[Block]:
    """Yield blocks of about 8 MB, the size that sources yield."""
    whole = Block(case.schema, {"x": x, "y": np.arange(len(x), dtype=np.int64)})
    step = max(1, BLOCK_BYTES // case.nbytes)
    return [whole.slice(at, min(at + step, len(x))) for at in range(0, len(x), step)]


def write_raw(data: memoryview, folder: Path) -> None:
    """Write ``data`` to a new file and fsync it."""
    fd = os.open(folder / "raw", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    for at in range(0, len(data), CHUNK):
        os.write(fd, data[at : at + CHUNK])
    os.fsync(fd)
    os.close(fd)


def write_shard(name: str, blocks: list[Block], folder: Path) -> None:
    """Write ``blocks`` as one shard of the format ``name``, durably."""
    count, nbytes = sum(len(b) for b in blocks), sum(b.nbytes for b in blocks)
    files = ShardFiles(folder, get_format(name), blocks[0].schema, samples=count, nbytes=nbytes)
    for block in blocks:
        files.write(block)
    files.finish()


def convert_shard(source: Path, name: str, into: str, schema: Schema, folder: Path) -> None:
    """Convert the shard in ``source`` as a worker of ``cachetool convert`` does."""
    with open_shard(source, get_format(name), schema) as reader:
        nbytes = reader.samples * schema.fixed_nbytes
        files = ShardFiles(folder, get_format(into), schema, samples=reader.samples, nbytes=nbytes)
        for block in run_of_blocks(reader, 0, reader.samples):
            files.write(block)
        files.facts()


def timed(work: Callable[[Path], None], folder: Path) -> float:
    """Return the seconds that ``work`` takes to fill a new folder."""
    begin = time.perf_counter()
    work(folder)
    return time.perf_counter() - begin


@contextmanager
def scratch(parent: Path) -> Iterator[Path]:
    """Yield a new folder and delete it afterwards."""
    folder = Path(tempfile.mkdtemp(dir=parent))
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


def measure(case: Case, options: argparse.Namespace, parent: Path) -> list[dict[str, Any]]:
    """Return the rows of one case."""
    names, pairs = options.formats.split(","), pairs_of(options)
    x = samples(max(1, int(case.count * options.scale)), case.nbytes)
    blocks = blocks_of(case, x)
    rows: list[dict[str, Any]] = []
    jobs: dict[str, Callable[[Path], float]] = {"raw": partial(timed, partial(write_raw, memoryview(x).cast("B")))}
    targets: dict[str, float | None] = {"raw": None}
    with ExitStack() as stack:
        for name in names:
            jobs[name] = partial(timed, partial(write_shard, name, blocks))
            targets[name] = case.target(name)
        for name in {name for name, _ in pairs}:
            (parent / name).mkdir()
            write_shard(name, blocks, parent / name)
        for name, into in pairs:
            work = partial(convert_shard, parent / name, name, into, case.schema)
            jobs[f"{name} > {into}"] = partial(timed, work)
            targets[f"{name} > {into}"] = case.pair_target(into)
        for name in options.peers.split(";") if options.peers_dir else ():
            try:
                peer = Peer(options.peers_dir, name, str(len(x)), str(case.nbytes))
            except PeerError as error:
                rows.append({"what": name, "error": str(error)})
                continue
            stack.callback(peer.close)
            jobs[name] = lambda folder, peer=peer: peer.write(folder / "out")
        seconds: dict[str, list[float]] = {what: [] for what in jobs}
        order = random.Random(0)
        for _ in range(options.rounds):
            # A new order in each round: a job may leave pending writes to the disk, and the same job must not always
            # run after it.
            for what in order.sample(list(jobs), len(jobs)):
                try:
                    with scratch(parent) as folder:
                        seconds[what].append(jobs[what](folder))
                except PeerError as error:
                    rows.append({"what": what, "error": str(error)})
                    del jobs[what], seconds[what]
    total = sum(block.nbytes for block in blocks)
    rows = [
        {
            "what": what,
            "MB/s": round(total / statistics.median(taken) / 1e6),
            "of raw": round(statistics.median(a / b for a, b in zip(seconds["raw"], taken, strict=True)), 2),
            "target": targets.get(what),
        }
        for what, taken in seconds.items()
    ] + rows
    fastest = max((row["MB/s"] for row in rows if row["what"] in PEERS and "MB/s" in row), default=None)
    for row in rows:
        if fastest and "MB/s" in row and row["what"] not in ("raw", *PEERS):
            row["of fastest peer"] = round(row["MB/s"] / fastest, 1)
    return rows


def pairs_of(options: argparse.Namespace) -> list[tuple[str, str]]:
    """Return the pairs of formats to convert."""
    names = options.formats.split(",")
    if options.pairs == "none":
        return []
    if options.pairs == "all":
        return [(a, b) for a in names for b in names]
    if options.pairs == "chain":  # reads and writes each format once
        return list(zip(names, [*names[1:], names[0]], strict=True))
    return [(a, b) for a, _, b in (pair.partition(":") for pair in options.pairs.split(","))]


def measure_memory(case: Case, options: argparse.Namespace, parent: Path) -> list[dict[str, Any]]:
    """Return the peak anonymous memory of a converting process, one row per pair."""
    pairs, rows, count = pairs_of(options), [], max(1, int(case.count * options.scale))
    nbytes = count * case.schema.fixed_nbytes
    one = samples(max(1, CHUNK // case.nbytes), case.nbytes)
    for name in sorted({name for name, _ in pairs}):
        with scratch(parent) as source:
            files = ShardFiles(source, get_format(name), case.schema, samples=count, nbytes=nbytes)
            for at in range(0, count, len(one)):
                x = one[: min(len(one), count - at)]
                files.write(Block(case.schema, {"x": x, "y": np.arange(at, at + len(x), dtype=np.int64)}))
            files.finish()
            for into in [into for a, into in pairs if a == name]:
                with scratch(parent) as folder:
                    peak = _peak(["--one", str(source), name, into, str(case.nbytes), str(folder)])
                bound = MEMORY_TARGET + 2 * case.schema.fixed_nbytes
                rows.append({"what": f"{name} > {into}", "peak MiB": peak // MIB, "bound MiB": bound // MIB})
    return rows


def _peak(arguments: list[str]) -> int:
    """Run this script in its own process. Return the highest RssAnon that was observed, in bytes."""
    process, peak = subprocess.Popen([sys.executable, __file__, *arguments]), 0
    while process.poll() is None:
        try:
            status = Path(f"/proc/{process.pid}/status").read_text()
        except OSError:
            break
        found = [int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("RssAnon")]
        peak = max([peak, *found])
        time.sleep(0.005)
    if process.wait():
        raise SystemExit(process.returncode)
    return peak


def main() -> None:
    if sys.argv[1:2] == ["--one"]:
        source, name, into, nbytes, folder = sys.argv[2:]
        return convert_shard(Path(source), name, into, Case(0, int(nbytes)).schema, Path(folder))
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--cases")
    parser.add_argument("--formats", default=",".join(format_names()))
    parser.add_argument("--pairs", default="all", help="all, chain, none, or such as lmdb:zarr,hdf5:hdf5")
    parser.add_argument("--scale", type=float, default=1.0, help="share of the samples to write")
    parser.add_argument("--peers-dir", type=Path, help="where the environments of the peers are, or will be")
    parser.add_argument("--peers", default=";".join(PEERS), help="only these peers: names with ; between them")
    parser.add_argument("--memory", action="store_true", help="measure memory, not speed")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    cases, run = (MEMORY_CASES, measure_memory) if options.memory else (CASES, measure)
    found = []
    for title in options.cases.split(",") if options.cases else cases:
        with scratch(options.folder) as parent:
            found += [{"case": title, **row} for row in run(cases[title], options, parent)]
    title = "memory" if options.memory else "convert"
    finish({title: found}, as_json=options.json, rounds=options.rounds, scale=options.scale)
    return None


if __name__ == "__main__":
    main()
