"""Epochs of a fixed number of steps over a loader whose own epochs grow.

::

    passes of the loader   |----- 6 -----|-------- 9 --------|----------- 12 -----------|
    epochs of 8 steps      |------- 8 -------|------- 8 -------|------- 8 -------|-- ...

A *pass* goes once through one snapshot. Trainers that keep the first length for all epochs, and learning-rate schedules
that count steps, are right with epochs of one length; every pass still takes a snapshot of its own.
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

if TYPE_CHECKING:
    from cachetool.loaders.loader import BaseLoader

__all__ = ["FixedEpochs", "require_one_epoch"]

T = TypeVar("T")


class FixedEpochs(Closing, Generic[T]):
    """The batches of ``loader`` in epochs of ``steps`` batches; see :meth:`Loader.epochs_of`.

    An epoch that is left with ``break`` ends there; the next one goes on with the batch behind it, so no sample of a
    pass is left out. ``state_dict`` says where the loader stands and how far this epoch is, and ``load_state_dict``
    lets the next ``iter()`` give the rest of that epoch. Raises :class:`UsageError` for ``steps`` below 1.
    """

    def __init__(self, loader: BaseLoader[T], *, steps: int) -> None:
        self.loader, self._steps = loader, parse_whole(steps, what="steps=", least=1)
        self._pass: Iterator[T] | None = None
        self._progress: Progress | None = None
        """Progress of the pass that is under way."""
        self._begin: Callable[[], Iterator[T]] = lambda: iter(loader)
        self._how: object = None
        self._at = 0
        """Batches of the present epoch that were handed out."""
        self._newest: object = None
        """The iterator that was made last; older ones end with an error."""
        self._resumed = False

    @property
    def batch_size(self) -> int:
        """Samples of a batch of one rank, at most."""
        return self.loader.batch_size

    @property
    def drop_last(self) -> bool:
        """True if every batch has ``batch_size`` samples."""
        return self.loader.drop_last

    def __len__(self) -> int:
        """Number of batches of every epoch."""
        return self._steps

    def __getitem__(self, index: object) -> NoReturn:
        """Raise :class:`UsageError`: this is no dataset for ``DataLoader``, which would ask for samples one by one."""
        raise UsageError(
            "epochs_of() gives batches: iterate it, or give it to the trainer as it is, without a DataLoader around it;"
            " docs/trainers.md has the way for each trainer"
        )

    def __iter__(self) -> Iterator[T]:
        """Begin an epoch; of one that was loaded from a state, go on with the rest."""
        loader = self.loader  # not self, which would then live until the garbage collector runs
        return self.begun_by(lambda: iter(loader), how=None)

    def begun_by(self, begin: Callable[[], Iterator[T]], *, how: object) -> Iterator[T]:
        """Begin an epoch as ``iter()`` does, with passes that ``begin`` begins: those of a prefetcher, so that only
        delivered batches count.

        ``how`` names the kind of ``begin``, such as a device. If the present pass was begun by another kind, its rest
        comes by this one.
        """
        progress = self._progress
        if progress is not None and (
            progress is not self.loader._progress or progress.feed.closed or progress.feed.pid != os.getpid()
        ):
            self._pass = self._progress = None  # the loader was closed, iterated by somebody else, or forked
        elif self._pass is not None and how != self._how:
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
                raise UsageError("this iterator ended when its loader was iterated again or closed")
            if self._at == self._steps:
                self._at, self._resumed = 0, False
                return
            batch = self._next()
            self._at, self._resumed = self._at + 1, False
            yield batch
            del batch

    def _next(self) -> T:
        """The next batch of this pass, or the first of the next one."""
        try:
            for batch in self._pass or ():
                return batch
            for _ in range(2):  # nothing may be left of a pass that was resumed
                # Of a view every pass is read whole, so its lengths say nothing about a trainer that kept one.
                self.loader._lengths.forget()
                self._pass = self._begin()
                for batch in self._pass:
                    self._progress = self.loader._progress
                    return batch
        except BaseException:
            self._pass = self._progress = None  # a pass with a hole in it is not gone on with
            raise
        raise UsageError(f"an epoch of {self._steps} steps cannot be filled: the loader gives no batch")

    def state_dict(self) -> dict[str, Any]:
        """Return where training stands, as plain values: the state of the loader, and how many batches of this epoch
        were handed out. Raises what :meth:`Loader.state_dict` does."""
        return {"state": STATE, "at": self._at % self._steps, "steps": self._steps, "loader": self.loader.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Let the next ``iter()`` go on where ``state_dict`` was called.

        With another number of ``steps`` that epoch goes on up to the new number. Raises :class:`UsageError` for what is
        no state of such epochs, and what :meth:`Loader.load_state_dict` raises; nothing has changed then.
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


def require_one_epoch(loader: BaseLoader[Any] | FixedEpochs[Any]) -> None:
    """Raise :class:`UsageError` for what is no loader, and for one with ``concurrent=True``, whose state a trainer
    cannot save.

    Trainers call ``iter()`` again while they hold an older iterator. With ``concurrent=True`` each call begins an epoch
    beside the others, which is no part of the state.
    """
    base = loader.loader if isinstance(loader, FixedEpochs) else loader
    if not hasattr(base, "epochs_of"):
        raise UsageError(f"{loader!r} is no loader of cachetool; give the Loader, or loader.epochs_of(steps=N)")
    if base._concurrent:
        raise UsageError("a loader with concurrent=True has no state that a trainer could save; leave it out")
