"""One case of the Hugging Face Trainer: ``python hf.py CASE FOLDER``, as one process or one of two ranks of
torchrun.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import EarlyStoppingCallback, Trainer, TrainerCallback, TrainingArguments

from cachetool.core.errors import UsageError
from cachetool.loaders.huggingface import GrowthMixin, LoaderStateCallback
from cachetool.loaders.torch import CacheDataset, EpochSampler, Loader
from tests.trainers.growing import BATCH, FIXED, LAST, Record, fill, grow

RANK, RANKS = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
HELD_OUT = {"split": "validation", "validation": 0.25}
KEPT = {"split": "train", "validation": 0.25}
FOLDER = Path(sys.argv[2])
CACHE = FOLDER / "cache"


class GrowingTrainer(GrowthMixin, Trainer):
    """The Trainer of cachetool's documentation."""


def own_trainer(loader: Any) -> type[Trainer]:
    """Return a Trainer without the mixin, whose batches come from ``loader``."""

    class OwnTrainer(Trainer):
        def get_train_dataloader(self) -> Any:
            return loader

    return OwnTrainer


def growing_trainer(loader: Any, *, own: bool) -> type[Trainer]:
    """Return a Trainer with the mixin. With ``own`` it returns ``loader`` by its own method."""

    class OwnTrainer(GrowthMixin, Trainer):
        def get_train_dataloader(self) -> Any:
            return loader

    return OwnTrainer if own else GrowingTrainer


