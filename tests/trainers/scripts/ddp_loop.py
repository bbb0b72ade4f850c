"""A custom loop with DistributedDataParallel, started by torchrun: ``CASE FOLDER``.

One process of the job, or with the case ``spawned`` the process that starts two of them itself.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import distributed
from torch.nn.parallel import DistributedDataParallel

from cachetool.loaders.torch import Loader
from tests.trainers.conftest import free_port
from tests.trainers.growing import BATCH, FIRST, FIXED, LAST, Record, fill, grow


def start(rank: int | None = None, world_size: int | None = None) -> tuple[int, int]:
    """Join the job, if one exists. Return rank and world size."""
    if rank is not None and world_size is not None:
        distributed.init_process_group("gloo", rank=rank, world_size=world_size)
    elif "RANK" in os.environ:
        distributed.init_process_group("gloo")
    else:
        return 0, 1
    return distributed.get_rank(), distributed.get_world_size()


def barrier() -> None:
    """Wait for the other ranks."""
    if distributed.is_initialized():
        distributed.barrier()


def first(rank: int, cache: Path, samples: int) -> None:
    """Let rank 0 fill the cache."""
    if rank == 0:
        fill(cache, samples)
    barrier()


class Step:
    """A model and one training step with it."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        model: Any = torch.nn.Linear(4, 1)
        self.model = DistributedDataParallel(model) if distributed.is_initialized() else model
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3)

    def __call__(self, batch: dict[str, Any]) -> None:
        loss = torch.nn.functional.mse_loss(self.model(batch["x"])[:, 0], batch["y"])
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()


def train(
    loader: Any, record: Record, epochs: range, *, cache: Path | None = None, rank: int = 0, stop: int | None = None
) -> None:
    """Train epochs in a typical loop. Rank 0 adds samples to ``cache`` in the middle of each epoch. The last epoch is
    left after ``stop`` batches.
    """
    step = Step()
    for epoch in epochs:
        for at, batch in enumerate(loader, 1):
            step(batch)
            record.saw(epoch, batch["id"])
            if at == 2 and cache is not None and rank == 0:
                grow(cache)
            if at == stop and epoch == epochs[-1]:
                break
        barrier()


def check(batch: dict[str, Any]) -> None:
    """Assert that the fields of each kind belong to the ids beside them."""
    for at, number in enumerate(batch["id"].tolist()):
        assert batch["__key__"][at] == f"scan{number}"
        assert batch["name"][at] == f"näme {number}"
        assert batch["blob"][at] == bytes([number % 256])
        assert torch.equal(batch["ragged"][at], torch.ones((number % 3, 2)))
        assert batch["x"][at].tolist() == [number % 7] * 4
        assert batch["y"][at].item() == number % 3
    assert type(batch["name"]) is type(batch["blob"]) is type(batch["__key__"]) is list
    assert len(batch["ragged"]) == len(batch["id"])


def run(case: str, folder: Path, rank: int, world_size: int, made: Any = None) -> None:
    """Run one rank."""
    cache, state = folder / "cache", folder / "state.json"
    options: dict[str, Any] = {"batch_size": BATCH, "fields": FIXED, "seed": 1}
    if case in ("grow", "before", "spawned"):
        if made is None:
            first(rank, cache, FIRST)
        loader = made or Loader(cache, **options)
        record = Record(loader)
        if case == "before" and rank == 0:  # as a program that prints the length; the other ranks do not ask
            record.extra["len"] = len(loader)
        train(loader, record, range(4), cache=cache, rank=rank)
    elif case in ("leave", "leave-growing"):
        first(rank, cache, LAST if case == "leave" else 144)
        loader = Loader(cache, **options)
        record = Record(loader)
        train(loader, record, range(2), stop=3 if case == "leave" else 2)
        if rank == 0:
            state.write_text(json.dumps(loader.state_dict()))
            if case == "leave-growing":
                grow(cache, LAST - 144)
    elif case == "resume":
        loader = Loader(cache, **options)
        loader.load_state_dict(json.loads(state.read_text()))
        record = Record(loader)
        record.extra["len"] = len(loader)
        train(loader, record, range(loader.epoch, 4))
    elif case == "validation":
        first(rank, cache, FIRST)
        loader = Loader(cache, split="train", validation=0.3, **options)
        other = Loader(cache, split="validation", validation=0.3, **options)
        record, validated = Record(loader), Record(other)
        for epoch in range(4):
            train(loader, record, range(epoch, epoch + 1), cache=cache, rank=rank)
            for batch in other:
                validated.saw(epoch, batch["id"])
        validated.write(folder, rank, "validated")
        other.close()
    elif case == "fields":
        first(rank, cache, FIRST)
        loader = Loader(cache, batch_size=BATCH)
        record, step = Record(loader), Step()
        for batch in loader:
            check(batch)
            step(batch)
            record.saw(0, batch["id"])
    elif case == "stop":
        first(rank, cache, FIRST)
        loader = Loader(cache, **options)
        record = Record(loader)
        train(loader, record, range(2), cache=cache, rank=rank, stop=2)
    elif case == "twice":
        first(rank, cache, FIRST)
        loader = Loader(cache, **options)
        record = Record(loader)
        train(loader, record, range(2), cache=cache, rank=rank)
        train(loader, record, range(2, 4), cache=cache, rank=rank)
    elif case == "schedule":
        first(rank, cache, FIRST)
        loader = Loader(cache, **options)
        view, record, step = loader.epochs_of(steps=7), Record(loader), Step()
        schedule = torch.optim.lr_scheduler.OneCycleLR(step.optimizer, max_lr=0.1, epochs=4, steps_per_epoch=len(view))
        for epoch in range(4):
            for batch in view:
                step(batch)
                record.extra["lr"] = schedule.get_last_lr()[0]
                schedule.step()  # raises after the last step
                record.saw(epoch, batch["id"])
            if rank == 0:
                grow(cache)
            barrier()
        record.extra["steps"] = schedule.last_epoch
    else:
        raise AssertionError(case)
    record.write(folder, rank)
    loader.close()
    if distributed.is_initialized():
        distributed.destroy_process_group()


def spawned(rank: int, folder: Path) -> None:
    """Run one of two ranks without a launcher: no RANK, WORLD_SIZE or TORCHELASTIC_RUN_ID."""
    run("spawned", folder, *start(rank, 2))


def main() -> None:
    """Run the case."""
    case, folder = sys.argv[1], Path(sys.argv[2])
    if case == "spawned":
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        torch.multiprocessing.spawn(spawned, args=(folder,), nprocs=2)
        return
    made = None
    if case == "before":  # as in a program that creates its loader first
        if os.environ["RANK"] == "0":
            fill(folder / "cache")
            (folder / "filled").touch()
        until = time.monotonic() + 60
        while not (folder / "filled").exists() and time.monotonic() < until:
            time.sleep(0.05)
        made = Loader(folder / "cache", batch_size=BATCH, fields=FIXED, seed=1)
    run(case, folder, *start(), made)


if __name__ == "__main__":
    main()
