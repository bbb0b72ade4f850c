"""A model of pulling and training on more nodes than can be tested, with its assumptions and measurements of them.

    python benchmarks/scale.py [FOLDER] [--nodes 2,10,100,1000] [--set samples=1e9 --set latency=0.03 ...] [--json]
    python benchmarks/scale.py FOLDER --measure [--json]

The first command computes the model's figures, in seconds. The second command measures the model's assumptions on
this machine: the driver's work for a thousand nodes, the time that a shard locks its catalog, and the time of a
commit. It also pulls over two nodes of Ray from a store of known latency, and prints the model's prediction beside
the result.

::

    worker      ... fetch a shard's samples, write, commit ... -> claim the next
                    latency, CPU, the node's and the store's      in the node's own catalog
                    bandwidth: whichever takes longest
    driver      a report of each node now and then

Nodes do not wait for each other, so the model is arithmetic over means.
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
    """The assumptions, in seconds, bytes and dollars. ``--set NAME=VALUE`` changes one of them."""

    samples: int = 10**9
    sample_bytes: int = 2**20
    nodes: int = 1000
    workers: int = 2
    """Pull workers of a node."""
    requests: int = 32
    """Requests in flight in each worker."""
    latency: float = 0.030
    """Median time from a request to its first byte."""
    spread: float = 0.5
    """Sigma of the logarithm of the latency."""
    node_rate: float = 1.25e9
    """Bandwidth of a node, in bytes per second."""
    store_rate: float = 125e9
    """Bandwidth of the store to all nodes together, in bytes per second."""
    object_cpu: float = 0.4e-3
    byte_cpu: float = 2.3e-9
    """CPU seconds of a worker per object and per byte: RESULTS.md, pulls of 64 KiB and 16 MiB."""
    shard_bytes: int = 64_000_000
    commit: float = 0.011
    """Time of a commit on the node. Measured."""
    lock: float = 0.002
    """Time that a shard locks the node's catalog, for its claim and its commit. Measured."""
    report: float = 0.001
    """Time that the driver needs for a node's report. Measured."""
    reports: float = 50
    """Most reports of all nodes per second."""
    key: int = 25
    """Bytes of a listing per object. Measured."""
    cap: float = 100e9
    """Cap of a node's cache, in bytes."""
    renew: float = 0.1
    """Share of a full cache that each epoch replaces by new samples."""
    appetite: float = 600e6
    """Bytes per second that the trainer of a node reads."""
    epochs: int = 90
    get_price: float = 0.4e-6
    """Price of a GET. Amazon S3's list price, as are the next three prices."""
    list_price: float = 5e-6
    """Price of a page of 1,000 keys."""
    region_price: float = 0.02e-9
    """Price of a byte to another region."""
    internet_price: float = 0.09e-9
    """Price of a byte to the internet."""
    lost: float = 30 * DAY
    """Mean time until a node and its disk are lost."""

    @property
    def per_claim(self) -> int:
        """Return the samples of a claim: one shard."""
        return max(1, min(self.samples, self.shard_bytes // self.sample_bytes))

    @property
    def claims(self) -> int:
        """Return the claims of a pass."""
        return -(-self.samples // self.per_claim)

    @property
    def all_workers(self) -> int:
        """Return the workers of all nodes."""
        return self.nodes * self.workers

    @property
    def shard_seconds(self) -> float:
        """Return the seconds between two shards of a worker."""
        return max(self.bounds().values()) + self.commit

    def bounds(self) -> dict[str, float]:
        """Return the least seconds of a claim by each limit: latency, CPU, the bandwidth of the node and of the
        store.
        """
        size = self.per_claim * self.sample_bytes
        return {
            "latency": self.per_claim * self.latency * math.exp(self.spread**2 / 2) / self.requests,
            "CPU": self.per_claim * self.object_cpu + size * self.byte_cpu,
            "node's network": size * self.workers / self.node_rate,
            "store": size * self.all_workers / self.store_rate,
        }


def pulling(world: World, counts: list[int]) -> Rows:
    """Return the rows of one pass over the source, for each number of nodes."""
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
    """Return the rows of epochs on full caches, for several shares of renewal.

    An epoch reads all samples in the cache. The next epoch may begin with up to ``renew`` of them replaced, as far
    as new samples were fetched meanwhile. Nodes hold different samples, and no sample is drawn again before the pass
    is complete. ``rate`` is the bytes per second that pulling brings to a node.
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
    """Return the store's price of a pass, of the epochs of :func:`training`, and of epochs without a cache."""
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
    """Return the sizes that grow with samples and nodes, besides the samples."""
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
    """Return all tables of the model."""
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
    """Return the assumptions with each ``NAME=VALUE`` applied."""
    kinds = {field.name: type(getattr(world, field.name)) for field in fields(world)}
    for text in settings:
        name, equals, value = text.partition("=")
        if not equals or name not in kinds:
            raise SystemExit(f"error: --set {text}: not NAME=VALUE, with a NAME of {', '.join(kinds)}")
        world = replace(world, **{name: kinds[name](float(value))})
    return world


def main() -> None:
    from tables import finish  # lies beside this script; tests import this module from another folder

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
