"""A Ray cluster on this machine whose nodes are named a, b and c; the driver runs on a."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import cachetool
from cachetool.cache import CacheDir
from cachetool.formats import get_format
from cachetool.formats.shard import open_shard

NAMES = ("a", "b", "c")
REPOSITORY = Path(__file__).parents[2]


class Nodes:
    """A cluster whose nodes can be killed and can return."""

    def __init__(self) -> None:
        for name, value in {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}.items():
            os.environ.setdefault(name, value)
        paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
        os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys([str(REPOSITORY), *filter(None, paths)]))
        from ray.cluster_utils import Cluster

        self._cluster = Cluster()
        self._nodes: dict[str, Any] = {}
        self.lost = False
        """True if a node was ever killed. Ray reports that on the stdout of every later driver."""
        for name in NAMES:
            self.start(name)

    @property
    def address(self) -> str:
        return str(self._cluster.address)

    @property
    def living(self) -> list[str]:
        return sorted(self._nodes)

    def start(self, name: str) -> None:
        """Add a node, or restart it."""
        self._nodes[name] = self._cluster.add_node(
            node_name=name, num_cpus=2, object_store_memory=80 * 2**20, include_dashboard=False
        )

    def kill(self, name: str) -> None:
        """Kill a node as if its machine were switched off; never a, where the driver runs."""
        assert name != "a"
        self.lost = True
        self._cluster.remove_node(self._nodes.pop(name), allow_graceful=False)

    def revive(self) -> None:
        """Restart all nodes that a test killed."""
        for name in NAMES:
            if name not in self._nodes:
                self.start(name)

    def stop(self) -> None:
        self._cluster.shutdown()


def keys(cache: CacheDir) -> list[str]:
    """Return the key of every sample in a cache."""
    found: list[str] = []
    for shard in cache.shards():
        with open_shard(shard.path, get_format(shard.format), shard.schema) as reader:
            block = reader.take(np.arange(shard.samples))
            found += [block.sample(at)["__key__"] for at in range(len(block))]
    return found


def keys_at(root: Path) -> list[str]:
    """Return the same as :func:`keys`, or no keys if no cache exists."""
    if not (root / "cachetool.json").exists():
        return []
    with cachetool.open_cache(root, create=False) as cache:
        return keys(cache)


def committed(root: Path) -> int:
    """Return the number of samples in a cache."""
    if not (root / "cachetool.json").exists():
        return 0
    with CacheDir(root) as cache:
        return sum(shard.samples for shard in cache.shards())


def until(true: Callable[[], object], seconds: float = 120.0) -> None:
    """Wait for an action of another process."""
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.02)


def write_numbers(folder: Path, count: int) -> Path:
    """Write ``count`` samples of 64 bytes each."""
    folder.mkdir(parents=True)
    for number in range(count):
        np.save(folder / f"{number:05d}.x.npy", np.full(16, number, dtype=np.float32))
    return folder


def command(source: Path, cache: Path | str, address: str, *more: str) -> list[str]:
    """Return the shell words of a pull over the nodes."""
    words = [sys.executable, "-m", "cachetool", "pull", str(source), "--cache", str(cache), "--on", "ray"]
    return [*words, "--address", address, *more]
