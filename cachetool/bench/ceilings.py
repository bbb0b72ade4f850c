"""Limits that the machine sets to any loader, in MB/s: its memory, and the disk on which the samples are."""

from __future__ import annotations

import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from cachetool.bench.consumer import rate, touched
from cachetool.bench.samples import Trial, drop
from cachetool.core.block import Ragged

__all__ = ["available", "disk", "memory"]

_PIECE = 2**23
# Requests at once: a disk reaches its rate at random places only with many in flight.
_IN_FLIGHT = 16


def available() -> int:
    """Return the bytes of memory that programs and the page cache may still take; 0 where the kernel does not say."""
    try:
        text = Path("/proc/meminfo").read_text(encoding="ascii")
    except OSError:
        return 0
    sizes = [line.split()[1] for line in text.splitlines() if line.startswith("MemAvailable")]
    return int(sizes[0]) * 1024 if sizes else 0


def memory(trial: Trial, seconds: float) -> float:
    """Return the rate at which shuffled samples are copied within memory into one batch, used again and again."""
    # No loader can be much faster than this copy, so it is the limit to compare with.
    columns = [stored.values if isinstance(stored, Ragged) else stored for stored in trial.block.columns.values()]
    column = max(columns, key=lambda values: values.nbytes)
    batch = max(1, min(trial.batch, len(column)))
    out = {"x": np.empty((batch, *column.shape[1:]), dtype=column.dtype)}
    rng = np.random.default_rng(0)

    def epochs() -> int:
        total, end = 0, time.perf_counter() + seconds
        while time.perf_counter() < end:
            order = rng.permutation(len(column))
            for at in range(0, len(order) - batch + 1, batch):
                # mode="clip", because with the default mode numpy.take copies into a buffer of its
                # own first, and the limit would be too low.
                np.take(column, order[at : at + batch], axis=0, out=out["x"], mode="clip")
                total += touched([out])
        return total

    return rate(epochs)


def disk(paths: list[Path], size: int, seconds: float) -> tuple[float, float]:
    """Return the rates of the disk for files read in order, and for pieces of ``size`` bytes at random, 16 at once.

    The page cache is dropped before both. A network disk or a virtual one may still answer from a memory of its own.
    """
    drop(paths)
    in_order = rate(lambda: _in_order(paths))
    drop(paths)
    rng = np.random.default_rng(0)
    places = [(path, at) for path in paths for at in range(0, max(1, path.stat().st_size - size), size)]
    chosen = [places[i] for i in rng.permutation(len(places)).tolist()]
    end = time.perf_counter() + seconds

    def read(assigned: list[tuple[Path, int]]) -> int:
        memory, total = memoryview(bytearray(size)), 0
        fds: dict[Path, int] = {}
        # Each thread has its own descriptors and buffer, so the threads share nothing but the disk.
        try:
            for path, at in assigned:
                if time.perf_counter() > end:
                    break
                fd = fds.setdefault(path, -1)
                if fd < 0:
                    fd = fds[path] = os.open(path, os.O_RDONLY)
                total += os.preadv(fd, [memory], at)
        finally:
            for fd in fds.values():
                if fd >= 0:
                    os.close(fd)
        return total

    with ThreadPoolExecutor(_IN_FLIGHT) as pool:
        return in_order, rate(lambda: sum(pool.map(read, [chosen[n::_IN_FLIGHT] for n in range(_IN_FLIGHT)])))


def _in_order(paths: list[Path]) -> int:
    memory, total = memoryview(bytearray(_PIECE)), 0
    for path in paths:
        # Without a buffer of Python's, whose copy would count into the rate of the disk.
        with open(path, "rb", buffering=0) as file:
            while count := file.readinto(memory):
                total += count
    return total