class Model(torch.nn.Module):
    """A model that records the ids of every batch in training and evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, 1)
        self.saw: Callable[..., None] = lambda **fields: None

    def forward(self, x: torch.Tensor, y: torch.Tensor, **fields: Any) -> dict[str, torch.Tensor]:
        self.saw(x=x, y=y, **fields)
        scores = self.linear(x)[:, 0]
        return {"loss": torch.nn.functional.mse_loss(scores, y), "logits": fields["id"] + 0 * scores.long()}


class Watch(TrainerCallback):
    """A callback that counts epochs, evaluations and steps, grows the cache, and stops at the requested step."""

    def __init__(self, record: Record, held_out: Record | None, *, grows: bool, stop: int = 0) -> None:
        self.record, self.held_out, self.grows, self.stop = record, held_out, grows, stop
        self.epoch, self.evaluations, self.updates, self.batches = -1, 0, 0, 0
        self.epochs: list[float] = []
        self.rates: list[float] = []
        self.groups: list[int] = []
        self.check: Callable[..., None] = lambda **fields: None

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        self.epoch = int(state.epoch)
        self.fresh = True

    def saw(self, **fields: Any) -> None:
        if torch.is_grad_enabled():
            self.batches += 1
            self.record.saw(self.epoch, fields["id"])
            self.check(**fields)
            if self.grows and self.fresh and RANK == 0:
                grow(CACHE)
            self.fresh = False
        elif self.held_out is not None:
            self.held_out.saw(self.evaluations, fields["id"])

    def on_evaluate(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        self.evaluations += 1

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        self.updates += 1
        self.groups.append(self.batches)
        self.batches = 0

    def on_step_end(self, args: Any, state: Any, control: Any, *, lr_scheduler: Any, **rest: Any) -> Any:
        self.epochs.append(round(state.epoch, 6))
        self.rates.append(lr_scheduler.get_last_lr()[0])
        if self.stop and state.global_step == self.stop:
            control.should_training_stop = control.should_save = True
        return control


def arguments(**options: Any) -> TrainingArguments:
    """Return the arguments common to all cases."""
    common = {
        "output_dir": str(FOLDER / "out"),
        "num_train_epochs": 4,
        "report_to": [],
        "disable_tqdm": True,
        "logging_strategy": "no",
        "save_strategy": "no",
        "use_cpu": True,
        "lr_scheduler_type": "constant",
        "label_names": ["y"],
        "ddp_find_unused_parameters": False,
    }
    return TrainingArguments(**{**common, **options})


RECORD: dict[str, Any] = {"watched": []}


def train(
    trained: Any,
    held_out: Any = None,
    *,
    kind: type[Trainer] = GrowingTrainer,
    record: Record,
    validation: Record | None = None,
    again: Record | None = None,
    grows: bool = False,
    stop: int = 0,
    resume: Any = None,
    callbacks: Sequence[Any] = (),
    check: Callable[..., None] | None = None,
    metrics: Any = None,
    **options: Any,
) -> Trainer:
    """Train once with these arguments, and record the samples."""
    watch = Watch(record, validation, grows=grows, stop=stop)
    model = Model()
    model.saw = watch.saw
    watch.check = check or watch.check
    trainer = kind(
        model, arguments(**options), train_dataset=trained if kind is GrowingTrainer else None, eval_dataset=held_out,
        callbacks=[*callbacks, watch], compute_metrics=metrics,
    )  # fmt: skip
    trainer.train(resume_from_checkpoint=resume)
    if again:
        watch.record = again
        trainer.train()
    RECORD["watched"].append(
        {
            "updates": watch.updates,
            "epochs": watch.epochs,
            "rates": watch.rates,
            "groups": watch.groups,
            "steps": [trainer.state.global_step, trainer.state.max_steps],
            "evaluated": [
                key
                for row in trainer.state.log_history
                for key in row
                if key.endswith("_loss") and key.startswith("eval")
            ],
        }
    )
    return trainer


def loader(**options: Any) -> Loader:
    """Return a loader of the cache."""
    return Loader(CACHE, **{"batch_size": BATCH, "fields": FIXED, "seed": 0, **options})


def done(record: Record, name: str = "record") -> None:
    """Write the record of a case."""
    record.extra.update(RECORD)
    record.write(FOLDER, name=name)


# -- one rank ----------------------------------------------------------------------------------------------------------


def grows(**options: Any) -> None:
    fill(CACHE)
    with loader() as batches:
        record = Record(batches)
        train(batches, record=record, grows=True, **options)
        done(record)


def accumulates() -> None:
    """Train on a growing cache with groups of two batches. Epochs of 9 and 15 batches end with half a group. Stop in
    epoch 1.
    """
    fill(CACHE)
    with loader() as batches:
        record = Record(batches)
        train(batches, record=record, grows=True, stop=5, gradient_accumulation_steps=2)
    with loader() as batches:
        record._loader = batches
        train(batches, record=record, grows=True, resume=FOLDER / "out/checkpoint-5", gradient_accumulation_steps=2)
        done(record)


def unaware() -> None:
    """Train without the mixin: the Trainer keeps the length of the first epoch."""
    fill(CACHE)
    with loader() as batches:
        record = Record(batches)
        train(None, kind=own_trainer(batches), record=record, grows=True)
        done(record)


def resumes(*, elsewhere: bool = False, growth: bool = False, fields: Any = FIXED) -> None:
    """Stop in the middle of epoch 1, and resume in a new trainer with a new loader."""
    fill(CACHE, 96 if growth else LAST)
    step = 9 if growth else 20
    with loader(fields=fields) as batches:
        record = Record(batches)
        train(batches, kind=growing_trainer(batches, own=elsewhere), record=record, grows=growth, stop=step)
    checkpoint = FOLDER / f"out/checkpoint-{step}"
    if growth:
        grow(CACHE, LAST)
    if elsewhere:
        checkpoint = shutil.move(checkpoint, FOLDER / "kept")
        shutil.rmtree(FOLDER / "out")
    with loader(fields=fields) as batches:
        record._loader = batches
        train(batches, kind=growing_trainer(batches, own=elsewhere), record=record, resume=checkpoint)
        done(record)


def fixed(*, steps: int = 10, kind: str = "mixin", stop: int = 0, restored: bool = False, **options: Any) -> None:
    """Train epochs of ten steps with the linear schedule. With a ``stop``, the cache grows before training is
    resumed.
    """
    fill(CACHE)

    def run(batches: Loader, **more: Any) -> None:
        epochs = batches.epochs_of(steps=steps)
        own = kind == "callback"
        train(
            epochs, kind=own_trainer(epochs) if own else GrowingTrainer, record=record, grows=not stop,
            callbacks=[LoaderStateCallback()] if own else [], lr_scheduler_type="linear", **more, **options,
        )  # fmt: skip

    with loader() as batches:
        record = Record(batches)
        run(batches, stop=stop)
    if stop:
        grow(CACHE, LAST)
        with loader() as batches:
            record._loader = batches
            checkpoint = str(FOLDER / f"out/checkpoint-{stop}")
            run(batches, resume=checkpoint, restore_callback_states_from_checkpoint=restored)
    done(record)


def evaluates() -> None:
    """Grow both sides of a split, and evaluate the other side after each epoch."""
    fill(CACHE)
    with loader(**KEPT) as trained, loader(**HELD_OUT) as held_out:
        record, validation = Record(trained), Record(held_out)
        train(trained, held_out, record=record, validation=validation, grows=True, eval_strategy="epoch")
        validation.write(FOLDER, name="validation")
        done(record)


def evaluates_two() -> None:
    """Evaluate a dict of two loaders by name, and run ``predict`` with a loader."""
    fill(CACHE)
    with loader(**KEPT) as trained, loader(**HELD_OUT) as a, loader() as b:
        record, validation = Record(trained), Record(a)
        trainer = train(
            trained, {"a": a, "b": b}, record=record, validation=validation, grows=True, eval_strategy="epoch",
            num_train_epochs=1,
        )  # fmt: skip
        RECORD["predicted"] = sorted(trainer.predict(b).predictions.tolist())
        validation.write(FOLDER, name="validation")
        done(record)


def all_fields() -> None:
    """Train without fields=: every pulled field arrives in forward()."""
    fill(CACHE)

    def check(**fields: Any) -> None:
        ids = fields["id"].tolist()
        assert fields["__key__"] == [f"scan{number}" for number in ids]
        assert fields["name"] == [f"näme {number}" for number in ids]
        assert fields["blob"] == [bytes([number % 256]) for number in ids]
        assert [tuple(one.shape) for one in fields["ragged"]] == [(number % 3, 2) for number in ids]
        assert all(bool((one == 1).all()) for one in fields["ragged"])

    with loader(fields=None) as batches:
        record = Record(batches)
        train(batches, record=record, grows=True, check=check)
        done(record)


def stops_early() -> None:
    """Stop early in the middle of epoch 1 and load the best model, then call ``train()`` again."""
    fill(CACHE)
    second = None
    with loader(**KEPT) as trained, loader(**HELD_OUT) as held_out:
        record, second = Record(trained), Record(trained)
        train(
            trained, held_out, record=record, again=second, grows=True, callbacks=[EarlyStoppingCallback(1, 100.0)],
            eval_strategy="steps", eval_steps=3, save_strategy="steps", save_steps=3, load_best_model_at_end=True,
            metric_for_best_model="eval_loss",
        )  # fmt: skip
        second.write(FOLDER, name="second")
        done(record)


def second_fit() -> None:
    """Train for two epochs, then again."""
    fill(CACHE)
    with loader() as batches:
        record, second = Record(batches), Record(batches)
        train(batches, record=record, again=second, grows=True, num_train_epochs=2)
        second.write(FOLDER, name="second")
        done(record)


def refuses() -> None:
    """Resume from a checkpoint without a loader's state, and pass an object that is not a loader."""
    fill(CACHE)
    errors = []
    with loader() as batches:
        record = Record(batches)
        train(None, kind=own_trainer(batches), record=record, stop=3)
        checkpoint = str(FOLDER / "out/checkpoint-3")
        for kind, callbacks in ((GrowingTrainer, []), (own_trainer(list(batches)), [LoaderStateCallback()])):
            try:
                train(batches, kind=kind, record=record, callbacks=callbacks, resume=checkpoint)
            except UsageError as error:
                errors.append(str(error))
        try:
            LoaderStateCallback([])  # type: ignore[arg-type]
        except UsageError as error:
            errors.append(str(error))
    RECORD["errors"] = errors
    done(record)


