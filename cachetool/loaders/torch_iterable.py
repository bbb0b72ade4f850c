"""An iterable-style dataset for :class:`torch.utils.data.DataLoader`, over a cache that grows.

::

    dataset = CacheIterableDataset("data/cache", batch_size=64, seed=0)
    loader = DataLoader(dataset, batch_size=None, num_workers=4)         # or torchdata's StatefulDataLoader
    for epoch in range(90):
        for batch in loader:                                             # epoch k + 1 sees what arrived during epoch k

One order of all samples is cut into batches; batch i of a rank is made by worker i modulo their number, so that the
order in which they come does not depend on it. With ``batch_size=None`` it gives single samples, some dozens in a row
from one worker, for a DataLoader that makes the batches.

Snapshots: every iteration takes the newest one, which its workers agree on
(:mod:`cachetool.loaders.torch_iterable`) and lease themselves. With several ranks all must read the same one: there
it is taken, and kept, in the process that made the dataset, by :meth:`CacheIterableDataset.set_epoch`.

Which epoch the workers of one iteration read, agreed among them: the first begins it, the others join.

::

    worker 0    takes the newest snapshot -> writes epoch, version, fingerprint, then who began it
    worker k    waits for that -> takes the same snapshot -> writes that it is there
    worker 0    at its own end: waits until all are there, since only its lease keeps what they are about to read

The workers of a DataLoader are all started before one of them can end, and none knows of an epoch but by being asked
for its iterator. The cells lie in shared memory that reaches them through fork, spawn and forkserver
(:mod:`cachetool.loaders.snapshots.indexed` has the same). What an earlier iteration with the same key left in them is
told by who wrote it, which has ended, or by who joined it, which was a worker of the same number. Of several iterations
at the same time each is begun when all workers of the one before have joined that.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.context import get_spawning_popen
from multiprocessing.sharedctypes import RawArray
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import IterableDataset, get_worker_info

from cachetool.core.errors import CacheToolError, UsageError
from cachetool.core.text import shown
from cachetool.core.units import is_one_of, parse_flag, parse_text, parse_whole
from cachetool.loaders.feed.batches import announced
from cachetool.loaders.loader import CacheOrPaths
from cachetool.loaders.order import SHUFFLES, Steps, parse_epoch
from cachetool.loaders.read.mapped import MappedParts
from cachetool.loaders.ring.memory import library, supported, wait
from cachetool.loaders.settings import EpochPlan, Settings, rows
from cachetool.loaders.snapshots.follow import launched_run, subscribe
from cachetool.loaders.snapshots.resume import (
    Resume,
    are_rows,
    is_whole,
    match_parts,
    require_order,
    require_seed,
    require_state,
)
from cachetool.loaders.torch_values import Sample, Samples, empty_tensors, finished, world
from cachetool.loaders.view import View

__all__ = ["CacheIterableDataset", "Call", "RollCall"]


_KEY, _PID, _EPOCH, _VERSION, _FINGERPRINT, _NEXT, _DONE, _WORKERS, _SEMAPHORE, _FIRST = *range(9), 16
_MOST = 1024  # workers
_POLL = 0.002
_PATIENCE = 120.0


class Call(NamedTuple):
    """What is read."""

    epoch: int
    version: int
    fingerprint: int


class RollCall:
    """Shared by a dataset and its copies in worker processes."""

    __slots__ = ("_cells",)

    def __init__(self, cells: list[int] | None = None) -> None:
        self._cells: Any = RawArray(ctypes.c_int64, _FIRST + _MOST)
        if cells is not None:
            self._cells[:] = cells
        else:
            self._cells[_DONE] = -1
        if supported():
            library(keeps_gil=True).sem_init(self._semaphore, 1, 1)

    @property
    def _semaphore(self) -> ctypes.c_void_p:
        """A semaphore that whoever begins an iteration takes down; it fills four cells."""
        return ctypes.c_void_p(ctypes.addressof(self._cells) + 8 * _SEMAPHORE)

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """While no other process begins an iteration; but nobody waits for ever for one that was killed."""
        if not supported():
            yield
            return
        end = time.monotonic() + _PATIENCE
        while not wait(self._semaphore, 1.0) and time.monotonic() < end:
            pass
        try:
            yield
        finally:
            library(keeps_gil=True).sem_post(self._semaphore)

    @property
    def next_epoch(self) -> int:
        """Number of the epoch that begins next."""
        return int(self._cells[_NEXT])

    @next_epoch.setter
    def next_epoch(self, epoch: int) -> None:
        self._cells[_NEXT] = epoch

    @property
    def done(self) -> int:
        """The last epoch that worker 0 read to its end; -1 before any."""
        return int(self._cells[_DONE])

    @done.setter
    def done(self, epoch: int) -> None:
        self._cells[_DONE] = epoch

    @contextlib.contextmanager
    def beginning(self, key: int, workers: int) -> Iterator[Callable[[Call], None]]:
        """To begin the iteration ``key`` of so many workers: gives what is to be told what it reads."""
        with self._alone():
            _until(self._all_joined, "another worker did not begin")
            yield functools.partial(self.begin, key, workers=workers)

    def begin(self, key: int, call: Call, *, workers: int = 1) -> None:
        """Say what the iteration ``key`` reads."""
        cells = self._cells
        cells[_KEY] = 0
        cells[_FIRST:] = [0] * _MOST
        cells[_PID], cells[_WORKERS] = os.getpid(), workers
        cells[_EPOCH], cells[_VERSION], cells[_FINGERPRINT] = call
        cells[_NEXT] = call.epoch + 1
        cells[_KEY] = key

    def _all_joined(self) -> bool:
        """Whether nobody is still to join the present iteration."""
        key, workers, cells = self._cells[_KEY], self._cells[_WORKERS], self._cells
        return not key or not _alive(cells[_PID]) or all(cell == key for cell in cells[_FIRST + 1 : _FIRST + workers])

    @property
    def current(self) -> Call:
        """What was begun last."""
        return Call(*(int(cell) for cell in self._cells[_EPOCH : _FINGERPRINT + 1]))

    def join(self, key: int, worker: int) -> Call:
        """What the iteration ``key`` reads, waited for."""
        if worker >= _MOST:
            raise UsageError(f"{worker + 1} workers are too many: at most {_MOST}")
        cells, own = self._cells, _FIRST + worker

        def begun() -> bool:
            # With the same seed for two epochs the key may be that of an earlier one, in which such a worker was.
            return bool(cells[_KEY] == key and cells[own] != key and _alive(cells[_PID]))

        _until(begun, "worker 0 has not begun the epoch")
        return self.current

    def arrived(self, key: int, worker: int) -> None:
        """Say that this worker holds what it is going to read."""
        self._cells[_FIRST + worker] = key

    def wait_for_all(self, key: int, workers: int) -> None:
        """Come back when all workers have arrived, as they have when another iteration was begun since."""
        others, cells = slice(_FIRST + 1, _FIRST + workers), self._cells
        _until(
            lambda: cells[_PID] != os.getpid() or all(cell == key for cell in cells[others]),
            "another worker did not begin",
        )

    def __reduce__(self) -> tuple[Callable[..., RollCall], tuple[Any]]:
        # Shared memory can only be handed to a child that is being started right now.
        if get_spawning_popen() is None:
            return RollCall, (list(self._cells),)
        return _attached, (self._cells,)


def _attached(cells: Any) -> RollCall:
    call = RollCall.__new__(RollCall)
    call._cells = cells
    return call


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def _until(condition: Callable[[], bool], complaint: str) -> None:
    parent, end = os.getppid(), time.monotonic() + _PATIENCE
    while not condition():
        if os.getppid() != parent or time.monotonic() > end:
            raise CacheToolError(f"{complaint}; was it killed?")
        time.sleep(_POLL)


_STATE = 1
_BEGUN = {
    "epoch": is_whole,
    "parts": are_rows,
    "row": lambda value: is_whole(value) and value > 0,
    "done": is_whole,
    "within": is_whole,
    "of": lambda value: isinstance(value, list | tuple) and len(value) == 4 and all(map(is_whole, value)),
}
_IN_A_ROW = 64  # samples that one worker gives before it is another's turn, at most
_ROW_BYTES = 2**23
_LEAST_ROWS = 4  # turns that each worker has at least, where there are samples enough


class CacheIterableDataset(IterableDataset[Sample]):
    """Every sample of the newest snapshot exactly once an epoch, over all workers and ranks.

    ``cache_or_paths``, ``fields``, ``shuffle``, ``seed`` and ``dataset`` are as for
    :class:`cachetool.loaders.numpy.Loader`.

    - ``batch_size=k``: gives batches as dicts (for ``DataLoader(batch_size=None)``), the same number on all ranks,
      sizes differing by at most one; ``drop_last`` leaves out the remainder so that all have k.
    - ``batch_size=None``: gives samples as dicts; with ``drop_last`` the same number on all ranks.
    - ``rank`` of ``world_size`` (default: those of torch.distributed or of the launcher's environment). With several,
      call :meth:`set_epoch` before each epoch on all of them, as with DistributedSampler; ``run`` names their job
      (default: from torchrun's or Slurm's environment).

    ``state_dict`` and ``load_state_dict`` are what ``torchdata.stateful_dataloader.StatefulDataLoader`` calls in every
    worker: an epoch that was broken off goes on with the samples it had, across growth, with the same number of
    workers and ranks.

    One iterator at a time in a process: the snapshot of the one before is given up, as when an iterator is left.

    Raises :class:`UsageError` for what cannot be read; iterating also :class:`CorruptError`.
    """

    def __init__(
        self,
        cache_or_paths: CacheOrPaths,
        *,
        batch_size: int | None = None,
        fields: Sequence[str] | None = None,
        shuffle: str | bool = "full",
        seed: int = 0,
        drop_last: bool = False,
        rank: int | None = None,
        world_size: int | None = None,
        dataset: str | None = None,
        run: str | None = None,
    ) -> None:
        super().__init__()
        self.rank, self.world_size = world(rank, world_size)
        if not 0 <= self.rank < self.world_size:
            raise UsageError(f"rank {self.rank} of a world of {self.world_size}: ranks are 0 to world_size - 1")
        batch_size = None if batch_size is None else parse_whole(batch_size, what="batch_size=")
        if batch_size is not None and batch_size < 1:
            raise UsageError(f"batch_size={batch_size} cannot be used: at least 1, or None for single samples")
        if not is_one_of(shuffle, SHUFFLES):
            raise UsageError(f"shuffle={shown(shuffle)} cannot be used: 'full', 'window' or False")
        run = launched_run() if run is None else parse_text(run, what="run=") or None
        self._led = self.world_size > 1
        if self._led and run is None:
            raise UsageError("several processes need run=NAME on their datasets, the same on each, to share snapshots")
        self.batch_size, self._drop_last = batch_size, parse_flag(drop_last, what="drop_last=")
        self._seed, self._shuffle = parse_whole(seed, what="seed="), SHUFFLES[shuffle]
        self._subscription = subscribe(cache_or_paths, dataset=dataset, run=run)
        schema = self._subscription.now().schema
        self.schema = schema if fields is None else schema.select(fields)
        """The fields of a sample."""
        self._token = secrets.token_hex(8)
        self._calls = RollCall()
        self._places = MappedParts()
        self._iterations = (0, 0, 0)  # pid, key of the workers' loader, iterations in this process so far
        self._resume: dict[str, Any] | None = None
        self._reading: _Reading | None = None
        self._leased: tuple[int, View] | None = None
        if self._led:
            self.set_epoch(0)

    # -- epochs --------------------------------------------------------------------------------------------------------

    def set_epoch(self, epoch: int) -> None:
        """Let the next iteration be epoch number ``epoch``; with several ranks on the newest snapshot, taken now.

        To be called on every rank, where the dataset was made. Raises :class:`UsageError` in a worker.
        """
        if get_worker_info() is not None:
            raise UsageError("set_epoch() belongs to the process that made the dataset, not to a worker")
        epoch = parse_epoch(epoch)
        if not self._led:
            self._calls.next_epoch = epoch
            return
        if self._leased is not None and self._leased[0] == epoch:
            return
        if self._leased is not None and self.rank == 0 and self._calls.done == self._leased[0]:
            self._subscription.served()
        view = self._subscription.newest(epoch=epoch)
        self._leased = epoch, view
        self._calls.begin(1, Call(epoch, view.version, view.fingerprint))

    def __len__(self) -> int:
        """Batches of this rank, or its samples with ``batch_size=None``, in what is there now; it may become more."""
        view = self._subscription.now() if self._leased is None else self._leased[1]
        if self.batch_size is not None:
            return Steps(view.samples, self.batch_size, self.rank, self.world_size, self._drop_last).count
        least, remainder = divmod(view.samples, self.world_size)
        return least + (self.rank < remainder and not self._drop_last)

    def __iter__(self) -> Iterator[Sample]:
        """This worker's share of an epoch."""
        info = get_worker_info()
        worker, workers = (0, 1) if info is None else (info.id, info.num_workers)
        state, self._resume = self._resume, None
        key = self._key(0 if info is None else info.seed - info.id, workers)
        epoch, view = self._begun(worker, workers, key, state)
        self._reading = self._read(epoch, view, worker, workers, state)
        return self._stream(self._reading, worker, workers, key)

    def _key(self, loader: int, workers: int) -> int:
        """What the workers of one iteration have in common: their loader's seed, their number, and how often it was
        iterated. (Loaders of different numbers of workers may have the same seed.)"""
        pid, before, count = self._iterations
        count = count + 1 if (pid, before) == (os.getpid(), loader) else 1
        self._iterations = os.getpid(), loader, count
        return (hash((loader, workers, count)) & (2**62 - 1)) + 1

    def _begun(self, worker: int, workers: int, key: int, state: dict[str, Any] | None) -> tuple[int, View]:
        """The number of the epoch, and the snapshot it reads, leased."""
        calls, subscription = self._calls, self._subscription
        epoch = None if state is None else state["epoch"]
        if self._led:
            call = calls.current
            view = self._leased[1] if get_worker_info() is None and self._leased else subscription.at(call.version)
            if view.fingerprint != call.fingerprint:
                raise UsageError("the snapshot of this epoch is over: call set_epoch() before every epoch")
            return (call.epoch if epoch is None else epoch), view
        # Who asks for the same epoch of the same run gets the same snapshot while anyone has it.
        run = f"{self._token} {key}"
        if worker == 0:
            with calls.beginning(key, workers) as begin:
                fresh, epoch = epoch is None, calls.next_epoch if epoch is None else epoch
                # No room is made by going on with one: what would go may be what it is to read.
                peek = state is not None and "parts" in state
                view = subscription.newest(epoch=epoch, run=run, sparing=fresh, peek=peek)
                begin(Call(epoch, view.version, view.fingerprint))
            return epoch, view
        call = calls.join(key, worker)
        view = subscription.newest(epoch=call.epoch, run=run)
        if view.fingerprint != call.fingerprint:
            raise UsageError("the workers of an epoch got different snapshots; iterate again")
        calls.arrived(key, worker)
        return call.epoch, view

    def _read(self, epoch: int, view: View, worker: int, workers: int, state: dict[str, Any] | None) -> _Reading:
        parts, done, within = rows(view.parts), 0, 0
        row = self.batch_size or self._row(view, workers)
        if state is not None and "parts" in state:
            parts, done, within, row = state["parts"], state["done"], state["within"], state["row"]
            if state["of"] != [worker, workers, self.rank, self.world_size]:
                was = "worker {} of {}, rank {} of {}"
                now = (worker, workers, self.rank, self.world_size)
                raise UsageError(
                    f"the state is of {was.format(*state['of'])}, this is {was.format(*now)}; go on with as many"
                )
            samples = sum(part[2] for part in parts)
            view, lost, _ = match_parts(view, Resume(0, samples, parts))
            if lost:
                raise UsageError(
                    f"{len(lost)} of {len(parts)} shards of the epoch to resume were evicted since; begin a new epoch"
                )
        samples = view.samples
        least = self.world_size * (self.batch_size or 1 if self._drop_last else 1)
        if samples < least:
            batches = f" with whole batches of {self.batch_size} (drop_last=True)" if least > self.world_size else ""
            raise UsageError(
                f"{samples} samples are too few for {self.world_size} rank{'s' * (self.world_size > 1)}{batches};"
                " pull more first"
            )
        spare = samples % self.world_size if self.batch_size is None and self._drop_last else 0
        return _Reading(EpochPlan(1, epoch, view, samples, spare=spare), self._settings(row), parts, [done, within])

    def _row(self, view: View, workers: int) -> int:
        """How many samples a worker gives in a row."""
        per_row = -(-view.samples // (self.world_size * workers * _LEAST_ROWS))
        return max(1, min(_IN_A_ROW, _ROW_BYTES // max(1, view.schema.fixed_nbytes), per_row))

    def _settings(self, row: int) -> Settings:
        return Settings(
            root="",
            batch_size=row,
            shuffle=self._shuffle,
            seed=self._seed,
            drop_last=self._drop_last and self.batch_size is not None,
            rank=self.rank,
            world_size=self.world_size,
        )

    def _stream(self, reading: _Reading, worker: int, workers: int, key: int) -> Iterator[Sample]:
        try:
            yield from self._samples(reading, worker, workers)
        except GeneratorExit:
            if self._reading is reading and not self._led:
                self._subscription.abandon()
            raise
        self._ended(reading.plan.epoch, worker, workers, key)

    def _samples(self, reading: _Reading, worker: int, workers: int) -> Iterator[Sample]:
        plan, settings, at = reading.plan, reading.settings, reading.at
        assert plan.view is not None
        self._places.keep(plan.view)
        steps = np.arange(worker, plan.steps(settings).count, workers, dtype=np.int64)[at[0] :]
        tensors: dict[str, torch.Tensor] = {}
        for _, indices in announced(plan, settings, steps, self._places, self.schema, feeders=workers):
            gathered = self._places.batches(plan.view, indices, self.schema, empty=empty_tensors(tensors))
            for batch_indices in indices:
                columns = next(gathered)
                batch = {f.name: finished(f, columns[f.name], tensors.get(f.name)) for f in self.schema}
                tensors.clear()
                if self.batch_size is not None:
                    at[0] += 1
                    yield batch
                    continue
                samples = Samples(batch, len(batch_indices))
                for number in range(at[1], len(batch_indices)):
                    at[:] = (at[0], number + 1) if number + 1 < len(batch_indices) else (at[0] + 1, 0)
                    yield samples[number]

    def _ended(self, epoch: int, worker: int, workers: int, key: int) -> None:
        if worker == 0:
            self._calls.done = epoch
        if self._led:
            return
        if worker == 0:
            self._calls.wait_for_all(key, workers)
            self._subscription.served()
        self._subscription.release()

    # -- state ---------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Where this copy of the dataset stands, as plain values: the epoch, its samples, what was given of them."""
        if self._reading is None:
            return self._resume or {"state": _STATE, "seed": self._seed, "epoch": self._calls.next_epoch}
        info, reading = get_worker_info(), self._reading
        worker, workers = (0, 1) if info is None else (info.id, info.num_workers)
        return {
            "state": _STATE,
            "seed": self._seed,
            "epoch": reading.plan.epoch,
            "parts": reading.parts,
            "order": self._order(),
            "row": reading.settings.batch_size,
            "done": reading.at[0],
            "within": reading.at[1],
            "of": [worker, workers, self.rank, self.world_size],
        }

    def _order(self) -> dict[str, Any]:
        """What the order of an epoch and its division depend on, beside the seed."""
        return {"shuffle": self._shuffle, "batch_size": self.batch_size, "drop_last": self._drop_last}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Let the next ``iter()`` go on where ``state_dict`` was called; after the last sample it gives none.

        Raises :class:`UsageError` for what is no state of a dataset, for that of one with another seed, and in the
        middle of an epoch of one with another ``shuffle``, ``batch_size`` or ``drop_last``.
        """
        begun = isinstance(state, dict) and "parts" in state
        require_state(state, _STATE, _BEGUN if begun else {"epoch": is_whole}, of="datasets")
        require_seed(state.get("seed"), self._seed, of="dataset")
        if begun:
            require_order(state.get("order"), self._order(), of="dataset")
        self._resume, self._reading = dict(state), None

    def close(self) -> None:
        """Give the lease back and close all files. May be called twice; in a copy it does nothing to the original."""
        self._subscription.close()
        self._places.close()
        self._leased = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_reading": None, "_leased": None}


class _Reading(NamedTuple):
    """An epoch as one worker reads it."""

    plan: EpochPlan
    settings: Settings
    parts: Sequence[Sequence[Any]]
    """Rows of the parts that it began with."""
    at: list[int]
    """Steps of this worker that were given whole, and samples of the one after them."""
