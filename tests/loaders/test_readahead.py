"""Reading ahead: samples are read from the disk before they are requested."""

from __future__ import annotations

import os
import time
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cachetool.cache import CacheDir, open_cache
from cachetool.core.extents import EXTENTS_FILE
from cachetool.core.schema import Field, Schema
from cachetool.formats.reading import load_extents
from cachetool.loaders import order
from cachetool.loaders.feed.batches import announced
from cachetool.loaders.items import Numbers
from cachetool.loaders.read import readahead
from cachetool.loaders.read.arena import Arena, open_arena
from cachetool.loaders.read.gather import Runs
from cachetool.loaders.read.mapped import MappedParts
from cachetool.loaders.read.readahead import Readahead, Windows
from cachetool.loaders.settings import EpochPlan, Settings
from cachetool.loaders.view import View
from tests.loaders.numbered import put

MIB = 2**20


def dropped(path: Path) -> Arena:
    """Map a file whose pages were dropped."""
    fd = os.open(path, os.O_RDONLY)
    os.fsync(fd)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(fd)
    arena = open_arena()
    assert arena is not None
    assert arena.map(path) is not None
    if not asleep(arena, 0, path.stat().st_size):
        pytest.skip("this file system keeps its files in memory")
    return arena


def asleep(arena: Arena, start: int, size: int) -> bool:
    """Return True if no page of a run is in memory. The first file of an arena begins at its first huge page."""
    base = -int(arena.bytes.ctypes.data) % (2 * MIB)
    pages = np.arange(start, start + size, 4096) + base
    return bool(arena.asleep(pages).all())


def awake(arena: Arena, start: int, size: int) -> bool:
    """Return True if every page of a run is in memory soon."""
    base = -int(arena.bytes.ctypes.data) % (2 * MIB)
    pages = np.arange(start, start + size, 4096) + base
    end = time.monotonic() + 20
    while arena.asleep(pages).any():
        if time.monotonic() > end:
            return False
        time.sleep(0.01)
    return True


