"""Views, open parts and gathering, without any framework."""

from __future__ import annotations

import multiprocessing
import pickle
import resource
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cachetool.cache import CacheDir, open_cache
from cachetool.core.block import Block
from cachetool.core.errors import CorruptError, UsageError
from cachetool.core.extents import Extents
from cachetool.core.schema import Schema
from cachetool.formats import format_names
from cachetool.formats.runs import Int64s
from cachetool.loaders.read.gather import OpenPart, Parts, Places, Runs, gather, open_by_library
from cachetool.loaders.read.mapped import MappedParts
from cachetool.loaders.snapshots.indexed import Board
from cachetool.loaders.view import ShardFile, View
from tests.loaders.numbered import EVERY, SMALL, digest, put, sample


def view_of(cache: CacheDir, dataset: str = "default") -> View:
    return View.of_shards(cache.version, dataset, cache.schema(dataset), cache.shards(dataset))


def gathered(view: View, indices: list[int], parts: Places) -> list[str]:
    at = np.array(indices, dtype=np.int64)
    block = Block(view.schema, gather(view, at, parts, view.schema))
    return [digest(view.schema, block.sample(i)) for i in range(block.samples)]


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[View]:
    """Create every format and every dtype, uncompressed and compressed: 77 samples in 7 parts."""
    with open_cache(tmp_path_factory.mktemp("mixed") / "cache", max_size="50MB") as cache:
        compressed = [("hdf5", "gzip"), ("zarr", "zstd"), ("tfrecord", "gzip")]
        for at, (name, compression) in enumerate([*((name, None) for name in format_names()), *compressed]):
            put(cache, range(11 * at, 11 * at + 11), format=name, schema=EVERY, compression=compression)
        yield view_of(cache)


EXPECTED = [digest(EVERY, sample(EVERY, n)) for n in range(77)]
OPEN: dict[str, Places] = {
    "read": MappedParts(maps=False),
    "library": Parts(open_by_library),
    "one at a time": Parts(open_by_library, limit=1),
    "side by side": MappedParts(),
}


@pytest.mark.parametrize("how", OPEN)
@settings(max_examples=20)
@given(indices=st.lists(st.integers(0, 76), max_size=40))
def test_any_samples_are_gathered_in_any_order_from_any_format(how: str, mixed: View, indices: list[int]) -> None:
    """Samples are read by extents and through the library, also with fewer open parts than a batch touches."""
    assert gathered(mixed, indices, OPEN[how]) == [EXPECTED[i] for i in indices]


def test_a_batch_of_many_parts_keeps_no_more_parts_mapped_than_allowed(mixed: View) -> None:
    alive, most = [0], []

    class Counted:
        """An open part that counts the buffers that it returned and that are still in use."""

        def __init__(self, inner: OpenPart) -> None:
            self.inner = inner

        def locate(self, within: Int64s, schema: Schema) -> Mapping[str, Runs]:
            located = self.inner.locate(within, schema)
            buffer = located["raw"].buffer.view()
            alive[0] += 1
            most.append(alive[0])
            weakref.finalize(buffer, lambda: alive.__setitem__(0, alive[0] - 1))
            return {**located, "raw": located["raw"]._replace(buffer=buffer)}

        def close(self) -> None:
            self.inner.close()

    parts = Parts(lambda part, schema: Counted(open_by_library(part, schema)), limit=2)

    assert gathered(mixed, list(range(77)), parts) == EXPECTED
    assert len(most) == 7
    assert max(most) == 1


each_way = pytest.mark.parametrize("make", [lambda: MappedParts(maps=False), MappedParts], ids=["read", "mapped"])


@each_way
def test_only_a_chosen_field_is_read(cache: CacheDir, make: Callable[[], Places]) -> None:
    view = view_of(cache)
    columns = gather(view, np.array([59, 0, 20]), make(), SMALL.select(["number"]))

    assert list(columns) == ["number"]
    assert np.asarray(columns["number"]).tolist() == [59, 0, 20]


@each_way
@pytest.mark.parametrize("indices", [[60], [-1], [0, 61, 2]])
def test_an_index_outside_the_view_is_refused(indices: list[int], cache: CacheDir, make: Callable[[], Places]) -> None:
    with pytest.raises(IndexError, match="outside a dataset of 60"):
        gathered(view_of(cache), indices, make())


@each_way
def test_a_truncated_file_is_named(tmp_path: Path, make: Callable[[], Places]) -> None:
    with open_cache(tmp_path / "cache", max_size="20MB") as cache:
        put(cache, range(20), format="hdf5")
        view = view_of(cache)
        data = view.parts[0].folder / "data.h5"
        data.write_bytes(data.read_bytes()[:2500])

        with pytest.raises(CorruptError, match=r"data\.h5 is cut short: it has 2500 bytes"):
            gathered(view, [19], make())


@each_way
@pytest.mark.parametrize("name", ["dada.h5", "data.h5/x", "."])
def test_a_missing_file_is_named(tmp_path: Path, make: Callable[[], Places], name: str) -> None:
    """A letter of the name was damaged in the extents, for example."""
    with open_cache(tmp_path / "cache", max_size="20MB") as cache:
        put(cache, range(20), format="hdf5")
        view = view_of(cache)
        places = view.parts[0].extents
        extents = Extents.from_buffer(places.read_bytes(), schema=view.schema)
        places.write_bytes(replace(extents, files=(name,)).to_bytes())

        with pytest.raises(CorruptError, match=r"is (missing|no plain file)"):
            gathered(view, [19], make())


