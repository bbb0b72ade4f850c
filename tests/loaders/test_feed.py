"""Feeders: every sample once, newest snapshots, errors, ends. Tests that kill something run in separate processes."""

from __future__ import annotations

import contextlib
import json
import math
import os
import random
import signal
import subprocess
import sys
import threading
import time
import weakref
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cachetool
from cachetool.cache import CacheDir, SourceRow, draws, open_cache
from cachetool.core.errors import CacheToolError, CorruptError, UsageError
from cachetool.core.extents import EXTENTS_FILE
from cachetool.core.names import Id
from cachetool.core.schema import Field, Schema
from cachetool.core.text import program
from cachetool.formats.reading import load_extents
from cachetool.loaders.numpy import Loader
from cachetool.loaders.snapshots import waiting
from cachetool.proc.lines import FeederTraceback
from tests.loaders.numbered import EVERY, KEYED, SMALL, digest, digests, leases, put, sample
from tests.loaders.processes import alive, children, until

SOURCE = Id("5" * 16)

FORMATS = (("lmdb", None), ("hdf5", None), ("zarr", None), ("tfrecord", None), ("hdf5", "gzip"), ("zarr", "zstd"))


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Create a cache with every kind of field in all formats, also compressed."""
    root = tmp_path_factory.mktemp("mixed") / "cache"
    with open_cache(root, max_size="50MB") as cache:
        for at, (name, compression) in enumerate(FORMATS):
            put(cache, range(9 * at, 9 * at + 9), format=name, schema=EVERY, compression=compression)
    return root


def seen(batch: dict[str, Any], schema: Any = SMALL) -> list[str]:
    """Return the digests of the samples of a batch."""
    count = len(next(iter(batch.values())))
    return [digest(schema, {name: column[i] for name, column in batch.items()}) for i in range(count)]


def numbers(loader: Loader) -> list[int]:
    """Return the numbers of the samples of one epoch, in order."""
    return [int(number) for batch in loader for number in batch["number"]]


@pytest.mark.parametrize("workers", [0, pytest.param(1, marks=pytest.mark.soak), 2, 8])
def test_an_epoch_delivers_every_sample_once_and_as_it_was_written(workers: int, mixed: Path) -> None:
    with Loader(mixed, batch_size=4, workers=workers, seed=3) as loader:
        assert len(loader) == 14  # 54 samples
        batches = [seen(batch, EVERY) for batch in loader]
        again = [seen(batch, EVERY) for batch in loader]

    assert {len(batch) for batch in batches} == {3, 4}
    assert len(batches) == 14
    for epoch in (batches, again):
        assert sorted(sample for batch in epoch for sample in batch) == digests(EVERY, range(54))
    assert batches != again


def test_the_order_does_not_depend_on_the_number_of_feeders(cache: CacheDir) -> None:
    orders = []
    for workers in (0, 1, 3):
        with Loader(cache, batch_size=7, fields=["number"], workers=workers, seed=5) as loader:
            orders.append([numbers(loader), numbers(loader)])

    assert orders[0] == orders[1] == orders[2]
    assert orders[0][0] != orders[0][1]


@pytest.mark.parametrize("workers", [0, 2])
def test_an_epoch_after_a_refresh_reads_the_newest_snapshot_and_its_lease_ends(workers: int, cache: CacheDir) -> None:
    with Loader(cache, batch_size=8, fields=["number"], workers=workers, epochs=3) as loader:
        assert sorted(numbers(loader)) == list(range(60))
        put(cache, range(60, 80))  # after the next epoch was prepared
        loader.refresh()
        assert sorted(numbers(loader)) == list(range(80))
        half = iter(loader)
        next(half)
        put(cache, range(80, 90))
        assert sorted(numbers(loader)) == list(range(90))
        with pytest.raises(UsageError, match="this iterator ended because its loader was iterated again"):
            next(half)
        assert loader.epoch == 4  # the epoch that was left has a number too
    assert leases(cache) == []
    assert [shard.epochs for shard in cache.shards()] == [3, 3, 3, 2, 1]


@pytest.mark.parametrize("workers", [0, 2])
def test_an_iterator_that_ended_early_raises_every_time(workers: int, cache: CacheDir) -> None:
    """The iterator ends with batches at hand, with the last batch, or with no batch yet."""
    with Loader(cache, batch_size=10, fields=["number"], workers=workers) as loader:
        for taken in range(6):
            older = iter(loader)
            for step in range(taken):
                assert len(older) == 6 - step
                next(older)
            newer = iter(loader)
            for _ in range(2):
                with pytest.raises(UsageError, match="this iterator ended because its loader was iterated again"):
                    next(older)
            assert len(older) == 6 - taken
            del newer
        whole, number = iter(loader), loader.epoch
        batches = [next(whole) for _ in range(6)]
        assert loader.epoch == number + 1  # without asking for one more batch
        _ = iter(loader)
        assert next(whole, None) is None
        assert sorted(n for batch in batches for n in batch["number"].tolist()) == list(range(60))


def test_delivered_batches_are_not_kept(cache: CacheDir) -> None:
    """Neither an iterator with more batches nor one at its end keeps them."""
    with Loader(cache, batch_size=10, fields=["number"]) as loader:
        epoch = iter(loader)
        for _ in range(6):
            there = weakref.ref(next(epoch)["number"])
            assert there() is None
        half = iter(loader)
        next(half)
        at_hand = [weakref.ref(batch["number"]) for batch in half.progress.ready]  # type: ignore[attr-defined]
        del half
        assert [there() for there in at_hand] == [None] * len(at_hand)


@pytest.mark.parametrize("workers", [0, 2])
def test_concurrent_iterators_have_their_own_feeders(workers: int, cache: CacheDir) -> None:
    before = len(children())
    with Loader(cache, batch_size=4, fields=["number"], workers=workers, concurrent=True) as loader:
        first, second = iter(loader), iter(loader)
        assert len(children()) - before == 2 * workers
        orders: list[list[list[int]]] = [[], []]
        for a, b in zip(first, second, strict=True):
            orders[0].append(a["number"].tolist())
            orders[1].append(b["number"].tolist())
        assert [sorted(n for batch in order for n in batch) for order in orders] == [list(range(60))] * 2
        assert orders[0] != orders[1]
        assert loader.epoch == 2
        assert len(children()) - before == workers  # the feeders of the second iterator ended with it
        half, whole = iter(loader), iter(loader)
        next(half), next(whole)
        del whole
        until(lambda: len(children()) - before == workers)
        assert sorted(n for batch in half for n in batch["number"].tolist())[-1] == 59
        third, fourth = iter(loader), iter(loader)
        next(third)
    with pytest.raises(UsageError, match="this iterator ended"):
        next(fourth)
    assert len(children()) == before
    assert leases(cache) == []


@pytest.mark.parametrize("workers", [0, 1])
def test_the_state_beside_a_concurrent_iterator_belongs_to_the_first_one(workers: int, cache: CacheDir) -> None:
    options: dict[str, Any] = {"batch_size": 4, "fields": ["number"], "workers": workers, "concurrent": True}
    with Loader(cache, **options) as loader:
        first = iter(loader)
        before = numbers([next(first), next(first)])
        beside = numbers(loader)
        state = loader.state_dict()
        rest = numbers(first)
        assert loader.epoch == 2
    with Loader(cache, **options) as loader:
        loader.load_state_dict(state)
        assert (loader.epoch, numbers(loader)) == (0, rest)
    assert sorted(before + rest) == sorted(beside) == list(range(60))


@pytest.mark.parametrize("workers", [0, 1])
def test_after_a_left_epoch_comes_one_that_no_concurrent_iterator_began(workers: int, cache: CacheDir) -> None:
    with Loader(cache, batch_size=4, fields=["number"], workers=workers, concurrent=True) as loader:
        orders = []
        for batch in loader:
            if orders:
                break
            orders.append([each["number"].tolist() for each in loader])
            del batch
        orders += [[each["number"].tolist() for each in loader] for _ in range(2)]
        assert loader.epoch == 4

    assert len({json.dumps(order) for order in orders}) == 3


@pytest.mark.parametrize("workers", [1, 2])
def test_feeders_end_at_once_despite_a_forked_child(workers: int, cache: CacheDir) -> None:
    """The child also has the pipes whose end tells feeders to stop. Feeders that do not end in time are killed."""
    loader = Loader(cache, batch_size=4, fields=["number"], workers=workers)
    numbers(loader)
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(write)
        os.read(read, 1)
        os._exit(0)
    keeper, pids = loader._feed._keeper, loader._feed.pids  # type: ignore[union-attr]
    assert len(pids) == workers
    loader.close()
    assert keeper.returncode == 0
    assert not any(map(alive, pids))
    assert leases(cache) == []
    os.close(write)
    os.waitpid(child, 0)
    os.close(read)


def test_deleted_shards_are_closed_while_the_loader_continues(cache: CacheDir) -> None:
    """A deleted file that is still mapped would still occupy the disk."""
    with Loader(cache, batch_size=8, fields=["number"], workers=2, hold=0.0) as loader:
        numbers(loader)
        first = cache.shards()[0]
        cache.evict(cache.usage().total - first.bytes, wait=5)
        assert sorted(numbers(loader)) == list(range(20, 60))
        for pid in children():
            assert first.id not in Path(f"/proc/{pid}/maps").read_text()


# the next epoch of the second case is requested before the last batch is built
@pytest.mark.parametrize("steps", [4, 40])
def test_batches_beyond_the_requested_steps_are_not_built(steps: int, cache: CacheDir, tmp_path: Path) -> None:
    notes = tmp_path / "notes"

    def note(sample: dict[str, Any]) -> dict[str, Any]:
        with open(notes, "a") as file:
            file.write(f"{sample['number']}\n")
        return {"number": sample["number"]}

    with Loader(cache, batch_size=1, steps=steps, transform=note, workers=1, prefetch=2, epochs=5) as loader:
        assert len(loader) == steps
        epochs = [numbers(loader) for _ in range(5)]
        assert loader.epoch == 5
    assert [len(epoch) for epoch in epochs] == [steps] * 5
    assert len(notes.read_text().split()) <= 5 * (steps + 2 + 1)  # of 5 x 60


@pytest.mark.parametrize("workers", [0, 2])
def test_kept_batches_do_not_change(workers: int, cache: CacheDir) -> None:
    with Loader(cache, batch_size=2, fields=["x", "number", "words"], workers=workers) as loader:
        kept: list[tuple[Any, Any]] = []
        for _ in range(3):
            for step, batch in enumerate(loader):
                look = [batch["x"], batch["x"][1:, 2], batch["number"].view(np.uint8), batch["words"]][step % 4]
                kept.append((look, look.copy() if isinstance(look, np.ndarray) else list(look)))
    assert len(kept) == 90
    for look, copy in kept:
        assert np.array_equal(look, copy)


def test_slots_are_returned_when_no_object_refers_to_them(cache: CacheDir) -> None:
    with Loader(cache, batch_size=2, fields=["x"], workers=1, prefetch=2) as loader:
        ring = loader._feed._rings[0] if (iter(loader), loader._feed) and loader._feed else None
        assert ring is not None
        for batch in loader:
            part = batch["x"][1:]
            del batch
            assert ring.batches_in_use in (1, 2)  # the slice keeps the batch; the loop's variable may keep one more
        del part
        assert ring.batches_in_use == 0
        kept = list(loader)
        assert ring.batches_in_use == 30
        kept.clear()
        assert ring.batches_in_use == 0
        assert len(list(loader)) == 30


def test_a_forked_child_that_drops_a_batch_returns_no_slot(cache: CacheDir) -> None:
    with Loader(cache, batch_size=2, fields=["x", "number"], workers=1, prefetch=2) as loader:
        batches = iter(loader)
        batch = next(batches)
        copy = batch["x"].copy()
        pid = os.fork()
        if pid == 0:
            same = np.array_equal(batch["x"], copy)
            del batch
            loader.close()
            os._exit(0 if same else 1)
        assert os.waitpid(pid, 0)[1] == 0
        for _ in range(20):
            next(batches)
        assert np.array_equal(batch["x"], copy)


def test_a_forked_child_reads_a_batch_that_its_parent_dropped_long_ago(cache: CacheDir) -> None:
    with Loader(cache, batch_size=2, fields=["x", "number"], workers=1, prefetch=2) as loader:
        batches = iter(loader)
        batch = next(batches)
        copy = batch["x"].copy()
        waits, goes = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(goes)
            os.read(waits, 1)
            os._exit(0 if np.array_equal(batch["x"], copy) else 1)
        del batch
        for _ in range(25):
            next(batches)
        ring = loader._feed._rings[0]  # type: ignore[union-attr]
        assert ring.batches_in_use == 1  # the child's reference
        os.write(goes, b"0")
        assert os.waitpid(pid, 0)[1] == 0
        next(batches)
        assert ring.batches_in_use == 0
        os.close(waits)
        os.close(goes)


def test_a_transform_is_applied_to_each_sample_in_the_feeders(cache: CacheDir) -> None:
    offset = 1000

    def double(sample: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
        return {
            "twice": 2 * sample["number"] + offset,
            "pid": os.getpid(),
            "text": f"{sample['words']}!",
            "noise": rng.random(3),
        }

    def read(workers: int) -> list[dict[str, Any]]:
        with Loader(cache, batch_size=16, workers=workers, transform=double) as loader:
            return list(loader)

    twos, here = read(2), read(0)
    assert sorted(int(n) for batch in twos for n in batch["twice"]) == [2 * n + 1000 for n in range(60)]
    pids = {int(pid) for batch in twos for pid in batch["pid"]}
    assert len(pids) == 2
    assert os.getpid() not in pids
    assert all(text.endswith("!") for batch in twos for text in batch["text"])
    for a, b in zip(twos, here, strict=True):
        assert np.array_equal(a["noise"], b["noise"])


def test_feeders_use_non_temporal_stores_unless_the_user_set_glibc_tunables(
    cache: CacheDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    def tunables(_: dict[str, Any]) -> dict[str, Any]:
        return {"tunables": os.environ["GLIBC_TUNABLES"]}

    name = "glibc.cpu.x86_non_temporal_threshold"
    found = []
    for mine in (None, f"{name}=0x100000"):
        if mine is not None:
            monkeypatch.setenv("GLIBC_TUNABLES", mine)
        with Loader(cache, batch_size=16, workers=2, transform=tunables) as loader:
            found.append({text for batch in loader for text in batch["tunables"]})

    assert found == [{f"{name}=0x80000"}, {f"{name}=0x80000:{name}=0x100000"}]


def test_a_transform_of_whole_batches_decides_the_content_of_a_batch(cache: CacheDir) -> None:
    def stack(batch: dict[str, Any]) -> dict[str, Any]:
        return {"mean": batch["x"].mean(axis=(1, 2)), "words": [word.upper() for word in batch["words"]]}

    with Loader(cache, batch_size=16, workers=2, transform=stack, transform_each="batch") as loader:
        batches = list(loader)

    assert {batch["mean"].shape for batch in batches} == {(15,)}
    assert all(word == word.upper() for batch in batches for word in batch["words"])


@pytest.mark.parametrize("workers", [0, 2])
def test_an_error_of_a_transform_is_raised_by_the_iterator_with_its_location(workers: int, cache: CacheDir) -> None:
    def fails(sample: dict[str, Any]) -> dict[str, Any]:
        if sample["number"] == 30:
            raise ZeroDivisionError("no such number")
        return {"number": sample["number"]}

    with Loader(cache, batch_size=4, workers=workers, transform=fails) as loader:
        with pytest.raises(UsageError, match="transform= raised ZeroDivisionError: no such number") as caught:
            list(loader)
        assert str(caught.value).endswith("(sample 30)")
        assert isinstance(caught.value.__cause__, FeederTraceback)
        where = str(caught.value.__cause__)
        assert "in fails" in where
        assert "cachetool/loaders" not in where  # frames of cachetool do not help the author of the transform
        with pytest.raises(UsageError, match="ZeroDivisionError"):  # the loader can still be used
            list(loader)
        assert loader.epoch == 0


@pytest.mark.parametrize("workers", [1, 2])
def test_batches_before_an_error_are_delivered(workers: int, cache: CacheDir, tmp_path: Path) -> None:
    """The rule also holds if the error already exists when the first batch is requested: several batches are taken
    together.
    """
    failed = tmp_path / "failed"

    def fails(sample: dict[str, Any]) -> dict[str, Any]:
        if sample["number"] == 30:
            failed.touch()
            raise ZeroDivisionError("no such number")
        return {"number": sample["number"]}

    with Loader(cache, batch_size=4, workers=workers, transform=fails, shuffle=False, prefetch=16) as loader:
        epoch = iter(loader)
        until(failed.exists)
        before = []
        with pytest.raises(UsageError, match="ZeroDivisionError"):
            before.extend(n for batch in epoch for n in batch["number"].tolist())  # all delivered samples
        with pytest.raises(UsageError, match="this iterator ended"):
            next(epoch)
    assert before == list(range(28))


def test_a_result_of_another_shape_is_refused_with_both_shapes(cache: CacheDir) -> None:
    def grows(sample: dict[str, Any]) -> dict[str, Any]:
        return {"x": np.zeros(3 if sample["number"] < 59 else 4)}

    with (
        Loader(cache, batch_size=4, workers=1, transform=grows) as loader,
        pytest.raises(UsageError, match=r"float64 \(3,\), got float64 \(4,\)"),
    ):
        list(loader)


def test_a_transform_that_cannot_be_pickled_is_refused_at_once(cache: CacheDir) -> None:
    lock = threading.Lock()
    with pytest.raises(UsageError, match="transform= cannot be sent to the feeders"):
        Loader(cache, batch_size=4, transform=lambda sample: {"x": lock.locked()})


def flip(cache: CacheDir, number: int, field: str, index: int) -> Path:
    """Flip one bit of a value of sample ``index`` of a shard. Return its data file."""
    shard = cache.shards()[number]
    extents = load_extents(shard.path / EXTENTS_FILE, shard.schema)
    path = shard.path / extents.files[extents.fields[field].file]
    at = int(extents.fields[field].locate(np.array([index]))[0][0])
    raw = bytearray(path.read_bytes())
    raw[at] ^= 1
    path.write_bytes(raw)
    return path


@pytest.mark.parametrize("workers", [0, 2])
def test_verify_names_file_and_sample_of_a_flipped_bit(workers: int, cache: CacheDir) -> None:
    with Loader(cache, batch_size=8, workers=workers, verify=True) as loader:
        assert sorted(seen_of(loader)) == digests(SMALL, range(60))
    path = flip(cache, 1, "x", 13)
    with Loader(cache, batch_size=8, workers=workers) as loader:
        assert sorted(seen_of(loader)) != digests(SMALL, range(60))  # no checksum was verified
    with (
        Loader(cache, batch_size=8, workers=workers, verify=True) as loader,
        pytest.raises(CorruptError, match=rf"{path}: sample 13, field 'x' does not match its checksum"),
    ):
        list(loader)
    with Loader(cache, batch_size=8, workers=workers, verify=True, fields=["number", "words"]) as loader:
        assert sorted(numbers(loader)) == list(range(60))  # the damaged field is not read


def test_verify_reads_every_kind_of_field_in_every_format(mixed: Path, tmp_path: Path) -> None:
    """Compressed shards and files outside a cache are included. A transform gets the samples after the check."""
    with Loader(mixed, batch_size=4, workers=2, verify=True) as loader:
        assert sorted(sample for batch in loader for sample in seen(batch, EVERY)) == digests(EVERY, range(54))
    with cachetool.open_cache(mixed) as opened:
        opened.convert(to="zarr", compression="zstd", out=tmp_path / "out")
    with Loader(tmp_path / "out", batch_size=4, workers=1, verify=True) as loader:
        assert sorted(sample for batch in loader for sample in seen(batch, EVERY)) == digests(EVERY, range(54))


def test_verify_happens_before_the_transform(cache: CacheDir) -> None:
    flip(cache, 0, "x", 3)
    with (
        Loader(cache, batch_size=8, workers=1, verify=True, transform=lambda sample: {"n": sample["number"]}) as loader,
        pytest.raises(CorruptError, match="sample 3, field 'x'"),
    ):
        list(loader)


def seen_of(loader: Loader) -> list[str]:
    """Return the digests of the samples of one epoch."""
    return [sample for batch in loader for sample in seen(batch)]


def test_damage_is_an_error_at_the_damaged_sample(cache: CacheDir) -> None:
    data = cache.shards()[1].data
    os.truncate(data, data.stat().st_size // 2)
    with Loader(cache, batch_size=4, workers=2) as loader, pytest.raises(CacheToolError, match=data.name):
        list(loader)


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("format", ["lmdb", "hdf5", "zarr", "tfrecord"])
def test_a_missing_file_counts_as_damage(tmp_path: Path, format: str, workers: int) -> None:
    with open_cache(tmp_path / "cache", max_size="50MB") as cache:
        put(cache, range(20), format=format)
        data = cache.shards()[0].data
        files = [data] if data.is_file() else [path for path in data.rglob("*") if path.suffix != ".json"]
        for path in files:
            if path.is_file():
                path.unlink()
        with Loader(cache, batch_size=4, workers=workers) as loader, pytest.raises(CorruptError, match="is missing"):
            list(loader)


def test_a_feeder_killed_by_a_truncated_file_is_reported_with_that_cause(cache: CacheDir) -> None:
    with Loader(cache, batch_size=2, workers=1, prefetch=1) as loader:
        batches = iter(loader)
        next(batches)
        os.kill(children()[0], signal.SIGBUS)
        with pytest.raises(CacheToolError, match=r"killed by signal 7; a shard was cut short.*cachetool verify"):
            list(batches)


def test_a_batch_is_built_while_the_previous_one_is_in_use(cache: CacheDir, tmp_path: Path) -> None:
    """The test uses the smallest ``prefetch``, and does not request the batch."""
    notes = tmp_path / "notes"

    def notes_it(sample: dict[str, Any]) -> dict[str, Any]:
        with open(notes, "a") as file:
            file.write("1")
        return {"number": sample["number"]}

    with Loader(cache, batch_size=10, workers=1, prefetch=1, transform=notes_it) as loader:
        batches = iter(loader)
        for number in range(1, 6):
            batch = next(batches)
            until(lambda number=number: len(notes.read_text()) >= 10 * (number + 1))
            del batch


def test_without_feeders_a_batch_is_built_on_request_without_a_thread(cache: CacheDir) -> None:
    made: list[tuple[int, threading.Thread]] = []

    def noted(sample: dict[str, Any]) -> dict[str, Any]:
        made.append((int(sample["number"]), threading.current_thread()))
        return {"number": sample["number"]}

    before = threading.active_count()
    with Loader(cache, batch_size=10, workers=0, transform=noted) as loader:
        for step, _ in enumerate(loader, 1):
            assert len(made) == 10 * step
            assert threading.active_count() == before
    assert {thread for _, thread in made} == {threading.current_thread()}


@pytest.mark.parametrize("number", [0, 2])
def test_a_killed_feeder_is_an_error_and_the_next_epoch_has_new_ones(number: int, cache: CacheDir) -> None:
    with Loader(cache, batch_size=2, workers=3, prefetch=1) as loader:
        batches = iter(loader)
        next(batches)
        feeders = children()
        assert len(feeders) == 3
        # the kernel schedules each session as one program
        until(lambda: [os.getsid(pid) for pid in feeders] == feeders)
        os.kill(feeders[number], signal.SIGKILL)
        with pytest.raises(CacheToolError, match=rf"a feeder \(pid {feeders[number]}\) was killed by signal 9"):
            list(batches)
        assert not any(map(alive, feeders))
        assert len(list(loader)) == 30
    assert leases(cache) == []


def test_child_processes_of_a_transform_do_not_disturb_the_feeders(cache: CacheDir, tmp_path: Path) -> None:
    """The transform waits for all its children, and forks one that outlives a killed feeder, with all its
    descriptors.
    """

    def forks(sample: dict[str, Any]) -> dict[str, Any]:
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)
        if os.fork() == 0:
            os._exit(0)
        with contextlib.suppress(ChildProcessError):
            while True:
                os.wait()
        tasks = Path("/proc/self/task").glob("*/children")
        assert not any(task.read_text() for task in tasks)
        if os.fork() == 0:
            (notes / str(os.getpid())).touch()
            until((tmp_path / "end").exists, 60)
            os._exit(0)
        signal.pause()
        return sample

    notes = tmp_path / "notes"
    notes.mkdir()
    with Loader(cache, batch_size=2, workers=2, prefetch=1, transform=forks) as loader:
        batches = iter(loader)
        feeders = children()
        until(lambda: len(os.listdir(notes)) == 2)
        os.kill(feeders[0], signal.SIGKILL)
        with pytest.raises(CacheToolError, match=rf"a feeder \(pid {feeders[0]}\) was killed by signal 9"):
            list(batches)
    (tmp_path / "end").touch()


@pytest.mark.parametrize("forked", [0, 1])
def test_feeders_that_cannot_be_forked_are_reported_and_none_is_left(forked: int) -> None:
    script = f"""
