"""What the numbers mean: which part is the slowest, and what to change. Pure: numbers in, sentences out."""

from __future__ import annotations

from dataclasses import dataclass

from cachetool.core.units import format_size

__all__ = ["Found", "advice"]

_FASTER = 1.25
"""Less is no difference on a machine that does other work."""


@dataclass(frozen=True)
class Found:
    """What was measured. Rates are MB/s."""

    whole: int
    """Bytes of all the samples, of which some were measured."""
    available: int
    """Bytes of memory that the page cache may take; 0 when unknown."""
    mean: int
    """Bytes of a sample."""
    batch: int
    """Samples of a batch."""
    memory: float
    in_order: float
    at_random: float
    own: str
    """The format that the samples are in, or the fastest."""
    warm: dict[str, float]
    busy: dict[str, float]
    cold: dict[str, float]
    window: float | None
    """Cold, with ``shuffle="window"``; None where it was not tried."""
    by_workers: dict[int, float]
    """Warm, by the number of feeders."""
    workers: int
    compressed: bool = False


def advice(found: Found) -> str:
    """One sentence: what sets the pace, and what would change it."""
    fits = not found.available or found.whole < 0.8 * found.available
    warm, cold = found.warm[found.own], found.cold[found.own]
    if not fits:
        return _disk(found, cold)
    fastest = max(found.warm, key=lambda name: found.warm[name])
    pace = f"All {format_size(found.whole)} fit into memory ({format_size(found.available)} left), so from the second"
    pace += f" epoch on batches come from there, at {warm:,.0f} MB/s"
    best = max(found.by_workers, key=lambda count: found.by_workers[count])
    if found.by_workers[best] > _FASTER * found.by_workers.get(found.workers, warm):
        return f"{pace}; the feeders set the pace: workers={best} gives {found.by_workers[best]:,.0f} MB/s."
    if found.warm[fastest] > _FASTER * warm:
        change = f"cachetool convert --to {fastest}"
        return f"{pace}; the format sets the pace: {fastest} gives {found.warm[fastest]:,.0f} MB/s ({change})."
    step = found.batch * found.mean / warm / 1e3
    return (
        f"{pace}: a training step of {step:.2g} ms or more for {found.batch} samples sets the pace and never waits;"
        " nothing needs to change."
    )


def _disk(found: Found, cold: float) -> str:
    pace = f"The {format_size(found.whole)} of samples do not fit into the {format_size(found.available)} of memory"
    pace += f" left, so epochs read the disk, at {cold:,.0f} MB/s"
    if found.window is not None and found.window > _FASTER * cold:
        better = f'shuffle="window" gives {found.window:,.0f} MB/s'
        return f"{pace}; samples of {format_size(found.mean)} one by one are slow: {better}."
    fastest = max(found.cold, key=lambda name: found.cold[name])
    if found.cold[fastest] > _FASTER * cold:
        return (
            f"{pace}; the format sets the pace: {fastest} gives {found.cold[fastest]:,.0f} MB/s"
            f" (cachetool convert --to {fastest})."
        )
    limit = max(found.at_random, found.in_order)
    if cold > 0.7 * found.at_random:
        return (
            f"{pace}, {100 * cold / limit:.0f} % of what it gives: the disk sets the pace; a cap below"
            f" {format_size(int(0.8 * found.available))} (--max-size) would keep the epochs in memory."
        )
    more = f"more workers keep more requests in flight (workers={found.workers * 2})"
    return f"{pace}, of {limit:,.0f} MB/s that it gives; {more}."
