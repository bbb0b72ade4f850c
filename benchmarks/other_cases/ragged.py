"""Ragged samples of 100 to 2,000 tokens in batches: padded and as values and offsets by the feeders, beside ragged
columns, a transform that pads each sample, and a DataLoader whose ``collate_fn`` pads.

All have two worker processes and the same samples, warm and in random order. The samples of the ``DataLoader`` are in
its memory, the others in a cache. A rate covers whole epochs after one that does not count. The padding transform
makes samples of one length, the greatest, because a transform does not see the batch.
"""

from __future__ import annotations

import contextlib
import functools
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np

from cachetool.bench.samples import fill
from cachetool.cache import open_cache
from cachetool.core.block import Block, Ragged
from cachetool.core.schema import Field, Schema
from cachetool.loaders.torch import Loader

SAMPLES = 20_000
LEAST, MOST = 100, 2_000
WORKERS = 2
TARGET = 100_000
"""Samples a second of padded batches."""
_SECONDS = 1.0
"""Time that a rate covers at least."""


def make(dtype: str) -> Block:
    """Return samples of random lengths."""
    rng = np.random.default_rng(0)
    lengths = rng.integers(LEAST, MOST + 1, SAMPLES)
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    tokens = Ragged(rng.integers(1, 50_000, int(offsets[-1])).astype(dtype), offsets, lengths[:, None])
    schema = Schema((Field("tokens", np.dtype(dtype).str, (None,)), Field("label", "<i8")))
    return Block(schema, {"tokens": tokens, "label": np.arange(SAMPLES)})


def padded_to_the_most(sample: dict[str, Any]) -> dict[str, Any]:
    """Pad one sample, as a transform of a sample can."""
    tokens = sample["tokens"]
    out = np.zeros(MOST, dtype=tokens.dtype)
    out[: len(tokens)] = tokens
    return {"tokens": out, "tokens_length": len(tokens), "label": sample["label"]}


def dataloader(block: Block, batch: int, workers: int = WORKERS) -> Iterable[Any]:
    """Return a DataLoader over samples in memory whose ``collate_fn`` pads to the longest of the batch."""
    import torch

    tokens = block.columns["tokens"]
    assert isinstance(tokens, Ragged)
    samples = [(torch.from_numpy(tokens[at]), at) for at in range(len(tokens))]

    def collate(chosen: list[tuple[torch.Tensor, int]]) -> dict[str, torch.Tensor]:
        values = [value for value, _ in chosen]
        return {
            "tokens": torch.nn.utils.rnn.pad_sequence(values, batch_first=True),
            "tokens_length": torch.tensor([len(value) for value in values]),
            "label": torch.tensor([label for _, label in chosen]),
        }

    return torch.utils.data.DataLoader(
        samples,  # type: ignore[arg-type]
        batch_size=batch,
        shuffle=True,
        num_workers=workers,
        collate_fn=collate,
        persistent_workers=True,
    )


def _epoch(batches: Iterable[dict[str, Any]]) -> int:
    return sum(len(batch["label"]) for batch in batches)


def rate(batches: Iterable[dict[str, Any]]) -> float:
    """Return the samples a second of whole epochs."""
    count, begin = 0, time.perf_counter()
    while (spent := time.perf_counter() - begin) < _SECONDS:
        count += _epoch(batches)
    return count / spent


def measure(folder: Path, rounds: int) -> list[dict[str, str | float]]:
    """Return a row for each type of token, size of batch and peer."""
    rows: list[dict[str, str | float]] = []
    for dtype in ("int32", "int64"):
        block = make(dtype)
        with tempfile.TemporaryDirectory(dir=folder) as root, open_cache(Path(root) / "cache", max_size="2GB") as cache:
            fill(cache, "lmdb", block, 4)
            for batch in (32, 256):
                rows += _measured(cache, block, batch, dtype, rounds)
    return rows


def _measured(cache: Any, block: Block, batch: int, dtype: str, rounds: int) -> list[dict[str, str | float]]:
    ours = functools.partial(Loader, cache, batch_size=batch, workers=WORKERS)
    ways: dict[str, Callable[[], Any]] = {
        "pad=": lambda: ours(pad={"tokens": 0}),
        "pad= to 2,048": lambda: ours(pad={"tokens": _pad(2048)}),
        "varlen=": lambda: ours(varlen={"tokens"}),
        "ragged columns": ours,
        "transform of each sample": lambda: ours(transform=padded_to_the_most),
        "DataLoader, collate_fn pads": lambda: contextlib.nullcontext(dataloader(block, batch)),
    }
    rates: dict[str, list[float]] = {name: [] for name in ways}
    with contextlib.ExitStack() as stack:
        opened = {name: stack.enter_context(way()) for name, way in ways.items()}
        for batches in opened.values():
            _epoch(batches)
        for _ in range(rounds):
            for name, batches in opened.items():
                rates[name].append(rate(batches))
    rows: list[dict[str, str | float]] = []
    for own, target in (("pad=", TARGET), ("pad= to 2,048", TARGET), ("varlen=", TARGET)):
        for peer in ("ragged columns", "transform of each sample", "DataLoader, collate_fn pads"):
            ratios = [mine / theirs for mine, theirs in zip(rates[own], rates[peer], strict=True)]
            rows.append(
                {
                    "case": f"{own}, {dtype}, batch {batch}",
                    "unit": "samples/s",
                    "ours": round(statistics.median(rates[own])),
                    "peer": peer,
                    "theirs": round(statistics.median(rates[peer])),
                    "ratio": round(statistics.median(ratios), 2),
                    "target": f"{target:,} samples/s",
                }
            )
    return rows


def _pad(length: int) -> Any:
    from cachetool.loaders.torch import Pad

    return Pad(0, length=length)