import os, signal
from cachetool.loaders.feed import feeder as keeper

fork, left = os.fork, {forked}

def fails():
    global left
    if left == 0:
        raise BlockingIOError(11, "no room")
    left -= 1
    return fork()

os.fork = fails
keeper.fork(3, trainer=os.getppid(), report=1, others=[])
signal.pause()
"""
    # A remaining process would hold stderr, so this call would wait for it.
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, timeout=60, check=True)
    assert json.loads(done.stdout) == {"error": "cannot start a feeder: no room"}
    assert done.stderr == b""


@pytest.mark.parametrize("how", ["ignores", "blocks"])
def test_a_killed_feeder_is_noticed_for_any_signal_settings_of_the_trainer(
    how: str, script: Any, cache: CacheDir
) -> None:
    """Feeders inherit ignored and blocked signals."""
    out, err = script(UNHEARD, cache.root, how).communicate(timeout=60)
    assert out == "killed by signal 9\nclosed\n"
    assert err == ""


UNHEARD = """
    import os, re, signal, sys
    from cachetool.loaders.numpy import Loader

    if sys.argv[2] == "ignores":
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    else:
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGCHLD, signal.SIGTERM])
    with Loader(sys.argv[1], batch_size=2, workers=2, prefetch=1) as loader:
        batches = iter(loader)
        os.kill(loader._feed.pids[1], signal.SIGKILL)
        try:
            list(batches)
        except Exception as error:
            print(*re.findall("killed by signal 9", str(error)))
        list(loader)
    print("closed")
