"""More shards than a process may have maps or descriptors: the excess is read by system calls, and nothing else
changes.

The limits are small here; ``benchmarks/many_shards.py`` has a hundred thousand shards.
"""

from __future__ import annotations

import gc
import json
import multiprocessing
import os
import resource
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cachetool
from cachetool.cache import CacheDir, open_cache
from cachetool.core.block import Block
from cachetool.core.errors import CorruptError, UsageError
from cachetool.core.extents import Extents
from cachetool.core.schema import Schema
from cachetool.formats import format_names
from cachetool.loaders.feed.batches import announced
from cachetool.loaders.items import Numbers
from cachetool.loaders.numpy import Loader
from cachetool.loaders.read import arena
from cachetool.loaders.read.gather import gather
from cachetool.loaders.read.mapped import MappedParts
from cachetool.loaders.read.unmapped import Descriptors
from cachetool.loaders.settings import EpochPlan, Settings
from cachetool.loaders.snapshots import plain_files as files
from cachetool.loaders.snapshots.plain_files import shards_at
from cachetool.loaders.view import View
from tests.loaders.conftest import REPOSITORY
from tests.loaders.numbered import SMALL, digest, put, sample

SHARDS, EACH = 24, 4
linux = pytest.mark.skipif(sys.platform != "linux", reason="only Linux maps files side by side")


def view_of(cache: CacheDir) -> View:
    return View.of_shards(cache.version, "default", cache.schema("default"), cache.shards("default"))


def expected(schema: Schema, numbers: Any) -> list[str]:
    return [digest(schema, sample(schema, int(number))) for number in numbers]


def read(parts: MappedParts, view: View, batches: list[Any], schema: Schema) -> list[str]:
    blocks = [Block(schema, columns) for columns in parts.batches(view, batches, schema)]
    return [digest(schema, block.sample(i)) for block in blocks for i in range(block.samples)]


def maps_of(root: Path) -> int:
    return Path("/proc/self/maps").read_text().count(f"{root}/shards/")


