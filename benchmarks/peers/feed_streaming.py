"""MosaicML Streaming: a local StreamingDataset of MDS files under a DataLoader. With the argument ``mixed`` three
streams in equal parts.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import numpy as np
from feeding import Batches, Job, arrays, serve
from mds_writer import write  # the module also prepares streaming for a PyTorch of another build
from streaming import Stream, StreamingDataset
from torch.utils.data import DataLoader


def prepare(job: Job) -> Callable[[], Batches]:
    if sys.argv[-1] == "mixed":
        places = [job.folder / f"mds{number}" for number in range(3)]
        for place, part in zip(places, np.array_split(job.x, 3), strict=True):
            write(place, part)
        streams = [Stream(local=str(place), proportion=1 / 3) for place in places]
        data = StreamingDataset(streams=streams, shuffle=True, batch_size=job.batch)
    else:
        write(job.folder / "mds", job.x)
        data = StreamingDataset(local=str(job.folder / "mds"), shuffle=True, batch_size=job.batch)
    loader = DataLoader(data, batch_size=job.batch, num_workers=job.workers, drop_last=True, persistent_workers=True)
    return lambda: arrays(loader)


if __name__ == "__main__":
    serve(prepare)
