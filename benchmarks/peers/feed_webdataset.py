"""WebDataset: tar files of .npy members, shuffled by shards and through a buffer of 1,000 samples."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Callable

import numpy as np
import webdataset as wds
from feeding import Batches, Job, arrays, serve

SHARDS = 8


def prepare(job: Job) -> Callable[[], Batches]:
    for shard in range(SHARDS):
        with tarfile.open(job.folder / f"{shard}.tar", "w") as archive:
            for number in range(shard, len(job.x), SHARDS):
                body = io.BytesIO()
                np.save(body, job.x[number])
                for name, data in (("npy", body.getvalue()), ("cls", b"%d" % number)):
                    info = tarfile.TarInfo(f"{number:06d}.{name}")
                    info.size = len(data)
                    archive.addfile(info, io.BytesIO(data))
    urls = sorted(str(path) for path in job.folder.glob("*.tar"))
    data = (
        wds.WebDataset(urls, shardshuffle=SHARDS, empty_check=False)
        .shuffle(1000)
        .decode()
        .to_tuple("npy", "cls")
        .batched(job.batch, partial=False)
    )
    loader = wds.WebLoader(data, batch_size=None, num_workers=job.workers, persistent_workers=True)
    return lambda: arrays(loader)


if __name__ == "__main__":
    serve(prepare)
