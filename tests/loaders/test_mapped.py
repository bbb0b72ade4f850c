"""All parts of a view in one range of addresses."""

from __future__ import annotations

import json
import multiprocessing
import pickle
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from cachetool.cache import CacheDir, open_cache
from cachetool.core.block import Block, Ragged
from cachetool.core.errors import CorruptError, UsageError
from cachetool.core.extents import EXTENTS_FILE
from cachetool.core.schema import Field, Schema
from cachetool.formats import format_names, get_format
from cachetool.formats.shard import ShardFiles
from cachetool.loaders.read import arena
from cachetool.loaders.read import mapped as module
from cachetool.loaders.read.arena import Arena, Memory
from cachetool.loaders.read.gather import gather
from cachetool.loaders.read.mapped import MappedParts
from cachetool.loaders.settings import EpochPlan
from cachetool.loaders.view import ShardFile, View
from tests.loaders.numbered import EVERY, SMALL, digest, put, sample

READ = Schema(
    (
        Field("x", "<f4", (16,)),
        Field("large", "<u2", (9000,)),
        Field("y", "<i8"),
        Field("wave", "<i2", (None, None)),
        Field("words", "str"),
    )
)


def view_of(cache: CacheDir) -> View:
    return View.of_shards(cache.version, "default", cache.schema("default"), cache.shards("default"))


def gathered(view: View, indices: list[int], parts: MappedParts) -> list[str]:
    block = Block(view.schema, gather(view, np.array(indices, dtype=np.int64), parts, view.schema))
    return [digest(view.schema, block.sample(i)) for i in range(block.samples)]


def numbered(*numbers: int) -> list[str]:
    return [digest(SMALL, sample(SMALL, n)) for n in numbers]


def maps(root: Path) -> dict[str, str]:
    """Return the address at which each file under ``root`` is mapped in this process."""
    lines = [line.split() for line in Path("/proc/self/maps").read_text().splitlines()]
    return {line[5]: line[0] for line in lines if len(line) > 5 and line[5].startswith(str(root))}


def random_block(count: int, rng: np.random.Generator) -> Block:
    shapes = rng.integers(0, 6, (count, 2))
    sizes = {"wave": shapes.prod(axis=1), "words": rng.integers(0, 9, count)}
    offsets = {name: np.concatenate([[0], np.cumsum(each)]) for name, each in sizes.items()}
    columns: dict[str, Any] = {
        "x": rng.integers(0, 2**32, (count, 16), dtype=np.uint32).view("<f4"),
        "large": rng.integers(0, 2**16, (count, 9000), dtype=np.uint16),
        "y": rng.integers(-(2**62), 2**62, count),
        "wave": Ragged(rng.integers(-9, 9, offsets["wave"][-1], dtype=np.int16), offsets["wave"], shapes),
        "words": Ragged(rng.integers(65, 90, offsets["words"][-1], dtype=np.uint8), offsets["words"]),
    }
    return Block(READ, columns)


def put_parts(folder: Path, name: str, sizes: list[int]) -> View:
    rng, parts = np.random.default_rng(len(sizes)), []
    for number, size in enumerate(sizes):
        where, block = folder / str(number), random_block(size, rng)
        where.mkdir(parents=True)
        files = ShardFiles(where, get_format(name), READ, samples=size, nbytes=block.nbytes)
        files.write(block)
        files.finish()
        data = f"data{get_format(name).suffix}"
        part = ShardFile(where.name, name, size, "", str(where), data)
        part.extents.parent.mkdir(parents=True)
        (where / EXTENTS_FILE).rename(part.extents)
        parts.append(part)
    return View(1, "default", READ, tuple(parts))


def same(one: Block, two: Block) -> bool:
    """Return True if all bytes are equal, also those of NaNs."""
    for name in READ.names:
        a, b = one.columns[name], two.columns[name]
        if isinstance(a, Ragged) and isinstance(b, Ragged):
            pairs = [(a.values, b.values), (a.sizes, b.sizes), (a.shapes, b.shapes)]
        else:
            pairs = [(a, b)]
        if any(np.asarray(x).tobytes() != np.asarray(y).tobytes() for x, y in pairs):
            return False
    return True


