"""Trains with three trainers and prints the names of the figures of waits that each logged. ``waits.py CACHE``."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from typing import Any

os.environ["KERAS_BACKEND"] = "torch"

import keras
import lightning.pytorch as pl
import torch
from transformers import Trainer, TrainingArguments

from cachetool.loaders.huggingface import GrowthMixin
from cachetool.loaders.keras import LoaderDataset, LoaderStateCallback
from cachetool.loaders.lightning import GrowthCallback
from cachetool.loaders.numpy import Loader as NumpyLoader
from cachetool.loaders.torch import Loader


class Model(pl.LightningModule):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def training_step(self, batch: dict[str, torch.Tensor], _: int) -> torch.Tensor:
        return self.layer(batch["x"]).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


class Plain(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": self.layer(x).square().mean()}


class GrowingTrainer(GrowthMixin, Trainer):  # type: ignore[misc]
    pass


def waits(logged: Any) -> list[str]:
    return sorted(name for name in logged if name in ("data_wait_seconds", "data_wait_share"))


def main() -> None:
    place, out = sys.argv[1], dict[str, list[str]]()
    with tempfile.TemporaryDirectory() as folder:
        with Loader(place, batch_size=4, fields=["x"]) as loader:
            trainer = pl.Trainer(
                max_epochs=2, accelerator="cpu", logger=False, callbacks=[GrowthCallback(loader)],
                enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
            )  # fmt: skip
            trainer.fit(Model(), loader)
            out["lightning"] = waits(trainer.callback_metrics)
        arguments = TrainingArguments(
            folder, max_steps=6, logging_steps=2, report_to=[], use_cpu=True, disable_tqdm=True, save_strategy="no"
        )
        with Loader(place, batch_size=4, fields=["x"]) as loader:
            growing = GrowingTrainer(Plain(), arguments, train_dataset=loader.epochs_of(steps=3))
            growing.train()
            rows = [row for row in growing.state.log_history if "loss" in row]
            out["huggingface"] = waits(rows[-1])
        with NumpyLoader(place, batch_size=4, fields=["x", "label"]) as arrays:
            dataset = LoaderDataset(arrays.epochs_of(steps=3), "x", "label")
            model = keras.Sequential([keras.layers.Dense(1)])
            model.compile(loss="mse")
            saved = LoaderStateCallback(dataset, f"{folder}/loader.json")
            out["keras"] = waits(model.fit(dataset, epochs=2, callbacks=[saved], verbose=0).history)
    print(json.dumps(out))


if __name__ == "__main__":
    main()
