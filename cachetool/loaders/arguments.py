"""The arguments of a loader, checked once and kept as :class:`~cachetool.loaders.settings.Settings`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cachetool.cache import CacheDir
from cachetool.core.errors import UsageError
from cachetool.core.schema import names_of
from cachetool.core.text import shown
from cachetool.core.units import is_one_of, parse_duration, parse_flag, parse_text, parse_whole
from cachetool.loaders.order import SHUFFLES
from cachetool.loaders.ranks import given
from cachetool.loaders.ring.memory import MOST_KEPT
from cachetool.loaders.settings import Settings
from cachetool.loaders.snapshots.plain_files import located
from cachetool.loaders.split import parse_split

__all__ = ["parse_arguments", "parse_place"]

_COUNTS = ("steps", "prefetch", "epochs", "min_samples")


def parse_arguments(cache_or_paths: Any, options: Mapping[str, Any]) -> tuple[Settings, int | None, int]:
    """Return the settings of a loader, its ``steps=`` and its ``workers=``.

    ``options`` has the keyword arguments of :class:`cachetool.loaders.numpy.Loader`. The settings are those of the only
    process of a run; :meth:`BaseLoader._placed` adds rank, world size and run. Raises :class:`UsageError` naming the
    argument and its value.
    """
    values = dict(options)
    for name in ("batch_size", "seed", "workers"):
        values[name] = parse_whole(values[name], what=f"{name}=")
    for name in _COUNTS:
        values[name] = None if values[name] is None else parse_whole(values[name], what=f"{name}=")
    for name in ("drop_last", "verify", "concurrent"):
        values[name] = parse_flag(values[name], what=f"{name}=")
    wait, hold = (parse_duration(values[name], what=f"{name}=") for name in ("wait", "hold"))
    validation = parse_split(values["split"], values["validation"])
    _check(values)
    if isinstance(cache_or_paths, CacheDir):
        cache_or_paths.settle_cap()  # the feeders must find it on disk, as it is to be
    root, paths = located(cache_or_paths)
    if paths and values["dataset"] is not None:
        raise UsageError(f"{root} is a folder of plain files, which hold one dataset; leave out dataset=")
    least = 1 if values["split"] == "validation" else values["batch_size"]
    settings = Settings(
        root=str(root),
        paths=tuple(map(str, paths)),
        dataset=values["dataset"],
        run=values["run"],
        fields=None if values["fields"] is None else names_of(values["fields"]),
        batch_size=values["batch_size"],
        shuffle=SHUFFLES[values["shuffle"]],
        seed=values["seed"],
        drop_last=values["drop_last"],
        split=values["split"],
        validation=validation,
        min_samples=least if values["min_samples"] is None else values["min_samples"],
        wait=wait,
        hold=hold,
        epochs=values["epochs"],
        missing=values["missing"],
        verify=values["verify"],
        prefetch=values["prefetch"],
        each=values["transform_each"],
    )
    return settings, values["steps"], values["workers"]


def parse_place(rank: int | None, world_size: int | None) -> tuple[int, int] | None:
    """Return ``rank=`` and ``world_size=`` of a loader; None when neither was given.

    Raises :class:`UsageError` for one without the other, and for a rank outside the world.
    """
    if (place := given(rank, world_size)) is None:
        return None
    rank, world_size = place
    _require(world_size >= 1, "world_size", world_size, "at least 1")
    _require(0 <= rank < world_size, "rank", rank, f"0 to {world_size - 1}, below world_size")
    return rank, world_size


def _check(values: Mapping[str, Any]) -> None:
    _require(values["batch_size"] >= 1, "batch_size", values["batch_size"], "at least 1")
    _require(is_one_of(values["shuffle"], SHUFFLES), "shuffle", values["shuffle"], "'full', 'window' or False")
    _require(values["workers"] >= 0, "workers", values["workers"], "0 (a thread) or more feeder processes")
    prefetch = values["prefetch"]
    _require(prefetch is None or 1 <= prefetch <= MOST_KEPT, "prefetch", prefetch, f"1 to {MOST_KEPT} batches")
    for name in ("steps", "epochs", "min_samples"):
        _require(values[name] is None or values[name] >= 1, name, values[name], "at least 1")
    each, transform = values["transform_each"], values["transform"]
    _require(is_one_of(each, ("sample", "batch")), "transform_each", each, "'sample' or 'batch'")
    _require(transform is None or callable(transform), "transform", transform, "a function")
    dataset, run = values["dataset"], values["run"]
    _require(dataset is None or (isinstance(dataset, str) and dataset != ""), "dataset", dataset, "a name")
    _require(run is None or isinstance(run, str), "run", run, "a name")
    for name in ("dataset", "run"):
        if values[name] is not None:
            parse_text(values[name], what=f"{name}=")
    missing = values["missing"]
    _require(is_one_of(missing, ("error", "skip", "refetch")), "missing", missing, "'error', 'skip' or 'refetch'")


def _require(good: bool, name: str, value: object, wanted: str) -> None:
    if not good:
        raise UsageError(f"{name}={shown(value)} cannot be used: {wanted}")
