"""Reads shards outside any cache with the loader for PyTorch, and prints the words of two epochs. Arguments: their
paths.
"""

from __future__ import annotations

import json
import sys

import torch

from cachetool.loaders.torch import Loader

with Loader(sys.argv[1:], batch_size=8, fields=["scalar int32", "cube", "words"], workers=2) as loader:
    count = len(loader)
    batches = [list(loader) for _ in range(2)]
assert count == len(batches[0])
assert all(isinstance(batch["scalar int32"], torch.Tensor) for epoch in batches for batch in epoch)
print(json.dumps([sorted(word for batch in epoch for word in batch["words"]) for epoch in batches]))
