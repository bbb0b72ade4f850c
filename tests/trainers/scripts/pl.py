"""Cells of Lightning: ``pl.py CASE FOLDER [STRATEGY] [OPTION ...]``.

STRATEGY is ``one`` (one process), or the strategy of two ranks: ``ddp``, ``ddp_fork``, ``ddp_spawn``. Options:
``steps`` trains on ``epochs_of(steps=10)``, ``alone`` leaves out the callback, ``module`` uses a ``CacheDataModule``,
``len`` asks for the length before ``fit``, ``old`` uses the package ``pytorch_lightning``.

This file is not named ``lightning.py``, because that would hide the package with this name.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

OPTIONS = sys.argv[4:]

if "old" in OPTIONS:  # before cachetool's module, which uses the imported package
    import pytorch_lightning as lightning
    from pytorch_lightning.callbacks import Callback, EarlyStopping, ModelCheckpoint
else:
    import lightning.pytorch as lightning
    from lightning.pytorch.callbacks import Callback, EarlyStopping, ModelCheckpoint

from cachetool.loaders.lightning import CacheDataModule, GrowthCallback  # noqa: E402
from cachetool.loaders.torch import Loader, TensorList  # noqa: E402
from tests.trainers.growing import BATCH, FIXED, LAST, Record, fill, grow  # noqa: E402

CASE, FOLDER = sys.argv[1], Path(sys.argv[2])
STRATEGY = sys.argv[3] if len(sys.argv) > 3 else "one"
RANKS = 1 if STRATEGY == "one" else 2
CACHE = FOLDER / "cache"


class Model(lightning.LightningModule):
    """A module that trains one weight, records the samples, and grows the cache."""

    def __init__(
        self,
        *,
        name: str = "record",
        grow_at: int | None = None,
        grow_before: bool = False,
        stop_at: tuple[int, int] | None = None,
        schedule: str = "",
    ) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)
        self.name_of_record = name
        self.grow_at, self.grow_before, self.stop_at, self.schedule = grow_at, grow_before, stop_at, schedule
        self.record: Record | None = None
        self.extra: dict[str, Any] = {"rates": [], "lengths": []}

    def seen(self, ids: Any) -> None:
        if self.record is None:
            self.record = Record(self.trainer.train_dataloader)
        self.record.saw(self.current_epoch, ids)

    def on_train_epoch_start(self) -> None:
        self.extra["lengths"].append(self.trainer.num_training_batches)
        if self.grow_before and self.trainer.is_global_zero:
            grow(CACHE)

    def training_step(self, batch: dict[str, Any], index: int) -> torch.Tensor:
        self.seen(batch["id"])
        self.extra["rates"].append(self.optimizers().param_groups[0]["lr"])
        if index == self.grow_at and self.trainer.is_global_zero:
            grow(CACHE)
        if (self.current_epoch, index) == self.stop_at:
            self.trainer.should_stop = True
        self.check(batch)
        return self.layer(batch["x"]).mean()

    def check(self, batch: dict[str, Any]) -> None:
        """Check the values of a batch, in cells that do so."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), 1e-5)
        if self.schedule == "estimated":
            self.extra["estimated"] = self.trainer.estimated_stepping_batches
        if self.schedule == "one cycle":
            steps = self.trainer.estimated_stepping_batches
            self.extra["estimated"] = steps
            rates = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1e-3, total_steps=steps)
            return [optimizer], [{"scheduler": rates, "interval": "step"}]
        if self.schedule == "epochs":
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.1)]
        return optimizer

    def on_train_end(self) -> None:
        assert self.record is not None
        self.record.extra = self.extra
        self.record.write(FOLDER, self.global_rank, self.name_of_record)


class Fields(Model):
    """A module that checks fields of every kind inside the step."""

    def check(self, batch: dict[str, Any]) -> None:
        ids = batch["id"].tolist()
        assert batch["__key__"] == [f"scan{number}" for number in ids]
        assert batch["name"] == [f"näme {number}" for number in ids]
        assert batch["blob"] == [bytes([number % 256]) for number in ids]
        assert isinstance(batch["ragged"], TensorList)
        assert [tuple(one.shape) for one in batch["ragged"]] == [(number % 3, 2) for number in ids]
        assert all(bool((one == 1).all()) for one in batch["ragged"])
        assert batch["x"][:, 0].tolist() == [number % 7 for number in ids]


