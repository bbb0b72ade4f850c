"""Ray Data: blocks in its object store, shuffled through a local buffer of four batches."""

from __future__ import annotations

import os
from collections.abc import Callable

import numpy as np
from feeding import Batches, Job, serve

os.environ["RAY_DATA_DISABLE_PROGRESS_BARS"] = "1"
import ray
import ray.data

BLOCKS = 8


def prepare(job: Job) -> Callable[[], Batches]:
    ray.init(num_cpus=job.workers, include_dashboard=False, logging_level="ERROR", object_store_memory=4 * 2**30)
    folder = job.folder / "parts"
    folder.mkdir()
    for number, rows in enumerate(np.array_split(np.arange(len(job.x)), BLOCKS)):
        np.save(folder / f"{number}.npy", job.x[rows])
    data = ray.data.read_numpy(str(folder))

    def batches() -> Batches:
        for batch in data.iter_batches(
            batch_size=job.batch, batch_format="numpy", drop_last=True, local_shuffle_buffer_size=4 * job.batch
        ):
            yield {"x": np.ascontiguousarray(batch["data"]), "y": np.arange(job.batch)}

    return batches


if __name__ == "__main__":
    serve(prepare)
