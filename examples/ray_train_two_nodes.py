"""Train on two nodes with Ray Train. Each rank reads the cache of its own node, and both caches grow meanwhile.

    pip install 'cachetool[ray,torch]' 'ray[train]' scikit-learn
    python examples/ray_train_two_nodes.py [FOLDER]

The 1,797 handwritten digits of scikit-learn stand for a bucket, and this machine simulates both nodes. On your cluster,
replace ``two_nodes`` by ``ray.init(address="auto")`` and the bucket's folder by its URL. ``{node}`` in the path of the
cache then becomes the name of each node.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")

import numpy as np
import ray
import ray.train
import torch
from ray.cluster_utils import Cluster
from ray.train import Checkpoint
from ray.train.torch import TorchTrainer, prepare_model
from sklearn.datasets import load_digits
from torch import distributed

from cachetool.loaders.ray import cache_here
from cachetool.loaders.torch import Loader

EPOCHS = 5


def write_digits(folder: Path) -> None:
    """Write ``0007.image.npy`` and ``0007.json`` for digit 7: objects with the same key are one sample."""
    folder.mkdir(parents=True)
    digits = load_digits()
    for number, (image, label) in enumerate(zip(digits.images, digits.target, strict=True)):
        np.save(folder / f"{number:04d}.image.npy", image.astype(np.float32) / 16)
        (folder / f"{number:04d}.json").write_text(json.dumps({"label": int(label)}))


@contextlib.contextmanager
def two_nodes() -> Iterator[str]:
    """Start a cluster of two nodes on this machine, ``left`` and ``right``, and yield its address."""
    cluster = Cluster(initialize_head=True, head_node_args={"node_name": "left", "num_cpus": 1})
    try:
        cluster.add_node(node_name="right", num_cpus=1)
        ray.init(address=cluster.address, logging_level="ERROR", log_to_driver=False)
        yield cluster.address
    finally:
        ray.shutdown()
        cluster.shutdown()


@ray.remote(num_cpus=0)
def pull(samples: int, bucket: str, cache: str, address: str) -> None:
    """Pull ``samples`` more samples into the nodes' caches. Each sample goes to one cache only."""
    line = ["pull", bucket, "--samples", str(samples), "--cache", cache, "--max-size", "8MB", "--shard-size", "20KB"]
    line = [sys.executable, "-m", "cachetool", *line, "--on", "ray", "--address", address, "--quiet", "--json"]
    subprocess.run(line, check=True, stdout=subprocess.DEVNULL)


def train(config: dict[str, Any]) -> None:
    """Run one of the two ranks."""
    torch.manual_seed(0)
    layers = [torch.nn.Flatten(), torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10)]
    model = prepare_model(torch.nn.Sequential(*layers))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    history = []
    # The ranks of a node divide its cache. In each epoch all ranks agree on a number of steps that each can take.
    with Loader(cache_here(config["cache"]), batch_size=16, fields=["image", "label"]) as loader:
        for _ in range(EPOCHS):
            first = distributed.get_rank() == 0
            more = config["pull"].remote(200, **config["place"]) if first else None  # runs while the model trains
            counts = torch.zeros(3)  # steps, samples, correct predictions
            for batch in loader:
                scores = model(batch["image"])
                loss = torch.nn.functional.cross_entropy(scores, batch["label"])
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                counts += torch.tensor([1, len(scores), int((scores.argmax(dim=1) == batch["label"]).sum())])
            if more is not None:
                ray.get(more)  # the epochs of this example are too short for the pull
            ranks = [torch.zeros(3) for _ in range(distributed.get_world_size())]
            distributed.all_gather(ranks, counts)
            history.append([rank.tolist() for rank in ranks])
    with tempfile.TemporaryDirectory() as place:
        torch.save(model.state_dict(), Path(place, "model.pt"))
        ray.train.report({"history": history}, checkpoint=Checkpoint.from_directory(place) if first else None)


def main(folder: Path) -> None:
    """Fill the caches, then train while a pull adds more samples."""
    bucket, cache = folder / "bucket", f"{folder.absolute()}/caches/{{node}}"
    write_digits(bucket)
    with two_nodes() as address:
        place = {"bucket": str(bucket.absolute()), "cache": cache, "address": address}
        ray.get(pull.remote(300, **place))
        trainer = TorchTrainer(
            train,
            train_loop_config={"cache": cache, "pull": pull, "place": place},
            scaling_config=ray.train.ScalingConfig(
                num_workers=2, resources_per_worker={"CPU": 1}, placement_strategy="STRICT_SPREAD"
            ),
            run_config=ray.train.RunConfig(storage_path=str(folder.absolute() / "results")),
        )
        history = trainer.fit().metrics["history"]
    for epoch, ranks in enumerate(history):
        steps = " and ".join(f"{rank[0]:.0f}" for rank in ranks)
        samples, right = (sum(rank[at] for rank in ranks) for at in (1, 2))
        print(f"epoch {epoch}: {steps} steps, {samples:.0f} samples on 2 nodes, accuracy {right / samples:.2f}")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path("digits"))
