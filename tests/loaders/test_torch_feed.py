"""The loader for PyTorch. Each script runs in a separate process and returns its results."""

from __future__ import annotations

import contextlib
import io
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from cachetool.bench.samples import fill
from cachetool.cache import CacheDir, open_cache
from cachetool.core.block import Block
from cachetool.core.schema import Field, Schema
from cachetool.loaders import torch_device
from cachetool.loaders.torch import Loader as TorchLoader
from tests.loaders.conftest import REPOSITORY, run_script
from tests.loaders.numbered import leases, put


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return the results of ``torch_feed.py``."""
    out: dict[str, Any] = run_script("torch_feed.py", tmp_path_factory.mktemp("torch") / "cache")
    return out


def test_every_kind_of_field_arrives_as_it_was_written(seen: dict[str, Any]) -> None:
    assert seen["every"]
    assert seen["ragged"]
    assert seen["leases"] == 0


def test_every_object_derived_from_a_batch_keeps_its_bytes(seen: dict[str, Any]) -> None:
    """Views, NumPy arrays, dlpack, storages, saved tensors of autograd and pickled copies, during all later batches."""
    assert seen["kept"] == [150, []]
    assert seen["gradients"] == 16
    assert seen["held"] == [0, 0]  # and all slots are returned


def test_saving_or_pickling_a_batch_excludes_the_rest_of_its_slot(seen: dict[str, Any]) -> None:
    assert seen["saved bytes"]
    assert seen["storage"]
    assert seen["loaded"]
    assert seen["pickled"]
    assert seen["shared"]


@pytest.mark.parametrize("workers", [0, 1])
def test_a_batch_with_empty_arrays_is_saved_completely(workers: int, tmp_path: Path) -> None:
    """PyTorch distinguishes the memory of tensors by its start address."""
    schema = Schema((Field("none", "<i2", (0, 3)), Field("boxes", "<f4", (None, None)), Field("y", "<i8")))
    with open_cache(tmp_path / "cache", max_size="20MB") as cache:
        samples = [
            {"none": np.zeros((0, 3), "<i2"), "boxes": np.zeros((0, 4), "<f4"), "y": number} for number in range(3)
        ]
        fill(cache, "lmdb", Block.from_samples(schema, samples), 1)
        with TorchLoader(cache, batch_size=2, shuffle=False, workers=workers) as loader:
            saved = io.BytesIO()
            torch.save(list(loader), saved)
    saved.seek(0)
    found = torch.load(saved, weights_only=False)
    assert [batch["y"].tolist() for batch in found] == [[0, 1], [2]]
    assert [tuple(batch["none"].shape) for batch in found] == [(2, 0, 3), (1, 0, 3)]
    assert [[tuple(box.shape) for box in batch["boxes"]] for batch in found] == [[(0, 4)] * 2, [(0, 4)]]


def test_a_device_gets_batches_ahead_and_keeps_them_until_they_are_copied(seen: dict[str, Any]) -> None:
    """The device module only records calls; no GPU is needed or used."""
    found = seen["prefetched"]

    assert found["device"]
    assert all(found["same"])
    assert found["own"] == ["OrderedDict", ["y", "x"], "meta", "text", "cpu", "meta", [3, 2, 1], "meta"]
    assert found["order"] == [
        *("on its own stream", "record 1", "on its own stream", "record 2"),
        *("on its own stream", "record 3", "on its own stream", "record 4", "wait 1"),
    ]
    assert found["kept until done"]
    assert found["recorded"]


def test_batches_in_flight_to_a_device_are_not_counted(seen: dict[str, Any]) -> None:
    """The rule holds for the prefetcher, and for a loader with a device."""
    assert seen["prefetched"]["counted"] == [[8, 16, 24, 32, 39, 46, 53, None]] * 2


def ranks(roots: Sequence[Path]) -> list[list[list[list[int]]]]:
    """Return the epochs of batches of numbers that each rank read."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    script = Path(__file__).parent / "scripts" / "torch_ranks.py"
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
    processes = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", str(script), str(rank), str(len(roots)), str(port), str(root)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        for rank, root in enumerate(roots)
    ]
    outputs = [process.communicate(timeout=200) for process in processes]
    for process, (_, err) in zip(processes, outputs, strict=True):
        assert process.returncode == 0, err
    found = [json.loads(out.splitlines()[-1]) for out, _ in outputs]
    apart = "the ranks begin different epochs (5 to 8), so samples would be read twice" if len(roots) > 1 else ""
    assert all(apart in each.pop() for each in found)
    return found


def test_a_single_rank_reads_every_epoch_completely(cache: CacheDir) -> None:
    (read,) = ranks([cache.root])

    for batches in read:
        assert len(batches) == 15  # 60 samples, 4 per step
        assert sorted(n for batch in batches for n in batch) == list(range(60))
    assert leases(cache) == []


def test_two_ranks_on_one_cache_divide_every_epoch(cache: CacheDir) -> None:
    """Rank, world size and the name of the run come from torch.distributed."""
    first, second = ranks([cache.root, cache.root])

    for mine, theirs in zip(first, second, strict=True):
        assert [len(mine), len(theirs)] == [8, 8]  # 60 samples, 2 x 4 per step
        assert sorted(n for batch in mine + theirs for n in batch) == list(range(60))
    assert first[0] != first[1]
    assert leases(cache) == []


@pytest.mark.soak  # the default run has two ranks
def test_four_ranks_divide_every_epoch(cache: CacheDir) -> None:
    read = ranks([cache.root] * 4)

    for epoch in zip(*read, strict=True):
        assert [len(batches) for batches in epoch] == [4] * 4  # 60 samples, 4 x 4 per step
        assert sorted(n for batches in epoch for batch in batches for n in batch) == list(range(60))
    assert leases(cache) == []


def test_ranks_on_unequal_caches_take_as_many_steps_as_the_smaller_allows(cache: CacheDir, tmp_path: Path) -> None:
    with open_cache(tmp_path / "other", max_size="20MB") as other:
        put(other, range(100, 127))
        first, second = ranks([cache.root, other.root])

    for mine, theirs in zip(first, second, strict=True):
        assert [len(mine), len(theirs)] == [4, 4]
        for batches, whole in ((mine, range(60)), (theirs, range(100, 127))):
            read = [n for batch in batches for n in batch]
            assert len(read) == len(set(read)) >= 12
            assert set(read) <= set(whole)
    assert leases(cache) == []


@pytest.mark.parametrize("depth", [1, 2, 5, 9])
def test_batches_in_flight_to_a_device_arrive_before_a_later_error(depth: int, monkeypatch: pytest.MonkeyPatch) -> None:
    class Event:
        query = staticmethod(lambda: True)
        record = staticmethod(lambda *_: None)

    device = SimpleNamespace(
        Stream=lambda _: SimpleNamespace(synchronize=lambda: None, device_index=0),
        Event=Event,
        stream=lambda _: contextlib.nullcontext(),
        current_stream=lambda _: SimpleNamespace(wait_event=lambda _: None),
    )

    def failing() -> Iterator[int]:
        yield from range(5)
        raise KeyError("the sixth")

    monkeypatch.setattr(torch_device, "_module", lambda _: device)
    arrived: list[int] = []
    with pytest.raises(KeyError, match="the sixth"):
        arrived.extend(torch_device.DevicePrefetcher(failing(), "meta", depth=depth))
    assert arrived == list(range(5))