# -- two ranks ---------------------------------------------------------------------------------------------------------


def ranks_evaluate() -> None:
    """Run ``evaluates`` with metrics of all predictions."""
    if RANK == 0:
        fill(CACHE)
    arguments()  # joins the ranks
    torch.distributed.barrier()
    counted: list[list[int]] = []

    def metrics(predicted: Any) -> dict[str, float]:
        counted.append(sorted(predicted.predictions.tolist()))
        return {"samples": len(predicted.predictions)}

    with loader(**KEPT) as trained, loader(**HELD_OUT) as held_out:
        record, validation = Record(trained), Record(held_out)
        train(trained, held_out, record=record, validation=validation, grows=True, eval_strategy="epoch",
              num_train_epochs=6, metrics=metrics)  # fmt: skip
        RECORD["predicted"] = counted
        validation.write(FOLDER, name="validation")
        done(record)


def ranks_grow() -> None:
    if RANK == 0:
        fill(CACHE)
    arguments()
    torch.distributed.barrier()
    with loader() as batches:
        record = Record(batches)
        train(batches, record=record, grows=True, num_train_epochs=8)
        done(record)


def ranks_resume(*, growth: bool) -> None:
    if RANK == 0:
        fill(CACHE, 144 if growth else LAST)
    arguments()
    torch.distributed.barrier()
    step = 7 if growth else 12
    with loader() as batches:
        record = Record(batches)
        train(batches, record=record, stop=step)
    torch.distributed.barrier()
    if growth and RANK == 0:
        grow(CACHE, LAST)
    torch.distributed.barrier()
    with loader() as batches:
        record._loader = batches
        train(batches, record=record, resume=str(FOLDER / f"out/checkpoint-{step}"))
        done(record)


