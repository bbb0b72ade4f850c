"""The task of the measuring process. It sends a message for each result, which ``cachetool bench`` shows."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cachetool.bench.ceilings as ceilings
import cachetool.bench.rates as rates
from cachetool.bench.rates import Measurements, advice
from cachetool.bench.samples import Trial, files_of, made_up, of_cache, of_files, written
from cachetool.cache import open_cache
from cachetool.cache.layout import cache_option
from cachetool.core.units import format_size
from cachetool.formats import format_names
from cachetool.proc.scratch import scratch
from cachetool.proc.task import Channel, Message

__all__ = ["run"]

_SMALL = 2**14
"""Bytes of a sample below which reading samples one by one is slow."""


def run(channel: Channel, **options: Any) -> Message:
    """Measure with the options ``cache``, ``data``, ``dataset``, ``folder``, ``workers`` and ``seconds``.

    First send ``{"note": ...}``, then each result as ``{"row": [what, how, number, unit]}``, last ``{"advice": ...}``.
    """
    with scratch(Path(options["folder"]), "cachetool-bench-") as folder:
        for message in _measure(options, folder):
            channel.send(message)
    return {}


def _measure(options: dict[str, Any], folder: Path) -> Iterator[Message]:
    trial = _trial(options)
    workers, seconds = int(options["workers"]), float(options["seconds"])
    about = f"{trial.block.samples} samples of {format_size(trial.mean)} on average, in batches of {trial.batch}"
    yield {"note": f"{trial.what}: {about}"}
    limits: dict[str, Any] = {"memory": ceilings.memory(trial, seconds)}
    yield _row("memory", "copies shuffled samples", limits["memory"])
    warm: dict[str, float] = {}
    busy: dict[str, float] = {}
    cold: dict[str, float] = {}
    names = format_names()
    own = trial.format or names[0]
    window = None
    by_workers: dict[int, float] = {}
    # The user's own format first, because the disk is measured by the files of the first one.
    for name in sorted(names, key=lambda candidate: candidate != own):
        with written(trial, name, folder) as cache:
            if not cold:
                limits["in_order"], limits["at_random"] = ceilings.disk(
                    files_of(cache), min(trial.mean, 2**20), seconds
                )
                yield _row("disk", "in order", limits["in_order"])
                yield _row(
                    "disk", f"{format_size(min(trial.mean, 2**20))} at random, 16 at a time", limits["at_random"]
                )
            cold[name] = rates.cold(cache, trial, workers=workers, shuffle="full")
            warm[name], busy[name] = rates.warm(cache, trial, workers=workers, seconds=seconds)
            yield _row(name, "Loader, from memory", warm[name])
            yield _row(name, "Loader, beside a busy Python thread", busy[name])
            yield _row(name, "Loader, from the disk", cold[name])
            if name == own:
                if trial.mean < _SMALL:
                    window = rates.cold(cache, trial, workers=workers, shuffle="window")
                    yield _row(name, 'Loader, from the disk, shuffle="window"', window)
                for count in sorted({1, workers, os.cpu_count() or 1}):
                    by_workers[count] = (
                        # Measured above already with this number of workers.
                        warm[name] if count == workers else rates.warm(cache, trial, workers=count, seconds=seconds)[0]
                    )
                    if count != workers:
                        yield _row(name, f"Loader, from memory, workers={count}", by_workers[count])
                pace, left = rates.gil_left(cache, trial, workers=workers, seconds=seconds, most=warm[name])
                yield {"row": [name, f"GIL left to Python at {pace:,.0f} MB/s", round(100 * left, 1), "%"]}
            if name == "tfrecord":
                for what, speed in rates.frameworks(cache, trial, workers=workers, seconds=seconds):
                    yield _row(name, what, speed)
    yield {
        "advice": advice(
            Measurements(
                total_bytes=trial.total_bytes,
                available=ceilings.available(),
                mean=trial.mean,
                batch=trial.batch,
                own=own,
                warm=warm,
                busy=busy,
                cold=cold,
                window=window,
                by_workers=by_workers,
                workers=workers,
                conversion=_conversion(options),
                **limits,
            )
        )
    }


def _trial(options: dict[str, Any]) -> Trial:
    if options["data"] is not None:
        return of_files(Path(options["data"]))
    if options["cache"] is None:
        return made_up()
    with open_cache(Path(options["cache"]), create=False) as cache:
        return of_cache(cache, options["dataset"])


def _conversion(options: dict[str, Any]) -> str:
    """Return the command that brings the samples into the format ``{}``."""
    if options["data"] is not None:
        return f"cachetool convert --to {{}} --out NEW {shlex.quote(options['data'])}"
    if options["cache"] is None:
        return "cachetool pull SOURCE --to {}"
    named = "" if options["dataset"] is None else f" --dataset {shlex.quote(options['dataset'])}"
    return f"cachetool convert --to {{}}{named}{cache_option(Path(options['cache']))}"


def _row(what: str, how: str, speed: float) -> dict[str, Any]:
    return {"row": [what, how, round(speed), "MB/s"]}
