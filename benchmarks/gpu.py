"""The rate of a loader's batches on a GPU, and the waits of training steps for a batch.

    python benchmarks/gpu.py FOLDER [--cases 1MiB,128KiB,3KiB] [--formats lmdb] [--workers 2,8] [--rounds 5] [--json]

The benchmark needs a CUDA device. Samples are warm and shuffled, with the fields ``x`` and ``y``, in the cases of
``feed.py`` with four times the samples.

*copies*: ``Loader(device="cuda")`` and two copies by hand, in turns. Figures are GB/s and shares, medians over
rounds of 8 GB. *pinned* is the ceiling: batches that lie in page-locked memory already are copied again and again,
three at a time. *by hand* puts each batch of a loader into one of three page-locked buffers and copies it from
there. *no device* drops the loader's batches at once: the rate of the feeders. The last column is the share of the
slower of *pinned* and *no device*.

*steps*: after each batch the GPU multiplies matrices for the time that the batch's bytes last at 2 GB/s. The batches
come from ``Loader(device="cuda")``, or one batch on the GPU is reused (*resident*). The training loop asks for a
batch when the step before the last one has ended, like a loop that reads each loss. *idle* is the share of time in
which the GPU computes nothing, *longest* the longest such gap, *over 0.1 ms* the share of steps after a longer gap
than that. *wait* is the time in ``next()``, median and longest, within an epoch. *between epochs* is the median gap
before the first step of an epoch. The first steps do not count. All objects that exist before are frozen, because
Python needs 80 ms to collect the objects of ``import torch``, and no step starts during that time, with or without
batches.

*starts*: the time from creating a loader in a new process that has used CUDA before until its feeders are ready, and
until its first batch. FOLDER must have about 3 GB free, and the machine about 6 GB of memory. The benchmark deletes
its files at the end.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import gc
import itertools
import statistics
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from epochs import starts
from feed import CASES, make
from tables import finish

from cachetool.bench.consumer import rate
from cachetool.bench.samples import fill
from cachetool.cache import open_cache
from cachetool.loaders.torch import Loader

TIMES = 4
BYTES = 8e9
PACE = 2e9
STEPS, SECONDS, FIRST = 200, 4.0, 20
"""Least number of steps, least seconds of steps, and first steps that do not count: they lock the slots' pages."""
AHEAD = 3
Batches = Iterable[dict[str, torch.Tensor]]


def nbytes(batch: dict[str, torch.Tensor]) -> int:
    return sum(column.nbytes for column in batch.values())


def copied(batches: Batches) -> int:
    """Copy page-locked batches, several at a time. Return the bytes."""
    total, events = 0, deque[torch.cuda.Event]()
    for batch in batches:
        there = {name: column.to("cuda", non_blocking=True) for name, column in batch.items()}
        events.append(torch.cuda.Event())
        events[-1].record()
        total += nbytes(there)
        if len(events) > AHEAD:
            events.popleft().synchronize()
    torch.cuda.synchronize()
    return total


def staged(batches: Batches) -> Iterator[dict[str, torch.Tensor]]:
    """Yield batches in page-locked buffers. A buffer is reused after its copy has ended."""
    buffers: list[tuple[dict[str, torch.Tensor], torch.cuda.Event]] = []
    for number, batch in enumerate(batches):
        if len(buffers) <= AHEAD:
            buffers.append(({k: torch.empty_like(v).pin_memory() for k, v in batch.items()}, torch.cuda.Event()))
        own, event = buffers[number % len(buffers)]
        event.synchronize()
        yield {name: own[name][: len(column)].copy_(column) for name, column in batch.items()}
        event.record()


def dropped(batches: Batches) -> int:
    return sum(nbytes(batch) for batch in batches)


def copies(make_loader: Callable[..., Loader], rounds: int) -> dict[str, float]:
    with make_loader() as here, make_loader(device="cuda") as there, make_loader() as by_hand:
        pinned = [{k: v.clone().pin_memory() for k, v in batch.items()} for batch in itertools.islice(here, 32)]
        size = nbytes(pinned[0])
        epochs = max(1, round(BYTES / (size * len(here))))
        ways: dict[str, Callable[[], int]] = {
            "pinned": lambda: copied(itertools.islice(itertools.cycle(pinned), epochs * len(here))),
            "no device": lambda: sum(dropped(here) for _ in range(epochs)),
            "by hand": lambda: sum(copied(staged(by_hand)) for _ in range(epochs)),
            'device="cuda"': lambda: sum(received(there) for _ in range(epochs)),
        }
        found: dict[str, list[float]] = {name: [] for name in ways}
        rng = np.random.default_rng(0)
        for loader in (here, by_hand, there):
            for _ in range(2):
                received(loader)
        for _ in range(rounds):
            for name in rng.permutation(list(ways)).tolist():
                found[name].append(rate(ways[name]) / 1e3)
    ours = found['device="cuda"']

    def share(others: Iterable[float]) -> float:
        return round(statistics.median(own / other for own, other in zip(ours, others, strict=True)), 2)

    return {
        **{f"{name} GB/s": round(statistics.median(each), 1) for name, each in found.items()},
        "of pinned": share(found["pinned"]),
        "of by hand": share(found["by hand"]),
        "of the slower": share(map(min, found["pinned"], found["no device"])),
    }


