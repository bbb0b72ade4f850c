"""The whole job: a background pull with a cap of a fifth of the data beside a training of ten epochs."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from tests.loaders.conftest import run_script

RENEW = 0.25
SHORT, WHOLE = (400, 8192, 5), (8000, 32768, 10)
"""Samples, float32 values of each, epochs: 13 MB, 1 GB."""


@pytest.mark.parametrize(
    ("kind", "samples", "values", "count"),
    [
        # Not by default: what an epoch of so little data brings depends on which of both processes is faster, and a
        # puller that is through with the source draws it again.
        pytest.param("torch", *SHORT, id="torch, short", marks=pytest.mark.soak),
        pytest.param("tensorflow", *SHORT, id="tensorflow, short", marks=pytest.mark.soak),
        *(pytest.param(kind, *WHOLE, id=kind, marks=pytest.mark.soak) for kind in ("torch", "loader", "tensorflow")),
    ],
)
@pytest.mark.timeout(1800)
def test_epochs_beside_a_background_pull(kind: str, samples: int, values: int, count: int, tmp_path: Path) -> None:
    """The set grows until the cap, then renews its share each epoch; a frozen puller stops no epoch; the cap holds."""
    source = tmp_path / "source"
    source.mkdir()
    array = np.zeros(values, dtype=np.float32)
    for number in range(samples):
        array[0] = number
        np.save(source / f"{number:05d}.x.npy", array)
    cap = samples * (values * 4 + 128) // 5 + 2_000_000  # a fifth of the data, and the catalog's own
    found = run_script("growing_run.py", kind, source, tmp_path / "cache", cap, RENEW, count, seconds=1700)
    epochs = [set(numbers) for numbers in found["epochs"]]

    assert all(len(numbers) == len(set(numbers)) for numbers in found["epochs"]), "a sample twice in one epoch"
    assert max(found["used"] + found["disk"]) <= cap
    seen: set[int] = set()
    for number, epoch in enumerate(epochs):
        new = epoch - seen
        assert new or len(seen) == samples, f"epoch {number} brought nothing new"
        seen |= epoch
    full = next(number for number, epoch in enumerate(epochs) if number and len(epoch) >= 0.7 * max(map(len, epochs)))
    for before, after in list(pairwise(epochs))[full:]:
        assert len(after - before) >= 0.8 * RENEW * len(after)
    assert len(seen) > len(max(epochs, key=len))
    with_puller, alone = np.median(found["steps"][1:]), found["alone"]["steps"][0]
    print(
        f"{kind}: {[len(epoch) for epoch in epochs]} samples, {len(seen)} distinct; median step"
        f" {1000 * with_puller:.2f} ms beside the puller, {1000 * alone:.2f} ms alone"
    )