"""


def test_feeders_have_different_random_numbers_and_no_standard_input(cache: CacheDir) -> None:
    """They are forked from one process. Workers forked so gave many trainings identical augmentations."""

    def draw(sample: dict[str, Any]) -> dict[str, Any]:
        drawn = [random.random(), np.random.random()]
        return {"number": sample["number"], "drawn": np.array(drawn), "pid": os.getpid(), "said": len(sys.stdin.read())}

    with Loader(cache, batch_size=2, workers=3, transform=draw) as loader:
        batches = list(loader)
    pids = {pid for batch in batches for pid in batch["pid"].tolist()}
    drawn = np.concatenate([batch["drawn"] for batch in batches])
    assert len(pids) == 3
    assert drawn.shape == (60, 2)
    assert len(np.unique(drawn)) == drawn.size


def test_a_dropped_loader_leaves_no_resources(cache: CacheDir) -> None:
    descriptors = len(os.listdir("/proc/self/fd"))
    loader = Loader(cache, batch_size=2, workers=2)
    batches = iter(loader)
    batch = next(batches)
    copy = batch["x"].copy()
    assert len(children()) == 2
    del loader, batches
    until(lambda: children() == [])
    assert np.array_equal(batch["x"], copy)
    assert leases(cache) == []
    assert len(os.listdir("/proc/self/fd")) == descriptors


def test_a_loader_waits_for_samples_in_an_empty_cache(tmp_path: Path) -> None:
    with open_cache(tmp_path / "cache", max_size="20MB") as cache:
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                with Loader(cache, batch_size=30, fields=["number"], workers=1, wait=30) as loader:
                    code = 0 if sorted(numbers(loader)) == list(range(40)) else 2
            finally:
                os._exit(code)
        put(cache, range(20))
        put(cache, range(20, 40))
        assert os.waitpid(pid, 0)[1] == 0


@pytest.mark.parametrize("workers", [0, 1])
def test_a_wait_ends_with_an_error_that_names_the_available_samples(workers: int, cache: CacheDir) -> None:
    with (
        Loader(cache, batch_size=64, workers=workers, wait=0.3) as loader,
        pytest.raises(UsageError, match=r"waited 0.3 s for samples: 60 of 64 samples in"),
    ):
        iter(loader)


@pytest.mark.parametrize("more", [{"batch_size": 64, "drop_last": True}, {"batch_size": 64}])
@pytest.mark.parametrize("workers", [0, 1])
def test_a_wait_reports_what_it_waits_for_and_that_no_pull_runs(
    workers: int, more: Any, cache: CacheDir, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once, on stderr. The line also reveals a batch size that is too large."""
    if workers == 0:
        monkeypatch.setattr(waiting, "FIRST", 0.1)
    given = {"batch_size": 8, "wait": 3.5 if workers else 0.7, **more}
    with Loader(cache, workers=workers, **given) as loader, pytest.raises(UsageError) as raised:
        iter(loader)
    says, less = rf"60 of 64 samples in {cache.root}", "min_samples="
    if "drop_last" in more:
        says, less = f"{says}, because drop_last=True uses only complete batches of 64", "batch_size="
    pull = f"cachetool pull SOURCE --cache {cache.root}"
    assert str(raised.value).endswith(f"{says}; fill it with: {pull}, or change {less}")
    who = f"no pull is filling this cache; start one with: {pull}, or change {less}"
    assert capfd.readouterr().err == f"cachetool: waiting for samples (for {given['wait']} s at most): {says}; {who}\n"


