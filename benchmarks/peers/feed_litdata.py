"""LitData: chunks of 64 MB, its own loader."""

from __future__ import annotations

from collections.abc import Callable

from feeding import Batches, Job, arrays, serve
from litdata import StreamingDataLoader, StreamingDataset
from litdata_optimize import write


def prepare(job: Job) -> Callable[[], Batches]:
    write(job.folder / "chunks", job.x)
    data = StreamingDataset(str(job.folder / "chunks"), shuffle=True, drop_last=True)
    loader = StreamingDataLoader(
        data, batch_size=job.batch, num_workers=job.workers, drop_last=True, persistent_workers=True
    )
    return lambda: arrays(loader)


if __name__ == "__main__":
    serve(prepare)
