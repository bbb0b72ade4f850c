"""How pulling and training on many nodes goes past what can be run: a model with its assumptions, and their check.

    python benchmarks/scale.py [FOLDER] [--nodes 2,10,100,1000] [--set samples=1e9 --set latency=0.03 ...] [--json]
    python benchmarks/scale.py FOLDER --measure [--json]

The first gives figures of the model, in seconds. The second runs two nodes of Ray on this machine and measures what the
model takes for granted: what the coordinator takes for a claim, what a commit takes, what it keeps of each, how long a
listing is for each key; and a pull from a store that answers as slowly as is said, beside what the model says of it.

::

    worker      ... fetch a shard's samples, write, commit ... -> report it and ask for the next claim -> ...
                    latency, CPU, the node's and the store's        wait until the coordinator
                    bandwidth: whichever takes longest              has answered those before

The coordinator answers all that was asked while it wrote its last answers down, up to 64 questions, and writes once for
them. Its queue is simulated exactly: worker by worker, question by question. All else is arithmetic over means.
"""

from __future__ import annotations

import argparse
import heapq
import math
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

DAY = 86400.0
GROUP = 64
"""Questions that the coordinator answers at once, at most."""
UNEVEN = 0.1
"""Standard deviation of the time that a shard takes, of its mean."""
Rows = list[dict[str, Any]]


