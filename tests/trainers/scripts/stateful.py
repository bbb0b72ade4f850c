"""torchdata's StatefulDataLoader over a CacheDataset and an EpochSampler: ``CASE FOLDER WORKERS``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from torchdata.stateful_dataloader import StatefulDataLoader

from cachetool.loaders.torch import CacheDataset, EpochSampler
from tests.trainers.growing import BATCH, FIRST, FIXED, LAST, fill, grow


class Record:
    """A record like :class:`tests.trainers.growing.Record`, for a dataset whose snapshot is that of the epoch."""

    def __init__(self, dataset: CacheDataset) -> None:
        self.dataset = dataset
        self.epochs: dict[int, dict[str, Any]] = {}

    def saw(self, epoch: int, ids: Any) -> None:
        """Record samples that were trained in this epoch."""
        row = self.epochs.setdefault(epoch, {"ids": [], "passes": {}})
        row["ids"] += ids.tolist()
        row["passes"].setdefault(str(epoch), {"snapshot": len(self.dataset), "ids": []})["ids"] += ids.tolist()

    def write(self, folder: Path) -> None:
        """Write the record beside the cache."""
        import json

        (folder / "record-0.json").write_text(json.dumps({"epochs": self.epochs}))


def made(cache: Path, workers: int, *, fields: list[str] | None = FIXED, epoch: int = 0) -> tuple[CacheDataset, Any]:
    """Return a dataset and its loader. The next epoch has the number ``epoch``."""
    dataset = CacheDataset(cache, fields=fields)
    sampler = EpochSampler(dataset, seed=1)
    sampler.set_epoch(epoch)
    loader: Any = StatefulDataLoader(
        dataset,
        batch_size=BATCH,
        sampler=sampler,
        num_workers=workers,
        collate_fn=dataset.collate,
        persistent_workers=workers > 0,
    )
    return dataset, loader


def check(batch: dict[str, Any]) -> None:
    """Assert that the fields of each kind belong to the ids beside them."""
    for at, number in enumerate(batch["id"].tolist()):
        assert batch["__key__"][at] == f"scan{number}"
        assert batch["name"][at] == f"näme {number}"
        assert batch["blob"][at] == bytes([number % 256])
        assert torch.equal(batch["ragged"][at], torch.ones((number % 3, 2)))


def resumed(case: str, cache: Path, workers: int) -> Record:
    """Train epoch 0 and three batches of epoch 1. Then another loader resumes by the state, or by the state and the
    epoch's number.
    """
    dataset, loader = made(cache, workers)
    record = Record(dataset)
    state: Any = None
    for epoch in range(2):
        for step, batch in enumerate(loader, 1):
            record.saw(epoch, batch["id"])
            if epoch == 1 and step == 3:
                state = loader.state_dict()
                break
    del loader
    dataset.close()
    if case == "resume-growing":
        grow(cache, LAST)
    dataset, loader = made(cache, workers, epoch=0 if case == "resume-number" else 1)
    loader.load_state_dict(state)
    record.dataset = dataset
    for epoch in (1, 2):
        for batch in loader:
            record.saw(epoch, batch["id"])
    return record


def main() -> None:
    """Run the case."""
    case, folder, workers = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
    cache = folder / "cache"
    fill(cache, {"resume-growing": 144}.get(case, LAST if case.startswith("resume") else FIRST))
    if case.startswith("resume"):
        resumed(case, cache, workers).write(folder)
        return
    dataset, loader = made(cache, workers, fields=None if case == "fields" else FIXED)
    record = Record(dataset)
    for run in range(2 if case == "twice" else 1):
        for epoch in range(2 * run, 2 * run + 2) if case == "twice" else range(4):
            for step, batch in enumerate(loader, 1):
                record.saw(epoch, batch["id"])
                if case == "fields":
                    check(batch)
                if step == 2 and case != "fields":
                    grow(cache)
                if case == "stop" and epoch == 1 and step == 3:
                    break
    record.write(folder)


if __name__ == "__main__":
    main()
