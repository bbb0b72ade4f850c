"""Accelerate divides the samples of a ``DataLoader`` among processes; an :class:`EpochSampler` can do that already.

::

    EpochSampler(rank=0, world_size=2)    every second sample
    BatchSamplerShard(num_processes=2)    every second batch of those: half of the samples are never trained

``accelerator.prepare(DataLoader(dataset, sampler=EpochSampler(dataset)))`` wraps the sampler without an error, so only
the sampler can see it, when it is asked for its first index.
"""

from __future__ import annotations

import sys

from cachetool.core.errors import UsageError
from cachetool.loaders.snapshots.waiting import say

__all__ = ["check_sharded_once"]

_MODULE = "accelerate.data_loader"
_DIVIDERS = ("BatchSamplerShard", "DataLoaderDispatcher")
"""Classes of that module that give each process a part of what the sampler returns."""


def check_sharded_once(*, rank: int, world_size: int, run: str | None) -> bool:
    """Check that the caller, a sampler for process ``rank`` of ``world_size``, is not divided a second time.

    Called when the sampler is asked for its first index. Prints one line to stderr on rank 0 if it is divided twice,
    and returns whether it did. Raises :class:`UsageError` for a sampler of all samples that Accelerate divides while
    the dataset has no ``run``: each process would then divide a snapshot of its own.
    """
    divider = _divider()
    if divider is None:
        return False
    if world_size == 1:
        # A dispatcher reads on one process, for all of them.
        if run is None and divider != "DataLoaderDispatcher":
            raise UsageError("several processes need run=NAME on their datasets, the same on each, to share snapshots")
        return False
    if rank:
        return False  # rank 0 prints it for all
    say(
        f"Accelerate divides the samples of this EpochSampler, rank {rank} of {world_size}, among the processes a"
        " second time, so many samples are never trained; use EpochSampler(dataset, rank=0, world_size=1)"
    )
    return True


def _divider() -> str | None:
    """Return the class of the object of Accelerate that asks for the next index and divides it among processes.

    The call stack says so. Neither the environment nor ``PartialState`` does: a program with Accelerate also has
    DataLoaders that it does not prepare, and there a sampler with a rank is right. Accelerate is looked up in
    ``sys.modules``, because importing it takes seconds, and a program without it has no such frames.
    """
    if _MODULE not in sys.modules:
        return None
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_globals.get("__name__") == _MODULE:
            owner = frame.f_locals.get("self")
            # The HF Trainer sets num_processes=1 on a BatchSamplerShard that is not to divide.
            state = getattr(owner, "state", None)  # of a DataLoaderDispatcher
            processes = getattr(owner, "num_processes", getattr(state, "num_processes", 1))
            if type(owner).__name__ in _DIVIDERS and processes > 1:
                return type(owner).__name__
        frame = frame.f_back  # type: ignore[assignment]
    return None
