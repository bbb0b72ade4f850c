"""What is read before it is asked for."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cachetool.cache import CacheDir
from cachetool.extents import EXTENTS_FILE
from cachetool.formats.reading import load_extents
from cachetool.loaders import readahead
from cachetool.loaders.arena import Arena, open_arena
from cachetool.loaders.gather import Runs
from cachetool.loaders.mapped import MappedParts
from cachetool.loaders.readahead import Readahead
from cachetool.loaders.view import View
from cachetool.schema import Field, Schema
from tests.loaders.numbered import put

MIB = 2**20


def dropped(path: Path) -> Arena:
    """A map of a file whose pages were dropped."""
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
    """Whether no page of a run is in memory; the first file of an arena begins at its first huge page."""
    base = -int(arena.bytes.ctypes.data) % (2 * MIB)
    pages = np.arange(start, start + size, 4096) + base
    return not any(arena.resident(pages[i : i + 1]) for i in range(len(pages)))


def awake(arena: Arena, start: int, size: int) -> bool:
    """Whether every page of a run is in memory, soon."""
    base = -int(arena.bytes.ctypes.data) % (2 * MIB)
    pages = np.arange(start, start + size, 4096) + base
    end = time.monotonic() + 20
    while not arena.resident(pages):
        if time.monotonic() > end:
            return False
        time.sleep(0.01)
    return True


def test_runs_that_will_be_needed_are_read_and_nothing_else(tmp_path: Path) -> None:
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
    """An arena that only takes notes."""

    def __init__(self, awake: bool = False) -> None:
        self.awake, self.needed, self.looked = awake, [], 0  # type: ignore[var-annotated]

    def resident(self, positions: Any) -> bool:
        self.looked += len(positions)
        return self.awake

    def will_need(self, starts: Any, sizes: Any, near: int) -> None:
        self.needed.append(list(zip(starts.tolist(), sizes.tolist(), strict=True)))


SCHEMA = Schema((Field("x", "<f4", (256,)), Field("number", "<i8")))


def reader(notes: Notes) -> Readahead:
    return Readahead(
        notes, SCHEMA, lambda at: {"x": Runs(np.empty(0), 1024 * at), "number": Runs(np.empty(0), at)}, near=0
    )  # type: ignore[arg-type]


def test_batches_are_read_in_their_order_at_most_so_far_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_nothing_is_asked_for_what_is_in_memory() -> None:
    notes = Notes(awake=True)
    ahead = reader(notes)
    ahead.expect([np.arange(1000)] * 50)
    for _ in range(50):
        ahead.gathering(1000)
    assert notes.needed == []
    assert 0 < notes.looked < 200  # of 50,000


def test_what_is_gathered_last_is_on_its_way_when_the_first_batch_is_there(tmp_path: Path, cache: CacheDir) -> None:
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
