"""An Engine of ignite: ``CASE FOLDER``."""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from ignite.engine import Engine, Events, create_supervised_trainer
from ignite.utils import convert_tensor

from cachetool.loaders.torch import Loader, TensorList
from tests.trainers.growing import BATCH, FIRST, FIXED, LAST, Record, fill, grow


def engine(record: Record, folder: Path | None, *, model: Any = None, loader: Any = None) -> Engine:
    """Return a trainer that records the samples of its steps. After the second step of each epoch, which is in its
    first half, it adds samples to the cache in ``folder``, so the next epoch has them.
    """
    model = torch.nn.Linear(4, 1) if model is None else model
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def step(trainer: Engine, batch: dict[str, Any]) -> float:
        batch = convert_tensor(batch, device="cpu")
        loss = torch.nn.functional.mse_loss(model(batch["x"])[:, 0], batch["y"])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        record.saw(trainer.state.epoch - 1, batch["id"])
        return loss.item()

    trainer = Engine(step)
    if folder is not None:
        begun = [0]  # iterations before this epoch: ignite counts over all epochs
        trainer.add_event_handler(Events.EPOCH_STARTED, lambda trainer: begun.append(trainer.state.iteration))
        trainer.add_event_handler(
            Events.ITERATION_COMPLETED,
            lambda trainer: grow(folder) if trainer.state.iteration == begun[-1] + 2 else None,
        )
    return trainer


def whole_passes(trainer: Engine, loader: Loader) -> None:
    """Make each epoch of ignite one pass of the loader."""

    @trainer.on(Events.EPOCH_COMPLETED)
    def next_pass(trainer: Engine) -> None:
        trainer.set_data(loader)  # begins the next pass
        trainer.state.epoch_length = len(loader)  # of that pass


def check(batch: dict[str, Any]) -> None:
    """Assert that the fields of each kind belong to the ids beside them."""
    assert isinstance(batch["ragged"], TensorList)
    for at, number in enumerate(batch["id"].tolist()):
        assert batch["__key__"][at] == f"scan{number}"
        assert batch["name"][at] == f"näme {number}"
        assert batch["blob"][at] == bytes([number % 256])
        assert torch.equal(batch["ragged"][at], torch.ones((number % 3, 2)))


def resumed(cache: Path, record: Record, *, at: int, growing: bool, **options: Any) -> Any:
    """Leave a training at iteration ``at``, and resume with another loader and engine, in epochs of 10 steps."""
    loader = Loader(cache, **options)
    view = loader.epochs_of(steps=10)
    record._loader = loader
    trainer = engine(record, None)
    saved: list[str] = []

    @trainer.on(Events.ITERATION_COMPLETED(once=at))
    def save(trainer: Engine) -> None:
        saved.append(json.dumps({"engine": trainer.state_dict(), "loader": view.state_dict()}))
        trainer.terminate()

    trainer.run(view, max_epochs=4)
    loader.close()
    if growing:
        grow(cache, LAST)

    state = json.loads(saved[0])
    loader = Loader(cache, **options)
    view = loader.epochs_of(steps=10)
    view.load_state_dict(state["loader"])
    record._loader = loader
    trainer = engine(record, None)
    trainer.load_state_dict(state["engine"])
    trainer.run(view, max_epochs=4)
    record.extra["iterations"] = trainer.state.iteration
    return loader


def main() -> None:
    """Run the case."""
    warnings.simplefilter("ignore")
    case, folder = sys.argv[1], Path(sys.argv[2])
    cache = folder / "cache"
    fill(cache, {"resume": LAST, "resume-growing": 144}.get(case, FIRST))
    options: dict[str, Any] = {"batch_size": BATCH, "fields": FIXED, "seed": 1}
    loader = Loader(cache, **({"batch_size": BATCH} if case == "fields" else options))
    record = Record(loader)
    if case in ("grow", "cut"):
        engine(record, cache).run(loader, max_epochs=4 if case == "grow" else 2)
    elif case == "passes":
        trainer = engine(record, cache)
        whole_passes(trainer, loader)
        trainer.run(loader, max_epochs=4)
    elif case == "fixed":
        model = torch.nn.Linear(4, 1)
        view = loader.epochs_of(steps=10)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=4 * len(view))
        trainer = engine(record, cache, model=model)
        trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda _: schedule.step())
        trainer.run(view, max_epochs=4)
        record.extra["lr"] = schedule.get_last_lr()[0]
    elif case in ("resume", "resume-growing"):
        loader.close()
        loader = resumed(cache, record, at=5 if case == "resume" else 13, growing=case != "resume", **options)
    elif case == "validation":
        loader.close()
        loader = Loader(cache, split="train", validation=0.3, **options)
        other = Loader(cache, split="validation", validation=0.3, **options)
        record, validated = Record(loader), Record(other)
        trainer = engine(record, cache)
        whole_passes(trainer, loader)

        @trainer.on(Events.EPOCH_COMPLETED)
        def validate(trainer: Engine) -> None:
            epoch = trainer.state.epoch - 1
            Engine(lambda _, batch: validated.saw(epoch, batch["id"])).run(other)  # each run asks for the length

        trainer.run(loader, max_epochs=4)
        validated.write(folder, 0, "validated")
        other.close()
    elif case == "fields":

        def prepare(batch: dict[str, Any], device: Any = None, non_blocking: bool = False) -> Any:
            batch = convert_tensor(batch, device=device, non_blocking=non_blocking)
            check(batch)
            record.saw(0, batch["id"])
            return batch["x"], batch["y"][:, None]

        model = torch.nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        create_supervised_trainer(
            model, optimizer, torch.nn.functional.mse_loss, device="cpu", prepare_batch=prepare
        ).run(loader, max_epochs=1)
    elif case == "stop":
        trainer = engine(record, cache)
        whole_passes(trainer, loader)
        trainer.add_event_handler(Events.ITERATION_COMPLETED(once=9), lambda trainer: trainer.terminate())
        trainer.run(loader, max_epochs=4)
    elif case == "twice":
        view = loader.epochs_of(steps=10)
        engine(record, cache).run(view, max_epochs=2)
        again = engine(record, cache)
        again.add_event_handler(Events.STARTED, lambda trainer: setattr(trainer.state, "epoch", 2))
        again.run(view, max_epochs=4, epoch_length=10)
    else:
        raise AssertionError(case)
    record.write(folder, 0)
    loader.close()


if __name__ == "__main__":
    main()
