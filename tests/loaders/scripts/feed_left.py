"""Prints what remains after each way in which iterating a loader ends, as one line of JSON. Arguments: cache, workers,
and the loader: ``numpy`` or ``torch``.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from cachetool import CacheToolError
from cachetool.cache import CacheDir, open_cache
from tests.loaders.numbered import leases
from tests.loaders.processes import alive, children

root, workers = sys.argv[1], int(sys.argv[2])
Loader = importlib.import_module(f"cachetool.loaders.{sys.argv[3]}").Loader


def fails(sample: dict[str, Any]) -> dict[str, Any]:
    if sample["number"] == 30:
        raise ZeroDivisionError("no such number")
    return {"number": sample["number"]}


def loader(**options: Any) -> Any:
    return Loader(root, batch_size=2, workers=workers, **options)


def exhausted() -> None:
    with loader() as opened:
        for _ in range(2):
            list(opened)


def abandoned() -> None:
    batches = iter(loader())
    next(batches)


def broken_off() -> None:
    with loader() as opened:
        for _ in opened:
            break


def failed() -> None:
    with loader(transform=fails) as opened, contextlib.suppress(CacheToolError):
        list(opened)
        raise AssertionError


def failed_and_forgotten() -> None:
    with contextlib.suppress(CacheToolError):
        list(loader(transform=fails))
        raise AssertionError


def killed(number: int) -> None:
    with loader(prefetch=1) as opened:
        batches = iter(opened)
        next(batches)
        feeders = children()
        os.kill(feeders[number], signal.SIGKILL)
        with contextlib.suppress(CacheToolError):
            list(batches)
            raise AssertionError
    assert not any(map(alive, feeders))


def killed_leader() -> None:
    killed(-1)


def killed_follower() -> None:
    killed(0)


def measured(cache: CacheDir) -> dict[str, int]:
    """Return processes (and zombies), descriptors, threads, maps and segments of shared memory, and leases."""
    tasks = _children("self")
    files = [line.split(maxsplit=5)[5] for line in Path("/proc/self/maps").read_text().splitlines() if "/" in line]
    shared = [*files, *_targets()]
    return {
        "processes": sum(1 + sum(map(len, _children(pid))) for task in tasks for pid in task),
        "threads": len(tasks),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "maps": sum(name.startswith(str(Path(root).resolve())) for name in files),
        "segments": sum(name.startswith(("/memfd:", "/dev/shm/", "/dev/zero")) for name in shared),
        "leases": len(leases(cache)),
    }


def _children(pid: str) -> list[list[str]]:
    """Return the child processes that each thread of a process started."""
    tasks = []
    for task in Path("/proc").glob(f"{pid}/task/*"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # a process that has ended meanwhile
            tasks.append((task / "children").read_text().split())
    return tasks


def _targets() -> Iterator[str]:
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            yield os.readlink(f"/proc/self/fd/{name}")


def main() -> None:
    ends: list[Callable[[], None]] = [exhausted, abandoned, broken_off, failed, failed_and_forgotten]
    ends += [killed_leader, killed_follower] if workers else []
    out: dict[str, Any] = {}
    with open_cache(root) as cache:
        for end in (exhausted, failed):
            end()  # imports and files that are opened once
        measured(cache)
        for end in ends:
            before = measured(cache)
            end()
            deadline = time.monotonic() + 20
            while (after := measured(cache)) != before and time.monotonic() < deadline:
                time.sleep(0.01)  # a thread or a process that is about to end
            out[end.__name__] = {name: after[name] - before[name] for name in before}
        with loader() as opened:
            batches = iter(opened)
            next(batches)
            out["while it runs"] = {name: value - before[name] for name, value in measured(cache).items()}
    print(json.dumps(out))


main()
