"""A training script that is killed in the middle of an epoch: ``left_epoch.py SOURCE CACHE`` prints the state of its
loader as a line of JSON, and waits.
"""

import json
import sys

import cachetool
from cachetool.loaders.numpy import Loader

source, root = sys.argv[1:]
cache = cachetool.open_cache(root)
loader = Loader(cache, batch_size=8, workers=1, seed=0)
background = cachetool.BackgroundPull(cache, source, shard_size="20kB")
for _ in loader:  # the pull needs space, and gets it from the next epoch
    pass
batches = iter(loader)
next(batches)
print(json.dumps(loader.state_dict()), flush=True)
sys.stdin.read()
