"""Several iterators over one iterable-style dataset at once. ``torch_twice.py METHOD ROOT``, ROOT a cache."""

from __future__ import annotations

import json
import sys
from typing import Any

from torch.utils.data import DataLoader

from cachetool.loaders.torch import CacheIterableDataset


def main() -> None:
    method, root = sys.argv[1:]
    dataset = CacheIterableDataset(root, batch_size=4, fields=["number"])
    options: dict[str, Any] = {"batch_size": None, "num_workers": 2, "multiprocessing_context": method}
    loaders = [DataLoader(dataset, **options) for _ in range(2)]
    found: list[list[int]] = []
    for pair in ([loaders[0], loaders[0]], loaders):
        both: tuple[list[int], list[int]] = [], []
        for batches in zip(*pair, strict=True):
            for numbers, batch in zip(both, batches, strict=True):
                numbers += batch["number"].tolist()
        found += both
    whole: list[int] = []
    for step, batch in enumerate(loaders[0]):
        whole += batch["number"].tolist()
        if step == 3:
            next(iter(loaders[0]))  # a look at an example
    json.dump([sorted(numbers) for numbers in (*found, whole)], sys.stdout)


if __name__ == "__main__":
    main()
