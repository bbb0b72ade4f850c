"""Map-style datasets for :class:`torch.utils.data.DataLoader`, over a cache that grows.

::

    dataset = CacheDataset("data/cache", fields=["image", "label"])
    sampler = EpochSampler(dataset, seed=0)                       # takes the newest snapshot at every epoch
    loader = DataLoader(dataset, batch_size=64, sampler=sampler, num_workers=4, persistent_workers=True,
                        collate_fn=dataset.collate)

A sample is a dict: numbers and arrays as tensors (datetime64 as int64), bytes and str as such. Files are opened at
first use, by each process for itself, so any start method of workers does. Snapshots and their leases stay in the
process that made the dataset; workers look up the list of shards that an index means
(:mod:`cachetool.loaders.snapshots.indexed`).

Accelerate divides the samples of a ``DataLoader`` among processes; an :class:`EpochSampler` can do that already.

::

    EpochSampler(rank=0, world_size=2)    every second sample
    BatchSamplerShard(num_processes=2)    every second batch of those: half of the samples are never trained

``accelerator.prepare(DataLoader(dataset, sampler=EpochSampler(dataset)))`` wraps the sampler without an error, so only
the sampler can see it, when it is asked for its first index.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from cachetool.cache import CacheDir
from cachetool.core.closing import Closing
from cachetool.core.errors import UsageError, without
from cachetool.loaders.snapshots.waiting import say

try:
    import torch
except ModuleNotFoundError as error:
    raise without("torch", "torch", error) from None
from torch.utils.data import Dataset, Sampler, get_worker_info

from cachetool.core.text import shown
from cachetool.core.units import parse_flag, parse_text, parse_whole
from cachetool.loaders.loader import CacheOrPaths
from cachetool.loaders.order import Int64s, decode, encode, order, parse_epoch, share
from cachetool.loaders.other_names import OF_DATASETS, answering
from cachetool.loaders.ranks import given, on_node, require_node
from cachetool.loaders.read.gather import Parts, Places, gather
from cachetool.loaders.read.lmdb_file import is_lmdb, only_lmdb, open_lmdb, subscribe_file
from cachetool.loaders.read.mapped import MappedParts
from cachetool.loaders.settings import rows
from cachetool.loaders.snapshots.follow import Subscription, launched_run, subscribe
from cachetool.loaders.snapshots.indexed import Check, Views, usable
from cachetool.loaders.snapshots.resume import (
    STATE,
    Resume,
    are_rows,
    is_resume,
    is_whole,
    places,
    require_same,
    require_state,
)
from cachetool.loaders.torch_device import DevicePrefetcher
from cachetool.loaders.torch_loader import Loader
from cachetool.loaders.torch_values import (
    Sample,
    Samples,
    TensorList,
    empty_tensors,
    finished,
    initialised,
    least,
    world,
)
from cachetool.proc.disk import parse_location

__all__ = [
    "CacheDataset",
    "DevicePrefetcher",
    "EpochSampler",
    "LMDBDataset",
    "Loader",
    "Samples",
    "TensorList",
]


_NEEDS_RUN = "several processes need run=NAME on their datasets, the same on each, to share snapshots"
_MODULE = "accelerate.data_loader"
_DIVIDERS = ("BatchSamplerShard", "DataLoaderDispatcher")
"""Classes of that module that give each process a part of what the sampler returns."""


def _check_sharded_once(*, rank: int, world_size: int, run: str | None) -> bool:
    """Check that the caller, a sampler for process ``rank`` of ``world_size``, is not divided a second time.

    Called when the sampler is asked for its first index. Prints one line to stderr on rank 0 if it is divided twice,
    and returns whether it did. Raises :class:`UsageError` for a sampler of all samples that Accelerate divides while
    the dataset has no ``run``: each process would then divide a snapshot of its own.
    """
    divider = _divider()
    if divider is None:
        return False
    if world_size == 1:
        # A dispatcher reads on one process, for all of them.
        if run is None and divider != "DataLoaderDispatcher":
            raise UsageError(_NEEDS_RUN)
        return False
    if rank:
        return False  # rank 0 prints it for all
    say(
        f"Accelerate divides the samples of this EpochSampler, rank {rank} of {world_size}, among the processes a"
        " second time, so many samples are never trained; use EpochSampler(dataset, rank=0, world_size=1)"
    )
    return True


def _divider() -> str | None:
    """Return the class of the object of Accelerate that asks for the next index and divides it among processes.

    The call stack says so. Neither the environment nor ``PartialState`` does: a program with Accelerate also has
    DataLoaders that it does not prepare, and there a sampler with a rank is right. Accelerate is looked up in
    ``sys.modules``, because importing it takes seconds, and a program without it has no such frames.
    """
    if _MODULE not in sys.modules:
        return None
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_globals.get("__name__") == _MODULE:
            owner = frame.f_locals.get("self")
            # The HF Trainer sets num_processes=1 on a BatchSamplerShard that is not to divide.
            state = getattr(owner, "state", None)  # of a DataLoaderDispatcher
            processes = getattr(owner, "num_processes", getattr(state, "num_processes", 1))
            if type(owner).__name__ in _DIVIDERS and processes > 1:
                return type(owner).__name__
        frame = frame.f_back  # type: ignore[assignment]
    return None


class _MapDataset(Closing, Dataset[Sample]):
    """What both datasets are: views that are taken again when asked, and the open parts they are read from."""

    def __init__(
        self, subscription: Subscription, parts: Places, fields: Sequence[str] | None, *, check: Check = usable
    ) -> None:
        self._parts = parts
        self._closed = False
        try:
            self._views = Views(subscription, check=check, changed=self._parts.keep)
            schema = self._views.plain().schema
            self.schema = schema if fields is None else schema.select(fields)
            """The fields of a sample."""
        except BaseException:
            subscription.close()
            raise

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of the numbers of the field ``label``, as ``pull --label-from-folder int`` numbered them; empty where
        no field has such names."""
        return self._views.plain().schema.classes

    @property
    def version(self) -> int:
        """The version of the catalog that plain indices mean; 1 for plain files."""
        return self._views.version

    def refresh(self, *, epoch: int | None = None, sparing: bool = False) -> int:
        """Take the newest snapshot, give the one before it back, and return the number of samples.

        To be called between epochs, where the dataset was made; :class:`EpochSampler` does it by itself. Processes of
        one ``run`` get the same snapshot for the same ``epoch``. ``sparing``: the newest samples of a full cache that
        nobody read yet may be left for the next snapshot, which would have nothing new. Raises :class:`UsageError` in a
        DataLoader's worker.
        """
        if get_worker_info() is not None:
            raise UsageError("refresh() belongs to the process that made the dataset, not to a worker of a DataLoader")
        self._require_open()
        return self._views.refresh(epoch=epoch, sparing=sparing).samples

    def __len__(self) -> int:
        return self._views.plain().samples

    def __getitem__(self, index: int) -> Sample:
        return self.__getitems__([operator.index(index)])[0]

    def __getitems__(self, indices: Sequence[int]) -> Samples:
        """The samples at these indices, read together; all of one snapshot. DataLoader calls this."""
        self._require_open()
        version = max(0, decode(int(indices[0]))[0]) if len(indices) else 0
        view = self._views.at(version) if version else self._views.plain()
        base = encode(version, 0)
        places = [int(index) - base for index in indices]
        if any(abs(place) >= 2**63 for place in places):  # beyond what NumPy takes
            raise IndexError(f"sample {shown(places[0])} of a dataset of {view.samples}")
        at = np.array(places, dtype=np.int64)
        if not version:
            at[at < 0] += view.samples
        elif int(at.min()) < 0 or decode(int(at.max()))[0]:
            raise UsageError("one batch has indices of two snapshots; draw a batch from one epoch of one sampler")
        tensors: dict[str, torch.Tensor] = {}
        columns = gather(view, at, self._parts, self.schema, empty=empty_tensors(tensors))
        return Samples({f.name: finished(f, columns[f.name], tensors.get(f.name)) for f in self.schema}, len(at))

    def collate(self, batch: Sequence[Sample]) -> Sample:
        """A batch as one dict: numeric fields stacked, (k, *shape); ragged ones a :class:`TensorList` or list; bytes
        and str a list. For ``DataLoader(collate_fn=dataset.collate)``: samples read together are one batch already."""
        if isinstance(batch, Samples):
            return dict(batch.columns)
        columns = {field.name: [sample[field.name] for sample in batch] for field in self.schema}
        return {f.name: torch.stack(columns[f.name]) if f.kind == "fixed" else columns[f.name] for f in self.schema}

    def served(self) -> None:
        """Count one epoch for the shards of the present snapshot (``stats``, ``--min-epochs``)."""
        self._views.served()

    def close(self) -> None:
        """Give the lease back and close all files. May be called twice; in a copy it does nothing to the original."""
        self._closed = True
        self._views.close()
        self._parts.close()

    def _require_open(self) -> None:
        if self._closed:
            raise UsageError(f"this {type(self).__name__} was closed")


