"""Taking out of a measurement how long a halted processor takes to run again."""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def awake() -> Iterator[bool]:
    """Keep idle processors from halting meanwhile, where that can be asked for (Linux, root): gives whether it was.

    A thread that is given the GIL was asleep, and so may its processor have been. What it takes to run that again
    counts neither as running nor, on Linux 6, as waiting for a processor; on a virtual machine, whose host must do it,
    it is 20 to 40 microseconds. By the file of Linux's power management for this (``PM QoS``), as cyclictest does; what
    was asked for ends with the process at the latest.
    """
    with contextlib.ExitStack() as stack:
        polls = False
        with contextlib.suppress(OSError):
            if Path("/sys/devices/system/cpu/cpu0/cpuidle/state0/name").read_text().strip() == "POLL":
                file = stack.enter_context(open("/dev/cpu_dma_latency", "r+b", buffering=0))
                polls = file.write(struct.pack("i", 0)) == 4  # microseconds that waking up may take
        yield polls
