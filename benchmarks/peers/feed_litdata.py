"""LitData: chunks of 64 MB, its own loader. With the argument ``mixed`` three datasets in equal parts."""

from __future__ import annotations

import sys
from collections.abc import Callable

import numpy as np
from feeding import Batches, Job, arrays, serve
from litdata import CombinedStreamingDataset, StreamingDataLoader, StreamingDataset
from litdata_optimize import write


def prepare(job: Job) -> Callable[[], Batches]:
    data: StreamingDataset | CombinedStreamingDataset
    if sys.argv[-1] == "mixed":
        places = [job.folder / f"chunks{number}" for number in range(3)]
        for place, part in zip(places, np.array_split(job.x, 3), strict=True):
            write(place, part)
        members = [StreamingDataset(str(place), shuffle=True, drop_last=True) for place in places]
        data = CombinedStreamingDataset(members, weights=[1 / 3] * 3, iterate_over_all=False)
    else:
        write(job.folder / "chunks", job.x)
        data = StreamingDataset(str(job.folder / "chunks"), shuffle=True, drop_last=True)
    loader = StreamingDataLoader(
        data, batch_size=job.batch, num_workers=job.workers, drop_last=True, persistent_workers=True
    )
    return lambda: arrays(loader)


if __name__ == "__main__":
    serve(prepare)
