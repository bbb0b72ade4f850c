"""What tests of loaders ask the kernel about processes."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from pathlib import Path


def children() -> list[int]:
    """Feeders of this process, those of each loader together; a leader is the last of them."""
    parents = {}
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError):
            pid = int(entry.name)
            if b"loaders.feed.feeder" in (entry / "cmdline").read_bytes():
                parents[pid] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
    keepers = sorted(pid for pid, parent in parents.items() if parent == os.getpid())
    return [pid for keeper in keepers for pid, parent in sorted(parents.items()) if parent == keeper]


def until(condition: Callable[[], object], seconds: float = 20.0) -> None:
    """Wait until a condition holds; for what happens in another process."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.01)


def alive(pid: int) -> bool:
    """Whether a process is there and no zombie: with none of its threads, the last of which lets go of its locks."""
    with contextlib.suppress(OSError):
        state, *others = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return state != "Z" or int(others[16]) > 1
    return False
