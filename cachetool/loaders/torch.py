"""Map-style datasets for :class:`torch.utils.data.DataLoader`, over a cache that grows.

::

    dataset = CacheDataset("data/cache", fields=["image", "label"])
    sampler = EpochSampler(dataset, seed=0)                       # takes the newest snapshot at every epoch
    loader = DataLoader(dataset, batch_size=64, sampler=sampler, num_workers=4, persistent_workers=True,
                        collate_fn=dataset.collate)

A sample is a dict: numbers and arrays as tensors (datetime64 as int64), bytes and str unchanged. Each process opens
files at their first use, so workers may be started by any method. Snapshots and their leases stay in the process that
made the dataset. Workers look up the list of shards to which an index belongs
(:mod:`cachetool.loaders.snapshots.indexed`).

Accelerate divides the samples of a ``DataLoader`` among processes; an :class:`EpochSampler` can do that already.

::

    EpochSampler(rank=0, world_size=2)    every second sample
    BatchSamplerShard(num_processes=2)    every second batch of those: half of the samples are never trained

``accelerator.prepare(DataLoader(dataset, sampler=EpochSampler(dataset)))`` wraps the sampler without an error. Only the
sampler can detect this, when it is asked for its first index.
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
from cachetool.core.docstrings import arguments_of
from cachetool.core.errors import UsageError, without
from cachetool.loaders.snapshots.waiting import say

try:
    import torch
except ModuleNotFoundError as error:
    raise without("torch", "torch", error) from None
from torch.utils.data import Dataset, Sampler, get_worker_info

from cachetool.core.text import shown
from cachetool.core.units import parse_flag, parse_text, parse_whole
from cachetool.loaders.decode import JPEG
from cachetool.loaders.loader import CacheOrPaths
from cachetool.loaders.order import Int64s, decode, encode, order, parse_epoch, share
from cachetool.loaders.other_names import OF_DATASETS, answering
from cachetool.loaders.padding import Pad
from cachetool.loaders.ranks import given, on_node, require_node
from cachetool.loaders.read.gather import Parts, Places
from cachetool.loaders.read.lmdb_file import is_lmdb, only_lmdb, open_foreign, subscribe_file
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
from cachetool.loaders.torch_columns import columns_of
from cachetool.loaders.torch_device import DevicePrefetcher
from cachetool.loaders.torch_loader import Loader
from cachetool.loaders.torch_values import (
    Sample,
    Samples,
    TensorList,
    initialised,
    least,
    world,
)
from cachetool.proc.disk import parse_location

__all__ = [
    "JPEG",
    "CacheDataset",
    "DevicePrefetcher",
    "EpochSampler",
    "LMDBDataset",
    "Loader",
    "Pad",
    "Samples",
    "TensorList",
]


_NEEDS_RUN = "several processes need the same run=NAME on all their datasets to share snapshots"
_MODULE = "accelerate.data_loader"
_DIVIDERS = ("BatchSamplerShard", "DataLoaderDispatcher")
"""Classes of that module that give each process a part of the sampler's indices."""


def _check_sharded_once(*, rank: int, world_size: int, run: str | None) -> bool:
    """Check that Accelerate does not divide the samples of a sampler, process ``rank`` of ``world_size``, a second
    time.

    Called when the sampler is asked for its first index. If the samples are divided twice, this prints one line to
    stderr on rank 0 and returns True. Raises :class:`UsageError` for a sampler of all samples that Accelerate divides
    while the dataset has no ``run``.
    """
    divider = _divider()
    if divider is None:
        return False
    if world_size == 1:
        # Without a run each process would divide a snapshot of its own, and samples would be lost or read twice. A
        # dispatcher reads on one process for all of them, so it needs no run.
        if run is None and divider != "DataLoaderDispatcher":
            raise UsageError(_NEEDS_RUN)
        return False
    # The samples are divided twice on all ranks, so one line by rank 0 is enough.
    if rank:
        return False
    say(
        f"Accelerate divides the samples of this EpochSampler, rank {rank} of {world_size}, among the processes a"
        " second time, and then many samples are never trained; use EpochSampler(dataset, rank=0, world_size=1)"
    )
    return True


