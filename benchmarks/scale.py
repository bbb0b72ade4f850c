"""How pulling and training on many nodes goes past what can be run: a model with its assumptions, and their check.

    python benchmarks/scale.py [FOLDER] [--nodes 2,10,100,1000] [--set samples=1e9 --set latency=0.03 ...] [--json]
    python benchmarks/scale.py FOLDER --measure [--json]

The first gives figures of the model, in seconds. The second measures on this machine what the model takes for granted:
what the driver of a pull takes for a thousand nodes, how long a shard has the lock of its catalog, what a commit takes;
and a pull of two nodes of Ray from a store that answers as slowly as is said, beside what the model says of it.

::

    worker      ... fetch a shard's samples, write, commit ... -> claim the next
                    latency, CPU, the node's and the store's      in the node's own catalog
                    bandwidth: whichever takes longest
    driver      a report of each node now and then

Nodes ask nobody, so all of it is arithmetic over means.
"""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

DAY = 86400.0
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
    commit: float = 0.011
    """What a commit takes on the node. Measured."""
    lock: float = 0.002
    """How long a shard has the lock of the node's catalog, for its claim and its commit. Measured."""
    report: float = 0.001
    """What a report of a node takes the driver. Measured."""
    reports: float = 50
    """Reports of all nodes in a second, at most."""
    key: int = 25
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
    def all_workers(self) -> int:
        """Workers of all nodes."""
        return self.nodes * self.workers

    @property
    def shard_seconds(self) -> float:
        """Seconds between two shards of a worker."""
        return max(self.bounds().values()) + self.commit

    def bounds(self) -> dict[str, float]:
        """Seconds that a claim takes its worker at least, by what bounds it."""
        size = self.per_claim * self.sample_bytes
        return {
            "latency": self.per_claim * self.latency * math.exp(self.spread**2 / 2) / self.requests,
            "CPU": self.per_claim * self.object_cpu + size * self.byte_cpu,
            "node's network": size * self.workers / self.node_rate,
            "store": size * self.all_workers / self.store_rate,
        }


def pulling(world: World, counts: list[int]) -> Rows:
    """A pass over the source by so many nodes."""
    rows = []
    for nodes in counts:
        here = replace(world, nodes=nodes)
        bounds = here.bounds()
        rate = here.all_workers * here.per_claim / here.shard_seconds
        rows.append(
            {
                "sample": _binary(world.sample_bytes),
                "shard": _size(world.shard_bytes),
                "nodes": nodes,
                "shards/s": round(here.all_workers / here.shard_seconds, 1),
                "driver busy": f"{100 * min(here.reports, 5 * nodes) * here.report:.1f} %",
                "catalog of a node busy": f"{100 * here.workers * here.lock / here.shard_seconds:.1f} %",
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
    return [
        {"what": "listing, an object a sample", "figure": _size(world.samples * world.key)},
        {"what": "listing, samples in files of a shard's size", "figure": _size(world.samples // packed * world.key)},
        {"what": "pages of that listing, an object a sample", "figure": f"{world.samples / 1000:,.0f}"},
        {"what": "their price", "figure": f"${world.samples / 1000 * world.list_price:,.0f}"},
        {"what": "their time at 0.1 s a page, one after another", "figure": f"{world.samples / 1e4 / 3600:.1f} h"},
        {"what": "parts of the source", "figure": f"{16 * world.nodes:,}"},
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


def modelled(world: World, counts: list[int]) -> dict[str, Rows]:
    """All tables of the model."""
    small = [replace(world, sample_bytes=size) for size in (3 * 2**10, 128 * 2**10) if size < world.sample_bytes]
    worlds = [*small, world, replace(world, shard_bytes=8 * world.shard_bytes)]
    pulls = [row for each in worlds for row in pulling(each, counts)]
    brought = pulling(world, [world.nodes])[0]["samples/s"] * world.sample_bytes
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
    finish(modelled(world, counts), as_json=options.json, **settings)


if __name__ == "__main__":
    main()
