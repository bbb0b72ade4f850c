"""A training script without a main guard: ``background.py WHAT SOURCE CACHE``. It prints JSON lines and ends with
stdin.
"""

import json
import os
import sys
import threading

import cachetool
from cachetool.loaders.snapshots.follow import subscribe

what, source, root = sys.argv[1:]


def say(**values: object) -> None:
    print(json.dumps(values), flush=True)


cache = cachetool.open_cache(root, max_size="3MB")
background = cachetool.BackgroundPull(cache, source, seed=3, shard_size="20kB")
if what == "fork":
    # A worker of the trainer: it has copies of all objects, outlives the trainer, and closes its inherited copies.
    pid = os.fork()
    if pid == 0:
        background.close()
        while os.getppid() != 1 and not os.read(0, 1):
            pass
        os._exit(0)
first = subscribe(cache, dataset=None, run=None).newest()
say(samples=sum(part.samples for part in first.parts), threads=threading.active_count(), pid=background.progress().pid)
for line in sys.stdin:
    if line.strip() == "close":
        background.close()
    say(**background.progress().as_dict())
