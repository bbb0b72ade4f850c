"""Questions of the loader tests to the kernel about processes."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from pathlib import Path


def children() -> list[int]:
    """Return the feeders of this process, grouped by loader, without their keepers. The leader is the last feeder of a
    loader.
    """
    parents = {}
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError):
            pid = int(entry.name)
            if b"loaders.feed.feeder" in (entry / "cmdline").read_bytes():
                parents[pid] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
    keepers = sorted(pid for pid, parent in parents.items() if parent == os.getpid())
    return [pid for keeper in keepers for pid, parent in sorted(parents.items()) if parent == keeper]


def until(condition: Callable[[], object], seconds: float = 20.0) -> None:
    """Wait until a condition holds that another process brings about."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.01)


def alive(pid: int) -> bool:
    """Return True until a process has ended with all its threads; its last thread releases its locks."""
    with contextlib.suppress(OSError):
        state, *others = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return state != "Z" or int(others[16]) > 1
    return False