@dataclass(frozen=True)
class World:
    """What is assumed; seconds, bytes, dollars. ``--set NAME=VALUE`` changes any of it."""

    samples: int = 10**9
    sample_bytes: int = 2**20
    nodes: int = 1000
    workers: int = 2
    """Of a node."""
    requests: int = 32
    """In flight in each worker."""
    latency: float = 0.030
    """Of a request until its first byte, median."""
    spread: float = 0.5
    """Sigma of its logarithm."""
    node_rate: float = 1.25e9
    """Bytes a second that reach a node."""
    store_rate: float = 125e9
    """Bytes a second that the store gives to all nodes."""
    object_cpu: float = 0.4e-3
    byte_cpu: float = 2.3e-9
    """Of a worker, for an object and for a byte: RESULTS.md, pulling 64 KiB and 16 MiB."""
    shard_bytes: int = 64_000_000
    answer: float = 0.0018
    """What the coordinator takes to answer a question; a claim is two, the commit before it is the other. Measured."""
    write: float = 0.0011
    """What it takes to write down the answers to all that was asked at once. Measured."""
    commit: float = 0.011
    """What a commit takes on the node. Measured."""
    record: int = 110
    """Bytes of the driver's catalog for a commit. Measured."""
    key: int = 100
    """Bytes of a listing for an object. Measured."""
    cap: float = 100e9
    """Of a node's cache."""
    renew: float = 0.1
    """Share of a full cache that an epoch gives up for new samples."""
    appetite: float = 600e6
    """Bytes a second that a node's trainer takes."""
    epochs: int = 90
    get_price: float = 0.4e-6
    """Of a GET. Amazon S3's list price, as those below."""
    list_price: float = 5e-6
    """Of a page of 1,000 keys."""
    region_price: float = 0.02e-9
    """Of a byte to another region."""
    internet_price: float = 0.09e-9
    """Of a byte to the internet."""
    lost: float = 30 * DAY
    """Mean time until a node is lost with its disk."""

    @property
    def per_claim(self) -> int:
        """Samples of a claim: those of a shard."""
        return max(1, min(self.samples, self.shard_bytes // self.sample_bytes))

    @property
    def claims(self) -> int:
        """Of a pass."""
        return -(-self.samples // self.per_claim)

    @property
    def most_claims(self) -> float:
        """That the coordinator hands out in a second when more is asked than it can answer."""
        return GROUP / (2 * (self.write + GROUP * self.answer))

    @property
    def customers(self) -> int:
        """Workers that ask the coordinator."""
        return self.nodes * self.workers

    def bounds(self) -> dict[str, float]:
        """Seconds that a claim takes its worker at least, by what bounds it."""
        size = self.per_claim * self.sample_bytes
        return {
            "latency": self.per_claim * self.latency * math.exp(self.spread**2 / 2) / self.requests,
            "CPU": self.per_claim * self.object_cpu + size * self.byte_cpu,
            "node's network": size * self.workers / self.node_rate,
            "store": size * self.customers / self.store_rate,
        }


def think(world: World, rng: np.random.Generator, count: int) -> npt.NDArray[np.float64]:
    """Seconds between an answer of the coordinator and the next question of that worker, (count,).

    Nearly normal, as a sum of many latencies is, and never below half of what bounds it.
    """
    bounds = world.bounds()
    relative = UNEVEN
    if max(bounds, key=lambda name: bounds[name]) == "latency":
        relative = max(relative, math.sqrt(math.expm1(world.spread**2) / world.per_claim))
    return max(bounds.values()) * np.clip(rng.normal(1.0, relative, count), 0.5, 1.5) + world.commit


def queue(world: World, claims: int, *, seed: int = 0) -> dict[str, float]:
    """What waits for the coordinator, simulated for so many claims in a steady state: a worker asks both questions of a
    claim, one after the other, then works for its think time."""
    rng = np.random.default_rng(seed)
    customers = min(world.customers, world.claims)
    mean = max(world.bounds().values()) + world.commit
    # Of each worker: when it asks, when it asked the first of the two questions, whether this is the second.
    asked = [(at, at, False) for at in rng.uniform(0.0, mean, customers).tolist()]
    heapq.heapify(asked)
    skip = 2 * customers  # until the queue is what it stays
    thinks = iter(think(world, rng, claims + skip + 2 * GROUP).tolist())
    waits: list[float] = []
    free, done, began, busy = 0.0, 0, 0.0, 0.0
    while done < claims + skip:
        start = max(free, asked[0][0])
        now = []
        while asked and asked[0][0] <= start and len(now) < GROUP:
            now.append(heapq.heappop(asked))
        free = start + world.write + len(now) * world.answer
        busy += free - start if done >= skip else 0.0
        for _, since, second in now:
            if not second:
                heapq.heappush(asked, (free, since, True))
                continue
            if done == skip:
                began = free
            if done >= skip:
                waits.append(free - since)
            done += 1
            then = free + next(thinks)
            heapq.heappush(asked, (then, then, False))
    return {
        "rate": len(waits) / (free - began),
        "busy": min(1.0, busy / (free - began)),
        "median": float(np.median(waits)),
        "p99": float(np.quantile(waits, 0.99)),
    }


def pulling(world: World, counts: list[int], claims: int) -> Rows:
    """A pass over the source by so many nodes."""
    rows = []
    for nodes in counts:
        here = replace(world, nodes=nodes)
        found, bounds = queue(here, claims), here.bounds()
        rate = min(found["rate"] * here.per_claim, here.samples / max(bounds.values()))
        asking = min(GROUP, here.customers)
        bounds["coordinator"] = 2 * (here.write + asking * here.answer) * here.customers / asking
        rows.append(
            {
                "sample": _binary(world.sample_bytes),
                "shard": _size(world.shard_bytes),
                "nodes": nodes,
                "claims/s": round(found["rate"], 1),
                "coordinator busy": f"{100 * found['busy']:.1f} %",
                "wait median, ms": round(1000 * found["median"], 1),
                "wait p99, ms": round(1000 * found["p99"], 1),
                "bound by": max(bounds, key=lambda name: bounds[name]),
                "samples/s": round(rate),
                "GB/s": round(rate * here.sample_bytes / 1e9, 2),
                "hours a pass": round(here.samples / rate / 3600, 2),
            }
        )
    return rows


def training(world: World, rate: float) -> Rows:
    """Epochs on full caches, for shares of renewal; ``rate`` is the bytes a second that pulling brings a node.

    An epoch shows all that is in the cache; the next one may begin with up to ``renew`` of it replaced, as far as that
    was fetched meanwhile. Nodes hold different samples, and none is drawn again before a pass is whole.
    """
    rows = []
    total = float(world.samples) * world.sample_bytes
    for share in sorted({0.0, 0.02, world.renew, 0.25, 1.0}):
        cap = min(world.cap, total / world.nodes)
        epoch = cap / world.appetite
        wanted = share * cap / epoch
        fetched = min(wanted, rate)
        shown = cap * world.nodes + fetched * epoch * (world.epochs - 1) * world.nodes
        times = world.epochs * cap * world.nodes / shown
        rows.append(
            {
                "renewed an epoch": f"{100 * share:.0f} %",
                "minutes an epoch": round(epoch / 60, 1),
                "MB/s a node wanted": round(wanted / 1e6, 1),
                "MB/s a node had": round(fetched / 1e6, 1),
                "really renewed": f"{100 * fetched * epoch / cap:.1f} %",
                "GB/s of the store": round(fetched * world.nodes / 1e9, 1),
                "each byte served, times": round(times, 1),
                f"of the source shown in {world.epochs} epochs": f"{100 * min(1.0, shown / total):.0f} %",
            }
        )
    return rows


def costs(world: World) -> Rows:
    """What the store charges: for a pass, for the epochs of :func:`training`, and without a cache."""
    total = float(world.samples) * world.sample_bytes
    cap = min(world.cap * world.nodes, total)
    brought = min(cap * (1 + world.renew * (world.epochs - 1)), 1e30)
    cases = {
        "one pass over the source": total,
        f"{world.epochs} epochs from caches, renewed as asked": brought,
        f"{world.epochs} epochs of as many bytes without caches": cap * world.epochs,
    }
    return [
        {
            "what": name,
            "TB": round(nbytes / 1e12, 1),
            "GET, millions": round(nbytes / world.sample_bytes / 1e6),
            "$ requests": round(nbytes / world.sample_bytes * world.get_price),
            "$ other region": round(nbytes * world.region_price),
            "$ internet": round(nbytes * world.internet_price),
        }
        for name, nbytes in cases.items()
    ]


def sizes(world: World) -> Rows:
    """What grows with samples and nodes beside the samples."""
    day = world.nodes * DAY / world.lost
    held = min(world.cap, float(world.samples) * world.sample_bytes / world.nodes)
    packed = max(1, world.shard_bytes // world.sample_bytes)
    alone = max(value for name, value in world.bounds().items() if name != "store")
    waiting = 2 * (world.write + GROUP * world.answer)
    saturated = (alone + world.commit + waiting) * world.most_claims / world.workers
    return [
        {"what": "listing, an object a sample", "figure": _size(world.samples * world.key)},
        {"what": "listing, samples in files of a shard's size", "figure": _size(world.samples // packed * world.key)},
        {"what": "pages of that listing, an object a sample", "figure": f"{world.samples / 1000:,.0f}"},
        {"what": "their price", "figure": f"${world.samples / 1000 * world.list_price:,.0f}"},
        {"what": "their time at 0.1 s a page, one after another", "figure": f"{world.samples / 1e4 / 3600:.1f} h"},
        {"what": "driver's catalog after a pass", "figure": _size(world.claims * world.record)},
        {"what": "nodes that keep the coordinator busy all the time", "figure": f"{saturated:,.0f}"},
        {"what": "nodes lost a day", "figure": f"{day:.1f}"},
        {"what": "drawn again for them, of all caches, a day", "figure": f"{100 * day / world.nodes:.1f} %"},
        {"what": "one lost node's cache", "figure": _size(int(held))},
    ]


def _size(nbytes: int) -> str:
    for unit, factor in (("TB", 10**12), ("GB", 10**9)):
        if nbytes >= factor:
            return f"{nbytes / factor:.1f} {unit}"
    return f"{nbytes / 1e6:.0f} MB"


def _binary(nbytes: int) -> str:
    return f"{nbytes / 2**20:g} MiB" if nbytes >= 2**20 else f"{nbytes / 2**10:g} KiB"


def simulated(world: World, counts: list[int], claims: int) -> dict[str, Rows]:
    """All tables of the model."""
    small = [replace(world, sample_bytes=size) for size in (3 * 2**10, 128 * 2**10) if size < world.sample_bytes]
    worlds = [*small, world, replace(world, shard_bytes=8 * world.shard_bytes)]
    pulls = [row for each in worlds for row in pulling(each, counts, claims)]
    brought = pulling(world, [world.nodes], claims)[0]["samples/s"] * world.sample_bytes
    rate = brought / world.nodes
    return {
        "pulling a pass": pulls,
        f"{world.nodes:,} nodes training": training(world, rate),
        "what the store charges": costs(world),
        "what else grows": sizes(world),
    }


def changed(world: World, settings: list[str]) -> World:
    """The world with ``NAME=VALUE`` in it."""
    kinds = {field.name: type(getattr(world, field.name)) for field in fields(world)}
    for text in settings:
        name, equals, value = text.partition("=")
        if not equals or name not in kinds:
            raise SystemExit(f"error: --set {text}: not NAME=VALUE, with a NAME of {', '.join(kinds)}")
        world = replace(world, **{name: kinds[name](float(value))})
    return world


def main() -> None:
    from tables import finish  # beside this script; tests import it from elsewhere

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", nargs="?", type=Path)
    parser.add_argument("--nodes", default="2,10,100,1000")
    parser.add_argument("--claims", type=int, default=20_000, help="simulated for each row")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument("--measure", action="store_true")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    world = changed(World(), options.set)
    if options.measure:
        from scale_measured import measured

        finish(measured(world, options.folder), as_json=options.json, seconds="as measured here")
        return
    counts = [int(each) for each in options.nodes.split(",")]
    settings = {field.name: getattr(world, field.name) for field in fields(world)}
    finish(simulated(world, counts, options.claims), as_json=options.json, **settings)


if __name__ == "__main__":
    main()