def test_stats_name_the_training_program_as_the_reader(cache: CacheDir) -> None:
    """The feeder that holds the lease is not listed."""
    with Loader(cache, batch_size=8, workers=1) as loader:
        iter(loader)
        readers = cache.stats().leases  # the feeder may have prepared the next epoch already

    assert {reader["what"] for reader in readers} == {program()}
    assert os.getpid() not in {reader["pid"] for reader in readers}


def test_a_wait_names_the_running_pull(cache: CacheDir, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "listing").mkdir()
    cache.add_source(SourceRow(SOURCE, "s3://bucket/", {}, "i", "default", 9, 9, 0, 0, 0), tmp_path / "listing")
    talk = waiting.Talk(cache.root, math.inf)
    talk._next = 0.0
    with cache.catalog.write() as connection:
        cache.holder.register(connection)
        draws.open_job(connection, SOURCE, holder=cache.holder.id, wanted=None, seed=None)
    talk.tell(waiting.NotYet("1 of 2 samples"))
    talk.tell(waiting.NotYet("1 of 2 samples"))

    told = "cachetool: waiting for samples: 1 of 2 samples; the pull of s3://bucket/ fills dataset 'default'\n"
    assert capfd.readouterr().err == told


def test_ranks_take_the_same_number_of_steps_and_share_no_sample(cache: CacheDir) -> None:
    put(cache, range(60, 71))
    loaders = [
        Loader(cache, batch_size=4, fields=["number"], workers=1, rank=rank, world_size=3, run="job")
        for rank in range(3)
    ]
    epochs = [iter(loader) for loader in loaders]
    put(cache, range(71, 80))  # the ranks share a snapshot although this shard arrives in between
    read = [[batch["number"].tolist() for batch in epoch] for epoch in epochs]
    for loader in loaders:
        loader.close()

    assert [len(batches) for batches in read] == [6, 6, 6]
    assert sorted(n for batches in read for batch in batches for n in batch) == list(range(71))
    assert {len(batch) for batches in read for batch in batches} == {3, 4}