class CacheDataset(_MapDataset):
    """The samples of a dataset of a cache, in any format: uncompressed shards straight out of memory maps.

    ``cache_or_paths`` is a cache or its folder; or a folder that ``cachetool convert --out`` wrote, one of its files,
    or a list of such. ``fields`` chooses and orders the fields of a sample. ``dataset`` is needed when the cache holds
    several. ``run`` names the training run when several processes share it (default: from torchrun's or Slurm's
    environment).

    It holds a lease until :meth:`close`, the end of the ``with`` block, its collection, or the end of the process. It
    belongs to one thread at a time; it may be forked and pickled, and a copy holds no lease.

    Raises :class:`UsageError` for a cache, dataset or field that is not there.
    """

    @answering(OF_DATASETS)
    def __init__(
        self,
        cache_or_paths: CacheOrPaths,
        *,
        fields: Sequence[str] | None = None,
        dataset: str | None = None,
        run: str | None = None,
    ) -> None:
        self.run = launched_run() if run is None else parse_text(run, what="run=") or None
        super().__init__(subscribe(cache_or_paths, dataset=dataset, run=self.run), MappedParts(), fields)


class LMDBDataset(_MapDataset):
    """The samples of LMDB shards, read by py-lmdb: one environment a file and process, opened at its first use.

    As :class:`CacheDataset`, and ``cache`` may also be a single LMDB file (or the folder of one): one of ours, or with
    ``value_format="raw"`` one of others, whose samples are ``key`` and ``value``, both bytes, in key order.

    Raises :class:`UsageError`, naming the format, for a dataset whose shards are in another one.
    """

    @answering(OF_DATASETS)
    def __init__(
        self,
        cache: CacheDir | str | Path,
        *,
        fields: Sequence[str] | None = None,
        dataset: str | None = None,
        run: str | None = None,
        value_format: str | None = None,
    ) -> None:
        self.run = launched_run() if run is None else parse_text(run, what="run=") or None
        if not isinstance(cache, CacheDir) and is_lmdb(path := Path(parse_location(cache, what="cache="))):
            subscription: Subscription = subscribe_file(path, value_format=value_format)
        elif value_format is not None:
            raise UsageError(f"value_format= goes with an LMDB file of others, not with {cache}")
        else:
            subscription = subscribe(cache, dataset=dataset, run=self.run)
        super().__init__(subscription, Parts(open_lmdb), fields, check=only_lmdb)


