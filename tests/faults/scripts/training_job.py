"""One training job on the cache of ``world.py``: epochs through a DataLoader whose workers are forked or spawned.

``training_job.py METHOD ROOT EPOCHS`` compares every sample with the expected one and prints one line of JSON.
"""

from __future__ import annotations

import json
import sys

import numpy as np
from torch.utils.data import DataLoader

from cachetool.loaders.torch import CacheDataset, EpochSampler
from tests.faults.world import sample


def main(method: str, root: str, epochs: int) -> None:
    seen: set[int] = set()
    samples = 0
    with CacheDataset(root) as dataset:
        loader = DataLoader(
            dataset,
            batch_size=16,
            sampler=EpochSampler(dataset, seed=1),
            num_workers=2,
            persistent_workers=True,
            multiprocessing_context=method,
            collate_fn=dataset.collate,
        )
        for _ in range(epochs):
            for batch in loader:
                for index, number in enumerate(batch["number"].tolist()):
                    wanted = sample(number)
                    assert batch["words"][index] == wanted["words"]
                    np.testing.assert_array_equal(batch["x"][index], wanted["x"])
                    np.testing.assert_array_equal(batch["r"][index], wanted["r"])
                    seen.add(number)
                    samples += 1
        del loader
    print(json.dumps({"samples": samples, "different": len(seen)}))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
