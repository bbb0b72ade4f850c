"""How a feeder spends its time, step by step, and what follows for a wait of the training process.

::

    feeder            | find | read: copying, disk, ... | decode | transform |        idle: no slot, no plan
                      '--- sums of each step, written into the ring before each batch is handed over ---'
    training process           |------- wait -------|
                               sums                 sums      their difference says what the batch was late in

The feeder adds up all its steps, and the training process looks at the sums when it begins to wait and when the wait
ends. So a batch that is not waited for costs the training process nothing, and the feeder two microseconds.

While a feeder reads, the thread's own processor time is copying. What is left was spent waiting: for the disk if pages
were read in meanwhile, otherwise for a processor.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

try:
    import resource
except ModuleNotFoundError:  # not on Windows
    resource = None  # type: ignore[assignment]

__all__ = ["DECODE", "FIND", "START", "STEPS", "TRANSFORM", "BatchTimes", "divided"]

STEPS = ("start", "find", "copy", "disk", "page_cache", "processor", "decode", "transform")
"""The steps of a feeder; those that are causes have the names of :data:`cachetool.core.causes.CAUSES`."""
START, FIND, COPY, DISK, PAGES, PROCESSOR, DECODE, TRANSFORM = range(len(STEPS))

_BLOCKED = 100_000
"""Nanoseconds without the processor that are looked at: below, looking takes as long."""
_SLOW = 2_000_000
"""Nanoseconds for each read of the disk, from which on the disk is slow. Flash memory takes 0.1 ms, a rotating disk
8 ms."""
_clock, _processor = time.monotonic_ns, time.thread_time_ns
_OF_THREAD = getattr(resource, "RUSAGE_THREAD", None)


class BatchTimes:
    """The sums of a feeder, in nanoseconds, in the order of :data:`STEPS`."""

    __slots__ = ("_at", "_reads", "_used", "spent")

    def __init__(self) -> None:
        self.spent = [0] * len(STEPS)
        self._at, self._used, self._reads = _clock(), 0, _reads()

    def resumed(self) -> None:
        """Leave out the time since the last call: the feeder had nothing to do."""
        self._at = _clock()

    def ended(self, step: int) -> None:
        """Add the time since the last call to a step."""
        now = _clock()
        self.spent[step] += now - self._at
        self._at = now

    def reading(self) -> None:
        """Begin to read."""
        self._used = _processor()

    def read(self) -> None:
        """Add the time since the last call, in which the feeder read, to the steps of reading."""
        now, used = _clock(), _processor() - self._used
        blocked = now - self._at - used
        self._at = now
        if blocked < _BLOCKED:
            self.spent[COPY] += used + max(0, blocked)
            return
        before, self._reads = self._reads, _reads()
        new = self._reads[0] - before[0]
        step = PROCESSOR if not new else DISK if blocked > _SLOW * new else PAGES
        # The kernel's own work of reading pages in is a part of it. Up to here little else was the kernel's.
        kernel = min(used, self._reads[1] - before[1]) if new else 0
        self.spent[COPY] += used - kernel
        self.spent[step] += blocked + kernel


def _reads() -> tuple[int, int]:
    """Return how often this thread has waited for the disk so far, and the nanoseconds that it spent in the kernel."""
    if _OF_THREAD is None:
        return 0, 0
    usage = resource.getrusage(_OF_THREAD)
    return usage.ru_majflt + usage.ru_inblock // _BLOCKS_OF_A_READ, int(1e9 * usage.ru_stime)


# ru_inblock counts 512 bytes. The kernel reads at least a page at a time, mostly much more.
_BLOCKS_OF_A_READ = 256


def divided(before: Sequence[int], after: Sequence[int], seconds: float) -> dict[str, float]:
    """Return the seconds of a wait by step: in the ratio of what a feeder spent between two looks at its sums.

    The steps took longer than the wait if the feeder began the batch before it. They took less if the feeder was idle:
    then the rest is missing in the result.
    """
    spent = {name: b - a for name, a, b in zip(STEPS, before, after, strict=True) if b > a}
    total = sum(spent.values()) / 1e9
    scale = min(1.0, seconds / total) if total > 0 else 0.0
    return {name: scale * nanoseconds / 1e9 for name, nanoseconds in spent.items()}
