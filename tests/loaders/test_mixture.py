"""Mixtures: draws from several datasets in a ratio, and from the values of a field."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from fractions import Fraction
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import cachetool
from cachetool.cache import open_cache
from cachetool.core.errors import UsageError
from cachetool.core.schema import Field, Schema
from cachetool.loaders.mixture import MixedOrder, drawn, length_of, permuted, shares
from cachetool.loaders.numpy import Loader
from cachetool.loaders.sample_weights import WeightedOrder
from cachetool.loaders.torch import Loader as TorchLoader
from tests.loaders.numbered import put_samples

SCHEMA = Schema((Field("__key__", "str"), Field("n", "<i8"), Field("label", "<i4"), Field("x", "<f4", (3,))))
SIZES = {"sim": 100, "obs": 30, "more": 50}
FIRST = {"sim": 0, "obs": 1000, "more": 2000}
WORKERS = pytest.mark.parametrize("workers", [0, 2])


def sample(number: int) -> dict[str, Any]:
    return {"__key__": f"key{number}", "n": number, "label": number % 7, "x": np.full(3, number, np.float32)}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A cache of three datasets, in two shards each, whose samples are numbered."""
    with open_cache(tmp_path / "cache", max_size="50MB") as cache:
        for name, size in SIZES.items():
            numbers = range(FIRST[name], FIRST[name] + size)
            put_samples(cache, [sample(number) for number in numbers[:20]], schema=SCHEMA, dataset=name)
            put_samples(cache, [sample(number) for number in numbers[20:]], schema=SCHEMA, dataset=name)
    return tmp_path / "cache"


def numbers_of(loader: Any) -> list[int]:
    return [int(number) for batch in loader for number in batch["n"]]


