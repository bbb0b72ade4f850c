"""Train with Lightning on a growing cache, validate on a split of it, stop, and resume.

    python examples/lightning_growing_cache.py [FOLDER [RANKS]]

The 1,797 handwritten digits of scikit-learn stand for a bucket. A pull fills the cache in the background. Each epoch
trains on the samples that are in the cache when the epoch begins. The first job ends in the middle of an epoch. The
second job loads its checkpoint and continues after the last batch, with the samples that this epoch began with. With
RANKS = 2, Lightning starts a second process. Both processes read one cache, and no sample goes to both.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from sklearn.datasets import load_digits
from torch.nn import functional

import cachetool
from cachetool.loaders.lightning import CacheDataModule

SAMPLES = 1797
PULLED_PER_EPOCH = 300
EPOCHS = 6
STEPS_OF_FIRST_JOB = 20


def write_digits(folder: Path) -> None:
    """Write ``0007.image.npy`` and ``0007.json`` for digit 7: objects with the same key are one sample."""
    folder.mkdir(parents=True)
    digits = load_digits()
    for number, (image, label) in enumerate(zip(digits.images, digits.target, strict=True)):
        np.save(folder / f"{number:04d}.image.npy", image.astype(np.float32) / 16)
        (folder / f"{number:04d}.json").write_text(json.dumps({"label": int(label)}))


class Pull(Callback):
    """A callback that pulls more samples while a job trains, in one process of the node."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.pull: cachetool.BackgroundPull | None = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start the pull."""
        if trainer.local_rank == 0:
            self.pull = cachetool.BackgroundPull(self.folder / "cache", str(self.folder / "bucket"), to="lmdb", seed=0)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Wait until the cache has grown: the epochs of this small model last only a moment."""
        if self.pull is None:
            return
        with cachetool.open_cache(self.folder / "cache") as cache:
            enough = min(cache.stats().samples + PULLED_PER_EPOCH, SAMPLES)
            while cache.stats().samples < enough:
                self.pull.check()  # raises the error of a failed pull
                time.sleep(0.05)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """End the pull; the cache keeps its samples."""
        if self.pull is not None:
            self.pull.close()


class Digits(LightningModule):
    """A small classifier that prints how many samples each epoch had."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Flatten(), torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10)
        )
        self.trained = self.validated = self.right = 0

    def training_step(self, batch: dict[str, Any], index: int) -> torch.Tensor:
        """Train on one batch."""
        self.trained += len(batch["label"])
        return functional.cross_entropy(self.layers(batch["image"]), batch["label"])

    def validation_step(self, batch: dict[str, Any], index: int) -> None:
        """Validate on one batch of held-out samples."""
        self.validated += len(batch["label"])
        self.right += int((self.layers(batch["image"]).argmax(dim=1) == batch["label"]).sum())

    def on_train_epoch_end(self) -> None:
        """Print the numbers of this epoch, summed over all ranks."""
        counts = self.all_gather(torch.tensor([self.trained, self.validated, self.right]))
        trained, validated, right = counts.reshape(-1, 3).sum(dim=0).tolist()
        if self.trainer.is_global_zero and validated:
            print(f"epoch {self.current_epoch}: {trained} samples trained on {self.trainer.world_size} ranks,"
                  f" {validated} held out, accuracy {right / validated:.2f}", flush=True)  # fmt: skip
        elif self.trainer.is_global_zero:
            print(f"epoch {self.current_epoch}: left after {trained} samples", flush=True)
        self.trained = self.validated = self.right = 0

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Adam with a constant rate; a schedule that counts steps needs ``CacheDataModule(..., steps=N)``."""
        return torch.optim.Adam(self.parameters(), lr=0.01)


def job(folder: Path, ranks: int, *, resume: Path | None = None, **limits: int) -> Trainer:
    """Run one job, with its own model, data module and Trainer."""
    options = {"batch_size": 32 // ranks, "fields": ["image", "label"], "seed": 0}
    data = CacheDataModule(folder / "cache", validation=0.2, **options)
    several = {"devices": ranks, "strategy": "ddp"} if ranks > 1 else {"devices": 1}
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    common = {"accelerator": "cpu", "enable_checkpointing": False, "num_sanity_val_steps": 0}
    trainer = Trainer(callbacks=[Pull(folder)], **common, **several, **quiet, **limits)
    trainer.fit(Digits(), datamodule=data, ckpt_path=resume)
    return trainer


def main(folder: Path, ranks: int) -> None:
    """Pull, train, stop and resume. A background pull runs beside each job."""
    seed_everything(0, verbose=False)
    first_of_node = os.environ.get("LOCAL_RANK", "0") == "0"  # Lightning runs this program again for each rank
    if first_of_node:
        write_digits(folder / "bucket")
        with cachetool.open_cache(folder / "cache", max_size="8MB") as cache:
            cache.pull(str(folder / "bucket"), samples=300, to="lmdb", seed=0)
    checkpoint = folder / "job.ckpt"
    trainer = job(folder, ranks, max_epochs=EPOCHS, max_steps=STEPS_OF_FIRST_JOB)
    trainer.save_checkpoint(checkpoint)
    job(folder, ranks, max_epochs=EPOCHS, resume=checkpoint)


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "digits"), int(sys.argv[2]) if len(sys.argv) > 2 else 1)
