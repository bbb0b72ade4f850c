"""One cell of Composer: ``CASE FOLDER``."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
from composer import Callback, DataSpec, Time, Trainer
from composer.models import ComposerModel
from composer.optim import LinearScheduler

from cachetool.loaders.composer import GrowthCallback
from cachetool.loaders.torch import Loader, TensorList
from tests.trainers.growing import BATCH, FIRST, FIXED, Record, fill, grow

RANK, RANKS = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


class Model(ComposerModel):
    """A linear model that records the samples of its loss."""

    def __init__(self, record: Record, validation: Record | None = None) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)
        self.record, self.validation = record, validation
        self.epoch = self.evaluation = 0
        self.texts: list[Any] = []

    def forward(self, batch: Any) -> torch.Tensor:
        """Return a number for each sample."""
        return self.layer(batch["x"])[:, 0]

    def loss(self, outputs: Any, batch: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Record the samples."""
        self.record.saw(self.epoch, batch["id"])
        for name in ("name", "ragged", "blob"):
            if name in batch:
                self.texts.append((name, batch["id"].tolist(), batch[name]))
        return ((outputs - batch["y"]) ** 2).mean()

    def eval_forward(self, batch: Any, outputs: Any = None) -> Any:
        """Record the samples of an evaluation."""
        if self.validation is not None:
            self.validation.saw(self.evaluation, batch["id"])
        return self(batch)


class Watch(Callback):
    """A callback that numbers the epochs, grows the cache in each, and stops at the requested batch."""

    def __init__(self, model: Model, folder: Path | None, *, stop: int = 0) -> None:
        self.model, self.folder, self.stop = model, folder, stop

    def batch_start(self, state: Any, logger: Any) -> None:
        """Number the epoch, by Composer's count."""
        self.model.epoch = int(state.timestamp.epoch)

    def eval_end(self, state: Any, logger: Any) -> None:
        """Number the evaluation."""
        self.model.evaluation += 1

    def batch_end(self, state: Any, logger: Any) -> None:
        """Add samples after the first batch of an epoch."""
        if self.folder is not None and RANK == 0 and int(state.timestamp.batch_in_epoch) == 1:
            grow(self.folder / "cache")
        if self.stop and int(state.timestamp.batch) == self.stop:
            state.max_duration = Time.from_batch(self.stop)  # as Composer's EarlyStopper does


def loader_of(folder: Path, **options: Any) -> Loader:
    """Return a loader over the cache of this cell."""
    return Loader(folder / "cache", **{"batch_size": BATCH, "fields": FIXED, "workers": 1, "wait": 20, **options})


def trainer_of(model: Model, loader: Any, callbacks: list[Any], duration: str, **options: Any) -> Trainer:
    """Return a trainer on the CPU that prints and saves nothing by itself."""
    return Trainer(
        model=model,
        train_dataloader=loader,
        optimizers=torch.optim.SGD(model.parameters(), 0.001),
        max_duration=duration,
        callbacks=callbacks,
        device="cpu",
        progress_bar=False,
        log_to_console=False,
        loggers=[],
        dist_timeout=60,
        **{"save_interval": "100000ba", **options},
    )


