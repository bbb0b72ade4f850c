"""``offsets=``: windows of the neighbours of a sample, against the rows of its source."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import cachetool
from cachetool.cache import open_cache
from cachetool.core.block import Block
from cachetool.core.errors import CorruptError, UsageError
from cachetool.core.schema import Field, Schema
from cachetool.loaders.numpy import Loader
from cachetool.loaders.series import Series, neighbours
from cachetool.loaders.torch import Loader as TorchLoader
from tests.loaders.cropped import BOX, boxed, volume, volumes
from tests.loaders.numbered import put_samples

WORKERS = pytest.mark.parametrize("workers", [0, 2])
REACH = (-2, 0, 1)
OPTIONS: dict[str, Any] = {
    "batch_size": 5,
    "offsets": {"volume": REACH, "number": (1,)},
    "fields": ["volume", "number", "point"],
    "min_samples": 1,
    "workers": 1,
}
STEPS = Schema((Field("__key__", "str"), Field("x", "<f4", (3,)), Field("number", "<i8")))


def step(number: int, key: str) -> dict[str, Any]:
    return {"__key__": key, "x": np.arange(3, dtype="<f4") + number, "number": number}


def steps(place: Path, keys: Sequence[str], shards: int = 1) -> Path:
    """Create a cache whose sample n has key n of ``keys``."""
    with open_cache(place, max_size="50MB") as cache:
        for shard in range(shards):
            rows = [step(number, key) for number, key in enumerate(keys) if number % shards == shard]
            put_samples(cache, rows, schema=STEPS)
    return place


def anchors(place: Path, offsets: Any, **options: Any) -> list[tuple[int, ...]]:
    """Return the number of each sample and of its neighbours, in order."""
    given = {"batch_size": 4, "workers": 0, "min_samples": 1, **options}
    with Loader(place, offsets={"x": offsets}, **given) as loader:
        return [
            (int(number), *(int(value[0]) for value in window))
            for batch in loader
            for number, window in zip(batch["number"], batch["x"], strict=True)
        ]


def checked(batches: Iterable[Mapping[str, Any]], reach: Sequence[int] = REACH) -> list[int]:
    """Return the numbers of the samples of windows, after a comparison with all rows."""
    found = []
    for batch in batches:
        for at, following in enumerate(np.asarray(batch["number"])[:, 0].tolist()):
            number = following - 1
            rows = [volume(number + offset)["volume"] for offset in reach]
            assert np.asarray(batch["volume"][at]).tobytes() == np.stack(rows).tobytes()
            assert np.asarray(batch["point"][at]).tolist() == volume(number)["point"].tolist()
            found.append(number)
    return found


def whole(numbers: Iterable[int], reach: Sequence[int] = (*REACH, 1)) -> list[int]:
    """Return the numbers whose neighbours are all among ``numbers`` and of their series of 20 rows."""
    have = set(numbers)
    return sorted(n for n in have if all(n + offset in have and (n + offset) // 20 == n // 20 for offset in reach))


# -- values ------------------------------------------------------------------------------------------------------------


@WORKERS
@pytest.mark.parametrize(
    ("format", "compression"),
    [("lmdb", None), ("hdf5", None), ("hdf5", "gzip"), ("zarr", None), ("zarr", "blosc"), ("tfrecord", None)],
)
def test_windows_reach_over_shards_of_permuted_rows(
    format: str, compression: str | None, workers: int, tmp_path: Path
) -> None:
    order = np.random.default_rng(0).permutation(45).tolist()
    place = volumes(tmp_path / "cache", [order[:17], order[17:30], order[30:]], format=format, compression=compression)
    for shuffle in ("full", "window", False):
        for verify in (False, True):
            with Loader(place, **{**OPTIONS, "workers": workers}, shuffle=shuffle, verify=verify) as loader:
                batches = list(loader)
            assert batches[0]["volume"].shape[1:] == (3, 12, 10, 8)
            assert sorted(checked(batches)) == whole(range(45))


@WORKERS
def test_evicted_converted_and_new_rows_change_which_samples_are_whole(
    workers: int, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    place = volumes(tmp_path / "cache", [range(0, 45, 3), range(1, 45, 3), range(2, 37, 3)])
    options = {**OPTIONS, "workers": workers, "offsets": {"volume": (0, 3), "number": (1,)}}
    with Loader(place, **options) as loader:
        expected = whole([*range(38), *range(39, 45, 3), *range(40, 45, 3)], (0, 3, 1))
        assert sorted(checked(loader, (0, 3))) == expected
    assert capfd.readouterr().err.count("offsets= leaves out") == 1
    with cachetool.open_cache(place) as cache:
        cache.convert(to="zarr", out=tmp_path / "out")
        cache.convert(to="hdf5")
    for there in (place, tmp_path / "out"):
        with Loader(there, **options) as loader:
            assert sorted(checked(loader, (0, 3))) == expected
    with open_cache(place) as cache:
        cache.evict(cache.usage().total - cache.shards()[0].bytes)
        left = [number for shard in cache.shards() for number in _numbers(place)]
    with Loader(place, **options) as loader:
        assert sorted(checked(loader, (0, 3))) == whole(left, (0, 3, 1))


def _numbers(place: Path) -> list[int]:
    with Loader(place, batch_size=8, fields="number", workers=0, min_samples=1) as loader:
        return [int(number) for batch in loader for number in batch["number"]]


def test_a_growing_cache_completes_windows(tmp_path: Path) -> None:
    place = volumes(tmp_path / "cache", [range(0, 20, 2)])
    with open_cache(place) as cache:
        from tests.loaders.cropped import put_volumes

        put_volumes(cache, (1, 3, 5))
        with Loader(place, **OPTIONS) as loader:
            assert sorted(checked(loader)) == [2, 3, 4, 5]
            put_volumes(cache, (7, 9))
            loader.refresh()
            assert sorted(checked(loader)) == list(range(2, 10))


def test_windows_of_several_fields_may_reach_differently_and_repeat_rows(tmp_path: Path) -> None:
    place = steps(tmp_path / "cache", [f"run#{n}" for n in range(12)], shards=3)
    offsets: dict[str, Any] = {"x": (1, 1, -2, 0), "number": range(-1, 2)}
    with Loader(place, batch_size=4, workers=1, offsets=offsets, min_samples=1) as loader:
        for batch in loader:
            assert batch["x"].shape[1:] == (4, 3)
            assert batch["number"].shape[1:] == (3,)
            middle = batch["number"][:, 1]
            assert (batch["number"] == middle[:, None] + np.arange(-1, 2)).all()
            assert (batch["x"][:, :, 0] == middle[:, None] + np.array(offsets["x"])).all()
    with Loader(place, batch_size=4, workers=1, offsets={"number": 3}, min_samples=1) as loader:
        assert sorted(np.concatenate([batch["number"] for batch in loader]).tolist()) == [[n] for n in range(3, 12)]


@WORKERS
def test_crops_of_a_window_have_one_corner(workers: int, tmp_path: Path) -> None:
    place = volumes(tmp_path / "cache", [range(0, 45, 2), range(1, 45, 2)])
    for compression in (None, "blosc"):
        if compression is not None:
            with cachetool.open_cache(place) as cache:
                cache.convert(to="zarr", compression=compression)
        crop = {"volume": BOX, "label": BOX}
        with Loader(place, **{**OPTIONS, "workers": workers, "fields": None}, crop=crop, crops=2) as loader:
            counts: Counter[int] = Counter()
            for batch in loader:
                assert batch["volume"].shape[1:] == (3, *BOX)
                for at, following in enumerate(batch["number"][:, 0].tolist()):
                    corner, number = batch["volume_corner"][at], following - 1
                    rows = [boxed(volume(number + offset)["volume"], corner, BOX) for offset in REACH]
                    assert np.array_equal(batch["volume"][at], rows)
                    assert np.array_equal(batch["label"][at], boxed(volume(number)["label"], corner, BOX))
                    counts[number] += 1
        assert counts == dict.fromkeys(whole(range(45)), 2)


@WORKERS
def test_a_flipped_bit_in_a_neighbour_is_found(workers: int, tmp_path: Path) -> None:
    place = volumes(tmp_path / "cache", [range(6)])
    data = next((place / "shards").glob("*/data.lmdb"))
    changed = bytearray(data.read_bytes())
    changed[changed.index(volume(0)["volume"].tobytes()) + 5] ^= 1
    data.write_bytes(changed)
    # Sample 0 is read as the neighbour of sample 2 alone.
    options = {**OPTIONS, "workers": workers, "where": {"number": [2]}}
    says = "field 'volume' does not match its checksum"
    with Loader(place, **options, verify=True) as loader, pytest.raises(CorruptError, match=says):
        list(loader)


# -- which samples are neighbours --------------------------------------------------------------------------------------


def codes(keys: Sequence[str]) -> Any:
    schema = Schema((Field("__key__", "str"),))
    return Series()._codes(Block.from_samples(schema, [{"__key__": key} for key in keys]).columns["__key__"])  # type: ignore[arg-type]


def pairs(keys: Sequence[str], offset: int) -> dict[str, str]:
    """Return the neighbours of samples with these keys."""
    found = neighbours(codes(keys), [offset])[offset]
    return {key: keys[int(at)] for key, at in zip(keys, found, strict=True) if at >= 0}


def test_the_last_number_of_a_key_counts_and_the_text_around_it_names_the_series() -> None:
    keys = ["a.zarr#1", "b.zarr#1", "a.zarr#2", "b.zarr#3", "b.zarr#2", "run7/step9.npy", "run7/step10.npy"]
    assert pairs(keys, 1) == {
        "a.zarr#1": "a.zarr#2",
        "b.zarr#1": "b.zarr#2",
        "b.zarr#2": "b.zarr#3",
        "run7/step9.npy": "run7/step10.npy",
    }
    assert pairs(keys, -1) == {after: before for before, after in pairs(keys, 1).items()}
    assert pairs(keys, 0) == {key: key for key in keys}


@pytest.mark.parametrize(
    ("keys", "offset", "expected"),
    [
        # Leading zeros, which folders of files have.
        (["0008", "0009", "0010", "0099", "0100"], 1, {"0008": "0009", "0009": "0010", "0099": "0100"}),
        (["x0-8", "x0-9", "x1-9"], 1, {"x0-8": "x0-9"}),
        # No number, and no key at all.
        (["a", "b", "", "a1"], 1, {}),
        (["a", "b", ""], 0, {}),
        # Below 0, and beyond what a number of a key may be.
        (["0", "1", "2"], -1, {"1": "0", "2": "1"}),
        (["a#0", "b#1"], -1, {}),
        (["s#999999999999", "s#999999999998", "t#0"], 1, {"s#999999999998": "s#999999999999"}),
        (["8999999999999", "9000000000000", "9000000000001"], 1, {"9000000000000": "9000000000001"}),
        (["20240101T000000", "20240101T000001"], 1, {"20240101T000000": "20240101T000001"}),
        # Signs are text, and letters of other alphabets are no digits.
        (["t-1", "t-2", "t٣", "t٤"], 1, {"t-1": "t-2"}),
        (["schön 1", "schön 2"], 1, {"schön 1": "schön 2"}),
        (["a1b", "a2b", "a2c"], 1, {"a1b": "a2b"}),
        ([], 1, {}),
    ],
)
def test_neighbours_of_unusual_keys(keys: list[str], offset: int, expected: dict[str, str]) -> None:
    assert pairs(keys, offset) == expected


@given(
    st.lists(
        st.tuples(st.sampled_from(("a", "a1x", "", "b/")), st.integers(0, 30), st.sampled_from((".npy", ""))),
        unique=True,
    ),
    st.integers(-4, 4),
)
def test_neighbours_are_those_of_a_dictionary(rows: list[tuple[str, int, str]], offset: int) -> None:
    keys = [f"{before}{number}{behind}" for before, number, behind in rows]
    # "a" + "1x"... never meet, because of the letter behind the digit.
    names = {(before, number, behind): key for (before, number, behind), key in zip(rows, keys, strict=True)}
    expected = {
        key: names[before, number + offset, behind]
        for (before, number, behind), key in names.items()
        if (before, number + offset, behind) in names
    }
    assert pairs(keys, offset) == expected


@WORKERS
def test_series_side_by_side_never_mix_in_a_loader(workers: int, tmp_path: Path) -> None:
    place = steps(tmp_path / "cache", [f"{name}.zarr#{row}" for row in range(9) for name in "ab"], shards=2)
    found = anchors(place, (-1, 0, 1), workers=workers)
    # Rows of one series have every second number.
    assert sorted(found) == [(n, n - 2, n, n + 2) for n in range(2, 16)]


@WORKERS
def test_samples_without_keys_or_neighbours_are_refused(workers: int, tmp_path: Path) -> None:
    schema = Schema((Field("x", "<f4", (3,)),))
    with open_cache(tmp_path / "keyless", max_size="20MB") as cache:
        put_samples(cache, [{"x": np.zeros(3, "<f4")}] * 4, schema=schema)
    options: dict[str, Any] = {"batch_size": 2, "offsets": {"x": (0, 1)}, "workers": workers, "wait": 0.1}
    with (
        Loader(tmp_path / "keyless", **options) as loader,
        pytest.raises(UsageError, match=r"^offsets= finds neighbours by the field __key__; this dataset was pulled"),
    ):
        iter(loader)
    place = steps(tmp_path / "lonely", ["a", "b7", "c"])
    with Loader(place, **options) as loader, pytest.raises(UsageError, match=r"none of the 3 samples .* offsets="):
        iter(loader)


@WORKERS
def test_fields_of_no_fixed_shape_have_no_windows(workers: int, tmp_path: Path) -> None:
    place = volumes(tmp_path / "cache")
    for name in ("plane", "__key__"):
        with (
            Loader(place, batch_size=4, offsets={name: (0, 1)}, workers=workers) as loader,
            pytest.raises(UsageError, match=f"several values of field '{name}' into one array, but it is"),
        ):
            list(loader)
    with (
        Loader(place, batch_size=4, offsets={"plane": (0, 1)}, crop={"plane": (2, 2)}, workers=workers) as loader,
        pytest.raises(UsageError, match="cannot both be used for field 'plane', whose values differ in shape"),
    ):
        list(loader)


# -- with other options ------------------------------------------------------------------------------------------------


@WORKERS
def test_a_selection_applies_to_the_sample_and_not_to_its_neighbours(workers: int, tmp_path: Path) -> None:
    place = steps(tmp_path / "cache", [f"run#{n}" for n in range(20)], shards=2)
    found = anchors(place, (-1, 1), where={"number": [0, 4, 5, 19]}, workers=workers)
    assert sorted(found) == [(4, 3, 5), (5, 4, 6)]


def test_a_split_keeps_runs_of_128_rows_together_and_no_window_mixes_sides(tmp_path: Path) -> None:
    count = 128 * 20
    keys = [f"run{n // (128 * 10)}#{n % (128 * 10)}" for n in range(count)]
    place = steps(tmp_path / "cache", keys, shards=3)
    sides: dict[str, set[int]] = {}
    seen: dict[str, set[int]] = {}
    for side in ("train", "validation"):
        found = anchors(place, (-3, 0, 2), split=side, validation=0.3, batch_size=64)
        sides[side] = {one[0] for one in found}
        seen[side] = {n for one in found for n in one}
    assert not seen["train"] & seen["validation"]
    runs = {side: {n // 128 for n in numbers} for side, numbers in sides.items()}
    assert runs["train"] | runs["validation"] == set(range(20))
    assert 1 <= len(runs["validation"]) <= 12
    # Inside of a run all samples are used, but for those near an edge to the other side.
    for side, numbers in sides.items():
        for run in runs[side]:
            assert set(range(run * 128 + 3, run * 128 + 126)) <= numbers
    # Without windows the split is that of single keys.
    with Loader(place, batch_size=64, workers=0, split="validation", validation=0.3, min_samples=1) as loader:
        single = {int(n) for batch in loader for n in batch["number"]}
    assert len({n // 128 for n in single}) == 20


def test_windows_are_the_same_for_workers_ranks_and_after_a_resume(tmp_path: Path) -> None:
    place = steps(tmp_path / "cache", [f"run{n % 2}#{n // 2}" for n in range(80)], shards=4)
    offsets = {"x": (-1, 0, 2)}
    options: dict[str, Any] = {"batch_size": 4, "offsets": offsets, "min_samples": 1}
    expected = anchors(place, (-1, 0, 2), workers=0)
    assert sorted(expected) == [(n, n - 2, n, n + 4) for n in range(2, 76)]
    assert anchors(place, (-1, 0, 2), workers=2) == expected

    def numbers(batches: Iterable[Mapping[str, Any]]) -> list[int]:
        return [int(number) for batch in batches for number in batch["number"]]

    parts = []
    for rank in range(2):
        with Loader(place, **options, workers=1, rank=rank, world_size=2, run="first") as loader:
            batches = iter(loader)
            parts += numbers([next(batches) for _ in range(4)])
            state = json.loads(json.dumps(loader.state_dict()))
    with open_cache(place) as cache:
        put_samples(cache, [step(n, f"run{n % 2}#{n // 2}") for n in range(80, 90)], schema=STEPS)
    for rank in range(3):
        with Loader(place, **options, workers=rank, rank=rank, world_size=3, run="second") as loader:
            loader.load_state_dict(state)
            parts += numbers(loader)
    assert sorted(parts) == list(range(2, 76))

    for change in ({"x": (-1, 0)}, {"x": (-1, 0, 2), "number": (0,)}, None):
        with Loader(place, **{**options, "offsets": change}) as loader:
            says = r"^the state was saved with offsets=\{'x': \(-1, 0, 2\)\}, but this loader has"
            with pytest.raises(UsageError, match=says):
                loader.load_state_dict(state)
    with Loader(place, **{**options, "offsets": {"x": (-1, 0)}}, workers=0) as loader:
        assert len(numbers(loader)) == 88
        between = loader.state_dict()
    with Loader(place, **options, workers=0) as loader:
        loader.load_state_dict(between)
        assert len(numbers(loader)) == 84


def test_an_epoch_of_windows_cannot_continue_without_evicted_rows(tmp_path: Path) -> None:
    place = steps(tmp_path / "cache", [f"run#{n}" for n in range(60)], shards=3)
    options: dict[str, Any] = {"batch_size": 4, "offsets": {"x": (0, 3)}, "workers": 1, "min_samples": 1}
    with Loader(place, **options) as loader:
        next(iter(loader))
        state = loader.state_dict()
    with open_cache(place) as cache:
        cache.evict(cache.usage().total - cache.shards()[0].bytes)
    for missing, says in (("error", "shards of the epoch to resume were evicted"), ("skip", "epoch with offsets= can")):
        with Loader(place, **options, missing=missing) as loader:
            loader.load_state_dict(state)
            with pytest.raises(UsageError, match=says):
                iter(loader)
    assert len(anchors(place, (0, 3))) == 38


@WORKERS
@pytest.mark.parametrize("transform", [None, dict])
def test_ranks_without_windows_get_empty_batches(transform: Any, workers: int, tmp_path: Path) -> None:
    """Sample 0 of the cache has no neighbour, so no rank may show what a transform makes of it."""
    place = steps(tmp_path / "cache", [f"run#{n}" for n in range(7)])
    found, shapes = [], set()
    for rank in range(4):
        given: dict[str, Any] = {"rank": rank, "world_size": 4, "run": str(rank), "transform": transform}
        with Loader(
            place, batch_size=1, wait=5, offsets={"x": (-2, 0)}, workers=workers, min_samples=1, **given
        ) as loader:
            for batch in loader:
                found += batch["number"].tolist()
                shapes.add(batch["x"].shape[1:])
    assert sorted(found) == [2, 3, 4, 5, 6]
    assert shapes == {(2, 3)}


@WORKERS
def test_a_rank_whose_only_batch_is_empty_knows_what_a_transform_makes_of_windows(workers: int, tmp_path: Path) -> None:
    """Sample 0 of the cache has no neighbour, so the transform cannot be shown that one."""

    def longer(sample: Mapping[str, Any]) -> dict[str, Any]:
        return {"number": sample["number"], "change": np.diff(sample["x"], axis=0)}

    place = steps(tmp_path / "cache", [f"run#{n}" for n in range(7)])
    options: dict[str, Any] = {"offsets": {"x": (-2, 0)}, "transform": longer, "min_samples": 1, "wait": 5}
    with Loader(place, batch_size=4, workers=workers, **options) as loader:
        next(iter(loader))
        state = loader.state_dict()
    found = []
    for rank in range(4):
        with Loader(place, batch_size=1, workers=workers, rank=rank, world_size=4, run=str(rank), **options) as loader:
            loader.load_state_dict(state)
            (batch,) = loader
            assert batch["change"].shape == (rank < 2, 1, 3)
            found += batch["number"].tolist()
    assert len(found) == 2


@WORKERS
def test_a_transform_gets_windows(workers: int, tmp_path: Path) -> None:
    def changes(sample: Mapping[str, Any]) -> dict[str, Any]:
        assert sample["x"].shape == (3, 3)
        return {"number": sample["number"], "change": np.diff(sample["x"], axis=0)}

    place = steps(tmp_path / "cache", [f"run#{n}" for n in range(9)])
    options: dict[str, Any] = {"offsets": {"x": (-1, 0, 3)}, "transform": changes, "workers": workers}
    with Loader(place, batch_size=4, min_samples=1, **options) as loader:
        batches = list(loader)
    assert sorted(int(n) for batch in batches for n in batch["number"]) == list(range(1, 6))
    assert all((batch["change"] == [[1.0] * 3, [3.0] * 3]).all() for batch in batches)


def test_windows_are_tensors_of_pytorch(tmp_path: Path) -> None:
    place = steps(tmp_path / "cache", [f"run#{n}" for n in range(9)])
    with TorchLoader(place, batch_size=4, offsets={"x": (-1, 0)}, workers=1, min_samples=1) as loader:
        batch = next(iter(loader))
    assert batch["x"].shape == (4, 2, 3)
    assert (batch["x"][:, 1, 0] == batch["number"]).all()