class EpochSampler(Sampler[int]):
    """The order of an epoch over the newest snapshot: every ``iter()`` refreshes the dataset first.

    The order is decided by ``seed``, the number of the epoch and the number of samples alone; ``shuffle=False`` goes
    through the samples oldest first. With several processes (``rank`` of ``world_size``; default: those of
    torch.distributed or of the launcher's environment) all use the same snapshot, so the dataset needs its ``run``, and
    no two read the same sample; ``drop_last`` leaves out the remainder, at most ``world_size - 1`` samples, another one
    every epoch, so that all take the same number of steps. Without it some ranks may take one step more. By default
    only the ranks of its node divide a cache that holds one node's share of its source, and the ranks of all nodes
    agree on the least number of samples.

    torchdata's StatefulDataLoader goes on in the middle of an epoch, with the samples it had, although the cache has
    grown since: the iterator has a state of its own.

    Accelerate divides a prepared ``DataLoader`` among the processes by itself: use ``rank=0, world_size=1`` there, on
    each process. All processes of one run then use the same snapshot as well.

    Its indices carry the number of the snapshot: workers that outlive the epoch read the right list of shards, and an
    index whose shard was evicted raises :class:`UsageError`. Raises :class:`UsageError` where the cache has less than
    one sample for each process.
    """

    def __init__(
        self,
        dataset: _MapDataset,
        *,
        shuffle: bool = True,
        seed: int = 0,
        rank: int | None = None,
        world_size: int | None = None,
        drop_last: bool = True,
    ) -> None:
        if not hasattr(dataset, "refresh"):
            raise UsageError(f"an EpochSampler is of a CacheDataset or LMDBDataset, not of {type(dataset).__name__}")
        self._dataset = dataset
        self._shuffle, self._drop_last = parse_flag(shuffle, what="shuffle="), parse_flag(drop_last, what="drop_last=")
        self._seed = parse_whole(seed, what="seed=")
        place = given(rank, world_size)
        self.rank, self.world_size = place or world()
        self._agrees = place is None and self.world_size > 1 and initialised() and dataset._views.plain().in_parts
        """Whether the ranks of other nodes have other caches, and must take as many steps."""
        if place is None and dataset._views.plain().in_parts:
            self.rank, self.world_size = require_node(on_node(self.world_size))
        self.epoch = 0
        """Number of the epoch that the next ``iter()`` begins."""
        if self.world_size > 1 and getattr(dataset, "run", None) is None:
            raise UsageError(_NEEDS_RUN)
        self._warned = False

    def set_epoch(self, epoch: int) -> None:
        """Let the next ``iter()`` begin epoch number ``epoch``: to go on after a restart."""
        self.epoch = parse_epoch(epoch)

    def __len__(self) -> int:
        """Number of indices of the present snapshot; the next epoch may have more."""
        return share(len(self._dataset), rank=self.rank, world_size=self.world_size, drop_last=self._drop_last)

    def __iter__(self) -> Iterator[int]:
        """Return the indices of an epoch; the iterator has ``state_dict`` and ``load_state_dict``."""
        return _EpochIndices(self)


