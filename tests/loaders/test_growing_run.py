"""The whole job: a background pull with a cap of a fifth of the data, beside a training of ten epochs."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from tests.loaders.conftest import run_script

RENEW = 0.25
SHORT, WHOLE = (400, 8192, 8), (8000, 32768, 10)
"""Samples, float32 values of each, epochs: 13 MB and 1 GB."""


@pytest.mark.parametrize(
    ("kind", "samples", "values", "count"),
    [
        *(pytest.param(kind, *SHORT, id=f"{kind}, short") for kind in ("torch", "loader", "tensorflow")),
        *(pytest.param(kind, *WHOLE, id=kind, marks=pytest.mark.soak) for kind in ("torch", "loader", "tensorflow")),
    ],
)
@pytest.mark.timeout(1800)
def test_epochs_beside_a_background_pull_read_growing_and_renewed_snapshots(
    kind: str, samples: int, values: int, count: int, tmp_path: Path
) -> None:
    """Each epoch reads all samples that were committed before it began, each once. The first epoch of a full cache may
    leave a share for the next one. The snapshot grows until the cap, then a share is renewed whenever the pull had
    enough time. A frozen pull stops no epoch, and the cap holds.
    """
    source = tmp_path / "source"
    source.mkdir()
    array = np.zeros(values, dtype=np.float32)
    for number in range(samples):
        array[0] = number
        np.save(source / f"{number:05d}.x.npy", array)
    cap = samples * (values * 4 + 128) // 5 + 2_000_000  # a fifth of the data, and the catalog's own bytes
    share = int(RENEW * samples / 5)
    found = run_script("growing_run.py", kind, source, tmp_path / "cache", cap, RENEW, share, count, seconds=1700)
    epochs = [set(numbers) for numbers in found["epochs"]]

    assert all(len(numbers) == len(set(numbers)) for numbers in found["epochs"]), "a sample twice in one epoch"
    assert max(found["used"] + found["disk"]) <= cap
    seen: set[int] = set()
    fresh = []
    full = found["full"].index(True)
    for number, (epoch, committed) in enumerate(zip(epochs, found["committed"], strict=True)):
        fresh.append(len(epoch - seen))
        seen |= epoch
        # No sample is evicted that no epoch has read; only a source at its end brings the same samples again. The cache
        # may have become full between the query and the snapshot of the epoch before `full`.
        assert len(seen) >= min(committed, samples) - (1.2 * share if number in (full - 1, full) else 0)
    shares = [len(after - before) / len(after) for before, after in pairwise(epochs)]
    assert min(shares[full:]) >= 0.8 * RENEW
    assert len(seen) > len(max(epochs, key=len))
    with_puller, alone = np.median(found["steps"][1:]), found["alone"]["steps"][0]
    print(
        f"{kind}: {[len(epoch) for epoch in epochs]} samples, {fresh} never seen before, {len(seen)} distinct; of each"
        f" epoch {[round(share, 2) for share in shares]} not in the one before; {max(found['used'] + found['disk'])}"
        f" bytes of {cap}; waits for the first batch {[round(each, 3) for each in found['waits']]} s; median step"
        f" {1000 * with_puller:.2f} ms beside the puller, {1000 * alone:.2f} ms alone"
    )
