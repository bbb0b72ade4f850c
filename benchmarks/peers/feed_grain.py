"""Grain over ArrayRecord: records of raw bytes, decoded and batched in its worker processes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import grain.python as grain
import numpy as np
from array_record.python.array_record_module import ArrayRecordWriter
from feeding import Batches, Job, arrays, serve


class Decode(grain.MapTransform):  # type: ignore[misc]
    """A transform that decodes eight bytes of the number, then the values."""

    def map(self, raw: bytes) -> dict[str, Any]:
        return {"x": np.frombuffer(raw, dtype="<f4", offset=8), "y": np.frombuffer(raw, dtype="<i8", count=1)[0]}


def prepare(job: Job) -> Callable[[], Batches]:
    path = str(job.folder / "x.arrayrecord")
    writer = ArrayRecordWriter(path, "group_size:1,uncompressed")
    for number, row in enumerate(job.x):
        writer.write(np.int64(number).tobytes() + row.tobytes())
    writer.close()
    source = grain.ArrayRecordDataSource([path])
    epochs = iter(range(10**6))

    def batches() -> Batches:
        sampler = grain.IndexSampler(
            num_records=len(source),
            shard_options=grain.NoSharding(),
            shuffle=True,
            num_epochs=1,
            seed=next(epochs),
        )
        return arrays(
            grain.DataLoader(
                data_source=source,
                sampler=sampler,
                operations=[Decode(), grain.Batch(batch_size=job.batch, drop_remainder=True)],
                worker_count=job.workers,
            )
        )

    return batches


if __name__ == "__main__":
    serve(prepare)
