"""MosaicML Streaming: a local StreamingDataset of MDS files under a DataLoader."""

from __future__ import annotations

from collections.abc import Callable

from feeding import Batches, Job, arrays, serve
from mds_writer import write  # the module also prepares streaming for a PyTorch of another build
from streaming import StreamingDataset
from torch.utils.data import DataLoader


def prepare(job: Job) -> Callable[[], Batches]:
    write(job.folder / "mds", job.x)
    data = StreamingDataset(local=str(job.folder / "mds"), shuffle=True, batch_size=job.batch)
    loader = DataLoader(data, batch_size=job.batch, num_workers=job.workers, drop_last=True, persistent_workers=True)
    return lambda: arrays(loader)


if __name__ == "__main__":
    serve(prepare)
