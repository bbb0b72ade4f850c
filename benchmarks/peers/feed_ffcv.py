"""FFCV: arrays in its .beton file, random order, its own threads; the page cache is warm (``os_cache``)."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from feeding import Batches, Job, Rows, arrays, serve
from ffcv.fields import IntField, NDArrayField
from ffcv.fields.decoders import IntDecoder, NDArrayDecoder
from ffcv.loader import Loader, OrderOption
from ffcv.writer import DatasetWriter


def prepare(job: Job) -> Callable[[], Batches]:
    path = str(job.folder / "data.beton")
    fields = {"x": NDArrayField(shape=job.x.shape[1:], dtype=np.dtype("float32")), "y": IntField()}
    DatasetWriter(path, fields, num_workers=1).from_indexed_dataset(Rows(job))
    loader = Loader(
        path,
        batch_size=job.batch,
        num_workers=job.workers,
        order=OrderOption.RANDOM,
        os_cache=True,
        drop_last=True,
        pipelines={"x": [NDArrayDecoder()], "y": [IntDecoder()]},
    )
    return lambda: arrays(loader)


if __name__ == "__main__":
    serve(prepare)
