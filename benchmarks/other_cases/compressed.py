"""Compressed shards beside h5py and zarr in PyTorch's DataLoader, with one sample a chunk.

The samples are random walks of float32, which compress about as well as fields of a weather model. Both sides give
shuffled batches of NumPy arrays with two workers, and the consumer touches every page. *Decoded* is the rate of one
loader without workers in one process: bytes before compression for each second of its processor.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch.utils.data

from cachetool.bench.consumer import rate, touched
from cachetool.bench.samples import fill
from cachetool.cache import open_cache
from cachetool.core.block import Block
from cachetool.core.schema import Field, Schema
from cachetool.loaders.numpy import Loader

SIZES = {"128KiB": (2**17, 512, 64, 1.5), "3KiB": (3 * 2**10, 4096, 256, 1.0)}
"""Bytes of a sample, samples, samples of a batch, and the least ratio."""

EPOCHS = 6
"""Epochs that are measured together: a loader has the first batches of an epoch ready before it begins."""
OURS = {"hdf5 gzip": ("hdf5", "gzip"), "zarr blosc": ("zarr", "blosc"), "zarr zstd": ("zarr", "zstd")}
PEERS = {"h5py gzip": "hdf5 gzip", "h5py lzf": "hdf5 gzip", "zarr blosc": "zarr blosc", "zarr zstd": "zarr zstd"}
"""Each peer, and ours that it is compared with."""


def smooth(samples: int, nbytes: int) -> np.ndarray:
    """Return float32 samples whose neighbouring values are close, (samples, nbytes // 4)."""
    steps = np.random.default_rng(0).normal(scale=0.01, size=(samples, nbytes // 4))
    # Three digits behind the point, as measured or packed data has.
    return (np.round(280 + np.cumsum(steps, axis=1), 3)).astype("<f4")


class Chunks(torch.utils.data.Dataset):  # type: ignore[type-arg]
    """A file with one sample a chunk, as a careful user writes it by hand."""

    def __init__(self, path: Path, kind: str, x: np.ndarray) -> None:
        self.path, self.kind, self.count = path, kind, len(x)
        self.data: Any = None
        library, codec = kind.split()
        if library == "h5py":
            import h5py

            with h5py.File(path, "w") as file:
                file.create_dataset("x", data=x, chunks=(1, x.shape[1]), compression=codec, shuffle=True)
            return
        import zarr
        from zarr.codecs import BloscCodec, ZstdCodec

        codecs = {"blosc": BloscCodec(cname="lz4", shuffle="bitshuffle"), "zstd": ZstdCodec()}
        data = zarr.create_array(path, shape=x.shape, dtype=x.dtype, chunks=(1, x.shape[1]), compressors=codecs[codec])
        data[:] = x

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[np.ndarray, int]:
        if self.data is None:
            if self.kind.startswith("h5py"):
                import h5py

                self.data = h5py.File(self.path)["x"]
            else:
                import zarr

                self.data = zarr.open_array(self.path, mode="r")
        return self.data[index], index


def collate(samples: list[tuple[np.ndarray, int]]) -> dict[str, Any]:
    """Return a batch of tensors."""
    return {
        "x": torch.from_numpy(np.stack([x for x, _ in samples])),
        "y": torch.tensor([y for _, y in samples]),
    }


def batches(dataset: Chunks, size: int) -> Callable[[], Iterator[dict[str, Any]]]:
    """Return a function that begins an epoch of the dataset in workers that stay."""
    loader = torch.utils.data.DataLoader(
        dataset,
        batch_size=size,
        shuffle=True,
        num_workers=2,
        collate_fn=collate,
        persistent_workers=True,
    )

    def epoch() -> Iterator[dict[str, Any]]:
        for batch in loader:
            yield {name: column.numpy() for name, column in batch.items()}

    return epoch


def sustained(begin: Callable[[], Any]) -> float:
    """Return the MB/s of consecutive epochs, after one that uses up the batches prepared before."""
    touched(begin())
    return rate(lambda: sum(touched(begin()) for _ in range(EPOCHS)))


def measure(folder: Path, rounds: int) -> list[dict[str, str | float]]:
    """Return a row for each size and peer, and the rate of decoding for each of ours."""
    rows: list[dict[str, str | float]] = []
    for size, (nbytes, count, batch, target) in SIZES.items():
        x = smooth(count, nbytes)
        schema = Schema((Field("x", "<f4", (nbytes // 4,)), Field("y", "<i8")))
        block = Block(schema, {"x": x, "y": np.arange(count)})
        ours: dict[str, Loader] = {}
        caches = []
        for name, (kind, compression) in OURS.items():
            cache = open_cache(folder / f"{size}-{name.replace(' ', '-')}", max_size="8GB")
            fill(cache, kind, block, 4, compression=compression)
            caches.append(cache)
            ours[name] = Loader(cache, batch_size=batch, workers=2)
        peers = {
            name: batches(Chunks(folder / f"{size}-{name.replace(' ', '-')}.peer", name, x), batch) for name in PEERS
        }
        rates: dict[str, list[float]] = {}
        rng = np.random.default_rng(1)
        for turn in range(rounds + 1):
            for name in rng.permutation([*(f"ours {n}" for n in ours), *(f"peer {n}" for n in peers)]).tolist():
                who, _, key = name.partition(" ")
                value = sustained((lambda key=key, ours=ours: ours[key]) if who == "ours" else peers[key])
                # The first round starts workers and fills caches.
                if turn:
                    rates.setdefault(name, []).append(value)
        for peer, mine in PEERS.items():
            pairs = zip(rates[f"ours {mine}"], rates[f"peer {peer}"], strict=True)
            rows.append(
                {
                    "case": f"{size} {mine}",
                    "ours": round(statistics.median(rates[f"ours {mine}"]), 1),
                    "peer": f"DataLoader, {peer}",
                    "theirs": round(statistics.median(rates[f"peer {peer}"]), 1),
                    "ratio": round(statistics.median(a / b for a, b in pairs), 2),
                    "unit": "MB/s",
                    "target": target,
                }
            )
        for loader in ours.values():
            loader.close()
        for (name, _), cache in zip(OURS.items(), caches, strict=True):
            with Loader(cache, batch_size=batch, workers=0) as loader:
                touched(loader)
                found = []
                for _ in range(rounds):
                    begin = time.process_time()
                    total = touched(loader)
                    found.append(total / (time.process_time() - begin) / 1e9)
            saved = block.nbytes / sum(shard.bytes for shard in cache.shards())
            rows.append(
                {
                    "case": f"{size} {name}, decoded on one core",
                    "ours": round(statistics.median(found), 2),
                    "peer": "",
                    "ratio": round(saved, 2),
                    "unit": "GB/s; ratio: times smaller on disk",
                    "target": 1.0 if name == "zarr blosc" and size == "128KiB" else "",
                }
            )
            cache.close()
    return rows
