"""Prints the samples of a cache of TFRecord shards that ``make_dataset`` selects with ``where=``."""

import json
import sys

from cachetool.loaders.tensorflow import make_dataset


def numbers(dataset):
    return sorted(int(number) for batch in dataset for number in batch["number"].numpy())


cache = sys.argv[1]
out = {}
out["numbers"] = numbers(make_dataset(cache, batch_size=16, where={"label": {0, 1}}))
out["side"] = numbers(make_dataset(cache, batch_size=16, split="train", validation=0.4))
out["both"] = numbers(make_dataset(cache, batch_size=16, split="train", validation=0.4, where={"word": "cat"}))
try:
    for _ in make_dataset(cache, batch_size=16, where={"label": 100}, repeat=True):
        pass
except Exception as error:  # noqa: BLE001 - TensorFlow wraps the cache's error
    out["nothing"] = str(error)
print(json.dumps(out))