def received(batches: Batches) -> int:
    total = dropped(batches)
    torch.cuda.synchronize()
    return total


class Work:
    """A training step of the GPU."""

    def __init__(self, seconds: float) -> None:
        self._a = torch.randn(2048, 2048, device="cuda")
        self._out = torch.empty_like(self._a)
        self._count, self.seconds = 1, seconds
        for _ in range(3):
            begin, end = self.run(None)
            end.synchronize()
            took = begin.elapsed_time(end) / 1e3
            self._count = max(1, round(self._count * seconds / took))

    def run(self, batch: dict[str, torch.Tensor] | None) -> tuple[torch.cuda.Event, torch.cuda.Event]:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        if batch is not None:
            batch["x"][:, 0].sum()
        for _ in range(self._count):
            torch.mm(self._a, self._a, out=self._out)
        end.record()
        return begin, end


def trained(batches: Iterator[dict[str, torch.Tensor]], work: Work, epoch: int) -> dict[str, float | None]:
    """Train one epoch over ``batches``, the batches of epoch ``epoch``."""
    waits, events = [], []
    for _ in range(FIRST + max(STEPS, round(SECONDS / work.seconds))):
        begin = time.perf_counter()
        batch = next(batches)
        waits.append(time.perf_counter() - begin)
        events.append(work.run(batch))
        del batch
        if len(events) > 1:
            events[-2][1].synchronize()  # like a loop that reads the loss of the step before
    torch.cuda.synchronize()
    gaps = np.array([end.elapsed_time(begin) for (_, end), (begin, _) in itertools.pairwise(events)])[FIRST:]
    number = np.arange(FIRST + 1, len(events))  # the number of the step after each gap
    first = number % epoch == 0
    inside, took = gaps[~first], [begin.elapsed_time(end) for begin, end in events[FIRST:]]
    waited = 1e3 * np.array(waits)[number[~first]]
    return {
        "steps": len(gaps),
        "step ms": round(statistics.median(took), 2),
        "idle %": round(100 * float(inside.sum() / (inside.sum() + sum(took))), 2),
        "longest ms": round(float(inside.max()), 2),
        "over 0.1 ms %": round(100 * float((inside > 0.1).mean()), 2),
        "wait ms": round(float(np.median(waited)), 3),
        "longest wait ms": round(float(waited.max()), 2),
        "between epochs ms": round(float(np.median(gaps[first])), 2) if first.any() else None,
    }


def steps(make_loader: Callable[..., Loader]) -> list[dict[str, Any]]:
    with make_loader(device="cuda") as loader:
        received(loader)
        batch = next(iter(loader))
        work = Work(nbytes(batch) / PACE)
        gc.freeze()
        resident = trained(itertools.repeat(batch), work, len(loader))
        del batch
        ours = trained(itertools.chain.from_iterable(itertools.repeat(loader)), work, len(loader))
        gc.unfreeze()
    return [{"batches": "resident", **resident}, {"batches": 'device="cuda"', **ours}]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--formats", default="lmdb")
    parser.add_argument("--cases", default="1MiB,128KiB,3KiB")
    parser.add_argument("--workers", default="2,8")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.exit(2, f"PyTorch {torch.__version__} finds no CUDA device here\n")
    tables: dict[str, list[dict[str, Any]]] = {"copies": [], "steps": [], "starts": []}
    for title in options.cases.split(","):
        case = CASES[title].scaled(TIMES)
        block = make(case)
        for name in options.formats.split(","):
            with contextlib.ExitStack() as stack:
                folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=options.folder)))
                cache = stack.enter_context(open_cache(folder / "cache", max_size="20GB"))
                fill(cache, name, block, case.shards)
                for workers in map(int, options.workers.split(",")):
                    every = {"batch_size": case.batch, "workers": workers, "drop_last": True}
                    loader = functools.partial(Loader, cache, **every)
                    row = {"case": title, "format": name, "workers": workers}
                    tables["copies"].append({**row, **copies(loader, options.rounds)})
                    tables["steps"] += [{**row, **each} for each in steps(loader)]
                    took = starts(folder, workers, options.rounds, "import torch; torch.zeros(1, device='cuda')")
                    tables["starts"].append({**row, **{f"{k} ms": round(1e3 * v) for k, v in took.items()}})
    finish(tables, as_json=options.json, rounds=options.rounds, device=torch.cuda.get_device_name())


if __name__ == "__main__":
    main()
