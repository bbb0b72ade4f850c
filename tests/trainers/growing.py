"""A cache that grows while a trainer runs, and a record of the trained samples; used by the scripts of this folder.

A script is one cell of the table of trainers and cases. It runs as one process or two ranks, trains with a real trainer
on a cache of numbered samples, and writes the samples of each epoch as one JSON file per rank.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np

from cachetool.cache import CacheDir, Facts, Origin, open_cache
from cachetool.core.block import Block
from cachetool.core.schema import Field, Schema
from cachetool.formats import get_format
from cachetool.formats.shard import ShardFiles, shard_bound

SCHEMA = Schema(
    (
        Field("__key__", "str"),
        Field("id", "<i8"),
        Field("x", "<f4", (4,)),
        Field("y", "<f4"),
        Field("name", "str"),
        Field("blob", "bytes"),
        Field("ragged", "<f4", (None, None)),
    )
)
"""One field of each kind, as in a typical pull."""
FIXED = ["id", "x", "y"]
"""The fields that every trainer stacks."""
FIRST, STEP, LAST = 96, 48, 240
"""Samples of the cache at the start, samples added during each epoch, and samples at the end."""
BATCH = 16


def put(cache: CacheDir, start: int, stop: int, *, format: str = "lmdb") -> None:
    """Commit one shard of the samples with the numbers ``start`` to ``stop - 1``."""
    samples = [
        {
            "__key__": f"scan{number}",
            "id": number,
            "x": np.full(4, number % 7, dtype=np.float32),
            "y": np.float32(number % 3),
            "name": f"näme {number}",
            "blob": bytes([number % 256]),
            "ragged": np.ones((number % 3, 2), dtype=np.float32),
        }
        for number in range(start, stop)
    ]
    kind, block = get_format(format), Block.from_samples(SCHEMA, samples)
    cache.declare("default", SCHEMA)
    bound = shard_bound(kind, SCHEMA, block.samples, block.nbytes)
    with cache.stage(dataset="default", schema=SCHEMA, format=format, bound=bound) as staging:
        files = ShardFiles(staging.path, kind, SCHEMA, samples=block.samples, nbytes=block.nbytes)
        files.write(block)
        facts = files.facts()
        row = Facts(facts.samples, facts.payload, facts.content, facts.digest, facts.data, facts.files)
        staging.commit(row, origin=Origin())


def fill(folder: Path | str, samples: int = FIRST, *, format: str = "lmdb") -> str:
    """Create a cache of ``samples`` samples in ``folder``. Return its path."""
    with open_cache(folder, max_size="50MB") as cache:
        for start in range(0, samples, STEP):
            put(cache, start, min(start + STEP, samples), format=format)
    return str(folder)


def grow(folder: Path | str, by: int = STEP, *, most: int = LAST, format: str = "lmdb") -> int:
    """Add ``by`` samples, up to ``most`` in all. Return the new total. Only rank 0 may call it."""
    with open_cache(folder, create=False) as cache:
        there = sum(shard.samples for shard in cache.shards())
        if there < most:
            put(cache, there, min(there + by, most), format=format)
        return min(there + by, most)


class Record:
    """The trained samples, epoch by epoch, and the number of samples in the snapshot of each epoch."""

    def __init__(self, loader: Any) -> None:
        self._loader = getattr(loader, "loader", loader)  # of a view from epochs_of()
        self.epochs: dict[int, dict[str, Any]] = {}
        self.extra: dict[str, Any] = {}

    def saw(self, epoch: int, ids: Any) -> int:
        """Record samples that were trained in the trainer's epoch ``epoch``. Return how many this epoch has so far."""
        progress = self._loader._progress
        row = self.epochs.setdefault(epoch, {"ids": [], "passes": {}})
        row["ids"] += [int(number) for number in ids]
        pass_number = str(progress.begun.epoch)
        row["passes"].setdefault(pass_number, {"snapshot": progress.begun.steps.samples, "ids": []})
        row["passes"][pass_number]["ids"] += [int(number) for number in ids]
        return len(row["ids"])

    def write(self, folder: Path | str, rank: int | None = None, name: str = "record") -> None:
        """Write the record beside the cache, one file per rank."""
        rank = int(os.environ.get("RANK", 0)) if rank is None else rank
        Path(folder, f"{name}-{rank}.json").write_text(json.dumps({"epochs": self.epochs, **self.extra}))