class _EpochIndices(Iterator[int]):
    """The indices of one epoch of a sampler, which ``torchdata``'s StatefulDataLoader saves and goes on with.

    A DataLoader draws indices ahead of the batches that it delivers. It asks for the state after each batch that it
    draws, and keeps the state of the batch that it delivered last: so the state belongs to the iterator, and is cheap.
    """

    def __init__(self, sampler: EpochSampler) -> None:
        self._sampler = sampler
        self._indices: Iterator[int] | None = None  # before the first index was asked for
        self._resume: Resume | None = None
        """The beginning of this epoch, once its samples are known."""
        self._epoch: int | None = None
        self._given = 0
        """Indices of this rank since."""

    def __next__(self) -> int:
        if self._indices is None:
            # The old snapshot stays leased until the first index is asked for, when workers of an epoch that was broken
            # off have finished what was still in flight.
            self._indices = self._begun()
        index = next(self._indices, None)
        if index is None:
            raise StopIteration
        self._given += 1
        return index

    def _begun(self) -> Iterator[int]:
        sampler, dataset = self._sampler, self._sampler._dataset
        epoch = self._epoch = sampler.epoch if self._epoch is None else self._epoch
        sampler.epoch = epoch + 1
        run = getattr(dataset, "run", None)
        if not sampler._warned:
            sampler._warned = _check_sharded_once(rank=sampler.rank, world_size=sampler.world_size, run=run)
        # Somebody else may divide the indices of a sampler for all samples among the processes of the job, which is
        # right only if all of them use one snapshot.
        shared = sampler.world_size > 1 or (
            run is not None and initialised() and torch.distributed.get_world_size() > 1
        )
        resume, where = self._resume, None
        samples = dataset.refresh(epoch=epoch if shared else None, sparing=resume is None)
        view = dataset._views.plain()
        if resume is not None:
            where = places(view, resume)
        elif samples < sampler.world_size:
            raise UsageError(f"{samples} samples are too few for {sampler.world_size} processes; pull more first")
        self._resume = resume or Resume(0, samples, rows(view.parts))
        return self._sample_indices(self._resume, epoch, encode(dataset.version, 0), where)

    def _sample_indices(
        self, resume: Resume, epoch: int, base: int, where: Callable[[Int64s], Int64s] | None
    ) -> Iterator[int]:
        sampler = self._sampler
        ranks: dict[str, Any] = {
            "rank": sampler.rank,
            "world_size": sampler.world_size,
            "drop_last": sampler._drop_last,
        }
        count = share(resume.samples - resume.position, **ranks)
        if sampler._agrees:
            (count,) = least(count)
        blocks = order(
            resume.samples,
            shuffle=sampler._shuffle,
            seed=sampler._seed,
            epoch=epoch,
            position=resume.position,
            **ranks,
        )
        for block in blocks:
            block, count = block[:count], count - len(block[:count])
            for index in (block if where is None else where(block)).tolist():
                yield base + index
        if sampler.rank == 0:
            sampler._dataset.served()

    def state_dict(self) -> dict[str, Any]:
        """Return how far this epoch is, and the shards that it reads, as plain values.

        With several ranks the state of each says the same once all have taken as many steps.
        """
        epoch = self._sampler.epoch if self._epoch is None else self._epoch
        state = {"state": STATE, **self._order(), "epoch": epoch, "position": 0}
        if (resume := self._resume) is None:
            return state
        reached = min(resume.samples, resume.position + self._given * self._sampler.world_size)
        return state | resume._replace(position=reached)._asdict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where ``state_dict`` was called, with the samples of that epoch, although the cache has grown since.

        Raises :class:`UsageError` for what is no such state, or that of a sampler with another ``seed`` or ``shuffle``;
        the first index raises it where shards of that epoch were evicted.
        """
        began = isinstance(state, dict) and state.get("parts") is not None
        kinds = {"epoch": is_whole, "position": is_whole} | ({"samples": is_whole, "parts": are_rows} if began else {})
        require_state(state, kinds, of="EpochSamplers")
        where = {name: state[name] for name in Resume._fields} if began else None
        if not is_resume(where) or (not began and state["position"]):
            raise UsageError("not a state of EpochSamplers: it has read more samples than its shards hold")
        own = self._order()
        require_same({name: state.get(name) for name in own}, own, of="EpochSampler")
        self._epoch, self._indices, self._given = int(state["epoch"]), None, 0
        self._sampler.epoch = self._epoch + 1  # of an epoch that ended StatefulDataLoader asks for the next at once
        self._resume = Resume.of(where)

    def _order(self) -> dict[str, Any]:
        return {"seed": self._sampler._seed, "shuffle": self._sampler._shuffle}
