"""Batches as NumPy arrays: the engine without any framework.

::

    with Loader("data/cache", batch_size=64) as loader:
        for epoch in range(90):
            for batch in loader:            # epoch k + 1 sees what arrived in the cache during epoch k
                batch["image"]              # (64, ...), memory that stays as it is for as long as it is seen
"""

from __future__ import annotations

from typing import Any

from cachetool.core.block import Ragged
from cachetool.loaders.columns import texts
from cachetool.loaders.loader import BaseLoader
from cachetool.loaders.ring.slot import Batch

__all__ = ["Loader"]


class Loader(BaseLoader[dict[str, Any]]):
    """Batches of a cache as dicts of NumPy arrays, made by ``workers`` feeder processes into shared memory.

    A batch has an array (k, *shape) for each numeric field, a :class:`~cachetool.core.block.Ragged` column for each
    ragged one, a list for str and bytes; k is at most ``batch_size``. Arrays are not copied in this process; their
    memory is used again once nothing sees it any more.

    - ``cache_or_paths``: a cache or its folder; or a folder that ``cachetool convert --out`` wrote, one of its files,
      or a list of such: a fixed set, no lease. ``dataset`` names one of several of a cache, ``fields`` chooses and
      orders the fields.
    - ``shuffle``: ``"full"``, ``"window"`` (neighbours are read together: for small samples on a cold disk) or False
      (in the order they arrived). The order is decided by ``seed``, the epoch and the snapshot.
    - ``drop_last``: batches of ``batch_size`` only; else sizes differ by at most one, and where fewer samples than
      ranks are left some of the last ones are empty. ``steps``: batches of an epoch at most, with those before it was
      resumed.
    - ``rank`` of ``world_size`` (default: ``RANK`` and ``WORLD_SIZE``, looked up when an epoch or its length is asked
      for, since trainers start their ranks once they have the loader): all take the same number of steps, no sample
      goes to two of them. They need the same ``run`` name (default: from torchrun's or Slurm's environment). By default
      a cache that holds one node's share of its source is divided by the ranks of that node alone.
    - ``workers=0``: ``next()`` makes the batch instead. ``prefetch``: batches that each feeder keeps ready, one
      that is in use among them, at least 2 and at most 8,192. Default: 96 MiB of them shared by the feeders, at least
      12 MiB and 2, at most 128; twice as many, up to four times, when ``next()`` waits again and again although all
      were ready before.
    - ``transform``: a function over each sample, a dict, that gives another one, called in the feeders; over a dict of
      columns with ``transform_each="batch"``. With a parameter ``rng`` it gets a generator seeded for the sample.
    - ``split``: ``"train"`` or ``"validation"`` by a hash of ``__key__``, ``validation`` (default: 5 %) of the samples
      in the latter.
    - ``where``: only samples with these numbers or texts, ``{"label": {0, 1}}``; of several fields, all of them.
    - ``min_samples`` (default ``world_size`` x ``batch_size``, with ``split="validation"`` or ``where`` ``world_size``)
      are waited for up to ``wait`` seconds.
    - The next epoch's snapshot is taken when all batches of this one are made and half of them delivered; none is taken
      after ``epochs`` epochs, nor with ``split="validation"``. :meth:`refresh` discards it. It is given up ``hold``
      seconds after the end of this one.
    - ``verify``: the feeders compare every value with the checksum it was written with.
    - ``concurrent``: an iterator that is not at its end goes on when the loader is iterated again, which then takes
      feeders of its own; else it ends with an error. Threads then have an epoch each, too.
    - ``missing``: what a resumed epoch does about shards evicted since: ``"error"`` or ``"skip"``.

    Raises :class:`UsageError`; iterating also :class:`CorruptError`, and what feeders raise.
    """

    def _finish(self, batch: Batch) -> dict[str, Any]:
        out: dict[str, Any] = dict(batch.columns)
        for name, column in batch.columns.items():
            if isinstance(column, Ragged) and column.shapes is None:
                out[name] = texts(column, text=batch.schema[name].kind == "str")
        return out
