"""Train with DistributedDataParallel in several processes that share one growing cache.

    torchrun --nproc-per-node 2 examples/torch_ddp.py [FOLDER]

The 1,797 handwritten digits of scikit-learn stand for a bucket. One process of the node pulls in the background. In
each epoch all ranks read the same snapshot, no two ranks read the same sample, and all ranks take the same number of
steps. The example runs on CPUs. For GPUs use ``init_process_group("nccl")`` and pass ``device=`` to the loader.

To use several nodes, each with its own cache and a part of the samples, see ``torchrun_two_nodes.py``.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from pathlib import Path

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import distributed
from torch.nn.parallel import DistributedDataParallel

import cachetool
from cachetool.loaders.torch import Loader

EPOCHS = 4


def write_digits(folder: Path) -> None:
    """Write ``0007.image.npy`` and ``0007.json`` for digit 7: objects with the same key are one sample."""
    folder.mkdir(parents=True)
    digits = load_digits()
    for number, (image, label) in enumerate(zip(digits.images, digits.target, strict=True)):
        np.save(folder / f"{number:04d}.image.npy", image.astype(np.float32) / 16)
        (folder / f"{number:04d}.json").write_text(json.dumps({"label": int(label)}))


def main(folder: Path) -> None:
    """Run one rank of the training."""
    distributed.init_process_group("gloo")
    bucket, cache = folder / "bucket", folder / "cache"
    first_of_node = int(os.environ["LOCAL_RANK"]) == 0
    if first_of_node:
        write_digits(bucket)
        with cachetool.open_cache(cache, max_size="8MB") as opened:
            opened.pull(str(bucket), samples=300)
    distributed.barrier()

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
    model = DistributedDataParallel(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    pulling = cachetool.BackgroundPull(cache, str(bucket)) if first_of_node else contextlib.nullcontext()
    with pulling, Loader(cache, batch_size=32, fields=["image", "label"], seed=0) as loader:
        for epoch in range(EPOCHS):
            counts = torch.zeros(2)  # samples, correct predictions
            for batch in loader:
                scores = model(batch["image"])
                loss = torch.nn.functional.cross_entropy(scores, batch["label"])
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                counts += torch.tensor([len(scores), int((scores.argmax(dim=1) == batch["label"]).sum())])
            distributed.all_reduce(counts)
            if distributed.get_rank() == 0:
                samples, right = counts.tolist()
                print(f"epoch {epoch}: {samples:.0f} samples on {distributed.get_world_size()} ranks,"
                      f" accuracy {right / samples:.2f}", flush=True)  # fmt: skip
    distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path("digits"))
