"""The loop that copies batches to a device before they are asked for; PyTorch and JAX each provide the copies.

::

    batches -- begin --> ahead: up to ``depth`` batches on the device -- arrive --> the training loop
                  |
                  +--> kept: batches in host memory, each until its copy is done

Feeders fill the memory of a batch again as soon as nothing refers to the batch. So a batch in host memory is kept until
its copy is done, and a loop that is left waits for all copies.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from cachetool.loaders.epoch import Epoch

__all__ = ["Copy", "copied_ahead"]


class Copy(Protocol):
    """The copy of one batch to a device. Copies finish in the order in which they begin."""

    def begin(self, batch: Any) -> Any:
        """Start the copy and return the batch on the device. If this raises an error, some arrays may be on their way
        already."""

    def arrive(self) -> None:
        """Let the training loop use the batch on the device; from then on the copy must not refer to that batch."""

    def wait(self) -> None:
        """Wait until the copy is done."""

    @property
    def done(self) -> bool:
        """True if the device no longer reads the batch in host memory."""


def copied_ahead(batches: Iterator[Any], copies: Callable[[], Copy], depth: int) -> Iterator[Any]:
    """Yield the batches on a device, with up to ``depth`` further batches on their way while one is in use.

    If ``batches`` is an :class:`Epoch`, the loop waits for no batch of it while it has a batch to yield, and a batch
    counts as delivered when it is yielded. An error of ``batches`` is raised after all batches before it were yielded.
    """
    epoch = batches if isinstance(batches, Epoch) else None
    ahead: deque[tuple[Any, Copy]] = deque()
    kept: deque[tuple[Any, Copy]] = deque()
    failed: list[Exception] = []
    here = _until(batches if epoch is None else epoch.uncounted(), failed)

    def begin() -> bool:
        """Begin the copy of one more batch; False when there is none."""
        for batch in here:
            copy = copies()
            # Kept before the copy begins: if the second array of a batch fails, the device may still read the first.
            kept.append((batch, copy))
            ahead.append((copy.begin(batch), copy))
            return True
        return False

    try:
        while ahead or begin():
            # Copies are started before the loop waits for one, so that depth=1 overlaps copy and computation in JAX
            # too. epoch.ready keeps the loop from waiting for the feeders while the training process could compute.
            while len(ahead) <= depth and (epoch is None or epoch.ready) and begin():
                pass
            ahead[0][1].arrive()
            while kept and kept[0][1].done:
                kept.popleft()
            if epoch is not None:
                epoch.count()
            # Removed from the queue first, so that nothing here keeps memory of the device while the training loop uses
            # it.
            yield ahead.popleft()[0]
    except BaseException:
        # The traceback of that error refers to this frame, and so to the epoch: both would live until the garbage
        # collector runs.
        failed.clear()
        raise
    finally:
        # Also if the training loop is left with break: otherwise feeders would fill memory that the device still reads.
        try:
            _wait(kept)
        # The handler of a signal may raise before the wait has begun. A second wait makes sure that no copy still runs.
        except BaseException:
            _wait(kept)
            raise
    if failed:
        raise failed.pop()


def _until(batches: Iterator[Any], failed: list[Exception]) -> Iterator[Any]:
    """Yield the batches; keep an error in ``failed`` instead of raising it."""
    try:
        yield from batches
    # The iterable is the user's, so any error may come. It is raised later, by copied_ahead(), because the batches
    # before it are still on their way and must be trained first.
    except Exception as error:  # noqa: BLE001
        failed.append(error)


def _wait(kept: deque[tuple[Any, Copy]]) -> None:
    for _, copy in kept:
        # The device may have failed, or, after a fork, belong to the parent process. The next call that uses the device
        # raises the error; here it would hide the reason why the loop ended.
        with contextlib.suppress(RuntimeError):
            copy.wait()
