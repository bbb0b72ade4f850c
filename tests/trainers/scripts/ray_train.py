"""Ray Train with two workers on this machine: ``CASE FOLDER``, or ``all FOLDER`` for each case in a folder with its
name.

A fit takes ten seconds to start, so the cases share two fits: one, and one that resumes from its checkpoint.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_DEDUP_LOGS": "0", "RAY_TRAIN_ENABLE_STATE_TRACKING": "0"}

import ray
import ray.train
import torch
from ray.train import Checkpoint
from ray.train.torch import TorchTrainer, prepare_data_loader, prepare_model
from torch import distributed
from torch.utils.data import DataLoader

from cachetool.loaders.torch import CacheDataset, EpochSampler, Loader
from tests.trainers.growing import BATCH, FIRST, FIXED, LAST, Record, fill, grow

CASES = ["grow", "resume", "resume-growing", "validation", "fields", "stop", "twice", "prepared"]


class Step:
    """A model and one training step with it."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model: Any = prepare_model(torch.nn.Linear(4, 1))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3)

    def __call__(self, batch: dict[str, Any]) -> None:
        loss = torch.nn.functional.mse_loss(self.model(batch["x"])[:, 0], batch["y"])
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()


def check(batch: dict[str, Any]) -> None:
    """Assert that the fields of each kind belong to the ids beside them."""
    for at, number in enumerate(batch["id"].tolist()):
        assert batch["__key__"][at] == f"scan{number}"
        assert batch["name"][at] == f"näme {number}"
        assert batch["blob"][at] == bytes([number % 256])
        assert torch.equal(batch["ragged"][at], torch.ones((number % 3, 2)))


def train(config: dict[str, Any]) -> None:
    """Run the cases one after another in each of the two workers, each with a state in the checkpoint."""
    rank = ray.train.get_context().get_world_rank()
    # The checkpoint of this run if Ray restarted its workers, otherwise that of the fit that this one resumes.
    checkpoint = ray.train.get_checkpoint() or config.get("saved")
    with tempfile.TemporaryDirectory() as place, contextlib.ExitStack() as stack:
        before = None if checkpoint is None else Path(stack.enter_context(checkpoint.as_directory()))
        for case, folder in config["cases"].items():
            if case == "prepared":
                prepared(Path(folder), rank)
                continue
            state = None if before is None else json.loads((before / f"{case}.json").read_text())
            state = one(case, Path(folder), rank, state=state)
            Path(place, f"{case}.json").write_text(json.dumps(state))
        ray.train.report({"rank": rank}, checkpoint=None if rank else Checkpoint.from_directory(place))


def one(case: str, folder: Path, rank: int, *, state: Any) -> Any:
    """Train on one cache. Return the state of the loader."""
    cache = folder / "cache"
    options: dict[str, Any] = {"batch_size": BATCH, "seed": 1, "fields": None if case == "fields" else FIXED}
    if case == "validation":
        options |= {"split": "train", "validation": 0.3}
    loader, step = Loader(cache, **options), Step()
    record, epochs = Record(loader), range({"fields": 1, "grow": 4, "validation": 4}.get(case, 2))
    if state is not None:
        loader.load_state_dict(state)
        epochs = range(loader.epoch, 4)
    stop = {"resume": 3, "resume-growing": 2, "stop": 2}.get(case) if state is None else None
    other = Loader(cache, **options | {"split": "validation"}) if case == "validation" else None
    validated = Record(other)
    for epoch in epochs:
        for at, batch in enumerate(loader, 1):
            step(batch)
            record.saw(epoch, batch["id"])
            if case == "fields":
                check(batch)
            elif at == 2 and rank == 0 and not case.startswith("resume"):
                grow(cache)
            if at == stop and epoch == epochs[-1]:
                break
        for batch in other or ():
            validated.saw(epoch, batch["id"])
        distributed.barrier()
    record.write(folder, rank, "before" if state is None and goes_on(case) else "record")
    state = loader.state_dict()
    if other is not None:
        validated.write(folder, rank, "validated")
        other.close()
    loader.close()
    distributed.barrier()
    if case == "resume-growing" and rank == 0:
        grow(cache, LAST)
    return state


def goes_on(case: str) -> bool:
    """Return True if the second fit resumes this case."""
    return case in ("resume", "resume-growing", "twice")


def prepared(folder: Path, rank: int) -> None:
    """Pass loaders to ``prepare_data_loader``, and record the results."""
    cache = folder / "cache"
    record: dict[str, Any] = {"errors": [], "epochs": {}}
    loader = Loader(cache, batch_size=BATCH, fields=FIXED)
    for add in (True, False):
        try:
            prepare_data_loader(loader, add_dist_sampler=add)  # type: ignore[arg-type]
        except AttributeError as error:
            record["errors"].append(str(error))
    loader.close()
    dataset = CacheDataset(cache, fields=FIXED, run="prepared")
    samplers: list[Any] = [EpochSampler(dataset, seed=1, rank=rank, world_size=2)]
    for at, (sampler, add) in enumerate([(samplers[0], True), (samplers[0], False)]):
        ready: Any = DataLoader(dataset, batch_size=BATCH, sampler=sampler, collate_fn=dataset.collate)
        ready = prepare_data_loader(ready, add_dist_sampler=add)
        record.setdefault("samplers", []).append(type(ready.sampler).__name__)
        for epoch in range(2):
            ids = [number for batch in ready for number in batch["id"].tolist()]
            record["epochs"][2 * at + epoch] = {"ids": ids, "passes": {}}
            distributed.barrier()
            if rank == 0:
                grow(cache)
            distributed.barrier()
    (folder / f"record-{rank}.json").write_text(json.dumps(record))


def main() -> None:
    """Run the case, or all of them."""
    case, folder = sys.argv[1], Path(sys.argv[2])
    cases = {case: folder} if case != "all" else {each: folder / each for each in CASES}
    for each, place in cases.items():
        fill(place / "cache", {"resume": LAST, "resume-growing": 144}.get(each, FIRST))

    def fit(cases: dict[str, Path], **config: Any) -> Any:
        return TorchTrainer(
            train,
            train_loop_config={"cases": {each: str(place) for each, place in cases.items()}, **config},
            scaling_config=ray.train.ScalingConfig(num_workers=2, resources_per_worker={"CPU": 1}),
            run_config=ray.train.RunConfig(storage_path=str(folder / "results")),
        ).fit()

    ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    saved = fit(cases).checkpoint
    if again := {each: place for each, place in cases.items() if goes_on(each)}:
        fit(again, saved=saved)
    ray.shutdown()


if __name__ == "__main__":
    main()
