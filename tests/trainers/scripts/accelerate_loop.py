"""One case of a loop with Accelerate: ``python accelerate_loop.py CASE FOLDER``, as one process or one of two ranks."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, skip_first_batches
from accelerate.utils import send_to_device
from torch.utils.data import DataLoader

from cachetool.core.errors import UsageError
from cachetool.loaders.torch import CacheDataset, EpochSampler, Loader
from tests.trainers.growing import BATCH, FIXED, LAST, Record, fill, grow

FOLDER = Path(sys.argv[2])
CACHE = FOLDER / "cache"
RANK, RANKS = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
EPOCHS = 4 if RANKS == 1 else 7  # two ranks share snapshots that were taken earlier


class Loop:
    """A loop in the form of Accelerate's documentation."""

    def __init__(self, samples: int, *, groups: int = 1) -> None:
        self.accelerator = Accelerator(cpu=True, gradient_accumulation_steps=groups)
        if RANK == 0 and samples:
            fill(CACHE, samples)
        self.accelerator.wait_for_everyone()
        self.updates = 0

    def prepare(self, batches: Any) -> Any:
        model = torch.nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
        self.model, self.optimizer, batches = self.accelerator.prepare(model, optimizer, batches)
        return batches

    def epoch(self, batches: Iterable[Any], record: Any, epoch: int, *, grows: bool = False, stop: int = 0) -> None:
        """Train one epoch, or its first ``stop`` batches."""
        for step, batch in enumerate(batches, start=1):
            with self.accelerator.accumulate(self.model):
                loss = torch.nn.functional.mse_loss(self.model(batch["x"])[:, 0], batch["y"])
                self.accelerator.backward(loss)
                self.updates += self.accelerator.sync_gradients
                self.optimizer.step()
                self.optimizer.zero_grad()
            record.saw(epoch, batch["id"])
            if grows and step == 1 and RANK == 0:
                grow(CACHE)
            if step == stop:
                return


class Ids:
    """A record for batches that do not come from a loader."""

    def __init__(self) -> None:
        self.epochs: dict[int, dict[str, Any]] = {}
        self.extra: dict[str, Any] = {}

    def saw(self, epoch: int, ids: Any) -> None:
        self.epochs.setdefault(epoch, {"ids": [], "passes": {}})["ids"] += ids.tolist()

    write = Record.write


def loader(**options: Any) -> Loader:
    return Loader(CACHE, **{"batch_size": BATCH, "fields": FIXED, "seed": 0, **options})


def grows() -> None:
    """Check that ``prepare`` returns the loader itself; train groups of two batches across the ends of epochs."""
    loop = Loop(96, groups=2)
    with loader() as batches:
        assert loop.prepare(batches) is batches
        record = Record(batches)
        for epoch in range(EPOCHS):
            loop.epoch(batches, record, epoch, grows=True)
        record.extra["updates"] = loop.updates
        record.write(FOLDER)


def resumes(*, growth: bool) -> None:
    """Call ``save_state`` in the middle of epoch 1, and ``load_state`` with a new loader. ``skip_first_batches``
    fails.
    """
    loop = Loop(96 * 2 if growth else LAST)
    with loader() as batches:
        record = Record(batches)
        loop.prepare(batches)
        loop.accelerator.register_for_checkpointing(batches)
        loop.epoch(batches, record, 0)
        loop.epoch(batches, record, 1, stop=3)
        loop.accelerator.save_state(str(FOLDER / "state"))
        loop.accelerator.wait_for_everyone()
        if growth and RANK == 0:
            grow(CACHE, LAST)
    loop = Loop(0)
    with loader() as batches:
        record._loader = batches
        loop.prepare(batches)
        loop.accelerator.register_for_checkpointing(batches)
        try:
            skip_first_batches(batches, 3)
        except AttributeError as error:
            record.extra["skipped"] = str(error)
        loop.accelerator.load_state(str(FOLDER / "state"))
        record.extra["left"] = [batches.epoch, len(batches)]
        for epoch in range(batches.epoch, 4):
            loop.epoch(batches, record, epoch)
        record.write(FOLDER)


