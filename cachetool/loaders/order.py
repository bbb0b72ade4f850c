"""Which samples a rank reads in an epoch, in which order, and how an index says which snapshot it means. All pure.

An index that travels to a worker process carries the number of its snapshot, so that a worker whose list of shards is
older or newer reads the right sample, or says that it cannot::

    bits  63 ........ 40 | 39 ........ 0
          version        | index              version << 40 | index

Versions of a catalog begin at 1, so a plain index (below 2**40) is never taken for one that carries a version. Python
integers have no upper end; in an int64 a version may reach 2**23.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from cachetool.errors import UsageError
from cachetool.permutation import MAX_N, Permutation

__all__ = ["decode", "encode", "order", "share"]

_BITS = 40
_MASK = MAX_N - 1
_BLOCK = 1 << 16


def encode(version: int, index: int) -> int:
    """``index`` in the snapshot ``version``, as one number."""
    return version << _BITS | index


def decode(index: int) -> tuple[int, int]:
    """Version and index of an encoded index; version 0 for a plain one."""
    return index >> _BITS, index & _MASK


def share(samples: int, *, rank: int = 0, world_size: int = 1, drop_last: bool = True) -> int:
    """How many of ``samples`` the process ``rank`` of ``world_size`` reads in an epoch.

    ``drop_last`` leaves out the remainder, at most ``world_size - 1`` samples, so that every rank takes the same number
    of steps; without it the first ranks read one more. Raises :class:`UsageError` for a rank outside the world.
    """
    if not 0 <= rank < world_size:
        raise UsageError(f"rank {rank} of a world of {world_size}: ranks are 0 to world_size - 1")
    least, rest = divmod(samples, world_size)
    return least if drop_last else least + (rank < rest)


def order(
    samples: int,
    *,
    shuffle: bool = True,
    seed: int = 0,
    epoch: int = 0,
    rank: int = 0,
    world_size: int = 1,
    drop_last: bool = True,
) -> Iterator[npt.NDArray[np.int64]]:
    """The indices that ``rank`` reads in ``epoch``, in blocks of at most 65,536: int64 arrays, (k,).

    Rank r takes the positions r, r + world_size, r + 2 world_size, ... of one order that all ranks share: the
    permutation of (seed, epoch), or 0, 1, 2, ... with ``shuffle=False``. No sample goes to two ranks, none comes twice.
    """
    permutation = Permutation(samples, seed=seed, turn=epoch) if shuffle else None
    count = share(samples, rank=rank, world_size=world_size, drop_last=drop_last)
    for start in range(0, count, _BLOCK):
        steps = np.arange(start, min(start + _BLOCK, count), dtype=np.int64)
        positions = steps * world_size + rank
        yield positions if permutation is None else permutation[positions]