def _divider() -> str | None:
    """Return the name of the class of Accelerate that asks for the next index and divides it; None if there is none."""
    # Accelerate is looked up, not imported: its import takes seconds, and a program without it has no such frames.
    if _MODULE not in sys.modules:
        return None
    # Only the call stack says it. The environment and PartialState do not: a program with Accelerate may also have
    # DataLoaders that it does not prepare, and for these a sampler with a rank is right.
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_globals.get("__name__") == _MODULE:
            owner = frame.f_locals.get("self")
            # A DataLoaderDispatcher has the number in its state. The Hugging Face Trainer sets num_processes=1 on a
            # BatchSamplerShard that must not divide.
            state = getattr(owner, "state", None)
            processes = getattr(owner, "num_processes", getattr(state, "num_processes", 1))
            if type(owner).__name__ in _DIVIDERS and processes > 1:
                return type(owner).__name__
        frame = frame.f_back  # type: ignore[assignment]
    return None


class _MapDataset(Closing, Dataset[Sample]):
    """A dataset for ``DataLoader`` over a snapshot, which :meth:`refresh` takes anew."""

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
            # A dataset that could not be made, for example because of an unknown field, must not keep its lease.
            subscription.close()
            raise

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of the classes that the numbers of the field ``label`` stand for: name i belongs to number i.

        ``pull --label-from-folder int`` stores these names. Empty if no field has names.
        """
        return self._views.plain().schema.classes

    @property
    def version(self) -> int:
        """The catalog version of the present snapshot; 1 for plain files."""
        return self._views.version

    def refresh(self, *, epoch: int | None = None, sparing: bool = False) -> int:
        """Take the newest snapshot and end the lease of the snapshot before it.

        Call this method between epochs, in the process that made the dataset. :class:`EpochSampler` calls it by itself.

        Args:
            epoch: Number of the epoch. Processes of one ``run`` get the same snapshot for the same number. Default:
                none; the newest snapshot.
            sparing: True: in a full cache the newest samples that nobody has read yet may be left for the next
                snapshot, so that the next epoch has new samples too. Default: False.

        Returns:
            The number of samples in the snapshot.

        Raises:
            UsageError: The call comes from a worker of a ``DataLoader``, or the dataset was closed.
        """
        if get_worker_info() is not None:
            raise UsageError("call refresh() in the process that created the dataset, not in a worker of a DataLoader")
        self._require_open()
        return self._views.refresh(epoch=epoch, sparing=sparing).samples

    def __len__(self) -> int:
        return self._views.plain().samples

    def __getitem__(self, index: int) -> Sample:
        return self.__getitems__([operator.index(index)])[0]

    def __getitems__(self, indices: Sequence[int]) -> Samples:
        """Return the samples at ``indices`` of one snapshot, read together; ``DataLoader`` calls this method."""
        self._require_open()
        version = max(0, decode(int(indices[0]))[0]) if len(indices) else 0
        view = self._views.at(version) if version else self._views.plain()
        try:
            at = np.fromiter(map(int, indices), dtype=np.int64, count=len(indices)) - encode(version, 0)
        except OverflowError:
            # PyTorch expects an IndexError for an index outside of a dataset.
            far = next(index for index in map(int, indices) if not -(2**63) <= index < 2**63)
            raise IndexError(f"index {shown(far)} is outside a dataset of {view.samples} samples") from None
        if not version:
            # Only an index without a version may be negative, as in a list. An index with a version is never negative.
            outside = at[(at < -view.samples) | (at >= view.samples)]
            if len(outside):
                raise IndexError(f"index {outside[0]} is outside a dataset of {view.samples} samples")
            at[at < 0] += view.samples
        elif int(at.min()) < 0 or decode(int(at.max()))[0]:
            raise UsageError("a batch has indices of two snapshots; use indices from one epoch of one sampler")
        located = self._parts.locate(view, at, self.schema)
        # In a worker the values are copied once, into the memory in which a batch reaches the training process.
        shared = get_worker_info() is not None
        return Samples(columns_of(located, len(at), self.schema, shared=shared), len(at))

    def collate(self, batch: Sequence[Sample]) -> Sample:
        """Return a batch as one dict; pass this method as ``collate_fn`` to a ``DataLoader``.

        Args:
            batch: Samples of this dataset: dicts, or the :class:`Samples` that ``DataLoader`` gets.

        Returns:
            Field to value: a tensor of shape (k, *shape) for numbers, a :class:`TensorList` or list for a ragged field,
            a list of k values for ``bytes`` and ``str``.
        """
        if isinstance(batch, Samples):
            return dict(batch.columns)
        columns = {field.name: [sample[field.name] for sample in batch] for field in self.schema}
        return {f.name: torch.stack(columns[f.name]) if f.kind == "fixed" else columns[f.name] for f in self.schema}

    def served(self) -> None:
        """Count one epoch for the shards of the present snapshot, for ``cachetool stats`` and ``--min-epochs``."""
        self._views.served()

    def close(self) -> None:
        """End the lease and close all files. May be called twice; in a copy it does nothing to the original."""
        self._closed = True
        self._views.close()
        self._parts.close()

    def _require_open(self) -> None:
        if self._closed:
            raise UsageError(f"this {type(self).__name__} was closed")


class CacheDataset(_MapDataset):
    """A map-style dataset for ``torch.utils.data.DataLoader``: the samples of a cache, in any format.

    A sample is a dict from field to value: a tensor for numbers (``datetime64`` as int64), ``bytes`` and ``str`` as
    they are. Uncompressed shards are read from memory maps. The dataset holds a lease until :meth:`close`, the end of
    its ``with`` block, or the end of the process. It may be forked and pickled; a copy holds no lease. Use it in one
    thread at a time. Use it with :class:`EpochSampler`, or growth is not seen.

    Args:
        cache_or_paths: The samples: an open cache, or the folder of a cache. Or files outside any cache: a folder that
            ``cachetool convert --out`` wrote, one of its files, or a list of such folders and files.
        fields: Names of the fields of a sample, in this order. Default: all fields.
        dataset: Name of the dataset of the cache. Default: ``"default"``, or the only dataset.
        run: Name of the training run, the same on all its ranks, which then share snapshots. Default: a name from the
            environment of torchrun or Slurm.

    Raises:
        UsageError: There is no such cache, dataset or field, or the dataset is empty.

    Example:
        >>> from torch.utils.data import DataLoader
        >>> from cachetool.loaders.torch import CacheDataset, EpochSampler
        >>> with CacheDataset("data/cache", fields=["volume", "label"]) as dataset:
        ...     sampler = EpochSampler(dataset, seed=0)
        ...     loader = DataLoader(dataset, batch_size=8, sampler=sampler, collate_fn=dataset.collate)
        ...     [len(batch["label"]) for batch in loader]
        [8, 8, 8]
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


