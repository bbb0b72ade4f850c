"""Train with the Hugging Face Trainer on a growing cache, stop in the middle of an epoch, and resume.

    python examples/huggingface_growing_cache.py [FOLDER]
    torchrun --nproc-per-node 2 examples/huggingface_growing_cache.py FOLDER

The 1,797 handwritten digits of scikit-learn stand for a bucket. One process pulls in the background. A fifth of the
samples is held out for validation. An epoch is 40 steps, so the Trainer's learning-rate schedule ends with the
training. Each pass over the cache begins with a snapshot of the newest samples. The Trainer's checkpoints contain
the loader's state.
"""

from __future__ import annotations

import contextlib
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sklearn.datasets import load_digits
from transformers import EvalPrediction, Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

import cachetool
from cachetool.loaders.huggingface import GrowthMixin
from cachetool.loaders.torch import Loader

STEPS, EPOCHS, STOP = 40, 4, 60


class GrowingTrainer(GrowthMixin, Trainer):
    """A Trainer that accepts loaders and resumes at their position."""


class Digits(torch.nn.Module):
    """A classifier that returns the loss and the scores."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Flatten(), torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10)
        )

    def forward(self, image: torch.Tensor, label: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return loss and scores. The Trainer passes each field of the batch as a keyword argument."""
        scores = self.layers(image)
        return {"loss": torch.nn.functional.cross_entropy(scores, label), "logits": scores}


class StopAt(TrainerCallback):
    """A callback that stops the training after ``step`` steps, as when the job's time is over."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        """Stop at the chosen step; the Trainer calls this method after each step of the optimizer."""
        if state.global_step == self.step:
            control.should_save = control.should_training_stop = True


def write_digits(folder: Path) -> None:
    """Write ``0007.image.npy`` and ``0007.json`` for digit 7: objects with the same key are one sample."""
    folder.mkdir(parents=True)
    digits = load_digits()
    for number, (image, label) in enumerate(zip(digits.images, digits.target, strict=True)):
        np.save(folder / f"{number:04d}.image.npy", image.astype(np.float32) / 16)
        (folder / f"{number:04d}.json").write_text(json.dumps({"label": int(label)}))


def train(cache: Path, args: TrainingArguments, stop: int | None = None) -> None:
    """Run one job, from its last checkpoint or from the beginning."""

    def metrics(predicted: EvalPrediction) -> dict[str, float]:
        right = predicted.predictions.argmax(axis=1) == predicted.label_ids
        if args.process_index == 0:
            print(f"{len(right)} held-out samples, accuracy {right.mean():.2f}", flush=True)
        return {"accuracy": float(right.mean())}

    common = {"fields": ["image", "label"], "validation": 0.2, "seed": 0}
    per_rank = 32 // args.world_size
    with (
        Loader(cache, batch_size=per_rank, split="train", **common) as loader,
        Loader(cache, batch_size=per_rank, split="validation", shuffle=False, **common) as held_out,
    ):
        trainer = GrowingTrainer(
            Digits(),
            args,
            train_dataset=loader.epochs_of(steps=STEPS),  # with the loader itself, an epoch is one pass
            eval_dataset=held_out,
            compute_metrics=metrics,
            callbacks=[] if stop is None else [StopAt(stop)],
        )
        trainer.train(resume_from_checkpoint=get_last_checkpoint(args.output_dir))
        if args.process_index == 0:
            rate = trainer.lr_scheduler.get_last_lr()[0]
            print(
                f"step {trainer.state.global_step} of {trainer.state.max_steps}, learning rate {rate:.5f}", flush=True
            )


def main(folder: Path) -> None:
    """Run two jobs. The first stops in the middle of its second epoch, the second resumes it."""
    args = TrainingArguments(
        output_dir=str(folder / "checkpoints"),
        num_train_epochs=EPOCHS,
        learning_rate=0.01,
        eval_strategy="epoch",
        label_names=["label"],
        logging_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=not torch.cuda.is_available(),
    )
    with args.main_process_first():
        if args.process_index == 0:
            (folder / "checkpoints").mkdir(parents=True)
            write_digits(folder / "bucket")
            with cachetool.open_cache(folder / "cache", max_size="8MB") as cache:
                cache.pull(str(folder / "bucket"), samples=300)
            print("300 samples are in the cache; the others arrive during the training", flush=True)
    pulls = args.process_index == 0
    pulling = cachetool.BackgroundPull(folder / "cache", str(folder / "bucket")) if pulls else contextlib.nullcontext()
    with pulling:
        train(folder / "cache", args, stop=STOP)
        train(folder / "cache", args)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(Path(sys.argv[1]))
    else:
        with tempfile.TemporaryDirectory() as name:
            main(Path(name))
