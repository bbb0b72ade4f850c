"""The causes of waits for data: their names, what each means, and what helps. One list for reports, commands and docs.

A wait is a moment at which a training program asked for a batch that was not ready. Its cause is the step in which that
batch was late. A cause is named only for waits; what delays no batch is no cause.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from cachetool.core.units import format_size

__all__ = ["CAUSES", "LEAST", "PULL_CAUSES", "Cause", "main_cause", "pull_sentence", "sentence"]


class Cause(NamedTuple):
    """A cause of waits."""

    late: str
    """The thing that was late, after "waited for"."""
    helps: str
    """Advice, as an instruction."""


CAUSES: Mapping[str, Cause] = {
    "samples": Cause("samples that a pull had not fetched yet", "look at the pull: cachetool stats"),
    "start": Cause("the start of feeders and epochs", "use longer epochs, and keep the loader open between them"),
    "disk": Cause("a slow disk", "use a faster disk for the cache, --compression, or shuffle='window'"),
    "page_cache": Cause(
        "samples that were on the disk but not in memory",
        "a second epoch is faster if the cache fits into memory; otherwise use shuffle='window' or more workers=",
    ),
    "decode": Cause("the decoding of fields", "use more workers=, smaller images, or pull them decoded"),
    "transform": Cause("the transform", "use more workers=, or do less in transform="),
    "feeders": Cause("feeders that copy batches, while processors were idle", "use more workers="),
    "memory": Cause("copies at the speed of memory", "nothing was late: training takes batches faster than memory"),
    "processor": Cause("a processor for the feeders", "use fewer workers= or threads, or more processors"),
    "gil": Cause(
        "the training process, which did not take a ready batch",
        "look for threads that keep Python's GIL; they slow down training, too",
    ),
    "slots": Cause("memory for batches, because the program keeps many", "keep fewer batches, or copies of them"),
}
"""The causes by name, in the order of a batch's way."""

PULL_CAUSES: Mapping[str, Cause] = {
    "store": Cause("the store to answer", "use more --workers, or a store that is nearer"),
    "throttling": Cause("a store that asked to slow down", "use fewer --workers or --max-rate, or raise its limits"),
    "decode": Cause("the decoding of files", "use more --workers, up to the number of processors"),
    "write": Cause("the writing of shards", "use a faster disk for the cache"),
    "commit": Cause("fsync and the catalog", "use larger shards (--shard-size), or a faster disk"),
    "room": Cause("room under the cap", "raise --max-size"),
    "readers": Cause("readers to end, which still use the shards that go", "use shorter epochs, or raise --max-size"),
}
"""The steps on which a pull spends its time, by name."""

LEAST = 0.02
"""Least part of an epoch's time that waits must take; below, nothing is late."""


def main_cause(causes: Mapping[str, float], seconds: float) -> str | None:
    """Return the cause of most seconds of waits; None if waits took less than :data:`LEAST` of ``seconds``."""
    if not causes or sum(causes.values()) < LEAST * seconds:
        return None
    return max(causes, key=lambda name: causes[name])


def pull_sentence(causes: Mapping[str, float], nbytes: int, seconds: float) -> str:
    """Return one sentence about a pull that brought ``nbytes`` in so many ``seconds``: its rate, what takes most of its
    time, and what helps."""
    rate = f"{format_size(int(nbytes / seconds))}/s" if seconds > 0 else "nothing yet"
    total = sum(causes.values())
    if not total:
        return rate
    cause = max(causes, key=lambda name: causes[name])
    about = PULL_CAUSES[cause]
    return f"{rate}, {100 * causes[cause] / total:.0f} % of the time for {about.late}; {about.helps}"


def sentence(causes: Mapping[str, float], seconds: float) -> str:
    """Return one sentence about the waits of an epoch of so many ``seconds``: share, main cause and what helps."""
    waited = sum(causes.values())
    share = f"{100 * min(1.0, waited / seconds):.0f} %" if seconds else "0 %"
    cause = main_cause(causes, seconds)
    if cause is None:
        return f"nothing was late: waits took {share} of the time"
    of_cause = 100 * causes[cause] / waited
    about = CAUSES[cause]
    return f"waits took {share} of the time, {of_cause:.0f} % of them for {about.late}; {about.helps}"
