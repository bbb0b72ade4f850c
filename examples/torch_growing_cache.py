"""Train a small PyTorch model on a cache that grows from epoch to epoch.

    python examples/torch_growing_cache.py [FOLDER]

A folder of objects stands for the bucket: the 1,797 handwritten digits of scikit-learn, an image and a label each. Each
epoch reads the samples that are in the cache when the epoch begins. Meanwhile a thread pulls more samples.
"""

from __future__ import annotations

import json
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader

import cachetool
from cachetool.loaders.torch import CacheDataset, EpochSampler

EPOCHS = 4
PULLED_PER_EPOCH = 300


def write_digits(folder: Path) -> None:
    """Write ``0007.image.npy`` and ``0007.json`` for digit 7: objects with the same key are one sample."""
    folder.mkdir(parents=True)
    digits = load_digits()
    for number, (image, label) in enumerate(zip(digits.images, digits.target, strict=True)):
        np.save(folder / f"{number:04d}.image.npy", image.astype(np.float32) / 16)
        (folder / f"{number:04d}.json").write_text(json.dumps({"label": int(label)}))


def main(folder: Path) -> None:
    """Pull, then train and pull at the same time."""
    write_digits(folder / "bucket")
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)

    with cachetool.open_cache(folder / "cache", max_size="8MB") as cache, ThreadPoolExecutor(1) as background:

        def pull() -> None:
            cache.pull(str(folder / "bucket"), samples=PULLED_PER_EPOCH, to="lmdb", seed=0)

        pull()
        with CacheDataset(cache, fields=["image", "label"]) as dataset:
            loader = DataLoader(
                dataset,
                batch_size=32,
                sampler=EpochSampler(dataset, seed=0),  # takes a new snapshot of the cache at each epoch
                collate_fn=dataset.collate,
                num_workers=2,
                persistent_workers=True,
                multiprocessing_context="forkserver",  # this program has threads, which do not survive a fork
            )
            for epoch in range(1, EPOCHS + 1):
                samples = right = 0
                for batch in loader:
                    if samples == 0:
                        more = background.submit(pull)  # the next epoch reads these samples
                    scores = model(batch["image"])
                    loss = torch.nn.functional.cross_entropy(scores, batch["label"])
                    optimizer.zero_grad()
                    loss.backward()
                    optimizer.step()
                    samples += len(scores)
                    right += int((scores.argmax(dim=1) == batch["label"]).sum())
                print(f"epoch {epoch}: {samples} samples, accuracy {right / samples:.2f}", flush=True)
                more.result()  # only so that every run prints the same numbers


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(Path(sys.argv[1]))
    else:
        with tempfile.TemporaryDirectory() as name:
            main(Path(name))
