"""Runs one epoch of all samples, and one of a side of a split, with ``make_dataset``."""

import sys

from cachetool.loaders.tensorflow import make_dataset

for _ in make_dataset(sys.argv[1], batch_size=8):
    pass
for _ in make_dataset(sys.argv[1], batch_size=6, split="train", validation=0.3):
    pass
print("{}")
