"""Train with Accelerate on a growing cache, stop in the middle of an epoch, and resume.

    python examples/accelerate_growing_cache.py [FOLDER]
    torchrun --nproc-per-node 2 examples/accelerate_growing_cache.py FOLDER              (or accelerate launch)

The 1,797 handwritten digits of scikit-learn stand for a bucket. One process pulls in the background. A fifth of the
samples is held out for validation. Each epoch reads the samples that are in the cache when the epoch begins, and no two
processes read the same sample. ``accelerator.save_state()`` also saves the loader's state.
"""

from __future__ import annotations

import contextlib
import json
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
from accelerate import Accelerator
from sklearn.datasets import load_digits

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


def accuracy(accelerator: Accelerator, model: torch.nn.Module, held_out: Loader) -> tuple[int, float]:
    """Return the number of held-out samples and the model's accuracy on them."""
    counts = torch.zeros(2, device=accelerator.device)
    with torch.no_grad():
        for batch in held_out:
            right = model(batch["image"]).argmax(dim=1) == batch["label"]
            counts += torch.tensor([len(right), int(right.sum())], device=accelerator.device)
    samples, right = accelerator.reduce(counts).tolist()
    return int(samples), right / samples


def train(folder: Path, stop: int | None = None) -> None:
    """Run one job, from its checkpoint or from the beginning. The job ends after ``stop`` steps of its second epoch."""
    accelerator = Accelerator(cpu=not torch.cuda.is_available())
    model: torch.nn.Module = torch.nn.Sequential(
        torch.nn.Flatten(), torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10)
    )
    model, optimizer = accelerator.prepare(model, torch.optim.Adam(model.parameters(), lr=0.01))
    common = {"batch_size": 16, "fields": ["image", "label"], "validation": 0.2, "device": accelerator.device}
    with (
        Loader(folder / "cache", split="train", **common) as loader,  # needs no prepare()
        Loader(folder / "cache", split="validation", shuffle=False, **common) as held_out,
    ):
        accelerator.register_for_checkpointing(loader)
        if (folder / "checkpoint").exists():
            accelerator.load_state(str(folder / "checkpoint"))
            accelerator.print(f"going on in epoch {loader.epoch}")
        while (epoch := loader.epoch) < EPOCHS:
            for step, batch in enumerate(loader, start=1):
                loss = torch.nn.functional.cross_entropy(model(batch["image"]), batch["label"])
                optimizer.zero_grad()
                accelerator.backward(loss)
                optimizer.step()
                if epoch == 1 and step == stop:  # as when the job's time is over
                    accelerator.save_state(str(folder / "checkpoint"))
                    accelerator.wait_for_everyone()
                    accelerator.print(f"stopped in epoch {epoch} after {step} of {len(loader)} steps")
                    return
            samples, share = accuracy(accelerator, model, held_out)
            accelerator.print(f"epoch {epoch}: {samples} held-out samples, accuracy {share:.2f}")


def main(folder: Path) -> None:
    """Run two jobs. The first stops in the middle of its second epoch, the second resumes it."""
    accelerator = Accelerator(cpu=not torch.cuda.is_available())
    pulls = accelerator.is_local_main_process
    if pulls:
        write_digits(folder / "bucket")
        with cachetool.open_cache(folder / "cache", max_size="8MB") as cache:
            cache.pull(str(folder / "bucket"), samples=300)
    accelerator.wait_for_everyone()
    pulling = cachetool.BackgroundPull(folder / "cache", str(folder / "bucket")) if pulls else contextlib.nullcontext()
    with pulling:
        train(folder, stop=5)
        train(folder)
    accelerator.end_training()


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(Path(sys.argv[1]))
    else:
        with tempfile.TemporaryDirectory() as name:
            main(Path(name))
