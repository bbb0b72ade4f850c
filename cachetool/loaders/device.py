"""Batches on a device before they are asked for: the loop that PyTorch and JAX share, each with its own copies.

::

    batches -- begin --> ahead: up to ``depth`` batches there -- arrive --> the training loop
                  |
                  +--> kept: batches here, each until its copy is done

Memory of a batch is filled again once nobody sees the batch. So a batch here is kept until its copy is done, and a loop
that is left waits for all copies.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from cachetool.loaders.epoch import Epoch

__all__ = ["Copy", "copied_ahead"]


class Copy(Protocol):
    """The copy of one batch to a device. Copies are done in the order in which they begin."""

    def begin(self, batch: Any) -> Any:
        """Ask for the copy and return the batch there. Where this raises, parts may be on their way all the same."""

    def arrive(self) -> None:
        """Let the training loop use the batch there. The copy may not refer to that batch any more."""

    def wait(self) -> None:
        """Wait until the copy is done."""

    @property
    def done(self) -> bool:
        """Whether the batch here is not read any more."""


def copied_ahead(batches: Iterator[Any], copies: Callable[[], Copy], depth: int) -> Iterator[Any]:
    """Yield the batches on a device, up to ``depth`` of them on their way while one is in use.

    Of an :class:`Epoch` no batch is waited for while there is one to hand out, and a batch counts when it is handed
    out. An error of ``batches`` is raised behind the batches before it.
    """
    epoch = batches if isinstance(batches, Epoch) else None
    ahead: deque[tuple[Any, Copy]] = deque()  # batch there
    kept: deque[tuple[Any, Copy]] = deque()  # batch here
    failed: list[Exception] = []
    here = _until(batches if epoch is None else epoch.uncounted(), failed)

    def begin() -> bool:
        """Begin the copy of one more batch; False when there is none."""
        for batch in here:
            copy = copies()
            kept.append((batch, copy))  # also when the second of its arrays fails
            ahead.append((copy.begin(batch), copy))
            return True
        return False

    try:
        while ahead or begin():
            while len(ahead) <= depth and (epoch is None or epoch.ready) and begin():
                pass
            ahead[0][1].arrive()
            while kept and kept[0][1].done:
                kept.popleft()
            if epoch is not None:
                epoch.count()
            yield ahead.popleft()[0]  # referred to by nothing here while it is in use
    except BaseException:
        failed.clear()  # its traceback keeps the epoch, and itself
        raise
    finally:  # also when the loop is left: the feeders would fill the memory again while it is read
        try:
            _wait(kept)
        except BaseException:  # a signal's handler, before it began
            _wait(kept)
            raise
    if failed:
        raise failed.pop()


def _until(batches: Iterator[Any], failed: list[Exception]) -> Iterator[Any]:
    """The batches until they fail: those before that are on their way yet, and are to arrive."""
    try:
        yield from batches
    except Exception as error:  # noqa: BLE001  # of whatever iterable, raised again
        failed.append(error)


def _wait(kept: deque[tuple[Any, Copy]]) -> None:
    for _, copy in kept:
        with contextlib.suppress(RuntimeError):  # where the device failed, or is the parent's, its next user is told
            copy.wait()
