"""The lengths that ``len()`` of a loader returned, and the one line about a trainer that kept an old one.

A trainer that asks for the length once, and then takes so many batches of every epoch, trains a growing cache only in
part, without an error anywhere. The loader sees this: an epoch is left exactly where another epoch would have ended.
"""

from __future__ import annotations

import os

from cachetool.loaders.epoch import Progress
from cachetool.loaders.snapshots.waiting import say

__all__ = ["Lengths"]

_KEPT = 64
"""Epochs whose lengths are remembered."""


class Lengths:
    """The lengths told by one loader, and whether its present epoch is left at one of another epoch."""

    def __init__(self) -> None:
        self._told: dict[int, int] = {}
        self._warned = False
        self.progress: Progress | None = None
        """Progress of the epoch that was begun last. The loader has it too; but this object is checked when the loader
        is collected, so it must not refer to the loader."""

    def tell(self, epoch: int, length: int) -> int:
        """Note that ``len()`` returned ``length`` for this epoch, and return it."""
        self._told.pop(epoch, None)  # so that the epochs asked for last stay
        self._told[epoch] = length
        if len(self._told) > _KEPT:
            del self._told[next(iter(self._told))]
        return length

    def forget(self) -> None:
        """Forget all lengths. An integration that asks for the length of each epoch calls this before, because an epoch
        that is left at an older length is then left on purpose: by early stopping, or at a number of steps."""
        self._told.clear()

    def check(self) -> None:
        """Say once on stderr, on rank 0, that the epoch begun last was left at the length of another epoch.

        Called when the next epoch begins, when the loader is closed, and at the latest when it is collected or the
        process ends.
        """
        progress, self.progress = self.progress, None
        if progress is None or self._warned or not progress.left or progress.feed.pid != os.getpid():
            return
        if progress.begun.steps.rank:
            return  # rank 0 says it for all
        epoch, reached = progress.begun.epoch, progress.before + progress.step
        others = [number for number, length in self._told.items() if length == reached and number != epoch]
        if not others or self._told.get(epoch) == reached:
            return
        self._warned = True
        say(
            f"epoch {epoch} was left after {reached} of {progress.before + progress.steps} batches, the length of epoch"
            f" {others[-1]}: the trainer kept that length, so what came to the cache since is not trained; use"
            " loader.epochs_of(steps=N), or the integration for this trainer in docs/trainers.md"
        )
