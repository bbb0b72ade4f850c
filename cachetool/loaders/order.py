"""The order of an epoch: the samples that a rank reads, and indices that name their snapshot. No function does any I/O.

An index that is sent to a worker process carries the version of its snapshot. So a worker whose list of shards is older
or newer reads the right sample, or raises an error::

    bits  63 ........ 40 | 39 ........ 0
          version        | index              version << 40 | index

Versions of a catalog begin at 1, so an index without a version (below 2**40) is never taken for one with a version.
Python integers have no upper limit; in an int64 a version may reach 2**23.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from cachetool.core.errors import UsageError
from cachetool.core.permutation import MAX_N, Permutation
from cachetool.core.units import parse_whole

__all__ = [
    "RUN_BYTES",
    "SHUFFLES",
    "EpochOrder",
    "Shuffle",
    "Steps",
    "decode",
    "encode",
    "order",
    "parse_epoch",
    "share",
]

_BITS = 40
_MASK = MAX_N - 1
# Positions are computed in blocks, so that an epoch of 10^9 samples does not need 8 GB for its order before the first
# batch.
_BLOCK = 1 << 16

Int64s = npt.NDArray[np.int64]
Shuffle = Literal["full", "window", "no"]
SHUFFLES: dict[Any, Shuffle] = {True: "full", "full": "full", "window": "window", False: "no", None: "no"}
"""The values of ``shuffle=``, each with the kind of order that it names."""

# Bytes of neighbouring samples that "window" keeps together, because a disk reads such a run in one piece.
RUN_BYTES = 2**18
_WINDOW_RUNS = 256
"""Number of runs whose samples are permuted together: a window of 64 MiB."""
_OF_A_RUN = 128
"""Most samples of a run that :meth:`EpochOrder.runs` returns: enough to know where the run lies in the file."""


def parse_epoch(number: object) -> int:
    """Return the number of an epoch, at least 0. Raise :class:`UsageError` otherwise."""
    return parse_whole(number, what="epoch=", least=0)


def encode(version: int, index: int) -> int:
    """Return ``index`` of the snapshot ``version`` as one number."""
    return version << _BITS | index


def decode(index: int) -> tuple[int, int]:
    """Return version and index of an encoded index; version 0 for an index without a version."""
    return index >> _BITS, index & _MASK


def share(samples: int, *, rank: int = 0, world_size: int = 1, drop_last: bool = True) -> int:
    """Return the number of samples, out of ``samples``, that the process ``rank`` of ``world_size`` reads in an epoch.

    ``drop_last`` leaves out the remainder, at most ``world_size - 1`` samples, so that all ranks take the same number
    of steps. Without it the first ranks read one sample more. Raises :class:`UsageError` for a rank outside of the
    world.
    """
    if not 0 <= rank < world_size:
        raise UsageError(f"rank={rank} cannot be used with world_size={world_size}; ranks are 0 to world_size - 1")
    least, remainder = divmod(samples, world_size)
    return least if drop_last else least + (rank < remainder)


def order(
    samples: int,
    *,
    shuffle: bool = True,
    seed: int = 0,
    epoch: int = 0,
    rank: int = 0,
    world_size: int = 1,
    drop_last: bool = True,
    position: int = 0,
) -> Iterator[npt.NDArray[np.int64]]:
    """Yield the indices that ``rank`` reads in ``epoch``, in int64 arrays of at most 65,536, (k,).

    Rank r takes the positions r, r + world_size, r + 2 world_size, ... of one order that all ranks share: the
    permutation of (seed, epoch), or 0, 1, 2, ... with ``shuffle=False``. No sample is read by two ranks, or twice.
    ``position`` is the number of positions that all ranks together have read before.
    """
    permutation = Permutation(samples, seed=seed, pass_number=epoch) if shuffle else None
    count = share(samples - position, rank=rank, world_size=world_size, drop_last=drop_last)
    for start in range(0, count, _BLOCK):
        steps = np.arange(start, min(start + _BLOCK, count), dtype=np.int64)
        positions = position + steps * world_size + rank
        yield positions if permutation is None else permutation[positions]


@dataclass(frozen=True, slots=True)
class Steps:
    """The division of an epoch's samples into the batches of all ranks.

    The positions ``position .. samples - 1`` of the epoch's order are divided into count x world_size batches of at
    most ``batch_size``, step by step and rank by rank. Sizes differ by at most one. With ``drop_last`` all batches have
    ``batch_size`` samples, and the remainder is left out. So after each step the ranks have read a beginning of the
    order, and an epoch that was interrupted can continue from there with another number of ranks.
    """

    samples: int
    batch_size: int
    rank: int = 0
    world_size: int = 1
    drop_last: bool = False
    position: int = 0

    @property
    def count(self) -> int:
        """Number of steps, the same for all ranks."""
        left, per_step = self.samples - self.position, self.world_size * self.batch_size
        return left // per_step if self.drop_last else -(-left // per_step)

    def bounds(self, steps: Int64s) -> tuple[Int64s, Int64s]:
        """Return the first position of the batch of each of these steps of this rank, and the position after its
        last."""
        cells = steps * self.world_size + self.rank
        return self._start(cells), self._start(cells + 1)

    def reached(self, step: int) -> int:
        """Return the position up to which all ranks have read the order once each has taken ``step`` steps."""
        return int(self._start(np.array([step * self.world_size], dtype=np.int64))[0])

    def _start(self, cells: Int64s) -> Int64s:
        if self.drop_last:
            return self.position + cells * self.batch_size
        # The first `remainder` batches have one sample more. max() guards against a division by zero when no sample is
        # left.
        size, remainder = divmod(self.samples - self.position, max(1, self.count * self.world_size))
        return self.position + cells * size + np.minimum(cells, remainder)


class EpochOrder:
    """The order of an epoch: ``order[positions]`` returns the indices of the samples at these positions; both int64,
    (k,).

    ``full`` is a permutation of all samples. ``window`` keeps runs of neighbouring samples together, about 256 KiB each
    (``nbytes`` is the known size of a sample, of which ``together`` crops are counted). It permutes the runs, and then
    the samples within each window of 256 runs, so a disk reads nearly in order. ``no`` is the order in which the
    samples arrived. The order depends on the arguments alone.
    """

    def __init__(
        self,
        samples: int,
        *,
        shuffle: Shuffle = "full",
        seed: int = 0,
        epoch: int = 0,
        nbytes: int = 0,
        together: int = 1,
    ) -> None:
        self._samples, self._seed, self._epoch = samples, seed, epoch
        self._permutation = Permutation(samples, seed=seed, pass_number=epoch) if shuffle == "full" else None
        self.window = 0
        """Number of samples of a window; 0 if there are no windows."""
        if shuffle != "window":
            return
        self._run = max(1, RUN_BYTES // max(1, nbytes)) * together
        self.window = self._run * _WINDOW_RUNS
        runs, self._remainder = divmod(samples, self._run)
        self._runs = Permutation(runs + 1, seed=seed, pass_number=epoch)
        # The last run of the dataset is shorter than the others. Somewhere in the permuted order it moves all positions
        # after it, so its place in that order must be known. It is searched in blocks, to keep the memory small.
        self._short = next(
            at + int(hits[0])
            for at in range(0, runs + 1, _BLOCK)
            if len(hits := np.flatnonzero(self._runs[np.arange(at, min(at + _BLOCK, runs + 1))] == runs))
        )

    def __getitem__(self, positions: Int64s) -> Int64s:
        if self._permutation is not None:
            indices: Int64s = self._permutation[positions]
            return indices
        return self._in_windows(positions) if self.window else positions

    def _in_windows(self, positions: Int64s) -> Int64s:
        at = np.empty_like(positions)
        windows = positions // self.window
        for window in np.unique(windows).tolist():
            chosen, first = windows == window, window * self.window
            at[chosen] = first + self._within(window)[positions[chosen] - first]
        at = self._in_runs(at)
        out: Int64s = self._runs[at // self._run] * self._run + at % self._run
        return out

    def runs(self, start: int, stop: int) -> Iterator[tuple[int, Int64s]]:
        """Yield, for each window of the positions from ``start`` to ``stop``, its number of positions and the runs of
        its samples.

        The runs come in the order in which they lie in the dataset. Each is a row of indices, int64 (runs, samples of a
        run). A run of more than 128 samples is represented by 128 of them, with its first and last. A shorter last run
        repeats its last sample. Works only if :attr:`window` is not 0.
        """
        those = np.linspace(0, self._run - 1, min(self._run, _OF_A_RUN)).astype(np.int64)
        for first in range(start // self.window * self.window, stop, self.window):
            behind = min(first + self.window, self._samples)
            a, b = (self._in_runs(np.array([first, behind - 1])) // self._run).tolist()
            runs = np.sort(self._runs[np.arange(a, b + 1)])
            rows = np.minimum(runs[:, None] * self._run + those, self._samples - 1)
            yield min(behind, stop) - max(first, start), rows

    def _in_runs(self, at: Int64s) -> Int64s:
        """Return the positions as if all runs had the same length and lay one after another."""
        return at + (at >= self._short * self._run + self._remainder) * (self._run - self._remainder)

    def _within(self, window: int) -> Permutation:
        size = min(self.window, self._samples - window * self.window)
        # Each window of each epoch needs a permutation of its own. A hash of both numbers avoids that window w of epoch
        # e has the order of another window of another epoch, as a sum of the numbers would.
        pass_number = int.from_bytes(hashlib.sha256(f"{self._epoch} {window}".encode()).digest()[:8], "little")
        return Permutation(size, seed=self._seed, pass_number=pass_number)
