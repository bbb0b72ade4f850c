"""Asking the disk for what coming batches need, if it is not in memory.

::

    expect(batches)                       the order is known long before
    gathering(): half of 64 MiB is used   as many samples more are looked up
    asleep? some of them                  mincore; all in memory: nothing to do
    will_need(starts, sizes)              sorted, neighbours as one -> the kernel reads them together

In an epoch of small samples in windows the order of samples need not be known: every window is read completely. Each
feeder of a loader needs nearly every page of a window, so the feeders share the work. Each asks for every n-th run and
leaves the others to the other feeders::

    window   | run | run | run | run | run ...      256 of 256 KiB, from all over the files
    feeder      0     1     0     1     0

A read of a mapped page that is not in memory waits for the disk, one page after another. When the kernel is told
beforehand, it has hundreds of reads in flight, and the copy finds its pages in memory. A window of shuffled neighbours
is read as long runs.
"""

from __future__ import annotations

import mmap
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np
import numpy.typing as npt

from cachetool.core.schema import Schema
from cachetool.formats.runs import Int64s
from cachetool.loaders.order import RUN_BYTES
from cachetool.loaders.read.arena import Arena, Memory
from cachetool.loaders.read.boxes import Boxes
from cachetool.loaders.read.gather import Located, Runs

__all__ = ["NEAR", "Readahead", "Windows"]

# Bytes between two samples that are read rather than left out: reading so many takes as long as one
# request more.
NEAR = 2**14
BYTES = 2**26
"""Bytes that are read ahead of the batch that is gathered."""
# Samples that are looked up to decide whether all of a group are in memory: mincore is a system
# call a page.
_LOOKED_AT = 8
_UNKNOWN = 2**16
"""Bytes assumed for a sample whose size is not fixed."""


_Locate = Callable[[Int64s], Located]


class _Asking:
    """A finder of samples that asks the kernel to read them."""

    def __init__(self, arena: Arena | Memory, schema: Schema, locate: _Locate, *, near: int) -> None:
        self._arena, self._locate, self._near = arena, locate, near
        # Scalar fields are left out: they lie in the extents, which were read when the shard was
        # opened.
        self._sizes = {field.name: field.nbytes for field in schema if not field.is_scalar}

    def _read(self, indices: Int64s) -> None:
        for _, name, runs in self._located(indices):
            if runs.boxes is not None:
                self._read_boxes(runs, runs.boxes)
                continue
            sizes = np.full(len(runs.starts), self._sizes[name]) if runs.sizes is None else runs.sizes
            if runs.unmapped is not None:
                runs.unmapped.will_need(runs.starts, sizes)
            else:
                self._arena.will_need(runs.starts, sizes, near=self._near)

    def _read_boxes(self, runs: Runs, boxes: Boxes) -> None:
        # Between two rows of a box nothing is read that lies in pages of its own.
        starts, sizes, _ = boxes.runs(mmap.PAGESIZE if runs.unmapped is None else runs.unmapped.near)
        count = starts.shape[1]
        starts, sizes = (starts + runs.starts[:, None]).reshape(-1), np.repeat(sizes, count)
        if runs.unmapped is not None:
            runs.unmapped.repeat(count).will_need(starts, sizes)
        else:
            self._arena.will_need(starts, sizes, near=mmap.PAGESIZE)

    def _located(self, indices: Int64s) -> Iterator[tuple[Int64s | None, str, Runs]]:
        """Yield which samples, the name of a field, and the positions of that field for them."""
        for to, fields in self._locate(indices):
            yield from ((to, name, runs) for name, runs in fields.items() if name in self._sizes)

    def _asleep(self, indices: Int64s) -> npt.NDArray[np.bool_]:
        """Return for each sample whether some of it is not in memory: bool."""
        asleep = np.zeros(len(indices), dtype=np.bool_)
        for to, _, runs in self._located(indices):
            where = self._arena if runs.unmapped is None else runs.unmapped
            starts = runs.starts if runs.boxes is None else runs.starts + runs.boxes.first_bytes
            found = where.asleep(starts)
            # By position, because an item of several samples is named several times.
            asleep[np.flatnonzero(found) if to is None else to[found]] = True
        return asleep


class Readahead(_Asking):
    """Reading ahead for the batches of one view, in the order in which they will be gathered."""

    def __init__(
        self, arena: Arena | Memory, schema: Schema, locate: _Locate, *, near: int, positions: int = 1
    ) -> None:
        super().__init__(arena, schema, locate, near=near)
        self._sample_bytes = positions * max(1, schema.fixed_nbytes if schema.is_fixed else _UNKNOWN)
        self._coming: deque[Int64s] = deque()
        self._ahead = 0

    def expect(self, batches: Sequence[Int64s]) -> None:
        """Add batches that follow those added before."""
        self._coming.extend(batches)

    def gathering(self, samples: int) -> None:
        """Have the kernel read ahead of the batch of ``samples`` samples that is gathered now."""
        # Asked for in groups of half the amount: each group is one look-up and one set of requests,
        # and the other half is still there while the kernel reads.
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
        # Spread over the whole group, because neighbours are often in memory together.
        per_batch = -(-_LOOKED_AT // len(group))
        some = [batch[:: max(1, len(batch) // per_batch)] for batch in group[:: max(1, len(group) // _LOOKED_AT)]]
        return not self._asleep(np.concatenate(some)).any()


class Windows(_Asking):
    """Reading ahead for an epoch in windows.

    Args:
        arena: The range in which the files are mapped.
        schema: The fields that batches have.
        locate: Returns the positions of samples.
        windows: For each window the number of positions of the order in it, and the samples that this feeder asks for,
            with those between them: int64 (runs, samples of a run), a row for each run of neighbours.
        reached: For each batch of this feeder the number of positions up to which windows are asked for by then, int64.
    """

    def __init__(
        self,
        arena: Arena | Memory,
        schema: Schema,
        locate: _Locate,
        windows: Iterable[tuple[int, Int64s]],
        reached: Int64s,
    ) -> None:
        # Half of a run: otherwise a run of another window that lies between two runs of this one
        # would be read with them.
        super().__init__(arena, schema, locate, near=RUN_BYTES // 2)
        self._windows, self._reached = iter(windows), iter(reached.tolist())
        self._asked = 0

    def gathering(self, samples: int) -> None:
        """Have the kernel read the batch of ``samples`` samples that is gathered now, and as much as shall be ahead of
        it."""
        wanted = next(self._reached, 0)
        while self._asked < wanted and (window := next(self._windows, None)) is not None:
            count, rows = window
            self._asked += count
            asleep = np.zeros(len(rows), dtype=np.bool_)
            # Two places of each run: another feeder may have touched a page too early, and the
            # kernel then read the pages around it, but not the run.
            for at in (rows.shape[1] // 4, 3 * rows.shape[1] // 4):
                asleep |= self._asleep(rows[:, at])
            if asleep.any():
                self._read(rows[asleep].ravel())
