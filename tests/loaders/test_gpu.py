"""Tests that need a GPU. Without one, the fake device of ``test_torch_feed.py`` stands in for it.

Many other copies to the device make these copies slow, so a batch whose memory was reused too early would have other
bytes.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from cachetool.bench.samples import fill
from cachetool.cache import open_cache
from cachetool.core.block import Block
from cachetool.core.schema import Field, Schema
from cachetool.loaders.torch import DevicePrefetcher, Loader
from cachetool.loaders.torch_device import page_lock
from tests.loaders.conftest import REPOSITORY

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="PyTorch finds no CUDA device here")

SAMPLES, VALUES, BATCH = 96, 2**19, 8  # of 2 MiB, in batches of 16
CUDA = torch.device("cuda")


def expected(numbers: torch.Tensor) -> torch.Tensor:
    """Return the samples with these numbers: each position has a different value."""
    return numbers[:, None] * 1_000_003 + torch.arange(VALUES, device=numbers.device, dtype=torch.int32)


@pytest.fixture(scope="module", params=["lmdb", "tfrecord"])
def root(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    numbers = torch.arange(SAMPLES, dtype=torch.int32)
    schema = Schema((Field("x", "<i4", (VALUES,)), Field("y", "<i4"), Field("word", "str")))
    words = [f"sample {number}" for number in range(SAMPLES)]
    rows = [
        {"x": x, "y": y, "word": word}
        for x, y, word in zip(expected(numbers).numpy(), numbers.numpy(), words, strict=True)
    ]
    folder = tmp_path_factory.mktemp("gpu") / "cache"
    with open_cache(folder, max_size="2GB") as cache:
        fill(cache, request.param, Block.from_samples(schema, rows), 3)
    return folder


class Crowd:
    """A load on the transfers to the device: copies on other streams."""

    def __init__(self) -> None:
        self._here = torch.empty(2**28, dtype=torch.uint8).pin_memory()
        self._there = torch.empty(2**28, dtype=torch.uint8, device=CUDA)
        self._streams = [torch.cuda.Stream() for _ in range(3)]

    def push(self) -> None:
        for stream in self._streams:
            with torch.cuda.stream(stream):
                self._there.copy_(self._here, non_blocking=True)


@pytest.fixture
def crowd() -> Iterator[Crowd]:
    yield Crowd()
    torch.cuda.synchronize()


def wrong(batches: list[dict[str, Any]]) -> int:
    """Return the number of values that differ from the written ones."""
    return sum(int((batch["x"] != expected(batch["y"])).sum()) for batch in batches)


def delivered(batches: list[dict[str, Any]]) -> list[int]:
    return sorted(number for batch in batches for number in batch["y"].tolist())


@pytest.mark.parametrize("workers", [1, 2])
def test_every_batch_arrives_as_it_was_written(root: Path, crowd: Crowd, workers: int) -> None:
    lock = page_lock(CUDA)
    assert lock is not None
    with Loader(root, batch_size=BATCH, device="cuda", workers=workers, prefetch=2) as loader:
        for _ in range(4):
            batches = []
            for batch in loader:
                crowd.push()
                batches.append(batch)
            assert all(batch["x"].device.type == "cuda" for batch in batches)
            assert wrong(batches) == 0
            assert delivered(batches) == list(range(SAMPLES))
            assert all(batch["word"][0] == f"sample {int(batch['y'][0])}" for batch in batches)
        assert lock.locked > 0
    del loader, batch, batches
    assert lock.locked == 0
    assert not lock.refused


@pytest.mark.parametrize("keep", [0, 1])
def test_a_loop_that_is_left_keeps_its_current_batch_intact(root: Path, crowd: Crowd, keep: int) -> None:
    """The batches of the next epoch would be built in the same memory."""
    with Loader(root, batch_size=BATCH, device="cuda", workers=1, prefetch=1) as loader:
        got = []
        for _ in range(12):
            crowd.push()
            batches = iter(loader)
            got.append(next(batches))
            if not keep:
                del batches
    assert wrong(got) == 0


def test_copies_in_flight_are_complete_after_the_loader_was_closed(root: Path, crowd: Crowd) -> None:
    got = []
    for _ in range(6):
        loader = Loader(root, batch_size=BATCH, device="cuda", workers=2)
        batches = iter(loader)
        crowd.push()
        got += [next(batches), next(batches)]
        loader.close()
        del loader, batches
    assert wrong(got) == 0
    lock = page_lock(CUDA)
    assert lock is not None
    assert lock.locked > 0  # a tensor that keeps words of a batch keeps its memory
    del got
    assert lock.locked == 0


@pytest.mark.parametrize("before", [False, True])
def test_a_users_own_copy_is_complete_although_the_batch_is_dropped_and_its_memory_reused(
    root: Path, crowd: Crowd, before: bool
) -> None:
    """``before``: the same memory was locked for cachetool's own copies."""
    with Loader(root, batch_size=BATCH, workers=1, prefetch=1) as loader:
        if before:
            assert delivered(list(DevicePrefetcher(loader, "cuda"))) == list(range(SAMPLES))
        for _ in range(4):
            got = []
            for batch in loader:
                assert not batch["x"].is_pinned()
                crowd.push()
                got.append({name: batch[name].to("cuda", non_blocking=True) for name in ("x", "y")})
                del batch
            assert wrong(got) == 0
            assert delivered(got) == list(range(SAMPLES))