def test_training_and_validation_stay_disjoint_while_the_cache_grows(tmp_path: Path) -> None:
    def sides(cache: CacheDir) -> list[set[int]]:
        read = []
        for side in ("train", "validation"):
            with Loader(cache, batch_size=4, fields=["number"], workers=1, split=side, validation=0.3) as loader:
                read.append(set(numbers(loader)))
        return read

    with open_cache(tmp_path / "cache", max_size="20MB") as cache:
        put(cache, range(100), schema=KEYED)
        train, validation = sides(cache)
        put(cache, range(100, 150), schema=KEYED)
        more, held_out = sides(cache)
    assert train | validation == set(range(100))
    assert not train & validation
    assert 15 <= len(validation) <= 45
    assert train < more
    assert validation < held_out


def test_a_split_by_keys_that_are_not_text_is_refused(tmp_path: Path) -> None:
    with open_cache(tmp_path / "cache", max_size="20MB") as cache:
        put(cache, range(20), schema=Schema((Field("__key__", "|u1", (3,)), Field("number", "<i8"))))
        with (
            pytest.raises(UsageError, match=r"needs a field __key__ of text; in this dataset it is uint8 \(3,\)"),
            Loader(cache, batch_size=4, fields=["number"], workers=1, split="train") as loader,
        ):
            numbers(loader)


