"""Cells of Fabric: ``fabric_loop.py CASE FOLDER [RANKS]``, a custom loop with ``fabric.to_device``.

With two ranks Fabric starts the second one itself, or torchrun has started both.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
from lightning.fabric import Fabric

from cachetool.loaders.torch import Loader, TensorList
from tests.trainers.growing import BATCH, FIXED, LAST, Record, fill, grow

CASE, FOLDER = sys.argv[1], Path(sys.argv[2])
RANKS = int(sys.argv[3]) if len(sys.argv) > 3 else 1
CACHE, SAVED = FOLDER / "cache", FOLDER / "save.ckpt"


class Run:
    """One training run: a model, its optimizer, a loader, and the record of the trained samples."""

    def __init__(self, fabric: Fabric, **options: Any) -> None:
        self.fabric = fabric
        model = torch.nn.Linear(4, 1)
        self.model, self.optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), 1e-5))
        self.loader = Loader(CACHE, **{"batch_size": BATCH // RANKS, "fields": FIXED, "seed": 3, **options})
        self.record = Record(self.loader)
        self.state = {"model": self.model, "optimizer": self.optimizer, "loader": self.loader}
        self.steps = 0

    def epoch(self, number: int, *, grow_at: int | None = None, stop_at: int | None = None) -> None:
        """Train one epoch, or leave it with ``break`` at a step."""
        for step, batch in enumerate(self.loader, start=1):
            moved = self.fabric.to_device(batch)
            self.optimizer.zero_grad()
            self.fabric.backward(self.model(moved["x"]).mean())
            self.optimizer.step()
            self.record.saw(number, moved["id"])
            check(moved)
            if step == grow_at and self.fabric.is_global_zero:
                grow(CACHE)
            if step == stop_at:
                break

    def end(self, name: str = "record") -> None:
        """Write the record."""
        self.record.write(FOLDER, self.fabric.global_rank, name)
        self.loader.close()


def check(batch: dict[str, Any]) -> None:
    """Check the moved batch if it has every field."""
    ids = batch["id"].tolist()
    assert batch["x"][:, 0].tolist() == [number % 7 for number in ids]
    if "ragged" in batch:
        assert batch["__key__"] == [f"scan{number}" for number in ids]
        assert batch["name"] == [f"näme {number}" for number in ids]
        assert batch["blob"] == [bytes([number % 256]) for number in ids]
        assert isinstance(batch["ragged"], TensorList)
        assert [tuple(one.shape) for one in batch["ragged"]] == [(number % 3, 2) for number in ids]


def case_grow(fabric: Fabric) -> None:
    run = Run(fabric)
    for number in range(4):
        run.epoch(number, grow_at=2)
    run.end()


def resumed(fabric: Fabric, stop_at: int, *, more: bool) -> None:
    """Leave the first epoch after some steps, and resume in a new run."""
    before = Run(fabric)
    before.epoch(0, stop_at=stop_at)
    fabric.save(SAVED, before.state)
    before.end("before")
    fabric.barrier()
    if more and fabric.is_global_zero:
        grow(CACHE, LAST)
    fabric.barrier()
    run = Run(fabric)
    fabric.load(SAVED, run.state)
    for number in range(run.loader.epoch, 4):
        run.epoch(number)
    run.end()


def case_resume(fabric: Fabric) -> None:
    resumed(fabric, 5, more=False)


def case_resume_grown(fabric: Fabric) -> None:
    resumed(fabric, 3, more=True)


def case_validation(fabric: Fabric) -> None:
    run = Run(fabric, split="train", validation=0.2)
    options = {"batch_size": BATCH // RANKS, "fields": FIXED, "split": "validation", "validation": 0.2}
    with Loader(CACHE, shuffle=False, **options) as held:
        validated = Record(held)
        for number in range(4):
            run.epoch(number, grow_at=1)
            for batch in held:
                validated.saw(number, fabric.to_device(batch)["id"])
        validated.write(FOLDER, fabric.global_rank, "validated")
    run.end()


def case_fields(fabric: Fabric) -> None:
    run = Run(fabric, fields=None)
    run.epoch(0)
    run.end()


def case_stop(fabric: Fabric) -> None:
    run = Run(fabric)
    run.epoch(0, grow_at=1)
    run.epoch(1, stop_at=4)
    run.end()


def case_second_fit(fabric: Fabric) -> None:
    """Use the same loader in a second loop, with another model."""
    first = Run(fabric)
    first.epoch(0, grow_at=1)
    first.epoch(1, stop_at=4)
    second = Run(fabric)
    second.loader, second.record = first.loader, first.record
    second.epoch(2)
    second.epoch(3)
    second.end()


def case_set_up(fabric: Fabric) -> None:
    """Check that ``setup_dataloaders`` accepts only torch's DataLoader."""
    run = Run(fabric)
    message = ""
    try:
        fabric.setup_dataloaders(run.loader)
    except TypeError as error:
        message = str(error)
    run.epoch(0)
    run.record.extra = {"message": message}
    run.end()


def main() -> None:
    """Run one case."""
    if os.environ.get("LOCAL_RANK", "0") == "0":
        fill(CACHE, {"resume": LAST, "resume_grown": 144}.get(CASE, 96))
    fabric = Fabric(accelerator="cpu", devices=RANKS, strategy="ddp" if RANKS > 1 else "auto")
    fabric.launch()
    fabric.barrier()
    globals()[f"case_{CASE}"](fabric)


if __name__ == "__main__":
    main()