class Validated(Model):
    """A module that also records the samples of each validation; number 0 is the sanity check."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.validations = -1
        self.validated: Record | None = None

    def on_validation_epoch_start(self) -> None:
        self.validations += 1

    def validation_step(self, batch: dict[str, Any], index: int) -> None:
        if self.validated is None:
            loader = self.trainer.val_dataloaders
            self.validated = Record(loader[0] if isinstance(loader, list) else loader)
        self.validated.saw(self.validations, batch["id"])
        self.log("val_loss", self.layer(batch["x"]).mean(), batch_size=len(batch["x"]))

    def test_step(self, batch: dict[str, Any], index: int) -> None:
        raise AssertionError("a data module of a cache has no samples for tests")

    def write_validated(self, name: str = "validated") -> None:
        assert self.validated is not None
        self.validated.write(FOLDER, self.global_rank, name)

    def on_train_end(self) -> None:
        super().on_train_end()
        self.write_validated()


def loader(**options: Any) -> Any:
    """Return the training loader of this cell, or the view of it."""
    loader = Loader(CACHE, **{"batch_size": BATCH // RANKS, "fields": FIXED, "seed": 3, **options})
    return loader.epochs_of(steps=10) if "steps" in OPTIONS else loader


def trainer(callbacks: list[Callback] | None = None, **options: Any) -> Any:
    """Return a Trainer that prints nothing."""
    if STRATEGY == "one":
        options["devices"] = 1
    else:
        options.update(devices=2, strategy=STRATEGY)
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    options.setdefault("enable_checkpointing", any(isinstance(one, ModelCheckpoint) for one in callbacks or []))
    options.setdefault("num_sanity_val_steps", 2)
    return lightning.Trainer(accelerator="cpu", default_root_dir=FOLDER, callbacks=callbacks, **quiet, **options)


def train(
    model: Model,
    *,
    callbacks: list[Callback] | None = None,
    resume: Path | None = None,
    validation: float | None = None,
    options: dict[str, Any] | None = None,
    **trained: Any,
) -> None:
    """Fit once with new loaders, as a new run does."""
    options = options or {}
    if "module" in OPTIONS:
        given = {"batch_size": BATCH // RANKS, "fields": FIXED, "seed": 3, **options}
        steps = 10 if "steps" in OPTIONS else None
        data = CacheDataModule(CACHE, steps=steps, validation=validation, **given)
        trainer(callbacks, **trained).fit(model, datamodule=data, ckpt_path=resume)
        return
    split = {} if validation is None else {"split": "train", "validation": validation}
    held = {"split": "validation", "validation": validation, "shuffle": False}
    valid = None if validation is None else Loader(CACHE, batch_size=BATCH // RANKS, fields=FIXED, seed=3, **held)
    with loader(**options, **split) as loaded:
        if "len" in OPTIONS and RANKS == 2:
            loaded_length = len(loaded)  # in a process that is not a rank: the whole cache
            assert loaded_length > 0
        growth = [] if "alone" in OPTIONS else [GrowthCallback(loaded)]
        trainer([*growth, *(callbacks or [])], **trained).fit(model, loaded, valid, ckpt_path=resume)
    if valid is not None:
        valid.close()


def only_first() -> bool:
    """Return True if this process fills or grows the cache: with the launcher ``ddp`` the other ranks run this script
    too.
    """
    return os.environ.get("LOCAL_RANK", "0") == "0"


def saved(**options: Any) -> ModelCheckpoint:
    """Return a checkpoint callback that writes ``save.ckpt``."""
    return ModelCheckpoint(dirpath=FOLDER / "saved", filename="save", enable_version_counter=False, **options)


SAVED = FOLDER / "saved" / "save.ckpt"


def case_grow() -> None:
    train(Model(grow_at=1), max_epochs=4)


def case_grow_before_the_first_step() -> None:
    train(Model(grow_before=True), max_epochs=4)


def case_resume() -> None:
    """Leave at 80 of 240 samples, and resume."""
    train(Model(name="before"), max_steps=5, callbacks=[saved(every_n_train_steps=5)])
    train(Model(), max_epochs=4, resume=SAVED)


def case_resume_grown() -> None:
    """Leave at 48 of 144 samples, and resume when the cache has 240."""
    train(Model(name="before"), max_steps=3, callbacks=[saved(every_n_train_steps=3)])
    if only_first():
        grow(CACHE, LAST)
    train(Model(), max_epochs=4, resume=SAVED)


def case_resume_estimated() -> None:
    """Leave at 80 of 240 in epoch 1. The optimizer asks for the number of steps before Lightning restores the
    loader.
    """
    train(Model(name="before", schedule="estimated"), max_steps=20, callbacks=[saved(every_n_train_steps=20)])
    train(Model(schedule="estimated"), max_epochs=4, resume=SAVED)


def case_resume_at_the_end() -> None:
    train(Model(name="before"), max_epochs=1, callbacks=[saved()])
    train(Model(), max_epochs=3, resume=SAVED)


def case_resume_at_the_end_grown() -> None:
    train(Model(name="before"), max_epochs=1, callbacks=[saved()])
    grow(CACHE, LAST)
    train(Model(), max_epochs=3, resume=SAVED)


def case_resume_at_the_end_steps() -> None:
    """Do the same with a Trainer that counts steps: Lightning then treats every checkpoint as one of mid-epoch."""
    train(Model(name="before"), max_epochs=1, callbacks=[saved()])
    if "same" not in OPTIONS:
        grow(CACHE, LAST)
    train(Model(), max_steps=30, resume=SAVED)


def case_resume_steps() -> None:
    """Leave at 80 of 240 samples with a Trainer that counts steps, and resume with another one."""
    train(Model(name="before"), max_steps=5, callbacks=[saved(every_n_train_steps=5)])
    train(Model(), max_steps=35, resume=SAVED)


def case_resume_stopped() -> None:
    """Stop in the first epoch, as a Timer does, and resume from the checkpoint of the end of that epoch."""
    train(
        Validated(name="before", schedule="epochs", stop_at=(0, 3)), max_epochs=3, validation=0.2, callbacks=[saved()]
    )
    train(Validated(schedule="epochs"), max_epochs=3, validation=0.2, resume=SAVED)


def case_resume_limited() -> None:
    """Leave every epoch after five batches, and resume from the checkpoint of the end of the first."""
    train(Model(name="before"), max_epochs=1, callbacks=[saved()], limit_train_batches=5)
    train(Model(), max_epochs=3, resume=SAVED, limit_train_batches=5)


def case_resume_after_validation() -> None:
    """Save when the validation after the last batch ends, before the epoch ends."""
    keep = saved(monitor="val_loss", save_on_train_epoch_end=False)
    train(Validated(name="before"), max_epochs=1, callbacks=[keep], validation=0.2)
    if "same" not in OPTIONS:
        grow(CACHE, LAST)
    train(Validated(), max_epochs=3, validation=0.2, resume=SAVED)


def case_resume_at_the_last_batch() -> None:
    """Save after the last batch, before the epoch ends; then the cache grows."""
    train(Model(name="before"), max_epochs=1, callbacks=[saved(every_n_train_steps=6, save_on_train_epoch_end=False)])
    if "same" not in OPTIONS:
        grow(CACHE, LAST)
    train(Model(), max_epochs=3, resume=SAVED)


def case_validation() -> None:
    train(Validated(grow_at=1), max_epochs=4, validation=0.2)


def case_validation_twice() -> None:
    train(Validated(grow_at=1), max_epochs=3, validation=0.2, val_check_interval=0.5)


def case_fields() -> None:
    """Train with every field, without fields=."""
    train(Fields(), max_epochs=2, options={"fields": None})


def case_stop() -> None:
    train(Model(grow_at=1, stop_at=(1, 5)), max_epochs=4)


def case_early_stopping() -> None:
    """Stop early, because the validation's loss does not improve in the second epoch."""
    stop = EarlyStopping(monitor="val_loss", min_delta=100.0, patience=1)
    train(Validated(grow_at=1), max_epochs=4, validation=0.2, callbacks=[stop], val_check_interval=0.5)


