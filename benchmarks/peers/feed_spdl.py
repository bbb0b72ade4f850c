"""SPDL: a pipeline of threads; each task reads a batch of .npy files."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from feeding import Batches, Job, arrays, serve
from spdl.pipeline import PipelineBuilder


def prepare(job: Job) -> Callable[[], Batches]:
    for number, row in enumerate(job.x):
        np.save(job.folder / f"{number}.npy", row)
    rng = np.random.default_rng(0)

    def load(chosen: list[int]) -> tuple[np.ndarray, np.ndarray]:
        return np.stack([np.load(job.folder / f"{number}.npy") for number in chosen]), np.array(chosen)

    def batches() -> Batches:
        order = rng.permutation(len(job.x))[: len(job.x) // job.batch * job.batch].reshape(-1, job.batch).tolist()
        pipeline = (
            PipelineBuilder()
            .add_source(order)
            .pipe(load, concurrency=job.workers)
            .add_sink(2)
            .build(num_threads=job.workers)
        )
        with pipeline.auto_stop():
            yield from arrays(pipeline)

    return batches


if __name__ == "__main__":
    serve(prepare)