def fixed() -> None:
    """Train epochs of ten steps, registered for checkpoints. The schedule ends with the training."""
    loop = Loop(96)
    with loader() as batches:
        epochs = batches.epochs_of(steps=10)
        assert loop.prepare(epochs) is epochs
        record = Record(batches)
        schedule = torch.optim.lr_scheduler.LinearLR(loop.optimizer, 1.0, 0.0, total_iters=40)
        rates = []
        loop.accelerator.register_for_checkpointing(epochs)
        for epoch in range(4):
            for at, batch in enumerate(epochs):
                if at == 0 and RANK == 0:
                    grow(CACHE)
                record.saw(epoch, batch["id"])
                loop.optimizer.step()
                schedule.step()
                rates.append(schedule.get_last_lr()[0])
                if epoch == 2 and at == 4:
                    loop.accelerator.save_state(str(FOLDER / "state"))
                    loop.accelerator.wait_for_everyone()
                    loop.accelerator.load_state(str(FOLDER / "state"))
                    break
            else:
                continue
            for batch in epochs:
                record.saw(epoch, batch["id"])
                loop.optimizer.step()
                schedule.step()
                rates.append(schedule.get_last_lr()[0])
        record.extra["rates"] = rates
        record.write(FOLDER)


def validates() -> None:
    loop = Loop(96)
    with (
        loader(split="train", validation=0.25) as batches,
        loader(split="validation", validation=0.25) as held_out,
    ):
        loop.prepare(batches)
        assert loop.accelerator.prepare(held_out) is held_out
        record, validation = Record(batches), Record(held_out)
        for epoch in range(EPOCHS):
            loop.epoch(batches, record, epoch, grows=True)
            for batch in held_out:
                validation.saw(epoch, batch["id"])
        validation.write(FOLDER, name="validation")
        record.write(FOLDER)


def all_fields() -> None:
    loop = Loop(96)
    with loader(fields=None) as batches:
        loop.prepare(batches)
        record = Record(batches)
        for batch in batches:
            moved = send_to_device(batch, loop.accelerator.device)
            ids = moved["id"].tolist()
            assert moved["__key__"] == [f"scan{number}" for number in ids]
            assert moved["name"] == [f"näme {number}" for number in ids]
            assert moved["blob"] == [bytes([number % 256]) for number in ids]
            assert type(moved["ragged"]) is type(batch["ragged"])
            assert [tuple(one.shape) for one in moved["ragged"]] == [(number % 3, 2) for number in ids]
            assert all(bool((one == 1).all()) for one in moved["ragged"])
            record.saw(0, moved["id"])
        record.write(FOLDER)


def stops() -> None:
    """Leave an epoch by ``break`` after the previous ``len()``, then run a second loop."""
    loop = Loop(96)
    with loader() as batches:
        loop.prepare(batches)
        record = Record(batches)
        loop.epoch(batches, record, 0, grows=True)
        loop.epoch(batches, record, 1, grows=True, stop=4 if RANKS == 1 else 2)
        record.extra["left"] = batches.epoch
        for epoch in range(2, EPOCHS):
            loop.epoch(batches, record, epoch)
        record.write(FOLDER)


def one_behind(loop: Loop, batches: Iterable[Any]) -> Iterator[Any]:
    """Yield the batches of an epoch that rank 1 begins only after rank 0 did, and after the cache grew."""
    if RANK:
        loop.accelerator.wait_for_everyone()
    for step, batch in enumerate(batches):
        if step == 0 and RANK == 0:
            grow(CACHE)
            loop.accelerator.wait_for_everyone()
        yield batch


def samples(
    *, grows: bool = True, right: bool = True, prepared: bool = True, run: bool = True, workers: int = 0
) -> None:
    """Train with an EpochSampler in a DataLoader, which Accelerate divides if it is ``prepared``."""
    loop = Loop(96)
    if not run:
        del os.environ["TORCHELASTIC_RUN_ID"]
    record = Ids()
    with CacheDataset(CACHE, fields=FIXED) as dataset:
        try:
            sampler = EpochSampler(dataset, **({"rank": 0, "world_size": 1} if right and prepared else {}))
            made: Any = DataLoader(
                dataset, batch_size=8, sampler=sampler, collate_fn=dataset.collate, num_workers=workers
            )
            batches = loop.prepare(made)
            if not prepared:
                batches = made
            for epoch in range(4):
                loop.epoch(one_behind(loop, batches) if grows else batches, record, epoch)
                assert not prepared or batches.iteration == epoch + 1
                assert sampler.epoch == epoch + 1
        except UsageError as error:
            record.extra["error"] = str(error)
        record.write(FOLDER)


CASES: dict[str, Callable[[], None]] = {
    "grow": grows,
    "resume": lambda: resumes(growth=False),
    "resume_grown": lambda: resumes(growth=True),
    "fixed": fixed,
    "validate": validates,
    "all_fields": all_fields,
    "stop": stops,
    "sampler": samples,
    "sampler_workers": lambda: samples(workers=1),
    "sampler_twice": lambda: samples(grows=False, right=False),
    "sampler_unprepared": lambda: samples(prepared=False),
    "sampler_no_run": lambda: samples(run=False, grows=False),
}

if __name__ == "__main__":
    torch.manual_seed(0)
    CASES[sys.argv[1]]()
