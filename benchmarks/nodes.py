"""The cost of a pull over the nodes of a Ray cluster, compared with a local pull of the same job on the same cores.

    python benchmarks/nodes.py FOLDER [--rounds 3] [--objects 600000] [--nodes 2] [--json]

Each round runs two whole commands, in random order, into empty folders: ``pull --all --workers N`` on this machine,
and ``pull --all --workers 1 --on ray`` over N nodes, which also run on this machine. The cluster runs before and
after; joining it is part of the command. Objects are names of one file of 3 KiB: many small samples cause the most
claims, messages and commits. The table gives seconds and the peak of Ray's object store, sampled 5 times a second.

FOLDER must have about 5 GB free. The benchmark deletes its files there at the end.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import shutil
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from tables import finish

ROOT = Path(__file__).parents[1]


def make(folder: Path, count: int) -> None:
    """Create ``count`` hard links; a new file begins after some ten thousand links."""
    folder.mkdir(parents=True)
    rng = np.random.default_rng(0)
    for first in range(0, count, 10_000):
        names = [folder / f"{number:07d}.x.npy" for number in range(first, min(count, first + 10_000))]
        np.save(names[0], rng.integers(0, 256, 3072, dtype=np.uint8))
        for name in names[1:]:
            os.link(names[0], name)


@contextlib.contextmanager
def cluster(nodes: int) -> Iterator[str]:
    """Start ``nodes`` nodes on this machine and yield the cluster's address."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    os.environ.setdefault("RAY_worker_niceness", "0")  # default 15: with it, workers get less of a shared machine
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH", ""))))
    from ray.cluster_utils import Cluster

    made = Cluster()
    for number in range(nodes):
        made.add_node(
            node_name=f"n{number}", num_cpus=1, object_store_memory=200 * 2**20, include_dashboard=False
        )  # fmt: skip
    try:
        yield str(made.address)
    finally:
        made.shutdown()


class Store:
    """The peak of a cluster's object stores, in bytes."""

    def __init__(self, address: str) -> None:
        import ray

        ray.init(address, log_to_driver=False, logging_level="ERROR")
        self.most, self._stopped = 0, threading.Event()
        self._total = ray.cluster_resources()["object_store_memory"]
        self._thread = threading.Thread(target=self._look)
        self._thread.start()

    def _look(self) -> None:
        import ray

        while not self._stopped.wait(0.2):
            free = ray.available_resources().get("object_store_memory", self._total)
            self.most = max(self.most, int(self._total - free))

    def close(self) -> None:
        import ray

        self._stopped.set()
        self._thread.join()
        ray.shutdown()


def timed(command: list[str]) -> float:
    began = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--objects", type=int, default=600_000)
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    base = options.folder / "nodes"
    shutil.rmtree(base, ignore_errors=True)
    seconds: dict[str, list[float]] = {"local": [], "ray": []}
    most = 0
    try:
        make(base / "source", options.objects)
        pull = [sys.executable, "-m", "cachetool", "pull", str(base / "source"), "--all", "--quiet"]
        with cluster(options.nodes) as address:
            there = ["--on", "ray", "--address", address, "--workers", "1", "--cache", str(base / "{node}")]
            here = ["--workers", str(options.nodes), "--cache", str(base / "local")]
            commands = {"local": [*pull, *here], "ray": [*pull, *there]}
            for number in range(options.rounds):
                for name in random.Random(number).sample(sorted(commands), 2):
                    store = Store(address) if name == "ray" else None
                    seconds[name].append(timed([*commands[name], "--max-size", "8GB"]))
                    if store is not None:
                        store.close()
                        most = max(most, store.most)
                    for cache in base.iterdir():
                        if cache.name != "source":
                            shutil.rmtree(cache)
                    print(f"round {number + 1}: {name} {seconds[name][-1]:.1f} s", file=sys.stderr)
    finally:
        shutil.rmtree(base, ignore_errors=True)
    medians = {name: statistics.median(found) for name, found in seconds.items()}
    rows: list[dict[str, Any]] = [
        {
            "pull": name,
            "s": round(median, 1),
            "of local": round(median / medians["local"], 3),
            "objects/s": round(options.objects / median),
            "object store MB": round(most / 1e6, 1) if name == "ray" else "",
        }
        for name, median in medians.items()
    ]
    finish({"nodes": rows}, as_json=options.json, rounds=options.rounds, objects=options.objects, nodes=options.nodes)


if __name__ == "__main__":
    main()