def test_kept_batches_do_not_change_while_the_device_is_fed(root: Path, crowd: Crowd) -> None:
    """They are kept from a separate epoch. A copy by the user may still be running."""
    with Loader(root, batch_size=BATCH, workers=2) as loader:
        kept = [batch for step, batch in enumerate(loader) if step < 3]
        for _ in range(3):
            for _ in DevicePrefetcher(loader, "cuda"):
                crowd.push()
        assert not any(batch["x"].is_pinned() for batch in kept)
        assert wrong(kept) == 0


def test_memory_that_cannot_be_page_locked_is_still_copied(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lock = page_lock(CUDA)
    assert lock is not None
    own, runtime = torch.empty(4096, dtype=torch.uint8), lock._runtime

    class Refusing:
        cudaHostUnregister = runtime.cudaHostUnregister

        def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
            assert int(runtime.cudaHostRegister(own.data_ptr(), 4096, 1)) == 0
            again = runtime.cudaHostRegister(own.data_ptr(), 4096, 1)
            assert int(again) != 0
            assert int(runtime.cudaHostUnregister(own.data_ptr())) == 0
            return int(again)

    monkeypatch.setattr(lock, "_runtime", Refusing())
    monkeypatch.setattr(lock, "refused", False)
    with Loader(root, batch_size=BATCH, device="cuda", workers=1) as loader:
        batches = list(loader)
        assert wrong(batches) == 0
        assert delivered(batches) == list(range(SAMPLES))
    assert lock.refused


def test_batches_arrive_without_feeder_processes_too(root: Path, crowd: Crowd) -> None:
    with Loader(root, batch_size=BATCH, device="cuda", workers=0) as loader:
        batches = []
        for batch in loader:
            crowd.push()
            batches.append(batch)
        assert wrong(batches) == 0
        assert delivered(batches) == list(range(SAMPLES))


STARTS = """
import json, sys, time, torch
torch.zeros(1, device="cuda")
from cachetool.loaders.torch import Loader
with Loader(sys.argv[1], batch_size=8, device="cuda", transform=lambda sample: sample) as loader:
    print(json.dumps(sorted(number for batch in loader for number in batch["y"].tolist())))
"""


@pytest.mark.parametrize("how", ["script", "stdin"])
def test_a_loader_starts_in_a_process_that_uses_cuda(root: Path, tmp_path: Path, how: str) -> None:
    """The program is a script without a main guard, or comes from standard input, and uses a lambda."""
    path = tmp_path / "program.py"
    path.write_text(STARTS)
    done = subprocess.run(
        [sys.executable, str(path) if how == "script" else "-", str(root)],
        input=STARTS if how == "stdin" else None,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(REPOSITORY), os.environ.get("PYTHONPATH", "")])},
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == list(range(SAMPLES))


def test_jax_gets_batches_as_they_were_written(root: Path) -> None:
    jax = pytest.importorskip("jax")
    if jax.default_backend() == "cpu":
        pytest.skip("JAX finds no accelerator here")
    from cachetool.loaders.jax import prefetch_to_device
    from cachetool.loaders.numpy import Loader as NumpyLoader

    with NumpyLoader(root, batch_size=BATCH, workers=1, prefetch=1, fields=["x", "y"]) as loader:
        got = list(prefetch_to_device(loader))
    found = [{name: np.asarray(column) for name, column in batch.items()} for batch in got]
    assert wrong([{name: torch.from_numpy(np.array(column)) for name, column in each.items()} for each in found]) == 0
    assert sorted(number for each in found for number in each["y"].tolist()) == list(range(SAMPLES))
