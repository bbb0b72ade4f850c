"""Batches through Ray's object store: two workers, four batches ahead. Argument: steps; prints one line of JSON."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator

import numpy as np
import ray
from producing import SHAPE, produced, trained

AHEAD = 4


def main(steps: int) -> None:
    def batches() -> Iterator[np.ndarray]:
        ray.init(num_cpus=2, include_dashboard=False, logging_level="ERROR", object_store_memory=2**30)
        make = ray.remote(num_cpus=1)(produced)
        pending = [make.remote(seed) for seed in range(AHEAD)]
        for seed in range(AHEAD, steps + AHEAD):
            batch = ray.get(pending.pop(0))
            pending.append(make.remote(seed))
            yield batch
            del batch

    found = trained(batches, steps)
    ray.shutdown()
    print(json.dumps({**found, "shape": SHAPE}))


if __name__ == "__main__":
    main(int(sys.argv[1]))