@each_way
def test_an_evicted_part_is_an_error_but_an_open_one_is_still_read(cache: CacheDir, make: Callable[[], Places]) -> None:
    view, parts = view_of(cache), make()
    before = gathered(view, [3], parts)
    cache.evict(cache.usage().total - 1)
    assert not view.parts[0].folder.exists()

    assert gathered(view, [3], parts) == before
    parts.keep(view_of(cache))
    for other in (make(), Parts(open_by_library)):
        with pytest.raises(UsageError, match=f"shard {view.parts[0].id} was evicted"):
            gathered(view, [3], other)
    with pytest.raises(UsageError, match="was evicted"):
        gathered(view, [3], parts)


def test_open_parts_are_few_and_belong_to_one_process(cache: CacheDir) -> None:
    view, parts = view_of(cache), Parts(open_by_library, limit=2)
    gathered(view, list(range(60)), parts)
    assert len(parts._open) == 2

    assert len(pickle.loads(pickle.dumps(parts))._open) == 0
    context = multiprocessing.get_context("fork")
    answers = context.SimpleQueue()
    child = context.Process(target=lambda: answers.put(gathered(view, [45, 7], parts)))
    child.start()
    child.join()
    assert child.exitcode == 0
    assert answers.get() == [digest(SMALL, sample(SMALL, n)) for n in (45, 7)]
    assert Parts(open_by_library).limit <= resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 4


def part(name: str, samples: int, content: str = "") -> ShardFile:
    return ShardFile(name, "lmdb", samples, content or name, name)


def view(*parts: ShardFile) -> View:
    return View(1, "default", SMALL, parts)


@given(sizes=st.lists(st.integers(0, 5), max_size=8))
def test_a_view_finds_the_part_of_each_sample(sizes: list[int]) -> None:
    made = view(*(part(str(i), size) for i, size in enumerate(sizes)))
    numbers, within = made.find(np.arange(sum(sizes)))

    assert made.samples == sum(sizes)
    expected = [(i, j) for i, size in enumerate(sizes) for j in range(size)]
    assert list(zip(numbers.tolist(), within.tolist(), strict=True)) == expected


def test_a_view_extends_another_only_if_no_index_changed_its_meaning() -> None:
    a, b, c = part("a", 5), part("b", 5), part("c", 5)

    assert view(a, b).extends(view(a))
    assert view(a, b).extends(view(a, b))
    assert view(a._replace(id="converted"), b).extends(view(a))
    assert not view(a).extends(view(a, b))
    assert not view(b, c).extends(view(a, b))
    assert not view(a._replace(id="other", content="other"), b).extends(view(a))


def test_views_of_different_parts_have_different_fingerprints() -> None:
    views = [view(), view(part("a", 5)), view(part("b", 5)), view(part("a", 6)), view(part("a", 5), part("b", 5))]

    assert len({v.fingerprint for v in views}) == len(views)
    assert all(0 <= v.fingerprint < 2**63 for v in views)


def test_a_board_keeps_the_last_snapshots_and_its_copies_are_independent() -> None:
    board = Board()
    assert board.current == 0
    for version in range(1, 31):
        board.publish(version, version * 7)
    board.publish(30, 210)
    copy = pickle.loads(pickle.dumps(board))
    board.publish(31, 5)

    assert (copy.current, board.current) == (30, 31)
    assert [board.fingerprint(v) for v in (15, 16, 30, 31, 32)] == [None, 112, 210, 5, None]
    assert copy.fingerprint(31) is None


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_child_process_sees_new_versions_on_its_parents_board(method: str) -> None:
    context = multiprocessing.get_context(method)
    board, ready, answers = Board(), context.SimpleQueue(), context.SimpleQueue()
    child = context.Process(target=answer, args=(board, ready, answers))
    child.start()
    assert answers.get() == [0, None]
    board.publish(9, 2**62)
    ready.put(True)

    assert answers.get() == [9, 2**62]
    child.join()


def answer(board: Board, ready: object, answers: object) -> None:
    """Run as the child of the test above: send the current version and its fingerprint, twice."""
    answers.put([board.current, board.fingerprint(9)])  # type: ignore[attr-defined]
    ready.get()  # type: ignore[attr-defined]
    answers.put([board.current, board.fingerprint(9)])  # type: ignore[attr-defined]


@each_way
@pytest.mark.parametrize("name", ["data.h5", "extents.bin"])
def test_a_link_in_a_shard_is_not_followed(tmp_path: Path, make: Callable[[], Places], name: str) -> None:
    """A cache from somebody else may have a link to any file of the user."""
    with open_cache(tmp_path / "cache", max_size="20MB") as cache:
        put(cache, range(20), format="hdf5")
        view = view_of(cache)
        file = view.parts[0].folder / name
        file.rename(tmp_path / name)
        file.symlink_to(tmp_path / name)

        with pytest.raises(CorruptError, match=f"{name} is a link"):
            gathered(view, [19], make())


@each_way
def test_a_link_in_place_of_a_parent_folder_is_not_entered(tmp_path: Path, make: Callable[[], Places]) -> None:
    """The extents may name a file behind the link."""
    with open_cache(tmp_path / "cache", max_size="20MB") as cache:
        put(cache, range(20), format="hdf5")
        view = view_of(cache)
        places = view.parts[0].extents
        extents = Extents.from_buffer(places.read_bytes(), schema=view.schema)
        places.write_bytes(replace(extents, files=("more/data.h5",)).to_bytes())
        (view.parts[0].folder / "data.h5").rename(tmp_path / "data.h5")
        (view.parts[0].folder / "more").symlink_to(tmp_path)

        with pytest.raises(CorruptError, match="more is a link"):
            gathered(view, [19], make())
