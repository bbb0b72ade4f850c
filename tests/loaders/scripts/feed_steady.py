"""Runs a loader over many epochs with few descriptors, and prints what grew, as one line of JSON.

``feed_steady.py CACHE WORKERS DESCRIPTORS``
"""

from __future__ import annotations

import json
import os
import resource
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3]))

from cachetool.loaders.numpy import Loader

EPOCHS = 50


def measured(pids: list[int]) -> dict[str, int]:
    """Return memory in KiB, descriptors, threads and maps of these processes together."""
    found = {"memory": 0, "descriptors": 0, "threads": 0, "maps": 0}
    for pid in pids:
        status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
        found["memory"] += sum(int(status[name].split()[0]) for name in ("RssAnon", "RssShmem"))
        found["threads"] += int(status["Threads"])
        found["descriptors"] += len(os.listdir(f"/proc/{pid}/fd"))
        found["maps"] += len(Path(f"/proc/{pid}/maps").read_text().splitlines())
    return found


def descendants(pid: int) -> list[int]:
    """Return all descendants of a process."""
    text = " ".join(path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/children"))
    return [each for child in map(int, text.split()) for each in (child, *descendants(child))]


def main(root: str, workers: int, descriptors: int) -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (descriptors, descriptors))
    with Loader(root, batch_size=4, workers=workers) as loader:
        read = set()
        for epoch in range(EPOCHS):
            kept = []
            for step, batch in enumerate(loader):
                read.update(batch["number"].tolist())
                if step % 5 == 0:
                    kept.append(batch)
                if epoch % 7 == 3 and step == 9:
                    break
            del batch, kept
            if epoch == 9:  # by then all slots and buffers have reached their size
                pids = [os.getpid(), *descendants(os.getpid())]
                before = measured(pids)
        after = measured(pids)
    assert len(pids) == 1 + (workers + 1 if workers else 0)  # the feeders, and the process that keeps them
    print(json.dumps({"read": len(read), "grown": {name: after[name] - before[name] for name in before}}))


main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