def case_limit() -> None:
    train(Model(grow_at=1), max_epochs=3, limit_train_batches=5)


def case_max_steps() -> None:
    train(Model(grow_at=1), max_steps=12)


def case_second_fit() -> None:
    """Fit the same loader again with a new Trainer. The first one stopped in its second epoch."""
    with loader() as loaded:
        options = {"callbacks": [GrowthCallback(loaded)]}
        trainer(**options, max_epochs=4).fit(Model(name="before", grow_at=1, stop_at=(1, 3)), loaded)
        trainer(**options, max_epochs=2).fit(Model(grow_at=1), loaded)


def case_cycle() -> None:
    train(Model(grow_at=1, schedule="one cycle"), max_epochs=4)


def case_fail_01() -> None:
    """Reproduce the first fault of the issue: resumed in mid-epoch without the callback, after 13 steps of 9 per
    epoch.
    """
    options = {"batch_size": 7}
    train(Model(name="before"), max_steps=13, callbacks=[saved(every_n_train_steps=13)], options=options)
    train(Model(), max_epochs=4, resume=SAVED, options=options)


def case_fail_02() -> None:
    """Reproduce the second fault of the issue: another process pulls between two epochs, then the loader is
    refreshed.
    """
    source = FOLDER / "source"
    source.mkdir()

    def pull(start: int, stop: int, *options: str) -> None:
        for number in range(start, stop):
            np.savez(source / f"s{number:03d}.npz", x=np.full(4, number, "f4"), id=np.int64(number))
        line = [sys.executable, "-m", "cachetool", "pull", str(source), "--all", "--cache", str(FOLDER / "pulled")]
        subprocess.run([*line, *options], check=True, capture_output=True)

    class Pulling(Model):
        def on_train_epoch_end(self) -> None:
            if self.current_epoch == 0:
                pull(60, 120, "--refresh")
                loaded.refresh()

    pull(0, 60, "--max-size", "20MB")
    with Loader(FOLDER / "pulled", batch_size=7, workers=1, seed=0, fields=["id", "x"]) as loaded:
        trainer([GrowthCallback(loaded)], max_epochs=3).fit(Pulling(), loaded)


