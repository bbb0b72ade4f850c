"""How fast a loader's batches reach a GPU, and whether a training step ever waits for one.

    python benchmarks/gpu.py FOLDER [--cases 1MiB,128KiB,3KiB] [--formats lmdb] [--workers 2,8] [--rounds 5] [--json]

Needs a CUDA device; warm and shuffled, fields ``x`` and ``y``, the cases of ``feed.py`` with four times the samples.

*copies*: ``Loader(device="cuda")`` beside two ways to do it by hand, in turns, GB/s and shares as medians over rounds
of 8 GB. *pinned* is the ceiling: batches that were put into page-locked memory beforehand, copied over and over, three
on their way. *by hand* takes the batches of a loader, puts each into one of three page-locked buffers and copies it
from there. *no device* are the loader's batches dropped at once: what the feeders make. The last column is the share of
the slower of *pinned* and *no device*.

*steps*: the GPU multiplies matrices for as long after each batch as its bytes last at 2 GB/s, with batches of
``Loader(device="cuda")`` and, *resident*, with one that is there; the training loop asks for a batch once the step
before the last one is done, as one that looks at each loss. *idle* is the share of the time in which the GPU computes
nothing, *longest* the longest such time, *over 0.1 ms* the share of steps before which it is longer than that, *wait*
how long the training loop is in ``next()``, median and longest, all within an epoch; *between epochs* is the median
time without computing before the first step of one. The first steps do not count. What was made before is frozen: to
collect all the objects of ``import torch`` takes Python 80 ms, in which no step is begun, with any batches or none.

*starts*: from the making of a loader in a new process that has used CUDA before to its feeders being ready, and to its
first batch.
FOLDER must have about 3 GB free, and the machine about 6 GB of memory; what is written is deleted again.
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
"""Steps at least, seconds of them, and how many are left out: when slots are locked and used for the first time."""
AHEAD = 3
Batches = Iterable[dict[str, torch.Tensor]]


def nbytes(batch: dict[str, torch.Tensor]) -> int:
    return sum(column.nbytes for column in batch.values())


def copied(batches: Batches) -> int:
    """Copy page-locked batches, a few on their way; gives the bytes."""
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
    """Batches put into page-locked buffers, which are used again when their copies are done."""
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
    """``epoch``: batches of one."""
    waits, events = [], []
    for _ in range(FIRST + max(STEPS, round(SECONDS / work.seconds))):
        begin = time.perf_counter()
        batch = next(batches)
        waits.append(time.perf_counter() - begin)
        events.append(work.run(batch))
        del batch
        if len(events) > 1:
            events[-2][1].synchronize()  # as whoever looks at the loss of the step before
    torch.cuda.synchronize()
    gaps = np.array([end.elapsed_time(begin) for (_, end), (begin, _) in itertools.pairwise(events)])[FIRST:]
    number = np.arange(FIRST + 1, len(events))  # of the step behind each gap
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