def grows(folder: Path, callback: bool = True) -> None:
    """Train four epochs of a growing cache."""
    with loader_of(folder, batch_size=BATCH // RANKS) as loader:
        model = Model(Record(loader))
        own = [GrowthCallback(loader)] if callback else []
        trainer_of(model, loader, [*own, Watch(model, folder)], "4ep" if RANKS == 1 else "6ep").fit()
        model.record.write(folder)


def resumes(folder: Path, stop: int, between: int, epochs: str) -> None:
    """Stop after ``stop`` batches with a checkpoint; resume in a new trainer and loader."""
    save = {"save_folder": str(folder / "checkpoints"), "save_interval": f"{stop}ba", "save_filename": "saved.pt"}
    with loader_of(folder, batch_size=BATCH // RANKS) as loader:
        model = Model(record := Record(loader))
        trainer_of(model, loader, [GrowthCallback(loader), Watch(model, None)], f"{stop}ba", **save).fit()
    for _ in range(between if RANK == 0 else 0):
        grow(folder / "cache")
    if RANKS > 1:
        torch.distributed.barrier()
    with loader_of(folder, batch_size=BATCH // RANKS) as loader:
        record._loader = loader
        model = Model(record)
        trainer_of(
            model,
            loader,
            [GrowthCallback(loader), Watch(model, None)],
            epochs,
            load_path=str(folder / "checkpoints" / "saved.pt"),
        ).fit()
    record.write(folder)


def fixed(folder: Path) -> None:
    """Train epochs of 7 steps, with a learning rate that is counted in batches: 42 of them."""
    with loader_of(folder) as loader:
        model = Model(Record(loader))

        class GrowInPass(Watch):
            def batch_end(self, state: Any, logger: Any) -> None:
                if int(state.timestamp.batch) in (1, 7, 16):
                    grow(folder / "cache")

        view = loader.epochs_of(steps=7)
        trainer = trainer_of(
            model,
            view,
            [GrowthCallback(view), GrowInPass(model, folder)],
            "6ep",
            schedulers=LinearScheduler(alpha_i=1.0, alpha_f=0.0, t_max="1dur"),
        )
        trainer.fit()
        model.record.extra["rate"] = trainer.state.schedulers[0].get_last_lr()[0]
        model.record.extra["batches"] = int(trainer.state.timestamp.batch)
        model.record.write(folder)


def default_fields(folder: Path) -> None:
    """Train with all fields; a ragged field needs a ``DataSpec``."""
    with loader_of(folder, fields=None) as loader:
        model = Model(Record(loader))
        spec = DataSpec(loader, get_num_samples_in_batch=lambda batch: len(batch["id"]), split_batch=whole)
        trainer_of(model, spec, [GrowthCallback(loader), Watch(model, None)], "2ep").fit()
        model.record.extra["right"] = {
            "name": sum(
                text == f"näme {one}"
                for kind, ids, texts in model.texts
                if kind == "name"
                for one, text in zip(ids, texts, strict=True)
            ),
            "blob": sum(
                text == bytes([one % 256])
                for kind, ids, texts in model.texts
                if kind == "blob"
                for one, text in zip(ids, texts, strict=True)
            ),
            "ragged": sum(
                isinstance(rows, TensorList) and list(row.shape) == [one % 3, 2] and bool((row == 1).all())
                for kind, ids, rows in model.texts
                if kind == "ragged"
                for one, row in zip(ids, rows, strict=True)
            ),
        }
        model.record.write(folder)


def whole(batch: Any, size: Any) -> list[Any]:
    """Return a batch as a single part."""
    return [batch]


def plain_fields(folder: Path) -> None:
    """Train with every field except the ragged one, without a ``DataSpec``."""
    fields = ["__key__", "id", "x", "y", "name", "blob"]
    with loader_of(folder, fields=fields) as loader:
        model = Model(Record(loader))
        trainer_of(model, loader, [GrowthCallback(loader), Watch(model, None)], "2ep").fit()
        model.record.write(folder)


def ragged_alone(folder: Path) -> None:
    """Pass the ragged field to Composer without a ``DataSpec``."""
    with loader_of(folder, fields=None) as loader:
        model = Model(Record(loader))
        try:
            trainer_of(model, loader, [GrowthCallback(loader), Watch(model, None)], "1ep").fit()
        except Exception as error:  # noqa: BLE001 - records any error of Composer
            model.record.extra["error"] = f"{type(error).__name__}: {error}"
        model.record.write(folder)


def validation(folder: Path) -> None:
    """Evaluate a growing split after every epoch."""
    sides = {"validation": 0.25, "fields": [*FIXED, "__key__"]}
    with (
        loader_of(folder, split="train", **sides) as loader,
        loader_of(folder, split="validation", shuffle=False, **sides) as held_out,
    ):
        model = Model(Record(loader), Record(held_out))
        trainer_of(model, loader, [GrowthCallback(loader), Watch(model, folder)], "5ep", eval_dataloader=held_out).fit()
        model.record.write(folder)
        model.validation.write(folder, name="validation")


def early_stop(folder: Path) -> None:
    """Stop after 8 batches, in the middle of the second epoch. The next fit continues."""
    with loader_of(folder) as loader:
        model = Model(Record(loader))
        trainer = trainer_of(model, loader, [GrowthCallback(loader), Watch(model, None, stop=8)], "4ep")
        trainer.fit()
        model.record.extra["stopped"] = int(trainer.state.timestamp.batch)
        trainer.fit(duration="10ba")
        model.record.write(folder)


def second_fit(folder: Path) -> None:
    """Fit two epochs, and two more."""
    with loader_of(folder) as loader:
        model = Model(Record(loader))
        trainer = trainer_of(model, loader, [GrowthCallback(loader), Watch(model, folder)], "2ep")
        trainer.fit()
        trainer.fit(duration="2ep")
        model.record.write(folder)


CASES = {
    "grow": (FIRST, grows),
    "kept_length": (FIRST, lambda folder: grows(folder, callback=False)),
    "resume": (240, lambda folder: resumes(folder, 5, 0, "4ep")),
    "resume_with_growth": (144, lambda folder: resumes(folder, 3, 2, "3ep")),
    "resume_at_an_end": (FIRST, lambda folder: resumes(folder, 6, 1, "3ep")),
    "fixed": (FIRST, fixed),
    "default_fields": (FIRST, default_fields),
    "plain_fields": (FIRST, plain_fields),
    "ragged_alone": (FIRST, ragged_alone),
    "validation": (FIRST, validation),
    "early_stop": (FIRST, early_stop),
    "second_fit": (FIRST, second_fit),
}

if __name__ == "__main__":
    samples, run = CASES[sys.argv[1]]
    if RANK == 0:
        fill(Path(sys.argv[2]) / "cache", samples)
    if RANKS > 1:
        torch.distributed.init_process_group("gloo")
        torch.distributed.barrier()
    run(Path(sys.argv[2]))
    if RANKS > 1:
        torch.distributed.destroy_process_group()
