"""Crops and windows: boxes of 64^3 out of volumes of 256^3 float32, and windows of three rows of 1 MiB.

A rate is items for each second of processor time of all processes, warm and in random order, with two workers. The
peers of crops: NumPy's strided copy out of one array in memory, h5py with chunks of 64^3 and slices of a memory map in
PyTorch's DataLoader, and a ``transform=`` that cuts whole samples. The peer of windows is the same windows stored three
times over. *Cold* is what the disk gave, divided by the pages that the boxes touch.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import time
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import torch.utils.data

from cachetool.bench.samples import drop, fill
from cachetool.cache import open_cache
from cachetool.core.block import Block
from cachetool.core.schema import Field, Schema
from cachetool.loaders.numpy import Loader
from cachetool.loaders.read.boxes import Boxes
from cachetool.loaders.read.mapped import MappedParts
from cachetool.loaders.snapshots.follow import subscribe

VOLUMES, SIDE, BOX = 16, 256, 64
ROWS, ROW = 256, 512
"""Rows of the windows, and the side of a row: 1 MiB of float32."""
OFFSETS = (-1, 0, 1)
BATCH = 8
_SECONDS = 2.0
"""Time that a rate covers at least."""
_TICKS = os.sysconf("SC_CLK_TCK")


def family() -> list[int]:
    """Return this process and all processes that it started and that still live."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])

    def ours(pid: int) -> bool:
        while pid > 1 and pid != os.getpid():
            pid = parents.get(pid, 0)
        return pid == os.getpid()

    return [pid for pid in parents if ours(pid)]


def processor_seconds() -> float:
    """Return the processor time of this process and of all processes that it started."""
    ticks = 0
    for pid in family():
        with contextlib.suppress(OSError):
            ticks += sum(map(int, Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:15]))
    return ticks / _TICKS


def rate(epoch: Callable[[], Iterable[Any]], items: int) -> float:
    """Return the items for each second of processor time, over whole epochs after one that does not count."""
    for _ in epoch():
        pass
    before, began, epochs = processor_seconds(), time.perf_counter(), 0
    while not epochs or time.perf_counter() - began < _SECONDS:
        for batch in epoch():
            # One number of each page, as a copy to a device would touch it.
            for values in batch if isinstance(batch, tuple | list) else [batch]:
                np.asarray(values).reshape(-1)[::1024].sum()
        epochs += 1
    return epochs * items / (processor_seconds() - before)


class Slices(torch.utils.data.Dataset):  # type: ignore[type-arg]
    """Random boxes out of one file by hand: h5py with chunks of a box, or a memory map."""

    def __init__(self, path: Path, count: int) -> None:
        self.path, self.count, self.data = path, count, None

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> np.ndarray:
        if self.data is None:
            shape = (VOLUMES, SIDE, SIDE, SIDE)
            hdf5 = self.path.suffix == ".h5"
            self.data = h5py.File(self.path)["x"] if hdf5 else np.memmap(self.path, "<f4", "r", shape=shape)
        z, y, x = np.random.default_rng(index).integers(0, SIDE - BOX + 1, 3).tolist()
        return np.asarray(self.data[index % VOLUMES, z : z + BOX, y : y + BOX, x : x + BOX])


def by_hand(path: Path, count: int) -> Callable[[], Iterable[Any]]:
    """Return a DataLoader over boxes, with two workers that stay."""
    # A slice of a memory map cannot be written, of which PyTorch warns.
    warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
    return torch.utils.data.DataLoader(
        Slices(path, count), batch_size=BATCH, shuffle=True, num_workers=2, persistent_workers=True
    ).__iter__