def case_module() -> None:
    """Do everything that a user does with one data module."""
    data = CacheDataModule(
        CACHE, validation=0.2, steps=10 if "steps" in OPTIONS else None, batch_size=BATCH, fields=FIXED, seed=3
    )
    data.setup("fit")
    data.setup("fit")
    length = len(data.train_dataloader())
    first = trainer([saved(every_n_train_steps=7)], max_epochs=4)
    stopped = Validated(name="before", grow_at=1, stop_at=(1, 1))
    first.fit(stopped, datamodule=data)
    first.save_checkpoint(FOLDER / "left.ckpt")  # after fit() the loaders are closed
    again = Validated()
    trainer(max_epochs=2).fit(again, datamodule=data)
    trainer().validate(again, datamodule=data, verbose=False)
    resumed = Validated(name="resumed")
    left = CacheDataModule(CACHE, validation=0.2, batch_size=BATCH, fields=FIXED, seed=3)
    if "steps" not in OPTIONS:
        trainer(max_epochs=3).fit(resumed, datamodule=left, ckpt_path=FOLDER / "left.ckpt")
    refused = ""
    try:
        trainer().test(again, datamodule=data)
    except ValueError as error:
        refused = str(error)
    again.write_validated()
    assert again.record is not None
    again.record.extra = {"length": length, "text": str(data), "refused": refused}
    again.record.write(FOLDER, 0)


def main() -> None:
    """Run one case."""
    samples = {
        "resume": LAST,
        "resume_stopped": LAST,
        "resume_steps": LAST,
        "resume_estimated": LAST,
        "resume_at_the_end": LAST,
        "resume_grown": 144,
        "fail_01": 60,
    }
    if only_first():
        fill(CACHE, samples.get(CASE, 96))
    globals()[f"case_{CASE}"]()


if __name__ == "__main__":
    main()