UNGUARDED = """
    import sys
    from cachetool.loaders.numpy import Loader
    print("started", flush=True)
    offset = 5
    loader = Loader(sys.argv[1], batch_size=8, workers=2, transform=lambda s: {"n": s["number"] + offset})
    print(sorted(int(n) for batch in loader for n in batch["n"]) == list(range(5, 65)), flush=True)
"""


@pytest.mark.parametrize("how", ["script", "stdin", "module"])
def test_a_loader_starts_from_an_unguarded_script_a_module_and_standard_input(
    how: str, script: Any, cache: CacheDir
) -> None:
    """The program runs only once: no feeder imports it."""
    out, err = script(UNGUARDED, cache.root, how=how).communicate(timeout=60)

    assert out == "started\nTrue\n"
    assert err == ""
    assert leases(cache) == []


RUNS = """
    import os, sys, time
    from cachetool.loaders.numpy import Loader
    loader = Loader(sys.argv[1], batch_size=2, workers=2)
    batches = iter(loader)
    batch = next(batches)
    if len(sys.argv) > 2 and os.fork() == 0:
        time.sleep(1000)          # outlives the trainer, with all its descriptors
    print(*loader._feed.pids, flush=True)
    while True:
        for batch in loader:
            pass
"""


@pytest.mark.parametrize("forks", [(), (1,)], ids=["alone", "forked"])
def test_feeders_end_with_a_killed_trainer(forks: tuple[int, ...], script: Any, cache: CacheDir) -> None:
    process = script(RUNS, cache.root, *forks)
    feeders = [int(pid) for pid in process.stdout.readline().split()]
    assert len(feeders) == 2
    assert all(map(alive, feeders))
    process.send_signal(signal.SIGKILL)
    process.wait()
    until(lambda: not any(map(alive, feeders)))
    assert leases(cache) == []
    process.stdout.close()
    process.stderr.close()
    for pid in forked(process):
        os.kill(pid, signal.SIGKILL)


