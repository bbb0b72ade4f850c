"""Rates at which batches reach a consumer that touches every page of them, and the advice that follows. MB/s of values.

The advice tells which part is the slowest, and what to change. It is made of the numbers alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from cachetool.bench.consumer import PACE, Spinner, rate, touched
from cachetool.bench.samples import Trial, drop, files_of
from cachetool.cache import CacheDir
from cachetool.core.units import format_size
from cachetool.loaders.numpy import Loader

__all__ = ["Measurements", "advice", "cold", "frameworks", "gil_left", "warm"]


# Set here, because the environment may be that of a launcher, whose ranks would divide the samples.
_ALONE: dict[str, Any] = {"rank": 0, "world_size": 1}
"""The place of the only process."""


def _epochs(batches: Iterable[Any], seconds: float) -> float:
    """Return the rate over whole epochs, for at least ``seconds`` seconds."""

    def read() -> int:
        total, end = 0, time.perf_counter() + seconds
        while time.perf_counter() < end:
            total += touched(batches)
        return total

    return rate(read)


def cold(cache: CacheDir, trial: Trial, *, workers: int, shuffle: str) -> float:
    """Return the rate of one epoch of samples that are only on the disk, measured once the feeders have started."""
    drop(files_of(cache))
    with Loader(cache, batch_size=trial.batch, workers=workers, **_ALONE, shuffle=shuffle, epochs=1) as loader:
        # iter() starts the feeders, which is not part of the rate.
        batches = iter(loader)
        return rate(lambda: touched(batches))


def warm(cache: CacheDir, trial: Trial, *, workers: int, seconds: float) -> tuple[float, float]:
    """Return the rates of epochs of samples in memory: alone, and beside a thread of pure Python."""
    with Loader(cache, batch_size=trial.batch, workers=workers, **_ALONE) as loader:
        # One epoch first, which brings the samples into memory and fills the ring.
        touched(loader)
        alone = _epochs(loader, seconds)
        with Spinner():
            return alone, _epochs(loader, seconds)


def gil_left(cache: CacheDir, trial: Trial, *, workers: int, seconds: float, most: float) -> tuple[float, float]:
    """Return the rate at which batches were taken, and the part of the time in which other Python code could run.

    The rate is 600 MB/s, or half of ``most``.
    """
    # Half of what is possible, so that the feeders are never what the loop waits for.
    pace = min(PACE, most * 1e6 / 2)
    with Loader(cache, batch_size=trial.batch, workers=workers, **_ALONE) as loader:
        touched(loader)
        with Spinner() as spinner:
            speed = rate(lambda: touched(loader, pace, seconds))
    return speed, 1 - spinner.blocked


def frameworks(cache: CacheDir, trial: Trial, *, workers: int, seconds: float) -> list[tuple[str, float]]:
    """Return the rates of the loaders for PyTorch and, of a cache of TFRecords, for TensorFlow, where they are
    installed."""
    # Batches of ragged fields are no arrays there, which the consumer could touch.
    measures: list[tuple[str, Callable[[], float]]] = []
    fixed = trial.block.schema.is_fixed
    if find_spec("torch") is not None and fixed:
        measures.append(("torch Loader", lambda: _torch_loader(cache, trial, workers, seconds)))
        measures.append(("torch DataLoader over CacheDataset", lambda: _torch_dataset(cache, trial, workers, seconds)))
    if find_spec("tensorflow") is not None and fixed:
        measures.append(("TensorFlow make_dataset", lambda: _tensorflow(cache, trial, seconds)))
    return [(name, measure()) for name, measure in measures]


def _arrays(batches: Iterable[Any]) -> Iterable[dict[str, Any]]:
    for batch in batches:
        yield {name: column.numpy() for name, column in batch.items()}


class _Epochs:
    """Batches as arrays, as often as they are asked for."""

    def __init__(self, start: Callable[[], Iterable[Any]]) -> None:
        self._start = start

    def __iter__(self) -> Any:
        return iter(_arrays(self._start()))


def _torch_loader(cache: CacheDir, trial: Trial, workers: int, seconds: float) -> float:
    from cachetool.loaders.torch import Loader as TorchLoader

    with TorchLoader(cache, batch_size=trial.batch, workers=workers, **_ALONE) as loader:
        batches = _Epochs(lambda: loader)
        touched(batches)
        return _epochs(batches, seconds)


def _torch_dataset(cache: CacheDir, trial: Trial, workers: int, seconds: float) -> float:
    from torch.utils.data import DataLoader

    from cachetool.loaders.torch import CacheDataset, EpochSampler

    data = CacheDataset(cache)
    loader: Any = DataLoader(
        data,
        batch_size=trial.batch,
        sampler=EpochSampler(data),
        collate_fn=data.collate,
        num_workers=workers,
        persistent_workers=workers > 0,
    )
    batches = _Epochs(lambda: loader)
    touched(batches)
    return _epochs(batches, seconds)


def _tensorflow(cache: CacheDir, trial: Trial, seconds: float) -> float:
    from cachetool.loaders.tensorflow import make_dataset

    data = make_dataset(cache, batch_size=trial.batch, shuffle_buffer=4 * trial.batch)
    batches = _Epochs(lambda: data)
    touched(batches)
    return _epochs(batches, seconds)


_FASTER = 1.25
"""Factor below which a difference of two rates says nothing on a machine that does other work."""


@dataclass(frozen=True)
class Measurements:
    """The results of a benchmark; rates are MB/s."""

    total_bytes: int
    """Bytes of all samples, of which some were measured."""
    available: int
    """Bytes of memory that the page cache may take; 0 when unknown."""
    mean: int
    """Bytes of a sample."""
    batch: int
    """Samples of a batch."""
    memory: float
    in_order: float
    at_random: float
    own: str
    """The format of the samples, or the fastest one."""
    warm: dict[str, float]
    busy: dict[str, float]
    cold: dict[str, float]
    window: float | None
    """Cold, with ``shuffle="window"``; None if it was not tried."""
    by_workers: dict[int, float]
    """Warm, by the number of feeders."""
    workers: int
    conversion: str
    """The command that brings the samples into the format ``{}``."""


def advice(measured: Measurements) -> str:
    """Return one sentence: what limits the rate, and what would change that."""
    fits = not measured.available or measured.total_bytes < 0.8 * measured.available
    warm, cold = measured.warm[measured.own], measured.cold[measured.own]
    if not fits:
        return _disk(measured, cold)
    fastest = max(measured.warm, key=lambda name: measured.warm[name])
    total, available = format_size(measured.total_bytes), format_size(measured.available)
    pace = f"All {total} fit into memory ({available} free), so from the second"
    pace += f" epoch on batches come from memory, at {warm:,.0f} MB/s"
    best = max(measured.by_workers, key=lambda count: measured.by_workers[count])
    if measured.by_workers[best] > _FASTER * measured.by_workers.get(measured.workers, warm):
        return f"{pace}; the feeders limit the rate: workers={best} gives {measured.by_workers[best]:,.0f} MB/s."
    if measured.warm[fastest] > _FASTER * warm:
        change = measured.conversion.replace("{}", fastest, 1)
        return f"{pace}; the format limits the rate: {fastest} gives {measured.warm[fastest]:,.0f} MB/s ({change})."
    step = measured.batch * measured.mean / warm / 1e3
    return (
        f"{pace}; a training step that takes {step:.2g} ms or more for {measured.batch} samples never waits;"
        " nothing needs to change."
    )


def _disk(measured: Measurements, cold: float) -> str:
    total, available = format_size(measured.total_bytes), format_size(measured.available)
    pace = f"The {total} of samples do not fit into the {available} of free"
    pace += f" memory, so epochs read the disk, at {cold:,.0f} MB/s"
    if measured.window is not None and measured.window > _FASTER * cold:
        better = f'shuffle="window" gives {measured.window:,.0f} MB/s'
        return f"{pace}; reading samples of {format_size(measured.mean)} one by one is slow: {better}."
    fastest = max(measured.cold, key=lambda name: measured.cold[name])
    if measured.cold[fastest] > _FASTER * cold:
        return (
            f"{pace}; the format limits the rate: {fastest} gives {measured.cold[fastest]:,.0f} MB/s"
            f" ({measured.conversion.replace('{}', fastest, 1)})."
        )
    limit = max(measured.at_random, measured.in_order)
    if cold > 0.7 * measured.at_random:
        return (
            f"{pace}, {100 * cold / limit:.0f} % of its rate: the disk is the limit; a cap below"
            f" {format_size(int(0.8 * measured.available))} (--max-size) keeps all samples in memory."
        )
    more = f"more workers keep more requests in flight (workers={measured.workers * 2})"
    return f"{pace}, of {limit:,.0f} MB/s that the disk can give; {more}."
