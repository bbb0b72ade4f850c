"""Reading what coming batches need before it is asked for, where it is not in memory.

::

    expect(batches)                       the order is known long before
    due() -> samples of some batches      half of 64 MiB is used up: so many more
    asleep? of some of them, looked up    mincore; all in memory: nothing to do
    will_need(starts, sizes)              sorted, neighbours as one -> the kernel reads them, all at once

Of an epoch of small samples in windows it is known without their order what will be read: all of every window. Each
feeder of a process needs nearly every page of it, so they share: each asks for every n-th run and leaves the others to
the others::

    window   | run | run | run | run | run ...      256 of 256 KiB, from all over the files
    feeder      0     1     0     1     0

A map that is touched where nothing was read waits for one read after another. Told beforehand, the kernel has hundreds
of reads under way and the copy finds its pages in memory; a window of shuffled neighbours is read as long runs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np
import numpy.typing as npt

from cachetool.core.schema import Schema
from cachetool.formats.runs import Int64s
from cachetool.loaders.order import RUN_BYTES
from cachetool.loaders.read.arena import Arena, Memory
from cachetool.loaders.read.gather import Located, Runs

__all__ = ["NEAR", "Readahead", "Windows"]

NEAR = 2**14  # bytes between two samples that are rather read than left out: so many take as long as one request more
BYTES = 2**26  # read ahead of the batch that is gathered
_LOOKED_AT = 8  # samples that say whether all of them are in memory
_UNKNOWN = 2**16  # bytes of a sample whose size is not fixed


_Locate = Callable[[Int64s], Located]


class _Asking:
    """Where samples lie, and that they are wanted."""

    def __init__(self, arena: Arena | Memory, schema: Schema, locate: _Locate, *, near: int) -> None:
        self._arena, self._locate, self._near = arena, locate, near
        self._sizes = {field.name: field.nbytes for field in schema if not field.is_scalar}

    def _read(self, indices: Int64s) -> None:
        for _, name, runs in self._located(indices):
            sizes = np.full(len(runs.starts), self._sizes[name]) if runs.sizes is None else runs.sizes
            if runs.unmapped is not None:
                runs.unmapped.will_need(runs.starts, sizes)
            else:
                self._arena.will_need(runs.starts, sizes, near=self._near)

    def _located(self, indices: Int64s) -> Iterator[tuple[Int64s | None, str, Runs]]:
        """Which samples, which field of them, and where it lies."""
        for to, fields in self._locate(indices):
            yield from ((to, name, runs) for name, runs in fields.items() if name in self._sizes)

    def _asleep(self, indices: Int64s) -> npt.NDArray[np.bool_]:
        """Of which samples something is not in memory: bool, one each."""
        asleep = np.zeros(len(indices), dtype=np.bool_)
        for to, _, runs in self._located(indices):
            where = self._arena if runs.unmapped is None else runs.unmapped
            asleep[slice(None) if to is None else to] |= where.asleep(runs.starts)
        return asleep


class Readahead(_Asking):
    """For the batches of one view, in the order in which they are going to be gathered."""

    def __init__(self, arena: Arena | Memory, schema: Schema, locate: _Locate, *, near: int) -> None:
        super().__init__(arena, schema, locate, near=near)
        self._sample_bytes = max(1, schema.fixed_nbytes if schema.is_fixed else _UNKNOWN)
        self._coming: deque[Int64s] = deque()
        self._ahead = 0

    def expect(self, batches: Sequence[Int64s]) -> None:
        """These follow those expected before."""
        self._coming.extend(batches)

    def gathering(self, samples: int) -> None:
        """The next batch, of so many samples, is gathered now: have as much read as shall be ahead of it."""
        if self._coming and self._ahead * self._sample_bytes * 2 <= BYTES:
            group = [self._coming.popleft()]
            count = len(group[0])
            while self._coming and (self._ahead + count) * self._sample_bytes < BYTES:
                group.append(self._coming.popleft())
                count += len(group[-1])
            self._ahead += count
            if not self._in_memory(group):
                self._read(np.concatenate(group))
        self._ahead -= samples

    def _in_memory(self, group: list[Int64s]) -> bool:
        per_batch = -(-_LOOKED_AT // len(group))
        some = [batch[:: max(1, len(batch) // per_batch)] for batch in group[:: max(1, len(group) // _LOOKED_AT)]]
        return not self._asleep(np.concatenate(some)).any()


class Windows(_Asking):
    """For an epoch in windows.

    ``windows``: of each one for how many positions of the order it is, and the samples that this feeder asks for, with
    what lies between them: int64 (runs, samples of a run), a row for each run of neighbours. ``reached``, int64: for
    each batch of this feeder, for how many positions windows are asked for by then.
    """

    def __init__(
        self,
        arena: Arena | Memory,
        schema: Schema,
        locate: _Locate,
        windows: Iterable[tuple[int, Int64s]],
        reached: Int64s,
    ) -> None:
        # Less than a run: one of another window that lies between two of this one is not read with them.
        super().__init__(arena, schema, locate, near=RUN_BYTES // 2)
        self._windows, self._reached = iter(windows), iter(reached.tolist())
        self._asked = 0

    def gathering(self, samples: int) -> None:
        """The next batch, of so many samples, is gathered now: have it and as much as shall be ahead of it read."""
        wanted = next(self._reached, 0)
        while self._asked < wanted and (window := next(self._windows, None)) is not None:
            count, rows = window
            self._asked += count
            asleep = np.zeros(len(rows), dtype=np.bool_)
            # At two places: the kernel may have read the middle around a page that another feeder touched too early.
            for at in (rows.shape[1] // 4, 3 * rows.shape[1] // 4):
                asleep |= self._asleep(rows[:, at])
            if asleep.any():
                self._read(rows[asleep].ravel())
