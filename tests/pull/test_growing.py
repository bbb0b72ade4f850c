"""Growing sources: a refreshed listing keeps its numbers, and a pass over it neither repeats nor loses a sample."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import cachetool
from cachetool import api
from cachetool.api import read_sample
from cachetool.cache import CacheDir
from cachetool.core.permutation import Permutation, SegmentedOrder
from cachetool.pull import prepare as planning
from cachetool.pull import run as pull
from cachetool.sources.keys import Stem
from cachetool.sources.listing import Listing, write_listing
from cachetool.sources.options import SourceOptions
from cachetool.sources.segments import EarlyListing, SegmentedListing, last_key, segment_name, write_changes
from cachetool.stores import Object
from tests.servers import Moto, rclone_http

STEM = Stem("first")
Contents = Mapping[str, int]
"""The size of each key."""


def listed(folder: Path, contents: Contents) -> Listing:
    shutil.rmtree(folder, ignore_errors=True)
    objects = [Object(key, size, f"e{size}") for key, size in contents.items()]
    return write_listing(folder, [objects], stem=STEM, url="u")


def units_of(listing: SegmentedListing) -> dict[int, frozenset[tuple[str, int]]]:
    """Return every unit that has not vanished: its number, and its objects."""
    gone = set(listing.vanished.tolist())
    return {
        number: frozenset((item.key, item.size) for item in listing.unit(number))
        for number in range(listing.units)
        if number not in gone
    }


NAMES = st.sampled_from(
    [f"{stem}.{end}" for stem in ("a", "b", "b/a", "c", "d-", "d", "é", "zz") for end in ("x", "y")]
)
STORES = st.dictionaries(NAMES, st.integers(0, 2), min_size=1)


@settings(max_examples=25)  # each example writes and syncs some dozen files
@given(history=st.lists(STORES, min_size=2, max_size=5))
def test_after_each_refresh_a_listing_matches_the_store_and_no_number_changes_its_meaning(
    history: list[Contents], tmp_path_factory: pytest.TempPathFactory
) -> None:
    root = tmp_path_factory.mktemp("l")
    listed(root / "base", history[0])
    meant: dict[int, frozenset[tuple[str, int]]] = {}
    for number, contents in enumerate(history):
        if number:
            old = SegmentedListing.open(root / "base")
            segment = root / "base" / segment_name(len(old.parts))
            before = old.units
            change = write_changes(segment, old, listed(root / "fresh", contents))
            assert SegmentedListing.open(root / "base", units=before).units == before
            assert SegmentedListing.open(root / "base").units == before + change.added
        now = SegmentedListing.open(root / "base")
        found = units_of(now)
        samples: dict[str, set[tuple[str, int]]] = {}
        for key, size in contents.items():
            samples.setdefault(key.rpartition("/")[0] + "/" + key.rpartition("/")[2].partition(".")[0], set()).add(
                (key, size)
            )
        assert sorted(map(sorted, found.values())) == sorted(map(sorted, samples.values()))
        for unit, objects in meant.items():
            assert frozenset((item.key, item.size) for item in now.unit(unit)) == objects
        meant |= found
        every = np.arange(now.units)
        assert now.unit_bytes(every).tolist() == [sum(item.size for item in now.unit(unit)) for unit in every]


@given(sizes=st.lists(st.integers(1, 40), min_size=1, max_size=5), seed=st.integers(0, 9), turn=st.integers(0, 3))
def test_a_further_segment_does_not_change_the_order_before_it(sizes: list[int], seed: int, turn: int) -> None:
    ends = np.cumsum(sizes).tolist()
    whole = SegmentedOrder(ends[-1], seed=seed, pass_number=turn, segments=ends[:-1])[np.arange(ends[-1])]
    assert sorted(whole) == list(range(ends[-1]))
    for number, end in enumerate(ends):
        part = SegmentedOrder(end, seed=seed, pass_number=turn, segments=ends[:number])[np.arange(end)]
        assert part.tolist() == whole[:end].tolist()
    first = Permutation(sizes[0], seed=seed, pass_number=turn)[np.arange(sizes[0])]
    assert whole[: sizes[0]].tolist() == first.tolist()


def write(folder: Path, numbers: Iterator[int] | range, *, value: int = 0) -> None:
    folder.mkdir(exist_ok=True)
    for number in numbers:
        np.save(folder / f"{number:04d}.x.npy", np.array([number, value]))


def drawn(cache: CacheDir) -> list[tuple[str, int]]:
    samples = [read_sample(cache, shard.id, at) for shard in cache.shards() for at in range(shard.samples)]
    return [(sample["__key__"], int(sample["x"][1])) for sample in samples]


def test_a_refresh_in_the_middle_of_a_pass_repeats_and_loses_no_sample(tmp_path: Path) -> None:
    remote = tmp_path / "remote"
    write(remote, range(200))
    with cachetool.open_cache(tmp_path / "cache", max_size="20MB") as cache:
        cache.pull(str(remote), samples=90, seed=5)
        before = drawn(cache)
        undrawn = sorted({f"{n:04d}" for n in range(200)} - {key for key, _ in before})
        gone, changed = undrawn[0], undrawn[1]
        (remote / f"{gone}.x.npy").unlink()
        write(remote, range(int(changed), int(changed) + 1), value=1)
        write(remote, range(200, 260))
        result = cache.pull(str(remote), samples=20, refresh=True)
        assert (result.added, result.vanished, result.vanished_examples) == (61, 2, (gone,))
        assert (cache.stats().sources[0]["units"], cache.stats().sources[0]["drawn"]) == (261, 110)

        again = cache.pull(str(remote), refresh=True, all=True)
        assert (again.added, again.vanished, again.pass_complete) == (0, 0, True)
        expected = {(f"{n:04d}", 0) for n in range(260)} - {(gone, 0), (changed, 0)} | {(changed, 1)}
        assert sorted(drawn(cache)) == sorted(expected)
        source = cache.stats().sources[0]
        assert (source["drawn"], source["skipped"], source["coverage"]) == (261, 2, 1.0)
        shard = cache.shards()[0]
        assert cache.catalog.rows("SELECT identity FROM sources")[0]["identity"] != ""
        assert shard.samples > 0

        # The next pass is one order over all units that still exist. It fetches the samples that the cache no longer
        # has.
        assert cache.pull(str(remote), samples=200).samples == 0
        cache.evict(cache.usage().total - 1)
        left = drawn(cache)
        assert 0 < len(left) < 259
        assert cache.pull(str(remote), samples=200).samples == 259 - len(left)
        assert sorted(drawn(cache)) == sorted(expected)


def replaced(remote: Path) -> int:
    for path in remote.iterdir():
        path.unlink()
    write(remote, range(500, 540))
    return 40


def touched(remote: Path) -> int:
    for path in remote.iterdir():
        os.utime(path, ns=(1, 1))
    return 30


@pytest.mark.parametrize("change", [replaced, touched])
def test_a_refresh_works_although_every_object_has_changed(change: Callable[[Path], int], tmp_path: Path) -> None:
    remote = tmp_path / "remote"
    write(remote, range(30))
    with cachetool.open_cache(tmp_path / "cache", max_size="20MB") as cache:
        cache.pull(str(remote), samples=10)
        count = change(remote)
        again = cache.pull(str(remote), refresh=True, all=True)
        assert (again.added, again.vanished, again.samples, again.pass_complete) == (count, 30, count, True)
        count = replaced(remote)
        cache.pull(str(remote), refresh=True, samples=5)
        assert cache.pull(str(remote), all=True).samples == count - 5  # all known objects have vanished, except these
        assert cache.pull(str(remote), refresh=True, samples=5).reason == "source at its end"


def test_units_that_follow_many_vanished_ones_are_drawn(tmp_path: Path) -> None:
    remote = tmp_path / "remote"
    write(remote, range(1, 1101))
    with cachetool.open_cache(tmp_path / "cache", max_size="20MB") as cache:
        cache.pull(str(remote), samples=5, order="sequential")
        for number in range(1, 1081):  # more than the first probe covers
            (remote / f"{number:04d}.x.npy").unlink()
        assert cache.pull(str(remote), samples=5, refresh=True).vanished == 1080
        assert cache.pull(str(remote), all=True).samples == 15


def test_the_result_of_a_refresh_survives_the_loss_of_the_catalog(tmp_path: Path) -> None:
    from cachetool.cache.rebuild import rebuild
    from cachetool.check.own_files import contradiction

    remote = tmp_path / "remote"
    write(remote, range(100))
    with cachetool.open_cache(tmp_path / "cache", max_size="20MB") as cache:
        cache.pull(str(remote), samples=40)
        write(remote, range(100, 130))
        cache.pull(str(remote), samples=10, refresh=True)
        assert contradiction(cache.catalog, cache.layout) is None
        before = [dict(row) for row in cache.catalog.rows("SELECT * FROM sources")]
        layout = cache.layout
    rebuild(layout)
    with cachetool.open_cache(tmp_path / "cache") as cache:
        assert [dict(row) for row in cache.catalog.rows("SELECT * FROM sources")] == before
        cache.pull(str(remote), all=True)
        assert sorted(drawn(cache)) == [(f"{n:04d}", 0) for n in range(130)]


def test_sequential_order_is_the_order_of_names(tmp_path: Path) -> None:
    remote = tmp_path / "remote"
    write(remote, range(60))
    with cachetool.open_cache(tmp_path / "cache", max_size="20MB") as cache:
        cache.pull(str(remote), samples=25, order="sequential", workers=1)
        cache.pull(str(remote), samples=25, workers=1)
        assert [key for key, _ in drawn(cache)] == [f"{n:04d}" for n in range(50)]
        with pytest.raises(cachetool.UsageError, match="--order sequential"):
            cache.pull(str(remote), order="random")
        with pytest.raises(cachetool.UsageError, match="random or sequential"):
            cache.pull(str(remote), order="backwards")


@pytest.fixture
def s3(moto: Moto, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> str:
    """Create a bucket with 57 samples of two objects each, and one object that belongs to no sample."""
    for name, value in moto.env.items():
        monkeypatch.setenv(name, value)
    bucket = f"early-{abs(hash(request.node.name)) % 10**9}"
    objects: dict[str, bytes] = {"0000-README": b"hello"}
    for number in range(57):
        array = np.array([number])
        objects[f"{number:04d}.x.npy"] = _npy(array)
        objects[f"{number:04d}.json"] = json.dumps({"n": number}).encode()
    moto.put(bucket, objects)
    return f"s3://{bucket}/"


@pytest.fixture(params=["folder", "manifest"])
def quick(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[str]:
    """Create the samples of :func:`s3` in a folder, or behind a manifest whose lines are in no order."""
    folder = tmp_path / "remote"
    for number in range(57):
        below = folder / ("train" if number % 2 else "train-2")
        below.mkdir(parents=True, exist_ok=True)
        np.save(below / f"{number:04d}.x.npy", np.array([number]))
        (below / f"{number:04d}.json").write_text(json.dumps({"n": number}))
    if request.param == "folder":
        (folder / "train" / ".hidden.json").write_text("{}")
        yield str(folder)
        return
    names = [str(path.relative_to(folder)) for path in folder.rglob("*.*")]
    (folder / "manifest.txt").write_text("\n".join(np.random.default_rng(0).permutation(names)))
    with rclone_http(folder) as url:
        yield f"{url}/manifest.txt"


def _npy(array: np.ndarray) -> bytes:  # type: ignore[type-arg]
    import io

    out = io.BytesIO()
    np.save(out, array)
    return out.getvalue()


def test_segments_end_after_complete_samples_and_continue_after_an_interruption(s3: str, tmp_path: Path) -> None:
    def segments(after: str | None, first: int, most: int) -> list[list[str]]:
        keys = []
        with EarlyListing(s3, SourceOptions(), size=25, after=after) as listing:
            while not listing.ended and len(keys) < most:
                folder = tmp_path / f"{first}-{len(keys)}"
                part = listing.write(folder)
                keys.append([item.key for unit in range(part.units) for item in part.unit(unit)])
                assert all(len(part.unit(unit)) == 2 for unit in range(part.units))
        return keys

    every = segments(None, 0, 99)
    assert len(every) == 5
    assert sorted(key for part in every for key in part) == sorted(
        f"{n:04d}.{end}" for n in range(57) for end in ("x.npy", "json")
    )
    again = segments(None, 1, 2)
    assert again + segments(last_key(tmp_path / "1-1"), 2, 99) == every


def test_a_quick_list_begins_with_small_segments_and_continues_after_an_interruption(
    quick: str, tmp_path: Path
) -> None:
    folders: list[Path] = []

    def segments(after: str | None, number: int, most: int) -> list[list[str]]:
        keys = []
        with EarlyListing(quick, SourceOptions(), size=256, after=after, number=number) as listing:
            while not listing.ended and len(keys) < most:
                folders.append(tmp_path / f"segment{len(folders)}")
                part = listing.write(folders[-1])
                keys.append([item.key for unit in range(part.units) for item in part.unit(unit)])
                assert all(len(part.unit(unit)) == 2 for unit in range(part.units))
        return keys

    every = segments(None, 0, 99)
    counted = [Listing.open(folder).left_out["hidden"] for folder in folders]
    assert [len(part) for part in every] == [4, 16, 64, 30]
    assert sorted(key for part in every for key in part) == [key for part in every for key in part]
    assert len({key for part in every for key in part}) == 114
    again = segments(None, 0, 2)
    assert again + segments(last_key(folders[-1]), 2, 99) == every
    assert sum(counted) == ("manifest" not in quick)


def test_a_quick_list_is_drawn_early_and_completely(
    quick: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(planning, "SEGMENT", 256)
    monkeypatch.setattr(pull, "SEGMENT", 256)
    drawn_keys: list[list[str]] = []
    for name in "ab":
        with api.open_cache(tmp_path / name, max_size="20MB") as cache:
            result = cache.pull(quick, start_early=True, all=True, seed=2, workers=1)
            assert (result.samples, result.pass_complete) == (57, True)
            (row,) = cache.catalog.rows("SELECT units, complete, segments FROM sources")
            assert (row["units"], row["complete"], len(json.loads(row["segments"]))) == (57, 1, 3)
            shards = cache.shards()
            drawn_keys.append(
                [read_sample(cache, shard.id, at)["__key__"] for shard in shards for at in range(shard.samples)]
            )
    assert drawn_keys[0] == drawn_keys[1]
    assert len(set(drawn_keys[0])) == 57


def test_a_pull_with_start_early_draws_all_samples_and_the_same_as_after_an_interrupted_listing(
    s3: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(planning, "SEGMENT", 25)
    monkeypatch.setattr(pull, "SEGMENT", 25)

    def keys(cache: CacheDir) -> list[str]:
        shards = cache.shards()
        return [read_sample(cache, shard.id, at)["__key__"] for shard in shards for at in range(shard.samples)]

    with api.open_cache(tmp_path / "a", max_size="20MB") as cache:
        result = cache.pull(s3, start_early=True, all=True, seed=2)
        assert (result.samples, result.pass_complete) == (57, True)
        assert sorted(keys(cache)) == [f"{n:04d}" for n in range(57)]
        row = cache.catalog.rows("SELECT units, complete, segments FROM sources")[0]
        assert (row["units"], row["complete"], len(json.loads(row["segments"]))) == (57, 1, 4)
        assert len(os.listdir(cache.listing(cache.catalog.rows("SELECT id FROM sources")[0]["id"]))) > 4
    with api.open_cache(tmp_path / "b", max_size="20MB") as cache:
        # A number of samples within the first segment draws the same samples, whatever follows that segment.
        first = cache.pull(s3, start_early=True, samples=9, seed=2, workers=1)
        assert first.samples == 9
        nine = keys(cache)
        assert cache.pull(s3, all=True).pass_complete
        assert sorted(keys(cache)) == [f"{n:04d}" for n in range(57)]
        assert cache.catalog.rows("SELECT segments FROM sources")[0]["segments"] == row["segments"]
    with api.open_cache(tmp_path / "c", max_size="20MB") as cache:
        cache.pull(s3, start_early=True, samples=9, seed=2, workers=3, shard_size=60)
        assert sorted(keys(cache)) == sorted(nine)


def test_start_early_is_refused_if_names_are_listed_in_no_order(digits: Path, tmp_path: Path) -> None:
    with (
        rclone_http(digits) as url,
        api.open_cache(tmp_path / "a", max_size="20MB") as cache,
        pytest.raises(cachetool.UsageError, match="--start-early needs names in order"),
    ):
        cache.pull(f"{url}/", start_early=True)
    assert not (tmp_path / "a").exists()
