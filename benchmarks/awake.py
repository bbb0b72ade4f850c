"""Excluding from a measurement the time that a halted processor needs to run again."""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def awake() -> Iterator[bool]:
    """Keep idle processors from halting inside the ``with`` block. Yield True if the kernel allowed it (Linux, root).

    A thread that receives the GIL was asleep, so its processor may have halted. The time to wake the processor
    counts neither as running nor, on Linux 6, as waiting for a processor. On a virtual machine, whose host wakes the
    processor, it takes 20 to 40 microseconds. The function uses the kernel's power management file (``PM QoS``), as
    cyclictest does. The request ends with the process at the latest.
    """
    with contextlib.ExitStack() as stack:
        polls = False
        with contextlib.suppress(OSError):
            if Path("/sys/devices/system/cpu/cpu0/cpuidle/state0/name").read_text().strip() == "POLL":
                file = stack.enter_context(open("/dev/cpu_dma_latency", "r+b", buffering=0))
                polls = file.write(struct.pack("i", 0)) == 4  # longest allowed wake-up time in microseconds
        yield polls
