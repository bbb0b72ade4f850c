"""Augment samples in the loader's worker processes, with the same result in every run.

    python examples/transform_in_workers.py [FOLDER]

``augmented`` shifts each digit of scikit-learn by up to one pixel, differently in each epoch. The function runs in the
loader's feeder processes. Its random numbers depend only on seed, epoch and sample, so a run with one worker and a run
with three workers train on the same shifts. The cache keeps the original digits; shifted ones are never stored.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sklearn.datasets import load_digits

import cachetool
from cachetool.loaders.torch import Loader


def augmented(sample: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    """Shift the image of one sample."""
    shift = rng.integers(-1, 2, size=2)
    image = np.roll(sample["image"], shift, axis=(0, 1))
    return {"image": image, "label": sample["label"], "shift": shift, "made_by": np.int64(os.getpid())}


def write_digits(folder: Path) -> None:
    """Write ``0007.image.npy`` and ``0007.json`` for digit 7: objects with the same key are one sample."""
    folder.mkdir(parents=True)
    digits = load_digits()
    for number, (image, label) in enumerate(zip(digits.images, digits.target, strict=True)):
        np.save(folder / f"{number:04d}.image.npy", image.astype(np.float32) / 16)
        (folder / f"{number:04d}.json").write_text(json.dumps({"label": int(label)}))


def shifts(cache: Path, workers: int) -> list[torch.Tensor]:
    """Return the shifts of the samples in two epochs, in the order of delivery."""
    epochs = []
    with Loader(cache, batch_size=64, seed=5, workers=workers, transform=augmented) as loader:
        for epoch in range(2):
            batches = list(loader)
            makers = {int(pid) for batch in batches for pid in batch["made_by"]}
            assert os.getpid() not in makers
            epochs.append(torch.cat([batch["shift"] for batch in batches]))
            print(f"{workers} workers, epoch {epoch}: {len(epochs[-1])} samples, made by {len(makers)} processes")
    return epochs


def main(folder: Path) -> None:
    """Pull, then compare a run with one worker with a run with three workers."""
    write_digits(folder / "bucket")
    with cachetool.open_cache(folder / "cache", max_size="8MB") as cache:
        cache.pull(str(folder / "bucket"), samples=500)
    one, three = shifts(folder / "cache", 1), shifts(folder / "cache", 3)
    print(f"the same in both runs: {all(torch.equal(a, b) for a, b in zip(one, three, strict=True))}")
    print(f"the same in both epochs: {torch.equal(one[0], one[1])}")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(Path(sys.argv[1]))
    else:
        with tempfile.TemporaryDirectory() as name:
            main(Path(name))
