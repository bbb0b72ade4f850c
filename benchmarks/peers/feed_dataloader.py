"""torch's DataLoader over a dataset that reads one sample at a time. The last argument is the form of the samples.

``npy``: one file per sample. ``lmdb``: pickles. ``hdf5``: one contiguous dataset. ``zarr``: one chunk per sample.
"""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import torch.utils.data
from feeding import Batches, Job, arrays, serve


class Samples(torch.utils.data.Dataset):  # type: ignore[type-arg]
    """A dataset that is written in the constructor and opened at the first read of each process."""

    def __init__(self, job: Job, kind: str) -> None:
        self.folder, self.count, self.kind = job.folder, len(job.x), kind
        self.opened: Any = None
        getattr(self, f"write_{kind}")(job.x)

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[np.ndarray, int]:
        if self.opened is None:
            self.opened = getattr(self, f"open_{self.kind}")()
        return self.opened(index), index

    def write_npy(self, x: np.ndarray) -> None:
        for number, row in enumerate(x):
            np.save(self.folder / f"{number}.npy", row)

    def open_npy(self) -> Callable[[int], np.ndarray]:
        return lambda index: np.load(self.folder / f"{index}.npy")

    def write_lmdb(self, x: np.ndarray) -> None:
        import lmdb

        with lmdb.open(str(self.folder / "x.lmdb"), map_size=4 * x.nbytes + 2**26) as env, env.begin(write=True) as txn:
            for number, row in enumerate(x):
                txn.put(b"%012d" % number, pickle.dumps(row, protocol=5))

    def open_lmdb(self) -> Callable[[int], np.ndarray]:
        import lmdb

        env = lmdb.open(str(self.folder / "x.lmdb"), readonly=True, lock=False)

        def read(index: int) -> np.ndarray:
            with env.begin(buffers=True) as txn:
                return pickle.loads(txn.get(b"%012d" % index))  # type: ignore[no-any-return]

        return read

    def write_hdf5(self, x: np.ndarray) -> None:
        import h5py

        with h5py.File(self.folder / "x.h5", "w") as file:
            file["x"] = x

    def open_hdf5(self) -> Callable[[int], np.ndarray]:
        import h5py

        data = h5py.File(self.folder / "x.h5")["x"]
        return lambda index: data[index]

    def write_zarr(self, x: np.ndarray) -> None:
        import zarr

        data = zarr.create_array(
            self.folder / "x.zarr", shape=x.shape, dtype=x.dtype, chunks=(1, x.shape[1]), compressors=None
        )
        data[:] = x

    def open_zarr(self) -> Callable[[int], np.ndarray]:
        import zarr

        data = zarr.open_array(self.folder / "x.zarr", mode="r")
        return lambda index: data[index]


def prepare(job: Job) -> Callable[[], Batches]:
    loader = torch.utils.data.DataLoader(
        Samples(job, sys.argv[6]),
        batch_size=job.batch,
        shuffle=True,
        drop_last=True,
        num_workers=job.workers,
        persistent_workers=True,
    )
    return lambda: arrays(loader)


if __name__ == "__main__":
    serve(prepare)