class Ids(Record):
    """A record for batches that do not come from a loader."""

    def saw(self, epoch: int, ids: Any) -> int:
        row = self.epochs.setdefault(epoch, {"ids": [], "passes": {}})
        row["ids"] += ids.tolist()
        return len(row["ids"])


def dataset_trainer(dataset: CacheDataset, sampler: EpochSampler | None = None) -> type[Trainer]:
    """Return a Trainer that creates its own DataLoader of a dataset."""

    class OwnTrainer(Trainer):
        def get_train_dataloader(self) -> Any:
            self.train_dataset, self.data_collator = dataset, dataset.collate
            return super().get_train_dataloader()

        def _get_train_sampler(self, train_dataset: Any = None) -> Any:
            return super()._get_train_sampler(train_dataset) if sampler is None else sampler

    return OwnTrainer


def datasets(*, rank: int | None = None, world_size: int | None = None, sampled: bool = False) -> None:
    """Train on a CacheDataset, of which the Trainer creates its own DataLoader."""
    if RANK == 0:
        fill(CACHE)
    arguments()
    if RANKS > 1:
        torch.distributed.barrier()
    with CacheDataset(CACHE, fields=FIXED) as dataset:
        sampler = EpochSampler(dataset, rank=rank, world_size=world_size) if sampled else None
        record = Ids(None)
        train(
            None, kind=dataset_trainer(dataset, sampler), record=record, grows=not sampled, remove_unused_columns=False,
            per_device_train_batch_size=8,
        )  # fmt: skip
        try:
            GrowingTrainer(Model(), arguments(), train_dataset=dataset)
        except UsageError as error:
            RECORD["error"] = str(error)
        done(record)


CASES: dict[str, Callable[[], None]] = {
    "grow": grows,
    "linear": lambda: grows(lr_scheduler_type="linear"),
    "max_steps": lambda: grows(max_steps=42, lr_scheduler_type="linear"),
    "half": lambda: grows(num_train_epochs=2.5),
    "accumulate": accumulates,
    "unaware": unaware,
    "resume": lambda: resumes(elsewhere=True),
    "resume_grown": lambda: resumes(growth=True),
    "fixed": fixed,
    "fixed_callback": lambda: fixed(kind="callback"),
    "fixed_resume": lambda: fixed(stop=15, gradient_accumulation_steps=1),
    "fixed_accumulate": lambda: fixed(steps=9, stop=7, gradient_accumulation_steps=2),
    "fixed_callback_resume": lambda: fixed(kind="callback", stop=15, restored=True),
    "evaluate": evaluates,
    "evaluate_two": evaluates_two,
    "all_fields": all_fields,
    "early_stop": stops_early,
    "second_fit": second_fit,
    "refuse": refuses,
    "dataset": datasets,
    "ranks_sampler": lambda: datasets(sampled=True, rank=0, world_size=1),
    "ranks_sampler_twice": lambda: datasets(sampled=True),
    "ranks_grow": ranks_grow,
    "ranks_resume": lambda: ranks_resume(growth=False),
    "ranks_resume_grown": lambda: ranks_resume(growth=True),
    "ranks_evaluate": ranks_evaluate,
}

if __name__ == "__main__":
    torch.manual_seed(0)
    CASES[sys.argv[1]]()
