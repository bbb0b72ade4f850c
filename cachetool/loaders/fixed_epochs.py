"""Epochs of a fixed number of steps over a loader whose own epochs grow.

::

    passes of the loader   |----- 6 -----|-------- 9 --------|----------- 12 -----------|
    epochs of 8 steps      |------- 8 -------|------- 8 -------|------- 8 -------|-- ...

A *pass* here is one walk through one snapshot. Trainers that keep the first length for all epochs, and learning-rate
schedules that count steps, are correct with epochs of one length. Each pass still takes a snapshot of its own.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Generic, NoReturn, TypeVar

from cachetool.core.closing import Closing
from cachetool.core.errors import UsageError
from cachetool.core.units import parse_whole
from cachetool.loaders.epoch import Progress
from cachetool.loaders.snapshots.resume import STATE, is_whole, require_state
from cachetool.loaders.waits import Report

if TYPE_CHECKING:
    from cachetool.loaders.loader import BaseLoader

__all__ = ["FixedEpochs", "require_one_epoch", "wait_metrics"]

T = TypeVar("T")


class FixedEpochs(Closing, Generic[T]):
    """The batches of a loader in epochs of a fixed number of steps; made by ``loader.epochs_of(steps=N)``.

    A ``break`` ends an epoch, and the next epoch continues with the batch after it, so no sample of a pass is left out.

    Args:
        loader: The loader whose passes are read one after another.
        steps: Number of batches in each epoch, 1 or more.

    Raises:
        UsageError: ``steps`` is not a whole number of 1 or more.
    """

    def __init__(self, loader: BaseLoader[T], *, steps: int) -> None:
        self.loader, self._steps = loader, parse_whole(steps, what="steps=", least=1)
        self._pass: Iterator[T] | None = None
        self._progress: Progress | None = None
        """Progress of the pass that is under way."""
        self._begin: Callable[[], Iterator[T]] = lambda: iter(loader)
        self._how: object = None
        self._at = 0
        """Number of batches of the present epoch that were yielded."""
        self._newest: object = None
        """Mark of the iterator that was made last; older iterators end with an error."""
        self._resumed = False

    @property
    def batch_size(self) -> int:
        """Most samples in one batch of one rank."""
        return self.loader.batch_size

    @property
    def drop_last(self) -> bool:
        """True if every batch has exactly ``batch_size`` samples."""
        return self.loader.drop_last

    def __len__(self) -> int:
        """Return the number of batches of every epoch."""
        return self._steps

    def __getitem__(self, index: object) -> NoReturn:
        """Raise :class:`UsageError`, because this is not a dataset: a ``DataLoader`` would ask for single samples."""
        raise UsageError(
            "epochs_of() returns batches: iterate it, or pass it to the trainer directly, not inside a DataLoader;"
            " docs/README.md lists a page for each trainer"
        )

    def __iter__(self) -> Iterator[T]:
        """Begin an epoch; after :meth:`load_state_dict` continue with the rest of the saved epoch."""
        # The function refers to the loader and not to self. A reference to self would be a cycle, so self and its
        # feeders would live until the garbage collector runs.
        loader = self.loader
        return self.begun_by(lambda: iter(loader), how=None)

    def begun_by(self, begin: Callable[[], Iterator[T]], *, how: object) -> Iterator[T]:
        """Begin an epoch as ``iter()`` does, with passes that ``begin`` begins; prefetchers call this method.

        Only batches that the prefetcher delivers then count for :meth:`state_dict`.

        Args:
            begin: A function that begins a pass and returns its iterator.
            how: A value that names the kind of ``begin``, such as a device. When the present pass was begun by another
                kind, the rest of the pass comes through ``begin``.

        Returns:
            An iterator over the batches of the epoch.

        Raises:
            UsageError: While iterating: a newer iterator exists, or the loader has no batch.
        """
        progress = self._progress
        if progress is not None and (
            progress is not self.loader._progress or progress.feed.closed or progress.feed.pid != os.getpid()
        ):
            # The loader was closed, iterated by another caller, or this is a forked child: the pass belongs to others.
            self._pass = self._progress = None
        elif self._pass is not None and how != self._how:
            # A prefetcher has batches of the pass on its device that were not delivered. The state counts delivered
            # batches only, so those batches come again.
            self.loader.load_state_dict(self.loader.state_dict())
            self._pass = self._progress = None
        if not self._resumed:
            self._at = 0
        self._begin, self._how = begin, how
        self._newest = token = object()
        return self._batches(token)

    def _batches(self, token: object) -> Iterator[T]:
        while True:
            if self._newest is not token:
                raise UsageError("this iterator ended because its loader was iterated again or closed")
            if self._at == self._steps:
                self._at, self._resumed = 0, False
                return
            batch = self._next()
            self._at, self._resumed = self._at + 1, False
            yield batch
            # Without this the generator would refer to the batch while the next one is made, so its memory could not be
            # used again.
            del batch

    def _next(self) -> T:
        """Return the next batch of this pass, or the first batch of the next pass."""
        try:
            for batch in self._pass or ():
                return batch
            # Twice, because nothing may be left of a pass that was resumed at its end.
            for _ in range(2):
                # The loader prints a line if a trainer leaves an epoch at an old length. This view reads each pass
                # completely, so the lengths say nothing.
                self.loader._lengths.forget()
                self._pass = self._begin()
                for batch in self._pass:
                    self._progress = self.loader._progress
                    return batch
        except BaseException:
            # An error lost batches of this pass; the next epoch must not continue it with a gap.
            self._pass = self._progress = None
            raise
        raise UsageError(f"an epoch of {self._steps} steps cannot be filled: the loader has no batches")

    def report(self) -> Report:
        """Return where the time of the present pass went so far, or of the last one; as ``Loader.report()``.

        Returns:
            A :class:`~cachetool.loaders.waits.Report`.

        Raises:
            UsageError: No batch was delivered yet.
        """
        return self.loader.report()

    def state_dict(self) -> dict[str, Any]:
        """Return the position of training as plain values: the state of the loader and the place in this epoch.

        Returns:
            A dict of plain values, for :meth:`load_state_dict`.

        Raises:
            UsageError: As ``Loader.state_dict()``.
        """
        return {"state": STATE, "at": self._at % self._steps, "steps": self._steps, "loader": self.loader.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Let the next ``iter()`` continue where ``state_dict()`` was called.

        With another number of ``steps`` that epoch continues up to the new number.

        Args:
            state: A dict from :meth:`state_dict`.

        Raises:
            UsageError: ``state`` is not the state of such epochs, or ``Loader.load_state_dict()`` refuses it. Nothing
                has changed then.
        """
        kinds = {"at": is_whole, "loader": lambda value: isinstance(value, Mapping)}
        require_state(state, kinds, of="epochs of fixed length")
        self.loader.load_state_dict(state["loader"])
        self._pass = self._progress = self._newest = None
        self._at, self._resumed = min(int(state["at"]), self._steps - 1), True

    def close(self) -> None:
        """Close the loader."""
        self._pass = self._progress = self._newest = None
        self.loader.close()


def wait_metrics(loader: BaseLoader[Any] | FixedEpochs[Any]) -> dict[str, float]:
    """Return the waits of a loader for a trainer's logger; nothing before its first batch."""
    try:
        return loader.report().metrics
    except UsageError:
        return {}


def require_one_epoch(loader: BaseLoader[Any] | FixedEpochs[Any]) -> None:
    """Raise :class:`UsageError` if ``loader`` is no loader, or has ``concurrent=True``, with which a trainer cannot
    save a state."""
    base = loader.loader if isinstance(loader, FixedEpochs) else loader
    if not hasattr(base, "epochs_of"):
        raise UsageError(f"{loader!r} is not a loader of cachetool; use a Loader or loader.epochs_of(steps=N)")
    # Trainers call iter() again while they hold an older iterator. With concurrent=True each call begins an epoch
    # beside the others, and only one epoch is part of the state.
    if base._concurrent:
        raise UsageError("a loader with concurrent=True has no state that a trainer can save; leave out concurrent=")
