"""The same crops in any division of an epoch, after resumes and evictions, and crops with other options."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cachetool
from cachetool.cache import open_cache
from cachetool.core.errors import UsageError
from cachetool.core.schema import Field, Schema
from cachetool.loaders.numpy import Loader, Pad
from cachetool.loaders.torch import Loader as TorchLoader
from tests.loaders.cropped import BOX, SHAPE, VOLUMES, checked, put_volumes, volume, volumes
from tests.loaders.numbered import put_samples

WORKERS = pytest.mark.parametrize("workers", [0, 2])
PAIR: dict[str, Any] = {"volume": BOX, "label": BOX}
CROPS = 3
OPTIONS: dict[str, Any] = {
    "batch_size": 4,
    "crop": PAIR,
    "crops": CROPS,
    "workers": 1,
    "fields": ["number", "volume", "label"],
    "min_samples": 1,
}
GRID: dict[str, Any] = {**OPTIONS, "crop": {"plane": (4, 4)}, "crops": "grid", "fields": ["number", "plane"]}


def read(place: Path, **options: Any) -> list[tuple[Any, ...]]:
    """Return the crops of one epoch in order, after a comparison with their samples."""
    with Loader(place, **{**OPTIONS, **options}) as loader:
        return checked(loader, {**OPTIONS, **options}["crop"])


@pytest.mark.parametrize("shuffle", ["full", "window", False])
def test_crops_and_their_order_are_the_same_for_any_number_of_workers(shuffle: Any, tmp_path: Path) -> None:
    place = volumes(tmp_path / "cache")
    expected = read(place, workers=0, shuffle=shuffle)
    assert Counter(number for number, *_ in expected) == dict.fromkeys(range(33), CROPS)
    for workers in (1, 2, 3):
        assert read(place, workers=workers, shuffle=shuffle) == expected
    if shuffle is False:
        assert [number for number, *_ in expected] == list(np.repeat(range(33), CROPS))


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("world_size", [2, 3])
def test_ranks_divide_the_crops_of_one_order(world_size: int, drop_last: bool, tmp_path: Path) -> None:
    place = volumes(tmp_path / "cache")
    whole = read(place)
    parts = []
    for rank in range(world_size):
        options: dict[str, Any] = {"rank": rank, "world_size": world_size, "drop_last": drop_last, "run": str(rank)}
        with Loader(place, **OPTIONS, **options) as loader:
            sizes = []
            for batch in loader:
                parts += checked([batch], PAIR)
                sizes.append(len(batch["number"]))
        if drop_last:
            assert set(sizes) == {4}
    # Counted, because two boxes of a sample may be equal by chance.
    assert Counter(parts) <= Counter(whole)
    assert len(parts) == (len(whole) // (4 * world_size) * 4 * world_size if drop_last else len(whole))


@pytest.mark.parametrize("options", [OPTIONS, GRID], ids=["random", "grid of ragged samples"])
@pytest.mark.parametrize("shuffle", ["full", "window"])
def test_an_epoch_resumes_with_other_numbers_of_ranks_and_workers(
    options: dict[str, Any], shuffle: str, tmp_path: Path
) -> None:
    place = volumes(tmp_path / "cache")
    crop = options["crop"]
    with Loader(place, **options, shuffle=shuffle) as loader:
        whole = checked(loader, crop)
    first, states = [], []
    for rank in range(2):
        with Loader(place, **options, shuffle=shuffle, rank=rank, world_size=2, run="first") as loader:
            batches = iter(loader)
            first += checked([next(batches) for _ in range(5)], crop)
            states.append(json.loads(json.dumps(loader.state_dict())))
    assert states[0] == states[1]
    # New samples belong to the next epoch.
    with open_cache(place) as cache:
        put_volumes(cache, range(33, 40))
    rest = []
    for rank in range(3):
        given = {**options, "workers": rank, "shuffle": shuffle}
        with Loader(place, **given, rank=rank, world_size=3, run="second") as loader:
            loader.load_state_dict(states[0])
            rest += checked(loader, crop)
            assert {number for number, *_ in checked(loader, crop)} & set(range(33, 40))
    assert sorted(first + rest) == sorted(whole)


def test_a_resume_inside_a_sample_and_without_evicted_shards_brings_the_other_crops(tmp_path: Path) -> None:
    place = volumes(tmp_path / "cache", [range(11), range(11, 22), range(22, 33)])
    whole = read(place)
    with Loader(place, **OPTIONS) as loader:
        batches = iter(loader)
        first = checked([next(batches) for _ in range(7)], PAIR)
        state = loader.state_dict()
    with open_cache(place) as cache:
        cache.evict(cache.usage().total - cache.shards()[1].bytes)
        left = {int(n) for (n, *_) in read(place)}
    assert 0 < len(left) < 33
    with Loader(place, **OPTIONS) as loader:
        loader.load_state_dict(state)
        with pytest.raises(UsageError, match="shards of the epoch to resume were evicted"):
            iter(loader)
    for workers in (0, 2):
        with Loader(place, **{**OPTIONS, "workers": workers}, missing="skip") as loader:
            loader.load_state_dict(state)
            rest = checked(loader, PAIR)
        # The same crops as without an eviction would need the numbers of the samples, which an eviction changes.
        counts = Counter(number for number, *_ in rest) + Counter(n for n, *_ in first if n in left)
        assert counts == dict.fromkeys(left, CROPS)
    assert len(whole) == 33 * CROPS


@WORKERS
def test_a_grid_without_evicted_shards_covers_what_is_left(workers: int, tmp_path: Path) -> None:
    place = volumes(tmp_path / "cache", [range(11), range(11, 22), range(22, 33)])
    crop = {"volume": (6, 5, 8)}
    options: dict[str, Any] = {"batch_size": 5, "crop": crop, "crops": "grid", "workers": workers, "min_samples": 1}
    with Loader(place, **options) as loader:
        batches = iter(loader)
        first = checked([next(batches) for _ in range(7)], crop)
        state = loader.state_dict()
    with open_cache(place) as cache:
        cache.evict(cache.usage().total - cache.shards()[1].bytes)
    with Loader(place, **options) as loader:
        left = checked(loader, crop)
    with Loader(place, **options, missing="skip") as loader:
        loader.load_state_dict(state)
        rest = checked(loader, crop)
    assert sorted(rest) == sorted(set(left) - set(first))


def test_a_grid_of_ragged_samples_cannot_continue_without_evicted_shards(tmp_path: Path) -> None:
    place = volumes(tmp_path / "cache")
    with Loader(place, **GRID) as loader:
        next(iter(loader))
        state = loader.state_dict()
    with open_cache(place) as cache:
        cache.evict(cache.usage().total - 1)
    says = "an epoch with crops='grid' over samples of different shapes cannot continue without evicted shards"
    with Loader(place, **GRID, missing="skip") as loader:
        loader.load_state_dict(state)
        with pytest.raises(UsageError, match=says):
            iter(loader)


@WORKERS
def test_a_growing_cache_brings_crops_of_new_samples(workers: int, tmp_path: Path) -> None:
    place = volumes(tmp_path / "cache")
    for options in (OPTIONS, GRID):
        with Loader(place, **{**options, "workers": workers}) as loader:
            before = checked(loader, options["crop"])
            with open_cache(place) as cache:
                put_volumes(cache, range(50, 53) if options is OPTIONS else range(53, 56), format="zarr")
            loader.refresh()
            after = checked(loader, options["crop"])
        new = {number for number, *_ in after} - {number for number, *_ in before}
        assert len(new) == 3
        if options is GRID:
            assert len(after) == len(set(after))


def test_crops_of_a_converted_cache_are_the_same(tmp_path: Path) -> None:
    place = volumes(tmp_path / "cache")
    expected = read(place)
    with cachetool.open_cache(place) as cache:
        cache.convert(to="zarr", out=tmp_path / "out")
        assert read(tmp_path / "out") == expected
        cache.convert(to="tfrecord")
    assert read(place) == expected


def test_a_state_belongs_to_its_crops_in_the_middle_of_an_epoch(tmp_path: Path) -> None:
    place = volumes(tmp_path / "cache")
    options = {**OPTIONS, "crop_pad": 0}
    with Loader(place, **options) as loader:
        start = loader.state_dict()
        batches = iter(loader)
        next(batches)
        state = json.loads(json.dumps(loader.state_dict()))
    other = {"volume": (4, 5, 2), "label": (4, 5, 2)}
    for change in (
        {"crop": other},
        {"crop": {"volume": BOX}},
        {"crops": 2},
        {"crops": "grid"},
        {"crops": "grid", "stride": 2},
        {"crop_pad": None},
        {"crop_pad": "edge"},
        {"crop": None, "crops": None, "crop_pad": None},
    ):
        with Loader(place, **{**options, **change}) as loader:
            with pytest.raises(
                UsageError, match=r"^the state was saved with crop=\{'volume'.*but this loader"
            ) as error:
                loader.load_state_dict(state)
            assert "\n" not in str(error.value)
            loader.load_state_dict(start)
    with Loader(place, **options) as loader:
        loader.load_state_dict(state)
    with Loader(place, batch_size=4, workers=0) as loader:
        next(iter(loader))
        plain = loader.state_dict()
    with (
        Loader(place, **OPTIONS) as loader,
        pytest.raises(UsageError, match=r"saved with crop=None, but this loader has"),
    ):
        loader.load_state_dict(plain)


# -- with other options ------------------------------------------------------------------------------------------------


@WORKERS
def test_selections_and_sides_choose_samples_of_which_all_crops_are_read(workers: int, tmp_path: Path) -> None:
    place = volumes(tmp_path / "cache")
    chosen = read(place, where={"number": range(4, 30, 3)}, workers=workers)
    assert Counter(number for number, *_ in chosen) == dict.fromkeys(range(4, 30, 3), CROPS)
    whole = read(place)
    sides = [read(place, split=side, validation=0.3, workers=workers) for side in ("train", "validation")]
    assert sorted(sides[0] + sides[1]) == sorted(whole)
    assert not {number for number, *_ in sides[0]} & {number for number, *_ in sides[1]}
    # A crop of a sample is the same whether others are selected or not.
    assert Counter(chosen) <= Counter(whole)


@WORKERS
@pytest.mark.parametrize("each", ["sample", "batch"])
def test_a_transform_gets_crops_with_their_corners_and_other_random_numbers_for_each(
    each: str, workers: int, tmp_path: Path
) -> None:
    def double(given: dict[str, Any], rng: Any) -> dict[str, Any]:
        assert given["volume"].shape[-3:] == BOX
        draw = rng.random() if each == "sample" else rng.random(len(given["number"]))
        return {**given, "twice": given["volume"] * 2, "draw": draw}

    place = volumes(tmp_path / "cache")
    draws = []
    options = {**OPTIONS, "workers": workers}
    with Loader(place, **options, transform=double, transform_each=each, verify=True) as loader:
        for batch in loader:
            checked([batch], PAIR)
            assert np.array_equal(batch["twice"], batch["volume"] * 2)
            draws += batch["draw"].tolist()
    assert len(set(draws)) == 33 * CROPS


@WORKERS
def test_other_fields_are_padded_joined_and_decoded_beside_crops(workers: int, tmp_path: Path) -> None:
    from tests.loaders.test_decode import photo

    schema = Schema((Field("number", "<i8"), Field("volume", "<f4", SHAPE), Field("image", "bytes"), VOLUMES["plane"]))
    place = tmp_path / "cache"
    with open_cache(place, max_size="50MB") as cache:
        samples = [
            {"number": n, "volume": volume(n)["volume"], "image": photo(n), "plane": volume(n)["plane"]}
            for n in range(9)
        ]
        put_samples(cache, samples, schema=schema)
    crop = {"volume": BOX}
    options: dict[str, Any] = {"batch_size": 4, "crop": crop, "crops": 2, "workers": workers}
    for verify in (False, True):
        with Loader(place, **options, pad={"plane": Pad(-1, mask="mask")}, verify=verify) as loader:
            for batch in loader:
                checked([batch], crop)
                for at, number in enumerate(batch["number"].tolist()):
                    rows, columns = volume(number)["plane"].shape
                    assert np.array_equal(batch["plane"][at, :rows, :columns], volume(number)["plane"])
                    assert batch["mask"][at].sum() == rows
        with Loader(place, **options, decode={"image": "jpeg"}, verify=verify) as loader:
            found = []
            for batch in loader:
                found += checked([batch], crop)
                assert batch["image"].shape[1:] == (75, 100, 3)
            assert Counter(number for number, _ in found) == dict.fromkeys(range(9), 2)
        with Loader(place, **options, decode={"image": "jpeg"}, pad={"plane": 0}, verify=verify) as loader:
            assert len(checked(loader, crop)) == 18


@WORKERS
@pytest.mark.parametrize("transform", [None, dict])
def test_ranks_without_crops_get_empty_batches(transform: Any, workers: int, tmp_path: Path) -> None:
    place = volumes(tmp_path / "cache", [range(3)])
    found, shapes = [], set()
    for rank in range(4):
        given: dict[str, Any] = {"rank": rank, "world_size": 4, "run": str(rank), "transform": transform}
        with Loader(place, **{**OPTIONS, "batch_size": 2, "workers": workers}, **given) as loader:
            for batch in loader:
                found += checked([batch], PAIR)
                shapes.add((*batch["volume"].shape[1:], *batch["volume_corner"].shape[1:]))
    assert Counter(number for number, *_ in found) == dict.fromkeys(range(3), CROPS)
    assert shapes == {(*BOX, 3)}


def test_len_steps_and_epochs_of_equal_length_count_crops(tmp_path: Path) -> None:
    place = volumes(tmp_path / "cache")
    with Loader(place, **OPTIONS) as loader:
        assert len(loader) == -(-33 * CROPS // 4)
        assert len(list(loader)) == -(-33 * CROPS // 4)
    with Loader(place, **OPTIONS, steps=5) as loader:
        assert len(checked(loader, PAIR)) == 20
    with Loader(place, **OPTIONS) as loader:
        epochs = loader.epochs_of(steps=10)
        assert [len(checked(epochs, PAIR)) for _ in range(3)][:2] == [40, 40]
    with Loader(place, **{**OPTIONS, "min_samples": 33 * CROPS + 1}, wait=0.1) as loader, pytest.raises(UsageError):
        iter(loader)


def test_tensors_and_arrays_of_jax_have_the_same_crops(tmp_path: Path) -> None:
    place = volumes(tmp_path / "cache")
    expected = read(place)
    with TorchLoader(place, **OPTIONS) as loader:
        batches = [{name: value.numpy() for name, value in batch.items()} for batch in loader]
    assert checked(batches, PAIR) == expected