@pytest.mark.parametrize("name", format_names())
def test_batches_of_every_kind_of_field_equal_the_written_values(name: str, tmp_path: Path) -> None:
    order = np.random.default_rng(2).integers(0, 30, 50)
    asked = np.split(order, [1, 20, 20])
    with open_cache(tmp_path / "cache", max_size="50MB") as cache:
        for at in (0, 12):
            put(cache, range(at, at + 12 + at // 2), format=name, schema=EVERY)
        parts = MappedParts()
        found = [Block(EVERY, columns) for columns in parts.batches(view_of(cache), asked, EVERY)]
        assert parts._all_mapped
    got = [[digest(EVERY, block.sample(i)) for i in range(block.samples)] for block in found]
    assert got == [[digest(EVERY, sample(EVERY, n)) for n in numbers] for numbers in asked]


@pytest.mark.parametrize("reads", [4_000, pytest.param(250_000, marks=[pytest.mark.soak, pytest.mark.timeout(1200)])])
@pytest.mark.parametrize("name", format_names())
def test_gathering_equals_the_formats_own_reader(name: str, reads: int, tmp_path: Path) -> None:
    """Every sample, in random order, from shards of several sizes; in the soak 1e6 reads over the four formats."""
    view = put_parts(tmp_path, name, [300, 1, 0, 77, 122])
    rng, parts = np.random.default_rng(1), MappedParts()
    schema, checked = view.schema, 0
    readers = [
        get_format(name).open(part.folder / f"data{get_format(name).suffix}", schema=READ) for part in view.parts
    ]
    while checked < reads:
        batches = np.array_split(rng.permutation(view.samples), 9)
        for indices, columns in zip(batches, parts.batches(view, batches, schema), strict=True):
            numbers, within = view.find(indices)
            for number, reader in enumerate(readers):
                mine = np.flatnonzero(numbers == number)
                assert same(reader.take(within[mine]), Block(READ, columns).take(mine))
            checked += len(indices)
    for reader in readers:
        reader.close()


def test_batches_come_in_order_and_are_built_on_request(cache: CacheDir) -> None:
    view, parts, made = view_of(cache), MappedParts(), []

    def empty(field: Field, shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
        made.append((field.name, shape))
        return np.empty(shape, dtype=field.numpy)

    schema = SMALL.select(["number"])
    batches = [np.array(each, dtype=np.int64) for each in ([59, 3], [4], [], [20, 21, 22])]
    columns = parts.batches(view, batches, schema, empty=empty)

    assert np.asarray(next(columns)["number"]).tolist() == [59, 3]
    assert made == [("number", (2,))]
    assert [np.asarray(each["number"]).tolist() for each in columns] == [[4], [], [20, 21, 22]]


def test_batches_continue_after_a_file_was_unmapped(cache: CacheDir, monkeypatch: pytest.MonkeyPatch) -> None:
    """Positions from before the maps moved are not used again."""
    view, parts = view_of(cache), MappedParts()
    batches = [np.array([n, 59 - n]) for n in range(12)]
    columns = parts.batches(view, batches, SMALL)
    first = [next(columns), next(columns)]
    parts.keep(View(2, "default", SMALL, view.parts[1:]))
    third = next(columns)
    parts.close()
    rest = [*first, third, *columns]

    got = [digest(SMALL, Block(SMALL, each).sample(i)) for each in rest for i in range(2)]
    assert got == numbered(*(number for n in range(12) for number in (n, 59 - n)))


def test_parts_of_the_next_view_keep_their_maps_and_other_maps_are_removed(cache: CacheDir) -> None:
    old, parts = view_of(cache), MappedParts()
    assert gathered(old, [0, 25, 45], parts) == numbered(0, 25, 45)
    before = maps(cache.root / "shards")
    put(cache, range(60, 80))
    new = view_of(cache)
    later = View(new.version, "default", SMALL, new.parts[1:])

    assert gathered(later, [0, 59], parts) == numbered(20, 79)
    after = maps(cache.root / "shards")
    assert {path for path in before if path not in after} == {path for path in before if old.parts[0].id in path}
    assert all(after[path] == place for path, place in before.items() if path in after)
    assert len(after) == 3  # data of each part; the small extents were copied


@pytest.mark.parametrize("reads", [False, True])
@pytest.mark.parametrize("name", ["lmdb", "zarr"])
def test_parts_that_are_opened_one_after_another_have_the_values_of_parts_opened_together(
    name: str, reads: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_cache(tmp_path / "cache", max_size="50MB") as cache:
        for start in range(0, 40, 8):
            compression = "zstd" if name == "zarr" and start == 16 else None
            put(cache, range(start, start + 8), format=name, schema=EVERY, compression=compression)
        view = view_of(cache)
    order = np.random.default_rng(0).permutation(40).tolist()
    monkeypatch.setattr(module, "_EAGER", 0)
    parts = MappedParts(maps=not reads)
    for at in range(0, 40, 2):
        expected = [digest(EVERY, sample(EVERY, number)) for number in order[at : at + 2]]
        assert gathered(view, order[at : at + 2], parts) == expected
    parts.close()


def test_of_many_parts_only_the_first_and_those_of_the_samples_are_opened(
    cache: CacheDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for start in range(60, 120, 20):
        put(cache, range(start, start + 20))
    monkeypatch.setattr(module, "_EAGER", 2)
    parts = MappedParts()
    assert gathered(view_of(cache), [90], parts) == numbered(90)
    assert len(maps(cache.layout.shards)) == 3
    assert gathered(view_of(cache), [*range(120)], parts) == numbered(*range(120))
    parts.close()


def test_the_new_parts_of_the_next_view_are_opened_before_it_begins(cache: CacheDir) -> None:
    parts, before = MappedParts(), view_of(cache)
    gathered(before, [0], parts)
    put(cache, range(60, 80))
    after = view_of(cache)
    parts.prepare(after)
    assert {part.id for part in after.parts} == {Path(path).parent.name for path in maps(cache.layout.shards)}
    assert gathered(before, [59], parts) == numbered(59)
    parts.keep(after)
    assert gathered(after, [0, 79], parts) == numbered(0, 79)
    parts.close()


def test_a_damaged_part_of_the_next_view_is_reported_when_that_view_is_read(cache: CacheDir) -> None:
    parts = MappedParts()
    gathered(view_of(cache), [0], parts)
    id = put(cache, range(60, 80))
    after = view_of(cache)
    (cache.layout.shards / id / EXTENTS_FILE).write_bytes(b"damaged")
    parts.prepare(after)
    with pytest.raises(CorruptError, match=id):
        gathered(after, [79], parts)
    parts.close()


def test_only_new_shards_of_a_view_are_sent_to_a_feeder(cache: CacheDir) -> None:
    with cache.snapshot() as snapshot:
        before = View.of_snapshot(snapshot)
        version = snapshot.version, snapshot.stamp
    sent = EpochPlan.from_json(json.loads(json.dumps(EpochPlan(1, 0, before).to_json()))).view
    put(cache, range(60, 80))
    first, last = before.parts[0].id, cache.shards()[-1].id
    with cache.snapshot(known=version) as snapshot:
        after = View.of_snapshot(snapshot, before)
        assert snapshot.has([first, last])
        assert not snapshot.has([first, "0" * 16])
    text = json.dumps(EpochPlan(2, 1, after).to_json(before))
    assert first not in text
    assert last in text
    received = EpochPlan.from_json(json.loads(text), sent).view
    assert received == after == view_of(cache)

    fewer = replace(after, parts=after.parts[2:] + after.parts[:1])
    text = json.dumps(EpochPlan(3, 2, fewer).to_json(after))
    assert last not in text
    assert EpochPlan.from_json(json.loads(text), received).view == fewer


def test_only_files_of_the_requested_fields_are_mapped(tmp_path: Path) -> None:
    with open_cache(tmp_path / "cache", max_size="20MB") as cache:
        put(cache, range(5), format="zarr")
        view, parts = view_of(cache), MappedParts()
        gather(view, np.array([1]), parts, SMALL.select(["number", "x"]))

        assert [Path(path).parent.name for path in maps(cache.root / "shards")] == ["x"]
        assert gathered(view, [1], parts) == numbered(1)


def test_parts_that_do_not_fit_into_the_range_are_read_one_by_one(
    cache: CacheDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(cache, range(60, 80), format="hdf5")
    view = view_of(cache)
    order = np.random.default_rng(0).permutation(80).tolist()
    for room in range(5):
        made = Arena(2**30)
        monkeypatch.setattr(made, "_has_room", lambda made=made, room=room: made.files < room)
        monkeypatch.setattr(module, "open_arena", lambda made=made, **_: made)
        assert gathered(view, order, MappedParts()) == numbered(*order)
        assert made.files == room
    monkeypatch.setattr(module, "open_arena", lambda **_: Memory())
    assert gathered(view, order, MappedParts()) == numbered(*order)


def test_a_used_up_range_is_replaced_by_a_new_one(cache: CacheDir, monkeypatch: pytest.MonkeyPatch) -> None:
    """A range is used up after days in which shards were added and deleted."""
    made: list[Arena] = []

    def small(**_: Any) -> Arena:
        made.append(Arena(32 * 2**20))
        return made[-1]

    monkeypatch.setattr(arena, "_SMALLEST", 2**21)
    monkeypatch.setattr(module, "open_arena", small)
    view, parts = view_of(cache), MappedParts()
    for turn in range(20):
        one = View(turn, "default", SMALL, (view.parts[turn % 3],))
        assert gathered(one, [7], parts) == numbered(turn % 3 * 20 + 7)
    assert 1 < len(made) < 10


@pytest.mark.parametrize(
    ("name", "break_it"),
    [
        ("offsets", lambda fields: fields["words"]["offsets"].__setitem__(3, 2**40)),
        ("negative offset", lambda fields: fields["words"]["offsets"].__setitem__(3, -1)),
        ("negative size", lambda fields: fields["words"]["sizes"].__setitem__(3, -8)),
        ("part of a value", lambda fields: fields["wave"]["sizes"].__setitem__(3, 3)),
    ],
)
def test_positions_outside_a_file_are_refused_before_anything_is_read(
    name: str, break_it: Callable[[Any], None], tmp_path: Path
) -> None:
    view = put_parts(tmp_path, "lmdb", [9])
    damage(view.parts[0].extents, break_it)

    with pytest.raises(CorruptError, match=r"data\.lmdb"):
        gather(view, np.array([0]), MappedParts(), READ)


def damage(path: Path, break_it: Callable[[Any], None]) -> None:
    """Change the arrays of an extents file."""
    from cachetool.formats.reading import load_extents

    extents = load_extents(path, READ)
    fields = {
        name: {part: None if getattr(f, part) is None else np.array(getattr(f, part)) for part in ("offsets", "sizes")}
        for name, f in extents.fields.items()
    }
    break_it(fields)
    for name, parts in fields.items():
        for part, array in parts.items():
            object.__setattr__(extents.fields[name], part, array)
    path.write_bytes(extents.to_bytes())


def test_extents_of_another_number_of_samples_are_refused(tmp_path: Path) -> None:
    view = put_parts(tmp_path, "hdf5", [9, 8])
    view.parts[0].extents.write_bytes(view.parts[1].extents.read_bytes())

    with pytest.raises(CorruptError, match=r"extents\.bin has 8 samples, but the shard has 9"):
        gather(view, np.array([0]), MappedParts(), READ)


def test_after_an_error_the_other_parts_can_still_be_read(cache: CacheDir) -> None:
    view, parts = view_of(cache), MappedParts()
    gathered(view, [0], parts)
    extents = view.parts[1].extents
    whole = extents.read_bytes()
    parts.close()
    extents.write_bytes(whole[:40])
    for _ in range(2):
        with pytest.raises(CorruptError, match="is not a whole extents file"):
            gathered(view, [0], parts)
    assert gathered(View(2, "default", SMALL, (view.parts[0],)), [5], parts) == numbered(5)
    extents.write_bytes(whole)
    assert gathered(view, [25], parts) == numbered(25)


def test_a_forked_child_continues_to_read_and_a_copy_starts_again(cache: CacheDir) -> None:
    view, parts = view_of(cache), MappedParts()
    gathered(view, list(range(60)), parts)
    context = multiprocessing.get_context("fork")
    answers = context.SimpleQueue()
    child = context.Process(target=lambda: answers.put(gathered(view, [45, 7], parts)))
    child.start()
    child.join()

    assert child.exitcode == 0
    assert answers.get() == numbered(45, 7)
    assert gathered(view, [8], pickle.loads(pickle.dumps(parts))) == numbered(8)


def test_gathering_no_samples_returns_columns_of_length_0(cache: CacheDir) -> None:
    nothing = np.empty(0, dtype=np.int64)
    columns = gather(view_of(cache), nothing, MappedParts(), SMALL)

    assert {name: len(column) for name, column in columns.items()} == dict.fromkeys(SMALL.names, 0)
    assert not any(map(len, gather(View(1, "", SMALL, ()), nothing, MappedParts(), SMALL).values()))


def test_an_evicted_part_is_named_with_and_without_maps(cache: CacheDir) -> None:
    view = view_of(cache)
    cache.evict(cache.usage().total - 1)
    for parts in (MappedParts(), MappedParts(maps=False)):
        with pytest.raises(UsageError, match=f"shard {view.parts[0].id} was evicted"):
            gather(view, np.array([3]), parts, SMALL)


@given(st.lists(st.integers(0, 70), min_size=1, max_size=40).filter(any))
@example([64] * 20 + [65] * 9)
@example([1] + [10_000] * 3)
def test_the_looked_up_part_of_a_sample_equals_the_searched_one(sizes: list[int]) -> None:
    """Both when parts are looked up in a table, and when one is so small that a search is used."""
    parts = MappedParts()
    parts._ends = np.cumsum(sizes, dtype=np.int64)
    parts._index()
    every = np.arange(sum(sizes), dtype=np.int64)
    assert parts._parts_of(every).tolist() == np.repeat(np.arange(len(sizes)), sizes).tolist()