def test_only_runs_that_will_be_needed_are_read(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(os.urandom(8 * MIB))
    arena = dropped(path)
    base = -int(arena.bytes.ctypes.data) % (2 * MIB)
    starts = np.array([6 * MIB + 100, MIB, MIB + 9000, 3 * MIB]) + base
    arena.will_need(starts, np.array([10_000, 5000, 5000, 0]), near=8192)

    assert awake(arena, MIB, 14_000)
    assert awake(arena, 6 * MIB, 12_000)
    for start, stop in ((0, MIB), (MIB + 65536, 6 * MIB), (6 * MIB + 65536, 8 * MIB)):
        assert asleep(arena, start, stop - start)


class Notes:
    """An arena that only records the requests."""

    def __init__(self, awake: bool = False) -> None:
        self.awake, self.needed, self.looked = awake, [], 0  # type: ignore[var-annotated]

    def asleep(self, positions: Any) -> Any:
        self.looked += len(positions)
        return np.full(len(positions), not self.awake)

    def will_need(self, starts: Any, sizes: Any, near: int) -> None:
        self.needed.append(list(zip(starts.tolist(), sizes.tolist(), strict=True)))


SCHEMA = Schema((Field("x", "<f4", (256,)), Field("number", "<i8")))


def reader(notes: Notes) -> Readahead:
    return Readahead(
        notes, SCHEMA, lambda at: [(None, {"x": Runs(np.empty(0), 1024 * at), "number": Runs(np.empty(0), at)})], near=0
    )  # type: ignore[arg-type]


def test_batches_are_read_ahead_in_order_up_to_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readahead, "BYTES", 10 * 1032)
    notes = Notes()
    ahead = reader(notes)
    batches = [np.arange(4 * at, 4 * at + 4) for at in range(10)]
    ahead.expect(batches[:5])
    most = 0
    for number, batch in enumerate(batches):
        if number == 2:
            ahead.expect(batches[5:])
        ahead.gathering(len(batch))
        told = sum(map(len, notes.needed))
        assert told >= 4 * number + 4  # before it is gathered
        most = max(most, told - 4 * number)
    assert [start // 1024 for group in notes.needed for start, _ in group] == list(range(40))
    assert {size for group in notes.needed for _, size in group} == {1024}
    assert most <= 10 + 4


def test_runs_that_are_in_memory_are_not_requested() -> None:
    notes = Notes(awake=True)
    ahead = reader(notes)
    ahead.expect([np.arange(1000)] * 50)
    for _ in range(50):
        ahead.gathering(1000)
    assert notes.needed == []
    assert 0 < notes.looked < 200  # of 50,000


def windows(notes: Notes, them: Any, *reached: int) -> Windows:
    locate = lambda at: [(None, {"x": Runs(np.empty(0), 1024 * at), "number": Runs(np.empty(0), at)})]  # noqa: E731
    return Windows(notes, SCHEMA, locate, them, np.array(reached))  # type: ignore[arg-type]


def test_windows_are_requested_in_order_up_to_a_limit() -> None:
    notes = Notes()
    them = [(10, np.arange(20 * at, 20 * at + 20).reshape(4, 5)) for at in range(12)]
    reached = (25, 25, 31, 60, 60, 115, 120)
    ahead = windows(notes, them, *reached)
    for wanted in reached:
        ahead.gathering(3)
        assert wanted <= 10 * len(notes.needed) < wanted + 10
    assert [start // 1024 for group in notes.needed for start, _ in group] == list(range(240))


def test_only_runs_of_a_window_that_are_not_in_memory_are_requested() -> None:
    notes = Notes()
    notes.asleep = lambda positions: positions // 1024 == 6  # type: ignore[method-assign]
    windows(notes, [(10, np.arange(20).reshape(4, 5))], 5).gathering(1)
    assert [start // 1024 for group in notes.needed for start, _ in group] == [5, 6, 7, 8, 9]
    notes = Notes(awake=True)
    windows(notes, [(10, np.arange(20).reshape(4, 5))] * 3, 100).gathering(1)
    assert (notes.needed, notes.looked) == ([], 24)


CASES: dict[str, dict[str, Any]] = {
    "one feeder": {"feeders": 1},
    "two": {},
    "three and a rest": {"feeders": 3, "samples": 2000},
    "more feeders than runs in a window": {"feeders": 6, "runs": 4, "batch": 4},
    "more feeders than batches": {"feeders": 4, "batch": 1024},
    "batches of more than two windows": {"feeders": 3, "batch": 200},
    "in the middle": {"position": 650},
    "taken up in the middle": {"done": 40},
    "two ranks": {"world": 2},
    "with keys": {"schema": Schema((Field("__key__", "str"), Field("x", "<f4", (512,))))},
    "a part of them": {"chosen": np.flatnonzero(np.arange(2048) % 20)},
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_feeders_together_request_each_window_once_and_in_time(
    cache: CacheDir, monkeypatch: pytest.MonkeyPatch, case: dict[str, Any]
) -> None:
    """Windows of 16 runs of 4 samples of 2 KiB each; the feeders gather in turns."""
    monkeypatch.setattr(order, "RUN_BYTES", 2**13)
    monkeypatch.setattr(order, "_WINDOW_RUNS", case.get("runs", 16))
    asked: list[int] = []
    monkeypatch.setattr(Arena, "asleep", lambda self, positions: np.ones(len(positions), dtype=np.bool_))
    monkeypatch.setattr(Arena, "will_need", lambda self, starts, sizes, near: asked.extend(starts.tolist()))
    feeders, world, chosen = case.get("feeders", 2), case.get("world", 1), case.get("chosen")
    schema = case.get("schema", Schema((Field("x", "<f4", (512,)),)))
    put(cache, range(2048), schema=schema, dataset="small", format="hdf5")
    view = View.of_shards(cache.version, "small", schema, cache.shards("small"))
    samples = len(chosen) if chosen is not None else case.get("samples", 2048)
    whole, position = schema.select(["x"]), case.get("position", 0)
    gathered: set[int] = set()
    everything: list[int] = []
    for rank in range(world):
        settings = Settings("", batch_size=case.get("batch", 8), shuffle="window", rank=rank, world_size=world)
        plan = EpochPlan(1, 0, view, samples=samples, position=position)
        cut = plan.steps(settings)
        steps = np.arange(cut.count, dtype=np.int64)
        parts = [MappedParts() for _ in range(feeders)]
        batches = []
        for feeder, each in enumerate(parts):
            mine = steps[feeder::feeders][case.get("done", 0) :]
            found = announced(plan, settings, mine, each, whole, feeders=feeders, numbers=Numbers(samples, chosen))
            batches.append((indices for _, several in found for indices in several))
        asked.clear()
        reached = position + case.get("done", 0) * feeders * 8
        while rounds := [found for each in batches if (found := next(each, None)) is not None]:
            for each, indices in zip(parts, rounds, strict=False):
                ahead = each._ahead
                assert isinstance(ahead, Windows)
                ahead.gathering(len(indices))
            places = [parts[0].locate(view, indices, whole)[0][1]["x"].starts.tolist() for indices in rounds]
            assert set(chain.from_iterable(places)) <= set(asked)
            gathered |= set(chain.from_iterable(rounds))
            reached += world * sum(map(len, rounds))
            most = (
                reached + world * (2 * 64 + feeders * 20) + world * sum(map(len, rounds)) + 64 + 4 * (samples // 64 + 2)
            )
            assert len(asked) <= most - (position + case.get("done", 0) * feeders * 8) // 64 * 64
        # A run that reaches into two windows is requested with both. A shorter run repeats its last sample.
        assert len(asked) <= len(set(asked)) + 4 * (samples // 64 + 2)
        everything += [int(at) for at in asked]
        for each in parts:
            each.close()
    assert len(gathered) == samples - position - case.get("done", 0) * feeders * 8
    assert len(everything) <= world * (samples - position + 64 + 4 * (samples // 64 + 2))


@pytest.mark.parametrize("done", [(9, 8), (8, 9), (15, 14), (16, 15)])
def test_workers_that_resume_from_different_steps_still_share_windows(
    cache: CacheDir, monkeypatch: pytest.MonkeyPatch, done: tuple[int, int]
) -> None:
    """Each worker process of a dataset knows only its own step. A window of 64 samples ends after four steps of
    each.
    """
    monkeypatch.setattr(order, "RUN_BYTES", 2**13)
    monkeypatch.setattr(order, "_WINDOW_RUNS", 16)
    asked: list[float] = []
    monkeypatch.setattr(Arena, "asleep", lambda self, positions: np.ones(len(positions), dtype=np.bool_))
    monkeypatch.setattr(Arena, "will_need", lambda self, starts, sizes, near: asked.extend(starts.tolist()))
    schema = Schema((Field("x", "<f4", (512,)),))
    put(cache, range(2048), schema=schema, dataset="small", format="hdf5")
    view = View.of_shards(cache.version, "small", schema, cache.shards("small"))
    plan, settings = EpochPlan(1, 0, view, samples=2048), Settings("", batch_size=8, shuffle="window")
    needed: list[float] = []
    for worker in range(2):
        parts = MappedParts()
        steps = np.arange(worker, plan.steps(settings).count, 2, dtype=np.int64)[done[worker] :]
        for _, several in announced(plan, settings, steps, parts, schema, feeders=2, numbers=Numbers(plan.samples)):
            for indices in several:
                assert isinstance(parts._ahead, Windows)
                parts._ahead.gathering(len(indices))
                needed += parts.locate(view, indices, schema)[0][1]["x"].starts.tolist()
        parts.close()
    # In the window that only one of the workers reads, half is its own.
    assert len(set(needed) - set(asked)) <= 64 // 2
    assert len(asked) <= len(set(asked)) + 4 * (2048 // 64 + 2)


@pytest.mark.parametrize("share", [0.5, 0.005])
def test_all_samples_of_one_side_of_a_split_are_requested(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, share: float
) -> None:
    """Some samples of a long run tell where it lies. Between the samples of a small side lie other samples."""
    wanted: list[tuple[int, int]] = []

    def will_need(self: Arena, starts: np.ndarray, sizes: np.ndarray, near: int) -> None:
        at, sizes, before = np.argsort(starts), np.broadcast_to(sizes, starts.shape), len(wanted)
        for start, size in zip(starts[at].tolist(), sizes[at].tolist(), strict=True):
            if len(wanted) > before and 0 <= start - wanted[-1][1] <= near:
                wanted[-1] = wanted[-1][0], start + size
            else:
                wanted.append((start, start + size))

    monkeypatch.setattr(Arena, "asleep", lambda self, positions: np.ones(len(positions), dtype=np.bool_))
    monkeypatch.setattr(Arena, "will_need", will_need)
    schema = Schema((Field("x", "|u1", (512,)),))
    with open_cache(tmp_path / "cache", max_size="100MB") as cache:
        put(cache, range(40_000), schema=schema, dataset="small", format="hdf5")
        view = View.of_shards(cache.version, "small", schema, cache.shards("small"))
    chosen = np.flatnonzero(np.random.default_rng(0).random(view.samples) < share)
    plan, settings = EpochPlan(1, 0, view, samples=len(chosen)), Settings("", batch_size=256, shuffle="window")
    parts = MappedParts()
    steps = np.arange(plan.steps(settings).count, dtype=np.int64)
    needed: list[int] = []
    for _, several in announced(plan, settings, steps, parts, schema, feeders=1, numbers=Numbers(len(chosen), chosen)):
        for indices in several:
            assert parts._ahead is not None
            parts._ahead.gathering(len(indices))
            needed += parts.locate(view, indices, schema)[0][1]["x"].starts.tolist()
    parts.close()
    assert len(needed) == len(chosen)
    wanted.sort()
    begins, ends = np.array(wanted).T
    at = np.searchsorted(begins, np.array(needed), side="right") - 1
    assert (at >= 0).all()
    assert (np.array(needed) + 512 <= np.maximum.accumulate(ends)[at]).all()
    read = sum(end - start for start, end in wanted)
    if share < 0.1:  # the samples in between are left to the other readers
        assert read < 512 * view.samples // 4


def test_announced_samples_are_forgotten_with_the_next_plan(cache: CacheDir) -> None:
    schema = Schema((Field("x", "<f4", (512,)),))
    put(cache, range(64), schema=schema, dataset="small", format="hdf5")
    view = View.of_shards(cache.version, "small", schema, cache.shards("small"))
    parts = MappedParts()
    for generation, shuffle in enumerate(("window", "full", "window"), 1):
        plan = EpochPlan(generation, 0, view, samples=64)
        settings = Settings("", batch_size=8, shuffle=shuffle)  # type: ignore[arg-type]
        found = announced(plan, settings, np.arange(8), parts, schema, feeders=1, numbers=Numbers(plan.samples))
        indices = [at for _, several in found for at in several]
        assert sorted(np.concatenate(indices).tolist()) == list(range(64))
        assert isinstance(parts._ahead, Windows if shuffle == "window" else Readahead)
    parts.close()


def test_the_last_batch_is_being_read_when_the_first_one_is_delivered(tmp_path: Path, cache: CacheDir) -> None:
    schema = Schema((Field("x", "<f4", (MIB // 4,)), Field("number", "<i8")))
    put(cache, range(12), schema=schema, dataset="large", format="hdf5")
    shard = cache.shards("large")[0]
    arena = dropped(shard.data)
    view = View.of_shards(cache.version, "large", schema, [shard])
    parts = MappedParts()
    batches = [np.array([at]) for at in (0, 2, 11)]
    parts.expect(view, batches, schema, first=True)
    next(parts.batches(view, batches, schema))
    x = load_extents(shard.path / EXTENTS_FILE, schema).fields["x"]
    assert awake(arena, x.start + 11 * MIB, MIB)
    assert asleep(arena, x.start + 6 * MIB, MIB)
    parts.close()
