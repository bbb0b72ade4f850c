"""The rate of a loader's batches when the samples come from the disk: the part of ``feed.py`` behind ``--cold``.

Each case has about 1 GB. Before each measurement the page cache is dropped (``posix_fadvise(DONTNEED)``), and
``mincore`` checks that it is empty. Each round reads three ways. First: the samples by bare ``preadv``, in a
shuffled order into one reused buffer, with 4, 16 and 64 requests in flight. Second: the files in order, 8 MiB at a
time. Third: an epoch of a new loader, whose time starts when ``iter()`` returns, after its feeders have started. *of
preadv* is the loader's rate as a share of the fastest number of requests in the same round. Samples of 3 KiB are
also read with ``shuffle="window"``.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from feed import Case, make

from cachetool.bench.consumer import touched
from cachetool.bench.samples import drop as forget
from cachetool.bench.samples import files_of, fill
from cachetool.cache import CacheDir, open_cache
from cachetool.core.extents import EXTENTS_FILE
from cachetool.formats.reading import load_extents
from cachetool.loaders.numpy import Loader
from cachetool.loaders.read.arena import open_arena

CASES = {
    "1MiB": Case(1024, 2**20, 32, 16, 0.75, 0),
    "128KiB": Case(8192, 2**17, 64, 16, 0.75, 0),
    "3KiB": Case(340_000, 3 * 2**10, 256, 16, 0.75, 0),
}
IN_FLIGHT = (4, 16, 64)
Reads = list[tuple[int, int, int]]


def drop(paths: list[Path]) -> None:
    """Drop these files from the page cache. Raise AssertionError if a process maps one of them."""
    forget(paths)
    arena = open_arena()
    assert arena is not None
    for path in paths:
        at, size = arena.map(path) or (0, 0)
        if size and arena.resident(np.array([at, at + size - 1])):
            raise AssertionError(f"{path} is still in memory")


def reads_of(cache: CacheDir) -> tuple[list[Path], Reads]:
    """Return the location of every ``x``: file number, offset, size."""
    paths: list[Path] = []
    found: Reads = []
    for shard in cache.shards():
        extents = load_extents(shard.path / EXTENTS_FILE, shard.schema)
        x = extents.fields["x"]
        offsets, sizes = x.locate(np.arange(shard.samples))
        found += [(len(paths), at, size) for at, size in zip(offsets.tolist(), sizes.tolist(), strict=True)]
        paths.append(shard.path / extents.files[x.file])
    return paths, found


def bare(paths: list[Path], reads: Reads, in_flight: int) -> float:
    """Return the MB/s of ``preadv`` calls in this order by ``in_flight`` threads."""
    fds = [os.open(path, os.O_RDONLY) for path in paths]

    def read(chosen: Reads) -> int:
        memory = memoryview(bytearray(chosen[0][2]))
        return sum(os.preadv(fds[file], [memory], at) for file, at, _ in chosen)

    with ThreadPoolExecutor(in_flight) as pool:
        begin = time.perf_counter()
        total = sum(pool.map(read, [reads[n::in_flight] for n in range(in_flight)]))
        seconds = time.perf_counter() - begin
    for fd in fds:
        os.close(fd)
    return total / seconds / 1e6


def in_order(paths: list[Path]) -> float:
    """Return the MB/s of reading the files one after another."""
    memory = memoryview(bytearray(2**23))
    total, begin = 0, time.perf_counter()
    for path in paths:
        with open(path, "rb", buffering=0) as file:
            while count := file.readinto(memory):
                total += count
    return total / (time.perf_counter() - begin) / 1e6


def loaded(cache: CacheDir, case: Case, shuffle: str, workers: int) -> float:
    """Return the MB/s of one epoch of a new loader."""
    with Loader(cache, batch_size=case.batch, shuffle=shuffle, workers=workers, epochs=1) as loader:
        batches = iter(loader)
        begin = time.perf_counter()
        return touched(batches) / (time.perf_counter() - begin) / 1e6


def measure(case: Case, name: str, folder: Path, *, rounds: int, workers: int) -> list[dict[str, Any]]:
    """Return the rows of one case and format, one row per shuffle."""
    rng = np.random.default_rng(1)
    seconds: dict[str, list[float]] = {}
    with open_cache(folder / "cache", max_size="20GB") as cache:
        fill(cache, name, make(case), case.shards)
        shuffles = ["full", *(["window"] if case.nbytes < 2**14 else [])]
        everything, (paths, reads) = files_of(cache), reads_of(cache)
        for _ in range(rounds):
            shuffled = [reads[i] for i in rng.permutation(len(reads)).tolist()]
            for shuffle in shuffles:
                drop(everything)
                seconds.setdefault(shuffle, []).append(loaded(cache, case, shuffle, workers))
            for in_flight in IN_FLIGHT:
                drop(everything)
                seconds.setdefault(f"preadv x {in_flight}", []).append(bare(paths, shuffled, in_flight))
            drop(everything)
            seconds.setdefault("in order", []).append(in_order(paths))
        best = [max(each) for each in zip(*(seconds[f"preadv x {n}"] for n in IN_FLIGHT), strict=True)]
    medians = {what: round(statistics.median(found)) for what, found in seconds.items()}
    return [
        {
            "format": name,
            "shuffle": shuffle,
            "MB/s": medians[shuffle],
            "of preadv": share(seconds[shuffle], best),
            "of in order": share(seconds[shuffle], seconds["in order"]),
            "of full": share(seconds[shuffle], seconds["full"]),
            **{f"{what} MB/s": medians[what] for what in (*(f"preadv x {n}" for n in IN_FLIGHT), "in order")},
        }
        for shuffle in shuffles
    ]


def share(of: list[float], whole: list[float]) -> float:
    """Return the median share over the rounds."""
    return round(statistics.median(a / b for a, b in zip(of, whole, strict=True)), 2)


def run(folder: Path, cases: list[str], formats: list[str], *, rounds: int, workers: int) -> list[dict[str, Any]]:
    """Return the rows of all cases."""
    rows = []
    for title in cases:
        for name in formats:
            with tempfile.TemporaryDirectory(dir=folder) as where:
                found = measure(CASES[title], name, Path(where), rounds=rounds, workers=workers)
                rows += [{"case": title, **row} for row in found]
    return rows
