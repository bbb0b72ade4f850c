"""Train with torchrun on two nodes, each with its own cache on its own disk. No other service is needed.

    python examples/torchrun_two_nodes.py [FOLDER]
    torchrun --nnodes 2 --node-rank 0 --nproc-per-node 8 --master-addr HOST examples/torchrun_two_nodes.py FOLDER

The first line simulates both nodes on this machine, with one process each. The second line is for a real node; use
``--node-rank 1`` on the other node. FOLDER is on the node's own disk. The 1,797 handwritten digits of scikit-learn
stand for a bucket; in your program use the bucket's URL. For GPUs use ``init_process_group("nccl")`` and pass
``device=`` to the loader.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
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


def train(folder: Path) -> None:
    """Run one rank of the training."""
    distributed.init_process_group("gloo")
    bucket, cache = folder / "bucket", folder / f"cache{os.environ['GROUP_RANK']}"
    if int(os.environ["LOCAL_RANK"]) == 0 and not bucket.exists():
        write_digits(bucket)
    distributed.barrier()

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
    model = DistributedDataParallel(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    with (
        cachetool.open_cache(cache, max_size="8MB") as opened,
        # Pulls this node's part of the bucket. All processes of a node ask for it; one pulls, the others wait.
        cachetool.BackgroundPull(opened, str(bucket), part="auto", shard_size="20KB"),
        # The processes of a node divide its cache. In each epoch all ranks agree on a number of steps that each can
        # take.
        Loader(cache, batch_size=32, fields=["image", "label"], seed=0, min_samples=300) as loader,
    ):
        for epoch in range(EPOCHS):
            counts = torch.zeros(3)  # steps, samples, correct predictions
            for batch in loader:
                scores = model(batch["image"])
                loss = torch.nn.functional.cross_entropy(scores, batch["label"])
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                counts += torch.tensor([1, len(scores), int((scores.argmax(dim=1) == batch["label"]).sum())])
            ranks = [torch.zeros(3) for _ in range(distributed.get_world_size())]
            distributed.all_gather(ranks, counts)
            if distributed.get_rank() == 0:
                steps = " and ".join(f"{rank[0]:.0f}" for rank in ranks)
                samples, right = (sum(float(rank[at]) for rank in ranks) for at in (1, 2))
                print(f"epoch {epoch}: {steps} steps, {samples:.0f} samples,"
                      f" accuracy {right / samples:.2f}", flush=True)  # fmt: skip
    distributed.destroy_process_group()


def play_two_nodes(folder: Path) -> None:
    """Start this program twice, with the environment that torchrun sets on two nodes. (One torchrun starts only one
    node.)
    """
    if not (folder / "bucket").exists():
        write_digits(folder / "bucket")
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    job = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1"}
    job |= {"LOCAL_RANK": "0", "TORCHELASTIC_RUN_ID": "two nodes", "OMP_NUM_THREADS": "1"}
    nodes = [
        subprocess.Popen(
            [sys.executable, __file__, folder], env={**os.environ, **job, "RANK": str(node), "GROUP_RANK": str(node)}
        )
        for node in range(2)
    ]
    if any(code != 0 for code in [node.wait() for node in nodes]):
        sys.exit("a node failed")


if __name__ == "__main__":
    start = train if "RANK" in os.environ else play_two_nodes
    start(Path(sys.argv[1]) if len(sys.argv) > 1 else Path("digits"))