def forked(trainer: subprocess.Popen[str]) -> list[int]:
    """Return processes of this trainer's program that outlived it. Other tests run their own beside it."""
    program = os.fsencode(trainer.args[1])  # type: ignore[index]
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError):
            if program in (entry / "cmdline").read_bytes() and int(entry.name) not in (trainer.pid, os.getpid()):
                found.append(int(entry.name))
    return found


@pytest.mark.parametrize("after", ["at once", "on and on"])
def test_two_interrupts_end_a_program_at_once_and_leave_no_process(after: str, script: Any, cache: CacheDir) -> None:
    """Both come before the first is handled, or one after the other, at any moment of the program until its end."""
    process = script(RUNS, cache.root)
    feeders = [int(pid) for pid in process.stdout.readline().split()]
    process.send_signal(signal.SIGINT)
    process.send_signal(signal.SIGINT)
    deadline = time.monotonic() + 20
    while after == "on and on" and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.005)  # interrupts can come this fast
        process.send_signal(signal.SIGINT)
    process.communicate(timeout=20)
    assert process.returncode in (-signal.SIGINT, 1, 130)
    until(lambda: not any(map(alive, feeders)))
    assert leases(cache) == []


BEGINS = """
    import json, sys
    from cachetool.loaders.numpy import Loader

    with Loader(sys.argv[1], batch_size=4, fields=["number"], workers=2, seed=1) as loader:
        batches = iter(loader)
        first = [int(n) for _ in range(6) for n in next(batches)["number"]]
        state = loader.state_dict()
        rest = [int(n) for batch in batches for n in batch["number"]]
    print(json.dumps([first, state, rest]))
"""