def strided(x: np.ndarray, count: int) -> Callable[[], Iterable[Any]]:
    """Return epochs of NumPy's own copies, in one process."""
    rng = np.random.default_rng(0)

    def epoch() -> Iterable[Any]:
        out = np.empty((BATCH, BOX, BOX, BOX), "<f4")
        for _ in range(count // BATCH):
            for row in out:
                n, z, y, x_ = (int(rng.integers(VOLUMES)), *rng.integers(0, SIDE - BOX + 1, 3).tolist())
                row[...] = x[n, z : z + BOX, y : y + BOX, x_ : x_ + BOX]
            yield out

    return epoch


def cut(sample: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    """Cut a box out of a whole sample, as a transform can."""
    z, y, x = rng.integers(0, SIDE - BOX + 1, 3).tolist()
    return {"x": sample["x"][z : z + BOX, y : y + BOX, x : x + BOX].copy()}


def loaded(loader: Loader, field: str = "x") -> Callable[[], Iterable[Any]]:
    """Return epochs of one field of a loader."""
    return lambda: (batch[field] for batch in loader)


def cold(root: Path) -> float:
    """Return the bytes that the disk gave for some crops, divided by the bytes of the pages that they touch."""
    drop([path for path in root.rglob("data.*") if path.is_file()])
    crop = {"crop": {"x": (BOX, BOX, BOX)}, "crops": 2}
    corners, labels = [], []
    before = read_bytes()
    with Loader(root, batch_size=BATCH, workers=2, fields=["x", "y"], **crop) as loader:
        for batch in loader:
            corners.append(batch["x_corner"])
            labels.append(batch["y"])
        after = read_bytes()
    return (after - before) / (4096 * pages(root, np.concatenate(labels), np.concatenate(corners)))


def read_bytes() -> int:
    """Return the bytes that this process and those that it started had read from disks."""
    total = 0
    for pid in family():
        with contextlib.suppress(OSError):
            lines = dict(line.split(": ") for line in Path(f"/proc/{pid}/io").read_text().splitlines())
            total += int(lines["read_bytes"])
    return total


def pages(root: Path, volumes: np.ndarray, corners: np.ndarray) -> int:
    """Return the number of pages that boxes touch."""
    subscription = subscribe(root, dataset=None, run=None)
    places = MappedParts()
    try:
        view = subscription.now()
        schema = view.schema.select(["x", "y"])
        ((_, runs),) = places.locate(view, np.arange(view.samples), schema)
        numbers = runs["y"].buffer[runs["y"].starts]
        starts = runs["x"].starts[np.argsort(numbers)][volumes]
        shapes = np.broadcast_to(np.array([SIDE] * 3), (len(volumes), 3))
        inner, sizes, _ = Boxes((BOX,) * 3, corners, shapes, 4).runs(0)
        first = starts[:, None] + inner
        touched = np.concatenate([(first // 4096).ravel(), ((first + sizes[:, None] - 1) // 4096).ravel()])
        return len(np.unique(touched))
    finally:
        places.close()
        subscription.close()


def measure(folder: Path, rounds: int) -> list[dict[str, str | float]]:
    """Return a row for each peer: items for each second of processor time."""
    rng = np.random.default_rng(0)
    x = rng.random((VOLUMES, SIDE, SIDE, SIDE), dtype=np.float32)
    crops = 16
    count = VOLUMES * crops
    schema = Schema((Field("x", "<f4", (SIDE,) * 3), Field("y", "<i8")))
    with open_cache(folder / "volumes", max_size="8GB") as cache:
        fill(cache, "hdf5", Block(schema, {"x": x, "y": np.arange(VOLUMES)}), 4)
    x.tofile(folder / "x.bin")
    with h5py.File(folder / "x.h5", "w") as file:
        file.create_dataset("x", data=x, chunks=(1, BOX, BOX, BOX))
    rows = rng.random((ROWS, ROW, ROW), dtype=np.float32)
    keys = [f"era5.zarr#{number}" for number in range(ROWS)]
    series = Schema((Field("__key__", "str"), Field("x", "<f4", (ROW, ROW))))
    with open_cache(folder / "rows", max_size="8GB") as cache:
        samples = [{"__key__": key, "x": row} for key, row in zip(keys, rows, strict=True)]
        fill(cache, "hdf5", Block.from_samples(series, samples), 4)
    anchors = np.arange(1, ROWS - 1)
    windows = Schema((Field("x", "<f4", (3, ROW, ROW)),))
    with open_cache(folder / "windows", max_size="8GB") as cache:
        fill(cache, "hdf5", Block(windows, {"x": rows[anchors[:, None] + np.array(OFFSETS)]}), 4)
    results: dict[str, list[float]] = {}
    with contextlib.ExitStack() as stack:

        def opened(root: str, **options: Any) -> Callable[[], Iterable[Any]]:
            loader = stack.enter_context(Loader(folder / root, batch_size=BATCH, workers=2, fields=["x"], **options))
            return loaded(loader)

        peers: dict[str, tuple[Callable[[], Iterable[Any]], int]] = {
            "crop=": (opened("volumes", crop={"x": (BOX,) * 3}, crops=crops), count),
            "NumPy's strided copy": (strided(x, count), count),
            "DataLoader, h5py": (by_hand(folder / "x.h5", count), count),
            "DataLoader, memmap": (by_hand(folder / "x.bin", count), count),
            "transform=": (opened("volumes", transform=cut), VOLUMES),
            "offsets=": (opened("rows", offsets={"x": OFFSETS}), len(anchors)),
            "rows stored three times": (opened("windows"), len(anchors)),
        }
        for _ in range(rounds):
            for name, (epoch, items) in peers.items():
                results.setdefault(name, []).append(rate(epoch, items))
    medians = {name: statistics.median(values) for name, values in results.items()}
    targets = {
        "NumPy's strided copy": 0.8, "DataLoader, h5py": 8, "DataLoader, memmap": 3, "transform=": 40,
        "rows stored three times": 0.95,
    }  # fmt: skip
    out: list[dict[str, str | float]] = []
    for peer, target in targets.items():
        ours = "offsets=" if peer == "rows stored three times" else "crop="
        # Of the same round, because a crowded machine slows both.
        ratio = statistics.median(a / b for a, b in zip(results[ours], results[peer], strict=True))
        out.append(
            {
                "case": f"{ours} beside {peer}", "ours": round(medians[ours], 1), "peer": round(medians[peer], 1),
                "ratio": round(ratio, 2), "target": target, "unit": "items for each second of processor time",
            }
        )  # fmt: skip
    bytes_of = {name: sum(p.stat().st_size for p in (folder / name).rglob("data.*")) for name in ("rows", "windows")}
    out.append(
        {
            "case": "offsets=, bytes on disk", "ours": round(bytes_of["rows"] / 1e6, 1),
            "peer": round(bytes_of["windows"] / 1e6, 1), "ratio": round(bytes_of["rows"] / bytes_of["windows"], 2),
            "target": 0.34, "unit": "MB; ours / stored three times",
        }
    )  # fmt: skip
    out.append(
        {
            "case": "crop=, cold",
            "ratio": round(cold(folder / "volumes"), 2),
            "target": 1.1,
            "unit": "bytes read / pages touched",
        }
    )
    return out
