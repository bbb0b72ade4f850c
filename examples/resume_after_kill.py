"""Resume training in the middle of an epoch after the job was killed.

    python examples/resume_after_kill.py [FOLDER]

The training process saves a checkpoint of model and loader after every fifth batch. In its second epoch it is killed
with SIGKILL and then started again. Meanwhile the cache grows, but the interrupted epoch continues with the samples
that it began with. At its end, the job has trained on each of these samples exactly once.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
from sklearn.datasets import load_digits

import cachetool
from cachetool.loaders.torch import Loader

EPOCHS = 3


def train(folder: Path) -> None:
    """Train from the last checkpoint, or from the beginning if there is no checkpoint."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    checkpoint, seen, first_start = folder / "checkpoint.pt", [], True
    with Loader(folder / "cache", batch_size=25, fields=["image", "label", "__key__"], seed=0) as loader:
        if checkpoint.exists():
            state = torch.load(checkpoint)
            model.load_state_dict(state["model"])
            loader.load_state_dict(state["loader"])
            seen, first_start = state["seen"], False
            print(f"going on in epoch {loader.epoch} behind {len(seen)} samples", flush=True)
        while (epoch := loader.epoch) < EPOCHS:
            for step, batch in enumerate(loader, start=1):
                optimizer.zero_grad()
                torch.nn.functional.cross_entropy(model(batch["image"]), batch["label"]).backward()
                optimizer.step()
                seen += batch["__key__"]
                if step % 5 == 0 or loader.epoch > epoch:
                    kept = [] if loader.epoch > epoch else seen
                    state = {"model": model.state_dict(), "loader": loader.state_dict(), "seen": kept}
                    torch.save(state, folder / "new.pt")
                    os.replace(folder / "new.pt", checkpoint)  # atomic: a kill never leaves half a checkpoint
                if first_start and epoch == 1 and step == 7:
                    os.kill(os.getpid(), signal.SIGKILL)
            print(f"epoch {epoch}: {len(seen)} samples, {len(set(seen))} different ones", flush=True)
            seen = []


def write_digits(folder: Path) -> None:
    """Write ``0007.image.npy`` and ``0007.json`` for digit 7: objects with the same key are one sample."""
    folder.mkdir(parents=True)
    digits = load_digits()
    for number, (image, label) in enumerate(zip(digits.images, digits.target, strict=True)):
        np.save(folder / f"{number:04d}.image.npy", image.astype(np.float32) / 16)
        (folder / f"{number:04d}.json").write_text(json.dumps({"label": int(label)}))


def main(folder: Path) -> None:
    """Restart the job until it succeeds, as a batch system does."""
    write_digits(folder / "bucket")
    with cachetool.open_cache(folder / "cache", max_size="8MB") as cache:
        cache.pull(str(folder / "bucket"), samples=300)
        while (code := subprocess.run([sys.executable, __file__, str(folder), "train"]).returncode) != 0:
            print(f"the job ended with {code}; 200 more samples are pulled before it is started again", flush=True)
            cache.pull(str(folder / "bucket"), samples=200)


if __name__ == "__main__":
    if len(sys.argv) > 2:
        train(Path(sys.argv[1]))
    elif len(sys.argv) > 1:
        main(Path(sys.argv[1]))
    else:
        with tempfile.TemporaryDirectory() as name:
            main(Path(name))