def test_an_epoch_resumes_in_another_process_and_with_another_world_size(script: Any, cache: CacheDir) -> None:
    out, err = script(BEGINS, cache.root).communicate()
    assert err == ""
    first, state, rest = json.loads(out)
    assert sorted(first + rest) == list(range(60))
    put(cache, range(60, 80))

    with Loader(cache, batch_size=4, fields=["number"], workers=1, seed=1) as loader:
        loader.load_state_dict(state)
        assert numbers(loader) == rest
        assert loader.epoch == 1
        assert sorted(numbers(loader)) == list(range(80))

    halves = []
    for rank in range(2):
        with Loader(
            cache, batch_size=5, fields=["number"], workers=1, seed=1, rank=rank, world_size=2, run="again"
        ) as loader:
            loader.load_state_dict(state)
            halves += numbers(loader)
    assert sorted(first + halves) == list(range(60))


def test_an_epoch_in_windows_is_complete_and_resumes_with_another_world_size(tmp_path: Path) -> None:
    """Two windows, one of them of 64 MiB. Both feeders read runs of both windows ahead."""
    cache = tmp_path / "large"
    schema = Schema((Field("x", "<f4", (3072,)), Field("number", "<i8")))
    with open_cache(cache, max_size="1GB") as large:
        for start in range(0, 7000, 3500):
            put(large, range(start, start + 3500), schema=schema, format="hdf5")
    options: dict[str, Any] = {"shuffle": "window", "workers": 2, "seed": 1}

    def checked(batches: Any) -> list[int]:
        found = []
        for batch in batches:
            for number, x in zip(batch["number"], batch["x"], strict=True):
                assert x.tobytes() == sample(schema, int(number))["x"].tobytes()
            found += batch["number"].tolist()
        return found

    with Loader(cache, batch_size=64, **options) as loader:
        assert sorted(checked(loader)) == list(range(7000))
        batches = iter(loader)
        first = numbers(islice(batches, 101))  # type: ignore[arg-type]
        state = loader.state_dict()
    halves = []
    for rank in range(2):
        with Loader(cache, batch_size=50, rank=rank, world_size=2, run="again", **options) as loader:
            loader.load_state_dict(state)
            halves += checked(loader)
    assert sorted(first + halves) == list(range(7000))


def test_a_state_with_evicted_shards_is_refused_or_resumes_without_them(cache: CacheDir) -> None:
    with Loader(cache, batch_size=4, fields=["number"], workers=1) as loader:
        batches = iter(loader)
        first = [int(n) for _ in range(5) for n in next(batches)["number"]]
        state = loader.state_dict()
    cache.evict(cache.usage().total - cache.shards()[0].bytes)

    with Loader(cache, batch_size=4, fields=["number"], workers=1) as loader:
        loader.load_state_dict(state)
        with pytest.raises(UsageError, match="1 of 3 shards of the epoch to resume were evicted"):
            iter(loader)
    with Loader(cache, batch_size=4, fields=["number"], workers=1, missing="skip") as loader:
        loader.load_state_dict(state)
        rest = numbers(loader)
    assert len(rest) == len(set(rest))
    assert set(rest) == set(range(20, 60)) - set(first)


def test_a_loader_works_in_a_trainer_with_thousands_of_open_files(cache: CacheDir) -> None:
    code = (
        "import os, resource, sys\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (4096, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))\n"
        "kept = [os.open('/dev/null', os.O_RDONLY) for _ in range(1200)]\n"
        "from cachetool.loaders.numpy import Loader\n"
        "with Loader(sys.argv[1], batch_size=2, workers=1) as loader:\n"
        "    print(sum(len(batch['number']) for batch in loader))\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(cache.root)], capture_output=True, text=True, check=False)

    assert (done.returncode, done.stdout) == (0, "60\n"), done.stderr