def descriptors_of(root: Path) -> list[str]:
    paths = (os.path.realpath(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd"))
    return [path for path in paths if path.startswith(str(root)) and "shards" in path]


@pytest.fixture
def few_maps(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Limit this process to a number of further maps."""

    def allow(more: int) -> None:
        monkeypatch.setattr(arena, "_FEW", 1)
        most = int((arena.maps_now() + more) / 0.75) + 1
        monkeypatch.setattr(arena, "most_maps", lambda: most)

    return allow


@pytest.fixture
def many(tmp_path: Path) -> Iterator[CacheDir]:
    with open_cache(tmp_path / "cache", max_size="50MB") as cache:
        for number in range(SHARDS):
            put(cache, range(EACH * number, EACH * number + EACH))
        yield cache


@pytest.mark.parametrize("few", [0, 8])
@pytest.mark.parametrize("name", format_names())
def test_shards_beyond_the_limit_are_read_with_the_same_values(
    name: str, few: int, tmp_path: Path, few_maps: Callable[[int], None]
) -> None:
    """Every kind of field of every format, twice, in batches with samples of mapped and of read shards."""
    order = np.random.default_rng(3).permutation(40)
    batches = np.split(order, [1, 1, 7, 30])
    with open_cache(tmp_path / "cache", max_size="100MB") as cache:
        for number in range(10):
            put(cache, range(4 * number, 4 * number + 4), format=name)
        view, parts = view_of(cache), MappedParts()
        few_maps(few * (len(SMALL) if name == "zarr" else 1))
        assert read(parts, view, batches, SMALL) == expected(SMALL, order)
        assert read(parts, view, batches[::-1], SMALL) == expected(SMALL, np.concatenate(batches[::-1]))
        assert (0 < parts._ways.tolist().count(0) < 10) == bool(few)
        parts.close()


def test_compressed_mapped_and_read_shards_share_a_batch(tmp_path: Path, few_maps: Callable[[int], None]) -> None:
    with open_cache(tmp_path / "cache", max_size="100MB") as cache:
        for number in range(9):
            compression = "gzip" if number % 3 == 0 else None
            put(cache, range(4 * number, 4 * number + 4), format="hdf5", compression=compression)
        view, parts = view_of(cache), MappedParts()
        few_maps(8)
        order = np.random.default_rng(0).permutation(36)
        assert read(parts, view, np.split(order, 4), SMALL) == expected(SMALL, order)
        assert set(parts._ways.tolist()) == {0, 1, 2}


@linux
def test_maps_of_the_program_itself_are_counted_and_some_are_left_free(many: CacheDir) -> None:
    """The process has used three quarters of its maps before: no map fails, and none is created."""
    script = """
import mmap, sys
import numpy as np
from cachetool.loaders.read import arena
from cachetool.loaders.read.gather import gather
from cachetool.loaders.read.mapped import MappedParts
from tests.loaders.test_many_shards import expected, open_cache, read, view_of, SMALL, maps_of
base = arena.reserve(2**32)
start = int(base.ctypes.data)
for number in range(int(0.75 * arena.most_maps() - arena.maps_now()) // 2):
    assert arena.map_at(start + 8192 * number, 4096, mmap.PROT_READ, arena._ANYWHERE, -1)
with open_cache(sys.argv[1]) as cache:
    view = view_of(cache)
    order = np.random.default_rng(1).permutation(view.samples)
    assert read(MappedParts(), view, np.split(order, 4), SMALL) == expected(SMALL, order)
    assert maps_of(sys.argv[1]) <= 32, maps_of(sys.argv[1])
    used = [mmap.mmap(-1, 4096) for _ in range(5000)]
"""
    done = subprocess.run(
        [sys.executable, "-c", script, str(many.root)], cwd=REPOSITORY, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


@linux
def test_a_shard_takes_one_map(many: CacheDir) -> None:
    """The small extents are kept in memory, and a shard's data lies beside its neighbours': no gap counts as a map."""
    view, parts = view_of(many), MappedParts()
    before = arena.maps_now()
    gather(view, np.arange(view.samples), parts, SMALL)
    assert maps_of(many.root) == SHARDS
    assert arena.maps_now() - before < SHARDS + 20


@linux
def test_maps_freed_by_deleted_shards_are_used_for_new_ones(many: CacheDir, few_maps: Callable[[int], None]) -> None:
    view, parts = view_of(many), MappedParts()
    few_maps(20)
    gather(view, np.arange(view.samples), parts, SMALL)
    mapped = parts._ways.tolist().count(0)
    assert 0 < mapped < SHARDS
    kept = View(
        view.version + 1, "default", SMALL, tuple(p for p, way in zip(view.parts, parts._ways, strict=True) if way)
    )
    gather(kept, np.arange(kept.samples), parts, SMALL)
    assert maps_of(many.root) == 0
    few_maps(40)
    for at in range(3):
        put(many, range(1000 + EACH * at, 1000 + EACH * at + EACH))
    grown = view_of(many)
    new = View(grown.version, "default", SMALL, (*kept.parts, *grown.parts[-3:]))
    numbers = np.arange(new.samples - 3 * EACH, new.samples)
    assert read(parts, new, [numbers], SMALL) == expected(SMALL, range(1000, 1000 + 3 * EACH))
    assert maps_of(many.root) == 3


def test_columns_kept_in_memory_do_not_accumulate_while_shards_change(
    many: CacheDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arena, "_BLOCK", 4096)
    view, parts, seen = view_of(many), MappedParts(), set()
    for turn in range(6 * SHARDS):
        one = View(turn, "default", SMALL, (view.parts[turn % SHARDS],))
        gather(one, np.arange(EACH), parts, SMALL)
        seen.add(id(parts._arena))
        assert parts._arena is not None
        assert getattr(parts._arena, "_held", 0) < 20_000
    assert len(seen) > 1


def test_few_descriptors_are_kept_and_those_of_deleted_shards_are_closed(many: CacheDir) -> None:
    view, parts = view_of(many), MappedParts(maps=False)
    parts._descriptors = Descriptors(share=5 / resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    order = np.random.default_rng(0).permutation(view.samples)
    assert read(parts, view, np.split(order, 4), SMALL) == expected(SMALL, order)
    assert 0 < len(descriptors_of(many.root)) <= 5
    part = next(p for p in view.parts if any(p.id in path for path in descriptors_of(many.root)))
    parts.keep(View(2, "default", SMALL, tuple(p for p in view.parts if p.id != part.id)))
    assert not any(part.id in path for path in descriptors_of(many.root))
    assert read(parts, view, [order], SMALL) == expected(SMALL, order)
    del parts
    gc.collect()
    assert descriptors_of(many.root) == []


def test_a_forked_child_continues_to_read_without_touching_its_parents_descriptors(many: CacheDir) -> None:
    view, parts = view_of(many), MappedParts(maps=False)
    every = np.arange(view.samples)
    read(parts, view, [every], SMALL)
    context = multiprocessing.get_context("fork")
    answers = context.SimpleQueue()

    def child() -> None:
        answers.put(read(parts, view, [every], SMALL))
        parts.close()

    process = context.Process(target=child)
    process.start()
    assert answers.get() == expected(SMALL, every)
    process.join()
    assert read(parts, view, [every], SMALL) == expected(SMALL, every)


def test_an_evicted_shard_without_a_map_is_named(many: CacheDir) -> None:
    view, parts = view_of(many), MappedParts(maps=False)
    read(parts, view, [np.array([EACH * SHARDS - 1])], SMALL)  # all shards are known by now, and one is open
    many.evict(many.usage().total - 1)
    with pytest.raises(UsageError, match=f"shard {view.parts[0].id} was evicted"):
        gather(view, np.array([0]), parts, SMALL)


@pytest.mark.parametrize("size", [0, 2000])
def test_a_file_without_a_map_that_was_truncated_meanwhile_is_named(size: int, many: CacheDir) -> None:
    view, parts = view_of(many), MappedParts(maps=False)
    data = view.parts[3].folder / "data.lmdb"
    os.truncate(data, size)
    with pytest.raises(CorruptError, match=f"data.lmdb is cut short: it has {size} bytes"):
        gather(view, np.arange(3 * EACH, 4 * EACH), parts, SMALL)


def test_an_impossible_size_is_refused_before_memory_is_allocated(tmp_path: Path) -> None:
    """The size of a file that is read without a map was never checked."""
    from tests.loaders.numbered import KEYED

    with open_cache(tmp_path / "cache", max_size="50MB") as cache:
        put(cache, range(5, 15), schema=KEYED)
        view = view_of(cache)
    extents = Extents.from_buffer(view.parts[0].extents.read_bytes(), schema=KEYED, name="extents")
    sizes = extents.fields["__key__"].sizes
    assert sizes is not None
    damaged = view.parts[0].extents.read_bytes().replace(sizes.tobytes(), (sizes + 2**60).tobytes())
    view.parts[0].extents.write_bytes(damaged)
    with pytest.raises(CorruptError, match=r"data.lmdb is cut short: it has [0-9]+ bytes, but field '__key__'"):
        gather(view, np.array([0]), MappedParts(maps=False), KEYED)


def test_a_split_reads_the_keys_of_shards_without_a_map(tmp_path: Path, few_maps: Callable[[int], None]) -> None:
    from cachetool.loaders.selection import Selection
    from tests.loaders.numbered import KEYED

    with open_cache(tmp_path / "cache", max_size="50MB") as cache:
        for number in range(SHARDS):
            put(cache, range(EACH * number, EACH * number + EACH), schema=KEYED)
        view = view_of(cache)
    whole = Selection("train", 0.3, None).chosen(view).tolist()
    few_maps(10)
    assert Selection("train", 0.3, None).chosen(view).tolist() == whole
    assert 0 < len(whole) < view.samples


def test_later_samples_of_files_without_a_map_are_read_ahead(many: CacheDir, monkeypatch: pytest.MonkeyPatch) -> None:
    """Advice on their descriptors requests the samples if a probe shows that their pages are not in memory."""
    from cachetool.loaders.read import unmapped

    view, parts = view_of(many), MappedParts(maps=False)
    asked: list[tuple[str, int]] = []
    monkeypatch.setattr(unmapped.Unmapped, "asleep", lambda self, starts: np.ones(len(starts), dtype=np.bool_))
    monkeypatch.setattr(
        unmapped.os,
        "posix_fadvise",
        lambda fd, start, size, _: asked.append((os.readlink(f"/proc/self/fd/{fd}"), start)),
    )
    plan, settings = EpochPlan(1, 0, view, samples=view.samples), Settings("", batch_size=8)
    schema = SMALL.select(["x"])
    steps = np.arange(plan.steps(settings).count, dtype=np.int64)
    count = 0
    for _, batches in announced(plan, settings, steps, parts, schema, feeders=1, numbers=Numbers(view.samples)):
        count += sum(len(columns["x"]) for columns in parts.batches(view, batches, schema))
    assert count == view.samples
    assert len(set(asked)) == view.samples


@pytest.mark.parametrize("asked", [{"verify": True}, {"shuffle": "window"}, {"shuffle": False}, {"fields": ["number"]}])
def test_an_epoch_in_a_thread_has_every_sample(asked: dict[str, Any], many: CacheDir) -> None:
    with Loader(many, batch_size=7, workers=0, **asked) as loader:
        for _ in range(2):
            assert sorted(int(n) for batch in loader for n in batch["number"]) == list(range(EACH * SHARDS))


LIMITED = """
import json, resource, sys
name, limit = getattr(resource, sys.argv[2]), int(sys.argv[3])
resource.setrlimit(name, (limit, limit))
from cachetool.cache import open_cache
from cachetool.loaders.items import Numbers
from cachetool.loaders.numpy import Loader
from tests.loaders.numbered import SMALL, digest, put
def epoch(loader):
    return sorted(
        digest(SMALL, {name: batch[name][i] for name in batch}) for batch in loader for i in range(len(batch["number"]))
    )
with open_cache(sys.argv[1]) as cache, Loader(cache, batch_size=9, workers=2, verify=True) as loader:
    first = epoch(loader)
    put(cache, range(500, 504))
    loader.refresh()
    second = epoch(loader)
    batches = iter(loader)
    some = [next(batches) for _ in range(3)]
    state, done = loader.state_dict(), [int(n) for batch in some for n in batch["number"]]
    del some, batches
    loader.close()
    with Loader(cache, batch_size=9, workers=2) as other:
        other.load_state_dict(state)
        rest = [int(n) for batch in other for n in batch["number"]]
    print(json.dumps({"first": first, "second": second, "resumed": sorted(done + rest)}))
"""


@linux
@pytest.mark.parametrize(("name", "limit"), [("RLIMIT_AS", 2**35), ("RLIMIT_NOFILE", 64)])
def test_under_process_limits_feeders_read_a_growing_cache_and_resume(name: str, limit: int, many: CacheDir) -> None:
    """Under ``ulimit -v`` no address range can be reserved, and under ``ulimit -n`` hardly any descriptor can be
    kept.
    """
    done = subprocess.run(
        [sys.executable, "-c", LIMITED, str(many.root), name, str(limit)],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    first = expected(SMALL, range(EACH * SHARDS))
    assert found["first"] == sorted(first)
    assert found["second"] == sorted([*first, *expected(SMALL, range(500, 504))])
    assert found["resumed"] == [*range(EACH * SHARDS), *range(500, 504)]


def test_a_list_of_files_reads_their_folders_description_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "source"
    source.mkdir()
    for number in range(30):
        np.save(source / f"{number}.x.npy", np.full(4, number, dtype="<f4"))
    cachetool.convert(source, to="lmdb", out=tmp_path / "out", shard_size=64)
    paths = sorted((tmp_path / "out").glob("part-*"))
    assert len(paths) >= 10
    dataset, reads = files._dataset, []
    monkeypatch.setattr(files, "_dataset", lambda folder: (reads.append(folder), dataset(folder))[1])
    assert shards_at(paths).now().samples == 30
    assert reads == [tmp_path / "out"]