def dataset_of(number: int) -> str:
    return ("sim", "obs", "more")[number // 1000]


# -- the order ---------------------------------------------------------------------------------------------------------


@given(st.lists(st.one_of(st.integers(0, 50), st.floats(0, 50, width=32)), min_size=1, max_size=5).filter(any))
@example([1, 10, 2.0, 1.0099999904632568])
def test_shares_are_whole_numbers_in_the_ratio_of_the_weights(weights: list[float]) -> None:
    ratio = shares(weights)
    assert all(type(share) is int and share >= 0 for share in ratio)
    total, whole = sum(map(Fraction, weights)), sum(ratio)
    for weight, share in zip(weights, ratio, strict=True):
        assert (share == 0) == (weight == 0)
        # Each of five shares is rounded by half a draw, and so is their sum, by two and a half: of 2**17 draws.
        assert abs(Fraction(weight) / total - Fraction(share, whole)) <= Fraction(3, 2**17)


def test_ratios_of_small_numbers_are_exact() -> None:
    assert shares([0.75, 0.25]) == (3, 1)
    assert shares([0.1, 0.2, 0.7]) == (1, 2, 7)
    assert shares([1 / 3, 2 / 3]) == (1, 2)
    assert shares([300, 100]) == (3, 1)


@given(st.lists(st.integers(0, 40), min_size=1, max_size=5).filter(any), st.integers(0, 500), st.integers(0, 500))
def test_draws_of_any_stretch_are_in_the_ratio(weights: list[int], first: int, count: int) -> None:
    ratio = shares(weights)
    counts = drawn(ratio, first + count) - drawn(ratio, first)
    assert counts.sum() == count
    assert (np.abs(counts - count * np.array(ratio) / sum(ratio)) <= 1 + len(ratio) / 2).all()


@given(st.lists(st.integers(1, 40), min_size=1, max_size=5), st.data())
def test_an_epoch_of_one_dataset_has_all_its_samples(weights: list[int], data: st.DataObject) -> None:
    ratio = shares(weights)
    group, items = data.draw(st.integers(0, len(ratio) - 1)), data.draw(st.integers(1, 200))
    length = length_of(ratio, group, items)
    assert drawn(ratio, length)[group] == items
    # All datasets are in the ratio, up to one draw of each.
    assert (np.abs(drawn(ratio, length) - items * np.array(ratio) / ratio[group]) <= 1 + len(ratio)).all()


ORDERS = st.fixed_dictionaries(
    {
        "sizes": st.lists(st.integers(1, 60), min_size=1, max_size=4),
        "weights": st.lists(st.sampled_from([1, 2, 3, 5, 0.5]), min_size=4, max_size=4),
        "samples": st.integers(1, 300),
        "batch": st.sampled_from([1, 1, 4]),
        "shuffle": st.sampled_from(["full", "window", "no"]),
        "seed": st.integers(0, 3),
    }
)


def orders(case: Mapping[str, Any], epochs: int) -> list[list[tuple[int, int]]]:
    """Return group and item of each draw of some epochs."""
    sizes = case["sizes"]
    starts = np.cumsum([0, *sizes]).tolist()
    groups = [range(a, b) for a, b in pairwise(starts)]
    samples = case["samples"] - case["samples"] % case["batch"]
    found = []
    for epoch in range(epochs):
        order = MixedOrder(
            groups, shares(case["weights"][: len(sizes)]), samples, shuffle=case["shuffle"], seed=case["seed"],
            epoch=epoch, first=epoch * (samples // case["batch"]), batch=case["batch"], nbytes=1000,
        )  # fmt: skip
        items = order[np.arange(samples)]
        of = np.searchsorted(starts, items, side="right") - 1
        found.append([(int(group), int(item) - starts[group]) for group, item in zip(of, items, strict=True)])
    return found


@given(ORDERS)
def test_each_dataset_is_drawn_through_before_it_begins_anew_also_over_epochs(case: Mapping[str, Any]) -> None:
    draws = [draw for epoch in orders(case, 3) for draw in epoch]
    for group, size in enumerate(case["sizes"]):
        mine = [item for of, item in draws if of == group]
        for first in range(0, len(mine), size):
            one_pass = mine[first : first + size]
            assert len(set(one_pass)) == len(one_pass)


@pytest.mark.parametrize(
    ("weights", "options"),
    [
        ({"sim": 24, "obs": 1}, {"epoch_samples": 10}),
        ({"sim": 9, "obs": 1}, {"epoch_samples": 64, "mix": "batch"}),
        ({"sim": 3, "obs": 1}, {"epoch_samples": 80, "mix": "batch"}),
        ({"sim": 9, "obs": 1}, {"epoch_samples": 64, "drop_last": True}),
        ({"sim": 1, "obs": 99}, {"epoch_of": "obs"}),
    ],
    ids=str,
)
def test_the_ratio_holds_over_short_epochs(root: Path, weights: dict[str, int], options: dict[str, Any]) -> None:
    total = sum(weights.values())
    with Loader(weights, cache=root, batch_size=16, workers=0, **options) as loader:
        counts = Counter(dataset_of(number) for _ in range(20) for number in numbers_of(loader))
    for name, weight in weights.items():
        # Within one batch of one dataset.
        assert abs(counts[name] - counts.total() * weight / total) <= 16


def test_tiny_weights_and_many_groups_keep_their_ratio() -> None:
    assert shares([1 / 1.5e6, 1 / 1e6]) == (2, 3)
    assert shares([5.1e-7, 4.9e-7]) == (51, 49)
    many = np.array(shares([1] * 1000 + [1e6]))
    assert abs(many[:-1].sum() / many.sum() - 1000 / 1_001_000) < 1e-4
    assert shares([10**400, 1e-300])[1] == 1


def test_datasets_of_one_size_have_orders_of_their_own() -> None:
    for size in (300, 6000):
        order = MixedOrder([range(size), range(size, 2 * size)], (1, 1), 2 * size)
        batches = (order[np.arange(2 * size)] % size).reshape(-1, 20)
        pairs = sum(20 - len(set(batch.tolist())) for batch in batches)
        # By chance 10 samples of one and 10 of the other meet their twins in a batch of 20 less than once.
        assert pairs < 30


@given(st.integers(1, 300), st.integers(0, 5))
def test_small_groups_are_permuted(size: int, number: int) -> None:
    of = [np.full(size, number, dtype=np.int64), np.arange(size) * 0]
    found = permuted(np.arange(size), np.full(size, size, dtype=np.int64), key=1, of=of)
    assert sorted(found.tolist()) == list(range(size))


def test_batches_of_balanced_classes_differ_from_each_other() -> None:
    groups = [range(10 * number, 10 * number + 10) for number in range(100)]
    batches = MixedOrder(groups, (1,) * 100, 4000)[np.arange(4000)].reshape(-1, 10) // 10
    assert len({tuple(sorted(batch.tolist())) for batch in batches}) == len(batches)


@given(ORDERS, st.data())
def test_an_order_does_not_depend_on_the_positions_that_are_asked_for_together(
    case: Mapping[str, Any], data: st.DataObject
) -> None:
    sizes, ratio = case["sizes"], shares(case["weights"][: len(case["sizes"])])
    starts = np.cumsum([0, *sizes]).tolist()
    order = MixedOrder(
        [range(a, b) for a, b in pairwise(starts)], ratio, case["samples"],
        shuffle=case["shuffle"], seed=case["seed"], epoch=1,
    )  # fmt: skip
    whole = order[np.arange(case["samples"])]
    some = np.array(data.draw(st.lists(st.integers(0, case["samples"] - 1), max_size=20)), dtype=np.int64)
    assert np.array_equal(order[some], whole[some])


@pytest.mark.parametrize("weights", [(3, 1), (0.7, 0.2, 0.1), (5, 3, 2, 1)])
def test_the_ratio_holds_within_one_percent_over_each_thousand_draws(weights: tuple[float, ...]) -> None:
    sizes = [4000, 300, 1000, 77][: len(weights)]
    starts = np.cumsum([0, *sizes]).tolist()
    ratio = shares(weights)
    order = MixedOrder([range(a, b) for a, b in pairwise(starts)], ratio, 50_000)
    groups = np.searchsorted(starts, order[np.arange(50_000)], side="right") - 1
    for group, share in enumerate(ratio):
        ends = np.cumsum([0, *(groups == group)])
        assert np.abs((ends[1000:] - ends[:-1000]) / 1000 - share / sum(ratio)).max() <= 0.01


# -- loaders -----------------------------------------------------------------------------------------------------------


@WORKERS
def test_an_epoch_of_one_dataset_reads_it_once_and_the_others_in_the_ratio(root: Path, workers: int) -> None:
    with Loader({"sim": 3, "obs": 1}, cache=root, batch_size=8, workers=workers, epoch_of="obs") as loader:
        for _ in range(3):
            length = len(loader)
            numbers = numbers_of(loader)
            counts = Counter(map(dataset_of, numbers))
            assert length == -(-len(numbers) // 8)
            assert counts["obs"] == len({number for number in numbers if number >= 1000}) == SIZES["obs"]
            assert counts["sim"] == 3 * SIZES["obs"]


def test_an_epoch_without_a_length_has_as_many_samples_as_all_datasets(root: Path) -> None:
    with Loader({"sim": 1, "more": 1}, cache=root, batch_size=8, workers=0) as loader:
        assert Counter(map(dataset_of, numbers_of(loader))) == {"sim": 75, "more": 75}


@pytest.mark.parametrize("mix", ["sample", "batch"])
def test_all_numbers_of_ranks_and_feeders_give_the_same_batches(root: Path, mix: str) -> None:
    found = {}
    for world, workers in ((1, 0), (1, 3), (2, 0), (4, 0)):
        batches: dict[tuple[int, int], list[int]] = {}
        for rank in range(world):
            with Loader(
                {"sim": 3, "obs": 1, "more": 0.5}, cache=root, batch_size=4, workers=workers, epoch_samples=240,
                mix=mix, rank=rank, world_size=world, run="run",
            ) as loader:  # fmt: skip
                assert len(loader) == 60 // world
                for step, batch in enumerate(loader):
                    batches[step, rank] = batch["n"].tolist()
        found[world, workers] = [batches[place] for place in sorted(batches)]
    assert len({json.dumps(batches) for batches in found.values()}) == 1


@WORKERS
def test_whole_batches_come_from_one_dataset_in_the_ratio(root: Path, workers: int) -> None:
    with Loader(
        {"sim": 3, "obs": 1}, cache=root, batch_size=5, workers=workers, epoch_samples=100, mix="batch"
    ) as loader:
        batches = [batch["n"] // 1000 for batch in loader]
    assert all(len(set(batch.tolist())) == 1 and len(batch) == 5 for batch in batches)
    assert Counter(int(batch[0]) for batch in batches) == {0: 15, 1: 5}


@WORKERS
@pytest.mark.parametrize("options", [{}, {"transform": dict}, {"verify": True}], ids=["plain", "transform", "verify"])
def test_a_batch_tells_the_dataset_of_each_sample_on_request(root: Path, workers: int, options: dict[str, Any]) -> None:
    with Loader(
        {"obs": 1, "sim": 1}, cache=root, batch_size=8, workers=workers, fields=["n", "__dataset__"], **options
    ) as loader:
        for batch in loader:
            assert list(batch) == ["n", "__dataset__"]
            assert batch["__dataset__"].dtype == np.int64
            assert (batch["__dataset__"] == (batch["n"] < 1000)).all()


def test_the_fields_of_datasets_may_stand_at_other_places(tmp_path: Path) -> None:
    other = Schema((Field("x", "<f4", (3,)), Field("extra", "<i2"), Field("n", "<i8"), Field("__key__", "str")))
    with open_cache(tmp_path, max_size="50MB") as cache:
        put_samples(cache, [sample(number) for number in range(20)], schema=SCHEMA, dataset="a")
        rows = [{**sample(number), "extra": 5} for number in range(1000, 1020)]
        put_samples(cache, rows, schema=other, dataset="b")
    for options in ({}, {"verify": True}):
        with Loader({"a": 1, "b": 1}, cache=tmp_path, batch_size=8, workers=0, fields=["x", "n"], **options) as loader:
            numbers = []
            for batch in loader:
                assert (batch["x"] == batch["n"][:, None]).all()
                numbers += batch["n"].tolist()
        assert sorted(numbers) == [*range(20), *range(1000, 1020)]
    with (
        pytest.raises(UsageError, match=r"differ in field 'label': 'a' has .*, 'b' has none; it has"),
        Loader({"a": 1, "b": 1}, cache=tmp_path, batch_size=8, workers=0) as loader,
    ):
        next(iter(loader))


def test_caches_and_exported_folders_are_mixed(root: Path, tmp_path: Path) -> None:
    with cachetool.open_cache(tmp_path / "other", max_size="50MB") as cache:
        put_samples(cache, [sample(number) for number in range(5000, 5040)], schema=SCHEMA)
        for name in ("one", "two"):
            cache.convert(to="hdf5", out=tmp_path / name)
    mixture = {(root, "sim"): 2, tmp_path / "other": 1, str(tmp_path / "one"): 1, tmp_path / "two": 0}
    with Loader(mixture, batch_size=8, workers=1, epoch_of=(root, "sim")) as loader:
        numbers = numbers_of(loader)
    counts = Counter(number // 1000 for number in numbers)
    assert counts[0] == 100
    assert abs(counts[5] - 100) <= 2


def test_a_mixture_of_a_validation_side_reads_only_this_side(root: Path) -> None:
    sides = {}
    for split in ("train", "validation"):
        with Loader(
            {"sim": 1, "obs": 1}, cache=root, batch_size=8, workers=0, split=split, validation=0.3, epoch_of="sim"
        ) as loader:
            sides[split] = set(numbers_of(loader))
    assert not sides["train"] & sides["validation"]
    assert len({n for n in sides["train"] | sides["validation"] if n < 1000}) == SIZES["sim"]


def test_windows_have_the_neighbours_of_their_own_dataset(tmp_path: Path) -> None:
    with open_cache(tmp_path, max_size="50MB") as cache:
        for name in ("a", "b"):
            rows = [{**sample(FIRST["obs"] * (name == "b") + row), "__key__": f"x.h5#{row}"} for row in range(20)]
            put_samples(cache, rows, schema=SCHEMA, dataset=name)
    with Loader({"a": 1, "b": 1}, cache=tmp_path, batch_size=4, workers=0, offsets={"n": (-1, 0, 1)}) as loader:
        windows = np.concatenate([batch["n"] for batch in loader])
    assert (np.diff(windows, axis=1) == 1).all()
    assert set(windows[:, 1].tolist()) == {*range(1, 19), *range(1001, 1019)}


def test_weights_change_from_the_next_epoch_on(root: Path) -> None:
    with Loader({"sim": 1, "obs": 1}, cache=root, batch_size=8, workers=2, epoch_samples=80) as loader:
        assert Counter(map(dataset_of, numbers_of(loader))) == {"sim": 40, "obs": 40}
        loader.weights = {"sim": 3, "obs": 1}
        assert Counter(map(dataset_of, numbers_of(loader))) == {"sim": 60, "obs": 20}
        loader.weights = {"sim": 0, "obs": 1}
        assert Counter(map(dataset_of, numbers_of(loader))) == {"obs": 80}
        with pytest.raises(UsageError, match="has no weight for 'obs'; give one for each dataset"):
            loader.weights = {"sim": 1}


@WORKERS
def test_a_function_gives_the_weights_of_each_epoch(root: Path, workers: int) -> None:
    with Loader(
        {"sim": 1, "obs": 1}, cache=root, batch_size=8, workers=workers, epoch_samples=80,
        weights=lambda epoch: {"sim": 1, "obs": epoch},
    ) as loader:  # fmt: skip
        for epoch in range(3):
            counts = Counter(map(dataset_of, numbers_of(loader)))
            assert abs(counts["obs"] - 80 * epoch / (1 + epoch)) <= 1


# -- resume ------------------------------------------------------------------------------------------------------------


@settings(max_examples=15)
@given(
    taken=st.integers(1, 9),
    world=st.sampled_from([(1, 2), (2, 1), (4, 3), (2, 2)]),
    mix=st.sampled_from(["sample", "batch"]),
    length=st.sampled_from([{"epoch_samples": 240}, {"epoch_of": "obs"}, {}]),
)
def test_a_resumed_epoch_repeats_and_loses_nothing_in_another_world(
    taken: int, world: tuple[int, int], mix: str, length: dict[str, Any], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Over growth of both datasets. Only whole batches that do not divide among the ranks are left out."""
    root = tmp_path_factory.mktemp("mixture") / "cache"
    with open_cache(root, max_size="50MB") as cache:
        for name, size in SIZES.items():
            rows = [sample(FIRST[name] + number) for number in range(size)]
            put_samples(cache, rows, schema=SCHEMA, dataset=name)

    def ranks(count: int, run: str) -> list[Loader]:
        return [
            Loader(
                {"sim": 3, "obs": 1, "more": 2}, cache=root, batch_size=4, workers=0, mix=mix, seed=3, rank=rank,
                world_size=count, run=run, **length,
            )
            for rank in range(count)
        ]  # fmt: skip

    with Loader(
        {"sim": 3, "obs": 1, "more": 2}, cache=root, batch_size=4, workers=0, mix=mix, seed=3, **length
    ) as loader:
        whole = numbers_of(loader)
    before, states = [], []
    for loader in ranks(world[0], "before"):
        with loader:
            batches = iter(loader)
            for _ in range(min(taken, len(loader))):
                before += next(batches)["n"].tolist()
            states.append(json.loads(json.dumps(loader.state_dict())))
    assert all(state == states[0] for state in states)
    with open_cache(root) as cache:
        for name in SIZES:
            put_samples(cache, [sample(FIRST[name] + 500 + i) for i in range(9)], schema=SCHEMA, dataset=name)
    after = []
    for loader in ranks(world[1], "after"):
        with loader:
            loader.load_state_dict(states[0])
            if states[0]["resume"] is not None:
                after += numbers_of(loader)
    expected, got = Counter(whole), Counter(before) + Counter(after)
    missing = sum((expected - got).values())
    assert not got - expected
    # With whole batches a remainder of fewer batches than ranks is left out, before and after.
    assert missing == 0 if mix == "sample" else missing < 4 * sum(world)


def test_a_state_keeps_the_weights_of_its_epoch(root: Path) -> None:
    options: dict[str, Any] = {"cache": root, "batch_size": 8, "workers": 1, "epoch_samples": 80}
    with Loader({"sim": 3, "obs": 1}, **options) as loader:
        batches = iter(loader)
        first = next(batches)["n"].tolist()
        state = loader.state_dict()
        rest = [n for batch in batches for n in batch["n"].tolist()]
    with Loader({"sim": 1, "obs": 1}, **options) as loader:
        loader.load_state_dict(state)
        assert numbers_of(loader) == rest
        assert Counter(map(dataset_of, numbers_of(loader))) == {"sim": 40, "obs": 40}
    assert Counter(map(dataset_of, first + rest)) == {"sim": 60, "obs": 20}
    with Loader({"obs": 1, "sim": 3}, **options) as loader, pytest.raises(UsageError, match="in the same order"):
        loader.load_state_dict(state)


# -- balance -----------------------------------------------------------------------------------------------------------


@WORKERS
@pytest.mark.parametrize("field", ["label", "name"])
def test_each_value_is_drawn_equally_often(tmp_path: Path, workers: int, field: str) -> None:
    schema = Schema((Field("n", "<i8"), Field("label", "|u1"), Field("name", "str")))
    labels = [0] * 70 + [1] * 20 + [5] * 10
    with open_cache(tmp_path, max_size="50MB") as cache:
        rows = [{"n": n, "label": label, "name": f"class {label}"} for n, label in enumerate(labels)]
        put_samples(cache, rows, schema=schema)
    with Loader(tmp_path, batch_size=8, workers=workers, balance=field) as loader:
        for _ in range(2):
            numbers = numbers_of(loader)
            counts = Counter(labels[number] for number in numbers)
            assert len(numbers) == 100
            assert max(counts.values()) - min(counts.values()) <= 1
            for label in counts:
                times = Counter(number for number in numbers if labels[number] == label)
                every = [times[number] for number, have in enumerate(labels) if have == label]
                assert max(every) - min(every) <= 2
    with Loader(
        tmp_path, batch_size=8, workers=workers, balance="label", weights_by={0: 0, 5: 3}, epoch_samples=200
    ) as loader:
        assert Counter(labels[number] for number in numbers_of(loader)) == {1: 50, 5: 150}


def test_balance_works_with_crops_and_a_selection(root: Path) -> None:
    with Loader(
        root, dataset="sim", batch_size=8, workers=0, balance="label", where={"label": {1, 2, 3}}, crop={"x": (2,)},
        crops=3,
    ) as loader:  # fmt: skip
        labels = [int(label) for batch in loader for label in batch["label"]]
    counts = Counter(labels)
    assert set(counts) == {1, 2, 3}
    assert max(counts.values()) - min(counts.values()) <= 1


# -- weights of samples -----------------------------------------------------------------------------------------------


@WORKERS
def test_samples_are_drawn_by_their_weights_with_the_factor_that_takes_them_back(root: Path, workers: int) -> None:
    keys = [f"key{number}" for number in range(100)]
    weights = np.arange(100) % 5
    with Loader(
        root, dataset="sim", batch_size=8, workers=workers, sample_weights=(keys, weights), epoch_samples=400
    ) as loader:
        counts: Counter[int] = Counter()
        value = 0.0
        for batch in loader:
            assert batch["__weight__"].dtype == np.float32
            expected = weights.mean() / weights[batch["n"]]
            assert np.allclose(batch["__weight__"], expected)
            counts.update(batch["n"].tolist())
            value += float((batch["__weight__"] * batch["n"]).sum())
    for number, weight in enumerate(weights.tolist()):
        assert abs(counts[number] - 400 * weight / weights.sum()) < 1
    drawn_at_all = [number for number in range(100) if weights[number]]
    assert value / 400 == pytest.approx(sum(drawn_at_all) / 100, rel=0.02)


def test_new_weights_hold_from_the_next_epoch_on(root: Path) -> None:
    some = {f"key{number}": float(number == 7) for number in range(100)}
    with Loader(root, dataset="sim", batch_size=10, workers=1, sample_weights=dict.fromkeys(some, 1.0)) as loader:
        assert sorted(numbers_of(loader)) == list(range(100))
        loader.sample_weights = some
        assert numbers_of(loader) == [7] * 100
        batches = iter(loader)
        next(batches)
        with pytest.raises(UsageError, match="an epoch is under way"):
            loader.sample_weights = some


def test_a_sample_without_a_weight_has_the_mean_weight(root: Path) -> None:
    with Loader(
        root, dataset="obs", batch_size=10, workers=0, sample_weights={"key1000": 3, "key1001": 1}, epoch_samples=600
    ) as loader:
        counts = Counter(numbers_of(loader))
    assert (counts[1000], counts[1001], counts[1002]) == (30, 10, 20)


@given(
    st.lists(st.sampled_from([0.0, 0.5, 1.0, 7.0]), min_size=1, max_size=30).filter(any),
    st.integers(1, 200),
    st.booleans(),
)
def test_counts_of_weighted_draws_are_the_shares_rounded(weights: list[float], samples: int, shuffle: bool) -> None:
    ends = np.cumsum(weights)
    order = WeightedOrder(ends, samples, shuffle=shuffle, seed=1, epoch=2)
    counts = np.bincount(order[np.arange(samples)], minlength=len(weights))
    assert counts.sum() == samples
    assert (np.abs(counts - samples * np.array(weights) / ends[-1]) < 1 + 1e-6).all()
    assert not counts[np.array(weights) == 0].any()


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ({}, "use a dict of keys and weights"),
        (([1], [2, 3]), "has 1 keys, but 2 weights"),
        ({3: 1}, "names 3; use the values of __key__"),
        ({"a": -1}, "the weight of 'a' is -1"),
        ({"a": 0}, "only weights of 0"),
    ],
)
def test_weights_of_samples_that_cannot_be_used_are_named(root: Path, weights: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Loader(root, dataset="sim", batch_size=4, sample_weights=weights)


# -- arguments ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("first", "options", "message"),
    [
        ({}, {}, "the mixture is empty"),
        ({"sim": -1}, {}, "the weight of 'sim' is -1; use a number of 0 or more"),
        ({"sim": 0, "obs": 0}, {}, "only weights of 0"),
        ({"sim": True}, {}, "the weight of 'sim' is True"),
        ({"sim": 1}, {"epoch_of": "obs"}, "epoch_of='obs' is no dataset of the mixture, which has 'sim'"),
        ({"sim": 1}, {"epoch_of": "sim", "epoch_samples": 5}, "both choose the length"),
        ({"sim": 1}, {"mix": "batches"}, "it must be 'sample' or 'batch'"),
        ({"sim": 1}, {"balance": "label"}, "leave one of them out"),
        ({"sim": 1}, {"dataset": "sim"}, "cannot be used in a mixture"),
        ({"sim": 1}, {"weights": {"sim": 2}}, "must be a function of the epoch"),
        ({3: 1}, {}, "3 is no name of a dataset"),
    ],
)
def test_arguments_that_cannot_be_used_are_named(root: Path, first: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Loader(first, cache=root, batch_size=4, workers=0, **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cache": "elsewhere"}, "cache='elsewhere' needs a mixture"),
        ({"epoch_samples": 5}, "epoch_samples=5 needs balance=, sample_weights=, or a mixture"),
        ({"weights_by": {1: 2}}, "needs balance="),
        ({"balance": "x"}, "balance= cannot use field 'x'"),
        ({"balance": "nothing"}, "balance= needs field 'nothing'; this dataset has"),
        ({"mix": "batch"}, "mix='batch' needs a mixture"),
    ],
)
def test_options_of_mixtures_need_one(root: Path, options: dict[str, Any], message: str) -> None:
    with (
        pytest.raises(UsageError, match=message),
        Loader(root, dataset="sim", batch_size=4, workers=0, **options) as loader,
    ):
        next(iter(loader))


def test_a_dataset_without_samples_is_waited_for(root: Path) -> None:
    with (
        Loader({"sim": 1, "new": 1}, cache=root, batch_size=4, workers=0, wait=0.3) as loader,
        pytest.raises(UsageError, match=r"unknown dataset 'new'|no samples of dataset 'new'"),
    ):
        next(iter(loader))


def test_whole_batches_read_the_dataset_of_an_epoch_once_over_epochs(root: Path) -> None:
    with Loader({"sim": 3, "obs": 1}, cache=root, batch_size=8, workers=0, mix="batch", epoch_of="obs") as loader:
        numbers = [number for _ in range(10) for number in numbers_of(loader) if number >= 1000]
    counts = Counter(numbers)
    assert len(numbers) == 10 * 24
    assert set(counts.values()) == {8}


@pytest.mark.parametrize("options", [{"drop_last": True}, {"mix": "batch"}], ids=str)
def test_no_sample_is_left_out_for_ever(root: Path, options: dict[str, Any]) -> None:
    with Loader({"obs": 1, "more": 1}, cache=root, batch_size=8, workers=0, epoch_samples=60, **options) as loader:
        counts = Counter(number for _ in range(20) for number in numbers_of(loader))
    assert len(counts) == SIZES["obs"] + SIZES["more"]


@pytest.mark.parametrize("options", [{"epoch_samples": 2}, {"epoch_samples": 10, "drop_last": True}], ids=str)
def test_an_epoch_that_is_too_short_for_the_ranks_is_refused(root: Path, options: dict[str, Any]) -> None:
    with (
        Loader(
            {"sim": 3, "obs": 1}, cache=root, batch_size=4, workers=0, rank=0, world_size=4, run="run", **options
        ) as loader,
        pytest.raises(UsageError, match="is too short for world_size=4"),
    ):
        next(iter(loader))


def test_whole_batches_of_another_size_cannot_resume(root: Path) -> None:
    options: dict[str, Any] = {"cache": root, "workers": 0, "mix": "batch", "epoch_samples": 160}
    with Loader({"sim": 3, "obs": 1}, batch_size=8, **options) as loader:
        next(iter(loader))
        state = loader.state_dict()
    with (
        Loader({"sim": 3, "obs": 1}, batch_size=16, **options) as loader,
        pytest.raises(UsageError, match="create it with the same datasets in the same order"),
    ):
        loader.load_state_dict(state)


@WORKERS
def test_weights_need_not_be_known_behind_the_last_epoch(root: Path, workers: int) -> None:
    table = [{"sim": 1, "obs": 1}, {"sim": 0, "obs": 1}]
    with Loader(
        table[0], cache=root, batch_size=8, workers=workers, epoch_samples=80, weights=table.__getitem__
    ) as loader:
        assert [Counter(map(dataset_of, numbers_of(loader)))["obs"] for _ in table] == [40, 80]


def test_the_dataset_of_an_epoch_needs_a_weight(root: Path) -> None:
    with (
        Loader({"sim": 1, "obs": 0}, cache=root, batch_size=8, workers=0, epoch_of="obs") as loader,
        pytest.raises(UsageError, match="epoch_of= names 'obs', whose weight is 0 in this epoch"),
    ):
        next(iter(loader))


@pytest.mark.parametrize(
    ("weights", "message"), [({"1": 5}, "weights_by= names '1'"), (dict.fromkeys(range(7), 0), "0 for all")]
)
def test_weights_of_values_must_fit_the_field(root: Path, weights: dict[Any, float], message: str) -> None:
    with (
        Loader(root, dataset="sim", batch_size=8, workers=0, balance="label", weights_by=weights) as loader,
        pytest.raises(UsageError, match=message),
    ):
        next(iter(loader))


def test_bytes_and_large_numbers_are_balanced(tmp_path: Path) -> None:
    schema = Schema((Field("n", "<i8"), Field("raw", "bytes"), Field("large", "<u8")))
    with open_cache(tmp_path, max_size="50MB") as cache:
        rows = [{"n": n, "raw": b"\xff" if n % 5 else b"\xfe", "large": 2**63 + n % 3} for n in range(60)]
        put_samples(cache, rows, schema=schema)
    with Loader(tmp_path, batch_size=10, workers=0, balance="raw") as loader:
        assert Counter(n % 5 == 0 for n in numbers_of(loader)) == {True: 30, False: 30}
    with Loader(tmp_path, batch_size=10, workers=0, balance="large", weights_by={2**63 + 1: 0}) as loader:
        assert {n % 3 for n in numbers_of(loader)} == {0, 2}


def test_weights_of_samples_cannot_change_in_a_resumed_epoch(root: Path) -> None:
    options: dict[str, Any] = {"dataset": "obs", "batch_size": 5, "workers": 0, "sample_weights": {"key1000": 2}}
    with Loader(root, **options) as loader:
        next(iter(loader))
        state = loader.state_dict()
        # The iterator is gone, so the next epoch may have other weights.
        loader.sample_weights = {"key1001": 5}
        assert loader.epoch == 1
    with Loader(root, **options) as loader:
        loader.load_state_dict(state)
        with pytest.raises(UsageError, match="the state of an epoch was loaded"):
            loader.sample_weights = {"key1001": 5}


def test_one_dataset_cannot_be_in_a_mixture_twice(root: Path) -> None:
    with pytest.raises(UsageError, match="is in the mixture twice; give it one weight"):
        Loader({(root, "sim"): 1, (str(root), "sim"): 2}, batch_size=4)


def test_tensors_are_mixed_too(root: Path) -> None:
    with TorchLoader({"sim": 1, "obs": 1}, cache=root, batch_size=8, epoch_of="obs") as loader:
        numbers = numbers_of(loader)
    assert Counter(map(dataset_of, numbers))["obs"] == SIZES["obs"]