@arguments_of(CacheDataset, "fields", "dataset", "run")
class LMDBDataset(_MapDataset):
    """A map-style dataset over LMDB shards, or over one LMDB file.

    Files of cachetool are read from memory maps, those of other programs by py-lmdb. Each process opens each file once,
    at its first use. Everything else is as for :class:`CacheDataset`.

    Args:
        cache: An open cache, the folder of a cache, or a single LMDB file (or the folder of one).
        value_format: ``"raw"`` for an LMDB file that another program wrote: its samples are ``key`` and ``value``, both
            ``bytes``, in key order. Default: a file of cachetool.

    Raises:
        UsageError: Shards of the dataset are in another format; ``value_format`` is missing for a file of another
            program, or given for a cache; or there is no such cache, dataset or field.

    Example:
        >>> from cachetool.loaders.torch import LMDBDataset
        >>> with LMDBDataset("data/cache", fields=["label"]) as dataset:
        ...     len(dataset), dataset[0]["label"].dtype
        (24, torch.int64)
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
            raise UsageError(f"value_format= is only for LMDB files of other programs, not for {cache}")
        else:
            subscription = subscribe(cache, dataset=dataset, run=self.run)
        parts = MappedParts() if value_format is None else Parts(open_foreign)
        super().__init__(subscription, parts, fields, check=only_lmdb)


class EpochSampler(Sampler[int]):
    """A sampler that takes the newest snapshot of a dataset for each epoch and yields its indices.

    ``seed``, the number of the epoch and the number of samples decide the order. With several processes all use the
    same snapshot, and no two read the same sample; the dataset then needs a ``run``. torchdata's ``StatefulDataLoader``
    can resume in the middle of an epoch, with the samples that the epoch had. Accelerate divides a prepared
    ``DataLoader`` among the processes by itself: there give ``rank=0, world_size=1`` on each process.

    Args:
        dataset: A :class:`CacheDataset` or :class:`LMDBDataset`.
        shuffle: True: a random order. False: the oldest samples first. Default: True.
        seed: Whole number that decides the random order. Default: 0.
        rank: Number of this process among those that divide the samples, from 0. Give it together with ``world_size``.
            Default: the rank of torch.distributed, or ``RANK`` in the environment. A cache that holds one node's share
            of its source is then divided by the ranks of that node only, and the ranks of all nodes agree on the least
            number of samples.
        world_size: Number of processes that divide the samples. Default: see ``rank``.
        drop_last: True: leave out the remainder, at most ``world_size - 1`` samples, so that all ranks take the same
            number of steps. False: some ranks may take one step more. Default: True.

    Attributes:
        epoch: Number of the epoch that the next ``iter()`` begins.

    Raises:
        UsageError: ``dataset`` is another kind of dataset; several processes have no ``run``; an argument cannot be
            used; or, while iterating, the cache has fewer samples than processes or a shard of the epoch was evicted.

    Example:
        >>> from cachetool.loaders.torch import CacheDataset, EpochSampler
        >>> with CacheDataset("data/cache") as dataset:
        ...     sampler = EpochSampler(dataset, seed=0, rank=0, world_size=1)
        ...     len(sampler), len(list(sampler))
        (24, 24)
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
            raise UsageError(f"EpochSampler needs a CacheDataset or LMDBDataset, not {type(dataset).__name__}")
        self._dataset = dataset
        self._shuffle, self._drop_last = parse_flag(shuffle, what="shuffle="), parse_flag(drop_last, what="drop_last=")
        self._seed = parse_whole(seed, what="seed=")
        place = given(rank, world_size)
        self.rank, self.world_size = place or world()
        self._agrees = place is None and self.world_size > 1 and initialised() and dataset._views.plain().in_parts
        """True if ranks of other nodes have other caches, and all ranks must take the same number of steps."""
        if place is None and dataset._views.plain().in_parts:
            self.rank, self.world_size = require_node(on_node(self.world_size))
        self.epoch = 0
        """Number of the epoch that the next ``iter()`` begins."""
        if self.world_size > 1 and getattr(dataset, "run", None) is None:
            raise UsageError(_NEEDS_RUN)
        self._warned = False

    def set_epoch(self, epoch: int) -> None:
        """Let the next ``iter()`` begin epoch number ``epoch``, to continue after a restart.

        Args:
            epoch: Number of the epoch, 0 or more.

        Raises:
            UsageError: ``epoch`` is not a whole number of 0 or more.
        """
        self.epoch = parse_epoch(epoch)

    def __len__(self) -> int:
        """Return the number of indices of the present snapshot; the next epoch may have more."""
        return share(len(self._dataset), rank=self.rank, world_size=self.world_size, drop_last=self._drop_last)

    def __iter__(self) -> Iterator[int]:
        """Return the indices of an epoch; the iterator has ``state_dict`` and ``load_state_dict``."""
        return _EpochIndices(self)


