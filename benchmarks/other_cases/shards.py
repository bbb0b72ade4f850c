"""Many small shards: the time that ``convert`` takes for each, and how a loader begins over 1,000, 10,000 and 50,000.


The shards are those of ``many_shards.py``: 16 samples each, in LMDB, in a cache and in a plain folder. *first batch*
includes the start of the loader. A shard is committed to a cache between the first and the second epoch. The peer of
each row is the same loader over 1,000 shards, so a ratio near 1 says that the number of shards does not matter.

``convert`` goes from LMDB to HDF5 in place, with one worker; its figure is the processor time of the worker for each
shard, fsyncs and catalog included.
"""

from __future__ import annotations

import shutil
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cachetool.cache import CacheDir
from cachetool.conversion.in_place import _groups, _origins, _shards, replace_groups
from cachetool.formats import get_format

SHARDS = (1_000, 10_000, 50_000)
CONVERTED = 200
"""Shards of a cache that are converted for one figure."""
WHERE = ("cache", "folder")
_FIGURES = {
    "first": ("first batch, s", 5.0),
    "second": ("first wait of the second epoch, ms", 2.0),
    "other": ("first wait of later epochs, ms", 2.0),
    "rate": ("samples/s", 0.8),
}
"""Title of each figure, and the target of its ratio to that of 1,000 shards."""


class _Silent:
    """A channel of a worker that nobody listens to."""

    def send(self, message: Any) -> None:
        """Drop a message."""


def _copy(source: Path, target: Path) -> None:
    """Copy a cache: shards as links, all other files as copies."""

    def copy(path: str, to: str) -> None:
        (Path(to).hardlink_to if "/shards/" in path else lambda file: shutil.copy2(file, to))(path)

    shutil.copytree(source, target, copy_function=copy)


def _converted(root: Path, scratch: Path) -> float:
    """Return the milliseconds of processor time for each shard of a conversion."""
    _copy(root, scratch)
    try:
        with CacheDir(scratch) as cache:
            groups = _groups(_shards(cache, "default"), _origins(cache), get_format("hdf5"), None, None)[:CONVERTED]
        begin = time.process_time()
        replace_groups(
            _Silent(),  # type: ignore[arg-type]
            root=str(scratch), dataset="default", groups=groups, to="hdf5", most=None, compression=None, verify=False,
            wait=0.0,
        )  # fmt: skip
        return 1e3 * (time.process_time() - begin) / len(groups)
    finally:
        shutil.rmtree(scratch)


def _rows(
    case: Callable[[int], str], found: dict[int, list[float]], target: float, unit: str
) -> list[dict[str, str | float]]:
    rows: list[dict[str, str | float]] = []
    least = min(found)
    for count in sorted(found):
        if count == least:
            continue
        ratios = [mine / theirs for mine, theirs in zip(found[count], found[least], strict=True)]
        rows.append(
            {
                "case": case(count),
                "unit": unit,
                "ours": round(statistics.median(found[count]), 3),
                "peer": f"{least:,} shards",
                "theirs": round(statistics.median(found[least]), 3),
                "ratio": round(statistics.median(ratios), 2),
                "target": target,
            }
        )
    return rows


def measure(folder: Path, rounds: int) -> list[dict[str, str | float]]:
    """Return a row for each figure and number of shards, beside the smallest number."""
    from many_shards import made, pool_of, train

    pool_of(folder, max(SHARDS))
    roots = {(where, count): made(folder, where, count) for where in WHERE for count in SHARDS}
    found: dict[tuple[str, int], list[dict[str, float]]] = {key: [] for key in roots}
    spent: dict[int, list[float]] = {count: [] for count in SHARDS}
    for _ in range(rounds):
        for key, root in roots.items():
            found[key].append(train(root, grow=folder / "grown" if key[0] == "cache" else None))
        for count in SHARDS:
            spent[count].append(_converted(roots["cache", count], folder / "converted"))
    rows: list[dict[str, str | float]] = []
    for where in WHERE:
        for name, (title, target) in _FIGURES.items():
            scale = 1e3 if title.endswith("ms") else 1.0
            figures = {count: [scale * one[name] for one in found[where, count]] for count in SHARDS}
            rows += _rows(lambda count, where=where: f"{count:,} shards, {where}", figures, target, title)  # type: ignore[misc]
    return rows + _rows(lambda count: f"convert in a cache of {count:,} shards", spent, 1.5, "ms of processor a shard")
