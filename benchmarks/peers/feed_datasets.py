"""Hugging Face datasets: an Arrow table of fixed lists, in torch format, under a DataLoader."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import datasets
from feeding import Batches, Job, arrays, serve
from torch.utils.data import DataLoader


def prepare(job: Job) -> Callable[[], Batches]:
    features = datasets.Features(
        {"x": datasets.Sequence(datasets.Value("float32"), length=job.x.shape[1]), "y": datasets.Value("int64")}
    )

    def rows() -> Iterator[dict[str, Any]]:
        for number, row in enumerate(job.x):
            yield {"x": row, "y": number}

    made = datasets.Dataset.from_generator(rows, features=features, cache_dir=str(job.folder))
    loader = DataLoader(
        made.with_format("torch"),
        batch_size=job.batch,
        shuffle=True,
        drop_last=True,
        num_workers=job.workers,
        persistent_workers=True,
    )
    return lambda: arrays(loader)


if __name__ == "__main__":
    serve(prepare)
