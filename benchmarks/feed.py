"""The rate of a loader's batches in the training loop, idle and beside a busy thread, as a share of ``np.take``.

    python benchmarks/feed.py FOLDER [--rounds 5] [--formats lmdb,hdf5] [--cases 1MiB,3KiB] [--workers 2] [--scale 1.0]
                                     [--json] [--peers-dir DIR [--peers "FFCV;Grain"]]
    python benchmarks/feed.py FOLDER --cold [...]            # see cold.py

Samples are warm and shuffled, with the fields ``x`` and ``y``. For each case a cache in each format is written into
FOLDER. A round has five passes, and each pass runs all formats in random order. For each format it first runs
``np.take`` of a shuffled order from memory into one reused batch, and then the loader. Both run alone (*idle*), then
beside a pure Python thread that spins in this process (*busy*). The consumer touches one byte of each page of each
batch while it holds the GIL. Shares are medians over pairs of the same pass. A rate covers epochs of 1.5 GB
together. The loader's rate includes the starts of its epochs and follows an epoch that does not count and uses up
the batches prepared before. *Of fastest format* is the share of the fastest format in the same pass.

*blocked* is the share of time in which the spinning thread neither ran nor waited for a processor, from
``/proc/thread-self/schedstat``: it waited for the GIL. It is measured twice: at full speed, and with the consumer
paced at 600 MB/s for a second or more. In the paced case no other loader has feeders, and this loader's feeders have
filled their slots. *by touching alone* is the same figure for batches that already exist in memory, so only the
difference is due to the loader. Both figures are measured again with processors that do not halt when they are idle
(*awake*; empty if the kernel does not allow it, as without root). *blocked* includes the time to wake a halted
processor, which was a quarter to a half of it on the tested virtual machine.

With ``--peers-dir`` each case also runs beside the peers, with the first of the formats (see ``beside.py``). FOLDER
must have about 3 GB free, and the machine about 5 GB of memory. The benchmark deletes its files at the end.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import statistics
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import beside
import numpy as np
from awake import awake
from peers.starting import LOADERS
from tables import finish

from cachetool.bench.consumer import PACE, Spinner, rate, touched
from cachetool.bench.samples import fill
from cachetool.cache import open_cache
from cachetool.core.block import Block
from cachetool.core.schema import Field, Schema
from cachetool.formats import format_names
from cachetool.loaders.numpy import Loader

REST = 0.2
"""Seconds of rest before a paced measurement."""

PASSES = 5
"""Passes of a round. A pair takes half a second, and a shared machine may be half as fast in one pair as in the
next.
"""


@dataclass(frozen=True)
class Case:
    """Samples of one size in some shards, with two targets: the share of ``np.take``, and of the idle rate when
    busy.
    """

    samples: int
    nbytes: int
    batch: int
    shards: int
    target: float
    busy: float

    @property
    def epochs(self) -> int:
        """Return the number of epochs that are measured together."""
        return -(-beside.SUSTAINED // (self.samples * self.nbytes))

    @property
    def paced(self) -> int:
        """Return the number of epochs at the paced rate: a second or more of them."""
        return math.ceil(PACE / (self.samples * self.nbytes))

    def scaled(self, share: float) -> Case:
        """Return the case with ``share`` of its samples, at least one batch and one sample per shard."""
        return replace(self, samples=max(self.batch, self.shards, int(self.samples * share)))


CASES = {
    "1MiB": Case(512, 2**20, 32, 8, 0.55, 0.5),
    "128KiB": Case(4096, 2**17, 64, 8, 0.45, 0.5),
    "3KiB": Case(50_000, 3 * 2**10, 256, 3, 0.75, 0.4),
    "780-shards": Case(50_000, 3 * 2**10, 256, 780, 0.5, 0.4),
}


def make(case: Case) -> Block:
    """Return random float32 arrays ``x`` with a number ``y``."""
    schema = Schema((Field("x", "<f4", (case.nbytes // 4,)), Field("y", "<i8")))
    raw = np.random.default_rng(0).integers(0, 2**63, size=case.samples * case.nbytes // 8, dtype=np.int64)
    return Block(schema, {"x": raw.view("<f4").reshape(case.samples, -1), "y": np.arange(case.samples)})


def taken(block: Block, size: int, order: np.ndarray) -> Iterator[dict[str, Any]]:
    """Yield batches that are copied from memory into one reused batch."""
    out = {f.name: np.empty((size, *f.sizes), dtype=f.numpy) for f in block.schema}
    for at in range(0, len(order) - size + 1, size):
        for name, column in out.items():
            np.take(block.columns[name], order[at : at + size], axis=0, out=column, mode="clip")
        yield out


def sustained(loader: Loader, case: Case) -> float:
    """Return the MB/s of consecutive epochs, after the batches prepared before are used up."""
    touched(loader)
    return rate(lambda: sum(touched(loader) for _ in range(case.epochs)))


def measure(loaders: dict[str, Loader], block: Block, case: Case, *, rounds: int) -> list[dict[str, Any]]:
    """Measure a loader over ``block`` in each format. Each pass runs all formats, each beside np.take."""
    rng = np.random.default_rng(1)
    for loader in loaders.values():
        for _ in range(2):  # fills the page tables
            touched(loader)
    found: dict[str, dict[str, list[float]]] = {name: {} for name in loaders}

    def note(name: str, **values: float) -> None:
        for what, value in values.items():
            found[name].setdefault(what, []).append(value)

    for name in [name for _ in range(rounds * PASSES) for name in rng.permutation(list(loaders)).tolist()]:
        loader = loaders[name]
        orders = [rng.permutation(case.samples) for _ in range(case.epochs)]
        take = rate(lambda orders=orders: sum(touched(taken(block, case.batch, order)) for order in orders))
        idle = sustained(loader, case)
        with Spinner() as spinner:
            busy = sustained(loader, case)
        note(name, take=take, idle=idle, share=idle / take, busy=busy, kept=busy / idle, blocked=spinner.blocked)
    held = [{field: np.array(column) for field, column in batch.items()} for batch in next(iter(loaders.values()))]
    with awake() as there:
        ways = ["paced", "own", *(["paced awake", "own awake"] if there else [])]
    for loader in loaders.values():
        loader.close()
    for name in rng.permutation(list(loaders)).tolist():
        with loaders[name] as loader:
            for _ in range(2):
                touched(loader)
            for way in [way for _ in range(rounds) for way in rng.permutation(ways).tolist()]:
                time.sleep(REST)
                with awake() if "awake" in way else contextlib.nullcontext(), Spinner() as spinner:
                    for _ in range(case.paced):
                        touched(loader if "paced" in way else held, PACE)
                note(name, **{way: spinner.blocked})
    for one in range(rounds * PASSES):
        fastest = max(each["idle"][one] for each in found.values())
        for name, each in found.items():
            note(name, fastest=each["idle"][one] / fastest)
    return [_row(name, each) for name, each in found.items()]


def _row(name: str, values: dict[str, list[float]]) -> dict[str, Any]:
    medians = {what: statistics.median(each) for what, each in values.items()}
    shares = {"blocked": "blocked", "blocked, paced": "paced", "by touching alone": "own"}
    shares |= {"blocked, awake": "paced awake", "by touching alone, awake": "own awake"}
    return {
        "format": name,
        "np.take MB/s": round(medians["take"]),
        "MB/s": round(medians["idle"]),
        "of np.take": round(medians["share"], 2),
        "of fastest format": round(medians["fastest"], 2),
        "busy MB/s": round(medians["busy"]),
        "of idle": round(medians["kept"], 2),
        **{title: round(medians[what], 3) if what in medians else None for title, what in shares.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--formats", default=",".join(format_names()))
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--scale", type=float, default=1.0, help="share of the samples to write")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--peers-dir", type=Path, help="beside the peers, whose environments are here, or will be")
    parser.add_argument("--peers", help="only these peers: names with ; between them")
    parser.add_argument("--cold", action="store_true", help="from the disk instead, beside bare preadv")
    options = parser.parse_args()
    if options.cold:
        import cold

        names = [name for name in options.cases.split(",") if name in cold.CASES]
        chosen = {"rounds": options.rounds, "workers": options.workers}
        rows = cold.run(options.folder, names, options.formats.split(","), **chosen)
        finish({"cold": rows}, as_json=options.json, **chosen)
        return
    found, peers = [], []
    for title in options.cases.split(","):
        case = CASES[title].scaled(options.scale)
        block = make(case)
        with contextlib.ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=options.folder)))
            loaders = {}
            for name in options.formats.split(","):
                cache = stack.enter_context(open_cache(folder / name, max_size="20GB"))
                fill(cache, name, block, case.shards)
                own = {"batch_size": case.batch, "workers": options.workers, "drop_last": True}
                loaders[name] = stack.enter_context(Loader(cache, **own))
            rows = measure(loaders, block, case, rounds=options.rounds)
            found += [{"case": title, "target": case.target, "busy target": case.busy, **row} for row in rows]
            if options.peers_dir:
                job = [case.samples, case.nbytes, case.batch, options.workers]
                names = options.peers.split(";") if options.peers else list(LOADERS)
                first = next(iter(loaders.values()))
                rows = beside.measure(first, folder, options.peers_dir, job, names=names, rounds=options.rounds)
                peers += [{"case": title, **each} for each in rows]
    tables = {"feed": found, "beside peers": peers} if peers else {"feed": found}
    finish(tables, as_json=options.json, rounds=options.rounds, workers=options.workers)


if __name__ == "__main__":
    main()