class _EpochIndices(Iterator[int]):
    """The indices of one epoch of a sampler, with the state that ``torchdata``'s StatefulDataLoader saves."""

    # The state belongs to the iterator, not to the sampler. A DataLoader draws indices ahead of the batches that it
    # delivers, asks for the state after each batch that it draws, and keeps the state of the batch that it delivered
    # last. So the state must be cheap too.
    def __init__(self, sampler: EpochSampler) -> None:
        self._sampler = sampler
        self._indices: Iterator[int] | None = None
        """Indices of the epoch; None before the first one was asked for."""
        self._resume: Resume | None = None
        """Position at which this epoch began, once its samples are known."""
        self._epoch: int | None = None
        self._given = 0
        """Number of indices of this rank since that position."""

    def __next__(self) -> int:
        if self._indices is None:
            # The new snapshot is taken now and not in __init__(), so the old one stays leased until workers of an
            # interrupted epoch have finished the batches that were in flight.
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
        # Accelerate may divide the indices of a sampler of all samples among the processes. This is right only if all
        # processes use one snapshot, so a run with several processes counts as shared too.
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
        # One rank counts the epoch for all; otherwise it would count once for each rank, and --min-epochs would end
        # early.
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
        """Continue where ``state_dict`` was called, with the samples of that epoch, although the cache has grown since.

        Raises :class:`UsageError` for what is no such state, or that of a sampler with another ``seed`` or ``shuffle``;
        the first index raises it where shards of that epoch were evicted.
        """
        began = isinstance(state, dict) and state.get("parts") is not None
        kinds = {"epoch": is_whole, "position": is_whole} | ({"samples": is_whole, "parts": are_rows} if began else {})
        require_state(state, kinds, of="EpochSamplers")
        where = {name: state[name] for name in Resume._fields} if began else None
        if not is_resume(where) or (not began and state["position"]):
            raise UsageError("this is not a state of EpochSamplers: it has read more samples than its shards hold")
        own = self._order()
        require_same({name: state.get(name) for name in own}, own, of="EpochSampler")
        self._epoch, self._indices, self._given = int(state["epoch"]), None, 0
        # StatefulDataLoader asks for the next epoch at once if this one has no index left.
        self._sampler.epoch = self._epoch + 1
        self._resume = Resume.of(where)

    def _order(self) -> dict[str, Any]:
        return {"seed": self._sampler._seed, "shuffle": self._sampler._shuffle}
