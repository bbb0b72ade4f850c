"""The loader compared with each peer, one pair at a time: the part of ``feed.py`` behind ``--peers-dir``.

Each peer writes the same samples in its own form. It loads them shuffled, with the same number of workers, in its
own process. Epochs of the peer and of our loader alternate: alone, beside a counting thread, and beside it at 600
MB/s. A rate covers epochs of 1.5 GB together, at most ``SECONDS``. It includes the start of each epoch except the
first, which starts to count after its first batch. An epoch that does not count precedes ours, beside the thread if
there is one, because our feeders already prepare the next epoch while a peer is measured. *times* is our rate
divided by the peer's.
"""

from __future__ import annotations

import contextlib
import statistics
import tempfile
from itertools import chain
from pathlib import Path
from typing import Any

from peers.starting import Peer, PeerError

from cachetool.bench.consumer import PACE, Spinner, epoch, touched
from cachetool.loaders.numpy import Loader

SECONDS = 2.0
SUSTAINED = 1_500_000_000
"""Bytes of the epochs over which our rate is measured."""
WAYS: dict[str, dict[str, Any]] = {
    "idle": {"seconds": SECONDS},
    "busy": {"busy": True, "seconds": SECONDS},
    "paced": {"busy": True, "pace": PACE, "seconds": SECONDS},
}


def measure(
    loader: Loader, folder: Path, peers: Path, job: list[int], *, names: list[str], rounds: int
) -> list[dict[str, Any]]:
    """Return a row for each peer of ``names``. ``job``: samples, bytes per sample, samples per batch, workers."""
    return [_row(loader, folder, peers, job, name=name, rounds=rounds) for name in names]


def _row(loader: Loader, folder: Path, peers: Path, job: list[int], *, name: str, rounds: int) -> dict[str, Any]:
    epochs = -(-SUSTAINED // (job[0] * job[1]))
    found: dict[str, list[tuple[dict[str, float], dict[str, float]]]] = {way: [] for way in WAYS}
    try:
        with tempfile.TemporaryDirectory(dir=folder) as own, Peer(peers, name, *map(str, job), own) as peer:
            peer.ask({"epochs": 1, "seconds": SECONDS})  # the first of several epochs differs from the others
            for _ in range(rounds):
                for way, options in WAYS.items():
                    with Spinner() if options.get("busy") else contextlib.nullcontext():
                        touched(loader)
                    ours = epoch(lambda: chain.from_iterable(loader for _ in range(epochs)), **options)
                    found[way].append((ours, peer.ask({"epochs": epochs, **options})))
    except PeerError as error:
        return {"peer": name, "error": str(error)}

    def of(way: str, what: str, who: int) -> float:
        return statistics.median(pair[who][what] for pair in found[way])

    def times(way: str) -> float:
        return statistics.median(ours["MB/s"] / theirs["MB/s"] for ours, theirs in found[way])

    return {
        "peer": name,
        "MB/s": round(of("idle", "MB/s", 1)),
        "ours": round(of("idle", "MB/s", 0)),
        "times": round(times("idle"), 1),
        "busy MB/s": round(of("busy", "MB/s", 1)),
        "ours busy": round(of("busy", "MB/s", 0)),
        "times busy": round(times("busy"), 1),
        "blocked": round(of("busy", "blocked", 1), 3),
        "paced MB/s": round(of("paced", "MB/s", 1)),
        "blocked, paced": round(of("paced", "blocked", 1), 3),
        "ours blocked, paced": round(of("paced", "blocked", 0), 3),
    }
